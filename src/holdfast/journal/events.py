"""The typed, versioned events of a run's journal: one JSON object a line.

Every line has the same frame (`v`, `at`, `who`, `attempt`, `seq`) around one event, tagged by `event`.
Fields are only ever added, with defaults; a reader keeps an event it does not know as `Unknown`, so
journals of newer releases stay readable.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from holdfast.journal.subjects import (
    Account,
    Event,
    FunctionRestarted,
    HealthFailed,
    JobFound,
    PingFailed,
    RequeueAsked,
    RestartFaulted,
    RestartHandedOver,
    RestartPlanned,
    StopAgreed,
    StopAsked,
    StopForced,
    StopHastened,
    StopSaved,
    StragglerFound,
    StragglersReported,
)

JOURNAL_VERSION = 1


def encode_loss(loss: float | None) -> float | str | None:
    """A loss as it is journalled. JSON has no NaN, and a NaN must not read like "no loss"."""
    if loss is None or math.isfinite(loss):
        return loss
    return "nan" if math.isnan(loss) else "inf" if loss > 0 else "-inf"


def decode_loss(loss: float | str | None) -> float | None:
    """The inverse of `encode_loss`. Text that no release writes reads as NaN: not a number, yet recorded."""
    if isinstance(loss, str):
        return {"inf": math.inf, "-inf": -math.inf}.get(loss, math.nan)
    return loss


class RunCreated(Event, tag="run_created"):
    """The run exists: its directory was made."""

    run: str
    checkpoint_root: str


class LeaseClaimed(Event, tag="lease_claimed"):
    """A launch claimed the lease: from here on only it may act on the run."""

    epoch: int
    owner: str
    """Launch id of the claimant."""
    evidence: str
    """Why the claim was allowed: first claim, released, holder dead, lapsed, same launch."""


class LeaseLost(Event, tag="lease_lost"):
    """Another launch holds the lease by now; the writer of this event stops acting."""

    epoch: int
    evidence: str


class AttemptStarted(Event, tag="attempt_started"):
    """A group of ranks begins to train."""

    epoch: int
    world_size: int
    nodes: int = 1
    launcher: str = "none"
    """`holdfast run`, `torchrun` or `none`."""
    torch: str = ""


class WorkersStarted(Event, tag="workers_started"):
    """The worker processes of one node run."""

    node: str
    pids: dict[int, int]
    """Global rank → process id."""
    master: str = ""
    kept: bool = False
    """Whether they are those of the previous attempt, which continue in the same processes."""


class WorkerFailed(Event, tag="worker_failed"):
    """How one worker ended, and what it left behind: message, error file, section."""

    rank: int
    node: str
    pid: int
    exit_code: int
    """As from waitpid: negative for a signal."""
    signal: str = ""
    message: str = ""
    error_file: str = ""
    section: str = ""
    left: bool = False
    """Whether it ended with exit code 0 while others still ran: that may be why they then failed, or it
    had simply finished first.
    """


class AttemptEnded(Event, tag="attempt_ended"):
    """The group has ended, and how."""

    outcome: str
    """finished, failed, stopped, lost."""
    exit_code: int = 0
    last_step: int = 0


class RejectedOption(msgspec.Struct, frozen=True):
    option: str
    why: list[str]


class Decision(Event, tag="decision"):
    """A choice made for the whole group, with its evidence."""

    about: str
    """resume, recovery, …"""
    chosen: str
    evidence: list[str]
    rejected: list[RejectedOption] = msgspec.field(default_factory=list)
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class RungRejected(Event, tag="rung_rejected"):
    """A checkpoint that a resume could not use, and why."""

    checkpoint: str
    step: int
    reasons: list[str]


class Resumed(Event, tag="resumed"):
    """The state is in place, from this checkpoint or from nothing."""

    checkpoint: str | None
    """None for a fresh start."""
    step: int
    seconds: float
    """From the start of the search to the state being in place."""
    world_size: int = 0
    """How many ranks resumed; 0 if not recorded."""
    saved_by: int = 0
    """How many ranks had saved it; 0 if not recorded."""
    bad_copies: list[str] = msgspec.field(default_factory=list)
    """Copies of it whose bytes are wrong: where, what is wrong, and what was read instead."""


class SaveStarted(Event, tag="save_started"):
    """A save has begun."""

    checkpoint: str
    step: int
    background: bool = False
    """Whether a separate process writes it, which may outlive the rank."""


class SaveCommitted(Event, tag="save_committed"):
    """A checkpoint is complete and durable; from here on a resume may use it."""

    checkpoint: str
    step: int
    parent: str | None
    bytes: int
    files: int
    seconds: float
    """Time from the call to the commit."""
    blocked_seconds: float
    """Time for which training stood still."""
    tier: str = "global"
    """`local`: committed on the nodes. A save to both tiers is recorded twice, the second time without
    blocking.
    """
    stored_seconds: float = 0.0
    """Of `seconds`, the time that writing and committing the files took on rank 0; 0 if that was not
    measured.
    """
    root: str = ""
    """The directory that it was committed in; empty for the local tier."""


class SaveFailed(Event, tag="save_failed"):
    """A save failed; earlier commits are untouched."""

    checkpoint: str
    step: int
    error: str
    in_a_row: int


class SaveSkipped(Event, tag="save_skipped"):
    """A save was due but was left out, on all ranks."""

    checkpoint: str
    step: int
    reason: str


class CheckpointsDeleted(Event, tag="checkpoints_deleted"):
    """Retention, or `holdfast ckpt gc`, deleted these; everything older or newer is untouched."""

    names: list[str]
    reasons: list[str]
    """One for each name."""
    bytes: int


class CopyDrained(Event, tag="copy_drained"):
    """A committed checkpoint now has a copy in the remote, complete and confirmed."""

    checkpoint: str
    step: int
    remote: str
    bytes: int
    seconds: float
    repeated: int = 0
    """Requests that had to be made again."""
    read_back: int = 0
    """Files whose bytes the store could not confirm with its own checksum."""
    waiting: int = 0
    """Checkpoints that are still waiting to be copied."""


class DrainFailed(Event, tag="drain_failed"):
    """A checkpoint could not be copied to the remote; the local one is untouched."""

    checkpoint: str
    step: int
    remote: str
    error: str


class CopyDeleted(Event, tag="copy_deleted"):
    """The remote copy of a checkpoint that retention had deleted is gone too."""

    checkpoint: str
    remote: str
    objects: int


class CopyFetched(Event, tag="copy_fetched"):
    """A resume brought a checkpoint back from the remote, verified, because the local one could not be
    used.
    """

    checkpoint: str
    step: int
    remote: str
    bytes: int
    seconds: float
    because: list[str]
    quarantine: str = ""
    """Where the bad local directory went."""


class ReplicaFailed(Event, tag="replica_failed"):
    """A rank's shards could not be copied to a peer; its own copy is untouched, and training continues."""

    checkpoint: str
    step: int
    rank: int
    node: str
    """The peer that should have held it."""
    error: str


class CopyReplicated(Event, tag="copy_replicated"):
    """Rank 0's shards now lie on a peer too, verified there; those of other ranks are not recorded one by
    one.
    """

    checkpoint: str
    step: int
    rank: int
    node: str
    """The peer that holds it."""
    seconds: float
    """How long sending took."""


class CopyReadBack(Event, tag="copy_read_back"):
    """A committed checkpoint was read from the checkpoint root while training continued: every byte is
    right.
    """

    checkpoint: str
    step: int
    bytes: int
    seconds: float


class CopyQuarantined(Event, tag="copy_quarantined"):
    """A copy whose bytes are wrong: it is never read again. Says nothing about the checkpoint."""

    checkpoint: str
    node: str
    kind: str
    """own, replica or global."""
    reasons: list[str]


class CopyReplaced(Event, tag="copy_replaced"):
    """After a resume: a copy of its checkpoint that was lost or bad was made again, and verified."""

    checkpoint: str
    step: int
    rank: int
    """The rank whose shards it holds, as numbered when they were saved."""
    node: str
    kind: str
    """own or replica."""
    sources: list[str]
    """Where the bytes came from: own, peer, global."""
    bytes: int
    seconds: float


class CopiesDropped(Event, tag="copies_dropped"):
    """Local copies that a node gave up for newer ones, or for lack of memory."""

    node: str
    checkpoints: list[str]
    reasons: list[str]
    """One for each."""
    bytes: int


class StorageAlarm(Event, tag="storage_alarm"):
    """Two checkpoints in a row could not be used: the storage itself was tested before continuing."""

    checkpoints: list[str]
    place: str
    probe: str
    """What the test showed; empty if nothing was wrong with it."""


class CadenceChosen(Event, tag="cadence_chosen"):
    """How often the run saves from now on. Written at a start and when the interval changes notably."""

    interval: int
    """Steps between saves."""
    seconds: float
    """The same as a time; 0 while no step was measured."""
    overhead: float
    """Expected share of all time lost to saves and failures; 0 while nothing was measured."""
    mtbf: float
    evidence: list[str]
    warnings: list[str] = msgspec.field(default_factory=list)


class StepsDone(Event, tag="steps_done"):
    """A batch of completed steps, written about once a second."""

    first: int
    """Step of the first entry; the rest follow one by one."""
    seconds: list[float]
    loss: list[float | str | None] = msgspec.field(default_factory=list)
    """Each as `encode_loss` gives it: None is a step whose loss was not recorded."""
    grad_norm: list[float | str | None] = msgspec.field(default_factory=list)
    """Like `loss`, if the loop recorded any."""
    samples: list[str] = msgspec.field(default_factory=list)
    """Digest of each step's sample ids, if the loop recorded them."""


class StepRejected(Event, tag="step_rejected"):
    """The group rejected a step's result before the optimizer used it (with deferred checks: after that)."""

    step: int
    reasons: list[str]
    ranks: list[int] = msgspec.field(default_factory=list)
    """The ranks whose own results, before any reduction, were bad; empty if that is not known."""
    then: str = ""
    """What was done: rerun, dropped, stop, restart."""
    batch: str = ""
    """The data of the step: batch and epoch, and the samples of those ranks, as far as they are known."""
    in_a_row: int = 0
    """Steps dropped in a row by now; 0 where that should not be reported."""


class Verdict(Event, tag="verdict"):
    """What a rejected step turned out to be."""

    verdict: str
    """transient, device or reproducible."""
    step: int
    evidence: list[str]
    node: str = ""
    device: str = ""
    """The device that it accuses or, for a transient fault, the one for which it was counted."""


class ProbationEnded(Event, tag="probation_ended"):
    """The steps after a resume in which what was loaded is watched are over."""

    checkpoint: str
    outcome: str
    """passed, breached, or unsettled (the attempt was going to end before that)."""
    first: int
    last: int
    evidence: list[str] = msgspec.field(default_factory=list)


class StandingChanged(Event, tag="standing_changed"):
    """What is known about a checkpoint has changed; the record is already durable."""

    checkpoint: str
    standing: str
    evidence: list[str]


class ThroughputLow(Event, tag="throughput_low"):
    """Steps after a resume take much longer than before it. Accuses a node, never the checkpoint."""

    seconds: float
    before: float
    """Median step time now, and before the checkpoint was saved."""
    probes: list[str]
    """What a short probe showed on each rank."""
    accused: str = ""
    """The node that is slower than the others; empty if none is."""


class DataSkipped(Event, tag="data_skipped"):
    """Samples that were left out because they fail everywhere."""

    step: int
    """The step that would have used them."""
    epoch: int
    first: int
    last: int
    """Batches of the epoch, counted from 0."""
    reason: str


class DeterminismMeasured(Event, tag="determinism_measured"):
    """How much the same step's result differed between two runs of it, relative to its size.

    For each step, the difference of its worst rank counts.
    """

    steps: int
    p50: float
    p90: float
    p99: float
    p999: float
    largest: float
    ranks: int = 1
    """How many were compared; older releases looked only at rank 0."""
    worst_rank: int = 0
    """The rank with the largest difference."""


class RunFinished(Event, tag="run_finished"):
    """The last step is done."""

    step: int
    samples: int
    tokens: int
    counts: str = ""
    """Whose totals these are, as in a manifest: `job`, or empty for rank 0's."""


class OperatorActed(Event, tag="operator_acted"):
    """An operator made a request; the record of it is already durable."""

    action: str
    """pause, unpause, reset_budget, pin, unpin, exclude or readmit."""
    subject: str = ""
    """What it is about: a checkpoint, a node, a device."""
    reason: str = ""
    by: str = ""


class Warned(Event, tag="warned"):
    """Anything else worth knowing."""

    message: str


class Unknown(msgspec.Struct, frozen=True):
    """An event of a newer release, kept as it is."""

    event: str
    fields: dict[str, Any]


AnyEvent = (
    RunCreated
    | LeaseClaimed
    | LeaseLost
    | AttemptStarted
    | WorkersStarted
    | WorkerFailed
    | AttemptEnded
    | Decision
    | RungRejected
    | Resumed
    | SaveStarted
    | SaveCommitted
    | SaveFailed
    | SaveSkipped
    | CheckpointsDeleted
    | CopyDrained
    | DrainFailed
    | CopyDeleted
    | CopyFetched
    | ReplicaFailed
    | CopyReplicated
    | CopyReplaced
    | CopyQuarantined
    | CopyReadBack
    | CopiesDropped
    | StorageAlarm
    | CadenceChosen
    | StepsDone
    | StepRejected
    | Verdict
    | ProbationEnded
    | StandingChanged
    | ThroughputLow
    | DataSkipped
    | DeterminismMeasured
    | StopAsked
    | StopHastened
    | StopAgreed
    | StopSaved
    | StopForced
    | JobFound
    | RequeueAsked
    | HealthFailed
    | PingFailed
    | StragglersReported
    | StragglerFound
    | RestartFaulted
    | RestartPlanned
    | RestartHandedOver
    | FunctionRestarted
    | Account
    | RunFinished
    | OperatorActed
    | Warned
)


class Line(msgspec.Struct, kw_only=True):
    """One line of the journal."""

    v: int
    at: float
    """Wall-clock seconds since 1970."""
    who: str
    """`agent-<node>`, `rank-<global rank>`, `drain`, `read-back` or `operator`."""
    attempt: int
    seq: int
    """Rises by one per writer, so that a gap shows."""
    body: AnyEvent | Unknown


def event_name(body: AnyEvent | Unknown) -> str:
    """The tag a body has in the file."""
    if isinstance(body, Unknown):
        return body.event
    return str(body.__struct_config__.tag)


EVENT_NAMES: tuple[str, ...] = tuple(str(kind.__struct_config__.tag) for kind in AnyEvent.__args__)
"""Every tag this release writes."""
