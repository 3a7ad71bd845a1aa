"""Gathers what a failed attempt left behind.

Guarantee: nothing a worker wrote can make this fail. An error file that is missing, torn, huge or of another
shape costs its message, not the decision.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from holdfast.checkpoint.identity import MANIFEST, CheckpointRoot
from holdfast.checkpoint.ladder import REFUSED
from holdfast.control.attempts import FailureRecord
from holdfast.control.directory import ControlDirectory
from holdfast.control.standing import StandingBook
from holdfast.errors import StorageError
from holdfast.files import read_regular
from holdfast.launch.workers import Workers
from holdfast.policy.classify import KERNEL_OOM, is_symptom

SETTLE = 1.0
"""Seconds to wait for the cause when only symptoms of a lost peer are seen yet."""
ERROR_FILE_LIMIT = 4 * 1024 * 1024
MESSAGE_LIMIT = 500


def message_of(path: Path) -> str:
    """The exception in an error file, on one line: its first line and, if it has more, its last."""
    try:
        data = msgspec.json.decode(read_regular(path, ERROR_FILE_LIMIT), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
    message = data.get("message")
    if isinstance(message, dict):
        message = message.get("message")
    if not isinstance(message, str):
        return ""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " … ".join(dict.fromkeys(lines[:1] + lines[-1:]))
    return text[:MESSAGE_LIMIT]


def code_of(path: Path) -> int:
    """The exit code of the exception in an error file; 1, as Python's own, if it does not say."""
    try:
        data = msgspec.json.decode(read_regular(path, ERROR_FILE_LIMIT), type=dict[str, Any])
        code = int(data["message"]["extraInfo"]["exit_code"])
    except (
        OSError,
        msgspec.DecodeError,
        RecursionError,
        UnicodeDecodeError,
        LookupError,
        TypeError,
        ValueError,
    ):
        return 1
    return code if 0 < code < 128 else 1


def written_at(path: Path) -> float | None:
    """When an error file was written; torch's own timestamps have whole seconds only."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime if info.st_size else None


def keep_error_file(source: Path, attempt: Path, rank: int) -> str:
    """Copy an error file into the attempt's directory, where it outlives temporary ones; its new path."""
    target = attempt / "errors" / f"rank_{rank:06d}.json"
    try:
        if source.is_symlink() or not source.is_file() or source.stat().st_size > ERROR_FILE_LIMIT:
            return ""
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
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
) -> dict[int, int]:
    """Stop a node's workers: rank → exit code of those that failed by themselves, not by being stopped.

    `at_once` are killed without being asked; codes in `fine` are no failure.
    """
    failed = _await_cause(workers, error_files, fine)
    asked = time.time()
    workers.stop(grace, at_once)
    for rank, code in workers.ended().items():
        # Was it failing already when it was asked to stop? Then its own error file is older.
        written = written_at(Path(error_files[rank]))
        if code not in fine and rank not in failed and written is not None and written < asked:
            # The signal is ours then and says nothing; the code is what its exception was about to exit with.
            ours = code in (-signal.SIGTERM, -signal.SIGKILL)
            failed[rank] = code_of(Path(error_files[rank])) if ours else code
    return failed


def _await_cause(workers: Workers, error_files: Mapping[int, str], fine: Collection[int]) -> dict[int, int]:
    """Those that failed. If all of them only lost a peer, the peer gets a moment to fail as well."""
    deadline = time.monotonic() + SETTLE
    while True:
        ended = workers.ended()
        failed = {rank: code for rank, code in ended.items() if code not in fine}
        cause_seen = any(
            not is_symptom(code, message_of(Path(error_files[rank]))) for rank, code in failed.items()
        )
        if not failed or cause_seen or len(ended) == len(workers.pids) or time.monotonic() >= deadline:
            return failed
        time.sleep(0.05)


def gather(
    attempt: Path,
    node: str,
    pids: Mapping[int, int],
    exit_codes: Mapping[int, int],
    error_files: Mapping[int, str],
    *,
    oom_kills: int,
    devices: Mapping[int, str] = MappingProxyType({}),
) -> list[FailureRecord]:
    """One record for each worker in `exit_codes` (by global rank) that failed by itself."""
    records = []
    for rank, code in sorted(exit_codes.items()):
        source = Path(error_files[rank])
        message = message_of(source)
        if code == -signal.SIGKILL and oom_kills > 0:
            message = KERNEL_OOM
        records.append(
            FailureRecord(
                rank=rank,
                node=node,
                pid=pids[rank],
                exit_code=code,
                at=min(time.time(), written_at(source) or time.time()),
                message=message,
                error_file=keep_error_file(source, attempt, rank),
                device=devices.get(rank, ""),
            )
        )
    return records


def count_oom_kills() -> int:
    """How often the kernel killed something in this process's cgroup for lack of memory; 0 if unknown."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        for line in (Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def highest_committed_step(root: Path, control: ControlDirectory) -> int:
    """The highest step among committed checkpoints; 0 if there is none. Says nothing about their bytes.

    One that is suspect or condemned is no progress.
    """
    checkpoints, book = CheckpointRoot(root), StandingBook(control)
    try:
        return next(
            (
                name.step
                for name in checkpoints.names()
                if (checkpoints.committed(name) / MANIFEST).is_file() and book.of(name.id) not in REFUSED
            ),
            0,
        )
    except (OSError, StorageError):
        return 0
