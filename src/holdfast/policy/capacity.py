"""Which nodes and devices the next attempt may use, and whether they are enough. Pure.

Guarantee: what is excluded is never part of an answer, and an answer never has fewer nodes than `min_nodes`:
it says instead how many are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from holdfast.policy.rotation import NodeDevices


class Exclusion(msgspec.Struct, frozen=True):
    """A node, or one device of it, that is kept out."""

    node: str
    device: str | None = None
    """None: the whole node."""
    reason: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to run on."""

    nodes: list[str] = []
    """Those that took part and are still there, in the plain order: by rank before any rotation."""
    spares: list[str] = []
    """Those that wait, the first to take first."""
    devices: dict[str, list[str]] = {}
    """Each node's visible devices, in their order; a node without an entry has none, or it is not known."""
    workers_per_node: int = 1
    min_nodes: int = 1
    max_nodes: int = 0
    """0 if not known."""
    may_shrink: bool = False
    """Whether the job may go on with fewer nodes than before."""
    excluded: list[Exclusion] = []


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a next attempt."""

    nodes: list[str]
    """In the plain order, those that were taken of the spares last."""
    spares: list[str] = []
    """Which of them are new."""
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
    """Whether a node may be used: it is not excluded, and has devices enough if it has any."""
    if any(e.node == node and e.device is None for e in cluster.excluded):
        return False
    return suffice(cluster, node, devices_of(cluster, node))


def fit(cluster: Cluster, wanted: int, without: AbstractSet[str] = frozenset()) -> Fit:
    """The nodes to go on with, as many as `wanted` if that can be; `without` are not to be used."""
    wanted = max(wanted, cluster.min_nodes)
    if cluster.max_nodes:
        wanted = min(wanted, max(cluster.max_nodes, cluster.min_nodes))
    here = [node for node in cluster.nodes if node not in without and usable(cluster, node)][:wanted]
    waiting = [node for node in cluster.spares if node not in {*without, *here} and usable(cluster, node)]
    taken = waiting[: wanted - len(here)]
    found = [*here, *taken]
    if len(found) >= wanted:
        return Fit(nodes=found, spares=taken)
    if cluster.may_shrink and len(found) >= cluster.min_nodes:
        return Fit(nodes=found, spares=taken, shrinks=True)
    least = cluster.min_nodes if cluster.may_shrink else wanted
    return Fit(nodes=found, spares=taken, missing=least - len(found))


def keep_out(
    cluster: Cluster, wanted: int, places: Iterable[tuple[str, str]], reason: str
) -> tuple[list[Exclusion], Fit] | None:
    """What to exclude so that none of these (node, device) is used, and who then goes on; None if too few do.

    A device alone where the rest of its node suffices, else the node. What is kept out already is left out.
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
    """The nodes with the devices that may be used, for `rotation`."""
    return [NodeDevices(node, devices_of(cluster, node)) for node in nodes]
