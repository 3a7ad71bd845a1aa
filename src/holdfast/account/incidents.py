"""Incidents, from a fault to the first productive step after it, and what steps, saves and faults cost. Pure.

One attempt's failures are one incident: when a rank dies the others fail with it, and only the first is a
cause. That is so for a restart in place too, even if only the culprit ended. Nobody saw the end of an attempt
that was lost with its launcher; it counts from its last sign of life. If the next fault comes before the run
is back where it was, the next incident takes over from there, so no second is counted in two incidents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, mode

from holdfast.account.answers import account_of_exit_code
from holdfast.account.ledger import JournalledAttempt, Phase, attempts_of, way_back
from holdfast.base import plural, printable
from holdfast.checkpoint.format import parse_name
from holdfast.journal import REPORTER, JournalLine
from holdfast.journal.events import (
    STOP,
    Account,
    CadenceChosen,
    DecisionMade,
    RestartFaulted,
    Resumed,
    SaveCommitted,
    StandingChanged,
    StepsDone,
    WorkerFailed,
)
from holdfast.policy import is_symptom

MAX_OTHERS = 8
"""How many failures are named besides the cause; when a node dies there may be very many."""


@dataclass(frozen=True)
class Incident:
    number: int
    attempt: int
    """The attempt that failed."""
    at: float
    """When the fault was detected, or the last sign of life of an attempt lost with its launcher."""
    what: str
    evidence: list[str]
    decision: str
    detected_at: float
    resumed_at: float | None
    """When a later attempt had its state in place."""
    caught_up_at: float | None
    """When the highest step ever reached was reached again."""
    ended_at: float
    """When the incident ended; the journal's last line while it is open."""
    seconds_down: float
    """From the fault to the first step done after it."""
    seconds_lost: float
    """Time down, and then time spent doing again what had been done."""
    steps_lost: int
    """Steps that had been done and were not in the state that was resumed from."""
    failed_at_step: int
    """The last step that the failed attempt is known to have done."""
    overtaken_by: int | None
    """The incident that began before this one was over."""
    open: bool
    account: Account | None = None
    """The account of it, if the launcher decided."""
    refused: tuple[str, ...] = ()
    """Checkpoints that the resume after it could not use, with the reasons."""
    resumed_step: int | None = None
    copies: tuple[str, ...] = ()
    """Bad copies of what was resumed from, and what was used instead."""
    settled: tuple[str, ...] = ()
    """What was later found out about checkpoints that might have been the cause."""
    phases: tuple[Phase, ...] = ()
    """What `seconds_down` was spent on; adds up to it exactly."""
    traced: bool = False
    """Whether rank 0 itself wrote down how it came back; an older release did not."""


def incidents_of(lines: list[JournalLine]) -> list[Incident]:
    """Every incident of a run, oldest first."""
    life = attempts_of(lines)
    last_at = max((line.at for line in lines), default=0.0)
    faults = [(index, fault) for index in range(len(life)) if (fault := _fault(life, index)) is not None]
    judged = [line.body for line in lines if isinstance(line.body, StandingChanged)]
    incidents: list[Incident] = []
    for position, (index, fault) in enumerate(faults):
        following = faults[position + 1] if position + 1 < len(faults) else None
        incident = _incident(life, position + 1, index, fault, following, last_at)
        suspects = incident.account.suspects if incident.account is not None else []
        verdicts = {body.checkpoint: verdict_on(body) for body in judged if body.checkpoint in suspects}
        incidents.append(replace(incident, settled=tuple(filter(None, verdicts.values()))))
    return incidents


def verdict_on(body: StandingChanged) -> str:
    """What was found out about a checkpoint that had been suspect; empty while nothing has been."""
    verdict = {
        "condemned": "is bad and is not used again",
        "acquitted": "is not to blame and may be used again",
    }.get(body.standing)
    if verdict is None:
        return ""
    name = parse_name(body.checkpoint)
    which = f"the checkpoint at step {name.step} ({body.checkpoint})" if name else body.checkpoint
    return printable(f"{which} {verdict}: {'; '.join(body.evidence[:2])}")


def bad_copies(body: Resumed) -> list[str]:
    """Each bad copy of what was loaded, and what was used instead."""
    return [
        printable(f"a copy of the checkpoint at step {body.step} was bad and is not used again: {copy}")
        for copy in body.bad_copies
    ]


def investigations(incidents: Sequence[Incident]) -> list[list[Incident]]:
    """Incidents that belong together: bad results whose cause is sought, up to the one that names it."""
    together: list[list[Incident]] = []
    for incident in incidents:
        before, account = together[-1][-1].account if together else None, incident.account
        if before is not None and before.undecided and account is not None and account.step == before.step:
            together[-1].append(incident)
        else:
            together.append([incident])
    return together


def stops_of(lines: list[JournalLine]) -> list[Incident]:
    """Every stop that was asked for and has an account, oldest first. The next launch ends its down time."""
    life = attempts_of(lines)
    last_at = max((line.at for line in lines), default=0.0)
    stops: list[Incident] = []
    for index, attempt in enumerate(life):
        asked = attempt.account is not None and attempt.account.kind == STOP and attempt.ended_at is not None
        if asked and _fault(life, index) is None:
            at = attempt.ended_at or attempt.last_at
            stops.append(_incident(life, len(stops) + 1, index, _Fault(at, at), None, last_at))
    return stops


@dataclass(frozen=True)
class _Fault:
    at: float
    detected_at: float


def _fault(life: list[JournalledAttempt], index: int) -> _Fault | None:
    """When an attempt failed, or None if it did not."""
    attempt = life[index]
    outcome = attempt.ended.outcome if attempt.ended else ""
    # Workers that end badly because the run was asked to stop are not a fault, unless treated as one.
    if attempt.failed_at is not None and (outcome != "stopped" or attempt.recovery):
        return _Fault(_since(attempt, attempt.failed_at), attempt.failed_at)
    if outcome == "failed" and attempt.ended_at is not None:
        return _Fault(_since(attempt, attempt.ended_at), attempt.ended_at)
    if outcome == "lost" and attempt.ended_at is not None:
        return _Fault(attempt.last_at, attempt.ended_at)
    if attempt.ended is None and attempt.finished_at is None and index + 1 < len(life):
        return _Fault(attempt.last_at, life[index + 1].first_at)
    if attempt.ended is None and attempt.told_at is not None:  # by a node with nobody left to decide for it
        return _Fault(min(attempt.last_at, attempt.told_at), attempt.told_at)
    return None


def headline(account: Account) -> str:
    """`rank 1 on node-b was killed by SIGKILL in step 25`."""
    return printable(f"{account.who} {account.what}")


_ORIGIN = re.compile(
    r"from (?:step (?P<step>\d+)|the beginning)(?P<open>, or from step \d+ if its save[^:]*)?"
    r"(?:, as nothing was saved yet)?: (?P<redo>(?:at most )?\d+ steps?|nothing) to redo"
)
"""Where an account says that training would go on from, as `answers` writes it."""


def done_of(account: Account, resumed: int | None) -> str:
    """What was done, as it turned out. `resumed`: the step that the run went on from in the end, None while
    that is not known. The intended checkpoint may have been refused since, or a later one completed."""
    origin = _ORIGIN.search(account.done)
    if resumed is None or account.ends or account.step is None or origin is None:
        return account.done
    meant = int(origin["step"] or 0)
    if resumed > account.step or (resumed == meant and not origin["open"]):
        return account.done  # what lies beyond the last step was asked for, and is not part of this incident
    where = f"from step {resumed}" if resumed else "from the beginning"
    if resumed < meant:
        where += ", as what was saved later was refused"
    elif resumed > meant:
        where += ", whose save was completed meanwhile"
    redo = max(0, account.step - resumed)
    left = plural(redo, "step") if redo else "nothing"
    return f"{account.done[: origin.start()]}{where}: {left} to redo{account.done[origin.end() :]}"


def _since(attempt: JournalledAttempt, seen: float) -> float:
    """When it began to cost time: a rank that stood still did so before anybody saw it."""
    began = attempt.account.began if attempt.account is not None else None
    return min(seen, began) if began is not None else seen


def _incident(
    life: list[JournalledAttempt],
    number: int,
    index: int,
    fault: _Fault,
    following: tuple[int, _Fault] | None,
    last_at: float,
) -> Incident:
    failed, later = life[index], life[index + 1 :]
    account = failed.account or (None if later else _untold(life[: index + 1]))
    until = len(life) if following is None else following[0] + 1
    highest = max((reached for one in life[: index + 1] if (reached := one.reached) is not None), default=0)
    position = next((one.reached for one in reversed(life[: index + 1]) if one.reached is not None), 0)

    resumed = next((one for one in life[index + 1 : until] if one.resumed_at is not None), None)
    taken = resumed.resumed if resumed is not None else None
    steps = [step for one in life[index + 1 : until] for step in one.steps]
    first_done = steps[0].end if steps else None
    # A run may finish without passing its old highest step; then everything lost was done again by its end.
    finished = [one.finished_at for one in life[index + 1 : until] if one.finished_at is not None]
    caught_up = next((step.end for step in steps if step.step >= highest), finished[0] if finished else None)

    overtaken = following is not None and caught_up is None
    ended = caught_up if caught_up is not None else following[1].at if following is not None else last_at
    ended = max(ended, fault.at)
    back = max(fault.at, first_done if first_done is not None else ended)
    trained = next((one for one in life[index + 1 : until] if one.steps), None)
    phases = way_back(failed, life[index + 1 : until], fault.at, back)
    return Incident(
        number=number,
        attempt=failed.number,
        at=fault.at,
        what=headline(account) if account else _what(failed),
        account=account,
        refused=tuple(
            printable(f"{name}: {'; '.join(why) or 'rejected'}")
            for name, why in (_passed_over(resumed or later[0]) if later else [])
        ),
        resumed_step=taken.step if taken is not None else None,
        copies=tuple(
            bad_copies(resumed.resumed) if resumed is not None and resumed.resumed is not None else ()
        ),
        evidence=_evidence(failed, later[0] if later else None),
        decision=_decision(failed, resumed or (later[0] if later else None)),
        detected_at=fault.detected_at,
        resumed_at=resumed.resumed_at if resumed else None,
        caught_up_at=caught_up,
        ended_at=ended,
        seconds_down=sum(phase.seconds for phase in phases),
        seconds_lost=ended - fault.at,
        steps_lost=_steps_lost(position, resumed, steps[0].step if steps else None),
        failed_at_step=position,
        overtaken_by=number + 1 if overtaken else None,
        open=caught_up is None and not overtaken,
        phases=phases,
        traced=trained is not None and trained.ready is not None,
    )


def _untold(life: list[JournalledAttempt]) -> Account | None:
    """What can be said about the run's end if the journal has no account of it."""
    failed = life[-1]
    if failed.ended is None or failed.ended.outcome != "failed" or failed.recovery is not None:
        return None
    saved = [save.step for one in life for _, save in one.saves if save.tier != "local"]
    return account_of_exit_code(
        failed.number, failed.ended.exit_code, failed.reached, max(saved, default=None)
    )


def _steps_lost(position: int, resumed: JournalledAttempt | None, first: int | None) -> int:
    if resumed is not None and resumed.resumed is not None:
        return max(0, position - resumed.resumed.step)
    return max(0, position - first + 1) if first is not None else 0


def _root(attempt: JournalledAttempt) -> WorkerFailed | None:
    """The failure that caused the others: the one recovery named, else a death by signal, else the first."""
    named = attempt.recovery.details.get("root_rank") if attempt.recovery else None
    ordered = [failure for _, failure in sorted(attempt.failures, key=lambda pair: pair[0])]
    by_name = [failure for failure in ordered if failure.rank == named]
    # SIGTERM is what the launcher itself sends to the others, so it never marks a cause.
    by_signal = [f for f in ordered if f.exit_code < 0 and f.signal != "SIGTERM" and f.exit_code != -15]
    return next(iter(by_name or by_signal or [f for f in ordered if not f.left]), None)


def _first_fault(attempt: JournalledAttempt) -> RestartFaulted | None:
    """The first fault of a restart in place that is not merely the loss of a peer."""
    ordered = sorted(attempt.faults, key=lambda pair: (is_symptom(0, pair[1].detail), pair[0]))
    return ordered[0][1] if ordered else None


def _what(attempt: JournalledAttempt) -> str:
    fault = _first_fault(attempt)
    if fault is not None:  # it says more than the record of a process that did not end
        return fault.summary()
    root = _root(attempt)
    if root is not None:
        return root.summary()
    if attempt.ended is not None and attempt.ended.outcome == "failed":
        code = f" with exit code {attempt.ended.exit_code}" if attempt.ended.exit_code else ""
        return f"attempt {attempt.number} failed{code}"
    return f"attempt {attempt.number} was lost with its launcher"


def _evidence(attempt: JournalledAttempt, after: JournalledAttempt | None) -> list[str]:
    """What recovery rested on, what the journal adds to that, and why higher rungs were not used."""
    if attempt.account is not None:
        root = _root(attempt)
        process = [f"rank {root.rank} was process {root.pid} on {root.node}"] if root is not None else []
        above = (
            [f"{name}: {'; '.join(why) or 'rejected'}" for name, why in _passed_over(after)] if after else []
        )
        return [printable(text) for text in (*attempt.account.why, *process, *above)]
    decided = attempt.recovery.evidence if attempt.recovery is not None else []
    evidence: list[str] = []
    root = _root(attempt)
    if root is not None:
        if not any(f"rank {root.rank} " in text for text in decided):
            how = (
                f"signal {root.signal or -root.exit_code}"
                if root.exit_code < 0
                else f"exit code {root.exit_code}"
            )
            evidence.append(f"rank {root.rank}, pid {root.pid} on {root.node}: {how}")
        if root.section:
            evidence.append(f"last section: {root.section}")
        if root.error_file:
            evidence.append(f"error file: {root.error_file}")
    elif attempt.ended is None and not attempt.faults:
        evidence.append("no end was recorded before the next attempt")
    first = _first_fault(attempt)
    others_in_place = [fault for _, fault in attempt.faults if fault is not first]
    evidence.extend(f"followed by: {fault.summary()}" for fault in others_in_place[:MAX_OTHERS])
    evidence.extend(decided)
    if not any(text.startswith("ranks ") for text in decided):  # recovery has named the others already
        others = [failure for _, failure in attempt.failures if failure is not root]
        evidence.extend(f"followed by: {failure.summary()}" for failure in others[:MAX_OTHERS])
        if len(others) > MAX_OTHERS:
            evidence.append(f"followed by {len(others) - MAX_OTHERS} more")
    if after is not None:
        evidence.extend(f"{name}: {'; '.join(why) or 'rejected'}" for name, why in _passed_over(after))
    return [printable(text) for text in dict.fromkeys(evidence)]


def _passed_over(attempt: JournalledAttempt) -> list[tuple[str, list[str]]]:
    """The rejected rungs above the one it used. Lower ones explain nothing."""
    taken = attempt.resumed.step if attempt.resumed is not None else -1
    return [
        (given, why)
        for given, why in attempt.rejected.items()
        if (name := parse_name(given)) is None or name.step > taken
    ]


def _decision(failed: JournalledAttempt, after: JournalledAttempt | None) -> str:
    parts = [failed.recovery.chosen] if failed.recovery is not None else []
    if failed.account is not None:
        resumed = after.resumed.step if after is not None and after.resumed is not None else None
        parts = [done_of(failed.account, resumed)]
    if failed.planned is not None:
        parts.append(f"in place, with {plural(failed.planned.world_size, 'rank')}")
    if after is not None:
        if after.resumed is not None and failed.account is None:  # an account already says it
            parts.append(resume_text(after.resumed.checkpoint, after.resumed.step))
        elif after.resume is not None:
            parts.append(_chosen(after.resume))
        if not parts:
            parts.append("start again")
    return printable("; ".join(parts)) if parts else "none yet"


def _chosen(resume: DecisionMade) -> str:
    name = parse_name(resume.chosen)
    return resume_text(resume.chosen, name.step) if name else resume.chosen


def resume_text(checkpoint: str | None, step: int) -> str:
    """Where a resume goes on: "resume from step 10 (step_00000010-3fa9c1d2)" or "fresh start"."""
    return "fresh start" if checkpoint is None else f"resume from step {step} ({checkpoint})"


# What a run's steps, saves and failures cost, from its journal; `holdfast plan` plans with it. Pure.
#
# It gives medians, because the first step and the first save of a process are slower than the rest, and the
# 90th percentile, so that a wide spread shows. An attempt that never trained counts neither as running time
# nor as a failure of training.


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing, in seconds."""

    median: float
    p90: float
    count: int


@dataclass(frozen=True)
class ObservedCosts:
    """What was observed; None for whatever was not."""

    step: Spread | None
    blocked: Spread | None
    """How long a save held up training."""
    commit: Spread | None
    """From the call of a save to its commit in the checkpoint root."""
    down: Spread | None
    """From a fault to the first step after it."""
    running: float
    """How many seconds the attempts ran, all together."""
    failures: int
    interval: int | None
    """Steps between saves to the checkpoint root at present."""
    local_blocked: Spread | None = None
    """How long a save to the local tier alone held training up."""
    local_commit: Spread | None = None
    local_interval: int | None = None


def observed_costs(lines: list[JournalLine]) -> ObservedCosts:
    """Everything that the journal says about costs."""
    life = [attempt for attempt in attempts_of(lines) if attempt.resumed is not None or attempt.steps]
    trained = {attempt.number for attempt in life}
    faults = [incident for incident in incidents_of(lines) if incident.attempt in trained]
    down = [
        fault.seconds_down for fault in faults if fault.resumed_at is not None and fault.overtaken_by is None
    ]
    saves = [line.body for line in lines if isinstance(line.body, SaveCommitted)]
    local = {save.checkpoint for save in saves if save.tier == "local"}
    rooted = {save.checkpoint for save in saves if save.tier == "global"}
    locally = [save for save in saves if save.tier == "local" and save.checkpoint not in rooted]
    steps = [
        seconds
        for line in lines
        if isinstance(line.body, StepsDone) and line.who == REPORTER
        for seconds in line.body.seconds
    ]
    return ObservedCosts(
        step=spread(steps),
        blocked=spread([save.blocked_seconds for save in saves if not _is_second(save, local)]),
        commit=spread([save.seconds for save in saves if save.tier == "global"]),
        down=spread(down),
        running=sum(max(0.0, attempt.last_at - attempt.first_at) for attempt in life),
        failures=len(faults),
        interval=_interval(lines, life),
        local_blocked=spread([save.blocked_seconds for save in locally]),
        local_commit=spread([save.seconds for save in locally]),
        local_interval=_interval(lines, life, "local") if locally else None,
    )


def _is_second(save: SaveCommitted, local: set[str]) -> bool:
    """Whether it reports that a checkpoint which the local tier already had is now in the root too."""
    return save.tier == "global" and save.checkpoint in local


def spread(values: Sequence[float]) -> Spread | None:
    """The median and the 90th percentile (the smallest value that nine tenths do not exceed)."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(median(ordered), ordered[max(0, -(-len(ordered) * 9 // 10) - 1)], len(ordered))


def _interval(lines: list[JournalLine], life: list[JournalledAttempt], tier: str = "global") -> int | None:
    """The newest attempt's interval: the one it chose, or else the commonest distance between its saves."""
    for attempt in reversed(life):
        chosen = [
            line.body.interval
            for line in lines
            if line.attempt == attempt.number
            and isinstance(line.body, CadenceChosen)
            and line.body.tier == tier
        ]
        if chosen:
            return chosen[-1]
        begun = [attempt.resumed.step] if attempt.resumed is not None else []
        saved = [*begun, *(save.step for _, save in attempt.saves if save.tier == tier)]
        gaps = [later - earlier for earlier, later in pairwise(saved) if later > earlier]
        if gaps:
            return mode(gaps)
    return None
