"""A site's own check of a node: a command of theirs, `health.command`, and what its end means.

Guarantee: it ends within its time limit and whatever it started with it, however much it prints; only its
last words are kept. Its exit code is the whole answer: 0 is fit, 3 could not tell, all else is unfit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from holdfast.health.result import Check
from holdfast.journal.text import printable
from holdfast.policy.health import CheckResult, Ended, Status, judge_site

NAME = "health.command"
WORDS = 600
"""Bytes of what it said last that are kept."""
POLL = 0.05
MARGIN = 10.0
"""Seconds beyond its limit in which it is ended and read."""

Wrap = Callable[[Sequence[str]], list[str]]


def site_check(command: str, timeout: float, wrap: Wrap | None = None) -> Check:
    """The check as the others are run. `wrap`: makes a command line of one that dies with who starts it."""
    return Check(
        name=NAME,
        look=lambda: run_site_command(command, timeout, wrap),
        deadline=timeout + MARGIN,
        hung=Status.CRITICAL,
        fix="it hangs in the kernel: look at what it does, and at the node",
    )


def run_site_command(command: str, timeout: float, wrap: Wrap | None = None) -> CheckResult:
    """Run it in a shell, in the directory and environment of whoever asks, and say what came of it."""
    argv: Sequence[str] = ["/bin/sh", "-c", command]
    began = time.monotonic()
    process = subprocess.Popen(
        wrap(argv) if wrap is not None else argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    assert process.stdout is not None
    with process.stdout as said:
        words, ended = _listen(process.pid, said.fileno(), began + timeout)
        # Not reaped yet, so its process group's number cannot be anybody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(MARGIN / 2)
    told = printable(" ".join(words.decode(errors="replace").split()), WORDS)
    took = time.monotonic() - began
    return judge_site(NAME, Ended(code=process.returncode if ended else None, words=told), timeout, took)


def _listen(pid: int, fd: int, deadline: float) -> tuple[bytes, bool]:
    """Its last words, and whether it ended in time; a child of it that keeps on talking is not waited for."""
    os.set_blocking(fd, False)
    words, open_ = b"", True
    while True:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        left = deadline - time.monotonic()
        wait = 0.0 if ended else max(0.0, min(POLL, left))
        if open_ and select.select([fd], [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                data = os.read(fd, 65536)
                words, open_ = (words + data)[-WORDS:], bool(data)
                if data and left > 0:
                    continue
        elif not open_ and not ended:
            time.sleep(wait)  # it has closed its output and works on; its end can only be looked for
        if ended or left <= 0:
            return words, ended
