"""What the launcher hands to its workers: HOLDFAST_LAUNCH, one environment variable, as JSON; and the other
way, what a script without `Run` tells the launcher: how far it is, in the file that HOLDFAST_PROGRESS names.

It is not a setting: a worker that finds it was started by `holdfast run`, belongs to the attempt it names,
and acts under that attempt's epoch. Everything else a worker needs it finds in the settings.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import ConfigError, UsageError
from holdfast.files import read_regular, replace_atomic
from holdfast.policy.rejection import Rerun, Trial

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
    avoid: list[str] = []
    """Checkpoints that the recovery decision told this attempt not to use, by name."""
    rerun: Rerun | None = None
    """The step whose rejection made this attempt necessary."""
    trial: Trial | None = None
    """The checkpoints whose guilt this attempt settles."""
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
