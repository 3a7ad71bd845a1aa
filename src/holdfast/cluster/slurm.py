"""The Slurm job that this process is part of, from its environment alone; nothing is asked of Slurm here.

Guarantee: the name by which Slurm is asked about the job never means another one. A job that was submitted
from within an array's task, or from within a heterogeneous job, inherits the variables of that one: they
count only where they agree with SLURM_JOB_ID, which Slurm sets anew for every job. What else the controller
says of that number (that it is a task of an array), `scontrol.as_named` adds.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from itertools import product

import msgspec

from holdfast.journal.events import JobFound

# Slurm's short form for many nodes, `n[1-3,07-09]`, spelt out.
#
# Guarantee: what is not understood is an error, never a guess, and the number of names is bounded: the text
# comes from outside.


MOST = 65_536
"""Names in one list; more than any Slurm has nodes."""
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand(text: str) -> list[str]:
    """The names that a list stands for, in its order, each as often as it is named. Empty text is no names.

    `n[1-3,07-09]`, `rack[0-1]n[0-7]`, `a,b[2-3]`. The width of the low end is kept: `n[08-10]` is n08 to n10.
    ValueError says what is wrong with a text.
    """
    found: list[str] = []
    for part in _split(text.strip()):
        found += _expand_one(part, MOST - len(found))
    return found


def _split(text: str) -> list[str]:
    """The parts between commas that are in no brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
        if depth not in (0, 1):
            raise ValueError(f"{_short(text)}: brackets do not match")
    if depth:
        raise ValueError(f"{_short(text)}: brackets do not match")
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _expand_one(part: str, most: int) -> list[str]:
    pieces: list[list[str]] = []
    count = 1
    for piece in re.split(r"(\[[^\]]*\])", part):
        if not piece:
            continue
        pieces.append(_numbers(piece[1:-1], most) if piece.startswith("[") else [piece])
        count *= len(pieces[-1])
        if count > most:
            raise ValueError(f"{_short(part)} stands for more than {MOST} names")
    if any(character.isspace() for piece in pieces for one in piece for character in one):
        raise ValueError(f"{_short(part)}: a name has no spaces")
    return ["".join(chosen) for chosen in product(*pieces)]


def _numbers(text: str, most: int) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"[{_short(text)}]: {_short(part)!r} is neither a number nor a range LOW-HIGH")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ValueError(f"[{_short(text)}]: the range {part} runs backwards")
        if int(high) - int(low) >= most - len(found):
            raise ValueError(f"[{_short(text)}] stands for more than {MOST} names")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


# What this node is called by everything that has to name it: the journal, exclusions, drains, the doctor.


def node_name(configured: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """The setting `launch.node_name`; else Slurm's name, by which it can be drained; else its host's."""
    return configured or environ.get("SLURMD_NODENAME", "") or socket.gethostname()


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
