"""Learned time limits, kept in the control directory: one file a node, replaced in one step.

```
timeouts/<node>.json         what the node's agent learned last, and in which attempt
hello.json                   that ranks of this command say hello to their agent, and how late
```
They only help: a file that cannot be read is told and left out, and the configured limits hold.
"""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import msgspec

from holdfast.control.directory import MAX_RECORD_BYTES, ControlDirectory, list_names
from holdfast.errors import ConfigError, ControlError
from holdfast.files import make_dirs, read_regular, replace_atomic
from holdfast.policy.timeouts import Learned, longest_of

RECENT_ATTEMPTS = 10
"""A node that has not been there for so many attempts no longer counts."""
_UNSAFE = re.compile(r"[^0-9A-Za-z_.-]")


class LearnedRecord(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    attempt: int
    at: float
    learned: Learned


def store_learned(control: ControlDirectory, node: str, attempt: int, learned: Learned) -> None:
    """Keep what this node has learned up to now. Raises OSError."""
    record = LearnedRecord(node=node, attempt=attempt, at=time.time(), learned=learned)
    folder = control.path / "timeouts"
    make_dirs(folder)
    name = _UNSAFE.sub("_", node)[:100] or "_"
    replace_atomic(folder / f"{name}.json", msgspec.json.encode(record) + b"\n")


def read_learned(control: ControlDirectory) -> tuple[Learned, list[str]]:
    """What all nodes learned, the longest of each, and what could not be read."""
    records: list[LearnedRecord] = []
    problems: list[str] = []
    folder = control.path / "timeouts"
    try:
        names = sorted(list_names(folder))
    except ControlError as error:
        return Learned(), [str(error)]
    for name in names:
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            record = msgspec.json.decode(read_regular(folder / name, MAX_RECORD_BYTES), type=LearnedRecord)
        except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            problems.append(f"learned timeouts in {folder / name} are left out: {error}")
            continue
        records.append(record)
    newest = max((record.attempt for record in records), default=0)
    recent = [record.learned for record in records if record.attempt > newest - RECENT_ATTEMPTS]
    return longest_of(recent), problems


# --- who says hello -----------------------------------------------------------------------------------------

HELLO = "hello.json"


class HelloRecord(msgspec.Struct, frozen=True, kw_only=True):
    """That ranks of a command said hello: those of its other attempts, and of other nodes, do so too."""

    command: str
    """A digest of the script and its arguments. With other arguments it may be a script without `Run`."""
    initial: float = 0.0
    """The initial limit that these ranks asked for, in seconds; 0 is off."""
    longest: float = 0.0
    """The longest that one took from the start of the workers to its hello, in seconds."""


def store_hello(control: ControlDirectory, record: HelloRecord) -> None:
    """Keep it in place of what was kept before. Raises OSError."""
    replace_atomic(control.path / HELLO, msgspec.json.encode(record) + b"\n")


def read_hello(control: ControlDirectory, command: str) -> HelloRecord | None:
    """What is known of this command; None if nothing is, or it cannot be read."""
    try:
        raw = read_regular(control.path / HELLO, MAX_RECORD_BYTES)
        record = msgspec.json.decode(raw, type=HelloRecord)
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return record if record.command == command else None


# --- the file of another system -----------------------------------------------------------------------------


class _Heartbeat(msgspec.Struct):
    initial: float | None = None
    subsequent: float | None = None


class _Sections(msgspec.Struct):
    section: dict[str, float | None] = {}
    out_of_section: float | None = None
    calculated_sections: list[str] = []
    is_out_of_section_calculated: bool = False


class _Current(_Heartbeat):
    """With both at the top (older releases) or one object each."""

    heartbeat: _Heartbeat | None = None
    section: _Sections | None = None


class _FtState(msgspec.Struct):
    current_timeouts: _Current


def read_ft_state(path: Path) -> Learned:
    """The timeouts that nvidia-resiliency-ext calculated and left in an `ft_state.json`.

    Those of its sections that it did not calculate only repeat its configuration, and are left out.
    """
    try:
        state = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=_FtState)
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise ConfigError(
            f"monitor.import_ft_state = {str(path)!r}: cannot be used: {reason}. It must name an "
            "ft_state.json of nvidia-resiliency-ext, or be empty"
        ) from error
    current = state.current_timeouts
    beats = current.heartbeat or current
    sections = current.section or _Sections()
    return Learned(
        initial=_usable(beats.initial),
        heartbeat=_usable(beats.subsequent),
        sections={
            name: seconds
            for name in sections.calculated_sections
            if (seconds := _usable(sections.section.get(name)))
        },
        out_of_section=_usable(sections.out_of_section) if sections.is_out_of_section_calculated else 0.0,
    )


def _usable(seconds: float | None) -> float:
    return seconds if seconds is not None and math.isfinite(seconds) and seconds > 0 else 0.0
