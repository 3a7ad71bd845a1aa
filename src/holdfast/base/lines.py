"""How things are said to people: times, sizes and other text, and the one writer of lines to standard error.

What ranks say goes through Python's logging first (`log.warning("holdfast: …")`). Where the script has set up
logging of its own, its handlers take it and write it in their way; else it is written here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, TextIO

from holdfast.base.bounded import Waiting, in_words, is_due, is_rewritten

# --- lines on standard error --------------------------------------------------------------------------------

MAX_TEXT = 500


@dataclass(frozen=True)
class Rendered:
    text: str
    style: str
    """fault, warning, decision, saved, good, progress or plain; whoever shows it decides on the looks."""
    details: list[str] = field(default_factory=list)
    """Lines that belong under the text: evidence and rejected options."""


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Any text as one harmless line."""
    line = " ".join(text[: limit * 4].split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def escaped(text: str, limit: int = 200) -> str:
    """`text` as it is, with escapes for control characters and lone surrogates, cut to `limit`: safe to print
    and to encode. Unlike `printable` it keeps every space, so that a path can be copied."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def duration(seconds: float) -> str:
    """A length of time with about three digits: 42 ms, 3.2 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def moment(at: float) -> str:
    """A point in time by the clock of this machine, whatever number a record has for it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "a time out of range"


def size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def number(value: float | None) -> str:
    """A loss for people."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


# How much is printed: HOLDFAST_VERBOSITY in the environment.
#
# It is not a setting of the run: what a run does never depends on it, and whoever looks for an error can
# change it without changing what the run was started with.


VERBOSITY_VARIABLE = "HOLDFAST_VERBOSITY"


class Verbosity(StrEnum):
    NORMAL = "normal"
    DEBUG = "debug"


def verbosity(environ: Mapping[str, str]) -> Verbosity:
    """What was asked for; what is no such word was refused where the settings were read."""
    asked = environ.get(VERBOSITY_VARIABLE, "")
    return Verbosity(asked) if asked in set(Verbosity) else Verbosity.NORMAL


def is_verbosity(text: str) -> bool:
    """Whether it is one of the words; empty is as if it were not set."""
    return not text or text in set(Verbosity)


# A line that Holdfast prints on standard error, in either of its forms: for people, or as JSON. Pure.
#
# HOLDFAST_LOG_FORMAT in the environment says which; `holdfast run --log-format` sets it for the launcher, and
# the workers inherit it. It is not a setting of the run: what a run does never depends on it.


FORMAT_VARIABLE = "HOLDFAST_LOG_FORMAT"
PREFIX = "holdfast: "
"""How text handed to Python's logging begins, where none of our own forms says who is speaking."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LineKind(StrEnum):
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


class LineSource(StrEnum):
    """Who is speaking in a line."""

    LAUNCHER = "launcher"
    RANK = "rank"
    SCRIPT = "script"
    """A process with a `Run` that is not a rank of anything."""
    COMMAND = "command"


class OutputLine(NamedTuple):
    at: float
    source: LineSource
    rank: int | None
    host: str
    attempt: int | None
    kind: LineKind
    level: str
    """info, warning or error."""
    text: str
    """The text for people; it may have several lines."""
    more: Mapping[str, Any] = {}
    """Fields that only this kind of line has: `account`, `wait`."""


_BEGINNINGS = (
    ("warning: ", LineKind.WARNING),
    ("note: ", LineKind.NOTE),
    ("error: ", LineKind.ERROR),
    ("stopped: ", LineKind.STOPPED),
    ("stopped by ", LineKind.STOPPED),
    ("asked to stop: ", LineKind.STOP),
    ("the stop ", LineKind.STOP),
    ("save ", LineKind.SAVE),
    ("saving holds ", LineKind.SAVE),
    ("straggler", LineKind.STRAGGLER),
    ("waiting for ", LineKind.WAIT),
    ("back at step ", LineKind.BACK),
    ("finished: ", LineKind.FINISHED),
    ("goes on from step ", LineKind.RESUME),
    ("begins anew: ", LineKind.RESUME),
    ("the checkpoint ", LineKind.RESUME),
)
_LEVELS = {
    LineKind.WARNING: "warning",
    LineKind.INCIDENT: "warning",
    LineKind.ERROR: "error",
    LineKind.STOPPED: "error",
}
_CUT = (LineKind.WARNING, LineKind.NOTE, LineKind.ERROR)
"""Kinds whose name begins the text; in JSON it is a field of its own."""


def log_format(environ: Mapping[str, str]) -> LogFormat:
    """What was asked for; what is no such word was refused where the settings were read."""
    asked = environ.get(FORMAT_VARIABLE, "")
    return LogFormat(asked) if asked in set(LogFormat) else LogFormat.TEXT


def is_format(text: str) -> bool:
    """Whether it is one of the words; empty is as if it were not set."""
    return not text or text in set(LogFormat)


def kind_of(text: str) -> LineKind:
    """What a sentence is about, judging by its beginning."""
    return next((kind for begins, kind in _BEGINNINGS if text.startswith(begins)), LineKind.MESSAGE)


def level_of(kind: LineKind) -> str:
    return _LEVELS.get(kind, "info")


def as_text(line: OutputLine) -> str:
    """`11:22:33 holdfast: …` of the launcher, `11:22:33 holdfast[rank 0]: …` of a rank."""
    if line.source is LineSource.COMMAND:
        return f"{PREFIX}{line.text}"
    who = f"holdfast[rank {line.rank}]" if line.rank is not None else "holdfast"
    return f"{time.strftime('%H:%M:%S', time.localtime(line.at))} {who}: {line.text}"


def as_json(line: OutputLine) -> str:
    """One object on one line. The fields are listed in docs/guides/launcher.md and will not change."""
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
_COLOURS = {
    LineKind.INCIDENT: RED,
    LineKind.STOPPED: RED,
    LineKind.ERROR: RED,
    LineKind.BACK: GREEN,
    LineKind.FINISHED: GREEN,
}


def rewrites(environ: Mapping[str, str], *, terminal: bool) -> bool:
    """Whether a line there can be written over."""
    return terminal and environ.get("TERM", "") not in ("", "dumb")


def has_colour(environ: Mapping[str, str], *, terminal: bool) -> bool:
    """True on a terminal that knows colours, unless NO_COLOR (no-color.org) is set to anything."""
    return rewrites(environ, terminal=terminal) and not environ.get("NO_COLOR")


def painted(shown: str, kind: LineKind) -> str:
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


_LAUNCH = "HOLDFAST_LAUNCH"


class OwnLines(logging.Handler):
    """Takes what no other handler takes, as `logging.lastResort` would."""

    def __init__(self, source: LineSource | None = None) -> None:
        """`source`: who this process is; None to take it from the environment."""
        debug = verbosity(os.environ) is Verbosity.DEBUG
        super().__init__(logging.INFO if debug else logging.WARNING)
        self.source = source

    def emit(self, record: logging.LogRecord) -> None:
        if is_taken(logging.getLogger(record.name)):
            return
        try:
            text = self.format(record).removeprefix(PREFIX)
        except Exception:  # noqa: BLE001 - a message that cannot be formatted must not end a run
            return
        level = "error" if record.levelno >= logging.ERROR else record.levelname.lower()
        speak(text, source=self.source, level=level)


def install(source: LineSource | None = None) -> None:
    """From now on, write what Holdfast logs and no other handler takes as lines of this process."""
    log = logging.getLogger("holdfast")
    for handler in [one for one in log.handlers if isinstance(one, OwnLines)]:
        log.removeHandler(handler)
    log.addHandler(OwnLines(source))
    if verbosity(os.environ) is Verbosity.DEBUG and log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def is_taken(log: logging.Logger) -> bool:
    """Whether a handler of somebody else gets what is logged here."""
    here: logging.Logger | None = log
    while here is not None:
        if any(not isinstance(one, OwnLines | logging.NullHandler) for one in here.handlers):
            return True
        here = here.parent if here.propagate else None
    return False


def speak(
    text: str,
    *,
    source: LineSource | None = None,
    kind: LineKind | None = None,
    level: str = "",
    attempt: int | None = None,
    more: Mapping[str, Any] | None = None,
    to: TextIO | None = None,
) -> None:
    """Write one line. Raises what the stream raises.

    `source`: who is speaking; None for this process, by its environment. `to`: standard error unless given.
    """
    stream = sys.stderr if to is None else to
    shown = rendered(text, stream, source=source, kind=kind, level=level, attempt=attempt, more=more)
    stream.write(f"{shown}\n")  # in one write: lines of other processes must not come in between
    stream.flush()


def rendered(
    text: str,
    stream: TextIO | None = None,
    *,
    source: LineSource | None = None,
    kind: LineKind | None = None,
    level: str = "",
    attempt: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> str:
    """The line as it is written to `stream`, without its line end; if no stream is given, as in a file."""
    kind = kind_of(text) if kind is None else kind
    source, rank, own = _who(os.environ) if source is None else (source, None, None)
    line = OutputLine(
        at=time.time(),
        source=source,
        rank=rank,
        host=os.uname().nodename,
        attempt=own if attempt is None else attempt,
        kind=kind,
        level=level or level_of(kind),
        text=text,
        more=more or {},
    )
    if log_format(os.environ) is LogFormat.JSON and source is not LineSource.COMMAND:
        return as_json(line)
    shown, terminal = as_text(line), stream is not None and _is_terminal(stream)
    if has_colour(os.environ, terminal=terminal):
        shown = painted(shown, kind)
    if rewrites(os.environ, terminal=terminal):  # a wait may have left its line there
        shown = shown.replace("\n", f"{CLEAR}\n", 1) if "\n" in shown else f"{shown}{CLEAR}"
    return shown


def say_as_rank(text: str, to: TextIO | None = None) -> None:
    """For what a rank says whether or not logging was set up. Nobody need be there to read it."""
    with contextlib.suppress(OSError, ValueError):
        speak(text, to=to)


def _who(environ: Mapping[str, str]) -> tuple[LineSource, int | None, int | None]:
    """Who a process other than the launcher is: its rank and attempt, as far as its environment tells."""
    rank = environ.get("RANK", "")
    attempt = None
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        found = json.loads(environ.get(_LAUNCH, "null")).get("attempt")
        attempt = found if isinstance(found, int) else None
    if rank.isdecimal():
        return LineSource.RANK, int(rank), attempt
    return LineSource.SCRIPT, None, attempt


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):
        return False


def _width(stream: TextIO) -> int:
    """Columns of the terminal; a longer line cannot be written over."""
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        return 80


class LiveLine:
    """Reports one wait while it goes on. Called at every look of whoever waits; most calls say nothing.

    On a terminal the line is written over: the cursor is left at its beginning, so whatever is printed next
    takes its place without having to know about it.
    """

    def __init__(self, source: LineSource | None = None, *, attempt: int | None = None) -> None:
        self._source, self._attempt = source, attempt
        self._told: float | None = None
        self._shown = False

    def __call__(self, waiting: Waiting) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
            self._tell(waiting)

    def _tell(self, waiting: Waiting) -> None:
        stream, environ = sys.stderr, os.environ
        in_place = rewrites(environ, terminal=_is_terminal(stream))
        if in_place and log_format(environ) is LogFormat.TEXT:
            if is_rewritten(waiting.waited, self._told):
                self._told, self._shown = waiting.waited, True
                shown = rendered(in_words(waiting), source=self._source, attempt=self._attempt)
                width = _width(stream) - 1
                cut = shown if len(shown) <= width else f"{shown[: width - 1]}…"
                stream.write(f"{cut}{CLEAR}\r")
                stream.flush()
            return
        if is_due(waiting.waited, self._told):
            self._told = waiting.waited
            speak(
                in_words(waiting),
                source=self._source,
                kind=LineKind.WAIT,
                attempt=self._attempt,
                more={
                    "wait": {
                        "what": waiting.what,
                        "waited": round(waiting.waited, 1),
                        "longest": waiting.longest,
                    }
                },
            )

    def over(self) -> None:
        """The wait has ended: its line is cleared, and another one may begin."""
        if self._shown:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(CLEAR)
                sys.stderr.flush()
        self._told, self._shown = None, False
