"""What is known of a hang: per node as its agent found it, and merged for the whole job.

Pure. A node's report says of every local rank what it is doing; only all reports together say who is missing
from a collective that spans nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.policy.missing import Missing, Position, describe, find_missing, ranks, suspects
from holdfast.policy.plain_words import a_collective, activity
from holdfast.policy.timeouts import EXITING, HELLO
from holdfast.worker.testimony import Frame, Registered, ThreadStack

NAMED = 3
"""Hangs told one by one in a summary."""
MAX_STACKS = 20
"""Threads whose stacks go into a node's report; all are in the text files."""

_STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger"}
_HEADER = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-fA-F]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_NOT_THE_JOBS = re.compile(
    r"^<|/site-packages/torch/|/dist-packages/torch/|/holdfast/(?:worker|checkpoint|run\.py)"
    r"|/lib/python3\.\d+/(?!site-packages|dist-packages)"
)


class HangRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that is overdue, for the decision."""

    rank: int
    node: str
    section: str = ""
    """Empty outside of any section."""
    rule: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    step: int = -1
    state: str = ""
    """The kernel's letter for its main thread; T: stopped, D: uninterruptible; empty if not known."""
    where: str = ""
    """`train.py:88 in forward`."""
    collective: str = ""
    """What it waits in: `all_reduce #412 of group 0`."""
    missing: tuple[int, ...] = ()
    """Ranks that did not reach it."""
    silent: tuple[int, ...] = ()
    """Ranks that may be missing from it and could not testify."""


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about one local rank, overdue or not."""

    rank: int
    pid: int
    state: str = ""
    waits: str = ""
    """The kernel function in which its main thread waits."""
    stacks_by: str = ""
    """`answer`, `signal`, or empty: there are none."""
    where: str = ""
    positions: list[Position] | None = None
    """None: it could not say."""
    sections: list[str] = []
    stacks: list[ThreadStack] = []
    problems: list[str] = []


class HangReport(msgspec.Struct, frozen=True, kw_only=True):
    """`attempts/<n>/hang/<node>.json`."""

    node: str
    at: float
    seconds: float
    """How long it took to collect this."""
    hung: list[HangRecord] = []
    ranks: list[RankEvidence] = []
    problems: list[str] = []
    kept: str = ""
    """Where the evidence is; empty if it could not be written in time."""

    @property
    def summary(self) -> str:
        """One line, from what this node alone knows."""
        return merge([self]).summary


class JobHang(msgspec.Struct, frozen=True, kw_only=True):
    """A hang as all nodes together saw it."""

    hung: list[HangRecord] = []
    missing: list[Missing] = []
    suspects: tuple[int, ...] = ()
    """Ranks that others wait for and that wait for nobody: where to look first."""
    told: list[str] = []
    """In sentences: first of whoever holds the others up, then of those that wait."""

    @property
    def summary(self) -> str:
        return "; ".join(self.told)


def merge(reports: Sequence[HangReport], *, world: int = 0) -> JobHang:
    """The whole job's hang, whatever order the reports are in.

    `world`: how many ranks there are; those of a node that left no report could not testify.
    """
    evidence = {one.rank: one for report in reports for one in report.ranks}
    positions = dict.fromkeys(range(world)) | {rank: one.positions for rank, one in evidence.items()}
    found = find_missing(positions)
    overdue = {record.rank for report in reports for record in report.hung}
    # Who is stopped is why others wait, also if its own limit has not passed yet.
    stopped = sorted(rank for rank, one in evidence.items() if one.state in _STOPPED and rank not in overdue)
    first = suspects(positions, found) or tuple(stopped)
    hung = [_complete(record, found) for report in reports for record in report.hung]
    # First who holds the others up, then who has been overdue for longest.
    hung.sort(key=lambda record: (record.rank not in first, -record.seconds, record.rank))
    lines = _sentences(hung)
    if len(lines) > NAMED:
        lines = [*lines[:NAMED], f"{len(lines) - NAMED} more stand still"]
    told = {record.collective for record in hung}
    lines += [f"rank {rank} is {_STOPPED[evidence[rank].state]}" for rank in stopped]
    lines += [describe(one) for one in found if one.missing and _named(one) not in told]
    if first and not overdue & set(first):
        known = [rank for rank in first if rank in evidence and evidence[rank].where and rank not in stopped]
        lines += [f"rank {rank} was at {evidence[rank].where}" for rank in known[:NAMED]]
        lines += [] if known else [f"look at {ranks(first)} first"]
    return JobHang(hung=hung, missing=found, suspects=first, told=lines)


def _sentences(hung: Sequence[HangRecord]) -> list[str]:
    """One for each rank that stands still, and one for all that wait at the same place for the same ranks."""
    alike: dict[object, list[HangRecord]] = {}
    for record in hung:
        at = (record.collective, record.missing, record.silent, record.where)
        alike.setdefault(at if _waits(record) else record.rank, []).append(record)
    return [summarise(records[0], [record.rank for record in records]) for records in alike.values()]


def _complete(record: HangRecord, found: Sequence[Missing]) -> HangRecord:
    mine = [one for one in found if one.certain and record.rank in one.waiting]
    if not mine:
        return record
    one = next((one for one in mine if one.missing), mine[0])
    return msgspec.structs.replace(record, collective=_named(one), missing=one.missing, silent=one.silent)


def _named(one: Missing) -> str:
    return f"{one.name or 'collective'} #{one.number} of group {one.group}"


def _waits(record: HangRecord) -> bool:
    """Whether others are why it stands still, as far as is known."""
    return bool(record.missing or record.silent) and record.state not in _STOPPED


def summarise(record: HangRecord, alike: Sequence[int] = ()) -> str:
    """`rank 3 stood still for 181 s in its training step (180 s are allowed): it was at train.py:88 in load`,
    or `rank 0 waited for rank 3 in an all_reduce (train.py:71 in forward)`; `alike`: all that wait so."""
    inside = f" in {a_collective(record.collective.partition(' #')[0])}" if record.collective else ""
    if _waits(record):
        text = f"{ranks(alike or [record.rank])} waited"
        text += f" for {ranks(record.missing)}" if record.missing else ""
        text += inside + (f" ({record.where})" if record.where else "")
        if not record.silent:
            return text
        unheard = f"{ranks(record.silent)}, which could not be asked"
        return f"{text}; it is not known of {unheard}" if record.missing else f"{text}, perhaps for {unheard}"
    seconds = f"{record.seconds:.0f} s"
    if record.rule == HELLO:
        text = f"rank {record.rank} did not reach holdfast.Run in {seconds}"
    else:
        where = activity(record.section, record.rule == EXITING)
        text = f"rank {record.rank} stood still for {seconds} {where}"
    if record.limit > 0:
        text += f" ({record.limit:g} s are allowed)"
    facts = []
    if record.state in _STOPPED:
        facts.append(f"its process was {_STOPPED[record.state]}")
    elif record.state == "D":
        facts.append("it waited in the kernel (uninterruptible sleep), for a disk, a mount or a driver")
    if inside:
        facts.append(f"it was{inside} that all ranks had reached")
    if record.where:
        facts.append(f"it was at {record.where}")
    return f"{text}: {'; '.join(facts)}" if facts else text


# --- stacks ------------------------------------------------------------------------------------------------


def parse_stacks(text: str, registered: Registered) -> list[ThreadStack]:
    """Stacks as the stack signal's handler writes them: no names of threads, innermost frame first."""
    found: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            found.append((int(header[1], 16), []))
        elif (frame := _FRAME.match(line)) and found:
            number = int(frame[2]) if frame[2].isdigit() else 0
            found[-1][1].append(Frame(frame[1], number, frame[3]))
    stacks = [
        ThreadStack(name=f"0x{ident:x}", main=ident == registered.main_thread, frames=frames)
        for ident, frames in found
    ]
    return sorted(stacks, key=lambda stack: not stack.main)


def place(stacks: Sequence[ThreadStack]) -> str:
    """Where the main thread is: its innermost frame that is the job's own, or else its innermost."""
    frames = next((stack.frames for stack in stacks if stack.main), [])
    if not frames:
        return ""
    mine = next((frame for frame in frames if not _NOT_THE_JOBS.search(frame.file)), frames[0])
    return f"{mine.file.rpartition('/')[2]}:{mine.line} in {mine.function}"


def render_stacks(stacks: Sequence[ThreadStack]) -> str:
    lines = []
    for stack in stacks:
        lines.append(f"thread {stack.name}{' (main)' if stack.main else ''} {stack.tid or ''}".rstrip())
        lines += [f"    {frame.file}:{frame.line} in {frame.function}" for frame in stack.frames]
    return "\n".join(lines)


def render_positions(positions: Mapping[str, Position] | Sequence[Position] | None) -> str:
    if positions is None:
        return "(could not be asked)"
    each = positions.values() if isinstance(positions, Mapping) else positions
    lines = [
        f"group {one.group} {one.backend} ({ranks(one.members)}): entered #{one.entered}"
        + (
            f", waits in {one.name or 'collective'} #{one.waits_in}"
            if one.waits_in
            else f" {one.name}".rstrip()
        )
        + (f", shapes {one.shapes}" if one.shapes else "")
        for one in each
    ]
    return "\n".join(lines) or "(none)"
