"""Collects the evidence of a hang, before anything is killed.

Guarantee: `collect` returns by its deadline whatever the ranks, the kernel and the disk do; what could not be
had in time is missing from the report and said to be. All ranks are asked at once, each in a thread of its
own that nobody waits for beyond the deadline: a rank may not answer, /proc may not answer for a process that
hangs in the kernel, and the control directory may be on the disk that hangs. What is written is durable on
return.

The stack signal goes only to a process that registered it and that, as the kernel says, handles it: the
signal's default action would end the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.bounded import Bounded
from holdfast.files import make_dirs, read_regular, replace_atomic
from holdfast.launch import processes
from holdfast.launch.hang_report import (
    MAX_STACKS,
    HangRecord,
    HangReport,
    RankEvidence,
    merge,
    parse_stacks,
    place,
    render_positions,
    render_stacks,
)
from holdfast.launch.processes import STATES, Thread
from holdfast.worker.testimony import Testimony, ThreadStack, registered, stacks_path

ASKING = 0.4
"""Share of the time that goes into asking; then the silent ones get the signal."""
SIGNALLING = 0.65
"""Share after which a rank's stacks are no longer waited for."""
READING = 0.8
"""Share after which what has been found is written, the rest of the time being for the disk."""
SETTLED = 0.3
"""Seconds without growth after which a file of stacks is taken to be complete."""
POLL = 0.02
LIMIT = 2 * 1024 * 1024
"""Bytes of an answer, a file of stacks or a written text that are kept."""
DIRECTORY = "hang"

Ask = Callable[[int, float], bytes | None]


class Overdue(Protocol):
    """A rank that exceeded a limit, as the monitor tells it."""

    @property
    def rank(self) -> int: ...
    @property
    def section(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def limit(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def step(self) -> int: ...


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

    `ask(rank, timeout)` gives a rank's testimony or None; `stacks` is the directory that ranks were told to
    `install` their stack signal with; `deadline` is on the monotonic clock.
    """
    began = time.monotonic()
    span = max(0.0, deadline - began)

    def look(rank: int, pid: int) -> tuple[RankEvidence, str]:
        try:
            return _Look(rank, pid, ask, stacks, began, span).all()
        except Exception as error:  # noqa: BLE001 - evidence is worth having, but never a failure of its own
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


class _Look:
    """At one rank, in a thread of its own."""

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
        """The evidence, and the whole of it as text."""
        self._look_behind_wrapper()
        before = processes.read(self._pid)
        stopped = before is not None and before.state in ("T", "t")
        told: Testimony | None = None
        by, stacks = "", list[ThreadStack]()
        if before is None or before.ended:
            self._problems.append("the process has ended")
        elif stopped:
            self._problems.append(f"{STATES[before.state]}: it can neither answer nor show its stacks")
        else:
            told = self._answer()
            if told is not None and told.threads:
                by, stacks = "answer", told.threads
            else:
                stacks = self._signalled()
                by = "signal" if stacks else ""
        threads = processes.threads(self._pid)
        main = threads[0] if threads else None
        evidence = RankEvidence(
            rank=self._rank,
            pid=self._pid,
            state=main.state if main is not None else (before.state if before is not None else ""),
            waits=main.wchan if main is not None else "",
            stacks_by=by,
            where=place(stacks),
            positions=told.positions if told is not None else None,
            sections=told.sections if told is not None else [],
            stacks=stacks[:MAX_STACKS],
            problems=self._problems + (told.problems if told is not None else []),
        )
        return evidence, _text(evidence, stacks, threads)

    def _look_behind_wrapper(self) -> None:
        """The worker may be a shell that started the rank and waits for it: then look at the rank."""
        record = self._record
        if record is not None and record.pid != self._child:
            everyone = processes.everyone()
            below = {process.identity for process in processes.descendants([self._child], everyone)}
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
        record, process = self._record, processes.read(self._pid)
        if self._directory is None or record is None or process is None:
            self._problems.append("registered no stack signal")
            return []
        if (record.pid, record.started) != process.identity or not processes.catches(
            self._pid, record.signal
        ):
            self._problems.append("does not handle the stack signal that was registered for it")
            return []
        path = stacks_path(self._directory, self._rank)
        start = path.stat().st_size
        processes.send(process, record.signal)
        text = self._await_stacks(path, start, self._left((ASKING + SIGNALLING) / 2))
        if not text and self._pid == self._child:
            # The kernel gives the signal to the main thread, which cannot take it in uninterruptible sleep.
            for thread in processes.threads(self._pid)[1:4]:
                processes.send_thread(self._pid, thread.tid, record.signal)
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
