"""Peers that are strangers, stall, vanish or talk nonsense: each costs its deadline and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.checkpoint.copies import peer_process, peers
from holdfast.checkpoint.copies.peers import PeerReader, announcement
from holdfast.checkpoint.copies.wire import (
    MOST_FRAME,
    GoOn,
    Greeting,
    Held,
    Line,
    LostLineError,
    Offer,
    PeerHello,
    Refused,
    TransferDeadline,
    Welcome,
    admit,
    call,
)
from holdfast.errors import PeerError
from holdfast.record.directory import ControlDirectory
from holdfast.record.secret import prove, run_secret
from kit.harness import job, wait_until
from kit.nodes.peering import MIB, Lab, await_arrival, holds, left, proxy, send, sender


def frame(message: Any) -> bytes:
    body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


def heard(connection: socket.socket, kind: Any) -> Any:
    """The next message on a bare socket."""
    connection.settimeout(5)
    (length,) = struct.unpack(">I", connection.recv(4, socket.MSG_WAITALL))
    return msgspec.msgpack.decode(connection.recv(length, socket.MSG_WAITALL), type=kind)


def closed(connection: socket.socket, within: float = 5.0) -> bool:
    """Whether the other side hangs up, with nothing more to say."""
    connection.settimeout(within)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def proven(lab: Lab, port: int) -> tuple[Line, Welcome]:
    return call(("127.0.0.1", port), run_secret(lab.control), lab.control.run_id, TransferDeadline.within(5))


# --- strangers at the server --------------------------------------------------------------------------------


def _wrong_secret(lab: Lab, nonce: bytes) -> bytes:
    ours, run = b"c" * 32, lab.control.run_id
    return frame(PeerHello(run, ours, prove(b"guessed", b"holdfast peer client", run.encode(), nonce, ours)))


def _wrong_run(lab: Lab, nonce: bytes) -> bytes:
    ours, run = b"c" * 32, "another"
    proof = prove(run_secret(lab.control), b"holdfast peer client", run.encode(), nonce, ours)
    return frame(PeerHello(run, ours, proof))


def _its_own_proof(lab: Lab, nonce: bytes) -> bytes:
    """What a server says of itself, played back to it."""
    ours, run = b"c" * 32, lab.control.run_id
    proof = prove(run_secret(lab.control), b"holdfast peer server", run.encode(), nonce, ours)
    return frame(PeerHello(run, ours, proof))


STRANGERS: dict[str, Callable[[Lab, bytes], bytes]] = {
    "garbage": lambda lab, nonce: b"\0\0\0\x08" + os.urandom(8),
    "another protocol": lambda lab, nonce: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge length": lambda lab, nonce: b"\xff\xff\xff\xff" + b"x" * 64,
    "a frame for those who are in": lambda lab, nonce: struct.pack(">I", 8192) + b"x" * 8192,
    "nothing": lambda lab, nonce: b"",
    "half a message": lambda lab, nonce: b"\0\0\0\x40abc",
    "a guessed secret": _wrong_secret,
    "another run": _wrong_run,
    "the server's own proof": _its_own_proof,
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_cut_off_and_told_nothing(lab: Lab, kind: str) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    with lab.server(theirs, handshake=0.4) as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            nonce = heard(stranger, Greeting).nonce
            stranger.sendall(STRANGERS[kind](lab, nonce))
            assert closed(stranger, 3.0)
        wait_until(lambda: server.connections == 0, 3, "its thread ends")
        assert send(lab, port, ours, lab.copy(ours)) == theirs.place, "others are served"


def test_a_handshake_that_was_overheard_cannot_be_used_again(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    with lab.server(theirs) as (_, port), proxy(port) as between:
        send(lab, between.port, ours, copy)
        said = between.heard[0]
        (length,) = struct.unpack(">I", said[:4])
        with socket.create_connection(("127.0.0.1", port)) as replayer:
            heard(replayer, Greeting)
            replayer.sendall(said[: 4 + length])
            assert closed(replayer)


def test_sixty_four_who_say_nothing_keep_no_peer_out_and_do_not_stay(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    with lab.server(theirs, handshake=1.0) as (server, port), contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(64)]
        for stranger in strangers:
            heard(stranger, Greeting)
        began = time.monotonic()
        send(lab, port, ours, copy)
        assert time.monotonic() - began < 0.9, "it did not have to wait until they were cut off"
        assert all(closed(stranger) for stranger in strangers)
        wait_until(lambda: server.connections == 0, 10, "nothing of them is left")
    assert holds(theirs, copy[0])


def test_who_finds_a_server_busy_waits_for_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss many read from one place: the more than it takes at a time are served a little later."""
    monkeypatch.setattr(peer_process, "MOST_CONNECTIONS", 2)
    ours = lab.place("a")
    record, files = lab.copy(ours)
    data = ours.image(record).read_bytes()

    def read(number: int) -> bool:
        reader = PeerReader(("127.0.0.1", port), lab.control, timeout=10)
        buffer = bytearray(1000)
        reader.read_into(memoryview(buffer), checkpoint=record.checkpoint, path=files[0].path, offset=number)
        reader.close()
        return buffer == data[number : number + 1000]

    with lab.server(ours) as (_, port), ThreadPoolExecutor(12) as pool:
        assert all(pool.map(read, range(12)))


def test_one_who_is_in_and_sends_nonsense_costs_only_its_own_connection(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    with lab.server(theirs) as (server, port):
        for said in (frame(b"\xc1nonsense"), frame({"type": "drop all"}), struct.pack(">I", MOST_FRAME + 1)):
            line, _ = proven(lab, port)
            line.send_bytes(memoryview(said), TransferDeadline.within(5))
            with pytest.raises(LostLineError):
                line.receive(Held, TransferDeadline.within(5))
            line.close()
        bad = msgspec.structs.replace(announcement(*copy), checkpoint="../../etc")
        line, _ = proven(lab, port)
        line.send(Offer(replica=bad, seconds=5.0), TransferDeadline.within(5))
        answer: Refused = line.receive(Refused, TransferDeadline.within(5))
        assert "is not a checkpoint's name" in answer.why
        line.close()
        wait_until(lambda: server.connections == 0, 3, "their threads end")
        assert theirs.records() == []
        assert list(theirs.images.iterdir()) == []
        send(lab, port, ours, copy)


def test_an_announcement_that_is_never_followed_by_bytes_leaves_no_record(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    with lab.server(theirs, patience=0.3) as (server, port):
        line, _ = proven(lab, port)
        line.send(Offer(replica=announcement(*copy), seconds=60.0), TransferDeadline.within(5))
        assert line.receive(GoOn, TransferDeadline.within(5)) == GoOn(0)
        wait_until(lambda: server.transfers == 0, 3, "it is given up")
        assert theirs.records() == []
        line.close()


# --- a server that is none ----------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_server(serve: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[bytes]]]:
    """A listener that does to each connection what it is told; its port, and what it got afterwards."""
    got: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError, PeerError):
                    connection.settimeout(3)
                    serve(connection)
                    connection.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        got.append(connection.recv(65536))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], got
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        listener.close()
        assert not thread.is_alive()


def test_nothing_is_sent_to_a_server_that_does_not_know_the_secret(lab: Lab) -> None:
    ours = lab.place("a")
    copy = lab.copy(ours)
    nonce = b"s" * 32

    def serve(connection: socket.socket) -> None:
        connection.sendall(frame(Greeting(1, nonce)))
        hello = heard(connection, PeerHello)
        # The client's own proof, played back.
        connection.sendall(frame(Welcome(hello.proof, "0" * 12, "fake")))
        connection.recv(1)

    with fake_server(serve) as (port, got):
        with pytest.raises(PeerError, match="did not prove that it belongs to run"):
            send(lab, port, ours, copy)
        with pytest.raises(PeerError, match="did not prove"):
            PeerReader(("127.0.0.1", port), lab.control, timeout=3).copies()
    assert not any(got)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"SSH-2.0-x\r\n" * 4, "announced a record of"),
        (frame(b"\xc1"), "not a message"),
        (frame(Greeting(2, b"s" * 32)), "use the same release"),
        (frame(Greeting(1, b"")), "nonce of 0 bytes"),
    ],
)
def test_a_server_that_talks_something_else_is_named_with_the_reason(lab: Lab, said: bytes, why: str) -> None:
    ours = lab.place("a")
    with fake_server(lambda connection: connection.sendall(said)) as (port, _):
        with pytest.raises(PeerError, match=why) as told:
            send(lab, port, ours, lab.copy(ours))
        assert f"127.0.0.1:{port}" in str(told.value)


def test_nobody_there_is_tried_a_few_times_and_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FIRST_PAUSE", 0.01)
    ours = lab.place("a")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerError, match=rf"5 tries brought it no further: peer 127.0.0.1:{port} cannot be"):
        send(lab, port, ours, lab.copy(ours))


def test_a_peer_that_stalls_mid_transfer_costs_at_most_the_deadline(lab: Lab) -> None:
    """It has proven itself, asks for the image, and then reads nothing."""
    ours = lab.place("a")
    copy = lab.copy(ours, size=32 * MIB)
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        line = Line(connection, "test")
        deadline = TransferDeadline.within(5)
        run = lab.control.run_id
        admit(line, run_secret(lab.control), run, place="0" * 12, node="b", deadline=deadline)
        line.receive(Offer, deadline)
        line.send(GoOn(0), deadline)
        ended.wait(10)

    with fake_server(serve) as (port, _):
        began = time.monotonic()
        try:
            with pytest.raises(PeerError, match="its time is over"):
                send(lab, port, ours, copy, seconds=1.0)
            assert time.monotonic() - began < 2.0
        finally:
            ended.set()
    assert ours.take_back(copy[0]), "no lease is left"


def test_a_server_whose_answer_is_cut_short_fails_the_read(lab: Lab) -> None:
    ours = lab.place("a")
    record, files = lab.copy(ours, size=MIB)
    cuts = iter([100, 100])

    with lab.server(ours) as (_, port):

        def serve(connection: socket.socket) -> None:
            with socket.create_connection(("127.0.0.1", port)) as real:
                connection.sendall(frame(heard(real, Greeting)))
                real.sendall(frame(heard(connection, PeerHello)))
                connection.sendall(frame(heard(real, Welcome)))
                real.sendall(connection.recv(4096))
                connection.sendall(real.recv(next(cuts), socket.MSG_WAITALL))

        with fake_server(serve) as (between, _):
            reader = PeerReader(("127.0.0.1", between), lab.control, timeout=5)
            with pytest.raises(PeerError, match=r"__3_0\.distcp of step_\S+ at byte 7 was not read"):
                reader.read_into(
                    memoryview(bytearray(4096)), checkpoint=record.checkpoint, path=files[0].path, offset=7
                )
            assert next(cuts, None) is None, "it was tried twice"
            reader.close()


def test_a_reader_connects_anew_once_when_its_server_was_replaced(lab: Lab) -> None:
    ours = lab.place("a")
    record, files = lab.copy(ours)
    data = ours.image(record).read_bytes()
    with lab.server(ours) as (_, port), proxy(port) as between:
        reader = PeerReader(("127.0.0.1", between.port), lab.control, timeout=5)
        for offset in (0, 100):
            buffer = bytearray(50)
            reader.read_into(
                memoryview(buffer), checkpoint=record.checkpoint, path=files[0].path, offset=offset
            )
            assert buffer == data[offset : offset + 50]
            between.cut()
        assert len(between.sent) == 2
        reader.close()


# --- a sender that vanishes ---------------------------------------------------------------------------------


def test_a_sender_that_is_killed_mid_transfer_leaves_what_the_next_one_goes_on_with(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=4 * MIB)
    with lab.server(theirs) as (server, port), proxy(port) as between:
        between.hold(3 * MIB)
        with job(sender(lab, between.port, ours, copy), cwd=lab.folder, may_leave=True) as sending:
            await_arrival(theirs, ours.image(copy[0]).read_bytes()[: 2 * MIB])
            sending.signal(signal.SIGKILL)
        between.cut()
        wait_until(lambda: server.transfers == 0, 5, "its thread ends")
        assert theirs.records() == []
        assert [name.rsplit(".")[-1] for name in left(theirs)] == ["json", "part"]
        assert ours.take_back(copy[0]), "its lease ended with it"
        ours.commit(copy[0])
        send(lab, between.port, ours, copy)
        assert between.sent[-1] < 2 * MIB + MIB // 2
    assert holds(theirs, copy[0])
    assert left(theirs) == []


def test_another_runs_server_is_refused(lab: Lab, tmp_path: Path) -> None:
    """Two runs, each with a secret of its own: neither serves the other."""
    other, _ = ControlDirectory.open_or_create(tmp_path / "other")
    ours = lab.place("a")
    copy = lab.copy(ours)
    with lab.server(ours) as (_, port):
        reader = PeerReader(("127.0.0.1", port), other, timeout=3)
        with pytest.raises(PeerError, match=f"does it belong to run {other.run_id}"):
            reader.read_into(
                memoryview(bytearray(1)), checkpoint=copy[0].checkpoint, path="__3_0.distcp", offset=0
            )
