"""The recovery runbook's judgements: what stopped a run, whose fault that is, and whether it may go on. Pure.

Guarantee: total. Every state of a run gets an answer, and what is not known is said to be not known; a
finding that stands in the way of a start carries the exit code that says why, and what to do about it.
Nothing here starts, drains or changes anything.

A stop that recovery decided on stands until somebody says that its cause is gone (`holdfast control
reset-budget`): starting again what fails again only costs machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.policy.classify import Cause
from holdfast.policy.unsettled import DEVICE, REPRODUCIBLE


class Mark(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Goes on, but somebody should know."""
    PROBLEM = "problem"
    """Stands in the way."""
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
    mark: Mark
    text: str
    evidence: list[str] = []
    code: int = 0
    """What `holdfast recover` ends with because of it; 0 unless it stands in the way."""
    next: str = ""
    """What to do about it."""


class StopFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A stop on request, as the journal tells it."""

    source: str
    """signal, stop_file, operator or time_limit."""
    detail: str
    saved: str | None = None
    """The checkpoint that holds the last step; None if it was not saved, empty if there was nothing to."""
    forced: str = ""
    """Why it ended without saving."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the records and the journal say of a run's end. What is not known keeps its default."""

    state: str
    """As `holdfast status` has it."""
    detail: str = ""
    attempt: int = 0
    exit_code: int | None = None
    cause: str = ""
    """What the incident was classified as when it happened."""
    incident: str = ""
    """It in one line."""
    step: int | None = None
    saved_step: int | None = None
    action: str = ""
    """What recovery decided after it."""
    decided_code: int = 0
    verdict: str = ""
    """On a step that was rejected: device or reproducible; empty if there is none."""
    reason: str = ""
    grounds: list[str] = []
    """What recovery's decision rests on."""
    failures: list[str] = []
    hang: str = ""
    """Where the reports of a hang lie; empty if there was none."""
    stop: StopFacts | None = None
    lease: str = ""
    """What is known of who held the run."""
    notes: list[str] = []
    """Other things of the last attempt that may have to do with its end."""
    forgiven: bool = False
    """Whether an operator reset the budget after the last attempt: its cause is said to be gone."""
    paused: str = ""
    problems: list[str] = []


LIVE = ("starting", "running", "stopping", "restarting", "paused")
"""States of a run that somebody holds: it is left alone."""
STANDING = frozenset(
    {
        ExitCode.FAILED,
        ExitCode.VALIDATION_FAILED,
        ExitCode.BUDGET_SPENT,
        ExitCode.STATE_MISFIT,
        ExitCode.NOTHING_LEFT,
    }
)
"""Stops that come again unless something has changed that nobody can see from here. The others are judged
anew: whether there is a rung, storage, a node, somebody who holds the run."""


def trigger(facts: Facts) -> Finding:
    """What stopped the run."""
    evidence = [*facts.failures, *facts.notes, *(f"could not be read: {text}" for text in facts.problems)]
    if facts.hang:
        evidence.append(f"reports of the hang: {facts.hang}")
    if facts.state in LIVE:
        waits = facts.state == "paused"
        return Finding(
            stage=Stage.TRIGGER,
            mark=Mark.PROBLEM,
            text=f"nothing: the run is alive ({facts.state}, attempt {facts.attempt}{_at(facts)})",
            evidence=[text for text in (facts.lease, facts.detail) if text],
            code=int(ExitCode.RUN_IS_LIVE),
            next="`holdfast control unpause RUN` lets it go on"
            if waits
            else "watch it with `holdfast status RUN --watch`",
        )
    if facts.state == "new":
        return Finding(stage=Stage.TRIGGER, mark=Mark.NOTE, text="nothing: no attempt has ever begun")
    if facts.state == "finished":
        text = f"nothing: the run finished{_at(facts)} (attempt {facts.attempt})"
        return Finding(stage=Stage.TRIGGER, mark=Mark.NOTE, text=text)
    if facts.state == "lost":
        what = f"attempt {facts.attempt} was lost with its launcher{_at(facts)}: it left no end"
        found = [f"the lease: {facts.lease}"] if facts.lease else []
        return Finding(stage=Stage.TRIGGER, mark=Mark.NOTE, text=what, evidence=[*found, *evidence])
    if facts.stop is not None and facts.state == "stopped":
        what = f"attempt {facts.attempt} was asked to stop{_at(facts)}: {facts.stop.detail}"
        return Finding(
            stage=Stage.TRIGGER, mark=Mark.NOTE, text=what, evidence=[_kept(facts.stop), *evidence]
        )
    if facts.state == "stopped":
        what = f"attempt {facts.attempt} was stopped{_at(facts)} {facts.detail}".rstrip()
        return Finding(stage=Stage.TRIGGER, mark=Mark.NOTE, text=what, evidence=evidence)
    what = facts.incident or f"attempt {facts.attempt} failed{_at(facts)}: {facts.detail}"
    decided = [f"decided: {facts.action}, {facts.reason}"] if facts.action else []
    found = list(dict.fromkeys([*evidence, *decided, *facts.grounds]))
    return Finding(stage=Stage.TRIGGER, mark=Mark.NOTE, text=what, evidence=found)


def _kept(stop: StopFacts) -> str:
    if stop.saved:
        text = f"its state is saved as {stop.saved}"
    elif stop.saved is not None:
        text = "there was nothing to save"
    else:
        text = "it ended without saving"
    return f"{text}: {stop.forced}" if stop.forced else text


class Side(StrEnum):
    """Whose fault it is, as far as what to do next depends on it."""

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
    Side.INFRASTRUCTURE: "something around the job broke: a start on machines that are well goes on",
    Side.JOB: "the job's own doing: it comes again unless its code or settings change",
    Side.DATA: "the same samples come again unless they change or are left out",
    Side.CHECKPOINT: "a checkpoint: a rung that is sound goes on",
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
"""A step that fails alike on any device fails for what it works on; one that follows a device, for that."""
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
    if facts.verdict in _BY_VERDICT:  # what came of an incident says more than what it looked like at first
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
        mark = Mark.NOTE if held else Mark.OK
        return Finding(stage=Stage.CLASSIFY, mark=mark, text=text, evidence=held)
    meaning, remedy = MEANINGS[ExitCode(facts.decided_code)]
    if facts.forgiven:
        told = [f"the stop with code {facts.decided_code} is forgiven: an operator reset the budget after it"]
        return Finding(stage=Stage.CLASSIFY, mark=Mark.NOTE, text=text, evidence=told)
    return Finding(
        stage=Stage.CLASSIFY,
        mark=Mark.PROBLEM,
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
    """Of the first finding that stands in the way; one that somebody holds the run outranks all."""
    codes = [finding.code for finding in findings if finding.code]
    return int(ExitCode.RUN_IS_LIVE) if ExitCode.RUN_IS_LIVE in codes else next(iter(codes), 0)


class NotStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run is not started again."""

    text: str
    code: int = 0
    """What to end with; 0 if the findings have said it."""
    question: str = ""
    """What to ask a person, whose word overrules it; empty if nobody's does."""


def why_not_started(
    findings: Sequence[Finding], answer: str, *, known: bool, submit: str
) -> NotStarted | None:
    """Only a stop that recovery decided on can be overruled. None: it may be started.

    `known`: whether there is a command; `submit`: how else to start it, if it must not be run here.
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
