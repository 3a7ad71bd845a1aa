"""Session: a rank's part in an attempt: made from the settings, joined, resumed, and left.

`Run` is its face towards the loop. What belongs to the attempt (who this rank is, what it may act on, what it
trains with, saves with, and is watched by) is held here, once.

Guarantee: whatever a session has taken (signals, the lease, a place in the local tier, processes) it gives
back, however its rank leaves, even if the session could not be made or started. It is left once: its outcome,
and the attempt's end where this process has to record that, are what the first leave said. When the
restartable function that made it is left, nothing of the session stays behind in the process; and an attempt
that the function did not bring to an end has failed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import torch

from holdfast import __version__
from holdfast.base import (
    collective_timeout,
    leavable,
    scope,
    seen_imports,
    to_the_end,
    torch_internals,
)
from holdfast.checkpoint import ReadBack, Retainer, sweep_staging
from holdfast.checkpoint.choose import LoadedState, ResumeDecision, Resumer, open_at_start
from holdfast.checkpoint.format import OF_THE_JOB, CheckpointName, CheckpointRoot, Versions, digest_bytes
from holdfast.checkpoint.remote import Drain
from holdfast.checkpoint.save import SaveContext, SaveFacts
from holdfast.checkpoint.state import Tracked
from holdfast.config import CheckpointSettings, idle, parse_fresh_parts, parse_section_timeouts, sources
from holdfast.errors import (
    ControlError,
    ExitCode,
    HoldfastError,
    LeaseLostError,
    SaveFailedError,
    Stopped,
    UsageError,
)
from holdfast.journal import Event
from holdfast.journal.events import Account, AttemptEnded, LoadTimes, RankStarted, RunFinished, Warned
from holdfast.policy import CHECKPOINTING, LOADING, STEP, RetentionRules, Source
from holdfast.process import began_at
from holdfast.record import (
    Decisions,
    EndRecord,
    Group,
    LaunchInfo,
    RunOrigin,
    applies_again,
    join_group,
    keep_account,
    leave_group,
    one_config,
    origin_now,
    pinned,
    record_origin,
)
from holdfast.stop import refuse_stop_file
from holdfast.train import (
    Beats,
    CrashHook,
    Deciding,
    Forgotten,
    Halting,
    LocalPlaces,
    Membership,
    Meter,
    Pinging,
    SaveSchedule,
    Saving,
    SimulatedFault,
    join_attempt,
    join_places,
    look_around,
    measured_before,
    simulated_fault,
    start_beats,
)
from holdfast.train.check import (
    Checks,
    RecordedFeed,
    Severity,
    Validation,
    make_validation,
    refuse_contradictions,
)
from holdfast.train.data import capture_rng, follow_skips, restore_rng
from holdfast.train.stragglers import Stragglers, make_stragglers, refuse_straggler_settings

log = logging.getLogger("holdfast")

T = TypeVar("T")

EXCHANGE_SLACK = 30.0
"""Seconds that ranks wait for each other beyond a save's own limit, for whoever sees that pass to say so."""


class Session:
    """Belongs to one rank. All ranks call its methods together, in the same order."""

    def __init__(self, file: str | os.PathLike[str] | None, keywords: Mapping[str, object]) -> None:
        """`keywords`: settings, spelt `<section>_<key>`."""
        self.around = Surroundings()
        self._started = self._searched = self._loaded = 0.0
        """When `start` was called, the search for a checkpoint began, and the state was in place."""
        self._load_times: LoadTimes | None = None
        self.crash: BaseException | None = None
        self.lost = ""
        """Why this attempt has lost its lease; empty as long as it is not known to have."""
        self.left = False
        self._group: Group | None = None
        self._member: Membership | None = None
        self._saving: Saving | None = None
        self._validation: Validation | None = None
        self.places: LocalPlaces | None = None
        self.forgotten: Forgotten | None = None
        self.stragglers: Stragglers | None = None
        self.fault: SimulatedFault | None = None
        self.pinging: Pinging | None = None
        self.feed: RecordedFeed | None = None
        self.beats = Beats()
        self.halting = Halting(lambda: self.meter.step)
        hook = CrashHook(self._on_crash)  # first, so that wrong settings end a rank with their own code too
        self.around.on_leave(hook.remove)
        self.launched = LaunchInfo.from_environment(os.environ)
        given = sources.load(
            one_config(file, self.launched),
            command_line=self.launched.command_line if self.launched else None,
            keywords=keywords,
        )
        # Once, here: if the script changes its working directory later, the run's paths stay the same.
        self.settings = given.settings.absolute(self.launched.base() if self.launched else None)
        self.effective = msgspec.structs.replace(given, settings=self.settings)
        refuse_contradictions(self.effective, self.launched)
        refuse_straggler_settings(self.effective, self.launched)
        if self.launched is None:
            refuse_stop_file(self.settings.stop_file())  # under a launcher, that has looked already
        self.root = CheckpointRoot(self.settings.checkpoint_root())
        # This start is recognised later by the settings as they were written.
        self.here = look_around(self.settings, given.settings) if self.launched is None else None
        self.versions = current_versions(given.settings)
        self.tracked = Tracked()
        self.meter = Meter(self.settings.journal.step_flush)
        self.schedule = self._make_schedule()
        self.checks = Checks(self.settings.validation, self.tracked)
        self.halting.watch(self.settings)
        try:
            self.beats = start_beats(self.effective, self.launched, halting=self.halting)
        except BaseException:
            self.halting.close("failed", 0)  # release the signals if the run never started
            raise
        self.halting.heed(self.beats)
        self.around.on_leave(self.beats.close, self._left_behind)

    # --- what there is once the run has started -------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether this rank is part of an attempt, or was."""
        return self._member is not None

    @property
    def group(self) -> Group:
        """Who this rank is, and how the ranks reach each other."""
        return _there(self._group)

    @property
    def member(self) -> Membership:
        """The attempt: its number, control directory, fence and journal."""
        return _there(self._member)

    @property
    def saving(self) -> Saving:
        return _there(self._saving)

    @property
    def validation(self) -> Validation:
        return _there(self._validation)

    @property
    def head(self) -> CheckpointName | None:
        """The newest checkpoint of this timeline; None before the run has started, too."""
        return self._saving.head if self._saving is not None else None

    @property
    def dropped(self) -> bool:
        """Whether the present step was dropped."""
        return self._validation is not None and self._validation.dropped

    # --- joining --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the attempt and resume."""
        chosen = self.settings
        self._started = time.time()
        try:
            self._join()
            self.halting.joined(chosen, self.group, self.member, self.schedule.last_commit)
            self._make()
            # Loading has a deadline of its own, and its failure must be reported before it counts as a hang.
            limit = chosen.checkpoint.timeout + 2 * EXCHANGE_SLACK
            with scope.critical(limit), self.beats.section(LOADING, at_least=limit):
                self.resume()
            self.tracked.gradients.start()
            self.around.resumed(self.member, self.saving)
            if chosen.straggler.enabled:
                self._find_stragglers()
            if self.beats.watched:
                self.fault = simulated_fault(self.effective, self.group, self.member)
                self._judge_collectives()
            self._tell_idle()
            self.pinging = Pinging(chosen.health, self.group, self.member.journal)
            self._tell_start()
        except BaseException:
            self.close()  # a run that could not start must keep neither lease nor signals
            raise

    def _tell_start(self) -> None:
        """Rank 0 says how it got here, for the account of a restart."""
        if self.group.is_coordinator:
            process, imports = began_at(os.getpid()), seen_imports()
            # A forked process was given what its parent had imported before.
            torch_at = max(process, imports.torch_at) if imports is not None else 0.0
            slow = imports.take_slow(torch_at) if imports is not None else {}
            self.member.journal.write(
                RankStarted(
                    process=process,
                    torch=torch_at,
                    imports={name: round(seconds, 3) for name, seconds in slow.items()},
                    importing=imports.ours_from if imports is not None else 0.0,
                    imported=imports.ours_at if imports is not None else 0.0,
                    start=self._started,
                    search=self._searched,
                    loaded=self._loaded,
                    load=self._load_times,
                )
            )

    def _join(self) -> None:
        group = join_group(self.settings.checkpoint.timeout + EXCHANGE_SLACK)
        member = join_attempt(self.settings, group, self.launched, self.here, self._on_lease_lost)
        self._group, self._member = group, member

    def _make(self) -> None:
        """Make the other parts, in this order: if one cannot be made, `close` gives back those before it."""
        self._tell_doubts()
        settings, group, member = self.settings, self.group, self.member
        node = self.launched.node if self.launched else settings.launch.node_name
        self.places = join_places(settings, group, member, node)
        self._saving = self._make_saving()
        decide = None
        if self.here is not None:
            node = self.here.node
            deciding = Deciding(member.control, member.fence, member.journal, settings, self.here)
            decide = functools.partial(deciding.at_rejection, member.attempt)
        self._validation = make_validation(
            settings.validation,
            group,
            member,
            self.launched,
            node=node,
            decide=decide,
            tracked=self.tracked,
            checks=self.checks,
            meter=self.meter,
            feed=self.feed,
            diagnose=self._diagnose,
            on_rerun=self._on_rerun,
        )

    def _tell_doubts(self) -> None:
        """Say what this torch lacks that Holdfast needs, or that nobody has tried Holdfast on it."""
        version = str(torch.__version__)
        for told in filter(None, [torch_internals.unproven(version), *torch_internals.missing()]):
            self._warn(told)

    def _tell_idle(self) -> None:
        """Say, once per launch, which of the given settings nothing reads, and what would switch them on."""
        if self.group.is_coordinator and not self.member.is_restart:
            for told in idle(self.effective):
                self._warn(told)

    def _judge_collectives(self) -> None:
        """Warn if collectives time out before a hung step is noticed: then the wrong ranks end first."""
        around = scope.current()
        if around is not None and around.own_collective_timeout:
            return  # in-process restart notices earlier who stands still, and chose this timeout itself
        limit = parse_section_timeouts(self.settings.monitor.rank_section_timeouts).get(STEP, 0.0)
        timeout = collective_timeout()
        if timeout is not None and limit and timeout <= limit:
            self._warn(
                f"the process group's timeout of {timeout:g} s is not longer than the {limit:g} s that a "
                "step may take: in a hang the healthy ranks end first, and which one hung may not be known. "
                f"The right order is: limit of {STEP} in monitor.rank_section_timeouts < timeout of "
                "init_process_group"
            )

    def _find_stragglers(self) -> None:
        self.stragglers = make_stragglers(
            self.settings,
            self.group,
            self.member,
            self.launched,
            self.tracked,
            stop=lambda why: self.halting.ask(Source.STRAGGLER, why),
            save=self.save,
        )
        if self.feed is not None:
            self.feed.timed = self.stragglers.input
        self.stragglers.begin_step()

    # --- what saves -----------------------------------------------------------------------------------------

    def _make_schedule(self) -> SaveSchedule:
        """When to save to the checkpoint root, and when to the local tier, if there is one."""
        chosen = self.settings.checkpoint
        local = chosen.non_persistent_save_interval if chosen.non_persistent_ckpt_type == "local" else 0
        return SaveSchedule(chosen.interval, chosen.mtbf_hours, local, chosen.non_persistent_save_share)

    def _make_saving(self) -> Saving:
        """What saves for this rank; on rank 0 also what deletes, and what copies to a remote."""
        group, member = self.group, self.member
        leads = group.is_coordinator
        drain = self._make_drain() if leads else None
        read_back = self._make_read_back() if leads else None
        return Saving(
            SaveContext(
                root=self.root,
                control=member.control,
                fence=member.fence,
                group=group,
                attempt=member.attempt,
            ),
            self.settings.checkpoint,
            lease_ttl=self.settings.control.lease_ttl,
            tracked=self.tracked,
            own=self._own_state,
            facts=self._facts,
            schedule=self.schedule,
            step_seconds=self.meter.median_step,
            meter=self.meter,
            retainer=self._make_retainer(drain, read_back) if leads else None,
            drain=drain,
            read_back=read_back,
            journal=member.journal,
            local=self.places.saving() if self.places is not None else None,
        )

    def _make_drain(self) -> Drain | None:
        chosen, member = self.settings.checkpoint, self.member
        if not chosen.remote_root:
            return None
        return Drain(
            control=member.control,
            root=self.root,
            remote_url=chosen.remote_root,
            epoch=member.fence.epoch,
            attempt=member.attempt,
            journal=member.journal,
            retry_seconds=chosen.remote_retry_seconds,
            linger=chosen.timeout,
        )

    def _make_read_back(self) -> ReadBack | None:
        chosen, member = self.settings.checkpoint, self.member
        if not chosen.read_back:
            return None
        return ReadBack(
            control=member.control,
            root=self.root,
            epoch=member.fence.epoch,
            attempt=member.attempt,
            rate=chosen.read_back_rate * 1e6,
            journal=member.journal,
        )

    def _make_retainer(self, drain: Drain | None, read_back: ReadBack | None) -> Retainer:
        chosen, member = self.settings.checkpoint, self.member
        return Retainer(
            control=member.control,
            root=self.root,
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

    def _facts(self, parent: str | None, reason: str) -> SaveFacts:
        return SaveFacts(
            step=self.meter.step,
            parent=parent,
            reason=reason,
            windows=self.meter.windows(),
            versions=self.versions,
        )

    def _own_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "rng": capture_rng(),
            "data": self.feed.state_dict() if self.feed is not None else None,
            "counters": self.meter.state_dict(),
        }
        if self._validation is not None and (kept := self._validation.state_dict()):
            own["validation"] = kept
        return own

    # --- resuming -------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Put this rank at the point where the run goes on."""
        group, member, saving, feed = self.group, self.member, self.saving, self.feed
        self.tracked.begin()
        resumer = self._make_resumer()
        wish = Wish(self.settings.checkpoint, group, member)
        self._searched = time.time()
        with leavable():  # a load may take long, and is done again if it is cut off
            decision, state = resumer.resume(wish.value, force=wish.force)
        wish.followed(decision)
        if state is not None:
            self._take_up(state, decision.step, resumer.counted)
        self._loaded = time.time()
        self._load_times = state.times if state is not None else None
        rung = decision.rung
        name = CheckpointName(rung.step, rung.id) if rung is not None else None
        manifest = state.manifest if state is not None else None
        if manifest is not None:
            self.meter.go_on_from(manifest.windows)
        self.validation.resumed(
            name,
            manifest,
            state.own.get("validation") if state is not None and state.own else None,
            control=member.control,
            timeout=self.settings.control.decision_timeout,
        )
        if feed is not None:
            feed.tell = lambda text: member.journal.write(Warned(message=text))
            follow_skips(
                feed,
                member.control,
                group,
                member.journal,
                lambda: self.meter.step,
                self.settings.control.decision_timeout,
            )
        saving.resumed_from(name)
        if (
            state is not None and state.manifest is not None and state.own and not state.fresh
        ):  # objects without state must not be given any
            saving.prepare()
        if group.is_coordinator:
            self._sweep()
        saving.start_draining()
        if self.places is not None:
            self.places.use_peers(saving)
            self.places.mend(saving, resumer.taken, manifest.world.size if manifest is not None else 0)
        self.schedule.start(
            self.meter.step,
            leads=group.is_coordinator,
            earlier=lambda: measured_before(member.control, member.attempt, member.launch),
            store=group.store,
            decisions=Decisions(member.control, member.fence, member.attempt, group.store),
            journal=member.journal,
            timeout=self.settings.control.decision_timeout,
        )
        log.info("holdfast: attempt %d starts from %s", member.attempt, decision.chosen)
        self.forgotten = Forgotten(
            self.tracked,
            feed,
            group,
            self.validation.agreement,
            member.journal,
            own_checkpoint=manifest is not None and manifest.run == member.control.run_id,
        )

    def _make_resumer(self) -> Resumer:
        settings, group, member, places = self.settings, self.group, self.member, self.places
        chosen = settings.checkpoint
        remote = None
        if chosen.remote_root and group.is_coordinator:
            remote = functools.partial(
                open_at_start,
                chosen.remote_root,
                retry_seconds=chosen.remote_retry_seconds,
                insist=not member.is_restart,
                journal=member.journal,
            )
        began = None
        if group.is_coordinator and chosen.resume_from != "auto":
            began = origin_now(member.control, chosen.resume_from)
        return Resumer(
            control=member.control,
            fence=member.fence,
            group=group,
            root=self.root,
            attempt=member.attempt,
            tracked=self.tracked,
            journal=member.journal,
            load_timeout=chosen.timeout,
            decision_timeout=settings.control.decision_timeout,
            remote=remote,
            retry_seconds=chosen.remote_retry_seconds,
            avoid=member.told.orders.avoid,
            local_unseen=chosen.non_persistent_ckpt_type == "local" and (places is None or not places.whole),
            local=places.inventory() if places is not None else None,
            needs_data=self.feed is not None,
            fresh_parts=parse_fresh_parts(chosen.fresh_parts),
            began=began.checkpoint if began is not None else "",
            names=chosen.names,
        )

    def _take_up(self, state: LoadedState, step: int, counted: tuple[int, int]) -> None:
        """Make what was loaded this rank's state. `counted`: samples and tokens of all ranks together."""
        state.apply()
        self._tell_changes(state)
        if not state.own:
            self.meter.load_state_dict({"step": step, "samples": 0, "tokens": 0})
            return
        if "counters" not in state.own:  # another project's, which may keep its generators
            self.meter.load_state_dict({"step": step, "samples": 0, "tokens": 0})
            restore_rng(state.own["rng"])
            return
        self.meter.load_state_dict(state.own["counters"])
        self.meter.others_told(counted, state.own["counters"])
        if self.feed is not None and "data" not in state.fresh:
            self.feed.load_state_dict(state.own["data"])
        restore_rng(state.own["rng"])

    def _tell_changes(self, state: LoadedState) -> None:
        """Say what makes this resume differ from going on as before; it does not stop the resume."""
        if not self.group.is_coordinator:
            return
        journal = self.member.journal
        for note in state.notes:
            journal.write(Warned(message=note))
        changes = changes_since(state.manifest.versions, self.versions) if state.manifest else []
        if changes:
            journal.write(Warned(message=f"since this checkpoint was saved: {'; '.join(changes)}"))

    def _sweep(self) -> None:
        """Tidy up after earlier attempts; the run goes on even if that fails."""
        member, root = self.member, self.root
        try:
            for place in (root, root.diagnostic()):
                for name in sweep_staging(place, member.control.run_id, member.fence):
                    told = f"removed {name}, left in staging by an earlier attempt"
                    member.journal.write(Warned(message=told))
        except OSError as error:
            member.journal.write(Warned(message=f"could not sweep {root.staging}: {error}"))

    # --- saves, as the loop asks for them -------------------------------------------------------------------

    def save(self, reason: str, *, diagnostic: bool = False, wait: bool = True) -> CheckpointName:
        """Save now, at a step boundary; see `Run.save`."""
        self._before_save()
        if not diagnostic and (why := self._doubt()):
            raise SaveFailedError(
                f"step {self.meter.step} is not saved: {why}. Go back to an older checkpoint; to look at "
                "this one, call save(diagnostic=True)"
            )
        with self.checkpointing(waits=wait):
            return self.saving.save("diagnostic" if diagnostic else reason, diagnostic=diagnostic, wait=wait)

    def save_as_due(self, due: str) -> None:
        """Do the save that is due after this step; while the state is in doubt, it stays due."""
        if due == "global" or not self.schedule.chooses_locally:
            self.meter.flush_at_once(self.member.journal)
        elif self.meter.flush_due():
            self.meter.flush(self.member.journal)
        self.validation.before_save()
        if why := self.validation.doubt(Severity.ODD):
            self.saving.withheld(why)
            return
        with self.checkpointing():
            (self.saving.scheduled if due == "global" else self.saving.scheduled_locally)()
            self.schedule.after_save(self.meter.step, self.meter.windows().step_seconds, due)

    def plan_ahead(self) -> None:
        """At a boundary at which no save is due: plan the first one, if that is best done now."""
        if self.saving.plans_now():
            with self.checkpointing():
                self.saving.prepare()

    def _before_save(self) -> None:
        self.meter.flush(self.member.journal)
        if self._validation is not None:
            self._validation.before_save()

    def _doubt(self) -> str:
        """Why the state must not be saved as good, not even at an end; "" if it may. Equal on every rank."""
        return self._validation.doubt(Severity.NONFINITE) if self._validation is not None else ""

    @contextlib.contextmanager
    def checkpointing(self, *, waits: bool = False) -> Iterator[None]:
        """The section of a save. `waits`: for a writer process, which has a (long) deadline of its own."""
        if self.stragglers is not None:
            self.stragglers.spoil()
        chosen = self.settings.checkpoint
        longest = chosen.timeout + EXCHANGE_SLACK
        at_least = 2 * longest if waits and chosen.async_save else 0.0
        with (
            scope.critical(max(longest, at_least)),
            self.beats.section(CHECKPOINTING, at_least=at_least, learn=not chosen.async_save),
        ):
            yield

    def _diagnose(self) -> str:
        """Save the state in the middle of a step, for people to look at. Returns its name, or why not."""
        with self.checkpointing(waits=True):
            return self.saving.diagnose()

    def _on_rerun(self) -> None:
        """A step that is re-run gets its full time again before it counts as a hang."""
        self.beats.leave(STEP, learn=False)
        self.beats.enter(STEP)

    # --- leaving --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The run has reached its end: save the last state (once), and say so in the journal."""
        group, member = self.group, self.member
        self._before_save()
        with self.checkpointing(waits=True):
            self.saving.finish(self.meter.step, doubt=self._doubt())
        self.around.saved(self.saving)
        if group.is_coordinator:
            samples, tokens = self.meter.of_the_job()
            member.journal.write(
                RunFinished(step=self.meter.step, samples=samples, tokens=tokens, counts=OF_THE_JOB)
            )
            self._tell_end("finished")
        self._leave("finished", ExitCode.OK)
        self._leave_group()

    def stop(self) -> NoReturn:
        """All ranks stop here, as asked: save the state, once, and raise `Stopped`."""
        step = self.meter.step
        self._before_save()
        with self.checkpointing(waits=True):
            kept = self.saving.stop(step, doubt=self._doubt())
        self.halting.saved(kept, step)
        self.beats.halted(step)
        self._tell_end("stopped")
        self._leave("stopped", ExitCode.STOPPED)
        self._leave_group()
        raise Stopped(step, self.halting.stopping.why)

    @scope.uninterrupted
    def close(self) -> None:
        """Give everything back. Does nothing after an end; before one, the attempt counts as stopped."""
        if self._member is None:
            self.halting.close("unused", 0)
        if self._member is None or self.left:
            return
        error = self.crash or sys.exc_info()[1]
        failed, unseen = self.around.judge(error)
        outcome = "failed" if failed else "stopped"
        self.meter.flush(self._member.journal, read_device=not failed)
        self._tell_end(outcome)
        code = error.exit_code if isinstance(error, HoldfastError) else ExitCode.FAILED
        self._leave(outcome, code, unseen=unseen)

    def _tell_end(self, outcome: str) -> None:
        """Say how the attempt ended. Under the launcher, the launcher does that."""
        if self.launched is None and self.group.is_coordinator:
            self.member.journal.write(AttemptEnded(outcome=outcome, last_step=self.meter.step))

    def _leave(self, outcome: str, code: ExitCode, *, unseen: bool = False) -> None:
        self.left = True
        if self.fault is not None:
            self.fault.disarm()
        if outcome == "failed":
            self.around.failed(self.halting)
        if self.stragglers is not None:
            self.stragglers.close()
        ending = "failed" if unseen else outcome
        self.halting.close("asked" if code is ExitCode.STOPPED else ending, self.meter.step)
        # From here on every wait is bounded. What the script does afterwards is watched by the limits of its
        # own sections; but an error that ends this rank has to end it sooner.
        if outcome == "failed":
            self.beats.failing()
        else:
            self.beats.exiting()
        self.tracked.gradients.close()
        if self.forgotten is not None:
            self.forgotten.close()
        try:
            if self._validation is not None:
                self._validation.close()
            if self._saving is not None:
                self._saving.close(outcome, unseen=unseen)
        finally:
            with to_the_end():
                self._give_back(outcome, code)

    def _give_back(self, outcome: str, code: ExitCode) -> None:
        """Give back the place and the lease, having recorded the attempt's end where that is its task."""
        if self.places is not None:
            self.places.close()
        head = self.head
        end = EndRecord(
            outcome=outcome,
            exit_code=int(code),
            cause="",
            highest_step=head.step if head is not None else 0,
            at=time.time(),
        )
        try:
            self.member.leave(end)
        except LeaseLostError as error:
            log.warning("holdfast: %s", error)

    def _leave_group(self) -> None:
        """Called when all ranks end alike."""
        if self.pinging is not None:
            self.pinging.close()
        self._group = leave_group(self.group)

    def _left_behind(self) -> None:
        """The restartable function that made this run was left: unless it closed the run, that has failed."""
        self.crash = self.crash or scope.RestartRequested("its function was left")
        self.close()

    # --- what others tell it, and what it tells -------------------------------------------------------------

    def _on_lease_lost(self, why: str) -> None:
        self.lost = why

    def _on_crash(self, error: BaseException) -> None:
        # A run that is not closed yet will be closed after this, when it no longer sees why; and the launcher
        # may end this process before that. So what is known of the last steps is written now.
        self.crash = error
        self.beats.failing()
        if self._member is not None and self.left:
            self._member.crashed(error)
        elif self._member is not None:
            self.meter.flush(self._member.journal, read_device=False)

    def _warn(self, told: str) -> None:
        """Warn, on rank 0 only, which speaks for all."""
        if self.group.is_coordinator:
            self.member.journal.write(Warned(message=told))
            log.warning("holdfast: %s", told)


def _there(part: T | None) -> T:
    if part is None:
        raise UsageError("the run has not started: call run.start(), or iterate over run.steps()")
    return part


# Where the settings want the run to begin.


class Wish:
    """Where the settings want the run to begin. The wish is followed once: see record/launches.py.

    Only what rank 0 makes of it counts; the others follow rank 0.
    """

    def __init__(self, chosen: CheckpointSettings, group: Group, member: Membership) -> None:
        self._asked = chosen.resume_from
        self._member = member
        self._before = None
        self.value, self.force = "auto", False
        # A restart goes on from where the launch's earlier attempt was.
        leads = not member.is_restart and group.is_coordinator
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
            origin = RunOrigin(
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


# What a run does for the restartable function that it was made in, if it was made in one.


class Ending(NamedTuple):
    """How a run that has not finished ends."""

    failed: bool
    unseen: bool
    """Whether an exception may be on its way that nobody has seen yet."""


class Surroundings:
    """What surrounds one run. Outside a restartable function every call does nothing."""

    def __init__(self) -> None:
        self._scope = scope.current()
        if self._scope is not None and self._scope.on_run is not None:
            self._scope.on_run()

    def on_leave(self, *closes: Callable[[], object]) -> None:
        """Have these called when the function has been left; the last named is called first."""
        if self._scope is not None:
            for close in closes:
                self._scope.on_leave(close)

    def stepped(self, step: int) -> None:
        if self._scope is not None:
            self._scope.step, self._scope.stepped = step, True

    def resumed(self, member: Membership, saving: Saving) -> None:
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

    def saved(self, saving: Saving) -> None:
        if self._scope is not None:
            self._scope.committed = max(self._scope.committed, saving.committed)

    def judge(self, error: BaseException | None) -> Ending:
        """`error`: the exception seen where the run is closed."""
        # When an exception leaves the loop, its generator is dropped before anyone can see that exception.
        unseen = isinstance(error, GeneratorExit)
        failed = error is not None and not unseen
        if self._scope is None:
            return Ending(failed, unseen)
        asked = bool(self._scope.asked)
        return Ending(failed or unseen or asked, unseen and not asked)  # few leave such a loop by `break`

    def failed(self, halting: Halting) -> None:
        """The run ends without having stopped as it was asked to."""
        if self._scope is not None:
            self._scope.stop = halting.asked_by


# What a run is made of: versions of code, settings and libraries, and what changed since a checkpoint.


def current_versions(settings: sources.Settings) -> Versions:
    return Versions(
        holdfast=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        code=_code_digest(),
        config=sources.digest(settings),
    )


def changes_since(then: Versions, now: Versions) -> list[str]:
    """Pure: in words, one entry per change. What either side does not know is not a change."""
    found = [
        f"{what} {before} → {after}"
        for what, before, after in (
            ("torch", then.torch, now.torch),
            ("Python", then.python, now.python),
            ("holdfast", then.holdfast, now.holdfast),
        )
        if before and after and before != after
    ]
    if then.code and now.code and then.code != now.code:
        found.append("the main script has changed")
    if then.config and now.config and then.config != now.config:
        found.append("the settings have changed")
    return found


def _code_digest() -> str:
    """Digest of the main script; empty where there is none."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return digest_bytes(Path(main).read_bytes()) if main else ""
    except OSError:
        return ""
