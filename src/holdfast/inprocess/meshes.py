"""What torch keeps of device meshes and DTensors beyond their groups' end, and must not take into new ones.

Two meshes over the same ranks count as equal. So what DTensor has in its caches (torch 2.11 and 2.13) for a
mesh of the last iteration is what it hands out for one of the next: results with the old mesh, and with
that the old groups, which 2.13 keeps in the mesh itself. And DTensor's random numbers go on where they
were, in place of starting as in a new process.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any


def forget_meshes() -> bool:
    """In the main thread; for other threads' caches too, if they are Python's. Whether there were any."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return False
    found = False
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _random, _redistribute, debug

    clear: Callable[[], None] = debug._clear_sharding_prop_cache
    clear()
    clear_plans = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_plans is not None:  # torch 2.11 has no such cache
        clear_plans()
    _random._rng_tracker = None
    for one in gc.get_objects():
        # By its exact type: to ask an object itself would run code of whatever is there.
        if type(one) is DeviceMesh:
            found = True
            _drop_groups(one)
        elif type(one) is functools._lru_cache_wrapper and one.__module__.startswith("torch.distributed."):
            one.cache_clear()  # some belong to functions inside of functions, with no name to be found by
    return found


def _drop_groups(mesh: Any) -> None:
    """A thread of torch's own may still have it in a cache: it then finds the new group of that name."""
    groups = mesh.__dict__.get("_pg_registry")
    if groups is not None:
        groups.clear()
