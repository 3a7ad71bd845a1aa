"""Stages what can be copied later from host memory: chooses between fork and block, and forks.

Only plain tensors in memory that a fork freezes are left to a child; all others are for the call to copy
(stage.py). A fork that fails costs nothing but a warning, because the call then copies. A child that fails
costs its save; from then on, in this attempt, nothing is left to one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from holdfast.checkpoint import fork_stage
from holdfast.checkpoint.failures import naming
from holdfast.checkpoint.fork_child import Bytes, Work
from holdfast.checkpoint.fork_stage import ForkedCopy
from holdfast.checkpoint.frozen_memory import Frozen, frozen, host_memory
from holdfast.checkpoint.snapshot import Snapshot
from holdfast.checkpoint.staging import Buffer
from holdfast.checkpoint.writer import check_size, plain
from holdfast.policy.host_snapshot import HostChoice, choose_on_host
from holdfast.policy.snapshot import Choice, Setting

log = logging.getLogger("holdfast.checkpoint")

Tell = Callable[[Choice | HostChoice], None]
"""Called with a choice that differs from the one before."""


class Later(NamedTuple):
    """A tensor that a child may copy."""

    at: int
    """Its position in the snapshot."""
    source: Bytes


class HostStager:
    """Forks for the snapshots of one rank."""

    def __init__(
        self, setting: Setting, *, timeout: float, step_seconds: Callable[[], float | None], tell: Tell
    ) -> None:
        self._setting = setting
        self._timeout = timeout
        self._step_seconds = step_seconds
        self._tell = tell
        self._told = ""
        self._missing: str | None = None
        self._trouble = ""
        """What went wrong with a fork before; from then on there is none."""
        self._copy_seconds: float | None = None
        self._flights: list[ForkedCopy] = []

    def choose(self, snapshot: Snapshot) -> list[Later]:
        """What is to be left to a child now: nothing, where the policy chooses to block."""
        if self._setting != "fork":
            return []
        self._look_back()
        try:
            view = frozen()
            later, obstacle = _frozen_in(view, snapshot), self._obstacle(view)
            memory = host_memory(_ranks_here())
        except OSError as error:
            later, obstacle, memory = [], f"the kernel does not tell what a fork freezes: {error}", None
        choice = choose_on_host(
            self._setting,
            needed_bytes=sum(one.source.nbytes for one in later),
            # A child that is still at work may yet come to hold as much as the next one.
            private_bytes=memory.private * (1 + len(self._flights)) if memory is not None else 0,
            free_bytes=memory.free if memory is not None else 0,
            host_bytes=memory.total if memory is not None else 0,
            cores=_cores(),
            copy_seconds=self._copy_seconds,
            step_seconds=self._step_seconds(),
            obstacle=obstacle or ("" if later else "none of the state is in memory that a fork freezes"),
        )
        self._say(choice)
        return later if choice.way == "fork" else []

    def begin(
        self, later: Sequence[Later], snapshot: Snapshot, buffer: Buffer, shares: int
    ) -> ForkedCopy | None:
        """Fork a child that copies them; None if that cannot be, which was told, and nothing is lost."""
        items = snapshot.plan.layout.items
        for one in later:
            check_size(items[one.at], one.source.nbytes)
        works = [
            Work(one.source, items[one.at].raw_offset, one.at in snapshot.prints, place)
            for place, one in enumerate(later)
        ]
        known = [snapshot.prints.get(one.at, "") for one in later]
        try:
            flight = fork_stage.begin(works, buffer.descriptor, known, shares=shares, timeout=self._timeout)
        except OSError as error:
            self._trouble = f"a fork failed: {error}"
            warning = f"{self._trouble}; blocking instead, from now on"
            self._say(HostChoice(way="block", evidence=[self._trouble], warning=warning))
            return None
        self._flights.append(flight)
        return flight

    def was_torn(self) -> None:
        self._trouble = self._trouble or "a snapshot of this run did not match its fingerprints"

    def close(self) -> None:
        """No child is left when this returns; bounded."""
        for flight in self._flights:
            flight.end()
        self._flights = []

    def _look_back(self) -> None:
        """What came of the children before counts now."""
        under_way = []
        for flight in self._flights:
            if not flight.done():
                under_way.append(flight)
            elif flight.problem:
                self._trouble = self._trouble or f"a child that copied a snapshot failed: {flight.problem}"
            else:
                self._copy_seconds = flight.copy_seconds()
        self._flights = under_way

    def _obstacle(self, view: Frozen) -> str:
        if self._missing is None:
            self._missing = fork_stage.missing_here()
        if self._trouble or self._missing:
            return self._trouble or self._missing
        if _uses_a_device():
            return "torch has initialised a device in this process"
        return f"this process has mapped a device ({view.device})" if view.device else ""

    def _say(self, choice: HostChoice) -> None:
        kind = f"{choice.way} {choice.warning.partition(':')[0]}"  # what follows has numbers, which change
        if kind != self._told:
            self._told = kind
            self._tell(choice)


def _frozen_in(view: Frozen, snapshot: Snapshot) -> list[Later]:
    """Those tensors that a fork freezes as they are. A copy made to be contiguous gains nothing by a fork."""
    found = []
    for at, tensor in enumerate(snapshot.tensors):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.nbytes:
            with naming(snapshot.plan.layout.items[at].name):
                raw = plain(tensor)
            start = raw.data_ptr()
            if start == tensor.data_ptr() and view.holds(start, start + raw.nbytes):
                found.append(Later(at, raw.numpy()))
    return found


def _uses_a_device() -> bool:
    kinds = (getattr(torch, name, None) for name in ("cuda", "xpu", "mtia"))
    return any(kind is not None and kind.is_initialized() for kind in kinds)


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1") or "1")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) // max(1, _ranks_here())
