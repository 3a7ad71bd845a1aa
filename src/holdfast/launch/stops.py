"""An attempt that is asked to stop: all ranks of all nodes stop after the same step, by a deadline.

The agents agree as parties of stop/agreement.py, whichever of them saw the request: each lets its ranks
promise a step and hands on the highest promise, and the leading one names the step. Ranks that have stopped
end by themselves; when the ranks of all nodes have ended, the leading agent gives notice of it.

Guarantee: every agent of the attempt learns of the request or of the attempt's end, and nothing here waits:
`poll` looks and returns. A stop that is not complete by the deadline (which the ranks enforce themselves)
ends with the workers killed and code 32, on every node that can still be reached.

With several nodes the words go through the attempt in the round's store: besides those of the agreement,
`stop/leaving/<group rank>`, how many nodes are `stop/done`, and on how many a rank has `stop/halted`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from holdfast.base import Look, Waiting, duration, plural
from holdfast.errors import ControlError, ExitCode
from holdfast.journal.events import StopAgreed, StopAsked, StopForced, StopHastened, Warned
from holdfast.launch.context import LaunchContext
from holdfast.launch.monitor import StopWords
from holdfast.launch.nodes import Attempt, Notice
from holdfast.launch.terminal import live_line, say
from holdfast.launch.workers import Workers
from holdfast.policy import (
    Agreed,
    Deadline,
    Source,
    StopRequest,
    closer_by,
    deadline,
    goes_on,
    leaves,
    node_word,
    sooner,
)
from holdfast.process import from_whom
from holdfast.record import OperatorRequest, stop_asked
from holdfast.stop import StopAgreement, StopFile
from holdfast.train import Prepare, StopAt, StopWish

# What asks a running attempt to stop, as the agent of one node sees it.
#
# Every agent sees here a signal to itself and one that reached a rank of its own. What all of them could see
# (the stop file, an operator's record, the job's time limit) is looked at by the leading agent alone, once a
# second. A file system that does not answer holds up neither the look at the rest nor the agent.


LOOK = 1.0
"""Seconds between two looks at what lies in files."""
BY_ITSELF = (ExitCode.STOPPED, ExitCode.STOPPED_UNSAVED)
"""Codes with which a rank says that it was asked to stop, if it could not tell its agent."""


class StopRequests:
    """The requests to stop one attempt."""

    def __init__(self, attempt: Attempt, context: LaunchContext) -> None:
        self._attempt = attempt
        self._context = context
        self._looked = 0.0
        self._stop_file = StopFile(context.settings.stop_file(), self._warn)
        self._operator = Look(self._asked_by_operator, "stop-asked")

    def look(self, ended: Mapping[int, int], wishes: Mapping[int, StopWish]) -> StopRequest | None:
        """A request, if there is one. `ended`: exit codes of the ranks that have ended."""
        found = self._by_signal() or self._by_rank(ended, wishes)
        if found is None and self._attempt.place.leads and time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            found = self._from_outside()
        if found is None or found.at:
            return found
        now, ends_at = time.time(), self._context.scheduler.ends_at
        lead = None if ends_at is None else max(0.0, ends_at - now)
        return msgspec.structs.replace(found, at=now, lead=lead)

    def _by_signal(self) -> StopRequest | None:
        received = self._context.signals.received
        if received is None:
            return None
        node, sender = self._attempt.place.node, self._context.signals.sender
        detail = f"{received.name}{from_whom(sender)} to the launcher on {node}"
        return StopRequest(
            source=Source.SIGNAL, detail=detail, signal=received.name, sender=sender, node=node
        )

    def _by_rank(self, ended: Mapping[int, int], wishes: Mapping[int, StopWish]) -> StopRequest | None:
        node = self._attempt.place.node
        for rank, wish in sorted(wishes.items()):
            detail = f"{wish.why} on {node}"
            source = Source(wish.source) if wish.source in set(Source) else Source.SIGNAL
            return StopRequest(
                source=source, detail=detail, signal=wish.signal, sender=wish.sender, node=node, rank=rank
            )
        for rank, code in sorted(ended.items()):
            if code in BY_ITSELF:
                detail = f"rank {rank} on {node} ended with code {code}: it was asked to stop"
                return StopRequest(source=Source.SIGNAL, detail=detail, node=node, rank=rank)
        return None

    def _from_outside(self) -> StopRequest | None:
        context = self._context
        due = context.scheduler.due()
        if due is not None:
            return due
        if self._stop_file.is_there():
            return StopRequest(source=Source.STOP_FILE, detail=f"the stop file {self._stop_file.path}")
        looked = self._operator.take()
        asked = looked.result() if looked is not None else None
        if asked is not None:
            return StopRequest(source=Source.OPERATOR, detail=f"an operator, {asked.describe()}")
        return None

    def _asked_by_operator(self) -> OperatorRequest | None:
        context = self._context
        try:
            return stop_asked(context.control, [context.launch, *context.earlier_launches])
        except ControlError:  # it is looked for again, and reported where the directory is needed
            return None

    def _warn(self, told: str) -> None:
        self._attempt.journal.write(Warned(message=told))
        say(f"warning: {told}")


QUICK = 0.03
"""Seconds between two looks while something is being agreed on."""
CROWD = 32
"""With more nodes than this, looks are less quick."""
QUICK_FOR = 5.0
"""Seconds for which looks are that quick: only a save or a hang takes longer."""
LEARN = 0.25
"""Seconds between two looks for another node's request."""
OVERTIME = 8.0
"""Seconds after the deadline at which the agent ends ranks that should have ended by themselves."""
LAST_WORDS = 1.0
"""Seconds for the monitor to read what a rank said before it ended."""
FINE = (int(ExitCode.OK), int(ExitCode.STOPPED))
"""Codes of a worker that has stopped as it was asked to."""


class Handed(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the agents pass it on."""

    request: StopRequest
    limit: Deadline
    """Counted from the request."""
    leaves: str = ""
    """The node that is to leave a group that may shrink; empty if the whole run is to stop."""


class Stopping:
    """The stop of one attempt, as the agent of one node takes part in it."""

    def __init__(self, attempt: Attempt, workers: Workers, context: LaunchContext) -> None:
        self._attempt = attempt
        self._workers = workers
        self._context = context
        self._requests = StopRequests(attempt, context)
        self._alone = attempt.place.nodes == 1
        board = attempt if attempt.place.nodes > 1 else None
        self._agreement = StopAgreement(board, attempt.place.group_rank, attempt.place.nodes, Handed)
        self._limit = Deadline(None, "")
        """The hard deadline as it is now, from `_limited` on."""
        self._limited = 0.0
        self._learnt = 0.0
        self._moved = 0.0
        self._read = 0.0
        self._said = False
        self._agreed: Agreed | None = None
        self._agreed_at = 0.0
        self._ended_at = 0.0
        self._prepared: set[int] = set()
        self._told: set[int] = set()
        self._leaving = False
        self._done = False
        self._forced = False
        self._line = live_line(attempt.number)
        self.asked_between = False
        """Whether the request came while the ranks were between two attempts."""

    @property
    def _handed(self) -> Handed | None:
        return self._agreement.request

    @property
    def request(self) -> StopRequest | None:
        """The request that counts; None while there is none."""
        return self._handed.request if self._handed is not None else None

    @property
    def of_all(self) -> bool:
        """Whether the whole run is to stop, and not only one of its nodes."""
        return self._handed is not None and not self._handed.leaves

    @property
    def pause(self) -> float | None:
        """Seconds to the next look; None if there is no hurry."""
        if self._handed is None or time.monotonic() - self._moved > QUICK_FOR:
            return None
        return QUICK * max(1.0, self._attempt.place.nodes / CROWD)  # all of them ask one store

    def failed(self, ended: Mapping[int, int]) -> bool:
        """Whether a worker has ended with a code that none should end with."""
        fine = FINE if self._handed is not None else (int(ExitCode.OK),)
        return any(code not in fine for code in ended.values())

    def poll(self, ended: Mapping[int, int], *, between: bool = False) -> Notice | None:
        """See to the stop, if there is one; returns the notice of its end, once there is one.

        `between`: the ranks are between two attempts, where nobody can save. A request is only learned then;
        whoever would let them go on asks for it.
        """
        words = self._context.monitor.stop_words()
        if self._handed is None:
            if not self._learn(ended, words):
                return None
            self.asked_between = between
        self._live(ended)
        notice = self._hurried(ended, words) or self._late(words)
        if notice is not None or between or self.failed(ended):
            return notice
        self._take_leave()
        self._hasten()
        if self._agreed is None:
            self._prepare()
            self._speak(ended, words)
            self._agree()
        if self._agreed is not None:
            return self._go_on(self._agreed, ended, words)
        return None

    # -- the request ----------------------------------------------------------------------------------------

    def _learn(self, ended: Mapping[int, int], words: StopWords) -> bool:
        """Whether there is a request now: this node's own, unless another node's came first."""
        found = self._requests.look(ended, words.wishes)
        mine = self._hand(found) if found is not None else None
        if mine is None and not self._may_read():
            return False
        handed = self._agreement.ask(mine)
        if handed is None:
            return False
        self._limit = handed.limit
        self._learnt = self._moved = self._limited = time.monotonic()
        if self._attempt.place.leads:
            self._context.scheduler.ask_again()
        if handed == mine:
            request = handed.request
            self._attempt.journal.write(
                StopAsked(
                    source=request.source,
                    detail=request.detail,
                    node=request.node,
                    rank=request.rank,
                    sender=request.sender,
                    seconds=handed.limit.seconds,
                )
            )
        what = f"node {handed.leaves} leaves" if handed.leaves else "all ranks save and stop"
        limit = self._limit
        within = f", within {duration(limit.seconds)} ({limit.why})" if limit.seconds is not None else ""
        within += closer_by(self._context.scheduler.grace, handed.request, limit)
        say(f"asked to stop: {handed.request.detail}; {what}{within}", attempt=self._attempt.number)
        return True

    def _may_read(self) -> bool:
        """Whether it is time to look for what another node says."""
        if time.monotonic() - self._read < LEARN:
            return False
        self._read = time.monotonic()
        return True

    def _hand(self, request: StopRequest) -> Handed:
        context, place = self._context, self._attempt.place
        limit = deadline(context.settings.stop.shutdown_timeout_sec, request.lead)
        signalled = context.signals.received is not None and request.rank is None
        alone = signalled and leaves(leads=place.leads, elastic=context.elastic)
        return Handed(request=request, limit=limit, leaves=place.node if alone else "")

    def _live(self, ended: Mapping[int, int]) -> None:
        left = len(set(self._workers.pids) - set(ended))
        waited, limit = time.monotonic() - self._learnt, self._left()
        if left:
            longest = None if limit is None else max(0.0, limit) + waited
            self._line(Waiting(f"{plural(left, 'rank')} to save and stop", waited, longest))

    def _left(self) -> float | None:
        """Seconds until the deadline."""
        seconds = self._limit.seconds
        return None if seconds is None else seconds - (time.monotonic() - self._limited)

    def _hasten(self) -> None:
        """The scheduler may end the job sooner than the requester knew: the leading agent tells all."""
        if self._attempt.place.leads:
            ends_at = self._context.scheduler.ends_at
            closer = sooner(self._left(), None if ends_at is None else ends_at - time.time())
            if closer is not None:
                self._agreement.hasten(closer)
        else:
            closer = self._agreement.sooner(Deadline) if self._may_read() else None
        if closer is None or closer.seconds is None:
            return
        self._limit, self._limited = closer, time.monotonic()
        self._prepared.clear()  # every rank is told again, and keeps to the shorter deadline
        if self._attempt.place.leads:
            self._attempt.journal.write(StopHastened(seconds=closer.seconds, why=closer.why))
        say(
            f"the stop must be over within {duration(closer.seconds)}: {closer.why}",
            attempt=self._attempt.number,
        )

    def _take_leave(self) -> None:
        """In a group that may go on: a node that was itself told to stop says so."""
        handed = self._handed
        if self._leaving or handed is None or not handed.leaves or self._context.signals.received is None:
            return
        self._leaving = True
        place = self._attempt.place
        self._attempt.fix(f"stop/leaving/{place.group_rank}", place.node)

    # -- the step -------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Ask every rank that can be asked for its promise."""
        assert self._handed is not None
        if not self._context.settings.stop.exit_signal_handler:
            return
        monitor, left = self._context.monitor, self._left()
        seconds = None if left is None else max(0.0, left)
        prepare = Prepare(self._handed.request.detail, seconds, time.monotonic() - self._learnt)
        for rank in monitor.hearing().there - self._prepared:
            if monitor.tell(rank, prepare):
                self._prepared.add(rank)

    def _speak(self, ended: Mapping[int, int], words: StopWords) -> None:
        """Hand on what this node's ranks have promised, once."""
        if self._said:
            return
        running = set(self._workers.pids) - set(ended)
        hearing = self._context.monitor.hearing()
        asked = self._context.settings.stop.exit_signal_handler
        there = hearing.there if asked else frozenset[int]()
        waited = time.monotonic() - self._learnt
        word = node_word(running, there, hearing.done, words.promises, waited)
        if word is not None:
            self._agreement.say(word)
            self._said = True

    def _agree(self) -> None:
        """Name the step if this node leads and all have spoken; otherwise learn it."""
        attempt = self._attempt
        self._agreed = self._agreement.named(attempt.lost_nodes())
        if self._agreed is None:
            return
        self._agreed_at = self._moved = time.monotonic()
        if attempt.place.leads and self._agreed.step is not None:
            after = self._agreed_at - self._learnt
            attempt.journal.write(StopAgreed(step=self._agreed.step, after=after))

    # -- the end --------------------------------------------------------------------------------------------

    def _go_on(self, agreed: Agreed, ended: Mapping[int, int], words: StopWords) -> Notice | None:
        if agreed.end:
            return self._end_them(agreed.code, "its ranks cannot be asked to save")
        if agreed.step is not None:
            monitor = self._context.monitor
            self._prepare()  # for ranks that have said hello only now
            for rank in monitor.hearing().there - self._told:
                if monitor.tell(rank, StopAt(agreed.step)):
                    self._told.add(rank)
            grace = self._context.settings.launch.stop_grace
            if agreed.step == 0 and time.monotonic() - self._agreed_at > grace:
                return self._end_them(int(ExitCode.STOPPED), f"nothing was trained within {grace:g} s")
        return self._finish(ended, words)

    def _end_them(self, code: int, why: str) -> Notice | None:
        """End the workers as they are; with several nodes, the leading agent gives the notice."""
        return self._conclude(code, why) if self._attempt.place.leads else None

    def _finish(self, ended: Mapping[int, int], words: StopWords) -> Notice | None:
        """Once the ranks of all nodes have ended by themselves, the leading agent gives the notice."""
        attempt = self._attempt
        halted = bool(words.halted) or int(ExitCode.STOPPED) in ended.values()
        alive = set(self._workers.pids) - set(ended)
        if alive and not (halted and alive.isdisjoint(self._told | self._context.monitor.hearing().done)):
            return None
        if not halted and self._unread(ended):
            return None
        if self._alone:
            return self._conclude(int(ExitCode.STOPPED)) if halted else self._finished()
        if not self._done:
            self._done = True
            if halted:
                attempt.count_in("stop/halted")
            attempt.count_in("stop/done")
            self._moved = time.monotonic()
        there = attempt.place.nodes - len(attempt.lost_nodes())
        if not attempt.place.leads or attempt.counted("stop/done") < there:
            return None
        if attempt.counted("stop/halted"):
            return self._conclude(int(ExitCode.STOPPED))
        return self._finished()

    def _unread(self, ended: Mapping[int, int]) -> bool:
        """Whether a rank that has ended may have said that it halted, and the monitor has not read it."""
        self._ended_at = self._ended_at or time.monotonic()
        speaking = self._context.monitor.hearing().there & set(ended)
        return bool(speaking) and time.monotonic() - self._ended_at < LAST_WORDS

    def _finished(self) -> Notice:
        """The run reached its last step before it reached the stop."""
        return self._attempt.give(Notice(kind="finished", node=self._attempt.place.node))

    def _hurried(self, ended: Mapping[int, int], words: StopWords) -> Notice | None:
        """A second request means "now", unless everything that was asked for is done."""
        if len(ended) == len(self._workers.pids) and not self.failed(ended):
            return None
        again = self._context.signals.again
        urgent = next((rank for rank, wish in sorted(words.wishes.items()) if wish.now), None)
        if again is not None:
            sender = from_whom(self._context.signals.sender_again)
            node = self._attempt.place.node
            why = f"{again.name}{sender} to the launcher on {node}, a second signal, means now"
        elif urgent is not None:
            why = f"a second signal to rank {urgent} means now"
        else:
            return None
        self._workers.kill()
        return self._force(why, words, urgent)

    def _late(self, words: StopWords) -> Notice | None:
        left = self._left()
        if left is None or left + OVERTIME > 0:
            return None
        return self._force(f"not all ranks had ended by the deadline ({self._limit.why})", words)

    def _force(self, why: str, words: StopWords, rank: int | None = None) -> Notice:
        """End the workers as they are. A rank halts when the state of all is safe: then nothing is lost."""
        why = f"the state is saved, but not all ranks had ended: {why}" if words.halted else why
        if not self._forced:
            self._forced = True
            self._attempt.journal.write(StopForced(why=why, rank=rank))
            say(f"the stop is forced: {why}")
        return self._conclude(int(ExitCode.STOPPED if words.halted else ExitCode.STOPPED_UNSAVED), why)

    def _conclude(self, code: int, why: str = "") -> Notice:
        """Give the notice of the end, the same for all nodes; if a node only leaves, the others go on."""
        handed, attempt = self._handed, self._attempt
        assert handed is not None
        detail = f"{handed.request.detail}; {why}" if why else handed.request.detail
        kind, nodes = "stopped", set[str]()
        if handed.leaves:
            keys = {f"stop/leaving/{rank}": rank for rank in range(attempt.place.nodes)}
            leavers = {keys[key]: node.decode() for key, node in attempt.read(list(keys)).items()}
            nodes = {*leavers.values(), handed.leaves}
            fewest = self._context.min_nodes
            if goes_on(attempt.place.nodes, len(nodes), without_leader=0 in leavers, min_nodes=fewest):
                kind = "left"
        return attempt.give(
            Notice(
                kind=kind,
                node=handed.leaves or handed.request.node or attempt.place.node,
                nodes=sorted(nodes) if kind == "left" else [],
                at=time.time(),
                detail=detail,
                exit_code=code,
            )
        )
