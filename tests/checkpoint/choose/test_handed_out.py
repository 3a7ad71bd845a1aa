"""What is about a whole checkpoint is read from the storage once, by rank 0, however many ranks resume."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.checkpoint.choose import resume
from holdfast.errors import HoldfastError
from holdfast.record import group as groups
from holdfast.record.group import Group, hand_out
from kit.ranks.together import together
from kit.tiny import checkpoints

HEADS = ("holdfast.json", ".metadata")


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "HANDED_OUT_FROM", 1)
    monkeypatch.setattr(groups, "HANDED_AT_ONCE", 1000)


def opened_here(run_dir: Path) -> list[str]:
    """The names of the files in the run's checkpoints that this process opens from now on."""
    found: list[str] = []

    def hook(event: str, arguments: Any) -> None:
        if event == "open" and str(arguments[0]).startswith(str(run_dir / "checkpoints")):
            found.append(Path(str(arguments[0])).name)

    sys.addaudithook(hook)
    return found


def saved_by(place: Path, world: int, steps: int = 2) -> None:
    def work(rank: int) -> None:
        run, _ = begun(place)
        while run.step < steps:
            run.begin_step()
            run.end_step()
            run.save()
        run.finish()

    (place / "saved").mkdir()
    together(place / "saved", world, work)


def begun(place: Path) -> tuple[holdfast.Run, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    run = holdfast.Run(run_dir=place / "run", checkpoint_interval=0)
    run.track(model=model)
    run.start()
    return run, model


@pytest.mark.parametrize("world", [2, 3])
def test_only_rank_0_reads_what_is_about_the_whole_checkpoint(tmp_path: Path, world: int) -> None:
    """Every rank did: of a checkpoint of 16,384 ranks, that is more than all of its shards together."""
    saved_by(tmp_path, 2)

    def work(rank: int) -> Any:
        opened = opened_here(tmp_path / "run")
        run, _ = begun(tmp_path)
        at = run.step
        run.close()
        return {"step": at, "heads": [name for name in opened if name in HEADS], "shards": len(opened)}

    (tmp_path / "resumed").mkdir()
    found = together(tmp_path / "resumed", world, work)
    assert [one["step"] for one in found] == [2] * world
    assert set(found[0]["heads"]) == set(HEADS)
    assert [one["heads"] for one in found[1:]] == [[]] * (world - 1)
    assert all(one["shards"] for one in found)


def altered(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("harm", [altered, Path.unlink])
def test_a_bad_one_is_refused_by_all_and_the_next_rung_is_taken(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    saved_by(tmp_path, 2)
    harm(checkpoints(tmp_path / "run")[0] / name)

    def work(rank: int) -> int:
        run, _ = begun(tmp_path)
        run.close()
        return run.step

    (tmp_path / "resumed").mkdir()
    assert together(tmp_path / "resumed", 2, work) == [1, 1]


def test_one_that_rank_0_cannot_read_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_by(tmp_path, 2, steps=1)

    def broken(path: Path, limit: int) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    def work(rank: int) -> str:
        monkeypatch.setattr(resume, "read_regular", broken)
        with pytest.raises(HoldfastError) as refused:
            begun(tmp_path)
        return str(refused.value)

    (tmp_path / "resumed").mkdir()
    for told in together(tmp_path / "resumed", 2, work):
        assert "Input/output error" in told


def test_what_is_handed_out_arrives_as_it_was(tmp_path: Path) -> None:
    sent = bytes(range(256)) * 13

    def work(rank: int) -> list[bool]:
        group = Group(rank, 3, dist.HashStore(), dist.group.WORLD)
        each = [hand_out(group, one if rank == 0 else None) for one in (sent, b"", None)]
        return [each[0] == sent, each[1] == b"", each[2] is None]

    assert together(tmp_path, 3, work) == [[True] * 3] * 3


def test_one_rank_alone_hands_nothing_out() -> None:
    assert hand_out(Group(0, 1, dist.HashStore(), None), b"all") == b"all"
