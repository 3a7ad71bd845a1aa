"""What ended an attempt: the root cause among all that was seen, and its kind.

Guarantee: pure and total. The same evidence gives the same answer whatever order it came in, and evidence
that says nothing clear is `unknown` rather than a guess.

When one rank dies, its peers fail too, often sooner as far as the agent can see: their connection is gone.
Such failures are symptoms. The root cause is the earliest thing seen that is not one; only a device that is
known to be broken outranks what came before it, because kernel logs are read late.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

import msgspec

from holdfast.exit_codes import ExitCode
from holdfast.policy.evidence import DeviceError, Evidence, Hang, Loss, LostNode, WorkerEnd, comparable
from holdfast.policy.rejection import Kind, Place, Rejection
from holdfast.policy.xids import proves_broken


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


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What an incident was. The fields have the names that `PastAttempt` has for them."""

    cause: Cause
    exit_code: int = 0
    """Of the worker that the others followed; 0 where the root cause is no worker's end."""
    message: str = ""
    section: str = ""
    """In which a rank hung."""
    culprit_node: str = ""
    culprit_device: str = ""
    """Where it went wrong, if the evidence says so and the cause is one that a place can have."""
    named: bool = False
    """Whether the hardware itself accuses that device."""
    alike: bool = False
    """Whether the ranks failed with one and the same error of their own; see `_alike`."""
    rung: str = ""
    steps: int | None = None
    """What was loaded, and the steps completed since then."""


KERNEL_OOM = "killed by the kernel for lack of memory"
"""How the agent's message begins when the kernel's counters say so."""

_LOST_PEER = re.compile(
    r"connection closed by peer|connection reset by peer|connection was likely closed|broken pipe"
    r"|connection refused|socket timeout|ncclremoteerror|nccl remote error|remote process exited"
    r"|a remote peer|recvvalue failed|sendbytes failed|recvbytes|distnetworkerror|diststoreerror"
    r"|decisiontimeouterror",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(
    r"out of memory|outofmemoryerror|\bmemoryerror\b|cannot allocate memory|out of shared memory", re.I
)
_HANG = re.compile(r"watchdog caught collective operation timeout|timed out waiting .*ms for", re.I)
_DEVICE = re.compile(
    r"uncorrectable ecc|ecc error|hardware stack error|fallen off the bus|gpu is lost|nvlink error"
    r"|device\(s\) is/are busy or unavailable|no cuda-capable device is detected",
    re.IGNORECASE,
)
_CUDA = re.compile(
    r"cuda error: (?!device-side assert)|cudnn_status_execution_failed|hip error|unspecified launch failure"
    r"|nccl.*unhandled cuda error|\bxid\b",
    re.IGNORECASE,
)
"""A device's errors that broken hardware and a wrong program both cause."""
_STORAGE = re.compile(
    r"\[errno (5|28|30|107|116|121|122)\]|no space left on device|input/output error|stale file handle"
    r"|transport endpoint is not connected|remote i/o error|disk quota exceeded|read-only file system",
    re.IGNORECASE,
)
_LOADER_KILLED = re.compile(r"dataloader worker .*killed by signal: killed", re.IGNORECASE)
_DATA = re.compile(r"caught \w+ in dataloader worker process", re.IGNORECASE)
_CHECKPOINT = re.compile(r"^(\w+\.)*(CheckpointError|NoValidRungError)\b")
_CLASS = re.compile(r"^(?:\w+\.)*(\w+)(?=:|$)")

_AT_IMPORT = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"})
"""Errors that every rank meets, so that one of them speaks for all."""

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
    ExitCode.STORAGE_FAILED: Cause.INFRASTRUCTURE,
    ExitCode.STOPPED: Cause.PREEMPTION,
    ExitCode.STOPPED_UNSAVED: Cause.PREEMPTION,
    ExitCode.HANDED_OVER: Cause.UNKNOWN,
}

_SYMPTOMS = frozenset({ExitCode.DECISION_TIMEOUT, ExitCode.HANDED_OVER})
"""Codes that say of what another rank's fault has led to, never of a fault."""

_BY_KIND = {
    Kind.STEP: Cause.UNKNOWN,
    Kind.DEVICE: Cause.DEVICE,
    Kind.PROBATION: Cause.CHECKPOINT,
    Kind.ROLLBACK: Cause.JOB,
}
"""A rejected step may be anybody's fault until there is a verdict."""

_HAS_A_PLACE = frozenset({Cause.INFRASTRUCTURE, Cause.DEVICE, Cause.HANG, Cause.UNKNOWN})
"""Causes for which it matters where they were seen. A job's own error accuses no node."""


def end_of(failure: Failure) -> WorkerEnd:
    return WorkerEnd(
        rank=failure.rank,
        exit_code=failure.exit_code,
        at=failure.at,
        node=getattr(failure, "node", ""),
        device=getattr(failure, "device", ""),
        message=failure.message,
        kernel_oom=failure.message.startswith(KERNEL_OOM),
    )


def names_storage(message: str) -> bool:
    """Whether an error's text says that storage is full, failing or away."""
    return bool(_STORAGE.search(message))


def is_symptom(exit_code: int, message: str) -> bool:
    """Whether a failure only says that a peer was lost, or that a restart in place was given up."""
    return exit_code in _SYMPTOMS or bool(_LOST_PEER.search(message))


def _doubt(failure: Failure) -> int:
    """How likely a failure is a symptom of another one: 0 no, 1 perhaps, 2 yes."""
    if is_symptom(failure.exit_code, failure.message):
        return 2
    # NCCL's watchdog aborts the process when a peer is lost, and leaves no message.
    return 1 if failure.exit_code == -signal.SIGABRT else 0


def root_cause(failures: Sequence[F]) -> F:
    """The failure that the others follow from. At least one must be given."""
    return min(failures, key=lambda f: (_doubt(f), f.at, f.rank, f.exit_code, f.message))


def diagnose(evidence: Evidence) -> Diagnosis:
    """What an incident was, where, and how soon after which load."""
    return msgspec.structs.replace(_diagnose(evidence), rung=evidence.rung, steps=evidence.steps)


def of_rejection(found: Diagnosis, rejection: Rejection | None) -> Diagnosis:
    """What an incident was if the ranks rejected a result before they ended.

    They had agreed on it before any of them ended, so whatever else was lost followed; only an end with a
    code of its own counts more. All ranks end with 16: which of them was seen first accuses no place.
    """
    if rejection is None or found.exit_code not in (0, ExitCode.RERUN_WANTED):
        return found
    accused = rejection.accused or Place("")
    why = "; ".join(rejection.reasons) or "no reason given"
    return Diagnosis(
        cause=_BY_KIND[rejection.kind],
        exit_code=int(ExitCode.RERUN_WANTED),
        message=found.message or f"step {rejection.step} was rejected: {why}",
        culprit_node=accused.node,
        culprit_device=accused.device,
        named=rejection.kind is Kind.DEVICE and bool(accused.node and accused.device),
        rung=found.rung,
        steps=found.steps,
    )


def _diagnose(evidence: Evidence) -> Diagnosis:
    seen = sorted(_ranked(evidence), key=lambda item: item[0])
    if not seen:
        return Diagnosis(cause=Cause.UNKNOWN)
    root = seen[0][1]
    match root:
        case DeviceError():
            return Diagnosis(
                cause=Cause.DEVICE,
                message=root.message or (f"XID {root.xid}" if root.xid is not None else "ECC errors"),
                culprit_node=root.node,
                culprit_device=root.device,
                named=bool(root.node and root.device),
            )
        case LostNode():
            left = root.how is Loss.LEFT
            return Diagnosis(
                cause=Cause.PREEMPTION if left else Cause.INFRASTRUCTURE,
                message=root.detail,
                culprit_node="" if left else root.node,
            )
        case Hang():
            return _of_hangs(root, evidence.hangs)
    return _of_end(root, evidence)


_Item = WorkerEnd | Hang | LostNode | DeviceError
_Key = tuple[int, float, bytes]


def _ranked(evidence: Evidence) -> Iterator[tuple[_Key, _Item]]:
    """Everything seen that may be a root cause, with its place in the order; the last part breaks ties."""
    for error in evidence.devices:
        if _is_broken(error):
            yield (-1, error.at, _tie(error)), error
    if evidence.ends:
        end = root_cause(sorted(evidence.ends, key=_tie))
        yield (_doubt(end), end.at, _tie(end)), end
    for hang in evidence.hangs:
        yield (0, hang.at, _tie(hang)), hang
    for lost in evidence.lost:
        yield (0, lost.at, _tie(lost)), lost


def _is_broken(error: DeviceError) -> bool:
    """Whether the hardware itself says so. A number says it better than the words around it."""
    if error.uncorrectable or error.xid is None:
        return error.uncorrectable or bool(_DEVICE.search(error.message))
    return proves_broken(error.xid)


def _tie(item: _Item) -> bytes:
    return type(item).__name__.encode() + msgspec.json.encode(item, order="deterministic")


def _of_hangs(first: Hang, hangs: Sequence[Hang]) -> Diagnosis:
    """Those that wait are the victims of those that are missing; who hangs alone is its own culprit."""
    missing = {node for hang in hangs for node in hang.missing_nodes}
    waiting = any(hang.missing for hang in hangs)
    node = device = ""
    if len(missing) == 1:
        node = next(iter(missing))
    elif len(hangs) == 1 and not waiting:
        node, device = first.node, first.device
    return Diagnosis(cause=Cause.HANG, section=first.section, culprit_node=node, culprit_device=device)


def _of_end(end: WorkerEnd, evidence: Evidence) -> Diagnosis:
    cause = _classify_end(end)
    placed = cause in _HAS_A_PLACE and _doubt(end) < 2
    return Diagnosis(
        cause=cause,
        exit_code=end.exit_code,
        message=end.message,
        culprit_node=end.node if placed else "",
        culprit_device=end.device if placed else "",
        named=bool(placed and end.node and end.device and _DEVICE.search(_text(end))),
        alike=_alike(end, evidence),
    )


def _alike(root: WorkerEnd, evidence: Evidence) -> bool:
    """Whether no rank tells another story, and most tell this one; of what fails at import one is enough.

    Not all: the agent stops the others as soon as it sees the first one fail. Exit code 2 without a word is
    how a script refuses its own arguments, which are the same on all ranks.
    """
    if not root.message:
        return root.exit_code == ExitCode.USAGE and {end.exit_code for end in evidence.ends} == {
            ExitCode.USAGE
        }
    told = (root.exit_code, comparable(_text(root)))
    same = sum((end.exit_code, comparable(_text(end))) == told for end in evidence.ends)
    if same < len(evidence.ends) or evidence.hangs or evidence.lost:
        return False
    return 2 * same > evidence.world_size or _error_class(root) in _AT_IMPORT


def _text(end: WorkerEnd) -> str:
    if not end.error_class or _error_class(end, given=False) == end.error_class:
        return end.message
    return f"{end.error_class}: {end.message}"


def _error_class(end: WorkerEnd, *, given: bool = True) -> str:
    found = _CLASS.match(end.message)
    return (given and end.error_class) or (found.group(1) if found else "")


def _classify_end(end: WorkerEnd) -> Cause:
    code, text = end.exit_code, _text(end)
    if code > 128 and code - 128 in signal.valid_signals():
        code = 128 - code  # a shell between the agent and the worker reports a signal n as 128 + n
    if end.kernel_oom:
        return Cause.JOB
    if code < 0:
        return _classify_signal(-code, text)
    if code in _BY_CODE:
        return _BY_CODE[ExitCode(code)]
    return _classify_message(text) or (Cause.JOB if code > 0 else Cause.UNKNOWN)


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
        (_CUDA, Cause.UNKNOWN),
        (_CHECKPOINT, Cause.CHECKPOINT),
        (_STORAGE, Cause.INFRASTRUCTURE),
        (_LOADER_KILLED, Cause.INFRASTRUCTURE),
        (_DATA, Cause.DATA),
    ):
        if pattern.search(message):
            return cause
    return None
