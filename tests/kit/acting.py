"""Real launchers told to act: what their workers saw, what was decided and recorded, what they left."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.journal import events
from holdfast.journal.reader import read_journal
from holdfast.record.attempts import AttemptRecord, EndRecord, ends_of
from holdfast.record.directory import ControlDirectory
from holdfast.record.launches import LaunchInfo
from kit.commands import command
from kit.harness import REPO, Job, Result, finish, holdfast, wait_until

ACTS = str(REPO / "tests" / "scripts" / "faults" / "acts.py")
TORCHS_OWN = "torchinductor_"
"""How a cache that torch keeps under the temporary directory begins."""
MOMENT = 20.0
"""Seconds for what should happen at once, on a machine whose cores others may have for a while."""


class Seen(NamedTuple):
    """One worker's beginning, as it saw itself."""

    attempt: int
    rank: int
    world: int
    pid: int
    node: str
    devices: str


class Place:
    """The working directory of one test, and a temporary directory for all that its launchers start."""

    def __init__(self, cwd: Path, tmp: Path) -> None:
        self.cwd = cwd
        self.tmp = tmp

    def environment(self, **more: str) -> dict[str, str]:
        return {"TMPDIR": str(self.tmp), **more}

    def wrap(self, **more: str) -> Any:
        """For `Cluster.start`: an agent in this environment."""
        words = [f"{name}={value}" for name, value in self.environment(**more).items()]
        return lambda argv: ["env", *words, *argv]

    def launch(self, *flags: str, acts: str, name: str = "n", run: str = "run") -> list[str]:
        plain = ("--no-preload", "--set", f"launch.node_name={name}", "--set", "launch.stop_grace=0.3")
        return holdfast("run", "--run-dir", run, *plain, *flags, ACTS, acts, "log")

    def finish(self, argv: list[str], timeout: float = 90.0, **more: str) -> Result:
        return finish(argv, cwd=self.cwd, env=self.environment(**more), timeout=timeout)

    def control(self, action: str, *words: str) -> None:
        """`holdfast control …`, which must be recorded."""
        done = command("control", action, self.cwd / "run", *words)
        assert done.code == 0, done.text

    def status(self) -> dict[str, Any]:
        told = json.loads(command("status", self.cwd / "run", "--json").out)
        assert isinstance(told, dict)
        return told

    # -- what was seen and recorded -------------------------------------------------------------------------

    def seen(self, attempt: int | None = None, log: str = "log") -> list[Seen]:
        """The workers that have begun, by attempt and rank."""
        path = self.cwd / log
        words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        found = [Seen(*map(int, line[:4]), line[4], line[5]) for line in words]
        return sorted(one for one in found if attempt in (None, one.attempt))

    def await_workers(self, running: Job, attempt: int, count: int = 1) -> list[Seen]:
        """Until so many workers of an attempt have begun."""
        wait_until(
            lambda: len(self.seen(attempt)) >= count or running.process.poll() is not None,
            60,
            f"{count} workers of attempt {attempt}",
        )
        found = self.seen(attempt)
        assert len(found) >= count, running.output().text
        return found

    def run(self) -> ControlDirectory:
        return ControlDirectory.open(self.cwd / "run")

    def attempts(self) -> list[tuple[AttemptRecord, EndRecord | None]]:
        return ends_of(self.run())

    def outcomes(self) -> list[str]:
        return [end.outcome if end is not None else "none" for _, end in self.attempts()]

    def journalled(self, kind: type[Any]) -> list[Any]:
        lines = read_journal(self.cwd / "run" / "journal")
        return [line.body for line in lines if isinstance(line.body, kind)]

    def decisions(self) -> list[events.DecisionMade]:
        return [one for one in self.journalled(events.DecisionMade) if one.about == "recovery"]

    def told(self) -> list[LaunchInfo]:
        """What each attempt's rank 0 was told by the launcher."""
        lines = (self.cwd / "told").read_text().splitlines()
        return [msgspec.json.decode(line, type=LaunchInfo) for line in lines]

    def go(self, gate: str = "go") -> None:
        """Let the workers that wait for this file go on."""
        (self.cwd / gate).touch()


def stays(condition: Callable[[], bool], what: str, seconds: float = 1.5) -> None:
    """What must not happen has this long to happen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), what
        time.sleep(0.05)


def _listening() -> set[int]:
    """Ports of this machine on which somebody listens."""
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        states = [line.split() for line in lines]
        found |= {int(words[1].rpartition(":")[2], 16) for words in states if words[3] == "0A"}
    return found


def nothing_left(place: Place) -> None:
    """No process in this test's temporary directory, no file in it, no port of its attempts."""
    wanted = f"TMPDIR={place.tmp}".encode()

    def living() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or wanted not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found

    wait_until(lambda: not living(), MOMENT, f"the end of {living()}")
    there = [path.relative_to(place.tmp) for path in place.tmp.rglob("*")]
    left = sorted(str(path) for path in there if not path.parts[0].startswith(TORCHS_OWN))
    assert not left, f"left under the temporary directory: {left}"
    if (place.cwd / "run").is_dir():
        masters = [one.master for one in place.journalled(events.WorkersStarted)]
        held = {int(master.rpartition(":")[2]) for master in masters} & _listening()
        assert not held, f"ports of attempts that are over: {held}"


@contextlib.contextmanager
def clean_place(cwd: Path) -> Iterator[Place]:
    """A place whose temporary directory must be as empty after the test as before."""
    tmp = Path(tempfile.mkdtemp(prefix="hfacts-", dir="/tmp"))  # short: sockets lie in it
    found = Place(cwd, tmp)
    try:
        yield found
        nothing_left(found)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
