"""The wire between places: frames, raw bytes, messages, and the proof that both ends belong to one run.

```
server → client   Greeting   protocol, nonce s
client → server   Hello      run, nonce c, proof over ("client", run, s, c)
server → client   Welcome    proof over ("server", run, s, c), place, node
```
Guarantee: nothing that arrives is interpreted before the other end has proven that it knows the run's
secret, except these three messages, which are small and typed. Both nonces are in both proofs, so neither
side's words can be replayed to it, and the labels differ, so they cannot be replayed to the other side.
A length is checked before memory is taken for it. Every call ends by its deadline. Nothing is unpickled.

The secret keeps strangers out. It does not hide or sign the bytes that follow: what was altered on the way is
found by its digest, and the network between the nodes is assumed to be the job's own.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import socket
import struct
import time
from typing import Annotated, Any, TypeVar

import msgspec

from holdfast.checkpoint.copies.tier import CopyRecord
from holdfast.checkpoint.format import MANIFEST, Count, Digest, is_safe_path, parse_name
from holdfast.errors import PeerError
from holdfast.record import prove, proves

PROTOCOL = 1
NONCE = 32
MOST_FRAME = 64 * 1024 * 1024
"""Most bytes of a record: room for the chunk tables of a rank with a million items."""
SMALL_FRAME = 4096
"""Most bytes of a message from somebody who has not proven anything yet."""
HANDSHAKE_TIMEOUT = 5.0
SILENT_HOST = 20.0
"""Seconds after which the kernel gives up a connection whose other host does not answer at all."""
_LENGTH = struct.Struct(">I")
_PIECE = 8 * 1024 * 1024

T = TypeVar("T")


class LostLineError(PeerError):
    """The connection ended, was silent for too long, or was never made: another one may succeed."""


class HungUpError(LostLineError):
    """The other side closed the connection."""


class BusyError(LostLineError):
    """The server hung up before it had said anything: it has as many connections as it accepts."""


class TransferDeadline:
    """When something must be done, and how long a single wait without any progress may take."""

    def __init__(self, end: float, patience: float = math.inf) -> None:
        self.end = end
        self.patience = patience

    @classmethod
    def within(cls, seconds: float, patience: float = math.inf) -> TransferDeadline:
        return cls(time.monotonic() + seconds, patience)

    @property
    def left(self) -> float:
        """Seconds that the next wait may take; not above 0 once it is over."""
        return min(self.end - time.monotonic(), self.patience)


class Greeting(msgspec.Struct, frozen=True, tag="holdfast peer"):
    protocol: int
    nonce: bytes


class PeerHello(msgspec.Struct, frozen=True, tag="hello"):
    run: str
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    proof: bytes
    place: str
    node: str


class Line:
    """One connection. Every call ends by its deadline, or raises a PeerError that names the other end."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a socket pair knows none of these
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_HOST * 1000))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENT_HOST / 2))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(SILENT_HOST / 4))
        self._socket = connection
        self.who = who

    @classmethod
    def connect(cls, address: tuple[str, int], deadline: TransferDeadline) -> Line:
        host, port = address
        who = f"peer {host}:{port}"
        try:
            if (left := deadline.left) <= 0:
                raise TimeoutError("no time is left")
            return cls(socket.create_connection(address, timeout=left), who)
        except OSError as error:
            raise LostLineError(f"{who} cannot be reached: {error.strerror or error}") from error

    def cut(self) -> None:
        """End the connection from another thread: whoever waits on it learns of it at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    # --- frames ---------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct, deadline: TransferDeadline) -> None:
        body = msgspec.msgpack.encode(message)
        if len(body) > MOST_FRAME:
            raise PeerError(
                f"{self.who}: a record of {len(body)} bytes is more than the {MOST_FRAME} allowed"
            )
        self.send_bytes(memoryview(_LENGTH.pack(len(body)) + body), deadline)

    def receive(self, kind: type[T] | Any, deadline: TransferDeadline, *, limit: int = MOST_FRAME) -> T:
        """The next message, which must be of this type (or one of a union)."""
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head), deadline)
        (length,) = _LENGTH.unpack(head)
        if length > limit:
            raise PeerError(f"{self.who} announced a record of {length} bytes; at most {limit} are accepted")
        body = bytearray(length)
        self.receive_into(memoryview(body), deadline)
        try:
            found: T = msgspec.msgpack.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise PeerError(f"{self.who} sent something that is not a message: {error}") from error
        return found

    # --- bytes ----------------------------------------------------------------------------------------------

    def send_bytes(self, view: memoryview, deadline: TransferDeadline) -> None:
        done = 0
        while done < view.nbytes:
            try:
                # Released even when this fails: a slice kept by a traceback would keep a mapping, and with it
                # a lease, for as long.
                with view[done : done + _PIECE] as piece:
                    done += self._socket.send(piece, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise self._lost(error) from error

    def send_file(self, descriptor: int, start: int, length: int, deadline: TransferDeadline) -> None:
        """Bytes of a file, straight from the page cache to the socket."""
        end = start + length
        while start < end:
            try:
                sent = os.sendfile(self._socket.fileno(), descriptor, start, min(end - start, _PIECE))
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if sent == 0:
                raise PeerError(f"the image ended at byte {start}, {end - start} bytes too early")
            start += sent

    def receive_into(self, view: memoryview, deadline: TransferDeadline) -> None:
        """Fill the whole view."""
        done = 0
        while done < view.nbytes:
            with view[done:] as rest:
                done += self.receive_some(rest, deadline)

    def receive_some(self, view: memoryview, deadline: TransferDeadline) -> int:
        """Receive at least one byte into the front of the view; returns how many."""
        while True:
            try:
                got = self._socket.recv_into(view)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if got == 0:
                raise HungUpError(f"{self.who} closed the connection")
            # A transfer that never has to wait must still come to an end.
            if deadline.left <= 0 and got < view.nbytes:
                raise LostLineError(f"{self.who} was too slow: its time is over")
            return got

    def _wait(self, event: int, deadline: TransferDeadline) -> None:
        left = deadline.left
        if left > 0:
            ready = select.poll()
            ready.register(self._socket.fileno(), event)
            if ready.poll(math.ceil(min(left, 3600.0) * 1000)):
                return
            if left > 3600.0:
                return
        over = deadline.end - time.monotonic() <= 0
        why = "its time is over" if over else f"nothing moved for {deadline.patience:g} s"
        raise LostLineError(f"{self.who} was too slow: {why}")

    def _lost(self, error: OSError) -> LostLineError:
        kind = HungUpError if isinstance(error, ConnectionResetError | BrokenPipeError) else LostLineError
        return kind(f"the connection to {self.who} was lost: {error.strerror or error}")


# --- who is there -------------------------------------------------------------------------------------------


def admit(line: Line, secret: bytes, run: str, *, place: str, node: str, deadline: TransferDeadline) -> None:
    """The server's side: let in whoever proves to belong to this run; PeerError for anybody else.

    A stranger learns nothing but a nonce.
    """
    ours = secrets.token_bytes(NONCE)
    line.send(Greeting(PROTOCOL, ours), deadline)
    hello: PeerHello = line.receive(PeerHello, deadline, limit=SMALL_FRAME)
    said = (run.encode(), ours, hello.nonce)
    known = hello.run == run and len(hello.nonce) == NONCE
    if not known or not proves(hello.proof, secret, b"holdfast peer client", *said):
        raise PeerError(f"{line.who} did not prove that it belongs to run {run}; it was cut off")
    line.send(Welcome(prove(secret, b"holdfast peer server", *said), place, node), deadline)


def introduce(line: Line, secret: bytes, run: str, deadline: TransferDeadline) -> Welcome:
    """The client's side: who the server says it is, once it has proven to belong to this run."""
    try:
        greeting: Greeting = line.receive(Greeting, deadline, limit=SMALL_FRAME)
    except HungUpError as error:
        raise BusyError(f"{error}, before it had said anything: it is busy, or was just replaced") from error
    if greeting.protocol != PROTOCOL:
        raise PeerError(
            f"{line.who} speaks protocol {greeting.protocol}, expected {PROTOCOL}: "
            "use the same release of holdfast on all nodes"
        )
    ours = secrets.token_bytes(NONCE)
    said = (run.encode(), greeting.nonce, ours)
    if len(greeting.nonce) != NONCE:
        raise PeerError(f"{line.who} sent a nonce of {len(greeting.nonce)} bytes, expected {NONCE}")
    line.send(PeerHello(run, ours, prove(secret, b"holdfast peer client", *said)), deadline)
    try:
        welcome: Welcome = line.receive(Welcome, deadline, limit=SMALL_FRAME)
    except LostLineError as error:
        raise LostLineError(f"{error}, before it let this rank in; does it belong to run {run}?") from error
    if not proves(welcome.proof, secret, b"holdfast peer server", *said):
        raise PeerError(f"{line.who} did not prove that it belongs to run {run}; nothing was sent to it")
    line.who = f"{line.who} (node {welcome.node})"
    return welcome


def call(
    address: tuple[str, int], secret: bytes, run: str, deadline: TransferDeadline
) -> tuple[Line, Welcome]:
    """A connection to a peer's server on which both ends have proven themselves."""
    early = TransferDeadline(min(deadline.end, time.monotonic() + HANDSHAKE_TIMEOUT))
    line = Line.connect(address, early)
    try:
        return line, introduce(line, secret, run, early)
    except BaseException:
        line.close()
        raise


# What places say to each other once both have proven that they belong to the same run.
#
# ```
# client              server
# Offer          →    GoOn(offset), and the client sends the image from there on; then Held, or Refused
#                     Held: it has the copy, verified, already        Refused: why not
# Read           →    Data(length) and the bytes, or Gone
# ListCopies     →    Copies
# ```
# One connection takes many requests, one after the other.


MOST_READ = 64 * 1024 * 1024
"""Bytes of one read."""
LARGEST_RANK = 10**9 - 1
LARGEST_IMAGE = 1 << 50

Seconds = Annotated[float, msgspec.Meta(gt=0, le=7 * 24 * 3600.0)]


class AnnouncedChunk(msgspec.Struct, frozen=True, array_like=True):
    """An item of a file; offsets are from the file's start."""

    offset: Count
    length: Count
    digest: Digest


class AnnouncedFile(msgspec.Struct, frozen=True, array_like=True):
    """A shard, where it lies in the image, and what it must be."""

    path: str
    start: Count
    size: Count
    digest: Digest
    chunks: list[AnnouncedChunk]


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica is, by the digests taken at its source. Equal replicas have equal announcements."""

    checkpoint: str
    manifest: Digest
    rank: Count
    files: list[AnnouncedFile]

    @property
    def size(self) -> int:
        """Bytes of the image."""
        return self.files[-1].start + self.files[-1].size if self.files else 0

    def __str__(self) -> str:
        return f"{self.checkpoint}, rank {self.rank}"


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    replica: Announcement
    seconds: Seconds
    """How long the sender will keep at it."""


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    checkpoint: str
    path: str
    offset: Count
    length: Annotated[int, msgspec.Meta(ge=1, le=MOST_READ)]


class ListCopies(msgspec.Struct, frozen=True, tag="list"):
    pass


Request = Offer | Read | ListCopies


class GoOn(msgspec.Struct, frozen=True, tag="go on"):
    offset: Count
    """The image up to here is there already, and was verified."""


class Held(msgspec.Struct, frozen=True, tag="held"):
    place: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    why: str
    altered: str = ""
    """The file whose bytes arrived wrong; empty if that is not the reason."""


class Data(msgspec.Struct, frozen=True, tag="data"):
    length: Count


class PeerGone(msgspec.Struct, frozen=True, tag="gone"):
    why: str


class Copies(msgspec.Struct, frozen=True, tag="copies"):
    records: list[CopyRecord]


def objection(replica: Announcement) -> str:
    """Why an announcement cannot be accepted, however much is free; empty if it can. Pure."""
    name = parse_name(replica.checkpoint)
    if name is None or str(name) != replica.checkpoint:
        return f"{replica.checkpoint[:200]!r} is not a checkpoint's name"
    if replica.rank > LARGEST_RANK:
        return f"rank {replica.rank} is more than {LARGEST_RANK}"
    if not replica.files or replica.size == 0:
        return "there is nothing in it"
    if replica.size > LARGEST_IMAGE:
        return f"an image of {replica.size} bytes is more than the {LARGEST_IMAGE} allowed"
    seen: set[str] = set()
    end = 0
    for file in replica.files:
        if not is_safe_path(file.path) or file.path == MANIFEST:
            return f"the path {file.path[:200]!r} is not allowed"
        if file.path in seen:
            return f"{file.path!r} is listed twice"
        if file.start < end:
            return f"{file.path!r} overlaps the file before it"
        seen.add(file.path)
        end = file.start + file.size
        inner = 0
        for chunk in file.chunks:
            if chunk.offset < inner or chunk.offset + chunk.length > file.size:
                return f"a chunk of {file.path!r} lies outside the file or overlaps another chunk"
            inner = chunk.offset + chunk.length
    return ""
