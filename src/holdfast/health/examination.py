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
from holdfast.health.result import Check, run_checks
from holdfast.health.storage import check_storage, try_storage
from holdfast.policy.health import CheckResult, Status, judge_skew, judge_storage, worst

STORAGE_DEADLINE = 15.0
GATE_PATIENCE = 60.0
"""Seconds that storage has before a node is kept out: an fsync may wait behind a checkpoint being written."""
GPU_DEADLINE = 45.0
COMPUTE_DEADLINE = 150.0
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
        named.append(("the local directory", Path(chosen.non_persistent_local_ckpt_dir)))
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


def gpu_check() -> Check:
    """What the driver says of the GPUs; nothing is computed on them."""
    return Check(
        name="gpu",
        look=lambda: check_gpus(compute=False),
        deadline=GPU_DEADLINE,
        hung=Status.CRITICAL,
        fix="the driver hangs: look at the kernel log, drain the node and reboot",
    )


def examine(places: Sequence[Place], *, name: str, quick: bool = False) -> NodeReport:
    """Look at this node. `quick` computes nothing on the GPUs; they are still asked for."""
    measured: list[Skew] = []
    checks = [*quick_checks(places, measured), Check(name="load", look=node.check_load)]
    checks.append(gpu_check())
    if present():
        checks.append(Check(name="kernel log", look=check_kernel_log, deadline=20.0))
        if not quick:
            checks.append(
                Check(name="gpu compute", look=check_compute, deadline=COMPUTE_DEADLINE, hung=Status.CRITICAL)
            )
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
