"""A run's saves: in the foreground or in the background, reported, counted, and followed by retention.

A save that fails, for whatever reason, is reported at the next step (journal, log, with the writer's
traceback) and training goes on, until too many have failed in a row; only a lost lease, a state that no
resume would take (found at the first save), or a group that can no longer exchange, ends a run from within a
save. What a run must not lose at its end (the last save, a save that is asked for) is waited for, with a
deadline, and its failure is raised.

With a local tier every save but a diagnostic one goes there first. What is committed there counts as saved at
once; retention, the remote and the cadence go by commits in the checkpoint root. A local save that fails is
reported, and stops no run: the tier is a shortcut, and the root is what a run must not be without.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast.checkpoint import ReadBack, Retainer
from holdfast.checkpoint.copies import Where, confirmed_replicas
from holdfast.checkpoint.format import CheckpointName, ManifestError
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.remote import Drain
from holdfast.checkpoint.save import (
    BackgroundSaver,
    Ended,
    ForegroundSaver,
    LocalTarget,
    MendCopies,
    PeerTarget,
    Save,
    SaveContext,
    SaveFacts,
    Saver,
    Snapshotter,
    Stager,
    UsePeers,
)
from holdfast.checkpoint.state import Tracked
from holdfast.config import CheckpointSettings
from holdfast.errors import (
    HoldfastError,
    IncompleteStateError,
    LeaseLostError,
    SaveFailedError,
    SaveStorageError,
    ValidationFailedError,
)
from holdfast.journal import Event, JournalWriter
from holdfast.journal.events import DecisionMade, SaveFailed, SaveSkipped, SaveStarted, Warned
from holdfast.policy import Choice
from holdfast.record import add_up, diagnosed, last_fresh, share
from holdfast.train.meter import Meter
from holdfast.train.schedule import SaveSchedule

log = logging.getLogger("holdfast")

PLANNED_AFTER = (2, 4, 8, 16)
"""Steps after which the first save is planned, unless it was made or planned before. After the first step it
is not known yet which gradients will be stored; and until its first step an optimizer has no state."""

Facts = Callable[[str | None, str], SaveFacts]
"""(parent, reason) → what the manifest says about this moment."""


LOOK = 0.5
"""Seconds between two looks at whether a checkpoint is on all peers."""


class Kept(NamedTuple):
    """What holds the state of a run that stops."""

    name: CheckpointName | None
    """None if there was nothing yet to save."""
    already: bool = False
    """Whether it was saved before."""
    seconds: float = 0.0


class Saving:
    """Saves for one attempt. Every rank makes the same calls at the same steps."""

    def __init__(
        self,
        context: SaveContext,
        settings: CheckpointSettings,
        *,
        lease_ttl: float,
        tracked: Tracked,
        own: Callable[[], dict[str, Any]],
        facts: Facts,
        schedule: SaveSchedule,
        step_seconds: Callable[[], float | None],
        meter: Meter,
        retainer: Retainer | None,
        drain: Drain | None,
        read_back: ReadBack | None = None,
        journal: JournalWriter,
        local: LocalTarget | None = None,
    ) -> None:
        self._settings = settings
        self._group = context.group
        self._tracked = tracked
        self._facts = facts
        self._schedule = schedule
        self._meter = meter
        self._retainer = retainer
        self._drain = drain
        self._read_back = read_back
        self._journal = journal
        self._snapshots = Snapshotter(
            tracked, own, run=context.control.run_id, attempt=context.attempt, group=context.group
        )
        self._saver: Saver
        if settings.async_save:
            stager = Stager(
                settings.snapshot, timeout=settings.timeout, step_seconds=step_seconds, tell=self._tell_way
            )
            stager.prepare(tracked.devices())
            self._saver = BackgroundSaver(
                context,
                self._snapshots,
                stager=stager,
                when_busy=settings.when_busy,
                timeout=settings.timeout,
                lease_ttl=lease_ttl,
                local=local,
                tell=journal.write,
            )
        else:
            self._saver = ForegroundSaver(context, self._snapshots)
        self._failed = self._failed_locally = 0
        self._too_many: SaveFailedError | None = None
        """To be raised, unless a save is committed first, which breaks the row of failures."""
        self._planned = not settings.async_save
        """Whether the first save was planned, or there is nothing to gain by that; the same on every rank."""
        self._steps = 0
        """Steps completed in this attempt."""
        self._told_doubt = self._told_skip = ""
        """Why nothing is saved at present; why the last local save was left out. Reported on every change."""
        self.head: CheckpointName | None = None
        """The newest checkpoint of this timeline that is known to be committed."""
        self.committed = 0
        """The highest step of a checkpoint that this rank knows to be committed for all ranks."""
        self.saved_step: int | None = None
        """The newest step whose state is committed or under way."""
        self._saver.local_waits = not schedule.chooses_locally
        self._copies: Where | None = None
        """On rank 0: where local copies and their replicas go."""
        self._sent: tuple[CheckpointName | None, float] = None, 0.0
        """The last checkpoint that is replicated, and the time after which its replicas count as failed."""
        self._looked = 0.0
        self._root = context.root
        self._control = context.control
        self._attempt = context.attempt
        self._rooted: int | None = None
        """The same for the checkpoint root alone."""

    def resumed_from(self, head: CheckpointName | None) -> None:
        self.head = head
        self.committed = head.step if head is not None else 0
        self.saved_step = head.step if head is not None else None
        self._rooted = head.step if head is not None and (self._root.path / str(head)).is_dir() else None
        self._saver.resumed_from(head)

    def use_peers(self, targets: list[PeerTarget], where: Where | None = None) -> None:
        """Where replicas of this rank's local copies go; `where`, on rank 0, says it for all ranks."""
        timeout = self._settings.replication_timeout
        self._copies = where
        self._saver.order(UsePeers(targets=targets, timeout=timeout, where=where))

    def mend(self, order: MendCopies) -> None:
        """The run has resumed: whatever this node lost of its checkpoint is made again, beside training."""
        self._saver.order(order)

    def start_draining(self) -> None:
        """The run has resumed: from now on what is committed is copied to the remote, if there is one."""
        if self._drain is not None:
            self._drain.start()

    def prepare(self) -> None:
        """Plan the first save, for which memory is then taken beside training; see `plans_now`."""
        self._planned = True
        self._saver.prepare()

    def stepping(self) -> None:
        """The first step is about to begin."""
        self._saver.stepping()

    @property
    def ready(self) -> bool:
        """Whether the first save will find its plan, and all that is got ready beside training."""
        return self._planned and self._saver.ready

    def plans_now(self) -> bool:
        """Whether to plan the first save at this boundary, at which none is due; the same on every rank.

        A run that goes on from a checkpoint has planned it before its first step.
        """
        if self._planned or self._steps not in PLANNED_AFTER:
            return False
        if self._steps == PLANNED_AFTER[-1]:
            return True
        stepped = list(map(id, self._tracked.gradients.stepped()))
        lacking = [one for one in self._tracked.optimizers() if not one.state and id(one) not in stepped]
        return self._snapshots.may_plan(self._meter.step, ready=not lacking)

    # --- saving ---------------------------------------------------------------------------------------------

    def save(self, reason: str, *, diagnostic: bool = False, wait: bool = True) -> CheckpointName:
        """Save now. With `wait` the checkpoint is committed when this returns, or an error is raised.

        The error is this save's own. If an earlier one failed, that is reported and counted, as at a step.
        """
        begun = self._begin(reason, diagnostic=diagnostic, must=True)
        assert begun is not None
        if not wait:
            return begun.name
        try:
            self.wait(f"the save of {begun.name}", own=begun.name)
        except SaveFailedError as error:
            if diagnostic or not self._saver.has_local_tier:
                raise
            # On every rank, whatever the error: what must not be lost must not depend on the local tier.
            why = f"because it was not saved: {error}"
            self._write(Warned(message=f"{begun.name} is saved again, to the checkpoint root alone, {why}"))
            begun = self._begin(reason, must=True, local=False)
            assert begun is not None
            self.wait(f"the save of {begun.name}", own=begun.name)
        return begun.name

    def diagnose(self) -> str:
        """Make a diagnostic save, in a run that is about to end; returns its name, or why there is none.

        One per step and preceding checkpoint is enough, however often that step is rejected.
        """
        if kept := share(self._group, self._diagnosed() if self._group.is_coordinator else "")[0]:
            return kept
        try:
            return str(self.save("diagnostic", diagnostic=True))
        except LeaseLostError:
            raise
        except (HoldfastError, OSError, RuntimeError, ValueError) as error:
            return f"none: {type(error).__name__}: {error}"

    def _diagnosed(self) -> str:
        """The diagnostic save of this step left by an earlier attempt on this timeline; empty if none."""
        control, place = self._control, self._root.diagnostic()
        with contextlib.suppress(HoldfastError, OSError):
            known = diagnosed(control, since=last_fresh(control), before=self._attempt)
            for name in place.names():
                if name.step != self._meter.step or str(name) not in known:
                    continue
                with contextlib.suppress(ManifestError):
                    manifest, _ = manifests.read(place.committed(name))
                    if manifest.parent == self._parent and manifest.run == control.run_id:
                        return str(name)
        return ""

    def scheduled(self) -> None:
        """The schedule says a save is due: a failure is reported, and raised only after too many in a row."""
        self._try_to_save(globally=True)

    def scheduled_locally(self) -> None:
        """A save to the local tier alone is due: a failure is reported."""
        if self._saver.has_local_tier:  # otherwise this attempt runs without one
            self._try_to_save(globally=False)

    def _try_to_save(self, *, globally: bool) -> None:
        self._snapshots.heard = 0
        self._snapshots.word = 2 * self._schedule.word() + (
            self._group.is_coordinator and not self._replicates()
        )
        try:
            self._begin("scheduled", globally=globally)
        except (LeaseLostError, IncompleteStateError):
            raise
        except HoldfastError as error:  # on every rank alike
            self._count(_as_failed(error), CheckpointName(self._meter.step, ""), fatal=globally)
            if globally:
                self._raise_too_many()
        finally:
            self._snapshots.word = 0
            self._schedule.heard(self._snapshots.heard // 2)

    # A save at every step can be more often than replicas can be sent. If each rank then sent whatever is its
    # newest when it is done with another, no checkpoint might ever be replicated by all. So rank 0 says which
    # are: the next one only once the last is on all peers, or has failed. The ranks keep their own copies of
    # the last two of these beyond their turn (copies/slots.py), so that what survives the loss of a node is
    # one checkpoint, whole. All others live on their own nodes only.

    def _replicates(self) -> bool:
        """On rank 0: whether the copies of the save that is due are to be sent to peers."""
        planned = 0
        if self._schedule.chooses_locally and self._copies is not None:
            planned = sum(len(place.targets) for place in self._copies.ranks)
        name, until = self._sent
        if not planned or name is None or time.monotonic() > until:
            return True
        if time.monotonic() < self._looked + LOOK:
            return False
        self._looked = time.monotonic()
        return confirmed_replicas(self._control, name) >= planned

    @property
    def _parent(self) -> str | None:
        return (self.head.id or None) if self.head is not None else None

    def _begin(
        self,
        reason: str,
        *,
        diagnostic: bool = False,
        must: bool = False,
        globally: bool = True,
        local: bool = True,
    ) -> Save | None:
        saver, facts = self._saver, self._facts(self._parent, reason)
        name = self._snapshots.next_name(facts.step)
        if (
            globally or not self._schedule.chooses_locally
        ):  # of those that may be at every step it has the ends
            self._write(SaveStarted(checkpoint=str(name), step=facts.step, background=saver.in_background))
        begun = saver.begin(facts, diagnostic=diagnostic, must=must, globally=globally, local=local)
        self._tell_doubts()
        self._tell_skipped(saver.why_skipped, name, once=begun is not None or not globally)
        if begun is None:
            return None
        self._planned = True
        if begun.local and begun.replicate:
            self._sent = begun.name, time.monotonic() + self._settings.replication_timeout
        self._schedule.begun(
            local_only=begun.local and not globally, nbytes=self._snapshots.planned_bytes or 0
        )
        self._meter.agreed(*self._snapshots.counted)
        if begun.waited > 0.0:
            delay = f"training waited {begun.waited:.1f} s for the save before {name} to be written"
            self._write(Warned(message=f"{delay}; save less often, or use faster storage"))
        if not diagnostic:
            self.saved_step = facts.step
            self._rooted = facts.step if globally else self._rooted
        if not saver.in_background:
            self._take_all()
        return begun

    def _tell_skipped(self, why: str, name: CheckpointName, *, once: bool) -> None:
        """A save, or its local copy, was left out. For want of room that may happen at every step: `once`."""
        kind = re.sub(r"[0-9.]+", "", why)  # the numbers in it keep changing
        if why and not (once and kind == self._told_skip):
            self._write(SaveSkipped(checkpoint=str(name), step=name.step, reason=why))
        self._told_skip = kind

    def _tell_way(self, choice: Choice) -> None:
        self._write(DecisionMade(about="snapshot", chosen=choice.way, evidence=choice.evidence))
        if choice.warning:
            self._write(Warned(message=choice.warning))
            log.warning("holdfast: %s", choice.warning)

    def _tell_doubts(self) -> None:
        found = [*self._snapshots.take_doubts(), *self._tracked.gradients.take_doubts()]
        for doubt in found if self._group.is_coordinator else ():
            self._write(Warned(message=doubt))
            log.warning("holdfast: %s", doubt)

    # --- what became of it ----------------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """A step is done: take in what has ended. Raises after too many failures in a row."""
        self._steps += 1
        self._tell_doubts()
        if self._drain is not None:
            self._drain.poll()
        if self._read_back is not None:
            self._read_back.poll()
        self._saver.boundary()
        self._take_all()
        self._raise_too_many()

    def _take_all(self) -> None:
        for ended in self._saver.poll():
            self._take(ended)

    def wait(self, what: str, own: CheckpointName | None = None) -> None:
        """Wait until nothing is under way; raise on every rank what went wrong on any.

        `own`: wait for this save, and raise what went wrong with it. Failures of earlier ones are reported
        and counted but not raised here, except for a lost lease, whichever save ran into it.
        """
        if not self._saver.in_background:
            return  # all ranks have known what became of a save ever since `begin` returned
        outcomes = self._saver.wait(self._settings.timeout, own)
        for ended in outcomes:
            if not isinstance(ended.error, LeaseLostError):
                self._take(ended)
        error = to_raise(outcomes, own)
        if error is None and self._saver.is_under_way(own):
            error = SaveFailedError(f"{what} was not done after {self._settings.timeout:g} s")
        failed, storage = add_up(self._group, [error is not None, isinstance(error, SaveStorageError)])
        if failed:
            self.saved_step = self._rooted = self._too_many = None
            elsewhere = f"{what} failed on another rank, whose error says why"
            raise error or (SaveStorageError(elsewhere) if storage else SaveFailedError(elsewhere))

    def _take(self, ended: Ended) -> None:
        name, diagnostic = ended.save.name, ended.save.diagnostic
        local_only = ended.save.local and not ended.save.globally
        if local_only or ended.tier == "global" or ended.error is not None:
            self._schedule.ended(
                local_only=local_only,
                blocked=ended.save.blocked,
                commit=0.0 if ended.error is not None else ended.seconds,
            )
        if ended.error is None:
            if ended.told is not None:
                self._write(ended.told)
            if ended.moves_head:
                self.head = name
                if ended.for_all:
                    self.committed = name.step
            if ended.tier == "local":
                self._failed_locally = 0
                return
            self._failed, self._too_many = 0, None
            if not diagnostic and self._rooted is None:  # an earlier save of this step may have failed
                self.saved_step = max(name.step, self.saved_step or 0)
                self._rooted = name.step
            self._committed(ended)
        elif isinstance(ended.error, LeaseLostError):
            raise ended.error
        elif self._group.is_coordinator:
            self._count(ended.error, name, fatal=not ended.save.local_only)
        else:  # rank 0's writer will learn of it and fail the save for all
            log.error("holdfast: %s\n%s", ended.error, "\n".join(getattr(ended.error, "__notes__", ())))

    def _committed(self, ended: Ended) -> None:
        """A save was committed in the checkpoint root."""
        save = ended.save
        if self._group.is_coordinator:
            self._schedule.note(blocked=save.blocked, commit=ended.seconds)
        if save.diagnostic:
            return
        if self._drain is not None:
            self._drain.push(str(save.name))
        if self._read_back is not None:
            self._read_back.committed()
        if self._retainer is not None:
            self._retainer.after_commit()

    def _count(self, error: SaveFailedError, name: CheckpointName, *, fatal: bool = True) -> None:
        if fatal:
            self._failed += 1
        else:
            self._failed_locally += 1
        in_a_row = self._failed if fatal else self._failed_locally
        if self.saved_step == name.step:
            self.saved_step = None
        if fatal and self._rooted == name.step:
            self._rooted = None
        shown = str(name) if name.id else f"step_{name.step:08d}"
        notes = "\n".join(getattr(error, "__notes__", ()))
        text = f"{error}\n{notes}" if notes else str(error)
        self._write(SaveFailed(checkpoint=shown, step=name.step, error=text, in_a_row=in_a_row))
        log.error("holdfast: %s (%d in a row)", text, in_a_row)
        if fatal and self._failed >= self._settings.max_failed_saves:
            often = "a failed save" if self._failed == 1 else f"{self._failed} failed saves in a row"
            self._too_many = type(error)(
                f"{error}; the run stops after {often} (checkpoint.max_failed_saves)"
            )
            self._too_many.__cause__ = error

    def _raise_too_many(self) -> None:
        if (error := self._too_many) is not None:
            self._too_many = None
            raise error

    def _write(self, event: Event) -> None:
        if self._group.is_coordinator:
            self._journal.write(event)

    # --- the end --------------------------------------------------------------------------------------------

    def withheld(self, why: str) -> None:
        """A save was due, but the state is in doubt. Reported once, until the reason changes."""
        if why != self._told_doubt:
            self._told_doubt = why
            step = self._meter.step
            self._write(SaveSkipped(checkpoint=f"step_{step:08d}", step=step, reason=why))
            if self._group.is_coordinator:
                log.warning("holdfast: nothing is saved after step %d, because %s", step, why)

    def finish(self, step: int, *, doubt: str = "") -> None:
        """The last step is done: wait until everything under way is committed, and save the last state.

        `doubt`: why it must not be saved as a good one, which is an error here.
        """
        try:
            self.wait("a save that was under way")
        except SaveFailedError:
            if not self._settings.save_at_end:
                raise
            # It was reported; the last state is about to be saved anyway.
        # Rank 0 may know of a failure that the others do not, so whether to save is agreed.
        due, samples, tokens = add_up(
            self._group, [self.saved_step != step, self._meter.samples, self._meter.tokens]
        )
        self._meter.agreed(samples, tokens)
        if doubt:
            raise ValidationFailedError(
                f"the run has reached its last step, {step}, but that is not saved: {doubt}. The newest good "
                f"checkpoint: {self.head or 'none'}. Look at the data and the learning rate, then start again"
            )
        if self._settings.save_at_end and due:
            self.save("final")

    def stop(self, step: int, *, doubt: str = "") -> Kept:
        """The run stops after this step: when this returns, the step is in the checkpoint root, saved once.

        `doubt`: why it must not be saved as a good one. The run then goes on from what was saved before.
        """
        with contextlib.suppress(SaveFailedError):  # it was reported, and the state is about to be saved
            self.wait("a save that was under way")
        if step == 0 and self.head is None:
            return Kept(None)
        if doubt:
            self.withheld(doubt)
            return Kept(self.head)
        started = time.monotonic()
        if not add_up(self._group, [self._rooted != step])[0]:
            return Kept(self.head, already=True)
        return Kept(self.save("stop"), seconds=time.monotonic() - started)

    def close(self, outcome: str, *, unseen: bool = False) -> None:
        """Give everything back. After a failure the writer finishes alone what it was handed.

        `unseen`: an error that cannot be seen from here may be on its way out, and must not be held up. Then
        too the writer finishes alone, and the interpreter waits for it at exit if there was no error.
        """
        self._saver.no_more()
        try:
            if self._read_back is not None:
                self._read_back.close()
            if self._retainer is not None:
                self._retainer.close()
            self._close_saver(failed=outcome == "failed", unseen=unseen)
        finally:
            if self._drain is not None:  # only a run that has reached its end waits for its last copies
                self._drain.close(self._settings.timeout if outcome == "finished" else 0.0)

    def _close_saver(self, *, failed: bool, unseen: bool) -> None:
        saver = self._saver
        if failed or unseen:
            saver.abandon(await_at_exit=self._settings.timeout if unseen else 0.0)
            return
        errors: list[SaveFailedError | LeaseLostError] = []
        try:
            outcomes = saver.wait(self._settings.timeout)
        except BaseException:  # something wants to leave the function around the run
            saver.abandon()
            raise
        for ended in outcomes:
            if (error := to_raise([ended])) is not None:
                errors.append(error)
            elif ended.error is not None:
                self._take(ended)  # only reported
        if saver.is_under_way():
            saver.abandon()
            raise SaveFailedError(f"a save was still under way after {self._settings.timeout:g} s")
        saver.close()
        if errors:
            raise errors[-1]


def _as_failed(error: HoldfastError) -> SaveFailedError:
    if isinstance(error, SaveFailedError):
        return error
    failed = SaveFailedError(f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def to_raise(
    outcomes: Sequence[Ended], own: CheckpointName | None = None
) -> SaveFailedError | LeaseLostError | None:
    """Pure: why saves failed, if anything has to be done about that; of several errors the last.

    A local copy is only a shortcut. With `own`, only the error of that save counts; a lost lease always does.
    """
    errors = [
        ended.error
        for ended in outcomes
        if isinstance(ended.error, LeaseLostError)
        or (ended.error is not None and not ended.save.local_only and own in (None, ended.save.name))
    ]
    lost = [error for error in errors if isinstance(error, LeaseLostError)]
    return (lost or errors or [None])[-1]
