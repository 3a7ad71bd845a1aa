"""A hang: from the overdue rank to the evidence, collected before anything is killed, and the report.

Guarantee: `collect` returns by its deadline whatever the ranks, the kernel and the disk do; what could not be
obtained in time is missing from the report, which says so. All ranks are asked at once, each in a thread of
its own for which nobody waits beyond the deadline: a rank may not answer, /proc may not answer for a process
that hangs in the kernel, and the control directory may be on the disk that hangs. What is written is durable
on return.

The stack signal goes only to a process that registered it and that, according to the kernel, handles it: the
signal's default action would end the process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.base import Bounded, make_dirs, read_regular, replace_atomic
from holdfast.launch import Monitor, Overdue
from holdfast.launch.nodes import Arrangement, Attempt, Notice
from holdfast.policy import (
    EXITING,
    HELLO,
    Hang,
    Missing,
    Position,
    StillRunning,
    a_collective,
    activity,
    describe_missing,
    find_missing,
    hanging,
    ranks,
    suspects,
)
from holdfast.process import STATES, Thread, proc
from holdfast.train import Registered, StackFrame, Testimony, ThreadStack, registered, stacks_path

# What is known about a hang: per node, as its agent found it, and merged for the whole job.
#
# Pure. A node's report says what every local rank is doing; only all reports together say who is missing from
# a collective that spans nodes.


NAMED = 3
"""How many hangs a summary names one by one."""
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
    """One overdue rank, for the decision."""

    rank: int
    node: str
    section: str = ""
    """Empty outside any section."""
    rule: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    step: int = -1
    state: str = ""
    """The kernel's letter for its main thread; T: stopped, D: uninterruptible; empty if not known."""
    where: str = ""
    """`train.py:88 in forward`."""
    collective: str = ""
    """The collective it waits in: `all_reduce #412 of group 0`."""
    missing: tuple[int, ...] = ()
    """Ranks that did not reach it."""
    silent: tuple[int, ...] = ()
    """Ranks that may be missing from it, but could not testify."""


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about one local rank, overdue or not."""

    rank: int
    pid: int
    state: str = ""
    waits: str = ""
    """The kernel function in which its main thread waits."""
    stacks_by: str = ""
    """`answer`, `signal`, or empty if there are none."""
    where: str = ""
    positions: list[Position] | None = None
    """None if it could not say."""
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
    """In sentences: first about the rank that holds the others up, then about those that wait."""

    @property
    def summary(self) -> str:
        return "; ".join(self.told)


def merge(reports: Sequence[HangReport], *, world: int = 0) -> JobHang:
    """The whole job's hang, in whatever order the reports are.

    `world`: how many ranks there are; those on a node that left no report could not testify.
    """
    evidence = {one.rank: one for report in reports for one in report.ranks}
    positions = dict.fromkeys(range(world)) | {rank: one.positions for rank, one in evidence.items()}
    found = find_missing(positions)
    overdue = {record.rank for report in reports for record in report.hung}
    # A stopped rank is why others wait, even if its own limit has not passed yet.
    stopped = sorted(rank for rank, one in evidence.items() if one.state in _STOPPED and rank not in overdue)
    first = suspects(positions, found) or tuple(stopped)
    hung = [_complete(record, found) for report in reports for record in report.hung]
    # First the ranks that hold the others up, then those that have been overdue for longest.
    hung.sort(key=lambda record: (record.rank not in first, -record.seconds, record.rank))
    lines = _sentences(hung)
    if len(lines) > NAMED:
        lines = [*lines[:NAMED], f"{len(lines) - NAMED} more stand still"]
    told = {record.collective for record in hung}
    lines += [f"rank {rank} is {_STOPPED[evidence[rank].state]}" for rank in stopped]
    lines += [describe_missing(one) for one in found if one.missing and _named(one) not in told]
    if first and not overdue & set(first):
        known = [rank for rank in first if rank in evidence and evidence[rank].where and rank not in stopped]
        lines += [f"rank {rank} was at {evidence[rank].where}" for rank in known[:NAMED]]
        lines += [] if known else [f"look at {ranks(first)} first"]
    return JobHang(hung=hung, missing=found, suspects=first, told=lines)


def _sentences(hung: Sequence[HangRecord]) -> list[str]:
    """A sentence for each rank that stands still, and one for all that wait alike for the same ranks."""
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
    """Whether it stands still because of others, as far as is known."""
    return bool(record.missing or record.silent) and record.state not in _STOPPED


def summarise(record: HangRecord, alike: Sequence[int] = ()) -> str:
    """`rank 3 stood still for 181 s in its training step (180 s are allowed): it was at train.py:88 in load`,
    or `rank 0 waited for rank 3 in an all_reduce (train.py:71 in forward)`; `alike`: all that wait alike."""
    inside = f" in {a_collective(record.collective.partition(' #')[0])}" if record.collective else ""
    if _waits(record):
        text = f"{ranks(alike or [record.rank])} waited"
        text += f" for {ranks(record.missing)}" if record.missing else ""
        text += inside + (f" ({record.where})" if record.where else "")
        if not record.silent:
            return text
        unheard = f"{ranks(record.silent)}, which could not be asked"
        return (
            f"{text}; nothing is known of {unheard}" if record.missing else f"{text}, perhaps for {unheard}"
        )
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
    """Stacks as the stack signal's handler writes them: without thread names, innermost frame first."""
    found: list[tuple[int, list[StackFrame]]] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            found.append((int(header[1], 16), []))
        elif (frame := _FRAME.match(line)) and found:
            number = int(frame[2]) if frame[2].isdigit() else 0
            found[-1][1].append(StackFrame(frame[1], number, frame[3]))
    stacks = [
        ThreadStack(name=f"0x{ident:x}", main=ident == registered.main_thread, frames=frames)
        for ident, frames in found
    ]
    return sorted(stacks, key=lambda stack: not stack.main)


def place(stacks: Sequence[ThreadStack]) -> str:
    """Where the main thread is: its innermost frame in the job's own code, or else its innermost frame."""
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


ASKING = 0.4
"""Share of the time that goes into asking; after it, silent ranks get the signal."""
SIGNALLING = 0.65
"""Share after which nobody waits for a rank's stacks any more."""
READING = 0.8
"""Share after which what has been found is written; the rest of the time is for the disk."""
SETTLED = 0.3
"""Seconds without growth after which a file of stacks is taken to be complete."""
POLL = 0.02
LIMIT = 2 * 1024 * 1024
"""How many bytes of an answer, a file of stacks or a written text are kept."""
DIRECTORY = "hang"

Ask = Callable[[int, float], bytes | None]


def collect(
    attempt_dir: Path,
    node: str,
    pids: Mapping[int, int],
    ask: Ask,
    *,
    hung: Sequence[Overdue],
    deadline: float,
    stacks: Path | None = None,
) -> HangReport:
    """Find out what every local rank is doing, and keep it. `pids`: global rank → child not reaped yet.

    `ask(rank, timeout)` gives a rank's testimony or None; `stacks` is the directory that the ranks got to
    `install` their stack signal with; `deadline` is on the monotonic clock.
    """
    began = time.monotonic()
    span = max(0.0, deadline - began)

    def look(rank: int, pid: int) -> tuple[RankEvidence, str]:
        try:
            return _RankLook(rank, pid, ask, stacks, began, span).all()
        except Exception as error:  # noqa: BLE001 - collecting evidence must never be a failure of its own
            problem = f"{type(error).__name__}: {error}"
            return RankEvidence(rank=rank, pid=pid, problems=[problem]), ""

    looks = {rank: Bounded(partial(look, rank, pid), f"look-{rank}") for rank, pid in sorted(pids.items())}
    in_time = {
        rank: one.result()
        for rank, one in looks.items()
        if one.ended(began + READING * span - time.monotonic())
    }
    late = [
        RankEvidence(rank=rank, pid=pid, problems=["nothing could be found out in time"])
        for rank, pid in pids.items()
        if rank not in in_time
    ]
    evidence = sorted([one for one, _ in in_time.values()] + late, key=lambda one: one.rank)
    report = HangReport(
        node=node,
        at=time.time(),
        seconds=time.monotonic() - began,
        hung=[_record(one, node, evidence) for one in hung],
        ranks=evidence,
    )
    report = msgspec.structs.replace(report, hung=merge([report]).hung)
    texts = {rank: text for rank, (_, text) in in_time.items()}
    return _keep(attempt_dir / DIRECTORY, report, texts, deadline)


def _record(overdue: Overdue, node: str, evidence: Sequence[RankEvidence]) -> HangRecord:
    mine = next((one for one in evidence if one.rank == overdue.rank), None)
    return HangRecord(
        rank=overdue.rank,
        node=node,
        section=overdue.section or "",
        rule=str(overdue.rule),
        seconds=overdue.seconds,
        limit=overdue.limit,
        step=overdue.step,
        state=mine.state if mine is not None else "",
        where=mine.where if mine is not None else "",
    )


class _RankLook:
    """A look at one rank, in a thread of its own."""

    def __init__(self, rank: int, pid: int, ask: Ask, stacks: Path | None, began: float, span: float) -> None:
        self._rank = rank
        self._child = pid
        self._pid = pid
        self._ask = ask
        self._directory = stacks
        self._record = registered(stacks, rank) if stacks is not None else None
        self._began = began
        self._span = span
        self._problems: list[str] = []

    def all(self) -> tuple[RankEvidence, str]:
        """The evidence, and all of it as text."""
        self._look_behind_wrapper()
        before = proc.read(self._pid)
        stopped = before is not None and before.state in ("T", "t")
        answer: Testimony | None = None
        by, stacks = "", list[ThreadStack]()
        if before is None or before.ended:
            self._problems.append("the process has ended")
        elif stopped:
            self._problems.append(f"{STATES[before.state]}: it can neither answer nor show its stacks")
        else:
            answer = self._answer()
            if answer is not None and answer.threads:
                by, stacks = "answer", answer.threads
            else:
                stacks = self._signalled()
                by = "signal" if stacks else ""
        threads = proc.threads(self._pid)
        main = threads[0] if threads else None
        evidence = RankEvidence(
            rank=self._rank,
            pid=self._pid,
            state=main.state if main is not None else (before.state if before is not None else ""),
            waits=main.wchan if main is not None else "",
            stacks_by=by,
            where=place(stacks),
            positions=answer.positions if answer is not None else None,
            sections=answer.sections if answer is not None else [],
            stacks=stacks[:MAX_STACKS],
            problems=self._problems + (answer.problems if answer is not None else []),
        )
        return evidence, _text(evidence, stacks, threads)

    def _look_behind_wrapper(self) -> None:
        """The worker may be a shell that started the rank and waits for it: if so, look at the rank."""
        record = self._record
        if record is not None and record.pid != self._child:
            everyone = proc.everyone()
            below = {process.identity for process in proc.descendants([self._child], everyone)}
            if (record.pid, record.started) in below:
                self._pid = record.pid

    def _left(self, share: float) -> float:
        return max(0.0, self._began + share * self._span - time.monotonic())

    def _answer(self) -> Testimony | None:
        raw = self._ask(self._rank, self._left(ASKING))
        if raw is None:
            self._problems.append("did not answer")
            return None
        try:
            return msgspec.json.decode(raw[: 4 * LIMIT], type=Testimony)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self._problems.append(f"its answer cannot be read: {error}")
            return None

    def _signalled(self) -> list[ThreadStack]:
        """The stacks that the stack signal's handler writes, if there is such a handler."""
        record, process = self._record, proc.read(self._pid)
        if self._directory is None or record is None or process is None:
            self._problems.append("registered no stack signal")
            return []
        if (record.pid, record.started) != process.identity or not proc.catches(self._pid, record.signal):
            self._problems.append("does not handle the stack signal that was registered for it")
            return []
        path = stacks_path(self._directory, self._rank)
        start = path.stat().st_size
        proc.send(process, record.signal)
        text = self._await_stacks(path, start, self._left((ASKING + SIGNALLING) / 2))
        if not text and self._pid == self._child:
            # The kernel gives the signal to the main thread, which in uninterruptible sleep cannot take it.
            for thread in proc.threads(self._pid)[1:4]:
                proc.send_thread(self._pid, thread.tid, record.signal)
            text = self._await_stacks(path, start, self._left(SIGNALLING))
        if not text:
            self._problems.append("the stack signal had no effect")
        return parse_stacks(text, record)

    def _await_stacks(self, path: Path, start: int, timeout: float) -> str:
        """What is in the file beyond `start`, once it no longer grows."""
        deadline = time.monotonic() + timeout
        size, grown = start, time.monotonic()
        while True:
            now = path.stat().st_size
            if now != size:
                size, grown = now, time.monotonic()
            settled = size > start and time.monotonic() - grown >= SETTLED
            if settled or time.monotonic() >= deadline:
                break
            time.sleep(POLL)
        return read_regular(path, 8 * LIMIT)[start : start + LIMIT].decode(errors="replace")


def _text(evidence: RankEvidence, stacks: Sequence[ThreadStack], threads: Sequence[Thread]) -> str:
    state = STATES.get(evidence.state, evidence.state or "not known")
    lines = [
        f"rank {evidence.rank}, pid {evidence.pid}: {state}, {evidence.where or 'at no known line'}",
        *(f"note: {problem}" for problem in evidence.problems),
        f"sections: {' > '.join(evidence.sections) or '(none told)'}",
        "",
        "collectives",
        render_positions(evidence.positions),
        "",
        f"Python stacks, innermost frame first (by {evidence.stacks_by or 'nothing'})",
        render_stacks(stacks),
        "",
        "threads, as the kernel sees them",
    ]
    for thread in threads:
        waits = f" in {thread.wchan}" if thread.wchan else ""
        doing = f"{thread.state} {STATES.get(thread.state, '')}{waits}"
        lines.append(f"{thread.tid} {thread.name}: {doing}; syscall {thread.syscall or '?'}")
        lines += [f"    {call}" for call in thread.stack]
    return "\n".join(lines)[:LIMIT] + "\n"


# --- keeping it --------------------------------------------------------------------------------------------


def _keep(directory: Path, report: HangReport, texts: Mapping[int, str], deadline: float) -> HangReport:
    """Write it all, the node's report first. In a thread: a disk that hangs must not hold up the kill."""
    path = directory / f"{report.node}.json"
    kept = msgspec.structs.replace(report, kept=str(directory))

    def work() -> str:
        try:
            make_dirs(directory)
            replace_atomic(path, msgspec.json.encode(kept) + b"\n")
            for rank, text in sorted(texts.items()):
                replace_atomic(directory / f"rank_{rank:06d}.txt", text.encode(errors="replace"))
        except OSError as error:
            return f"the evidence could not be written to {directory}: {error.strerror or error}"
        return ""

    writing = Bounded(work, "hang-evidence")
    if writing.ended(deadline - time.monotonic()):
        problem = writing.result()
    else:
        problem = f"the evidence was not written to {directory} in time; its disk may hang"
    return kept if not problem else msgspec.structs.replace(report, problems=[*report.problems, problem])


def read_reports(attempt_dir: Path) -> list[HangReport]:
    """What the nodes of an attempt kept; a report that cannot be read is left out."""
    found = []
    for path in sorted((attempt_dir / DIRECTORY).glob("*.json")):
        try:
            found.append(msgspec.json.decode(read_regular(path, 64 * LIMIT), type=HangReport))
        except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
    return found


# A hang, from the overdue rank to what the decision learns about it.
#
# Guarantee: an overdue rank counts as hung only by `policy.timeouts.hanging`, which is asked about the ranks
# of all nodes. An agent with an overdue rank raises a hand; the leading agent calls the roll, every agent
# answers with what it knows about its ranks at that moment, and the leader judges. If the leader does not
# call the roll, or a node does not answer, for `PATIENCE` seconds, the others judge without it: an agent that
# hangs does not hold this up.
#
# Every node looks at all of its own ranks before it ends them, wherever the hang was noticed first: only all
# of them together show who is missing from a collective.


LOOKING = 10.0
"""Seconds for finding out what the ranks of a node are doing, and for writing it down."""
PATIENCE = 60.0
"""Seconds for the leading agent to call the roll, and for the others to answer it."""
ASK = 0.5
"""Seconds between two looks for a roll call or a raised hand."""
CALL = 2.0
"""Seconds between two calls while somebody is overdue."""
HANDS, CALLED, ANSWERED = "roll/hands", "roll/called", "roll/answered"


class RollCall:
    """Whether the ranks of one attempt hang, according to all of its nodes. One per attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._place = attempt.place
        self._until: dict[int, float] = {}
        """Until when each rank that is late but was excused has time."""
        self._asked = 0.0
        self._raised: float | None = None
        """When this node raised its hand, if nobody has called the roll since."""
        self._answered = 0
        self._hands = 0
        """For the leader: how many hands were raised before the last call."""
        self._call = 0
        """The number of the last call."""
        self._before = 0
        """How many answers had been given before it."""
        self._open: float | None = None
        """When it was made, while not all have answered."""
        self._next = 0.0
        """When the next call is due; 0 if nobody was overdue."""

    def look(self, mine: StillRunning) -> Notice | None:
        """To be called often; returns a notice if the group hangs. `mine`: this node's ranks."""
        now = time.monotonic()
        if self._place.nodes == 1:
            return self._judge([mine], now)
        if now - self._asked < ASK:
            return None
        self._asked = now
        return self._lead(mine, now) if self._place.leads else self._follow(mine, now)

    def _judge(self, standings: Sequence[StillRunning], now: float) -> Notice | None:
        found, self._until = hanging(standings, self._until, now)
        if not found:
            return None
        detail = "; ".join(late.told for _, late in found[:NAMED])
        return Notice(kind="hang", node=found[0][0], at=time.time(), detail=detail)

    # -- the others -----------------------------------------------------------------------------------------

    def _follow(self, mine: StillRunning, now: float) -> Notice | None:
        called = self._attempt.counted(CALLED)
        if called > self._answered:
            self._answered, self._raised = called, None
            self._attempt.say(f"roll/{self._place.group_rank}", msgspec.json.encode((called, mine)).decode())
            self._attempt.count(ANSWERED)
        elif not mine.late:
            self._raised = None
        elif self._raised is None:
            self._raised = now
            self._attempt.count(HANDS)
        elif now - self._raised > PATIENCE:
            return self._judge([mine], now)  # the leader does not look
        return None

    # -- the leader -----------------------------------------------------------------------------------------

    def _lead(self, mine: StillRunning, now: float) -> Notice | None:
        if self._open is None:
            self._begin(mine, now)
            return None
        lost = self._attempt.lost_nodes()
        others = [rank for rank in range(1, self._place.nodes) if rank not in lost]
        late = now - self._open > PATIENCE
        if self._attempt.counted(ANSWERED) - self._before < len(others) and not late:
            return None
        answers = self._attempt.read([f"roll/{rank}" for rank in others]).values()
        heard = [msgspec.json.decode(raw, type=tuple[int, StillRunning]) for raw in answers]
        standings = [mine, *(standing for call, standing in heard if call == self._call)]
        if len(standings) <= len(others) and not late:
            return None  # some of those counted have been lost since, or had answered an earlier call
        self._open = None
        if not any(standing.late for standing in standings):
            self._next, self._until = 0.0, {}
            return None
        self._next = now + CALL
        return self._judge(standings, now)

    def _begin(self, mine: StillRunning, now: float) -> None:
        """Call the roll if a hand is up here or elsewhere, or somebody was overdue the last time."""
        if now < self._next:
            return
        hands = self._attempt.counted(HANDS)
        if hands == self._hands and not mine.late and not self._next:
            return
        self._before = self._attempt.counted(ANSWERED)
        self._call, self._hands, self._open = self._attempt.count(CALLED), hands, now


def look_at_hang(
    attempt: Attempt,
    pids: Mapping[int, int],
    monitor: Monitor,
    ranks: Mapping[int, int],
    ended: Collection[int] = (),
) -> None:
    """Record what this node's ranks are doing, while they are still doing it.

    `ranks`: the rank each worker was started with → its present rank; a worker without one does nothing.
    `ended`: ranks whose processes have ended.
    """
    started = {rank: first for first, rank in ranks.items()}
    collect(
        attempt.control.attempt(attempt.number),
        attempt.place.node,
        {rank: pids[first] for rank, first in started.items()},
        lambda rank, timeout: monitor.ask(started[rank], timeout),
        hung=[
            msgspec.structs.replace(one, rank=ranks.get(one.rank, one.rank)) for one in monitor.overdue(ended)
        ],
        deadline=time.monotonic() + LOOKING,
        stacks=monitor.path.parent,
    )


def hangs_of(attempt: Attempt) -> tuple[list[Hang], list[str]]:
    """What all nodes found, as evidence and in words."""
    reports = read_reports(attempt.control.attempt(attempt.number))
    if not reports:
        return [], []
    found = merge(reports, world=attempt.place.world_size)
    nodes = attempt.nodes_of_ranks or _nodes_of_ranks(attempt.told.arrangement, attempt.place.world_size)
    hangs = [
        Hang(
            rank=one.rank,
            at=min(report.at for report in reports),
            node=one.node,
            section=one.section,
            seconds=one.seconds,
            limit=one.limit,
            missing=list(one.missing),
            missing_nodes=sorted({nodes[rank] for rank in one.missing if rank in nodes}),
            silent=list(one.silent),
            exiting=one.rule == EXITING,
        )
        for one in found.hung
    ]
    return hangs, found.told


def _nodes_of_ranks(arrangement: Arrangement, world_size: int) -> dict[int, str]:
    """Global rank → node, if all nodes have equally many workers."""
    nodes = [one.node for one in arrangement.nodes]
    if not nodes or world_size % len(nodes):
        return {}
    each = world_size // len(nodes)
    return {rank: nodes[rank // each] for rank in range(world_size)}
