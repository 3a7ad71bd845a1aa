"""Reading shards from several sources: each is left for the next one, and costs no more than it must."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.checkpoint.choose import verifying_reader as reader
from holdfast.checkpoint.choose.verifying_reader import VerifyingReader
from holdfast.checkpoint.copies import assembled, peers
from holdfast.checkpoint.copies.assembled import AssembledShards, ServingRank, make_map
from holdfast.checkpoint.copies.peer_process import PeerHost, PeerServer
from holdfast.checkpoint.copies.rules import assemble
from holdfast.checkpoint.copies.tier import LocalTier
from holdfast.checkpoint.copies.wire import Data, Line, Read, TransferDeadline, admit
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import METADATA
from holdfast.errors import CheckpointError
from holdfast.journal.events import CopyQuarantined, Warned
from holdfast.journal.writer import JournalWriter
from holdfast.record.secret import run_secret
from kit.damage import flip
from kit.harness import wait_until
from kit.nodes.local_places import (
    CHUNKS,
    NAME,
    SHARD,
    SHARDS,
    LocalRun,
    local_run,
    manifest_of,
    shard_bytes,
)
from kit.nodes.local_tier import memory
from kit.runs import events_in

FILES = [f"__{rank}_{shard}.distcp" for rank in range(2) for shard in range(SHARDS)]
OWN, OTHERS = FILES[:SHARDS], FILES[SHARDS:]
"""Of the reader's rank, 0, and of rank 1; each node holds both."""


class Reading:
    """A rank that loads: rank 0 on node-1, beside node-2 whose server is at `port`, and a global tier."""

    def __init__(self, folder: Path, port: int = 0, *, in_global: bool = True, timeout: float = 0.5) -> None:
        self.run: LocalRun = local_run(folder)
        self.manifest = manifest_of(run=self.run.control.run_id)
        self.run.commit(self.manifest)
        self.here, self.there = self.run.nodes
        self.port, self.in_global, self.timeout = port, in_global, timeout
        self.directory = folder / "root" / str(NAME)
        self.directory.mkdir(parents=True)
        for rank in range(2):
            for shard in range(SHARDS):
                (self.directory / f"__{rank}_{shard}.distcp").write_bytes(shard_bytes(rank, shard))
        self.holders = [self.here, self.there]
        self.verified = True
        self.shards: AssembledShards | None = None
        self.journal = JournalWriter(self.run.control.journal, "rank0", 1)

    def begin(self) -> AssembledShards:
        """After the places have been found to hold what they hold."""
        control = self.run.control
        held = {tier.place: [f.path for r in tier.records() for f in r.files] for tier in self.holders}
        self.shards = AssembledShards(
            str(NAME),
            assemble(FILES, held, in_global=self.in_global, verified=self.verified),
            places=make_map(
                [
                    ServingRank(place=self.here.place, node="node-1"),
                    ServingRank(place=self.there.place, node="node-2", host="127.0.0.1", port=self.port),
                ]
            ),
            rank=0,
            tier=self.here,
            control=control,
            directory=self.directory,
            journal=self.journal,
            timeout=self.timeout,
        )
        return self.shards

    def load(self, *paths: str) -> dict[str, int]:
        """Read and verify these files; from where their bytes came."""
        shards = self.shards or self.begin()
        reader = VerifyingReader(self.directory, self.manifest, shards.open)
        before = dict(shards.used)
        reader.verify_rest(paths)
        return {kind: n - before.get(kind, 0) for kind, n in shards.used.items() if n != before.get(kind, 0)}

    def events(self, kind: type[Any]) -> list[Any]:
        return events_in(self.run.control.path, kind)

    def quarantined(self) -> list[str]:
        return [path.name for tier in self.run.nodes for path in tier.quarantined.iterdir()]


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[Reading]:
    made = Reading(tmp_path)
    yield made
    if made.shards is not None:
        made.shards.close()
    made.journal.close()


@contextlib.contextmanager
def served(reading: Reading, tier: LocalTier) -> Iterator[PeerServer]:
    """A real server for node-2."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = PeerServer(listener, reading.run.control, tier, keep=2)
        thread = threading.Thread(target=server.serve)
        thread.start()
        reading.port = listener.getsockname()[1]
        try:
            yield server
        finally:
            server.stop()
            thread.join(5)


@contextlib.contextmanager
def fake(reading: Reading, answer: Callable[[Line, Read], None]) -> Iterator[list[Read]]:
    """A peer that knows the secret, and answers as it likes; what it was asked for."""
    asked: list[Read] = []
    control, record = reading.run.control, reading.there.record
    lines: list[Line] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                line = Line(listener.accept()[0], "test")
                lines.append(line)
                with contextlib.suppress(Exception):
                    deadline = TransferDeadline.within(20)
                    admit(
                        line,
                        run_secret(control),
                        control.run_id,
                        place=record.place,
                        node="node-2",
                        deadline=deadline,
                    )
                    while True:
                        asked.append(line.receive(Read, deadline))
                        answer(line, asked[-1])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        reading.port = listener.getsockname()[1]
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for line in lines:
                line.cut()
            thread.join(5)


def lose_here(reading: Reading) -> None:
    for record in reading.here.records():
        assert reading.here.drop(record)


# --- this node's own ----------------------------------------------------------------------------------------


def test_what_this_node_holds_is_read_here_and_nobody_is_asked(reading: Reading) -> None:
    assert reading.load(*FILES) == {"own": len(FILES) * SHARD}
    assert not reading.events(Warned)


def test_a_copy_that_went_bad_is_quarantined_once_and_costs_nothing_but_itself(reading: Reading) -> None:
    """Its other shards are not asked for again; what else this node holds is still used."""
    record = reading.here.find(str(NAME), 0)
    assert record is not None
    with served(reading, reading.there):
        reading.begin()  # it was sound when the places said what they hold
        flip(reading.here.image(record), 100)
        assert reading.load(*FILES) == {
            "own": SHARD + SHARD * SHARDS,  # what the bad chunk lies in was read here first, in one go
            "peer": SHARD * SHARDS,
        }
    (bad,) = reading.events(CopyQuarantined)
    assert (bad.node, bad.kind, bad.checkpoint) == ("node-1", "own", str(NAME))
    assert bad.reasons[0].startswith("altered __0_0.distcp")
    assert reading.here.find(str(NAME), 0) is None
    assert reading.here.find(str(NAME), 1) is not None
    assert len(reading.quarantined()) == 1
    assert not reading.events(Warned), "its other shard was not tried here"


def test_a_copy_that_is_given_up_meanwhile_is_not_quarantined(reading: Reading) -> None:
    """A newer one of the same name stays: it is not the one that could not be read."""
    reading.begin()
    old = reading.here.find(str(NAME), 0)
    assert old is not None
    assert reading.here.take_back(old)
    os.rename(reading.here.image(old), reading.here.images / "00000.abc")
    newer = msgspec.structs.replace(old, image="00000.abc")
    reading.here.commit(newer)
    assert reading.load(*OWN) == {"global": SHARD * SHARDS}
    assert reading.here.find(str(NAME), 0) == newer
    assert not reading.quarantined()
    assert not reading.events(CopyQuarantined)
    assert reading.load(*OTHERS) == {"own": SHARD * SHARDS}, "the rest of what this node holds still counts"


def test_a_copy_that_is_shorter_than_it_was_is_bad(reading: Reading) -> None:
    record = reading.here.find(str(NAME), 0)
    assert record is not None
    os.truncate(reading.here.image(record), SHARD + 10)
    assert reading.load(*OWN)["global"] == SHARD
    (bad,) = reading.events(CopyQuarantined)
    assert "truncated" in bad.reasons[0]


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    """The same where the node's directory is memory, with items that are used where they lie."""
    monkeypatch.setattr(reader, "IN_PLACE", 512)
    with memory() as where:
        made = Reading(where)
        yield made
        if made.shards is not None:
            made.shards.close()
        made.journal.close()


def test_what_lies_in_memory_is_used_there_and_nothing_else_is_read(
    in_memory: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembled, "read_at", None)
    assert in_memory.load(*FILES) == {"own": len(FILES) * SHARD}


def test_a_byte_flipped_in_memory_is_found_where_it_lies_and_costs_the_copy(in_memory: Reading) -> None:
    record = in_memory.here.find(str(NAME), 0)
    assert record is not None
    flip(in_memory.here.image(record), 100)
    assert in_memory.load(*OWN) == {"own": 700, "global": SHARD * SHARDS}
    (bad,) = in_memory.events(CopyQuarantined)
    assert bad.reasons[0].startswith("altered __0_0.distcp")
    assert in_memory.here.find(str(NAME), 0) is None


def test_an_image_in_memory_that_was_cut_short_is_bad_and_ends_nobody(in_memory: Reading) -> None:
    """A mapping of it would be a signal that ends the process."""
    record = in_memory.here.find(str(NAME), 0)
    assert record is not None
    os.truncate(in_memory.here.image(record), SHARD + 10)
    assert in_memory.load(*OWN)["global"] == SHARD
    (bad,) = in_memory.events(CopyQuarantined)
    assert "truncated" in bad.reasons[0]


def test_two_ranks_of_a_node_that_find_the_same_copy_bad_quarantine_it_once(reading: Reading) -> None:
    record = reading.here.find(str(NAME), 0)
    assert record is not None
    entry = next(entry for entry in reading.manifest.files if entry.path == OWN[0])
    other = reading.begin()
    with other.open(entry) as shard:
        shard.read_into(memoryview(bytearray(700)), 0)
        flip(reading.here.image(record), 100)
        reading.begin()
        assert reading.load(*OWN)["global"] == SHARD * SHARDS
        assert shard.another("altered __0_0.distcp: both saw it"), "there is another source"
    assert len(reading.events(CopyQuarantined)) == 1
    assert len(reading.quarantined()) == 1


# --- peers --------------------------------------------------------------------------------------------------


def test_what_this_node_has_lost_comes_from_a_peer(reading: Reading) -> None:
    lose_here(reading)
    with served(reading, reading.there):
        assert reading.load(*FILES) == {"peer": len(FILES) * SHARD}


def _part(request: Read) -> memoryview:
    _, rank, shard = request.path.removesuffix(".distcp").rsplit("_", 2)
    return memoryview(shard_bytes(int(rank), int(shard)))[request.offset : request.offset + request.length]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PIECE", 100)
    monkeypatch.setattr(assembled, "FROM_PEER", 100)


def test_the_next_piece_is_asked_for_while_this_one_is_on_its_way(
    reading: Reading, small_pieces: None
) -> None:
    """A peer that gives a piece only once it was asked for the next one is no obstacle."""
    lose_here(reading)
    held: list[Read] = []
    ends = {offset + length for offset, length in CHUNKS}

    def give(line: Line, request: Read) -> None:
        held.append(request)
        last = request.offset + request.length in ends
        if len(held) < 2 and not last:
            return
        for one in [held.pop(0) for _ in range(len(held) if last else 1)]:
            line.send(Data(one.length), TransferDeadline.within(5))
            line.send_bytes(_part(one), TransferDeadline.within(5))

    with fake(reading, give) as asked:
        assert reading.load(*FILES) == {"peer": len(FILES) * SHARD}
    assert len(asked) == len({(one.path, one.offset) for one in asked}), "nothing is asked for twice"


def test_a_line_that_is_lost_between_two_pieces_is_taken_up_where_it_was(
    reading: Reading, small_pieces: None
) -> None:
    lose_here(reading)
    given: list[int] = []

    def give(line: Line, request: Read) -> None:
        given.append(request.offset)
        if len(given) % 7 == 0:
            line.cut()
            return
        line.send(Data(request.length), TransferDeadline.within(5))
        line.send_bytes(_part(request), TransferDeadline.within(5))

    with fake(reading, give):
        assert reading.load(*FILES) == {"peer": len(FILES) * SHARD}
    assert not reading.events(Warned)


def test_wrong_bytes_of_a_peer_cost_that_shard_and_not_the_peer(reading: Reading) -> None:
    lose_here(reading)
    record = reading.there.find(str(NAME), 0)
    assert record is not None
    flip(reading.there.image(record), 5)
    with served(reading, reading.there):
        found = reading.load(*FILES)
    assert found == {"peer": SHARD * 4, "global": SHARD}
    (warned,) = reading.events(Warned)
    assert "altered __0_0.distcp" in warned.message
    assert "node-2" in warned.message
    assert not reading.events(CopyQuarantined), "it is not this node's to judge"


def test_a_peer_that_has_given_a_copy_up_is_still_asked_for_others(reading: Reading) -> None:
    lose_here(reading)
    record = reading.there.find(str(NAME), 0)
    assert record is not None
    with served(reading, reading.there):
        reading.begin()
        assert reading.there.drop(record)
        assert reading.load(*FILES) == {"global": SHARD * SHARDS, "peer": SHARD * SHARDS}


def test_a_peer_that_cannot_be_reached_is_asked_once(reading: Reading) -> None:
    lose_here(reading)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reading.port = listener.getsockname()[1]
    assert reading.load(*FILES) == {"global": len(FILES) * SHARD}
    (warned,) = reading.events(Warned)
    assert "cannot be reached" in warned.message


def test_a_peer_without_a_server_is_passed_over(reading: Reading) -> None:
    lose_here(reading)
    assert reading.load(*FILES) == {"global": len(FILES) * SHARD}


def test_a_peer_that_stalls_within_an_answer_costs_its_deadline_once(reading: Reading) -> None:
    def half(line: Line, request: Read) -> None:
        line.send(Data(request.length), TransferDeadline.within(5))
        line.send_bytes(memoryview(bytes(request.length // 2)), TransferDeadline.within(5))

    lose_here(reading)
    with fake(reading, half) as asked:
        started = time.monotonic()
        assert reading.load(*FILES) == {"global": len(FILES) * SHARD}
        taken = time.monotonic() - started
        assert len(asked) == 1, "four files, one deadline"
    assert 0.4 < taken < 3, taken
    (warned,) = reading.events(Warned)
    assert "too slow" in warned.message


def test_a_peer_from_which_nothing_comes_is_left_before_its_deadline(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "STILL", 0.1)
    reading.timeout = 60.0
    lose_here(reading)
    with fake(reading, lambda line, request: None):
        started = time.monotonic()
        assert reading.load(*FILES) == {"global": len(FILES) * SHARD}
        assert time.monotonic() - started < 10


def _garbage(line: Line, request: Read) -> None:
    line.send(Data(request.length), TransferDeadline.within(5))
    line.send_bytes(memoryview(b"\xff" * request.length), TransferDeadline.within(5))


def _nonsense(line: Line, request: Read) -> None:
    line.send_bytes(memoryview(b"\x00\x00\x00\x04junk"), TransferDeadline.within(5))


def _boast(line: Line, request: Read) -> None:
    line.send(Data(request.length + 1), TransferDeadline.within(5))


def _hang_up(line: Line, request: Read) -> None:
    line.cut()


@pytest.mark.parametrize("answer", [_garbage, _nonsense, _boast, _hang_up])
def test_a_peer_that_serves_nonsense_is_never_believed(
    answer: Callable[[Line, Read], None], reading: Reading
) -> None:
    lose_here(reading)
    with fake(reading, answer):
        started = time.monotonic()
        found = reading.load(*FILES)
        assert time.monotonic() - started < 5
    assert found["global"] == len(FILES) * SHARD
    warned = reading.events(Warned)
    assert len(warned) == (len(FILES) if answer is _garbage else 1)
    assert (f"offered {SHARD + 1} bytes, expected {SHARD}" in warned[0].message) is (answer is _boast)


def test_a_peer_that_is_killed_in_the_middle_of_a_load_is_left_for_the_next_source(reading: Reading) -> None:
    """A real server process, whose leader is stuck and does not replace it."""
    lose_here(reading)
    control = reading.run.control
    journal = JournalWriter(control.journal, "rank1", 1)
    host = PeerHost(
        control=control,
        tier=reading.there,
        attempt=1,
        journal=journal,
        host="127.0.0.1",
        keep=2,
        linger=0.5,
    )
    try:
        host.start()
        reading.port, reading.timeout = host.address[1], 10.0
        assert reading.load(FILES[0]) == {"peer": SHARD}
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        assert reading.shards is not None
        reading.shards._readers[reading.there.place]._timeout = 0.3
        assert reading.load(*FILES[1:]) == {"global": 3 * SHARD}
    finally:
        host.close(10.0)
        journal.close()


# --- the end of all sources ---------------------------------------------------------------------------------


def test_without_any_source_left_the_load_fails_by_name(reading: Reading) -> None:
    reading.in_global = False
    lose_here(reading)
    with pytest.raises(CheckpointError, match=r"missing.*has no peer server"):
        reading.load(*FILES)


def test_a_bad_shard_in_the_global_tier_is_the_last_word(reading: Reading) -> None:
    lose_here(reading)
    flip(reading.directory / FILES[1], 2000)
    with pytest.raises(CheckpointError, match=rf"altered {FILES[1]}"):
        reading.load(*FILES)


def test_files_that_no_place_has_verified_are_left_to_whoever_loads(reading: Reading) -> None:
    reading.verified = False
    assert reading.begin().rest(2) == OWN, "what rank 0 has saved; the rest is rank 1's"
    reading.verified, reading.holders = True, [reading.here]
    record = reading.here.find(str(NAME), 0)
    assert record is not None
    assert reading.here.drop(record)
    assert reading.begin().rest(2) == OWN, "only the root has it, and nobody has looked there"
    assert METADATA not in reading.begin().rest(2)
    assert manifests.read(reading.run.control.path / "local" / str(NAME))[0] == reading.manifest


def test_reading_from_a_peer_leaves_no_connection_behind(reading: Reading) -> None:
    lose_here(reading)
    with served(reading, reading.there) as server:
        reading.load(*FILES)
        assert server.connections == 1
        assert reading.shards is not None
        reading.shards.close()
        wait_until(lambda: server.connections == 0, 5, "the connection ends")
