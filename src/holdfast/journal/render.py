"""One line of plain text for each event, for people; the terminal and the report both show these.

Guarantee: the text is one line and safe to print. A worker's message may hold anything, so control
characters (which could steer a terminal) are shown as escapes, and very long text is cut.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Iterable
from itertools import zip_longest

from holdfast.base import Rendered, duration, moment, number, plural, printable, size
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

# One line of plain text for each event of life on a cluster; see render.py.


ClusterEvent = (
    StopAsked
    | StopHastened
    | StopAgreed
    | StopSaved
    | StopForced
    | JobFound
    | RequeueAsked
    | HealthFailed
    | PingFailed
)


def render_cluster(body: ClusterEvent) -> Rendered:
    match body:
        case StopAsked():
            limit = "" if body.seconds is None else f"; {duration(body.seconds)} until the deadline"
            return Rendered(f"asked to stop: {printable(body.detail)}{limit}", "decision")
        case StopHastened():
            text = f"the stop must be over within {duration(body.seconds)}: {printable(body.why)}"
            return Rendered(text, "warning")
        case StopAgreed():
            return Rendered(
                f"all ranks stop after step {body.step} (agreed in {duration(body.after)})", "decision"
            )
        case StopSaved():
            return _saved(body)
        case StopForced():
            whose = f"rank {body.rank}" if body.rank is not None else "the workers"
            details = [f"stacks: {printable(body.stacks)}"] if body.stacks else []
            return Rendered(f"{whose} ended by force: {printable(body.why)}", "fault", details)
        case JobFound():
            return _job(body)
        case RequeueAsked():
            what = "was asked to queue" if body.asked else "was not asked to queue"
            details = [f"without {', '.join(map(printable, body.exclude))}"] if body.exclude else []
            text = f"the scheduler {what} job {printable(body.job)} again: {printable(body.reason)}"
            return Rendered(text, "decision" if body.asked else "plain", details)
        case HealthFailed():
            then = "; it is kept out" if body.kept_out else ""
            text = f"health of {printable(body.node)} is {printable(body.status)}{then}"
            return Rendered(
                text, "fault" if body.kept_out else "warning", [printable(one) for one in body.problems]
            )
        case PingFailed():
            who = f"{plural(len(body.missing), 'rank')} ({', '.join(map(str, body.missing))})"
            return Rendered(
                f"no answer to the ping at step {body.step} from {who} in {duration(body.seconds)}", "fault"
            )


def _saved(body: StopSaved) -> Rendered:
    if not body.checkpoint:
        return Rendered(f"stopped at step {body.step}: there was nothing to save", "good")
    how = "was saved already" if body.already else f"saved in {duration(body.seconds)}"
    text = f"stopped after step {body.step}: {printable(body.checkpoint)} {how}"
    return Rendered(f"{text}, {duration(body.after)} after it was asked", "good")


def _job(body: JobFound) -> Rendered:
    text = f"{printable(body.scheduler)} job {printable(body.job)} on {plural(len(body.nodes), 'node')}"
    text += f", queued again {plural(body.restarts, 'time')}" if body.restarts else ""
    details = []
    if body.ends_at is not None:
        details.append(f"ends at {moment(body.ends_at)}")
    if body.requeue == "never":
        details.append("is not to be queued again: slurm.requeue = never")
    return Rendered(text, "plain", details)


# One line of plain text for each event of in-process restart; see render.py.


RestartEvent = RestartFaulted | RestartPlanned | RestartHandedOver | FunctionRestarted

_BEFELL = {
    "exception": "raised",
    "lost": "ended",
    "soft_timeout": "stood still",
    "hard_timeout": "was ended by its keeper",
    "silent": "was lost with its node",
    "late": "did not come to the barrier",
    "unfit": "is not fit to go on",
    "asked": "asked for a restart",
}


def restart_fault(event: RestartFaulted) -> str:
    """What befell whom: "rank 1 on a raised: ValueError: bad sample"."""
    reserve = f"reserve {event.member}" if event.member >= 0 else "a process"
    who = reserve if event.rank is None else f"rank {event.rank}"
    where = f" on {event.node}" if event.node else ""
    text = f"{who}{where} {_BEFELL.get(event.kind, event.kind)}"
    return printable(f"{text}: {event.detail}" if event.detail else text)


def render_restarts(body: RestartEvent) -> Rendered:
    match body:
        case RestartFaulted():
            details = [f"after step {body.step}"] if body.step else []
            return Rendered(restart_fault(body), "fault", details)
        case RestartPlanned():
            return _planned(body)
        case RestartHandedOver():
            text = f"not restarted in place after iteration {body.iteration}: {printable(body.reason)}"
            return Rendered(text, "fault", [f"the processes end with code {body.exit_code}"])
        case FunctionRestarted():
            text = f"iteration {body.iteration} begins as rank {body.rank}"
            return Rendered(f"{text}, {duration(body.seconds)} after the last one ended", "good")


def _planned(body: RestartPlanned) -> Rendered:
    text = f"restart in place: iteration {body.iteration} with {plural(body.world_size, 'rank')}"
    text += f" and {plural(len(body.reserves), 'reserve')}" if body.reserves else ""
    text += f", planned {duration(body.seconds)} after the fault" if body.seconds else ""
    details = [f"because {printable(body.reason)}"] if body.reason else []
    if body.promoted:
        details.append(f"promoted: {', '.join(_placed(body, member) for member in body.promoted)}")
    return Rendered(text, "decision", details)


def _placed(body: RestartPlanned, member: int) -> str:
    return f"process {member} as rank {body.order.index(member) if member in body.order else member}"


# One line of plain text for each event of the straggler detector; see render.py.


StragglerEvent = StragglersReported | StragglerFound


def render_stragglers(body: StragglerEvent) -> Rendered:
    match body:
        case StragglersReported():
            return _report(body)
        case StragglerFound():
            then = {"stop": "; the run saves and stops", "exclude": "; the run goes on without it"}
            text = f"straggler: {printable(body.why)}{then.get(body.then, '')}"
            return Rendered(text, "fault" if body.then in then else "warning")


def _report(body: StragglersReported) -> Rendered:
    what = "node" if body.by_node else "rank"
    text = f"{plural(len(body.ranks), what)} compared over {plural(body.steps, 'step')}"
    text += f" of {duration(body.step_seconds)}"
    scored = [
        (score, rank) for score, rank in zip(body.relative, body.ranks, strict=False) if score is not None
    ]
    if scored:
        score, rank = min(scored)
        text += f"; the slowest is rank {rank} with a score of {score:.2f}"
    if body.group_slower:
        text += "; most ranks are slower than they were, so nobody can be named"
    return Rendered(text, "warning" if body.group_slower else "progress")


# What is printed of a save: one line for each of its events, stable and made to be searched for.
#
# ```
# holdfast: save scheduled: step 12, step_00000012-3fa9c1d2
# holdfast: save committed: step 12, step_00000012-3fa9c1d2, local, 1.2 GiB in 310 ms, training …
# holdfast: save replicated: step 12, step_00000012-3fa9c1d2, rank 0's part on node-b in 800 ms
# holdfast: save drained: step 12, step_00000012-3fa9c1d2, to the checkpoint root, 1.2 GiB in 3.1 s
# holdfast: save verified: step 12, step_00000012-3fa9c1d2, read back, 1.2 GiB in 6.0 s
# ```
# `docs/guides/async-saves.md` has the table of them. What fails has words of its own: `save failed` is an
# error in the log of rank 0 and so not printed a second time.


KEPT = 100
"""Local commits that are remembered: what comes to the root later was drained there."""


class SaveLines:
    """Lines for the events of one run's saves, in the order in which they came."""

    def __init__(self) -> None:
        self._local: deque[str] = deque(maxlen=KEPT)

    def line(self, body: object) -> str | None:
        """What to print for an event; None if it is none of a save's."""
        if not isinstance(body, Event):
            return None
        match body:
            case SaveStarted():
                return _line("scheduled", body.step, body.checkpoint)
            case SaveCommitted():
                return self._committed(body)
            case CopyReplicated():
                where = f"rank {body.rank}'s part on {printable(body.node)} in {duration(body.seconds)}"
                return _line("replicated", body.step, body.checkpoint, where)
            case CopyDrained():
                took = f"{size(body.bytes)} in {duration(body.seconds)}"
                return _line("drained", body.step, body.checkpoint, f"to {printable(body.remote)}", took)
            case CopyReadBack():
                took = f"{size(body.bytes)} in {duration(body.seconds)}"
                return _line("verified", body.step, body.checkpoint, "read back", took)
            case SaveSkipped():
                return _line("skipped", body.step, body.checkpoint, printable(body.reason))
            case DrainFailed():
                why = f"to {printable(body.remote)}: {printable(body.error)}"
                return _line("not drained", body.step, body.checkpoint, why)
            case ReplicaFailed():
                why = f"rank {body.rank}'s part on {printable(body.node)}: {printable(body.error)}"
                return _line("not replicated", body.step, body.checkpoint, why)
            case _:
                return None

    def _committed(self, body: SaveCommitted) -> str:
        took = f"{size(body.bytes)} in {duration(body.seconds)}"
        if body.tier != "local" and body.checkpoint in self._local:
            return _line("drained", body.step, body.checkpoint, "to the checkpoint root", took)
        if body.tier == "local":
            self._local.append(body.checkpoint)
        still = f"training stood still for {duration(body.blocked_seconds)}"
        return _line("committed", body.step, body.checkpoint, printable(body.tier), took, still)


def _line(what: str, step: int, checkpoint: str, *more: str) -> str:
    return ", ".join([f"save {what}: step {step}", printable(checkpoint), *more])


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


def render_event(body: AnyEvent | Unknown) -> Rendered:
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
