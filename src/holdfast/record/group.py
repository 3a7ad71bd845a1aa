"""Who a rank is and how ranks reach each other: their group, and the store that an agent hosts for them.

The store is for decisions; the process group is only for DCP's planning and for saves. It is a separate group
on gloo, because the collectives of DCP must never mix with those of training. Only what reaches other ranks
imports torch: to know who a rank is takes none.

A hosted store lives in no rank: an agent or a keeper hosts it, and ranks meet in it as its clients.
Guarantee: every attempt of the launcher has a store of its own, hosted by the leading agent. Nothing that an
earlier attempt wrote can be read in it, and its port cannot be lost to somebody else between being chosen
and being used, because the listening socket is handed over rather than closed and opened again. It listens
only at the address it was given, if that is one of this machine's.

Anybody who reaches that address can connect, and torch's server neither asks who connects nor limits how many
do. So it runs with its own table of open files: however many connect, the process that hosts it can still
open files of its own. Connections that never say a word are cut after a few seconds, and earlier when there
are many (`secret.to_cut`). What agents read from a store is proven by its seal, not by who connected.

torch's agent shares one store among all attempts without a prefix, so restarted gloo ranks read the addresses
of their dead predecessors; without sharing, the store lives in rank 0 and dies with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from holdfast.base import leavable
from holdfast.errors import UsageError
from holdfast.record.decisions import DecisionStore
from holdfast.record.secret import to_cut

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed import TCPStore


@dataclass(frozen=True)
class Group:
    rank: int
    world_size: int
    store: DecisionStore
    process_group: dist.ProcessGroup | None
    """None when this rank is alone."""
    backend: str = ""
    """The backend of the training group, for the record."""

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0


def join_group(timeout: float) -> Group:
    """The group as it is now. All ranks call this together, after torch's own setup."""
    import torch.distributed as dist

    from holdfast.base import default_store

    if dist.is_available() and dist.is_initialized():
        default = default_store()
        # Every rank starts the same runs in the same order, so its own count keeps their keys apart.
        number = default.add(f"holdfast/starts/{dist.get_rank()}", 1)
        store = dist.PrefixStore(f"holdfast/{number}", default)
        world = dist.get_world_size()
        group = _new_group(timeout) if world > 1 else None
        return Group(dist.get_rank(), world, store, group, str(dist.get_backend()))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise UsageError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group before the run starts, so that the ranks can agree"
        )
    return Group(0, 1, dist.HashStore(), None)


def _new_group(timeout: float) -> dist.ProcessGroup:
    import torch.distributed as dist

    with leavable():  # torch waits for all ranks here; what it leaves behind goes when all groups go
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        return group


def leave_group(group: Group) -> Group:
    """End the group made for saves, on all ranks alike, after the last save; what is left is this rank alone.

    It must not live on until the interpreter ends: the threads of a gloo group that is still alive then may
    need the interpreter once more, and abort the process after all its work is done.
    """
    if group.process_group is not None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group(group.process_group)
    return replace(group, process_group=None)


# The few exchanges that a save needs between ranks, over the group made for saves.
#
# Every save makes `add_up`: a handful of integers, summed over all ranks. The others run only when something
# has changed or failed. None of them ever touches one of training's own groups.


T = TypeVar("T")

_WRAP = 1 << 64


def add_up(group: Group, numbers: Sequence[int]) -> list[int]:
    """Each number's sum over all ranks, modulo 2^64 and signed; every rank gets the same."""
    own = [_signed(number) for number in numbers]
    if group.process_group is None:
        return own
    import torch
    import torch.distributed as dist

    summed = torch.tensor(own, dtype=torch.int64)
    dist.all_reduce(summed, group=group.process_group)
    return cast("list[int]", summed.tolist())


def _signed(number: int) -> int:
    wrapped = number % _WRAP
    return wrapped - _WRAP if wrapped >= _WRAP // 2 else wrapped


def gather(group: Group, value: T) -> list[T] | None:
    """Every rank's value, on rank 0; None elsewhere."""
    if group.process_group is None:
        return [value]
    import torch.distributed as dist

    found: list[T | None] | None = [None] * group.world_size if group.is_coordinator else None
    dist.gather_object(value, found, dst=0, group=group.process_group)
    return cast("list[T] | None", found)


def scatter(group: Group, values: list[T] | None) -> T:
    """This rank's value, out of those that rank 0 gives."""
    if group.process_group is None:
        assert values is not None
        return values[0]
    import torch.distributed as dist

    mine: list[T | None] = [None]
    dist.scatter_object_list(mine, values, src=0, group=group.process_group)
    return cast("T", mine[0])


def share(group: Group, value: T) -> list[T]:
    """Every rank's value, on every rank."""
    if group.process_group is None:
        return [value]
    import torch.distributed as dist

    found: list[T | None] = [None] * group.world_size
    dist.all_gather_object(found, value, group=group.process_group)
    return cast("list[T]", found)


def hand_out(group: Group, data: bytes | None) -> bytes | None:
    """What rank 0 has, on every rank; None if rank 0 has nothing. All ranks call this together."""
    if group.process_group is None:
        return data
    import torch
    import torch.distributed as dist

    size = torch.tensor([-1 if data is None else len(data)])
    dist.broadcast(size, src=0, group=group.process_group)
    if size.item() < 0:
        return None
    whole = bytearray(int(size)) if data is None else b""
    for start in range(0, int(size), HANDED_AT_ONCE):
        if data is not None:
            part = torch.frombuffer(bytearray(data[start : start + HANDED_AT_ONCE]), dtype=torch.uint8)
        else:
            part = torch.frombuffer(whole, dtype=torch.uint8)[start : start + HANDED_AT_ONCE]
        dist.broadcast(part, src=0, group=group.process_group)
    return data if data is not None else bytes(whole)


HANDED_AT_ONCE = 64 << 20
"""Bytes; the group's deadline holds for each of them."""


# --- a store that lives in no rank --------------------------------------------------------------------------

CONNECT_TIMEOUT = 60.0
AGAIN = 0.5
"""Seconds until a client that was turned away tries again."""
PARTING = 5.0
SWEEP = 1.0
"""Seconds between two checks of the connections."""
GAP = 64
"""How far to look beyond the highest descriptor in use: the kernel gives a new file the lowest free one."""
_CLOSE_RANGE, _UNSHARE_FILES, _ALL = 436, 2, 0xFFFFFFFF
_CLONE_FILES = 0x400
_RECEIVED = 128
"""Where Linux's struct tcp_info has the number of bytes received."""


class HostedStore:
    """Hosts a TCPStore until closed. The ranks, and the process that hosts it, are only ever its clients."""

    def __init__(self, address: str, port: int = 0, *, alone: bool = False) -> None:
        """`port`: 0 for a free one; raises OSError if it is taken. `alone`: no other node looks for it."""
        import torch.distributed  # noqa: F401 - not in the thread, whose files are its own

        self._listening = listen(port, address, alone=alone)
        self.address = address
        self.port: int = self._listening.getsockname()[1]
        self._apart = False
        self._error: BaseException | None = None
        self._ready, self._end = threading.Event(), threading.Event()
        # Everything that concerns the server happens on this thread: on others its descriptors mean different
        # files.
        self._thread = threading.Thread(target=self._serve, name="holdfast-store", daemon=True)
        self._thread.start()
        in_time = self._ready.wait(CONNECT_TIMEOUT)
        if self._apart or self._error is not None:
            self._listening.close()
        else:
            self._listening.detach()  # the store's server closes it
        if self._error is not None:
            raise self._error
        if not in_time:
            raise OSError(f"the store at {address}:{self.port} was not ready within {CONNECT_TIMEOUT:g} s")

    def close(self) -> None:
        """Stop serving. Clients that are still connected get an error."""
        self._end.set()
        self._thread.join(PARTING)

    def _serve(self) -> None:
        from torch.distributed import TCPStore

        # A signal handler writes to a descriptor of this process, which here may be a stranger's connection.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        descriptor, host = self._listening.fileno(), self._listening.getsockname()[0]
        unspecified = ipaddress.ip_address(host.partition("%")[0]).is_unspecified
        try:
            self._apart = _take_files_apart(descriptor)
            store: TCPStore | None = TCPStore(
                host_name="localhost" if unspecified else host,
                port=self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=CONNECT_TIMEOUT),
                master_listen_fd=descriptor,
            )
        except BaseException as error:  # noqa: BLE001 - for whoever waits
            self._error = error
            return
        finally:
            self._ready.set()
        door = _Doorkeeper(self.port)
        while not self._end.wait(SWEEP):
            door.look()
        store = None
        del store


def _take_files_apart(keep: int) -> bool:
    """Give this thread, and those that it starts, their own open files: `keep`, and standard error.

    False where the kernel does not allow it (Linux before 5.9 in a container): the files stay shared.
    """
    if not _unshare_files(keep):
        return False
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # whoever reads what this process writes must see when it ends
        os.dup2(nothing, standard)
    os.close(nothing)
    return True


def _unshare_files(keep: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)

    def close_range(first: int, last: int, flags: int) -> bool:
        arguments = (ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(flags))
        return bool(libc.syscall(ctypes.c_long(_CLOSE_RANGE), *arguments) == 0)

    if close_range(keep + 1, _ALL, _UNSHARE_FILES):
        return keep == 3 or close_range(3, keep - 1, 0)
    if libc.unshare(_CLONE_FILES) != 0:
        return False
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    return True


class _Doorkeeper:
    """Cuts connections to a port of ours that never say a word: a client that wants something says so.

    It opens no file, because there may be none left to open: it looks at one descriptor after another.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._since: dict[int, float] = {}
        """When a silent connection was first seen, by inode."""
        self._others: set[int] = set()
        """Inodes that need not be looked at again: in a store with ten thousand ranks, nearly all."""
        self._highest = 0

    def look(self) -> None:
        now = time.monotonic()
        silent: dict[int, tuple[str, float]] = {}
        since: dict[int, float] = {}
        others: set[int] = set()
        descriptor = 2
        while (descriptor := descriptor + 1) < self._highest + GAP:
            try:
                found = os.fstat(descriptor)
            except OSError:
                continue
            self._highest = max(self._highest, descriptor)
            inode = found.st_ino
            if inode in self._others or not stat.S_ISSOCK(found.st_mode):
                others.add(inode)
            elif address := _silent_client(descriptor, self._port):
                since[inode] = self._since.get(inode, now)
                silent[descriptor] = (address, since[inode])
            else:
                others.add(inode)
        self._since, self._others = since, others
        for descriptor in to_cut(silent, now):
            with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)  # the server that owns it sees the end and closes it


def _silent_client(descriptor: int, port: int) -> str:
    """The address of a client that has connected to this port and sent nothing so far; else empty."""
    try:
        with _borrowed(descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return ""
            if connection.getsockname()[1] != port:
                return ""
            peer = str(connection.getpeername()[0])
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return ""
    if len(info) < _RECEIVED + 8:
        return ""  # a kernel that does not count
    (received,) = struct.unpack_from("=Q", info, _RECEIVED)
    return "" if received else peer


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def connect(address: str, port: int, timeout: float = CONNECT_TIMEOUT) -> TCPStore:
    """A client of a store hosted elsewhere. Raises torch's RuntimeError if it is not reached in time."""
    from torch.distributed import TCPStore

    deadline = time.monotonic() + timeout
    while True:
        try:
            return TCPStore(
                host_name=address,
                port=port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(0.1, deadline - time.monotonic())),
            )
        except RuntimeError:
            # A crowd of strangers may have taken the last place, until their connections are cut.
            if time.monotonic() + AGAIN >= deadline:
                raise
            time.sleep(AGAIN)


def listen(port: int = 0, address: str = "", *, alone: bool = False) -> socket.socket:
    """A listening socket, on a free port unless one is given, at the address that others will use.

    It listens at every address, of both families if there are two, if none is given, or an ambiguous one: a
    name that means several addresses, or none of this machine's own (a service's), or only the loopback
    although others look for it (they do not if this node is `alone`).
    """
    if (host := _own_address(address, alone=alone)) is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(socket.gaierror):
            return socket.create_server((host, port), family=family, backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)


def _own_address(address: str, *, alone: bool) -> str | None:
    """The one address of this machine that a name or an address means; None if that is ambiguous."""
    if not address:
        return None
    if address == "localhost":
        return "127.0.0.1"
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    given = alone or address in found
    if len(found) != 1 or not all(can_bind(one) for one in found):
        return None
    [one] = found
    # Debian gives a machine's own name a loopback address, by which nobody else can find it.
    return one if given or not ipaddress.ip_address(one.partition("%")[0]).is_loopback else None


def can_bind(address: str) -> bool:
    """Whether an address is one of this machine's own, whatever its interfaces are called."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def reachable_address(address: str, nodes: int) -> str:
    """`address`, or the loopback address if a single node cannot resolve its own name."""
    if nodes > 1:
        return address
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        return "127.0.0.1"
    return address
