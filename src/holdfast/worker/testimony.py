"""What a rank can say of itself while its main thread hangs.

Two ways, since neither covers all hangs. `testify` runs in another thread and tells everything: the stacks of
all threads with their names, and where the rank stands in each process group. It needs the interpreter's
lock. The stack signal needs nothing but a live process: the handler, in C, writes the Python stacks into a
file that `install` opened, also while a C call holds that lock. Only a process that is stopped, or whose
threads all sit in the kernel, says nothing at all.

Guarantee: neither raises, waits for another rank, imports torch or touches a device. No source file is read
for the stacks, because the disk may be what hangs.

torch keeps two flight recorders: one for NCCL, one for gloo and whatever else uses the generic one. Numbers
in them are right; the states of gloo's are not (`scheduled` for ever), but `retired` is. Where they are off
(TORCH_FR_BUFFER_SIZE=0) the process groups still know how many collectives were entered, without names or
which of them are done.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import msgspec

from holdfast.bounded import Bounded
from holdfast.files import read_regular, replace_atomic
from holdfast.policy.missing import Position

DEPTH = 200
"""Frames kept of each thread, innermost first."""
MAX_THREADS = 500
RECORDER_PATIENCE = 2.0
"""Seconds for a flight recorder's dump: it asks the device for the states of its events."""
RECORD_LIMIT = 64 * 1024
_CANDIDATES = range(7, 15)
"""Offsets from SIGRTMIN. The first two or three real-time signals are what other libraries tend to take."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    file: str
    line: int
    function: str


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tid: int = 0
    """As the kernel counts threads; 0 if not known."""
    main: bool = False
    frames: list[Frame] = []
    """Innermost first."""


class Testimony(msgspec.Struct, frozen=True, kw_only=True):
    threads: list[ThreadStack] = []
    positions: list[Position] = []
    sections: list[str] = []
    """Open ones, outermost first."""
    recorders: list[str] = []
    """Where the positions come from: `nccl`, `generic`, `counters`."""
    problems: list[str] = []


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """Left beside the file for the stacks: the signal may be sent to this process, and to no other."""

    pid: int
    started: int
    signal: int
    main_thread: int


class Installed:
    """A registered stack signal. Kept, because the handler writes to a descriptor that must stay open."""

    def __init__(self, file: BinaryIO, number: int, record: Path) -> None:
        self._file = file
        self._record = record
        self.signal = number

    def close(self) -> None:
        """Take the registration back. Who sends the signal after this has not looked, and is ignored."""
        with contextlib.suppress(OSError):
            self._record.unlink(missing_ok=True)
        signal.signal(self.signal, signal.SIG_IGN)  # one that is under way must not end us
        with contextlib.suppress(RuntimeError, ValueError):
            faulthandler.unregister(self.signal)
        signal.signal(self.signal, signal.SIG_IGN)  # unregistering brings the default action back
        self._file.close()


def stacks_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:06d}.stacks"


def record_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:06d}.registered"


def install(directory: Path, rank: int) -> Installed | None:
    """Have a signal write all threads' Python stacks into a file of this rank in the agent's directory.

    None if that is not possible here: then there are no stacks of a rank that holds the interpreter's lock.
    """
    try:
        number = _free_signal()
        if number is None:
            return None
        path, record = stacks_path(directory, rank), record_path(directory, rank)
        file = path.open("wb", buffering=0)  # the handler needs it until the process ends
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        # Only once the handler is there: before, the signal would have ended this process.
        registered = Registered(
            pid=os.getpid(),
            started=_started(),
            signal=number,
            main_thread=threading.main_thread().ident or 0,
        )
        replace_atomic(record, msgspec.json.encode(registered), durable=False)
    except (OSError, ValueError, RuntimeError):
        return None
    return Installed(file, number, record)


def registered(directory: Path, rank: int) -> Registered | None:
    """What a rank registered; None if nothing that can be read says so."""
    try:
        raw = read_regular(record_path(directory, rank), RECORD_LIMIT)
        return msgspec.json.decode(raw, type=Registered)
    except (OSError, msgspec.DecodeError):
        return None


def _free_signal() -> int | None:
    """A real-time signal that nobody in this process handles, in Python or in C."""
    caught = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
    for offset in _CANDIDATES:
        number = signal.SIGRTMIN + offset
        if number <= signal.SIGRTMAX and not caught >> (number - 1) & 1:
            return int(number)
    return None


def _started() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


# --- what a thread of the rank can tell --------------------------------------------------------------------


def testify(sections: Sequence[str] = ()) -> bytes:  # noqa: PT028 - no test
    """Everything that can be told now, as JSON of a `Testimony`. Never raises."""
    problems: list[str] = []
    stacks: list[ThreadStack] = []
    positions: list[Position] = []
    recorders: list[str] = []
    try:
        stacks = _stacks()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with this process, the rest may be told
        problems.append(f"no stacks: {type(error).__name__}: {error}")
    try:
        positions, recorders, found = _positions()
        problems += found
    except Exception as error:  # noqa: BLE001
        problems.append(f"no collectives: {type(error).__name__}: {error}")
    told = Testimony(
        threads=stacks,
        positions=positions,
        sections=[str(section) for section in sections],
        recorders=recorders,
        problems=problems,
    )
    try:
        return msgspec.json.encode(told)
    except Exception as error:  # noqa: BLE001 - a name that is not text
        return msgspec.json.encode(Testimony(problems=[f"cannot be told: {type(error).__name__}"]))


def _stacks() -> list[ThreadStack]:
    known = {thread.ident: thread for thread in list(threading.enumerate())}
    main = threading.main_thread().ident
    found = []
    for ident, frame in list(sys._current_frames().items())[:MAX_THREADS]:
        thread = known.get(ident)
        found.append(
            ThreadStack(
                name=_clean(thread.name) if thread is not None else "(not started by Python)",
                tid=(thread.native_id or 0) if thread is not None else 0,
                main=ident == main,
                frames=frames_of(frame),
            )
        )
    return sorted(found, key=lambda stack: not stack.main)


def frames_of(frame: FrameType | None) -> list[Frame]:
    """The innermost first. Reads no file: the source may lie where everything hangs."""
    found: list[Frame] = []
    while frame is not None and len(found) < DEPTH:
        code = frame.f_code
        found.append(Frame(_clean(code.co_filename), frame.f_lineno or 0, _clean(code.co_name)))
        frame = frame.f_back
    return found


def _clean(text: object) -> str:
    """Names may hold lone surrogates, which JSON does not take."""
    return str(text).encode(errors="replace").decode()[:500]


# --- collectives -------------------------------------------------------------------------------------------


def _positions() -> tuple[list[Position], list[str], list[str]]:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or distributed is None:
        return [], [], []
    members = _members(distributed)
    problems: list[str] = []
    found: dict[tuple[str, str], Position] = {}
    sources: list[str] = []
    for source, name in (("nccl", "_dump_nccl_trace_json"), ("generic", "_dump_fr_trace_json")):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        entries, problem = _entries(dump)
        if problem:
            problems.append(f"flight recorder {source}: {problem}")
        seen = read_entries(entries, members)
        if seen:
            sources.append(source)
        found.update(seen)
    recorded = {group for group, _ in found}
    counted = [one for one in _counters(distributed, members) if one.group not in recorded]
    if counted:
        sources.append("counters")
    return [*found.values(), *counted], sources, problems


def _entries(dump: Any) -> tuple[list[dict[str, Any]], str]:
    """A recorder's entries. In a thread: its dump may wait for a device that hangs."""
    dumped = Bounded(
        lambda: json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries") or [], "recorder"
    )
    if not dumped.ended(RECORDER_PATIENCE):
        return [], f"no answer within {RECORDER_PATIENCE:g} s"
    try:
        return dumped.result(), ""
    except Exception as error:  # noqa: BLE001
        return [], f"{type(error).__name__}: {error}"


def read_entries(
    entries: Sequence[Any], members: dict[str, tuple[int, ...]]
) -> dict[tuple[str, str], Position]:
    """Per group and backend, from a flight recorder: the first collective that is not done, and the last one.

    Entries of another shape are passed over. Sends and receives count apart, and not here: that a peer has
    not sent is seen from its stack.
    """
    first: dict[tuple[str, str], dict[str, Any]] = {}
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        try:
            if entry["is_p2p"]:
                continue
            number = int(entry["collective_seq_id"])
            key = _clean(entry["process_group"][0]), _clean(entry["profiling_name"]).partition(":")[0]
            done = bool(entry["retired"]) or entry["state"] == "completed"
        except (KeyError, TypeError, ValueError, IndexError):
            continue
        if key not in last or number >= int(last[key]["collective_seq_id"]):
            last[key] = entry
        if not done and (key not in first or number < int(first[key]["collective_seq_id"])):
            first[key] = entry
    return {
        key: Position(
            group=key[0],
            backend=key[1],
            entered=int(entry["collective_seq_id"]),
            name=_name(first.get(key, entry)),
            waits_in=int(first[key]["collective_seq_id"]) if key in first else 0,
            members=members.get(key[0], ()),
            shapes=_shapes(first.get(key, entry)),
        )
        for key, entry in last.items()
    }


def _name(entry: dict[str, Any]) -> str:
    """`all_reduce` from `nccl:all_reduce`."""
    return _clean(entry.get("profiling_name", "")).rpartition(":")[2]


def _shapes(entry: dict[str, Any]) -> str:
    def words(key: str) -> str:
        sizes = entry.get(key)
        return " ".join(str(size).replace(" ", "") for size in sizes[:4]) if isinstance(sizes, list) else ""

    return _clean(f"{words('input_sizes')} -> {words('output_sizes')}")[:200]


def _members(distributed: Any) -> dict[str, tuple[int, ...]]:
    """Global ranks of every process group of this rank, by the name that all ranks call it."""
    world = distributed._world
    return {
        str(name): tuple(sorted(int(rank) for rank in world.pg_group_ranks.get(group, {})))
        for group, name in list(world.pg_names.items())
    }


def _counters(distributed: Any, members: dict[str, tuple[int, ...]]) -> list[Position]:
    """How many collectives were entered in each group: what is known without a flight recorder."""
    found = []
    for group, name in list(distributed._world.pg_names.items()):
        with contextlib.suppress(Exception):  # a backend that does not count
            entered = int(group._get_sequence_number_for_group())
            known = members.get(str(name), ())
            found.append(Position(group=str(name), entered=max(0, entered), members=known))
    return found
