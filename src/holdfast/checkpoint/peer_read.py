"""Reading shards from a peer's copy.

Nothing that is read here is verified here: whoever asked checks it against the manifest's digests, as it does
with every other source, and turns to the next source if they do not match.

Who reads on from there says so (`until`), and the next piece is asked for before this one has come. So the
peer never waits for the next question, and a piece is on its way while the one before is digested.
"""

from __future__ import annotations

import random
import time
from collections import deque

from holdfast.checkpoint.local_tier import CopyRecord
from holdfast.checkpoint.peer_messages import Copies, Data, Gone, ListCopies, Read
from holdfast.checkpoint.peer_wire import BusyError, Deadline, Line, LostLineError, call
from holdfast.control.directory import ControlDirectory
from holdfast.control.secret import run_secret
from holdfast.errors import PeerError

PIECE = 16 * 1024 * 1024
"""Asked for at a time: the copy is leased for as long as one answer takes."""
STILL = 30.0
"""Seconds without a byte after which a peer is not waited for any longer."""
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0


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
        """Requests that have not been answered yet; only ever the one that is read and the next."""

    def read_into(self, view: memoryview, *, checkpoint: str, path: str, offset: int, until: int = 0) -> None:
        """Fill the view from a file of a copy; PeerError if that cannot be done within the timeout.

        `until`: where in the file the next reads, which follow at once, will end.
        """
        deadline = Deadline.within(self._timeout, STILL)
        end = offset + view.nbytes
        until = max(until, end)

        def ask(at: int) -> Read | None:
            # A piece ends where this view does, so that the next view begins with one.
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
                    self._read(piece, request, following, deadline)  # once: the server may be another now
            at += request.length

    def copies(self) -> list[CopyRecord]:
        """The records of what the peer holds; they prove nothing."""
        deadline = Deadline.within(self._timeout)
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

    def _read(self, view: memoryview, request: Read, following: Read | None, deadline: Deadline) -> None:
        try:
            if self._asked and self._asked[0] != request:
                self.close()  # something else was expected to be read
            line = self._connected(deadline)
            for one in (request, following):
                if one is not None and one not in self._asked:
                    line.send(one, deadline)
                    self._asked.append(one)
            answer: Data | Gone = line.receive(Data | Gone, deadline)
            if isinstance(answer, Gone):
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

    def _connected(self, deadline: Deadline) -> Line:
        if self._line is None:
            if deadline.end <= time.monotonic():
                raise PeerError(
                    f"peer {self._address[0]}:{self._address[1]}: no time is left to connect to it"
                )
            self._line = self._call(deadline)
        return self._line

    def _call(self, deadline: Deadline) -> Line:
        """Where many read from one place after a loss, some have to wait for others."""
        pause = FIRST_PAUSE
        while True:
            try:
                return call(self._address, self._secret, self._run, deadline)[0]
            except BusyError:
                if deadline.left <= pause:
                    raise
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, LONGEST_PAUSE)
