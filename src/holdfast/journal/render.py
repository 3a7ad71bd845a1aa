"""One line of plain text for each event, for people; the terminal and the report both show these.

Guarantee: the text is one line and safe to print. A worker's message may hold anything, so control
characters (which could steer a terminal) are shown as escapes, and very long text is cut.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from itertools import zip_longest

from holdfast.journal.account_events import Account
from holdfast.journal.events import (
    AnyEvent,
    AttemptEnded,
    AttemptStarted,
    CadenceChosen,
    CheckpointsDeleted,
    CopiesDropped,
    CopyDeleted,
    CopyDrained,
    CopyFetched,
    CopyQuarantined,
    CopyReadBack,
    CopyReplaced,
    CopyReplicated,
    DataSkipped,
    Decision,
    DeterminismMeasured,
    DrainFailed,
    LeaseClaimed,
    LeaseLost,
    Line,
    OperatorActed,
    ProbationEnded,
    ReplicaFailed,
    Resumed,
    RunCreated,
    RunFinished,
    RungRejected,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    StandingChanged,
    StepRejected,
    StepsDone,
    StorageAlarm,
    ThroughputLow,
    Unknown,
    Verdict,
    Warned,
    WorkerFailed,
    WorkersStarted,
    decode_loss,
)
from holdfast.journal.render_cluster import ClusterEvent, render_cluster
from holdfast.journal.render_restarts import RestartEvent, render_restarts
from holdfast.journal.render_stragglers import StragglerEvent, render_stragglers
from holdfast.journal.restart_events import FunctionRestarted
from holdfast.journal.text import MAX_TEXT as MAX_TEXT
from holdfast.journal.text import Rendered as Rendered
from holdfast.journal.text import duration as duration
from holdfast.journal.text import number as number
from holdfast.journal.text import plural as plural
from holdfast.journal.text import printable as printable
from holdfast.journal.text import size as size

REPORTER = "rank-0"
"""The rank whose steps are shown."""


def _exit(code: int) -> str:
    """An exit code as from waitpid, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def worker_end(event: WorkerFailed) -> str:
    """How a worker ended: "rank 1 killed by SIGKILL", "rank 0 exited with code 1: ValueError: …"."""
    if event.exit_code < 0 or event.signal:
        named = event.signal if event.signal.startswith("SIG") else f"signal {-event.exit_code}"
        text = f"rank {event.rank} killed by {named}"
    elif event.left:
        text = f"rank {event.rank} left with exit code 0 while others still ran"
    else:
        text = f"rank {event.rank} exited with code {event.exit_code}"
    return printable(f"{text}: {event.message}" if event.message else text)


def _steps(event: StepsDone) -> str:
    count = max(len(event.seconds), len(event.loss), 1)
    last = event.first + count - 1
    text = f"step {last}" if count == 1 else f"steps {event.first}–{last}"
    recorded = [loss for loss in map(decode_loss, event.loss) if loss is not None]
    if len(recorded) == 1:
        text += f", loss {number(recorded[0])}"
    elif recorded:
        text += f", loss {number(recorded[0])} → {number(recorded[-1])}"
    broken = sum(1 for loss in recorded if not math.isfinite(loss))
    if broken:
        text += f" ({broken} not finite)"
    if event.seconds:
        text += f", {duration(sum(event.seconds) / len(event.seconds))} a step"
    return text


def _decision(event: Decision) -> Rendered:
    details = [f"because {printable(item)}" for item in event.evidence]
    for option in event.rejected:
        why = "; ".join(printable(reason) for reason in option.why) or "no reason given"
        details.append(f"not {printable(option.option)}: {why}")
    return Rendered(f"decided {printable(event.about)}: {printable(event.chosen)}", "decision", details)


def _judged(body: StepRejected | Verdict | ProbationEnded | StandingChanged) -> Rendered:
    match body:
        case StepRejected():
            whose = f" on {plural(len(body.ranks), 'rank')} ({', '.join(map(str, body.ranks))})"
            text = f"step {body.step} rejected{whose if body.ranks else ''}"
            text += f": {printable(body.then)}" if body.then else ""
            batch = [printable(body.batch)] if body.batch else []
            return Rendered(text, "fault", [*batch, *(printable(item) for item in body.reasons)])
        case Verdict():
            where = "/".join(printable(part) for part in (body.node, body.device) if part)
            text = f"verdict on step {body.step}: {printable(body.verdict)}{', ' + where if where else ''}"
            return Rendered(text, "decision", [f"because {printable(item)}" for item in body.evidence])
        case ProbationEnded():
            text = f"probation of {printable(body.checkpoint)}, steps {body.first}–{body.last}"
            style = {"passed": "good", "breached": "fault"}.get(body.outcome, "plain")
            details = [printable(item) for item in body.evidence]
            return Rendered(f"{text}: {printable(body.outcome)}", style, details)
        case StandingChanged():
            style = {"proven": "good", "acquitted": "good"}.get(body.standing, "warning")
            details = [f"because {printable(item)}" for item in body.evidence]
            text = f"{printable(body.checkpoint)} is {printable(body.standing)}"
            return Rendered(text, style, details)


def _percentiles(body: DeterminismMeasured) -> tuple[float, ...]:
    return body.p50, body.p90, body.p99, body.p999, body.largest


def render(body: AnyEvent | Unknown) -> Rendered:
    """What an event says."""
    if isinstance(body, ClusterEvent):
        return render_cluster(body)
    if isinstance(body, StragglerEvent):
        return render_stragglers(body)
    if isinstance(body, RestartEvent):
        return render_restarts(body)
    match body:
        case RunCreated():
            return Rendered(
                f"run {printable(body.run)} created; checkpoints in {printable(body.checkpoint_root)}",
                "plain",
            )
        case LeaseClaimed():
            return Rendered(f"lease claimed, epoch {body.epoch}: {printable(body.evidence)}", "plain")
        case LeaseLost():
            return Rendered(f"lease lost, epoch {body.epoch}: {printable(body.evidence)}", "fault")
        case AttemptStarted():
            where = f" on {plural(body.nodes, 'node')}" if body.nodes != 1 else ""
            under = f" under {printable(body.launcher)}" if body.launcher != "none" else ""
            return Rendered(f"attempt started: {plural(body.world_size, 'rank')}{where}{under}", "good")
        case WorkersStarted():
            how = "of %s go on" if body.kept else "started on %s"
            return Rendered(f"{plural(len(body.pids), 'worker')} {how % printable(body.node)}", "plain")
        case WorkerFailed():
            details = [f"last section: {printable(body.section)}"] if body.section else []
            if body.error_file:
                details.append(f"error file: {printable(body.error_file)}")
            return Rendered(worker_end(body), "fault", details)
        case AttemptEnded():
            code = f", {_exit(body.exit_code)}" if body.exit_code else ""
            step = f", last step {body.last_step}" if body.last_step else ""
            style = {"finished": "good", "stopped": "warning"}.get(body.outcome, "fault")
            return Rendered(f"attempt {printable(body.outcome)}{code}{step}", style)
        case Decision():
            return _decision(body)
        case Account():
            details = [f"because {printable(item)}" for item in body.why]
            details += [f"done: {printable(body.done)}", f"next: {printable(body.next)}"]
            return Rendered(printable(f"{body.who} {body.what}"), "fault", details)
        case RungRejected():
            reasons = "; ".join(printable(reason) for reason in body.reasons)
            return Rendered(f"rung rejected: {printable(body.checkpoint)}: {reasons}", "warning")
        case Resumed(checkpoint=None):
            return Rendered(f"fresh start, after {duration(body.seconds)}", "good")
        case Resumed():
            return Rendered(
                f"resumed at step {body.step} from {printable(body.checkpoint or '')} "
                f"in {duration(body.seconds)}",
                "good",
            )
        case SaveStarted():
            return Rendered(f"save started: {printable(body.checkpoint)}", "plain")
        case SaveCommitted():
            tier = " to the local tier" if body.tier == "local" else ""
            return Rendered(
                f"checkpoint committed{tier}: {printable(body.checkpoint)}, {size(body.bytes)} in "
                f"{duration(body.seconds)} (training stood still for {duration(body.blocked_seconds)})",
                "saved",
            )
        case SaveFailed():
            row = f" ({body.in_a_row} in a row)" if body.in_a_row > 1 else ""
            return Rendered(
                f"save failed{row}: {printable(body.checkpoint)}: {printable(body.error)}", "fault"
            )
        case SaveSkipped():
            return Rendered(f"save left out: {printable(body.checkpoint)}: {printable(body.reason)}", "fault")
        case CheckpointsDeleted():
            text = f"{plural(len(body.names), 'checkpoint')} deleted, {size(body.bytes)}"
            pairs = zip_longest(body.names, body.reasons, fillvalue="")
            return Rendered(text, "plain", [printable(f"{name}: {why}") for name, why in pairs])
        case CopyDrained():
            behind = f"; {plural(body.waiting, 'checkpoint')} waiting" if body.waiting else ""
            again = f", {plural(body.repeated, 'request')} repeated" if body.repeated else ""
            return Rendered(
                f"copied to {printable(body.remote)}: {printable(body.checkpoint)}, {size(body.bytes)} in "
                f"{duration(body.seconds)}{again}{behind}",
                "saved",
            )
        case DrainFailed():
            what = f"not copied to {printable(body.remote)}: {printable(body.checkpoint)}"
            return Rendered(f"{what}: {printable(body.error)}", "fault")
        case CopyDeleted():
            where = printable(body.remote)
            return Rendered(f"deleted from {where}: {printable(body.checkpoint)}", "plain")
        case CopyFetched():
            details = [f"because {printable(item)}" for item in body.because]
            if body.quarantine:
                details.append(f"the bad local copy is kept in {printable(body.quarantine)}")
            text = f"fetched from {printable(body.remote)}: {printable(body.checkpoint)}, {size(body.bytes)}"
            return Rendered(f"{text} in {duration(body.seconds)}", "good", details)
        case ReplicaFailed():
            what = f"rank {body.rank}'s part of {printable(body.checkpoint)}"
            text = f"no replica on {printable(body.node)} of {what}"
            return Rendered(text, "warning", [printable(body.error)])
        case CopyReplicated():
            what = f"rank {body.rank}'s part of {printable(body.checkpoint)}"
            text = f"replica on {printable(body.node)} of {what}, after {duration(body.seconds)}"
            return Rendered(text, "plain")
        case CopyReadBack():
            text = f"read back: {printable(body.checkpoint)}, {size(body.bytes)} in {duration(body.seconds)}"
            return Rendered(f"{text}, every byte is right", "plain")
        case CopyQuarantined():
            kind = f"{printable(body.kind)} copy on {printable(body.node)}"
            details = [printable(item) for item in body.reasons]
            return Rendered(f"quarantined: {kind} of {printable(body.checkpoint)}", "fault", details)
        case CopyReplaced():
            what = f"{printable(body.kind)} copy on {printable(body.node)} of rank {body.rank}'s part"
            took = f"{size(body.bytes)} from {printable(' and '.join(body.sources))}"
            text = f"replaced: {what} of {printable(body.checkpoint)}, {took} in {duration(body.seconds)}"
            return Rendered(text, "good")
        case CopiesDropped():
            details = [
                f"{printable(name)}: {printable(why)}"
                for name, why in zip(body.checkpoints, body.reasons, strict=False)
            ]
            what = f"its copies of {plural(len(body.checkpoints), 'checkpoint')}"
            return Rendered(f"{printable(body.node)} gave up {what}, {size(body.bytes)}", "plain", details)
        case StorageAlarm():
            found = printable(body.probe) or "it took and gave back what was written"
            details = [f"could not be used: {printable(name)}" for name in body.checkpoints]
            return Rendered(f"storage alarm: {printable(body.place)} was tried: {found}", "fault", details)
        case CadenceChosen():
            every = f" ({duration(body.seconds)})" if body.seconds > 0 else ""
            cost = f"; expected overhead {body.overhead:.2%}" if body.overhead > 0 else ""
            details = [f"because {printable(item)}" for item in body.evidence]
            details += [f"warning: {printable(item)}" for item in body.warnings]
            text = f"saving every {plural(body.interval, 'step')}{every}{cost}"
            return Rendered(text, "warning" if body.warnings else "decision", details)
        case StepsDone():
            return Rendered(_steps(body), "progress")
        case StepRejected() | Verdict() | ProbationEnded() | StandingChanged():
            return _judged(body)
        case ThroughputLow():
            text = f"slow: {duration(body.seconds)} a step, {duration(body.before)} before this resume"
            accused = f"; {printable(body.accused)} is slower than the others" if body.accused else ""
            return Rendered(f"{text}{accused}", "warning", [printable(item) for item in body.probes])
        case DataSkipped():
            what = f"batches {body.first}–{body.last} of epoch {body.epoch}"
            text = f"left out at step {body.step}: {what}"
            return Rendered(text, "warning", [f"because {printable(body.reason)}"])
        case DeterminismMeasured():
            parts = zip(("p50", "p90", "p99", "p99.9", "largest"), _percentiles(body), strict=True)
            text = ", ".join(f"{name} {value:.2g}" for name, value in parts)
            where = f" (rank {body.worst_rank})" if body.ranks > 1 and body.largest else ""
            on = f" on {body.ranks} ranks" if body.ranks > 1 else ""
            return Rendered(f"two runs of {plural(body.steps, 'step')}{on} differ by {text}{where}", "plain")
        case RunFinished():
            counts = [plural(body.samples, "sample")] if body.samples else []
            counts += [plural(body.tokens, "token")] if body.tokens else []
            return Rendered(f"run finished at step {body.step}{''.join(', ' + c for c in counts)}", "good")
        case OperatorActed():
            what = printable(f"{body.action.replace('_', ' ')} {body.subject}".strip())
            details = [f"because {printable(body.reason)}"] if body.reason else []
            return Rendered(f"{printable(body.by) or 'an operator'} asked: {what}", "decision", details)
        case Warned():
            return Rendered(printable(body.message), "warning")
        case Unknown():
            fields = ", ".join(f"{key}={value!r}" for key, value in body.fields.items())
            name = body.event.replace("_", " ")
            return Rendered(printable(f"{name} (from a newer release): {fields}"), "plain")


def condense(lines: Iterable[Line]) -> list[Line]:
    """The lines worth a person's time: every rank does the same steps, and starts again alike, so only those
    of rank 0 are kept, and its neighbouring batches of steps are joined into one."""
    joined: list[Line] = []
    for line in lines:
        if line.who != REPORTER and isinstance(line.body, StepsDone | FunctionRestarted):
            continue
        if not isinstance(line.body, StepsDone):
            joined.append(line)
            continue
        before = joined[-1] if joined else None
        if (
            before is not None
            and isinstance(before.body, StepsDone)
            and line.attempt == before.attempt
            and line.body.first == before.body.first + len(before.body.seconds)
        ):
            before.body.loss.extend([None] * (len(before.body.seconds) - len(before.body.loss)))
            before.body.loss.extend(line.body.loss)
            before.body.seconds.extend(line.body.seconds)
            before.at = line.at
        else:
            joined.append(_own(line, line.body))
    return joined


def _own(line: Line, steps: StepsDone) -> Line:
    """A copy that later batches may be joined to without touching the caller's line."""
    body = StepsDone(first=steps.first, seconds=[*steps.seconds], loss=[*steps.loss])
    return Line(v=line.v, at=line.at, who=line.who, attempt=line.attempt, seq=line.seq, body=body)
