"""Gathers what a failed attempt left behind, and puts questions to ranks that still answer.

Guarantee: nothing a worker wrote can make this fail. If an error file is missing, torn, huge or of another
shape, its message is lost, but not the decision.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from holdfast.base import read_regular
from holdfast.health import CGROUPS, OWN, cgroup_memory
from holdfast.launch.workers import Workers
from holdfast.policy import (
    KERNEL_OOM,
    LOADER_KILLED,
    MOST_RAISED,
    MemoryKill,
    Raised,
    clipped,
    in_words,
    is_symptom,
    tells,
    told_by_traceback,
)
from holdfast.record import FailureRecord
from holdfast.train import ANSWER_LIMIT, AnswerPart

# Questions that an agent has put to its ranks, and the answers, which come in parts.


@dataclass
class _Question:
    rank: int
    parts: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    answer: bytes | None = None


class Questions:
    """The open questions. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Question] = {}
        self._numbers = itertools.count(1)

    def any(self) -> bool:
        return bool(self._open)

    def put(self, rank: int) -> int:
        """Open a new question to a rank; returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._open[number] = _Question(rank)
            return number

    def await_answer(self, number: int, timeout: float) -> bytes | None:
        """The whole answer, or None if there is none in time. Either way, this closes the question."""
        with self._lock:
            question = self._open.get(number)
        if question is None:
            return None
        question.ended.wait(timeout)
        with self._lock:
            self._open.pop(number, None)
            return question.answer

    def take(self, rank: int, message: AnswerPart) -> None:
        """A part of an answer has come. ValueError if it makes no sense."""
        with self._lock:
            question = self._open.get(message.ask)
            if question is None or question.rank != rank or question.ended.is_set():
                return  # it has come too late
            if message.parts == 0:
                question.ended.set()
                return
            if not 0 <= message.index < message.parts:
                raise ValueError(f"part {message.index} of {message.parts} of an answer")
            question.parts[message.index] = message.data
            question.size += len(message.data)
            if question.size > ANSWER_LIMIT:
                raise ValueError(f"an answer of more than {ANSWER_LIMIT} bytes")
            if len(question.parts) == message.parts:
                question.answer = b"".join(part for _, part in sorted(question.parts.items()))
                question.ended.set()

    def give_up(self, rank: int | None = None) -> None:
        """Nobody is left to answer, in this rank or in any."""
        with self._lock:
            for question in self._open.values():
                if rank is None or question.rank == rank:
                    question.ended.set()


SETTLE = 1.0
"""Seconds to wait for the cause when only symptoms of a lost peer are seen yet."""
ERROR_FILE_LIMIT = 4 * 1024 * 1024
MESSAGE_LIMIT = 500
LAST_LINES = 120
"""How many of the last lines of a rank may be about its end: an abort writes its stack below the message."""
_SAYS_NOTHING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _read_error_file(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_regular(path, ERROR_FILE_LIMIT), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}


def message_of(path: Path) -> str:
    """The exception in an error file, on one line: its first line and, if it has more, its last."""
    message = _read_error_file(path).get("message")
    if isinstance(message, dict):
        message = message.get("message")
    return _on_one_line(message) if isinstance(message, str) else ""


def _on_one_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys(lines[:1] + lines[-1:]))[:MESSAGE_LIMIT]


def errors_of(path: Path) -> list[Raised]:
    """The exception in an error file and what led to it: as Holdfast wrote it, or from torch's traceback."""
    message = _read_error_file(path).get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    if not isinstance(extra, dict):
        return []
    with contextlib.suppress(msgspec.ValidationError, KeyError):
        return _clipped(msgspec.convert(extra["chain"], list[Raised]))
    stack = extra.get("py_callstack")
    return _clipped(told_by_traceback(stack, _here())) if isinstance(stack, str) else []


def _clipped(errors: list[Raised]) -> list[Raised]:
    """The errors, kept short: whoever decides reads those of all ranks."""
    return [
        Raised(
            types=one.types[:MOST_RAISED],
            message=one.message[: 2 * MESSAGE_LIMIT],
            errno=one.errno,
            where=clipped(one.where),
        )
        for one in errors[:MOST_RAISED]
    ]


def _here() -> str:
    """The directory that this agent is in, which its workers were started in; empty if it is gone."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def code_of(path: Path) -> int:
    """The exit code of the exception in an error file; 1, like Python's own, if the file does not say."""
    try:
        code = int(_read_error_file(path)["message"]["extraInfo"]["exit_code"])
    except (LookupError, TypeError, ValueError):
        return 1
    return code if 0 < code < 128 else 1


def heard_in(
    last_lines: str, exit_code: int, added: Sequence[tuple[str, str]] = ()
) -> tuple[list[Raised], str]:
    """What a rank without an error file said at its end: its exceptions, and the cause in one line.

    An exception counts only if it ended the process, a line only if it is near the end. If the rank was
    killed, its last line says nothing. `added`: causes and patterns of the configuration, looked for first.
    """
    if exit_code == 0 or -exit_code in _SAYS_NOTHING:
        return [], ""
    lines = [line.strip() for line in last_lines.splitlines() if line.strip()]
    last = "\n".join(last_lines.splitlines()[-LAST_LINES:])
    if exit_code > 0 and (errors := told_by_traceback(last, _here())):
        return _clipped(errors), _on_one_line(in_words(errors[0]))
    near = lines[: -LAST_LINES - 1 : -1]
    own = (line for line in near if any(re.search(one, line, re.IGNORECASE) for _, one in added))
    telling = next(own, "") or next(filter(tells, near), "") or next(iter(near), "")
    return [], telling[:MESSAGE_LIMIT]


def written_at(path: Path) -> float | None:
    """When an error file was written; torch's own timestamps have whole seconds only."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime if info.st_size else None


def keep_error_file(source: Path, attempt: Path, rank: int) -> str:
    """Copy an error file into the attempt's directory, where it outlives temporary files; its new path."""
    target = attempt / "errors" / f"rank_{rank:06d}.json"
    try:
        if source.is_symlink() or not source.is_file() or source.stat().st_size > ERROR_FILE_LIMIT:
            return ""
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError:
        return ""
    return str(target)


def keep_last_lines(text: str, attempt: Path, rank: int) -> str:
    """Write what a rank wrote last to a file in the attempt's directory; its path."""
    target = attempt / "errors" / f"rank_{rank:06d}.stderr"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, errors="replace")
    except OSError:
        return ""
    return str(target)


def stop_and_see(
    workers: Workers,
    error_files: Mapping[int, str],
    grace: float,
    *,
    at_once: Collection[int] = (),
    fine: Collection[int] = (0,),
    early: bool = False,
    leavers: bool = False,
) -> dict[int, int]:
    """Stop a node's workers: rank → exit code of those that failed by themselves, not by being stopped.

    `at_once` are killed without being asked; codes in `fine` are not failures. `early`: no rank has begun to
    train, so all of them may fail in the same way. `leavers`: the first that left with 0 is included.
    """
    failed = _await_cause(workers, error_files, fine, early=early)
    done = [rank for rank, code in workers.ended().items() if code == 0]
    first = min(done, key=lambda rank: (workers.seen[rank], rank), default=None)
    asked = time.time()
    workers.stop(grace, at_once)
    for rank, code in workers.ended().items():
        # Was it failing already when it was asked to stop? Then its own error file is older.
        written = written_at(Path(error_files[rank]))
        if code not in fine and rank not in failed and written is not None and written < asked:
            # The signal may be ours, which says nothing; then take the code its exception would have led to.
            ours = code in (-signal.SIGTERM, -signal.SIGKILL)
            failed[rank] = code_of(Path(error_files[rank])) if ours else code
    if leavers and first is not None:
        failed[first] = 0
    return failed


def _await_cause(
    workers: Workers, error_files: Mapping[int, str], fine: Collection[int], *, early: bool
) -> dict[int, int]:
    """The ranks that failed. If all of them only lost a peer, the peer gets a moment to fail as well.

    So do all ranks before any of them trains: that shows whether all of them fail or only one.
    """
    deadline = time.monotonic() + SETTLE
    while True:
        ended = workers.ended()
        failed = {rank: code for rank, code in ended.items() if code not in fine}
        cause_seen = any(
            not is_symptom(code, message_of(Path(error_files[rank]))) for rank, code in failed.items()
        )
        # If a rank was killed, all that the others could do is be killed too.
        more = early and all(code > 0 for code in failed.values())
        enough = (cause_seen or not failed) and not more
        if enough or len(ended) == len(workers.pids) or time.monotonic() >= deadline:
            return failed
        time.sleep(0.05)


def gather(
    attempt: Path,
    node: str,
    pids: Mapping[int, int],
    exit_codes: Mapping[int, int],
    error_files: Mapping[int, str],
    *,
    memory: MemoryKill | None,
    devices: Mapping[int, str] = MappingProxyType({}),
    last_lines: Callable[[int], str] = lambda _: "",
    seen: Mapping[int, float] = MappingProxyType({}),
    steps: Mapping[int, int] = MappingProxyType({}),
    causes: Sequence[tuple[str, str]] = (),
) -> list[FailureRecord]:
    """One record for each worker in `exit_codes` (by global rank) that ended by itself.

    Also by global rank: the `last_lines` of standard error, when each was `seen` to have ended, and the last
    `steps`. `memory`: what the kernel counted in this attempt; `causes`: those that the configuration adds.
    """
    records = []
    for rank, code in sorted(exit_codes.items()):
        source = Path(error_files[rank])
        message, errors = message_of(source), errors_of(source)
        written = last_lines(rank) if code else ""
        if not message:
            errors, message = heard_in(written, code, causes)
        starved = memory is not None and code == -signal.SIGKILL
        if starved:
            message = KERNEL_OOM
        elif memory is not None and any(LOADER_KILLED in one.message for one in errors):
            message, starved = f"{KERNEL_OOM}: {message}", True
        now = time.time()
        records.append(
            FailureRecord(
                rank=rank,
                node=node,
                pid=pids[rank],
                exit_code=code,
                at=min(seen.get(rank, now), (written_at(source) if code else None) or now),
                message=message,
                error_file=keep_error_file(source, attempt, rank) if code else "",
                device=devices.get(rank, ""),
                errors=errors,
                stderr_file=keep_last_lines(written, attempt, rank) if written.strip() else "",
                memory=memory if starved else None,
                left=code == 0,
                step=steps.get(rank) if code == 0 else None,
            )
        )
    return records


def memory_kill(before: int) -> MemoryKill | None:
    """What the kernel killed in this job for lack of memory since its count was `before`; None if nothing."""
    group, now = _oom_counter()
    if now <= before:
        return None
    tightest = cgroup_memory()
    return MemoryKill(
        kills=now - before,
        group=group,
        limit=tightest.limit if tightest is not None else None,
        limited=tightest.group if tightest is not None else "",
    )


def count_oom_kills(groups: Path = OWN, mounted: Path = CGROUPS) -> int:
    """How often the kernel killed something in this process's cgroup for lack of memory; 0 if unknown."""
    return _oom_counter(groups, mounted)[1]


def _oom_counter(groups: Path = OWN, mounted: Path = CGROUPS) -> tuple[str, int]:
    """The cgroup that has the counter, and its count.

    Both versions of cgroups have one, each in a file of its own. Inside a container the group's own path may
    not exist, and the root of what is mounted is the group.
    """
    files: list[tuple[str, Path]] = []
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if "memory" in controllers.split(","):
                root, name = mounted / "memory", "memory.oom_control"
            elif not controllers:
                root, name = mounted, "memory.events"
            else:
                continue
            files += [(path, root / path.lstrip("/") / name), ("/", root / name)]
    for group, file in files:
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return group, int(value)
    return "", 0
