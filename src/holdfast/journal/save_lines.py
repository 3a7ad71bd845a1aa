"""What is printed of a save: one line for each of its events, stable and made to be searched for.

```
holdfast: save scheduled: step 12, step_00000012-3fa9c1d2
holdfast: save committed: step 12, step_00000012-3fa9c1d2, local, 1.2 GiB in 310 ms, training …
holdfast: save replicated: step 12, step_00000012-3fa9c1d2, rank 0's part on node-b in 800 ms
holdfast: save drained: step 12, step_00000012-3fa9c1d2, to the checkpoint root, 1.2 GiB in 3.1 s
holdfast: save verified: step 12, step_00000012-3fa9c1d2, read back, 1.2 GiB in 6.0 s
```
`docs/guides/async-saves.md` has the table of them. What fails has words of its own: `save failed` is an error
in the log of rank 0 and so not printed a second time.
"""

from __future__ import annotations

from collections import deque

from holdfast.journal.base import Event
from holdfast.journal.events import (
    CopyDrained,
    CopyReadBack,
    CopyReplicated,
    DrainFailed,
    ReplicaFailed,
    SaveCommitted,
    SaveSkipped,
    SaveStarted,
)
from holdfast.journal.text import duration, printable, size

KEPT = 100
"""Local commits that are remembered: what comes to the root later was drained there."""


class SaveLines:
    """Lines for the events of one run's saves, in the order in which they came."""

    def __init__(self) -> None:
        self._local: deque[str] = deque(maxlen=KEPT)

    def line(self, body: object) -> str | None:
        """What to print for an event; None if it is none of a save's."""
        if not isinstance(body, Event):
            return None
        match body:
            case SaveStarted():
                return _line("scheduled", body.step, body.checkpoint)
            case SaveCommitted():
                return self._committed(body)
            case CopyReplicated():
                where = f"rank {body.rank}'s part on {printable(body.node)} in {duration(body.seconds)}"
                return _line("replicated", body.step, body.checkpoint, where)
            case CopyDrained():
                took = f"{size(body.bytes)} in {duration(body.seconds)}"
                return _line("drained", body.step, body.checkpoint, f"to {printable(body.remote)}", took)
            case CopyReadBack():
                took = f"{size(body.bytes)} in {duration(body.seconds)}"
                return _line("verified", body.step, body.checkpoint, "read back", took)
            case SaveSkipped():
                return _line("skipped", body.step, body.checkpoint, printable(body.reason))
            case DrainFailed():
                why = f"to {printable(body.remote)}: {printable(body.error)}"
                return _line("not drained", body.step, body.checkpoint, why)
            case ReplicaFailed():
                why = f"rank {body.rank}'s part on {printable(body.node)}: {printable(body.error)}"
                return _line("not replicated", body.step, body.checkpoint, why)
            case _:
                return None

    def _committed(self, body: SaveCommitted) -> str:
        took = f"{size(body.bytes)} in {duration(body.seconds)}"
        if body.tier != "local" and body.checkpoint in self._local:
            return _line("drained", body.step, body.checkpoint, "to the checkpoint root", took)
        if body.tier == "local":
            self._local.append(body.checkpoint)
        still = f"training stood still for {duration(body.blocked_seconds)}"
        return _line("committed", body.step, body.checkpoint, printable(body.tier), took, still)


def _line(what: str, step: int, checkpoint: str, *more: str) -> str:
    return ", ".join([f"save {what}: step {step}", printable(checkpoint), *more])
