"""What a rank leaves behind when an exception ends it: the error file, and the documented exit code.

torch's launcher names an error file for each rank but only functions wrapped with its decorator write one,
with times in whole seconds. This hook writes it for any uncaught exception, before anything else can hang, in
the same form, with the exact time, and with the classes and numbers of the exception and of all that led to
it. An error raised on purpose also becomes its own exit code. Where all that ended a rank is the loss of
another, its traceback goes to a file (`folding`).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from holdfast.errors import HoldfastError
from holdfast.policy.evidence import Raised
from holdfast.policy.frames import MOST_TOLD, Frame, where_of
from holdfast.speaking import say_as_rank
from holdfast.worker.folding import fold, put_away, show_all

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

MOST_RAISED = 8
"""Exceptions of one chain that are written."""
MOST_TYPES = 8
MOST_TEXT = 4000
"""Characters of one exception's message."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class CrashHook:
    """Goes before the present excepthook; `on_crash` is told, if given, once the error file is written."""

    _folding: BaseException | None = None
    """What any of them has put away: there may be one of a run inside of one of a restartable function."""

    def __init__(self, on_crash: Callable[[BaseException], None] | None = None) -> None:
        self._on_crash = on_crash
        self._previous: Hook = sys.excepthook
        self._own: Hook = self._hook
        sys.excepthook = self._own

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        write_error_file(error)
        if self._on_crash is not None:
            self._on_crash(error)
        self._show(kind, error, trace)
        if isinstance(error, HoldfastError):
            if CrashHook._folding is not error:
                show_all()
            sys.stderr.flush()
            raise SystemExit(int(error.exit_code))

    def _show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The hooks before this one are told in any case; what is only a consequence they do not print."""
        folded = None
        if CrashHook._folding is not error:  # else a later one has seen to it
            folded = fold(error, msgspec.convert(chain_of(error), list[Raised]))
        if folded is None:
            self._previous(kind, error, trace)
            return
        CrashHook._folding = error
        with put_away(folded):
            self._previous(kind, error, trace)

    def remove(self) -> None:
        """Nobody is told any more; unless another hook was put before it, it is gone."""
        self._on_crash = None
        if sys.excepthook is self._own:
            sys.excepthook = self._previous


def chain_of(error: BaseException, longest: int = MOST_TEXT) -> list[dict[str, Any]]:
    """An exception and what led to it, the outermost first, as `policy.evidence.Raised` has them."""
    found: list[dict[str, Any]] = []
    waiting: list[BaseException] = [error]
    seen: set[int] = set()
    here = _directory()
    while waiting and len(found) < MOST_RAISED:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        said = _said(one)
        number = getattr(one, "errno", None) if isinstance(one, OSError) else None
        found.append(
            {
                "types": _types(type(one)),
                "message": said[: min(longest, MOST_TEXT)],
                "errno": number if isinstance(number, int) else None,
                "where": where_of(_frames(one), said, here),
            }
        )
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        before = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if before is not None:
            waiting.append(before)
    return found


def _types(kind: type[BaseException]) -> list[str]:
    """A class and what it derives from, up to but without Exception."""
    above = (Exception, BaseException, object)
    names = [_name(one) for one in kind.__mro__ if one not in above]
    return names[:MOST_TYPES] or [kind.__qualname__]


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _frames(error: BaseException) -> list[Frame]:
    """Where it was raised, the innermost last; a line that cannot be compiled is the innermost one."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(Frame(code.co_filename, trace.tb_lineno or 0, code.co_name))
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and isinstance(error.lineno, int):
        found.append(Frame(error.filename, error.lineno))
    return found


def _directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed meanwhile
        return ""


def text_of(error: BaseException) -> str:
    """Its message, whatever its class makes of that, within bounds."""
    return _said(error)[:MOST_TEXT]


def _said(error: BaseException) -> str:
    """Its message, with as much of another process's traceback as one may have to look at."""
    try:
        text = str(error)
    except Exception as problem:  # noqa: BLE001 - the user's own class; its name must do
        text = f"(its text cannot be had: {type(problem).__name__})"
    return text[:MOST_TOLD].encode(errors="replace").decode()


def write_error_file(error: BaseException) -> None:
    """Write the launcher's error file, if there is to be one and nobody has written it yet."""
    name = os.environ.get(ERROR_FILE)
    if not name or Path(name).exists():
        return
    now = time.time()
    report = {
        "message": {
            "message": f"{type(error).__name__}: {text_of(error)}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "chain": chain_of(error),
                "timestamp": str(int(now)),
                "timestamp_exact": f"{now:.6f}",
                "exit_code": str(int(error.exit_code) if isinstance(error, HoldfastError) else 1),
            },
        }
    }
    try:
        Path(name).write_text(json.dumps(report))
    except OSError as problem:
        say_as_rank(f"cannot write the error file {name}: {problem}")
