"""Trying the network out between the nodes of a job, and reading the counters of a node's links.

Every node runs this at the same time; the one that has the endpoint's address hosts a store in which they
meet. Then they try each other out in rounds (connections.py): each pair makes a real connection, to a port
that the kernel chose, and sends a few small messages for the latency and some megabytes for the bandwidth.
Finally all nodes reduce together, over gloo and, if every node has a device, over NCCL.

Guarantee: bounded; every wait has a deadline, and a node that does not come or answer is named, or counted.
Whoever connects must know the token from the store; nothing received is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import re
import secrets
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.base import Bounded
from holdfast.health.connections import (
    LIMITS,
    BusSlot,
    Pair,
    Port,
    judge_all_reduce,
    judge_interface,
    judge_joined,
    judge_names,
    judge_not_reduced,
    judge_nvlink,
    judge_pairs,
    judge_ports,
    judge_ports_of,
    judge_reached,
    judge_slots,
    partner,
    round_count,
)
from holdfast.health.gpu import normal_bus
from holdfast.health.judgements import CheckResult
from holdfast.health.trials import ask

if TYPE_CHECKING:
    from torch.distributed import Store


# Reads the counters of a node's links, where the system shows them. Judges nothing, changes nothing.


SYSFS = Path("/sys")
TIMEOUT = 10.0
_VENDORS = {"0x10de": "gpu", "0x15b3": "adapter"}
"""NVIDIA's devices; Mellanox' adapters."""
_CLASSES = ("0x03", "0x02")
"""Displays and 3D controllers; networks. Other things from these vendors (bridges, audio) are left out."""
_STATE = re.compile(r"\d+: (\w+)")
_RATE = re.compile(r"([\d.]+) Gb/sec")
_GPU = re.compile(r"^(GPU \d+)\b")
_LINK = re.compile(r"^\s+Link (\d+): ([A-Za-z][A-Za-z \-]*?)(?: Count)?:\s*(\d+)\s*$")


def check_links(sysfs: Path = SYSFS) -> list[CheckResult]:
    """InfiniBand ports, NVLink, and the lanes of GPUs and adapters; nothing if there are none."""
    return [
        *judge_ports_of(ports(sysfs)),
        *judge_slots(slots(sysfs)),
        *judge_nvlink(nvlink()),
    ]


def ports(sysfs: Path = SYSFS) -> list[Port]:
    """Every port of every InfiniBand or RoCE adapter."""
    found = []
    for place in sorted((sysfs / "class" / "infiniband").glob("*/ports/*")):
        state, rate = _STATE.match(_text(place / "state")), _RATE.match(_text(place / "rate"))
        counters = {name: _number(place / "counters" / name) for name in LIMITS}
        found.append(
            Port(
                name=f"{place.parent.parent.name}/{place.name}",
                state=state[1] if state else "",
                rate=float(rate[1]) if rate else None,
                counters={name: value for name, value in counters.items() if value is not None},
            )
        )
    return found


def slots(sysfs: Path = SYSFS) -> list[BusSlot]:
    """GPUs and adapters on the bus. Their speed is left out: idle devices lower it to save power."""
    found = []
    for place in sorted((sysfs / "bus" / "pci" / "devices").glob("*")):
        what = _VENDORS.get(_text(place / "vendor"))
        if what is None or not _text(place / "class").startswith(_CLASSES):
            continue
        fatal = re.search(r"TOTAL_ERR_FATAL (\d+)", _text(place / "aer_dev_fatal"))
        found.append(
            BusSlot(
                bus=normal_bus(place.name),
                what=what,
                width=_number(place / "current_link_width"),
                widest=_number(place / "max_link_width"),
                fatal=int(fatal[1]) if fatal else 0,
            )
        )
    return found


def nvlink() -> dict[str, dict[str, int]]:
    """Device → counter of its links → value, from `nvidia-smi`; the kernel shows none of them."""
    if shutil.which("nvidia-smi") is None:
        return {}
    answer = ask(["nvidia-smi", "nvlink", "-e"], TIMEOUT)
    return parse_nvlink(answer.out) if answer.code == 0 else {}


def parse_nvlink(text: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    device = ""
    for line in text.splitlines():
        if named := _GPU.match(line):
            device = named[1]
        elif device and (told := _LINK.match(line)):
            found.setdefault(device, {})[f"link {told[1]} {told[2].lower()}"] = int(told[3])
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() else None


JOIN = 60.0
"""Seconds within which all nodes must come: schedulers do not start them at the same moment."""
ROUND = 5.0
"""Seconds that two nodes have for their trial."""
RESOLVE = 10.0
REDUCE = 60.0
"""Seconds for a group of all nodes to form and reduce: NCCL starts slowly."""
ECHOES = 20
BUDGET = 0.1
"""Seconds for which bytes are sent in each direction."""
FIRST, MOST = 256 * 1024, 64 * 1024 * 1024
"""Bytes sent for a first look at the speed, and at most."""
ELEMENTS = 1024 * 1024
TOKEN = 16
NETWORK = Path("/sys/class/net")
PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_HELLO = struct.Struct(f"!{TOKEN}sII")
_SIZE = struct.Struct("!Q")
_FOUND = struct.Struct("!dd")
_SIOCGIFADDR = 0x8915


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells the others."""

    name: str
    host: str
    """The host name of its machine."""
    address: str
    port: int
    devices: int = 0


class Interface(NamedTuple):
    name: str
    address: str

    def describe(self) -> str:
        return f"{self.name} ({self.address})" if self.name else self.address


# --- what one node can see by itself ------------------------------------------------------------------------


def local_checks(
    environ: Mapping[str, str] = os.environ,
    network: Path = NETWORK,
    ports: Path = PORTS,
    *,
    names: bool = True,
) -> list[CheckResult]:
    """The interfaces named for gloo and NCCL, whether a port can be had, and (`names`) this node's name."""
    found = [
        _look_at_interface(variable, name, network)
        for variable in VARIABLES
        for name in _exact_names(environ.get(variable, ""))
    ]
    problem = ""
    try:
        socket.create_server(("", 0)).close()
    except OSError as error:
        problem = error.strerror or str(error)
    found.append(judge_ports(*_port_range(ports), problem))
    if not names:
        return found
    own = socket.gethostname()
    return [*found, judge_names(own, resolve([own]))]


def _exact_names(value: str) -> list[str]:
    """NCCL also accepts beginnings of names, and `^` for all but some; we can only look for whole names."""
    if value.startswith("^"):
        return []
    return [name.removeprefix("=").partition(":")[0] for name in value.split(",") if name]


def _look_at_interface(variable: str, name: str, network: Path) -> CheckResult:
    there = sorted(path.name for path in network.glob(f"{name}*")) if "/" not in name else []
    exact = name if name in there else there[0] if there and variable.startswith("NCCL") else ""
    state = "down"
    if exact:
        with contextlib.suppress(OSError):
            state = (network / exact / "operstate").read_text().strip()
    address = address_of(exact) if exact else ""
    up = state in ("up", "unknown")  # a loopback or a tunnel does not say
    return judge_interface(variable, name, there=bool(exact), up=up, address=address)


def _port_range(path: Path) -> tuple[int, int]:
    try:
        low, high = (int(word) for word in path.read_text().split())
    except (OSError, ValueError):
        return 0, -1
    return low, high


def resolve(names: Sequence[str], timeout: float = RESOLVE) -> dict[str, str]:
    """Names without an address, and why. All are looked up at once: a dead name server answers late."""
    deadline = time.monotonic() + timeout
    asking = [(name, Bounded(partial(_address, name), "resolve")) for name in dict.fromkeys(names)]
    found: dict[str, str] = {}
    for name, one in asking:
        if not one.ended(deadline - time.monotonic()):
            found[name] = f"no answer within {timeout:g} s"
        elif problem := one.result():
            found[name] = problem
    return found


def _address(name: str) -> str:
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            raw = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(raw[20:24])


def interface_used(towards: str, environ: Mapping[str, str] = os.environ) -> Interface:
    """The interface that gloo is told to use; else the one through which the meeting point is reached."""
    for variable in VARIABLES:
        for name in _exact_names(environ.get(variable, "")):
            if address := address_of(name):
                return Interface(name, address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((towards, 9))  # sends nothing: the kernel only says which interface it would use
            address = str(asked.getsockname()[0])
        except OSError:
            address = "127.0.0.1"
    with contextlib.suppress(OSError):
        for _, name in socket.if_nameindex():
            if address_of(name) == address:
                return Interface(name, address)
    return Interface("", address)


# --- two nodes ----------------------------------------------------------------------------------------------


class ProbeListener:
    """Accepts others' connections while this node is busy, and hands over the one that it waits for."""

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        self._server = socket.create_server((address, 0), backlog=128)
        self.port: int = self._server.getsockname()[1]
        self._arrived: dict[tuple[int, int], socket.socket] = {}
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._accept, name="holdfast-probe", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(ROUND)
            token, number, rank = _HELLO.unpack(_receive(connection, _HELLO.size))
            if not hmac.compare_digest(token, self._token):
                raise OSError("a wrong token")
        except (OSError, struct.error):
            connection.close()
            return
        with self._changed:
            if self._closed:
                connection.close()
                return
            self._arrived[number, rank] = connection
            self._changed.notify_all()

    def take(self, number: int, rank: int, timeout: float) -> socket.socket:
        """The connection from a node for a round; TimeoutError if it does not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: (number, rank) in self._arrived, timeout):
                raise TimeoutError("it did not come")
            return self._arrived.pop((number, rank))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`, which would keep it open
        self._server.close()
        with self._changed:
            self._closed = True
            for one in self._arrived.values():
                one.close()
            self._arrived.clear()


def _receive(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        data = connection.recv(min(size - len(found), 1024 * 1024))
        if not data:
            raise ConnectionError("the connection ended")
        found += data
    return bytes(found)


def _swallow(connection: socket.socket, size: int) -> None:
    """Take in bytes that nobody needs."""
    buffer = memoryview(bytearray(1024 * 1024))
    while size:
        count = connection.recv_into(buffer[: min(size, len(buffer))])
        if not count:
            raise ConnectionError("the connection ended")
        size -= count


def _lead(connection: socket.socket) -> tuple[float, float]:
    """The side that connected: (seconds one way, bytes per second in the slower direction)."""
    _receive(connection, 1)  # now the other side has time
    times = []
    for _ in range(ECHOES):
        began = time.perf_counter()
        connection.sendall(b"ping....")
        _receive(connection, 8)
        times.append(time.perf_counter() - began)
    rates = []
    for flow in (_push, _pull):
        rate = flow(connection, FIRST)
        rates.append(flow(connection, int(min(MOST, max(FIRST, rate * BUDGET)))))
    connection.sendall(_SIZE.pack(0))
    found = min(times) / 2, min(rates)
    connection.sendall(_FOUND.pack(*found))
    return found


_UP, _DOWN = 1 << 62, 1 << 61


def _push(connection: socket.socket, size: int) -> float:
    began = time.perf_counter()
    connection.sendall(_SIZE.pack(_UP | size))
    _send(connection, size)
    _receive(connection, 1)
    return size / max(1e-9, time.perf_counter() - began)


def _pull(connection: socket.socket, size: int) -> float:
    began = time.perf_counter()
    connection.sendall(_SIZE.pack(_DOWN | size))
    _swallow(connection, size)
    return size / max(1e-9, time.perf_counter() - began)


def _send(connection: socket.socket, size: int) -> None:
    block = memoryview(bytes(1024 * 1024))
    while size:
        part = block[: min(size, len(block))]
        connection.sendall(part)
        size -= len(part)


def _follow(connection: socket.socket) -> tuple[float, float]:
    """The side that was connected to; it learns what the other has found."""
    connection.sendall(b"g")
    for _ in range(ECHOES):
        connection.sendall(_receive(connection, 8))
    while wish := _SIZE.unpack(_receive(connection, _SIZE.size))[0]:
        size = wish & (_DOWN - 1)
        if size > MOST:
            raise ConnectionError("it asks for too much")
        if wish & _UP:
            _swallow(connection, size)
            connection.sendall(b"k")
        else:
            _send(connection, size)
    latency, rate = _FOUND.unpack(_receive(connection, _FOUND.size))
    return float(latency), float(rate)


def meet_all(rank: int, nodes: Sequence[Node], listener: ProbeListener, token: bytes) -> list[Pair]:
    """This node's part of all rounds: the lower number connects, the higher one is connected to."""
    found = []
    for number in range(round_count(len(nodes))):
        other = partner(rank, number, len(nodes))
        if other is not None:
            found.append(_meet(rank, other, number, nodes, listener, token))
    return found


def _meet(
    rank: int, other: int, number: int, nodes: Sequence[Node], listener: ProbeListener, token: bytes
) -> Pair:
    mine, theirs = nodes[rank], nodes[other]
    try:
        if rank < other:
            connection = socket.create_connection((theirs.address, theirs.port), ROUND)
        else:
            connection = listener.take(number, other, 2 * ROUND)
        with connection:
            connection.settimeout(2 * ROUND)  # the other may still be busy with the round before
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if rank < other:
                connection.sendall(_HELLO.pack(token, number, rank))
            latency, rate = _lead(connection) if rank < other else _follow(connection)
    except (OSError, struct.error) as error:
        way = "connecting" if rank < other else "waiting"
        why = f"{way}: {getattr(error, 'strerror', None) or error}"
        return Pair(a=mine.name, b=theirs.name, problem=why)
    return Pair(a=mine.name, b=theirs.name, latency=latency, bandwidth=rate)


# --- a ring -------------------------------------------------------------------------------------------------

RING_WAIT = 5.0
"""Seconds for a neighbour to say where it listens."""


def try_ring(store: Store, rank: int, count: int, name: str, token: bytes, towards: str) -> Pair:
    """Each node tries out the next one, all at the same time: a thousand nodes take as long as two.

    `store`: where the nodes tell each other where they listen; `towards`: an address in the network to use.
    What went wrong is part of the answer.
    """
    interface = interface_used(towards)
    after, before = (rank + 1) % count, (rank - 1) % count
    deadline = time.monotonic() + RING_WAIT
    with contextlib.closing(ProbeListener(interface.address, token)) as listener:
        mine = Node(name=name, host="", address=interface.address, port=listener.port)
        store.set(f"ring/{rank}", msgspec.json.encode(mine).decode())
        serving = Bounded(partial(_serve, listener, before), "ring")
        theirs = _read(store, f"ring/{after}", deadline, partial(msgspec.json.decode, type=Node))
        if theirs is None:
            return Pair(
                a=name, b=f"node {after}", problem=f"it did not say where it listens in {RING_WAIT:g} s"
            )
        found = _reach(mine, theirs, rank, token)
        serving.ended(max(0.0, deadline - time.monotonic()))  # the previous node may still be at it
        return found


def read_soon(store: Store, key: str, timeout: float) -> bytes | None:
    """The value of a key in the store, if it is there soon enough."""
    found: bytes | None = _read(store, key, time.monotonic() + timeout, bytes)
    return found


def ring_pairs(store: Store, count: int, timeout: float) -> list[Pair]:
    """What the nodes of a ring have found, as far as they reported it in time."""
    deadline = time.monotonic() + timeout
    decode = partial(msgspec.json.decode, type=Pair)
    told = [_read(store, f"ring/pair/{rank}", deadline, decode) for rank in range(count)]
    return [one for one in told if one is not None]


def _serve(listener: ProbeListener, rank: int) -> None:
    with contextlib.suppress(OSError, struct.error), listener.take(0, rank, 2 * RING_WAIT) as connection:
        connection.settimeout(RING_WAIT)
        _follow(connection)


def _reach(mine: Node, theirs: Node, rank: int, token: bytes) -> Pair:
    try:
        with socket.create_connection((theirs.address, theirs.port), RING_WAIT) as connection:
            connection.settimeout(RING_WAIT)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_HELLO.pack(token, 0, rank))
            latency, rate = _lead(connection)
    except (OSError, struct.error) as error:
        why = f"connecting to {theirs.address}: {getattr(error, 'strerror', None) or error}"
        return Pair(a=mine.name, b=theirs.name, problem=why)
    return Pair(a=mine.name, b=theirs.name, latency=latency, bandwidth=rate)


# --- all of them --------------------------------------------------------------------------------------------


def probe_network(endpoint: str, count: int, name: str, *, join: float = JOIN) -> list[CheckResult]:
    """What this node finds out together with the others; the first node also says what all of them found."""
    host, _, port = endpoint.rpartition(":")
    try:
        store = _store(host, int(port), join)
        rank = store.add("probe/count", 1) - 1
    except (RuntimeError, OSError) as error:
        why = f"{endpoint} cannot be reached: {str(error).splitlines()[0][:200]}"
        return [judge_joined(0, count, why), *local_checks()]
    if rank >= count:
        why = f"this is number {rank + 1}: another one runs with the same endpoint"
        return [judge_joined(rank + 1, count, why)]
    if rank == 0:
        store.set("probe/token", secrets.token_hex(TOKEN // 2))
    interface = interface_used(host)
    try:
        token = bytes(store.get("probe/token"))
        listener = ProbeListener(interface.address, token)
    except (OSError, RuntimeError) as error:
        return [judge_ports(0, -1, str(error))]
    with contextlib.closing(listener):
        mine = Node(
            name=name, host=socket.gethostname(), address=interface.address, port=listener.port,
            devices=_devices(),
        )  # fmt: skip
        store.set(f"probe/node/{rank}", msgspec.json.encode(mine).decode())
        nodes = _all_nodes(store, count, join)
        came = [one for one in nodes if one is not None]
        joined = judge_joined(len(came), count, f"{', '.join(one.name for one in came)} did")
        if len(came) < count:
            return [joined, *local_checks()]
        pairs = meet_all(rank, came, listener, token)
    results = [joined, *judge_reached(interface.describe(), pairs), *local_checks()]
    results.append(judge_names(mine.host, resolve([one.host for one in came])))
    store.set(f"probe/pairs/{rank}", msgspec.json.encode(pairs).decode())
    if rank == 0:
        every = _every_pair(store, count)
        results.append(judge_pairs([one for one in every if one.a < one.b or one.problem]))
        whole = len(every) == count * (count - 1) and not any(one.problem for one in every)
        store.set("probe/whole", "1" if whole else "0")
    backends = ["gloo", *(["nccl"] if all(one.devices for one in came) else [])]
    # One decision for all: if some left the reduction out, the others would hang.
    if _read(store, "probe/whole", time.monotonic() + 6 * ROUND, bytes) == b"1":
        results += [all_reduce(store, backend, rank, count) for backend in backends]
    else:
        results += [judge_not_reduced(backend) for backend in backends]
    _leave(store, count)
    return _once(results)


def network_seconds(nodes: int) -> float:
    """The seconds within which `probe_network` ends, whatever happens: linear in nodes, not in pairs."""
    return JOIN + 3 * ROUND * (round_count(nodes) + 2) + RESOLVE * 2 + 8 * ROUND + REDUCE * 2 + 60.0


def _once(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Only the last result under each name."""
    return list({one.name: one for one in results}.values())


def _store(host: str, port: int, timeout: float) -> Store:
    """The store in which the nodes meet; hosted where the address is, by the first process there."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    def opened(*, hosts: bool) -> TCPStore:
        return TCPStore(
            host, port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )

    if _is_here(host):
        with contextlib.suppress(RuntimeError, OSError):  # another process on this machine was first
            return opened(hosts=True)
    return opened(hosts=False)


def _is_here(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
            tried.bind((socket.gethostbyname(host), 0))
    except OSError:
        return False
    return True


def _devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _all_nodes(store: Store, count: int, timeout: float) -> list[Node | None]:
    """What each node reported, None for one that did not come in time; all wait until the same moment."""
    deadline = time.monotonic() + timeout
    return [
        _read(store, f"probe/node/{number}", deadline, partial(msgspec.json.decode, type=Node))
        for number in range(count)
    ]


def _every_pair(store: Store, count: int) -> list[Pair]:
    deadline = time.monotonic() + 4 * ROUND
    return [pair for number in range(count) for pair in _pairs(store, number, deadline)]


def _pairs(store: Store, number: int, deadline: float) -> list[Pair]:
    return (
        _read(store, f"probe/pairs/{number}", deadline, partial(msgspec.json.decode, type=list[Pair])) or []
    )


def _read(store: Store, key: str, deadline: float, decode: Callable[[bytes], Any]) -> Any:
    from datetime import timedelta

    try:
        store.wait([key], timedelta(seconds=max(0.05, deadline - time.monotonic())))
        return decode(bytes(store.get(key)))
    except (RuntimeError, msgspec.DecodeError):
        return None


def _leave(store: Store, count: int) -> None:
    """Stay for a while, until the others are done with the store: this may be the node that hosts it."""
    with contextlib.suppress(RuntimeError):
        if store.add("probe/left", 1) == count:
            store.set("probe/all_left", "1")
        _read(store, "probe/all_left", time.monotonic() + 2 * ROUND, bytes)


def all_reduce(store: Store, backend: str, rank: int, count: int) -> CheckResult:
    """A sum over all nodes, with every element known; the time is that of a second one."""
    began = time.monotonic()
    reducing = Bounded(partial(_reduce, store, backend, rank, count), f"all-reduce-{backend}")
    size = ELEMENTS * 4
    if not reducing.ended(REDUCE):
        took = time.monotonic() - began
        return judge_all_reduce(
            backend, count, seconds=0, size=size, problem=f"no answer within {took:.0f} s"
        )
    seconds, problem = reducing.result()
    return judge_all_reduce(backend, count, seconds=seconds, size=size, problem=problem)


def _reduce(store: Store, backend: str, rank: int, count: int) -> tuple[float, str]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    try:
        with _group(
            dist, backend, PrefixStore(f"probe/{backend}", store), rank, count, timedelta(seconds=REDUCE)
        ):
            seconds = 0.0
            for _ in range(2):
                tensor = torch.full((ELEMENTS,), float(rank + 1), device=device)
                began = time.perf_counter()
                dist.all_reduce(tensor)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds = time.perf_counter() - began
                if not bool((tensor == count * (count + 1) / 2).all()):
                    return 0.0, f"a WRONG sum: {float(tensor[0])} instead of {count * (count + 1) / 2}"
            return seconds, ""
    except Exception as error:  # noqa: BLE001 - a sick network may fail in any way
        return 0.0, f"{type(error).__name__}: {error}".splitlines()[0][:300]


@contextlib.contextmanager
def _group(dist: Any, backend: str, store: Store, rank: int, count: int, timeout: Any) -> Iterator[None]:
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
