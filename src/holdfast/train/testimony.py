"""How a rank is watched: what it says of itself while it hangs, pings, and faults on purpose.

It testifies in two ways, since neither covers all hangs. `testify` runs in another thread and tells
everything: the stacks of all threads with their names, and where the rank stands in each process group. It
needs the interpreter's lock. The stack signal needs nothing but a live process: the handler, in C, writes the
Python stacks into a file that `install` opened, even while a C call holds that lock. Only a process that is
stopped, or whose threads all sit in the kernel, says nothing at all.

Guarantee: neither raises, waits for another rank, imports torch or touches a device. No source file is read
for the stacks, because the disk may be what hangs.

torch keeps two flight recorders: one for NCCL, one for gloo and whatever else uses the generic one. Numbers
in them are right; gloo's states are not (`scheduled` for ever), but its `retired` is. Where they are off
(TORCH_FR_BUFFER_SIZE=0) the process groups still know how many collectives were entered, but not their names
or which of them are done.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from holdfast.base import Bounded, read_regular, replace_atomic, scope
from holdfast.config import Effective, HealthSettings, MonitorSettings
from holdfast.errors import ConfigError, PingFailedError
from holdfast.health import LivenessPing
from holdfast.journal import JournalWriter
from holdfast.journal.events import PingFailed, Warned
from holdfast.policy import SETUP, Position
from holdfast.process import proc
from holdfast.record import (
    UNPROTECTED,
    ControlDirectory,
    Group,
    LaunchInfo,
    check_timeouts,
    ends_of,
    limits_of,
    refuse_unknown_to_launcher,
    refuse_without_launcher,
)
from holdfast.train.beats import Beats

if TYPE_CHECKING:
    from holdfast.train.halting import Halting
    from holdfast.train.membership import Membership


DEPTH = 200
"""How many frames are kept of each thread, innermost first."""
MAX_THREADS = 500
RECORDER_PATIENCE = 2.0
"""Seconds for a flight recorder's dump: it asks the device for the states of its events."""
RECORD_LIMIT = 64 * 1024
_CANDIDATES = range(7, 15)
"""Offsets from SIGRTMIN. The first two or three real-time signals are what other libraries tend to take."""


class StackFrame(msgspec.Struct, frozen=True, array_like=True):
    file: str
    line: int
    function: str


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tid: int = 0
    """As the kernel counts threads; 0 if not known."""
    main: bool = False
    frames: list[StackFrame] = []
    """Innermost first."""


class Testimony(msgspec.Struct, frozen=True, kw_only=True):
    threads: list[ThreadStack] = []
    positions: list[Position] = []
    sections: list[str] = []
    """Open ones, outermost first."""
    recorders: list[str] = []
    """The sources of the positions: `nccl`, `generic`, `counters`."""
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
        """Take the registration back. A sender that has not looked, and signals after this, is ignored."""
        with contextlib.suppress(OSError):
            self._record.unlink(missing_ok=True)
        signal.signal(self.signal, signal.SIG_IGN)  # a signal under way must not end us
        with contextlib.suppress(RuntimeError, ValueError):
            faulthandler.unregister(self.signal)
        signal.signal(self.signal, signal.SIG_IGN)  # unregistering brings the default action back
        self._file.close()


def stacks_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:06d}.stacks"


def record_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:06d}.registered"


def install(directory: Path, rank: int) -> Installed | None:
    """Make a signal write all threads' Python stacks into this rank's file in the agent's directory.

    None if that is not possible here: then a rank that holds the interpreter's lock leaves no stacks.
    """
    try:
        number = _free_signal()
        if number is None:
            return None
        path, record = stacks_path(directory, rank), record_path(directory, rank)
        file = path.open("wb", buffering=0)  # the handler needs it until the process ends
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        # Only once the handler is in place: before that, the signal would end this process.
        registered = Registered(
            pid=os.getpid(),
            started=proc.started_at(os.getpid()),
            signal=number,
            main_thread=threading.main_thread().ident or 0,
        )
        replace_atomic(record, msgspec.json.encode(registered), durable=False)
    except (OSError, ValueError, RuntimeError):
        return None
    return Installed(file, number, record)


def registered(directory: Path, rank: int) -> Registered | None:
    """What a rank registered; None if there is nothing readable."""
    try:
        raw = read_regular(record_path(directory, rank), RECORD_LIMIT)
        return msgspec.json.decode(raw, type=Registered)
    except (OSError, msgspec.DecodeError):
        return None


def _free_signal() -> int | None:
    """A real-time signal that nobody in this process handles, in Python or in C."""
    caught = proc.caught(os.getpid())
    for offset in _CANDIDATES:
        number = signal.SIGRTMIN + offset
        if number <= signal.SIGRTMAX and not caught >> (number - 1) & 1:
            return int(number)
    return None


# --- what a thread of the rank can tell --------------------------------------------------------------------


def testify(sections: Sequence[str] = ()) -> bytes:  # noqa: PT028 - no test
    """Everything that can be told right now, as JSON of a `Testimony`. Never raises."""
    problems: list[str] = []
    stacks: list[ThreadStack] = []
    positions: list[Position] = []
    recorders: list[str] = []
    try:
        stacks = _stacks()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with this process, the rest can be told
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


def frames_of(frame: FrameType | None) -> list[StackFrame]:
    """Innermost first. Reads no file: the source may be on the very disk that hangs."""
    found: list[StackFrame] = []
    while frame is not None and len(found) < DEPTH:
        code = frame.f_code
        found.append(StackFrame(_clean(code.co_filename), frame.f_lineno or 0, _clean(code.co_name)))
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
    counted = [position for position in _counters(distributed, members) if position.group not in recorded]
    if counted:
        sources.append("counters")
    return [*found.values(), *counted], sources, problems


def _entries(dump: Any) -> tuple[list[dict[str, Any]], str]:
    """A recorder's entries. Read in a thread, since its dump may wait for a device that hangs."""
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

    Entries of another shape are skipped. Sends and receives are numbered separately and not counted here: a
    peer's stack shows that it has not sent.
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
    """Global ranks of every process group of this rank, by the name that all ranks use for it."""
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


# Deliberate faults (monitor.simulate_fault): a rank stops or kills itself, to check that the run survives.
#
# Only in the first attempt of a launch, and journalled before it happens. All ranks derive the same choice
# from names they share, so nothing has to be exchanged.


RANDOM_SHARE = 0.2
"""The delay is the base delay plus up to this share of it."""
_SIGNALS = {"rank_hung": signal.SIGSTOP, "rank_killed": signal.SIGKILL}


class DrilledFault(msgspec.Struct, frozen=True):
    kind: str
    """rank_hung or rank_killed."""
    rank: int
    delay: float
    """Seconds from the first completed step."""


def choose(settings: MonitorSettings, seed: str, world_size: int) -> DrilledFault:
    """The fault; every rank of an attempt derives the same one."""
    chance = random.Random(seed)
    kind, rank = chance.choice(sorted(_SIGNALS)), chance.randrange(world_size)
    delay = settings.simulated_fault_base_delay * (1 + RANDOM_SHARE * chance.random())
    if settings.simulated_fault_type != "random":
        kind = settings.simulated_fault_type
    if isinstance(settings.simulated_fault_rank, int):
        rank = settings.simulated_fault_rank
    if rank >= world_size:
        raise ConfigError(
            f"monitor.simulated_fault_rank = {rank}: there are {world_size} ranks, 0 to {world_size - 1}"
        )
    return DrilledFault(kind, rank, delay)


def is_first_attempt(control: ControlDirectory, attempt: int, launch: str) -> bool:
    """Whether no earlier attempt belongs to this launch."""
    return not any(record.launch == launch and record.number < attempt for record, _ in ends_of(control))


class SimulatedFault:
    """The fault, in the rank that is to have it. Call `arm` after each step: the first starts the clock."""

    def __init__(self, fault: DrilledFault, journal: JournalWriter) -> None:
        self._fault = fault
        self._journal = journal
        self._timer: threading.Timer | None = None

    def arm(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._fault.delay, self._happen)
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _happen(self) -> None:
        number = _SIGNALS[self._fault.kind]
        warning = f"simulated fault: {self._fault.kind}, rank {self._fault.rank} sends itself {number.name}"
        self._journal.write(Warned(message=warning))
        os.kill(os.getpid(), number)


# The liveness ping of a run: at a step's end, every `health.nccl_health_check_interval` steps.
#
# It comes before anything else at the boundary, because there the ranks are closest together: saving,
# evaluating and logging come after it.


class Pinging:
    """One per attempt. All ranks make it together."""

    def __init__(self, settings: HealthSettings, group: Group, journal: JournalWriter) -> None:
        self._every = settings.nccl_health_check_interval if group.world_size > 1 else 0
        self._journal = journal
        self._ping = LivenessPing(timeout=settings.nccl_health_check_timeout) if self._every else None

    def at_boundary(self, step: int) -> None:
        """After a step; raises PingFailedError, which ends the rank with 21, if a peer does not answer."""
        if self._ping is None or step % self._every:
            return
        try:
            self._ping()
        except PingFailedError as error:
            missing = list(error.missing)
            self._journal.write(PingFailed(step=step, missing=missing, seconds=round(error.seconds, 3)))
            failed = PingFailedError(f"after step {step}: {error}")
            failed.missing, failed.seconds = missing, error.seconds
            raise failed from None

    def close(self) -> None:
        """After the last step, on all ranks alike."""
        if self._ping is not None:
            self._ping.close()
            self._ping = None


# How a rank comes to be watched, as its settings say, if there is somebody to watch it.


log = logging.getLogger("holdfast")


def start_beats(
    effective: Effective,
    launched: LaunchInfo | None,
    testify: Callable[[Sequence[str]], bytes] = testify,
    halting: Halting | None = None,
) -> Beats:
    """Begin to be watched, in section `setup`; without a launcher, warn of what that leaves unprotected."""
    if launched is None:
        unread = refuse_without_launcher(effective, kept=scope.current() is not None)
        if unread and os.environ.get("RANK", "0") == "0":
            log.warning("holdfast: %s", "; ".join(unread))
        if os.environ.get("RANK", "0") == "0" and scope.current() is None:  # else a keeper watches
            log.warning("holdfast: %s", UNPROTECTED)
        return Beats()
    refuse_unknown_to_launcher(effective, launched.config)
    if not launched.monitor:
        return Beats()
    check_timeouts(effective, os.environ)
    learn = effective.settings.monitor.calc_ft_timeouts
    stacks = install(Path(launched.monitor).parent, int(os.environ.get("RANK", "0")))
    around = scope.current()
    if around is not None and stacks is not None:
        around.on_leave(stacks.close)

    def answer(kept: Installed | None = stacks) -> bytes:
        del kept  # held so that the signal's file stays open for as long as somebody may ask
        return testify(beats.open_sections())

    beats = Beats.connect(
        launched.monitor,
        limits_of(effective),
        learn=learn,
        testify=answer,
        heeds=halting,
        defers_sigterm=halting is not None and halting.takes_sigterm,
    )
    beats.enter(SETUP)
    return beats


def simulated_fault(effective: Effective, group: Group, member: Membership) -> SimulatedFault | None:
    """The fault that this rank is to simulate, if any."""
    chosen = effective.settings.monitor
    if not chosen.simulate_fault:
        return None
    fault = choose(chosen, f"{member.control.run_id}/{member.launch}/{member.attempt}", group.world_size)
    if fault.rank != group.rank or not is_first_attempt(member.control, member.attempt, member.launch):
        return None
    return SimulatedFault(fault, member.journal)
