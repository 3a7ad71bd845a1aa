"""What ended an attempt: the root cause among several failures, and its kind.

Guarantee: pure and total. The same failures give the same answer whatever order they came in, and evidence
that says nothing clear is `unknown` rather than a guess.

When one rank dies, its peers fail too, often sooner as far as the agent can see: their connection is gone.
Such failures are symptoms. The root cause is the earliest failure that is not one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

import msgspec

from holdfast.exit_codes import ExitCode


class Cause(StrEnum):
    PREEMPTION = "preemption"
    """Somebody asked the worker to end: a scheduler, an operator."""
    INFRASTRUCTURE = "infrastructure"
    """Something around the job broke: a node, the network, storage, a kill from outside."""
    DEVICE = "device"
    JOB = "job"
    """The job's own doing: an exception, out of memory, divergence."""
    DATA = "data"
    CHECKPOINT = "checkpoint"
    HANG = "hang"
    UNKNOWN = "unknown"


class Failure(Protocol):
    """The part of a failure record that the policies read."""

    @property
    def rank(self) -> int: ...
    @property
    def exit_code(self) -> int: ...
    @property
    def at(self) -> float: ...
    @property
    def message(self) -> str: ...


F = TypeVar("F", bound=Failure)

KERNEL_OOM = "killed by the kernel for lack of memory"
"""How the agent's message begins when the kernel's counters say so."""

_LOST_PEER = re.compile(
    r"connection closed by peer|connection reset by peer|connection was likely closed|broken pipe"
    r"|connection refused|socket timeout|ncclremoteerror|nccl remote error|remote process exited"
    r"|a remote peer|recvvalue failed|sendbytes failed|recvbytes|distnetworkerror|diststoreerror"
    r"|decisiontimeouterror",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(r"out of memory|outofmemoryerror|\bmemoryerror\b|cannot allocate memory", re.I)
_HANG = re.compile(r"watchdog caught collective operation timeout|timed out waiting .*ms for", re.I)
_DEVICE = re.compile(
    r"uncorrectable ecc|cuda error: (?!device-side assert)|cudnn_status_execution_failed|hip error"
    r"|unspecified launch failure|\bxid\b|fallen off the bus|nccl.*unhandled cuda error",
    re.IGNORECASE,
)
_CHECKPOINT = re.compile(r"^(\w+\.)*(CheckpointError|NoValidRungError)\b")

_ASKED_TO_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2}

_BY_CODE = {
    ExitCode.RERUN_WANTED: Cause.DEVICE,
    ExitCode.VALIDATION_FAILED: Cause.JOB,
    ExitCode.NO_VALID_RUNG: Cause.CHECKPOINT,
    ExitCode.LEASE_LOST: Cause.INFRASTRUCTURE,
    ExitCode.RUN_IS_LIVE: Cause.INFRASTRUCTURE,
    ExitCode.DECISION_TIMEOUT: Cause.INFRASTRUCTURE,
    ExitCode.SAVE_FAILED: Cause.INFRASTRUCTURE,
    ExitCode.CONTROL_UNUSABLE: Cause.INFRASTRUCTURE,
}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one worker's end."""

    exit_code: int
    """As from waitpid: negative for a signal."""
    message: str = ""
    kernel_oom: bool = False


def evidence_of(failure: Failure) -> Evidence:
    return Evidence(
        exit_code=failure.exit_code,
        message=failure.message,
        kernel_oom=failure.message.startswith(KERNEL_OOM),
    )


def is_symptom(exit_code: int, message: str) -> bool:
    """Whether a failure only says that a peer was lost."""
    return exit_code == ExitCode.DECISION_TIMEOUT or bool(_LOST_PEER.search(message))


def _doubt(failure: Failure) -> int:
    """How likely a failure is a symptom of another one: 0 no, 1 perhaps, 2 yes."""
    if is_symptom(failure.exit_code, failure.message):
        return 2
    # NCCL's watchdog aborts the process when a peer is lost, and leaves no message.
    return 1 if failure.exit_code == -signal.SIGABRT else 0


def root_cause(failures: Sequence[F]) -> F:
    """The failure that the others follow from. At least one must be given."""
    return min(failures, key=lambda f: (_doubt(f), f.at, f.rank, f.exit_code, f.message))


def classify(evidence: Evidence) -> Cause:
    """The kind of a worker's end."""
    code, message = evidence.exit_code, evidence.message
    if code > 128 and code - 128 in signal.valid_signals():
        code = 128 - code  # a shell between the agent and the worker reports a signal n as 128 + n
    if evidence.kernel_oom:
        return Cause.JOB
    if code < 0:
        return _classify_signal(-code, message)
    if code in _BY_CODE:
        return _BY_CODE[ExitCode(code)]
    return _classify_message(message) or (Cause.JOB if code > 0 else Cause.UNKNOWN)


def _classify_signal(number: int, message: str) -> Cause:
    if number in _ASKED_TO_END:
        return Cause.PREEMPTION
    if number == signal.SIGKILL:
        return Cause.INFRASTRUCTURE
    return _classify_message(message) or Cause.UNKNOWN


def _classify_message(message: str) -> Cause | None:
    for pattern, cause in (
        (_OUT_OF_MEMORY, Cause.JOB),
        (_HANG, Cause.HANG),
        (_LOST_PEER, Cause.INFRASTRUCTURE),
        (_DEVICE, Cause.DEVICE),
        (_CHECKPOINT, Cause.CHECKPOINT),
    ):
        if pattern.search(message):
            return cause
    return None
