"""Which of this process's sockets belong to gloo, and freeing who waits in a collective.

gloo has no call that ends a collective under way: `abort` and `shutdown` of its groups return and change
nothing (torch 2.11 and 2.13). What ends it is the end of the connections. gloo tells that to all that wait
on one, but not to a send or a receive of which a part has passed (`Pair::signalException` looks neither at
`op.ubuf` of what is being sent nor at `rx_`): such a one waits on until its group's timeout, and so does
whoever destroys the group. Hence:

* A connection is ended when nothing has passed over it for a moment. What healthy ranks had begun is then
  through.
* It is ended for this process only, and kept open towards the peer until a new group is made: by then all
  have left the old one, at a moment of their own.
* A send that got stuck half-way, because the peer takes no more, is let through first: a socket that takes
  everything is put in the connection's place, and that is what is ended.

What is not covered is a peer that was killed half-way through a message, or stood still half-way through
one to us. Such a call ends with the group's timeout, which is thus to be shorter than what is waited for a
rank to leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.process import proc

# Which of this process's sockets belong to gloo.
#
# Guarantees: only sockets that a gloo device has in its event loop are found. They are not told by when they
# appeared, which would take in what another thread opened meanwhile, but by what holds them: the kernel lists
# what an epoll waits for, with inodes, and that of a gloo device is known by its make: the reading end of a
# pipe, one listening TCP socket, and a pointer to a handler as the data of each entry. libuv (torch's store),
# asyncio and the like keep a descriptor's number there, and wake up by an eventfd or a socket pair. So a
# store's connection, or a socket that the user opened before, meanwhile or after, is never among them.
#
# A descriptor may be closed and given out again at any moment. So each is duplicated before it is used, and
# what the duplicate refers to is compared with the kernel's list.


_ENTRY = re.compile(r"^tfd:\s*(\d+) events:\s*(\w+) data:\s*(\w+)\s+pos:\w+ ino:(\w+)", re.MULTILINE)
_DIAL_SECONDS = 1.0
"""For one connection to a listener in this process: it takes microseconds."""


class Descriptor(NamedTuple):
    """An open file, told from any later one under the same number."""

    number: int
    inode: int


class Entry(NamedTuple):
    """What an event loop waits for."""

    descriptor: Descriptor
    events: int
    handler: int

    @property
    def connecting(self) -> bool:
        """The connection is not a pair's yet: who it is for is still being said."""
        return bool(self.events & select.EPOLLONESHOT)

    @property
    def sending(self) -> bool:
        """A send has begun that the connection did not take as a whole."""
        return bool(self.events & select.EPOLLOUT) and not self.connecting


class GlooDevice(NamedTuple):
    """A group's place on the network: an event loop, and the socket on which the others connect to it."""

    epoll: int
    listener: Descriptor


def gloo_devices() -> set[GlooDevice]:
    """All that this process has now."""
    found = set()
    for number in proc.descriptors():
        with contextlib.suppress(OSError):
            if proc.file_of(number) == "anon_inode:[eventpoll]":
                device = _device(number)
                if device is not None:
                    found.add(device)
    return found


def connections(device: GlooDevice) -> list[Entry]:
    """Its connections now; none if the device is gone."""
    try:
        found = _entries(device.epoll)
    except OSError:
        return []
    if not any(entry.descriptor == device.listener for entry in found):
        return []
    return [
        entry
        for entry in found
        if entry.descriptor != device.listener and stat.S_ISSOCK(_mode(entry.descriptor))
    ]


def dial(device: GlooDevice, pairs: int) -> None:
    """Free who waits for a peer that is to connect to this device and never will.

    There is no connection to shut then, and to shut the listener would end the process. But who connects says
    only which pair it is for, by a number that gloo counts up from 0 for each device: so we connect in the
    peer's place, and hang up.
    """
    with contextlib.suppress(OSError), duplicate(device.listener) as listener:
        address, family = listener.getsockname(), listener.family
        for number in range(pairs):
            with socket.socket(family, socket.SOCK_STREAM) as line:
                line.settimeout(_DIAL_SECONDS)
                line.connect(address)
                line.sendall(struct.pack("=q", number))


def shut(descriptor: Descriptor, how: int = socket.SHUT_RDWR) -> None:
    """End a connection, if it is still the same; the descriptor stays its owner's to close."""
    with contextlib.suppress(OSError), duplicate(descriptor) as connection:
        connection.shutdown(how)


def connections_to(port: int) -> set[Descriptor]:
    """TCP connections of this process to a port, wherever that is."""
    found = set()
    for number in proc.descriptors():
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            descriptor = Descriptor(number, status.st_ino)
            with duplicate(descriptor) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                    found.add(descriptor)
    return found


@contextlib.contextmanager
def duplicate(descriptor: Descriptor) -> Iterator[socket.socket]:
    """A second descriptor of the same socket; OSError if the number stands for something else by now."""
    number = os.dup(descriptor.number)
    try:
        if os.fstat(number).st_ino != descriptor.inode:
            raise OSError(f"descriptor {descriptor.number} was closed and given out again")
        copy = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise
    with copy:
        yield copy


def _device(epoll: int) -> GlooDevice | None:
    """What an epoll belongs to, if that is a gloo device."""
    listeners, pipes = [], 0
    for descriptor, _, handler in _entries(epoll):
        if handler & 0xFFFFFFFF == descriptor.number:
            return None  # a number, and not an address; what stands in its upper half is chance
        kind = _mode(descriptor)
        if stat.S_ISFIFO(kind):
            pipes += 1
        elif stat.S_ISSOCK(kind):
            with contextlib.suppress(OSError), duplicate(descriptor) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listeners.append(descriptor)
    return GlooDevice(epoll, listeners[0]) if pipes == 1 and len(listeners) == 1 else None


def _mode(descriptor: Descriptor) -> int:
    """What kind of file it is; 0 if it is closed."""
    try:
        return os.fstat(descriptor.number).st_mode
    except OSError:
        return 0


def _entries(epoll: int) -> list[Entry]:
    return [
        Entry(Descriptor(int(number), int(inode, 16)), int(events, 16), int(handler, 16))
        for number, events, handler, inode in _ENTRY.findall(proc.details_of(epoll))
    ]


QUIET_SECONDS = 0.03
"""Without any byte, after which a connection counts as quiet."""
RESTLESS_SECONDS = 1.0
"""After which a connection is ended even if bytes still pass."""
SWALLOW_SECONDS = 10.0
"""For one send to be taken, at memory's speed."""
_LOOK_SECONDS = 0.01
_CHUNK = 1 << 20


class _Look(NamedTuple):
    """What was seen of a connection: since when it is looked at, and since when just this has passed."""

    first: float
    since: float
    passed: bytes


class GlooFreeing:
    """Ends the connections of gloo devices; called again until nothing waits any more."""

    def __init__(self) -> None:
        self._kept: dict[Descriptor, socket.socket] = {}
        self._looks: dict[Descriptor, _Look] = {}
        self._ended: set[Descriptor] = set()

    def free(self, device: GlooDevice) -> bool:
        """Whether all its connections are ended; where not, call again a little later."""
        done = True
        for entry in connections(device):
            if entry.connecting:
                shut(entry.descriptor)
            elif entry.descriptor not in self._ended:
                if self._quiet(entry.descriptor):
                    self._end(device, entry)
                else:
                    done = False
        return done

    def release(self) -> None:
        """Close what was kept open for the peers."""
        kept, self._kept = self._kept, {}
        for connection in kept.values():
            connection.close()
        self._looks.clear()
        self._ended.clear()

    def _quiet(self, descriptor: Descriptor) -> bool:
        now, passed = time.monotonic(), _passed(descriptor)
        look = self._looks.get(descriptor, _Look(now, now, passed))
        if look.passed != passed:
            look = _Look(look.first, now, passed)
        self._looks[descriptor] = look
        return now - look.since >= QUIET_SECONDS or now - look.first >= RESTLESS_SECONDS

    def _end(self, device: GlooDevice, entry: Entry) -> None:
        self._ended.add(entry.descriptor)
        with contextlib.suppress(OSError), duplicate(entry.descriptor) as connection:
            self._kept[entry.descriptor] = connection.dup()
        if entry.sending:
            diverted = _divert(device, entry)
            if diverted is not None:
                self._ended.add(diverted)
        else:
            shut(entry.descriptor, socket.SHUT_RD)


def _passed(descriptor: Descriptor) -> bytes:
    """How many bytes the peer has taken and we have got, as the kernel counts them."""
    with contextlib.suppress(OSError), duplicate(descriptor) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[120:136]
    return b""


def _divert(device: GlooDevice, entry: Entry) -> Descriptor | None:
    """Put a socket that takes everything in a connection's place, in the event loop too."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    number = entry.descriptor.number
    with theirs, contextlib.suppress(OSError):
        with duplicate(entry.descriptor):  # what is there is still what was listed
            _epoll_ctl(device.epoll, _EPOLL_CTL_DEL, number, 0, 0)
            os.dup2(theirs.fileno(), number, inheritable=False)
        diverted = Descriptor(number, os.fstat(number).st_ino)
        # Where gloo has just registered it itself, with what it waits for by now, that stands.
        _epoll_ctl(device.epoll, _EPOLL_CTL_ADD, number, entry.events, entry.handler)
        swallow = threading.Thread(
            target=_swallow, args=(device, diverted, ours), name="holdfast-swallow", daemon=True
        )
        swallow.start()
        return diverted
    ours.close()
    return None


def _swallow(device: GlooDevice, diverted: Descriptor, ours: socket.socket) -> None:
    """Take all that is sent; end the connection when nothing more is on its way."""
    deadline = time.monotonic() + SWALLOW_SECONDS
    ours.settimeout(_LOOK_SECONDS)
    with ours, contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            try:
                if not ours.recv(_CHUNK):
                    return  # gloo has closed it
            except TimeoutError:
                here = [entry for entry in connections(device) if entry.descriptor == diverted]
                if not any(entry.sending for entry in here):
                    ours.shutdown(socket.SHUT_WR)


# --- epoll_ctl, which Python does not let us give the data of an entry
# ----------------------------------------

_EPOLL_CTL_ADD, _EPOLL_CTL_DEL = 1, 2


class _Event(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _epoll_ctl(epoll: int, what: int, number: int, events: int, handler: int) -> None:
    """OSError where the kernel refuses, except to add what is there already."""
    event = _Event(events & (select.EPOLLIN | select.EPOLLOUT), handler)
    library = ctypes.CDLL(None, use_errno=True)
    if library.epoll_ctl(epoll, what, number, ctypes.byref(event)) == -1:
        code = ctypes.get_errno()
        if not (what == _EPOLL_CTL_ADD and code == 17):
            raise OSError(code, os.strerror(code))
