"""How Holdfast says something on standard error: the one place where a process of ours writes a line there.

What ranks say goes through Python's logging first (`log.warning("holdfast: …")`). Where the script has set
its own logging up, its handlers take it, and write it as they do; else it is written here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from holdfast.lines import (
    CLEAR,
    PREFIX,
    Kind,
    Line,
    LogFormat,
    Source,
    as_json,
    as_text,
    has_colour,
    kind_of,
    level_of,
    log_format,
    painted,
    rewrites,
)
from holdfast.verbosity import Verbosity, verbosity
from holdfast.waiting import Waiting, in_words, is_due, is_rewritten

_LAUNCH = "HOLDFAST_LAUNCH"


class OwnLines(logging.Handler):
    """Takes what nobody else takes, as `logging.lastResort` would."""

    def __init__(self, source: Source | None = None) -> None:
        """`source`: who this process is; None if its environment tells."""
        debug = verbosity(os.environ) is Verbosity.DEBUG
        super().__init__(logging.INFO if debug else logging.WARNING)
        self.source = source

    def emit(self, record: logging.LogRecord) -> None:
        if is_taken(logging.getLogger(record.name)):
            return
        try:
            text = self.format(record).removeprefix(PREFIX)
        except Exception:  # noqa: BLE001 - a message that cannot be made is no reason to end a training
            return
        level = "error" if record.levelno >= logging.ERROR else record.levelname.lower()
        speak(text, source=self.source, level=level)


def install(source: Source | None = None) -> None:
    """Have what is logged by Holdfast, and taken by nobody else, written as lines of this process."""
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
    source: Source | None = None,
    kind: Kind | None = None,
    level: str = "",
    attempt: int | None = None,
    more: Mapping[str, Any] | None = None,
    to: TextIO | None = None,
) -> None:
    """Write one line. Raises what the stream raises.

    `source`: who says it; None for whoever this process is by its environment. `to`: standard error unless
    given.
    """
    stream = sys.stderr if to is None else to
    shown = rendered(text, stream, source=source, kind=kind, level=level, attempt=attempt, more=more)
    stream.write(f"{shown}\n")  # at once: lines of other processes must not come in between
    stream.flush()


def rendered(
    text: str,
    stream: TextIO | None = None,
    *,
    source: Source | None = None,
    kind: Kind | None = None,
    level: str = "",
    attempt: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> str:
    """The line as it is written to this stream, without the end of line; without one, as it is in a file."""
    kind = kind_of(text) if kind is None else kind
    source, rank, own = _who(os.environ) if source is None else (source, None, None)
    line = Line(
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
    if log_format(os.environ) is LogFormat.JSON and source is not Source.COMMAND:
        return as_json(line)
    shown, terminal = as_text(line), stream is not None and _is_terminal(stream)
    if has_colour(os.environ, terminal=terminal):
        shown = painted(shown, kind)
    if rewrites(os.environ, terminal=terminal):  # a wait may have left its line there
        shown = shown.replace("\n", f"{CLEAR}\n", 1) if "\n" in shown else f"{shown}{CLEAR}"
    return shown


def say_as_rank(text: str, to: TextIO | None = None) -> None:
    """For what a rank says whether or not somebody has set logging up. Nobody may be there to read it."""
    with contextlib.suppress(OSError, ValueError):
        speak(text, to=to)


def _who(environ: Mapping[str, str]) -> tuple[Source, int | None, int | None]:
    """Who a process is that is no launcher: its rank and its attempt, as far as its environment tells."""
    rank = environ.get("RANK", "")
    attempt = None
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        found = json.loads(environ.get(_LAUNCH, "null")).get("attempt")
        attempt = found if isinstance(found, int) else None
    if rank.isdecimal():
        return Source.RANK, int(rank), attempt
    return Source.SCRIPT, None, attempt


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):
        return False


def _width(stream: TextIO) -> int:
    """Columns; a line that is longer cannot be written over."""
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        return 80


class LiveLine:
    """Tells of one wait while it goes on. Called at every look of whoever waits; most calls say nothing.

    On a terminal the line is written over: the cursor is left at its beginning, so whatever is printed next
    takes its place, and nobody has to know of it.
    """

    def __init__(self, source: Source | None = None, *, attempt: int | None = None) -> None:
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
                kind=Kind.WAIT,
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
