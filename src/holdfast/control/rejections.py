"""What the ranks of an attempt rejected, and what was settled about steps of the run's timeline.

`attempts/<n>/rejection.json`: what they agreed to reject, written by rank 0 before it ends. The first one
stays.

`attempts/<n>/settled.json`: verdicts on steps, by the ranks of that attempt and by whoever decided about it.
Every later attempt reads those of all attempts. Neither is fenced: it is evidence, and evidence harms nobody.
What cannot be read is left out: then a step is judged once more, which costs time and no checkpoint.
"""

from __future__ import annotations

import logging

import msgspec

from holdfast.control.attempts import attempt_numbers
from holdfast.control.directory import ControlDirectory, create_record, read_record
from holdfast.errors import ControlError
from holdfast.files import explain_os_error, replace_atomic
from holdfast.policy.rejection import Rejection, Settled

log = logging.getLogger("holdfast")

NAME = "rejection.json"
SETTLED = "settled.json"
MOST_SETTLED = 256
"""Steps that one attempt keeps, the latest ones: it never grows beyond that, however many are dropped."""
MOST_READ = 4 * MOST_SETTLED


class SettledRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`settled.json`."""

    settled: list[Settled]


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


def record_settled(control: ControlDirectory, attempt: int, settled: Settled) -> None:
    """Keep a verdict on a step, durably; what is kept already is not added again."""
    path = control.attempt(attempt) / SETTLED
    before = settled_in(control, attempt)
    if settled in before:
        return
    record = SettledRecord(settled=[*before, settled][-MOST_SETTLED:])
    try:
        replace_atomic(path, msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise explain_os_error(error, "write", path) from error


def settled_steps(control: ControlDirectory) -> list[Settled]:
    """All that was settled about steps, in the order in which it was; of very many the latest."""
    found: list[Settled] = []
    for number in reversed(attempt_numbers(control)):
        found = [*settled_in(control, number), *found]
        if len(found) >= MOST_READ:
            break
    return found


def settled_in(control: ControlDirectory, attempt: int) -> list[Settled]:
    """What one attempt settled."""
    try:
        record = read_record(control.attempt(attempt) / SETTLED, SettledRecord)
    except ControlError as error:
        log.warning("holdfast: what attempt %d settled about steps is left out: %s", attempt, error)
        return []
    return record.settled if record is not None else []
