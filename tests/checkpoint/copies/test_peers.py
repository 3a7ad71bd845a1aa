"""Replicas: sent with the digests of their source, verified where they lie, and read back."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.copies import peers, receipt
from holdfast.checkpoint.copies.peers import PeerReader, announcement
from holdfast.checkpoint.copies.receipt import RunningDigests, verified_prefix
from holdfast.checkpoint.copies.tier import CopyRecord
from holdfast.checkpoint.copies.wire import (
    AnnouncedChunk,
    AnnouncedFile,
    Announcement,
    Data,
    Held,
    Line,
    Read,
    TransferDeadline,
    call,
    objection,
)
from holdfast.checkpoint.format.manifest import digest_bytes
from holdfast.errors import AlteredCopyError, PeerError
from holdfast.journal.events import CopiesDropped, CopyQuarantined
from holdfast.journal.writer import JournalWriter
from holdfast.record.secret import run_secret
from kit.damage import flip
from kit.harness import wait_until
from kit.nodes.peering import CHUNK, MIB, Lab, await_arrival, content, holds, left, proxy, send


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


# --- the good case ------------------------------------------------------------------------------------------


def test_a_replica_is_sent_verified_committed_and_read_back(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    record, files = lab.copy(ours, size=3 * MIB + 17, files=3)
    with lab.server(theirs) as (_, port):
        assert send(lab, port, ours, (record, files)) == theirs.place
        assert holds(theirs, record)
        found = theirs.find(record.checkpoint, record.rank)
        assert found is not None
        assert found.kind == "replica"
        assert left(theirs) == []
        reader = PeerReader(("127.0.0.1", port), lab.control, timeout=10)
        data = ours.image(record).read_bytes()
        for file in record.files:
            for offset, length in ((0, file.size), (5, 1), (file.size - 3, 3)):
                buffer = bytearray(length)
                reader.read_into(
                    memoryview(buffer), checkpoint=record.checkpoint, path=file.path, offset=offset
                )
                start = file.start + offset
                assert buffer == data[start : start + length]
        assert reader.copies() == [found]
        reader.close()


def test_two_senders_at_once_each_get_their_replica(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copies = [lab.copy(ours, rank=rank, size=4 * MIB) for rank in range(4)]
    with lab.server(theirs) as (_, port), ThreadPoolExecutor(4) as pool:
        places = list(pool.map(lambda copy: send(lab, port, ours, copy), copies))
    assert places == [theirs.place] * 4
    assert all(holds(theirs, record) for record, _ in copies)


def test_the_same_replica_sent_twice_at_once_is_taken_once(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=8 * MIB)
    with lab.server(theirs) as (_, port), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: send(lab, port, ours, copy), range(2)))
    assert holds(theirs, copy[0])
    assert left(theirs) == []
    assert len(list(theirs.images.iterdir())) == 1


def test_what_is_there_already_is_verified_before_it_is_said_to_be_held(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    journal = JournalWriter(lab.control.journal, "test", 1)
    with lab.server(theirs, journal=journal) as (_, port), proxy(port) as between:
        send(lab, between.port, ours, copy)
        first = theirs.find(copy[0].checkpoint, 3)
        send(lab, between.port, ours, copy)
        assert between.sent[0] > MIB > between.sent[1], "the second time no bytes were sent"
        assert first is not None
        flip(theirs.image(first), 70_000)
        send(lab, between.port, ours, copy)
        assert between.sent[2] > MIB, "a bad one is replaced"
    assert holds(theirs, copy[0])
    assert theirs.find(copy[0].checkpoint, 3) != first
    assert len(list(theirs.quarantined.iterdir())) == 1
    (told,) = lab.journal()
    assert isinstance(told, CopyQuarantined)
    assert (told.node, told.kind) == ("b", "replica")
    assert "rank 3: __3_0.distcp has digest" in told.reasons[0]


def test_older_replicas_are_dropped_in_the_order_in_which_they_came(lab: Lab) -> None:
    """Also after a rollback: the newest then has a lower step than those before it."""
    ours, theirs = lab.place("a"), lab.place("b")
    other = lab.copy(ours, step=1, rank=9)
    with lab.server(theirs, keep=2) as (_, port):
        send(lab, port, ours, other)
        for step in (20, 30, 10):
            copy = lab.copy(ours, step=step)
            send(lab, port, ours, copy)
        wait_until(lambda: len(theirs.records()) == 3, 5, "the oldest is dropped")
    assert {(record.name.step, record.rank) for record in theirs.records()} == {(30, 3), (10, 3), (1, 9)}
    assert len(list(theirs.images.iterdir())) == 3


def test_a_replica_can_be_read_as_soon_as_its_sender_hears_of_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock on what arrives is given up before the answer, and not only with the connection."""
    ours, theirs = lab.place("a"), lab.place("b")
    record, files = lab.copy(ours)
    readable: list[bool] = []
    tell = Line.send

    def watched(self: Line, message: Any, deadline: Any) -> None:
        if isinstance(message, Held):
            (found,) = theirs.records()
            with theirs.lease(found) as descriptor:
                readable.append(descriptor is not None)
        tell(self, message, deadline)

    monkeypatch.setattr(Line, "send", watched)
    with lab.server(theirs) as (_, port):
        send(lab, port, ours, (record, files))
    assert readable == [True]


def test_a_reader_is_given_what_stands_now_and_not_what_it_read_before(lab: Lab) -> None:
    """A place that dropped a copy and got it again lets the same connection read on."""
    ours, theirs = lab.place("a"), lab.place("b")
    record, files = lab.copy(ours)
    data = ours.image(record).read_bytes()
    with lab.server(theirs) as (_, port):
        reader = PeerReader(("127.0.0.1", port), lab.control, timeout=5)

        def read() -> bytes:
            buffer = bytearray(100)
            reader.read_into(memoryview(buffer), checkpoint=record.checkpoint, path=files[1].path, offset=0)
            return bytes(buffer)

        send(lab, port, ours, (record, files))
        assert read() == data[MIB // 2 :][:100]
        (held,) = theirs.records()
        flip(theirs.image(held), MIB // 2)
        theirs.quarantine(held, "its bytes are wrong")
        with pytest.raises(PeerError, match="this place holds no copy"):
            read()
        send(lab, port, ours, (record, files))
        assert read() == data[MIB // 2 :][:100]
        reader.close()


# --- altered on the way: never a record ---------------------------------------------------------------------


def test_a_byte_altered_in_the_senders_image_after_its_digest_is_never_a_replica(lab: Lab) -> None:
    """Case nvidia-resiliency-ext#349: the digests are the source's, not of what is sent."""
    ours, theirs = lab.place("a"), lab.place("b")
    record, files = lab.copy(ours)
    flip(ours.image(record), MIB - 5)
    with lab.server(theirs) as (_, port), proxy(port) as between:
        with pytest.raises(AlteredCopyError, match=r"__3_1\.distcp has digest \w+, \w+ when it was saved"):
            send(lab, between.port, ours, (record, files))
        assert len(between.sent) == 1, "sending it again would not help"
    assert theirs.records() == []
    assert list(theirs.images.iterdir()) == []


def test_a_byte_altered_on_the_wire_is_never_a_replica_and_is_sent_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case nvidia-resiliency-ext#349."""
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    with lab.server(theirs) as (_, port), proxy(port) as between:
        between.flip_at = MIB // 2
        seen: list[int] = []
        commit = theirs.commit

        def watched(record: CopyRecord) -> None:
            seen.append(len(between.sent))
            commit(record)

        monkeypatch.setattr(theirs, "commit", watched)
        send(lab, between.port, ours, copy)
        assert seen == [2], "only what arrived right was committed"
        assert len(between.sent) == 2
    assert holds(theirs, copy[0])
    assert left(theirs) == []


def test_a_wire_that_alters_every_time_is_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    with lab.server(theirs) as (_, port), proxy(port) as between:
        between.flip_at = MIB // 2
        refused = peers._Sending._refused

        def again(self: Any, who: str, answer: Any) -> PeerError:
            between.flip_at = MIB // 2
            return refused(self, who, answer)

        monkeypatch.setattr(peers._Sending, "_refused", again)
        with pytest.raises(PeerError, match="altered on the way or at the peer, twice"):
            send(lab, between.port, ours, copy)
    assert theirs.records() == []
    assert list(theirs.images.iterdir()) == []


def test_a_byte_altered_in_the_receivers_image_before_the_commit_is_never_a_replica(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case nvidia-resiliency-ext#349: what lies in the image is digested, not what came over the wire."""
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    receive = Line.receive_some

    def altered(self: Line, view: memoryview, deadline: Any) -> int:
        got = receive(self, view, deadline)
        if view.nbytes > CHUNK:  # the image, not a message
            view[0] ^= 0x10
        return got

    monkeypatch.setattr(Line, "receive_some", altered)
    with lab.server(theirs) as (_, port), pytest.raises(PeerError, match="arrived with digest"):
        send(lab, port, ours, copy)
    assert theirs.records() == []
    assert list(theirs.images.iterdir()) == []


def test_a_byte_altered_after_the_commit_is_found_by_who_reads_it(lab: Lab) -> None:
    """Whoever reads checks the digest of each chunk, as with every other source."""
    ours, theirs = lab.place("a"), lab.place("b")
    record, files = lab.copy(ours)
    with lab.server(theirs) as (_, port):
        send(lab, port, ours, (record, files))
        found = theirs.find(record.checkpoint, 3)
        assert found is not None
        flip(theirs.image(found), 2 * CHUNK + 9)
        reader = PeerReader(("127.0.0.1", port), lab.control, timeout=10)
        bad = []
        for chunk in files[0].chunks:
            buffer = bytearray(chunk.length)
            reader.read_into(
                memoryview(buffer), checkpoint=record.checkpoint, path=files[0].path, offset=chunk.offset
            )
            if digest_bytes(bytes(buffer)) != chunk.digest:
                bad.append(chunk.offset)
        reader.close()
    assert bad == [2 * CHUNK]


def test_a_record_that_does_not_fit_the_manifest_is_not_sent(lab: Lab) -> None:
    ours = lab.place("a")
    record, files = lab.copy(ours)
    other = [msgspec.structs.replace(files[0], digest="0" * 32), *files[1:]]
    with pytest.raises(PeerError, match=r"does not fit the manifest's entry of __3_0\.distcp"):
        send(lab, 1, ours, (record, other))


# --- cut and gone on with -----------------------------------------------------------------------------------


def test_a_transfer_that_is_cut_goes_on_where_it_was_verified_up_to(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=4 * MIB)
    with lab.server(theirs) as (_, port), proxy(port) as between:
        between.cut_at = 3 * MIB
        send(lab, between.port, ours, copy)
        first, second = between.sent
    assert first >= 3 * MIB
    assert second < 2 * MIB, "what was there was not sent again"
    assert holds(theirs, copy[0])
    assert left(theirs) == []


def test_a_transfer_whose_line_was_lost_without_a_word_gives_way_to_the_next(lab: Lab) -> None:
    """The server cannot know that its sender is gone; who announces the same replica again shows it."""
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=4 * MIB)
    with lab.server(theirs) as (_, port), proxy(port) as between:
        between.hold(3 * MIB)

        def try_to_send() -> None:
            with contextlib.suppress(PeerError):
                send(lab, between.port, ours, copy)

        stuck = threading.Thread(target=try_to_send)
        stuck.start()
        await_arrival(theirs, ours.image(copy[0]).read_bytes()[: 2 * MIB])
        with proxy(port) as other:
            send(lab, other.port, ours, copy, seconds=10)
            assert other.sent[-1] < 2 * MIB + MIB // 2
        between.cut()
        stuck.join(10)
        assert not stuck.is_alive()
    assert holds(theirs, copy[0])
    assert left(theirs) == []
    assert len(list(theirs.images.iterdir())) == 1


def test_nothing_grows_over_many_transfers_and_strangers(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    seen: list[tuple[int, int]] = []
    with lab.server(theirs) as (server, port):
        for step in range(1, 31):
            send(lab, port, ours, lab.copy(ours, step=step, size=4 * CHUNK))
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"x" * 100)
            if step in (5, 30):
                wait_until(lambda: server.connections == 0, 5, "all connections end")
                seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        assert len(theirs.records()) == 2
    assert all(late <= early for early, late in zip(*seen, strict=True)), seen


def test_what_a_cut_left_is_judged_by_its_digests_and_not_by_its_length(lab: Lab) -> None:
    """A partial image that was altered meanwhile is gone on with before the first wrong chunk."""
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=4 * MIB)
    with lab.server(theirs) as (server, port), proxy(port) as between:
        between.hold(3 * MIB)
        with pytest.raises(PeerError, match="its time is over"):
            send(lab, between.port, ours, copy, seconds=1.2)
        wait_until(lambda: server.transfers == 0, 5, "the transfer ends")
        (part,) = theirs.images.glob(".*.part")
        assert theirs.records() == []
        flip(part, MIB + 1)
        between.cut()
        send(lab, between.port, ours, copy)
        assert 3 * MIB <= between.sent[-1] < 4 * MIB
    assert holds(theirs, copy[0])
    assert left(theirs) == []


def test_a_partial_image_is_superseded_by_the_ranks_next_checkpoint(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    old, new, other = lab.copy(ours, step=5), lab.copy(ours, step=6), lab.copy(ours, step=5, rank=4)
    with lab.server(theirs) as (server, port), proxy(port) as between:
        between.hold(MIB // 2)
        for copy in (old, other):
            with pytest.raises(PeerError):
                send(lab, between.port, ours, copy, seconds=0.4)
        wait_until(lambda: server.transfers == 0, 5, "the transfers end")
        assert len(left(theirs)) == 4
        between.cut()
        send(lab, between.port, ours, new)
    assert [name.split(".")[1] for name in left(theirs)] == ["00004", "00004"], "another rank's is left alone"
    assert [record.checkpoint for record in theirs.records()] == [new[0].checkpoint]


def test_a_start_clears_away_what_is_old_and_what_nobody_refers_to(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    kept = lab.copy(ours)
    with lab.server(theirs) as (_, port):
        send(lab, port, ours, kept)
    now = time.time()
    for name, age in (
        (".00007.aaaaaaaa.part", 7200), (".00007.aaaaaaaa.json", 7200), (".00008.bbbbbbbb.part", 60),
        (".00003.cccccccc.part", 60), ("00009.dddddddd", 7200), ("00009.eeeeeeee", 60), ("00009.0", 7200),
    ):  # fmt: skip
        (theirs.images / name).write_bytes(b"x")
        os.utime(theirs.images / name, (now - age, now - age))
    receipt.sweep(theirs)
    (record,) = theirs.records()
    assert {path.name for path in theirs.images.iterdir()} == {
        record.image, ".00008.bbbbbbbb.part", "00009.eeeeeeee", "00009.0",
    }  # fmt: skip
    assert holds(theirs, kept[0])


def test_an_announcement_clears_away_what_is_old_whosever_it_was(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    with lab.server(theirs) as (_, port):
        for name, age in ((".00007.aaaaaaaa.part", 7200), (".00008.bbbbbbbb.part", 60)):
            (theirs.images / name).write_bytes(b"x")
            os.utime(theirs.images / name, (time.time() - age,) * 2)
        send(lab, port, ours, lab.copy(ours))
    assert left(theirs) == [".00008.bbbbbbbb.part"]


def test_what_somebody_works_on_is_not_cleared_away(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    replica = announcement(*lab.copy(ours))
    incoming = receipt.begin(theirs, replica, max_bytes=0)
    try:
        other = receipt.begin(theirs, replica, max_bytes=0)
        assert len(list(theirs.images.glob(".*.part"))) == 2, "locked: another one is begun"
        other.close()
        receipt.sweep(theirs, rank=3, keep=None)
        assert len(list(theirs.images.glob(".*.part"))) == 1
    finally:
        incoming.close()
    receipt.sweep(theirs, rank=3, keep=None)
    assert left(theirs) == []


# --- room, and refusals -------------------------------------------------------------------------------------


def test_an_image_that_does_not_fit_is_refused_before_a_byte_is_sent(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    with lab.server(theirs, max_bytes=MIB // 2) as (_, port), proxy(port) as between:
        with pytest.raises(PeerError, match=r"do not fit .* of checkpoint\.non_persistent_max_bytes"):
            send(lab, between.port, ours, copy)
        assert between.sent[0] < MIB // 8
    with lab.server(theirs) as (_, port):
        huge = msgspec.structs.replace(copy[0].files[1], size=1 << 43)
        record = msgspec.structs.replace(copy[0], files=[copy[0].files[0], huge])
        ours.commit(record)
        os.truncate(ours.image(record), huge.start + huge.size)
        entry = msgspec.structs.replace(copy[1][1], size=1 << 43)
        with pytest.raises(PeerError, match="bytes are free"):
            send(lab, port, ours, (record, [copy[1][0], entry]))

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        ours.commit(copy[0])
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(PeerError, match=r"do not fit into \S+: No space left on device"):
            send(lab, port, ours, copy)
    assert theirs.records() == []
    assert list(theirs.images.iterdir()) == []


def test_a_record_that_cannot_be_written_leaves_no_image_behind(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = lab.place("a"), lab.place("b")

    def full(record: CopyRecord) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(theirs, "commit", full)
    with lab.server(theirs) as (_, port), pytest.raises(PeerError, match="its record cannot be written"):
        send(lab, port, ours, lab.copy(ours))
    assert list(theirs.images.iterdir()) == []


def test_under_pressure_the_oldest_replica_makes_room_and_the_last_one_never_does(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    journal = JournalWriter(lab.control.journal, "test", 1)
    with lab.server(theirs, keep=2, max_bytes=2 * MIB, journal=journal) as (_, port):
        for step in (1, 2, 3):
            send(lab, port, ours, lab.copy(ours, step=step))
        assert {record.name.step for record in theirs.records()} == {2, 3}
        big = lab.copy(ours, step=4, size=2 * MIB)
        with pytest.raises(PeerError, match="do not fit"):
            send(lab, port, ours, big)
        assert {record.name.step for record in theirs.records()} == {3}
    told = [event for event in lab.journal() if isinstance(event, CopiesDropped)]
    assert [event.checkpoints for event in told] == [["step_00000001-00000001"], ["step_00000002-00000002"]]
    assert "to make room" in told[0].reasons[0]


def test_a_copy_that_was_taken_back_is_neither_sent_nor_read(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    with lab.server(theirs) as (_, port):
        send(lab, port, ours, copy)
        assert ours.take_back(copy[0])
        with pytest.raises(PeerError, match="was taken back"):
            send(lab, port, ours, copy)
        (held,) = theirs.records()
        assert theirs.drop(held)
        reader = PeerReader(("127.0.0.1", port), lab.control, timeout=5)
        with pytest.raises(PeerError, match=r"this place holds no copy of __3_0\.distcp"):
            reader.read_into(
                memoryview(bytearray(1)), checkpoint=held.checkpoint, path="__3_0.distcp", offset=0
            )
        reader.close()


def test_a_read_beyond_the_end_of_a_file_is_refused(lab: Lab) -> None:
    """What follows in the image is another file."""
    ours = lab.place("a")
    record, files = lab.copy(ours)
    with lab.server(ours) as (_, port):
        reader = PeerReader(("127.0.0.1", port), lab.control, timeout=5)
        with pytest.raises(PeerError, match="were asked for"):
            reader.read_into(
                memoryview(bytearray(2)),
                checkpoint=record.checkpoint,
                path=files[0].path,
                offset=files[0].size - 1,
            )
        reader.close()


def _file(path: str = "__0_0.distcp", start: int = 0, size: int = 8, chunks: Any = ()) -> AnnouncedFile:
    return AnnouncedFile(path, start, size, "0" * 32, list(chunks))


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("../../x", [_file()], "not a checkpoint's name"),
        ("step_0000000005-00000005", [_file()], "not a checkpoint's name"),
        ("step_00000005-00000005", [], "nothing in it"),
        ("step_00000005-00000005", [_file("../x")], "is not allowed"),
        ("step_00000005-00000005", [_file("/x")], "is not allowed"),
        ("step_00000005-00000005", [_file(size=1 << 60)], "more than"),
        ("step_00000005-00000005", [_file(), _file("__0_1.distcp", start=7)], "overlaps"),
        ("step_00000005-00000005", [_file(), _file(start=8)], "twice"),
        ("step_00000005-00000005", [_file(chunks=[AnnouncedChunk(4, 5, "0" * 32)])], "lies outside"),
    ],
)
def test_an_announcement_that_cannot_be_right_is_refused_with_the_reason(
    name: str, files: list[AnnouncedFile], why: str
) -> None:
    assert why in objection(Announcement(checkpoint=name, manifest="0" * 32, rank=0, files=files))


@settings(deadline=None)  # a thread takes the digests
@given(
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    chunk=st.integers(1, 25),
    there=st.integers(0, 320),
    wrong=st.integers(0, 320),
)
def test_the_verified_prefix_is_right_and_as_long_as_the_chunks_allow(
    cuts: list[int], chunk: int, there: int, wrong: int
) -> None:
    """Of an image that is there up to a byte, with one byte altered; what follows is empty."""
    data = content(sum(cuts), "prefix")
    files, start = [], 0
    for number, size in enumerate(cuts):
        shard = data[start : start + size]
        chunks = [
            AnnouncedChunk(at, len(shard[at : at + chunk]), digest_bytes(shard[at : at + chunk]))
            for at in range(0, size, chunk)
        ]
        files.append(AnnouncedFile(f"f{number}", start, size, digest_bytes(shard), chunks))
        start += size
    image = bytearray(len(data))
    image[:there] = data[:there]
    if wrong < len(image):
        image[wrong] ^= 0x10
    good = next((at for at, (a, b) in enumerate(zip(image, data, strict=True)) if a != b), len(data))
    found = verified_prefix(memoryview(image), files)
    assert good - chunk < found <= good
    digests = RunningDigests(memoryview(image), files, 0)
    digests.arrived(len(image))
    assert (digests.finish() is None) == (bytes(image) == data)


# --- leases -------------------------------------------------------------------------------------------------


def test_a_replica_that_is_being_read_is_dropped_later(lab: Lab) -> None:
    """Scenario: a slow reader holds a lease; the next commit goes on, and the drop is put off."""
    ours, theirs = lab.place("a"), lab.place("b")
    first, second, third = (lab.copy(ours, step=step) for step in (1, 2, 3))
    with lab.server(theirs, keep=1) as (_, port):
        send(lab, port, ours, first)
        (held,) = theirs.records()
        with theirs.lease(held) as descriptor:
            assert descriptor is not None
            send(lab, port, ours, second)
            assert theirs.find(held.checkpoint, 3) == held
            assert os.pread(descriptor, 64, 0) == ours.image(first[0]).read_bytes()[:64]
        send(lab, port, ours, third)
        wait_until(lambda: len(theirs.records()) == 1, 5, "the put-off ones are dropped")
    assert holds(theirs, third[0])
    assert len(list(theirs.images.iterdir())) == 1


def test_a_reader_that_stalls_holds_its_lease_no_longer_than_the_servers_patience(lab: Lab) -> None:
    ours = lab.place("a")
    record, files = lab.copy(ours, size=32 * MIB, files=1)
    with lab.server(ours, patience=0.5) as (_, port):
        deadline = TransferDeadline.within(10)
        line, _ = call(("127.0.0.1", port), run_secret(lab.control), lab.control.run_id, deadline)
        request = Read(checkpoint=record.checkpoint, path=files[0].path, offset=0, length=32 * MIB)
        line.send(request, deadline)
        assert isinstance(line.receive(Data, deadline), Data)
        assert not ours.take_back(record), "it is being read"
        wait_until(lambda: ours.take_back(record), 5, "the lease is given up")
        line.close()


def test_what_is_on_its_way_to_a_reader_does_not_change_when_the_image_does(lab: Lab) -> None:
    """The lease ends when the last byte is queued; from then on the image may be filled anew."""
    ours = lab.place("a")
    record, files = lab.copy(ours, files=1)
    data = ours.image(record).read_bytes()
    length = 2 * CHUNK  # less than a connection holds
    with lab.server(ours) as (_, port):
        deadline = TransferDeadline.within(10)
        line, _ = call(("127.0.0.1", port), run_secret(lab.control), lab.control.run_id, deadline)
        line.send(Read(checkpoint=record.checkpoint, path=files[0].path, offset=5, length=length), deadline)
        assert isinstance(line.receive(Data, deadline), Data)
        wait_until(lambda: ours.take_back(record), 5, "all of it is queued")
        with ours.image(record).open("r+b") as image:
            image.write(b"x" * MIB)
        buffer = bytearray(length)
        line.receive_into(memoryview(buffer), deadline)
        line.close()
    assert buffer == data[5 : 5 + length]


def test_a_sender_holds_a_lease_on_its_own_image(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=2 * MIB)
    with lab.server(theirs) as (_, port), proxy(port) as between:
        between.hold(MIB)
        sender = threading.Thread(target=send, args=(lab, between.port, ours, copy))
        sender.start()
        wait_until(lambda: between.sent and between.sent[0] > 0, 5, "it is sending")
        assert not ours.take_back(copy[0])
        between.release()
        sender.join(10)
    assert holds(theirs, copy[0])
    assert ours.take_back(copy[0])
