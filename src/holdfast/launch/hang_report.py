"""What is known of a hang: per node as its agent found it, and merged for the whole job.

Pure. A node's report says of every local rank what it is doing; only all reports together say who is missing
from a collective that spans nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.policy.missing import Missing, Position, describe, find_missing, ranks, suspects
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
    summary: str = ""


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
    lines = [summarise(record) for record in hung[:NAMED]]
    if len(hung) > NAMED:
        lines.append(f"{len(hung) - NAMED} more hang")
    told = {record.collective for record in hung[:NAMED]}
    lines += [f"rank {rank} is {_STOPPED[evidence[rank].state]}" for rank in stopped]
    lines += [describe(one) for one in found if one.missing and _named(one) not in told]
    if first and not {record.rank for record in hung[:1]} & set(first):
        lines.append(f"look at {ranks(first)} first")
    return JobHang(hung=hung, missing=found, suspects=first, summary="; ".join(lines))


def _complete(record: HangRecord, found: Sequence[Missing]) -> HangRecord:
    mine = [one for one in found if one.certain and record.rank in one.waiting]
    if not mine:
        return record
    one = next((one for one in mine if one.missing), mine[0])
    return msgspec.structs.replace(record, collective=_named(one), missing=one.missing, silent=one.silent)


def _named(one: Missing) -> str:
    return f"{one.name or 'collective'} #{one.number} of group {one.group}"


def summarise(record: HangRecord) -> str:
    """`rank 3 hangs in section step for 181 s (limit 180): in all_reduce #412 of group 0, without rank 5`."""
    if record.rule == HELLO:
        text = f"rank {record.rank} did not reach holdfast.Run in {record.seconds:.0f} s"
    else:
        place = f"in section {record.section}" if record.section else "outside of any section"
        if record.rule == EXITING:
            on_its_way = "between the end of its loop and its exit"
            place = f"after its loop, {place}" if record.section else on_its_way
        text = f"rank {record.rank} hangs {place} for {record.seconds:.0f} s"
    if record.limit > 0:
        text += f" (limit {record.limit:g})"
    facts = []
    if record.state in _STOPPED:
        facts.append(_STOPPED[record.state])
    elif record.state == "D":
        facts.append("in uninterruptible sleep")
    if record.collective:
        without = f", without {ranks(record.missing)}" if record.missing else ""
        unheard = f", {ranks(record.silent)} not heard" if record.silent else ""
        facts.append(f"in {record.collective}{without}{unheard}")
    if record.where:
        facts.append(f"at {record.where}")
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
