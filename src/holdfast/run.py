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
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from holdfast.base import scope
from holdfast.checkpoint.format import CheckpointName
from holdfast.checkpoint.state import Split
from holdfast.config import Settings
from holdfast.errors import LeaseLostError, UsageError
from holdfast.policy import SETUP, STEP
from holdfast.session import Session
from holdfast.train.check import RecordedFeed
from holdfast.train.data import DataFeed

T = TypeVar("T")


class Run:
    """One process's part in a run. Settings as keywords are spelt `<section>_<key>`."""

    @scope.uninterrupted
    def __init__(self, file: str | os.PathLike[str] | None = None, /, **settings: object) -> None:
        self._session = session = Session(file, settings)
        self._meter, self._beats, self._halting = session.meter, session.beats, session.halting
        self._in_step = self._looping = False

    @property
    def settings(self) -> Settings:
        return self._session.settings

    # --- before the first step ------------------------------------------------------------------------------

    def track(self, *, layout: Mapping[str, Split | str] | None = None, **parts: object) -> None:
        """Make these objects part of every checkpoint, under the given names.

        `layout` is for plain tensors that differ between ranks, by patterns of full names: a `holdfast.Split`
        says of which larger tensor each rank holds a part, and "lowest" that another number of ranks takes
        the lowest rank's. What is not declared is kept for each rank, and refused at another number of ranks.
        """
        if self._session.joined:
            raise UsageError("track() came after the run started; track everything before the first step")
        if layout is not None:
            self._session.tracked.division.declare(layout)
        for name, thing in parts.items():
            self._session.tracked.add(name, thing)

    def ignore(self, *things: object) -> None:
        """Leave these out of the checkpoint on purpose: an optimizer, a schedule, a gradient scaler or a
        loader that may start afresh at a resume. Anything else that the run trains with untracked is an error
        at the end of its first step."""
        for thing in things:
            self._session.tracked.ignore(thing)

    def feed(self, loader: Iterable[Any]) -> DataFeed:
        """Hand the loader to the run; iterate over what this returns instead. Call it before `start`."""
        session = self._session
        if session.joined:
            raise UsageError("feed() came after the run started; a data position is restored before iter()")
        if session.feed is not None:
            raise UsageError("feed() was called twice; a run has one data feed")
        self._halting.spare(loader)
        trusted = session.settings.checkpoint.data_position == "trusted"
        session.feed = RecordedFeed(loader, trusted=trusted)
        session.feed.alive = self._beats.beat
        return session.feed

    def add_check(self, name: str, check: Callable[[float], object]) -> None:
        """Add a check of your own, on every rank: given its loss, it rejects the step by True or a text."""
        if self._session.joined:
            raise UsageError("add_check() came after the run started; add every check before the first step")
        self._session.checks.add(name, check)

    @scope.uninterrupted
    def start(self) -> int:
        """Join the attempt and resume. Returns the number of steps already done."""
        if not self._session.joined:
            if not self._session.tracked.names():
                raise UsageError(
                    "nothing is tracked: call run.track(model=…, optimizer=…) before the first step"
                )
            self._session.start()
        return self.step

    # --- the loop -------------------------------------------------------------------------------------------

    def steps(
        self, loader: Iterable[Any], *, until: int, batches: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) until `until` steps are done, resuming first; saves as set, and at the end.

        With `batches`, each step gets a list of that many, for gradients accumulated within a step.
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
        session = self._session
        if not session.joined:
            raise UsageError("begin_step() before start(): the run has not resumed yet")
        if self._in_step:
            raise UsageError(f"begin_step() twice: step {self.step + 1} was not ended")
        if not self._looping:
            self._looping = True
            self._beats.leave(SETUP)
            self._halting.stopping.begin()
            self._stop_if_reached()
            session.saving.stepping()
        self._in_step = True
        session.tracked.gradients.begin_step()
        self._beats.enter(STEP)
        self._meter.begin_step()
        session.validation.begin_step()

    def compute(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call the step's forward and backward; its result, if it is a single number, is the step's loss.

        The result is checked on all ranks together before this returns; a rejected one is computed again, or
        dropped, as the settings say. Every rank makes as many calls in a step as the others.
        """
        session = self._session
        if not session.joined:
            raise UsageError("compute() before start(): the run has not resumed yet")
        stragglers = session.stragglers
        timed = stragglers.around(function) if stragglers is not None else function
        result: T = session.validation.compute(timed, args, kwargs)
        if stragglers is not None:
            stragglers.arrived()
        if isinstance(result, float) or (isinstance(result, torch.Tensor) and result.numel() == 1):
            self._meter.record(loss=result)
        return result

    def check(self, loss: float | torch.Tensor | None = None) -> bool:
        """For loops that do not call `compute`: whether to use this step, after backward and on every rank.

        False: it was dropped on all ranks, and its gradients with it. Nothing is computed again here.
        """
        if not self._session.joined:
            raise UsageError("check() before start(): the run has not resumed yet")
        if loss is not None:
            self._meter.record(loss=loss)
        return self._session.validation.check(loss)

    @property
    def dropped(self) -> bool:
        """Whether this step was dropped: an optimizer that is not torch's own must then skip it."""
        return self._session.dropped

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
        """The step is complete: count it, and save if a save is due. `last` leaves the save to `finish`.

        Raises `Stopped`, after saving the state, if the run was asked to stop and all ranks stop here.
        """
        if not self._in_step:
            raise UsageError("end_step() without begin_step()")
        self._in_step = False
        session, saving, validation = self._session, self._session.saving, self._session.validation
        stragglers = session.stragglers
        if stragglers is not None:
            stragglers.end_step()
        if session.feed is not None:
            self._meter.first_batch(session.feed.first_drawn)
        self._meter.end_step()
        step = self._meter.step
        session.tracked.gradients.end_step()
        session.around.stepped(step)
        self._beats.step_done(step)
        if session.fault is not None:
            session.fault.arm()
        if session.lost:
            raise LeaseLostError(f"this attempt lost its lease: {session.lost}")
        assert session.pinging is not None
        session.pinging.at_boundary(step)
        assert session.forgotten is not None
        if (scaled := session.forgotten.at_boundary(step)) is not None:
            validation.scaled = scaled
        validation.completed(step)
        saving.at_boundary()
        if not last:
            if stragglers is not None:
                stragglers.meet(step)
            self._stop_if_reached()
        due = session.schedule.due(step)
        if due and not last:
            session.save_as_due(due)
        elif self._meter.flush_due():
            self._meter.flush(session.member.journal)
        if not due and not last:
            session.plan_ahead()
        session.around.saved(saving)
        if stragglers is not None:
            stragglers.begin_step()

    def _stop_if_reached(self) -> None:
        """Save and stop if asked to and if all ranks are to stop here; else go on."""
        if self._halting.stopping.asked and self._halting.reached(self.step):
            self._session.stop()

    def section(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A named span of the loop: watched by its own limit in monitor.rank_section_timeouts, if it has one,
        and measured where stragglers are looked for. It may wait for other ranks in collectives only."""
        stragglers = self._session.stragglers
        if stragglers is None:
            return self._beats.section(name)
        return stragglers.section(name, self._beats.section(name))

    def beat(self) -> None:
        """A sign of life in long work that gives none by itself, such as one batch of an evaluation."""
        self._beats.beat()

    # --- saving ---------------------------------------------------------------------------------------------

    @scope.uninterrupted
    def save(self, *, reason: str = "asked", diagnostic: bool = False, wait: bool = True) -> CheckpointName:
        """Save now, at a step boundary. A diagnostic save lives apart and is never resumed from.

        With `checkpoint.async_save`, `wait=False` returns as soon as training may go on; a failure is then
        raised at a later step or at the end.
        """
        if self._in_step:
            raise UsageError(f"save() in the middle of step {self.step + 1}; call it between steps")
        return self._session.save(reason, diagnostic=diagnostic, wait=wait)

    @scope.uninterrupted
    def wait_for_saves(self) -> None:
        """Wait until nothing is being saved any more; raise on every rank what went wrong on any."""
        saving = self._session.saving
        with self._session.checkpointing(waits=True):
            saving.wait("a save that was under way")

    # --- the end --------------------------------------------------------------------------------------------

    @scope.uninterrupted
    def finish(self) -> None:
        """The run has reached its end: save the last state (once), and say so in the journal."""
        self._session.finish()

    def close(self) -> None:
        """Give everything back. Does nothing after `finish`; before it, the attempt counts as stopped."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        if error is None and self._session.joined and not self._session.left:
            self.finish()
        self.close()

    # --- what a loop may want to know -----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps completed."""
        return self._meter.step

    @property
    def samples(self) -> int:
        """Samples of all ranks since the run began: the others' as of the last save, this one's as of now."""
        return self._meter.of_the_job()[0]

    @property
    def tokens(self) -> int:
        """Tokens, counted like `samples`."""
        return self._meter.of_the_job()[1]

    @property
    def attempt(self) -> int:
        return self._session.member.attempt

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop; the loop goes on until `end_step` raises `Stopped`."""
        return self._halting.stopping.asked

    @property
    def head(self) -> CheckpointName | None:
        """The newest checkpoint of this timeline: the one resumed from, or the last one saved."""
        return self._session.head
