"""What is told on the terminal between an incident and its end: refusals, the resume, being back. Pure.

Fed with the journal's lines as they are written; each gives a line for people, or None. What it says of time
and steps comes from `incidents`, which every other page uses too.
"""

from __future__ import annotations

from holdfast.account.incidents import Incident, bad_copies, verdict_on
from holdfast.account.remarks import (
    KINDS,
    Remark,
    counted,
    drop_on_the_terminal,
    resized,
    stored_slowly,
    what_of_slow_storage,
)
from holdfast.account.wording import NOTHING, short
from holdfast.checkpoint.identity import parse_name
from holdfast.journal.account_events import Account
from holdfast.journal.events import (
    Line,
    Resumed,
    RungRejected,
    SaveCommitted,
    StandingChanged,
    StepRejected,
    StepsDone,
)
from holdfast.journal.text import duration, plural, printable, size

AVOIDED = "avoided:"
"""How the reason begins of a checkpoint that may be sound, and that the next attempt is to do without."""
MOST_REFUSED = 20
"""Refused checkpoints that are told of one by one, in one attempt."""
MOST_DROPPED = 20
"""The same of dropped steps, in one launch."""


class Story:
    """One for a launch. `fell` is called when an incident is told."""

    def __init__(self) -> None:
        self._open: Account | None = None
        self.target = 0
        """The step at which the run is back."""
        self._refused: set[str] = set()
        self._suspects: set[str] = set()
        """Checkpoints that may have been the cause of something, until it is known."""
        self._unsound = False
        """Whether one of them was no good."""
        self._slow: set[str] = set()
        """Storage that was told to be slow: the end says what it came to."""
        self._dropped = 0

    def fell(self, account: Account) -> None:
        """An incident was told; if the run goes on, it is followed until it is back."""
        self._open = None if account.ends else account
        self.target = max(self.target, account.step or 0)
        self._suspects |= set(account.suspects)
        self._refused, self._unsound = set(), False

    def line(self, line: Line) -> str | None:
        """What to print for this line; None for nothing."""
        body = line.body
        if isinstance(body, RungRejected):
            return self._refuses(body)
        if isinstance(body, StepRejected):
            return self._drops(body)
        if isinstance(body, Resumed) and self._open is not None and line.attempt > self._open.attempt:
            told = (_resumed(body, self._unsound), *bad_copies(body), resized(body))
            return "\n  ".join(filter(None, told))
        if isinstance(body, Resumed):
            return "\n  ".join(filter(None, (*bad_copies(body), resized(body)))) or None
        if isinstance(body, StandingChanged) and body.checkpoint in self._suspects:
            return verdict_on(body) or None
        if isinstance(body, SaveCommitted) and stored_slowly(body) and body.root not in self._slow:
            self._slow.add(body.root)
            return _stored_slowly(body)
        return None

    def is_back(self, line: Line) -> Account | None:
        """The incident that this line ends: the run has done again what it had done before it."""
        told, body = self._open, line.body
        if told is None or not isinstance(body, StepsDone) or line.attempt <= told.attempt:
            return None
        last = body.first + max(len(body.seconds), len(body.loss), 1) - 1
        if last < self.target:
            return None
        self._open = None
        return told

    def _drops(self, body: StepRejected) -> str | None:
        if body.then != "dropped" or not body.in_a_row or self._dropped > MOST_DROPPED:
            return None
        self._dropped += 1
        if self._dropped > MOST_DROPPED:
            return "further dropped steps are not told here: `holdfast journal` has them all"
        return drop_on_the_terminal(body)

    def _refuses(self, body: RungRejected) -> str | None:
        if body.checkpoint in self._refused or len(self._refused) >= MOST_REFUSED:
            return None
        passed_over = all(reason.startswith(AVOIDED) for reason in body.reasons) and bool(body.reasons)
        self._refused.add(body.checkpoint)
        self._unsound = self._unsound or not passed_over
        name = parse_name(body.checkpoint)
        which = f"at step {name.step} ({printable(body.checkpoint)})" if name else printable(body.checkpoint)
        why = "; ".join(printable(reason) for reason in body.reasons) or "it may not be used"
        if passed_over:
            return f"the checkpoint {which} is passed over: what failed may come from it"
        return f"the checkpoint {which} was refused: {why}"


def _resumed(body: Resumed, refused: bool) -> str:
    if body.checkpoint is None:
        return "begins anew: there is no checkpoint to go on from"
    below = ", the newest that is sound" if refused else ""
    return f"goes on from step {body.step}{below} ({printable(body.checkpoint)}, verified)"


def _stored_slowly(body: SaveCommitted) -> str:
    waited = ", and training stood still meanwhile" if body.blocked_seconds >= 1 else ""
    which = f"the {size(body.bytes)} of the save of step {body.step}"
    return (
        f"the storage of {printable(body.root, 4096)} is slow: it took "
        f"{duration(body.stored_seconds)} to store {which}{waited}; the save is sound\n"
        f"  next: {what_of_slow_storage(body.blocked_seconds)}"
    )


def back(incident: Incident, step: int) -> str:
    """Said once the run has caught up."""
    redone = f", {plural(incident.steps_lost, 'step')} done again" if incident.steps_lost else ""
    told = incident.account
    left = short(told.next) if told is not None else ""
    return f"back at step {step} after {duration(incident.seconds_lost)}{redone}: {left or NOTHING}"


def closing(found: list[Incident], others: list[Remark], steps: int, run_dir: str) -> str:
    """The last line of a run that finished."""
    said = finished(found, others, steps)
    if not found and not others:
        return said
    return f"{said}; report: holdfast journal {printable(run_dir, 4096)} --report report.html"


def finished(found: list[Incident], others: list[Remark], steps: int) -> str:
    """How a run that finished came through, for the terminal's last line and the report's first."""
    if not found and not others:
        return f"finished: {plural(steps, 'step')}, no incident"
    restarts = sum(one.account is None or not one.account.ends for one in found)
    redone = sum(one.steps_lost for one in found)
    what = [plural(steps, "step"), plural(restarts, "restart") if restarts else "no restart"]
    what += [f"{plural(redone, 'step')} done again"] if redone else []
    what += [f"{duration(sum(one.seconds_lost for one in found))} lost"] if found else []
    asked = [one.account.next for one in found if one.account is not None]
    asked += [one.next for one in others if one.kind != "stop"]  # it went on since
    left = list(dict.fromkeys(filter(None, map(short, asked))))
    more = f", and {len(left) - 1} more" if len(left) > 1 else ""
    to_do = f"; to do: {left[-1]}{more}" if left else f", {NOTHING}"
    worst = {KINDS[kind]: _costliest(others, kind) for kind in ("slow", "storage")}
    met = "".join(f"; {plural(count, kind)}{worst.get(kind, '')}" for count, kind in counted(others))
    return f"finished: {', '.join(what)}{met}{to_do}"


def _costliest(others: list[Remark], kind: str) -> str:
    """What the slow rank, or the slow save, that cost most came to: a count alone says nothing about it."""
    most = max((one for one in others if one.kind == kind), key=lambda one: one.seconds, default=None)
    if most is None:
        return ""
    return f" ({most.who}{f': {most.cost}' if most.cost else ''})"
