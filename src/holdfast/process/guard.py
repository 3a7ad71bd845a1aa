"""Ties a worker's life to its agent's, then becomes the worker.

Guarantee: a worker never outlives its agent, even if the agent is killed with SIGKILL. The kernel is asked
(PR_SET_PDEATHSIG) to kill this process when its parent dies; the request survives exec. If the parent died
before the request was made, this process ends at once.

It is run by path, isolated and with only the standard library, so that it costs a few milliseconds and leaves
nothing behind in the worker: the command it executes sees its own arguments, environment and interpreter.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def guarded(command: Sequence[str], parent: int | None = None) -> list[str]:
    """The command line that runs `command` so that it dies with `parent`, by default the caller."""
    tied_to = os.getpid() if parent is None else parent
    return [sys.executable, "-I", "-S", os.path.realpath(__file__), str(tied_to), *command]


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; end at once if the parent is no longer `parent`."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        _complain(f"cannot tie this worker to its agent: {os.strerror(number)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _complain(text: str) -> None:
    """Print a line as `holdfast.base.lines` does, which cannot be imported here."""
    import json
    import time

    rank = os.environ.get("RANK", "")
    if os.environ.get("HOLDFAST_LOG_FORMAT") == "json":
        now = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime())}+00:00"
        number = int(rank) if rank.isdecimal() else None
        host = os.uname().nodename
        fields = {"time": now, "level": "error", "source": "rank", "rank": number, "host": host}
        print(json.dumps({**fields, "attempt": None, "kind": "error", "text": text}), file=sys.stderr)
    else:
        print(f"{time.strftime('%H:%M:%S')} holdfast[rank {rank}]: {text}", file=sys.stderr)


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        _complain(f"cannot execute {command[0]}: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main())
