"""Writes the parts of the docs that follow from the code: exit codes, settings, events, the package map.

    python tools/reference.py             write them
    python tools/reference.py --check     exit code 1 if a page differs, and say which

Each part lies between two comments of its page. What stands around them is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import get_args

import msgspec

from holdfast.config.settings import FIELDS
from holdfast.errors import MEANINGS
from holdfast.journal import AnyEvent, Event

DOCS = Path("docs")
SOURCE = Path("src") / "holdfast"
ROOMS = (
    *("cli", "drill", "recover", "observe", "launch", "run", "session"),
    *("restart", "account", "train", "stop"),
    *("checkpoint", "health", "cluster", "record", "policy", "process", "journal", "config"),
    *("errors", "base"),
)
"""From the top down; a room may import from those after it, and a module that stands alone counts as one."""


def table(*rows: tuple[str, ...]) -> str:
    """The first row is the heading."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def exit_codes() -> str:
    return table(
        ("code", "name", "meaning", "what to do"),
        *(
            (str(int(code)), f"`{code.name}`", meaning, advice)
            for code, (meaning, advice) in MEANINGS.items()
        ),
    )


def settings() -> str:
    return table(
        ("setting", "default", "allowed", "what it does, and when to change it"),
        *(
            (f"`{field.key}`", f"`{json.dumps(field.default)}`", field.allowed, field.description)
            for field in FIELDS.values()
        ),
    )


def events() -> str:
    return table(("event", "what it means", "fields"), *(_event(kind) for kind in get_args(AnyEvent)))


def _event(kind: type[Event]) -> tuple[str, str, str]:
    fields = msgspec.structs.fields(kind)
    explained = _explained(kind)
    optional = [field.name for field in fields if not field.required]
    told = [
        f"`{field.name}`{'?' if field.name in optional else ''}"
        + (f": {explained[field.name]}" if field.name in explained else "")
        for field in fields
    ]
    return f"`{kind.__struct_config__.tag}`", _cell(inspect.getdoc(kind) or ""), "<br>".join(told)


def _explained(kind: type[Event]) -> dict[str, str]:
    """The line under each field, by the field's name: Python itself does not keep those."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, line in zip(definition.body, definition.body[1:], strict=False):
        match field, line:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = _cell(text)
    return found


def rooms() -> str:
    """What each room is for, from the docstrings of the fronts."""
    rows = []
    for front in _fronts():
        first, *rest = _docstring(front).split("\n\n")
        told = dict(
            re.findall(r"(For|Promises:|Never:) ((?:.|\n)*?)(?=\nPromises:|\nNever:|\Z)", "\n\n".join(rest))
        )
        rows.append(
            (f"`{_name(front)}`", _cell(first), *(_cell(told[word]) for word in ("Promises:", "Never:")))
        )
    return table(("room", "what it is", "it promises", "it must never"), *rows)


def modules() -> str:
    """Every module, room by room, with the first sentence of its docstring."""
    lines = []
    for front in _fronts():
        lines.append(f"{_name(front)}/")
        files = sorted(path for path in front.parent.glob("*.py") if path.name != "__init__.py")
        lines += [f"  {path.name:22} {_docstring(path).splitlines()[0]}" for path in files]
    alone = [SOURCE / "run.py", SOURCE / "session.py", SOURCE / "errors.py"]
    lines += [f"{path.name:24} {_docstring(path).splitlines()[0]}" for path in alone]
    return "\n".join(("```", *lines, "```"))


def _fronts() -> list[Path]:
    order = {name: at for at, name in enumerate(ROOMS)}
    fronts = [path for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE]
    return sorted(fronts, key=lambda path: (order[_name(path).split("/")[0]], _name(path)))


def _name(front: Path) -> str:
    return front.parent.relative_to(SOURCE).as_posix()


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


TABLES = {
    "exit codes": ("reference/exit-codes.md", exit_codes),
    "settings": ("reference/configuration.md", settings),
    "events": ("reference/journal.md", events),
    "the rooms": ("design/architecture.md", rooms),
    "the modules": ("design/architecture.md", modules),
}


def written(name: str, page: str, content: str) -> str:
    """The page with this content between its two comments."""
    begin, end = f"<!-- {name}: written by tools/reference.py -->", f"<!-- end of {name} -->"
    parts = re.split(f"({re.escape(begin)}|{re.escape(end)})", page)
    if len(parts) != 5 or (parts[1], parts[3]) != (begin, end):
        raise SystemExit(f"the page of {name} needs one line '{begin}' and, after it, one '{end}'")
    return f"{parts[0]}{begin}\n{content}\n{end}{parts[4]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check: bool = parser.parse_args().check
    different = 0
    for name, (file, make) in TABLES.items():
        path = DOCS / file
        before = path.read_text(encoding="utf-8")
        after = written(name, before, make())
        if before == after:
            continue
        different += 1
        if check:
            print(f"{path}: {name} is not what the code says; `make docs` writes it")
        else:
            path.write_text(after, encoding="utf-8")
            print(f"{path}: wrote {name}")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
