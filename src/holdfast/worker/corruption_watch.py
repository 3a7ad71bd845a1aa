"""The silent corruption watch: now and then a micro-batch is computed twice, if possible by two devices.

A device that computes wrongly without any error gives numbers that look like any others. Every so many steps
each rank's micro-batch, with its random numbers, goes to the next rank; all ranks compute their neighbour's
together, so that collectives inside the step match; and the two losses are compared. Where arguments cannot
be passed on, or a rank is alone, the step is computed twice here, and the gradients' norm is compared too.

Guarantee: afterwards gradients, buffers, scalers, random numbers and what was recorded are as they were
before. All ranks take part alike, and know the same outcome. `policy.disagreement` says who is accused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from holdfast.checkpoint.state import Tracked
from holdfast.control.group import Group
from holdfast.policy.disagreement import judge
from holdfast.policy.rejection import Place
from holdfast.worker.checking import read_together, single_number
from holdfast.worker.determinism import difference
from holdfast.worker.gradients import Gradients
from holdfast.worker.neighbour import exchange, pack
from holdfast.worker.rng import capture_rng

log = logging.getLogger("holdfast")

ROW = 512
"""Bytes in which a rank tells what it saw."""
PLACE = 150
"""Characters of a place's name that are told."""

Call = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Computes the micro-batch of these arguments, with whatever it draws for itself served again."""


class State(Protocol):
    """A rank's state at one moment, to go back to: `worker.rerun.Rewind`."""

    def capture(self) -> None: ...

    def restore(self) -> None: ...

    def release(self) -> None: ...


class _Row(msgspec.Struct, frozen=True, array_like=True):
    place: str
    own: float | None
    """The loss of this rank's micro-batch, here."""
    neighbours: float | None
    """The loss of the micro-batch of the rank before, here."""


class CorruptionWatch:
    """One for a rank."""

    def __init__(
        self,
        interval: int,
        tolerance: float,
        *,
        group: Group,
        tracked: Tracked,
        place: Place,
        state: Callable[[], State],
    ) -> None:
        self._interval = interval
        self._tolerance = tolerance
        self._group = group
        self._place = f"{place.node}/{place.device}" if place.device else place.node
        self._gradients = Gradients(tracked.models())
        self._only_here = group.process_group is None or bool(tracked.generators())
        """Generators of the user's own are not passed on."""
        self._held = False
        self._told: set[str] = set()
        self._make_state = state
        self._before: State | None = None
        self._after: State | None = None
        self._random: dict[str, Any] = {}
        self._noted = False
        self.compared = 0
        """How many micro-batches were compared."""

    def due(self, step: int) -> bool:
        """Whether the step's first micro-batch is to be computed twice; alike on all ranks."""
        return self._interval > 0 and step % self._interval == 0

    def before(self) -> None:
        """The micro-batch is about to be computed for the first time."""
        if self._before is None:
            self._before, self._after = self._make_state(), self._make_state()
        self._before.capture()
        self._random = capture_rng()
        self._noted = True

    def compare(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[str]:
        """Compute it for a second time and say what is wrong, on the ranks that are accused. All ranks call
        this together, after `before` and the first computation, whose `result` is given."""
        assert self._noted
        assert self._before is not None
        assert self._after is not None
        self._noted = False
        loss, norm = self._read(result)
        self._after.capture()
        try:
            self._before.restore()
            packed = "" if self._only_here else pack(args, kwargs)
            if self._all_can(packed if loss is not None else "the step's result is not a single number"):
                assert not isinstance(packed, str)
                reasons = self._there(call, *exchange(packed, self._random, self._group), loss)
            else:
                reasons = self._here(call, args, kwargs, loss, norm)
        finally:
            self._after.restore()
            self._before.release()
            self._after.release()
        self.compared += 1
        return reasons

    def _here(self, call: Call, args: Any, kwargs: Any, loss: float | None, norm: float | None) -> list[str]:
        again, norm_again = self._read(call(args, kwargs))
        told = f"computed twice on rank {self._group.rank} ({self._place})"
        reasons = []
        if difference(loss, again) > self._tolerance:
            reasons.append(f"the micro-batch gave the loss {loss}, then {again}, {told}")
        if difference(norm, norm_again) > self._tolerance:
            reasons.append(f"the micro-batch gave gradients of norm {norm}, then {norm_again}, {told}")
        return reasons

    def _there(self, call: Call, args: Any, kwargs: Any, loss: float | None) -> list[str]:
        theirs, _ = self._read(call(args, kwargs))
        rows = self._gather(_Row(self._place[:PLACE], loss, theirs))
        world, rank = len(rows), self._group.rank
        differs = [
            difference(rows[i].own, rows[(i + 1) % world].neighbours) > self._tolerance for i in range(world)
        ]
        found = judge(differs, held_before=self._held)
        self._held = self._held or not any(differs)
        if not found.suits:
            self._only_here = True
            self._tell(
                "the corruption watch compares on each rank alone from now on: the micro-batches of "
                f"{sum(differs)} of {world} ranks gave another loss on the next rank, which no single device "
                "does. The model may be split over ranks, a step may take data from elsewhere than its "
                "arguments, or results differ by more than validation.rerun_tolerance"
            )
            return []
        if rank not in found.accused:
            return []
        return [
            f"the micro-batch of rank {i} gave the loss {rows[i].own} there ({rows[i].place}) and "
            f"{rows[(i + 1) % world].neighbours} on rank {(i + 1) % world} ({rows[(i + 1) % world].place})"
            for i in ((rank - 1) % world, rank)
            if differs[i]
        ]

    def _all_can(self, packed: Any) -> bool:
        """Whether every rank can pass its arguments on, and all are built alike."""
        if self._group.process_group is None or self._only_here:
            return False
        cannot = isinstance(packed, str)
        shape = 0 if cannot else packed.shape
        numbers = torch.tensor([int(cannot), shape, -shape])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group.process_group)
        some_cannot, highest, lowest = numbers.tolist()
        if not some_cannot and highest == -lowest:
            return True
        why = packed if cannot else "another rank's arguments cannot be passed on, or are built otherwise"
        self._tell(f"the corruption watch computes twice on each rank, not on a neighbour: {why}")
        return False

    def _gather(self, row: _Row) -> list[_Row]:
        encoded = msgspec.msgpack.encode(row)
        mine = torch.zeros(ROW, dtype=torch.uint8)
        mine[: 1 + 1 + len(encoded)] = torch.tensor([*divmod(len(encoded), 256), *encoded], dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self._group.world_size)]
        dist.all_gather(rows, mine, group=self._group.process_group)
        told = [bytes(row.tolist()) for row in rows]
        return [msgspec.msgpack.decode(raw[2 : 2 + raw[0] * 256 + raw[1]], type=_Row) for raw in told]

    def _read(self, result: Any) -> tuple[float | None, float | None]:
        return read_together(single_number(result), self._gradients.norms())

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning("holdfast: %s", message)
