"""Running checks: each with a deadline of its own, all at the same time.

Guarantee: never longer than the longest deadline, and never an error raised. A check that hangs (a dead
mount, a sick driver) cannot be interrupted, so it is left behind in its daemon thread and counts as what it
says a hang means; one that raises could not look, which is `unknown`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.bounded import Bounded
from holdfast.policy.health import CheckResult, Status

Looked = CheckResult | Sequence[CheckResult]


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    look: Callable[[], Looked]
    deadline: float = 5.0
    hung: Status = Status.UNKNOWN
    """What it means if it does not end in time."""
    fix: str = ""
    """What to do about that."""


def run_checks(checks: Sequence[Check]) -> list[CheckResult]:
    """In the order in which they are given, whichever ends first."""
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
        except Exception as error:  # noqa: BLE001 - a machine that is ill may fail in any way
            text = f"could not be looked at: {type(error).__name__}: {error}"[:300]
            found = [CheckResult(name=self._check.name, status=Status.UNKNOWN, found=text)]
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


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Of a program that was asked."""

    code: int | None = None
    """None if it is not there, or did not end in time."""
    out: str = ""
    err: str = ""
    missing: bool = False
    hung: bool = False


def ask(command: Sequence[str], timeout: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Run a program for what it says. One that cannot even be killed is left behind, and not waited for."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
        )
    except OSError as error:
        return Answer(missing=True, err=str(error))
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        process.terminate()  # first: srun then ends what it started elsewhere
        return Answer(
            hung=True,
            out=(_end(process) or expired.output or b"").decode(errors="replace"),
            err=f"{command[0]} did not answer within {timeout:g} s",
        )
    return Answer(code=process.returncode, out=out.decode(errors="replace"), err=err.decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> bytes:
    """What it had said by then. One that hangs in the kernel is not waited for."""
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
