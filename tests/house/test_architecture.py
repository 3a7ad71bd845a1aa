"""The package map holds: dependencies point down only, policies have no effects, no file grows too long."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kit.harness import REPO

SOURCE = REPO / "src" / "holdfast"
ROOMS = [
    "cli",
    "drill",
    "recover",
    "observe",
    "launch",
    "run",
    "inprocess",
    "account",
    "worker",
    "checkpoint",
    "health",
    "cluster",
    "control",
    "policy",
    "journal",
]
"""From the top down; what is not a room (config, files, errors …) is the floor that all stand on."""
MODULES = sorted(SOURCE.rglob("*.py"))


def room(parts: tuple[str, ...]) -> str:
    return parts[0] if parts and parts[0] in ROOMS else ""


def imports(path: Path) -> set[str]:
    """Every module of ours that a file imports anywhere in it, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_dependencies_point_down_only(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    here = room((relative.parts[0].removesuffix(".py"),))
    if relative.name in ("__init__.py", "__main__.py") and len(relative.parts) == 1:
        return  # the package's own front door
    level = ROOMS.index(here) if here else len(ROOMS)
    for name in imports(path):
        if name.startswith("holdfast."):
            there = room(tuple(name.split(".")[1:]))
            assert not there or ROOMS.index(there) >= level, (
                f"{relative} imports {name}, which stands above it"
            )


@pytest.mark.parametrize("path", sorted((SOURCE / "policy").glob("*.py")), ids=lambda path: path.name)
def test_a_policy_imports_nothing_that_has_effects(path: Path) -> None:
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
    assert not {name.split(".")[0] for name in imports(path)} & effects


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_is_over_700_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 700


def test_the_documented_map_names_every_room() -> None:
    text = (REPO / "docs" / "design" / "architecture.md").read_text()
    for name in ROOMS:
        assert f"  {name}.py " in text or f"  {name}/ " in text, name


def listed() -> dict[str, list[str]]:
    """By room: the modules that the map in the docs names, as often as it does."""
    text = (REPO / "docs" / "design" / "architecture.md").read_text()
    found: dict[str, list[str]] = {}
    here = ""
    for line in text.split("```")[1].splitlines():
        if named := re.match(r"  ([a-z_]+)(/|\.py)", line):
            here = named[1] if named[2] == "/" and named[1] not in found else ""
            assert here or named[2] == ".py", f"{named[1]} is there twice"
        if here:
            # A row may begin with what its modules are about; the last word before a comma is a name.
            found.setdefault(here, []).extend(part.split()[-1] for part in line.split(",") if part.strip())
    return found


def test_the_map_in_the_docs_names_every_module_once() -> None:
    rooms = listed()
    assert set(rooms) == set(ROOMS) - {"run"}
    for name in sorted(set(rooms) - {"cli", "drill", "observe"}):  # those are told in words
        modules = rooms[name]
        there = {path.stem for path in (SOURCE / name).glob("*.py")} - {"__init__", "__main__"}
        matching = {module: {one for one in there if fnmatch(one, module)} for module in modules}
        assert all(matching.values()), f"{name}: {[one for one, found in matching.items() if not found]}"
        named = sorted(one for found in matching.values() for one in found)
        assert named == sorted(there), f"{name}: {sorted(there ^ set(named)) or 'one is there twice'}"
