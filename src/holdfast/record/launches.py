"""How a run was started, so that it can be started again, and what the launcher hands to its workers.

Every `holdfast run` leaves a record, one file per node, replaced in one step by the next launch there:

```
launches/<node>.json
origin/000001-<digest>.json   where the run was told to begin, each time that changed
```
Guarantee: a launch is never held up or ended by its record; what cannot be written is a warning. The record
tells people and `holdfast recover` what to run, and tells the launcher whose run the default run directory
holds. Only the names of environment variables are kept, because values may be secrets; a command line is kept
as it was given, because every process listing shows it anyway.

The origin takes part in decisions: `checkpoint.resume_from` is followed once, and again only when it has
changed or somebody insists. A record of it that nobody can read still counts, by its name.

`digest_of` is what the bound on launches compares (`policy.budgets`): two launches are of the same thing if
the script, the Python files beside it, its arguments, the configuration files that these name, and the
settings are the same. Whoever has fixed one of them starts something else.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from holdfast import __version__
from holdfast.base import make_dirs, read_regular, replace_atomic
from holdfast.config import NOT_SETTINGS, Settings, is_step
from holdfast.errors import ConfigError, ControlError, UsageError
from holdfast.policy import Orders
from holdfast.process import job_of
from holdfast.record.directory import ControlDirectory, append, contents, entries, read_record
from holdfast.record.lease import Fence

# What the launcher hands to its workers: HOLDFAST_LAUNCH, one environment variable, as JSON; and in the other
# direction, what a script without `Run` reports to the launcher: how far it has got, in the file that
# HOLDFAST_PROGRESS names.
#
# HOLDFAST_LAUNCH is not a setting: a worker that finds it was started by `holdfast run`, belongs to the
# attempt it names, and acts under that attempt's epoch. Everything else a worker needs is in the settings.


log = logging.getLogger("holdfast")

VARIABLE = "HOLDFAST_LAUNCH"
PROGRESS = "HOLDFAST_PROGRESS"
FURTHEST = 999_999_999_999
"""No step is higher: a larger number is not a step."""

S = TypeVar("S", bound=msgspec.Struct)


def read_handover(environ: Mapping[str, str], variable: str, kind: type[S]) -> S | None:
    """What the launcher handed over in a variable; None if nothing."""
    raw = environ.get(variable)
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(
            f"{variable} in the environment is not what `holdfast run` writes: {error}. "
            "Unset it, or start the script with `holdfast run`"
        ) from error


class LaunchInfo(msgspec.Struct, frozen=True, kw_only=True):
    run_dir: str
    """Absolute path of the control directory."""
    run_id: str
    launch: str
    """Launch id: the same for all attempts and nodes of one `holdfast run`."""
    attempt: int
    epoch: int
    node: str
    config: str = ""
    """Absolute path of the settings file; empty if there is none."""
    command_line: dict[str, str] = {}
    """Settings given on the command line: dotted key → text, as `config.load` takes them."""
    directory: str = ""
    """Where `holdfast run` was started: relative paths in settings count from there, wherever a script is by
    then. Empty if not known."""
    lease_ttl: float = 30.0
    orders: Orders = Orders()
    """What recovery told this attempt to do differently."""
    restarts_left: int | None = None
    """How many restarts without progress are left after this one; None if not known."""
    device: str = ""
    """What the launcher calls this worker's device; empty where a node has none to tell apart."""
    monitor: str = ""
    """Path of the socket on which the agent listens for signs of life; empty if it does not."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LaunchInfo | None:
        """The hand-over, or None for a process that `holdfast run` did not start."""
        return read_handover(environ, VARIABLE, cls)

    def base(self) -> Path | None:
        """What relative paths count from, if that is not the current directory of this process."""
        return Path(self.directory) if self.directory else None

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}


def one_config(file: str | os.PathLike[str] | None, launched: LaunchInfo | None) -> Path | None:
    """The settings file of a script, which may name one or be handed one, but not two different ones."""
    given = launched.config if launched is not None else ""
    if file is not None and launched is not None and launched.directory:
        path = Path(launched.directory, file)  # the script may have changed its directory
        file = path if str(path) == given or not Path(file).exists() else file
    if file is not None and given and Path(file).absolute() != Path(given).absolute():
        raise ConfigError(
            f"two settings files: the script reads {os.fspath(file)}, `holdfast run` was given {given}. "
            "Use one of them"
        )
    chosen = os.fspath(file) if file is not None else given
    return Path(chosen) if chosen else None


def progress(step: int) -> None:
    """For a script that saves by itself, without `Run`: report that a restart would go on from this step.

    Call it after each save, on any rank. Under `holdfast run`, restarts are refunded when the highest step
    ever reported rises; elsewhere this does nothing. Without Python: `echo 120 > "$HOLDFAST_PROGRESS"`.
    """
    path = os.environ.get(PROGRESS)
    if not path:
        return
    try:
        if not 0 <= step <= FURTHEST:
            raise ValueError(f"a step is a whole number from 0 to {FURTHEST}")
        replace_atomic(Path(path), f"{int(step)}\n".encode())
    except (OSError, TypeError, ValueError) as error:  # not a reason to end training
        log.warning("holdfast: step %r could not be told to the launcher: %s", step, error)


def progress_file(run_dir: Path, rank: int) -> Path:
    """Where a rank reports its progress: one file per rank for the whole run, so that the highest counts."""
    return run_dir / "progress" / f"rank_{rank:06d}"


def told_progress(run_dir: Path) -> int:
    """The highest step that any rank reported; 0 if none did. Anything that is not a step is ignored."""
    highest = 0
    try:
        names = os.listdir(run_dir / "progress")
    except OSError:
        return 0
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            step = int(read_regular(run_dir / "progress" / name, 64))
            highest = max(highest, step if step <= FURTHEST else 0)
    return highest


FOLDER = "launches"
ORIGIN = "origin"
TOGETHER = 600.0
"""Seconds within which the nodes of one launch are started."""
READ = 16
"""How many records are read."""
MOST_ENTRIES = 4000
"""How many names are looked at beside a script: a script in a heap of data must not cost more than this."""
LARGEST_FILE = 1024 * 1024
"""Bytes of the largest file that counts: code and settings are small, and anything larger is data."""
CONFIGURATION = frozenset({".py", ".toml", ".yaml", ".yml", ".json", ".ini", ".cfg", ".sh"})
"""The suffixes with which a file named in an argument counts: others may be written by the script."""
_UNSAFE = re.compile(r"[^0-9A-Za-z_.-]")
_RELEVANT = re.compile(
    r"(HOLDFAST|NCCL|GLOO|UCX|FI|PET|MKL|TORCH|TORCHELASTIC|CUDA|HSA|ROCR|HIP|MASTER)_.*"
    r"|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|WORLD_SIZE|RANK|LOCAL_RANK"
)
"""Variables that a run's behaviour may depend on. (Not OMP_NUM_THREADS: torch sets it for every launch.)"""


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One `holdfast run` on one node. What an older release did not record has its default."""

    launch: str
    """Its id, as this node proposed it: all attempts of the launch have the id of the first node."""
    argv: list[str]
    """What came after `holdfast run`."""
    python: str = ""
    """The interpreter that ran it."""
    directory: str = ""
    """Where it was started: relative paths count from there."""
    run_dir: str = ""
    """The run's directory at that time: the command would not start a copy of it that is elsewhere."""
    node: str = ""
    at: float = 0.0
    job: str = ""
    """The Slurm job that it was in; empty if in none."""
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
        """The command that starts the same again, for a shell in `directory`."""
        return [self.python or "python", "-m", "holdfast", "run", *self.argv]


def relevant(environ: Mapping[str, str]) -> list[str]:
    """The names of the variables that matter to a run, sorted."""
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
    """Write down how this launch was started. Returns why that was not possible; empty if it was."""
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
        replace_atomic(_path(control, node), raw, mode=0o600)  # a script's arguments may hold a secret
    except (OSError, ValueError) as error:
        return f"how this launch was started could not be kept: {error}"
    return ""


class RunOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run was told to begin, by `checkpoint.resume_from`, and what followed from it."""

    value: str
    """The setting; a path is absolute."""
    checkpoint: str = ""
    """What was used: a checkpoint's name, or a fresh start."""
    step: int = 0
    attempt: int = 0
    """The attempt that began there; 0 if the record cannot be read."""
    launch: str = ""
    at: float = 0.0


def origin_now(control: ControlDirectory, resume_from: str) -> RunOrigin | None:
    """The last record of where the run begins, if that is exactly what is asked for now; else None.

    So a setting that stays in place counts once; if it is absent in one launch, it counts again.
    """
    newest = next(reversed(entries(control.path / ORIGIN)), None)
    if newest is None or newest.word != _word(resume_from):
        return None
    return contents(newest, RunOrigin) or RunOrigin(value=_named(resume_from))


def applies_again(*, force: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a setting that was followed is followed again: somebody insists, and it is not a scheduler
    starting the same job once more."""
    return force and not int(environ.get("SLURM_RESTART_COUNT", "0") or 0)


def record_origin(control: ControlDirectory, fence: Fence, origin: RunOrigin) -> None:
    """Record that the run has begun where it was told to. Nothing is written until it is first told."""
    records = entries(control.path / ORIGIN)
    wish = "" if origin.value == "auto" else _word(origin.value)
    if (not wish and not records) or (records and records[-1].word == _word(origin.value)):
        return
    with fence.guard("record where the run begins"):
        record = msgspec.structs.replace(origin, value=_named(origin.value), at=time.time())
        append(control.path / ORIGIN, _word(origin.value), record)


def origin_attempts(control: ControlDirectory) -> set[int]:
    """The attempts that began where somebody had told them to."""
    origins = [contents(one, RunOrigin) for one in entries(control.path / ORIGIN)]
    return {one.attempt for one in origins if one is not None and one.value != "auto"}


def last_fresh(control: ControlDirectory) -> int:
    """The last attempt that made a fresh start because it was told to; 0 if none was."""
    word = _word("fresh")
    origins = [contents(one, RunOrigin) for one in entries(control.path / ORIGIN) if one.word == word]
    return max((one.attempt for one in origins if one is not None), default=0)


def _word(resume_from: str) -> str:
    return str(xxhash.xxh3_64(_named(resume_from).encode(errors="surrogateescape")).hexdigest())


def _named(resume_from: str) -> str:
    """The setting in the form that is compared: the same relative path from elsewhere is a different one."""
    plain = resume_from in ("auto", "fresh") or is_step(resume_from) or "://" in resume_from
    return resume_from if plain else _text(str(Path(resume_from).absolute()))


def digest_of(script: str, arguments: Sequence[str], settings: Settings, *, module: bool = False) -> str:
    """What is started, as one digest; empty where there is no script (somebody types it in, and watches).

    `module`: `script` is what came after `-m`, and is looked for from the current directory. One setting does
    not count, the name of this node: a pod has another name each time.
    """
    if not script:
        return ""
    try:
        folder = Path.cwd() if module else Path(script).absolute().parent
        name = script if module else str(Path(script).absolute())
    except OSError:  # the directory in which this was started is gone
        return ""
    own = msgspec.structs.replace(settings.launch, node_name="")
    mark = xxhash.xxh3_128(msgspec.json.encode(msgspec.structs.replace(settings, launch=own)))
    mark.update("\0".join([name, *arguments]).encode(errors="surrogateescape"))
    named = [Path(word.rpartition("=")[2]) for word in arguments]
    given = [*([] if module else [Path(script)]), *(path for path in named if path.suffix in CONFIGURATION)]
    beside = [] if "site-packages" in folder.parts else _python_files(folder)
    for path in (*given, *beside):
        with contextlib.suppress(OSError, ValueError):
            mark.update(read_regular(path.resolve(), LARGEST_FILE))
    return mark.hexdigest()


def _python_files(folder: Path) -> list[Path]:
    """The Python files of a folder and of those folders below it that contain any, in a fixed order."""
    found: list[Path] = []
    folders, left = [folder], MOST_ENTRIES
    while folders and left > 0:
        try:
            with os.scandir(folders.pop(0)) as entries:
                listed = sorted(itertools.islice(entries, left), key=lambda entry: entry.name)
        except OSError:
            continue
        left -= len(listed)
        mine = [Path(one.path) for one in listed if one.name.endswith(".py")]
        found += mine
        if mine:
            hidden = (".", "__pycache__")
            folders += [Path(one.path) for one in listed if one.is_dir() and not one.name.startswith(hidden)]
    return found


def newest_launches(control: ControlDirectory) -> list[LaunchRecord]:
    """The last launch on each of the nodes started last, oldest first; what cannot be read is left out.

    Very many nodes may have a record, so only the newest few files are read.
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
    """The record to start the run from: the newest, or this node's own if it belongs to the same launch."""
    newest = next(reversed(newest_launches(control)), None)
    if newest is None:
        return None
    own = _read(_path(control, node)) if node else None
    return own if own is not None and newest.at - own.at <= TOGETHER else newest


def _path(control: ControlDirectory, node: str) -> Path:
    return control.path / FOLDER / f"{_UNSAFE.sub('_', node)[:100] or '_'}.json"


def _text(text: str) -> str:
    """Text in a form that JSON can carry: a file name may hold bytes that are not text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
