"""The errors that Holdfast raises, and every exit code, in one table.

A message says what happened, to what, what was expected and found, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar

# Every exit code that Holdfast uses, in one table. `docs/reference/exit-codes.md` is checked against it.


class ExitCode(IntEnum):
    """A code that a worker or the `holdfast` command ends with. A shell shows signal n as 128 + n."""

    OK = 0
    FAILED = 1
    USAGE = 2
    RERUN_WANTED = 16
    VALIDATION_FAILED = 17
    NO_VALID_RUNG = 18
    LEASE_LOST = 19
    RUN_IS_LIVE = 20
    DECISION_TIMEOUT = 21
    BUDGET_SPENT = 22
    SAVE_FAILED = 23
    CONTROL_UNUSABLE = 24
    STATE_MISFIT = 25
    NOTHING_LEFT = 26
    REQUEUE_WANTED = 27
    NO_CAPACITY = 28
    PAUSED_TOO_LONG = 29
    STORE_LOST = 30
    STOPPED = 31
    STOPPED_UNSAVED = 32
    HANDED_OVER = 33
    STORAGE_FAILED = 34


MEANINGS: dict[ExitCode, tuple[str, str]] = {
    ExitCode.OK: ("The run finished, or the checkpoint is sound.", "nothing"),
    ExitCode.FAILED: (
        "The job failed and recovery decided to stop, or the checkpoint is not sound.",
        "read `holdfast why`: it names the cause and what it rests on",
    ),
    ExitCode.USAGE: (
        "Wrong flag, setting or path; nothing was started or changed.",
        "fix what the message names",
    ),
    ExitCode.RERUN_WANTED: (
        "A rejected step asks to be re-run on another device.",
        "the launcher restarts; without it, start the run again: it varies what it can",
    ),
    ExitCode.VALIDATION_FAILED: (
        "Validation failed for a reason that a restart cannot cure.",
        "`holdfast journal` names the step and what was tried; look at its data, then launch again",
    ),
    ExitCode.NO_VALID_RUNG: (
        "The run had checkpoints and none of them may be used.",
        "`holdfast ckpt ls`; resume_from a named one, or resume_from = 'fresh'",
    ),
    ExitCode.LEASE_LOST: (
        "A newer attempt holds the run; this one may not write any more.",
        "nothing: the newer attempt goes on",
    ),
    ExitCode.RUN_IS_LIVE: (
        "Another launcher holds this run directory and is alive.",
        "stop it first, or use another --run-dir",
    ),
    ExitCode.DECISION_TIMEOUT: (
        "A rank or node did not learn the group's decision in time.",
        "the launcher restarts; look for the rank that never answered",
    ),
    ExitCode.BUDGET_SPENT: (
        "Restarts, or launches, without progress used up the budget.",
        "fix the cause that `holdfast why` names, then launch again; the message says what lets it in",
    ),
    ExitCode.SAVE_FAILED: (
        "Saving failed too often in a row, or the last save failed.",
        "check space and permissions of the checkpoint root",
    ),
    ExitCode.CONTROL_UNUSABLE: (
        "The control directory cannot be read or written.",
        "check the path and its permissions",
    ),
    ExitCode.STATE_MISFIT: (
        "The script's state does not fit the checkpoint, or could not be loaded from one that is saved.",
        "track what was saved, with the same shapes and ranks, or resume_from = 'fresh'",
    ),
    ExitCode.NOTHING_LEFT: (
        "The same failure came back, and recovery has nothing left to vary against it.",
        "read `holdfast why`: it lists what was tried; fix the cause, then launch again",
    ),
    ExitCode.REQUEUE_WANTED: (
        "The run cannot go on with the nodes it has, and wants to be queued again.",
        "launch it on other nodes; a scheduler that queues it again does that by itself",
    ),
    ExitCode.NO_CAPACITY: (
        "There were too few usable nodes, and no more came in time.",
        "bring nodes, readmit excluded ones, or allow fewer, then launch again",
    ),
    ExitCode.PAUSED_TOO_LONG: (
        "Recovery was paused by an operator and nobody ended the pause in time.",
        "`holdfast control unpause RUN`, then launch again",
    ),
    ExitCode.STORE_LOST: (
        "The host through which the nodes meet is gone or cut off, and no other endpoint is left.",
        "start the same command again; name several endpoints to survive this",
    ),
    ExitCode.STOPPED: (
        "The run was asked to stop, and its state is saved.",
        "start the same command again to go on from there",
    ),
    ExitCode.STOPPED_UNSAVED: (
        "The run was asked to stop and ended without saving: there was no time to, or a rank failed.",
        "start the same command again: it goes on from an earlier checkpoint; `holdfast journal` says why",
    ),
    ExitCode.HANDED_OVER: (
        "The function could not start again in these processes; the message and the journal say why.",
        "the launcher restarts; without it, start the run again",
    ),
    ExitCode.STORAGE_FAILED: (
        "The run's storage could not be written; nothing is known to be wrong with the run.",
        "look at the storage, then start it again; a scheduler that queues it again does that by itself",
    ),
}

NOT_ALERTED: dict[ExitCode, str] = {
    ExitCode.OK: "the run finished",
    ExitCode.USAGE: "nothing was started",
    ExitCode.LEASE_LOST: "the run goes on elsewhere",
    ExitCode.RUN_IS_LIVE: "the run goes on elsewhere",
}
"""Ends of a launch about which nobody is alerted, and why. After any other, the run waits for people."""


class RunEnded(BaseException):
    """Base of everything with which Holdfast ends a run: each `HoldfastError`, and `Stopped`.

    For a script that has something to do at its end, however it ends. Not an Exception by itself.
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

    def __init__(self, what: str, running: int = 0) -> None:
        """`running`: processes and threads of this user here, as the limit counts them; 0 if not known."""
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "none" if soft == resource.RLIM_INFINITY else str(soft)
        has = f" (now {running})" if running else ""
        super().__init__(
            f"no more processes or threads can be started ({what}): `ulimit -u` is {limit} for all that this "
            f"user runs here{has}, and a container may have a limit of its own (pids.max). Raise it, or end "
            "something else, then launch again"
        )


class DecisionTimeoutError(HoldfastError):
    """A group decision was not learned by its deadline; nobody chooses alone."""

    exit_code = ExitCode.DECISION_TIMEOUT


class NoValidRungError(HoldfastError):
    """Checkpoints exist and none may be used; starting from nothing was not asked for."""

    exit_code = ExitCode.NO_VALID_RUNG


class SaveFailedError(HoldfastError):
    """A checkpoint was not committed. Every older checkpoint is untouched."""

    exit_code = ExitCode.SAVE_FAILED


class SaveStorageError(SaveFailedError):
    """A checkpoint was not committed, and only the storage failed."""

    exit_code = ExitCode.STORAGE_FAILED


class TornSnapshotError(SaveFailedError):
    """The staged bytes are not those that were on the device when the snapshot was taken."""


class RerunWantedError(HoldfastError):
    """A result was rejected; whoever starts the next attempt has to vary something. See `Rejection`."""

    exit_code = ExitCode.RERUN_WANTED


class ValidationFailedError(HoldfastError):
    """A result was rejected, and starting again would not help."""

    exit_code = ExitCode.VALIDATION_FAILED


class BudgetSpentError(HoldfastError):
    """Too many launches in a row made no progress: this one does not begin."""

    exit_code = ExitCode.BUDGET_SPENT


class IncompleteStateError(HoldfastError):
    """State does not match the checkpoint: a part or key is missing, extra, or of another shape."""

    exit_code = ExitCode.STATE_MISFIT


class CheckpointError(HoldfastError):
    """A checkpoint or one of its files is not what its manifest says."""


class PeerError(HoldfastError):
    """A peer's server could not be reached or trusted, or did not do what it was asked. Never ends a run."""


class AlteredCopyError(PeerError):
    """A copy at the sender no longer matches its digests: the copy is bad, not the peer."""


class PingFailedError(HoldfastError):
    """Ranks did not answer a liveness ping in time. The message names them."""

    exit_code = ExitCode.DECISION_TIMEOUT
    missing: Sequence[int] = ()
    """The ranks that did not answer; empty if that could not be learned."""
    seconds: float = 0.0


class HandedOverError(HoldfastError):
    """The function was not started again in these processes. The message says why, and what befell whom."""

    exit_code = ExitCode.HANDED_OVER


class Stopped(RunEnded, SystemExit):
    """The run was asked to stop and has done so. Unless this is caught, it ends the process.

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
