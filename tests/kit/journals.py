"""Journals for tests: what a run has written, and lines with a clock that the test moves, as if one had."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.checkpoint.format.manifest import CheckpointName, derive_id
from holdfast.journal import Event, JournalLine
from holdfast.journal.events import (
    AttemptEnded,
    AttemptStarted,
    DecisionMade,
    LeaseClaimed,
    RejectedOption,
    Resumed,
    RunCreated,
    RunFinished,
    RungRejected,
    SaveCommitted,
    StepsDone,
    WorkerFailed,
    WorkersStarted,
    encode_loss,
)

START = 1_763_000_000.0
ALTERED = "altered __0_0.distcp: its digest does not match"


def loss_of(step: int) -> float:
    """A loss that falls like a real one, the same whenever a step is done."""
    return 1.2 + 3.0 * math.exp(-step / 18) + 0.12 * math.sin(step * 1.7) * math.exp(-step / 60)


def name_of(step: int, attempt: int = 1) -> str:
    return str(CheckpointName(step, derive_id("run", attempt, step, 0)))


class Journal:
    """A run's journal in the making. Each method moves the clock by what it takes and adds lines."""

    def __init__(self, at: float = START) -> None:
        self.now = at
        self.attempt = 0
        self.lines: list[JournalLine] = []
        self._seq: dict[tuple[str, int], int] = {}

    def write(self, event: Event, who: str = "rank-0", attempt: int | None = None) -> JournalLine:
        number = self.attempt if attempt is None else attempt
        seq = self._seq[who, number] = self._seq.get((who, number), -1) + 1
        line = JournalLine(v=1, at=self.now, who=who, attempt=number, seq=seq, body=event)  # type: ignore[arg-type]
        self.lines.append(line)
        return line

    def pass_time(self, seconds: float) -> Journal:
        self.now += seconds
        return self

    def start(self, *, resume: tuple[str | None, int] | None = (None, 0), ranks: int = 2,
              rejected: Sequence[str] = (), takes: float = 1.0) -> Journal:  # fmt: skip
        """A new attempt that resumes from (checkpoint, step); None: it never gets so far."""
        self.attempt += 1
        if self.attempt == 1:
            self.write(RunCreated(run="3fa9c1d2e4b5", checkpoint_root="runs/demo/checkpoints"), "agent-a")
        self.write(LeaseClaimed(epoch=self.attempt, owner="launch", evidence="same launch"), "agent-a")
        started = AttemptStarted(
            epoch=self.attempt, world_size=ranks, launcher="holdfast run", torch="2.13.0"
        )
        self.write(started, "agent-a")
        self.write(WorkersStarted(node="a", pids={rank: 100 + rank for rank in range(ranks)}), "agent-a")
        self.pass_time(takes)
        if resume is None:
            return self
        checkpoint, step = resume
        for name in rejected:
            self.write(RungRejected(checkpoint=name, step=int(name[5:13]), reasons=[ALTERED]))
        self.write(
            DecisionMade(
                about="resume",
                chosen=checkpoint or "fresh start",
                evidence=["4 files match their digests"] if checkpoint else ["the run has no checkpoint"],
                rejected=[RejectedOption(name, [ALTERED]) for name in rejected],
            )
        )
        self.write(Resumed(checkpoint=checkpoint, step=step, seconds=takes / 4))
        return self

    def steps(self, first: int, last: int, *, seconds: float = 0.1, batch: int = 10,
              losses: dict[int, float | None] | None = None) -> Journal:  # fmt: skip
        """Steps first … last, written in batches."""
        given = losses or {}
        for begin in range(first, last + 1, batch):
            numbers = range(begin, min(begin + batch, last + 1))
            self.pass_time(seconds * len(numbers))
            loss = [encode_loss(given.get(step, loss_of(step))) for step in numbers]
            self.write(StepsDone(first=begin, seconds=[seconds] * len(numbers), loss=loss))
        return self

    def save(self, step: int, *, seconds: float = 0.3, blocked: float | None = None) -> str:
        self.pass_time(seconds)
        name = name_of(step, self.attempt)
        self.write(
            SaveCommitted(checkpoint=name, step=step, parent=None, bytes=3_400_000, files=4, seconds=seconds,
                          blocked_seconds=seconds if blocked is None else blocked)
        )  # fmt: skip
        return name

    def fail(
        self, rank: int = 1, *, signal: str = "SIGKILL", exit_code: int = -9, message: str = ""
    ) -> Journal:
        self.write(
            WorkerFailed(
                rank=rank, node="a", pid=100 + rank, exit_code=exit_code, signal=signal, message=message
            ),
            "agent-a",
        )
        return self

    def recover(self, chosen: str = "restart here", *, root: int | None = None,
                why: str = "1 of 3 restarts used", last_step: int = 0) -> Journal:  # fmt: skip
        """The agent decides and ends the attempt."""
        details = {} if root is None else {"root_rank": root}
        rejected = [RejectedOption("stop", ["the budget is not spent"])]
        self.write(
            DecisionMade(about="recovery", chosen=chosen, evidence=[why], rejected=rejected, details=details),
            "agent-a",
        )
        return self.end("failed", 1, last_step)

    def end(self, outcome: str, exit_code: int = 0, last_step: int = 0) -> Journal:
        self.write(AttemptEnded(outcome=outcome, exit_code=exit_code, last_step=last_step), "agent-a")
        return self

    def finish(self, step: int) -> Journal:
        self.write(RunFinished(step=step, samples=step * 8, tokens=step * 1024))
        return self.end("finished", 0, step)

    def store(self, run_dir: Path) -> Path:
        """Write the lines where a run would have them: one file a writer, beside a run.json."""
        (run_dir / "journal").mkdir(parents=True, exist_ok=True)
        (run_dir / "run.json").write_text('{"format":1,"run":"3fa9c1d2e4b5","created":1763000000.0}\n')
        for line in self.lines:
            path = run_dir / "journal" / f"{line.attempt:06d}-{line.who}-{100}.jsonl"
            with path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        return run_dir


def killed_and_corrupted() -> Journal:
    """The demo's story: a rank is killed after step 27, the newest checkpoint (20) is altered, the run goes
    on from step 10; a second kill after 44 costs four steps; it finishes at 60."""
    run = Journal()
    run.start()
    run.steps(1, 10)
    ten = run.save(10)
    run.steps(11, 20)
    twenty = run.save(20)
    run.steps(21, 27).pass_time(0.4)
    run.fail(1).fail(0, signal="", exit_code=1, message="RuntimeError: Connection closed by peer")
    run.pass_time(0.2).recover(root=1).pass_time(0.3)
    run.start(resume=(ten, 10), rejected=[twenty])
    run.steps(11, 20)
    run.save(20)
    run.steps(21, 40)
    forty = run.save(40)
    run.steps(41, 44).pass_time(0.2).fail(0).recover(root=0).pass_time(0.2)
    run.start(resume=(forty, 40))
    run.steps(41, 60)
    run.save(60)
    return run.finish(60)
