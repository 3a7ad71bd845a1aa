"""What the ranks have to agree on in a step, in one small exchange.

Guarantee: every rank gets the same answer, the gravest that any rank gave, and only for the same call of the
same step: ranks that are elsewhere are told so, instead of being paired up wrongly. A rank that is
alone exchanges nothing. The exchange runs over the group that Holdfast made for itself; its deadline is that
group's own, and a rank that is gone ends it at once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from holdfast.control.group import Group
from holdfast.errors import UsageError

_CALLS = 1 << 20
"""More calls than a step has."""


class Severity(IntEnum):
    FINE = 0
    ODD = 1
    """Finite, and yet rejected by some check: a spike, an outlier, a check of the user's own."""
    NONFINITE = 2


class Agreed(NamedTuple):
    severity: Severity = Severity.FINE
    breach: bool = False
    """What was loaded does not go on from where it was."""
    heard: bool = False
    """A result was a single number, so its loss was looked at."""
    bad: int = 0
    """Of steps that are complete: how many were found not to be finite, at most on one rank."""
    still: Severity = Severity.FINE
    """And what the last one was."""
    pending: bool = False
    """Of some of them a device has not told yet."""
    forgot: bool = False
    """A part of the training is not tracked."""
    scales: bool = False
    """There is a gradient scaler to look at."""


class Agreement:
    """One for an attempt; the few numbers that are exchanged are always in the same memory."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._numbers = torch.zeros(10, dtype=torch.int64)
        self.exchanges = 0

    def agree(self, own: Agreed, step: int, call: int, *, again: bool = False) -> Agreed:
        """`again`: about the same call, which was made for a second time."""
        if self._group.process_group is None:
            return own
        at = step * _CALLS + 2 * call + again
        numbers = self._numbers
        numbers.copy_(torch.tensor([*own, at, -at], dtype=torch.int64))
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group.process_group)
        self.exchanges += 1
        *found, highest, lowest = numbers.tolist()
        if highest != -lowest:
            raise UsageError(
                f"rank {self._group.rank} is in step {step}, in its call {call} of run.compute() or "
                f"run.check(); another rank is in step {highest // _CALLS}, call {highest % _CALLS // 2}. "
                "Every rank must make as many calls in a step as the others"
            )
        severity, breach, heard, bad, still, *flags = found
        return Agreed(Severity(severity), bool(breach), bool(heard), bad, Severity(still), *map(bool, flags))

    @property
    def ranks(self) -> int:
        return self._group.world_size

    def worst(self, own: float, known: float) -> tuple[float, int]:
        """The largest value of all ranks, and, where that is more than `known`, the first rank that has it.

        `known` is the same on all ranks, and so is the answer.
        """
        if self._group.process_group is None:
            return own, self._group.rank
        value = torch.tensor([own], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group.process_group)
        largest = float(value.item())
        if largest <= known:
            return largest, 0
        rank = torch.tensor([self._group.rank if own == largest else self._group.world_size])
        dist.all_reduce(rank, op=dist.ReduceOp.MIN, group=self._group.process_group)
        return largest, int(rank.item())
