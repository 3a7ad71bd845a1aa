"""The file whose appearance asks for a stop.

Guarantee: looking for it never ends a run, nor holds one up. It may be on a file system that answers with an
error for a while, or not at all (a stale handle, a lost server): then nobody is asked to stop by it, which is
told once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.bounded import Look
from holdfast.errors import UsageError


class StopFile:
    """For whoever looks for it again and again."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path = path
        self._tell = tell
        self._told = False
        self._look = Look(lambda: _exists(self.path), "stop-file")

    def is_there(self) -> bool:
        looked = self._look.take()
        if looked is None:
            return self._cannot("its file system does not answer")
        try:
            return looked.result()
        except OSError as error:
            return self._cannot(str(error.strerror or error))

    def _cannot(self, why: str) -> bool:
        if not self._told:
            self._told = True
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
