"""All checks of one node, put together: what `holdfast doctor` shows and what the gate asks for.

The quick ones take well under a second on a machine that is well, and write a few KiB. Where there are GPUs
the driver and the kernel's log are asked as well, which takes as long as they take; computing comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.config import Settings
from holdfast.health import node
from holdfast.health.gpu import check_compute, check_gpus
from holdfast.health.gpu_facts import present
from holdfast.health.kernel_log import check_kernel_log
from holdfast.health.links import check_links
from holdfast.health.mounts import mount_of
from holdfast.health.network import local_checks, network_seconds, probe_network
from holdfast.health.result import Check, run_checks
from holdfast.health.site import Wrap, site_check
from holdfast.health.storage import check_storage, try_storage
from holdfast.policy.file_systems import judge_file_system
from holdfast.policy.gpu_health import UNCORRECTED_LIMIT
from holdfast.policy.health import CheckResult, Status, judge_skew, judge_storage, worst

STORAGE_DEADLINE = 15.0
GATE_PATIENCE = 60.0
"""Seconds that storage has before a node is kept out: an fsync may wait behind a checkpoint being written."""
GPU_DEADLINE = 45.0
COMPUTE_DEADLINE = 150.0
NETWORK_DEADLINE = 15.0
LOCAL_DIRECTORY = "the local directory"
MOUNT = "the file system does not answer: look at its server and the mount"


class Place(msgspec.Struct, frozen=True):
    """A directory that a run writes to."""

    what: str
    path: Path


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """How far this node's clock is ahead of the clock that the run directory's files are stamped by."""

    seconds: float
    uncertain: float


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on one node."""

    node: str
    status: Status
    results: list[CheckResult]
    skew: Skew | None = None
    """None if it was not measured."""


def places_of(settings: Settings) -> list[Place]:
    """Where a run with these settings writes; each directory once."""
    chosen = settings.checkpoint
    named = [
        ("the run directory", Path(settings.run.dir)),
        ("the checkpoint root", settings.checkpoint_root()),
    ]
    if chosen.non_persistent_local_ckpt_dir:
        named.append((LOCAL_DIRECTORY, Path(chosen.non_persistent_local_ckpt_dir)))
    found: dict[Path, Place] = {}
    for what, path in named:
        found.setdefault(path.absolute(), Place(what, path.absolute()))
    return list(found.values())


def quick_checks(
    places: Sequence[Place], measured: list[Skew] | None = None, patience: float = STORAGE_DEADLINE
) -> list[Check]:
    """What training needs of a node, without computing anything.

    `measured` takes the skew of this node's clock against the first place's, which is looked at then;
    `patience` is how long storage may take.
    """
    checks = [
        Check(name="memory", look=node.check_memory),
        Check(name="shared memory", look=node.check_shared_memory),
        Check(name="open files", look=node.check_open_files),
        Check(name="threads", look=node.check_threads),
    ]
    for number, place in enumerate(places):
        clock = measured if number == 0 else None
        checks += [
            _of_place(f"space of {place.what}", partial(node.check_space, place.path, place.what), patience),
            _of_place(f"storage of {place.what}", partial(_try_place, place, clock), patience),
        ]
    return checks


def _of_place(name: str, look: Callable[[], CheckResult | list[CheckResult]], deadline: float) -> Check:
    return Check(name=name, look=look, deadline=deadline, hung=Status.CRITICAL, fix=MOUNT)


def _try_place(place: Place, measured: list[Skew] | None) -> CheckResult | list[CheckResult]:
    """One file tells both: whether the storage works, and what time it is there."""
    if measured is None or not place.path.is_dir():
        return check_storage(place.path, place.what)
    tried = try_storage(place.path)
    found = [judge_storage(place.what, str(place.path), tried.problem, tried.seconds, tried.slowest)]
    if tried.skew is not None:
        measured.append(Skew(seconds=tried.skew, uncertain=tried.uncertain))
        found.append(judge_skew(f"the clock of {place.what}'s files", tried.skew, tried.uncertain))
    return found


def file_system_checks(places: Sequence[Place]) -> list[Check]:
    """On what each directory lies, by name. The kernel is asked, not the file system, which may be dead."""
    return [
        Check(
            name=f"file system of {place.what}", look=partial(_file_system, place), deadline=STORAGE_DEADLINE
        )
        for place in places
    ]


def _file_system(place: Place) -> CheckResult:
    found = mount_of(place.path)
    if found is None:
        text = "not known: the kernel shows no table of mounts"
        return CheckResult(name=f"file system of {place.what}", status=Status.UNKNOWN, found=text)
    kept = place.what != LOCAL_DIRECTORY
    return judge_file_system(place.what, str(place.path), found.kind, found.options, kept=kept)


def network_check() -> Check:
    """What this node needs of its own network: interfaces that are named for it, and ports."""
    return Check(name="network", look=local_checks, deadline=NETWORK_DEADLINE)


def gate_network() -> Check:
    """The part of it that a node cannot do without; names are asked of servers that may be slow."""
    return Check(name="network", look=partial(local_checks, names=False), deadline=NETWORK_DEADLINE)


def network_probe(endpoint: str, nodes: int, name: str) -> Check:
    """This node's part in trying the network out together with all others."""
    return Check(
        name="network",
        look=partial(probe_network, endpoint, nodes, name),
        deadline=network_seconds(nodes),
        hung=Status.CRITICAL,
        fix="a peer or the network hangs: try fewer nodes at a time to find it",
    )


def site_checks(settings: Settings, wrap: Wrap | None = None) -> list[Check]:
    """The site's own, if there is one."""
    chosen = settings.health
    return [site_check(chosen.command, chosen.command_timeout, wrap)] if chosen.command else []


def compute_check(look: Callable[[], list[CheckResult]] = check_compute) -> Check:
    """Computing on the GPUs, for a second each."""
    return Check(name="gpu compute", look=look, deadline=COMPUTE_DEADLINE, hung=Status.CRITICAL)


def gpu_check(limit: int = UNCORRECTED_LIMIT) -> Check:
    """What the driver says of the GPUs; nothing is computed on them. `limit`: see `check_gpus`."""
    return Check(
        name="gpu",
        look=lambda: check_gpus(compute=False, limit=limit),
        deadline=GPU_DEADLINE,
        hung=Status.CRITICAL,
        fix="the driver hangs: look at the kernel log, drain the node and reboot",
    )


def examine(
    places: Sequence[Place],
    *,
    name: str,
    quick: bool = False,
    limit: int = UNCORRECTED_LIMIT,
    more: Sequence[Check] = (),
) -> NodeReport:
    """Look at this node. `quick` computes nothing on the GPUs, which are still asked for; `limit`: see
    `check_gpus`; `more`: checks beside those that every node has."""
    measured: list[Skew] = []
    checks = [*quick_checks(places, measured), Check(name="load", look=node.check_load)]
    checks += [*file_system_checks(places), Check(name="links", look=check_links, deadline=20.0), *more]
    checks.append(gpu_check(limit))
    if present():
        checks.append(Check(name="kernel log", look=check_kernel_log, deadline=20.0))
        if not quick:
            checks.append(compute_check())
    results = run_checks(checks)
    skew = measured[0] if measured else None
    return NodeReport(node=name, status=worst(results), results=results, skew=skew)


def compare_clocks(reports: Sequence[NodeReport]) -> CheckResult | None:
    """Between nodes, by the one clock that all of them read; None where fewer than two did."""
    known = [(one.skew.seconds, one.skew.uncertain, one.node) for one in reports if one.skew is not None]
    if len(known) < 2:
        return None
    low, high = min(known), max(known)
    between = judge_skew(f"that of {low[2]}", high[0] - low[0], low[1] + high[1])
    return msgspec.structs.replace(between, name="clocks", found=f"that of {high[2]} {between.found}")
