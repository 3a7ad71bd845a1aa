"""The file whose appearance asks for a stop.

Guarantee: looking for it never ends a run. It may be on a file system that answers with an error for a while
(a stale handle, a lost server): then nobody is asked to stop by it, which is told once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.errors import UsageError


class StopFile:
    """For whoever looks for it again and again."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path = path
        self._tell = tell
        self._told = False

    def is_there(self) -> bool:
        try:
            return _exists(self.path)
        except OSError as error:
            if not self._told:
                self._told = True
                why = error.strerror or error
                self._tell(
                    f"the stop file {self.path} cannot be looked for: {why}; it asks for nothing meanwhile"
                )
            return False


def refuse_stop_file(path: Path) -> None:
    """One that is there before the start would end the run at once; somebody forgot it."""
    try:
        there = _exists(path)
    except OSError as error:
        raise UsageError(
            f"the stop file {path} cannot be looked for: {error.strerror or error}. Set stop.stop_file to a "
            "path that can be"
        ) from error
    if there:
        raise UsageError(
            f"the stop file {path} is there already, so this run would stop before it trains. Remove it "
            "when the run is to go on, then start again"
        )


def _exists(path: Path) -> bool:
    """Unlike `Path.exists`, which in some releases of Python takes any error for a no."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
