"""The keeper: ends what an agent leaves behind when it is killed itself.

Workers die with their agent by the kernel's hand (process/guard.py), but what they started in other sessions
does not: with the agent gone, the kernel gives it to init, and nothing tells whose it was. What stays is its
environment. Every agent marks its own (`HOLDFAST_AGENT`), every descendant inherits the mark, and this
process, which waits for the agent's end, kills whoever has it.

Guarantee: within moments of the agent's end, however it ended, nothing that descends from it is alive, but
checkpoint writers and drain processes (orphans.py), and these for a bounded time. Not found is a process that
gave up its environment as well as its session; the agent finds such ones too, while it lives. A keeper that
is killed is replaced by its agent; who kills both at once is left with the kernel's promise about workers.

It imports neither torch nor anything else that is large: about 15 MB and a tenth of a second, once a launch.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from holdfast.launch import say
from holdfast.launch.workers.orphans import PATIENCE, recognise
from holdfast.process import AGENT, Process, leave_stopping_to_the_trainer, own_child, proc

POLL = 0.05
LOOK = 1.0
"""Seconds between two looks at the parent, where the kernel cannot tell of its end."""
KILL_PATIENCE = 30.0
"""Seconds after which a process that SIGKILL has not ended is left: it hangs in the kernel."""
REPLACEMENTS = 3


def mark_environment() -> str:
    """Mark this process as an agent, for all that it starts hereafter. An outer agent's mark is replaced."""
    mark = _mark_of(os.getpid())
    os.environ[AGENT] = mark
    return mark


def _mark_of(pid: int) -> str:
    found = proc.read(pid)
    return f"{pid}.{found.started if found is not None else 0}"


class Keeper:
    """The agent's side."""

    def __init__(self, outlive: float, scratch: Sequence[str] = ()) -> None:
        """`outlive`: seconds for which a writer may go on without the agent; `scratch`: its directories."""
        self._outlive = outlive
        self._scratch = scratch
        self._process: subprocess.Popen[bytes] | None = None
        self._replaced = 0

    def start(self) -> int:
        """Mark this process's environment and start a keeper; its id. Raises OSError if that fails."""
        mark = mark_environment()
        arguments = [str(os.getpid()), mark, repr(self._outlive), *self._scratch]
        self._process = subprocess.Popen(
            own_child("holdfast.launch.workers.sweeper", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # what ends the agent's session or group must not end its keeper
        )
        return self._process.pid

    def check(self) -> tuple[int | None, str]:
        """Replace a keeper that died, a few times. The new one's id, if any, and what to tell people."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None, ""
        self._process = None
        if self._replaced >= REPLACEMENTS:
            return None, f"the keeper process ended {self._replaced + 1} times ({code}) and is not replaced"
        self._replaced += 1
        try:
            return self.start(), f"the keeper process ended ({code}) and was replaced"
        except OSError as error:
            return None, f"the keeper process ended ({code}) and another cannot be started: {error}"


# --- the process -------------------------------------------------------------------------------------------


def await_end(pid: int) -> None:
    """Until our parent, the agent, is gone."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)  # before the look at the parent: then it stands for the agent
    poll = select.poll()
    if fd >= 0:
        poll.register(fd, select.POLLIN)
    while os.getppid() == pid:
        poll.poll(LOOK * 1000)


def end_the_rest(mark: str, outlive: float) -> tuple[int, int]:
    """Kill what has the mark until nothing is left that can be; how many were killed, how many are left."""
    began = time.monotonic()
    killed: set[tuple[int, int]] = set()
    while True:
        mortal, outliving = _sort(mark)
        late = time.monotonic() - began
        if late >= outlive:
            mortal, outliving = mortal + outliving, []
        if not mortal and not outliving:
            return len(killed), 0
        for process in mortal:
            if proc.send(process, signal.SIGKILL):
                killed.add(process.identity)
        if mortal and not outliving and late >= max(outlive, 0.0) + KILL_PATIENCE:
            return len(killed), len(mortal)
        time.sleep(POLL if mortal or late < LOOK else LOOK)


def _sort(mark: str) -> tuple[list[Process], list[Process]]:
    """Processes with the mark: those to be ended at once, and those that may go on for a while."""
    mortal, outliving = [], []
    for process in proc.everyone().values():
        if process.ended or process.pid == os.getpid() or not _has(process, mark):
            continue
        recognised = recognise(process)
        if recognised is None or recognised[0]:
            outliving.append(process)
        else:
            mortal.append(process)
    return mortal, outliving


def _has(process: Process, mark: str) -> bool:
    # What started before the agent cannot descend from it; most of a machine's processes did.
    if process.started < int(mark.rpartition(".")[2]):
        return False
    environment = proc.within(PATIENCE, lambda: proc.environment(process.pid))
    return environment is not None and environment.get(AGENT) == mark


def _remove(scratch: Sequence[str]) -> None:
    for path in scratch:
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    leave_stopping_to_the_trainer()  # here: to the agent
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    agent, mark, outlive, scratch = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]
    if _mark_of(agent) == mark:
        await_end(agent)
    _remove(scratch)  # a writer that goes on needs none of it, and may take long
    killed, left = end_the_rest(mark, outlive)
    _remove(scratch)  # what a worker wrote while it was ended
    if killed:
        say(f"the launcher is gone; ended {killed} processes that it left")
    if left:
        say(f"{left} of them hang in the kernel and do not end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
