"""The same checks on every node of a Slurm job, started there by `srun`.

Guarantee: bounded. A node that does not answer in time is named, as critical, because the job would wait for
it too; one whose answer cannot be read is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.cluster.slurm import SlurmJob
from holdfast.errors import UsageError
from holdfast.health.examination import NodeReport, Skew, compare_clocks
from holdfast.health.result import ask
from holdfast.own_child import own_child
from holdfast.policy.health import CheckResult, Status, worst

TIMEOUT = 240.0
LINE = 1000
"""Bytes of a line that `srun` hands on whole; longer ones of several nodes come mixed up."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Of all nodes that were asked: what `holdfast doctor --json` prints."""

    status: Status
    nodes: list[NodeReport]
    between: list[CheckResult] = []
    """What is only seen by comparing nodes."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a node found, or that it has told all."""

    node: str
    result: CheckResult | None = None
    skew: Skew | None = None
    done: bool = False


def lines_of(report: NodeReport) -> list[str]:
    """A node's report in lines that are short enough."""
    lines = [_short(Line(node=report.node, result=result)) for result in report.results]
    end = msgspec.json.encode(Line(node=report.node, skew=report.skew, done=True))
    return [*lines, end.decode()]


def _short(line: Line) -> str:
    result = line.result
    assert result is not None
    for keep in (LINE, 300, 150, 60):
        cut = msgspec.structs.replace(result, found=result.found[:keep], fix=result.fix[:keep])
        text = msgspec.json.encode(msgspec.structs.replace(line, result=cut))
        if len(text) < LINE:
            break
    return text.decode()


def from_lines(text: str) -> list[NodeReport]:
    """What nodes told, of those that told all."""
    results: dict[str, list[CheckResult]] = {}
    found = []
    for raw in text.splitlines():
        try:
            line = msgspec.json.decode(raw, type=Line)
        except msgspec.DecodeError:
            continue
        told = results.setdefault(line.node, [])
        if line.result is not None:
            told.append(line.result)
        if line.done:
            found.append(NodeReport(node=line.node, status=worst(told), results=told, skew=line.skew))
    return found


def merge(nodes: Sequence[NodeReport]) -> Report:
    clocks = compare_clocks(nodes)
    between = [clocks] if clocks is not None else []
    status = worst([*(result for one in nodes for result in one.results), *between])
    return Report(status=status, nodes=sorted(nodes, key=lambda one: one.node), between=between)


def ask_all_nodes(job: SlurmJob, arguments: Sequence[str], timeout: float = TIMEOUT) -> Report:
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
        status=Status.CRITICAL if hung else Status.UNKNOWN,
        found=why,
        expected="an answer",
        fix=f"try `srun -w {name} hostname`; drain the node if that hangs",
    )
    return NodeReport(node=name, status=result.status, results=[result])
