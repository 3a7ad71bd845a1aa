"""Reading shards from a peer's copy, and sending replicas to peers.

Guarantee: what is announced is the digests that were taken at the source when the checkpoint was saved.
They are never taken again from what is sent: that would give a right digest to a byte that was altered in
this node's memory since then. So the receiver finds such a byte, whether it was altered here, on the way or
there.

The image stays unchanged while it is sent (a lease), so the sender must come to an end: by its deadline, even
if the peer stalls. A cut transfer continues from where the peer has verified it.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import deque

from holdfast.checkpoint.copies.receipt import mapped, wrong_file
from holdfast.checkpoint.copies.tier import CopyRecord, LocalTier
from holdfast.checkpoint.copies.wire import (
    AnnouncedChunk,
    AnnouncedFile,
    Announcement,
    BusyError,
    Copies,
    Data,
    GoOn,
    Held,
    Line,
    ListCopies,
    LostLineError,
    Offer,
    PeerGone,
    Read,
    Refused,
    TransferDeadline,
    call,
    objection,
)
from holdfast.checkpoint.format import FileEntry
from holdfast.errors import AlteredCopyError, PeerError
from holdfast.record import ControlDirectory, run_secret

# Reading shards from a peer's copy.
#
# Nothing that is read here is verified here: the caller checks it against the manifest's digests, as it does
# with every other source, and turns to the next source if they do not match.
#
# A caller that will read on from there says so (`until`), and the next piece is asked for before this one has
# arrived. So the peer never waits for the next request, and a piece is on its way while the previous one is
# digested.


PIECE = 16 * 1024 * 1024
"""Bytes asked for at a time: the copy is leased for as long as one answer takes."""
STILL = 30.0
"""Seconds without a byte after which a peer is not waited for any longer."""
FIRST_READ_PAUSE = 0.05
LONGEST_READ_PAUSE = 1.0


class GoneError(PeerError):
    """The peer answers, and holds no such copy."""


class PeerReader:
    """One connection to one peer's server, made when it is needed. Not for several threads at once."""

    def __init__(self, address: tuple[str, int], control: ControlDirectory, *, timeout: float) -> None:
        self._address = address
        self._run = control.run_id
        self._secret = run_secret(control)
        self._timeout = timeout
        self._line: Line | None = None
        self._asked: deque[Read] = deque()
        """Requests that have not been answered yet; only ever the one being read and the next."""

    def read_into(self, view: memoryview, *, checkpoint: str, path: str, offset: int, until: int = 0) -> None:
        """Fill the view from a file of a copy; PeerError if that cannot be done within the timeout.

        `until`: where in the file the next reads, which follow at once, will end.
        """
        deadline = TransferDeadline.within(self._timeout, STILL)
        end = offset + view.nbytes
        until = max(until, end)

        def ask(at: int) -> Read | None:
            # A piece ends where this view does, so that the next view begins with a new one.
            stop = min(end if at < end else until, at + PIECE)
            return Read(checkpoint=checkpoint, path=path, offset=at, length=stop - at) if stop > at else None

        at = offset
        while (request := ask(at)) is not None and at < end:
            following = ask(at + request.length)
            with view[at - offset : at - offset + request.length] as piece:
                try:
                    self._read(piece, request, following, deadline)
                except LostLineError:
                    if deadline.left <= 0:
                        raise
                    self._read(piece, request, following, deadline)  # once: there may be a new server now
            at += request.length

    def copies(self) -> list[CopyRecord]:
        """The records of what the peer holds; they prove nothing."""
        deadline = TransferDeadline.within(self._timeout)
        try:
            line = self._connected(deadline)
            line.send(ListCopies(), deadline)
            answer: Copies = line.receive(Copies, deadline)
        except BaseException:
            self.close()
            raise
        return answer.records

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        self._asked.clear()

    def _read(
        self, view: memoryview, request: Read, following: Read | None, deadline: TransferDeadline
    ) -> None:
        try:
            if self._asked and self._asked[0] != request:
                self.close()  # something else was expected to be read
            line = self._connected(deadline)
            for read in (request, following):
                if read is not None and read not in self._asked:
                    line.send(read, deadline)
                    self._asked.append(read)
            answer: Data | PeerGone = line.receive(Data | PeerGone, deadline)
            if isinstance(answer, PeerGone):
                raise GoneError(f"{line.who}: {answer.why}")
            if answer.length != request.length:
                raise PeerError(f"{line.who} offered {answer.length} bytes, expected {request.length}")
            line.receive_into(view, deadline)
            self._asked.popleft()
        except BaseException as error:
            # After a cut answer nobody knows where the next one begins.
            self.close()
            if isinstance(error, PeerError):
                what = f"{request.path} of {request.checkpoint} at byte {request.offset}"
                raise type(error)(f"{what} was not read: {error}") from error
            raise

    def _connected(self, deadline: TransferDeadline) -> Line:
        if self._line is None:
            if deadline.end <= time.monotonic():
                raise PeerError(
                    f"peer {self._address[0]}:{self._address[1]}: no time is left to connect to it"
                )
            self._line = self._call(deadline)
        return self._line

    def _call(self, deadline: TransferDeadline) -> Line:
        """Connect. Where many read from one place after a loss, some have to wait for others."""
        pause = FIRST_READ_PAUSE
        while True:
            try:
                return call(self._address, self._secret, self._run, deadline)[0]
            except BusyError:
                if deadline.left <= pause:
                    raise
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, LONGEST_READ_PAUSE)


log = logging.getLogger("holdfast.checkpoint")

TRIES = 5
"""Connections in a row without progress after which the transfer is given up."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 3.0
PATIENCE = 15.0
"""Seconds for which a peer may take nothing before the connection is given up."""


def send_replica(
    address: tuple[str, int],
    control: ControlDirectory,
    tier: LocalTier,
    record: CopyRecord,
    files: list[FileEntry],
    *,
    deadline: float,
) -> str:
    """Have a peer hold this copy too; returns the id of its place. `deadline` is on the monotonic clock.

    PeerError: it does not hold it. AlteredCopyError: because the copy here is no longer what it was.
    """
    replica = announcement(record, files)
    host, port = address
    if why := objection(replica):
        raise PeerError(f"{replica} cannot be sent to {host}:{port}: {why}")
    with tier.lease(record) as descriptor:
        if descriptor is None:
            raise PeerError(f"{replica}: the copy here was taken back before it was sent to {host}:{port}")
        if os.fstat(descriptor).st_size < replica.size:
            raise AlteredCopyError(
                f"{replica}: its image here has {os.fstat(descriptor).st_size} bytes, expected {replica.size}"
            )
        return _Sending(address, control, replica, descriptor, deadline).run()


def announcement(record: CopyRecord, files: list[FileEntry]) -> Announcement:
    """A copy's files where they lie, with the digests of their chunks; PeerError if the two do not fit."""
    entries = {entry.path: entry for entry in files}
    announced = []
    for file in sorted(record.files, key=lambda file: file.start):
        entry = entries.get(file.path)
        if entry is None or (entry.size, entry.digest) != (file.size, file.digest):
            raise PeerError(
                f"{record.checkpoint}, rank {record.rank}: the record of the copy does not fit "
                f"the manifest's entry of {file.path}; it was not sent"
            )
        chunks = [AnnouncedChunk(chunk.offset, chunk.length, chunk.digest) for chunk in entry.chunks]
        announced.append(AnnouncedFile(file.path, file.start, file.size, file.digest, chunks))
    return Announcement(
        checkpoint=record.checkpoint, manifest=record.manifest, rank=record.rank, files=announced
    )


class _Sending:
    def __init__(
        self,
        address: tuple[str, int],
        control: ControlDirectory,
        replica: Announcement,
        descriptor: int,
        deadline: float,
    ) -> None:
        self._address = address
        self._run = control.run_id
        self._secret = run_secret(control)
        self._replica = replica
        self._descriptor = descriptor
        self._deadline = TransferDeadline(deadline, PATIENCE)
        self._furthest = 0
        self._failed = 0
        """Tries since the peer last got further."""
        self._arrived_wrong = False

    def run(self) -> str:
        tries = 0
        while True:
            try:
                return self._try()
            except LostLineError as error:
                tries += 1
                self._failed += not isinstance(error, BusyError)  # a busy peer is only waited for
                pause = min(FIRST_PAUSE * 2 ** min(tries, 10), LONGEST_PAUSE)
                over = time.monotonic() + pause >= self._deadline.end
                if self._failed >= TRIES or over:
                    why = "its time is over" if over else f"{self._failed} tries brought it no further"
                    raise PeerError(f"{self._replica} was not sent, {why}: {error}") from error
                log.info("holdfast: %s: %s; trying again", self._replica, error)
                time.sleep(pause)

    def _try(self) -> str:
        line, welcome = call(self._address, self._secret, self._run, self._deadline)
        try:
            seconds = max(self._deadline.end - time.monotonic(), 0.001)
            line.send(Offer(replica=self._replica, seconds=seconds), self._deadline)
            # The peer may first have to digest what it has.
            whole = TransferDeadline(self._deadline.end)
            answer: GoOn | Held | Refused = line.receive(GoOn | Held | Refused, whole)
            if isinstance(answer, GoOn):
                offset, size = answer.offset, self._replica.size
                if offset > size:
                    raise PeerError(f"{line.who} asked for byte {offset} of an image of {size}")
                if offset > self._furthest:
                    self._furthest, self._failed = offset, 0
                line.send_file(self._descriptor, offset, size - offset, self._deadline)
                answer = line.receive(Held | Refused, whole)
            if isinstance(answer, Refused):
                raise self._refused(line.who, answer)
            return welcome.place
        finally:
            line.close()

    def _refused(self, who: str, answer: Refused) -> PeerError:
        text = f"{who} refused {answer.why}"
        if not answer.altered:
            return PeerError(text)
        # Only now is the image looked at again, to tell who is to blame. The verdict on the replica stands.
        size = self._replica.size
        with mapped(self._descriptor, 0, size) as view:
            found = wrong_file(view, self._replica.files)
        if found is not None:
            path, expected, digest = found
            return AlteredCopyError(
                f"{text}. The copy here is altered: {path} has digest {digest}, {expected} when it was saved"
            )
        text = f"{text}. The copy here is right: its bytes were altered on the way or at the peer"
        if self._arrived_wrong:
            return PeerError(f"{text}, twice")
        self._arrived_wrong = True
        return LostLineError(text)
