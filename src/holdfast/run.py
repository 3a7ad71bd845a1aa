"""Run: the one object that a training loop holds.

```python
run = holdfast.Run("holdfast.toml")
run.track(model=model, optimizer=opt, schedule=sched)
for step, batch in run.steps(loader, until=10_000):
    loss = run.compute(forward_backward, batch)
    opt.step(); sched.step(); opt.zero_grad()
    run.record(loss=loss, tokens=batch.numel())
```
The same in callback shape, for frameworks that own the loop: `start`, then `begin_step` and `end_step` around
each step, batches from `feed`, and `close` at the end.

Steps count from 1. A checkpoint of step n holds the state after n completed steps: weights, optimizer, every
tracked object, the RNG of every rank, the data position and the counters, all in one commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import torch

from holdfast.base import scope
from holdfast.checkpoint.format import OF_THE_JOB, CheckpointName, CheckpointRoot
from holdfast.config import sources
from holdfast.errors import ExitCode, HoldfastError, LeaseLostError, SaveFailedError, Stopped, UsageError
from holdfast.journal.events import AttemptEnded, RunFinished
from holdfast.policy import CHECKPOINTING, LOADING, SETUP, STEP, Source
from holdfast.record import Group, LaunchInfo, leave_group, one_config
from holdfast.session import EXCHANGE_SLACK, Parts, Surroundings
from holdfast.stop import refuse_stop_file
from holdfast.train import (
    Beats,
    CrashHook,
    Halting,
    Membership,
    Pinging,
    Saving,
    SimulatedFault,
    judge_collectives,
    simulated_fault,
    start_beats,
    tell_idle,
)
from holdfast.train.check import RecordedFeed, Severity, Validation, refuse_contradictions
from holdfast.train.data import DataFeed
from holdfast.train.stragglers import Stragglers, make_stragglers, refuse_straggler_settings

log = logging.getLogger("holdfast")

T = TypeVar("T")


class Run:
    """One process's part in a run. Settings as keywords are spelt `<section>_<key>`."""

    @scope.uninterrupted
    def __init__(self, file: str | os.PathLike[str] | None = None, /, **settings: object) -> None:
        self._around = Surroundings()
        self._crash: BaseException | None = None
        self._member: Membership | None = None
        self._beats = Beats()
        self._halting = Halting(lambda: self._meter.step)
        hook = CrashHook(self._on_crash)  # first: wrong settings, too, end a rank with their own code
        self._around.on_leave(hook.remove)
        self._launched = LaunchInfo.from_environment(os.environ)
        given = sources.load(
            one_config(file, self._launched),
            command_line=self._launched.command_line if self._launched else None,
            keywords=settings,
        )
        # Once, here: what the script does to its working directory later changes no path of the run's.
        self.settings = given.settings.absolute(self._launched.base() if self._launched else None)
        self._effective = msgspec.structs.replace(given, settings=self.settings)
        refuse_contradictions(self._effective, self._launched)
        refuse_straggler_settings(self._effective, self._launched)
        if self._launched is None:
            refuse_stop_file(self.settings.stop_file())  # else the launcher has looked
        self._root = CheckpointRoot(self.settings.checkpoint_root())
        self._parts = parts = Parts(self.settings, self._root, self._launched, given=given.settings)
        self._tracked, self._checks = parts.tracked, parts.checks
        self._meter, self._schedule = parts.meter, parts.schedule
        self._halting.watch(self.settings)
        try:
            self._beats = start_beats(self._effective, self._launched, halting=self._halting)
        except BaseException:
            self._halting.close("failed", 0)  # the signals must not stay with a run that there is not
            raise
        self._halting.heed(self._beats)
        self._around.on_leave(self._beats.close, self._left_behind)
        self._fault: SimulatedFault | None = None
        self._pinging: Pinging | None = None
        self._stragglers: Stragglers | None = None
        self._group: Group | None = None
        self._lost = ""
        self._closed = self._in_step = self._looping = False

    # --- before the first step ------------------------------------------------------------------------------

    def track(self, **parts: object) -> None:
        """Make these objects part of every checkpoint, under the given names."""
        if self._member is not None:
            raise UsageError("track() came after the run started; track everything before the first step")
        for name, thing in parts.items():
            self._tracked.add(name, thing)

    def ignore(self, *things: object) -> None:
        """These are no part of the checkpoint, on purpose: an optimizer, a schedule, a gradient scaler or a
        loader that a resume may begin anew. Whatever else the run trains with and nobody tracks is an error
        at the end of its first step."""
        for thing in things:
            self._tracked.ignore(thing)

    def feed(self, loader: Iterable[Any]) -> DataFeed:
        """Hand the loader to the run; iterate over what this returns instead. Call it before `start`."""
        if self._member is not None:
            raise UsageError("feed() came after the run started; a data position is restored before iter()")
        if self._parts.feed is not None:
            raise UsageError("feed() was called twice; a run has one data feed")
        self._halting.spare(loader)
        trusted = self.settings.checkpoint.data_position == "trusted"
        self._parts.feed = RecordedFeed(loader, trusted=trusted)
        self._parts.feed.alive = self._beats.beat
        return self._parts.feed

    def add_check(self, name: str, check: Callable[[float], object]) -> None:
        """A check of your own: given this rank's loss, True or a text rejects the step. On every rank."""
        if self._member is not None:
            raise UsageError("add_check() came after the run started; add every check before the first step")
        self._checks.add(name, check)

    @scope.uninterrupted
    def start(self) -> int:
        """Join the attempt and resume. Returns the number of steps that are done already."""
        if self._member is not None:
            return self.step
        if not self._tracked.names():
            raise UsageError("nothing is tracked: call run.track(model=…, optimizer=…) before the first step")
        chosen = self.settings
        try:
            self._group, self._member = self._parts.join(self._on_lease_lost)
            self._halting.joined(chosen, self._group, self._member, self._schedule.last_commit)
            self._parts.make(self._group, self._member, diagnose=self._diagnose, on_rerun=self._on_rerun)
            # Loading has a deadline of its own, and its failure must be told before it counts as a hang.
            limit = chosen.checkpoint.timeout + 2 * EXCHANGE_SLACK
            with scope.critical(limit), self._beats.section(LOADING, at_least=limit):
                self._parts.resume(self._group, self._member)
            self._tracked.gradients.start()
            self._around.resumed(self._member, self._saving)
            if chosen.straggler.enabled:
                self._find_stragglers()
            if self._beats.watched:
                self._fault = simulated_fault(self._effective, self._group, self._member)
                judge_collectives(self._effective, self._group, self._member)
            tell_idle(self._effective, self._group, self._member)
            self._pinging = Pinging(chosen.health, self._group, self._member.journal)
        except BaseException:
            self.close()  # neither lease nor signals must stay with a run that could not start
            raise
        return self.step

    def _find_stragglers(self) -> None:
        self._stragglers = make_stragglers(
            self.settings,
            *self._joined(),
            self._launched,
            self._tracked,
            stop=lambda why: self._halting.ask(Source.STRAGGLER, why),
            save=lambda reason: self.save(reason=reason),
        )
        if self._parts.feed is not None:
            self._parts.feed.timed = self._stragglers.input
        self._stragglers.begin_step()

    # --- the loop -------------------------------------------------------------------------------------------

    def steps(
        self, loader: Iterable[Any], *, until: int, batches: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) until `until` steps are done, resuming first; saves as set, and at the end.

        With `batches` each step gets a list of so many, for gradients that are accumulated within a step.
        """
        if batches is not None and batches < 1:
            raise UsageError(f"steps(batches={batches}): a step takes one batch or more")
        feed = self.feed(loader)
        self.start()
        try:
            while self.step < until:
                self.begin_step()
                given = feed.next() if batches is None else [feed.next() for _ in range(batches)]
                yield self.step + 1, given
                self.end_step(last=self.step + 1 >= until)
            self.finish()
        finally:
            self.close()

    @scope.uninterrupted
    def begin_step(self) -> None:
        """The step begins: its batch is about to be fetched, or was."""
        if self._member is None:
            raise UsageError("begin_step() before start(): the run has not resumed yet")
        if self._in_step:
            raise UsageError(f"begin_step() twice: step {self.step + 1} was not ended")
        if not self._looping:
            self._looping = True
            self._beats.leave(SETUP)
            self._halting.stopping.begin()
            if self._halting.stopping.asked:
                self._stop_if_reached()
        self._in_step = True
        self._tracked.gradients.begin_step()
        self._beats.enter(STEP)
        self._meter.begin_step()
        assert self._validation is not None
        self._validation.begin_step()

    def compute(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call the step's forward and backward; its result, if it is a single number, is the step's loss.

        The result is checked on all ranks together before this returns; a rejected one is computed again, or
        dropped, as the settings say. Every rank makes as many calls in a step as the others.
        """
        if self._validation is None:
            raise UsageError("compute() before start(): the run has not resumed yet")
        stragglers = self._stragglers
        timed = stragglers.around(function) if stragglers is not None else function
        result: T = self._validation.compute(timed, args, kwargs)
        if stragglers is not None:
            stragglers.arrived()
        if isinstance(result, float) or (isinstance(result, torch.Tensor) and result.numel() == 1):
            self._meter.record(loss=result)
        return result

    def check(self, loss: float | torch.Tensor | None = None) -> bool:
        """For loops that do not call `compute`: whether to use this step, after backward and on every rank.

        False: it was dropped on all ranks, and its gradients with it. Nothing is computed again here.
        """
        if self._validation is None:
            raise UsageError("check() before start(): the run has not resumed yet")
        if loss is not None:
            self._meter.record(loss=loss)
        return self._validation.check(loss)

    @property
    def dropped(self) -> bool:
        """Whether this step was dropped: an optimizer that is not torch's own must leave it out then."""
        return self._validation is not None and self._validation.dropped

    def record(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
        samples: int | Sequence[int] | torch.Tensor | None = None,
        tokens: int = 0,
    ) -> None:
        """Record facts of this step. `samples` is a count, or the ids, whose digest is then journalled."""
        self._meter.record(loss=loss, grad_norm=grad_norm, samples=samples, tokens=tokens)

    @scope.uninterrupted
    def end_step(self, *, last: bool = False) -> None:
        """The step is complete: count it, and save if it is due. `last` leaves the save to `finish`.

        Raises `Stopped` if the run was asked to stop and all ranks stop here: the state is saved then.
        """
        if not self._in_step:
            raise UsageError("end_step() without begin_step()")
        self._in_step = False
        if self._stragglers is not None:
            self._stragglers.end_step()
        self._meter.end_step()
        self._tracked.gradients.end_step()
        self._around.stepped(self.step)
        self._beats.step_done(self.step)
        if self._fault is not None:
            self._fault.arm()
        if self._lost:
            raise LeaseLostError(f"this attempt lost its lease: {self._lost}")
        assert self._pinging is not None
        self._pinging.at_boundary(self.step)
        assert self._saving is not None
        assert self._validation is not None
        assert self._parts.forgotten is not None
        if (scaled := self._parts.forgotten.at_boundary(self.step)) is not None:
            self._validation.scaled = scaled
        self._validation.completed(self.step)
        self._saving.at_boundary()
        if self._stragglers is not None and not last:
            self._stragglers.meet(self.step)
        if self._halting.stopping.asked and not last:
            self._stop_if_reached()
        due = self._schedule.due(self.step)
        if due and not last:
            self._meter.flush_at_once(self._joined()[1].journal)
            self._validation.before_save()
            if why := self._validation.doubt(Severity.ODD):
                self._saving.withheld(why)  # it stays due
            else:
                with self._checkpointing():
                    (self._saving.scheduled if due == "global" else self._saving.scheduled_locally)()
                    self._schedule.after_save(self.step, self._meter.windows().step_seconds, due)
        elif self._meter.flush_due():
            self._meter.flush(self._joined()[1].journal)
        self._around.saved(self._saving)
        if self._stragglers is not None:
            self._stragglers.begin_step()

    def section(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A named span of the loop: watched by its own limit in monitor.rank_section_timeouts, if it has one,
        and measured where stragglers are looked for. It should not wait for other ranks."""
        if self._stragglers is None:
            return self._beats.section(name)
        return self._stragglers.section(name, self._beats.section(name))

    def beat(self) -> None:
        """A sign of life in work that is long and gives none, such as one batch of an evaluation."""
        self._beats.beat()

    # --- saving ---------------------------------------------------------------------------------------------

    @scope.uninterrupted
    def save(self, *, reason: str = "asked", diagnostic: bool = False, wait: bool = True) -> CheckpointName:
        """Save now, at a step boundary. A diagnostic save lives apart and is never resumed from.

        With `checkpoint.async_save`, `wait=False` returns as soon as training may go on; a failure is then
        told at a later step, and at the end.
        """
        if self._in_step:
            raise UsageError(f"save() in the middle of step {self.step + 1}; call it between steps")
        self._before_save()
        assert self._saving is not None
        if not diagnostic and (why := self._doubt()):
            raise SaveFailedError(
                f"step {self.step} is not saved: {why}. Go back to an older checkpoint; to look at this one, "
                "call save(diagnostic=True)"
            )
        with self._checkpointing(waits=wait):
            return self._saving.save("diagnostic" if diagnostic else reason, diagnostic=diagnostic, wait=wait)

    @scope.uninterrupted
    def wait_for_saves(self) -> None:
        """Wait until nothing is being saved any more; raise on every rank what went wrong on any."""
        self._joined()
        assert self._saving is not None
        with self._checkpointing(waits=True):
            self._saving.wait("a save that was under way")

    def _before_save(self) -> None:
        self._meter.flush(self._joined()[1].journal)
        if self._validation is not None:
            self._validation.before_save()

    def _doubt(self) -> str:
        """Why the state must not be saved as a good one, not even at an end; the same on every rank."""
        return self._validation.doubt(Severity.NONFINITE) if self._validation is not None else ""

    @contextlib.contextmanager
    def _checkpointing(self, *, waits: bool = False) -> Iterator[None]:
        """The section of a save. Waiting for a writer process has a deadline of its own, a long one."""
        if self._stragglers is not None:
            self._stragglers.spoil()
        chosen = self.settings.checkpoint
        longest = chosen.timeout + EXCHANGE_SLACK
        at_least = 2 * longest if waits and chosen.async_save else 0.0
        with (
            scope.critical(max(longest, at_least)),
            self._beats.section(CHECKPOINTING, at_least=at_least, learn=not chosen.async_save),
        ):
            yield

    def _diagnose(self) -> str:
        """A save of the state as it is in the middle of a step, to be looked at; its name, or why not."""
        assert self._saving is not None
        with self._checkpointing(waits=True):
            return self._saving.diagnose()

    def _on_rerun(self) -> None:
        """A step that is run again may take as long again before it counts as a hang."""
        self._beats.leave(STEP, learn=False)
        self._beats.enter(STEP)

    # --- the end --------------------------------------------------------------------------------------------

    @scope.uninterrupted
    def finish(self) -> None:
        """The run has reached its end: save the last state (once), and say so in the journal."""
        group, member = self._joined()
        assert self._saving is not None
        self._before_save()
        with self._checkpointing(waits=True):
            self._saving.finish(self.step, doubt=self._doubt())
        self._around.saved(self._saving)
        if group.is_coordinator:
            samples, tokens = self._meter.of_the_job()
            member.journal.write(
                RunFinished(step=self.step, samples=samples, tokens=tokens, counts=OF_THE_JOB)
            )
            if self._launched is None:
                member.journal.write(AttemptEnded(outcome="finished", last_step=self.step))
        self._leave("finished", ExitCode.OK)
        self._leave_group(group)

    @scope.uninterrupted
    def close(self) -> None:
        """Give everything back. Does nothing after `finish`; before it, the attempt counts as stopped."""
        if self._member is None:
            self._halting.close("unused", 0)
        if self._member is None or self._closed:
            return
        error = self._crash or sys.exc_info()[1]
        failed, unseen = self._around.judge(error)
        outcome = "failed" if failed else "stopped"
        self._meter.flush(self._member.journal, read_device=not failed)
        if self._launched is None and self._joined()[0].is_coordinator:
            self._member.journal.write(AttemptEnded(outcome=outcome, last_step=self.step))
        code = error.exit_code if isinstance(error, HoldfastError) else ExitCode.FAILED
        self._leave(outcome, code, unseen=unseen)

    def _left_behind(self) -> None:
        """The restartable function that made this run was left: unless it closed the run, that has failed."""
        self._crash = self._crash or scope.RestartRequested("its function was left")
        self.close()

    def _stop_if_reached(self) -> None:
        """The run was asked to stop. Goes on if that is not to be here; else saves, once, and stops."""
        if not self._halting.reached(self.step):
            return
        group, member = self._joined()
        assert self._saving is not None
        self._before_save()
        with self._checkpointing(waits=True):
            kept = self._saving.stop(self.step, doubt=self._doubt())
        self._halting.saved(kept, self.step)
        self._beats.halted(self.step)
        if group.is_coordinator and self._launched is None:
            member.journal.write(AttemptEnded(outcome="stopped", last_step=self.step))
        self._leave("stopped", ExitCode.STOPPED)
        self._leave_group(group)
        raise Stopped(self.step, self._halting.stopping.why)

    def _leave_group(self, group: Group) -> None:
        """At the end of all ranks alike."""
        if self._pinging is not None:
            self._pinging.close()
        self._group = leave_group(group)

    def _leave(self, outcome: str, code: ExitCode, *, unseen: bool = False) -> None:
        assert self._member is not None
        self._closed = True
        if self._fault is not None:
            self._fault.disarm()
        if outcome == "failed":
            self._around.failed(self._halting)
        if self._stragglers is not None:
            self._stragglers.close()
        ending = "failed" if unseen else outcome
        self._halting.close("asked" if code is ExitCode.STOPPED else ending, self.step)
        # From here on every wait is bounded. What the script does afterwards has limits of its own, by which
        # its sections are watched too; but an error that ends this rank has to end it sooner.
        if outcome == "failed":
            self._beats.failing()
        else:
            self._beats.exiting()
        self._parts.leave(self._member, outcome, code, unseen=unseen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        if error is None and self._member is not None and not self._closed:
            self.finish()
        self.close()

    # --- what a loop may want to know -----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps completed."""
        return self._meter.step

    @property
    def samples(self) -> int:
        """Of all ranks since the run began: the others' as of the last save, this one's as of now."""
        return self._meter.of_the_job()[0]

    @property
    def tokens(self) -> int:
        """The same, of tokens."""
        return self._meter.of_the_job()[1]

    @property
    def attempt(self) -> int:
        return self._joined()[1].attempt

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop; the loop goes on until `end_step` raises `Stopped`."""
        return self._halting.stopping.asked

    @property
    def head(self) -> CheckpointName | None:
        """The newest checkpoint of this timeline: the one resumed from, or the last one saved."""
        return self._saving.head if self._saving is not None else None

    @property
    def _saving(self) -> Saving | None:
        return self._parts.saving

    @property
    def _validation(self) -> Validation | None:
        return self._parts.validation

    def _joined(self) -> tuple[Group, Membership]:
        if self._group is None or self._member is None:
            raise UsageError("the run has not started: call run.start(), or iterate over run.steps()")
        return self._group, self._member

    def _on_lease_lost(self, why: str) -> None:
        self._lost = why

    def _on_crash(self, error: BaseException) -> None:
        # A run that is not closed by now is closed after this, and then no longer sees why; the launcher may
        # end this process before that, so what is known of the last steps is written now.
        self._crash = error
        self._beats.failing()
        if self._member is not None and self._closed:
            self._member.crashed(error)
        elif self._member is not None:
            self._meter.flush(self._member.journal, read_device=False)
