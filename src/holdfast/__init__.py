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
    from holdfast.worker.batches import GlobalBatches
    from holdfast.worker.nan_detector import NaNDetector

__all__ = ["ExitCode", "GlobalBatches", "HoldfastError", "NaNDetector", "Run", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Run":
        from holdfast.run import Run

        return Run
    if name == "GlobalBatches":
        from holdfast.worker.batches import GlobalBatches

        return GlobalBatches
    if name == "NaNDetector":
        from holdfast.worker.nan_detector import NaNDetector

        return NaNDetector
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
