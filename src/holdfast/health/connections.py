"""What trials of the network, counters of links and kinds of file systems say. Pure.

Every two nodes meet once, in rounds in which each node has at most one partner: n nodes need n - 1 rounds (n
if their number is odd), so the time grows with the number of nodes, not of pairs, and no two pairs disturb
each other at a node.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from holdfast.base import plural
from holdfast.health.judgements import CheckResult, HealthStatus

SLOW_LINK = 3.0
"""A pair is reported if it is slower than half of all by this factor: links of one network differ less."""
SLOW_RING, RING = 10.0, 4
"""The factor for a ring, and the fewest nodes in one. There all are tried at once while workers wait to
start: one short look, which a busy machine disturbs."""
LATENCY_WARNING = 0.01
"""Seconds one way: a node further away is in another building, or the path to it is broken."""
PORTS_WARNING = 4096
"""Ports that a node should be able to give away: each rank connects to many others."""
NAMED = 5
"""Most nodes or pairs that are listed one by one."""


def round_count(nodes: int) -> int:
    return nodes - 1 + nodes % 2 if nodes > 1 else 0


def partner(node: int, number: int, nodes: int) -> int | None:
    """The partner of a node in a round; None if it rests. It is mutual."""
    even = nodes + nodes % 2
    places = even - 1
    if node == even - 1:
        found = number * (even // 2) % places
    else:
        found = (number - node) % places
        found = even - 1 if found == node else found
    return found if found < nodes else None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What two nodes found out about the connection between them."""

    a: str
    b: str
    latency: float = 0.0
    """Seconds one way."""
    bandwidth: float = 0.0
    """Bytes a second, in the slower direction."""
    problem: str = ""
    """Why they did not meet; empty if they did."""


def judge_joined(came: int, wanted: int, missing: str) -> CheckResult:
    """`missing`: what is known about those that did not come."""
    well = came == wanted
    return CheckResult(
        name="network nodes",
        status=HealthStatus.OK if well else HealthStatus.CRITICAL,
        found=f"{came} of {plural(wanted, 'node')} came" + ("" if well else f": {missing}"),
        expected="all of them",
        fix=""
        if well
        else "look at those that are missing; the port may be closed between them and the first",
    )


def judge_reached(interface: str, pairs: Sequence[Pair]) -> list[CheckResult]:
    """For one node, `a` in all `pairs`: who could not be reached, and how far and fast the others are."""
    lost = [one for one in pairs if one.problem]
    good = [one for one in pairs if not one.problem]
    told = "; ".join(f"{one.b}: {one.problem}" for one in lost[:NAMED])
    more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
    results = [
        CheckResult(
            name="network peers",
            status=HealthStatus.CRITICAL if lost else HealthStatus.OK,
            found=f"{plural(len(lost), 'node')} cannot be reached over {interface}: {told}{more}"
            if lost
            else f"{plural(len(good), 'node')} reached over {interface}",
            expected="every node of the job",
            fix="open all ports between the nodes of a job, and check the interface (NCCL_SOCKET_IFNAME, "
            "GLOO_SOCKET_IFNAME)"
            if lost
            else "",
        )
    ]
    if good:
        far = max(good, key=lambda one: one.latency)
        slow = min(good, key=lambda one: one.bandwidth)
        late = far.latency > LATENCY_WARNING
        results.append(
            CheckResult(
                name="network latency",
                status=HealthStatus.WARNING if late else HealthStatus.OK,
                found=f"at most {far.latency * 1e6:.0f} µs one way, to {far.b}",
                expected=f"at most {LATENCY_WARNING * 1e3:g} ms",
                fix="look at the path to it: another switch, another building, a full link?" if late else "",
            )
        )
        results.append(
            CheckResult(
                name="network bandwidth",
                status=HealthStatus.OK,
                found=f"at least {slow.bandwidth / 1e9:.3g} GB/s on one connection, to {slow.b}",
            )
        )
    return results


def judge_pairs(pairs: Sequence[Pair], factor: float = SLOW_LINK) -> CheckResult:
    """For all nodes together: pairs that are far slower than half of all, and the node that they share.

    `factor`: by which they must be slower.
    """
    good = [one for one in pairs if not one.problem and one.bandwidth > 0]
    name = "network between nodes"
    if not good:
        return CheckResult(name=name, status=HealthStatus.UNKNOWN, found="no two nodes have met")
    usual = statistics.median(one.bandwidth for one in good)
    slow = sorted((one for one in good if one.bandwidth * factor < usual), key=lambda one: one.bandwidth)
    found = f"{plural(len(good), 'pair')}, half of them at {usual / 1e9:.3g} GB/s or more"
    if not slow:
        return CheckResult(name=name, status=HealthStatus.OK, found=found)
    told = ", ".join(f"{one.a} and {one.b} at {one.bandwidth / 1e9:.3g}" for one in slow[:NAMED])
    shared, times = Counter(node for one in slow for node in (one.a, one.b)).most_common(1)[0]
    whose = f"; {shared} is part of {times} of them" if len(slow) > 1 and times > len(slow) / 2 else ""
    return CheckResult(
        name=name,
        status=HealthStatus.WARNING,
        found=f"{found}; far slower: {told}{whose}",
        expected=f"no pair more than {factor:g} times slower than half of them",
        fix=f"look at the link and the switch port of {shared}" if whose else "look at their links",
    )


def judge_names(own: str, problems: Mapping[str, str]) -> CheckResult:
    """`problems`: names that were not resolved, and why."""
    told = "; ".join(f"{name}: {why}" for name, why in sorted(problems.items())[:NAMED])
    return CheckResult(
        name="network names",
        status=HealthStatus.WARNING if problems else HealthStatus.OK,
        found=f"{len(problems)} not resolved: {told}" if problems else f"resolved, this node is {own}",
        expected="every node's name has an address",
        fix="add them to the site's name service or to /etc/hosts: a rendezvous by name would fail"
        if problems
        else "",
    )


def judge_ports(low: int, high: int, problem: str) -> CheckResult:
    """`problem`: why no port was given; empty if one was."""
    count = max(0, high - low + 1)
    few = count < PORTS_WARNING
    status = HealthStatus.CRITICAL if problem else HealthStatus.WARNING if few else HealthStatus.OK
    found = f"ports {low} to {high} are given away" if count else "not known which ports are given away"
    return CheckResult(
        name="network ports",
        status=status,
        found=f"no port can be had: {problem}" if problem else found,
        expected=f"at least {PORTS_WARNING}",
        fix=""
        if status is HealthStatus.OK
        else "raise net.ipv4.ip_local_port_range, or end what holds the ports",
    )


def judge_interface(variable: str, name: str, *, there: bool, up: bool, address: str) -> CheckResult:
    """For an interface that a variable names: without it no group of ranks can form."""
    well = there and up and bool(address)
    why = "is not there" if not there else "is down" if not up else "has no IPv4 address"
    return CheckResult(
        name=f"network interface {name}",
        status=HealthStatus.OK if well else HealthStatus.CRITICAL,
        found=f"{address}" if well else f"{variable} names it, and it {why}",
        expected="up, with an address",
        fix="" if well else f"set {variable} to one that this node has (`ip -br addr`), or bring it up",
    )


def judge_all_reduce(backend: str, ranks: int, *, seconds: float, size: int, problem: str) -> CheckResult:
    """`problem`: why there is no right answer; empty if there is one."""
    rate = 2 * (ranks - 1) / ranks * size / seconds / 1e9 if seconds > 0 and ranks > 1 else 0.0
    speed = f", {rate:.3g} GB/s on the bus" if rate else ""
    return CheckResult(
        name=f"all-reduce over {backend}",
        status=HealthStatus.CRITICAL if problem else HealthStatus.OK,
        found=problem or f"{plural(ranks, 'node')} have the right sum after {seconds * 1e3:.3g} ms{speed}",
        expected="the right sum on every node",
        fix="look at what the nodes cannot reach above, then at the backend's log" if problem else "",
    )


def judge_not_reduced(backend: str) -> CheckResult:
    """Where some nodes cannot reach each other, a group of all nodes would hang."""
    found = "not tried: not every two nodes reach each other"
    return CheckResult(name=f"all-reduce over {backend}", status=HealthStatus.UNKNOWN, found=found)


# What the counters of a node's links say: InfiniBand, NVLink, and the bus that devices sit on. Pure.
#
# Counters run since the machine was booted, or since somebody cleared them: they tell what to look at, and
# keep no node out.


LIMITS = {
    "link_downed": (0, "the link went down"),
    "link_error_recovery": (0, "the link had to recover"),
    "excessive_buffer_overrun_errors": (0, "its buffers ran over"),
    "local_link_integrity_errors": (100, "errors on the link itself"),
    "symbol_error": (100, "wrong symbols"),
    "port_rcv_errors": (100, "packets came in damaged"),
}
"""An InfiniBand counter → how high it may stand, and what it means. Busy links count others daily."""
NVLINK = {"recovery": 0, "fatal": 0, "replay": 100, "crc": 100}
"""A word in the name of an NVLink counter → how high it may stand."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One port of an InfiniBand or RoCE adapter."""

    name: str
    """Such as `mlx5_0/1`."""
    state: str = ""
    """ACTIVE, DOWN …"""
    rate: float | None = None
    """Gb/s."""
    counters: Mapping[str, int] = {}


class BusSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device sits on the bus."""

    bus: str
    what: str
    """gpu or adapter."""
    width: int | None = None
    widest: int | None = None
    fatal: int = 0
    """Errors that the bus could not recover from."""


def judge_ports_of(ports: Sequence[Port]) -> list[CheckResult]:
    """One result for each port; the ports of one node should be alike."""
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
        status=HealthStatus.WARNING if told else HealthStatus.OK,
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
                status=HealthStatus.WARNING if high else HealthStatus.OK,
                found=", ".join(high[:NAMED]) + more if high else "no errors",
                expected="no errors",
                fix="look for XID 74 in the kernel log; reseat or replace what it names" if high else "",
            )
        )
    return found


def judge_slots(slots: Sequence[BusSlot]) -> list[CheckResult]:
    """A device whose link to the bus has fewer lanes than it could have is slower than its peers."""
    found = []
    for one in slots:
        narrow = one.width is not None and one.widest is not None and 0 < one.width < one.widest
        told = [f"{one.width} of {one.widest} lanes"] if narrow else []
        told += [f"{one.fatal} errors that the bus could not get over"] if one.fatal else []
        found.append(
            CheckResult(
                name=f"bus of {one.what} {one.bus}",
                status=HealthStatus.WARNING if told else HealthStatus.OK,
                found="; ".join(told) or (f"{one.width} lanes" if one.width else "no errors"),
                expected="all lanes, no errors",
                fix="reseat it, and look at the riser and the firmware" if told else "",
            )
        )
    return found


# What is known about the file systems that runs are kept on, and what to look at in each. Pure.
#
# Only what a run depends on is judged: that a rename is one step for everyone who looks, that durable data
# stays, that no error is made up, and that nodes soon see each other's files. What is merely worth knowing is
# mentioned when a file system is well.


class KnownFileSystem(msgspec.Struct, frozen=True, kw_only=True):
    called: str
    worth_knowing: str = ""
    shared: bool = False
    """Whether several nodes can have it mounted."""
    lost_with: str = ""
    """What takes everything on it away when it goes; empty if the data stays."""


_FUSE = "renames may not be one step, and what is written may be late: try it with `holdfast doctor`"
KINDS: dict[str, KnownFileSystem] = {
    "lustre": KnownFileSystem(
        called="Lustre",
        shared=True,
        worth_knowing="a directory's stripe count decides how fast large shards are written (`lfs "
        "getstripe`); quotas are not in the free space (`lfs quota`)",
    ),
    "nfs": KnownFileSystem(
        called="NFS",
        shared=True,
        worth_knowing="other nodes see a new name only after their attribute cache ends (acdirmax, 60 s "
        "unless set); one server bounds the speed of all nodes",
    ),
    "gpfs": KnownFileSystem(
        called="GPFS",
        shared=True,
        worth_knowing="quotas of blocks and of files are not in the free space (`mmlsquota`); many nodes "
        "that write into one directory wait for each other",
    ),
    "beegfs": KnownFileSystem(called="BeeGFS", shared=True, worth_knowing="quotas are not in the free space"),
    "ceph": KnownFileSystem(
        called="CephFS", shared=True, worth_knowing="quotas may be set on any directory above"
    ),
    "weka": KnownFileSystem(called="Weka", shared=True),
    "wekafs": KnownFileSystem(called="Weka", shared=True),
    "cifs": KnownFileSystem(called="SMB", shared=True, worth_knowing=_FUSE),
    "tmpfs": KnownFileSystem(called="tmpfs", lost_with="the next reboot, or the container"),
    "ramfs": KnownFileSystem(called="ramfs", lost_with="the next reboot"),
    "overlay": KnownFileSystem(called="overlay", lost_with="the container"),
}
_LATER = {"nfs4": "nfs", "fuse.ceph": "ceph", "fuse.ceph-fuse": "ceph", "smb3": "cifs", "mmfs": "gpfs"}


def judge_file_system(
    what: str, path: str, kind: str, options: Collection[str], *, kept: bool
) -> CheckResult:
    """`kept`: whether what lies there must outlast the node; a local tier's directory need not."""
    name = f"file system of {what}"
    known = KINDS.get(_LATER.get(kind, kind))
    called = known.called if known is not None else kind
    trouble, fix = _trouble(kind, known, options, kept=kept)
    if trouble:
        found = f"{path} is on {called}: {trouble}"
        return CheckResult(name=name, status=HealthStatus.WARNING, found=found, fix=fix)
    told = f"; {known.worth_knowing}" if known is not None and known.worth_knowing else ""
    return CheckResult(name=name, status=HealthStatus.OK, found=f"{path} is on {called}{told}")


def _trouble(
    kind: str, known: KnownFileSystem | None, options: Collection[str], *, kept: bool
) -> tuple[str, str]:
    """(what is wrong with it, what to do); empty if nothing is wrong."""
    family = _LATER.get(kind, kind)
    if "ro" in options:
        return "it is mounted read-only", "mount it for writing, or set another directory"
    if known is not None and known.lost_with and kept:
        return (
            f"what is kept there is lost with {known.lost_with}",
            "set run.dir and checkpoint.root to a directory that stays, on all nodes the same",
        )
    if family == "nfs" and "soft" in options:
        return (
            "it is mounted `soft`, so a server that is only slow gives errors and saves fail",
            "mount it `hard`",
        )
    if family == "nfs" and {"nolock", "local_lock=all", "local_lock=flock"} & set(options):
        return "locks do not reach other nodes (nolock, local_lock)", "mount it with locks"
    if family == "lustre" and "flock" not in options:
        return (
            "it is mounted without `flock`, so locks fail or do not reach other nodes",
            "mount it with `flock`",
        )
    if kind.startswith("fuse") and family == kind and known is None:
        return (
            _FUSE,
            "use a file system that the kernel mounts itself, or checkpoint.remote for object stores",
        )
    return "", ""
