"""Runs of the example as jobs of a real Slurm: submitted, watched through their journal, compared."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from holdfast.drill import compare
from holdfast.journal import Event, JournalLine
from holdfast.journal.events import Resumed, StepsDone
from holdfast.journal.reader import JournalReader
from kit.commands import command
from kit.harness import REPO
from kit.nodes.slurm_cluster import ENDED, SlurmCluster

EXAMPLE = REPO / "examples" / "train_gpt.py"
STEPS = 60
RANKS = 2
SETTINGS = (
    "checkpoint.interval=1000", "journal.step_flush=0.2", "launch.node_timeout=10", "control.lease_ttl=15",
)  # fmt: skip
"""No save but those that a test is about: what was not saved at the stop is missing after it."""


def arguments(steps: int = STEPS) -> list[str]:
    return ["--steps", str(steps), "--layers", "1", "--dim", "32", "--batch", "2", "--device", "cpu"]


E = TypeVar("E", bound=Event)


class SlurmRun:
    """One run directory and the job that trains in it."""

    def __init__(self, cluster: SlurmCluster, cwd: Path, name: str = "run") -> None:
        self.cluster = cluster
        self.cwd = cwd
        self.run_dir = cwd / name
        self.job = ""
        self.ranks = RANKS
        self.lines: list[JournalLine] = []
        self._reader = JournalReader(self.run_dir / "journal")

    def submit(
        self, *flags: str, nodes: int = RANKS, steps: int = STEPS, settings: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """Submit the script that `holdfast slurm script` writes for one rank a node; `flags` are sbatch's."""
        script = self.cwd / f"{self.run_dir.name}.sbatch"
        pairs = (pair.split("=", 1) for pair in (*SETTINGS, *settings))
        setup = [f"export HOLDFAST_{key.upper().replace('.', '_')}={value}" for key, value in pairs]
        endpoint = self.cluster.endpoint
        done = command(
            "slurm", "script", "--nodes", str(nodes), "--nproc-per-node", "1", "--run-dir", self.run_dir,
            "--holdfast", f"{sys.executable} -m holdfast", "--log", f"{self.run_dir.name}-%j.out",
            "--output", script, "--force", *(("--rdzv-endpoint", endpoint) if endpoint else ()),
            *(word for line in setup for word in ("--setup", line)), *options,
            "--", EXAMPLE, *arguments(steps),
        )  # fmt: skip
        assert done.code == 0, done.text
        self.ranks = nodes
        self.job = self.cluster.sbatch(script, *flags, cwd=self.cwd)
        return self.job

    def poll(self) -> list[JournalLine]:
        self.lines.extend(self._reader.poll())
        return self.lines

    def events(self, kind: type[E]) -> list[E]:
        return [line.body for line in self.poll() if isinstance(line.body, kind)]

    def await_journal(self, done: Callable[[], object], what: str, timeout: float = 120) -> None:
        """Until the journal says so; fails with the job's output if the job ends before that."""
        deadline = time.monotonic() + timeout
        while not done():
            ended = self.cluster.state(self.job) in ENDED
            if (ended and not done()) or time.monotonic() > deadline:
                state = self.cluster.state(self.job)
                raise AssertionError(f"{what}: not so, and job {self.job} is {state}\n{self.text()}")
            time.sleep(0.05)

    def await_step(self, step: int, timeout: float = 120) -> None:
        """Until every rank has done this step."""
        self.await_journal(lambda: self.steps_done() >= step, f"step {step} is done", timeout)

    def steps_done(self) -> int:
        """The highest step that all ranks have done."""
        last = {
            line.who: line.body.first + len(line.body.seconds) - 1
            for line in self.poll()
            if isinstance(line.body, StepsDone) and line.who.startswith("rank-")
        }
        return min(last.values()) if len(last) == self.ranks else 0

    def resumed_from(self) -> list[int]:
        """The step of each resume; a fresh start is 0."""
        return [event.step for event in self.events(Resumed)]

    def text(self) -> str:
        said = [
            f"{line.at:.1f} {line.attempt} {line.who} {line.body}"[:300]
            for line in self.poll()
            if not isinstance(line.body, StepsDone)
        ]
        return self.cluster.output(self.job) + "\n--- journal\n" + "\n".join(said)


def differences(one: Path, other: Path) -> list[str]:
    """How two finished runs differ: losses, samples and the whole state of the last step, bit by bit."""
    timelines = [compare.timeline(JournalReader(run / "journal").poll()) for run in (one, other)]
    found = [
        compare.compare_losses(*timelines, steps=STEPS, ranks=RANKS),
        compare.compare_samples(*timelines, steps=STEPS, ranks=RANKS),
        *compare.compare_checkpoints(last_checkpoint(one), last_checkpoint(other)),
    ]
    return [str(part) for part in found if not part.equal]


def checkpoints(run_dir: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    return sorted(path for path in (run_dir / "checkpoints").glob("step_*") if path.is_dir())


def last_checkpoint(run_dir: Path) -> Path:
    found = checkpoints(run_dir)
    assert found, f"no checkpoint in {run_dir}"
    assert found[-1].name.startswith(f"step_{STEPS:08d}-"), [path.name for path in found]
    return found[-1]
