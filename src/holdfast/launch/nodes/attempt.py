"""One attempt as the agents of its nodes share it, and which devices its ranks get.

The agent of group rank 0 leads: it claims the epoch, numbers the attempt, hosts its store and announces all
three in the rendezvous round's store. The others follow: they learn the announcement before a deadline, or
end. Every attempt's keys live under that round, so nothing from an earlier one is ever read.

Guarantee: all nodes of an attempt act on the same notice (the first that any of them gave), under the same
number and epoch; only the leader writes the attempt's end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import msgspec

from holdfast.checkpoint.choose import next_orders, write_findings
from holdfast.cluster import Device
from holdfast.errors import ControlError, ExitCode, HoldfastError
from holdfast.journal import JournalWriter
from holdfast.journal.events import AttemptEnded, AttemptStarted, LeaseClaimed, Warned
from holdfast.launch.nodes.watch import FollowerWatch, LeaderWatch
from holdfast.policy import (
    Exclusion,
    NodeDevices,
    Orders,
    Participant,
    PastAttempt,
    arrange,
    describe_devices,
    device_of,
    restarts_left,
)
from holdfast.record import (
    Claim,
    ControlDirectory,
    Decisions,
    EndRecord,
    Fence,
    HostedStore,
    SealedStore,
    await_key,
    begin_attempt,
    end_attempt,
    ends_of,
    last_decision,
    operator,
    past_attempts,
    run_secret,
    was_kept,
    within,
)

# Which devices a node has, which of them may be used, and on which of them its ranks run.
#
# The order of nodes and devices is chosen once for the job, by the leading agent, from the last decision
# (`policy.rotation`); every node learns the whole order, and it is recorded with the attempt, so that a later
# verdict can compare where a fault appeared.


def usable_devices(devices: Sequence[Device], node: str, excluded: Sequence[Exclusion]) -> list[str]:
    """Pure: the names of the devices that are not excluded under any name that they have or had."""
    out = [one.device for one in excluded if one.node == node]
    return [device.name for device in devices if not any(device.is_called(name) for name in out)]


def why_unfit(devices: Sequence[Device], node: str, workers: int, excluded: Sequence[Exclusion]) -> str:
    """Pure: why a node may not take part; empty if it may."""
    whole = next((one for one in excluded if one.node == node and one.device is None), None)
    if whole is not None:
        return f"this node is excluded: {whole.reason}"
    left = usable_devices(devices, node, excluded)
    if devices and len(left) < min(workers, len(devices)):
        reasons = "; ".join(f"{one.device}: {one.reason}" for one in excluded if one.node == node)
        return f"{len(left)} devices are left for {workers} workers; excluded are {reasons}"
    return ""


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of an attempt in rank order, each with its devices in the order its workers see them."""

    nodes: list[NodeDevices] = []
    placement: str = ""
    rotation: int = 0

    def place_of(self, node: str) -> int:
        return next(index for index, one in enumerate(self.nodes) if one.node == node)

    def devices_of(self, node: str) -> list[str]:
        return self.nodes[self.place_of(node)].devices

    def devices_of_ranks(self, node: str, ranks: Mapping[int, int]) -> dict[int, str]:
        """Global rank → device, for a node's workers; `ranks`: global rank → local rank."""
        if not self.nodes:
            return {}
        devices = self.devices_of(node)
        return {rank: device_of(devices, local_rank) for rank, local_rank in ranks.items()}


def arrange_attempt(members: Sequence[Participant], rotation: int) -> Arrangement:
    """Pure: the arrangement of an attempt; `members` are in their original order."""
    arranged = arrange([NodeDevices(member.node, member.devices) for member in members], rotation)
    workers = max((member.slots for member in members), default=1)
    return Arrangement(nodes=arranged, placement=describe_devices(arranged, workers), rotation=rotation)


log = logging.getLogger("holdfast.launch")

POLL = 0.05
CONNECT_PATIENCE = 30.0
"""Seconds for the others to connect to a leader that has announced an attempt."""
ANNOUNCEMENT = "holdfast/attempt"
NOTICE = "holdfast/notice"
FAREWELL = 60.0
"""Seconds for which a node that cannot take part stays so that the leader can read that it is there."""
STORE_TIMEOUT = 60.0
"""Seconds for one answer of the store; its own calls may wait for ever for a host that was cut off."""

T = TypeVar("T")


class StopRun(Exception):  # noqa: N818 - an end, not an error
    """The launcher ends with this code and message."""

    def __init__(self, code: int, message: str, then: str = "") -> None:
        """`then`: what to do next, if the code's own advice would be beside the point."""
        super().__init__(message)
        self.code = code
        self.then = then


class LeaderLostError(HoldfastError):
    """The leading agent is gone before it could say what to do; the nodes meet again without it."""

    exit_code = ExitCode.DECISION_TIMEOUT


class AttemptAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader tells the others at the start of an attempt."""

    run: str = ""
    attempt: int = 0
    epoch: int = 0
    restarts: int = 0
    """Earlier attempts of this launch."""
    master_addr: str = ""
    master_port: int = 0
    watch_port: int = 0
    """The port at which the leader watches and is watched."""
    arrangement: Arrangement = Arrangement()
    orders: Orders = Orders()
    restarts_left: int | None = None
    """Restarts without progress that are left after this one."""
    refused: str = ""
    """Why there is no attempt; empty if there is one."""
    exit_code: int = 0


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Why an attempt ends; the first one given counts for all nodes."""

    kind: str
    """failure, hang, node_lost, leader_lost, left (nodes were told to stop, and the others go on), regroup,
    stopped (all were), lease_lost, finished."""
    node: str
    nodes: list[str] = []
    """Nodes that were lost, or that leave."""
    at: float = 0.0
    detail: str = ""
    exit_code: int = 0


class RoundPlace(msgspec.Struct, frozen=True, kw_only=True):
    """This agent's place in the round."""

    node: str
    group_rank: int
    nodes: int
    world_size: int

    @property
    def leads(self) -> bool:
        return self.group_rank == 0


class Attempt:
    """This node's view of the running attempt."""

    def __init__(
        self,
        control: ControlDirectory,
        place: RoundPlace,
        launch: str,
        told: AttemptAnnouncement,
        store: SealedStore,
        patience: float = STORE_TIMEOUT,
    ) -> None:
        """`patience`: how long the store may take to answer before it counts as lost."""
        self.control = control
        self.place = place
        self.launch = launch
        self.told = told
        self.number = told.attempt
        self.fence = Fence(control, told.epoch)
        self.journal = JournalWriter(control.journal, f"agent-{place.node}", told.attempt)
        self.decisions = Decisions(control, self.fence, told.attempt, store, store_timeout=patience)
        self.hosted: HostedStore | None = None
        self.watched: FollowerWatch | None = None
        """How a follower sees the leader."""
        self.watching: LeaderWatch | None = None
        """How the leader sees the others."""
        self.ended = False
        self.noticed_at = self.stopped_at = 0.0
        """When this node learned what ended the attempt, and when it knew that all workers were gone."""
        self._got_to: set[str] = set()
        self.nodes_of_ranks: dict[int, str] = {}
        """Global rank → node, if members of an in-process restart have changed their ranks."""
        self._store = store
        self._patience = patience

    # -- the round's store: a few keys, polled, never waited on -------------------------------------------

    def give(self, notice: Notice) -> Notice:
        """Give a notice; returns the one that counts."""
        text = msgspec.json.encode(notice).decode()
        raw = self._ask(lambda: self._store.compare_set(NOTICE, "", text))
        return msgspec.json.decode(raw, type=Notice)

    def notice(self) -> Notice | None:
        """The notice that another node gave, if any."""
        if self.place.nodes == 1:
            return None
        self._ask(self._store.mind)
        if self.watching is not None and self.watching.awaits and self._ask(self._store.hailed):
            why = _other_run(self.control, self.place.node, self._store.foreign)
            code = int(ExitCode.CONTROL_UNUSABLE)
            return self.give(Notice(kind="stopped", node=self.place.node, detail=why, exit_code=code))
        raw = self._ask(lambda: self._store.get(NOTICE) if self._store.check([NOTICE]) else b"")
        return msgspec.json.decode(raw, type=Notice) if raw else None

    def fix(self, key: str, text: str) -> bytes:
        """Say something once for all nodes; returns what was said first."""
        return self._ask(lambda: self._store.compare_set(f"holdfast/{key}", "", text))

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """What was said under these keys, as far as they exist."""

        def look() -> dict[str, bytes]:
            there = [key for key in keys if self._store.check([f"holdfast/{key}"])]
            return {key: self._store.get(f"holdfast/{key}") for key in there}

        return self._ask(look)

    def say(self, key: str, text: str) -> None:
        """Say something, replacing what was said before under this key."""
        self._ask(lambda: self._store.set(f"holdfast/{key}", text))

    def count(self, what: str) -> int:
        """Add one to a counter; returns the new number."""
        return self._ask(lambda: self._store.add(f"holdfast/{what}", 1))

    def count_in(self, what: str) -> None:
        """Say that this node has reached `what`; it counts once, however often it is said."""
        if what in self._got_to:
            return
        self._got_to.add(what)
        self._ask(lambda: self._store.add(f"holdfast/{what}", 1))

    def counted(self, what: str) -> int:
        """How many nodes have reached `what`."""
        return self._ask(lambda: self._store.add(f"holdfast/{what}", 0))

    def _ask(self, call: Callable[[], T]) -> T:
        return within(call, self._patience, f"the other nodes of attempt {self.number}")

    def await_all(self, what: str, timeout: float) -> int:
        """Wait, at most `timeout` seconds, until all nodes not lost have reached `what`; how many have."""
        deadline = time.monotonic() + timeout
        while True:
            arrived = self.counted(what)
            expected = self.place.nodes - len(self.lost_nodes())
            if arrived >= expected or time.monotonic() >= deadline:
                return arrived
            time.sleep(POLL)

    def lost_nodes(self) -> dict[int, str]:
        """Group rank → how it was lost, as the leader knows it."""
        return self.watching.lost() if self.watching is not None else {}

    def lost_leader(self) -> str:
        """How the leader was lost, as a follower knows it; empty while it is not lost."""
        return self.watched.lost if self.watched is not None else ""

    def go_on(self, told: AttemptAnnouncement, world_size: int) -> None:
        """The same workers go on as the next attempt: whatever bears its number or epoch is made anew."""
        self.journal.close()
        self.place = msgspec.structs.replace(self.place, world_size=world_size)
        self.told, self.number, self.ended = told, told.attempt, False
        self.noticed_at = self.stopped_at = 0.0
        self.fence = Fence(self.control, told.epoch)
        self.journal = JournalWriter(self.control.journal, f"agent-{self.place.node}", told.attempt)
        self.decisions = Decisions(
            self.control, self.fence, told.attempt, self._store, store_timeout=self._patience
        )

    # -- the end ------------------------------------------------------------------------------------------

    def end(
        self, outcome: str, *, exit_code: int, cause: str, highest_step: int, quiet: bool = False
    ) -> None:
        """Write the attempt's end, once; only the leader does.

        If the control directory cannot be written, or is gone, the record is lost but the end stands: nobody
        decides by the record, and a job that has finished has finished. `quiet`: this was said already.
        """
        if not self.place.leads or self.ended:
            return
        self.ended = True
        record = EndRecord(
            outcome=outcome, exit_code=exit_code, cause=cause, highest_step=highest_step, at=time.time()
        )
        try:
            end_attempt(self.control, self.fence, self.number, record)
        except ControlError as error:
            text = f"attempt {self.number} has no record of its end, which is {outcome}: {error}"
            self.journal.write(Warned(message=text))
            if not quiet:
                log.error("holdfast: %s", text)
        self.journal.write(
            AttemptEnded(
                outcome=outcome,
                exit_code=exit_code,
                last_step=highest_step,
                noticed=self.noticed_at,
                stopped=self.stopped_at,
            )
        )

    def close(self) -> None:
        for watch in (self.watching, self.watched):
            if watch is not None:
                watch.close()
        self.watching = self.watched = None
        if self.hosted is not None:
            self.hosted.close()
        self.journal.close()


def agree_on_launch(store: SealedStore, mine: str) -> str:
    """The launch id that all agents of this rendezvous share, including those that join or lead later."""
    return store.compare_set("holdfast/launch", "", mine).decode()


def lead(
    control: ControlDirectory,
    place: RoundPlace,
    held: Claim,
    address: str,
    store: SealedStore,
    torch_version: str,
    *,
    node_timeout: float,
    members: Sequence[Participant],
    max_restarts: int,
    started_with: str = "",
    launched: float = 0.0,
    paused: float = 0.0,
) -> Attempt:
    """Number the attempt, host its store, watch over the others, and announce it to them. `launched`: when
    this launch began; `paused`: seconds for which an operator held the attempt up."""
    begun = _begin_next(control, place, held, members, max_restarts, started_with)
    hosted = HostedStore(address, alone=place.nodes == 1)
    watching = None
    if place.nodes > 1:
        watching = LeaderWatch(
            run_secret(control),
            attempt=begun.attempt,
            epoch=held.epoch,
            nodes=place.nodes,
            timeout=node_timeout,
            patience=max(node_timeout, CONNECT_PATIENCE),
            address=address,
        )
    told = msgspec.structs.replace(
        begun,
        master_addr=address,
        master_port=hosted.port,
        watch_port=watching.port if watching is not None else 0,
    )
    attempt = Attempt(control, place, held.owner, told, store, node_timeout)
    attempt.hosted, attempt.watching = hosted, watching
    _journal_begin(attempt, held, torch_version, launched, paused)
    store.set(ANNOUNCEMENT, msgspec.json.encode(told).decode())
    return attempt


def lead_on(
    attempt: Attempt,
    held: Claim,
    torch_version: str,
    *,
    members: Sequence[Participant],
    max_restarts: int,
    started_with: str,
    world_size: int,
    launched: float = 0.0,
) -> None:
    """Number the next attempt of the same workers: its store, its watch and its nodes stay."""
    place = msgspec.structs.replace(attempt.place, world_size=world_size)
    begun = _begin_next(attempt.control, place, held, members, max_restarts, started_with)
    told = attempt.told
    attempt.go_on(
        msgspec.structs.replace(
            begun, master_addr=told.master_addr, master_port=told.master_port, watch_port=told.watch_port
        ),
        world_size,
    )
    _journal_begin(attempt, held, torch_version, launched)


def _begin_next(
    control: ControlDirectory,
    place: RoundPlace,
    held: Claim,
    members: Sequence[Participant],
    max_restarts: int,
    started_with: str,
) -> AttemptAnnouncement:
    """Begin an attempt as the decision about the last one says; its announcement, without where to meet."""
    earlier = sum(record.launch == held.owner for record, _ in ends_of(control))
    fence = Fence(control, held.epoch)
    newest, decided = last_decision(control)
    if decided is not None and not was_kept(control, newest):  # the deciding agent died before keeping it
        with contextlib.closing(JournalWriter(control.journal, f"agent-{held.owner}", newest)) as journal:
            write_findings(control, fence, journal, newest, decided)
    past = past_attempts(control, before=newest + 1)
    orders = next_orders(control, past)  # before there is a newer attempt
    arrangement = arrange_attempt(members, decided.rotate_by if decided is not None else 0)
    begun = begin_attempt(
        control,
        fence,
        held.owner,
        place.world_size,
        max_restarts=max_restarts,
        nodes=[member.node for member in members] or [place.node],
        placement=arrangement.placement,
        rotation=arrangement.rotation,
        started_with=started_with,
    )
    return AttemptAnnouncement(
        run=control.run_id,
        attempt=begun.number,
        epoch=held.epoch,
        restarts=earlier,
        arrangement=arrangement,
        orders=orders,
        restarts_left=restarts_left(
            [*past, PastAttempt(number=begun.number, launch=held.owner, outcome="failed")],
            max_restarts,
            operator.budget_reset(control) or 0,
        ),
    )


def _journal_begin(
    attempt: Attempt, held: Claim, torch_version: str, launched: float, paused: float = 0.0
) -> None:
    attempt.journal.write(LeaseClaimed(epoch=held.epoch, owner=held.owner, evidence=held.evidence))
    attempt.journal.write(
        AttemptStarted(
            epoch=held.epoch,
            world_size=attempt.place.world_size,
            nodes=attempt.place.nodes,
            launcher="holdfast run",
            torch=torch_version,
            launched=launched,
            paused=paused,
        )
    )


def refuse(store: SealedStore, error: HoldfastError | StopRun) -> None:
    """Tell the others why there is no attempt, so that they need not wait for one."""
    code = error.code if isinstance(error, StopRun) else int(error.exit_code)
    told = AttemptAnnouncement(refused=str(error), exit_code=code)
    store.set(ANNOUNCEMENT, msgspec.json.encode(told).decode())


def _other_run(control: ControlDirectory, node: str, other: str) -> str:
    return (
        f"{node} sees run {control.run_id} in {control.path}, other nodes see run {other}. All nodes must "
        "see the same run directory: put --run-dir on a file system that they share"
    )


def _refuse_foreign(control: ControlDirectory, node: str, store: SealedStore) -> NoReturn:
    """Leave, once the leader knows it or its time is over: this node may be the one that hosts the store."""
    what = "the leading agent"
    within(store.hail, STORE_TIMEOUT, what)
    deadline = time.monotonic() + FAREWELL
    while not within(store.heard, STORE_TIMEOUT, what) and time.monotonic() < deadline:
        time.sleep(POLL)
    raise StopRun(int(ExitCode.CONTROL_UNUSABLE), _other_run(control, node, store.foreign))


def follow(
    control: ControlDirectory,
    place: RoundPlace,
    launch: str,
    store: SealedStore,
    *,
    timeout: float,
    node_timeout: float,
    given_up: Callable[[], str],
) -> Attempt:
    """Learn what the leader announced, or raise. `given_up` says why no announcement can come any more."""
    what = "the attempt that the leading agent begins"

    def why_not() -> str:
        if store.foreign:
            _refuse_foreign(control, place.node, store)
        return given_up()

    raw = await_key(store, ANNOUNCEMENT, timeout, what, patience=node_timeout, given_up=why_not)
    told = msgspec.json.decode(raw, type=AttemptAnnouncement)
    if told.refused:
        raise StopRun(told.exit_code or ExitCode.FAILED, f"the leading agent was refused: {told.refused}")
    attempt = Attempt(control, place, launch, told, store, node_timeout)
    if told.watch_port:
        attempt.watched = _watch_leader(control, told, place, node_timeout)
    return attempt


def _watch_leader(
    control: ControlDirectory, told: AttemptAnnouncement, place: RoundPlace, node_timeout: float
) -> FollowerWatch:
    secret, deadline = run_secret(control), time.monotonic() + node_timeout
    while True:
        try:
            return FollowerWatch(
                (told.master_addr, told.watch_port),
                secret,
                attempt=told.attempt,
                epoch=told.epoch,
                rank=place.group_rank,
                timeout=node_timeout,
            )
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(POLL)
                continue
            raise LeaderLostError(
                f"{place.node} cannot reach the leading agent at {told.master_addr}:{told.watch_port}: "
                f"{error}. Give each node an address that the others reach with --local-addr"
            ) from error
