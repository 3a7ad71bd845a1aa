"""The line that is to blame: which frame of a traceback is the user's own.

Guarantee: pure and total. A traceback ends where the error was raised, which is most often inside of torch or
of another package; whoever reads it looks for the last line that is theirs. Paths alone decide, so that the
text of a traceback tells the same as the traceback itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

TRACEBACK = "Traceback (most recent call last):"
LINKED = re.compile(r"^(The above exception was the direct cause|During handling of the above exception)")
MOST_WHERE = 200
"""Characters of a place as it is kept."""
MOST_TOLD = 65_536
"""Characters of a message in which another process's traceback is looked for."""

_FRAME = re.compile(
    r'^[ \t|+]*File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<function>[^\n]+))?$', re.MULTILINE
)
_OWN = __file__.rpartition("/policy/")[0] + "/"
_INSTALLED = re.compile(
    r"(^|/)(site|dist)-packages/|(^|/)lib(32|64)?/python3(\.\d+)?t?/|(^|/)python3\d+t?\.zip/"
    # torch built from its sources lies where its sources are
    r"|(^|/)torch/(_\w+|amp|ao|autograd|backends|cuda|distributed|distributions|export|fx|func|functional"
    r"|jit|library|linalg|multiprocessing|nested|nn|onnx|optim|overrides|profiler|random|serialization"
    r"|sparse|storage|utils|xpu)(/|\.py$)"
)
_TYPED_IN = ("<string>", "<stdin>", "<ipython-input")
"""Names of no file that are a user's own lines all the same; others (`<frozen runpy>`) are not."""
_WHERE = re.compile(r"(?P<path>.*):\d+( in .*)?", re.DOTALL)


class Frame(NamedTuple):
    path: str
    line: int
    function: str = ""
    """Empty of a line that could not even be compiled."""


def frames_in(text: str) -> list[Frame]:
    """The frames in the text of a traceback, in its order."""
    return [
        Frame(found["path"], int(found["line"][:9]), (found["function"] or "").strip())
        for found in _FRAME.finditer(text)
    ]


def is_users(path: str) -> bool:
    """Whether a file is neither torch's, Holdfast's, another package's nor Python's own."""
    if path.startswith("<"):
        return path.startswith(_TYPED_IN)
    return bool(path) and not path.startswith(_OWN) and not _INSTALLED.search(path)


def where_of(frames: Sequence[Frame], message: str = "", directory: str = "") -> str:
    """The last of a user's frames, as `train.py:44 in __getitem__`; empty if there is no frame to name.

    A message that holds the traceback of another process (of one that loads data, say) knows better than the
    frames that waited for it. Without a frame of the user's: the last one that is not Holdfast's. Paths below
    `directory` are shown as from there.
    """
    theirs = _last_of_user(_told_in(message[:MOST_TOLD])) or _last_of_user(frames)
    others = (frame for frame in reversed(frames) if not frame.path.startswith(_OWN))
    chosen = theirs or next(others, None)
    return _shown(chosen, directory) if chosen is not None else ""


def is_users_place(where: str) -> bool:
    """Whether what `where_of` gave is a user's own line."""
    found = _WHERE.fullmatch(where)
    return found is not None and is_users(found["path"])


def clipped(where: str) -> str:
    """Within bounds, and on one line; of one that is too long the end says more."""
    text = "".join(one if one.isprintable() else "?" for one in where[-2 * MOST_WHERE :])
    return text if len(where) <= MOST_WHERE else f"…{text[1 - MOST_WHERE :]}"


def _last_of_user(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in reversed(frames) if is_users(frame.path)), None)


def _told_in(message: str) -> list[Frame]:
    """The frames of the first error in another process's traceback: what followed from it comes below it."""
    lines = message.partition(TRACEBACK)[2].splitlines()
    end = next((number for number, line in enumerate(lines) if LINKED.match(line)), len(lines))
    return frames_in("\n".join(lines[:end]))


def _shown(frame: Frame, directory: str) -> str:
    below = f"{directory.rstrip('/')}/"
    path = frame.path.removeprefix(below) if len(below) > 1 else frame.path
    place = f"{path.removeprefix('./')}:{frame.line}"
    return clipped(f"{place} in {frame.function}" if frame.function else place)
