"""The local wire, with real sockets and processes: what arrives, what does not, and who waits how long."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.process.local_wire import (
    MOST_DESCRIPTORS,
    PACKET_LIMIT,
    Caller,
    Garbage,
    Gone,
    Listener,
    Packets,
    Stream,
)
from kit.harness import wait_until


class Word(msgspec.Struct, frozen=True, tag="word"):
    text: str


class Number(msgspec.Struct, frozen=True, tag="number"):
    value: int


Said = Word | Number

PRELUDE = """
import os, signal, socket, sys, time
import msgspec
from holdfast.process import Garbage, Gone, Packets, Stream
class Word(msgspec.Struct, frozen=True, tag="word"):
    text: str
"""


def child(code: str, *passed: int) -> subprocess.Popen[bytes]:
    arguments = [str(number) for number in passed]
    return subprocess.Popen([sys.executable, "-c", PRELUDE + code, *arguments], pass_fds=passed)


def raw_pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, kind)


@pytest.fixture
def packets() -> Iterator[tuple[Packets[Said], Packets[Said]]]:
    ours, theirs = raw_pair(socket.SOCK_SEQPACKET)
    with (
        contextlib.closing(Packets[Said](ours, Said)) as one,
        contextlib.closing(Packets[Said](theirs, Said)) as other,
    ):
        yield one, other


@pytest.fixture
def streams() -> Iterator[tuple[Stream[Said], Stream[Said]]]:
    ours, theirs = raw_pair(socket.SOCK_STREAM)
    with (
        contextlib.closing(Stream[Said](ours, Said)) as one,
        contextlib.closing(Stream[Said](theirs, Said)) as other,
    ):
        yield one, other


def open_descriptors() -> set[str]:
    listed = os.listdir("/proc/self/fd")  # with the one by which it is listed
    return {number for number in listed if os.path.lexists(f"/proc/self/fd/{number}")}


# --- packets ------------------------------------------------------------------------------------------------


def test_packets_arrive_whole_and_in_order_and_nobody_waits_for_one(
    packets: tuple[Packets[Said], Packets[Said]],
) -> None:
    one, other = packets
    sent: list[Said] = [Word("a"), Number(2), Word("x" * 60_000), Word("")]
    assert all(one.send(word) for word in sent)
    assert other.wait(0.0)
    assert [other.receive() for _ in sent] == sent
    began = time.monotonic()
    assert other.receive() is None
    assert not other.wait(0.0)
    assert time.monotonic() - began < 1.0
    assert other.receive(0.05) is None


def test_a_full_inbox_costs_the_sender_the_message_and_no_time(
    packets: tuple[Packets[Said], Packets[Said]],
) -> None:
    """What a rank's sign of life rests on: an agent that does not read holds nobody up."""
    one, other = packets
    taken = 0
    while one.send(Number(taken)):
        taken += 1
    assert taken > 10
    began = time.monotonic()
    for _ in range(1000):
        assert not one.send(Number(-1))
    assert time.monotonic() - began < 5.0
    assert not one.send(Number(-1), 0.1), "nor does it wait for longer than told"
    assert 0.1 <= time.monotonic() - began < 10.0
    assert [other.receive() for _ in range(taken)] == [Number(n) for n in range(taken)]
    assert other.receive() is None, "what was not taken never comes"
    assert one.send(Number(-2))
    assert other.receive() == Number(-2)


def test_a_send_that_may_wait_goes_on_as_soon_as_there_is_room(
    packets: tuple[Packets[Said], Packets[Said]],
) -> None:
    one, other = packets
    taken = 0
    while one.send(Number(taken)):
        taken += 1
    reader = threading.Timer(0.1, lambda: [other.receive() for _ in range(taken)])
    reader.start()
    assert one.send(Word("after all"), 30.0)
    reader.join()
    assert other.receive(30.0) == Word("after all")


def test_there_is_room_or_something_to_receive(packets: tuple[Packets[Said], Packets[Said]]) -> None:
    one, other = packets
    began = time.monotonic()
    assert not one.wait(30.0, room=True), "there is room, and nothing to receive"
    assert time.monotonic() - began < 20.0
    assert other.send(Word("x"))
    assert one.wait(30.0, room=True)


def test_what_is_too_long_is_refused_by_both_ends(packets: tuple[Packets[Said], Packets[Said]]) -> None:
    one, other = packets
    with pytest.raises(Gone, match=f"{PACKET_LIMIT}"):
        one.send(Word("x" * PACKET_LIMIT))
    assert other.receive() is None
    assert one.send(Number(1)), "nothing of it was said"
    assert other.receive() == Number(1)

    ours, theirs = raw_pair(socket.SOCK_SEQPACKET)
    reader: Packets[Said] = Packets(theirs, Said, 100)
    with ours, contextlib.closing(reader):
        ours.send(msgspec.msgpack.encode(Word("x" * 100)))
        ours.send(msgspec.msgpack.encode(Word("x" * 10)))
        with pytest.raises(Garbage, match="more than 100 bytes"):
            reader.receive()
        assert reader.receive() == Word("x" * 10), "packets stay apart"


NONSENSE = {
    "no msgpack": b"\xc1",
    "cut": msgspec.msgpack.encode(Word("cut"))[:-1],
    "more than one": msgspec.msgpack.encode(Word("a")) * 2,
    "another type": msgspec.msgpack.encode({"type": "pickle", "data": b"x"}),
    "another field": msgspec.msgpack.encode({"type": "word", "text": 7}),
    "a number beyond all": msgspec.msgpack.encode({"type": "number", "value": 2**64 - 1})[:-8],
    "deep": b"\x91" * 60_000,
    "a promise of much": b"\xdd\xff\xff\xff\xff",
    "no text": b"\x82\xa4type\xa4word\xa4text\xa2\xff\xfe",
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_garbage_whatever_it_is(name: str) -> None:
    ours, theirs = raw_pair(socket.SOCK_SEQPACKET)
    with ours, contextlib.closing(Packets[Said](theirs, Said)) as reader:
        ours.send(NONSENSE[name])
        with pytest.raises(Garbage):
            reader.receive()
        ours.send(msgspec.msgpack.encode(Number(1)))
        assert reader.receive() == Number(1)

    ours, theirs = raw_pair(socket.SOCK_STREAM)
    with ours, contextlib.closing(Stream[Said](theirs, Said)) as stream:
        ours.sendall(len(NONSENSE[name]).to_bytes(8, "little") + NONSENSE[name])
        with pytest.raises(Garbage):
            stream.receive(10.0)
        with pytest.raises(Gone):
            stream.receive(10.0)
        assert not stream.open, "who cannot be understood is not listened to any more"


@given(st.binary(min_size=1, max_size=300))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    ours, theirs = raw_pair(socket.SOCK_SEQPACKET)
    with ours, contextlib.closing(Packets[Said](theirs, Said)) as reader:
        ours.send(data)
        with contextlib.suppress(Garbage):
            assert isinstance(reader.receive(), Word | Number)
    ours, theirs = raw_pair(socket.SOCK_STREAM)
    with ours, contextlib.closing(Stream[Said](theirs, Said)) as stream:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        heard: object = True
        with contextlib.suppress(Gone):
            while heard:
                heard = stream.receive(0.0)
        assert heard, "its end was not heard"


# --- the other end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Packets, Stream])
def test_that_a_killed_process_is_gone_is_heard_after_its_last_words(
    kind: type[Packets[Said]] | type[Stream[Said]],
) -> None:
    line, theirs = kind.pair(Said)
    within = ", within=9" if kind is Stream else ""
    process = child(
        f"line = {kind.__name__}.at(int(sys.argv[1]), None)\nline.send(Word('last'){within})\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
        theirs.fileno(),
    )
    theirs.close()
    assert process.wait(60) == -signal.SIGKILL
    assert line.other_end_is_gone(), "though there is something left to receive"
    heard = line.receive(30.0)
    assert (heard[0] if isinstance(heard, tuple) else heard) == Word("last")
    for _ in range(2):
        with pytest.raises(Gone):
            line.receive(30.0)
    for _ in range(2):
        with pytest.raises(Gone):
            line.send(Word("x"), within=30.0)
    line.close()


def test_the_last_words_of_one_that_left_something_unread_are_heard(
    packets: tuple[Packets[Said], Packets[Said]],
) -> None:
    """The kernel says 'connection reset' first then, and what was said only afterwards."""
    one, other = packets
    one.send(Word("never read"))
    other.send(Word("stopped after step 7"))
    other.close()
    assert one.receive() == Word("stopped after step 7")
    with pytest.raises(Gone):
        one.receive()


def test_the_end_wakes_whoever_waits(packets: tuple[Packets[Said], Packets[Said]]) -> None:
    one, other = packets
    began = time.monotonic()
    threading.Timer(0.1, other.close).start()
    assert one.wait(60.0)
    with pytest.raises(Gone, match="closed the connection"):
        one.receive(60.0)
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_who_says_no_more_is_still_spoken_to(kind: socket.SocketKind) -> None:
    ours, theirs = raw_pair(kind)
    wire = Packets if kind == socket.SOCK_SEQPACKET else Stream
    one: Packets[Said] | Stream[Said] = wire(ours, Said)
    other: Packets[Said] | Stream[Said] = wire(theirs, Said)
    one.say_no_more()
    with pytest.raises(Gone):
        other.receive(10.0)
    if isinstance(other, Packets):
        assert other.send(Word("farewell"))
        assert one.receive(10.0) == Word("farewell")
    one.close()
    other.close()


def test_an_end_that_is_closed_here_is_gone(packets: tuple[Packets[Said], Packets[Said]]) -> None:
    one, _ = packets
    assert one.open
    one.close()
    assert not one.open
    assert one.fileno() == -1
    assert one.other_end_is_gone()
    assert one.wait(60.0)
    with pytest.raises(Gone):
        one.receive(60.0)
    with pytest.raises(Gone):
        one.send(Word("x"), 60.0)


def test_a_fork_that_holds_the_other_end_holds_it_open_and_may_let_it_go() -> None:
    line, theirs = Packets[Said].pair(Said)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    theirs.close()
    assert not line.other_end_is_gone(), "only what a trainer's children say tells that the trainer is dead"
    assert line.receive(0.05) is None
    os.close(writer)
    os.close(reader)
    os.waitpid(pid, 0)
    with pytest.raises(Gone):
        line.receive(30.0)
    line.close()


def test_a_send_to_nobody_does_not_end_a_process_that_takes_sigpipe_as_it_comes() -> None:
    code = (
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "for kind, more in ((Packets, {}), (Stream, {'within': 1.0})):\n"
        "    line, theirs = kind.pair(None)\n    theirs.close()\n"
        "    try: line.send(Word('x'), **more)\n    except Gone: pass\n    else: sys.exit(1)\n"
    )
    assert child(code).wait(60) == 0


@pytest.mark.parametrize("kind", [Packets, Stream])
def test_descriptors_beyond_those_that_select_knows(
    kind: type[Packets[Said]] | type[Stream[Said]],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip("this process may not have so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    try:
        ours, theirs = raw_pair(kind.KIND)
        with theirs:
            line = kind.at(fcntl.fcntl(ours, fcntl.F_DUPFD, 2000), Said)
            ours.close()
            assert not line.wait(0.01)
            assert line.receive(0.01) is None
            line.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- streams ------------------------------------------------------------------------------------------------


def test_a_stream_carries_messages_of_any_size_and_tells_the_end(
    streams: tuple[Stream[Said], Stream[Said]],
) -> None:
    one, other = streams
    assert not one.other_end_is_gone()
    sent = [Word("x" * n * 7000) for n in range(20)]
    received = []
    for message in sent:
        other.send(message, within=10.0)
        received.append(one.receive(1.0))
    assert [heard for heard, _ in filter(None, received)] == sent
    assert one.receive(0.0) is None
    other.send(sent[3], within=10.0)
    other.close()
    assert one.other_end_is_gone(), "though there is something left to receive"
    assert one.receive(0.0) == (sent[3], [])
    with pytest.raises(Gone):
        one.receive(None)
    with pytest.raises(Gone):
        one.send(Number(1), within=10.0)


def test_a_message_far_beyond_the_sockets_buffer_arrives_whole_from_another_process() -> None:
    line, theirs = Stream[Said].pair(Said)
    text = "0123456789abcdef" * 1_000_000
    process = child(
        "line = Stream.at(int(sys.argv[1]), None)\nfor _ in range(2):\n"
        "    line.send(Word('0123456789abcdef' * 1_000_000), within=60)",
        theirs.fileno(),
    )
    theirs.close()
    for _ in range(2):
        heard = line.receive(60.0)
        assert heard is not None
        assert heard[0] == Word(text)
    assert process.wait(60) == 0
    with pytest.raises(Gone):
        line.receive(60.0)
    line.close()


def test_what_comes_in_pieces_is_put_together_and_never_waited_for() -> None:
    ours, theirs = raw_pair(socket.SOCK_STREAM)
    sent: list[Said] = [Word("one"), Number(2), Word("three" * 50)]
    whole = b"".join(len(body).to_bytes(8, "little") + body for body in map(msgspec.msgpack.encode, sent))
    heard = []
    with ours, contextlib.closing(Stream[Said](theirs, Said)) as stream:
        began = time.monotonic()
        for at in range(len(whole)):
            ours.send(whole[at : at + 1])
            if (found := stream.receive(0.0)) is not None:
                heard.append(found[0])
        assert heard == sent
        assert stream.receive(0.0) is None
        assert time.monotonic() - began < 30.0

        rest, order = whole, random.Random(7)
        heard = []
        while rest:
            count = order.randint(1, 40)
            ours.send(rest[:count])
            rest = rest[count:]
            while (found := stream.receive(0.0)) is not None:
                heard.append(found[0])
        assert heard == sent


def test_a_reader_that_reads_nothing_is_waited_for_no_longer_than_told_and_hears_nothing_else(
    streams: tuple[Stream[Said], Stream[Said]],
) -> None:
    """Never half a message followed by another."""
    one, other = streams
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"read nothing for 0\.2 s"):
        one.send(Word("x" * 5_000_000), within=0.2)
    assert 0.2 <= time.monotonic() - began < 20.0
    with pytest.raises(Gone):
        one.send(Number(1), within=10.0)
    with pytest.raises(Gone):
        other.receive(10.0)


def test_of_what_was_not_even_begun_nothing_is_heard_and_the_line_stays(
    streams: tuple[Stream[Said], Stream[Said]],
) -> None:
    one, other = streams
    taken = 0
    raw = one._socket
    frame = msgspec.msgpack.encode(Number(1))
    with contextlib.suppress(BlockingIOError):
        while True:  # whole messages only
            assert raw.send(len(frame).to_bytes(8, "little") + frame) == 8 + len(frame)
            taken += 1
    with pytest.raises(TimeoutError):
        one.send(Word("not begun"), within=0.05)
    for _ in range(taken):
        assert other.receive(10.0) == (Number(1), [])
    assert other.receive(0.0) is None
    one.send(Word("after it"), within=10.0)
    assert other.receive(10.0) == (Word("after it"), [])


def test_a_length_that_nobody_could_mean_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = raw_pair(socket.SOCK_STREAM)
    with ours, contextlib.closing(Stream[Said](theirs, Said)) as stream:
        ours.sendall(b"\xff" * 8)
        with pytest.raises(Garbage, match="more than"):
            stream.receive(10.0)
        assert not stream.open
        assert ours.recv(1) == b"", "whoever says that is hung up on"

    ours, theirs = raw_pair(socket.SOCK_STREAM)
    with contextlib.closing(Stream[Said](ours, Said, 1000)) as one, theirs:
        with pytest.raises(Gone, match="1000"):
            one.send(Word("x" * 1000), within=10.0)
        one.send(Number(1), within=10.0)


def test_one_that_ends_in_the_middle_of_a_message_is_gone() -> None:
    whole = msgspec.msgpack.encode(Word("whole"))
    whole = len(whole).to_bytes(8, "little") + whole
    for cut in range(len(whole)):
        ours, theirs = raw_pair(socket.SOCK_STREAM)
        with contextlib.closing(Stream[Said](theirs, Said)) as stream:
            ours.send(whole[:cut])
            ours.close()
            with pytest.raises(Gone):
                stream.receive(10.0)


# --- descriptors --------------------------------------------------------------------------------------------


def file_with(place: Path, text: str) -> int:
    path = place / text
    path.write_text(text)
    return os.open(path, os.O_RDONLY)


def test_descriptors_come_with_their_message_and_not_before(
    tmp_path: Path, streams: tuple[Stream[Said], Stream[Said]]
) -> None:
    """Whoever forks for the first message must not hand on what belongs to the second."""
    one, other = streams
    for name, count in (("a", 1), ("b", 3), ("c", 0), ("d", MOST_DESCRIPTORS)):
        files = [file_with(tmp_path, f"{name}{number}") for number in range(count)]
        one.send(Word(name * 1000), files, within=10.0)
        for number in files:
            os.close(number)
    before = open_descriptors()
    for name, count in (("a", 1), ("b", 3), ("c", 0), ("d", MOST_DESCRIPTORS)):
        heard = other.receive(10.0)
        assert heard is not None
        message, descriptors = heard
        assert message == Word(name * 1000)
        assert [os.read(number, 9).decode() for number in descriptors] == [f"{name}{n}" for n in range(count)]
        assert not any(os.get_inheritable(number) for number in descriptors)
        assert open_descriptors() - before == {str(number) for number in descriptors}
        for number in descriptors:
            os.close(number)
    with pytest.raises(ValueError, match="come with one message"):
        one.send(Word("x"), [0] * (MOST_DESCRIPTORS + 1), within=10.0)
    one.send(Word("y"), within=10.0)
    assert other.receive(10.0) == (Word("y"), [])


def test_descriptors_of_a_large_message_and_of_the_one_behind_it(tmp_path: Path) -> None:
    """The end of a message that took several writes lies in the socket next to the head of the next one."""
    line, theirs = Stream[Said].pair(Said)
    (tmp_path / "f").write_text("f")
    process = child(
        "line = Stream.at(int(sys.argv[1]), None)\n"
        f"place = {str(tmp_path / 'f')!r}\n"
        "for n in range(3):\n"
        "    line.send(Word(str(n) * 500_000), [os.open(place, os.O_RDONLY)], within=60)",
        theirs.fileno(),
    )
    theirs.close()
    before = open_descriptors()
    for number in range(3):
        heard = line.receive(60.0)
        assert heard is not None
        assert heard[0] == Word(str(number) * 500_000)
        assert open_descriptors() - before == {str(heard[1][0])}
        os.close(heard[1][0])
    assert process.wait(60) == 0
    line.close()


def test_descriptors_of_what_is_refused_are_closed(tmp_path: Path) -> None:
    for cut, damage in ((20, b""), (None, b"\xc1")):
        ours, theirs = raw_pair(socket.SOCK_STREAM)
        with contextlib.closing(Stream[Said](theirs, Said)) as stream:
            body = damage or msgspec.msgpack.encode(Word("x" * 100))
            data = (len(body).to_bytes(8, "little") + body)[:cut]
            number = file_with(tmp_path, "f")
            socket.send_fds(ours, [data], [number])
            ours.close()
            before = open_descriptors()
            with pytest.raises(Gone):
                stream.receive(10.0)
            assert open_descriptors() <= before
            os.close(number)


def test_a_message_whose_descriptors_cannot_be_taken_is_refused() -> None:
    """The kernel drops those that the process has no room for, and says so only to who looks."""
    ours, theirs = raw_pair(socket.SOCK_STREAM)
    process = child(
        "import resource\nline = Stream.at(int(sys.argv[1]), Word)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1,) * 2)\n"
        "try: line.receive(60)\nexcept Garbage as error: print(error); sys.exit(7)",
        theirs.fileno(),
    )
    theirs.close()
    one: Stream[Said] = Stream(ours, Said)
    one.send(Word("x"), [0, 1, 2], within=10.0)
    assert process.wait(60) == 7
    one.close()


def test_more_descriptors_than_a_message_has_are_refused() -> None:
    ours, theirs = raw_pair(socket.SOCK_STREAM)
    with ours, contextlib.closing(Stream[Said](theirs, Said)) as stream:
        before = open_descriptors()
        body = msgspec.msgpack.encode(Number(1))
        rights = array.array("i", [0] * 40).tobytes()
        ours.sendmsg(
            [len(body).to_bytes(8, "little") + body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        )
        with pytest.raises(Garbage, match="descriptors"):
            stream.receive(10.0)
        assert open_descriptors() <= before


# --- who connects -------------------------------------------------------------------------------------------


def test_a_listener_knows_who_connects_by_the_kernels_word(tmp_path: Path) -> None:
    path = tmp_path / "private" / "wire.sock"
    listener: Listener[Said] = Listener(path, Said)
    assert path.parent.stat().st_mode & 0o077 == 0
    assert listener.accept() is None
    process = child(
        f"from pathlib import Path\nline = Packets.connect(Path({str(path)!r}), None, 10)\n"
        "line.send(Word('hello'))"
    )
    found: list[Caller[Said]] = []

    def called() -> bool:
        found.extend(filter(None, [listener.accept()]))
        return bool(found)

    wait_until(called, 60, "it connects")
    (line, pid, user) = found[0]
    assert (pid, user) == (process.pid, os.geteuid())
    assert line.receive(30.0) == Word("hello")
    with pytest.raises(Gone):
        line.receive(30.0)
    assert process.wait(60) == 0
    line.close()
    listener.close()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        Packets.connect(path, None, 1.0)


def test_a_listener_at_a_path_that_is_too_long_for_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 150) / "wire.sock"
    listener: Listener[Said] = Listener(path, Said)
    line: Packets[None] = Packets.connect(path, None, 10.0)
    assert line.send(Word("far away"))
    caller = listener.accept()
    assert caller is not None
    assert caller.line.receive(10.0) == Word("far away")
    caller.line.close()
    line.close()
    listener.close()


def test_a_listener_that_cannot_be_found_any_more_knows_it(tmp_path: Path) -> None:
    path = tmp_path / "wire.sock"
    listener: Listener[Said] = Listener(path, Said)
    assert listener.reachable
    path.unlink()
    assert not listener.reachable
    other: Listener[Said] = Listener(path, Said)
    assert other.reachable
    assert not listener.reachable, "another one lies there"
    other.close()
    listener.close()


def test_nobody_listens_any_more(tmp_path: Path) -> None:
    path = tmp_path / "wire.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    with pytest.raises(ConnectionRefusedError):
        Packets.connect(path, None, 0.0)


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    Listener(tmp_path / "open" / "a.sock", Said).close()
    assert (tmp_path / "open").stat().st_mode & 0o077 == 0
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(PermissionError):
        Listener(tmp_path / "link" / "a.sock", Said)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError):
        Listener(tmp_path / "open" / "a.sock", Said)
