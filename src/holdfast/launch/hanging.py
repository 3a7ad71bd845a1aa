"""A hang, from the rank that is overdue to what the decision is told of it.

Every node looks at all of its own ranks before it ends them, wherever the hang was noticed first: only all of
them together show who is missing from a collective.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from holdfast.launch.arrangement import Arrangement
from holdfast.launch.attempt import Attempt
from holdfast.launch.hang import collect, read_reports
from holdfast.launch.hang_report import merge
from holdfast.launch.monitor import Monitor
from holdfast.policy.evidence import Hang

LOOKING = 10.0
"""Seconds for finding out what the ranks of a node do, and for writing it down."""


def look_at_hang(
    attempt: Attempt, pids: Mapping[int, int], monitor: Monitor, ranks: Mapping[int, int]
) -> None:
    """Keep what this node's ranks are doing, while they still do it.

    `ranks`: by what each worker was started with, its present rank; who has none does nothing.
    """
    started = {rank: first for first, rank in ranks.items()}
    collect(
        attempt.control.attempt(attempt.number),
        attempt.place.node,
        {rank: pids[first] for rank, first in started.items()},
        lambda rank, timeout: monitor.ask(started[rank], timeout),
        hung=[msgspec.structs.replace(one, rank=ranks.get(one.rank, one.rank)) for one in monitor.overdue()],
        deadline=time.monotonic() + LOOKING,
        stacks=monitor.path.parent,
    )


def hangs_of(attempt: Attempt) -> tuple[list[Hang], list[str]]:
    """What all nodes found, as evidence, and in words."""
    reports = read_reports(attempt.control.attempt(attempt.number))
    if not reports:
        return [], []
    found = merge(reports, world=attempt.place.world_size)
    nodes = attempt.nodes_of_ranks or _nodes_of_ranks(attempt.told.arrangement, attempt.place.world_size)
    hangs = [
        Hang(
            rank=one.rank,
            at=min(report.at for report in reports),
            node=one.node,
            section=one.section,
            seconds=one.seconds,
            limit=one.limit,
            missing=list(one.missing),
            missing_nodes=sorted({nodes[rank] for rank in one.missing if rank in nodes}),
            silent=list(one.silent),
        )
        for one in found.hung
    ]
    return hangs, [found.summary] if found.summary else []


def _nodes_of_ranks(arrangement: Arrangement, world_size: int) -> dict[int, str]:
    """Global rank → node, where all nodes have as many workers."""
    nodes = [one.node for one in arrangement.nodes]
    if not nodes or world_size % len(nodes):
        return {}
    each = world_size // len(nodes)
    return {rank: nodes[rank // each] for rank in range(world_size)}
