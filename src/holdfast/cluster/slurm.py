"""The Slurm job that this process is part of, from its environment alone; nothing is asked of Slurm here.

Guarantee: the name by which Slurm is asked about the job never means another one. A job that was submitted
from within an array's task, or from within a heterogeneous job, inherits the variables of that one: they
count only where they agree with SLURM_JOB_ID, which Slurm sets anew for every job. What else the controller
says of that number (that it is a task of an array), `scontrol.as_named` adds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from holdfast.cluster.hostlist import expand
from holdfast.journal.cluster_events import JobFound


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the job without asking. What Slurm did not say keeps its default."""

    job_id: int
    array_job_id: int | None = None
    array_task_id: int | None = None
    name: str = ""
    partition: str = ""
    user: str = ""
    restarts: int = 0
    """How often Slurm has queued it again."""
    nodes: list[str] = []
    node: str = ""
    """The node that this process is on, as Slurm names it."""
    tasks: int = 0
    ends_at: float | None = None
    """Seconds since 1970; None if not known."""
    components: int = 1
    """Of a heterogeneous job; 1 for any other."""

    @property
    def label(self) -> str:
        """`1234`, or `1230_4` for a job that is known to be a task of an array.

        Slurm must be asked by this name: one task of an array has the number of the whole array for its own.
        Every other task is meant by its own number, too.
        """
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        return str(self.job_id)


def current_job(environ: Mapping[str, str] = os.environ) -> SlurmJob | None:
    """The job, or None outside of Slurm."""
    job_id = _number(environ.get("SLURM_JOB_ID")) or _number(environ.get("SLURM_JOBID"))
    components = min(_number(environ.get("SLURM_HET_SIZE")) or 1, 1024)
    # Of a heterogeneous job the first component leads: it is the one that can be queued again.
    leader = _number(environ.get("SLURM_JOB_ID_HET_GROUP_0"))
    if leader and (job_id is None or leader <= job_id < leader + components):  # Slurm numbers them in a row
        job_id = leader
    else:
        components = 1
    if not job_id:
        return None
    own = _number(environ.get("SLURM_ARRAY_JOB_ID")) == job_id
    end = _number(environ.get("SLURM_JOB_END_TIME"))  # Slurm 23.02 and later
    return SlurmJob(
        job_id=job_id,
        array_job_id=job_id if own else None,
        array_task_id=_number(environ.get("SLURM_ARRAY_TASK_ID")) if own else None,
        name=environ.get("SLURM_JOB_NAME", ""),
        partition=environ.get("SLURM_JOB_PARTITION", ""),
        user=environ.get("SLURM_JOB_USER", ""),
        restarts=_number(environ.get("SLURM_RESTART_COUNT")) or 0,
        nodes=_nodes(environ, components),
        node=environ.get("SLURMD_NODENAME", ""),
        tasks=_number(environ.get("SLURM_NTASKS")) or _number(environ.get("SLURM_NPROCS")) or 0,
        ends_at=float(end) if end else None,
        components=components,
    )


def job_found(job: SlurmJob, ends_at: float | None, requeue: str) -> JobFound:
    """For the journal. `requeue`: the run's slurm.requeue, for the batch script, which knows no settings."""
    return JobFound(
        scheduler="slurm",
        job=job.label,
        restarts=job.restarts,
        nodes=list(job.nodes),
        ends_at=ends_at,
        requeue=requeue,
        partition=job.partition,
    )


def _nodes(environ: Mapping[str, str], components: int) -> list[str]:
    of_components = range(components) if components > 1 else ()
    lists = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}", "") for index in of_components]
    if not any(lists):
        lists = [environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")]
    found: list[str] = []
    for text in lists:
        try:
            found += expand(text)
        except ValueError:
            return []  # some nodes would be taken for all
    return list(dict.fromkeys(found))


def _number(text: str | None) -> int | None:
    """A whole number that is not negative; what Slurm writes for "none" is larger than any."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 18:
        return None
    number = int(text)
    return None if number in (0xFFFFFFFE, 0xFFFFFFFF) else number
