"""Watches the ranks of one node: where each one is, what it says, whether it is overdue, and what is learned.

Guarantees: nothing that a process sends can end or mislead the agent: only processes of this user that are
workers or were started by one are listened to, messages are typed and bounded, and anything else closes that
connection. A rank becomes overdue only by time that this process was awake to see: if it finds that it was
itself stopped (SIGSTOP, a suspended machine), every clock starts afresh, and that is reported.

A rank that has not said hello is overdue `policy.timeouts.hello_limit` after the start of the workers, if the
script's ranks are known to say hello: another rank of this attempt has, or some did in an earlier one
(`expect`). If no rank of the script was ever heard, only the processes are watched; that is said once.

The node's time limits are learned for the attempts and launches that follow. Within an attempt they do not
change: what is seen is smoothed with what was known at its start, however often it is written. That the ranks
of a command say hello, and how long they took, is kept at once. Learning never ends a run: a failed write is
reported once, and nobody waits for a file system that does not answer.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.base import PATIENCE, Bounded, Look
from holdfast.errors import ControlError
from holdfast.launch.incident import Questions
from holdfast.policy import (
    EXITING,
    HELLO,
    Late,
    Learned,
    Limits,
    Observed,
    RankState,
    Ruling,
    StillRunning,
    activity,
    apply,
    hello_limit,
    learn,
    ruling,
)
from holdfast.process import (
    ANCESTORS,
    Garbage,
    Gone,
    Listener,
    Packets,
    Waking,
    descends,
    lineage,
    proc,
)
from holdfast.record import (
    ControlDirectory,
    HelloRecord,
    read_hello,
    read_learned,
    store_hello,
    store_learned,
)
from holdfast.train import (
    SOCKET,
    AnswerPart,
    Ask,
    Bye,
    FromRank,
    Halted,
    Hello,
    Prepare,
    Promise,
    Seen,
    State,
    StopAt,
    StopWish,
)

# What the ranks of one node have said about stopping, in one attempt.


StopWord = StopWish | Promise | Halted


@dataclass
class StopWords:
    """By global rank. The first word of each kind stays, except that a wish may become urgent."""

    wishes: dict[int, StopWish] = field(default_factory=dict)
    promises: dict[int, int] = field(default_factory=dict)
    """The step that the rank does not go past before it knows where all stop."""
    halted: dict[int, int] = field(default_factory=dict)
    """The step after which the rank stopped, with its state safe."""

    def take(self, rank: int, word: StopWord) -> None:
        if isinstance(word, StopWish):
            if word.now or rank not in self.wishes:
                self.wishes[rank] = word
        elif isinstance(word, Promise):
            self.promises.setdefault(rank, word.step)
        else:
            self.halted.setdefault(rank, word.step)

    def copy(self) -> StopWords:
        return StopWords(dict(self.wishes), dict(self.promises), dict(self.halted))


@dataclass(frozen=True)
class Hearing:
    """Which of a node's ranks can be spoken to."""

    there: frozenset[int]
    """Those that have said hello and listen."""
    done: frozenset[int]
    """Those that have said that their training is over."""
    defer: frozenset[int] = frozenset()
    """Those that take SIGTERM as a request to save together: only SIGKILL ends them at once."""


LOOK = 0.1
"""Seconds between two looks at what has arrived. Nobody waits on the sockets themselves: a send that had to
wake this process would cost a rank's step several times as much."""
LOOK_FOR_ANSWERS = 0.005
LOOK_WHILE_STOPPING = 0.02
BLIND = 5.0
"""If more seconds than this pass between two ticks, the agent counts as having been stopped itself."""
UNHEARD = 300.0
"""Seconds after which a rank that has not said hello is reported."""
SILENT = 1.0
"""Seconds without a sign of life after which a look is taken whether the rank's process is stopped."""
MESSAGES_AT_ONCE = 1000
PENDING = 60.0
"""Seconds for which a process of this agent may wait until `begin` names it."""
CONNECTIONS = 1024


class Overdue(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has used up its limit."""

    rank: int
    section: str
    """Empty for none."""
    rule: str
    """initial, section, heartbeat, out_of_section, exiting, or hello: it has not said hello yet."""
    limit: float
    seconds: float
    step: int
    """The last step it completed."""
    progress: int = 0
    """How far it has come, compared with others."""
    stopped: bool = False
    """Whether its process is stopped by a signal."""

    def __str__(self) -> str:
        stopped = "; its process is stopped by a signal" if self.stopped else ""
        if self.rule == HELLO:
            return (
                f"rank {self.rank} has not reached holdfast.Run {self.seconds:.1f} s after the workers were "
                f"started, and the limit is {self.limit:g} s{stopped}"
            )
        where = activity(self.section, self.rule == EXITING)
        step = f"after step {self.step}" if self.step else "before its first step"
        return (
            f"rank {self.rank} has stood still for {self.seconds:.1f} s {where}, {step}, and "
            f"{self.limit:g} s are allowed{stopped}"
        )


@dataclass
class _Connection:
    line: Packets[FromRank]
    pid: int
    since: float
    rank: int | None = None
    hello: Hello | None = None


@dataclass
class _Rank:
    pid: int
    distance: int = ANCESTORS
    """How many forks lie between the worker and the process that speaks for it."""
    connection: _Connection | None = None
    limits: Limits | None = None
    learns: bool = False
    defers: bool = False
    state: RankState | None = None
    seen: Seen | None = None
    dropped: int = 0
    speaker: int = 0
    """The process that last spoke for it: the worker, or a process that the worker started."""
    hello_after: float | None = None
    """Seconds from the start of the workers to its first hello of this attempt."""


def _ignore(message: str) -> None:
    del message


class Monitor:
    """One for all attempts of an agent. Every method may be called from any thread.

    `directory` must be accessible to its owner only, and is made so if it is made here.
    """

    def __init__(self, directory: Path, limits: Limits, tell: Callable[[str], None] = _ignore) -> None:
        self.path = directory.absolute() / SOCKET
        """What goes into `LaunchInfo.monitor`."""
        self._limits = limits
        self._tell = tell
        self._lock = threading.RLock()
        self._ranks: dict[int, _Rank] = {}
        self._by_pid: dict[int, int] = {}
        self._learned = Learned()
        self._connections: dict[int, _Connection] = {}
        self._questions = Questions()
        self._stop_words = StopWords()
        self._look = LOOK
        self._stopping = threading.Event()
        self._waking = Waking()
        self._fresh = self._began = time.monotonic()
        self._told_unheard = False
        self._expected: HelloRecord | None = None
        self._refused = 0
        self._waiting: frozenset[int] = frozenset()
        """Reserves of an in-process restart, which say nothing while they wait."""
        self._listener: Listener[FromRank] = Listener(self.path, FromRank)
        self._thread = threading.Thread(target=self._watch, name="holdfast-monitor", daemon=True)
        self._thread.start()

    # --- for the agent --------------------------------------------------------------------------------------

    def begin(self, pids: Mapping[int, int], learned: Learned | None = None) -> None:
        """A new attempt: these are its workers, by global rank. Earlier ones are forgotten."""
        with self._lock:
            self._ranks = {rank: _Rank(pid) for rank, pid in pids.items()}
            self._by_pid = {pid: rank for rank, pid in pids.items()}
            self._learned = learned or Learned()
            self._stop_words, self._look = StopWords(), LOOK
            self._waiting = frozenset()
            self._began = self._fresh = time.monotonic()
            self._told_unheard = not pids
            self._questions.give_up()
            for connection in list(self._connections.values()):
                if connection.rank is not None or not self._adopt(connection):
                    self._drop(connection)

    def go_on(self, ranks: Collection[int], reserves: Collection[int], learned: Learned) -> None:
        """The same workers, as far as they are left, go on as another attempt; all clocks start afresh."""
        with self._lock:
            for rank in set(self._ranks) - set(ranks):
                left = self._ranks.pop(rank)
                self._by_pid.pop(left.pid, None)
                if left.connection is not None:
                    self._drop(left.connection)
            for known in self._ranks.values():
                if known.connection is not None:
                    self._read(known.connection)  # its farewell may be waiting, or already its next hello
                if known.connection is None or (known.state is not None and known.state.done):
                    known.state = known.seen = known.hello_after = None
            self._learned, self._waiting = learned, frozenset(reserves)
            self._fresh = time.monotonic()

    def expect(self, known: HelloRecord | None) -> None:
        """Set what was kept about this command's ranks: if there is anything, all have to say hello."""
        with self._lock:
            self._expected = known

    def hellos(self) -> tuple[float, float] | None:
        """The initial limit of the ranks that said hello in this attempt, and how long the slowest took."""
        with self._lock:
            heard = [known for known in self._ranks.values() if known.hello_after is not None]
            if not heard:
                return None
            limits = [self._limits_of(known).initial for known in heard]
            initial = max(limits) if all(limits) else 0.0
            return initial, max(known.hello_after or 0.0 for known in heard)

    def overdue(self, ended: Collection[int] = ()) -> list[Overdue]:
        """The ranks that have used up the limit that applies to them now, the most overdue first.

        `ended`: ranks whose processes have ended, to which no limit applies any more.
        """
        with self._lock:
            self._notice_blindness()
            now, found = time.monotonic(), []
            for rank, known in self._ranks.items():
                held = self._ruling(rank, known, now)
                if rank in ended or held is None or not held.overdue:
                    continue
                found.append(
                    Overdue(
                        rank=rank,
                        section=held.section,
                        rule=held.rule,
                        limit=held.limit,
                        seconds=held.seconds,
                        step=known.state.step if known.state is not None else 0,
                        progress=known.state.progress if known.state is not None else 0,
                        stopped=_stopped(known),
                    )
                )
            return sorted(found, key=lambda one: (one.limit - one.seconds, one.rank))

    def standing(
        self,
        node: str,
        ended: Collection[int] = (),
        ranks: Mapping[int, int] | None = None,
        excused: Callable[[Overdue], bool] = lambda _: False,
    ) -> StillRunning:
        """What this node says when it is asked whether the group hangs (`policy.timeouts.hanging`).

        `ranks`: the rank each worker was started with → its present rank, if that differs. `excused`: whether
        an overdue rank counts as one that is in time. A rank whose process is stopped by a signal does not,
        however much of its own limit is left: nothing that others wait for comes from it.
        """
        ranks = ranks or {}
        overdue = self.overdue(ended)
        waiting = [one for one in overdue if excused(one)]
        late = [
            Late(
                rank=one.rank,
                step=one.progress,
                limit=one.limit,
                stopped=one.stopped,
                told=str(msgspec.structs.replace(one, rank=ranks.get(one.rank, one.rank))),
            )
            for one in overdue
            if one not in waiting
        ]
        with self._lock:
            now = time.monotonic()
            in_time = [one.progress for one in waiting] + [
                known.state.progress if known.state is not None else 0
                for rank, known in self._ranks.items()
                if rank not in ended
                and (held := self._ruling(rank, known, now)) is not None
                and not held.overdue
                and not _stands_still(known, now)
            ]
        return StillRunning(node=node, late=late, in_time=min(in_time, default=None))

    def _ruling(self, rank: int, known: _Rank, now: float) -> Ruling | None:
        """The limit that applies to a rank; None if none does."""
        if known.state is not None:
            if known.state.done or (known.state.exiting and _has_exited(known)):
                return None
            return ruling(known.state, self._limits_of(known), now, self._fresh)
        if rank in self._waiting:
            return None
        waited = now - max(self._began, self._fresh)
        expected = self._hello_limit()
        if expected is not None:
            return Ruling(HELLO, "", expected, waited) if self._listener.reachable else None
        # It is not known yet whether it will say hello. Others may wait for it, but no longer than this.
        limit = self._limits.initial
        return Ruling(HELLO, "", limit, waited) if limit and waited <= limit else None

    def _hello_limit(self) -> float | None:
        """Seconds after the start of the workers by which all must have said hello; 0 means no limit.

        None: it is not known that they say hello at all.
        """
        said, kept = self.hellos(), self._expected
        if said is None and kept is None:
            return None
        known = [one for one in (said, (kept.initial, kept.longest) if kept is not None else None) if one]
        if not all(initial for initial, _ in known):
            return 0.0
        return max(hello_limit(initial, longest) for initial, longest in known)

    def state(self, rank: int) -> RankState | None:
        """What a rank last said; None if it never said anything."""
        with self._lock:
            known = self._ranks.get(rank)
            return known.state if known is not None else None

    def limits(self, rank: int) -> Limits:
        """The limits in force for a rank."""
        with self._lock:
            known = self._ranks.get(rank)
            return self._limits_of(known) if known is not None else self._limits

    def last_steps(self) -> dict[int, int]:
        """Global rank → the last step it completed, for ranks that said hello."""
        with self._lock:
            return {rank: known.state.step for rank, known in self._ranks.items() if known.state is not None}

    def sections(self) -> dict[int, str]:
        """Global rank → the innermost section it is in (empty for none), for ranks that said hello."""
        with self._lock:
            return {r: known.state.section for r, known in self._ranks.items() if known.state is not None}

    def dropped(self) -> dict[int, int]:
        """Global rank → messages it could not send because this process did not read them in time."""
        with self._lock:
            return {rank: known.dropped for rank, known in self._ranks.items() if known.dropped}

    def learns(self) -> bool:
        """Whether any rank wants limits to be learned (monitor.calc_ft_timeouts)."""
        with self._lock:
            return any(known.learns for known in self._ranks.values())

    def observed(self) -> tuple[dict[str, Observed], Observed]:
        """What the ranks measured in this attempt, by section and between sections: the longest of all."""
        sections: dict[str, Observed] = {}
        gaps = Observed()
        with self._lock:
            for seen in (known.seen for known in self._ranks.values()):
                if seen is not None:
                    for name, one in seen.sections.items():
                        sections[name] = _longer(one, sections.get(name, Observed()))
                    gaps = _longer(seen.out_of_section, gaps)
        return sections, gaps

    def ask(self, rank: int, timeout: float) -> bytes | None:
        """The rank's testimony of what it is doing; None if it does not answer in time."""
        return self.ask_all([rank], timeout)[rank]

    def ask_all(self, ranks: Iterable[int], timeout: float) -> dict[int, bytes | None]:
        """Ask several ranks at once and wait for all, at most `timeout` seconds in all."""
        deadline = time.monotonic() + timeout
        asked = {rank: self._put(rank, timeout) for rank in ranks}
        return {
            rank: self._questions.await_answer(number, max(0.0, deadline - time.monotonic()))
            for rank, number in asked.items()
        }

    def stop_words(self) -> StopWords:
        """What the ranks have said about stopping so far."""
        with self._lock:
            return self._stop_words.copy()

    def hearing(self) -> Hearing:
        """Which ranks can be spoken to, and which have no more to say."""
        with self._lock:
            said = {rank: known for rank, known in self._ranks.items() if known.state is not None}
            done = frozenset(
                rank
                for rank, known in said.items()
                if known.state is not None and (known.state.done or known.state.exiting)
            )
            here = frozenset(r for r, known in said.items() if known.connection is not None)
            defer = frozenset(rank for rank, known in said.items() if known.defers)
            return Hearing(there=here - done, done=done, defer=defer - done)

    def tell(self, rank: int, message: Prepare | StopAt) -> bool:
        """Send a rank what it must know to stop; returns whether that worked. From now on looks are quick."""
        with self._lock:
            self._look = LOOK_WHILE_STOPPING
            known = self._ranks.get(rank)
            if known is None or known.connection is None:
                return False
            try:
                return known.connection.line.send(message)
            except Gone:
                return False

    def close(self) -> None:
        """Stop watching; the socket is gone when this returns."""
        self._stopping.set()
        self._thread.join(5.0)
        with self._lock:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._listener.close()

    # --- the thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_FOR_ANSWERS if self._questions.any() else self._look):
            with self._lock:
                self._notice_blindness()
                while self._accept():
                    pass
                for connection in list(self._connections.values()):
                    if connection.rank is not None:
                        self._read(connection)
                self._end_pending()
                self._tell_unheard()

    def _notice_blindness(self) -> None:
        blind = self._waking.missed()
        if blind > BLIND:
            self._fresh = time.monotonic()
            self._tell(
                f"this agent was itself stopped or starved for {blind:.1f} s: it saw nothing of its "
                "ranks in that time, and all their time limits start afresh"
            )

    def _tell_unheard(self) -> None:
        if self._told_unheard or time.monotonic() - max(self._began, self._fresh) < UNHEARD:
            return
        self._told_unheard = True
        silent = sorted({rank for rank, known in self._ranks.items() if known.state is None} - self._waiting)
        if not silent:
            return
        shown = ", ".join(map(str, silent[:8])) + (" …" if len(silent) > 8 else "")
        stopped = [str(rank) for rank in silent if _stopped(self._ranks[rank])]
        if stopped:
            shown += f" (stopped by a signal: {', '.join(stopped[:8])})"
        limit = self._hello_limit()
        if limit and self._listener.reachable:
            what = f"it has {limit:g} s for that from its start"
        else:
            what = (
                "a hang there is not noticed, only the end of its process. Use holdfast.Run in the script to "
                "have its sections watched"
            )
        self._tell(f"rank {shown} has not said hello in {UNHEARD:g} s: {what}")

    # --- who may speak --------------------------------------------------------------------------------------

    def _accept(self) -> bool:
        """Take one new connection; False if there is none."""
        caller = self._listener.accept()
        if caller is None:
            return False
        line, pid, user = caller
        if user != os.geteuid() or len(self._connections) >= CONNECTIONS:
            line.close()
            self._refuse(f"process {pid} of user {user}")
            return True
        connection = _Connection(line, pid, time.monotonic())
        self._connections[line.fileno()] = connection
        # A worker may be quicker than `begin`: a process that is not known yet is not read, and judged then.
        if not self._adopt(connection) and not descends(pid, os.getpid()):
            self._drop(connection)
            self._refuse(f"process {pid}, which no worker of this node has started,")
        return True

    def _end_pending(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.rank is None and now - max(connection.since, self._fresh) > PENDING:
                self._drop(connection)
                self._refuse(f"process {connection.pid}, which is not a worker of this attempt,")

    def _refuse(self, who: str) -> None:
        self._refused += 1
        if self._refused == 1:
            self._tell(f"{who} tried to speak to the monitor of this node and was refused")

    def _adopt(self, connection: _Connection) -> bool:
        """Find the rank that a connection speaks for. The process nearest to the worker is believed."""
        found = self._rank_of(connection.pid)
        if found is None:
            return False
        rank, distance = found
        known = self._ranks[rank]
        if known.connection is not None:
            self._read(known.connection)  # it may have hung up meanwhile
        holder = known.connection
        if holder is not None:
            if distance >= known.distance and connection.pid != holder.pid:
                return False
            self._drop(holder)
        connection.rank, known.connection, known.distance = rank, connection, distance
        known.speaker = connection.pid
        return True

    def _rank_of(self, pid: int) -> tuple[int, int] | None:
        for distance, ancestor in enumerate(lineage(pid)):
            if ancestor in self._by_pid:
                return self._by_pid[ancestor], distance
        return None

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.line.fileno(), None)
        connection.line.close()
        if connection.rank is None:
            return
        known = self._ranks.get(connection.rank)
        if known is not None and known.connection is connection:
            known.connection, known.distance = None, ANCESTORS
            self._questions.give_up(connection.rank)

    # --- what they say --------------------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            if not connection.line.open:
                return
            try:
                said = connection.line.receive()
                if said is None:
                    return
                self._take(connection, said)
            except (Garbage, ValueError) as error:
                self._drop(connection)
                self._tell(
                    f"rank {connection.rank} (process {connection.pid}) sent what Holdfast never sends: "
                    f"{str(error)[:200]}. It is no longer listened to"
                )
                return
            except Gone:
                self._drop(connection)  # the process's end is seen elsewhere
                return

    def _take(self, connection: _Connection, message: FromRank) -> None:
        assert connection.rank is not None
        known = self._ranks[connection.rank]
        now = time.monotonic()
        if isinstance(message, Hello):
            if connection.hello is not None:
                raise ValueError("a second hello")
            connection.hello = message
            if known.hello_after is None:
                known.hello_after = max(0.0, now - max(self._began, self._fresh))
            at = min(message.at, now)
            known.limits, known.learns = message.limits, message.learn
            known.defers = message.defers_sigterm
            known.state, known.seen = RankState(sign=at, left=at), None
        elif connection.hello is None:
            raise ValueError("the first message is not a hello")
        elif isinstance(message, State):
            known.dropped = message.dropped
            known.state = RankState(
                sign=min(message.at, now),
                left=min(message.left, now),
                step=message.step,
                trained=message.trained,
                sectioned=message.sectioned,
                sections=tuple(message.sections),
                exiting=message.exiting,
            )
        elif isinstance(message, Seen):
            known.seen = message
        elif isinstance(message, Bye):
            assert known.state is not None
            known.state = msgspec.structs.replace(
                known.state, done=True, sections=(), left=min(message.at, now)
            )
        elif isinstance(message, (StopWish, Promise, Halted)):
            self._stop_words.take(connection.rank, message)
        elif isinstance(message, AnswerPart):
            self._questions.take(connection.rank, message)

    def _put(self, rank: int, timeout: float) -> int:
        """Send a question; its number, 0 if it could not be sent."""
        with self._lock:
            known = self._ranks.get(rank)
            if known is None or known.connection is None:
                return 0
            number = self._questions.put(rank)
            try:
                sent = known.connection.line.send(Ask(number, timeout))
            except Gone:
                sent = False
            if not sent:
                self._questions.give_up(rank)
            return number

    def _limits_of(self, known: _Rank) -> Limits:
        limits = known.limits or self._limits
        # What was learned is about the loop: an evaluation after it often takes longer.
        exiting = known.state is not None and known.state.exiting
        return apply(self._learned, limits) if known.learns and not exiting else limits


def _has_exited(known: _Rank) -> bool:
    """Whether the process that spoke for a rank is gone while its worker, perhaps a shell, still lives."""
    if known.connection is not None or known.speaker in (0, known.pid):
        return False
    process = proc.read(known.speaker)
    return process is None or process.state in ("Z", "X")


def _stopped(known: _Rank) -> bool:
    """Whether the process that speaks, or should speak, for a rank is stopped by a signal."""
    process = proc.read(known.connection.pid if known.connection is not None else known.pid)
    return process is not None and process.state == "T"


def _stands_still(known: _Rank, now: float) -> bool:
    """Whether a rank that has been silent for a while is stopped by a signal."""
    return known.state is not None and now - known.state.sign > SILENT and _stopped(known)


def _longer(one: Observed, other: Observed) -> Observed:
    return Observed(max(one.count, other.count), max(one.longest, other.longest))


LEARN_EVERY = 1.0
"""Seconds between two looks for what another node, or an earlier attempt, has kept."""
PERIOD = 30.0
"""Seconds between two writes during an attempt."""
LONGER = 1.25
"""A rank's time to its hello is written if it is more than this many times the longest known."""


class Learner:
    """One node's learning. `tell` gets what a person should know."""

    def __init__(
        self, control: ControlDirectory, tell: Callable[[str], None], command: Sequence[str] = ()
    ) -> None:
        """`command`: what a worker is started with."""
        self._control = control
        self._tell = tell
        self._command = hashlib.sha256("\0".join(command).encode(errors="surrogateescape")).hexdigest()[:32]
        self._node = ""
        self._attempt = 0
        self._earlier = Learned()
        self._stored = Learned()
        self._wrote = time.monotonic()
        self._failed = False
        self._hello: HelloRecord | None = None
        """What is known of this command's ranks; it is looked for until something is found."""
        self._hellos = Look(lambda: read_hello(control, self._command), "hello")
        self._next_look = 0.0
        self._writing: Bounded[None] | None = None

    def begin(self, node: str, attempt: int) -> Learned:
        """An attempt starts: what was learned so far on all nodes, for `Monitor.begin`."""
        self._node, self._attempt = node, attempt
        self._wrote = time.monotonic()
        self._earlier, problems = read_learned(self._control)
        self._stored = self._earlier
        for problem in problems:
            self._tell(problem)
        return self._earlier

    def go_on(self, monitor: Monitor, attempt: int) -> Learned:
        """The same workers go on as another attempt: what was learned so far, as from `begin`."""
        self.keep(monitor)
        return self.begin(self._node, attempt)

    def poll(self, monitor: Monitor) -> None:
        """To be called now and then during an attempt, from its start on."""
        if time.monotonic() - self._wrote >= PERIOD:
            self.keep(monitor)
        else:
            self._learn_hello(monitor)

    def _learn_hello(self, monitor: Monitor) -> None:
        """Learn who says hello: from what was kept, and from what was heard here."""
        known = self._hello = self._hello or self._kept_hello()
        said = monitor.hellos()
        if said is not None:
            initial, longest = said
            if known is None or known.initial != initial or longest > LONGER * known.longest:
                longest = max(longest, known.longest if known is not None else 0.0)
                self._hello = HelloRecord(command=self._command, initial=initial, longest=longest)
                record = self._hello
                if problem := self._write(lambda: store_hello(self._control, record)):
                    self._complain(problem)
        monitor.expect(self._hello)

    def _kept_hello(self) -> HelloRecord | None:
        """What any node has kept; it is looked for every now and then."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        looked = self._hellos.take()
        if looked is None:
            return None
        self._next_look = now + LEARN_EVERY
        return looked.result()

    def _complain(self, problem: str) -> None:
        if not self._failed:
            self._failed = True
            self._tell(f"learned timeouts cannot be kept in {self._control.path}: {problem}")

    def keep(self, monitor: Monitor) -> Learned | None:
        """Write what was learned, now and then and at the attempt's end; None if there is nothing new."""
        self._learn_hello(monitor)  # an attempt may end before anybody has looked
        self._wrote = time.monotonic()
        if not monitor.learns():
            return None
        found = learn(*monitor.observed(), self._earlier)
        if found == self._stored:
            return None
        node, attempt = self._node, self._attempt
        if problem := self._write(lambda: store_learned(self._control, node, attempt, found)):
            self._complain(problem)
            return None
        self._stored = found
        return found

    def _write(self, store: Callable[[], None]) -> str:
        """Write it; returns why that failed, or nothing."""
        if self._writing is None or self._writing.ended():
            self._writing = Bounded(store, "learned-timeouts")
            self._writing.ended(PATIENCE)
        if not self._writing.ended():
            return "the file system does not answer"
        written, self._writing = self._writing, None
        try:
            written.result()
        except (OSError, ControlError) as error:
            return str(error)
        return ""
