"""The `holdfast` command within the test's own process, for tests that call it many times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.errors import HoldfastError
from kit.harness import Result, finish, holdfast


def command(*args: str | Path, given: str | None = None) -> Result:
    """`holdfast …`, its errors and exit code as `main` makes them."""
    done = CliRunner().invoke(app, [*map(str, args)], input=given)
    if isinstance(done.exception, HoldfastError):
        return Result(int(done.exception.exit_code), done.stdout, f"{done.stderr}{done.exception}")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Result(done.exit_code, done.stdout, done.stderr)


def ckpt(*args: str | Path, given: str | None = None) -> Result:
    return command("ckpt", *args, given=given)


def ckpt_json(*args: str | Path) -> Any:
    return json.loads(ckpt(*args, "--json").out)


def ckpt_process(cwd: Path, *args: str | Path) -> Result:
    """`holdfast ckpt …` in a process of its own, as a shell runs it."""
    return finish(holdfast("ckpt", *map(str, args)), cwd=cwd)
