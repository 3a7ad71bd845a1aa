"""The last lines of a run's last attempts. The cost does not depend on how long the run was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from holdfast.control.directory import ControlDirectory, list_names
from holdfast.journal.events import Line, StepsDone, decode_loss
from holdfast.journal.reader import read_tail
from holdfast.journal.render import REPORTER

TAIL_BYTES = 1024 * 1024
"""Of each writer's file: many thousand steps."""
FILES = 64
"""Writers of one attempt whose files are read: rank 0, the agents of the first nodes, operators."""
_NAME = re.compile(r"([0-9]{6,})-(.*)-[0-9]+\.jsonl")


def recent_lines(control: ControlDirectory, attempts: Iterable[int]) -> list[Line]:
    """The ends of these attempts' journals, by time; what cannot be read is left out."""
    wanted = set(attempts)
    chosen: dict[int, list[str]] = {}
    for name in sorted(list_names(control.journal), key=_importance):
        match = _NAME.fullmatch(name)
        if match and int(match[1]) in wanted:
            chosen.setdefault(int(match[1]), []).append(name)
    lines = [
        line
        for names in chosen.values()
        for name in names[:FILES]
        for line in read_tail(control.journal / name, TAIL_BYTES)
    ]
    return sorted(lines, key=lambda line: (line.at, line.who, line.seq))


class StepTold(NamedTuple):
    step: int
    seconds: float
    loss: float | None
    samples: str
    """The digest of its sample ids; empty if it had none."""


def steps_told(lines: Iterable[Line]) -> Iterator[StepTold]:
    """What rank 0 journalled of every completed step, in the order of the lines."""
    for line in lines:
        body = line.body
        if isinstance(body, StepsDone) and line.who == REPORTER:
            for at, took in enumerate(body.seconds):
                loss = decode_loss(body.loss[at]) if at < len(body.loss) else None
                samples = body.samples[at] if at < len(body.samples) else ""
                yield StepTold(body.first + at, took, loss, samples)


def _importance(name: str) -> tuple[bool, str]:
    """Ranks but the first say little that others do not, and may be very many."""
    return ("-rank-" in name and "-rank-0-" not in name, name)
