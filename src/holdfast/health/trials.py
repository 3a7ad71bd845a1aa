"""Running checks, each with its own deadline; and a site's own check.

Guarantee: never longer than the longest deadline, and never an error raised. A check that hangs (a dead
mount, a sick driver) cannot be interrupted, so it is left behind in its daemon thread, and its result is what
the check says a hang means. One that raises could not look, which is `unknown`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.base import Bounded, printable
from holdfast.health.judgements import CheckResult, CommandEnded, HealthStatus, judge_site

Looked = CheckResult | Sequence[CheckResult]


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    look: Callable[[], Looked]
    deadline: float = 5.0
    hung: HealthStatus = HealthStatus.UNKNOWN
    """The status if it does not end in time."""
    fix: str = ""
    """What to do about a hang."""


def run_checks(checks: Sequence[Check]) -> list[CheckResult]:
    """Run all checks at once. Results come in the order given, whichever ends first."""
    running = [_Running(check) for check in checks]
    return [result for one in running for result in one.results()]


class _Running:
    def __init__(self, check: Check) -> None:
        self._check = check
        self._began = time.monotonic()
        self._looking = Bounded(self._look, f"check-{check.name}")

    def _look(self) -> list[CheckResult]:
        began = time.monotonic()
        try:
            looked = self._check.look()
            found = [looked] if isinstance(looked, CheckResult) else list(looked)
        except Exception as error:  # noqa: BLE001 - a sick machine may fail in any way
            text = f"could not be looked at: {type(error).__name__}: {error}"[:300]
            found = [CheckResult(name=self._check.name, status=HealthStatus.UNKNOWN, found=text)]
        took = time.monotonic() - began
        return [one if one.seconds else msgspec.structs.replace(one, seconds=round(took, 4)) for one in found]

    def results(self) -> list[CheckResult]:
        if self._looking.ended(self._began + self._check.deadline - time.monotonic()):
            return self._looking.result()
        limit = self._check.deadline
        return [
            CheckResult(
                name=self._check.name,
                status=self._check.hung,
                found=f"no answer within {limit:g} s: it hangs",
                expected=f"an answer within {limit:g} s",
                fix=self._check.fix,
                seconds=limit,
            )
        ]


class ProgramAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a program that was asked."""

    code: int | None = None
    """Its exit code; None if the program is missing or did not end in time."""
    out: str = ""
    err: str = ""
    missing: bool = False
    hung: bool = False


def ask(command: Sequence[str], timeout: float, environ: Mapping[str, str] | None = None) -> ProgramAnswer:
    """Run a program for its output. One that cannot even be killed is left behind and not waited for."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
        )
    except OSError as error:
        return ProgramAnswer(missing=True, err=str(error))
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        process.terminate()  # before a kill: so srun ends what it started elsewhere
        return ProgramAnswer(
            hung=True,
            out=(_end(process) or expired.output or b"").decode(errors="replace"),
            err=f"{command[0]} did not answer within {timeout:g} s",
        )
    return ProgramAnswer(
        code=process.returncode, out=out.decode(errors="replace"), err=err.decode(errors="replace")
    )


def _end(process: subprocess.Popen[bytes]) -> bytes:
    """End it, and return what it had said by then. One that hangs in the kernel is not waited for."""
    for patience in (1.0, 0.5):
        try:
            return process.communicate(timeout=patience)[0] or b""
        except subprocess.TimeoutExpired as expired:
            said = expired.output or b""
            process.kill()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    return said


# A site's own check of a node: a command of theirs, `health.command`, and what its end means.
#
# Guarantee: it ends within its time limit, together with whatever it started, however much it prints; only
# its last words are kept. Its exit code is the whole answer: 0 is fit, 3 could not tell, all else is unfit.


NAME = "health.command"
WORDS = 600
"""How many bytes of its last words are kept."""
POLL = 0.05
MARGIN = 10.0
"""Seconds beyond its limit for ending it and reading the rest."""

Wrap = Callable[[Sequence[str]], list[str]]


def site_check(command: str, timeout: float, wrap: Wrap | None = None) -> Check:
    """The site's check, to be run like the others. `wrap`: makes a command die with whoever starts it."""
    return Check(
        name=NAME,
        look=lambda: run_site_command(command, timeout, wrap),
        deadline=timeout + MARGIN,
        hung=HealthStatus.CRITICAL,
        fix="it hangs in the kernel: look at what it does, and at the node",
    )


def run_site_command(command: str, timeout: float, wrap: Wrap | None = None) -> CheckResult:
    """Run it in a shell, in the caller's directory and environment, and say what came of it."""
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
    return judge_site(
        NAME, CommandEnded(code=process.returncode if ended else None, words=told), timeout, took
    )


def _listen(pid: int, fd: int, deadline: float) -> tuple[bytes, bool]:
    """Its last words, and whether it ended in time; a child of it that goes on printing is not waited for."""
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
            time.sleep(wait)  # it has closed its output but still runs; all we can do is look for its end
        if ended or left <= 0:
            return words, ended
