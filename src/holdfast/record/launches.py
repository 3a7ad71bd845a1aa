"""How a run was started, so that it can be started again, and what the launcher hands to its workers.

Every `holdfast run` leaves a record, one file a node, replaced in one step by the next launch there:

```
launches/<node>.json
origin/000001-<digest>.json   where the run was told to begin, each time it was told something else
```
Guarantee: a launch is never held up or ended by its record; what cannot be written is a warning. It tells
people and `holdfast recover` what to run, and the launcher whose run the default run directory holds. Of the
environment only names are kept, because values may be secrets; a command line is kept as it was given, as
every process listing shows it.

The origin is decided on: `checkpoint.resume_from` is followed once, and again only when it has changed or
somebody insists. A record of it that nobody can read still counts, by its name.

`digest_of` is what the bound on launches goes by (`policy.budgets`): two launches are of the same thing if
the script, the Python files beside it, its arguments, the configuration files that these name, and the
settings are the same. Whoever mended one of them starts something else.
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

# What the launcher hands to its workers: HOLDFAST_LAUNCH, one environment variable, as JSON; and the other
# way, what a script without `Run` tells the launcher: how far it is, in the file that HOLDFAST_PROGRESS
# names.
#
# It is not a setting: a worker that finds it was started by `holdfast run`, belongs to the attempt it names,
# and acts under that attempt's epoch. Everything else a worker needs it finds in the settings.


log = logging.getLogger("holdfast")

VARIABLE = "HOLDFAST_LAUNCH"
PROGRESS = "HOLDFAST_PROGRESS"
FURTHEST = 999_999_999_999
"""No step is higher: a number beyond it is no step."""

S = TypeVar("S", bound=msgspec.Struct)


def read_handover(environ: Mapping[str, str], variable: str, kind: type[S]) -> S | None:
    """What the launcher has handed over in a variable; None if nothing."""
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
    """Where `holdfast run` was started: relative paths in settings are meant from there, wherever a script is
    by then. Empty if that is not known."""
    lease_ttl: float = 30.0
    orders: Orders = Orders()
    """What recovery told this attempt to do in another way."""
    restarts_left: int | None = None
    """Restarts without progress that are left after this one; None if that is not known."""
    device: str = ""
    """What the launcher calls this worker's device; empty where a node has none to tell apart."""
    monitor: str = ""
    """Path of the socket on which the agent listens for signs of life; empty if it does not."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LaunchInfo | None:
        """The hand-over, or None for a process that `holdfast run` did not start."""
        return read_handover(environ, VARIABLE, cls)

    def base(self) -> Path | None:
        """What relative paths are meant from, if that is not the directory that this process is in."""
        return Path(self.directory) if self.directory else None

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}


def one_config(file: str | os.PathLike[str] | None, launched: LaunchInfo | None) -> Path | None:
    """The settings file of a script, which may name it or be handed it, but not two of them."""
    given = launched.config if launched is not None else ""
    if file is not None and launched is not None and launched.directory:
        there = Path(launched.directory, file)  # the script may have changed its directory
        file = there if str(there) == given or not Path(file).exists() else file
    if file is not None and given and Path(file).absolute() != Path(given).absolute():
        raise ConfigError(
            f"two settings files: the script reads {os.fspath(file)}, `holdfast run` was given {given}. "
            "Use one of them"
        )
    chosen = os.fspath(file) if file is not None else given
    return Path(chosen) if chosen else None


def progress(step: int) -> None:
    """For a script that saves by itself, without `Run`: a restart would go on from this step.

    Call it after each save, on any rank. Under `holdfast run` restarts are paid back when the highest step
    ever told rises; elsewhere this does nothing. The same without Python: `echo 120 > "$HOLDFAST_PROGRESS"`.
    """
    path = os.environ.get(PROGRESS)
    if not path:
        return
    try:
        if not 0 <= step <= FURTHEST:
            raise ValueError(f"a step is a whole number from 0 to {FURTHEST}")
        replace_atomic(Path(path), f"{int(step)}\n".encode())
    except (OSError, TypeError, ValueError) as error:  # no reason to end a training
        log.warning("holdfast: step %r could not be told to the launcher: %s", step, error)


def progress_file(run_dir: Path, rank: int) -> Path:
    """Where a rank tells how far it is; one file a rank for the whole run, so that the highest counts."""
    return run_dir / "progress" / f"rank_{rank:06d}"


def told_progress(run_dir: Path) -> int:
    """The highest step that any rank told; 0 if none did. What is not a step is not counted."""
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
"""Records that are read."""
MOST_ENTRIES = 4000
"""Names that are looked at beside a script; one that lies in a heap of data costs no more than this."""
LARGEST_FILE = 1024 * 1024
"""Bytes of a file that counts: code and settings are small, and what is larger is data."""
CONFIGURATION = frozenset({".py", ".toml", ".yaml", ".yml", ".json", ".ini", ".cfg", ".sh"})
"""What a file that an argument names must be called to count: others may be what the script writes."""
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
        replace_atomic(_path(control, node), raw, mode=0o600)  # a script's arguments may hold a secret
    except (OSError, ValueError) as error:
        return f"how this launch was started could not be kept: {error}"
    return ""


class RunOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run was told to begin, by `checkpoint.resume_from`, and what came of it."""

    value: str
    """The setting; a path is absolute."""
    checkpoint: str = ""
    """What was taken: a checkpoint's name, or a fresh start."""
    step: int = 0
    attempt: int = 0
    """The one that began there; 0 if the record cannot be read."""
    launch: str = ""
    at: float = 0.0


def origin_now(control: ControlDirectory, resume_from: str) -> RunOrigin | None:
    """The last word on where the run begins, if that is just what is asked for now; None if it is not.

    So a setting that stays where it is counts once; taken away for a launch, it counts anew.
    """
    newest = next(reversed(entries(control.path / ORIGIN)), None)
    if newest is None or newest.word != _word(resume_from):
        return None
    return contents(newest, RunOrigin) or RunOrigin(value=_named(resume_from))


def applies_again(*, force: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a wish that was followed is followed again: somebody insists, who is not a scheduler that
    starts the same job once more."""
    return force and not int(environ.get("SLURM_RESTART_COUNT", "0") or 0)


def record_origin(control: ControlDirectory, fence: Fence, origin: RunOrigin) -> None:
    """The run has begun where it was told to. Nothing is written before the first wish."""
    there = entries(control.path / ORIGIN)
    wish = "" if origin.value == "auto" else _word(origin.value)
    if (not wish and not there) or (there and there[-1].word == _word(origin.value)):
        return
    with fence.guard("record where the run begins"):
        record = msgspec.structs.replace(origin, value=_named(origin.value), at=time.time())
        append(control.path / ORIGIN, _word(origin.value), record)


def origin_attempts(control: ControlDirectory) -> set[int]:
    """The attempts that began where they were told to."""
    told = [contents(one, RunOrigin) for one in entries(control.path / ORIGIN)]
    return {one.attempt for one in told if one is not None and one.value != "auto"}


def last_fresh(control: ControlDirectory) -> int:
    """The last attempt that began anew because it was told to; 0 if none was."""
    word = _word("fresh")
    told = [contents(one, RunOrigin) for one in entries(control.path / ORIGIN) if one.word == word]
    return max((one.attempt for one in told if one is not None), default=0)


def _word(resume_from: str) -> str:
    return str(xxhash.xxh3_64(_named(resume_from).encode(errors="surrogateescape")).hexdigest())


def _named(resume_from: str) -> str:
    """The setting as it counts: the same path from elsewhere is another one."""
    plain = resume_from in ("auto", "fresh") or is_step(resume_from) or "://" in resume_from
    return resume_from if plain else _text(str(Path(resume_from).absolute()))


def digest_of(script: str, arguments: Sequence[str], settings: Settings, *, module: bool = False) -> str:
    """What is started, as one digest; empty where there is no script (somebody types it in, and watches).

    `module`: `script` is what came after `-m`, and is looked for from here. Of settings, what this node is
    called does not count: a pod has another name each time.
    """
    if not script:
        return ""
    try:
        folder = Path.cwd() if module else Path(script).absolute().parent
        name = script if module else str(Path(script).absolute())
    except OSError:  # the directory that this was started in is gone
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
    """The Python files of a folder and of those below it that hold some themselves, in a fixed order."""
    found: list[Path] = []
    folders, left = [folder], MOST_ENTRIES
    while folders and left > 0:
        try:
            with os.scandir(folders.pop(0)) as entries:
                there = sorted(itertools.islice(entries, left), key=lambda entry: entry.name)
        except OSError:
            continue
        left -= len(there)
        mine = [Path(one.path) for one in there if one.name.endswith(".py")]
        found += mine
        if mine:
            hidden = (".", "__pycache__")
            folders += [Path(one.path) for one in there if one.is_dir() and not one.name.startswith(hidden)]
    return found


def newest_launches(control: ControlDirectory) -> list[LaunchRecord]:
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
    newest = next(reversed(newest_launches(control)), None)
    if newest is None:
        return None
    own = _read(_path(control, node)) if node else None
    return own if own is not None and newest.at - own.at <= TOGETHER else newest


def _path(control: ControlDirectory, node: str) -> Path:
    return control.path / FOLDER / f"{_UNSAFE.sub('_', node)[:100] or '_'}.json"


def _text(text: str) -> str:
    """As JSON can carry it: a file name may hold bytes that are no text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
