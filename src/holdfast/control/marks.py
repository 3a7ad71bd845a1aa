"""Marks in the environment by which processes are recognised, whoever their parent is by now.

A process's parent, group and session say where it belongs only until it leaves them. What it was started with
stays: `/proc/<pid>/environ`. Standard library only, so that any process may read it at no cost.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

AGENT = "HOLDFAST_AGENT"
"""Which agent a process descends from: `<pid>.<start time>`, unique until the next boot."""
OUTLIVES = "HOLDFAST_OUTLIVES"
"""Set for a process that may outlive the trainer which started it: `<module> <trainer's pid>`."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers and people ask a whole job to end."""


def outliving(module: str) -> dict[str, str]:
    """The environment for a process of ours, run as `-m module`, that may outlive this one."""
    return {**os.environ, OUTLIVES: f"{module} {os.getpid()}"}


@contextlib.contextmanager
def stopping_blocked() -> Iterator[None]:
    """Around the start of such a process, which inherits it: while it starts, nothing can be ignored yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_stopping_to_the_trainer() -> None:
    """For such a process: schedulers signal every process of a job; what that means, the trainer decides."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
