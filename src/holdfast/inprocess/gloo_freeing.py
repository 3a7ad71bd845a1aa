"""Freeing who waits in a gloo collective.

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
import select
import socket
import threading
import time
from typing import NamedTuple

from holdfast.inprocess.gloo_sockets import (
    Descriptor,
    Entry,
    GlooDevice,
    connections,
    duplicate,
    shut,
)

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
