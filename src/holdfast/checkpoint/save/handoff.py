"""What a trainer and its writer process say to each other.

A stream socket between parent and child carries length-prefixed msgpack messages (never pickle), and once for
each staging buffer its file descriptor. The first one carries the writer's lock (record/writers.py), which
is held also while it is on its way. The trainer never waits for the writer here, except, with a deadline,
when the socket is full.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import time
from typing import Any

import msgspec

from holdfast.checkpoint import Committed
from holdfast.checkpoint.copies import PlaceMap, Where
from holdfast.checkpoint.format import Declared, Layout, Manifest
from holdfast.errors import SaveFailedError

SEND_TIMEOUT = 60.0
_LENGTH = 8


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message: who the writer works for."""

    run_dir: str
    run: str
    attempt: int
    epoch: int
    lease_ttl: float
    root: str
    rank: int
    world: int
    threads: int
    tier: str = ""
    """This place's directory in the local tier; empty: there is none."""
    keep: int = 2
    """Checkpoints that the local tier keeps."""
    trainer: int = 0
    """Its process id, which the writer's parent has for as long as the trainer lives; 0: not told."""
    locked: bool = False
    """The writer's lock comes with this message."""


class UseBuffer(msgspec.Struct, frozen=True, tag="buffer"):
    """A staging buffer; its file descriptor comes with this message."""

    index: int
    size: int


class UsePlan(msgspec.Struct, frozen=True, tag="plan"):
    number: int
    layout: Layout
    declared: Declared | None


class PeerTarget(msgspec.Struct, frozen=True, array_like=True):
    """A place that is to hold a replica of what this rank saves, and where its peer server listens."""

    place: str
    node: str
    host: str
    port: int


class UsePeers(msgspec.Struct, frozen=True, kw_only=True, tag="peers"):
    """Where replicas go from now on."""

    targets: list[PeerTarget]
    timeout: float
    """Seconds that the replicas of one save may take."""
    where: Where | None = None
    """On rank 0: of all ranks, for `where.json`."""


class MendCopies(msgspec.Struct, frozen=True, kw_only=True, tag="mend"):
    """The run has resumed from the local tier: what is missing of that checkpoint here is made again."""

    checkpoint: str
    manifest: str
    """Its digest."""
    home: str
    """Where the manifest is."""
    assembly: str
    """Where it is written which place holds what."""
    directory: str
    """Where the global tier has it, if it has."""
    rank: int
    ranks: list[int]
    """Whose shards this rank sees to, by who saved them."""
    places: PlaceMap
    tier: str
    node: str
    keep: int
    max_bytes: int
    timeout: float
    """Seconds that one copy may take."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The run is at its end: what is being sent to peers need not be waited for."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """A snapshot that is fully staged."""

    serial: int
    step: int
    id: str
    diagnostic: bool
    plan: int
    buffer: int
    prints: list[str]
    """Fingerprints, in the layout's order."""
    timeout: float
    """Seconds that this save may take from now."""
    called: float
    """Wall-clock time at which the save was asked for."""
    blocked: float
    """Seconds for which training was held up."""
    manifest: Manifest | None
    """On rank 0; complete but for the files and the parent."""
    failed: str = ""
    """The snapshot could not be staged on this rank; the others must learn of it."""
    again: bool = False
    """An earlier writer may have begun with it."""
    local: bool = False
    """It is committed in the local tier,"""
    globally: bool = True
    """and in the checkpoint root."""
    image: str = ""
    """Of a local one: the image that is to hold it. In memory, that is the buffer itself."""
    slot: int = -1
    """The image's index; the same as the buffer's where it is that."""


class BufferFree(msgspec.Struct, frozen=True, tag="free"):
    serial: int
    index: int


class JobDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """This rank's part is written; on rank 0, all is committed."""

    serial: int
    seconds: float
    committed: Committed | None = None


class LocalDone(msgspec.Struct, frozen=True, kw_only=True, tag="local"):
    """It is committed in the local tier, and now goes to the checkpoint root too."""

    serial: int
    seconds: float


class JobFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    serial: int
    error: str
    trace: str
    lease_lost: bool = False
    locally: bool = False
    """It did not even get as far as the local tier."""


ToWriter = Start | UseBuffer | UsePlan | UsePeers | MendCopies | Job | Leave
ToTrainer = BufferFree | LocalDone | JobDone | JobFailed

_to_writer = msgspec.msgpack.Decoder(ToWriter)
_to_trainer = msgspec.msgpack.Decoder(ToTrainer)


class Gone(Exception):  # noqa: N818 - not an error: the other side has ended
    """The other side has closed its end."""


class Channel:
    """One end of the socket."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._socket = sock
        self._decoder = decoder
        self._received = bytearray()
        self._descriptors: list[int] = []
        sock.setblocking(False)

    @classmethod
    def of_trainer(cls, sock: socket.socket) -> Channel:
        return cls(sock, _to_trainer)

    @classmethod
    def of_writer(cls, sock: socket.socket) -> Channel:
        return cls(sock, _to_writer)

    def send(self, message: ToWriter | ToTrainer, descriptor: int | None = None) -> None:
        """Raises Gone if nobody is there, SaveFailedError if nobody reads."""
        body = msgspec.msgpack.encode(message)
        data = memoryview(len(body).to_bytes(_LENGTH, "little") + body)
        deadline = time.monotonic() + SEND_TIMEOUT
        extra = [] if descriptor is None else [_rights(descriptor)]
        while data:
            try:
                sent = self._socket.sendmsg([data], extra)
                data, extra = data[sent:], []
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SaveFailedError(f"the writer process read nothing for {SEND_TIMEOUT:g} s") from None
                self._wait_for(select.POLLOUT, left)
            except OSError as error:
                raise Gone from error

    def receive(self, timeout: float | None) -> tuple[Any, int | None] | None:
        """The next message and the descriptor that came with it; None after `timeout` (None: no limit).

        Raises Gone when the other side has ended and everything it had said was received.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._next()
            if message is not None:
                with_one = isinstance(message, UseBuffer) or (isinstance(message, Start) and message.locked)
                return message, self._descriptors.pop(0) if with_one else None
            try:
                data, ancillary, _, _ = self._socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._wait_for(select.POLLIN, left)
                continue
            except OSError as error:
                raise Gone from error
            self._descriptors += _received_descriptors(ancillary)
            if not data:
                raise Gone
            self._received += data

    def other_side_is_gone(self) -> bool:
        """Never blocks; takes nothing off the stream. What it had said may still be there to be received."""
        ready = select.poll()
        ready.register(self._socket, select.POLLRDHUP)
        return bool(ready.poll(0))

    def _wait_for(self, event: int, seconds: float | None) -> None:
        ready = select.poll()  # not select(), which knows only the first 1024 descriptors of a process
        ready.register(self._socket, event)
        ready.poll(None if seconds is None else max(1, int(seconds * 1000)))

    def _next(self) -> Any:
        if len(self._received) < _LENGTH:
            return None
        length = int.from_bytes(self._received[:_LENGTH], "little")
        if len(self._received) < _LENGTH + length:
            return None
        body = bytes(self._received[_LENGTH : _LENGTH + length])
        del self._received[: _LENGTH + length]
        return self._decoder.decode(body)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _rights(descriptor: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]).tobytes()


def _received_descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
