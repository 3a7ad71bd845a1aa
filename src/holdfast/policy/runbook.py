"""The recovery runbook's judgements: what stopped a run, whether it may go on, and from which rung. Pure.

Guarantee: total. Every state of a run gets an answer, and whatever is not known is reported as not known; a
finding that stands in the way of a start carries the exit code that says why, and what to do about it.
Nothing here starts, drains or changes anything.

A stop that recovery decided on stands until somebody says that its cause is gone (`holdfast control
reset-budget`): to start what will fail again only wastes machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.base import plural
from holdfast.errors import MEANINGS, ExitCode
from holdfast.policy.placement import Cluster, Exclusion, fit, shrinkable
from holdfast.policy.signs import Cause
from holdfast.policy.verdicts import DEVICE, REPRODUCIBLE


class StageMark(StrEnum):
    OK = "ok"
    NOTE = "note"
    """It does not prevent a start, but somebody should know."""
    PROBLEM = "problem"
    """It stands in the way of a start."""
    UNKNOWN = "unknown"


class Stage(StrEnum):
    """In the order of the runbook."""

    TRIGGER = "trigger"
    CLASSIFY = "classify"
    NODES = "nodes"
    CAPACITY = "capacity"
    STORAGE = "storage"
    LOCATE = "locate"
    VERIFY = "verify"
    RUNG = "rung"
    WORLD = "world"
    COMMAND = "command"
    RESUME = "resume"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage found."""

    stage: Stage
    mark: StageMark
    text: str
    evidence: list[str] = []
    code: int = 0
    """What `holdfast recover` ends with because of this; 0 unless it stands in the way."""
    next: str = ""
    """What to do about it."""


class StopFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A stop on request, according to the journal."""

    source: str
    """signal, stop_file, operator or time_limit."""
    detail: str
    saved: str | None = None
    """The checkpoint that holds the last step; None if it was not saved, empty if nothing had to be."""
    forced: str = ""
    """Why it ended without saving."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the records and the journal say about a run's end. What is not known keeps its default."""

    state: str
    """As `holdfast status` shows it."""
    detail: str = ""
    attempt: int = 0
    exit_code: int | None = None
    cause: str = ""
    """What the incident was classified as when it happened."""
    incident: str = ""
    """The incident in one line."""
    step: int | None = None
    saved_step: int | None = None
    action: str = ""
    """What recovery decided after it."""
    decided_code: int = 0
    verdict: str = ""
    """The verdict on a rejected step: device or reproducible; empty if there is none."""
    reason: str = ""
    grounds: list[str] = []
    """What recovery's decision rests on."""
    failures: list[str] = []
    hang: str = ""
    """Where the reports of a hang are; empty if there was none."""
    stop: StopFacts | None = None
    lease: str = ""
    """What is known about who held the run."""
    notes: list[str] = []
    """Other things about the last attempt that may have to do with its end."""
    forgiven: bool = False
    """Whether an operator reset the budget after the last attempt, and so said that its cause is gone."""
    paused: str = ""
    problems: list[str] = []


LIVE = ("starting", "running", "stopping", "restarting", "paused")
"""States of a run that somebody holds, and that is therefore left alone."""
STANDING = frozenset(
    {
        ExitCode.FAILED,
        ExitCode.VALIDATION_FAILED,
        ExitCode.BUDGET_SPENT,
        ExitCode.STATE_MISFIT,
        ExitCode.NOTHING_LEFT,
    }
)
"""Stops that will come again unless something has changed that nobody can see from here. The others are
judged afresh: whether there is a rung, storage, a node, and whether somebody holds the run."""


def trigger(facts: Facts) -> Finding:
    """What stopped the run."""
    evidence = [*facts.failures, *facts.notes, *(f"could not be read: {text}" for text in facts.problems)]
    if facts.hang:
        evidence.append(f"reports of the hang: {facts.hang}")
    if facts.state in LIVE:
        waits = facts.state == "paused"
        return Finding(
            stage=Stage.TRIGGER,
            mark=StageMark.PROBLEM,
            text=f"nothing: the run is alive ({facts.state}, attempt {facts.attempt}{_at(facts)})",
            evidence=[text for text in (facts.lease, facts.detail) if text],
            code=int(ExitCode.RUN_IS_LIVE),
            next="`holdfast control unpause RUN` lets it go on"
            if waits
            else "watch it with `holdfast status RUN --watch`",
        )
    if facts.state == "new":
        return Finding(stage=Stage.TRIGGER, mark=StageMark.NOTE, text="nothing: no attempt has ever begun")
    if facts.state == "finished":
        text = f"nothing: the run finished{_at(facts)} (attempt {facts.attempt})"
        return Finding(stage=Stage.TRIGGER, mark=StageMark.NOTE, text=text)
    if facts.state == "lost":
        what = f"attempt {facts.attempt} was lost with its launcher{_at(facts)}: it recorded no end"
        found = [f"the lease: {facts.lease}"] if facts.lease else []
        return Finding(stage=Stage.TRIGGER, mark=StageMark.NOTE, text=what, evidence=[*found, *evidence])
    if facts.stop is not None and facts.state == "stopped":
        what = f"attempt {facts.attempt} was asked to stop{_at(facts)}: {facts.stop.detail}"
        return Finding(
            stage=Stage.TRIGGER, mark=StageMark.NOTE, text=what, evidence=[_kept(facts.stop), *evidence]
        )
    if facts.state == "stopped":
        what = f"attempt {facts.attempt} was stopped{_at(facts)} {facts.detail}".rstrip()
        return Finding(stage=Stage.TRIGGER, mark=StageMark.NOTE, text=what, evidence=evidence)
    what = facts.incident or f"attempt {facts.attempt} failed{_at(facts)}: {facts.detail}"
    decided = [f"decided: {facts.action}, {facts.reason}"] if facts.action else []
    found = list(dict.fromkeys([*evidence, *decided, *facts.grounds]))
    return Finding(stage=Stage.TRIGGER, mark=StageMark.NOTE, text=what, evidence=found)


def _kept(stop: StopFacts) -> str:
    if stop.saved:
        text = f"its state is saved as {stop.saved}"
    elif stop.saved is not None:
        text = "there was nothing to save"
    else:
        text = "it ended without saving"
    return f"{text}: {stop.forced}" if stop.forced else text


class Side(StrEnum):
    """Whose fault it is, as far as that matters for what to do next."""

    NOBODY = "nobody"
    INFRASTRUCTURE = "infrastructure"
    JOB = "job"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    PREEMPTION = "preemption"
    OPERATOR = "operator"
    UNKNOWN = "unknown"


_SIDES = {
    Cause.PREEMPTION: Side.PREEMPTION,
    Cause.INFRASTRUCTURE: Side.INFRASTRUCTURE,
    Cause.DEVICE: Side.INFRASTRUCTURE,
    Cause.JOB: Side.JOB,
    Cause.DATA: Side.DATA,
    Cause.CHECKPOINT: Side.CHECKPOINT,
    Cause.HANG: Side.UNKNOWN,
    Cause.UNKNOWN: Side.UNKNOWN,
}
_MEANT = {
    Side.NOBODY: "there is nothing to recover from",
    Side.INFRASTRUCTURE: "something around the job broke: a start on healthy machines can go on",
    Side.JOB: "the job's own doing: it will come again unless its code or settings change",
    Side.DATA: "the same samples come again unless they are changed or left out",
    Side.CHECKPOINT: "a checkpoint is at fault: a start from a sound rung can go on",
    Side.PREEMPTION: "somebody needed the machines: it says nothing about the job",
    Side.OPERATOR: "a person wanted it",
    Side.UNKNOWN: "the evidence does not say whose fault it is",
}
_BY_CODE = {
    ExitCode.VALIDATION_FAILED: Side.JOB,
    ExitCode.STATE_MISFIT: Side.JOB,
    ExitCode.NO_VALID_RUNG: Side.CHECKPOINT,
    ExitCode.SAVE_FAILED: Side.INFRASTRUCTURE,
    ExitCode.CONTROL_UNUSABLE: Side.INFRASTRUCTURE,
    ExitCode.STORAGE_FAILED: Side.INFRASTRUCTURE,
    ExitCode.STORE_LOST: Side.INFRASTRUCTURE,
    ExitCode.NO_CAPACITY: Side.INFRASTRUCTURE,
    ExitCode.REQUEUE_WANTED: Side.INFRASTRUCTURE,
    ExitCode.PAUSED_TOO_LONG: Side.OPERATOR,
}
_BY_VERDICT = {REPRODUCIBLE: Side.DATA, DEVICE: Side.INFRASTRUCTURE}
"""A step that fails alike on any device is the data's fault; one that follows a device is the device's."""
_INTERRUPTED = 128 + 2


def side_of(facts: Facts) -> Side:
    """Infrastructure, job, data, checkpoint, preemption, an operator, or nobody."""
    if facts.state in (*LIVE, "new", "finished"):
        return Side.NOBODY
    if facts.state == "lost":
        return Side.INFRASTRUCTURE
    if facts.state == "stopped":
        asked = facts.stop
        by_hand = asked is not None and (
            asked.source in ("operator", "stop_file") or "SIGINT" in asked.detail
        )
        return Side.OPERATOR if by_hand or facts.exit_code == _INTERRUPTED else Side.PREEMPTION
    if facts.verdict in _BY_VERDICT:  # what an incident turned out to be outweighs what it first looked like
        return _BY_VERDICT[facts.verdict]
    if facts.cause in set(Cause):
        return _SIDES[Cause(facts.cause)]
    code = facts.decided_code or facts.exit_code or 0
    return _BY_CODE.get(ExitCode(code), Side.UNKNOWN) if code in set(ExitCode) else Side.UNKNOWN


def classify(facts: Facts) -> Finding:
    """Whose fault it is, and whether that stands in the way of a start."""
    side = side_of(facts)
    text = f"{side}: {_MEANT[side]}"
    held = (
        [f"recovery is paused by {facts.paused}: a start begins, its next failure waits"]
        if facts.paused
        else []
    )
    if facts.state != "failed" or facts.action != "stop" or facts.decided_code not in STANDING:
        mark = StageMark.NOTE if held else StageMark.OK
        return Finding(stage=Stage.CLASSIFY, mark=mark, text=text, evidence=held)
    meaning, remedy = MEANINGS[ExitCode(facts.decided_code)]
    if facts.forgiven:
        forgiven = [
            f"the stop with code {facts.decided_code} is forgiven: an operator reset the budget after it"
        ]
        return Finding(stage=Stage.CLASSIFY, mark=StageMark.NOTE, text=text, evidence=forgiven)
    return Finding(
        stage=Stage.CLASSIFY,
        mark=StageMark.PROBLEM,
        text=text,
        evidence=[f"recovery stopped with code {facts.decided_code}: {meaning}", facts.reason],
        code=facts.decided_code,
        next=f"{remedy}; once its cause is gone, say so with `holdfast control reset-budget RUN --reason …`",
    )


def _at(facts: Facts) -> str:
    if facts.step is None:
        return ""
    saved = "" if facts.saved_step is None else f", saved up to step {facts.saved_step}"
    return f" after step {facts.step}{saved}"


def exit_code(findings: Sequence[Finding]) -> int:
    """The code of the first finding that stands in the way; "somebody holds the run" outranks all others."""
    codes = [finding.code for finding in findings if finding.code]
    return int(ExitCode.RUN_IS_LIVE) if ExitCode.RUN_IS_LIVE in codes else next(iter(codes), 0)


class NotStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run is not started again."""

    text: str
    code: int = 0
    """What to end with; 0 if the findings have already said it."""
    question: str = ""
    """What to ask a person, whose word can overrule it; empty if nobody can."""


def why_not_started(
    findings: Sequence[Finding], answer: str, *, known: bool, submit: str
) -> NotStarted | None:
    """Why not; None if it may be started. Only a stop that recovery decided on can be overruled.

    `known`: whether there is a command; `submit`: how else to start the run, if that must not be done here.
    """
    blocking = [one for one in findings if one.code]
    if any(one.stage is not Stage.CLASSIFY for one in blocking):
        return NotStarted(text=answer)
    if not known:
        text = "how it was started is not known: give the command after `--`"
        return NotStarted(text=text, code=int(ExitCode.USAGE))
    if submit:
        return NotStarted(text=submit, code=int(ExitCode.USAGE))
    if not blocking:
        return None
    stands = blocking[0]
    return NotStarted(
        text=f"{stands.text}. Give --yes to start it all the same",
        question=f"{stands.evidence[0]} Start it all the same?",
    )


# Whether a stopped run has what it needs to go on: nodes, storage, and ranks that fit. Pure.
#
# This is the part of the recovery runbook that looks ahead; the part above looks back.


# --- nodes and capacity ------------------------------------------------------------------------------------


class Suspected(msgspec.Struct, frozen=True, kw_only=True):
    """A node, or a device of one, that there is evidence against."""

    node: str
    device: str | None = None
    why: str
    sure: bool = False
    """Whether the hardware or a health check itself says so; if not, it is only where things went wrong."""


class NodeDrain(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    device: str | None = None
    reason: str

    def describe(self) -> str:
        return self.node if self.device is None else f"device {self.device} of {self.node}"


TWICE = 2
"""How often a place must have been named for its faults to count against it: once is chance."""


def nodes_to_drain(suspected: Sequence[Suspected], cluster: Cluster) -> tuple[list[NodeDrain], Finding]:
    """What to take out of service before the run is started again.

    That is what the hardware or a health check accuses, and, if the rest suffices, where things went wrong
    twice.
    """
    places: dict[tuple[str, str | None], list[Suspected]] = {}
    for one in suspected:
        out = any(e.node == one.node and e.device in (None, one.device) for e in cluster.excluded)
        if not out:
            places.setdefault((one.node, one.device), []).append(one)
    drains: list[NodeDrain] = []
    looked: list[str] = []
    for (node, device), known in sorted(places.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        reason = next((one.why for one in known if one.sure), known[-1].why)
        drain = NodeDrain(node=node, device=device, reason=reason)
        without = _without(cluster, [*drains, drain])
        enough = not fit(without, max(cluster.min_nodes, 1)).missing
        if any(one.sure for one in known) or (len(known) >= TWICE and enough):
            drains.append(drain)
        else:
            only = "the rest would not suffice without it" if not enough else "once is no pattern"
            looked.append(f"look at {drain.describe()}: {reason} ({only})")
    kept_out = [
        f"{e.node}{'' if e.device is None else f', device {e.device}'} is out already: {e.reason}"
        for e in cluster.excluded
    ]
    if drains:
        names = ", ".join(drain.describe() for drain in drains)
        reasons = [f"{drain.describe()}: {drain.reason}" for drain in drains]
        text = f"to be drained: {names}"
        return drains, Finding(
            stage=Stage.NODES, mark=StageMark.NOTE, text=text, evidence=[*reasons, *looked, *kept_out]
        )
    return [], Finding(
        stage=Stage.NODES,
        mark=StageMark.NOTE if looked else StageMark.OK,
        text="none to drain",
        evidence=[*looked, *kept_out],
    )


def _without(cluster: Cluster, drains: Sequence[NodeDrain]) -> Cluster:
    gone = [Exclusion(drain.node, drain.device, drain.reason) for drain in drains]
    return msgspec.structs.replace(cluster, excluded=[*cluster.excluded, *gone])


def nodes_to_start_with(cluster: Cluster, drains: Sequence[NodeDrain]) -> int | None:
    """How many nodes a start would have, if the run may shrink; None where only its launch says that."""
    if not shrinkable(cluster):
        return None
    found = fit(_without(cluster, drains), cluster.max_nodes)
    return len(found.nodes) if found.nodes and not found.missing else None


class NodeOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that a scheduler has for the run now, without those that are kept out."""

    by: str
    nodes: int
    queues: bool
    """Whether a start waits in its queue until there are enough; a running job keeps the nodes it has."""


def capacity(cluster: Cluster, drains: Sequence[NodeDrain], offer: NodeOffer | None) -> Finding:
    """Whether there are enough nodes: enough, shrink, or wait.

    `offer`: None if there is no scheduler to ask, or no answer; then the last attempts' nodes count.
    """
    if not cluster.nodes and offer is None:
        return Finding(
            stage=Stage.CAPACITY, mark=StageMark.UNKNOWN, text="not known: the run has no record of its nodes"
        )
    wanted = max(cluster.max_nodes or len(cluster.nodes), cluster.min_nodes)
    if offer is not None:
        return _offered(cluster, offer, wanted)
    found = fit(_without(cluster, drains), wanted)
    have = f"{len(found.nodes)} of {wanted} node{'s' * (wanted != 1)}"
    if found.missing:
        tied = f" (fewer cannot go on: {cluster.tied})" if cluster.may_shrink and cluster.tied else ""
        return _too_few(f"wait: {have} usable, {found.missing} more needed{tied}")
    if found.shrinks:
        text = f"shrink: {have} usable, and the run may go on with {cluster.min_nodes} or more"
        return Finding(stage=Stage.CAPACITY, mark=StageMark.NOTE, text=text)
    where = ", ".join(found.nodes[:8]) + (" …" if len(found.nodes) > 8 else "")
    new = [f"{node} is new to the run: it takes the place of one that is out" for node in found.spares]
    mark = StageMark.NOTE if new else StageMark.OK
    return Finding(stage=Stage.CAPACITY, mark=mark, text=f"enough: {have} ({where})", evidence=new)


def _offered(cluster: Cluster, offer: NodeOffer, wanted: int) -> Finding:
    have = f"{offer.by} has {offer.nodes} {'free' if offer.queues else 'usable'}, {wanted} are wanted"
    if offer.nodes >= wanted:
        return Finding(stage=Stage.CAPACITY, mark=StageMark.OK, text=f"enough: {have}")
    if shrinkable(cluster) and offer.nodes >= cluster.min_nodes:
        text = f"shrink: {have}, and the run may go on with {cluster.min_nodes} or more"
        return Finding(stage=Stage.CAPACITY, mark=StageMark.NOTE, text=text)
    if not offer.queues:
        return _too_few(f"wait: {have}")
    text = f"wait: {have}; the job waits in the queue until there are enough"
    return Finding(stage=Stage.CAPACITY, mark=StageMark.NOTE, text=text)


def _too_few(text: str) -> Finding:
    code = ExitCode.NO_CAPACITY
    return Finding(
        stage=Stage.CAPACITY, mark=StageMark.PROBLEM, text=text, code=int(code), next=MEANINGS[code][1]
    )


# --- storage, and the number of ranks ----------------------------------------------------------------------


class StorageFacts(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    what: str
    """What is kept there: the checkpoints, or the run's memory."""
    problem: str = ""
    """What a test of it showed; empty if what is written can be read back."""
    free: int | None = None
    needed: int = 0
    """How many bytes the next save takes; 0 if not known."""
    code: int = int(ExitCode.SAVE_FAILED)
    """What a start would end with if it cannot be written."""


def storage(places: Sequence[StorageFacts], alarm: Sequence[str]) -> Finding:
    """Whether the storage can be trusted, and has room for the next save."""
    evidence: list[str] = []
    code, remedy = 0, ""
    for one in places:
        short = one.free is not None and one.free < one.needed
        if one.problem:
            evidence.append(f"{one.what} in {one.place}: {one.problem}")
        elif short:
            evidence.append(
                f"{one.what} in {one.place}: {one.free} bytes free, the next save takes {one.needed}"
            )
        else:
            evidence.append(f"{one.what} in {one.place}: written, made durable, moved and read back")
        if (one.problem or short) and not code:
            code, remedy = one.code, MEANINGS[ExitCode(one.code)][1]
    if alarm:
        doubt = f"storage alarm: {' and '.join(alarm)}, one after the other, cannot be used"
        works = "the storage was tried and works, so the next older checkpoint counts"
        evidence.append(doubt if code else f"{doubt}; {works}")
    if code:
        text = "cannot be used as it is"
        return Finding(
            stage=Stage.STORAGE, mark=StageMark.PROBLEM, text=text, evidence=evidence, code=code, next=remedy
        )
    mark = StageMark.NOTE if alarm else StageMark.OK
    text = "what is written can be read back"
    return Finding(stage=Stage.STORAGE, mark=mark, text=text, evidence=evidence)


def world(saved: int | None, wanted: int | None, *, shared: bool | None, tied: str = "") -> Finding:
    """Whether that many ranks can take up what others saved.

    `shared`: the data position is a global one. `tied`: what ties the state to the ranks that saved it.
    """
    if saved is None or wanted is None:
        known = "the number of ranks that a start would have" if wanted is None else "how many ranks saved it"
        return Finding(stage=Stage.WORLD, mark=StageMark.UNKNOWN, text=f"{known} is not known")
    if saved == wanted:
        return Finding(
            stage=Stage.WORLD,
            mark=StageMark.OK,
            text=f"{plural(saved, 'rank')} saved it, as many would start",
        )
    both = f"{plural(saved, 'rank')} saved it, {plural(wanted, 'rank')} would start"
    if tied:
        return Finding(
            stage=Stage.WORLD,
            mark=StageMark.PROBLEM,
            text=f"{both}: refused",
            evidence=[f"{tied}, and nothing says of which whole they are parts"],
            code=int(ExitCode.STATE_MISFIT),
            next=f"start {plural(saved, 'rank')}; run.track(layout=…) declares it for later checkpoints",
        )
    if shared is None:
        text = f"{both}: whether its data position can be shared out is known only when it is loaded"
        return Finding(stage=Stage.WORLD, mark=StageMark.UNKNOWN, text=text)
    if shared:
        resharded = ["tensors and the data position are resharded; random generators are seeded anew"]
        return Finding(
            stage=Stage.WORLD, mark=StageMark.NOTE, text=f"{both}: resharding is fine", evidence=resharded
        )
    return Finding(
        stage=Stage.WORLD,
        mark=StageMark.PROBLEM,
        text=f"{both}: refused",
        evidence=["its loader keeps one data position per rank: samples would be repeated or left out"],
        code=int(ExitCode.STATE_MISFIT),
        next=f"start {plural(saved, 'rank')}; with holdfast.GlobalBatches any number could go on",
    )


# --- the command -------------------------------------------------------------------------------------------


def command(
    shown: str | None, *, nodes: int = 1, missing: Sequence[str] = (), submit: str = "", wrong: str = ""
) -> Finding:
    """How to start the run again. `shown`: the command in words, None if not known.

    `missing`: variables that only the last launch had; `submit`: how to start the run where the command must
    not be run here; `wrong`: why the command would not start this run.
    """
    if shown is None:
        return Finding(
            stage=Stage.COMMAND,
            mark=StageMark.UNKNOWN,
            text="not known: the run was not started by `holdfast run`",
            next="start it as before, or give the command after `--`",
        )
    if wrong and not submit:
        return Finding(
            stage=Stage.COMMAND,
            mark=StageMark.PROBLEM,
            text=shown,
            evidence=[wrong],
            code=int(ExitCode.USAGE),
            next="give the command that starts this run after `--`",
        )
    evidence = [f"set for the last launch, and not here: {', '.join(missing)}"] if missing else []
    if submit:
        evidence.append(submit)
    elif nodes > 1:
        evidence.append(f"on each of {nodes} nodes, or through the batch script again")
    return Finding(
        stage=Stage.COMMAND, mark=StageMark.NOTE if evidence else StageMark.OK, text=shown, evidence=evidence
    )
