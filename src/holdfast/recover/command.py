"""The command that starts a run again, and how many ranks it would have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.control.launches import LaunchRecord
from holdfast.recover.report import Command


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
