"""A place's peer server: it takes replicas of other places' copies, and gives out what this place holds.

It runs as a separate process, without torch, on a socket that the place leader (`PeerHost`) listens on and
keeps: a process that replaces another has the same address, and serves those who connected in between. After
REPLACEMENTS deaths the socket is closed, so that peers are refused at once and do not wait in vain.

Guarantees: a replica counts here only once its bytes, where they lie, have the digests that its sender
announced. A connection that has not proven to belong to the run is cut off after a few seconds, and earlier
if there are many of them: those that have been silent longest go first, never a proven or a new one. A
connection that is slow, stalls or talks nonsense costs its own thread until its deadline, and nobody else
anything. The leader never waits for its process, except in `close` for as long as it is told to.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.checkpoint.copies import receipt
from holdfast.checkpoint.copies.receipt import Incoming, NoRoomError, RunningDigests
from holdfast.checkpoint.copies.tier import CopyFile, CopyRecord, LocalTier
from holdfast.checkpoint.copies.wire import (
    HANDSHAKE_TIMEOUT,
    Announcement,
    Copies,
    Data,
    GoOn,
    Held,
    Line,
    ListCopies,
    Offer,
    PeerGone,
    Read,
    Refused,
    Request,
    TransferDeadline,
    admit,
    objection,
)
from holdfast.errors import PeerError
from holdfast.journal import Event, JournalWriter
from holdfast.journal.events import CopiesDropped, CopyQuarantined, Warned
from holdfast.process import (
    BESIDE,
    Companion,
    Packets,
    leave_stopping_to_the_trainer,
    start_child,
    step_aside,
)
from holdfast.record import ControlDirectory, listen, run_secret, to_cut

log = logging.getLogger("holdfast.checkpoint")

MOST_CONNECTIONS = 1024
"""Connections of peers that have proven themselves."""
IDLE = 120.0
"""Seconds that a connection may stay without a request."""
PATIENCE = 30.0
"""Seconds for which a transfer may stand still."""
PIECE = 4 * 1024 * 1024
LOOK = 0.2
"""Seconds between checks of whether the leader is still there, and whether anything is still on its way."""
QUIET = 1.0
"""Seconds without a byte after which a transfer that somebody has announced again is cut."""


Known = dict[tuple[str, str], tuple[CopyRecord, CopyFile]]
"""By checkpoint and path: what a connection has read from. Whether it still counts is checked every time."""


class _Transfer:
    """A replica that is on its way in."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.ended = threading.Event()
        self.moved = time.monotonic()
        """When the last bytes came."""


class PeerServer:
    """`serve` runs until `close_door` or `stop`, in any thread. The socket stays the caller's."""

    def __init__(
        self,
        listener: socket.socket,
        control: ControlDirectory,
        tier: LocalTier,
        *,
        keep: int,
        max_bytes: int = 0,
        journal: JournalWriter | None = None,
        patience: float = PATIENCE,
        handshake: float = HANDSHAKE_TIMEOUT,
    ) -> None:
        self._listener = listener
        self._run = control.run_id
        self._secret = run_secret(control)
        self._tier = tier
        self._keep = max(keep, 1)
        self._max_bytes = max_bytes
        self._journal = journal
        self._patience = patience
        self._handshake = handshake
        self._closed = threading.Event()
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self._lines: dict[Line, threading.Thread] = {}
        self._unproven: dict[Line, tuple[str, float]] = {}
        """From where, and since when."""
        self._transfers: dict[tuple[str, int], _Transfer] = {}
        """By checkpoint and rank."""

    @property
    def transfers(self) -> int:
        """Replicas that are on their way in."""
        with self._guard:
            return len(self._transfers)

    @property
    def connections(self) -> int:
        with self._guard:
            return len(self._lines)

    def serve(self) -> None:
        receipt.sweep(self._tier)
        self._listener.setblocking(False)
        ready = select.poll()
        ready.register(self._listener, select.POLLIN)
        while not self._closed.is_set():
            if ready.poll(LOOK * 1000):
                self._accept()

    def close_door(self) -> None:
        """Let nobody new in: `serve` returns, and the existing connections continue."""
        self._closed.set()

    def stop(self, timeout: float = 5.0) -> None:
        """Cut every connection, and wait for their threads; what is not verified by then does not count."""
        self.close_door()
        self._stopping.set()
        with self._guard:
            lines = list(self._lines.items())
        for line, _ in lines:
            line.cut()
        deadline = time.monotonic() + timeout
        for _, thread in lines:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return  # the server before this one, which has the same socket, was quicker
        except OSError as error:
            log.warning("holdfast: the peer server cannot accept a connection: %s", error)
            self._closed.wait(LOOK)
            return
        line = Line(connection, f"{address[0]}:{address[1]}")
        with self._guard:
            if len(self._lines) - len(self._unproven) >= MOST_CONNECTIONS:
                line.close()  # the peer tries again
                return
            self._unproven[line] = (str(address[0]), time.monotonic())
            for silent in to_cut(self._unproven, time.monotonic()):
                silent.cut()  # its own thread notices
            thread = threading.Thread(
                target=self._converse, args=(line,), name="holdfast-peer-line", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread left
                log.warning("holdfast: %s cannot be served: %s", line.who, error)
                del self._unproven[line]
                line.close()
                return
            self._lines[line] = thread

    def _converse(self, line: Line) -> None:
        known: Known = {}
        try:
            self._admit(line)
            while not self._stopping.is_set():
                self._answer(line, line.receive(Request, TransferDeadline.within(IDLE)), known)
        except PeerError as error:
            log.info("holdfast: %s", error)
        except Exception:
            log.exception("holdfast: a connection from %s ended with an error", line.who)
        finally:
            with self._guard:
                self._lines.pop(line, None)
            line.close()

    def _admit(self, line: Line) -> None:
        place = self._tier.record
        try:
            deadline = TransferDeadline.within(self._handshake)
            admit(line, self._secret, self._run, place=place.place, node=place.node, deadline=deadline)
        finally:
            with self._guard:
                self._unproven.pop(line, None)

    def _answer(self, line: Line, request: Request, known: Known) -> None:
        if isinstance(request, Offer):
            deadline = TransferDeadline.within(request.seconds, self._patience)
            if why := objection(request.replica):
                line.send(Refused(why=why), deadline)
                return
            with self._transfer(request.replica, line, deadline) as transfer:
                self._take(transfer, request.replica, deadline)
        elif isinstance(request, Read):
            self._give(line, request, known)
        elif isinstance(request, ListCopies):
            line.send(Copies(self._tier.records()), TransferDeadline.within(self._patience))

    # --- taking ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transfer(self, replica: Announcement, line: Line, deadline: TransferDeadline) -> Iterator[_Transfer]:
        """One transfer of the same replica at a time.

        A peer that announces it again has lost its earlier connection, though this side may not know that
        yet; if the earlier transfer still moves, it is waited for.
        """
        key, transfer = (replica.checkpoint, replica.rank), _Transfer(line)
        with self._guard:
            before = self._transfers.get(key)
            self._transfers[key] = transfer
        try:
            while before is not None and not before.ended.wait(LOOK / 4):
                if time.monotonic() - before.moved > QUIET:
                    before.line.cut()
                if deadline.left <= 0:
                    raise PeerError(f"{line.who}: {replica} is being sent by somebody else")
            yield transfer
        finally:
            transfer.ended.set()
            with self._guard:
                if self._transfers.get(key) is transfer:
                    del self._transfers[key]

    def _take(self, transfer: _Transfer, replica: Announcement, deadline: TransferDeadline) -> None:
        tier, line = self._tier, transfer.line
        receipt.sweep(tier, rank=replica.rank, keep=replica)
        if (known := tier.find(replica.checkpoint, replica.rank)) is not None:
            if self._is_held(known, replica):
                line.send(Held(tier.place), deadline)
                return
            if known.kind == "own":
                why = f"{replica}: this place has its own copy of that, under manifest {known.manifest}"
                line.send(Refused(why=why), deadline)
                return
        try:
            incoming = self._begin(replica)
        except (NoRoomError, OSError) as error:
            line.send(Refused(why=f"{replica}: {error}"), deadline)
            return
        try:
            self._receive(transfer, incoming, deadline)
        finally:
            incoming.close()

    def _begin(self, replica: Announcement) -> Incoming:
        try:
            return receipt.begin(self._tier, replica, max_bytes=self._max_bytes)
        except NoRoomError as error:
            # The oldest one, which would be dropped after this one, is dropped before it; never the last one.
            dropped = receipt.drop_older(self._tier, replica.rank, None, self._keep - 1)
            if not dropped:
                raise
            self._tell(
                CopiesDropped(
                    node=self._tier.record.node,
                    checkpoints=[record.checkpoint for record in dropped],
                    reasons=[f"a replica of rank {replica.rank}, to make room: {error}" for _ in dropped],
                    bytes=sum(record.nbytes for record in dropped),
                )
            )
            return receipt.begin(self._tier, replica, max_bytes=self._max_bytes)

    def _receive(self, transfer: _Transfer, incoming: Incoming, deadline: TransferDeadline) -> None:
        line, replica, at = transfer.line, incoming.replica, incoming.there
        line.send(GoOn(at), deadline)
        digests = RunningDigests(incoming.view, replica.files, at)
        try:
            while at < replica.size:
                with incoming.view[at : at + PIECE] as piece:
                    at += line.receive_some(piece, deadline)
                transfer.moved = time.monotonic()
                digests.arrived(at)
            wrong = digests.finish()
        except BaseException:
            digests.stop()
            incoming.touch()
            raise
        if wrong is not None:
            incoming.discard()
            path, expected, found = wrong
            why = (
                f"{replica}: {path} arrived with digest {found}, announced as {expected}; it was thrown away"
            )
            line.send(Refused(why=why, altered=path), deadline)
            return
        try:
            record = incoming.commit()
        except OSError as error:
            line.send(Refused(why=f"{replica}: its record cannot be written: {error}"), deadline)
            return
        incoming.close()  # unlocked before anybody hears of it and wants to read it
        line.send(Held(self._tier.place), deadline)
        receipt.drop_older(self._tier, replica.rank, record, self._keep)

    def _is_held(self, known: CopyRecord, replica: Announcement) -> bool:
        """Whether a copy here is the announced one; a record proves nothing, so its bytes are digested."""
        files = [CopyFile(file.path, file.start, file.size, file.digest) for file in replica.files]
        if known.manifest != replica.manifest or known.files != files:
            return False
        with self._tier.lease(known) as descriptor:
            if descriptor is None:
                return False
            if os.fstat(descriptor).st_size < replica.size:
                wrong = f"its image has {os.fstat(descriptor).st_size} bytes, expected {replica.size}"
            else:
                with receipt.mapped(descriptor, 0, replica.size) as view:
                    found = receipt.wrong_file(view, replica.files)
                if found is None:
                    return True
                wrong = f"{found[0]} has digest {found[2]}, expected {found[1]}"
            self._tier.quarantine(known, wrong)
            self._tell(
                CopyQuarantined(
                    checkpoint=known.checkpoint,
                    node=self._tier.record.node,
                    kind=known.kind,
                    reasons=[f"rank {known.rank}: {wrong}"],
                )
            )
            return False

    def _tell(self, event: Event) -> None:
        log.warning("holdfast: %s", event)
        if self._journal is not None:
            self._journal.write(event)

    # --- giving ---------------------------------------------------------------------------------------------

    def _give(self, line: Line, request: Read, known: Known) -> None:
        deadline = TransferDeadline.within(self._patience)
        key = (request.checkpoint, request.path)
        if key in known and self._give_from(line, request, *known[key], deadline):
            return
        if (found := self._find(request)) is not None:
            known[key] = found
            if self._give_from(line, request, *found, deadline):
                return
        line.send(PeerGone(f"this place holds no copy of {request.path} of {request.checkpoint}"), deadline)

    def _give_from(
        self, line: Line, request: Read, record: CopyRecord, file: CopyFile, deadline: TransferDeadline
    ) -> bool:
        """False: the copy no longer stands."""
        end = request.offset + request.length
        if end > file.size:
            line.send(PeerGone(f"{file.path} has {file.size} bytes; {end} were asked for"), deadline)
            return True
        with self._tier.lease(record) as descriptor:
            if descriptor is None or os.fstat(descriptor).st_size < file.start + end:
                return False
            line.send(Data(request.length), deadline)
            # Copied as it is sent: what sendfile queues is the image's own memory, and that may be taken back
            # before the peer has read the last of it.
            with receipt.mapped(descriptor, file.start + request.offset, request.length) as view:
                line.send_bytes(view, deadline)
            return True

    def _find(self, request: Read) -> tuple[CopyRecord, CopyFile] | None:
        for record in self._tier.records():
            if record.checkpoint == request.checkpoint:
                for file in record.files:
                    if file.path == request.path:
                        return record, file
        return None


# The server as a process. A signal that asks a whole job to end does not end it. When its leader is gone or
# lets go of it, it lets nobody new in, lets replicas that are on their way arrive, for at most `linger`
# seconds, and ends.


class PeerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a peer process needs to know, given at its start."""

    control: str
    tier: str
    keep: int
    max_bytes: int
    linger: float
    attempt: int


def run(order: PeerOrder, listener: socket.socket, line: Packets[None], parent: int) -> int:
    tier = LocalTier.at(Path(order.tier))
    control = ControlDirectory.open(Path(order.control))
    with tier.in_use():
        journal = JournalWriter(control.journal, f"peer-{tier.place}", order.attempt)
        server = PeerServer(
            listener, control, tier, keep=order.keep, max_bytes=order.max_bytes, journal=journal
        )
        thread = threading.Thread(target=server.serve, name="holdfast-peer-server", daemon=True)
        thread.start()
        # A fork of the leader may still hold its end of the line: then only our parent's id tells.
        while os.getppid() == parent and thread.is_alive():
            if line.wait(LOOK):
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
    """`python -m holdfast.checkpoint.copies.peer_process <order> <listener> <line> <parent>`: started by
    PeerHost only."""
    leave_stopping_to_the_trainer()
    step_aside(BESIDE)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    order = msgspec.json.decode(sys.argv[1].encode(), type=PeerOrder)
    listener = socket.socket(fileno=int(sys.argv[2]))
    return run(order, listener, Packets.at(int(sys.argv[3]), None), int(sys.argv[4]))


REPLACEMENTS = 3
MODULE = "holdfast.checkpoint.copies.peer_process"
ALONE = "127.0.0.1"
ELSEWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737), to see which of ours leads there. Nothing is sent."""


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
        self._child: Companion[Packets[None]] | None = None
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
            self._child = Companion(lambda line: self._spawn(listening, line), Packets.pair(None))
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
        self._warn(f"{why}; it takes no replicas and gives out none until the next start")

    def _warn(self, message: str) -> None:
        self._journal.write(Warned(message=message))
        log.warning("holdfast: %s", message)


def own_address(towards: str) -> str:
    """This host's address as its peers reach it: the one it would use to go `towards` a host (MASTER_ADDR).

    A name for this host itself often means a loopback address here, which is of no use to others; then it is
    the address that leads elsewhere. 127.0.0.1 if there is nobody to reach.
    """
    if not towards or towards == "localhost":
        return ALONE
    found = _address_to(towards)
    if not found or (_is_loopback(found) and not _is_loopback(towards)):
        found = _address_to(ELSEWHERE) or found
    return found or ALONE


def _address_to(host: str) -> str:
    """Our address on the way to a host; empty if there is no way."""
    try:
        ways = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in ways:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # for a datagram socket this only looks up the route
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
