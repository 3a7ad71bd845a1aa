"""What the launcher hands to its workers: one environment variable, HOLDFAST_LAUNCH, as JSON.

It is not a setting: a worker that finds it was started by `holdfast run`, belongs to the attempt it names,
and acts under that attempt's epoch. Everything else a worker needs it finds in the settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import ConfigError, UsageError
from holdfast.policy.rejection import Rerun, Trial

VARIABLE = "HOLDFAST_LAUNCH"

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
    lease_ttl: float = 30.0
    avoid: list[str] = []
    """Checkpoints that the recovery decision told this attempt not to use, by name."""
    rerun: Rerun | None = None
    """The step whose rejection made this attempt necessary."""
    trial: Trial | None = None
    """The checkpoints whose guilt this attempt settles."""
    device: str = ""
    """What the launcher calls this worker's device; empty where a node has none to tell apart."""
    monitor: str = ""
    """Path of the socket on which the agent listens for signs of life; empty if it does not."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LaunchInfo | None:
        """The hand-over, or None for a process that `holdfast run` did not start."""
        return read_handover(environ, VARIABLE, cls)

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}


def one_config(file: str | os.PathLike[str] | None, launched: LaunchInfo | None) -> Path | None:
    """The settings file of a script, which may name it or be handed it, but not two of them."""
    given = launched.config if launched is not None else ""
    if file is not None and given and Path(file).absolute() != Path(given).absolute():
        raise ConfigError(
            f"two settings files: the script reads {os.fspath(file)}, `holdfast run` was given {given}. "
            "Use one of them"
        )
    chosen = os.fspath(file) if file is not None else given
    return Path(chosen) if chosen else None
