"""What a run's journal says of its stops and requeues: who asked for the last stop, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from holdfast.journal.cluster_events import JobFound, RequeueAsked, StopAsked
from holdfast.journal.events import Line, SaveCommitted
from holdfast.policy.stopping import Source, StopRequest

_SIGNAL = re.compile(r"\bSIG[A-Z0-9]+\b")


class LastStop(msgspec.Struct, frozen=True, kw_only=True):
    """Of the newest attempt."""

    attempt: int = 0
    request: StopRequest | None = None
    """None if nobody asked for a stop."""
    settled: RequeueAsked | None = None
    """What was decided about queueing again, if it was."""
    step: int = 0
    """The highest that is saved, by any attempt."""
    requeue: str = ""
    """The run's slurm.requeue, if its job is known."""


def last_stop(lines: Sequence[Line]) -> LastStop:
    newest = max((line.attempt for line in lines), default=0)
    request: StopRequest | None = None
    settled: RequeueAsked | None = None
    for line in lines:
        body = line.body
        if line.attempt != newest:
            continue
        if isinstance(body, StopAsked) and request is None:
            request = _request(body, line.at)
        elif isinstance(body, RequeueAsked):
            settled = body
    bodies = [line.body for line in lines]
    saved = (one.step for one in bodies if isinstance(one, SaveCommitted) and one.tier == "global")
    found = [one.requeue for one in bodies if isinstance(one, JobFound)]
    return LastStop(
        attempt=newest,
        request=request,
        settled=settled,
        step=max(saved, default=0),
        requeue=found[-1] if found else "",
    )


def _request(asked: StopAsked, at: float) -> StopRequest:
    named = _SIGNAL.search(asked.detail) if asked.source == Source.SIGNAL else None
    try:
        source = Source(asked.source)
    except ValueError:
        source = Source.OPERATOR  # a newer release's: in doubt a person asked, and the job stays away
    return StopRequest(
        source=source,
        detail=asked.detail,
        signal=named[0] if named else "",
        sender=asked.sender,
        node=asked.node,
        rank=asked.rank,
        at=at,
    )
