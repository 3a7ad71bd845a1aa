"""The keeper of one node's members: sees them end, reports it, and ends those that hang.

Guarantees: the end of a member's process is reported within moments, whatever ended it (pidfd). A member is
killed that gives no sign of life for hard_timeout, whose main thread stands still for that long, that does
not leave the function, or that a plan left out and that does not end. The first two limits are extended by
the member's allowance while a first step is not done, unless its process is stopped. Only time in which this
process was awake to see counts; if it was itself stopped, every clock starts afresh. Nothing that a process
sends can mislead it: only members of this user are listened to, and a pid is believed only if the kernel
confirms it.

When the store is lost, members learn it from the end of their connection's reading side (they may still say
farewell), and have hard_timeout to end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import selectors
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.config import InProcessSettings
from holdfast.policy import Fault, FaultKind, describe_end
from holdfast.process import Garbage, Gone, Listener, Packets, Waking, descends, proc
from holdfast.restart.messages import (
    KEEPS,
    LEFT,
    LOST,
    UNREADABLE,
    Beat,
    End,
    EndKind,
    Farewell,
    IterationPlan,
    MemberHello,
    Next,
    NodeKeeper,
    Over,
    Said,
    beat_key,
    end_key,
    fault_key,
    gone_key,
    keeper_key,
    lost_store,
    plan_key,
    text,
)

if TYPE_CHECKING:
    from torch.distributed import Store


# A keeper's side of the store: says who is gone, gives signs of life, and learns the plans.
#
# All of it happens on a thread of its own, so that a store that does not answer never keeps the keeper from
# seeing an end or from ending members that hang. If the store is lost, or does not answer for
# heartbeat_timeout, `lost` says so, once and for good.


FOLLOW = 0.5
"""Seconds between two looks for a new plan: only members that it leaves out are judged by it."""
PARTING = 2.0
"""Seconds for the last words."""


class Reporter:
    """One for each keeper. Any thread may read `plan` and `lost`, and call every method."""

    def __init__(self, store: Store, node: str, kept: NodeKeeper, chosen: InProcessSettings) -> None:
        self.plan: Next | None = None
        """The newest plan that is known."""
        self.planned = 0.0
        """When it became known, on the monotonic clock."""
        self.lost = ""
        """Why the store can no longer be spoken to; empty while it can."""
        self._store = store
        self._node = node
        self._interval = chosen.heartbeat_interval
        self._patience = chosen.heartbeat_timeout
        self._beaten = float("-inf")
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calling = 0.0
        self._work.put(lambda: self._introduce(kept))
        self._thread = threading.Thread(target=self._serve, name="holdfast-keeper-store", daemon=True)
        self._thread.start()

    def gone(self, member: int, fault: Fault | None) -> None:
        """This member will never come back; no fault means that it said farewell."""
        self._work.put(lambda: self._tell_gone(member, fault))

    def look(self, fresh: float) -> None:
        """Check that the store still answers; `fresh`: since when this process has been awake."""
        since = self._calling
        if since and time.monotonic() - max(since, fresh) > self._patience:
            self._lose(f"the store has not answered for {self._patience:g} s")

    def close(self) -> None:
        """Say what is still to be said, within a limit, and that this keeper leaves."""
        self._work.put(lambda: self._add(LEFT))
        self._work.put(None)
        self._thread.join(PARTING)

    # --- the thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                try:
                    work = self._work.get(timeout=min(FOLLOW, self._interval))
                except queue.Empty:
                    work = self._routine
                if work is None or self.lost:
                    return
                self._calling = time.monotonic()
                work()
                self._routine()
                self._calling = 0.0
        except (RuntimeError, *UNREADABLE) as error:  # torch's DistNetworkError, DistStoreError, …
            self._lose(lost_store(error))

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why

    def _add(self, key: str) -> None:
        self._store.add(key, 1)

    def _introduce(self, kept: NodeKeeper) -> None:
        mine = text(kept)
        kept_by = self._store.compare_set(keeper_key(self._node), "", mine).decode()
        if kept_by != mine:
            self._lose(f"the store has a keeper of {self._node} already ({kept_by}): it is another job's")
        self._add(KEEPS)

    def _routine(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= self._interval:
            self._add(beat_key(self._node))
            self._beaten = now
        self._follow()

    def _follow(self) -> None:
        while self.plan is None or isinstance(self.plan, IterationPlan):
            key = plan_key(0 if self.plan is None else self.plan.iteration + 1)
            if not self._store.check([key]):
                return
            self.plan = msgspec.json.decode(self._store.get(key), type=Next)
            self.planned = time.monotonic()

    def _tell_gone(self, member: int, fault: Fault | None) -> None:
        mine = text(fault)
        if self._store.compare_set(gone_key(member), "", mine).decode() == mine:
            self._add(LOST)  # before the look at the plan: the planning conductor does it the other way round
        self._follow()
        plan = self.plan
        if fault is None or not isinstance(plan, IterationPlan) or member not in plan.order:
            return  # what befalls a reserve does not end the iteration
        fault = msgspec.structs.replace(fault, rank=plan.order.index(member))
        self._store.compare_set(fault_key(plan.iteration, member), "", text(fault))
        self._store.compare_set(end_key(plan.iteration), "", text(End(kind=EndKind.FAULT, fault=fault)))


SOCKET = "restart.sock"
LOOK = 0.1
"""Seconds between two looks at the clocks; what happens to sockets and processes is seen at once."""
BLIND = 1.0
"""If more seconds than this pass between two looks, the keeper counts as having been stopped itself."""
NO_HELLO = "its first message is not a hello"
LONGEST = 4096
"""Most bytes in a message of a member."""
KILL_PATIENCE = 5.0
"""Seconds after which a process that SIGKILL has not ended is given up: it hangs in the kernel."""
JOIN = 5.0


def _ignore(message: str) -> None:
    del message


@dataclass
class _Member:
    number: int
    pid: int | None
    pidfd: int = -1
    line: Packets[Said] | None = None
    heard: float = 0.0
    """When it last gave a sign of life, on the monotonic clock; 0 before its hello."""
    beat: Beat = field(default_factory=lambda: Beat(iteration=0))
    killed: float = 0.0
    why: str = ""
    over: bool = False
    """It has ended or said farewell: nothing about it is watched any more."""


class Keeper:
    """One for each node. Any thread may use whatever is public.

    `members`: number → process id if it is known, of those that may say hello here; `directory` must be
    accessible to its owner only, and is made so if it is made here. Keys go into `store` as they are.
    """

    def __init__(
        self,
        store: Store,
        node: str,
        members: Mapping[int, int | None],
        chosen: InProcessSettings,
        directory: Path,
        *,
        tell: Callable[[str], None] = _ignore,
    ) -> None:
        self.path = str(directory.absolute() / SOCKET)
        self._node = node
        self._hard = chosen.hard_timeout
        self._tell = tell
        self._members = {number: _Member(number, pid) for number, pid in members.items()}
        self._faults: dict[int, Fault] = {}
        self._closing = False
        self._waking = Waking()
        self._fresh = time.monotonic()
        self._lost_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._listener: Listener[Said] = Listener(Path(self.path), Said, LONGEST)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
        self._reporter = Reporter(store, node, NodeKeeper(path=self.path, pid=os.getpid()), chosen)
        self._thread = threading.Thread(target=self._watch, name="holdfast-keeper", daemon=True)
        self._thread.start()

    def gone(self) -> dict[int, Fault]:
        """Members of this node that have ended without a farewell, and how."""
        return dict(self._faults)

    @property
    def lost(self) -> str:
        """Why the store cannot be reached any more; empty while it can."""
        return self._reporter.lost

    @property
    def planned(self) -> bool:
        """Whether a plan says who takes part: after that, no new member comes."""
        return self._reporter.plan is not None

    @property
    def watching(self) -> int:
        """How many members of this node are watched."""
        return sum(member.pidfd >= 0 and not member.over for member in list(self._members.values()))

    def close(self) -> None:
        """Stop watching; what was seen is reported first, within a limit. The socket is gone on return."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(JOIN)
        os.close(self._wake)
        self._reporter.close()
        self._listener.close()

    # --- the thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            for member in self._members.values():
                if member.pid is not None:
                    self._open(member, member.pid)
            while not self._closing:
                for key, _ in self._selector.select(LOOK):
                    key.data()
                self._notice_blindness()  # only after reading what has come meanwhile
                self._reporter.look(self._fresh)
                self._notice_loss()
                for member in self._members.values():
                    if member.pidfd >= 0 and not member.over:
                        self._judge(member)
        finally:  # whatever happens here, members see that there is no longer a keeper
            for member in self._members.values():
                self._let_go(member)
            self._selector.close()
            self._listener.close()

    def _notice_blindness(self) -> None:
        blind = self._waking.missed()
        if blind > BLIND:
            self._fresh = time.monotonic()
            self._tell(f"this keeper was itself stopped for {blind:.1f} s: all its clocks start afresh")

    def _notice_loss(self) -> None:
        if self._lost_at or not self.lost:
            return
        self._lost_at = time.monotonic()
        self._tell(f"{self.lost}: the members of this node have {self._hard:g} s to end")
        for member in self._members.values():
            if member.line is not None:
                member.line.say_no_more()

    # --- who may speak, and what is said --------------------------------------------------------------------

    def _accept(self) -> None:
        caller = self._listener.accept()
        if caller is None:
            return
        line, pid, user = caller
        if user != os.geteuid() or self.lost:
            line.close()
            return
        self._selector.register(line, selectors.EVENT_READ, lambda: self._greet(line, pid))

    def _greet(self, line: Packets[Said], pid: int) -> None:
        """The first message of a connection: unless it is a hello, the connection is not listened to."""
        try:
            said = line.receive()
        except Gone as error:
            self._selector.unregister(line)
            line.close()
            if isinstance(error, Garbage):  # otherwise it only checked whether somebody listens
                self._tell(f"process {pid} is not listened to: {NO_HELLO}")
            return
        if said is None:
            return
        member = self._members.get(said.member) if isinstance(said, MemberHello) else None
        self._selector.unregister(line)
        why = self._refusal(member, said, pid)
        if member is None or why:
            line.close()
            self._tell(f"process {pid} is not listened to: {why}")
            return
        if member.pid != pid or member.pidfd < 0:
            self._open(member, pid)
        self._hang_up(member)
        member.line, member.heard = line, time.monotonic()
        self._selector.register(line, selectors.EVENT_READ, lambda: self._hear(member))

    def _refusal(self, member: _Member | None, said: Said, pid: int) -> str:
        if not isinstance(said, MemberHello):
            return NO_HELLO
        if member is None:
            return f"there is no member {said.member} here"
        if said.pid != pid:
            return f"it says that it is process {said.pid}"
        if member.over:
            return f"member {said.member} has ended already"
        if member.pid is not None and not descends(pid, member.pid):
            return f"member {said.member} is process {member.pid}"
        return ""

    def _hear(self, member: _Member) -> None:
        while member.line is not None:
            try:
                said = member.line.receive()
            except Gone:
                self._hang_up(member)  # the process's end is seen elsewhere; if it lives on, it is silent
                return
            if said is None:
                return
            if isinstance(said, Beat):
                member.beat, member.heard = said, time.monotonic()
            elif isinstance(said, Farewell):
                self._let_go(member)
                self._reporter.gone(member.number, None)
            else:
                self._hang_up(member)

    def _hang_up(self, member: _Member) -> None:
        if member.line is not None:
            self._selector.unregister(member.line)
            member.line.close()
            member.line = None

    # --- ends -----------------------------------------------------------------------------------------------

    def _open(self, member: _Member, pid: int) -> None:
        """Watch this process."""
        self._forget(member)
        member.pid = pid
        try:
            member.pidfd = os.pidfd_open(pid)
        except OSError:
            self._ended(member)
            return
        self._selector.register(member.pidfd, selectors.EVENT_READ, lambda: self._ended(member))

    def _forget(self, member: _Member) -> None:
        if member.pidfd >= 0:
            self._selector.unregister(member.pidfd)
            os.close(member.pidfd)
            member.pidfd = -1

    def _let_go(self, member: _Member) -> None:
        member.over = True
        self._hang_up(member)
        self._forget(member)

    def _ended(self, member: _Member, still_there: bool = False) -> None:
        if member.line is not None:
            self._hear(member)  # it may have said farewell before
        if member.over:
            return
        code = proc.exit_code_of(member.pid or 0)
        detail = member.why or _in_words(code)
        fault = Fault(
            member=member.number,
            rank=self._rank_of(member),
            node=self._node,
            kind=FaultKind.HARD_TIMEOUT if member.why else FaultKind.LOST,
            detail=f"{detail}; SIGKILL does not end it" if still_there else detail,
            exit_code=code,
            at=time.time(),
            step=member.beat.step,
        )
        self._let_go(member)
        self._faults[member.number] = fault
        self._reporter.gone(member.number, fault)
        self._tell(f"member {member.number} (process {member.pid}) is gone: {fault.describe()}")

    def _rank_of(self, member: _Member) -> int:
        plan = self._reporter.plan
        if not isinstance(plan, IterationPlan) or plan.iteration < member.beat.iteration:
            return member.beat.rank  # it knew of a newer plan
        return plan.order.index(member.number) if member.number in plan.order else -1

    def _judge(self, member: _Member) -> None:
        now = time.monotonic()
        if member.killed:
            if now - member.killed > KILL_PATIENCE:
                self._ended(member, still_there=True)
            return
        why = self._charge(member, now)
        if not why:
            return
        member.killed, member.why = now, why
        self._tell(f"member {member.number} (process {member.pid}) is killed: {why}")
        kill(member.pidfd, member.pid or 0)

    def _charge(self, member: _Member, now: float) -> str:
        """What this member is to be ended for; empty if for nothing."""
        if not member.heard:
            return ""  # a process that never said hello takes no part, and is not ours to end
        hard, beat = self._hard, member.beat
        awake = now - self._fresh
        if self._lost_at and now - max(self._lost_at, self._fresh) > hard:
            return f"it did not end within {hard:g} s after the store was lost"
        silent, allowed = now - max(member.heard, self._fresh), hard + beat.allowance
        limit = hard if silent > hard and _is_stopped(member.pid or 0) else allowed
        if silent > limit:
            return f"no sign of life for {limit:g} s"
        if min(beat.idle, awake) > allowed:
            return f"its main thread made no progress for {beat.idle:.1f} s"
        if min(beat.leaving, awake) > hard:
            return f"it did not leave the function within {beat.leaving:.1f} s"
        plan = self._reporter.plan
        stays = plan is None or (
            isinstance(plan, IterationPlan) and member.number in (*plan.order, *plan.reserves)
        )
        if not stays and now - max(self._reporter.planned, self._fresh) > hard:
            what = "everything was over" if isinstance(plan, Over) else "the others went on without it"
            return f"it had not ended {hard:g} s after {what}"
        return ""


def log_path(chosen: InProcessSettings, node: str) -> Path | None:
    """Where a node's keeper logs what it sees, in a directory that is made if needed; None for nowhere."""
    if not chosen.monitor_process_logdir:
        return None
    place = Path(chosen.monitor_process_logdir)
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"keeper-{node}.log"
    if path.exists() and not path.is_file():  # opening a FIFO would wait for whoever reads it
        raise OSError(errno.EINVAL, "it exists and is not a regular file", str(path))
    return path


def stamped(message: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}"


def kill(pidfd: int, pid: int) -> None:
    """End a process, and what it started in its own session if it leads one."""
    leads = False
    with contextlib.suppress(OSError):
        leads = os.getsid(pid) == pid
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    if leads:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a terminal has stopped it."""
    process = proc.read(pid)
    return process is not None and process.state == "T"


def _in_words(exit_code: int) -> str:
    return describe_end(exit_code) if exit_code else "its process has ended"
