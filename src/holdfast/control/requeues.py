"""How often the scheduler was asked to queue the job again: one record each, `requeues/000001-asked.json`.

A record is written before the scheduler is asked, which may end this process: the count can only be too high.
One that came to nothing is withdrawn by `000002-withdrawn-1.json`.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from holdfast.control.appended import append, contents, entries
from holdfast.control.directory import ControlDirectory
from holdfast.control.operator import budget_reset

ASKED, WITHDRAWN = "asked", "withdrawn"


class Requeue(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int
    step: int
    """The highest step that was committed by then."""
    job: str = ""
    at: float = 0.0


def record_requeue(control: ControlDirectory, attempt: int, step: int, job: str) -> int:
    """The number of the record."""
    return append(_folder(control), ASKED, Requeue(attempt=attempt, step=step, job=job, at=time.time()))


def withdraw_requeue(control: ControlDirectory, number: int, attempt: int, step: int) -> None:
    """The scheduler was not asked after all, or said no."""
    append(_folder(control), f"{WITHDRAWN}-{number}", Requeue(attempt=attempt, step=step, at=time.time()))


def requeues_without_progress(control: ControlDirectory, step: int) -> int:
    """How often it was asked since the highest committed step, which is `step` now, was lower.

    A record that cannot be read counts. Those up to an operator's reset of the budget do not.
    """
    forgiven = budget_reset(control) or 0
    there = entries(_folder(control))
    withdrawn = {entry.word for entry in there}
    asked = [
        entry
        for entry in there
        if not entry.word.startswith(f"{WITHDRAWN}-") and f"{WITHDRAWN}-{entry.number}" not in withdrawn
    ]
    found = [contents(entry, Requeue) for entry in asked]
    return sum(one is None or (one.step >= step and one.attempt > forgiven) for one in found)


def _folder(control: ControlDirectory) -> Path:
    return control.path / "requeues"
