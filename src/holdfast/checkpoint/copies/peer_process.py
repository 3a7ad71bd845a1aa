"""A place's peer server as a process: what it runs, and how the place leader starts and replaces it.

Guarantee: nothing here blocks, whatever the process does, except `close` for as long as it is told to. The
listening socket stays the leader's: a process that takes another's place has the same address, and who
connected in between is served by the next. After REPLACEMENTS deaths the socket is closed, so that peers
are refused at once and do not wait in vain.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from holdfast.checkpoint.copies.server import PeerServer
from holdfast.checkpoint.copies.tier import LocalTier
from holdfast.errors import PeerError
from holdfast.journal import JournalWriter
from holdfast.journal.events import Warned
from holdfast.process import Companion, leave_stopping_to_the_trainer, start_child
from holdfast.record import ControlDirectory, listen

# The process of a place's peer server, started by the place leader; without torch.
#
# It serves on a socket that its leader listens on and keeps, so that another process can take its place at
# the same address. A signal that asks a whole job to end does not end it. When its leader is gone or lets go
# of it, nobody new is let in, replicas that are on their way may arrive, for at most `linger` seconds, and it
# ends.


LOOK = 0.2
"""Seconds between looks at whether the leader is still there, and at whether anything is still on its way."""


class PeerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a peer process needs to know, given at its start."""

    control: str
    tier: str
    keep: int
    max_bytes: int
    linger: float
    attempt: int


def run(order: PeerOrder, listener: socket.socket, line: socket.socket, parent: int) -> int:
    tier = LocalTier.at(Path(order.tier))
    control = ControlDirectory.open(Path(order.control))
    with tier.in_use():
        journal = JournalWriter(control.journal, f"peer-{tier.place}", order.attempt)
        server = PeerServer(
            listener, control, tier, keep=order.keep, max_bytes=order.max_bytes, journal=journal
        )
        thread = threading.Thread(target=server.serve, name="holdfast-peer-server", daemon=True)
        thread.start()
        # A fork of the leader may still hold its end of the line: then only our parent tells.
        while os.getppid() == parent and thread.is_alive():
            if select.select([line], [], [], LOOK)[0]:
                break
        served = thread.is_alive()
        server.close_door()
        thread.join()
        listener.close()
        ends = time.monotonic() + order.linger
        while server.transfers and time.monotonic() < ends:
            time.sleep(LOOK / 4)
        server.stop()
        journal.close()
    return 0 if served else 1


def main() -> int:
    """`python -m holdfast.checkpoint.copies.peer_process <order> <listener> <line> <parent>`: by PeerHost
    only."""
    leave_stopping_to_the_trainer()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    order = msgspec.json.decode(sys.argv[1].encode(), type=PeerOrder)
    listener, line = (socket.socket(fileno=int(number)) for number in sys.argv[2:4])
    return run(order, listener, line, int(sys.argv[4]))


log = logging.getLogger("holdfast.checkpoint")

REPLACEMENTS = 3
MODULE = "holdfast.checkpoint.copies.peer_process"
ALONE = "127.0.0.1"
ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): which of ours would be used to go there? Nothing is sent."""


class PeerHost:
    """`start` once; `poll` every now and then; `close` at the end."""

    def __init__(
        self,
        *,
        control: ControlDirectory,
        tier: LocalTier,
        attempt: int,
        journal: JournalWriter,
        host: str,
        keep: int,
        max_bytes: int = 0,
        linger: float = 30.0,
    ) -> None:
        """Listens from here on. `host`: how peers reach this node, see `own_address`."""
        self._order = PeerOrder(
            control=str(control.path),
            tier=str(tier.path),
            keep=keep,
            max_bytes=max_bytes,
            linger=linger,
            attempt=attempt,
        )
        self._log = control.attempt(attempt) / f"peer-{tier.place}.log"
        self._journal = journal
        self._node = tier.record.node
        self._child: Companion | None = None
        self._replaced = 0
        try:
            self._listener: socket.socket | None = listen(0, host)
        except OSError as error:
            raise PeerError(f"node {self._node} cannot listen for its peers: {error}") from error
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        """What peers connect to; the same for as long as this lives."""

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Start the process; a failure is journalled, and training goes on without replicas here."""
        if self._listener is None:
            return
        listening = self._listener.fileno()
        try:
            self._child = Companion(lambda line: self._spawn(listening, line))
        except OSError as error:
            self._give_up(f"the peer server of node {self._node} could not be started: {error}")

    def _spawn(self, *passed: int) -> subprocess.Popen[bytes]:
        order = msgspec.json.encode(self._order).decode()
        arguments = [order, *map(str, passed), str(os.getpid())]
        return start_child(MODULE, *arguments, passed=passed, log=self._log, outlives=True)

    def poll(self) -> None:
        """Replace a process that has died."""
        if self._child is None or (code := self._child.code) is None:
            return
        self._child.hang_up()
        self._child = None
        if self._replaced >= REPLACEMENTS:
            self._give_up(
                f"the peer server of node {self._node} ended {self._replaced + 1} times (code {code}, "
                f"see {self._log})"
            )
            return
        self._replaced += 1
        self._warn(
            f"the peer server of node {self._node} ended with code {code} (see {self._log}); it is started "
            f"anew, {self._replaced} of {REPLACEMENTS}"
        )
        self.start()

    def close(self, timeout: float = 0.0) -> None:
        """Let nobody new in, and wait for the process; replicas on their way may arrive without us."""
        self._close_door()
        if self._child is not None:
            self._child.hang_up()
            self._child.wait(timeout)
            self._child = None

    def _close_door(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _give_up(self, why: str) -> None:
        self._close_door()
        self._warn(f"{why}; it takes no replicas and gives out none before the next start")

    def _warn(self, message: str) -> None:
        self._journal.write(Warned(message=message))
        log.warning("holdfast: %s", message)


def own_address(towards: str) -> str:
    """This host's address as its peers reach it: the one it would use to go `towards` a host (MASTER_ADDR).

    A name that means this host itself is often one of the loopback here, which is of no use to others; then
    it is the address that leads elsewhere. 127.0.0.1 when there is nobody to reach.
    """
    if not towards or towards == "localhost":
        return ALONE
    found = _address_to(towards)
    if not found or (_is_loopback(found) and not _is_loopback(towards)):
        found = _address_to(ELSEWHERE) or found
    return found or ALONE


def _address_to(host: str) -> str:
    """Ours on the way to a host; empty if there is no way."""
    try:
        ways = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in ways:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: only looks the route up
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
