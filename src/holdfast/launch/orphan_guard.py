"""Ties a worker's life to its agent's, then becomes the worker.

Guarantee: a worker never outlives its agent, also when the agent is killed with SIGKILL. The kernel is asked
(PR_SET_PDEATHSIG) to kill this process when its parent dies; the request survives exec. If the parent died
before the request was made, this process ends at once.

Run by path, isolated and with the standard library only, so that it costs a few milliseconds and leaves
nothing behind in the worker: the command it executes sees its own arguments, environment and interpreter.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def guarded(command: Sequence[str], parent: int | None = None) -> list[str]:
    """The command line that runs `command` as one that dies with its parent: the caller, or as given."""
    tied_to = os.getpid() if parent is None else parent
    return [sys.executable, "-I", "-S", os.path.realpath(__file__), str(tied_to), *command]


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; end at once if it is not `parent` any more."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        print(f"holdfast: cannot tie this worker to its agent: {os.strerror(number)}", file=sys.stderr)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"holdfast: cannot execute {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main())
