"""Real faults, done to real runs, which are watched through their journals.

Each fault returns exactly what was done, so that a drill can check afterwards that the run noticed that very
thing. Nothing is simulated: the process is killed, the bytes on disk are changed.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import struct
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.checkpoint.format import MetadataError
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.errors import HoldfastError
from holdfast.journal import JournalLine, JournalReader
from holdfast.journal.events import WorkersStarted
from holdfast.process import AGENT, guarded, own_child, proc

LARGEST_ITEM = 64 * 1024 * 1024
"""Stored tensors above this size are not chosen: finding the payload reads the item into memory."""
FLOATS = {"float32": "<f", "float64": "<d", "float16": "<e"}


class FaultError(HoldfastError):
    """The fault could not be done; nothing was changed."""


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    pid: int
    node: str
    attempt: int
    signal: str
    at: float
    """Wall-clock time just before the signal was sent."""


class FlippedByte(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    offset: int
    bit: int
    before: int
    after: int
    checkpoint: str = ""
    tensor: str = ""
    """The tensor whose payload holds the byte, if it was chosen by tensor."""
    value_before: float | None = None
    value_after: float | None = None
    """The element as it was saved, and (after) as a reader that checks nothing would now see it."""


def kill_rank(lines: Iterable[JournalLine], rank: int, number: int = signal.SIGKILL) -> Killed:
    """Send a signal to a rank's process, as the newest `WorkersStarted` in the journal names it."""
    newest, pid = _process_of(lines, rank)
    at = time.time()
    _send(pid, rank, number)
    name = signal.Signals(number).name
    assert isinstance(newest.body, WorkersStarted)
    return Killed(rank=rank, pid=pid, node=newest.body.node, attempt=newest.attempt, signal=name, at=at)


@contextlib.contextmanager
def stopped_rank(lines: Iterable[JournalLine], rank: int, *, timeout: float = 10.0) -> Iterator[int]:
    """Keep a rank's process stopped by SIGSTOP for as long as the block lasts, unless it is killed inside."""
    _, pid = _process_of(lines, rank)
    _send(pid, rank, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + timeout
        while not _is_stopped(pid, rank):
            if time.monotonic() > deadline:
                raise FaultError(f"rank {rank}, pid {pid}, did not stop within {timeout:g} s of SIGSTOP")
            time.sleep(0.001)
        yield pid
    finally:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int, rank: int) -> bool:
    """Whether all of its threads are stopped: the signal reaches them one after the other."""
    threads = proc.threads(pid)
    if not threads:
        raise FaultError(f"cannot stop rank {rank}: its process {pid} is gone")
    return all(thread.state == "T" for thread in threads)


def _process_of(lines: Iterable[JournalLine], rank: int) -> tuple[JournalLine, int]:
    started = [line for line in lines if isinstance(line.body, WorkersStarted) and rank in line.body.pids]
    if not started:
        raise FaultError(f"cannot kill rank {rank}: no workers_started event in the journal names it")
    newest = started[-1]
    assert isinstance(newest.body, WorkersStarted)
    pid = newest.body.pids[rank]
    _check_identity(pid, rank)
    return newest, pid


def _send(pid: int, rank: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        raise FaultError(f"cannot kill rank {rank}, pid {pid}: {error.strerror}") from error


def _check_identity(pid: int, rank: int) -> None:
    """A process id may have been given to somebody else since: never signal a stranger.

    A worker is a child of the agent, and the agent's mark is in its environment, or in that of the process it
    was forked from.
    """
    worker = proc.read(pid)
    if worker is None:
        raise FaultError(f"cannot kill rank {rank}: its process {pid} is gone")
    if not proc.environment(pid).get(AGENT, "").startswith(f"{worker.parent}."):
        raise FaultError(f"cannot kill rank {rank}: process {pid} is not its worker any more")


def flip_byte(path: Path, offset: int, *, bit: int = 0) -> FlippedByte:
    """Flip one bit of one byte, in place. Size and times stay as they were, as with a silent fault."""
    if not 0 <= bit <= 7:
        raise FaultError(f"there is no bit {bit} in a byte; give 0 to 7")
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise FaultError(f"cannot alter {path}: {error.strerror}") from error
    try:
        times = os.fstat(fd)
        found = os.pread(fd, 1, offset) if offset >= 0 else b""
        if not found:
            raise FaultError(f"{path} has {times.st_size} bytes; there is none at offset {offset}")
        changed = bytes([found[0] ^ (1 << bit)])
        os.pwrite(fd, changed, offset)
        os.fsync(fd)
        os.utime(fd, ns=(times.st_atime_ns, times.st_mtime_ns))
    finally:
        os.close(fd)
    return FlippedByte(path=str(path), offset=offset, bit=bit, before=found[0], after=changed[0])


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Where the numbers of one stored tensor lie."""

    tensor: str
    path: str
    """Relative to the checkpoint."""
    start: int
    length: int
    dtype: str


def payloads(directory: Path) -> list[Payload]:
    """The stored floating-point tensors of a checkpoint, without the archives' own headers around them."""
    try:
        meta = metadatas.read(directory)
    except MetadataError as error:
        raise FaultError(f"{directory}: .metadata: {error}") from error
    found = []
    for (name, offsets), entry in sorted(
        meta.storage.items(), key=lambda item: (item[1].path, item[1].offset)
    ):
        tensor = meta.tensors.get(name)
        if offsets is None or tensor is None or tensor.dtype not in FLOATS or entry.length > LARGEST_ITEM:
            continue
        with (directory / entry.path).open("rb") as file:
            file.seek(entry.offset)
            place = _payload_of(file.read(entry.length))
        if place is not None:
            start, length = entry.offset + place[0], place[1]
            found.append(
                Payload(tensor=name, path=entry.path, start=start, length=length, dtype=tensor.dtype)
            )
    return found


def _payload_of(item: bytes) -> tuple[int, int] | None:
    """(offset, length) of the numbers in one torch.save archive, which is an uncompressed zip."""
    try:
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            inner = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    except zipfile.BadZipFile:
        return None
    if len(inner) != 1 or inner[0].compress_type != zipfile.ZIP_STORED or not inner[0].file_size:
        return None
    header = inner[0].header_offset
    name, extra = struct.unpack_from("<HH", item, header + 26)
    return header + 30 + name + extra, inner[0].file_size


def flip_in_checkpoint(directory: Path, *, seed: int = 0) -> FlippedByte:
    """Flip one bit of one number in one of the largest tensors that a checkpoint stores; `seed` chooses."""
    found = payloads(directory)
    if not found:
        raise FaultError(f"{directory} stores no floating-point tensor whose bytes could be altered")
    largest = max(payload.length for payload in found)
    rng = random.Random(seed)
    chosen = rng.choice([payload for payload in found if payload.length == largest])
    layout = FLOATS[chosen.dtype]
    width = struct.calcsize(layout)
    element = chosen.start + width * rng.randrange(chosen.length // width)
    path = directory / chosen.path
    before = _read_number(path, element, layout)
    # The last byte of a little-endian float holds its sign and the top of its exponent: worth flipping.
    flipped = flip_byte(path, element + width - 1, bit=rng.randrange(8))
    return msgspec.structs.replace(
        flipped,
        checkpoint=directory.name,
        tensor=chosen.tensor,
        value_before=before,
        value_after=_read_number(path, element, layout),
    )


def _read_number(path: Path, offset: int, layout: str) -> float:
    with path.open("rb") as file:
        file.seek(offset)
        return float(struct.unpack(layout, file.read(struct.calcsize(layout)))[0])


# A training run as a child process, watched through its journal.
#
# Guarantee: every wait has a deadline, and leaving the `with` block ends the launcher; its workers end with
# it. The launcher is tied to this process as workers are to their agent, so that nothing is left behind even
# if this process is killed.


POLL = 0.02
STOP_GRACE = 5.0
LOG_TAIL = 12


class TrainingFailedError(HoldfastError):
    """A drill's training run did not do what it should have; the message points to its log."""


class Training:
    """A running `holdfast run`, and what its journal has said so far."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.log = log
        self.lines: list[JournalLine] = []
        self._reader = JournalReader(run_dir / "journal")

    def poll(self) -> list[JournalLine]:
        """The new journal lines."""
        fresh = self._reader.poll()
        self.lines.extend(fresh)
        return fresh

    def follow(
        self,
        until: Callable[[], bool],
        see: Callable[[JournalLine], None],
        *,
        timeout: float,
        quiet: float,
        what: str,
    ) -> None:
        """Hand every new line to `see` until `until()`. At most `timeout` seconds, `quiet` without a line."""
        begun = heard = time.monotonic()
        while True:
            ended = (
                self.process.poll() is not None
            )  # asked before polling, so that what it wrote before it ended is still read
            for line in self.poll():
                heard = time.monotonic()
                see(line)
            if until():
                return
            now = time.monotonic()
            if ended:
                code = self.process.returncode
                raise TrainingFailedError(
                    f"the run ended with code {code} while waiting for {what}{self.tail()}"
                )
            if now - begun > timeout or now - heard > quiet:
                why = f"{timeout:g} s" if now - begun > timeout else f"{quiet:g} s without a word from it"
                raise TrainingFailedError(f"gave up waiting for {what} after {why}{self.tail()}")
            time.sleep(POLL)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def tail(self) -> str:
        """Where the log is, and its last lines."""
        try:
            last = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
        except OSError:
            last = []
        shown = "".join(f"\n    {line}" for line in last)
        where = f"\n  log:     {self.log}\n  journal: holdfast journal {self.run_dir}"
        return f"{where}\n  the log's last lines:{shown or ' none'}"

    def end(self) -> None:
        """Stop the launcher: politely at first, then by force."""
        for number, grace in ((signal.SIGTERM, STOP_GRACE), (signal.SIGKILL, STOP_GRACE)):
            if self.process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)


@contextlib.contextmanager
def training(
    script: Path, run_dir: Path, log: Path, *, ranks: int, settings: Sequence[str], arguments: Sequence[str]
) -> Iterator[Training]:
    """Train `script` on CPU ranks under `holdfast run`, with its output in `log`, until the block is left."""
    command = own_child("holdfast", "run", f"--nproc-per-node={ranks}", f"--run-dir={run_dir}")
    for setting in settings:
        command += ["--set", setting]
    command += [str(script), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            guarded(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the launcher
        )
    run = Training(process, run_dir, log)
    try:
        yield run
    finally:
        run.end()


def _environment() -> dict[str, str]:
    """Our environment without other launches' settings, with one thread per rank: results depend on that."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PET_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
