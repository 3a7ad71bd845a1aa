"""Puts together what resumes a run, from its settings, and what is done around it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection

from holdfast.checkpoint.commit import sweep_staging
from holdfast.checkpoint.identity import CheckpointName, CheckpointRoot
from holdfast.checkpoint.load import LoadedState
from holdfast.checkpoint.manifest import Versions
from holdfast.checkpoint.remote import Remote
from holdfast.checkpoint.remote_fetch import open_at_start
from holdfast.checkpoint.resume import ResumeDecision, Resumer
from holdfast.checkpoint.state import Tracked
from holdfast.control.decisions import Decisions
from holdfast.control.group import Group
from holdfast.control.launches import Origin, applies_again, origin_now, record_origin
from holdfast.control.operator import pinned
from holdfast.journal.events import Warned
from holdfast.scope import leavable
from holdfast.settings import CheckpointSettings, Settings, parse_fresh_parts
from holdfast.worker.data import DataFeed
from holdfast.worker.measured import measured_before
from holdfast.worker.membership import Membership
from holdfast.worker.meter import Meter
from holdfast.worker.places import LocalPlaces
from holdfast.worker.rng import restore_rng
from holdfast.worker.saving import Saving
from holdfast.worker.schedule import SaveSchedule
from holdfast.worker.skipping import follow_skips
from holdfast.worker.validation import Validation
from holdfast.worker.versions import changes_since

log = logging.getLogger("holdfast")


class Wish:
    """Where the settings want the run to begin. It is followed once: see `control.launches`.

    Only what rank 0 makes of it counts; the others follow rank 0.
    """

    def __init__(self, chosen: CheckpointSettings, group: Group, member: Membership, *, first: bool) -> None:
        """`first`: no earlier attempt of this launch has trained; a restart goes on from where that was."""
        self._asked = chosen.resume_from
        self._member = member
        self._before = None
        self.value, self.force = "auto", False
        leads = first and group.is_coordinator
        self._counts = leads and pinned(member.control) is None
        if leads and self._asked != "auto":
            self._before = origin_now(member.control, self._asked)
            self._again = applies_again(force=chosen.force)
            if self._before is None or self._again:
                self.value, self.force = self._asked, chosen.force

    def followed(self, decision: ResumeDecision) -> None:
        """The group has resumed: record where the run began, or say why the wish was not followed."""
        if not self._counts:
            return
        before, member = self._before, self._member
        name = f"checkpoint.resume_from = {self._asked!r}"
        if before is None:
            origin = Origin(
                value=self._asked,
                checkpoint=decision.chosen,
                step=decision.step,
                attempt=member.attempt,
                launch=member.launch,
            )
            record_origin(member.control, member.fence, origin)
            return
        when = f" at {time.strftime('%Y-%m-%d %H:%M', time.localtime(before.at))}" if before.at else ""
        was = f"attempt {before.attempt} of launch {before.launch}{when}" if before.attempt else "before"
        if self._again:
            text = (
                f"{name} is applied again, because checkpoint.force is set: the run begins once more from "
                f"{decision.chosen} (it was applied by {was}). Take checkpoint.force away for the next launch"
            )
        else:
            text = (
                f"{name} was applied by {was}; going on from {decision.chosen}, step {decision.step}. To "
                "apply it again, start once with checkpoint.force = true, or take the setting away"
            )
        log.warning("holdfast: %s", text)
        member.journal.write(Warned(message=text))


def make_resumer(
    settings: Settings,
    root: CheckpointRoot,
    group: Group,
    member: Membership,
    *,
    tracked: Tracked,
    avoid: Collection[str],
    insist: bool,
    places: LocalPlaces | None,
    needs_data: bool,
) -> Resumer:
    """What resumes this rank. `insist`: a remote that does not answer is an error."""
    chosen = settings.checkpoint
    remote: Callable[[], Remote] | None = None
    if chosen.remote_root and group.is_coordinator:
        remote = functools.partial(
            open_at_start,
            chosen.remote_root,
            retry_seconds=chosen.remote_retry_seconds,
            insist=insist,
            journal=member.journal,
        )
    began = None
    if group.is_coordinator and chosen.resume_from != "auto":
        began = origin_now(member.control, chosen.resume_from)
    return Resumer(
        control=member.control,
        fence=member.fence,
        group=group,
        root=root,
        attempt=member.attempt,
        tracked=tracked,
        journal=member.journal,
        load_timeout=chosen.timeout,
        decision_timeout=settings.control.decision_timeout,
        remote=remote,
        retry_seconds=chosen.remote_retry_seconds,
        avoid=avoid,
        local_unseen=chosen.non_persistent_ckpt_type == "local" and (places is None or not places.whole),
        local=None
        if places is None
        else places.inventory(group, member, timeout=chosen.timeout, peer_timeout=chosen.replication_timeout),
        needs_data=needs_data,
        fresh_parts=parse_fresh_parts(chosen.fresh_parts),
        began=began.checkpoint if began is not None else "",
    )


def resume(
    settings: Settings,
    root: CheckpointRoot,
    group: Group,
    member: Membership,
    *,
    tracked: Tracked,
    avoid: Collection[str],
    insist: bool,
    meter: Meter,
    feed: DataFeed | None,
    validation: Validation,
    saving: Saving,
    schedule: SaveSchedule,
    places: LocalPlaces | None,
    versions: Versions,
) -> bool:
    """Put this rank where the run goes on from; whether that is a checkpoint that this run has saved itself.

    `insist`: no earlier attempt of this launch has trained.
    """
    tracked.begin()
    resumer = make_resumer(
        settings,
        root,
        group,
        member,
        tracked=tracked,
        avoid=avoid,
        insist=insist,
        places=places,
        needs_data=feed is not None,
    )
    wish = Wish(settings.checkpoint, group, member, first=insist)
    with leavable():  # a load may take long, and what it leaves behind when it is cut is loaded again
        decision, state = resumer.resume(wish.value, force=wish.force)
    wish.followed(decision)
    if state is not None:
        state.apply()
        tell_changes(state, group, member, versions)
        if state.own:
            meter.load_state_dict(state.own["counters"])
            meter.others_told(resumer.counted, state.own["counters"])
            if feed is not None and "data" not in state.fresh:
                feed.load_state_dict(state.own["data"])
            restore_rng(state.own["rng"])
        else:
            meter.load_state_dict({"step": decision.step, "samples": 0, "tokens": 0})
    rung = decision.rung
    name = CheckpointName(rung.step, rung.id) if rung is not None else None
    manifest = state.manifest if state is not None else None
    if manifest is not None:
        meter.go_on_from(manifest.windows)
    validation.resumed(
        name,
        manifest,
        state.own.get("validation") if state is not None and state.own else None,
        control=member.control,
        timeout=settings.control.decision_timeout,
    )
    if feed is not None:
        feed.tell = lambda text: member.journal.write(Warned(message=text))
        follow_skips(
            feed,
            member.control,
            group,
            member.journal,
            lambda: meter.step,
            settings.control.decision_timeout,
        )
    saving.resumed_from(name)
    if state is not None and state.own and not state.fresh:  # what has no state yet must not be given any
        saving.prepare()
    if group.is_coordinator:
        sweep(root, member)
    saving.start_draining()
    if places is not None:
        places.use_peers(saving, group.rank)
        saved_world = state.manifest.world.size if state is not None and state.manifest else 0
        places.mend(saving, group.rank, resumer.taken, saved_world)
    schedule.start(
        meter.step,
        leads=group.is_coordinator,
        earlier=lambda: measured_before(member.control, member.attempt, member.launch),
        store=group.store,
        decisions=Decisions(member.control, member.fence, member.attempt, group.store),
        journal=member.journal,
        timeout=settings.control.decision_timeout,
    )
    log.info("holdfast: attempt %d starts from %s", member.attempt, decision.chosen)
    return manifest is not None and manifest.run == member.control.run_id


def tell_changes(state: LoadedState, group: Group, member: Membership, versions: Versions) -> None:
    """What makes this resume differ from going on as before does not stop it, but is said."""
    if not group.is_coordinator:
        return
    for note in state.notes:
        member.journal.write(Warned(message=note))
    changes = changes_since(state.manifest.versions, versions) if state.manifest else []
    if changes:
        member.journal.write(Warned(message=f"since this checkpoint was saved: {'; '.join(changes)}"))


def sweep(root: CheckpointRoot, member: Membership) -> None:
    """Tidy up after earlier attempts; if that does not work, the run goes on all the same."""
    try:
        for place in (root, root.diagnostic()):
            for name in sweep_staging(place, member.control.run_id, member.fence):
                member.journal.write(Warned(message=f"removed {name}, left in staging by an earlier attempt"))
    except OSError as error:
        member.journal.write(Warned(message=f"could not sweep {root.staging}: {error}"))
