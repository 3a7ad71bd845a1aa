"""Which nodes make up the group: who is here, who is awaited, who is parked, and when a round forms.

Guarantee: pure. A round forms only when every member of the round before has come back or is known to be
gone, from nodes that are fit, never more than `max_nodes` of them. A node too many is parked and costs nobody
anything; a node that was declared gone never comes back under the same name of its agent, so an old life of
it cannot be mistaken for a new one.

The state is one value that all agents change by compare-and-set; each function here gives the next value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One agent, as the others see it."""

    agent: str
    """Unique for one life of one agent."""
    node: str
    """Its node's name, unique among the nodes that take part; the same again after a restart of the agent."""
    ticket: int
    """Its place in the order of arrival."""
    slots: int = 1
    """How many workers it starts."""
    role: str = "default"
    devices: list[str] = []
    """Its devices as its workers see them, in that order; none on a CPU."""
    unfit: str = ""
    """Why it may not take part (its node is excluded); empty if it may."""


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """The run has ended; nobody needs to wait any more."""

    code: int
    why: str


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    round: int = 0
    members: list[Member] = []
    """The nodes of the round that was formed last, by group rank."""
    here: dict[str, Member] = {}
    """Agents that wait for the next round."""
    gone: dict[str, str] = {}
    """Agents that were declared gone, and why."""
    tickets: int = 0
    over: Over | None = None


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
        known = Member(agent=agent, node=_unique(meeting, node), ticket=ticket, slots=slots, role=role)
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


def awaited(meeting: Meeting) -> list[Member]:
    """Members of the last round that have not come back yet."""
    return [m for m in meeting.members if m.agent not in meeting.here and m.agent not in meeting.gone]


def candidates(meeting: Meeting) -> list[Member]:
    """Who may be in the next round, in the order in which they would be taken: old members first."""
    places = {m.agent: place for place, m in enumerate(meeting.members)}
    fit = [m for m in meeting.here.values() if not m.unfit]
    return sorted(fit, key=lambda m: (places.get(m.agent, len(places)), m.ticket))


def form(meeting: Meeting, *, min_nodes: int, max_nodes: int, enough: bool) -> Meeting | None:
    """The meeting with its next round formed, or None while it cannot be.

    `enough` says that nobody waits any longer for more than `min_nodes` to come.
    """
    if meeting.over is not None or awaited(meeting):
        return None
    chosen = candidates(meeting)[:max_nodes]
    if len(chosen) < min_nodes or (len(chosen) < max_nodes and not enough):
        return None
    taken = {m.agent for m in chosen}
    return msgspec.structs.replace(
        meeting,
        round=meeting.round + 1,
        members=chosen,
        here={agent: m for agent, m in meeting.here.items() if agent not in taken},
    )


def parked(meeting: Meeting, agent: str) -> str:
    """Why an agent that waits is not part of the group that runs; empty if it is not known to be so."""
    me = meeting.here.get(agent)
    if me is None:
        return ""
    if me.unfit:
        return me.unfit
    if meeting.round and len(awaited(meeting)) == len(meeting.members):
        return f"the group is running with {len(meeting.members)} nodes; this one is a spare"
    return ""


def spares(meeting: Meeting) -> list[Member]:
    """Nodes that wait beside a running group and could take part, the first to take first."""
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
    """The run is over; the first word counts."""
    if meeting.over is not None:
        return meeting
    return msgspec.structs.replace(meeting, over=Over(code=code, why=why))


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one node's workers: each is the first of as many as the node has workers."""

    first: int
    world_size: int
    first_of_role: int
    role_world_size: int


def ranks_of(members: list[Member], place: int) -> Ranks:
    """Ranks in the order of the nodes, as torchrun gives them."""
    role = members[place].role
    return Ranks(
        first=sum(m.slots for m in members[:place]),
        world_size=sum(m.slots for m in members),
        first_of_role=sum(m.slots for m in members[:place] if m.role == role),
        role_world_size=sum(m.slots for m in members if m.role == role),
    )
