"""The errors Holdfast raises. Each carries the exit code that a process ends with when nobody catches it.

A message says what happened, to what, what was expected and found, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from holdfast.exit_codes import ExitCode


class RunEnded(BaseException):
    """Base of everything with which Holdfast ends a run: each `HoldfastError`, and `Stopped`.

    For a script that has something to do at its end, whichever it is. It is no Exception by itself.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class HoldfastError(RunEnded, Exception):
    """Base of every error raised on purpose."""


class ConfigError(HoldfastError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""

    exit_code = ExitCode.USAGE


class UsageError(HoldfastError):
    """The API was called in a way that cannot work."""

    exit_code = ExitCode.USAGE


class ControlError(HoldfastError):
    """The control directory is missing, unreadable, unwritable or of another format."""

    exit_code = ExitCode.CONTROL_UNUSABLE


class StorageError(ControlError):
    """The run's storage is full, failing, away or stuck. Nothing is known to be wrong with the run."""

    exit_code = ExitCode.STORAGE_FAILED


class RunIsLiveError(HoldfastError):
    """Somebody else holds the run's lease and keeps renewing it."""

    exit_code = ExitCode.RUN_IS_LIVE


class LeaseLostError(HoldfastError):
    """A higher epoch exists: this attempt may no longer commit, delete, move a pointer or decide."""

    exit_code = ExitCode.LEASE_LOST


class NoProcessesError(HoldfastError):
    """No process or thread can be started: the user's limit, or the container's, is reached."""

    exit_code = ExitCode.NO_CAPACITY

    def __init__(self, what: str) -> None:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "none" if soft == resource.RLIM_INFINITY else str(soft)
        running = _run_by_this_user()
        has = f" (now {running})" if running else ""
        super().__init__(
            f"no more processes or threads can be started ({what}): `ulimit -u` is {limit} for all that this "
            f"user runs here{has}, and a container may have a limit of its own (pids.max). Raise it, or end "
            "something else, then launch again"
        )


def _run_by_this_user() -> int:
    """Processes and their threads, as the limit counts them; 0 if that cannot be seen."""
    import os
    from pathlib import Path

    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                found += (process / "task").stat().st_nlink - 2
        except OSError:  # it has ended, or is hidden
            continue
    return found


class DecisionTimeoutError(HoldfastError):
    """A group decision was not learnt before its deadline; nobody chooses alone."""

    exit_code = ExitCode.DECISION_TIMEOUT


class NoValidRungError(HoldfastError):
    """Checkpoints exist and none may be used; starting from nothing was not asked for."""

    exit_code = ExitCode.NO_VALID_RUNG


class SaveFailedError(HoldfastError):
    """A checkpoint was not committed. Every older checkpoint is untouched."""

    exit_code = ExitCode.SAVE_FAILED


class SaveStorageError(SaveFailedError):
    """The same, and what failed is the storage alone."""

    exit_code = ExitCode.STORAGE_FAILED


class TornSnapshotError(SaveFailedError):
    """What was staged is not what was on the device when the snapshot was taken."""


class RerunWantedError(HoldfastError):
    """A result was rejected, and who starts the next attempt has to vary something. See `Rejection`."""

    exit_code = ExitCode.RERUN_WANTED


class ValidationFailedError(HoldfastError):
    """A result was rejected, and starting again would not help."""

    exit_code = ExitCode.VALIDATION_FAILED


class BudgetSpentError(HoldfastError):
    """Too many launches in a row made no progress: this one is not begun."""

    exit_code = ExitCode.BUDGET_SPENT


class IncompleteStateError(HoldfastError):
    """State does not match the checkpoint: a part or key is missing, extra, or of another shape."""

    exit_code = ExitCode.STATE_MISFIT


class CheckpointError(HoldfastError):
    """A checkpoint or one of its files is not what its manifest says."""


class PeerError(HoldfastError):
    """A peer's server could not be reached or trusted, or did not do what it was asked. Never ends a run."""


class AlteredCopyError(PeerError):
    """A copy at the sender is not what its digests say any more: the copy is bad, not the peer."""


class PingFailedError(HoldfastError):
    """Ranks did not answer a liveness ping in time. The message names them."""

    exit_code = ExitCode.DECISION_TIMEOUT
    missing: Sequence[int] = ()
    """The ranks that did not answer; empty if that could not be learnt."""
    seconds: float = 0.0


class HandedOverError(HoldfastError):
    """The function was not started again in these processes. The message says why, and what befell whom."""

    exit_code = ExitCode.HANDED_OVER


class Stopped(RunEnded, SystemExit):
    """The run was asked to stop and has done so: what ends the process is this, unless it is caught.

    A SystemExit, so that neither `except Exception` takes it for a failure nor code after the loop runs as if
    training were done.
    """

    exit_code = ExitCode.STOPPED

    def __init__(self, step: int, why: str) -> None:
        super().__init__(int(ExitCode.STOPPED))
        self.step = step
        self.why = why

    def __str__(self) -> str:
        return f"stopped after step {self.step}: {self.why}"
