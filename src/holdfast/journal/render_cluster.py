"""One line of plain text for each event of life on a cluster; see render.py."""

from __future__ import annotations

from holdfast.journal.cluster_events import (
    HealthFailed,
    JobFound,
    PingFailed,
    RequeueAsked,
    StopAgreed,
    StopAsked,
    StopForced,
    StopHastened,
    StopSaved,
)
from holdfast.journal.text import Rendered, duration, moment, plural, printable

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
