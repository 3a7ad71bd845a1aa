"""The line of the user that an error came from: of tracebacks, their text, and other processes'."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.launch.incident import inquest as evidence
from holdfast.policy.evidence import (
    MOST_WHERE,
    Frame,
    Raised,
    blamed,
    clipped,
    frames_in,
    is_users,
    is_users_place,
    told_by_traceback,
    where_of,
)
from holdfast.record.attempts import FailureRecord
from holdfast.train.crash import ERROR_FILE, chain_of, write_error_file

PACKAGE = str(Path(holdfast.__file__).parent)
TORCH = "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py"
USER = Frame("/home/me/job/train.py", 44, "__getitem__")


@pytest.mark.parametrize(
    ("path", "users"),
    [
        ("/home/me/job/train.py", True),
        ("train.py", True),
        ("/home/me/torch/train.py", True),
        ("/home/me/holdfast/train.py", True),
        ("/data/lib/python_tools/x.py", True),
        ("<string>", True),
        ("<stdin>", True),
        (TORCH, False),
        ("/opt/pytorch/torch/nn/modules/module.py", False),
        ("/opt/pytorch/torch/_tensor.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("venv/lib/python3.12/site-packages/numpy/core.py", False),
        ("/usr/lib/python3.12/json/decoder.py", False),
        ("/home/me/.pyenv/versions/3.13.1/lib/python3.13t/runpy.py", False),
        ("/usr/lib/python312.zip/json/decoder.py", False),
        (f"{PACKAGE}/run.py", False),
        ("<frozen runpy>", False),
        ("<frozen importlib._bootstrap>", False),
        ("<eval_with_key>.3", False),
        ("", False),
    ],
)
def test_whose_a_file_is(path: str, users: bool) -> None:
    assert is_users(path) is users
    assert is_users_place(f"{path}:3 in main") is users


def test_the_last_frame_of_the_user_is_named_and_else_the_last_that_is_not_ours() -> None:
    run, torchs, frozen = Frame(f"{PACKAGE}/run.py", 9, "steps"), Frame(TORCH, 7, "_call"), "<frozen runpy>"
    assert where_of([Frame(frozen, 1, "x"), Frame("/a/b.py", 2, "main"), USER, torchs, run]) == (
        "/home/me/job/train.py:44 in __getitem__"
    )
    assert where_of([Frame(frozen, 1, "_run"), torchs, run]) == f"{TORCH}:7 in _call"
    assert where_of([Frame(frozen, 88, "_run_code"), run]) == "<frozen runpy>:88 in _run_code"
    assert where_of([run]) == ""
    assert where_of([]) == ""


@pytest.mark.parametrize(
    ("path", "directory", "shown"),
    [
        ("/home/me/job/train.py", "/home/me/job", "train.py"),
        ("/home/me/job/data/x.py", "/home/me/job/", "data/x.py"),
        ("/home/me/job2/x.py", "/home/me/job", "/home/me/job2/x.py"),
        ("/home/me/x.py", "/home/me/job", "/home/me/x.py"),
        ("/x.py", "/", "/x.py"),
        ("/x.py", "", "/x.py"),
        ("./x.py", "/home", "x.py"),
        ("x.py", "/home", "x.py"),
    ],
)
def test_a_path_is_shown_as_from_the_working_directory(path: str, directory: str, shown: str) -> None:
    assert where_of([Frame(path, 3, "f")], directory=directory) == f"{shown}:3 in f"


def test_a_place_is_short_and_on_one_line() -> None:
    long = where_of([Frame(f"/{'d' * 5000}/train.py", 3, "f")])
    assert len(long) == MOST_WHERE
    assert long.endswith("d/train.py:3 in f")
    assert where_of([Frame("a\nb\udc80.py", 3, "f")]) == "a?b?.py:3 in f"
    assert clipped("train.py:3 in f") == "train.py:3 in f"


@given(st.text(), st.lists(st.tuples(st.text(), st.integers(), st.text()), max_size=5), st.text())
def test_any_text_has_a_place_or_none(text: str, frames: list[tuple[str, int, str]], directory: str) -> None:
    found = where_of([Frame(*one) for one in frames], text, directory)
    assert len(found) <= MOST_WHERE
    assert "\n" not in found
    told_by_traceback(text, directory)


# -- real exceptions -----------------------------------------------------------------------------------------


class Rows(Dataset[int]):
    def __init__(self, error: type[Exception] = ValueError) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self._read(index)

    def _read(self, index: int) -> int:
        try:
            return {}[index]
        except KeyError:
            if self.error is KeyError:
                raise
            raise self.error("bad sample") from None


class PickyError(Exception):
    """torch cannot make it again from a text."""

    def __init__(self, one: str, two: str = "") -> None:
        if len(one) > 20:
            raise TypeError("no")
        super().__init__(one)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line)


RAISING = "raise self.error("


def load(error: type[Exception], workers: int) -> None:
    list(DataLoader(Rows(error), num_workers=workers, batch_size=2))


def linear() -> None:
    torch.nn.Linear(4, 2)(torch.ones(1, 5))


def wrapped() -> None:
    try:
        linear()
    except RuntimeError as error:
        raise ValueError("the model does not fit") from error


def parse() -> None:
    json.loads("{")


def pooled() -> None:
    with ProcessPoolExecutor(1) as pool:
        pool.submit(parse).result()


def uncompiled() -> None:
    compile("x = 1\ny = = 2\n", str(Path.cwd() / "config.py"), "exec")


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of any kind
        return error
    raise AssertionError("nothing was raised")


def places(error: BaseException) -> tuple[list[Raised], list[Raised]]:
    """As a worker writes it down, and as its printed traceback tells it."""
    shown = "".join(traceback.format_exception(error))
    ranked = "".join(f"[rank1]: {line}" for line in shown.splitlines(keepends=True))
    chain = msgspec.json.decode(msgspec.json.encode(chain_of(error)), type=list[Raised])
    return chain, told_by_traceback(f"epoch 1\n{ranked}", str(Path.cwd()))


CASES: dict[str, tuple[Callable[[], object], list[tuple[str, str]]]] = {
    "torch": (linear, [("torch.nn.Linear(4, 2)(", "linear")]),
    "standard library": (parse, [('json.loads("{")', "parse")]),
    "chain": (wrapped, [('raise ValueError("the model', "wrapped"), ("torch.nn.Linear(4, 2)(", "linear")]),
    "loading here": (lambda: load(ValueError, 0), [(RAISING, "_read")]),
    "loading process": (lambda: load(ValueError, 1), [(RAISING, "_read")]),
    "loading process, unpicklable": (lambda: load(PickyError, 1), [(RAISING, "_read")]),
    "loading process, KeyError": (lambda: load(KeyError, 1), [("return {}[index]", "_read")]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_exception_of_a_chain_has_its_own_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, expected = CASES[name]
    monkeypatch.chdir(Path(__file__).parent)
    error = raised_by(call)
    lines = [f"test_blamed_line.py:{line_of(text)} in {function}" for text, function in expected]
    chain, told = places(error)
    assert [one.where for one in chain] == lines, "from the exception"
    if name != "loading process, KeyError":  # Python shows its text as a repr, on one line
        assert [one.where for one in told] == lines, "from its text"
    assert blamed(chain) == lines[-1]


def test_another_processes_traceback_counts_even_where_python_itself_hands_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    chain, _ = places(raised_by(pooled))
    assert blamed(chain) == f"test_blamed_line.py:{line_of('json.loads(')} in parse"


def test_a_line_that_cannot_be_compiled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chain, told = places(raised_by(uncompiled))
    assert [one.where for one in chain] == [one.where for one in told] == ["config.py:2"]
    assert blamed(chain) == "config.py:2"


def test_a_working_directory_that_is_gone_costs_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    chain = chain_of(raised_by(linear))
    assert chain[0]["where"] == f"{__file__}:{line_of('torch.nn.Linear(4, 2)(')} in linear"
    stack = "Traceback (most recent call last):\n  File \"/a/b.py\", line 3, in f\nKeyError: 'lr'\n"
    (heard,), _ = evidence.heard_in(stack, 1)
    assert heard.where == "/a/b.py:3 in f"


def test_a_loaders_line_beyond_what_is_kept_of_its_message_is_still_found() -> None:
    waiting = "".join(f'  File "{TORCH}", line {n}, in step\n    call()\n' for n in range(200))
    told = f'{waiting}  File "/job/rows.py", line 7, in __getitem__\n    raise\nValueError: bad\n'
    caught = "Caught ValueError in DataLoader worker process 0."
    (found,) = chain_of(ValueError(f"{caught}\nOriginal Traceback (most recent call last):\n{told}"))
    assert found["where"] == "/job/rows.py:7 in __getitem__"
    assert len(found["message"]) == 4000


def test_what_was_handed_on_twice_or_led_to_more_is_named_by_its_beginning() -> None:
    def told(path: str) -> str:
        return f'Original Traceback (most recent call last):\n  File "{path}", line 1, in f\nE: x\n'

    assert where_of([USER], f"Caught\n{told('/a.py')}{told('/b.py')}") == "/b.py:1 in f"
    followed = told("/a.py") + "\nDuring handling of the above exception, another exception occurred:\n\n"
    more = 'Traceback (most recent call last):\n  File "/c.py", line 1, in f\nE: y\n'
    assert where_of([USER], f"Caught\n{followed}{more}") == "/a.py:1 in f"
    assert where_of([USER], f"Caught\n{told(TORCH)}") == "/home/me/job/train.py:44 in __getitem__"


def test_the_innermost_line_of_the_user_is_to_blame_and_else_the_outermost() -> None:
    torchs, ours = Raised(where=f"{TORCH}:7 in f"), Raised(where="train.py:3 in main")
    inner = Raised(where="rows.py:9")
    assert blamed([ours, inner]) == "rows.py:9"
    assert blamed([ours, torchs]) == "train.py:3 in main"
    assert blamed([ours, Raised()]) == "train.py:3 in main"
    assert blamed([torchs, Raised(where="/usr/lib/python3.12/json/decoder.py:1 in g")]) == torchs.where
    assert blamed([Raised(), torchs]) == torchs.where
    assert blamed([Raised(message="x")]) == blamed([]) == ""


# -- what is kept --------------------------------------------------------------------------------------------


def test_the_record_of_an_end_holds_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    error = raised_by(wrapped)
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    write_error_file(error)
    (found,) = evidence.gather(tmp_path / "attempt", "a", {3: 7}, {3: 1}, {3: str(path)}, memory=None)
    line = f"test_blamed_line.py:{line_of('raise ValueError(')} in wrapped"
    assert found.errors[0].where == line
    report = json.loads(path.read_text())
    del report["message"]["extraInfo"]["chain"]  # as torch writes it
    path.write_text(json.dumps(report))
    assert evidence.errors_of(path)[0].where == line
    report["message"]["extraInfo"]["chain"] = [{"types": ["E"], "where": "x" * 10_000}]
    path.write_text(json.dumps(report))
    assert len(evidence.errors_of(path)[0].where) == MOST_WHERE


def test_a_record_of_an_earlier_release_is_read() -> None:
    old = {"rank": 0, "node": "a", "pid": 1, "exit_code": 1, "at": 1.0, "errors": [{"types": ["E"]}]}
    record = msgspec.json.decode(json.dumps(old), type=FailureRecord)
    assert [one.where for one in record.errors] == [""]


def test_frames_of_a_group_are_read_too() -> None:
    assert frames_in('  |   File "/a.py", line 3, in f\n  |     x()\n') == [Frame("/a.py", 3, "f")]
