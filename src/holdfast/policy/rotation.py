"""Which physical device each rank gets, so that another attempt can run on others. Pure.

Guarantee: shift 0 is the plain order. Any other shift below `arrangements` puts every rank on another
physical device than the plain order does, uses the same devices of the same nodes, and is described by a text
of its own. Where no rank can move there is one arrangement only.

Within a node the visible devices are taken in their order, from a later one on; local rank i gets the i-th of
them. Across nodes the order of the nodes is turned, so that each rank lands on the next node's devices. Nodes
stay in their order where the devices within each of them suffice: what a rank has on its local disk stays
near it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class NodeDevices(msgspec.Struct, frozen=True):
    """A node and its devices as they are visible to its workers, in that order; none on a CPU."""

    node: str
    devices: list[str] = []


def arrangements(nodes: Sequence[NodeDevices]) -> int:
    """How many shifts there are, the plain order included."""
    if not nodes:
        return 1
    most = max(1, *(len(node.devices) for node in nodes))
    if _within(nodes):
        return len(nodes) * most
    return 1 + (len(nodes) - 1) * most


def arrange(nodes: Sequence[NodeDevices], shift: int) -> list[NodeDevices]:
    """The nodes in rank order, each with its devices in the order in which its workers shall see them.

    `nodes` are given in the plain rank order. Shifts beyond the last one begin again.
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
    """The device of one worker, given its node's in the order of `arrange`; empty without any."""
    return devices[local_rank % len(devices)] if devices else ""


def describe(arranged: Sequence[NodeDevices], workers_per_node: int) -> str:
    """Which rank runs where, as the text by which attempts are compared: "a[0,1] b[0,1]"."""
    described = []
    for node in arranged:
        used = [device_of(node.devices, local_rank) for local_rank in range(workers_per_node)]
        described.append(f"{node.node}[{','.join(used)}]" if node.devices else node.node)
    return " ".join(described)


def _within(nodes: Sequence[NodeDevices]) -> bool:
    """Whether every rank can move within its node."""
    return all(len(node.devices) > 1 for node in nodes)


def _from(devices: Sequence[str], inner: int) -> list[str]:
    """The devices from a later one on. With fewer than elsewhere, never back to the plain order but for 0."""
    if inner and len(devices) > 1:
        inner = 1 + (inner - 1) % (len(devices) - 1)
    else:
        inner = 0
    return [*devices[inner:], *devices[:inner]]
