"""The Slurm job that this process is part of: from its environment, and by asking Slurm's own `scontrol`.

Guarantee: the name by which Slurm is asked about the job never means another one. A job that was submitted
from within an array's task, or from within a heterogeneous job, inherits the variables of that one: they
count only where they agree with SLURM_JOB_ID, which Slurm sets anew for every job. What else the controller
says of that number (that it is a task of an array), `as_named` adds.

Guarantee: no call to scontrol outlives its deadline, and none raises. A scontrol that is missing, hangs,
fails or says what is not understood is "not known": training goes on without. What was asked for is carried
out even if a signal reaches the whole job meanwhile, as it does when the job is queued again.
"""

from __future__ import annotations

import calendar
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
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


# --- what scontrol answers ----------------------------------------------------------------------------------

ASK = 10.0
"""Seconds for an answer; a controller that is busy or failing over takes some."""
END = 1.0
"""Seconds for one that is killed to end."""
ALMOST_A_YEAR = 364 * 86_400.0
LONGEST_TEXT = 1_000
"""Characters of a comment or a reason that is handed to Slurm."""
_DEAF = 'trap "" TERM INT HUP USR1 USR2; exec "$@"'
"""Signals of the job are for its ranks: a scontrol that is under way must not die of them."""
_REQUEUE = """
trap "" TERM INT HUP USR1 USR2
program=$1 job=$2
shift 2
"$program" requeue "$job" || exit 1
for field in "$@"; do
    "$program" update "JobId=$job" "$field" 2>&1 || echo "${field%%=*} was not changed"
done
"""
_KEY = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z/:&_]*)=")
_TO_THE_END = frozenset(
    {
        "JobName",
        "Comment",
        "AdminComment",
        "SystemComment",
        "Command",
        "WorkDir",
        "StdErr",
        "StdIn",
        "StdOut",
        "SubmitLine",
        "Extra",
        "OS",
    }
)
"""Keys whose value is the rest of its line: people write what they like in them."""
_NOTHING = frozenset({"", "(null)", "None", "N/A", "Unknown", "NONE", "n/a"})


class Reply(msgspec.Struct, frozen=True):
    """What came of a call. `text`: what it said, or what went wrong, in a line."""

    ok: bool
    text: str
    late: bool = False
    """Whether there was no answer in time: what was asked for may have been done."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm says of a job now. None: it did not say."""

    state: str
    job_id: int | None = None
    array_job_id: int | None = None
    array_task_id: int | None = None
    reason: str = ""
    starts_at: float | None = None
    ends_at: float | None = None
    """Comes closer when the job is preempted with a grace time."""
    endless: bool = False
    """Whether it is known to have no limit."""
    requeue: bool | None = None
    batch: bool | None = None
    """Whether it has a batch script, which alone can be started again."""
    restarts: int | None = None
    preempted_at: float | None = None
    comment: str = ""
    exclude: list[str] = []
    require: list[str] = []
    """Nodes that the user has named; it cannot start without them."""
    nodes: list[str] = []
    node_count: int | None = None
    partition: str = ""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str
    """As Slurm writes it: `IDLE`, `MIXED+DRAIN`, `DOWN*`."""
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether Slurm would start something there sooner or later."""
        words = set(re.split(r"[^A-Z_]+", self.state.upper()))
        bad = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "NOT_RESPONDING", "UNKNOWN"}
        return "*" not in self.state and not words & bad


def call(*arguments: str, timeout: float = ASK) -> Reply:
    """Run scontrol. Times in its answer are UTC, whatever the machine's zone is."""
    program = shutil.which("scontrol")
    if program is None:
        return Reply(False, "there is no scontrol here")
    return _run(["/bin/sh", "-c", _DEAF, "sh", program, *arguments], arguments, timeout)


def job_record(label: str, timeout: float = ASK) -> JobRecord | None:
    """What Slurm says of a job; None if that is not known."""
    reply = call("show", "job", label, timeout=timeout)
    return parse_job(reply.text, label) if reply.ok else None


def identified(job: SlurmJob, timeout: float = ASK) -> SlurmJob:
    """The job as the controller names it: a task of an array, or none whatever its environment says."""
    return as_named(job, job_record(job.label, timeout))


def as_named(job: SlurmJob, record: JobRecord | None) -> SlurmJob:
    """The job with the array and the task that the controller's record of it names."""
    if record is None or record.job_id != job.job_id:
        return job  # not known, or of another job
    return msgspec.structs.replace(job, array_job_id=record.array_job_id, array_task_id=record.array_task_id)


def node_records(nodes: Sequence[str], timeout: float = ASK) -> dict[str, NodeRecord]:
    """What Slurm says of nodes, by name; one that it says nothing of is missing."""
    if not nodes:
        return {}
    reply = call("show", "node", ",".join(nodes), timeout=timeout)
    return {one.name: one for one in parse_nodes(reply.text)} if reply.ok else {}


def partition_nodes(partition: str, timeout: float = ASK) -> list[str] | None:
    """All nodes of a partition (or of several, with commas); None if that is not known."""
    found: list[str] = []
    for name in partition.split(","):
        reply = call("show", "partition", name, timeout=timeout)
        listed = next((one.get("Nodes", "") for one in records(reply.text)), "") if reply.ok else ""
        if listed in _NOTHING:
            return None
        try:
            found += expand(listed)
        except ValueError:
            return None
    return list(dict.fromkeys(found))


def kills_on_bad_exit(timeout: float = ASK) -> bool | None:
    """Whether this cluster ends all tasks of a step when one fails, unless srun is told otherwise.

    None if that is not known.
    """
    reply = call("show", "config", timeout=timeout)
    found = re.search(r"^KillOnBadExit\s*=\s*([01])\b", reply.text, re.MULTILINE) if reply.ok else None
    return None if found is None else found.group(1) == "1"


def kill_wait(timeout: float = ASK) -> float | None:
    """Seconds between SIGTERM and SIGKILL when this cluster ends a job; None if that is not known."""
    reply = call("show", "config", timeout=timeout)
    found = re.search(r"^KillWait\s*=\s*(\d{1,9})\b", reply.text, re.MULTILINE) if reply.ok else None
    return None if found is None else float(found.group(1))


def grace_time(partition: str, timeout: float = ASK) -> float | None:
    """Seconds that a partition leaves jobs which are preempted; 0 for none, None if that is not known."""
    reply = call("show", "partition", partition, timeout=timeout)
    found = next((one.get("GraceTime") for one in records(reply.text)), None) if reply.ok else None
    seconds = _count(found)
    return None if seconds is None else float(seconds)


def set_comment(label: str, comment: str, timeout: float = ASK) -> Reply:
    return call("update", f"JobId={label}", f"Comment={_line(comment)}", timeout=timeout)


def requeue(label: str, changes: Mapping[str, str] = {}, timeout: float = 2 * ASK) -> Reply:
    """Queue a running job again; Slurm then ends it, and with it whoever calls this from inside of it.

    `changes`: fields that can be set only once the job waits again, such as the nodes to do without. So one
    process does it all, and hears no signal: the job cannot start anew before the caller has ended, who waits
    for it. `ok` tells of the requeue; what went wrong with the changes is in the text, else it is empty.
    """
    program = shutil.which("scontrol")
    if program is None:
        return Reply(False, "there is no scontrol here")
    fields = [f"{name}={_line(value)}" for name, value in changes.items()]
    return _run(["/bin/sh", "-c", _REQUEUE, "sh", program, label, *fields], ["requeue", label], timeout)


def drain(node: str, reason: str, timeout: float = ASK) -> Reply:
    """Have Slurm start nothing more on a node; only its operators may."""
    return call("update", f"NodeName={node}", "State=DRAIN", f"Reason={_line(reason)}", timeout=timeout)


# --- reading what it says


def records(text: str) -> list[dict[str, str]]:
    """The records of an answer, as `key=value`, with empty lines between them.

    Of a key that comes twice the first counts: what Slurm says itself stands before what people wrote.
    """
    found: list[dict[str, str]] = []
    for block in re.split(r"\n[ \t]*\n", text):
        record: dict[str, str] = {}
        for line in block.splitlines():
            _read_line(line.strip(), record)
        if record:
            found.append(record)
    return found


def _read_line(line: str, record: dict[str, str]) -> None:
    keys = list(_KEY.finditer(line))
    for index, key in enumerate(keys):
        last = key[1] in _TO_THE_END or (index == 0 and key[1] == "Reason")
        end = len(line) if last or index + 1 == len(keys) else keys[index + 1].start()
        record.setdefault(key[1], line[key.end() : end].strip())
        if last:
            return


def parse_job(text: str, label: str = "") -> JobRecord | None:
    """The record of `scontrol show job` that is the job's; None if there is none.

    Asked by an array's number, Slurm shows all of its tasks, also one for those that still wait.
    """
    found = [one for one in records(text) if "JobId" in one and one.get("JobState")]
    if not found:
        return None
    record = next((one for one in found if label in _names_of(one)), found[0])
    task = _count(record.get("ArrayTaskId"))
    return JobRecord(
        state=record["JobState"].upper(),
        job_id=_count(record["JobId"]),
        array_job_id=_count(record.get("ArrayJobId")) if task is not None else None,
        array_task_id=task,
        reason=_text(record.get("Reason")),
        starts_at=_time(record.get("StartTime")),
        ends_at=None if _endless(record) else _time(record.get("EndTime")),
        endless=_endless(record),
        requeue=_flag(record.get("Requeue")),
        batch=_flag(record.get("BatchFlag")),
        restarts=_count(record.get("Restarts")),
        preempted_at=_time(record.get("PreemptTime")),
        comment=_text(record.get("Comment")),
        exclude=_names(record.get("ExcNodeList")),
        require=_names(record.get("ReqNodeList")),
        nodes=_names(record.get("NodeList")),
        node_count=_count(record.get("NumNodes", "").partition("-")[0]),
        partition=_text(record.get("Partition")),
    )


def _names_of(record: Mapping[str, str]) -> tuple[str, ...]:
    array, task = record.get("ArrayJobId"), record.get("ArrayTaskId")
    if array is None:
        return (record["JobId"],)
    if _count(task) is None:
        return ()  # tasks that wait
    return record["JobId"], f"{array}_{task}"


def parse_nodes(text: str) -> list[NodeRecord]:
    return [
        NodeRecord(name=one["NodeName"], state=one.get("State", ""), reason=_text(one.get("Reason")))
        for one in records(text)
        if "NodeName" in one
    ]


def _endless(record: Mapping[str, str]) -> bool:
    """Whether the job has no limit: as its end Slurm then writes a year from its start."""
    starts_at, ends_at = _time(record.get("StartTime")), _time(record.get("EndTime"))
    return starts_at is not None and ends_at is not None and ends_at - starts_at > ALMOST_A_YEAR


def _text(value: str | None) -> str:
    return "" if value is None or value in _NOTHING else value


def _flag(value: str | None) -> bool | None:
    return {"0": False, "1": True, "2": True}.get(value or "")


def _count(value: str | None) -> int | None:
    ascii_number = value is not None and value.isascii() and value.isdecimal() and len(value) < 10
    return int(value) if value is not None and ascii_number else None


def _names(value: str | None) -> list[str]:
    try:
        return expand(_text(value))
    except ValueError:
        return []


def _time(value: str | None) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(value or "", "%Y-%m-%dT%H:%M:%S")))
    except (ValueError, OverflowError):
        return None


# --- running it


def _line(text: str) -> str:
    """People's words on one line, so that they cannot look like another field's."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:LONGEST_TEXT]


def _run(command: Sequence[str], asked: Sequence[str], timeout: float) -> Reply:
    environ = {**os.environ, "TZ": "UTC", "LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "standard"}
    try:
        # A session of its own, so that all of it can be ended. stderr apart: warnings are not fields.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
    except OSError as error:
        return Reply(False, f"scontrol could not be run: {error}")
    try:
        streams = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel is left to itself
            process.communicate(timeout=END)
        told = f"scontrol {' '.join(asked[:2])} did not answer within {timeout:g} s"
        return Reply(False, told, late=True)
    out, err = (stream.decode(errors="replace").strip() for stream in streams)
    if process.returncode != 0:
        return Reply(False, _line(err or out or f"scontrol ended with code {process.returncode}"))
    return Reply(True, out)
