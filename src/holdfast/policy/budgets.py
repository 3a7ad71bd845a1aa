"""How many restarts a run may still make, and how many launches.

Guarantee: restarts are counted over the run's whole durable history, across launches, and refunded only
when the highest-ever committed step rises, when an attempt finishes, or when an operator resets them; a run
that somebody has sent elsewhere (`checkpoint.resume_from`, a pin) is measured by what it reached after that.
So neither a quick rejoin nor a new launch buys restarts, and a run that makes progress is never stopped for
the number of faults it survived.

Launches that nobody watches (a pod's restart policy, a requeue, a shell loop) are bounded as well: after
`MAX_FAILED_LAUNCHES` that failed, or `MAX_LAUNCHES` whatever ended them, in a row and without progress, the
next is refused. Only launches of the same script, arguments and settings count as a row: whoever changed
something, or reset the budget, may launch again.

`launch.max_restarts` is the cap for the whole job. Below it each cause has its own, in `BUDGETS`: a high
`max_restarts` is meant for machines that fail often, not for one fault that comes back a hundred times.
Preemption uses up none of the job's restarts, because it says nothing about the job; it is bounded by its own
numbers alone.

What counts as progress is a *committed* step whose checkpoint is neither suspect nor condemned when the
attempt ends. To ask for a *proven* one would be too much: a checkpoint is proven at the resume that uses it,
so a run that only ever saves would earn nothing. It does no harm if bad state has been committed: the highest
step ever counts, so the same steps, replayed from a lower rung, earn nothing a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from holdfast.policy.diagnosis import Diagnosis
from holdfast.policy.results import Findings, Rejection
from holdfast.policy.signs import Cause

MAX_REGROUPS = 10
"""Restarts for a change of membership allowed without progress; after that, new nodes have to wait."""
MAX_REQUEUES = 5
"""How often a job may be given back to its scheduler without progress; then it needs a person."""
MAX_FAILED_LAUNCHES = 1 + MAX_REQUEUES
"""Launches in a row that may fail without progress: the first, and as many requeues as are allowed."""
LONG_LAUNCH = 3600.0
"""A launch that failed after more seconds than this does not count as failing at once, unless it is known to
have made no progress: the cost of a loop of such launches is bounded by `MAX_LAUNCHES` alone."""
RERUNS = 2
"""Restarts without progress after exit code 16: one on other devices tells a bad device from bad work, the
second confirms it. A step that is still rejected then has failed validation (17)."""


class CauseBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What one cause may cost without progress."""

    restarts: int
    repeats: int
    """How often the very same cycle may be run again; see `variation`."""
    vary_first: bool = False
    """Whether to vary something before repeating."""
    per_window: int = 0
    window: float = 0.0
    """At most this many restarts within this many seconds; 0 means no such limit."""
    why: str


BUDGETS: Mapping[Cause, CauseBudget] = {
    Cause.PREEMPTION: CauseBudget(
        restarts=20,
        repeats=20,
        per_window=5,
        window=3600.0,
        why="it says nothing about the job; but a job that never gets to its next save only burns time",
    ),
    Cause.INFRASTRUCTURE: CauseBudget(
        restarts=12,
        repeats=3,
        why="what comes from outside passes, and a rack that restarts takes several attempts with it",
    ),
    Cause.DEVICE: CauseBudget(
        restarts=8,
        repeats=1,
        vary_first=True,
        why="a broken device stays broken: other devices first, then the same ones once more",
    ),
    Cause.JOB: CauseBudget(
        restarts=4,
        repeats=2,
        why="an error of the script repeats; one that says what it is does not even get a third run",
    ),
    Cause.DATA: CauseBudget(
        restarts=4,
        repeats=2,
        why="as with the job's own errors: the same samples come again",
    ),
    Cause.CHECKPOINT: CauseBudget(
        restarts=4,
        repeats=1,
        vary_first=True,
        why="the same checkpoint fails again: a lower rung first, at most two, then once more",
    ),
    Cause.HANG: CauseBudget(
        restarts=6,
        repeats=1,
        why="a hang costs its whole timeout each time; a race may pass, the second time something varies",
    ),
    Cause.UNKNOWN: CauseBudget(
        restarts=6,
        repeats=2,
        why="nothing is known: first the same place, twice, as most faults pass; then something varies",
    ),
}
"""How many restarts without progress each cause is given, within `launch.max_restarts`."""

MAX_LAUNCHES = BUDGETS[Cause.PREEMPTION].restarts
"""Launches in a row that may end without progress, whatever ended them: a launch that was killed or stopped
before it could save was at best preempted, and no cause is given more than preemption is."""

MOST_IDENTICAL = 1 + max(RERUNS, *(b.repeats for c, b in BUDGETS.items() if c is not Cause.PREEMPTION))
"""How often the very same cycle is ever run without progress; for preemption, as often as it may restart."""


class PastAttempt(Diagnosis, frozen=True, kw_only=True):
    """One attempt as recovery sees it, with what ended it. Whatever an older release did not record has its
    default."""

    number: int
    launch: str
    started_with: str = ""
    """What was started, as a digest of script, arguments and settings; empty if not known."""
    outcome: str
    """finished, failed, stopped or lost (its launcher died before it could write an end)."""
    cause: str = ""
    highest_step: int = 0
    """Highest step that any attempt had committed when it ended; 0 if not known."""
    saved: int = 0
    """Highest step that it committed itself; 0 if none, or not known."""
    sent: bool = False
    """Whether somebody told it where to begin: then it is not measured by what the run had reached before."""
    began: bool = True
    """Whether any rank got as far as Run or a step; True if not known."""
    seconds: float = 0.0
    """How long it lasted."""
    at: float = 0.0
    """When it ended, in seconds since 1970; 0 if not known."""
    nodes: list[str] = msgspec.field(default_factory=list)
    """In the plain order: by rank before any rotation."""
    node_count: int = 0
    world_size: int = 0
    placement: str = ""
    """Which rank ran on which device, in the words of `placement.describe_devices`."""
    rotation: int = 0
    """The shift that `placement` came from."""
    last_step: int | None = None
    """The last step that a rank is known to have completed; None if not known."""
    rejection: Rejection | None = None
    """What the ranks rejected, if that is what ended it."""
    action: str = ""
    """What was decided after it."""
    decided: Findings = Findings()
    """What that decision found out and told the next attempt. Flat in the record (`record.history`)."""


def highest_step(history: Sequence[PastAttempt]) -> int:
    """The highest step ever committed."""
    return max((attempt.highest_step for attempt in history), default=0)


def since_progress(
    history: Sequence[PastAttempt], forgiven: int = 0
) -> list[tuple[PastAttempt | None, PastAttempt]]:
    """The attempts after the last one that raised the highest step or finished, each with the one before it.

    Those up to number `forgiven` do not count: an operator reset the budget after them.
    """
    found: list[tuple[PastAttempt | None, PastAttempt]] = []
    moved = _moved(history)
    for before, attempt in _pairs(history):
        found.append((before, attempt))
        if attempt.number in moved or attempt.outcome == "finished":
            found.clear()
    return [(before, attempt) for before, attempt in found if attempt.number > forgiven]


def episode(history: Sequence[PastAttempt], forgiven: int = 0) -> list[PastAttempt]:
    """The attempts that ended at the present highest step, oldest first.

    These are the attempts after the last progress, and the one that made it, since it too failed at that
    step; but not one that finished.
    """
    ordered, moved = [attempt for _, attempt in _pairs(history)], _moved(history)
    start = 0
    for index, attempt in enumerate(ordered):
        if attempt.number in moved:
            start = index
        if attempt.outcome == "finished":
            start = index + 1
    return [attempt for attempt in ordered[start:] if attempt.number > forgiven]


def _moved(history: Sequence[PastAttempt]) -> set[int]:
    """The attempts that made progress: they got further than any before them or, once somebody has sent the
    run elsewhere, further than any since. Being sent back by recovery's own decision does not count."""
    found: set[int] = set()
    best, reached, sent = 0, 0, False
    for _, attempt in _pairs(history):
        if attempt.sent:
            reached, sent = 0, True
        if attempt.highest_step > best or (sent and attempt.saved > reached):
            found.add(attempt.number)
        best, reached = max(best, attempt.highest_step), max(reached, attempt.saved)
    return found


def _pairs(history: Sequence[PastAttempt]) -> Iterator[tuple[PastAttempt | None, PastAttempt]]:
    before: PastAttempt | None = None
    for attempt in sorted(history, key=lambda a: a.number):
        yield before, attempt
        before = attempt


def _restarts(history: Sequence[PastAttempt], forgiven: int) -> Iterator[PastAttempt]:
    """For each restart since the last progress, the attempt that made it necessary.

    The first attempt of a launch is not a restart: somebody asked for it.
    """
    for before, attempt in since_progress(history, forgiven):
        if before is not None and before.launch == attempt.launch and before.outcome != "stopped":
            yield before


def restarts_without_progress(history: Sequence[PastAttempt], forgiven: int = 0) -> int:
    """Restarts since the last progress that the job has to answer for."""
    return sum(before.cause != Cause.PREEMPTION for before in _restarts(history, forgiven))


def restarts_after(cause: Cause, history: Sequence[PastAttempt], forgiven: int = 0) -> int:
    """Restarts since the last progress for one cause."""
    return sum(before.cause == cause for before in _restarts(history, forgiven))


def restarts_left(history: Sequence[PastAttempt], max_restarts: int, forgiven: int = 0) -> int:
    return max(0, max_restarts - restarts_without_progress(history, forgiven))


def recent(cause: Cause, attempts: Sequence[PastAttempt], now: float) -> int:
    """How many of the attempts ended for a cause within its window, counting those of unknown time."""
    window = BUDGETS[cause].window
    return sum(a.cause == cause and (not a.at or not now or now - a.at <= window) for a in attempts)


def most_restarts(max_restarts: int) -> int:
    """The most restarts that recovery ever makes without progress, whatever happens."""
    if max_restarts == 0:
        return 0
    own = sum(budget.restarts for cause, budget in BUDGETS.items() if cause is not Cause.PREEMPTION)
    return min(max_restarts, own) + BUDGETS[Cause.PREEMPTION].restarts


def may_regroup(history: Sequence[PastAttempt]) -> bool:
    """Whether another restart for a change of membership is allowed. They are not failures, yet bounded."""
    regroups = sum(
        before is not None and before.launch == attempt.launch and before.outcome == "stopped"
        for before, attempt in since_progress(history)
    )
    return regroups < MAX_REGROUPS


def launches_without_progress(
    history: Sequence[PastAttempt], started_with: str, forgiven: int = 0
) -> list[list[PastAttempt]]:
    """The launches in the present row, oldest first, each with its attempts.

    A row consists of launches of the very same thing. A launch that got further than any before it, or
    finished, breaks it off, and so does one that an operator has forgiven. If it is not known what is
    started, there is no row.
    """
    launches: dict[str, list[PastAttempt]] = {}
    moved = _moved(history)
    for _, attempt in _pairs(history):
        launches.setdefault(attempt.launch, []).append(attempt)
    row: list[list[PastAttempt]] = []
    for attempts in reversed(launches.values()):
        same = bool(started_with) and attempts[0].started_with == started_with
        got_on = any(one.number in moved or one.outcome == "finished" for one in attempts)
        if got_on or not same or attempts[-1].number <= forgiven:
            break
        row.append(attempts)
    return row[::-1]


def launch_refused(history: Sequence[PastAttempt], started_with: str, forgiven: int = 0) -> str:
    """Why another launch of the same thing is refused, in words; empty if it may begin."""
    row = launches_without_progress(history, started_with, forgiven)
    failed = [one for one in row if _has_failed(one, known=highest_step(history) > 0)]
    if len(failed) < MAX_FAILED_LAUNCHES and len(row) < MAX_LAUNCHES:
        return ""
    told = f", {len(failed)} of which failed" if failed and len(failed) < len(row) else ""
    last = row[-1][-1]
    how = last.message or (f"code {last.exit_code}" if last.exit_code else last.outcome)
    best = highest_step(history)
    return (
        f"{len(row)} launches in a row of the same script and settings{told} made no progress beyond step "
        f"{best}; the last one's attempt {last.number} ended with: {how}"
    )


def _has_failed(launch: Sequence[PastAttempt], *, known: bool) -> bool:
    """Whether a launch failed and achieved nothing. `known`: whether this run has ever shown any progress. If
    it has not, perhaps because its script saves by itself and tells nobody, then a launch that lasted may
    have made some."""
    if launch[-1].outcome != "failed" or launch[-1].cause == Cause.PREEMPTION:
        return False
    return known or sum(attempt.seconds for attempt in launch) < LONG_LAUNCH
