"""Which stored name is which tracked one: the rule, its limits, and a user's own function."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.foreign.contents import ForeignTensor, StoredBox
from holdfast.checkpoint.foreign.names import name_function, tracked_names, unstacked
from holdfast.errors import ConfigError, IncompleteStateError

WANTED = ["a.weight", "a.bias", "b.weight"]


@pytest.mark.parametrize(
    "stored",
    [
        WANTED,
        [f"net.{name}" for name in WANTED],
        [f"module.model.{name}" for name in WANTED],
        [f"_orig_mod.{name}" for name in WANTED],
        ["a._orig_mod.weight", "a._orig_mod.bias", "b.weight"],
    ],
)
def test_one_prefix_more_is_left_out_for_all(stored: list[str]) -> None:
    assert tracked_names(stored, WANTED) == dict(zip(stored, WANTED, strict=True))


def test_one_prefix_less_is_added_for_all() -> None:
    stored = ["weight", "bias"]
    assert tracked_names(stored, ["net.weight", "net.bias"]) == {"weight": "net.weight", "bias": "net.bias"}


def test_what_has_another_prefix_keeps_its_name_for_whoever_names_it() -> None:
    stored = [*(f"net.{name}" for name in WANTED), "teacher.x"]
    assert tracked_names(stored, WANTED)["teacher.x"] == "teacher.x"


def test_two_prefixes_that_fit_are_refused() -> None:
    stored = [f"{net}.{name}" for net in ("student", "teacher") for name in WANTED]
    with pytest.raises(IncompleteStateError, match=r"in 2 ways: without 'student.', without 'teacher.'"):
        tracked_names(stored, WANTED)


def test_what_shares_memory_need_not_be_stored() -> None:
    found = tracked_names(["model.wte"], ["wte", "head"], dispensable=["head", "wte"])
    assert found == {"model.wte": "wte"} or found == {"model.wte": "model.wte"}
    assert tracked_names(["model.wte", "model.b"], ["wte", "b", "head"], dispensable=["head", "wte"]) == {
        "model.wte": "wte",
        "model.b": "b",
    }


def function_in(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    (folder / f"{name}.py").write_text(f"def tracked(name):\n    {body}\n")
    monkeypatch.syspath_prepend(str(folder))
    return f"{name}:tracked"


def test_a_function_of_the_users_decides_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "return None if name == 'x' else name.upper()"
    setting = function_in(tmp_path, body, monkeypatch, "mine_one")
    assert tracked_names(["x", "a"], ["A"], function=name_function(setting)) == {"a": "A"}


@pytest.mark.parametrize(
    ("body", "why"), [("return 7", "answered 7 for 'a'"), ("return 'one'", "gives 'one' to 'a' and to 'b'")]
)
def test_what_it_must_not_answer_is_refused(
    body: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = function_in(tmp_path, body, monkeypatch, f"mine_{len(body)}")
    with pytest.raises(ConfigError, match=why):
        tracked_names(["a", "b"], ["A"], function=name_function(setting))


@pytest.mark.parametrize("setting", ["nowhere.at.all:f", "json:nothing", "json:__name__", "json"])
def test_a_function_that_is_not_there_is_named(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.names = "):
        name_function(setting)


def test_stacked_layers_are_taken_apart_where_the_model_counts_them() -> None:
    boxes = tuple(StoredBox((at, 0), (1, 3), Path("f"), 100 * at, None, 50) for at in range(2))
    entries = {
        "layers.w": ForeignTensor((2, 3), "float32", boxes),
        "norm": ForeignTensor((3,), "float32", ()),
    }
    found = unstacked(entries, ["layers.0.w", "layers.1.w", "norm"])
    assert sorted(found) == ["layers.0.w", "layers.1.w", "norm"]
    assert found["layers.1.w"].shape == (3,)
    assert [(box.offsets, box.start, box.row) for box in found["layers.1.w"].boxes] == [((0,), 100, 0)]
    assert unstacked(entries, ["layers.w"]) == entries
