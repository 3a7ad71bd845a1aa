"""What the ends of one attempt's journal files say. The cost does not depend on how long the files are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from holdfast.journal.events import (
    Line,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    StepsDone,
    WorkersStarted,
    decode_loss,
    encode_loss,
)
from holdfast.journal.reader import read_tail
from holdfast.journal.render import REPORTER, printable

TAIL_BYTES = 256 * 1024
RATE_WINDOW = 60.0
"""Seconds before the newest step over which the rate is taken."""


class Batch(NamedTuple):
    """Steps that rank 0 journalled together."""

    at: float
    last: int
    seconds: list[float]
    loss: list[float | str | None]


def tails(journal: Path, files: list[str], attempt: int, who: str) -> list[Line]:
    """The last lines that those whose name begins with `who` journalled in an attempt, oldest first."""
    start = f"{attempt:06d}-{who}-"
    lines = [
        line
        for name in sorted(files)
        if name.startswith(start) and name.endswith(".jsonl")
        for line in read_tail(journal / name, TAIL_BYTES)
    ]
    return sorted(lines, key=lambda line: line.at)


def batches(journal: Path, files: list[str], attempt: int) -> list[Batch]:
    """The newest batches of an attempt, oldest first. `files` are the names in the journal's directory."""
    return [
        Batch(line.at, body.first + len(body.seconds) - 1, body.seconds, body.loss)
        for line in tails(journal, files, attempt, REPORTER)
        if isinstance(body := line.body, StepsDone) and body.seconds
    ]


def last_step(journal: Path, files: list[str], attempt: int) -> int | None:
    """The last step that an attempt is known to have done."""
    found = batches(journal, files, attempt)
    return found[-1].last if found else None


def unfinished_save(journal: Path, files: list[str], attempt: int) -> str | None:
    """The checkpoint whose save the ranks of an attempt had begun last and had not ended, if there is one.

    Of a save in the background nobody can say so: its writer may still commit it after its rank has ended.
    """
    newest: SaveStarted | None = None
    for line in tails(journal, files, attempt, REPORTER):
        body = line.body
        if isinstance(body, SaveStarted):
            newest = None if body.background else body
        elif newest is None:
            continue
        # One that failed may have failed before it had an id.
        elif (isinstance(body, SaveCommitted | SaveSkipped) and body.checkpoint == newest.checkpoint) or (
            isinstance(body, SaveFailed) and body.step == newest.step
        ):
            newest = None
    return newest.checkpoint if newest is not None else None


def last_loss(found: list[Batch]) -> float | str | None:
    """The newest loss that was recorded, as JSON can carry it."""
    recorded = (loss for batch in reversed(found) for loss in reversed(batch.loss) if loss is not None)
    return encode_loss(decode_loss(next(recorded, None)))


def rate(found: list[Batch]) -> float | None:
    """Steps a second, saves and other work between them included, where two batches or more tell."""
    recent = [batch for batch in found if found[-1].at - batch.at <= RATE_WINDOW]
    done, elapsed = sum(len(batch.seconds) for batch in recent[1:]), recent[-1].at - recent[0].at
    if not done or elapsed <= 0:
        done, elapsed = len(recent[-1].seconds), sum(recent[-1].seconds)
    return done / elapsed if elapsed > 0 else None


def nodes_started(journal: Path, files: list[str], attempt: int) -> dict[str, list[int]]:
    """Node → its ranks, as the agents journalled them."""
    lines = tails(journal, files, attempt, "agent")
    started = [line.body for line in lines if isinstance(line.body, WorkersStarted)]
    return {printable(body.node): sorted(body.pids) for body in sorted(started, key=lambda body: body.node)}
