"""Which of this process's sockets belong to gloo.

Guarantees: only sockets that a gloo device has in its event loop are found. They are not told by when they
appeared, which would take in what another thread opened meanwhile, but by what holds them: the kernel lists
what an epoll waits for, with inodes, and that of a gloo device is known by its make: the reading end of a
pipe, one listening TCP socket, and a pointer to a handler as the data of each entry. libuv (torch's store),
asyncio and the like keep a descriptor's number there, and wake up by an eventfd or a socket pair. So a
store's connection, or a socket that the user opened before, meanwhile or after, is never among them.

A descriptor may be closed and given out again at any moment. So each is duplicated before it is used, and
what the duplicate refers to is compared with the kernel's list.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ENTRY = re.compile(r"^tfd:\s*(\d+) events:\s*(\w+) data:\s*(\w+)\s+pos:\w+ ino:(\w+)", re.MULTILINE)
_DESCRIPTORS = Path("/proc/self/fd")
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
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):
            if str((_DESCRIPTORS / name).readlink()) == "anon_inode:[eventpoll]":
                device = _device(int(name))
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
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):
            status = (_DESCRIPTORS / name).stat()
            if not stat.S_ISSOCK(status.st_mode):
                continue
            descriptor = Descriptor(int(name), status.st_ino)
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
    text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    return [
        Entry(Descriptor(int(number), int(inode, 16)), int(events, 16), int(handler, 16))
        for number, events, handler, inode in _ENTRY.findall(text)
    ]
