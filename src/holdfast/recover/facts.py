"""What the records and the journal say of a run's end, in the form the runbook's judgements need. Reads only.

Like the status, this always answers: what cannot be read is left out and named under `problems`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from holdfast.base import printable
from holdfast.errors import ControlError
from holdfast.journal import REPORTER, JournalLine, read_tail
from holdfast.journal.events import (
    HealthFailed,
    LeaseLost,
    OperatorActed,
    PingFailed,
    SaveFailed,
    StepsDone,
    StopForced,
    StorageAlarm,
    Warned,
    decode_loss,
)
from holdfast.launch import shown_decision
from holdfast.observe import Status, StopState
from holdfast.policy import Cluster, Exclusion, Facts, StopFacts, Suspected, describe_end, episode
from holdfast.record import (
    LAUNCHER_ENDED,
    AttemptRecord,
    ControlDirectory,
    FailureRecord,
    LaunchRecord,
    attempt_numbers,
    end_of,
    excluded,
    failures_of,
    list_names,
    past_attempts,
    read_record,
    tied_to_ranks,
)

# The last lines of a run's last attempts. The cost does not depend on how long the run was.


TAIL_BYTES = 1024 * 1024
"""Bytes read from each writer's file: many thousand steps."""
FILES = 64
"""Most writers of an attempt whose files are read: rank 0, the agents of the first nodes, operators."""
_NAME = re.compile(r"([0-9]{6,})-(.*)-[0-9]+\.jsonl")


def recent_lines(control: ControlDirectory, attempts: Iterable[int]) -> list[JournalLine]:
    """The ends of these attempts' journals, by time; what cannot be read is left out."""
    wanted = set(attempts)
    chosen: dict[int, list[str]] = {}
    for name in sorted(list_names(control.journal), key=_importance):
        match = _NAME.fullmatch(name)
        if match and int(match[1]) in wanted:
            chosen.setdefault(int(match[1]), []).append(name)
    lines = [
        line
        for names in chosen.values()
        for name in names[:FILES]
        for line in read_tail(control.journal / name, TAIL_BYTES)
    ]
    return sorted(lines, key=lambda line: (line.at, line.who, line.seq))


class StepTold(NamedTuple):
    step: int
    seconds: float
    loss: float | None
    samples: str
    """The digest of the step's sample ids; empty if it had none."""


def steps_told(lines: Iterable[JournalLine]) -> Iterator[StepTold]:
    """What rank 0 journalled of every completed step, in the order of the lines."""
    for line in lines:
        body = line.body
        if isinstance(body, StepsDone) and line.who == REPORTER:
            for at, took in enumerate(body.seconds):
                loss = decode_loss(body.loss[at]) if at < len(body.loss) else None
                samples = body.samples[at] if at < len(body.samples) else ""
                yield StepTold(body.first + at, took, loss, samples)


def _importance(name: str) -> tuple[bool, str]:
    """Ranks other than the first say little that others do not, and there may be very many."""
    return ("-rank-" in name and "-rank-0-" not in name, name)


SHOWN = 8
"""Most failures, grounds and notes listed one by one."""
REMEMBERED = 5
"""The nodes of so many last attempts are assumed to be still there."""

T = TypeVar("T")


def facts_of(control: ControlDirectory, status: Status, lines: list[JournalLine]) -> Facts:
    """`lines`: those of the newest attempt at least."""
    number = status.attempt
    problems = list(status.problems)

    def tried(read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except (ControlError, OSError) as error:
            problems.append(printable(str(error)))
            return default

    folder = control.attempt(number)
    decided = tried(lambda: shown_decision(control, number), None)
    end = tried(lambda: end_of(control, number), None)
    failures: list[FailureRecord] = tried(lambda: failures_of(control, number), [])
    told = [
        f"rank {one.rank} on {printable(one.node)}: {describe_end(one.exit_code)}"
        + (f": {printable(one.message, 300)}" if one.message else "")
        for one in failures[:SHOWN]
    ]
    if len(failures) > SHOWN:
        told.append(f"and {len(failures) - SHOWN} more")
    mine = [line for line in lines if line.attempt == number]
    incident, reset = status.incident, status.budget_reset
    return Facts(
        state=status.state,
        detail=status.detail,
        attempt=number,
        exit_code=status.exit_code,
        cause=end.cause if end is not None else "",
        incident=incident.text if incident is not None and incident.attempt == number else "",
        step=status.step,
        saved_step=status.save.step if status.save is not None else None,
        action=decided.action if decided is not None else "",
        decided_code=decided.exit_code if decided is not None else 0,
        verdict=decided.verdict if decided is not None else "",
        reason=printable(decided.reason) if decided is not None else "",
        grounds=[printable(line) for line in decided.evidence[:SHOWN]] if decided is not None else [],
        failures=told,
        hang=str(folder / "hang") if (folder / "hang").is_dir() else "",
        stop=_stop(status.stop, mine),
        lease=f"{status.lease.holder}, {status.lease.detail}" if status.lease is not None else "",
        notes=_notes(mine),
        forgiven=reset is not None and reset.attempt >= number,
        paused=status.paused.describe() if status.paused is not None else "",
        problems=problems,
    )


def _stop(stop: StopState | None, lines: list[JournalLine]) -> StopFacts | None:
    """As in the status, with the reason why any rank was ended; the status has that for rank 0 alone."""
    if stop is None:
        return None
    forced = [line.body.why for line in lines if isinstance(line.body, StopForced)]
    return StopFacts(
        source=stop.source,
        detail=stop.asked_by,
        saved=stop.checkpoint,
        forced=stop.forced or printable(next(iter(forced), "")),
    )


def _notes(lines: list[JournalLine]) -> list[str]:
    """What else in the journal may have to do with the end, the last few of each kind."""
    kinds = (HealthFailed, PingFailed, StorageAlarm, SaveFailed, LeaseLost)
    found = [line.body.render().text for line in lines if isinstance(line.body, kinds)]
    ended = [
        printable(line.body.message)
        for line in lines
        if isinstance(line.body, Warned) and line.body.message.startswith(LAUNCHER_ENDED)
    ]
    return [*found[-SHOWN:], *ended[-1:]]


def suspected(control: ControlDirectory, lines: list[JournalLine], forgiven: int) -> list[Suspected]:
    """Nodes and devices accused by attempts without progress, or by failed health checks.

    Accusations from before a node was readmitted no longer count.
    """
    newest = max(attempt_numbers(control), default=0)
    readmitted = {
        line.body.subject: line.at
        for line in lines
        if isinstance(line.body, OperatorActed) and line.body.action == "readmit"
    }
    found = [
        Suspected(
            node=one.culprit_node,
            device=one.culprit_device or None,
            why=f"attempt {one.number}: {one.cause or 'failed'} there"
            + (f", {printable(one.message, 200)}" if one.message else ""),
            sure=one.named,
        )
        for one in episode(past_attempts(control, before=newest + 1), forgiven)
        if one.culprit_node and one.at >= _readmitted_at(readmitted, one.culprit_node, one.culprit_device)
    ]
    for line in lines:
        body = line.body
        if not isinstance(body, HealthFailed) or line.at < _readmitted_at(readmitted, body.node):
            continue
        if body.status == "critical" or body.kept_out:
            why = "; ".join(map(printable, body.problems)) or "its health check failed"
            found.append(Suspected(node=body.node, why=why, sure=True))
    return found


def _readmitted_at(readmitted: Mapping[str, float], node: str, device: str = "") -> float:
    """When a node, or a device of it, was readmitted last; 0 if never."""
    as_told = Exclusion(node, device or None).describe()
    return max(readmitted.get(node, 0.0), readmitted.get(as_told, 0.0))


def cluster_of(control: ControlDirectory, started: LaunchRecord | None, here: str = "") -> Cluster:
    """The nodes that recently took part, what is excluded, and how many nodes are needed.

    `here`: the node that the command would start on, which can replace an excluded one.
    """
    numbers = attempt_numbers(control)[-REMEMBERED:]
    records = [read_record(control.attempt(one) / "attempt.json", AttemptRecord) for one in numbers]
    nodes = [node for record in reversed(records) if record is not None for node in record.nodes]
    if not nodes and started is not None:
        nodes = [started.node]
    low = started.min_nodes if started is not None else 1
    high = started.max_nodes if started is not None else 0
    return Cluster(
        nodes=list(dict.fromkeys(nodes)),
        spares=[here] if here and here not in nodes else [],
        workers_per_node=max(1, started.workers_per_node) if started is not None else 1,
        min_nodes=low,
        max_nodes=high,
        may_shrink=low < high,
        excluded=[*excluded(control)],
        tied=tied_to_ranks(control),
    )
