"""One line of the journal, and every event that it can hold.

Every line is one JSON object: the same frame (`v`, `at`, `who`, `attempt`, `seq`) around one event, tagged by
`event`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, get_args

import msgspec

from holdfast.journal import events
from holdfast.journal.event import Unknown
from holdfast.journal.events import FunctionRestarted, StepsDone

JOURNAL_VERSION = 1
REPORTER = "rank-0"
"""The rank whose steps are shown."""

AnyEvent: TypeAlias = (
    events.RunCreated
    | events.LeaseClaimed
    | events.LeaseLost
    | events.AttemptStarted
    | events.WorkersStarted
    | events.RankStarted
    | events.WorkerFailed
    | events.AttemptEnded
    | events.DecisionMade
    | events.RungRejected
    | events.Resumed
    | events.SaveStarted
    | events.SaveCommitted
    | events.SaveFailed
    | events.SaveSkipped
    | events.CheckpointsDeleted
    | events.CopyDrained
    | events.DrainFailed
    | events.CopyDeleted
    | events.CopyFetched
    | events.ReplicaFailed
    | events.CopyReplicated
    | events.CopyReplaced
    | events.CopyQuarantined
    | events.CopyReadBack
    | events.CopiesDropped
    | events.StorageAlarm
    | events.CadenceChosen
    | events.StepsDone
    | events.StepRejected
    | events.Verdict
    | events.ProbationEnded
    | events.StandingChanged
    | events.ThroughputLow
    | events.DataSkipped
    | events.DeterminismMeasured
    | events.StopAsked
    | events.StopHastened
    | events.StopAgreed
    | events.StopSaved
    | events.StopForced
    | events.JobFound
    | events.RequeueAsked
    | events.HealthFailed
    | events.PingFailed
    | events.StragglersReported
    | events.StragglerFound
    | events.RestartFaulted
    | events.RestartPlanned
    | events.RestartHandedOver
    | events.FunctionRestarted
    | events.Account
    | events.RunFinished
    | events.OperatorActed
    | events.Warned
)

EVENT_NAMES: tuple[str, ...] = tuple(str(kind.__struct_config__.tag) for kind in get_args(AnyEvent))
"""Every tag this release writes."""

TIMES = (-1e9, 1e11)
"""The range of `at`: from a clock that was never set, to the year 5138. No clock shows a time outside it."""


class JournalLine(msgspec.Struct, kw_only=True):
    """One line of the journal."""

    v: int
    at: float
    """Wall-clock seconds since 1970."""
    who: str
    """`agent-<node>`, `rank-<global rank>`, `drain`, `read-back` or `operator`."""
    attempt: int
    seq: int
    """Rises by one with each of a writer's lines, so that a gap shows."""
    body: AnyEvent | Unknown


class _LineHead(msgspec.Struct):
    v: int
    at: float
    who: str
    attempt: int
    seq: int
    body: msgspec.Raw


_frame_decoder = msgspec.json.Decoder(_LineHead)
_body_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(AnyEvent)
_loose_decoder = msgspec.json.Decoder(dict[str, Any])


def parse_line(raw: bytes) -> JournalLine | None:
    """One line, or None if it is not a journal line."""
    try:
        frame = _frame_decoder.decode(raw)
        try:
            body = _body_decoder.decode(frame.body)
        except msgspec.ValidationError:
            fields = _loose_decoder.decode(frame.body)
            body = Unknown(event=str(fields.pop("event", "?")), fields=fields)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not TIMES[0] <= frame.at <= TIMES[1]:
        return None
    return JournalLine(v=frame.v, at=frame.at, who=frame.who, attempt=frame.attempt, seq=frame.seq, body=body)


def condense(lines: Iterable[JournalLine]) -> list[JournalLine]:
    """The lines worth a person's time. Every rank does the same steps and starts again in the same way, so
    only rank 0's lines are kept, and its neighbouring batches of steps are joined into one."""
    joined: list[JournalLine] = []
    for line in lines:
        if line.who != REPORTER and isinstance(line.body, StepsDone | FunctionRestarted):
            continue
        if not isinstance(line.body, StepsDone):
            joined.append(line)
            continue
        before = joined[-1] if joined else None
        if (
            before is not None
            and isinstance(before.body, StepsDone)
            and line.attempt == before.attempt
            and line.body.first == before.body.first + len(before.body.seconds)
        ):
            before.body.loss.extend([None] * (len(before.body.seconds) - len(before.body.loss)))
            before.body.loss.extend(line.body.loss)
            before.body.seconds.extend(line.body.seconds)
            before.at = line.at
        else:
            joined.append(_own(line, line.body))
    return joined


def _own(line: JournalLine, steps: StepsDone) -> JournalLine:
    """A copy that later batches may be joined to without touching the caller's line."""
    body = StepsDone(first=steps.first, seconds=[*steps.seconds], loss=[*steps.loss])
    return JournalLine(v=line.v, at=line.at, who=line.who, attempt=line.attempt, seq=line.seq, body=body)
