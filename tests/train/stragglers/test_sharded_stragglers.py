"""The straggler detector in real sharded training on gloo: fully_shard, tensor parallelism, pipelines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.train.stragglers import reports
from kit.ranks.sharded import Slow, named, train
from kit.ranks.together import together

LAYOUTS: list[dict[str, int]] = [
    {"fsdp": 4},
    {"fsdp": 2, "tp": 2},
    {"pp": 2, "fsdp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2},
]
LATER = 48
"""A step after which there have been reports."""


def shown(layout: Mapping[str, int]) -> str:
    return "x".join(f"{name}{size}" for name, size in layout.items())


def ran(place: Path, layout: Mapping[str, int], slow: Slow, steps: int, **given: Any) -> list[dict[str, Any]]:
    """The reports of rank 0; a directory of its own for each run."""
    inside = place / f"{len(list(place.iterdir()))}"
    inside.mkdir()
    world = math.prod(layout.values())
    found: list[dict[str, Any]] = together(
        inside, world, lambda rank: train(rank, layout, slow, steps=steps, **given)
    )[0]
    assert len(found) >= 2
    return found


def test_the_late_rank_of_a_sharded_model_is_named(tmp_path: Path) -> None:
    """F3: fully_shard on two ranks, of which one sleeps in its forward; its own past says the same."""
    found = ran(tmp_path, {"fsdp": 2}, Slow({1: 0.05}), 28)
    assert named(found) == {"rank 1"}
    last = found[-1]
    assert last["relative"][0] == 1.0
    assert last["relative"][1] < 0.5
    assert last["waiting"][0] > 0.5 > last["waiting"][1]
    assert "a step it waits" in last["why"][0]


@pytest.mark.drill
def test_where_waits_are_many_and_steps_short_only_some_steps_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: as if timing a wait took longer than it does. All ranks measure the same steps."""
    monkeypatch.setattr(reports, "WAIT_ON_HOST", 1e-5)
    found = ran(tmp_path, {"fsdp": 2}, Slow({1: 0.02}), 90)
    between = [after["step"] - before["step"] for before, after in itertools.pairwise(found)]
    assert max(between) > reports.ENOUGH_STEPS
    assert named(found) == {"rank 1"}


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS, ids=shown)
def test_slow_ranks_of_real_meshes_by_seeds(
    tmp_path: Path, layout: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """F3: precision and recall over seeds, with blocks that vary by a third. Each rank in turn is slow; one
    alone in its stage only later, since nothing but its own past can tell."""
    world, named_in_all, right = math.prod(layout.values()), 0, 0
    seeds = 4
    for seed in range(seeds):
        bad = seed % world
        alone = layout == {"pp": 2}
        slow = Slow({bad: 0.04}, begins=LATER if alone else 0, jitter=0.33)
        found = named(ran(tmp_path, layout, slow, LATER + 40 if alone else 40, seed=seed))
        named_in_all += len(found)
        right += f"rank {bad}" in found
    with capsys.disabled():
        print(f"\n{shown(layout):10} {seeds} seeds: named {named_in_all}, of which right {right}")
    assert named_in_all == right == seeds


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS, ids=shown)
def test_nobody_is_named_in_real_meshes_where_no_one_is_to_blame(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    """F3: blocks that vary by half; a slow rank that is another one in each step; uneven stages."""
    for seed in range(2):
        assert named(ran(tmp_path, layout, Slow(jitter=0.5), 150, seed=seed)) == set()
        assert named(ran(tmp_path, layout, Slow({0: 0.03}, rotates=True), 60, seed=seed)) == set()
    if "pp" in layout:
        found = ran(tmp_path, layout, Slow(), 60, usual=(0.004, 0.02))
        assert named(found) == set()
        assert {tuple(one["unclear"]) for one in found} == {(1,) if layout == {"pp": 2} else ()}


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_a_slow_link_is_told_from_a_slow_rank_in_a_real_mesh(tmp_path: Path) -> None:
    """F3: what two ranks of tensor parallelism exchange takes longer; then a rank is slow instead."""
    layout = {"fsdp": 2, "tp": 2}
    for link in ((0, 1), (2, 3)):
        found = ran(tmp_path, layout, Slow(link=link), 48)
        assert named(found) == {f"link {link[0]},{link[1]}"}
    assert named(ran(tmp_path, layout, Slow({3: 0.04}), 40)) == {"rank 3"}
