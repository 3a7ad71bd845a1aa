"""Who this rank is, and how the ranks reach each other for decisions and saves.

The store is for decisions; the process group is for DCP's planning only. It is a group of its own on gloo,
because DCP's collectives must never mix with those of training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from holdfast.control.decisions import Store
from holdfast.errors import UsageError
from holdfast.scope import leavable
from holdfast.torch_internals import default_store


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
    if dist.is_available() and dist.is_initialized():
        default = default_store()
        # Every rank starts the same runs in the same order, so its own count keeps their keys apart.
        number = default.add(f"holdfast/starts/{dist.get_rank()}", 1)
        store = PrefixStore(f"holdfast/{number}", default)
        world = dist.get_world_size()
        group = _new_group(timeout) if world > 1 else None
        return Group(dist.get_rank(), world, store, group, str(dist.get_backend()))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise UsageError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group before the run starts, so that the ranks can agree"
        )
    return Group(0, 1, HashStore(), None)


def _new_group(timeout: float) -> dist.ProcessGroup:
    with leavable():  # torch waits for all ranks here; what it leaves behind goes with all other groups
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        return group


def leave_group(group: Group) -> Group:
    """End the group made for saves, on all ranks alike, after the last one; what is left is this rank alone.

    It must not live on until the interpreter ends: the threads of a gloo group that is alive then may need
    the interpreter once more, and abort the process after all its work is done.
    """
    if group.process_group is not None and dist.is_initialized():
        dist.destroy_process_group(group.process_group)
    return replace(group, process_group=None)
