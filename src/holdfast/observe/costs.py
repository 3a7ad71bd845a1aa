"""What a run's steps, saves and failures cost, from its journal: what `holdfast plan` plans with. Pure.

Medians, because the first step and the first save of a process are slower than the rest; beside them the
90th percentile, so that a wide spread shows. An attempt that never trained counts neither as running time nor
as a failure of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, mode

from holdfast.account.history import Attempt, attempts
from holdfast.account.incidents import incidents
from holdfast.journal.events import CadenceChosen, Line, SaveCommitted, StepsDone
from holdfast.journal.render import REPORTER


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing, in seconds."""

    median: float
    p90: float
    count: int


@dataclass(frozen=True)
class ObservedCosts:
    """None where nothing was observed."""

    step: Spread | None
    blocked: Spread | None
    """For which a save held training up."""
    commit: Spread | None
    """From the call of a save to its commit in the checkpoint root."""
    down: Spread | None
    """From a fault to the first step after it."""
    running: float
    """Seconds that the attempts ran, all together."""
    failures: int
    interval: int | None
    """Steps between saves at present."""


def observed_costs(lines: list[Line]) -> ObservedCosts:
    """Everything that the journal says about costs."""
    life = [attempt for attempt in attempts(lines) if attempt.resumed is not None or attempt.steps]
    trained = {attempt.number for attempt in life}
    faults = [incident for incident in incidents(lines) if incident.attempt in trained]
    down = [
        fault.seconds_down for fault in faults if fault.resumed_at is not None and fault.overtaken_by is None
    ]
    saves = [line.body for line in lines if isinstance(line.body, SaveCommitted)]
    local = {save.checkpoint for save in saves if save.tier == "local"}
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
    )


def _is_second(save: SaveCommitted, local: set[str]) -> bool:
    """Whether it tells that a checkpoint which the local tier had already is now in the root too."""
    return save.tier == "global" and save.checkpoint in local


def spread(values: Sequence[float]) -> Spread | None:
    """Median and 90th percentile (the smallest value that nine tenths do not exceed)."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(median(ordered), ordered[max(0, -(-len(ordered) * 9 // 10) - 1)], len(ordered))


def _interval(lines: list[Line], life: list[Attempt]) -> int | None:
    """What the newest attempt saves at: as it chose, or else the commonest distance between its saves."""
    for attempt in reversed(life):
        chosen = [
            line.body.interval
            for line in lines
            if line.attempt == attempt.number and isinstance(line.body, CadenceChosen)
        ]
        if chosen:
            return chosen[-1]
        begun = [attempt.resumed.step] if attempt.resumed is not None else []
        saved = [*begun, *(save.step for _, save in attempt.saves if save.tier == "global")]
        gaps = [later - earlier for earlier, later in pairwise(saved) if later > earlier]
        if gaps:
            return mode(gaps)
    return None
