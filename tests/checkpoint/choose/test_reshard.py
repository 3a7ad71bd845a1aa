"""Another world size: no sample repeated or left out, totals kept, and a refusal where that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.checkpoint.choose.sharing import reshard
from holdfast.checkpoint.format import manifest as manifests
from holdfast.errors import IncompleteStateError, UsageError
from holdfast.journal.events import RunFinished
from kit.harness import REPO, finish
from kit.harness import holdfast as holdfast_command
from kit.runs import events_in, warnings_of
from kit.tiny import Numbers, checkpoints

SCRIPT = str(REPO / "tests" / "scripts" / "train" / "train_global.py")


def order(
    directory: Path, name: str, plan: list[tuple[int, int]]
) -> tuple[dict[int, list[int]], dict[int, float]]:
    """Train as `plan` says, (ranks, until) by (ranks, until); each step's global batch and mean loss."""
    batches: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    (directory / name).mkdir()
    for number, (ranks, until) in enumerate(plan):
        env = {"GLOBAL_OUT": f"out{number}", "GLOBAL_UNTIL": str(until)}
        argv = holdfast_command("run", "--nproc-per-node", str(ranks), "--run-dir", "run", SCRIPT)
        result = finish(argv, cwd=directory / name, env=env, timeout=90)
        assert result.code == 0, result.text
        for path in sorted((directory / name / f"out{number}").glob("rank*.log")):
            for line in path.read_text().splitlines():
                step, loss, ids = line.split(" ", 2)
                batches.setdefault(int(step), []).extend(int(i) for i in ids.strip("[]").split(","))
                losses[int(step)] = losses.get(int(step), 0.0) + float(loss) / ranks
    return {step: sorted(ids) for step, ids in batches.items()}, losses


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([(2, 4), (3, 9)], id="2 to 3"),
        pytest.param([(4, 4), (2, 7), (3, 9)], id="4 to 2 to 3", marks=pytest.mark.drill),
    ],
)
def test_on_another_number_of_ranks_every_sample_is_seen_once(
    tmp_path: Path, plan: list[tuple[int, int]]
) -> None:
    """Scenario 21, 4→2 and on: cases torchtitan#816, DeepSpeed#2898. FSDP2, model and optimizer resharded."""
    whole, losses = order(tmp_path, "whole", [(1, 9)])
    parts, resharded = order(tmp_path, "parts", plan)
    assert parts == whole
    assert all(abs(losses[step] - resharded[step]) < 1e-4 for step in losses), (losses, resharded)
    epoch = [i for step in range(1, 4) for i in whole[step]]
    assert len(epoch) == len(set(epoch)) == 36
    told = warnings_of(tmp_path / "parts" / "run")
    (saved, _), (resumed, _) = plan[:2]
    assert f"{saved} ranks saved this, {resumed} resume it: random generators are seeded anew" in told
    for name in ("whole", "parts"):  # a step has 12 samples, on however many ranks
        found = [manifests.read(path)[0] for path in checkpoints(tmp_path / name / "run")]
        assert {one.step: one.samples for one in found} == {one.step: 12 * one.step for one in found}
        finished = events_in(tmp_path / name / "run", RunFinished)
        assert [(one.step, one.samples) for one in finished][-1] == (9, 108)
        assert all(one.samples == 12 * one.step for one in finished)


KINDS = {"schedule": "object"}


def blob(samples: int = 0, *, schedule: object = 1, position: dict[str, Any] | None = None) -> dict[str, Any]:
    counters = {"step": 5, "samples": samples, "tokens": 3 * samples}
    return {"tracked": {"schedule": schedule}, "own": {"counters": counters, "data": position, "rng": {}}}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 8))
def test_totals_are_kept_and_seeds_differ(samples: list[int], world: int) -> None:
    blobs = [blob(count) for count in samples]
    shares = [
        reshard(blobs, run="r", step=5, rank=rank, world=world, kinds=KINDS).own for rank in range(world)
    ]
    assert sum(share["counters"]["samples"] for share in shares) == sum(samples)
    assert sum(share["counters"]["tokens"] for share in shares) == 3 * sum(samples)
    assert len({share["rng"]["seed"] for share in shares}) == world


def test_state_that_differs_between_ranks_is_refused_by_name() -> None:
    with pytest.raises(IncompleteStateError, match=r"schedule\.lr differs between ranks 0 and 1"):
        reshard(
            [blob(schedule={"lr": 1}), blob(schedule={"lr": 2})],
            run="r",
            step=5,
            rank=0,
            world=4,
            kinds=KINDS,
        )


def test_a_position_that_is_not_global_is_refused() -> None:
    own = {"is_global": False, "loader": None}
    with pytest.raises(IncompleteStateError, match="cannot be shared out to 4"):
        reshard([blob(position=own), blob(position=own)], run="r", step=5, rank=0, world=4, kinds=KINDS)
    far = [blob(position={"is_global": True, "loader": {"batch": n}}) for n in (1, 2)]
    with pytest.raises(IncompleteStateError, match="positions differ"):
        reshard(far, run="r", step=5, rank=0, world=4, kinds=KINDS)


@given(st.integers(1, 20), st.integers(1, 6), st.data())
def test_the_slices_of_all_ranks_are_the_global_batch(
    batch_size: int, world: int, data: st.DataObject
) -> None:
    if batch_size < world:
        with pytest.raises(UsageError, match="cannot share it"):
            holdfast.GlobalBatches(Numbers(), batch_size, rank=0, world_size=world)
        return
    alone = [
        ids.tolist() for ids, _ in holdfast.GlobalBatches(Numbers(), batch_size, seed=3, rank=0, world_size=1)
    ]
    ranks = [
        holdfast.GlobalBatches(Numbers(), batch_size, seed=3, rank=r, world_size=world) for r in range(world)
    ]
    shared = [
        sorted(i for ids in step for i in ids)
        for step in zip(*[[b[0].tolist() for b in r] for r in ranks], strict=True)
    ]
    assert shared == [sorted(batch) for batch in alone]
    assert len(alone) == 20 // batch_size


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 10])
def test_global_batches_resume_where_they_were(tmp_path: Path, stop: int) -> None:
    def batches(run_dir: Path, until: int) -> dict[int, list[int]]:
        torch.manual_seed(0)
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
        run.track(model=nn.Linear(1, 1))
        source = holdfast.GlobalBatches(Numbers(), 4, seed=9)
        return {step: ids.tolist() for step, (ids, _) in run.steps(source, until=until)}

    whole = batches(tmp_path / "whole", 12)
    assert batches(tmp_path / "parts", stop) | batches(tmp_path / "parts", 12) == whole
    assert sorted(i for step in range(1, 6) for i in whole[step]) == list(range(20))


def test_another_batch_size_or_dataset_is_refused(tmp_path: Path) -> None:
    saved = holdfast.GlobalBatches(Numbers(), 4, seed=9).state_dict()
    with pytest.raises(IncompleteStateError, match="batch_size 4 → 5"):
        holdfast.GlobalBatches(Numbers(), 5, seed=9).load_state_dict(saved)
    with pytest.raises(IncompleteStateError, match="seed 9 → 8"):
        holdfast.GlobalBatches(Numbers(), 4, seed=8).load_state_dict(saved)
    with pytest.raises(UsageError, match="the dataset has 20 samples"):
        holdfast.GlobalBatches(Numbers(), 21)
