"""An account in words: in one line, as five answers, and as the story that the terminal tells. Pure.

The story is fed the journal's lines as they are written; each gives a line for people, or None. What it says
about time and steps comes from `incidents`, which every other page uses too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.account.incidents import Incident, bad_copies, done_of, headline, verdict_on
from holdfast.account.ledger import Phase, largest
from holdfast.account.remarks import (
    KINDS,
    Remark,
    counts_by_kind,
    drop_text,
    is_slow_save,
    resize_text,
    slow_storage_advice,
)
from holdfast.base import duration, plural, printable, size
from holdfast.checkpoint.format import parse_name
from holdfast.errors import ExitCode
from holdfast.journal import JournalLine
from holdfast.journal.events import (
    Account,
    Resumed,
    RungRejected,
    SaveCommitted,
    StandingChanged,
    StepRejected,
    StepsDone,
)
from holdfast.policy import Cause

# An account in words: one line, the lines of a terminal, and the five answers. Pure.


NOTHING = "nothing to do"
NEEDS_NOTHING = "; the run itself needs nothing"
"""How `next` ends if it asks for something that the run does not have to wait for."""


class Answer(NamedTuple):
    """One of the five answers, for a person who has seen nothing else."""

    question: str
    text: str


def incident_line(account: Account, resumed: int | None = None) -> str:
    """An incident, what was decided about it, and what is left to do, for alerts and `holdfast status`.
    `resumed`: see `done_of`."""
    left = "" if account.next in ("", NOTHING) else f"; next: {printable(account.next)}"
    return f"{headline(account)} → {printable(done_of(account, resumed))}{left}"


def incident_text(account: Account, run_dir: str) -> str:
    """What to print when it happens: three or four lines if the run goes on, a few more if it does not."""
    lines = [headline(account)]
    if account.why:
        lines.append(f"why:  {printable(account.why[0])}")
    if account.cause == Cause.HANG and not account.ends:  # who waited is half the answer
        lines += [f"      {printable(text)}" for text in account.why[1:2]]
    if not account.ends:
        lines.append(f"done: {printable(account.done)}")
        if account.next != NOTHING:
            lines.append(f"next: {printable(account.next)}")
        return "\n  ".join(lines)
    lines += [f"      {printable(text)}" for text in account.why[1:]]
    lines.append(f"done: {printable(account.done)} (exit code {account.exit_code}){_unsaved(account)}")
    lines.append(f"next: {printable(account.next)}")
    lines += [f"file: {printable(name, 4096)}" for name in account.files]
    lines.append(f"more: holdfast why {printable(run_dir, 4096)}")
    return "\n  ".join(lines)


def stop_text(account: Account, run_dir: str) -> str:
    """What to print at the end of a run that was asked to stop."""
    lines = [f"stopped: {headline(account)}"]
    lines += [
        f"{'why: ' if not at else '     '} {printable(text)}" for at, text in enumerate(account.why[:3])
    ]
    lost = _unsaved(account) if account.exit_code == ExitCode.STOPPED_UNSAVED else ""
    lines.append(f"done: {printable(account.done)} (exit code {account.exit_code}){lost}")
    lines.append(f"next: {printable(account.next)}")
    lines.append(f"more: holdfast why {printable(run_dir, 4096)}")
    return "\n  ".join(lines)


def cost_of(incident: Incident) -> str:
    """What it cost, in the numbers that every page shows."""
    lost = duration(incident.seconds_lost)
    account = incident.account
    if account is not None and account.ends and incident.open:
        return f"the run ended{_unsaved(account)}"
    if incident.open:
        return f"{lost} so far, {plural(incident.steps_lost, 'step')} to do again"
    if incident.caught_up_at is None:  # the next incident came first, and continues from there
        return f"{lost} until the next incident"
    by = _in_brackets(incident)
    if not incident.steps_lost:
        return f"{lost} until it trained again{by}, no step lost"
    steps = f"{plural(incident.steps_lost, 'step')} done again"
    again = incident.seconds_lost - incident.seconds_down
    if again < LITTLE * incident.seconds_lost:  # the same number twice says less than once
        return f"{lost} until it trained again{by}, {steps}"
    down = duration(incident.seconds_down)
    return f"{lost}: {down} until it trained again{by}, then {steps} in {duration(again)}"


def phases_text(phases: Sequence[Phase], most: int = 3) -> str:
    """The phases that took the longest: `import 2.1 s, setup 1.9 s, load 0.8 s`."""
    return ", ".join(f"{phase.name} {duration(phase.seconds)}" for phase in largest(phases, most))


def _in_brackets(incident: Incident) -> str:
    """On what the time until it trained again was spent; nothing where no rank wrote that down."""
    told = phases_text(incident.phases) if incident.traced else ""
    return f" ({told})" if told else ""


LITTLE = 0.02
"""A share of the time lost that is too small for a number of its own."""


def short_advice(next_: str) -> str:
    """What to do, in a few words, for a line that says much else already; empty if there is nothing to do."""
    asked = next_.removesuffix(NEEDS_NOTHING)
    if not asked or asked.startswith(NOTHING):
        return ""
    return printable(asked.partition(" (")[0].partition(": ")[0].partition("; ")[0])


def _unsaved(account: Account) -> str:
    """What the next start has to do again."""
    saved, last = account.saved, account.step
    if last is None or last <= (saved or 0):
        return "" if saved is None else f"; saved up to step {saved}"
    lost = f"step {last} is" if last == (saved or 0) + 1 else f"steps {(saved or 0) + 1}–{last} are"
    kept = f"saved up to step {saved}" if saved is not None else "nothing was saved"
    return f"; {kept}, {lost} lost"


def five_answers(incident: Incident) -> list[Answer]:
    """Who failed first, what happened, why, what was done and what it cost, what to do now."""
    account = incident.account
    if account is None:  # an older release wrote this, or nobody watched the run
        return [
            Answer("what", incident.what),
            Answer("why", "; ".join(incident.evidence[:3]) or "not recorded"),
            Answer("done", incident.decision),
            Answer("cost", cost_of(incident)),
        ]
    answers = [
        Answer("who", printable(account.who)),
        Answer("what", printable(account.what)),
        *(Answer("why" if not at else "", printable(text)) for at, text in enumerate(account.why)),
        Answer("done", printable(done_of(account, incident.resumed_step))),
    ]
    if incident.refused:
        others = (text for text in incident.refused if text.partition(":")[0] not in account.suspects)
        answers += [Answer("", f"refused {text}") for text in others]
    answers += [Answer("", text) for text in incident.copies]
    answers += [Answer("", text) for text in incident.settled]
    answers.append(Answer("cost", cost_of(incident)))
    now = account.next if account.ends or not incident.open else "wait: it is not back yet"
    return [*answers, Answer("next", printable(now))]


AVOIDED = "avoided:"
"""How the reason begins for a checkpoint that may be sound, but that the next attempt is to do without."""
MOST_REFUSED = 20
"""How many refused checkpoints are shown one by one, in one attempt."""
MOST_DROPPED = 20
"""How many dropped steps are shown one by one, in one launch."""


class Story:
    """The story of one launch. `fell` is called when an incident is reported."""

    def __init__(self) -> None:
        self._open: Account | None = None
        self.target = 0
        """The step at which the run is back where it was."""
        self._refused: set[str] = set()
        self._suspects: set[str] = set()
        """Checkpoints that may have been the cause of something, until that is known."""
        self._unsound = False
        """Whether a refused checkpoint was bad."""
        self._slow: set[str] = set()
        """Storage that was reported as slow once; the last line says what it cost in all."""
        self._dropped = 0

    def fell(self, account: Account) -> None:
        """An incident was reported; if the run goes on, it is followed until it is back."""
        self._open = None if account.ends else account
        self.target = max(self.target, account.step or 0)
        self._suspects |= set(account.suspects)
        self._refused, self._unsound = set(), False

    def line(self, line: JournalLine) -> str | None:
        """What to print for this line; None for nothing."""
        body = line.body
        if isinstance(body, RungRejected):
            return self._refuses(body)
        if isinstance(body, StepRejected):
            return self._drops(body)
        if isinstance(body, Resumed) and self._open is not None and line.attempt > self._open.attempt:
            parts = (_resumed_text(body, self._unsound), *bad_copies(body), resize_text(body))
            return "\n  ".join(filter(None, parts))
        if isinstance(body, Resumed):
            return "\n  ".join(filter(None, (*bad_copies(body), resize_text(body)))) or None
        if isinstance(body, StandingChanged) and body.checkpoint in self._suspects:
            return verdict_on(body) or None
        if isinstance(body, SaveCommitted) and is_slow_save(body) and body.root not in self._slow:
            self._slow.add(body.root)
            return _slow_storage_text(body)
        return None

    def is_back(self, line: JournalLine) -> Account | None:
        """The incident that this line ends, because the run has done again what it had done before."""
        account, body = self._open, line.body
        if account is None or not isinstance(body, StepsDone) or line.attempt <= account.attempt:
            return None
        last = body.first + max(len(body.seconds), len(body.loss), 1) - 1
        if last < self.target:
            return None
        self._open = None
        return account

    def _drops(self, body: StepRejected) -> str | None:
        if body.then != "dropped" or not body.in_a_row or self._dropped > MOST_DROPPED:
            return None
        self._dropped += 1
        if self._dropped > MOST_DROPPED:
            return "further dropped steps are not shown here: `holdfast journal` has them all"
        return drop_text(body)

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
            return f"the checkpoint {which} is passed over: it may be the cause of the failure"
        return f"the checkpoint {which} was refused: {why}"


def _resumed_text(body: Resumed, refused: bool) -> str:
    if body.checkpoint is None:
        return "begins anew: there is no checkpoint to go on from"
    below = ", the newest that is sound" if refused else ""
    return f"goes on from step {body.step}{below} ({printable(body.checkpoint)}, verified)"


def _slow_storage_text(body: SaveCommitted) -> str:
    waited = ", and training stood still meanwhile" if body.blocked_seconds >= 1 else ""
    which = f"the {size(body.bytes)} of the save of step {body.step}"
    return (
        f"the storage of {printable(body.root, 4096)} is slow: it took "
        f"{duration(body.stored_seconds)} to store {which}{waited}; the save is sound\n"
        f"  next: {slow_storage_advice(body.blocked_seconds)}"
    )


def back_line(incident: Incident, step: int) -> str:
    """What to print once the run has caught up."""
    redone = f", {plural(incident.steps_lost, 'step')} done again" if incident.steps_lost else ""
    account = incident.account
    left = short_advice(account.next) if account is not None else ""
    lost = f"{duration(incident.seconds_lost)}{_in_brackets(incident)}"
    return f"back at step {step} after {lost}{redone}: {left or NOTHING}"


def closing_line(incidents: list[Incident], remarks: list[Remark], steps: int, run_dir: str) -> str:
    """The last line of a run that finished."""
    line = finished_line(incidents, remarks, steps)
    if not incidents and not remarks:
        return line
    return f"{line}; report: holdfast journal {printable(run_dir, 4096)} --report report.html"


def finished_line(incidents: list[Incident], remarks: list[Remark], steps: int) -> str:
    """How a finished run got through, for the terminal's last line and the report's first."""
    if not incidents and not remarks:
        return f"finished: {plural(steps, 'step')}, no incident"
    restarts = sum(one.account is None or not one.account.ends for one in incidents)
    redone = sum(one.steps_lost for one in incidents)
    what = [plural(steps, "step"), plural(restarts, "restart") if restarts else "no restart"]
    what += [f"{plural(redone, 'step')} done again"] if redone else []
    what += [f"{duration(sum(one.seconds_lost for one in incidents))} lost"] if incidents else []
    asked = [one.account.next for one in incidents if one.account is not None]
    asked += [one.next for one in remarks if one.kind != "stop"]  # it has gone on since
    left = list(dict.fromkeys(filter(None, map(short_advice, asked))))
    more = f", and {len(left) - 1} more" if len(left) > 1 else ""
    to_do = f"; to do: {left[-1]}{more}" if left else f", {NOTHING}"
    worst = {KINDS[kind]: _costliest(remarks, kind) for kind in ("slow", "link", "storage")}
    met = "".join(f"; {plural(count, kind)}{worst.get(kind, '')}" for count, kind in counts_by_kind(remarks))
    return f"finished: {', '.join(what)}{met}{to_do}"


def _costliest(remarks: list[Remark], kind: str) -> str:
    """The cost of the costliest slow rank, link or save: a count alone says nothing about it."""
    candidates = [remark for remark in remarks if remark.kind == kind]
    most = max(candidates, key=lambda remark: remark.seconds, default=None)
    if most is None:
        return ""
    return f" ({most.who}{f': {most.cost}' if most.cost else ''})"
