"""Stopping on request for loops that do not use `Run`.

```python
with holdfast.ShutdownHandler(timeout=300) as stop:
    for step in range(done, until):
        train_one_step()
        if stop.should_stop(step):
            save(step)
            break
```
Guarantee: `should_stop` is True after the same step on every rank, without a collective; a signal to any one
of them is enough. By the deadline the process has left the block, or is ended with its stacks written down.
Where Slurm ends the job, the deadline is what Slurm leaves; rank 0 asks Slurm, and says at the start how much
that is. A second signal ends the process at once. See agreement.py for how it works.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.cluster import TimeLimit, current_job, node_name
from holdfast.config import StopSettings, parse_signals
from holdfast.errors import UsageError
from holdfast.policy import Deadline, Grace, StopRequest, closer_by, deadline
from holdfast.stop.agreement import LastStep, RankStop, signalled
from holdfast.stop.signals import StopDeadline, StopFile, StopSignals

log = logging.getLogger("holdfast")

PATIENCE = 600.0
"""Seconds to wait for the other ranks' promises where no deadline is set."""
SLACK = 30.0
"""Seconds to wait beyond a deadline, which ends the process before they are over."""
_DEFAULTS = StopSettings()


class ShutdownHandler:
    """A context manager around a training loop, used on every rank alike."""

    def __init__(
        self,
        signals: str | Iterable[str | int] = _DEFAULTS.exit_signal,
        timeout: float = _DEFAULTS.shutdown_timeout_sec,
        group: Any = None,
        *,
        stop_file: str | os.PathLike[str] | None = None,
        stacks: str | os.PathLike[str] | None = None,
    ) -> None:
        """`timeout`: seconds from the request until the block must have been left; 0 for no limit.

        `group`: whose ranks agree: a process group; a pair of a c10d store and (rank, world size); or None
        for the default group, or for this process alone if there is none. `stop_file`: a file that asks for
        a stop too, once it exists (rank 0 looks for it). `stacks`: a file for what every thread was doing
        when the deadline passed.
        """
        text = signals if isinstance(signals, str) else ",".join(_name(one) for one in signals)
        try:
            numbers = parse_signals(text)
        except ValueError as error:
            raise UsageError(f"ShutdownHandler(signals={signals!r}): {error}") from error
        if timeout < 0:
            raise UsageError(f"ShutdownHandler(timeout={timeout!r}): seconds are 0 or more")
        self._timeout = timeout
        self._group = group
        self._file = StopFile(Path(stop_file), self._warn) if stop_file is not None else None
        self._step = 0
        self._rank = 0
        self._stopping = LastStep(lambda: self._step)
        self._deadline = StopDeadline()
        if stacks is not None:
            self._deadline.write_to(Path(stacks))
        self._signals = StopSignals(numbers, self._on_signal)
        self._over_store: RankStop | None = None
        self._job_end: TimeLimit | None = None
        self._used = False

    def __enter__(self) -> Self:
        if self._used:
            raise UsageError("a ShutdownHandler can be used only once; make a new one for another loop")
        self._used = True
        store, self._rank, world = _reach(self._group)
        self._over_store = RankStop(
            self._stopping,
            store,
            self._rank,
            world,
            heard=self._heard,
            agreed=lambda step: log.warning("holdfast: all ranks stop after step %d", step),
            unanswered=lambda who: self._deadline.arm(0.0, f"{who}, so there is no step to stop after"),
            hastened=self._hasten,
            look=self._file.request if self._file is not None and self._rank == 0 else None,
        )
        if self._rank == 0 and (job := current_job()) is not None:
            self._job_end = TimeLimit(job, 0.0, on_grace=self._tell_grace, on_ending=self._over_store.hasten)
        self._signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        self._signals.close()
        self._deadline.disarm()
        if self._job_end is not None:
            self._job_end.close()
        if self._over_store is not None:
            self._over_store.close(self._step, failed=error is not None)

    def should_stop(self, step: int | None = None) -> bool:
        """Whether to save and leave the loop now. Every rank must call it after the same steps.

        `step`: the number of the step that is done, rising; without it the calls are counted.
        """
        self._step = self._step + 1 if step is None else step
        self._stopping.begin()
        if not self._stopping.asked:  # after the two lines above: see agreement.py
            return False
        left = self._deadline.left
        return self._stopping.reached(self._step, PATIENCE if left is None else left + SLACK)

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for; `should_stop` says when."""
        return self._stopping.asked

    @property
    def why(self) -> str:
        """Who or what asked; empty while nobody has."""
        return self._stopping.why

    # --- on threads -----------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        self._arm()
        assert self._over_store is not None
        self._over_store.wish(signalled(number, self._signals.sender(number), self._rank, node_name()))

    def _warn(self, told: str) -> None:
        log.warning("holdfast: %s", told)

    def _heard(self, request: StopRequest) -> None:
        self._arm()
        if self._job_end is not None:
            self._job_end.ask_again()
        left = self._deadline.left
        limit = "no deadline is set" if left is None else f"{left:.0f} s until the hard deadline"
        limit += closer_by(self._grace, request, Deadline(left, ""))
        log.warning("holdfast: asked to stop: %s; %s", request.detail, limit)

    @property
    def _grace(self) -> Grace | None:
        return self._job_end.grace if self._job_end is not None else None

    def _tell_grace(self, grace: Grace) -> None:
        if not self._timeout or self._timeout > grace.seconds:
            log.warning(
                "holdfast: Slurm leaves %g s from SIGTERM to SIGKILL (%s) when it preempts the job: a step "
                "and a save must fit into that, whatever ShutdownHandler(timeout=%g) says",
                grace.seconds,
                grace.why,
                self._timeout,
            )

    def _hasten(self, lead: float) -> None:
        """Rank 0 has learned from Slurm that it ends the job in `lead` seconds."""
        closer = self._deadline.hasten(lead) if self._stopping.asked else None
        if closer is not None:
            log.warning("holdfast: the stop must be over within %.1f s: %s", closer.seconds, closer.why)

    def _arm(self) -> None:
        limit = deadline(self._timeout, None)
        self._deadline.arm(limit.seconds, f"{self._timeout:g} s from the request")


def _name(one: str | int) -> str:
    return one if isinstance(one, str) else signal.Signals(one).name


def _reach(group: Any) -> tuple[Any, int, int]:
    """The store through which the ranks agree, this rank, and how many there are."""
    if isinstance(group, tuple):
        store, (rank, world) = group
        return _numbered(store, rank, ""), int(rank), int(world)
    distributed: Any = sys.modules.get("torch.distributed")  # if not imported, there is no group either
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            raise UsageError(
                f"WORLD_SIZE is {world} but torch.distributed is not initialised. Call "
                "torch.distributed.init_process_group before ShutdownHandler, so that the ranks can agree"
            )
        return None, 0, 1
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise UsageError("this rank is not a member of the group that was given to ShutdownHandler")
    name = group.group_name if group is not None else ""
    from holdfast.base import default_store  # torch is imported already, so this costs little

    default = default_store()
    return _numbered(default, rank, str(name)), rank, world


def _numbered(store: Any, rank: int, name: str) -> Any:
    """The store under this handler's own prefix: every rank makes the same handlers in the same order."""
    from torch.distributed import PrefixStore  # the store is torch's, so torch is installed

    number = store.add(f"holdfast/shutdown/{name}/{rank}", 1)
    return PrefixStore(f"holdfast/shutdown/{name}/{number}", store)
