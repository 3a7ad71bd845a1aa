"""The house holds: dependencies point down, rooms are entered by their fronts, policies are pure."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.base.fronts import listed
from kit.harness import REPO

SOURCE = REPO / "src" / "holdfast"
PAGE = REPO / "docs" / "design" / "architecture.md"
MODULES = {
    ".".join(("holdfast", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
FRONTS = {name for name, path in MODULES.items() if path.name == "__init__.py"}
PURE = ["policy", "account/answers.py", "account/incidents.py", "account/ledger.py", "account/remarks.py"]
PURE += ["account/words.py", "checkpoint/copies/rules.py", "health/connections.py", "health/judgements.py"]
PURE += ["train/stragglers/scores.py"]
"""Rooms and modules that decide from values alone."""
MOST_MODULES, MOST_FILES, MOST_LINES, FEWEST_LINES = 255, 15, 1000, 40


def tools() -> dict[str, object]:
    """What tools/reference.py defines; it lies in no package."""
    spec = importlib.util.spec_from_file_location("reference", REPO / "tools" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


ROOMS: tuple[str, ...] = tools()["ROOMS"]  # type: ignore[assignment]


def room(module: str) -> str:
    """The room on the top floor: `checkpoint` for holdfast.checkpoint.save.plan."""
    return module.split(".")[1] if module != "holdfast" else ""


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Every module of ours that a file imports from, anywhere in it, and the name that it takes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
            for alias in node.names:
                yield node.module or "", alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("holdfast."):
                    yield alias.name, ""


def test_every_room_has_its_place() -> None:
    assert {room(name) for name in MODULES if name not in ("holdfast", "holdfast.__main__")} == set(ROOMS)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("holdfast", "holdfast.__main__")])
def test_dependencies_point_down_only(name: str) -> None:
    level = ROOMS.index(room(name))
    for module, taken in imports(MODULES[name]):
        there = room(module if module != "holdfast" else f"holdfast.{taken}")
        if there in ROOMS:
            floor = {room(name), there} == {"errors", "base"}
            assert ROOMS.index(there) >= level or floor, f"{name} imports {module}, which stands above it"


@pytest.mark.parametrize("name", [name for name in MODULES if name not in FRONTS])
def test_rooms_are_entered_by_their_fronts(name: str) -> None:
    """A module imports from the modules of its own package, or from fronts, and there what they list."""
    own = name.rpartition(".")[0]
    for module, taken in imports(MODULES[name]):
        package = module if module in FRONTS else module.rpartition(".")[0]
        if module in FRONTS and package != own and module != "holdfast":
            offered = listed(package)
            assert taken in offered or f"{module}.{taken}" in FRONTS, f"{package} does not list {taken}"
        elif package not in (own, "holdfast"):
            raise AssertionError(f"{name} imports {module}: import {taken} from {package}")


@pytest.mark.parametrize("front", sorted(FRONTS - {"holdfast"}))
def test_a_front_says_what_its_room_is_for_and_lists_what_there_is(front: str) -> None:
    doc = ast.get_docstring(ast.parse(MODULES[front].read_text())) or ""
    assert re.search(r"\nFor .*\nPromises: .*\nNever: ", doc, re.DOTALL), doc
    for name, (module, there) in listed(front).items():
        assert f"{module}.".startswith(f"{front}."), f"{front} lists {name} of another room"
        assert name == (there or module.rpartition(".")[2])
        if there and not module.endswith("_triton"):
            assert hasattr(importlib.import_module(module), there), f"{front} lists {name}, {module} has none"


def test_a_front_lists_nothing_that_nobody_takes() -> None:
    """Outsiders are other rooms, tests, benchmarks, and what the docs tell people to import."""
    taken: dict[str, set[str]] = defaultdict(set)
    others = [path for folder in ("tests", "bench", "tools") for path in (REPO / folder).rglob("*.py")]
    for path in [*MODULES.values(), *others]:
        for module, name in imports(path):
            taken[module].add(name)
    told = "\n".join(path.read_text() for path in (REPO / "docs").rglob("*.md"))
    for front in sorted(FRONTS - {"holdfast"}):
        needless = {
            name
            for name in listed(front)
            if name not in taken[front] and not re.search(rf"\b{front}\b.*\b{name}\b", told)
        }
        assert not needless, f"{front} lists what nobody takes: {sorted(needless)}"


def test_one_name_is_one_class() -> None:
    """A word of the glossary, or any other, names one thing wherever it is read."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def pure_modules() -> list[Path]:
    found = [SOURCE / one for one in PURE]
    return [file for path in found for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]


@pytest.mark.parametrize("path", pure_modules(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_what_decides_imports_nothing_that_has_effects(path: Path) -> None:
    effects = {
        "os",
        "io",
        "socket",
        "subprocess",
        "threading",
        "time",
        "pathlib",
        "shutil",
        "random",
        "torch",
    }
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    assert not found & effects


def test_no_two_modules_have_one_name() -> None:
    """Commands are named for what they call, events for their subject; only there may a name come twice."""
    names = Counter(
        path.stem
        for name, path in MODULES.items()
        if name not in FRONTS
        and not name.startswith(("holdfast.cli.", "holdfast.journal.events.", "holdfast.__"))
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_house_stays_small_enough_to_overlook() -> None:
    assert len(MODULES) <= MOST_MODULES
    files = Counter(path.parent.relative_to(SOURCE).as_posix() for path in MODULES.values())
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
    short = {name for name, count in lines.items() if count < FEWEST_LINES and name not in FRONTS}
    assert {name for name in short if "__main__" not in MODULES[name].read_text()} - {
        "holdfast.__main__"
    } == set()


def test_the_page_says_what_must_hold() -> None:
    text = PAGE.read_text()
    for most in (MOST_MODULES, MOST_FILES, MOST_LINES, FEWEST_LINES):
        assert re.search(rf"\| .*\b{most}\b", text.partition("## What must hold")[2]), most


WAYS = {
    "a synchronous save": 20,
    "a resume": 20,
    "from a crash until the ranks run again": 30,
}


def way(name: str) -> list[str]:
    """The files that a row of the page's table names."""
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} | `")]
    return re.findall(r"`([a-z_/.]+)`", row)


@pytest.mark.parametrize("name", WAYS)
def test_a_way_is_short_and_its_files_exist(name: str) -> None:
    files = way(name)
    assert len(files) == len(set(files)) <= WAYS[name]
    assert [file for file in files if not (SOURCE / file).is_file()] == []


def test_a_save_enters_no_other_files_than_the_page_names(tmp_path: Path) -> None:
    """A real save of a run, traced: whatever of ours it enters is on the way, or beside it."""
    entered = save_traced(tmp_path)
    named = (*way("a synchronous save"), *way("beside a save"))
    strangers = {file for file in entered if not any(file == one or file.startswith(one) for one in named)}
    assert not strangers
    assert "checkpoint/commit.py" in entered


def save_traced(place: Path) -> set[str]:
    import sys

    import torch
    from torch import nn

    import holdfast

    entered: set[str] = set()
    prefix = f"{SOURCE}/"

    def trace(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_filename.startswith(prefix) and code.co_name != "<module>":
            entered.add(code.co_filename.removeprefix(prefix))

    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    run = holdfast.Run(run_dir=place / "run")
    run.track(model=model, optimizer=optimizer)
    run.start()
    for traced in (False, True):  # the first save of an attempt proves itself, once
        run.begin_step()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        run.end_step()
        sys.setprofile(trace if traced else None)
        try:
            run.save()
        finally:
            sys.setprofile(None)
    run.close()
    return entered
