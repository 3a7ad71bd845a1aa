"""Puts together a rank's part in an attempt, from its settings, and takes it apart at the end."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from holdfast.base import leavable, scope, to_the_end
from holdfast.checkpoint import ReadBack, Retainer, sweep_staging
from holdfast.checkpoint.choose import LoadedState, ResumeDecision, Resumer, open_at_start
from holdfast.checkpoint.format import CheckpointName, CheckpointRoot, Versions
from holdfast.checkpoint.remote import Drain, Remote
from holdfast.checkpoint.save import SaveContext, SaveFacts
from holdfast.checkpoint.state import Tracked
from holdfast.config import CheckpointSettings, Settings, parse_fresh_parts
from holdfast.errors import ControlError, ExitCode, LeaseLostError
from holdfast.journal import Event
from holdfast.journal.events import Account, Warned
from holdfast.policy import RetentionRules
from holdfast.record import (
    Decisions,
    EndRecord,
    Group,
    LaunchInfo,
    Origin,
    applies_again,
    join_group,
    keep_account,
    latest_head,
    origin_now,
    pinned,
    read_attempt,
    record_origin,
)
from holdfast.train.alone import Deciding, look_around
from holdfast.train.check import Checks, RecordedFeed, Validation, make_validation
from holdfast.train.data import DataFeed, capture_rng, follow_skips, restore_rng
from holdfast.train.forgotten import Forgotten
from holdfast.train.halting import Halting
from holdfast.train.membership import Membership, changes_since, current_versions, join_attempt, tell_doubts
from holdfast.train.meter import Meter
from holdfast.train.place import LocalPlaces, join_places
from holdfast.train.saves import Facts, Saving
from holdfast.train.schedule import SaveSchedule, measured_before

# What a run does for the restartable function that it was made in, if it was made in one.
#
# Guarantee: when the function is left, in whatever way, nothing of the run stays behind in the process; and
# an attempt that it did not bring to an end has failed.


class Ending(NamedTuple):
    """How a run that has not finished ends."""

    failed: bool
    unseen: bool
    """An exception may be on its way that nobody has seen yet."""


class Surroundings:
    """Of one run. Outside of a restartable function every call does nothing."""

    def __init__(self) -> None:
        self._scope = scope.current()
        if self._scope is not None and self._scope.on_run is not None:
            self._scope.on_run()

    def on_leave(self, *closes: Callable[[], object]) -> None:
        """What gives something back when the function was left; what is named last is called first."""
        if self._scope is not None:
            for close in closes:
                self._scope.on_leave(close)

    def stepped(self, step: int) -> None:
        if self._scope is not None:
            self._scope.step, self._scope.stepped = step, True

    def resumed(self, member: Membership, saving: Saving | None) -> None:
        """The run is part of an attempt, and has its state."""
        if self._scope is None:
            return
        self._scope.attempt, self._scope.run_dir = member.attempt, str(member.control.path)
        told, self._scope.events = self._scope.events, []
        for event in told:
            assert isinstance(event, Event)
            member.journal.write(event)
            if isinstance(event, Account):
                self._keep(member, event)
        self.saved(saving)

    def _keep(self, member: Membership, account: Account) -> None:
        try:
            keep_account(member.control, account)
        except (ControlError, OSError) as error:
            told = f"the account of attempt {account.attempt} is not kept: {error}"
            member.journal.write(Warned(message=told))

    def saved(self, saving: Saving | None) -> None:
        if self._scope is not None and saving is not None:
            self._scope.committed = max(self._scope.committed, saving.committed)

    def judge(self, error: BaseException | None) -> Ending:
        """`error`: what is seen from where the run is closed."""
        # A loop that is left by an exception drops its generator before anyone can see that exception.
        unseen = isinstance(error, GeneratorExit)
        failed = error is not None and not unseen
        if self._scope is None:
            return Ending(failed, unseen)
        asked = bool(self._scope.asked)
        return Ending(failed or unseen or asked, unseen and not asked)  # few leave such a loop by `break`

    def failed(self, halting: Halting) -> None:
        """The run ends without having followed whoever asked it to stop."""
        if self._scope is not None:
            self._scope.stop = halting.asked_by


# Puts together what saves for a run, from its settings.


def make_saving(
    settings: Settings,
    root: CheckpointRoot,
    group: Group,
    member: Membership,
    *,
    tracked: Tracked,
    own: Callable[[], dict[str, Any]],
    facts: Facts,
    schedule: SaveSchedule,
    step_seconds: Callable[[], float | None],
    meter: Meter,
    places: LocalPlaces | None,
) -> Saving:
    """What saves for this rank; on rank 0 with what deletes, and what copies to a remote if there is one."""
    drain = _drain(settings, root, member) if group.is_coordinator else None
    read_back = _read_back(settings, root, member) if group.is_coordinator else None
    retainer = _retainer(settings, root, member, drain, read_back) if group.is_coordinator else None
    return Saving(
        SaveContext(
            root=root, control=member.control, fence=member.fence, group=group, attempt=member.attempt
        ),
        settings.checkpoint,
        lease_ttl=settings.control.lease_ttl,
        tracked=tracked,
        own=own,
        facts=facts,
        schedule=schedule,
        step_seconds=step_seconds,
        meter=meter,
        retainer=retainer,
        drain=drain,
        read_back=read_back,
        journal=member.journal,
        local=places.saving(settings.checkpoint, group.rank) if places is not None else None,
    )


def make_schedule(settings: Settings) -> SaveSchedule:
    """When to save to the checkpoint root, and when to the local tier, if there is one."""
    chosen = settings.checkpoint
    local = chosen.non_persistent_save_interval if chosen.non_persistent_ckpt_type == "local" else 0
    return SaveSchedule(chosen.interval, chosen.mtbf_hours, local)


def _drain(settings: Settings, root: CheckpointRoot, member: Membership) -> Drain | None:
    chosen = settings.checkpoint
    if not chosen.remote_root:
        return None
    return Drain(
        control=member.control,
        root=root,
        remote_url=chosen.remote_root,
        epoch=member.fence.epoch,
        attempt=member.attempt,
        journal=member.journal,
        retry_seconds=chosen.remote_retry_seconds,
        linger=chosen.timeout,
    )


def _read_back(settings: Settings, root: CheckpointRoot, member: Membership) -> ReadBack | None:
    chosen = settings.checkpoint
    if not chosen.read_back:
        return None
    return ReadBack(
        control=member.control,
        root=root,
        epoch=member.fence.epoch,
        attempt=member.attempt,
        rate=chosen.read_back_rate * 1e6,
        journal=member.journal,
    )


def _retainer(
    settings: Settings,
    root: CheckpointRoot,
    member: Membership,
    drain: Drain | None,
    read_back: ReadBack | None,
) -> Retainer:
    chosen = settings.checkpoint
    return Retainer(
        control=member.control,
        root=root,
        rules=RetentionRules(
            keep_last=chosen.keep_last,
            keep_every_steps=chosen.keep_every_steps,
            keep_every_hours=chosen.keep_every_hours,
            await_read_back=chosen.read_back,
        ),
        fence=member.fence,
        attempt=member.attempt,
        journal=member.journal,
        on_deleted=drain.delete if drain is not None else None,
        on_waiting=read_back.hurry if read_back is not None else None,
    )


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


# Puts together a rank's part in an attempt, from its settings, and takes it apart at the end.


EXCHANGE_SLACK = 30.0
"""Seconds that ranks wait for each other beyond a save's own limit: who sees that pass must get to say so."""


def is_restart(member: Membership) -> bool:
    """Whether an earlier attempt of this very launch already trained."""
    head = latest_head(member.control, before=member.attempt)
    return head is not None and read_attempt(member.control, head.attempt).launch == member.launch


class Parts:
    """What a rank trains with in an attempt. The settings make it, `Run` drives it."""

    def __init__(
        self, settings: Settings, root: CheckpointRoot, launched: LaunchInfo | None, *, given: Settings
    ) -> None:
        """`given`: the settings as they were written, which is what they are recognised by later."""
        self._settings = settings
        self._root = root
        self._launched = launched
        self.here = look_around(settings, given) if launched is None else None
        self._versions = current_versions(given)
        self.tracked = Tracked()
        self.meter = Meter(settings.journal.step_flush)
        self.schedule = make_schedule(settings)
        self.checks = Checks(settings.validation, self.tracked)
        self.feed: RecordedFeed | None = None
        self.places: LocalPlaces | None = None
        self.saving: Saving | None = None
        self.validation: Validation | None = None
        self.forgotten: Forgotten | None = None

    def join(self, on_lost: Callable[[str], None]) -> tuple[Group, Membership]:
        """Become part of the run's present attempt. All ranks call this together."""
        settings = self._settings
        group = join_group(settings.checkpoint.timeout + EXCHANGE_SLACK)
        return group, join_attempt(settings, self._root.path, group, self._launched, self.here, on_lost)

    def make(
        self,
        group: Group,
        member: Membership,
        *,
        diagnose: Callable[[], str],
        on_rerun: Callable[[], None],
    ) -> None:
        """Fill in the rest, in this order: if one cannot be made, `leave` gives back those before it."""
        if group.is_coordinator:
            tell_doubts(member)
        settings, launched = self._settings, self._launched
        node = launched.node if launched else settings.launch.node_name
        self.places = join_places(settings, group, member, node, insist=not is_restart(member))
        self.saving = make_saving(
            settings,
            self._root,
            group,
            member,
            tracked=self.tracked,
            own=self._own_state,
            facts=self._facts,
            schedule=self.schedule,
            step_seconds=self.meter.median_step,
            meter=self.meter,
            places=self.places,
        )
        here, decide = self.here, None
        if here is not None:
            decide = Deciding(member.control, member.fence, member.journal, member.attempt, settings, here)
        self.validation = make_validation(
            settings.validation,
            group,
            member,
            launched,
            node=here.node if here is not None else node,
            decide=decide,
            tracked=self.tracked,
            checks=self.checks,
            meter=self.meter,
            feed=self.feed,
            diagnose=diagnose,
            on_rerun=on_rerun,
        )

    def resume(self, group: Group, member: Membership) -> None:
        """Put this rank where the run goes on from."""
        assert self.saving is not None
        assert self.validation is not None
        own = resume(
            self._settings,
            self._root,
            group,
            member,
            tracked=self.tracked,
            avoid=member.told.orders.avoid,
            insist=not is_restart(member),
            meter=self.meter,
            feed=self.feed,
            validation=self.validation,
            saving=self.saving,
            schedule=self.schedule,
            places=self.places,
            versions=self._versions,
        )
        self.forgotten = Forgotten(
            self.tracked, self.feed, group, self.validation.agreement, member.journal, own_checkpoint=own
        )

    def _facts(self, parent: str | None, reason: str) -> SaveFacts:
        return SaveFacts(
            step=self.meter.step,
            parent=parent,
            reason=reason,
            windows=self.meter.windows(),
            versions=self._versions,
        )

    def _own_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "rng": capture_rng(),
            "data": self.feed.state_dict() if self.feed is not None else None,
            "counters": self.meter.state_dict(),
        }
        if self.validation is not None and (kept := self.validation.state_dict()):
            own["validation"] = kept
        return own

    def leave(self, member: Membership, outcome: str, code: ExitCode, *, unseen: bool) -> None:
        """Give everything back, and the lease; record the attempt's end where that is for this process."""
        self.tracked.gradients.close()
        if self.forgotten is not None:
            self.forgotten.close()
        try:
            if self.validation is not None:
                self.validation.close()
            if self.saving is not None:
                self.saving.close(outcome, unseen=unseen)
        finally:
            with to_the_end():
                self._part(member, outcome, code)

    def _part(self, member: Membership, outcome: str, code: ExitCode) -> None:
        if self.places is not None:
            self.places.close()
        head = self.saving.head if self.saving is not None else None
        end = EndRecord(
            outcome=outcome,
            exit_code=int(code),
            cause="",
            highest_step=head.step if head is not None else 0,
            at=time.time(),
        )
        try:
            member.leave(end)
        except LeaseLostError as error:
            log.warning("holdfast: %s", error)
