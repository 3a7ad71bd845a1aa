"""What is told on the terminal between an incident and its end: refusals, the resume, being back. Pure.

Fed with the journal's lines as they are written; each gives a line for people, or None. What it says of time
and steps comes from `incidents`, which every other page uses too.
"""

from __future__ import annotations

from holdfast.account.incidents import Incident
from holdfast.account.remarks import Remark, counted, drop_on_the_terminal, resized
from holdfast.checkpoint.identity import parse_name
from holdfast.journal.account_events import Account
from holdfast.journal.events import Line, Resumed, RungRejected, StepRejected, StepsDone
from holdfast.journal.text import duration, plural, printable

NOTHING = "nothing to do"
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
        self._unsound = False
        """Whether one of them was no good."""
        self._dropped = 0

    def fell(self, account: Account) -> None:
        """An incident was told; if the run goes on, it is followed until it is back."""
        self._open = None if account.ends else account
        self.target = max(self.target, account.step or 0)
        self._refused, self._unsound = set(), False

    def line(self, line: Line) -> str | None:
        """What to print for this line; None for nothing."""
        body = line.body
        if isinstance(body, RungRejected):
            return self._refuses(body)
        if isinstance(body, StepRejected):
            return self._drops(body)
        if isinstance(body, Resumed) and self._open is not None and line.attempt > self._open.attempt:
            return "\n  ".join(filter(None, (_resumed(body, self._unsound), resized(body))))
        if isinstance(body, Resumed):
            return resized(body) or None
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


def back(incident: Incident, step: int) -> str:
    """Said once the run has caught up."""
    redone = f", {plural(incident.steps_lost, 'step')} done again" if incident.steps_lost else ""
    told = incident.account
    left = told.next if told is not None and told.next else "nothing to do"
    return f"back at step {step} after {duration(incident.seconds_lost)}{redone}: {left}"


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
    met = "".join(f"; {plural(count, kind)}" for count, kind in counted(others))
    met += _slowest(others) + _after_drops(others)
    if not found:
        return f"finished: {plural(steps, 'step')}, no restart{met}"
    restarts = sum(one.account is None or not one.account.ends for one in found)
    redone = sum(one.steps_lost for one in found)
    lost = duration(sum(one.seconds_lost for one in found))
    what = [plural(steps, "step"), plural(restarts, "restart")]
    what += [f"{plural(redone, 'step')} done again"] if redone else []
    asked = [one.account.next for one in found if one.account is not None and one.account.next != NOTHING]
    left = f"; {printable(asked[-1])}" if asked else "" if others else f", {NOTHING}"
    return f"finished: {', '.join(what)}, {lost} lost{left}{met}"


def _slowest(others: list[Remark]) -> str:
    """What the rank that cost most came to: a count alone says nothing about it."""
    slow = max((one for one in others if one.kind == "slow"), key=lambda one: one.seconds, default=None)
    if slow is None:
        return ""
    cost = f", {slow.cost}" if slow.cost else ""
    return f"; {slow.who} {slow.did}{cost}: {slow.next}"


def _after_drops(others: list[Remark]) -> str:
    """What to do about dropped steps: the run is well, and the data may not be."""
    dropped = next((one for one in others if one.kind == "dropped"), None)
    return f"; {dropped.next.partition('; if more ')[0]}" if dropped is not None else ""
