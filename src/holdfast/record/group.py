"""Who this rank is, how the ranks reach each other, and the few exchanges that a save needs.

The store is for decisions; the process group is for the planning of DCP and for saves only. It is a group of
its own on gloo, because the collectives of DCP must never mix with those of training. Only what reaches other
ranks imports torch: to know who a rank is takes none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from holdfast.base import leavable
from holdfast.errors import UsageError
from holdfast.record.decisions import Store

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    rank: int
    world_size: int
    store: Store
    process_group: dist.ProcessGroup | None
    """None when this rank is alone."""
    backend: str = ""
    """Of the training group, for the record."""

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0


def join_group(timeout: float) -> Group:
    """The group as it is now. All ranks call this together, after torch's own set-up."""
    import torch.distributed as dist

    from holdfast.base import default_store

    if dist.is_available() and dist.is_initialized():
        default = default_store()
        # Every rank starts the same runs in the same order, so its own count keeps their keys apart.
        number = default.add(f"holdfast/starts/{dist.get_rank()}", 1)
        store = dist.PrefixStore(f"holdfast/{number}", default)
        world = dist.get_world_size()
        group = _new_group(timeout) if world > 1 else None
        return Group(dist.get_rank(), world, store, group, str(dist.get_backend()))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise UsageError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group before the run starts, so that the ranks can agree"
        )
    return Group(0, 1, dist.HashStore(), None)


def _new_group(timeout: float) -> dist.ProcessGroup:
    import torch.distributed as dist

    with leavable():  # torch waits for all ranks here; what it leaves behind goes with all other groups
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        return group


def leave_group(group: Group) -> Group:
    """End the group made for saves, on all ranks alike, after the last one; what is left is this rank alone.

    It must not live on until the interpreter ends: the threads of a gloo group that is alive then may need
    the interpreter once more, and abort the process after all its work is done.
    """
    if group.process_group is not None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group(group.process_group)
    return replace(group, process_group=None)


# The few exchanges that a save needs between ranks, over the group made for saves.
#
# `add_up` is the one that every save makes: a handful of integers, summed over all ranks. The others run only
# when something has changed or failed. None of them ever touches a group of the training.


T = TypeVar("T")

_WRAP = 1 << 64


def add_up(group: Group, numbers: Sequence[int]) -> list[int]:
    """Each number's sum over all ranks, modulo 2^64, as signed; every rank gets the same."""
    own = [_signed(number) for number in numbers]
    if group.process_group is None:
        return own
    import torch
    import torch.distributed as dist

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
    import torch.distributed as dist

    found: list[T | None] | None = [None] * group.world_size if group.is_coordinator else None
    dist.gather_object(value, found, dst=0, group=group.process_group)
    return cast("list[T] | None", found)


def scatter(group: Group, values: list[T] | None) -> T:
    """This rank's value of those that rank 0 gives."""
    if group.process_group is None:
        assert values is not None
        return values[0]
    import torch.distributed as dist

    mine: list[T | None] = [None]
    dist.scatter_object_list(mine, values, src=0, group=group.process_group)
    return cast("T", mine[0])


def share(group: Group, value: T) -> list[T]:
    """Every rank's value, on every rank."""
    if group.process_group is None:
        return [value]
    import torch.distributed as dist

    found: list[T | None] = [None] * group.world_size
    dist.all_gather_object(found, value, group=group.process_group)
    return cast("list[T]", found)
