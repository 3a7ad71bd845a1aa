"""What is recognised as whose, in which order, without torch and whatever pointers say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.foreign.recognition import checkpoints_in, hints, rank_files, recognise
from kit.harness import finish
from kit.tiny import tree
from kit.worlds import foreign


@pytest.mark.parametrize("layout", foreign.LAYOUTS)
def test_each_layout_is_recognised_by_its_path_and_in_the_directory_above_it(
    layout: str, tmp_path: Path
) -> None:
    path = foreign.LAYOUTS[layout](tmp_path / "there")
    found = recognise(path)
    assert found is not None
    assert (str(found.layout), found.step) == (
        layout,
        None if layout == "Hugging Face model" else foreign.STEP,
    )
    assert [(one.path, str(one.layout)) for one in checkpoints_in(tmp_path / "there")] == [(path, layout)]


def test_the_newest_comes_first_by_number_and_not_by_name(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        foreign.lightning(tmp_path, step)
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "epoch=1-step=100.ckpt").read_bytes())
    found = [one.path.name for one in checkpoints_in(tmp_path)]
    assert found == ["last.ckpt", "epoch=1-step=100.ckpt", "epoch=1-step=20.ckpt", "epoch=1-step=9.ckpt"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("40", []),
        ("60", ["latest_checkpointed_iteration.txt names iter_0000060"]),
        ("release", ["latest_checkpointed_iteration.txt names release"]),
        ("soon", ["latest_checkpointed_iteration.txt holds neither a number nor `release`: 'soon'"]),
    ],
)
def test_megatrons_pointer_is_told_where_it_differs_and_never_believed(
    word: str, told: list[str], tmp_path: Path
) -> None:
    path = foreign.megatron(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(word)
    found = checkpoints_in(tmp_path)
    assert [one.path for one in found] == [path]
    assert hints(tmp_path, found) == told


def test_a_released_megatron_checkpoint_is_one(tmp_path: Path) -> None:
    foreign.megatron(tmp_path).rename(tmp_path / "release")
    (found,) = checkpoints_in(tmp_path)
    assert (str(found.layout), found.step) == ("Megatron", None)


def test_a_link_leads_to_what_it_names_and_is_not_counted_twice(tmp_path: Path) -> None:
    path = foreign.kempner(tmp_path)
    assert [one.path for one in checkpoints_in(tmp_path)] == [path]
    found = recognise(tmp_path / "latest")
    assert found is not None
    assert (found.path, found.step) == (path, foreign.STEP)


def test_the_files_of_all_ranks_belong_to_one_local_checkpoint(tmp_path: Path) -> None:
    path = foreign.megatron_local(tmp_path, ranks=3)
    assert list(rank_files(path)) == [0, 1, 2]
    assert len(checkpoints_in(tmp_path)) == 1


@pytest.mark.parametrize("name", ["notes.txt", "weights.pt", "empty"])
def test_what_is_no_checkpoint_is_none(name: str, tmp_path: Path) -> None:
    if name == "empty":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("no archive")
    assert recognise(tmp_path / name) is None
    assert recognise(tmp_path / "nowhere") is None


def test_ls_needs_neither_torch_nor_numpy_and_changes_nothing(tmp_path: Path) -> None:
    for number, make in enumerate(foreign.LAYOUTS.values()):
        make(tmp_path / str(number) / "there")
    torch.save({"w": torch.ones(2)}, tmp_path / "flat.pt")
    before = tree(tmp_path)
    roots = [str(tmp_path / str(number) / "there") for number in range(len(foreign.LAYOUTS))]
    code = (
        "import sys\nfrom holdfast.cli.app import app\n"
        f"for root in {[*roots, str(tmp_path)]!r}:\n"
        "    try:\n        app(['ckpt', 'ls', root])\n"
        "    except SystemExit as end:\n        assert not end.code, (root, end.code)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')))\n"
    )
    result = finish([sys.executable, "-c", code], cwd=tmp_path)
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == "[]"
    for layout in foreign.LAYOUTS:
        assert f"complete, no digests ({layout})" in result.out
    assert tree(tmp_path) == before
