"""What ended an attempt: the root cause among all that was seen, and its kind.

Guarantee: pure and total. The same evidence gives the same answer whatever order it came in, and evidence
that says nothing clear is `unknown` rather than a guess.

When one rank dies, its peers fail too, often sooner as far as the agent can see: their connection is gone.
Such failures are symptoms. The root cause is the earliest thing seen that is not one; only a device that is
known to be broken outranks what came before it, because kernel logs are read late. A rank that left with exit
code 0 is the root cause if its peers then did nothing but lose it, or wait for it; if anything else went
wrong, that rank had simply finished.

The kind of the root cause is decided in this order: what the hardware and the kernel say; exit codes and
signals that mean only one thing; what the configuration adds; the classes of the exception and of those that
led to it (`signs.TYPES`), with their errno; texts (`signs.SIGNS`), in the exceptions or, where a rank left
none, in its last lines of standard error.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from holdfast.errors import ExitCode
from holdfast.policy.evidence import (
    MOST_RAISED,
    DeviceError,
    Evidence,
    Hang,
    Loss,
    LostNode,
    Raised,
    WorkerEnd,
    comparable,
)
from holdfast.policy.results import Kind, Place, Rejection
from holdfast.policy.signs import (
    Cause,
    Found,
    found_in,
    in_words,
    is_of_fabric,
    is_of_hardware,
    is_of_lost_peer,
    is_own,
    proves_broken,
    sign_in,
)

F = TypeVar("F", bound=WorkerEnd)


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What an incident was; an attempt in the history of a run (`budgets.PastAttempt`) is one too."""

    cause: str
    """One of `signs.Cause`, or perhaps another word in another release's record; empty if nothing failed."""
    exit_code: int = 0
    """That of the worker that the others followed; 0 where the root cause is not the end of a worker."""
    message: str = ""
    section: str = ""
    """The section in which a rank hung."""
    culprit_node: str = ""
    culprit_device: str = ""
    """Where it went wrong, if the evidence says so and the cause is one that a place can be blamed for."""
    named: bool = False
    """Whether the hardware itself accuses that device."""
    alike: bool = False
    """Whether the ranks all failed with the same error of their own; see `_alike`."""
    same_ranks: int = 0
    """How many of them ended with that very error; 0 if not known."""
    root_rank: int | None = None
    """The rank whose end it was; None where the root cause is not the end of a worker."""
    rung: str = ""
    """The checkpoint that was loaded; empty for a fresh start."""
    steps: int | None = None
    """Steps completed since then; None if not known."""


_CLASS = re.compile(r"^(?:\w+\.)*(\w+)(?=:|$)")
_AT_IMPORT = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"})
"""Errors of a script's first lines, which all ranks share."""

_OF_TORCH = re.compile(r"\b(gloo|nccl|c10d|tcpstore)\b|\.(cc|cpp|cu|h|hpp):\d+\]", re.IGNORECASE)
"""Text that occurs in a RuntimeError that torch raises about its peers, and hardly in one from the script."""
_NO_PEERS = re.compile(
    r"traceback \(most recent|failed to (listen|bind)|eaddrinuse|address already in use|name resolution"
    r"|service not known|could not be resolved",
    re.IGNORECASE,
)
"""Signs that another process of this rank failed, or that this machine's own socket or names are at fault."""

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
"""Codes that report what another rank's fault has led to, never a fault of their own."""

_BY_KIND = {
    Kind.STEP: Cause.UNKNOWN,
    Kind.DEVICE: Cause.DEVICE,
    Kind.PROBATION: Cause.CHECKPOINT,
    Kind.ROLLBACK: Cause.JOB,
}
"""A rejected step may be anybody's fault until there is a verdict."""

_HAS_A_PLACE = frozenset({Cause.INFRASTRUCTURE, Cause.DEVICE, Cause.HANG, Cause.UNKNOWN})
"""Causes for which it matters where they were seen. A job's own error accuses no node."""


def is_symptom(exit_code: int, message: str) -> bool:
    """Whether a failure only says that a peer was lost, or that a restart in place was given up."""
    return exit_code in _SYMPTOMS or is_of_lost_peer(message)


def loss_of_peer(errors: Sequence[Raised]) -> Raised | None:
    """The exception by which a rank lost a peer, if what ended the rank began with that; else None.

    Stricter than `is_symptom`, which weighs one rank's end against the others': here the words alone decide
    that nobody needs to read on. So they must be torch's own, about a group or a store, and no error of this
    rank's own may have come before them. `errors`: from the outermost on, as `Raised` has them.
    """
    if len(errors) >= MOST_RAISED or any("Group" in name for one in errors for name in one.types[:1]):
        return None  # what came first may be missing, or be one of several
    first = next((number for number, one in enumerate(errors) if _lost_peer(one)), len(errors))
    return errors[first] if errors[first:] and all(map(_lost_peer, errors[first:])) else None


def _lost_peer(raised: Raised) -> bool:
    text = in_words(raised)
    sign = sign_in(text)
    if sign is None or not sign.symptom or is_of_hardware(text) or _NO_PEERS.search(text):
        return False
    kind = raised.types[0] if raised.types else ""
    ours = kind.startswith("torch.") or kind == "holdfast.errors.DecisionTimeoutError"
    return ours or (kind == "RuntimeError" and _OF_TORCH.search(raised.message) is not None)


def tells(line: str) -> bool:
    """Whether a line of a rank's standard error says by itself what was wrong."""
    return sign_in(line) is not None


def at_import(errors: Sequence[Raised]) -> bool:
    """Whether a script failed in its first lines, which all ranks run."""
    return bool(errors) and _class_name(errors[0]) in _AT_IMPORT


def _doubt(failure: WorkerEnd) -> int:
    """How likely a failure is a symptom of another one: 0 no, 1 perhaps, 2 yes."""
    if is_symptom(failure.exit_code, failure.message):
        return 2
    if any(is_of_lost_peer(in_words(one)) for one in failure.errors):
        return 2  # it raised this because it had lost a peer
    # NCCL's watchdog aborts the process when a peer is lost. A rank that left with 0 may have been done.
    return int(failure.exit_code == -signal.SIGABRT or failure.left)


def root_cause(failures: Sequence[F]) -> F:
    """The failure that the others follow from. At least one must be given."""
    return min(failures, key=lambda f: (_doubt(f), f.at, f.rank, f.exit_code, f.message))


def diagnose(evidence: Evidence) -> Diagnosis:
    """What an incident was, where it happened, and how soon after which load."""
    found = _diagnose(evidence)
    # A rank that hangs after its loop used what was loaded to the end, even if no step was left to do.
    hangs = evidence.hangs if found.cause == Cause.HANG else []
    over = bool(hangs) and all(hang.exiting for hang in hangs)
    return msgspec.structs.replace(found, rung=evidence.rung, steps=None if over else evidence.steps)


def of_rejection(found: Diagnosis, rejection: Rejection | None) -> Diagnosis:
    """What an incident was if the ranks rejected a result before they ended.

    They had agreed on it before any of them ended, so any other loss followed from it; only an end with a
    code of its own counts for more. All ranks end with 16, so the one that was seen first accuses no place.
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
_KINDS = (DeviceError, Hang, LostNode, WorkerEnd)
_Key = tuple[int, float, bytes]


def _ranked(evidence: Evidence) -> Iterator[tuple[_Key, _Item]]:
    """Everything seen that may be a root cause, with its place in the order; the last part breaks ties."""
    for error in evidence.devices:
        if _is_broken(error):
            yield (-1, error.at, _tie(error)), error
    if not all(end.left for end in evidence.ends):
        end = root_cause(sorted(evidence.ends, key=_tie))
        yield (_doubt(end), end.at, _tie(end)), end
    waited_for = {rank for hang in evidence.hangs for rank in (*hang.missing, *hang.silent)}
    for end in evidence.ends:
        if end.left and end.rank in waited_for:
            yield (0, end.at, _tie(end)), end
    # An adapter that has failed leaves others waiting: neither they nor what they loaded is to blame.
    follows = 3 if any(_tells_of_fabric(end) for end in evidence.ends) else 0
    for hang in evidence.hangs:
        yield (follows, hang.at, _tie(hang)), hang
    for lost in evidence.lost:
        yield (0, lost.at, _tie(lost)), lost


def _tells_of_fabric(end: WorkerEnd) -> bool:
    return any(map(is_of_fabric, (end.message, *map(in_words, end.errors))))


def _is_broken(error: DeviceError) -> bool:
    """Whether the hardware itself says that it is broken. An XID says it better than the words around it."""
    if error.uncorrectable or error.xid is None:
        return error.uncorrectable or is_of_hardware(error.message)
    return proves_broken(error.xid)


def _tie(item: _Item) -> bytes:
    kind = next(number for number, kind in enumerate(_KINDS) if isinstance(item, kind))
    return b"%d" % kind + msgspec.json.encode(item, order="deterministic")


def _of_hangs(first: Hang, hangs: Sequence[Hang]) -> Diagnosis:
    """Ranks that wait are victims of those that are missing; a rank that hangs alone is its own culprit."""
    missing = {node for hang in hangs for node in hang.missing_nodes}
    waiting = any(hang.missing for hang in hangs)
    node = device = ""
    if len(missing) == 1:
        node = next(iter(missing))
    elif len(hangs) == 1 and not waiting and not first.exiting:
        node, device = first.node, first.device
    return Diagnosis(cause=Cause.HANG, section=first.section, culprit_node=node, culprit_device=device)


def _of_end(end: WorkerEnd, evidence: Evidence) -> Diagnosis:
    if end.left:
        message = f"rank {end.rank} left with exit code 0 before its peers"
        return Diagnosis(cause=Cause.JOB, message=message, root_rank=end.rank)
    if (held := _held_back(end, evidence)) is not None:
        message = f"{end.message}; {held.message}" if end.message else held.message
        return Diagnosis(cause=Cause.INFRASTRUCTURE, message=message, root_rank=end.rank)
    same = _same_ranks(end, evidence)
    alike = _alike(end, evidence, same)
    found = _classify_end(end, evidence.causes)
    if found.cause is Cause.JOB and not alike and _error_class(end) in _AT_IMPORT:
        # The others run the same lines. If only some of them cannot import something, the fault is with their
        # node, or with what the script does on that rank: one more try will tell.
        found = Found(Cause.UNKNOWN)
    placed = found.cause in _HAS_A_PLACE and found.here and _doubt(end) < 2
    return Diagnosis(
        cause=found.cause,
        exit_code=end.exit_code,
        message="" if end.heard and not found.told else end.message,
        culprit_node=end.node if placed else "",
        culprit_device=end.device if placed else "",
        named=bool(placed and end.node and end.device and found.hardware),
        alike=alike,
        same_ranks=same,
        root_rank=end.rank,
    )


def _same_ranks(root: WorkerEnd, evidence: Evidence) -> int:
    root_error = (root.exit_code, comparable(root.message))
    return sum((end.exit_code, comparable(end.message)) == root_error for end in evidence.ends)


def _alike(root: WorkerEnd, evidence: Evidence, same: int) -> bool:
    """Whether no rank tells a different story, and most tell this one.

    "Most", not "all": the agent stops the others as soon as it sees the first one fail. Exit code 2 without a
    word is how a script refuses its own arguments, which are the same on all ranks.
    """
    if evidence.hangs or evidence.lost:
        return False
    if not root.message and root.exit_code != ExitCode.USAGE:
        return False
    return same == len(evidence.ends) and 2 * same > evidence.world_size


# -- the kind of one worker's end ----------------------------------------------------------------------------


def _class_name(raised: Raised) -> str:
    return raised.types[0].rpartition(".")[2] if raised.types else ""


_OF_DEVICE_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError", re.IGNORECASE
)


def _held_back(end: WorkerEnd, evidence: Evidence) -> DeviceError | None:
    """Memory that an earlier attempt had not given back where this rank lacked some: not the job's doing."""
    if not any(_OF_DEVICE_MEMORY.search(text) for text in (end.message, *map(in_words, end.errors))):
        return None
    held = [one for one in evidence.devices if one.held and one.node == end.node]
    return next((one for one in held if end.device in ("", one.device) or not one.device), None)


def _error_class(end: WorkerEnd) -> str:
    if end.errors:
        return _class_name(end.errors[0])
    found = _CLASS.match(end.message)
    return found.group(1) if found else ""


def _classify_end(end: WorkerEnd, added: Sequence[tuple[str, str]]) -> Found:
    """First what the kernel says, then codes that mean one thing, then the configuration, then exceptions.

    If none of this matches, the cause is the job if the class of the exception says so, else unknown.
    """
    code = end.exit_code
    if code > 128 and code - 128 in signal.valid_signals():
        code = 128 - code  # a shell between the agent and the worker reports a signal n as 128 + n
    if end.kernel_oom:
        return Found(Cause.JOB)
    if -code in _ASKED_TO_END:
        return Found(Cause.PREEMPTION)
    if code == -signal.SIGKILL:
        return Found(Cause.INFRASTRUCTURE)
    if code in _BY_CODE:
        return Found(_BY_CODE[ExitCode(code)])
    chain = end.errors or [Raised(message=end.message)]
    for text in (end.message, *map(in_words, end.errors)):
        for cause, pattern in added:
            if re.search(pattern, text, re.IGNORECASE):
                return Found(Cause(cause))
    classified = [one for link in chain if (one := found_in(link)) is not None]
    if any(is_of_fabric(in_words(link)) for link in chain):
        return Found(Cause.INFRASTRUCTURE)
    if classified:
        return next((one for one in classified if one.cause is not Cause.UNKNOWN), classified[0])
    raised = bool(end.errors) or bool(end.message and not end.heard)
    if code > 0 and (code == ExitCode.USAGE or (raised and is_own(chain[0]))):
        return Found(Cause.JOB)
    return Found(Cause.UNKNOWN, told=raised)
