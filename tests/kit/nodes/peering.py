"""Places, copies and peer servers for tests, and a proxy between them that alters, holds and cuts."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.checkpoint.copies.peer_process import PeerHost
from holdfast.checkpoint.copies.peers import send_replica
from holdfast.checkpoint.copies.server import PeerServer
from holdfast.checkpoint.copies.tier import CopyFile, CopyRecord, LocalTier
from holdfast.checkpoint.format.manifest import Chunk, FileEntry, digest_bytes
from holdfast.journal.event import Event
from holdfast.journal.writer import JournalWriter
from holdfast.record.directory import ControlDirectory
from kit.harness import REPO, python, wait_until
from kit.runs import events_in

CHUNK = 64 * 1024
MIB = 1024 * 1024


def content(size: int, seed: str) -> bytes:
    """Bytes in which no two chunks are alike, the same for the same seed."""
    block = b"".join(hashlib.sha512(f"{seed}/{number}".encode()).digest() for number in range(1024))
    pieces = [number.to_bytes(8, "big") + block[8:] for number in range(-(-size // len(block)))]
    return b"".join(pieces)[:size]


class Lab:
    """A run, and places of it on as many nodes as there are names for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control, _ = ControlDirectory.open_or_create(folder / "run")

    def place(self, node: str) -> LocalTier:
        return LocalTier.open(self.folder / node, self.control.run_id, node=node, run_dir=self.control.path)

    def copy(
        self, tier: LocalTier, step: int = 5, rank: int = 3, size: int = MIB, files: int = 2
    ) -> tuple[CopyRecord, list[FileEntry]]:
        """A committed copy of one rank's shards, and what its manifest says of them."""
        image = f"{rank:05d}.{step:x}"
        data = content(size, f"{step}/{rank}")
        (tier.images / image).write_bytes(data)
        bounds = [size * number // files for number in range(files + 1)]
        entries, places = [], []
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            shard = data[start:end]
            chunks = [
                Chunk(at, len(shard[at : at + CHUNK]), digest_bytes(shard[at : at + CHUNK]))
                for at in range(0, len(shard), CHUNK)
            ]
            path, digest = f"__{rank}_{number}.distcp", digest_bytes(shard)
            entries.append(FileEntry(path=path, size=end - start, digest=digest, chunks=chunks))
            places.append(CopyFile(path, start, end - start, digest))
        record = CopyRecord(
            checkpoint=f"step_{step:08d}-{step:08x}",
            manifest=digest_bytes(f"manifest {step}".encode()),
            rank=rank,
            image=image,
            files=places,
            kind="own",
            at=time.time(),
        )
        tier.commit(record)
        return record, entries

    @contextlib.contextmanager
    def server(self, tier: LocalTier, *, keep: int = 2, **more: Any) -> Iterator[tuple[PeerServer, int]]:
        """A server in a thread of this process, and its port. Nothing of it may be left at the end."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = PeerServer(listener, self.control, tier, keep=keep, **more)
            thread = threading.Thread(target=server.serve)
            thread.start()
            try:
                yield server, listener.getsockname()[1]
            finally:
                server.stop()
                thread.join(5)
            assert not thread.is_alive()
            wait_until(lambda: server.connections == 0 and server.transfers == 0, 5, "connections end")

    @contextlib.contextmanager
    def host(self, tier: LocalTier, **more: Any) -> Iterator[PeerHost]:
        """A server in a process of its own."""
        journal = JournalWriter(self.control.journal, "test", 1)
        more = {"keep": 2, "linger": 0.5, **more}
        host = PeerHost(control=self.control, tier=tier, attempt=1, journal=journal, host="127.0.0.1", **more)
        host.start()
        try:
            yield host
        finally:
            host.close(10.0)
            journal.close()

    def journal(self) -> list[Event]:
        return events_in(self.control.path, Event)


def sender(
    lab: Lab, port: int, tier: LocalTier, copy: Any, seconds: float = 20.0, host: str = "127.0.0.1"
) -> list[str]:
    """The command line that sends a copy from a process of its own."""
    record, files = copy
    told = (host, port, lab.control.path, tier.path, record.checkpoint, record.rank)
    script = REPO / "tests" / "scripts" / "launch" / "send_copy.py"
    return python(script, *map(str, told), msgspec.json.encode(files).decode(), str(seconds))


def left(tier: LocalTier) -> list[str]:
    """Files of transfers that have not come to their end."""
    return sorted(path.name for path in tier.images.iterdir() if path.name.startswith("."))


def await_arrival(tier: LocalTier, sent: bytes) -> None:
    """Until a partial image begins with these bytes: what a proxy has passed on may not be there yet."""

    def arrived() -> bool:
        return any(path.read_bytes()[: len(sent)] == sent for path in tier.images.glob(".*.part"))

    wait_until(arrived, 20, f"{len(sent)} bytes arrive")


def holds(tier: LocalTier, record: CopyRecord) -> bool:
    """Whether a place has a committed copy with the very bytes that the digests of another's record name."""
    found = tier.find(record.checkpoint, record.rank)
    if found is None:
        return False
    data = tier.image(found).read_bytes()
    assert found.files == record.files
    assert found.manifest == record.manifest
    for file in record.files:
        assert digest_bytes(data[file.start : file.start + file.size]) == file.digest, file.path
    return True


class Proxy:
    """Passes on what a client and a server say. Offsets count what the client sent over one connection."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.flip_at: int | None = None
        self.hold_at: int | None = None
        """Pass on so much and no more, until `release` or `cut`."""
        self.cut_at: int | None = None
        """Close both ends after so much, once."""
        self.sent: list[int] = []
        """By connection."""
        self.heard: list[bytes] = []
        """The first bytes that the client sent, by connection."""
        self._going = threading.Event()
        self._going.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def hold(self, offset: int) -> None:
        self.hold_at = offset
        self._going.clear()

    def release(self) -> None:
        self.hold_at = None
        self._going.set()

    def cut(self) -> None:
        """End every connection that is there."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.release()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for one in (self._listener, *self._sockets):
            one.close()

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._sockets += [client, server]
            self.sent.append(0)
            self.heard.append(b"")
            self._start(self._forward, client, server, len(self.sent) - 1)
            self._start(self._back, server, client)

    def _forward(self, client: socket.socket, server: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(CHUNK):
                if len(self.heard[number]) < 4096:
                    self.heard[number] += data
                at = self.sent[number]
                if self.flip_at is not None and at <= self.flip_at < at + len(data):
                    altered = bytearray(data)
                    altered[self.flip_at - at] ^= 0x10
                    data, self.flip_at = bytes(altered), None
                if self.hold_at is not None and at + len(data) >= self.hold_at:
                    self._going.wait(30)
                self.sent[number] = at + len(data)
                server.sendall(data)
                if self.cut_at is not None and self.sent[number] >= self.cut_at:
                    self.cut_at = None
                    break
        self._end(client, server)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                client.sendall(data)
        self._end(client, server)

    @staticmethod
    def _end(*both: socket.socket) -> None:
        for one in both:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    between = Proxy(port)
    try:
        yield between
    finally:
        between.close()


class Leader(NamedTuple):
    """A process that leads a place, and its server."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    server: int
    """The server's pid."""


@contextlib.contextmanager
def leader(
    lab: Lab, tier: LocalTier, *, linger: float, towards: str = "", wrap: Any = lambda argv: argv
) -> Iterator[Leader]:
    script = REPO / "tests" / "scripts" / "launch" / "lead_place.py"
    argv = wrap(python(script, str(lab.control.path), str(tier.path), str(linger), towards))
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pids = [process.pid]
    try:
        host, port, server = process.stdout.readline().decode().split()
        pids.append(int(server))
        yield Leader(process, host, int(port), int(server))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()


def send(lab: Lab, port: int, tier: LocalTier, copy: Any, seconds: float = 20.0) -> str:
    deadline = time.monotonic() + seconds
    return send_replica(("127.0.0.1", port), lab.control, tier, *copy, deadline=deadline)
