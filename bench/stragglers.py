"""What the straggler detector costs on the host: a section, one `with`, as a loop has it; and a report.

Thousands of sections in steps of ten; microseconds of one, by the time that the thread had a core, in the
fastest of several rounds: whoever else uses the machine only adds. The same of a wait in a collective, which
is timed where it is. Of a report what rank 0 does, from the
letters of all ranks to the names and the journal's event.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from holdfast.config.sections import StragglerSettings
from holdfast.record.group import join_group
from holdfast.train.stragglers.reports import Actions, Stragglers, event_of, letter_of, read_letter
from holdfast.train.stragglers.scores import (
    COMPUTE,
    INPUT,
    OTHER,
    Meets,
    RankTimes,
    ScoreLimits,
    Span,
    StragglerJudge,
)
from holdfast.train.stragglers.times import HostTimes
from holdfast.train.stragglers.waits import Waits, group_key

STEPS, SECTIONS, ROUNDS = 300, 10, 5


def untold(event: object) -> None:
    """Nobody keeps a journal here."""
    del event


def sections(repeat: int) -> tuple[list[float], list[float]]:
    """Microseconds of a section, and of a `with` around nothing."""
    return [_fastest(_measured) for _ in range(repeat)], [_fastest(_bare) for _ in range(repeat)]


def _fastest(once: object) -> float:
    assert callable(once)
    return min(float(once()) for _ in range(ROUNDS))


def _measured() -> float:
    chosen = StragglerSettings(enabled=True)
    found = Stragglers(chosen, join_group(5.0), actions=Actions(tell=untold))
    try:
        spent = 0.0
        for step in range(STEPS):
            found.begin_step()
            began = time.thread_time()
            for _ in range(SECTIONS):
                with found.section("augment"):
                    pass
            spent += time.thread_time() - began
            found.end_step()
            found.meet(step)
        return spent / STEPS / SECTIONS * 1e6
    finally:
        found.close()


def _bare() -> float:
    nothing = contextlib.nullcontext()
    began = time.thread_time()
    for _ in range(STEPS * SECTIONS):
        with nothing:
            pass
    return (time.thread_time() - began) / STEPS / SECTIONS * 1e6


SUMS = 300


def waits(repeat: int) -> tuple[list[float], list[float]]:
    """Microseconds that a sum over a gloo group of one takes longer while its wait is timed (as it is in a
    step that is measured), and longer where it is not (in all other steps)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return [_added(on=True) for _ in range(repeat)], [_added(on=False) for _ in range(repeat)]
    finally:
        dist.destroy_process_group()


def _added(*, on: bool) -> float:
    bare = timed = float("inf")
    for _ in range(3 * ROUNDS):  # in turns
        bare = min(bare, _sums())
        times = HostTimes()
        found = Waits(times)
        times.begin()
        found.begin_step(measured=on)
        timed = min(timed, _sums())
        found.close()
    return (timed - bare) / SUMS * 1e6


def _sums() -> float:
    """On the thread that waits; what gloo's own thread does is the same in both."""
    numbers = torch.ones(1)
    began = time.thread_time()
    for _ in range(SUMS):
        dist.all_reduce(numbers)
    return time.thread_time() - began


def _meets(rank: int, ranks: int, ranks_per_node: int) -> dict[str, Meets]:
    """Of a mesh with tensor parallelism in a node, data parallelism between nodes, and a sum over all."""
    node, place = divmod(rank, ranks_per_node)
    inside = range(node * ranks_per_node, min((node + 1) * ranks_per_node, ranks))
    across = range(place, ranks, ranks_per_node)
    return {
        _named(inside): Meets(0.01, 64.0),
        _named(across): Meets(0.02, 32.0),
        _named(range(ranks)): Meets(0.001, 1.0),
    }


@functools.cache
def _named(ranks: range) -> str:
    return group_key(ranks)


def judging(ranks: int, ranks_per_node: int) -> Callable[[], float]:
    """Seconds of a report of so many ranks, one of which is slow, after those that have named it."""
    chance = random.Random(0)
    letters = []
    for rank in range(ranks):
        compute = 0.08 if rank == ranks // 2 else chance.uniform(0.039, 0.041)
        spans = {
            INPUT: Span(0.004),
            COMPUTE: Span(compute, 0.09 - compute),
            "augment": Span(0.01),
            OTHER: Span(0.006),
        }
        times = RankTimes(
            rank=rank,
            node=f"n{rank // ranks_per_node}",
            steps=100,
            noise=1e-4,
            sections=spans,
            meets=_meets(rank, ranks, ranks_per_node),
        )
        letters.append(letter_of(times))
    judge = StragglerJudge(ScoreLimits())

    def measured() -> float:
        gc.collect()
        gc.disable()  # a collection goes through all of torch, whenever it happens to come
        try:
            started = time.perf_counter()
            found = [read_letter(letter, rank) for rank, letter in enumerate(letters)]
            finding = judge.judge(found)
            event_of(found, finding, 100, 300.0)
            taken = time.perf_counter() - started
        finally:
            gc.enable()
        if [one.rank for one in finding.named] != [ranks // 2]:
            raise RuntimeError(f"of {ranks} ranks {[one.key for one in finding.named]} are named")
        return taken

    for _ in range(2):
        judge.judge([read_letter(letter, rank) for rank, letter in enumerate(letters)])
    return measured
