"""A run that is stopped: where its ranks are, what asked for it, and what must be true afterwards."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.errors import ExitCode
from holdfast.journal.events.stops import StopAgreed, StopAsked, StopForced, StopSaved
from kit.harness import REPO, Job, Result, holdfast, wait_until
from kit.runs import ends, journalled
from kit.tiny import checkpoints

SCRIPT = str(REPO / "tests" / "scripts" / "train" / "train_stop.py")
ROOM = 30.0
"""Seconds from the request to the end, on a machine whose cores others have as well; 5 s on a free one."""


def launch(*flags: str, ranks: int = 2) -> list[str]:
    return holdfast("run", "--nproc-per-node", str(ranks), "--run-dir", "run", *flags, SCRIPT, "log")


def steps(cwd: Path) -> dict[int, list[int]]:
    """Rank → the steps it has begun, of the processes that began last."""
    found: dict[int, list[int]] = {}
    for path in sorted(cwd.glob("log.*.*"), key=lambda one: one.stat().st_mtime_ns):
        found[int(path.name.split(".")[1])] = [int(line) for line in path.read_text().split()]
    return found


def pid_of(cwd: Path, rank: int) -> int:
    (path,) = cwd.glob(f"log.{rank}.*")
    return int(path.name.rpartition(".")[2])


def await_step(running: Job, cwd: Path, step: int, ranks: int = 2) -> None:
    """Until every rank has begun this step."""

    def there() -> bool:
        done = steps(cwd)
        return len(done) == ranks and all(one and one[-1] >= step for one in done.values())

    wait_until(lambda: there() or running.process.poll() is not None, 90, f"step {step} on {ranks} ranks")
    assert there(), running.output().text


def await_end(running: Job, asked: float) -> Result:
    """The end of a run that was asked to stop at this time."""
    result = running.wait(60)
    assert time.monotonic() - asked < ROOM, f"{time.monotonic() - asked:.1f} s\n{result.text}"
    wait_until(lambda: not running.processes(), 5, "no process of the run is left")
    return result


def stopped_well(cwd: Path, result: Result, source: str, words: str, ranks: int = 2) -> int:
    """All stopped after one step, which one save holds; that step."""
    assert result.code == ExitCode.STOPPED, result.text
    assert "Traceback" not in result.err, result.text
    last = {rank: done[-1] for rank, done in steps(cwd).items()}
    assert len(last) == ranks
    assert len(set(last.values())) == 1, f"stopped apart: {last}"
    step = last[0]
    (asked,) = journalled(cwd, StopAsked)
    assert asked.source == source
    assert words in asked.detail
    assert asked.seconds == 600.0
    assert [one.step for one in journalled(cwd, StopAgreed)] == [step]
    (saved,) = journalled(cwd, StopSaved)
    assert saved.step == step
    assert [path.name for path in checkpoints(cwd / "run") if path.name == saved.checkpoint]
    assert len([path for path in checkpoints(cwd / "run") if f"{step:08d}" in path.name]) == 1
    assert not journalled(cwd, StopForced)
    assert not list(cwd.glob("finished*")), "code after the loop ran as if training were done"
    assert ends(cwd)[-1] == ("stopped", ExitCode.STOPPED)
    assert not list((cwd / "run" / "checkpoints" / ".staging").glob("*")), "half a save is left"
    return step
