"""A line that Holdfast prints on standard error, and the forms it has: for people, or as JSON. Pure.

HOLDFAST_LOG_FORMAT in the environment says which; `holdfast run --log-format` sets it for the launcher, and
the workers inherit it. It is not a setting of the run: what a run does never depends on it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

VARIABLE = "HOLDFAST_LOG_FORMAT"
PREFIX = "holdfast: "
"""How what is handed to Python's logging begins, where no form of ours tells who says it."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Kind(StrEnum):
    """What a line is about, for programs. Names are stable; new ones may come."""

    INCIDENT = "incident"
    RESUME = "resume"
    BACK = "back"
    FINISHED = "finished"
    STOP = "stop"
    STOPPED = "stopped"
    SAVE = "save"
    STRAGGLER = "straggler"
    WAIT = "wait"
    WARNING = "warning"
    NOTE = "note"
    ERROR = "error"
    MESSAGE = "message"


class Source(StrEnum):
    """Who says a line."""

    LAUNCHER = "launcher"
    RANK = "rank"
    SCRIPT = "script"
    """A process with a `Run` that is no rank of anything."""
    COMMAND = "command"


class Line(NamedTuple):
    at: float
    source: Source
    rank: int | None
    host: str
    attempt: int | None
    kind: Kind
    level: str
    """info, warning or error."""
    text: str
    """As people read it; it may have several lines."""
    more: Mapping[str, Any] = {}
    """Fields that only this kind of line has: `account`, `wait`."""


_BEGINNINGS = (
    ("warning: ", Kind.WARNING),
    ("note: ", Kind.NOTE),
    ("error: ", Kind.ERROR),
    ("stopped: ", Kind.STOPPED),
    ("stopped by ", Kind.STOPPED),
    ("asked to stop: ", Kind.STOP),
    ("the stop ", Kind.STOP),
    ("save ", Kind.SAVE),
    ("saving holds ", Kind.SAVE),
    ("straggler", Kind.STRAGGLER),
    ("waiting for ", Kind.WAIT),
    ("back at step ", Kind.BACK),
    ("finished: ", Kind.FINISHED),
    ("goes on from step ", Kind.RESUME),
    ("begins anew: ", Kind.RESUME),
    ("the checkpoint ", Kind.RESUME),
)
_LEVELS = {Kind.WARNING: "warning", Kind.INCIDENT: "warning", Kind.ERROR: "error", Kind.STOPPED: "error"}
_CUT = (Kind.WARNING, Kind.NOTE, Kind.ERROR)
"""Kinds that their text begins with, which in JSON is a field of its own."""


def log_format(environ: Mapping[str, str]) -> LogFormat:
    """What was asked for; what is no such word was refused where the settings were read."""
    asked = environ.get(VARIABLE, "")
    return LogFormat(asked) if asked in set(LogFormat) else LogFormat.TEXT


def is_known(text: str) -> bool:
    """Whether it is one of the words; empty is as if it were not set."""
    return not text or text in set(LogFormat)


def kind_of(text: str) -> Kind:
    """What a sentence is about, by its beginning."""
    return next((kind for begins, kind in _BEGINNINGS if text.startswith(begins)), Kind.MESSAGE)


def level_of(kind: Kind) -> str:
    return _LEVELS.get(kind, "info")


def as_text(line: Line) -> str:
    """`11:22:33 holdfast: …` of the launcher, `11:22:33 holdfast[rank 0]: …` of a rank."""
    if line.source is Source.COMMAND:
        return f"{PREFIX}{line.text}"
    who = f"holdfast[rank {line.rank}]" if line.rank is not None else "holdfast"
    return f"{time.strftime('%H:%M:%S', time.localtime(line.at))} {who}: {line.text}"


def as_json(line: Line) -> str:
    """One object on one line. The fields are listed in docs/guides/launcher.md, and stay."""
    text = line.text
    if line.kind in _CUT:
        text = text.removeprefix(f"{line.kind}: ")
    fields = {
        "time": datetime.fromtimestamp(line.at).astimezone().isoformat(timespec="milliseconds"),
        "level": line.level,
        "source": str(line.source),
        "rank": line.rank,
        "host": line.host,
        "attempt": line.attempt,
        "kind": str(line.kind),
        "text": text,
        **line.more,
    }
    return json.dumps(fields, ensure_ascii=False, default=str)


# --- on a terminal ------------------------------------------------------------------------------------------

RED, GREEN, BOLD, DIM, PLAIN = "\x1b[1;31m", "\x1b[32m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
CLEAR = "\x1b[K"
"""Clears from the cursor to the end of its line."""
_LABELS = ("why:", "done:", "next:", "file:", "more:")
_COLOURS = {Kind.INCIDENT: RED, Kind.STOPPED: RED, Kind.ERROR: RED, Kind.BACK: GREEN, Kind.FINISHED: GREEN}


def rewrites(environ: Mapping[str, str], *, terminal: bool) -> bool:
    """Whether a line there can be written over."""
    return terminal and environ.get("TERM", "") not in ("", "dumb")


def has_colour(environ: Mapping[str, str], *, terminal: bool) -> bool:
    """On a terminal that knows them, unless NO_COLOR (no-color.org) is set to anything."""
    return rewrites(environ, terminal=terminal) and not environ.get("NO_COLOR")


def painted(shown: str, kind: Kind) -> str:
    """The text of a line with its headline in the colour of its kind, and the labels below it in bold."""
    first, *rest = shown.split("\n")
    stamp, colon, headline = first.partition(": ")
    colour = _COLOURS.get(kind)
    if colour is not None and colon:
        first = f"{DIM}{stamp}{colon}{PLAIN}{colour}{headline}{PLAIN}"
    return "\n".join([first, *map(_labelled, rest)])


def _labelled(line: str) -> str:
    label = line.strip().partition(" ")[0]
    return line.replace(label, f"{BOLD}{label}{PLAIN}", 1) if label in _LABELS else line
