"""The one harness for tests with processes: hard timeouts, and nothing left behind.

Every process of a job inherits a marker in its environment, so that orphans are found too, whoever their
parent is by then. Leaving the `with` block kills what is left and fails the test if something had to be.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

REPO = Path(__file__).resolve().parents[2]
MARKER = "HFTEST_JOB"

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout: float, what: str) -> T:
    """Poll until `condition()` is truthy and return it; fail the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what}: not within {timeout:g} s")
        time.sleep(0.01)


def free_port() -> int:
    """One that nobody listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not reaped does not."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def stood_at(pid: int) -> Path:
    """Where a forked child that is aborted writes the stacks of its threads."""
    return Path(tempfile.gettempdir()) / f"holdfast-test-{os.getuid()}-{pid}.stacks"


def tell_where_it_stood() -> None:
    """In a forked child: what `await_child` shows of it if it does not end. pytest swallows stderr."""
    faulthandler.enable(stood_at(os.getpid()).open("w"))


def await_child(pid: int, timeout: float) -> int:
    """The exit code of a forked child, as subprocess gives it; fail the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    stacks = stood_at(pid)
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        waits = {task.name: (task / "wchan").read_text() for task in Path(f"/proc/{pid}/task").iterdir()}
        os.kill(pid, signal.SIGABRT)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not is_alive(pid), 5, "its last words")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        stood = stacks.read_text() if stacks.exists() else "it left no stacks"
        raise AssertionError(f"process {pid} was still running after {timeout:g} s, in {waits}:\n{stood}")
    finally:
        stacks.unlink(missing_ok=True)


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Job:
    """A command and everything it started."""

    def __init__(self, argv: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> None:
        self.marker = uuid.uuid4().hex
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
        environment.update({"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}, **(env or {}))
        environment[MARKER] = self.marker
        self._out = cwd / f".job-{self.marker[:8]}.out"
        self._err = cwd / f".job-{self.marker[:8]}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                argv, cwd=cwd, env=environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def processes(self) -> dict[int, str]:
        """Live processes of this job: pid → command line."""
        found: dict[int, str] = {}
        wanted = f"{MARKER}={self.marker}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X"):
                    continue
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def output(self) -> Result:
        out = self._out.read_text(errors="replace") if self._out.exists() else ""
        err = self._err.read_text(errors="replace") if self._err.exists() else ""
        return Result(self.process.returncode if self.process.returncode is not None else -999, out, err)

    def wait(self, timeout: float = 60.0) -> Result:
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s\n{self.output().text}") from None
        return self.output()

    def kill_everything(self) -> dict[int, str]:
        """SIGKILL what is left; returns what that was."""
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        wait_until(lambda: not self.processes(), 10, "killed processes end")
        return left


@contextlib.contextmanager
def job(
    argv: list[str], *, cwd: Path, env: dict[str, str] | None = None, may_leave: bool = False
) -> Iterator[Job]:
    """Run a command; on leaving, nothing of it may be alive (a second of grace) unless `may_leave`."""
    running = Job(argv, cwd=cwd, env=env)
    failed = True
    try:
        yield running
        failed = False
    finally:
        deadline = time.monotonic() + 1.0
        while not failed and running.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        left = running.kill_everything()
        for path in (running._out, running._err):
            path.unlink(missing_ok=True)
    assert may_leave or not left, f"processes left behind: {left}"


def python(script: Path | str, *args: str) -> list[str]:
    return [sys.executable, str(script), *args]


def holdfast(*args: str) -> list[str]:
    return [sys.executable, "-m", "holdfast", *args]


def finish(argv: list[str], *, cwd: Path, env: dict[str, str] | None = None, timeout: float = 60.0) -> Result:
    """Run a command to its end."""
    with job(argv, cwd=cwd, env=env) as running:
        return running.wait(timeout)
