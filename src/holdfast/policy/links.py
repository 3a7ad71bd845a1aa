"""What the counters of a node's links say: InfiniBand, NVLink, and the bus that devices sit on. Pure.

Counters run since the machine was booted, or since somebody cleared them: they tell what to look at and keep
nobody out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.policy.health import CheckResult, Status

LIMITS = {
    "link_downed": (0, "the link went down"),
    "link_error_recovery": (0, "the link had to recover"),
    "excessive_buffer_overrun_errors": (0, "its buffers ran over"),
    "local_link_integrity_errors": (100, "errors on the link itself"),
    "symbol_error": (100, "wrong symbols"),
    "port_rcv_errors": (100, "packets came in damaged"),
}
"""An InfiniBand counter → how high it may stand, and what it means. Busy links count others every day."""
NVLINK = {"recovery": 0, "fatal": 0, "replay": 100, "crc": 100}
"""A word in the name of an NVLink counter → how high it may stand."""
NAMED = 5


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One port of an InfiniBand or RoCE adapter."""

    name: str
    """As `mlx5_0/1`."""
    state: str = ""
    """ACTIVE, DOWN …"""
    rate: float | None = None
    """Gb/s."""
    counters: Mapping[str, int] = {}


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device sits on the bus."""

    bus: str
    what: str
    """gpu or adapter."""
    width: int | None = None
    widest: int | None = None
    fatal: int = 0
    """Errors that the bus could not get over."""


def judge_ports_of(ports: Sequence[Port]) -> list[CheckResult]:
    """One result for each port; those of one node should be alike."""
    fastest = max((one.rate for one in ports if one.rate is not None and one.state == "ACTIVE"), default=None)
    return [_judge_port(one, fastest) for one in ports]


def _judge_port(port: Port, fastest: float | None) -> CheckResult:
    told = [
        f"{meaning} ({name} {port.counters[name]})"
        for name, (limit, meaning) in LIMITS.items()
        if port.counters.get(name, 0) > limit
    ]
    if port.state != "ACTIVE":
        told.insert(0, f"it is {port.state or 'in no known state'}")
    elif fastest is not None and port.rate is not None and port.rate < fastest:
        told.insert(0, f"it runs at {port.rate:g} Gb/s, another of this node at {fastest:g}")
    rate = f" at {port.rate:g} Gb/s" if port.rate is not None else ""
    return CheckResult(
        name=f"infiniband {port.name}",
        status=Status.WARNING if told else Status.OK,
        found="; ".join(told) if told else f"active{rate}, no errors",
        expected="active, as fast as the others, no errors",
        fix="look at its cable and the switch port (`ibdiagnet`, `ibqueryerrors`)" if told else "",
    )


def judge_nvlink(counters: Mapping[str, Mapping[str, int]]) -> list[CheckResult]:
    """Device → counter → value; one result for each device that has any."""
    found = []
    for device, values in sorted(counters.items()):
        high = [
            f"{name} {value}"
            for name, value in values.items()
            if any(word in name.lower() and value > limit for word, limit in NVLINK.items())
        ]
        more = f" and {len(high) - NAMED} more" if len(high) > NAMED else ""
        found.append(
            CheckResult(
                name=f"nvlink of {device}",
                status=Status.WARNING if high else Status.OK,
                found=", ".join(high[:NAMED]) + more if high else "no errors",
                expected="no errors",
                fix="look for XID 74 in the kernel log; reseat or replace what it names" if high else "",
            )
        )
    return found


def judge_slots(slots: Sequence[Slot]) -> list[CheckResult]:
    """A device whose link to the bus has fewer lanes than it could have is slower than its peers."""
    found = []
    for one in slots:
        narrow = one.width is not None and one.widest is not None and 0 < one.width < one.widest
        told = [f"{one.width} of {one.widest} lanes"] if narrow else []
        told += [f"{one.fatal} errors that the bus could not get over"] if one.fatal else []
        found.append(
            CheckResult(
                name=f"bus of {one.what} {one.bus}",
                status=Status.WARNING if told else Status.OK,
                found="; ".join(told) or (f"{one.width} lanes" if one.width else "no errors"),
                expected="all lanes, no errors",
                fix="reseat it, and look at the riser and the firmware" if told else "",
            )
        )
    return found
