"""Joining the local tier: every rank knows the same map of places, or the same reason why there is none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from holdfast.checkpoint.choose import load as loading
from holdfast.checkpoint.choose.sharing import Shared
from holdfast.checkpoint.choose.verifying_reader import VerifyingReader
from holdfast.checkpoint.copies.peers import PeerReader
from holdfast.checkpoint.copies.tier import CopyRecord
from holdfast.checkpoint.copies.wire import LostLineError
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.state.tracked import Tracked
from holdfast.config.settings import CheckpointSettings, ControlSettings, Settings
from holdfast.errors import DecisionTimeoutError, UsageError
from holdfast.journal.events import Warned
from holdfast.journal.writer import JournalWriter
from holdfast.record.directory import ControlDirectory
from holdfast.record.group import Group
from holdfast.train.membership import Membership
from holdfast.train.place import LocalPlaces, join_places
from kit.runs import events_in
from kit.tiny import checkpoints, train

Joined = LocalPlaces | None | Exception


class Two:
    """Two ranks on two nodes, as threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control, _ = ControlDirectory.open_or_create(folder / "run")
        self.journal = JournalWriter(self.control.journal, "test", 1)
        self.factor, self.jump, self.timeout = 2, 0, 10.0

    def directory(self, rank: int) -> Path:
        return self.folder / f"node-{rank}"

    def join(self, *ranks: int, insist: bool) -> list[Joined]:
        store = HashStore()

        def one(rank: int) -> Joined:
            settings = Settings(
                checkpoint=CheckpointSettings(
                    non_persistent_ckpt_type="local",
                    non_persistent_local_ckpt_dir=str(self.directory(rank)),
                    replication_factor=self.factor,
                    replication_jump=self.jump,
                    replication_timeout=0.2,
                ),
                control=ControlSettings(decision_timeout=self.timeout),
            )
            # No fence is needed: nothing is committed here.
            member = Membership(self.control, None, 1, "test", self.journal)  # type: ignore[arg-type]
            member.is_restart = not insist
            try:
                return join_places(settings, Group(rank, 2, store, None), member, f"node-{rank}")
            except Exception as error:  # noqa: BLE001 - it is looked at by the test
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, ranks or (0, 1)))

    def told(self) -> list[str]:
        lines: list[Any] = events_in(self.control.path)
        return [body.message for body in lines if isinstance(body, Warned)]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    made = Two(tmp_path)
    yield made
    made.journal.close()


def test_both_ranks_have_the_same_map_and_serve_each_other(two: Two) -> None:
    first, second = two.join(insist=True)
    assert isinstance(first, LocalPlaces)
    assert isinstance(second, LocalPlaces)
    try:
        assert first.places == second.places
        assert [info.node for info in first.places.places] == ["node-0", "node-1"]
        assert all(info.port for info in first.places.places)
        assert first.replication == second.replication
        assert not two.told()
    finally:
        first.close()
        second.close()


def test_at_a_first_start_all_ranks_refuse_a_directory_that_one_cannot_use(two: Two) -> None:
    two.directory(1).write_text("a file")
    first, second = two.join(insist=True)
    assert isinstance(first, UsageError)
    assert isinstance(second, UsageError)
    assert str(first) == str(second)
    assert str(first).startswith("rank 1 on node-1: the local tier cannot use")
    assert "non_persistent_local_ckpt_dir" in str(first)


def test_at_a_restart_a_node_without_its_directory_costs_its_own_place_only(two: Two) -> None:
    """What the other node holds can be read by both; no rank saves locally, and that is said once."""
    two.directory(1).write_text("a file")
    first, second = two.join(insist=False)
    assert isinstance(first, LocalPlaces)
    assert isinstance(second, LocalPlaces)
    try:
        assert first.places == second.places
        assert first.tier is not None
        assert second.tier is None
        assert [bool(info.place) for info in first.places.places] == [True, False]
        assert [bool(info.port) for info in first.places.places] == [True, False]
        assert not first.whole
        assert [first.saving(), second.saving()] == [None, None]
        here = first.tier.place
        assert first.replication.targets == [[], [here]], "what rank 1 had saved is looked after by rank 0"
    finally:
        first.close()
        second.close()
    told, factor = two.told()
    assert told.startswith("rank 1 on node-1: the local tier cannot use")
    assert "saves of this attempt go to the checkpoint root only" in told
    assert "replication_factor" in factor


def test_at_a_restart_where_no_node_has_its_directory_all_go_on_without(two: Two) -> None:
    """A run that has lost its nodes' directories is not ended by it."""
    for rank in range(2):
        two.directory(rank).write_text("a file")
    assert two.join(insist=False) == [None, None]
    (told,) = two.told()
    assert told.startswith("going on without a local tier: rank 0 on node-0: the local tier cannot use")


def test_a_peer_server_that_dies_is_replaced_without_a_step_being_done(two: Two) -> None:
    """As during a resume: whoever reads from it goes on reading, from the same address."""
    joined = two.join(insist=True)
    first, second = joined
    assert isinstance(first, LocalPlaces)
    assert isinstance(second, LocalPlaces)
    try:
        info = second.places.of(1)
        reader = PeerReader((info.host, info.port), two.control, timeout=30)
        assert reader.copies() == []
        assert second._host is not None
        assert second._host.pid is not None
        os.kill(second._host.pid, signal.SIGKILL)
        assert reader_again(reader) == []
        reader.close()
        assert any("it is started anew, 1 of 3" in told for told in two.told())
    finally:
        _close(joined)


def reader_again(reader: PeerReader) -> list[CopyRecord]:
    """Asked as a load asks: once more after a lost line."""
    try:
        return reader.copies()
    except LostLineError:
        return reader.copies()


def test_a_rank_that_never_comes_costs_the_others_their_deadline(two: Two) -> None:
    two.timeout = 0.2
    assert [type(error) for error in two.join(0, insist=False)] == [DecisionTimeoutError]
    assert [type(error) for error in two.join(1, insist=False)] == [DecisionTimeoutError]


def test_a_jump_that_leads_nowhere_is_refused_first_and_told_of_later(two: Two) -> None:
    two.jump = 5
    refused = two.join(insist=True)
    assert [type(error) for error in refused] == [UsageError, UsageError]
    assert str(refused[0]) == str(refused[1])
    assert "replication_jump" in str(refused[0])
    assert not two.told()
    _close(two.join(insist=False))
    (told,) = two.told()
    assert "replication_jump is 5 ranks" in told


def test_replicas_for_which_there_are_too_few_nodes_are_told_of_once(two: Two) -> None:
    two.factor = 3
    _close(two.join(insist=True))
    (told,) = two.told()
    assert "replication_factor is 3, but the ranks are on 2 nodes" in told


def _close(joined: list[Joined]) -> None:
    for one in joined:
        assert isinstance(one, LocalPlaces)
        one.close()


def test_what_is_left_to_this_rank_is_verified_after_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that comes from the global tier and is not needed by anybody must be right all the same."""
    train(tmp_path / "run", until=3)
    (directory,) = checkpoints(tmp_path / "run")
    _, digest = manifests.read(directory)
    looked: list[list[str]] = []
    monkeypatch.setattr(VerifyingReader, "verify_rest", lambda _, paths: looked.append(list(paths)))
    names = [f"__{rank}_0.distcp" for rank in range(5)]

    class Mixed:
        open = None

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def rest(self, saved_world: int) -> list[str]:
            assert saved_world == 1
            return names[self.rank :: 2]

    monkeypatch.setattr(loading, "_load_tensors", lambda *_: None)
    monkeypatch.setattr(loading, "_read_blob", lambda *_: {"tracked": {}, "own": {"data": None}})
    monkeypatch.setattr(loading, "reshard", lambda *_, **__: Shared({}, {"data": None}, [], [], {}))
    for check in ("check_parts", "check_strict"):
        monkeypatch.setattr(loading, check, lambda *_, **__: None)
    for rank in range(2):
        loading.load(directory, digest, Tracked(), rank, 2, shards=Mixed(rank))  # type: ignore[arg-type]
    assert looked == [names[0::2], names[1::2]]
