"""The local wire: typed messages between this process and another one on the same machine.

There are two kinds of socket, and one class for each:

* `Packets`, for what must never hold up its sender: signs of life, orders, outcomes. A message is one packet
  of bounded size, which the kernel takes whole or not at all. A reader that does not read costs its sender
  the message, but no time.
* `Stream`, for messages that may be large, or that bring descriptors along: a plan, a staging buffer, a
  worker to be forked. Such a message may not fit in at once, so the sender says how long that may take.

Guarantees of both: no call waits for longer than it is told to. If the other end is gone, the outcome is
always `Gone`, however it shows and whichever call notices; a reader gets it only after everything that the
other end had said. What comes in is bounded, and what is not a message is `Garbage`, whatever its bytes are:
never a decoder error. Messages are msgpack, and nothing is ever pickled. No program that this process
executes inherits a descriptor that was received here.

A socket pair has no name, so nobody else can get at it. A `Listener` has one, in a directory that only its
owner may enter, and the kernel tells it (SO_PEERCRED) which process is connecting.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Self, TypeVar

import msgspec

PACKET_LIMIT = 64 * 1024
"""Bytes in one packet."""
MESSAGE_LIMIT = 1 << 30
"""Bytes in one message of a stream: far more than the plan of any model."""
MOST_DESCRIPTORS = 8
"""How many may come with one message."""
CONNECTIONS = 1024
"""How many may wait to be accepted."""
UNIX_PATH = 100
"""A socket whose path is this long or longer is reached through its directory: the kernel takes 107 bytes."""
_HEADER = 8
"""How many bytes say how long a stream's next message is."""
_PIECE = 1 << 20
_CLOSED = "it has closed the connection"

_encode = msgspec.msgpack.Encoder().encode

In = TypeVar("In")
"""What is heard: a message type, or several; None if nothing is."""


class Gone(ConnectionError):  # noqa: N818 - not an error: the other end has ended
    """The other end is closed, or cannot take what is to be said: there is no point in going on."""


class Garbage(Gone):
    """What came is not a message of ours."""


class _Wire(Generic[In]):
    """One end. One thread at a time may receive; each kind says whether several may send."""

    KIND: socket.SocketKind
    LIMIT: int
    """Bytes in one message, unless a limit is given."""

    def __init__(self, end: socket.socket, hears: object, limit: int = 0) -> None:
        """`hears`: the type of the messages that come, as msgspec takes it."""
        end.setblocking(False)
        self._socket = end
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(hears)
        self._limit = limit or self.LIMIT

    @classmethod
    def pair(cls, hears: object) -> tuple[Self, socket.socket]:
        """One end, and the other one, which is for a child. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, cls.KIND)
        return cls(ours, hears), theirs

    @classmethod
    def at(cls, descriptor: int, hears: object) -> Self:
        """The end that this process was given by another process."""
        os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=descriptor), hears)

    def fileno(self) -> int:
        """-1 once this end is closed."""
        return self._socket.fileno()

    @property
    def open(self) -> bool:
        """Whether this end is open. The next call finds out about the other end."""
        return self._socket.fileno() >= 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def say_no_more(self) -> None:
        """The other end then sees this one as gone, but is still heard."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def other_end_is_gone(self) -> bool:
        """Never waits, and takes nothing: what the other end said may still be there to be received."""
        return bool(self._poll(select.POLLRDHUP, 0.0))

    def wait(self, within: float | None, *, room: bool = False) -> bool:
        """Wait until there is something to receive, even if that is the end; returns whether there is.

        `within`: seconds; None for no limit. `room`: wait also until something can be said.
        """
        found = self._poll(select.POLLIN | (select.POLLOUT if room else 0), within)
        return bool(found & ~select.POLLOUT)

    def _poll(self, events: int, within: float | None) -> int:
        if not self.open:
            return select.POLLHUP
        ready = select.poll()  # not select(), which only knows the first 1024 descriptors of a process
        ready.register(self._socket, events)
        found = ready.poll(None if within is None else max(0, math.ceil(within * 1000)))
        return found[0][1] if found else 0

    def _decoded(self, data: bytes | bytearray) -> In:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Garbage(str(error)) from error


class Packets(_Wire[In]):
    """Whole messages of bounded size, to a reader that no sender waits for. Any thread may send."""

    KIND, LIMIT = socket.SOCK_SEQPACKET, PACKET_LIMIT

    @classmethod
    def connect(cls, path: Path, hears: object, within: float) -> Self:
        """Connect to a `Listener`. Raises OSError."""
        end = socket.socket(socket.AF_UNIX, cls.KIND)
        try:
            end.settimeout(within)
            with _short_address(path) as address:
                end.connect(address)
            return cls(end, hears)
        except BaseException:
            end.close()
            raise

    def send(self, message: object, within: float = 0.0) -> bool:
        """Whether the message was taken; False if its reader made no room in that time. Raises Gone."""
        data = _encode(message)
        if len(data) > self._limit:
            raise Gone(f"it takes {self._limit} bytes, and {len(data)} were to be said")
        deadline: float | None = None
        while True:
            try:
                self._socket.send(data, socket.MSG_NOSIGNAL)
                return True
            except BlockingIOError:
                now = time.monotonic()
            except OSError as error:
                raise Gone(_reason(error)) from error
            deadline = now + within if deadline is None else deadline
            if now >= deadline:
                return False
            self._poll(select.POLLOUT, deadline - now)

    def receive(self, within: float = 0.0) -> In | None:
        """The next message; None if nothing came in that time. Raises Gone; Garbage, after which the next
        message may be received."""
        deadline: float | None = None
        reset = False
        while True:
            try:
                data = self._socket.recv(self._limit + 1)
                break
            except BlockingIOError:
                now = time.monotonic()
            except OSError as error:
                if isinstance(error, ConnectionResetError) and not reset:
                    reset = True  # it ended with something unread; what it said comes after this error
                    continue
                raise Gone(_reason(error)) from error
            deadline = now + within if deadline is None else deadline
            if now >= deadline:
                return None
            self._poll(select.POLLIN, deadline - now)
        if not data:
            raise Gone(_CLOSED)
        if len(data) > self._limit:  # the rest of it is lost
            raise Garbage(f"a message of more than {self._limit} bytes")
        return self._decoded(data)


class Stream(_Wire[In]):
    """Messages of any size, with descriptors. One thread at a time may send."""

    KIND, LIMIT = socket.SOCK_STREAM, MESSAGE_LIMIT

    def __init__(self, end: socket.socket, hears: object, limit: int = 0) -> None:
        super().__init__(end, hears, limit)
        self._head = bytearray()
        self._body = bytearray()
        self._descriptors: list[int] = []
        """Those of the message that has come in part."""

    def send(self, message: object, descriptors: Sequence[int] = (), *, within: float) -> None:
        """Raises Gone; TimeoutError if the message was not taken whole in that time. The part that was taken
        is then the last thing that the other end hears."""
        body = _encode(message)
        if len(body) > self._limit:
            raise Gone(f"it takes {self._limit} bytes, and {len(body)} were to be said")
        if len(descriptors) > MOST_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors; {MOST_DESCRIPTORS} come with one message")
        data = memoryview(len(body).to_bytes(_HEADER, "little") + body)
        whole, extra = len(data), [_rights(descriptors)] if descriptors else []
        deadline = time.monotonic() + within
        while data:
            try:
                sent = self._socket.sendmsg([data], extra, socket.MSG_NOSIGNAL)
                data, extra = data[sent:], []
                continue
            except BlockingIOError:
                left = deadline - time.monotonic()
            except OSError as error:
                raise Gone(_reason(error)) from error
            if left <= 0:
                if len(data) < whole:  # what came next would be taken for the rest of this message
                    self.say_no_more()
                raise TimeoutError(f"the other end read nothing for {within:g} s")
            self._poll(select.POLLOUT, left)

    def receive(self, within: float | None) -> tuple[In, list[int]] | None:
        """The next message and its descriptors, which the caller must close; None if it did not come whole in
        that time. Raises Gone; Garbage, which ends the line. `within`: None for no limit."""
        deadline = None if within is None else time.monotonic() + within
        while True:
            try:
                if self._take():
                    break
                continue
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
            except Gone:
                self.close()
                raise
            except OSError as error:
                raise Gone(_reason(error)) from error
            if left is not None and left <= 0:
                return None
            self._poll(select.POLLIN, left)
        body, descriptors = self._body, self._descriptors
        self._head, self._body, self._descriptors = bytearray(), bytearray(), []
        try:
            return self._decoded(body), descriptors
        except Garbage:
            _close_all(descriptors)
            self.close()
            raise

    def close(self) -> None:
        _close_all(self._descriptors)
        self._descriptors = []
        super().close()

    def _take(self) -> bool:
        """Take what there is of the next message; returns whether it is whole.

        Never more than that: a process that forks because of one message would pass on the descriptors of the
        next, and whoever waits for one of those to be closed would wait for the wrong process.
        """
        if (missing := _HEADER - len(self._head)) > 0:
            data, ancillary, flags, _ = self._socket.recvmsg(
                missing, socket.CMSG_SPACE(MOST_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
            self._descriptors += _descriptors_in(ancillary)
            if flags & socket.MSG_CTRUNC:
                raise Garbage("not all of its descriptors could be taken: this process has too many open")
            self._head += self._some(data)
            if len(self._head) == _HEADER and self._length > self._limit:
                raise Garbage(f"a message of {self._length} bytes, more than {self._limit}")
        elif (missing := self._length - len(self._body)) > 0:
            self._body += self._some(self._socket.recv(min(missing, _PIECE)))
        return len(self._head) == _HEADER and len(self._body) == self._length

    @property
    def _length(self) -> int:
        return int.from_bytes(self._head, "little")

    def _some(self, data: bytes) -> bytes:
        if not data:
            raise Gone(_CLOSED)
        return data


class Caller(NamedTuple, Generic[In]):
    """Who has connected to a listener, according to the kernel."""

    line: Packets[In]
    pid: int
    user: int


class Listener(Generic[In]):
    """A socket at this path, in a directory that is created, or made accessible only to its owner."""

    def __init__(self, path: Path, hears: object, limit: int = PACKET_LIMIT) -> None:
        """Raises OSError."""
        _make_private(path.parent)
        self._path, self._hears, self._limit = path, hears, limit
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _short_address(path) as address:
                self._socket.bind(address)
            self._inode = path.stat().st_ino
            self._socket.listen(CONNECTIONS)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def reachable(self) -> bool:
        """Whether it is still at its path: whatever cleans up temporary directories may have removed it."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def accept(self) -> Caller[In] | None:
        """Whoever has connected next; None if nobody has."""
        while True:
            try:
                end, _ = self._socket.accept()
            except OSError:
                return None
            try:
                raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            except OSError:
                end.close()
                continue
            pid, user, _ = struct.unpack("3i", raw)
            return Caller(Packets(end, self._hears, self._limit), pid, user)

    def close(self) -> None:
        """Let nobody connect any more; the path is gone when this returns."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._socket.close()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _rights(descriptors: Sequence[int]) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes()


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


@contextlib.contextmanager
def _short_address(path: Path) -> Iterator[str]:
    """The path of a socket in a form that the kernel accepts, however long it is."""
    if len(os.fsencode(path)) < UNIX_PATH:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def _make_private(directory: Path) -> None:
    """Create the directory, or make sure that nobody else can get at an existing one."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.lstat()
    if info.st_uid != os.geteuid() or not directory.is_dir() or directory.is_symlink():
        raise PermissionError(f"{directory} belongs to somebody else; a socket of ours may not lie there")
    if info.st_mode & 0o077:
        directory.chmod(0o700)
