"""The few exchanges that a save needs between ranks, over the group made for saves.

`add_up` is the one that every save makes: a handful of integers, summed over all ranks. The others run only
when something has changed or failed. None of them ever touches a group of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from holdfast.control.group import Group

T = TypeVar("T")

_WRAP = 1 << 64


def add_up(group: Group, numbers: Sequence[int]) -> list[int]:
    """Each number's sum over all ranks, modulo 2^64, as signed; every rank gets the same."""
    own = [_signed(number) for number in numbers]
    if group.process_group is None:
        return own
    summed = torch.tensor(own, dtype=torch.int64)
    dist.all_reduce(summed, group=group.process_group)
    return cast("list[int]", summed.tolist())


def _signed(number: int) -> int:
    wrapped = number % _WRAP
    return wrapped - _WRAP if wrapped >= _WRAP // 2 else wrapped


def gather(group: Group, value: T) -> list[T] | None:
    """Every rank's value, on rank 0; None elsewhere."""
    if group.process_group is None:
        return [value]
    found: list[T | None] | None = [None] * group.world_size if group.is_coordinator else None
    dist.gather_object(value, found, dst=0, group=group.process_group)
    return cast("list[T] | None", found)


def scatter(group: Group, values: list[T] | None) -> T:
    """This rank's value of those that rank 0 gives."""
    if group.process_group is None:
        assert values is not None
        return values[0]
    mine: list[T | None] = [None]
    dist.scatter_object_list(mine, values, src=0, group=group.process_group)
    return cast("T", mine[0])


def share(group: Group, value: T) -> list[T]:
    """Every rank's value, on every rank."""
    if group.process_group is None:
        return [value]
    found: list[T | None] = [None] * group.world_size
    dist.all_gather_object(found, value, group=group.process_group)
    return cast("list[T]", found)
