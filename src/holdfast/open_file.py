"""An open file that is closed whatever cuts the code which opened it.

Guarantee: between the opening and the moment at which somebody answers for the closing there is none in which
an interruption (see scope.py) loses the number of what was opened. A plain number would be lost there, and
what it stands for, with the locks on it, kept for as long as the process lives.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from holdfast.scope import critical


class OpenFile:
    """Closed at the end of its `with`, and else with its last reference."""

    def __init__(self, path: Path | str, flags: int, *, beneath: OpenFile | None = None) -> None:
        self.number = -1
        with critical():  # what comes at its end finds an object that knows what to close
            where = beneath.number if beneath is not None else None
            self.number = os.open(path, flags | os.O_CLOEXEC, dir_fd=where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Also twice."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)
