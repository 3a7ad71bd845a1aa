"""How the run was started, kept so that it can be started again.

Every `holdfast run` leaves a record, one file a node, replaced in one step by the next launch there:

```
launches/<node>.json
```
Guarantee: a launch is never held up or ended by this; what cannot be written is a warning. The record tells
people and `holdfast recover` what to run, and the launcher whose run the default run directory holds. Of the
environment only names are kept, because values may be secrets; a command line is kept as it was given, as
every process listing shows it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast._version import __version__
from holdfast.config import NOT_SETTINGS
from holdfast.control.directory import ControlDirectory, read_record
from holdfast.control.holder import job_of
from holdfast.errors import ControlError
from holdfast.files import make_dirs, replace_atomic

FOLDER = "launches"
TOGETHER = 600.0
"""Seconds within which the nodes of one launch are started."""
READ = 16
"""Records that are read."""
_UNSAFE = re.compile(r"[^0-9A-Za-z_.-]")
_RELEVANT = re.compile(
    r"(HOLDFAST|NCCL|GLOO|UCX|FI|PET|MKL|TORCH|TORCHELASTIC|CUDA|HSA|ROCR|HIP|MASTER)_.*"
    r"|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|WORLD_SIZE|RANK|LOCAL_RANK"
)
"""Variables that a run's behaviour may depend on. (Not OMP_NUM_THREADS: torch sets it for every launch.)"""


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One `holdfast run` on one node. What an older release did not record has its default."""

    launch: str
    """Its id, as this node proposed it: that of the first node is the one all attempts of the launch have."""
    argv: list[str]
    """What came after `holdfast run`."""
    python: str = ""
    """The interpreter that ran it."""
    directory: str = ""
    """Where it was started: relative paths count from there."""
    run_dir: str = ""
    """The run's directory as it was then: a copy of it elsewhere is not what the command would start."""
    node: str = ""
    at: float = 0.0
    job: str = ""
    """The Slurm job it was in; empty if in none."""
    restarts: int = 0
    """How often Slurm had queued that job again."""
    min_nodes: int = 1
    max_nodes: int = 1
    workers_per_node: int = 0
    """0 if not known."""
    root: str = ""
    """The checkpoint root, if it is not inside the run's directory."""
    remote: str = ""
    resume_from: str = "auto"
    force: bool = False
    """The settings of checkpoint.*: what the same command would start from."""
    environment: list[str] = []
    """Names of relevant variables that were set."""
    version: str = ""

    def command(self) -> list[str]:
        """The same again, for a shell in `directory`."""
        return [self.python or "python", "-m", "holdfast", "run", *self.argv]


def relevant(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables that matter to a run, in their order."""
    return sorted(name for name in environ if _RELEVANT.fullmatch(name) and name not in NOT_SETTINGS)


def record_launch(
    control: ControlDirectory,
    launch: str,
    argv: Sequence[str],
    *,
    node: str,
    min_nodes: int,
    max_nodes: int,
    workers_per_node: int,
    root: str,
    remote: str = "",
    resume_from: str = "auto",
    force: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Write down how this launch was started; why that could not be done, empty if it was."""
    try:
        record = LaunchRecord(
            launch=launch,
            argv=[_text(word) for word in argv],
            python=sys.executable,
            directory=_text(str(Path.cwd())),
            run_dir=_text(str(control.path)),
            node=node,
            at=time.time(),
            job=job_of(environ),
            restarts=int(environ.get("SLURM_RESTART_COUNT", "0") or 0),
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            workers_per_node=workers_per_node,
            root=_text(str(Path(root).absolute())) if root else "",
            remote=remote,
            resume_from=resume_from,
            force=force,
            environment=relevant(environ),
            version=__version__,
        )
        raw = msgspec.json.encode(record) + b"\n"
        make_dirs(control.path / FOLDER)
        replace_atomic(_path(control, node), raw)
    except (OSError, ValueError) as error:
        return f"how this launch was started could not be kept: {error}"
    return ""


def launches(control: ControlDirectory) -> list[LaunchRecord]:
    """The last launches on the nodes that were started last, oldest first; what cannot be read is left out.

    Very many nodes may have one: of each folder only the newest few files are read.
    """
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError), os.scandir(control.path / FOLDER) as entries:
        for entry in entries:
            if entry.name.endswith(".json") and not entry.name.startswith("."):
                found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
    records = [_read(path) for _, path in sorted(found)[-READ:]]
    return sorted((record for record in records if record is not None), key=lambda record: record.at)


def _read(path: Path) -> LaunchRecord | None:
    try:
        return read_record(path, LaunchRecord)
    except ControlError:
        return None


def launch_to_repeat(control: ControlDirectory, node: str = "") -> LaunchRecord | None:
    """The record to start the run by: the newest, or this node's own if it was of the same launch."""
    newest = next(reversed(launches(control)), None)
    if newest is None:
        return None
    own = _read(_path(control, node)) if node else None
    return own if own is not None and newest.at - own.at <= TOGETHER else newest


def _path(control: ControlDirectory, node: str) -> Path:
    return control.path / FOLDER / f"{_UNSAFE.sub('_', node)[:100] or '_'}.json"


def _text(text: str) -> str:
    """As JSON can carry it: a file name may hold bytes that are no text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
