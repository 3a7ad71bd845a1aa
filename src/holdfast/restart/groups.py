"""Leaving torch's process groups and meshes after a fault, so that new ones can be made.

Guarantees: after `abort`, no call on a group made under the watch waits for a peer any more, nor does the
making of a gloo group (for gloo's limits see below; backends other than gloo and NCCL are only destroyed).
After `leave` there is no group, and `init_process_group` works as in a new process. Sockets that are not the
groups', and gloo groups that existed before, are left alone.

gloo has no call that ends a collective under way: `abort` and `shutdown` of its groups return and change
nothing (torch 2.11 and 2.13). Only the end of its connections ends it. gloo reports that to every call that
waits on one, except a send or a receive of which a part has passed (`Pair::signalException` looks neither at
`op.ubuf` of what is being sent nor at `rx_`): such a call waits on until its group's timeout, and so does
whoever destroys the group. Hence:

* A connection is ended when nothing has passed over it for a moment. What healthy ranks had begun is then
  through.
* It is ended for this process only, and kept open towards the peer until a new group is made: by then all
  have left the old one, each in its own time.
* A send that got stuck half-way, because the peer takes no more, is let through first: a socket that takes
  everything is put in the connection's place, and that socket is what is ended.

Not covered is a peer that was killed half-way through a message, or that stopped half-way through one to us.
Such a call ends with the group's timeout, which should therefore be shorter than the time that a rank is
given to leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import platform
import re
import select
import socket
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import _unregister_all_process_groups
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from holdfast.base import collective_timeout, plural
from holdfast.config import InProcessSettings
from holdfast.errors import HandedOverError
from holdfast.process import proc

# Which of this process's sockets belong to gloo.
#
# Guarantees: only sockets that a gloo device has in its event loop are found. They are recognised not by when
# they appeared, which would include what another thread opened meanwhile, but by what holds them: the kernel
# lists what an epoll waits for, with inodes, and the epoll of a gloo device is known by its entries: the
# reading end of a pipe, one listening TCP socket, and a pointer to a handler as the data of each entry. libuv
# (torch's store), asyncio and the like keep a descriptor's number as that data, and are woken by an eventfd
# or a socket pair. So a store's connection, or a socket that the user opened before, meanwhile or after, is
# never among them.
#
# A descriptor may be closed and its number reused at any moment. So each is duplicated before it is used, and
# what the duplicate refers to is compared with the kernel's list.


_ENTRY = re.compile(r"^tfd:\s*(\d+) events:\s*(\w+) data:\s*(\w+)\s+pos:\w+ ino:(\w+)", re.MULTILINE)
_DIAL_SECONDS = 1.0
"""Limit for one connection to a listener in this process: it takes microseconds."""


class Descriptor(NamedTuple):
    """An open file, distinguishable from any later one under the same number."""

    number: int
    inode: int


class Entry(NamedTuple):
    """One thing that an event loop waits for."""

    descriptor: Descriptor
    events: int
    handler: int

    @property
    def connecting(self) -> bool:
        """The connection does not belong to a pair yet: the peer is still saying for which it is."""
        return bool(self.events & select.EPOLLONESHOT)

    @property
    def sending(self) -> bool:
        """A send has begun that the connection has not yet taken as a whole."""
        return bool(self.events & select.EPOLLOUT) and not self.connecting


class GlooDevice(NamedTuple):
    """A group's place on the network: an event loop, and the socket to which the others connect."""

    epoll: int
    listener: Descriptor


def gloo_devices() -> set[GlooDevice]:
    """All gloo devices that this process has now."""
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
    """Free threads that wait for a peer that should connect to this device and never will.

    There is no connection to shut then, and shutting the listener would end the process. But a peer that
    connects says only which pair it is for, by a number that gloo counts up from 0 for each device: so we
    connect in the peer's place, and hang up.
    """
    with contextlib.suppress(OSError), duplicate(device.listener) as listener:
        address, family = listener.getsockname(), listener.family
        for number in range(pairs):
            with socket.socket(family, socket.SOCK_STREAM) as line:
                line.settimeout(_DIAL_SECONDS)
                line.connect(address)
                line.sendall(struct.pack("=q", number))


def shut(descriptor: Descriptor, how: int = socket.SHUT_RDWR) -> None:
    """End a connection, if it is still the same; closing the descriptor is left to its owner."""
    with contextlib.suppress(OSError), duplicate(descriptor) as connection:
        connection.shutdown(how)


def connections_to(port: int) -> set[Descriptor]:
    """TCP connections of this process to a port, on whatever host."""
    found = set()
    for number in proc.descriptors():
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            descriptor = Descriptor(number, status.st_ino)
            with duplicate(descriptor) as line:
                if line.family in (socket.AF_INET, socket.AF_INET6) and line.getpeername()[1] == port:
                    found.add(descriptor)
    return found


@contextlib.contextmanager
def duplicate(descriptor: Descriptor) -> Iterator[socket.socket]:
    """A second descriptor of the same socket; OSError if the number refers to something else by now."""
    number = os.dup(descriptor.number)
    try:
        if os.fstat(number).st_ino != descriptor.inode:
            raise OSError(f"descriptor {descriptor.number} was closed and its number reused")
        copy = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise
    with copy:
        yield copy


def _device(epoll: int) -> GlooDevice | None:
    """The gloo device that an epoll belongs to, if it belongs to one."""
    listeners, pipes = [], 0
    for descriptor, _, handler in _entries(epoll):
        if handler & 0xFFFFFFFF == descriptor.number:
            return None  # a number, not an address; its upper half is arbitrary
        kind = _mode(descriptor)
        if stat.S_ISFIFO(kind):
            pipes += 1
        elif stat.S_ISSOCK(kind):
            with contextlib.suppress(OSError), duplicate(descriptor) as line:
                if line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
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
"""A connection counts as quiet after this long without any byte."""
RESTLESS_SECONDS = 1.0
"""A connection is ended after this long even if bytes still pass."""
SWALLOW_SECONDS = 10.0
"""Limit for taking one send, at memory's speed."""
_LOOK_SECONDS = 0.01
_CHUNK = 1 << 20


class _Sighting(NamedTuple):
    """What was seen of a connection: when it was first looked at, since when this has passed, and what."""

    first: float
    since: float
    passed: bytes


class GlooFreeing:
    """Ends the connections of gloo devices; called again until nothing waits any more."""

    def __init__(self) -> None:
        self._kept: dict[Descriptor, socket.socket] = {}
        self._looks: dict[Descriptor, _Sighting] = {}
        self._ended: set[Descriptor] = set()

    def free(self, device: GlooDevice) -> bool:
        """Whether all its connections are ended; if not, call again a little later."""
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
        look = self._looks.get(descriptor, _Sighting(now, now, passed))
        if look.passed != passed:
            look = _Sighting(look.first, now, passed)
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
    """How many bytes the peer has taken and we have received, as the kernel counts them."""
    with contextlib.suppress(OSError), duplicate(descriptor) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[120:136]
    return b""


def _divert(device: GlooDevice, entry: Entry) -> Descriptor | None:
    """Put a socket that takes everything in a connection's place, in the event loop too."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    number = entry.descriptor.number
    with theirs, contextlib.suppress(OSError):
        with duplicate(entry.descriptor):  # the number still refers to what was listed
            _epoll_ctl(device.epoll, _EPOLL_CTL_DEL, number, 0, 0)
            os.dup2(theirs.fileno(), number, inheritable=False)
        diverted = Descriptor(number, os.fstat(number).st_ino)
        # If gloo has just registered it itself, with the events it now waits for, its own entry stands.
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


# epoll_ctl: Python does not let us set the data of an entry.

_EPOLL_CTL_ADD, _EPOLL_CTL_DEL = 1, 2


class _Event(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _epoll_ctl(epoll: int, what: int, number: int, events: int, handler: int) -> None:
    """OSError if the kernel refuses, except where it refuses to add what is already there."""
    event = _Event(events & (select.EPOLLIN | select.EPOLLOUT), handler)
    library = ctypes.CDLL(None, use_errno=True)
    if library.epoll_ctl(epoll, what, number, ctypes.byref(event)) == -1:
        code = ctypes.get_errno()
        if not (what == _EPOLL_CTL_ADD and code == 17):
            raise OSError(code, os.strerror(code))


# What torch keeps of device meshes and DTensors beyond their groups' end, and must not take into new ones.
#
# Two meshes over the same ranks count as equal. So what DTensor has cached (torch 2.11 and 2.13) for a mesh
# of the last iteration is what it hands out for one of the next: results with the old mesh, and with that the
# old groups, which 2.13 keeps in the mesh itself. And DTensor's random numbers would go on where they were,
# instead of starting as in a new process.


def forget_meshes() -> bool:
    """Call in the main thread; clears other threads' caches too, if they are Python's. True if any mesh was
    found.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return False
    found = False
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _random, _redistribute, debug

    clear: Callable[[], None] = debug._clear_sharding_prop_cache
    clear()
    clear_plans = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_plans is not None:  # torch 2.11 has no such cache
        clear_plans()
    _random._rng_tracker = None
    for item in gc.get_objects():
        # By its exact type: asking an object itself could run anybody's code.
        if type(item) is DeviceMesh:
            found = True
            _drop_groups(item)
        elif type(item) is functools._lru_cache_wrapper and item.__module__.startswith("torch.distributed."):
            item.cache_clear()  # some belong to nested functions, which cannot be found by name
    return found


def _drop_groups(mesh: Any) -> None:
    """A thread of torch's own may still have the mesh cached: it then finds the new group of that name."""
    groups = mesh.__dict__.get("_pg_registry")
    if groups is not None:
        groups.clear()


# Letting go of what a call of the function has left behind, so that the next one finds the memory free.


def forget(error: BaseException | None, chosen: InProcessSettings) -> None:
    """Drop what the frames of an error hold, and all cyclic garbage; give the device's memory back.

    The error itself stays, and so do those that led to it, each with a note that says where it was raised.
    The traceback has to go as a whole: a frame whose variables are cleared still has its function, and a
    nested function (torch's modules call their hooks from one) still has the outer function's variables.
    """
    for raised in _chain(error):
        lines = raised.__traceback__
        if lines is not None:
            raised.__traceback__ = None
            raised.add_note("".join(["It was raised here:\n", *traceback.format_tb(lines)]).rstrip())
            traceback.clear_frames(lines)
            del lines
    gc.collect()
    torch = sys.modules.get("torch")
    if chosen.empty_cuda_cache and torch is not None and torch.cuda.is_initialized():
        # If the device is broken, the health check, which comes next, says so.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_clearCublasWorkspaces()  # the next call allocates anew what it needs
            torch.cuda.empty_cache()


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and all those from which, or while handling which, it was raised, each once."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return found


log = logging.getLogger("holdfast")

LEAVE_SECONDS = 30.0
"""Limit for backends to let go of what they hold, once aborted: NCCL may wait for a kernel."""
DROP_SECONDS = 0.05
"""Limit for the threads of gloo groups to end once the last reference to the groups is gone. A thread that
waits half-way through a message ends when the peers have left too: with the next group."""
FREE_SECONDS = 0.1
"""Limit for one try to free what waits in gloo; the caller has other things to watch."""
CONNECTION_TRIES = 5
LONGEST_COLLECTIVE = 86_400.0
"""Stands for no limit; not larger, because gloo counts in milliseconds and adds them to the clock."""

NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""Read when a group is made. By default NCCL's watchdog ends the process as soon as a peer is lost."""


class StoreLine:
    """The store for making groups: over a connection of its own, which can be ended.

    Whoever makes a group waits in the store for all its peers' addresses. If one of them never comes, only
    the end of the connection frees the waiting thread. A line that was not ended serves the next groups too.
    """

    def __init__(self, store: Store) -> None:
        self.ended = False
        self._descriptor: Descriptor | None = None
        port = _port(store)
        clone: Callable[[], Store] = getattr(store, "clone", lambda: store)
        for _ in range(CONNECTION_TRIES if port else 0):
            before = connections_to(port)
            self.store = clone()
            new = connections_to(port) - before
            if len(new) == 1:
                self._descriptor = new.pop()
                return
            # Another thread connected to the store at the same moment: whose connection is which, is unknown.
        self.store = clone() if port else store

    def end(self) -> None:
        """Free the thread that waits in it, if one does."""
        if self._descriptor is not None:
            self.ended = True
            shut(self._descriptor)


class GroupWatch:
    """Watches the groups made since it began."""

    def __init__(self) -> None:
        self._before = gloo_devices()
        self._excepthook = sys.excepthook
        self._made: set[GlooDevice] = set()
        self._making = 0
        """The number of ranks of the group that is being made right now; 0 if none is."""
        self._dialled: set[GlooDevice] = set()
        self._line: StoreLine | None = None
        self._aborted: list[Any] = []
        self._aborts: list[threading.Thread] = []
        self._gloo = GlooFreeing()
        self._lock = threading.Lock()

    def over(self, line: StoreLine) -> Store:
        """The store for making groups here; `abort` ends its line if a group is being made at that moment."""
        self._line = line
        return line.store

    def abort(self) -> None:
        """Free whatever waits in a group or in the making of one. From any thread, any number of times."""
        with self._lock:
            for free in (self._free_gloo, self._free_store, self._free_nccl):
                try:
                    free()
                except Exception:  # the next call may free what this one did not, and its timeout will
                    log.warning("groups: freeing what waits in them failed", exc_info=True)

    def leave(self) -> None:
        """Call in the main thread, once the function was left: from here on there are no groups."""
        deadline = time.monotonic() + LEAVE_SECONDS
        self.abort()
        for thread in self._aborts:
            thread.join(max(0.0, deadline - time.monotonic()))
        destroying = threading.Thread(target=self._destroy, name="holdfast-leave-groups", daemon=True)
        destroying.start()
        destroying.join(max(0.0, deadline - time.monotonic()))
        if destroying.is_alive() or any(thread.is_alive() for thread in self._aborts):
            raise HandedOverError(
                f"The process groups of the last iteration were not left within {LEAVE_SECONDS:g} s: a "
                "thread of their backend still waits, for a kernel or for a peer that was lost half-way "
                "through a message. No new groups can be made in this process; start it anew."
            )
        if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = self._excepthook  # torch wraps it once more with every default group
        self._aborts, self._aborted = [], []
        if forget_meshes() and gloo_devices() - self._before:
            gc.collect()  # what only the caches still held may be in a reference cycle
        self._await_end()

    def release(self) -> None:
        """All ranks have left these groups: close what was kept open for those that had not."""
        self._gloo.release()

    # --- what frees -----------------------------------------------------------------------------------------

    def _free_gloo(self) -> None:
        deadline = time.monotonic() + FREE_SECONDS
        while not self._all_ended() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _all_ended(self) -> bool:
        done = True
        for device in gloo_devices() - self._before:
            if self._making and device not in self._made | self._dialled:
                self._dialled.add(device)
                dial(device, self._making)
            done = self._gloo.free(device) and done
        return done

    def _free_store(self) -> None:
        # Only while a group is being made: any other use of the default store either does not wait for a lost
        # peer, or has a deadline of its own.
        if self._making and self._line is not None:
            self._line.end()

    def _free_nccl(self) -> None:
        new = [one for one in _nccl_backends() if not any(one is other for other in self._aborted)]
        if new:
            self._aborted += new  # kept, so that each is aborted only once, by one thread
            thread = threading.Thread(
                target=_abort_nccl, args=(new,), name="holdfast-abort-nccl", daemon=True
            )
            self._aborts.append(thread)
            thread.start()  # it may wait for a kernel, and the caller has other things to watch

    # --- what destroys --------------------------------------------------------------------------------------

    def _destroy(self) -> None:
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception:  # they are given up in any case; what counts is that nothing refers to them
                log.warning("groups: torch could not destroy them; they are dropped", exc_info=True)
        _forget_groups()

    def _await_end(self) -> None:
        deadline = time.monotonic() + DROP_SECONDS
        while left := gloo_devices() - self._before:
            if time.monotonic() >= deadline:
                log.warning(
                    "holdfast: note: something still waits in, or refers to, %s of the function's last call. "
                    "Their threads and descriptors stay until all ranks have left and nothing refers to them",
                    plural(len(left), "process group"),
                )
                self._before |= left
                return
            time.sleep(0.005)

    # --- what is noticed ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _making_of(self, size: int) -> Iterator[None]:
        self._gloo.release()  # all ranks of the new group have left the earlier ones
        self._making = max(size, 0)
        try:
            yield
        finally:
            self._making = 0
            self._made |= gloo_devices()


@contextlib.contextmanager
def watch_groups() -> Iterator[GroupWatch]:
    """Watch the groups that are made inside.

    The one place where torch's code is replaced: `_new_process_group_helper`, through which
    `init_process_group` and `new_group` make every group in torch 2.11 and 2.13 alike. It is needed to know
    that a group is being made at present, and of how many ranks: a rank that waits there for its peers must
    be freed in a different way from one in a collective, and that way would harm a group that is complete.
    """
    watch = GroupWatch()
    original: Callable[..., Any] = c10d._new_process_group_helper

    def noticed(group_size: int, *args: Any, **kwargs: Any) -> Any:
        with watch._making_of(group_size):
            return original(group_size, *args, **kwargs)

    own = {name: value for name, value in NCCL_SETTINGS.items() if name not in os.environ}
    os.environ.update(own)
    c10d._new_process_group_helper = noticed
    try:
        yield watch
    finally:
        c10d._new_process_group_helper = original
        for name in own:
            os.environ.pop(name, None)


def limit_collectives(seconds: float, instead_of: float) -> None:
    """Set how long a collective of the default group may wait from now on. Any thread may call it.

    A call that already waits keeps the old limit. A group whose limit is not `instead_of` is somebody else's.
    """
    before = collective_timeout()
    if before is None or abs(before - min(instead_of, LONGEST_COLLECTIVE)) > 0.01:
        return
    try:
        c10d._set_pg_timeout(timedelta(seconds=min(seconds, LONGEST_COLLECTIVE)))
    except Exception:  # it is being torn down
        log.debug("groups: the timeout of the default group was not set", exc_info=True)


def _port(store: Store) -> int:
    """The port on which the server of a TCP store listens; 0 for other stores."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else 0


def _nccl_backends() -> list[Any]:
    """The NCCL backends of all groups, in the order in which torch aborts them."""
    if not dist.is_nccl_available():
        return []
    names = dict(c10d._world.pg_names)
    found: list[Any] = []
    for group in sorted(names, key=names.__getitem__, reverse=True):
        for device in group._device_types:
            backend: Any = group._get_backend(device)
            backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            if isinstance(backend, c10d.ProcessGroupNCCL) and not any(backend is one for one in found):
                found.append(backend)
    return found


def _abort_nccl(backends: list[Any]) -> None:
    """Abort as `_abort_process_group` does, but without its changes to what the main thread may be using."""
    backends[0]._group_start()  # otherwise two aborts may wait for each other (pytorch 119797)
    try:
        for backend in backends:
            try:
                backend.abort()
            except Exception:
                log.warning("groups: a communicator could not be aborted", exc_info=True)
    finally:
        backends[0]._group_end()


def _forget_groups() -> None:
    """Empty torch's own lists of groups, as `destroy_process_group` does.

    That function cannot be called without a default group, and a group whose making was interrupted still
    leaves traces: a raised count, because of which the ranks would disagree on the names of the next groups.
    """
    world: Any = c10d._world
    c10d._update_default_pg(None)
    for known in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        known.clear()
    _unregister_all_process_groups()
    world.group_count = 0
