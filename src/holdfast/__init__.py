"""Holdfast keeps long PyTorch training runs alive, correctly.

`import holdfast` is light: what is exported here is imported, and torch with it, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base import install as _install
from holdfast.base import offers
from holdfast.base import watch_imports as _watch_imports
from holdfast.errors import ExitCode, HoldfastError, RunEnded, Stopped

if TYPE_CHECKING:
    from holdfast.base import current as restart_scope
    from holdfast.checkpoint.choose import resolve_resume
    from holdfast.checkpoint.state import Split
    from holdfast.cluster import SlurmJob
    from holdfast.cluster import current_job as current_slurm_job
    from holdfast.health import LivenessPing, check_gpus, check_node, check_storage
    from holdfast.record import progress
    from holdfast.restart import restartable
    from holdfast.run import Run
    from holdfast.stop import ShutdownHandler
    from holdfast.train.check import NaNDetector
    from holdfast.train.data import GlobalBatches
    from holdfast.train.stragglers import StragglerDetector
else:
    __getattr__ = offers(__name__)

__all__ = [
    "ExitCode",
    "GlobalBatches",
    "HoldfastError",
    "LivenessPing",
    "NaNDetector",
    "Run",
    "RunEnded",
    "ShutdownHandler",
    "SlurmJob",
    "Split",
    "Stopped",
    "StragglerDetector",
    "__version__",
    "check_gpus",
    "check_node",
    "check_storage",
    "current_slurm_job",
    "progress",
    "resolve_resume",
    "restart_scope",
    "restartable",
]

__version__ = "0.1.0"


_watch_imports()  # torch's and our own take a good part of every restart
_install()  # what Holdfast logs, and nobody takes, becomes lines with a time and a rank
