"""The `holdfast` command in a process in which nothing more can be started.

The first argument says from which start on, or is `store`: then torch's store is what finds no room for its
thread, and says so in the words of C++.
"""

from __future__ import annotations

import errno
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

MAIN = os.getpid()
FULL = "Resource temporarily unavailable"


def limited(start: Callable[..., Any], left: list[int], error: Callable[[], Exception]) -> Callable[..., Any]:
    def started(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() == MAIN:
            left[0] -= 1
            if left[0] < 0:
                raise error()
        return start(*args, **kwargs)

    return started


def no_store(*_: Any, **__: Any) -> Any:
    raise RuntimeError(FULL)


def main(kind: str) -> None:
    if kind == "store":
        import torch.distributed

        stores: Any = torch.distributed
        stores.TCPStore = no_store
    else:
        left = [int(kind)]
        starts: Any = threading.Thread
        starts.start = limited(starts.start, left, lambda: RuntimeError("can't start new thread"))
        runs: Any = subprocess.Popen
        runs._execute_child = limited(runs._execute_child, left, lambda: BlockingIOError(errno.EAGAIN, FULL))
    runpy.run_module("holdfast", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    chosen = sys.argv.pop(1)
    main(chosen)
