"""Replication of one image over loopback: ours against a bare socket copy between as many processes.

Both go from a file in memory, over TCP, into a mapping of a new file in memory. The bare copy is `sendfile`
on one side and `recv_into` on the other, and an answer of one byte; ours also proves both ends, allocates the
image in full first, digests it where it lies, commits its record and says so.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from holdfast.checkpoint.copies.peer_process import PeerHost
from holdfast.checkpoint.copies.peers import send_replica
from holdfast.checkpoint.copies.tier import CopyFile, CopyRecord, LocalTier
from holdfast.checkpoint.format.manifest import Chunk, FileEntry
from holdfast.journal.writer import JournalWriter
from holdfast.record.directory import ControlDirectory

MIB = 1024 * 1024
CHUNK = 16 * MIB
LIMIT = 120.0
PIECE = 4 * MIB


def in_memory(work: Path, size: int) -> Path:
    """A directory in memory with room for three images; else where temporary data goes."""
    shared = Path("/dev/shm")
    fits = shared.is_dir() and shutil.disk_usage(shared).free > 3 * size
    return Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=shared if fits else work))


def make_copy(tier: LocalTier, size: int) -> tuple[CopyRecord, list[FileEntry]]:
    whole, chunks = xxhash.xxh3_128(), []
    block = os.urandom(CHUNK)
    with (tier.images / "00000.0").open("wb") as image:
        for start in range(0, size, CHUNK):
            piece = block[: min(CHUNK, size - start)]
            image.write(piece)
            whole.update(piece)
            chunks.append(Chunk(start, len(piece), xxhash.xxh3_128_hexdigest(piece)))
    digest, path = whole.hexdigest(), "__0_0.distcp"
    record = CopyRecord(
        checkpoint="step_00000001-00000001",
        manifest="0" * 32,
        rank=0,
        image="00000.0",
        files=[CopyFile(path, 0, size, digest)],
        kind="own",
        at=time.time(),
    )
    tier.commit(record)
    return record, [FileEntry(path=path, size=size, digest=digest, chunks=chunks)]


@contextlib.contextmanager
def sides(work: Path, size_mib: int) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Seconds of one transfer: ours, and bare."""
    folder = in_memory(work, size_mib * MIB)
    control, _ = ControlDirectory.open_or_create(folder / "run")
    one, other = (
        LocalTier.open(folder / node, control.run_id, node=node, run_dir=control.path) for node in "ab"
    )
    record, files = make_copy(one, size_mib * MIB)
    (folder / "files.json").write_bytes(msgspec.json.encode(files))
    journal = JournalWriter(control.journal, "bench", 1)
    host = PeerHost(control=control, tier=other, attempt=1, journal=journal, host="127.0.0.1", keep=1)
    host.start()

    def ours() -> float:
        seconds = child("send", *host.address, control.path, one.path, folder / "files.json")
        for found in other.records():
            other.drop(found)
        return float(seconds)

    def bare() -> float:
        argv = [sys.executable, __file__, "receive", str(folder / "bare"), str(size_mib * MIB)]
        receiver = subprocess.Popen(argv, stdout=subprocess.PIPE)
        try:
            assert receiver.stdout is not None
            port = int(receiver.stdout.readline())
            seconds = child("send-bare", "127.0.0.1", port, one.image(record))
            receiver.wait(LIMIT)
        finally:
            receiver.kill()
            receiver.wait()
        (folder / "bare").unlink()
        return float(seconds)

    try:
        yield ours, bare
    finally:
        host.close(10.0)
        shutil.rmtree(folder)


def child(*arguments: object) -> float:
    told = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, check=True, timeout=LIMIT
    )
    return float(json.loads(told.stdout))


def send(host: str, port: str, run_dir: str, place: str, files: str) -> float:
    control, tier = ControlDirectory.open(Path(run_dir)), LocalTier.at(Path(place))
    (record,) = tier.records()
    entries = msgspec.json.decode(Path(files).read_bytes(), type=list[FileEntry])
    started = time.perf_counter()
    send_replica((host, int(port)), control, tier, record, entries, deadline=time.monotonic() + LIMIT)
    return time.perf_counter() - started


def send_bare(host: str, port: str, image: str) -> float:
    with Path(image).open("rb") as file:
        started = time.perf_counter()
        with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
            connection.sendfile(file)
            assert connection.recv(1) == b"."
        return time.perf_counter() - started


def receive(path: str, size: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    length, at = int(size), 0
    with connection, Path(path).open("w+b") as file:
        file.truncate(length)
        with mmap.mmap(file.fileno(), length) as mapped, memoryview(mapped) as view:
            while at < length:
                with view[at : at + PIECE] as piece:
                    at += connection.recv_into(piece)
        connection.sendall(b".")


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(*sys.argv[2:])
    else:
        print((send if sys.argv[1] == "send" else send_bare)(*sys.argv[2:]))
