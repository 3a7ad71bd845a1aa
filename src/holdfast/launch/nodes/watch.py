"""Agents that watch each other while an attempt runs, and the lease as the leading agent holds it.

Guarantee: the leading agent learns of another's end at once when its connection closes, and within `timeout`
when it only falls silent; all others learn of the leader's end in the same way. A goodbye distinguishes an
orderly end from a loss. A process that cannot prove that it knows the run's secret is not listened to, and
nothing that arrives is interpreted beyond its length and a code made from that secret.

Each follower holds one connection to the leader; both sides send a byte now and then. A cut in only one
direction is noticed too: the side that hears nothing closes the connection, and the other side sees that.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.errors import ControlError
from holdfast.launch import live_line
from holdfast.record import (
    HANDOVER,
    Claim,
    ControlDirectory,
    LeaseKeeper,
    claim,
    current_epoch,
    listen,
    prove,
    proves,
    read_claim,
    to_cut,
)

# The lease as the leading agent holds it, across the attempts of one launch.
#
# Guarantee: between two attempts of a launch the run is never free for others: the old epoch is kept alive
# until the next one is claimed. While workers run, losing the lease ends them at once; failing to renew it is
# reported, and ends nothing.


class Leadership:
    def __init__(
        self,
        control: ControlDirectory,
        ttl: float,
        handover: float = HANDOVER,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """`tell` gets what a person should know, from another thread."""
        self._control = control
        self._ttl = ttl
        self._handover = handover
        self._tell = tell
        self._keeper: LeaseKeeper | None = None
        self._lock = threading.Lock()
        self._owner = ""
        self._on_lost: Callable[[], None] | None = None
        self.lost = ""
        """Why the lease was lost while workers ran; empty while it is held."""

    def claim(self, owner: str) -> Claim:
        """Take the next epoch for this launch. Raises RunIsLiveError if another launch is alive."""
        self._owner = owner
        line = live_line()
        held = claim(self._control, owner, self._ttl, handover=self._handover, waiting=line)
        line.over()
        previous, self._keeper = self._keeper, LeaseKeeper(self._control, held, self._lost, self._tell)
        if previous is not None:
            previous.stop()
        return held

    def guard(self, on_lost: Callable[[], None]) -> None:
        """Workers start: from now on a loss calls `on_lost`, from another thread."""
        with self._lock:
            self._on_lost = on_lost

    def unguard(self) -> None:
        """Workers are gone. Until the next attempt, another agent of this launch may become the leader."""
        with self._lock:
            self._on_lost = None

    def _lost(self, evidence: str) -> None:
        with self._lock:
            if self._on_lost is None and self._handed_over():
                return
            self.lost = evidence
            if self._on_lost is not None:
                self._on_lost()

    def _handed_over(self) -> bool:
        try:
            newest = read_claim(self._control, current_epoch(self._control))
        except ControlError:
            return False
        return newest is not None and newest.owner == self._owner

    def release(self) -> None:
        if self._keeper is not None:
            self._keeper.release()
            self._keeper = None


NONCE = 16
HELLO = struct.Struct(">QQI32s")
"""Attempt, epoch, group rank, and a proof that they come from an agent of this run."""
ALIVE, GOODBYE = b"a", b"g"
HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a follower gives the leader; the leader gives less to a peer that does not prove itself."""


def _said(nonce: bytes, attempt: int, epoch: int, rank: int) -> tuple[bytes, ...]:
    """What a follower's proof covers: that it is this node of this attempt, in answer to this nonce."""
    return b"watch", nonce, struct.pack(">QQI", attempt, epoch, rank)


@dataclass
class _Peer:
    connection: socket.socket
    heard: float
    nonce: bytes
    address: str
    since: float = field(default_factory=time.monotonic)
    inbox: bytearray = field(default_factory=bytearray)
    rank: int | None = None


class LeaderWatch:
    """The leader's side: one connection from every other node of the attempt."""

    def __init__(
        self,
        secret: bytes,
        *,
        attempt: int,
        epoch: int,
        nodes: int,
        timeout: float,
        patience: float,
        address: str = "",
    ) -> None:
        """`patience`: how long a node may take for its first word; `address`: where the others connect."""
        self._secret, self._attempt, self._epoch = secret, attempt, epoch
        self._timeout, self._patience = timeout, patience
        self._awaited = set(range(1, nodes))
        self._began = time.monotonic()
        self._lost: dict[int, str] = {}
        self._left: set[int] = set()
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._server = listen(0, address)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="holdfast-watch", daemon=True)
        self._thread.start()

    def lost(self) -> dict[int, str]:
        """Group rank → how it was lost, for the nodes that are lost."""
        with self._lock:
            return dict(self._lost)

    @property
    def awaits(self) -> bool:
        """Whether a node has not connected yet."""
        return bool(self._awaited)

    def close(self) -> None:
        """End in order: say goodbye to the others."""
        self._stop.set()
        self._thread.join(2 * self._pause())
        with self._lock:
            for peer in self._peers.values():
                _farewell(peer.connection)
            self._peers.clear()
        self._server.close()
        self._selector.close()

    def _pause(self) -> float:
        return max(0.05, min(1.0, self._timeout / 6))

    def _run(self) -> None:
        beaten = time.monotonic()
        while not self._stop.is_set():
            for key, _ in self._selector.select(self._pause()):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._receive(key.fd)
            now = time.monotonic()
            if now - beaten > self._timeout:
                self._forgive(now)  # this process did not run for a while: nobody else fell silent
            if now - beaten >= self._pause():
                beaten = now
                self._beat(now)

    def _forgive(self, now: float) -> None:
        for peer in self._peers.values():
            peer.heard = now

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, address = self._server.accept()
            connection.setblocking(False)
            nonce = secrets.token_bytes(NONCE)
            peer = _Peer(connection, time.monotonic(), nonce, str(address[0]))
            with self._lock:
                self._peers[connection.fileno()] = peer
            self._selector.register(connection, selectors.EVENT_READ)
            connection.send(nonce)
        self._cut_strangers(time.monotonic())

    def _cut_strangers(self, now: float) -> None:
        """Cut those that say nothing, but never a peer that has just come or has proven itself."""
        strangers = {fd: (peer.address, peer.since) for fd, peer in self._peers.items() if peer.rank is None}
        for fd in to_cut(strangers, now):
            self._drop(fd, "")

    def _receive(self, fd: int) -> None:
        peer = self._peers.get(fd)
        if peer is None:
            return
        try:
            data = peer.connection.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            data = b""  # closed without reading all that we sent
        except OSError as error:
            self._drop(fd, error.strerror or str(error))
            return
        if not data:
            self._drop(fd, "its connection was closed")
            return
        peer.heard = time.monotonic()
        if peer.rank is not None:
            if GOODBYE in data:
                self._left.add(peer.rank)
            return
        peer.inbox += data
        if len(peer.inbox) >= HELLO.size:
            self._admit(fd, peer)

    def _admit(self, fd: int, peer: _Peer) -> None:
        attempt, epoch, rank, code = HELLO.unpack(peer.inbox[: HELLO.size])
        expected = (attempt, epoch) == (self._attempt, self._epoch) and rank in self._awaited
        if not expected or not proves(code, self._secret, *_said(peer.nonce, attempt, epoch, rank)):
            self._drop(fd, "")
            return
        peer.rank = rank
        self._awaited.discard(rank)

    def _drop(self, fd: int, why: str) -> None:
        with self._lock:
            peer = self._peers.pop(fd, None)
            if peer is None:
                return
            if peer.rank is not None and peer.rank not in self._left:
                self._lost.setdefault(peer.rank, why)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _beat(self, now: float) -> None:
        self._cut_strangers(now)
        for fd, peer in list(self._peers.items()):
            if peer.rank is not None and now - peer.heard > self._timeout:
                self._drop(fd, f"nothing was heard from it for {now - peer.heard:.0f} s")
            elif peer.rank is not None:
                try:
                    peer.connection.send(ALIVE)
                except BlockingIOError:
                    pass  # it does not read; if it does not write either, its time will run out
                except OSError as error:
                    self._drop(fd, error.strerror or str(error))
        if self._awaited and now - self._began > self._patience:
            with self._lock:
                for rank in self._awaited:
                    self._lost.setdefault(rank, f"it did not connect within {self._patience:g} s")
            self._awaited.clear()


class FollowerWatch:
    """A follower's side: watches whether the leader is still there."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, *, attempt: int, epoch: int, rank: int, timeout: float
    ) -> None:
        self._timeout = timeout
        self._stop = threading.Event()
        self._lost = ""
        self._left = False
        self._connection = socket.create_connection(address, timeout=min(timeout, HANDSHAKE_TIMEOUT))
        nonce = _read_exactly(self._connection, NONCE)
        proof = prove(secret, *_said(nonce, attempt, epoch, rank))
        self._connection.sendall(HELLO.pack(attempt, epoch, rank, proof))
        self._connection.settimeout(max(0.05, min(1.0, timeout / 6)))
        self._thread = threading.Thread(target=self._run, name="holdfast-watch", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str:
        """How the leader was lost; empty while it is there or has said goodbye."""
        return self._lost

    @property
    def left(self) -> bool:
        """Whether the leader has said goodbye."""
        return self._left

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2.0)
        _farewell(self._connection)

    def _run(self) -> None:
        heard = beaten = time.monotonic()
        pause = self._connection.gettimeout() or 1.0
        while not self._stop.is_set():
            try:
                data = self._connection.recv(4096)
                if not data:
                    self._end("its connection was closed")
                    return
                heard = time.monotonic()
                self._left = self._left or GOODBYE in data
            except TimeoutError:
                pass
            except OSError as error:
                self._end(error.strerror or str(error))
                return
            now = time.monotonic()
            if now - beaten > self._timeout:
                heard = now  # this process did not run for a while
            if now - heard > self._timeout:
                self._end(f"nothing was heard from it for {now - heard:.0f} s")
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # the other side sees it, if that way is open
                return
            if now - beaten < pause:
                continue
            beaten = now
            try:
                self._connection.send(ALIVE)
            except TimeoutError:
                pass
            except OSError as error:
                self._end(error.strerror or str(error))
                return

    def _end(self, why: str) -> None:
        if not self._left and not self._stop.is_set():
            self._lost = why


def _farewell(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(GOODBYE)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = connection.recv(size - len(found))
        if not data:
            raise ConnectionError("the leading agent closed the connection before the handshake")
        found += data
    return found
