"""Holdfast keeps long PyTorch training runs alive, correctly.

`import holdfast` is light: torch is imported when `Run` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast._version import __version__
from holdfast.errors import HoldfastError
from holdfast.exit_codes import ExitCode

if TYPE_CHECKING:
    from holdfast.run import Run

__all__ = ["ExitCode", "HoldfastError", "Run", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Run":
        from holdfast.run import Run

        return Run
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
