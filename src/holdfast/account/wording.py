"""An account in words: one line, the lines of a terminal, and the five answers. Pure."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.account.incidents import Incident, done_of, headline
from holdfast.exit_codes import ExitCode
from holdfast.journal.account_events import Account
from holdfast.journal.text import duration, plural, printable
from holdfast.policy.signs import Cause

NOTHING = "nothing to do"
NEEDS_NOTHING = "; the run itself needs nothing"
"""How `next` ends where it asks for something that the run goes on without."""


class Answer(NamedTuple):
    """One of the five, for a person who has seen nothing else."""

    question: str
    text: str


def one_line(account: Account, resumed: int | None = None) -> str:
    """An incident, what was decided about it and what is left to do, for alerts and `holdfast status`.
    `resumed`: see `done_of`."""
    left = "" if account.next in ("", NOTHING) else f"; next: {printable(account.next)}"
    return f"{headline(account)} → {printable(done_of(account, resumed))}{left}"


def on_the_terminal(account: Account, run_dir: str) -> str:
    """At the moment it happens: three or four lines if the run goes on, a few more if it does not."""
    lines = [headline(account)]
    if account.why:
        lines.append(f"why:  {printable(account.why[0])}")
    if account.cause == Cause.HANG and not account.ends:  # who waited is half of the answer
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


def stop_on_the_terminal(account: Account, run_dir: str) -> str:
    """At the end of a run that was asked to stop."""
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
    """What it cost, by the numbers that every page shows."""
    lost = duration(incident.seconds_lost)
    told = incident.account
    if told is not None and told.ends and incident.open:
        return f"the run ended{_unsaved(told)}"
    if incident.open:
        return f"{lost} so far, {plural(incident.steps_lost, 'step')} to do again"
    if incident.caught_up_at is None:  # the next one came first, and goes on from there
        return f"{lost} until the next incident"
    if not incident.steps_lost:
        return f"{lost} until it trained again, no step lost"
    steps = f"{plural(incident.steps_lost, 'step')} done again"
    again = incident.seconds_lost - incident.seconds_down
    if again < LITTLE * incident.seconds_lost:  # the same number twice says less than once
        return f"{lost} until it trained again, {steps}"
    down = duration(incident.seconds_down)
    return f"{lost}: {down} until it trained again, then {steps} in {duration(again)}"


LITTLE = 0.02
"""Part of the time lost that is not worth a number of its own."""


def short(next_: str) -> str:
    """What is to be done, in a few words, for a line that has said much else; empty if nothing is."""
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


def five(incident: Incident) -> list[Answer]:
    """Who failed first, what happened, why, what was done and what it cost, what to do now."""
    told = incident.account
    if told is None:  # of an older release, or of a run that nobody watched
        return [
            Answer("what", incident.what),
            Answer("why", "; ".join(incident.evidence[:3]) or "not recorded"),
            Answer("done", incident.decision),
            Answer("cost", cost_of(incident)),
        ]
    found = [
        Answer("who", printable(told.who)),
        Answer("what", printable(told.what)),
        *(Answer("why" if not at else "", printable(text)) for at, text in enumerate(told.why)),
        Answer("done", printable(done_of(told, incident.resumed_step))),
    ]
    if incident.refused:
        others = (text for text in incident.refused if text.partition(":")[0] not in told.suspects)
        found += [Answer("", f"refused {text}") for text in others]
    found += [Answer("", text) for text in incident.copies]
    found += [Answer("", text) for text in incident.settled]
    found.append(Answer("cost", cost_of(incident)))
    now = told.next if told.ends or not incident.open else "wait: it is not back yet"
    return [*found, Answer("next", printable(now))]
