"""Which devices a node has, which of them may be used, and on which of them its ranks run.

The order of nodes and devices is chosen once for the job, by the leading agent, from the last decision
(`policy.rotation`); every node is told the whole of it, and it is recorded with the attempt, so that a later
verdict can compare where a fault appeared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.control.devices import Device
from holdfast.control.exclusions import Exclusion
from holdfast.policy.rotation import NodeDevices, arrange, describe, device_of
from holdfast.policy.rounds import Member


def usable_devices(devices: Sequence[Device], node: str, excluded: Sequence[Exclusion]) -> list[str]:
    """Pure: the names of those that are not excluded, under any name that they have or had."""
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
        """Global rank → device, of a node's workers; `ranks`: global rank → local rank."""
        if not self.nodes:
            return {}
        devices = self.devices_of(node)
        return {rank: device_of(devices, local_rank) for rank, local_rank in ranks.items()}


def arrange_attempt(members: Sequence[Member], rotation: int) -> Arrangement:
    """Pure: the arrangement of an attempt; `members` are in their plain order."""
    arranged = arrange([NodeDevices(member.node, member.devices) for member in members], rotation)
    workers = max((member.slots for member in members), default=1)
    return Arrangement(nodes=arranged, placement=describe(arranged, workers), rotation=rotation)
