"""A run's journal sorted into attempts. Pure.

Some lines speak about an attempt that is over: a new launcher may record the end of one that it found lost,
or the decision about it, before its own attempt starts; after a restart in place the next attempt tells what
ended the one before. Such lines belong to the attempt they speak about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.account.steps import Step, steps_done
from holdfast.journal.account_events import Account
from holdfast.journal.events import (
    AnyEvent,
    AttemptEnded,
    AttemptStarted,
    Decision,
    Line,
    OperatorActed,
    Resumed,
    RunFinished,
    RungRejected,
    SaveCommitted,
    Unknown,
    WorkerFailed,
)
from holdfast.journal.restart_events import RestartFaulted, RestartPlanned

RECOVERY = "recovery"
RESUME = "resume"


@dataclass
class Attempt:
    """What the journal says of one attempt."""

    number: int
    first_at: float
    """Its first line."""
    last_at: float
    """Its last sign of life."""
    started: AttemptStarted | None = None
    resumed: Resumed | None = None
    resumed_at: float | None = None
    ended: AttemptEnded | None = None
    ended_at: float | None = None
    finished_at: float | None = None
    """When the run finished in it."""
    failures: list[tuple[float, WorkerFailed]] = field(default_factory=list)
    faults: list[tuple[float, RestartFaulted]] = field(default_factory=list)
    """What befell processes of which others went on in place."""
    planned: RestartPlanned | None = None
    """The restart in place that followed."""
    account: Account | None = None
    """What was told of its end."""
    told_at: float | None = None
    """When that was."""
    recovery: Decision | None = None
    recovery_at: float | None = None
    resume: Decision | None = None
    rejected: dict[str, list[str]] = field(default_factory=dict)
    """Rungs it could not use, with the reasons."""
    saves: list[tuple[float, SaveCommitted]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def failed_at(self) -> float | None:
        """When the first fault of it was seen; None if none was."""
        seen = [at for at, _ in self.failures] + [at for at, _ in self.faults]
        return min(seen, default=None)

    @property
    def reached(self) -> int | None:
        """The highest step it came to, by what it loaded or did. (What an agent records as the last step is
        the highest one ever committed; that may be another attempt's.)"""
        known = [step.step for step in self.steps[-1:]]
        if self.account is not None and self.account.step is not None:
            known.append(self.account.step)  # rank 0 may have ended before it could journal its last steps
        if self.resumed is not None:
            known.append(self.resumed.step)
        return max(known, default=None)


def attempts(lines: list[Line]) -> list[Attempt]:
    """The run's attempts, in order."""
    found: dict[int, Attempt] = {}
    for line in lines:
        number = line.attempt
        if isinstance(line.body, RestartFaulted | RestartPlanned):
            number = line.body.ended or line.attempt
        elif isinstance(line.body, Account):
            number = line.body.attempt
        elif line.attempt not in found and found and _about_an_earlier_one(line.body):
            number = max(found)
        attempt = found.get(number)
        if attempt is None:
            attempt = found[number] = Attempt(number, line.at, line.at)
        _add(attempt, line)
    for step in steps_done(lines):
        found[step.attempt].steps.append(step)
    return [found[number] for number in sorted(found) if _lived(found[number])]


def _about_an_earlier_one(body: AnyEvent | Unknown) -> bool:
    """Whether this may be somebody else's word about an attempt that is over."""
    return (
        isinstance(body, Account)
        or (isinstance(body, AttemptEnded) and body.outcome == "lost")
        or (isinstance(body, Decision) and body.about == RECOVERY)
    )


def _lived(attempt: Attempt) -> bool:
    """Whether it is an attempt at all; a launcher's own lines before its first attempt are none."""
    return bool(attempt.started or attempt.resumed or attempt.steps or attempt.failures or attempt.ended)


def _add(attempt: Attempt, line: Line) -> None:
    body = line.body
    match body:
        case AttemptStarted():
            attempt.started = attempt.started or body
        case Resumed() if attempt.resumed is None:
            attempt.resumed, attempt.resumed_at = body, line.at
        case AttemptEnded() if attempt.ended is None:
            attempt.ended, attempt.ended_at = body, line.at
            if body.outcome == "finished" and attempt.finished_at is None:
                attempt.finished_at = line.at
        case RunFinished():
            attempt.finished_at = line.at
        case WorkerFailed():
            attempt.failures.append((line.at, body))
        case RestartFaulted() if body.ended:
            attempt.faults.append((min(body.at or line.at, line.at), body))
        case RestartPlanned() if body.ended:
            attempt.planned = body
        case Account() if attempt.account is None or attempt.account.alone or not body.alone:
            attempt.account, attempt.told_at = body, line.at
        case Decision(about=about) if about == RECOVERY:
            attempt.recovery, attempt.recovery_at = body, line.at
        case Decision(about=about) if about == RESUME:
            attempt.resume = body
            for option in body.rejected:
                _reject(attempt, option.option, option.why)
        case RungRejected():
            _reject(attempt, body.checkpoint, body.reasons)
        case SaveCommitted():
            attempt.saves.append((line.at, body))
        case _:
            pass  # steps are placed in time afterwards, all together
    if not _about_an_earlier_one(body) and not isinstance(body, OperatorActed):  # these are no sign of life
        attempt.last_at = max(attempt.last_at, line.at)


def _reject(attempt: Attempt, checkpoint: str, reasons: list[str]) -> None:
    known = attempt.rejected.setdefault(checkpoint, [])
    known.extend(reason for reason in reasons if reason not in known)
