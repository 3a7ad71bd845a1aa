"""Holdfast keeps long PyTorch training runs alive, correctly.

`import holdfast` is light: what is exported here is imported, and torch with it, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast._version import __version__
from holdfast.errors import HoldfastError, RunEnded, Stopped
from holdfast.exit_codes import ExitCode
from holdfast.speaking import install as _install

if TYPE_CHECKING:
    from holdfast.checkpoint.resolver import resolve_resume
    from holdfast.cluster.slurm import SlurmJob
    from holdfast.cluster.slurm import current_job as current_slurm_job
    from holdfast.control.handover import progress
    from holdfast.health.gpu import check_gpus
    from holdfast.health.node import check_node
    from holdfast.health.ping import LivenessPing
    from holdfast.health.storage import check_storage
    from holdfast.inprocess.restartable import restartable
    from holdfast.run import Run
    from holdfast.scope import current as restart_scope
    from holdfast.worker.batches import GlobalBatches
    from holdfast.worker.nan_detector import NaNDetector
    from holdfast.worker.shutdown_handler import ShutdownHandler
    from holdfast.worker.straggler_detector import StragglerDetector

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

_HOMES = {
    "GlobalBatches": "holdfast.worker.batches",
    "LivenessPing": "holdfast.health.ping",
    "NaNDetector": "holdfast.worker.nan_detector",
    "Run": "holdfast.run",
    "ShutdownHandler": "holdfast.worker.shutdown_handler",
    "SlurmJob": "holdfast.cluster.slurm",
    "StragglerDetector": "holdfast.worker.straggler_detector",
    "check_gpus": "holdfast.health.gpu",
    "check_node": "holdfast.health.node",
    "check_storage": "holdfast.health.storage",
    "current_slurm_job": "holdfast.cluster.slurm:current_job",
    "progress": "holdfast.control.handover",
    "resolve_resume": "holdfast.checkpoint.resolver",
    "restart_scope": "holdfast.scope:current",
    "restartable": "holdfast.inprocess.restartable",
}
"""Where what is imported on first use lives; after a colon, its name there if that is another."""


_install()  # what Holdfast logs, and nobody takes, becomes lines with a time and a rank


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    module, _, other = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), other or name)
