"""The command that starts a run again: how many ranks it would have, and with which settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.config import load, parse_assignments
from holdfast.control.launches import LaunchRecord
from holdfast.errors import HoldfastError
from holdfast.recover.report import Command
from holdfast.settings import Settings


def command_of(
    started: LaunchRecord | None,
    given: Sequence[str],
    nodes: int | None,
    environ: Mapping[str, str] = os.environ,
) -> Command | None:
    """What was given on the command line, else what the last launch left; None if neither is known.

    `nodes`: how many would take part, where that is known.
    """
    if given:
        per_node, wanted = _asked(given)
        count = wanted or 1
        world = per_node * count if per_node else None
        return Command(argv=list(given), directory=str(Path.cwd()), source="given", world=world, nodes=count)
    if started is None:
        return None
    count = nodes or started.max_nodes
    per_node = started.workers_per_node
    return Command(
        argv=started.command(),
        directory=started.directory,
        source="launch",
        world=per_node * count if per_node else None,
        nodes=count,
        run_dir=started.run_dir,
        missing=[name for name in started.environment if name not in environ],
    )


def settings_of(
    started: LaunchRecord | None, given: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Settings:
    """What the command would run with, as far as its flags, their file and the environment here say.

    A command that cannot be read is refused when it starts; until then the defaults count.
    """
    argv: Sequence[str] = given or (started.argv if started is not None else [])
    directory = Path(started.directory) if started is not None and not given else Path.cwd()
    wanted = parse_words(argv, "--set")
    file = next(reversed(parse_words(argv, "--config")), None)
    try:
        return load(
            directory / file if file else None, environ=environ, command_line=parse_assignments(wanted)
        ).settings
    except (HoldfastError, OSError):
        return Settings()


def parse_words(argv: Sequence[str], flag: str) -> list[str]:
    """Every value that a flag was given."""
    found: list[str] = []
    for at, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            found.append(word.partition("=")[2])
        elif word == flag and at + 1 < len(argv):
            found.append(argv[at + 1])
    return found


def _asked(argv: Sequence[str]) -> tuple[int, int]:
    """(workers per node, nodes) as the flags of `holdfast run` or torchrun say; 0 where they do not."""
    values: dict[str, str] = {}
    for at, word in enumerate(argv):
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if word.startswith("-") and name in ("nproc-per-node", "nnodes"):
            values[name] = value if equals else argv[at + 1] if at + 1 < len(argv) else ""
    launched = any(Path(word).name in ("holdfast", "torchrun", "run") for word in argv[:4])
    workers = values.get("nproc-per-node", "1" if launched else "")
    nodes = values.get("nnodes", "1").rpartition(":")[2]
    return int(workers) if workers.isdecimal() else 0, int(nodes) if nodes.isdecimal() else 0
