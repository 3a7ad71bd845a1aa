"""What a rank leaves behind when an exception ends it: error file, exit code, and a traceback folded away.

torch's launcher names an error file for each rank, but only functions wrapped with its decorator write one,
with times in whole seconds. This hook writes it for any uncaught exception, before anything else can hang, in
the same form, with the exact time, and with the classes and numbers of the exception and of all that led to
it. An error raised on purpose also sets its own exit code. If a rank ended only because it lost another, its
traceback goes to a file (`fold`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import msgspec

from holdfast.base import Bounded, Verbosity, replace_atomic, say_as_rank, speak, verbosity
from holdfast.errors import HoldfastError
from holdfast.policy import MOST_TOLD, Frame, Raised, loss_of_peer, where_of
from holdfast.record import LaunchInfo

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

MOST_RAISED = 8
"""How many exceptions of one chain are written."""
MOST_TYPES = 8
MOST_TEXT = 4000
"""Characters of one exception's message."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class CrashHook:
    """Goes in front of the current excepthook; calls `on_crash`, if given, once the error file is written."""

    _folding: BaseException | None = None
    """What any hook has put away: a run's hook may lie inside that of a restartable function."""

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
        """Always call the hooks before this one, but keep them from printing what is only a consequence."""
        folded = None
        if CrashHook._folding is not error:  # otherwise a later hook has seen to it
            folded = fold(error, msgspec.convert(chain_of(error), list[Raised]))
        if folded is None:
            self._previous(kind, error, trace)
            return
        CrashHook._folding = error
        with put_away(folded):
            self._previous(kind, error, trace)

    def remove(self) -> None:
        """Stop calling anybody; the hook itself is gone unless another was put in front of it."""
        self._on_crash = None
        if sys.excepthook is self._own:
            sys.excepthook = self._previous


def chain_of(error: BaseException, longest: int = MOST_TEXT) -> list[dict[str, Any]]:
    """An exception and what led to it, outermost first, as `policy.evidence.Raised` has them."""
    found: list[dict[str, Any]] = []
    waiting: list[BaseException] = [error]
    seen: set[int] = set()
    here = _directory()
    while waiting and len(found) < MOST_RAISED:
        raised = waiting.pop(0)
        if id(raised) in seen:
            continue
        seen.add(id(raised))
        said = _said(raised)
        number = getattr(raised, "errno", None) if isinstance(raised, OSError) else None
        found.append(
            {
                "types": _types(type(raised)),
                "message": said[: min(longest, MOST_TEXT)],
                "errno": number if isinstance(number, int) else None,
                "where": where_of(_frames(raised), said, here),
            }
        )
        if isinstance(raised, BaseExceptionGroup):
            waiting += raised.exceptions
        before = raised.__cause__ or (None if raised.__suppress_context__ else raised.__context__)
        if before is not None:
            waiting.append(before)
    return found


def _types(kind: type[BaseException]) -> list[str]:
    """A class and what it derives from, up to but not including Exception."""
    above = (Exception, BaseException, object)
    names = [_name(one) for one in kind.__mro__ if one not in above]
    return names[:MOST_TYPES] or [kind.__qualname__]


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _frames(error: BaseException) -> list[Frame]:
    """Where it was raised, innermost last; a line that cannot be compiled counts as the innermost."""
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
    """Its message, in whatever form its class gives it, within bounds."""
    return _said(error)[:MOST_TEXT]


def _said(error: BaseException) -> str:
    """Its message, with as much of another process's traceback as may have to be examined."""
    try:
        text = str(error)
    except Exception as problem:  # noqa: BLE001 - the user's own class; its name must do
        text = f"(its text cannot be had: {type(problem).__name__})"
    return text[:MOST_TOLD].encode(errors="replace").decode()


def write_error_file(error: BaseException) -> None:
    """Write the launcher's error file, if it wants one and nobody has written it yet."""
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


# A traceback that only tells of a lost peer is put away, and one line says where.
#
# When a rank dies, every other rank fails where it waits for it, with thirty lines that end in gloo's or
# NCCL's words. Those are the first and longest thing that a user sees, and none of them is the cause.
#
# Guarantee: nothing is lost. A traceback is left out only once it is in a file that outlives the launch, and
# only if `holdfast run` will report the cause; whatever is not clearly such a consequence is shown as usual.


FILE_LIMIT = 1024 * 1024
"""How many characters of a traceback are kept: half from its beginning, half from its end."""
PATIENCE = 5.0
"""Seconds that the file may take. A dead mount must not keep a rank from ending, nor hide its traceback."""
LONGEST = 160
"""How many characters of the exception the line shows."""
_TORCHS = "_distributed_excepthook"


class Folded(NamedTuple):
    """A traceback that was put away."""

    path: Path
    text: str


def fold(error: BaseException, errors: Sequence[Raised]) -> Folded | None:
    """Put the traceback of an uncaught exception away and say so; None if it is to be printed.

    `errors`: the exception and what led to it, as the error file has them.
    """
    lost = loss_of_peer(errors) if isinstance(error, Exception) else None
    target = _target() if lost is not None else None
    if lost is None or target is None or verbosity(os.environ) is Verbosity.DEBUG:
        return None
    text = "".join(traceback.format_exception(error))
    if not _written(target, text):
        return None
    lines = len(text.splitlines())
    speak(
        f"ended because it lost another rank ({_short(lost)}): a consequence, not the "
        f"cause; its traceback, {lines} lines, is in {target}",
        to=_stream(),
    )
    return Folded(target, text)


@contextlib.contextmanager
def put_away(folded: Folded) -> Iterator[None]:
    """What others' hooks print meanwhile goes to the file, if it is more than the traceback there."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    finally:
        if _bare(printed.getvalue()) not in _bare(folded.text):
            _written(folded.path, f"{folded.text}\n{printed.getvalue()}")


def show_all() -> None:
    """Print what torch holds back: its hook prints only once ours has returned, which an exit never does."""
    if _stream() is not sys.stderr and isinstance(sys.stderr, io.StringIO):
        with contextlib.suppress(OSError, ValueError):
            _stream().write(sys.stderr.getvalue())
            _stream().flush()


def _stream() -> TextIO:
    """Standard error itself, even while torch's hook collects what is written to prefix it with the rank."""
    collects = isinstance(sys.stderr, io.StringIO) and getattr(sys.excepthook, "__name__", "") == _TORCHS
    return sys.__stderr__ if collects and sys.__stderr__ is not None else sys.stderr


def _target() -> Path | None:
    """Where the traceback may go; None if nobody will report the cause, or there is no peer to lose."""
    try:
        launched = LaunchInfo.from_environment(os.environ)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (HoldfastError, LookupError, ValueError):
        return None
    if launched is None or not os.environ.get("TORCHELASTIC_ERROR_FILE") or world < 2:
        return None
    # Beside the copy of the error file that the agent keeps.
    attempt = Path(launched.run_dir) / "attempts" / f"{launched.attempt:06d}"
    return attempt / "errors" / f"rank_{rank:06d}.traceback"


def _written(target: Path, text: str) -> bool:
    half = FILE_LIMIT // 2
    if len(text) > FILE_LIMIT:
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters are left out here …\n{text[-half:]}"

    def write() -> bool:
        target.parent.mkdir(exist_ok=True)  # not its parents: a run that was removed stays removed
        replace_atomic(target, text.encode(errors="replace"), durable=False)
        return True

    try:
        writing = Bounded(write, "traceback")
        return writing.ended(PATIENCE) and writing.result()
    except (OSError, RuntimeError):  # the latter: no thread can be started
        return False


def _bare(text: str) -> str:
    """The text without what torch puts in front of each line."""
    prefix = f"[rank{os.environ.get('RANK', '')}]:"
    return "\n".join(line.removeprefix(prefix).strip() for line in text.splitlines()).strip()


def _short(lost: Raised) -> str:
    """Its class and its first sentence, without the place in torch's sources."""
    first = next(iter(lost.message.strip().splitlines()), "")
    if first.startswith("["):
        first = first.partition("] ")[2] or first
    told = first.partition(". ")[0].rstrip(". ")
    kind = lost.types[0].rpartition(".")[2] if lost.types else "error"
    return (f"{kind}: {told}" if told else kind)[:LONGEST]
