"""Arguments that several commands take, each spelt and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# `parser`: left to itself typer looks at every path it is given, which on a dead mount never ends.
RUN = Annotated[Path, typer.Argument(parser=Path, help="The run's directory (run.dir, --run-dir).")]
WHICH = Annotated[str, typer.Argument(metavar="STEP|ID|NAME", help="The checkpoint: step, id or name.")]
REASON = Annotated[str, typer.Option(help="Why; kept with the record and in the journal.")]
ROOT = Annotated[
    Path | None, typer.Option(parser=Path, help="Its checkpoint root, if not RUN_DIR/checkpoints.")
]
YES = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
CONFIG = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Read settings from this TOML file.")
]
