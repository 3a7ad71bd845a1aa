"""Where a launch's agents meet: a rendezvous of our own, on a store that a node hosts.

Guarantee: a round forms at once when everybody is there; a dead node is waited for no longer than
`node_timeout`, and not at all if its end was seen; a surplus node is parked; a node that may not take part is
parked with the reason. Every wait has a deadline, except that of a node parked beside a running group, which
ends with the run. What a stranger writes into the store is ignored, and what it overwrites is written again
(`control.secret`): it cannot change who meets.

torch's own c10d rendezvous waits out a heartbeat timeout for a dead node, restarts a full group for ever when
a spare waits beside it, and keeps no place for a node that must stay out. All decisions here are made by
`policy.rounds`; this module moves its state through the store by compare-and-set.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from holdfast.base import Waiting, is_table_full
from holdfast.errors import DecisionTimeoutError, ExitCode, HoldfastError, UsageError
from holdfast.launch import live_line
from holdfast.launch.nodes.attempt import StopRun
from holdfast.policy import Meeting, placement
from holdfast.record import HostedStore, SealedStore, can_bind, connect, within

if TYPE_CHECKING:
    from torch.distributed import TCPStore


# The store in which a launch's agents meet: hosted by the first endpoint's node, or by the next one's.
#
# Guarantee: connecting is bounded, and an agent that cannot reach an endpoint says which. With several
# endpoints (`--rdzv-endpoint one:29400,two:29400`) the loss of the store's host moves everybody to the next
# one in the list, in the same order everywhere, and late arrivals go where the others are. With only one, it
# ends the launch with a code that says "start it again".


DEFAULT_PORT = 29400
PROBE = 2.0
"""Seconds to find out whether an endpoint is in use."""


class StoreLostError(HoldfastError):
    """The store in which the agents meet cannot be reached, and there is no other one."""

    exit_code = ExitCode.STORE_LOST


def parse_endpoints(text: str) -> list[tuple[str, int]]:
    """`host[:port]`, or several separated by commas; IPv6 addresses are in brackets."""
    found = []
    for part in (part.strip() for part in text.split(",")):
        host, colon, port = part.rpartition(":")
        if not colon or "]" in port:
            host, port = part, str(DEFAULT_PORT)
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(
                f"--rdzv-endpoint {text}: {part!r} is not HOST or HOST:PORT. Write host:port, or several "
                "separated by commas"
            )
        found.append((host, int(port)))
    if len(set(found)) < len(found):
        raise UsageError(f"--rdzv-endpoint {text}: an endpoint is named twice")
    return found


class Endpoints:
    """Connects to the endpoints of a launch, moving on to the next as they fail."""

    def __init__(
        self,
        endpoints: list[tuple[str, int]],
        *,
        is_host: bool | None,
        timeout: float,
        alone: bool = False,
    ) -> None:
        """`alone`: no other node will come."""
        self.all = endpoints
        self._is_host = is_host
        self._alone = alone
        self._timeout = timeout
        self._next = 0
        self.index = -1
        """Which endpoint is in use; rises with every move."""
        self.hosting = False
        self._hosted: HostedStore | None = None
        self.port = 0
        self.failures: list[str] = []

    @property
    def name(self) -> str:
        host, port = self.all[self.index]
        return f"{host}:{port}"

    @property
    def exhausted(self) -> bool:
        return self._next >= len(self.all)

    def begin(self) -> TCPStore:
        """The store to meet in at the start: the one that the others have moved to, if they had to."""
        self.look_ahead()
        return self.connect()

    def look_ahead(self) -> str:
        """Where others meet, if that is at a later endpoint than this; if so, `connect` goes there next."""
        for index in range(len(self.all) - 1, max(self.index, 0), -1):
            host, port = self.all[index]
            if _answers(host, port):
                self._next = index
                return f"{host}:{port}"
        return ""

    def connect(self) -> TCPStore:
        """The store of the next endpoint that answers. Raises StoreLostError when none is left."""
        while not self.exhausted:
            self.index = self._next
            self._next += 1
            host, port = self.all[self.index]
            try:
                return self._open(host, port)
            except (RuntimeError, TimeoutError, OSError) as error:
                if is_table_full(error):
                    raise  # this machine has no room for a thread, whichever endpoint is next
                first = str(error).partition("\n")[0]
                self.failures.append(f"{host}:{port}: {first}")
        tried = "; ".join(self.failures) or f"{self.name} was the only one"
        raise StoreLostError(
            f"no endpoint at which the nodes could meet is left ({tried}). Nothing of the run is "
            "lost: start the same command again, and give several endpoints if the loss of one host "
            "must be survived"
        )

    def _open(self, host: str, port: int) -> TCPStore:
        if self._hosted is not None:
            self._hosted.close()
            self._hosted = None
        ours = is_this_machine(host) if self._is_host is None else self._is_host
        if ours:
            try:
                self._hosted = HostedStore(host, port, alone=self._alone)
            except OSError as error:
                if self._is_host or error.errno != errno.EADDRINUSE:
                    raise
                # Several agents on one machine: the first one hosts it, this one is a client.
        self.hosting = self._hosted is not None
        store = connect(host, self._hosted.port if self._hosted is not None else port, self._timeout)
        self.port = store.port
        return store


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there already."""
    try:
        socket.create_connection((host, port), timeout=PROBE).close()
    except OSError:
        return False
    return True


def is_this_machine(host: str) -> bool:
    """Whether an endpoint's host is this machine, so that the store must be hosted here."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is not None and address.is_loopback:
        return True
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(can_bind(str(one)) for one in found)


STATE = "meeting"
CHANGES = 10_000
"""Tries for one change. Each failed try means that another node's change got through, and those are fewer."""
POLL = 0.05
SLOW_POLL = 0.5
"""Seconds between two looks of a parked node."""
FAREWELL = 5.0
"""Seconds for which the store's host waits, at the end, for those that must still read that it is over."""

R = TypeVar("R")


class Pulse:
    """Says through the store that this agent is alive, and notices when the store no longer answers."""

    def __init__(self, store: Any, key: str, interval: float, timeout: float) -> None:
        self.lost = ""
        """Why the store counts as lost; empty while it answers."""
        self._store, self._key = store, key
        self._interval, self._timeout = interval, timeout
        self._beats = 0
        self._heard = time.monotonic()
        self._stop = threading.Event()
        self._beat()
        for target in (self._run, self._look):
            threading.Thread(target=target, name="holdfast-pulse", daemon=True).start()

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._key, str(self._beats))
        self._heard = time.monotonic()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._beat()
            except RuntimeError as error:  # torch's DistNetworkError and its like
                if not self._stop.is_set():
                    self.lost = str(error).partition("\n")[0] or type(error).__name__
                return

    def _look(self) -> None:
        """Calls to the store may hang for ever when its host is cut off: another thread watches the clock."""
        looked = time.monotonic()
        while not self._stop.wait(self._interval) and not self.lost:
            now = time.monotonic()
            if now - looked > self._timeout:
                self._heard = now  # this process did not run for a while: the store did not fall silent
            looked, silent = now, now - self._heard
            if silent > self._timeout:
                self.lost = f"the store has not answered for {silent:.0f} s"

    def stop(self) -> None:
        self._stop.set()


class MeetingHandler(RendezvousHandler):
    """torch's rendezvous interface over `policy.rounds`."""

    def __init__(
        self,
        endpoints: Endpoints,
        run_id: str,
        *,
        run: str,
        secret: bytes,
        node: str,
        slots: int,
        role: str,
        min_nodes: int,
        max_nodes: int,
        join_timeout: float,
        last_call: float,
        node_timeout: float,
        devices: Callable[[], list[str]],
        unfit: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        self.node = node
        """The node's name; from the first round on, made unique among the others."""
        self.gone: dict[str, str] = {}
        """Agents that this one saw end, and how; the next round does not wait for them."""
        self._endpoints = endpoints
        self._run_id = run_id
        self._run, self._secret = run, secret
        self._slots, self._role = slots, role
        self._min, self._max = min_nodes, max_nodes
        self._join_timeout, self._last_call = join_timeout, last_call
        self._node_timeout = node_timeout
        self._devices, self._unfit, self._say = devices, unfit, say
        self._agent = uuid.uuid4().hex[:12]
        self._round = 0
        self._members: list[placement.Participant] = []
        self._pulses: dict[str, tuple[int, float]] = {}
        self._looked = self._looked_elsewhere = 0.0
        self._elsewhere = ""
        self._warned = False
        self._connect(endpoints.begin())

    # -- the store ----------------------------------------------------------------------------------------

    def _connect(self, store: TCPStore) -> None:
        self._store = self._sealed(store)
        # A client of its own: a call that hangs blocks its client for everybody else.
        self._pulse_store = self._sealed(store.clone() if hasattr(store, "clone") else store)
        self._begin_pulse()

    def _sealed(self, store: TCPStore) -> SealedStore:
        scope = f"holdfast.{self._run_id}.{self._endpoints.index}"
        return SealedStore(PrefixStore(scope, store), self._secret, self._run, scope, self.warn)

    def warn(self, text: str) -> None:
        """Warn, once, of what a stranger does to the store."""
        if not self._warned:
            self._warned = True
            self._say(f"warning: {text}")

    def _begin_pulse(self) -> None:
        key = f"pulse/{self._agent}"
        self._pulse = Pulse(self._pulse_store, key, self._node_timeout / 6, self._node_timeout)

    @property
    def lost(self) -> str:
        """Why the store counts as lost; empty while it answers."""
        return self._pulse.lost

    def move(self, why: str) -> None:
        """The store's host is gone: go to the next endpoint, as the others do. Raises StoreLostError."""
        self._pulse.stop()
        self._endpoints.failures.append(f"{self._endpoints.name}: {why}")
        self._agent, self._round, self._members, self.gone = uuid.uuid4().hex[:12], 0, [], {}
        self._elsewhere = ""
        self._connect(self._endpoints.connect())

    def _ask(self, call: Callable[[], R]) -> R:
        try:
            return within(call, self._node_timeout, "the nodes' meeting")
        except DecisionTimeoutError as error:
            raise StoreLostError(f"the store at {self._endpoints.name} is lost: {error}") from error

    def _read(self) -> tuple[Meeting, str]:
        raw = self._ask(lambda: self._store.get(STATE) if self._store.check([STATE]) else b"").decode()
        if not raw and self._store.foreign and not self._round:
            self._refuse_foreign()
        return (msgspec.json.decode(raw, type=Meeting) if raw else Meeting()), raw

    def _change(self, change: Callable[[Meeting], Meeting | None]) -> Meeting:
        """Apply a change, again and again until nobody else has changed the state meanwhile."""
        for _ in range(CHANGES):
            meeting, raw = self._read()
            wanted = change(meeting)
            if wanted is None or wanted == meeting:
                return meeting
            text = msgspec.json.encode(wanted).decode()
            found = self._ask(partial(self._store.compare_set, STATE, raw, text))
            if found.decode() == text:
                return wanted
            if self._store.foreign and not self._round:
                self._refuse_foreign()
        raise StoreLostError(f"the meeting at {self._endpoints.name} changed {CHANGES} times meanwhile")

    def _refuse_foreign(self) -> NoReturn:
        """Refuse, as nodes of another run meet here: they do not see this run's directory, or must not."""
        other, store = self._store.foreign, self._store
        why = (
            f"{self.node} is of run {self._run}, and other nodes that meet at {self._endpoints.name} as "
            f"{self._run_id} are of run {other}. All nodes must see the same run directory: put --run-dir on "
            "a file system that they share; if these are two runs, give each an --rdzv-id of its own"
        )
        with contextlib.suppress(StoreLostError, RuntimeError):  # its host knows too, and has ended by now
            self._ask(store.hail)
            deadline = time.monotonic() + FAREWELL
            while not self._ask(store.heard) and time.monotonic() < deadline:  # this node may host the store
                time.sleep(POLL)
        raise StopRun(int(ExitCode.CONTROL_UNUSABLE), why)

    # -- torch's interface ----------------------------------------------------------------------------------

    def get_backend(self) -> str:
        return "c10d"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return self._read()[0].over is not None

    def set_closed(self) -> None:
        self.finish(0, "it was closed")

    def num_nodes_waiting(self) -> int:
        """How many waiting nodes the running group has room for: none if it is full, whoever waits."""
        if len(self._members) >= self._max:
            return 0
        return len(placement.spares(self._read()[0]))

    def keep_size(self, nodes: int) -> None:
        """The next round is to have exactly so many nodes. To be said before this agent joins it."""
        self._change(lambda meeting: msgspec.structs.replace(meeting, size=nodes))

    def shutdown(self) -> bool:
        self._pulse.stop()
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. Raises StopRun if the run is over, a timeout's error or StoreLostError."""
        arrived = began = self._looked_elsewhere = time.monotonic()
        meeting = self._arrive()
        told, line = "", live_line()
        enough_since: float | None = None
        while True:
            if meeting.over is not None:
                self._ask(lambda: self._store.add("farewell", 1))
                raise StopRun(meeting.over.code, f"the run has ended: {meeting.over.why}")
            if self._agent in meeting.gone:
                self._say(f"this node was taken for gone ({meeting.gone[self._agent]}); it joins again")
                self._pulse.stop()
                self._agent = uuid.uuid4().hex[:12]
                self._begin_pulse()
                meeting = self._arrive()
            place = next((i for i, m in enumerate(meeting.members) if m.agent == self._agent), None)
            if place is None and self._agent not in meeting.here:
                meeting = self._arrive()  # our arrival was overwritten before others read it
                continue
            if meeting.round > self._round and place is not None and self._agent not in meeting.here:
                line.over()
                return self._enter(meeting, place)
            parked = placement.parked(meeting, self._agent)
            if parked and parked != told:
                told = parked
                self._say(f"waiting: {parked}")
            fewest = meeting.size or self._min
            ready = len(placement.candidates(meeting)) >= fewest and not placement.awaited(meeting)
            enough_since = (enough_since or time.monotonic()) if ready else None
            if parked and placement.awaited(meeting):
                began = time.monotonic()  # the group runs; the time to wait begins with its end
            if time.monotonic() - began > self._join_timeout:
                raise RendezvousTimeoutError(self._who_is_missing(meeting))
            running = bool(parked and placement.awaited(meeting))
            line(self._waiting(meeting, time.monotonic() - (arrived if running else began), running=running))
            self._look_after(meeting, enough_since)
            if not parked:
                self._look_elsewhere()
            if not meeting.round and self._ask(self._store.hailed):
                self._refuse_foreign()
            if self._pulse.lost:
                raise StoreLostError(f"the store at {self._endpoints.name} is lost: {self._pulse.lost}")
            time.sleep(SLOW_POLL if parked else POLL)
            changed = bool(parked) and self._unfit() != _unfit_of(meeting, self._agent)
            meeting = self._arrive() if changed else self._read()[0]

    def _arrive(self) -> Meeting:
        unfit, devices, gone = self._unfit(), self._devices(), dict(self.gone)

        def change(meeting: Meeting) -> Meeting:
            return placement.arrive(
                placement.remove(meeting, gone),
                self._agent,
                self.node,
                slots=self._slots,
                role=self._role,
                devices=devices,
                unfit=unfit,
            )

        return self._change(change)

    def _enter(self, meeting: Meeting, place: int) -> RendezvousInfo:
        self._round, self._members = meeting.round, meeting.members
        self.node, self.gone = meeting.members[place].node, {}
        store = PrefixStore(f"round.{meeting.round}", self._store.base)
        return RendezvousInfo(store, place, len(meeting.members), RendezvousStoreInfo("", 0))

    def _look_after(self, meeting: Meeting, enough_since: float | None) -> None:
        """Form the round if it can be formed, and notice agents that have fallen silent."""
        now = time.monotonic()
        enough = enough_since is not None and now - enough_since >= self._patience(meeting)
        formed = placement.form(meeting, min_nodes=self._min, max_nodes=self._max, enough=enough)
        if formed is not None:
            self._change(
                lambda m: (
                    placement.form(m, min_nodes=self._min, max_nodes=self._max, enough=enough)
                    if m.round == meeting.round
                    else None
                )
            )
            return
        if now - self._looked >= self._node_timeout / 6:
            self._looked = now
            silent = self._silent(meeting)
            if silent:
                self._change(lambda m: placement.remove(m, silent))

    def _look_elsewhere(self) -> None:
        """After a cut, some may have moved to a later endpoint while others never lost theirs.

        An agent that waits and finds that others meet there goes there too; nobody ever moves back.
        """
        now = time.monotonic()
        if now - self._looked_elsewhere < self._node_timeout:
            return
        self._looked_elsewhere = now
        self._elsewhere = self._endpoints.look_ahead()
        if self._elsewhere:
            raise StoreLostError(f"the other nodes meet at {self._elsewhere}")

    def _patience(self, meeting: Meeting) -> float:
        """How long to wait for more than enough nodes: only at the start, as later ones can join at any time.

        After a move nobody knows who is still coming; every live agent notices the loss within its timeout.
        """
        if meeting.round > 0:
            return 0.0
        return min(self._last_call, self._node_timeout) if self._endpoints.failures else self._last_call

    def _silent(self, meeting: Meeting) -> dict[str, str]:
        """Awaited agents whose pulse has not changed for the timeout, by our own clock."""
        now, silent = time.monotonic(), {}
        for member in [*placement.awaited(meeting), *meeting.here.values()]:
            if member.agent == self._agent:
                continue
            beats = self._beats_of(member.agent)
            before = self._pulses.get(member.agent)
            if before is None or before[0] != beats:
                self._pulses[member.agent] = (beats, now)
            elif now - before[1] > self._node_timeout:
                silent[member.agent] = f"{member.node} has been silent for {now - before[1]:.0f} s"
        return silent

    def _beats_of(self, agent: str) -> int:
        key = f"pulse/{agent}"
        raw = self._ask(lambda: self._store.get(key) if self._store.check([key]) else b"0")
        return int(raw)

    def _who_is_missing(self, meeting: Meeting) -> str:
        here = ", ".join(m.node for m in placement.candidates(meeting)) or "nobody"
        late = ", ".join(m.node for m in placement.awaited(meeting))
        unfit = ", ".join(f"{m.node} ({m.unfit})" for m in meeting.here.values() if m.unfit)
        text = f"waited {self._join_timeout:g} s for {meeting.size or self._min} nodes; here: {here}"
        return (
            text + (f"; awaited: {late}" if late else "") + (f"; may not take part: {unfit}" if unfit else "")
        )

    def _waiting(self, meeting: Meeting, waited: float, *, running: bool) -> Waiting:
        """What this node waits for, in words for people. `running`: a group trains without it."""
        if running:
            return Waiting("a place in the group, which is full", waited, None)
        late = ", ".join(member.node for member in placement.awaited(meeting))
        here, wanted = len(placement.candidates(meeting)), meeting.size or self._min
        if here >= wanted and not meeting.size:
            more = f"up to {self._max} nodes to join ({here} are here, {wanted} are enough)"
            return Waiting(late or more, waited, self._join_timeout)
        return Waiting(
            f"{wanted} nodes to join ({here} here{late and f', {late} expected'})", waited, self._join_timeout
        )

    # -- what the agent tells -------------------------------------------------------------------------------

    @property
    def members(self) -> list[placement.Participant]:
        """The nodes of the round that this agent is in, by group rank."""
        return self._members

    @property
    def leads(self) -> bool:
        return bool(self._members) and self._members[0].agent == self._agent

    def over(self) -> placement.RunOver | None:
        """The end of the run, if another node has declared it."""
        return self._read()[0].over

    def belongs(self) -> bool:
        """Whether this node is part of the group that was formed last, not a spare of it."""
        meeting = self._read()[0]
        return any(member.agent == self._agent for member in meeting.members)

    @property
    def scope(self) -> str:
        """The scope to which the keys of this round belong."""
        return f"holdfast.{self._run_id}.{self._endpoints.index}/round.{self._round}"

    @property
    def endpoint(self) -> str:
        return self._endpoints.name

    def silent_leader(self) -> str:
        """Why the leader of this round cannot be expected to answer; empty while it can."""
        if not self._members or self.leads:
            return ""
        leader = self._members[0]
        beats = self._beats_of(leader.agent)
        before = self._pulses.get(leader.agent)
        if before is None or before[0] != beats:
            self._pulses[leader.agent] = (beats, time.monotonic())
            return ""
        silent = time.monotonic() - before[1]
        return f"{leader.node} has been silent for {silent:.0f} s" if silent > self._node_timeout else ""

    def look_at_store(self) -> str:
        """Ask the store once; returns why it counts as lost, or nothing if it answers."""
        if self._elsewhere:
            return f"the other nodes meet at {self._elsewhere}"
        with contextlib.suppress(StoreLostError):
            self._read()
            return self._pulse.lost
        return self._pulse.lost or "it does not answer"

    def see_gone(self, group_rank: int, why: str) -> None:
        """A member's end was seen: its connection is closed, or it has been silent for too long."""
        if 0 <= group_rank < len(self._members):
            self.gone[self._members[group_rank].agent] = why

    def spares(self) -> list[placement.Participant]:
        """Nodes that wait beside the group, in the order in which to take them."""
        return placement.spares(self._read()[0])

    def leave(self, why: str) -> None:
        """Say that this agent goes: the others need not wait for it."""
        self._change(lambda m: placement.remove(m, {self._agent: why}))

    def finish(self, code: int, why: str) -> None:
        """The run is over: parked nodes end too. The store's host stays until they have read that."""
        meeting = self._change(lambda m: placement.finish(m, code, why))
        waiting = len(meeting.here)
        if not self._endpoints.hosting or not waiting:
            return
        deadline = time.monotonic() + FAREWELL
        while self._ask(lambda: self._store.add("farewell", 0)) < waiting and time.monotonic() < deadline:
            time.sleep(POLL)


def _unfit_of(meeting: Meeting, agent: str) -> str:
    me = meeting.here.get(agent)
    return me.unfit if me is not None else ""
