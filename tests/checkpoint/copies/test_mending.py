"""Copies that were lost or bad at a resume are made again, from verified sources, beside training."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.checkpoint.copies import room
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.assembled import ServingRank, make_map
from holdfast.checkpoint.copies.inspection import verify_copy
from holdfast.checkpoint.copies.peer_process import PeerServer
from holdfast.checkpoint.copies.rules import assemble, duties, replicate
from holdfast.checkpoint.copies.tier import CopyRecord, LocalTier
from holdfast.checkpoint.format.manifest import CheckpointName, encode
from holdfast.checkpoint.save.handoff import MendCopies
from holdfast.checkpoint.save.local import Mender
from holdfast.journal.events import CopyQuarantined, CopyReplaced, DecisionMade, Resumed, Warned
from holdfast.journal.writer import JournalWriter
from holdfast.train.place import LocalPlaces
from kit.damage import flip
from kit.harness import wait_until
from kit.nodes.local_places import NAME, SHARD, SHARDS, keep_copy, local_run, manifest_of, shard_bytes
from kit.ranks.local_ranks import AtStep, Nodes, killed_after_saves
from kit.runs import events_in

PAIR = ["a", "b"]
LAST, END = 4, 8

# --- who sees to what ---------------------------------------------------------------------------------------


@given(
    per_place=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    factor=st.integers(1, 4),
    saved_world=st.integers(1, 30),
)
def test_every_copy_that_the_next_save_would_make_has_one_rank_that_sees_to_it(
    per_place: list[int], factor: int, saved_world: int
) -> None:
    places = [f"{number:012x}" for number, count in enumerate(per_place) for _ in range(count)]
    targets = replicate(places, factor=factor, jump=0).targets
    seen: list[tuple[str, int]] = []
    for rank, place in enumerate(places):
        mine = duties(places, targets, saved_world=saved_world, rank=rank)
        own = [saved for saved in mine if saved % len(places) == rank]
        assert mine[: len(own)] == own, "its own first"
        seen += [(place, saved) for saved in mine]
    wanted = {
        (place, saved)
        for saved in range(saved_world)
        for place in (places[saved % len(places)], *targets[saved % len(places)])
    }
    assert sorted(seen) == sorted(wanted), "all of them, and none twice"


def test_a_rank_without_a_place_is_looked_after_by_others() -> None:
    places, targets = ["a", "", "c"], [["c"], ["a", "c"], ["a"]]
    found = [duties(places, targets, saved_world=3, rank=rank) for rank in range(3)]
    assert found == [[0, 1, 2], [], [2, 0, 1]]


# --- one copy at a time -------------------------------------------------------------------------------------


class Mended:
    """Rank 0 on node-1, which sees to its own copy and to rank 1's replica; node-2 serves what it holds."""

    def __init__(self, folder: Path) -> None:
        self.run = local_run(folder)
        self.manifest = manifest_of(run=self.run.control.run_id)
        self.name = self.run.commit(self.manifest)
        self.here, self.there = self.run.nodes
        self.directory = folder / "root" / str(NAME)
        self.directory.mkdir(parents=True)
        self.journal = JournalWriter(self.run.control.journal, "writer-0", 1)
        self.port, self.max_bytes, self.timeout, self.in_global = 0, 0, 10.0, False

    def order(self) -> MendCopies:
        control = self.run.control
        held = {tier.place: [f.path for r in tier.records() for f in r.files] for tier in self.run.nodes}
        files = [f"__{rank}_{shard}.distcp" for rank in range(2) for shard in range(SHARDS)]
        written = control.path / "assembly-0.json"
        written.write_bytes(msgspec.json.encode(assemble(files, held, in_global=self.in_global)))
        return MendCopies(
            checkpoint=str(self.name),
            manifest=encode(self.manifest)[1],
            home=str(local_manifest.folder(control, self.name)),
            assembly=str(written),
            directory=str(self.directory),
            rank=0,
            ranks=[0, 1],
            places=make_map(
                [
                    ServingRank(place=self.here.place, node="node-1"),
                    ServingRank(place=self.there.place, node="node-2", host="127.0.0.1", port=self.port),
                ]
            ),
            tier=str(self.here.path),
            node="node-1",
            keep=2,
            max_bytes=self.max_bytes,
            timeout=self.timeout,
        )

    def mend(self) -> None:
        mender = Mender(self.order(), self.run.control, self.journal)
        mender.start()
        mender._thread.join(20)
        assert not mender._thread.is_alive()

    def lose(self, rank: int) -> None:
        record = self.here.find(str(NAME), rank)
        assert record is not None
        assert self.here.drop(record)

    def into_root(self) -> None:
        self.in_global = True
        for rank in range(2):
            for shard in range(SHARDS):
                (self.directory / f"__{rank}_{shard}.distcp").write_bytes(shard_bytes(rank, shard))

    def events(self, kind: type[Any]) -> list[Any]:
        return events_in(self.run.control.path, kind)

    def sound(self, rank: int) -> CopyRecord:
        """The copy here, every byte of it read."""
        record = self.here.find(str(NAME), rank)
        assert record is not None
        assert not verify_copy(self.here, record, self.manifest, digest=encode(self.manifest)[1])
        return record

    def leftovers(self) -> list[str]:
        """Images that no record is of."""
        known = {record.image for record in self.here.records()}
        return sorted(path.name for path in self.here.images.iterdir() if path.name not in known)


@pytest.fixture
def mended(tmp_path: Path) -> Iterator[Mended]:
    made = Mended(tmp_path)
    yield made
    made.journal.close()


@contextlib.contextmanager
def served(mended: Mended) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = PeerServer(listener, mended.run.control, mended.there, keep=2)
        thread = threading.Thread(target=server.serve)
        thread.start()
        mended.port = listener.getsockname()[1]
        try:
            yield
        finally:
            server.stop()
            thread.join(5)


def test_an_own_copy_and_a_replica_are_made_again_from_the_peer(mended: Mended) -> None:
    """A spare with an empty directory holds afterwards what the node before it held."""
    mended.lose(0)
    mended.lose(1)
    with served(mended):
        mended.mend()
    assert (mended.sound(0).kind, mended.sound(1).kind) == ("own", "replica")
    told = [(one.rank, one.node, one.kind, one.sources, one.bytes) for one in mended.events(CopyReplaced)]
    size = SHARD * SHARDS
    assert told == [(0, "node-1", "own", ["peer"], size), (1, "node-1", "replica", ["peer"], size)]
    assert not mended.leftovers()
    assert not mended.events(Warned)


def test_nothing_is_made_where_nothing_is_missing(mended: Mended) -> None:
    before = mended.here.records()
    mended.mend()
    assert mended.here.records() == before
    assert not mended.events(CopyReplaced)


def test_a_replica_that_the_resume_did_not_read_is_verified_and_made_again_if_it_is_bad(
    mended: Mended,
) -> None:
    """Issue 5, point 4: one bad copy is quarantined and replaced."""
    bad = mended.here.find(str(NAME), 1)
    assert bad is not None
    flip(mended.here.image(bad), 4000)
    with served(mended):
        mended.mend()
    (quarantined,) = mended.events(CopyQuarantined)
    assert (quarantined.node, quarantined.kind) == ("node-1", "replica")
    assert mended.sound(1).image != bad.image
    assert [one.rank for one in mended.events(CopyReplaced)] == [1]


def test_a_peer_whose_bytes_are_wrong_is_left_for_the_checkpoint_root(mended: Mended) -> None:
    mended.lose(0)
    mended.into_root()
    bad = mended.there.find(str(NAME), 0)
    assert bad is not None
    flip(mended.there.image(bad), SHARD + 5)
    with served(mended):
        mended.mend()
    mended.sound(0)
    assert [one.sources for one in mended.events(CopyReplaced)] == [["global", "peer"]]


def test_what_is_wrong_everywhere_is_not_made_into_a_copy(mended: Mended) -> None:
    mended.lose(0)
    bad = mended.there.find(str(NAME), 0)
    assert bad is not None
    flip(mended.there.image(bad), SHARD + 5)
    with served(mended):
        mended.mend()
    assert mended.here.find(str(NAME), 0) is None
    assert not mended.leftovers(), "no half copy either"
    assert not mended.events(CopyReplaced)
    told = mended.events(Warned)[-1].message
    assert "rank 0's part" in told
    assert "altered __0_1.distcp" in told


def test_a_peer_that_is_gone_costs_its_deadline_and_says_so(mended: Mended) -> None:
    mended.lose(0)
    mended.timeout = 0.3
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it listens, and never answers
        mended.port = listener.getsockname()[1]
        mended.mend()
    assert mended.here.find(str(NAME), 0) is None
    assert "was not replaced" in mended.events(Warned)[-1].message
    assert not mended.leftovers()


@pytest.mark.parametrize("bound", ["limit", "memory"])
def test_without_free_room_nothing_is_given_up_for_it(
    bound: str, mended: Mended, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = manifest_of(name=CheckpointName(60, "00000060"), run=mended.run.control.run_id)
    mended.run.commit(older)
    mended.lose(0)
    before = mended.here.records()
    if bound == "limit":
        mended.max_bytes = 3 * 8192 + SHARD
    else:
        monkeypatch.setattr(room.LocalRoom, "free", lambda _: SHARD)
    with served(mended):
        mended.mend()
    assert mended.here.records() == before
    assert not mended.leftovers()
    assert "are needed and" in mended.events(Warned)[-1].message


def test_where_a_newer_copy_is_already_the_older_one_is_left_lost(mended: Mended) -> None:
    mended.lose(0)
    newer = manifest_of(name=CheckpointName(180, "00000180"), run=mended.run.control.run_id)
    keep_copy(mended.here, 0, newer, slot="b")
    with served(mended):
        mended.mend()
    assert mended.here.find(str(NAME), 0) is None
    assert not mended.events(CopyReplaced)
    assert not mended.events(Warned)


def test_another_manifest_under_the_same_name_mends_nothing(mended: Mended) -> None:
    mended.lose(0)
    folder = local_manifest.folder(mended.run.control, mended.name)
    other = encode(msgspec.structs.replace(mended.manifest, created=5.0))[0]
    (folder / "holdfast.json").write_bytes(other)
    with served(mended):
        mended.mend()
    assert mended.here.find(str(NAME), 0) is None
    assert "were not looked after" in mended.events(Warned)[-1].message


# --- two nodes lost, one after the other --------------------------------------------------------------------


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes saved locally every two steps, replicated, and were killed before step 5."""
    with killed_after_saves(tmp_path_factory.mktemp("died") / "two", PAIR, LAST, END) as nodes:
        yield nodes


def die_at(step: int, nodes: Nodes, replaced: int) -> AtStep:
    """Before that step, once so many copies have been made again."""

    def at_step(now: int, run: holdfast.Run) -> None:
        if now == step:
            wait_until(lambda: len(nodes.events(CopyReplaced)) >= replaced, 30, "copies are replaced")
            os.kill(os.getpid(), signal.SIGKILL)

    return at_step


@pytest.mark.parametrize("mending", [True, pytest.param(False, marks=pytest.mark.drill)])
def test_a_second_node_lost_right_after_the_first_costs_nothing_once_copies_are_replaced(
    mending: bool, died: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 5, points 4 and 5: node a is lost, then node b, before the next save. Without it: a step back."""
    if not mending:
        monkeypatch.setattr(LocalPlaces, "mend", lambda *_: None)
    with died.aside(f"second {mending}") as nodes:
        nodes.lose("a")
        dying = die_at(LAST + 1, nodes, replaced=2 if mending else 0)
        assert nodes.train(PAIR, END, at_step=dict.fromkeys(range(2), dying)) == [-9] * 2
        assert nodes.events(Resumed)[-1].step == LAST
        replaced = {(one.node, one.rank, one.kind) for one in nodes.events(CopyReplaced)}
        assert replaced == ({("a", 0, "own"), ("a", 1, "replica")} if mending else set())
        nodes.lose("b")
        assert nodes.train(PAIR, END) == [0] * 2
        assert nodes.events(Resumed)[-1].step == (LAST if mending else 0)
        assert nodes.steps() == died.reference
        chosen = [one for one in nodes.events(DecisionMade) if one.about == "resume"][-1]
        assert any("from peers" in text for text in chosen.evidence) is mending
        for node in PAIR:  # the run may have ended while something was being made: it is whole, or nothing
            tier = LocalTier.at(nodes.place(node))
            assert not list(tier.images.glob(".*.part"))
            for record in tier.records():
                manifest = local_manifest.read(nodes.control, record.name, record.manifest)
                assert not verify_copy(tier, record, manifest, digest=record.manifest)
