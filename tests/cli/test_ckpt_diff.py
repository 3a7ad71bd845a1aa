"""`holdfast ckpt diff`: equal state is called equal, and every difference is named and measured."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import difference
from holdfast.checkpoint.format.manifest import PartEntry
from holdfast.checkpoint.read_back import unread
from kit.checkpoints import make_checkpoint
from kit.commands import ckpt, ckpt_json
from kit.damage import flip_shard
from kit.harness import finish
from kit.tiny import checkpoints, train, tree


def pair(tmp_path: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[Path, Path]:
    """Two sealed checkpoints with these tensors as their model."""
    return (
        make_checkpoint(tmp_path / "a", state={"model": a}),
        make_checkpoint(tmp_path / "b", state={"model": b}),
    )


def entries(a: Path, b: Path, *more: str) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in ckpt_json("diff", a, b, *more)["entries"]}


def test_a_resumed_run_and_an_uninterrupted_one_are_equal_though_their_facts_differ(tmp_path: Path) -> None:
    """Weights, optimizer, schedule, RNG, data position and counters; ids and times are only facts."""
    train(tmp_path / "whole", until=6)
    train(tmp_path / "parts", until=4)
    train(tmp_path / "parts", until=6)
    a, b = checkpoints(tmp_path / "whole")[0], checkpoints(tmp_path / "parts")[0]
    before = tree(tmp_path)
    result = ckpt("diff", a, b)
    assert result.code == 0, result.text
    assert "the state is equal" in result.out
    assert tree(tmp_path) == before
    facts = {fact["name"]: (fact["a"], fact["b"]) for fact in ckpt_json("diff", a, b)["facts"]}
    assert facts["attempt"] == (1, 2)
    assert facts["id"] == (a.name[14:], b.name[14:])
    assert "step" not in facts


def test_two_steps_of_one_run_differ_in_weights_and_in_the_parts_that_moved(tmp_path: Path) -> None:
    train(tmp_path / "run", until=6)
    six, three = checkpoints(tmp_path / "run")
    result = ckpt("diff", three, six)
    assert result.code == 1, result.text
    found = ckpt_json("diff", three, six)
    assert found["equal"] is False
    by_name = {entry["name"]: entry for entry in found["entries"]}
    assert by_name["model.0.weight"]["what"] == "values"
    assert by_name["model.0.weight"]["differing"] == by_name["model.0.weight"]["elements"] == 72
    blob = by_name["holdfast.rank_00000"]
    assert {"own.counters", "own.data", "own.rng", "tracked.schedule"} <= set(blob["parts"])
    measured = [entry["max_abs"] for entry in found["entries"] if entry["what"] == "values"]
    assert measured == sorted(measured, reverse=True), "largest first"
    assert "tracked.schedule" in result.out
    assert "model.0.weight" in result.out


def test_what_has_equal_digests_is_not_read_and_needs_no_torch(tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "a")
    other = Path(shutil.copytree(one, tmp_path / "b" / one.name))
    assert ckpt_json("diff", one, other)["read"] == 0
    code = (
        "import sys\n"
        "from holdfast.cli.app import app\n"
        "try:\n"
        f"    app(['ckpt', 'diff', {str(one)!r}, {str(other)!r}])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print('torch' in sys.modules)\n"
    )
    result = finish([sys.executable, "-c", code], cwd=tmp_path)
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == "False"


def test_values_are_measured(tmp_path: Path) -> None:
    x = torch.arange(6.0).view(2, 3)
    y = x.clone()
    y[0, 1] += 0.5
    y[1, 2] -= 2.0
    found = entries(*pair(tmp_path, {"w": x, "same": x}, {"w": y, "same": x}))
    assert found.keys() == {"model.w"}
    expected = {"what": "values", "differing": 2, "elements": 6, "max_abs": 2.0, "nans_a": 0, "nans_b": 0}
    assert expected.items() <= found["model.w"].items()


@pytest.mark.parametrize(
    ("a", "b", "differing", "max_abs", "nans"),
    [
        ([1.0, math.nan], [1.0, 2.0], 1, 0.0, (1, 0)),
        ([math.nan, 1.0], [math.nan, 1.5], 1, 0.5, (1, 1)),
        ([math.nan], [1.0], 1, None, (1, 0)),
        ([math.inf, 1.0], [math.inf, 2.0], 1, 1.0, (0, 0)),
        ([math.inf], [1.0], 1, "inf", (0, 0)),
        ([0.0], [-0.0], 1, 0.0, (0, 0)),
    ],
)
def test_values_that_are_no_ordinary_numbers(
    tmp_path: Path, a: list[float], b: list[float], differing: int, max_abs: object, nans: tuple[int, int]
) -> None:
    both = pair(tmp_path, {"w": torch.tensor(a)}, {"w": torch.tensor(b)})
    found = entries(*both)["model.w"]
    assert (found["differing"], found["max_abs"], (found["nans_a"], found["nans_b"])) == (
        differing,
        max_abs,
        nans,
    )
    assert json.loads(ckpt("diff", *both, "--json").out), "valid JSON, also with infinities"


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.float64,
    ],
)
def test_every_dtype_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    a, b = torch.tensor([0.0, 1.0, 1.0]).to(dtype), torch.tensor([0.0, 1.0, 0.0]).to(dtype)
    found = entries(*pair(tmp_path, {"w": a}, {"w": b}))["model.w"]
    assert (found["differing"], found["max_abs"]) == (1, 1.0)


def test_a_tolerance_covers_small_differences_and_never_a_nan(tmp_path: Path) -> None:
    x = torch.ones(4)
    near = pair(tmp_path / "near", {"w": x}, {"w": x + 1e-3})
    assert ckpt("diff", *near).code == 1
    assert ckpt("diff", *near, "--tolerance", "1e-4").code == 1
    assert ckpt("diff", *near, "--tolerance", "1e-2").code == 0
    torn = x.clone()
    torn[2] = math.nan
    assert ckpt("diff", *pair(tmp_path / "nan", {"w": x}, {"w": torn}), "--tolerance", "1e9").code == 1


def test_names_shapes_and_dtypes_are_told_first(tmp_path: Path) -> None:
    a = {"gone": torch.ones(2), "shape": torch.ones(2, 3), "dtype": torch.ones(2), "w": torch.ones(2)}
    b = {
        "new": torch.ones(2),
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(2).double(),
        "w": torch.zeros(2),
    }
    found = ckpt_json("diff", *pair(tmp_path, a, b))["entries"]
    assert found[-1]["name"] == "model.w"
    told = {entry["name"]: (entry["what"], entry["detail"]) for entry in found[:-1]}
    assert told == {
        "model.gone": ("only in A", ""),
        "model.new": ("only in B", ""),
        "model.shape": ("shape", "[2, 3] and [3, 2]"),
        "model.dtype": ("dtype", "float32 and float64"),
    }


def test_objects_are_compared_by_digest(tmp_path: Path) -> None:
    a = make_checkpoint(tmp_path / "a", state={"model": {"w": torch.ones(2)}, "step": 1})
    b = make_checkpoint(tmp_path / "b", state={"model": {"w": torch.ones(2)}, "step": 2})
    assert entries(a, b).keys() == {"step"}
    assert entries(a, b)["step"]["what"] == "object"


def test_facts_of_both_are_shown(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}}
    a = make_checkpoint(tmp_path / "a", state=state, tokens=5)
    b = make_checkpoint(
        tmp_path / "b", state=state, step=121, run="run-b", tokens=7, parts={"net": PartEntry(kind="model")}
    )
    facts = {fact["name"]: (fact["a"], fact["b"]) for fact in ckpt_json("diff", a, b)["facts"]}
    assert facts == {
        "step": (120, 121),
        "run": ("run-a", "run-b"),
        "tokens": (5, 7),
        "part model": ("model", None),
        "part net": (None, "model"),
    }
    assert "run-b" in ckpt("diff", a, b).out


def test_an_unsound_checkpoint_is_refused_and_not_called_different(tmp_path: Path) -> None:
    x = torch.ones(30_000)
    a, b = pair(tmp_path, {"w": x}, {"w": x + 1})
    flip_shard(b)
    result = ckpt("diff", a, b)
    assert result.code == 2, result.text
    assert "not sound" in result.err
    assert "altered" in result.err
    (b / "__0_0.distcp").unlink()
    result = ckpt("diff", a, b)
    assert result.code == 2
    assert "missing: __0_0.distcp" in result.err
    assert ckpt("diff", a, tmp_path / "nowhere").code == 2


def test_neither_of_the_two_can_be_deleted_while_they_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair(tmp_path, {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    seen: list[bool] = []
    compare_values = difference._values

    def look(*args: Any) -> Any:
        for directory in both:
            with unread(directory) as free:
                seen.append(free)
        return compare_values(*args)

    monkeypatch.setattr(difference, "_values", look)
    assert ckpt("diff", *both).code == 1
    assert seen == [False, False]
