"""What a process holds that a run, or an iteration, might leave behind in it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

KEPT_ALIVE = ("Run", "Halting", "LeaseKeeper", "Validation", "Saving")
"""Objects of a run that must not outlive it: they hold the model."""


def held() -> dict[str, int]:
    gc.collect()
    handlers = sum(
        signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN) for number in signal.valid_signals()
    )
    hooks, hook = 0, sys.excepthook
    while (owner := getattr(hook, "__self__", None)) is not None and hasattr(owner, "_previous"):
        hooks, hook = hooks + 1, owner._previous
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": len(_children()),
        "shared memory": _shared(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "handlers": handlers,
        "hooks": hooks,
        "objects": sum(type(one).__name__ in KEPT_ALIVE for one in gc.get_objects()),
    }


def _shared() -> int:
    """Mappings of this process that others could share: staged snapshots, queues, semaphores."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("/dev/shm/" in line or "/memfd:" in line or "holdfast" in line for line in maps)


def _children() -> list[str]:
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += (task / "children").read_text().split()
    return found


def grown(before: dict[str, int], timeout: float = 10.0) -> dict[str, int]:
    """What there is more of once all that is on its way out has had time to end; stderr has the details."""
    deadline = time.monotonic() + timeout
    while True:
        now = held()
        found = {key: now[key] - before[key] for key in now if now[key] > before[key]}
        if not found:
            return found
        if time.monotonic() >= deadline:
            links = [_link(name) for name in sorted(os.listdir("/proc/self/fd"), key=int)]
            threads = [thread.name for thread in threading.enumerate()]
            print(f"more than before: {found}\n{links}\n{threads}", file=sys.stderr, flush=True)
            return found
        time.sleep(0.05)


def _link(name: str) -> str:
    try:
        return f"{name} {Path('/proc/self/fd', name).readlink()}"
    except OSError:
        return name
