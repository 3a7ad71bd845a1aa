"""All checks of one node together, and the same checks on every node of a Slurm job.

The quick checks take well under a second on a healthy machine, and write a few KiB. Where there are GPUs, the
driver and the kernel's log are asked as well, which takes as long as they need; computing comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.cluster import SlurmJob
from holdfast.config import Settings
from holdfast.errors import UsageError
from holdfast.health import node
from holdfast.health.connections import judge_file_system
from holdfast.health.gpu import check_compute, check_gpus, check_kernel_log, present
from holdfast.health.judgements import (
    UNCORRECTED_LIMIT,
    CheckResult,
    HealthStatus,
    judge_skew,
    judge_storage,
    worst,
)
from holdfast.health.network import check_links, local_checks, network_seconds, probe_network
from holdfast.health.node import check_storage, mount_of, try_storage
from holdfast.health.trials import Check, Wrap, ask, run_checks, site_check
from holdfast.process import own_child

STORAGE_DEADLINE = 15.0
GATE_PATIENCE = 60.0
"""Seconds that storage may take before its node is kept out: an fsync may wait behind a checkpoint."""
GPU_DEADLINE = 45.0
COMPUTE_DEADLINE = 150.0
NETWORK_DEADLINE = 15.0
LOCAL_DIRECTORY = "the local directory"
MOUNT = "the file system does not answer: look at its server and the mount"


class CheckedPlace(msgspec.Struct, frozen=True):
    """A directory that a run writes to."""

    what: str
    path: Path


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """How far this node's clock is ahead of the clock that stamps the run directory's files."""

    seconds: float
    uncertain: float


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on one node."""

    node: str
    status: HealthStatus
    results: list[CheckResult]
    skew: Skew | None = None
    """None if it was not measured."""


def places_of(settings: Settings) -> list[CheckedPlace]:
    """Where a run with these settings writes; each directory once."""
    chosen = settings.checkpoint
    named = [
        ("the run directory", Path(settings.run.dir)),
        ("the checkpoint root", settings.checkpoint_root()),
    ]
    if chosen.non_persistent_local_ckpt_dir:
        named.append((LOCAL_DIRECTORY, Path(chosen.non_persistent_local_ckpt_dir)))
    found: dict[Path, CheckedPlace] = {}
    for what, path in named:
        found.setdefault(path.absolute(), CheckedPlace(what, path.absolute()))
    return list(found.values())


def quick_checks(
    places: Sequence[CheckedPlace], measured: list[Skew] | None = None, patience: float = STORAGE_DEADLINE
) -> list[Check]:
    """What training needs of a node, without computing anything.

    If `measured` is given, the skew of this node's clock against the first place's is measured and added to
    it; `patience` is how long storage may take.
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
    return Check(name=name, look=look, deadline=deadline, hung=HealthStatus.CRITICAL, fix=MOUNT)


def _try_place(place: CheckedPlace, measured: list[Skew] | None) -> CheckResult | list[CheckResult]:
    """One file shows both: whether the storage works, and what time it is there."""
    if measured is None or not place.path.is_dir():
        return check_storage(place.path, place.what)
    tried = try_storage(place.path)
    found = [judge_storage(place.what, str(place.path), tried.problem, tried.seconds, tried.slowest)]
    if tried.skew is not None:
        measured.append(Skew(seconds=tried.skew, uncertain=tried.uncertain))
        found.append(judge_skew(f"the clock of {place.what}'s files", tried.skew, tried.uncertain))
    return found


def file_system_checks(places: Sequence[CheckedPlace]) -> list[Check]:
    """Which file system each directory is on. The kernel is asked, not the file system, which may be dead."""
    return [
        Check(
            name=f"file system of {place.what}", look=partial(_file_system, place), deadline=STORAGE_DEADLINE
        )
        for place in places
    ]


def _file_system(place: CheckedPlace) -> CheckResult:
    found = mount_of(place.path)
    if found is None:
        text = "not known: the kernel shows no table of mounts"
        return CheckResult(name=f"file system of {place.what}", status=HealthStatus.UNKNOWN, found=text)
    kept = place.what != LOCAL_DIRECTORY
    return judge_file_system(place.what, str(place.path), found.kind, found.options, kept=kept)


def network_check() -> Check:
    """What this node needs of its own network: the interfaces that were named for it, and ports."""
    return Check(name="network", look=local_checks, deadline=NETWORK_DEADLINE)


def gate_network() -> Check:
    """The part of it that a node cannot do without; without names, whose servers may be slow."""
    return Check(name="network", look=partial(local_checks, names=False), deadline=NETWORK_DEADLINE)


def network_probe(endpoint: str, nodes: int, name: str) -> Check:
    """This node's part in trying the network out together with all others."""
    return Check(
        name="network",
        look=partial(probe_network, endpoint, nodes, name),
        deadline=network_seconds(nodes),
        hung=HealthStatus.CRITICAL,
        fix="a peer or the network hangs: try fewer nodes at a time to find it",
    )


def site_checks(settings: Settings, wrap: Wrap | None = None) -> list[Check]:
    """The site's own check, if there is one."""
    chosen = settings.health
    return [site_check(chosen.command, chosen.command_timeout, wrap)] if chosen.command else []


def compute_check(look: Callable[[], list[CheckResult]] = check_compute) -> Check:
    """Compute on the GPUs, for a second each."""
    return Check(name="gpu compute", look=look, deadline=COMPUTE_DEADLINE, hung=HealthStatus.CRITICAL)


def gpu_check(limit: int = UNCORRECTED_LIMIT) -> Check:
    """What the driver says of the GPUs; nothing is computed on them. `limit`: see `check_gpus`."""
    return Check(
        name="gpu",
        look=lambda: check_gpus(compute=False, limit=limit),
        deadline=GPU_DEADLINE,
        hung=HealthStatus.CRITICAL,
        fix="the driver hangs: look at the kernel log, drain the node and reboot",
    )


def examine(
    places: Sequence[CheckedPlace],
    *,
    name: str,
    quick: bool = False,
    limit: int = UNCORRECTED_LIMIT,
    more: Sequence[Check] = (),
) -> NodeReport:
    """Look at this node. `quick` computes nothing on the GPUs, but still asks about them; `limit`: see
    `check_gpus`; `more`: checks in addition to those that every node has."""
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
    """Compare the nodes' clocks by the one clock that all of them read; None if fewer than two read it."""
    known = [(one.skew.seconds, one.skew.uncertain, one.node) for one in reports if one.skew is not None]
    if len(known) < 2:
        return None
    low, high = min(known), max(known)
    between = judge_skew(f"that of {low[2]}", high[0] - low[0], low[1] + high[1])
    return msgspec.structs.replace(between, name="clocks", found=f"that of {high[2]} {between.found}")


# The same checks on every node of a Slurm job, started there by `srun`.
#
# Guarantee: bounded. A node that does not answer in time is reported as critical, because the job would wait
# for it too; one whose answer cannot be read is unknown.


TIMEOUT = 240.0
LINE = 1000
"""Bytes of a line that `srun` passes on whole; longer lines from several nodes get mixed up."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report on all nodes that were asked: what `holdfast doctor --json` prints."""

    status: HealthStatus
    nodes: list[NodeReport]
    between: list[CheckResult] = []
    """What only a comparison of nodes shows."""


class NodeLine(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a node found, or the sign that it has reported everything."""

    node: str
    result: CheckResult | None = None
    skew: Skew | None = None
    done: bool = False


def lines_of(report: NodeReport) -> list[str]:
    """A node's report, in lines that are short enough."""
    lines = [_short(NodeLine(node=report.node, result=result)) for result in report.results]
    end = msgspec.json.encode(NodeLine(node=report.node, skew=report.skew, done=True))
    return [*lines, end.decode()]


def _short(line: NodeLine) -> str:
    result = line.result
    assert result is not None
    for keep in (LINE, 300, 150, 60):
        cut = msgspec.structs.replace(result, found=result.found[:keep], fix=result.fix[:keep])
        text = msgspec.json.encode(msgspec.structs.replace(line, result=cut))
        if len(text) < LINE:
            break
    return text.decode()


def from_lines(text: str) -> list[NodeReport]:
    """The reports of those nodes that reported everything."""
    results: dict[str, list[CheckResult]] = {}
    found = []
    for raw in text.splitlines():
        try:
            line = msgspec.json.decode(raw, type=NodeLine)
        except msgspec.DecodeError:
            continue
        told = results.setdefault(line.node, [])
        if line.result is not None:
            told.append(line.result)
        if line.done:
            found.append(NodeReport(node=line.node, status=worst(told), results=told, skew=line.skew))
    return found


def merge(nodes: Sequence[NodeReport]) -> DoctorReport:
    clocks = compare_clocks(nodes)
    between = [clocks] if clocks is not None else []
    status = worst([*(result for one in nodes for result in one.results), *between])
    return DoctorReport(status=status, nodes=sorted(nodes, key=lambda one: one.node), between=between)


def ask_all_nodes(job: SlurmJob, arguments: Sequence[str], timeout: float = TIMEOUT) -> DoctorReport:
    """`holdfast doctor` with these arguments, once on each node of the job; UsageError if none is known."""
    if not job.nodes:
        raise UsageError(
            f"which nodes job {job.label} has is not known: SLURM_JOB_NODELIST is empty or not a list of "
            "nodes, so nothing was looked at. Run it from the batch script itself, or without --all-nodes on "
            "each node"
        )
    count = len(job.nodes)
    command = [
        "srun",
        f"--jobid={job.job_id}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--overlap",
        "--kill-on-bad-exit=0",
        "--wait=0",
        *own_child("holdfast", "doctor", "--lines", *arguments),
    ]
    answer = ask(command, timeout)
    found = {one.node: one for one in from_lines(answer.out)}
    said = answer.err.strip().splitlines()
    why = f"no answer within {timeout:g} s" if answer.hung else (said[-1][:200] if said else "no answer")
    for name in job.nodes:
        if name not in found:
            found[name] = _silent(name, why, hung=answer.hung)
    return merge(list(found.values()))


def _silent(name: str, why: str, *, hung: bool) -> NodeReport:
    result = CheckResult(
        name="node",
        status=HealthStatus.CRITICAL if hung else HealthStatus.UNKNOWN,
        found=why,
        expected="an answer",
        fix=f"try `srun -w {name} hostname`; drain the node if that hangs",
    )
    return NodeReport(node=name, status=result.status, results=[result])
