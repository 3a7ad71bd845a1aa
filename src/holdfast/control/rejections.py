"""What the ranks of an attempt agreed to reject: one record an attempt, written by rank 0 before it ends.

Not fenced: it is evidence, and evidence harms nobody. The first one stays.
"""

from __future__ import annotations

from holdfast.control.attempts import attempt_numbers
from holdfast.control.directory import ControlDirectory, create_record, read_record
from holdfast.policy.rejection import Rejection

NAME = "rejection.json"


def record_rejection(control: ControlDirectory, attempt: int, rejection: Rejection) -> bool:
    """Keep it, durably; False if the attempt had one already."""
    return create_record(control.attempt(attempt) / NAME, rejection)


def rejection_of(control: ControlDirectory, attempt: int) -> Rejection | None:
    return read_record(control.attempt(attempt) / NAME, Rejection)


def diagnosed(control: ControlDirectory, *, since: int, before: int) -> set[str]:
    """The diagnostic saves that rejections have been recorded with, by name; of attempts from `since` on."""
    numbers = [one for one in attempt_numbers(control) if since <= one < before]
    found = (rejection_of(control, number) for number in numbers)
    return {one.diagnostic for one in found if one is not None and one.diagnostic}
