"""Every setting is read by something that acts on it: one that nothing reads is a promise nobody keeps.

The walk is over the syntax trees of the package. An expression stands for a section of the settings if it is
`….<section>` of something called settings, a parameter or field annotated with the section's class, or a name
that was assigned one of these. A setting counts as read where its name is taken from such an expression.
What only loads, checks or shows settings does not count.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config.settings import FIELDS, Settings
from kit.harness import REPO

SOURCE = REPO / "src" / "holdfast"
CLASSES = {kind.__name__: section for section, kind in typing.get_type_hints(Settings).items()}
SECTIONS = frozenset(CLASSES.values())
NOT_READERS = ("config/sources.py", "cli/config.py")
NOT_READING = ("absolute",)
"""The function that makes the paths of a whole tree absolute."""


class Reads(ast.NodeVisitor):
    """Which settings one module reads."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._names: list[dict[str, str]] = [{}]
        self._fields: dict[str, str] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._fields = self._fields, {}
        for _ in range(2):  # an attribute may be read above the line that sets it
            self.generic_visit(node)
        self._fields = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in NOT_READING:
            return
        names: dict[str, str] = {}
        self._names.append(names)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in every:
            if section := _annotated(argument.annotation):
                names[argument.arg] = section
        self.generic_visit(node)
        self._names.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self._take(node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if section := _annotated(node.annotation):
            self._bind(node.target, section)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        section = self._section(node.value)
        if section and isinstance(node.ctx, ast.Load):
            self.found.add(f"{section}.{node.attr}")
        self.generic_visit(node)

    def _take(self, node: ast.Assign) -> None:
        """Follow `chosen = settings.straggler`, also in pairs, and `self._chosen = chosen`."""
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for one, value in pairs:
                if section := self._section(value):
                    self._bind(one, section)

    def _bind(self, target: ast.expr, section: str) -> None:
        if isinstance(target, ast.Name):
            self._names[-1][target.id] = section
        elif isinstance(target, ast.Attribute):
            self._fields[target.attr] = section

    def _section(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return next((names[node.id] for names in reversed(self._names) if node.id in names), "")
        if not isinstance(node, ast.Attribute):
            return ""
        if node.attr in SECTIONS and _is_settings(node.value):
            return node.attr
        return self._fields.get(node.attr, "") if isinstance(node.value, ast.Name) else ""


def _annotated(annotation: ast.expr | None) -> str:
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)] if annotation else []
    return next((CLASSES[name] for name in names if name in CLASSES), "")


def _is_settings(node: ast.expr) -> bool:
    """Whether something is the whole tree: `settings`, `self._settings`, `options.settings`, `chosen` …"""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    if isinstance(node, ast.Call):  # load(…).settings has an attribute above; settings.absolute() is one
        return isinstance(node.func, ast.Attribute) and _is_settings(node.func.value)
    return name.strip("_") in ("settings", "chosen", "given", "self")  # `self`: the tree's own methods


def reads(text: str) -> set[str]:
    walk = Reads()
    walk.visit(ast.parse(text))
    return walk.found


def readers() -> Iterator[tuple[str, set[str]]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name not in NOT_READERS:
            yield name, reads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def read() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, keys in readers():
        for key in keys:
            found.setdefault(key, []).append(name)
    return found


@pytest.mark.parametrize("key", FIELDS)
def test_something_reads_every_setting(read: dict[str, list[str]], key: str) -> None:
    field = FIELDS[key]
    if len(field.words) == 1:
        return  # it has one value, which says what there is; any other is refused where settings are loaded
    assert read.get(key), f"nothing reads {key}: take it away, or let something act on it"


def test_the_walk_finds_what_is_read_and_nothing_else() -> None:
    assert reads("def f(settings): return settings.launch.stop_grace") == {"launch.stop_grace"}
    made = " def __init__(self, s: CheckpointSettings): self._s = s"
    kept = f"class A:\n def f(self): return self._s.timeout\n{made}"
    assert reads(kept) == {"checkpoint.timeout"}
    assert reads("def f(e):\n a, b = e.settings.health, 1\n return a.gate") == {"health.gate"}
    for other in (
        "def f(command): return command.launch.stop_grace",
        "def f(settings): settings.launch.stop_grace = 1",
        "def f(a): return a.gate",
        "'settings.launch.stop_grace'",
    ):
        assert reads(other) == set(), other
    assert Path(SOURCE, NOT_READERS[0]).is_file()
