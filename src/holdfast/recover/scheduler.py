"""What the scheduler adds to the runbook: nodes that are free, nodes taken out of service, where to start.

Quiet where there is no Slurm; every question to it has a deadline, and no answer is "not known".
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from holdfast.cluster.scontrol import drain as drain_node
from holdfast.cluster.scontrol import job_record, node_records, partition_nodes
from holdfast.cluster.slurm import current_job
from holdfast.control.launches import LaunchRecord
from holdfast.policy.readiness import Offer
from holdfast.recover.report import Action

_FREE = re.compile(r"\bIDLE\b")


def offered_nodes(
    started: LaunchRecord | None, without: Collection[str], environ: Mapping[str, str] = os.environ
) -> Offer | None:
    """The nodes that could be had now; None where there is no scheduler, or no answer.

    Inside of a job these are its own nodes; else those of the last launch's partition that are idle.
    """
    job = current_job(environ)
    if job is not None:
        usable = [node for node in job.nodes if node not in without]
        return Offer(by=f"Slurm job {job.label}", nodes=len(usable), queues=False) if job.nodes else None
    if started is None or not started.job:
        return None
    last = job_record(started.job)
    names = partition_nodes(last.partition) if last is not None and last.partition else None
    if names is None:
        return None
    found = node_records(names)
    free = [one for one in found.values() if one.usable and _FREE.search(one.state.upper())]
    return Offer(by="Slurm", nodes=len([one for one in free if one.name not in without]), queues=True)


def drain(node: str, reason: str) -> Action | None:
    """Have Slurm start nothing more on a node; None where it knows no such node."""
    known = node_records([node]).get(node)
    if known is None:
        return None
    what = f"drain {node} in Slurm"
    if not known.usable:
        return Action(what=what, done=True, result=f"it is {known.state} already: {known.reason}")
    reply = drain_node(node, reason)
    return Action(what=what, done=reply.ok, result=reply.text or reason)


def must_be_submitted(started: LaunchRecord | None, environ: Mapping[str, str] = os.environ) -> str:
    """How to start a run that lives in Slurm, if this is not inside of a job; empty if it may start here."""
    if started is None or not started.job or current_job(environ) is not None:
        return ""
    return (
        f"the last launch was in Slurm job {started.job}: submit its batch script again, or `scontrol "
        f"requeue {started.job}` while Slurm knows it; then `holdfast recover RUN --watch` judges the resume"
    )
