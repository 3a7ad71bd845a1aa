"""Who runs where next: what was tried, which nodes and devices are left, who makes up the group. Pure.

A *cycle* is a failure (its signature), the placement and number of the ranks, and the checkpoint they came
from. Running the same cycle again can only help if something outside it has changed. So each cause is allowed
a small number of repetitions (`budgets.BUDGETS`); after that something must be varied, and in a way that this
failure has not been seen with since the last progress.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from holdfast.policy.budgets import PastAttempt
from holdfast.policy.evidence import comparable
from holdfast.policy.signs import Cause, deed

MAX_ROTATIONS = 3
"""Rotations allowed without progress. One shows whether a fault follows the device; more only help against
several bad devices, which is what exclusion is for."""
MAX_LOWER_RUNGS = 2
"""Rungs that an incident may go down. If three checkpoints in a row fail alike, they are not the cause."""
NEAR_RESUME = 10
"""Steps after a resume within which what was loaded may be the cause of a hang or of the job's error."""

Signature = tuple[str, int, str, str, str]
Setting = tuple[str, int, str]
Cycle = tuple[Signature, Setting]

_OWN_WORDS = frozenset({Cause.JOB, Cause.DATA, Cause.CHECKPOINT})
"""Causes whose message is the job's own and is compared to the letter; with other causes the numbers in it
are ports, times and sequence numbers."""
_ACCUSING = frozenset({Cause.INFRASTRUCTURE, Cause.DEVICE, Cause.HANG, Cause.UNKNOWN})
_BY_LOADING = frozenset({Cause.CHECKPOINT})
"""Causes that may lie in what was loaded. An unknown cause is not among them: a good checkpoint would pay."""
_SOON_AFTER_LOADING = frozenset({Cause.HANG, Cause.JOB})


def signature(attempt: PastAttempt) -> Signature:
    """What makes two failures the same one."""
    message = comparable(attempt.message)
    if attempt.cause == Cause.HANG:
        message = ""
    elif attempt.cause not in _OWN_WORDS:
        message = re.sub(r"\d+", "…", message)
    where = attempt.culprit_node if attempt.cause == Cause.INFRASTRUCTURE else ""
    return attempt.cause, attempt.exit_code, message, attempt.section, where


def setting(attempt: PastAttempt) -> Setting:
    return attempt.placement, attempt.world_size, attempt.rung


def cycle(attempt: PastAttempt) -> Cycle:
    return signature(attempt), setting(attempt)


class Tried:
    """What has been tried against the failure of the last of these attempts, since the last progress."""

    def __init__(self, attempts: Sequence[PastAttempt], failed: PastAttempt) -> None:
        self._failed = failed
        self._attempts = [a for a in attempts if a.number != failed.number]
        mine = signature(failed)
        self._same = [a for a in self._attempts if a.outcome == "failed" and signature(a) == mine] + [failed]

    @property
    def repeats(self) -> int:
        """How often this failure came back in a setting in which it had been seen before."""
        return len(self._same) - len({setting(attempt) for attempt in self._same})

    @property
    def same_error(self) -> PastAttempt | None:
        """The latest earlier attempt that ended with the same error of the job's own, at the same step."""
        if not self._failed.message or self._failed.cause not in (Cause.JOB, Cause.DATA):
            return None
        return self._same[-2] if len(self._same) > 1 else None

    @property
    def accused(self) -> int:
        """How often the same place was the culprit, whatever the failure; 0 if there is no culprit."""
        place = _place(self._failed)
        if self._failed.cause not in _ACCUSING or not place[0]:
            return 0
        found = [a for a in self._attempts if a.cause in _ACCUSING and _place(a) == place]
        return 1 + len(found)

    def met_on(self, nodes: Sequence[str]) -> bool:
        """Whether this failure has been seen on exactly these nodes."""
        return any(set(attempt.nodes) == set(nodes) for attempt in self._same)

    def next_shift(self, arrangements: int) -> int | None:
        """A rotation that this failure has not been seen with; None if there is none, or enough was tried."""
        rotations = sum(attempt.action == "rotate" for attempt in self._attempts)
        if self._failed.cause not in _ACCUSING or rotations >= MAX_ROTATIONS:
            return None
        if self._failed.named:
            return None  # the device is known, and it will be no better under another rank
        seen = {attempt.rotation % arrangements for attempt in self._same}
        here = self._failed.rotation
        shifts = ((here + more) % arrangements for more in range(1, min(arrangements, len(seen) + 2)))
        return next((shift for shift in shifts if shift not in seen), None)

    @property
    def avoid(self) -> list[str]:
        """Checkpoints that must not be used until there is progress."""
        return sorted({name for attempt in self._attempts for name in attempt.decided.avoid})

    def may_lower(self) -> bool:
        """Whether a lower rung may help: what was loaded can be the cause, and not everything was tried."""
        failed = self._failed
        lowered = sum(attempt.action == "lower_rung" for attempt in self._attempts)
        if not failed.rung or lowered >= MAX_LOWER_RUNGS:
            return False
        if failed.cause == Cause.JOB and failed.exit_code == 0:
            return False  # a rank left of its own accord
        soon = failed.steps is not None and failed.steps <= NEAR_RESUME
        return failed.cause in _BY_LOADING or (failed.cause in _SOON_AFTER_LOADING and soon)

    @property
    def requeues(self) -> int:
        return sum(attempt.action == "requeue" for attempt in self._attempts)

    @property
    def told(self) -> str:
        """What has been decided since the last progress, in words."""
        counts = Counter(attempt.action for attempt in self._attempts if attempt.action)
        return ", ".join(f"{deed(action)} {_times(count)}" for action, count in sorted(counts.items()))


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _place(attempt: PastAttempt) -> tuple[str, str]:
    """Where it went wrong. Only a device's own error accuses the device and not its whole node."""
    return attempt.culprit_node, attempt.culprit_device if attempt.cause == Cause.DEVICE else ""


# Which physical device each rank gets, so that another attempt can run on others. Pure.
#
# Guarantee: shift 0 is the plain order. Any other shift below `arrangements` puts every rank on a different
# physical device than the plain order does, uses the same devices of the same nodes, and is described by a
# text of its own. Where no rank can move, there is only one arrangement.
#
# Within a node the list of visible devices is rotated, to begin with a later one; local rank i gets the i-th
# device. Across nodes the order of the nodes is rotated, so that each rank lands on another node's devices.
# Nodes keep their order as long as the devices within each of them suffice, so that what a rank has on its
# local disk stays near it.


class NodeDevices(msgspec.Struct, frozen=True):
    """A node and its devices as its workers see them, in that order; none on a CPU."""

    node: str
    devices: list[str] = []


def arrangements(nodes: Sequence[NodeDevices]) -> int:
    """How many shifts there are, including the plain order."""
    if not nodes:
        return 1
    most = max(1, *(len(node.devices) for node in nodes))
    if _within(nodes):
        return len(nodes) * most
    return 1 + (len(nodes) - 1) * most


def arrange(nodes: Sequence[NodeDevices], shift: int) -> list[NodeDevices]:
    """The nodes in rank order, each with its devices in the order in which its workers should see them.

    `nodes`: in the plain rank order. Shifts beyond the last one start over.
    """
    if not nodes:
        return []
    shift %= arrangements(nodes)
    most = max(1, *(len(node.devices) for node in nodes))
    if _within(nodes):
        turn, inner = divmod(shift, most)
    elif shift:
        inner, turn = divmod(shift - 1, len(nodes) - 1)
        turn += 1
    else:
        turn = inner = 0
    turned = [*nodes[turn:], *nodes[:turn]]
    return [NodeDevices(node.node, _from(node.devices, inner)) for node in turned]


def device_of(devices: Sequence[str], local_rank: int) -> str:
    """The device of one worker, given its node's devices in the order of `arrange`; empty if it has none."""
    return devices[local_rank % len(devices)] if devices else ""


def describe_devices(arranged: Sequence[NodeDevices], workers_per_node: int) -> str:
    """Which rank runs where, as the text that attempts are compared by: "a[0,1] b[0,1]"."""
    described = []
    for node in arranged:
        used = [device_of(node.devices, local_rank) for local_rank in range(workers_per_node)]
        described.append(f"{node.node}[{','.join(used)}]" if node.devices else node.node)
    return " ".join(described)


def _within(nodes: Sequence[NodeDevices]) -> bool:
    """Whether every rank can move within its node."""
    return all(len(node.devices) > 1 for node in nodes)


def _from(devices: Sequence[str], inner: int) -> list[str]:
    """The devices from a later one on. Only 0 gives the plain order, even on a node with fewer devices."""
    if inner and len(devices) > 1:
        inner = 1 + (inner - 1) % (len(devices) - 1)
    else:
        inner = 0
    return [*devices[inner:], *devices[:inner]]


# Which nodes and devices the next attempt may use, and whether they are enough. Pure.
#
# Guarantee: what is excluded is never part of an answer, and an answer with fewer nodes than `min_nodes`
# always says how many are missing.


class Exclusion(msgspec.Struct, frozen=True):
    """A node, or one device of it, that is kept out."""

    node: str
    device: str | None = None
    """None: the whole node."""
    reason: str = ""

    def describe(self) -> str:
        return self.node if self.device is None else f"{self.node}, device {self.device}"


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What is available to run on."""

    nodes: list[str] = []
    """The nodes that took part and are still here, in the plain order: by rank before any rotation."""
    spares: list[str] = []
    """The nodes that wait, in the order in which to take them."""
    devices: dict[str, list[str]] = {}
    """Each node's visible devices, in their order; a node without an entry has none or they are unknown."""
    workers_per_node: int = 1
    min_nodes: int = 1
    max_nodes: int = 0
    """0 if not known."""
    may_shrink: bool = False
    """Whether the job may go on with fewer nodes than before."""
    excluded: list[Exclusion] = []
    tied: str = ""
    """Why the newest checkpoint needs as many ranks as saved it, in words; empty if it does not."""


def shrinkable(cluster: Cluster) -> bool:
    """Whether fewer nodes than before can go on."""
    return cluster.may_shrink and not cluster.tied


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a next attempt."""

    nodes: list[str]
    """In the plain order, with those taken from the spares last."""
    spares: list[str] = []
    """Which of these nodes are new."""
    shrinks: bool = False
    missing: int = 0
    """How many more are needed; 0 if these suffice."""


def devices_of(cluster: Cluster, node: str, without: str | None = None) -> list[str]:
    """The devices of a node that may be used."""
    out = {e.device for e in cluster.excluded if e.node == node} | {without}
    return [device for device in cluster.devices.get(node, []) if device not in out]


def suffice(cluster: Cluster, node: str, left: Sequence[str]) -> bool:
    """Whether these devices of a node are enough for its workers, which may have shared what it had."""
    return len(left) >= min(cluster.workers_per_node, len(cluster.devices.get(node, [])))


def usable(cluster: Cluster, node: str) -> bool:
    """Whether a node may be used: it is not excluded, and has enough devices if it has any."""
    if any(e.node == node and e.device is None for e in cluster.excluded):
        return False
    return suffice(cluster, node, devices_of(cluster, node))


def fit(cluster: Cluster, wanted: int, without: AbstractSet[str] = frozenset()) -> Fit:
    """The nodes to go on with, as many as `wanted` if possible; those in `without` are not used."""
    wanted = max(wanted, cluster.min_nodes)
    if cluster.max_nodes:
        wanted = min(wanted, max(cluster.max_nodes, cluster.min_nodes))
    here = [node for node in cluster.nodes if node not in without and usable(cluster, node)][:wanted]
    waiting = [node for node in cluster.spares if node not in {*without, *here} and usable(cluster, node)]
    taken = waiting[: wanted - len(here)]
    found = [*here, *taken]
    if len(found) >= wanted:
        return Fit(nodes=found, spares=taken)
    if shrinkable(cluster) and len(found) >= cluster.min_nodes:
        return Fit(nodes=found, spares=taken, shrinks=True)
    least = cluster.min_nodes if shrinkable(cluster) else wanted
    return Fit(nodes=found, spares=taken, missing=least - len(found))


def keep_out(
    cluster: Cluster, wanted: int, places: Iterable[tuple[str, str]], reason: str
) -> tuple[list[Exclusion], Fit] | None:
    """What to exclude so that none of these (node, device) is used, and the nodes that then go on; None if
    those are too few.

    Excludes a device alone where the rest of its node suffices, else the node. What is kept out already is
    not repeated.
    """
    added: list[Exclusion] = []
    for node, device in sorted(set(places)):
        if any(out.node == node and out.device in (None, device) for out in cluster.excluded):
            continue
        one = Exclusion(node, None, reason)
        if device and device in devices_of(cluster, node):
            left = devices_of(cluster, node, without=device)
            one = Exclusion(node, device, reason) if suffice(cluster, node, left) else one
        added.append(one)
        cluster = msgspec.structs.replace(cluster, excluded=[*cluster.excluded, one])
    found = fit(cluster, wanted)
    return None if found.missing else (added, found)


def layout(cluster: Cluster, nodes: list[str]) -> list[NodeDevices]:
    """The nodes with those of their devices that may be used, for `arrange`."""
    return [NodeDevices(node, devices_of(cluster, node)) for node in nodes]


# Which nodes make up the group: who is here, who is awaited, who is parked, and when a round forms.
#
# Guarantee: pure. A round forms only when every member of the previous round has come back or is known to be
# gone; it consists of fit nodes, never more than `max_nodes`. A surplus node is parked and costs nobody
# anything. A node that was declared gone never comes back with the same agent name, so an old life of it
# cannot be mistaken for a new one.
#
# The state is one value that all agents change by compare-and-set; each function here gives the next value.


class Participant(msgspec.Struct, frozen=True, kw_only=True):
    """One agent, as the others see it."""

    agent: str
    """Unique for one life of one agent."""
    node: str
    """Its node's name, unique among the nodes that take part; it stays the same when the agent restarts."""
    ticket: int
    """Its place in the order of arrival."""
    slots: int = 1
    """How many workers it starts."""
    role: str = "default"
    devices: list[str] = []
    """The node's devices as its workers see them, in that order; none on a CPU."""
    unfit: str = ""
    """Why it may not take part (its node is excluded); empty if it may."""


class RunOver(msgspec.Struct, frozen=True, kw_only=True):
    """The run has ended; nobody needs to wait any more."""

    code: int
    why: str


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    round: int = 0
    members: list[Participant] = []
    """The nodes of the round formed last, by group rank."""
    here: dict[str, Participant] = {}
    """Agents that are waiting for the next round."""
    gone: dict[str, str] = {}
    """Agents that have been declared gone, and why."""
    tickets: int = 0
    size: int = 0
    """Of the next round, where no other number of nodes can go on from what is saved; 0 if others can."""
    over: RunOver | None = None


def arrive(
    meeting: Meeting,
    agent: str,
    node: str,
    *,
    slots: int = 1,
    role: str = "default",
    devices: Sequence[str] = (),
    unfit: str = "",
) -> Meeting:
    """An agent waits for the next round."""
    if agent in meeting.gone or meeting.over is not None:
        return meeting
    known = meeting.here.get(agent) or next((m for m in meeting.members if m.agent == agent), None)
    if known is None:
        ticket = meeting.tickets + 1
        known = Participant(agent=agent, node=_unique(meeting, node), ticket=ticket, slots=slots, role=role)
        meeting = msgspec.structs.replace(meeting, tickets=ticket)
    me = msgspec.structs.replace(known, devices=list(devices), unfit=unfit)
    return msgspec.structs.replace(meeting, here={**meeting.here, agent: me})


def _unique(meeting: Meeting, node: str) -> str:
    taken = {m.node for m in meeting.here.values()}
    taken |= {m.node for m in meeting.members if m.agent not in meeting.gone}
    name, number = node, 1
    while name in taken:
        number += 1
        name = f"{node}.{number}"
    return name


def awaited(meeting: Meeting) -> list[Participant]:
    """Members of the last round that have not come back yet."""
    return [m for m in meeting.members if m.agent not in meeting.here and m.agent not in meeting.gone]


def candidates(meeting: Meeting) -> list[Participant]:
    """Who may be in the next round, in the order in which they would be taken: old members first."""
    places = {m.agent: place for place, m in enumerate(meeting.members)}
    fit = [m for m in meeting.here.values() if not m.unfit]
    return sorted(fit, key=lambda m: (places.get(m.agent, len(places)), m.ticket))


def form(meeting: Meeting, *, min_nodes: int, max_nodes: int, enough: bool) -> Meeting | None:
    """The meeting with its next round formed, or None while that is not possible.

    `enough`: nobody waits any longer for more nodes than `min_nodes`.
    """
    if meeting.over is not None or awaited(meeting):
        return None
    if meeting.size:
        min_nodes = max_nodes = meeting.size
    chosen = candidates(meeting)[:max_nodes]
    if len(chosen) < min_nodes or (len(chosen) < max_nodes and not enough):
        return None
    taken = {m.agent for m in chosen}
    return msgspec.structs.replace(
        meeting,
        round=meeting.round + 1,
        members=chosen,
        size=0,
        here={agent: m for agent, m in meeting.here.items() if agent not in taken},
    )


def parked(meeting: Meeting, agent: str) -> str:
    """Why a waiting agent is not part of the running group; empty if it is not known to be left out."""
    me = meeting.here.get(agent)
    if me is None:
        return ""
    if me.unfit:
        return me.unfit
    if meeting.round and len(awaited(meeting)) == len(meeting.members):
        return f"the group is running with {len(meeting.members)} nodes; this one is a spare"
    return ""


def spares(meeting: Meeting) -> list[Participant]:
    """Nodes that wait beside a running group and could take part, in the order in which to take them."""
    old = {m.agent for m in meeting.members}
    return [m for m in candidates(meeting) if m.agent not in old]


def remove(meeting: Meeting, gone: Mapping[str, str]) -> Meeting:
    """Declare agents gone, with the reason."""
    new = {agent: why for agent, why in gone.items() if agent not in meeting.gone}
    if not new:
        return meeting
    here = {agent: m for agent, m in meeting.here.items() if agent not in new}
    return msgspec.structs.replace(meeting, here=here, gone={**meeting.gone, **new})


def finish(meeting: Meeting, code: int, why: str) -> Meeting:
    """The run is over; only the first word on it counts."""
    if meeting.over is not None:
        return meeting
    return msgspec.structs.replace(meeting, over=RunOver(code=code, why=why))


class NodeRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one node's workers: each field gives the first of as many as the node has workers."""

    first: int
    world_size: int
    first_of_role: int
    role_world_size: int


def ranks_of(members: list[Participant], place: int) -> NodeRanks:
    """Ranks in the order of the nodes, as torchrun gives them."""
    role = members[place].role
    return NodeRanks(
        first=sum(m.slots for m in members[:place]),
        world_size=sum(m.slots for m in members),
        first_of_role=sum(m.slots for m in members[:place] if m.role == role),
        role_world_size=sum(m.slots for m in members if m.role == role),
    )
