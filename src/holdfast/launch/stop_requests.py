"""What asks a running attempt to stop, as the agent of one node sees it.

A signal to this agent and one that reached a rank are seen here by every agent. What is there for all of them
to see (the stop file, an operator's record, the job's time limit) is looked at by the leading agent alone,
once a second. A file system that does not answer holds up neither the look at the rest nor the agent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from holdfast.bounded import Look
from holdfast.control.operator import Request, stop_asked
from holdfast.errors import ControlError
from holdfast.exit_codes import ExitCode
from holdfast.journal.events import Warned
from holdfast.launch.attempt import Attempt
from holdfast.launch.context import LaunchContext
from holdfast.launch.summary import say
from holdfast.policy.stopping import Source, StopRequest
from holdfast.signal_senders import from_whom
from holdfast.worker.beat_messages import Wish
from holdfast.worker.stop_file import StopFile

LOOK = 1.0
"""Seconds between two looks at what lies in files."""
BY_ITSELF = (ExitCode.STOPPED, ExitCode.STOPPED_UNSAVED)
"""Codes by which a rank says that it was asked to stop, where it could not tell its agent."""


class StopRequests:
    """The requests to stop one attempt."""

    def __init__(self, attempt: Attempt, context: LaunchContext) -> None:
        self._attempt = attempt
        self._context = context
        self._looked = 0.0
        self._stop_file = StopFile(context.settings.stop_file(), self._warn)
        self._operator = Look(self._asked_by_operator, "stop-asked")

    def look(self, ended: Mapping[int, int], wishes: Mapping[int, Wish]) -> StopRequest | None:
        """A request, if there is one. `ended`: exit codes of the ranks that have ended."""
        found = self._by_signal() or self._by_rank(ended, wishes)
        if found is None and self._attempt.place.leads and time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            found = self._from_outside()
        return found

    def _by_signal(self) -> StopRequest | None:
        received = self._context.signals.received
        if received is None:
            return None
        node, sender = self._attempt.place.node, self._context.signals.sender
        told = f"{received.name}{from_whom(sender)} to the launcher on {node}"
        return self._request(Source.SIGNAL, told, signal=received.name, sender=sender, node=node)

    def _by_rank(self, ended: Mapping[int, int], wishes: Mapping[int, Wish]) -> StopRequest | None:
        node = self._attempt.place.node
        for rank, wish in sorted(wishes.items()):
            told = f"{wish.why} on {node}"
            source = Source(wish.source) if wish.source in set(Source) else Source.SIGNAL
            return self._request(source, told, signal=wish.signal, sender=wish.sender, node=node, rank=rank)
        for rank, code in sorted(ended.items()):
            if code in BY_ITSELF:
                detail = f"rank {rank} on {node} ended with code {code}: it was asked to stop"
                return self._request(Source.SIGNAL, detail, node=node, rank=rank)
        return None

    def _from_outside(self) -> StopRequest | None:
        context = self._context
        due = context.scheduler.due()
        if due is not None:
            return due
        if self._stop_file.is_there():
            return self._request(Source.STOP_FILE, f"the stop file {self._stop_file.path}")
        looked = self._operator.take()
        asked = looked.result() if looked is not None else None
        if asked is not None:
            return self._request(Source.OPERATOR, f"an operator, {asked.describe()}")
        return None

    def _asked_by_operator(self) -> Request | None:
        context = self._context
        try:
            return stop_asked(context.control, [context.launch, *context.earlier_launches])
        except ControlError:  # it is looked for again, and told of where the directory is needed
            return None

    def _warn(self, told: str) -> None:
        self._attempt.journal.write(Warned(message=told))
        say(f"warning: {told}")

    def _request(
        self,
        source: Source,
        detail: str,
        *,
        signal: str = "",
        sender: str = "",
        node: str = "",
        rank: int | None = None,
    ) -> StopRequest:
        now = time.time()
        ends_at = self._context.scheduler.ends_at
        lead = None if ends_at is None else max(0.0, ends_at - now)
        return StopRequest(
            source=source,
            detail=detail,
            signal=signal,
            sender=sender,
            node=node,
            rank=rank,
            at=now,
            lead=lead,
        )
