"""A traceback that only tells of a lost peer is put away, and one line says where.

When a rank dies, every other one fails where it waits for it, with thirty lines that end in gloo's or NCCL's
words. Those are the first and longest thing that a user sees, and none of them is the cause.

Guarantee: nothing is lost. A traceback is left out only once it is in a file that outlives the launch, and
only where `holdfast run` will tell the cause; whatever is not clearly such a consequence is shown as ever.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from holdfast.bounded import Bounded
from holdfast.control.handover import LaunchInfo
from holdfast.errors import HoldfastError
from holdfast.files import replace_atomic
from holdfast.policy.classify import loss_of_peer
from holdfast.policy.evidence import Raised
from holdfast.speaking import speak
from holdfast.verbosity import Verbosity, verbosity

FILE_LIMIT = 1024 * 1024
"""Characters of a traceback that are kept: half of them from its beginning, half from its end."""
PATIENCE = 5.0
"""Seconds that the file may take. A dead mount must not keep a rank from ending, nor hide its traceback."""
LONGEST = 160
"""Characters of the exception in the line."""
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
    """What the hooks of others print meanwhile goes to the file, if it is more than the traceback there."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    finally:
        if _bare(printed.getvalue()) not in _bare(folded.text):
            _written(folded.path, f"{folded.text}\n{printed.getvalue()}")


def show_all() -> None:
    """Print what torch holds back: its hook prints after ours has returned, which an exit does not do."""
    if _stream() is not sys.stderr and isinstance(sys.stderr, io.StringIO):
        with contextlib.suppress(OSError, ValueError):
            _stream().write(sys.stderr.getvalue())
            _stream().flush()


def _stream() -> TextIO:
    """Standard error itself, also while torch's hook collects what is written to put the rank before it."""
    collects = isinstance(sys.stderr, io.StringIO) and getattr(sys.excepthook, "__name__", "") == _TORCHS
    return sys.__stderr__ if collects and sys.__stderr__ is not None else sys.stderr


def _target() -> Path | None:
    """Where the traceback may go; None where nobody will tell the cause, or there is no peer to lose."""
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
        target.parent.mkdir(exist_ok=True)  # not its parents: a run that was removed stays so
        replace_atomic(target, text.encode(errors="replace"), durable=False)
        return True

    try:
        writing = Bounded(write, "traceback")
        return writing.ended(PATIENCE) and writing.result()
    except (OSError, RuntimeError):  # the latter: no thread can be had
        return False


def _bare(text: str) -> str:
    """Without what torch puts before each line."""
    prefix = f"[rank{os.environ.get('RANK', '')}]:"
    return "\n".join(line.removeprefix(prefix).strip() for line in text.splitlines()).strip()


def _short(lost: Raised) -> str:
    """Its class and what it says first, without the place in torch's sources."""
    first = next(iter(lost.message.strip().splitlines()), "")
    if first.startswith("["):
        first = first.partition("] ")[2] or first
    told = first.partition(". ")[0].rstrip(". ")
    kind = lost.types[0].rpartition(".")[2] if lost.types else "error"
    return (f"{kind}: {told}" if told else kind)[:LONGEST]
