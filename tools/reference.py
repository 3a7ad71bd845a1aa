"""Writes the tables of docs/reference/ that follow from the code: exit codes, settings, journal events.

    python tools/reference.py             write them
    python tools/reference.py --check     exit code 1 if a page differs, and say which

Each table lies between two comments of its page. What stands around them is written by hand.
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

REFERENCE = Path("docs") / "reference"


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


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


TABLES = {
    "exit codes": ("exit-codes.md", exit_codes),
    "settings": ("configuration.md", settings),
    "events": ("journal.md", events),
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
        path = REFERENCE / file
        before = path.read_text(encoding="utf-8")
        after = written(name, before, make())
        if before == after:
            continue
        different += 1
        if check:
            print(f"{path}: the table of {name} is not what the code says; `make docs` writes it")
        else:
            path.write_text(after, encoding="utf-8")
            print(f"{path}: wrote the table of {name}")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
