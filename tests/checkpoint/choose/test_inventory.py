"""What places say they hold, found out and judged at a resume, without training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore

from holdfast.checkpoint.choose.ladder import take_inventory, take_pinned
from holdfast.checkpoint.choose.resume import blame_storage
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.assembled import ServingRank, make_map
from holdfast.checkpoint.copies.inspection import LocalInventory
from holdfast.checkpoint.copies.rules import Assembly
from holdfast.checkpoint.format.manifest import MANIFEST, METADATA, CheckpointName, CheckpointRoot, encode
from holdfast.errors import DecisionTimeoutError
from holdfast.journal.events import CopyQuarantined, StorageAlarm
from holdfast.journal.writer import JournalWriter
from kit.damage import flip
from kit.nodes.local_places import NAME, LocalRun, local_run, manifest_of
from kit.runs import events_in


class Resuming:
    """Two nodes of one rank each, as they are at a resume."""

    def __init__(self, folder: Path) -> None:
        self.run: LocalRun = local_run(folder)
        self.manifest = manifest_of(run=self.run.control.run_id)
        self.digest = encode(self.manifest)[1]
        self.name = self.run.commit(self.manifest)
        self.root = folder / "root"
        self.journal = JournalWriter(self.run.control.journal, "rank0", 1)
        self.store = HashStore()
        self.folder = local_manifest.folder(self.run.control, self.name)
        self.ranks = [self.inventory(rank) for rank in range(2)]

    def inventory(self, rank: int, timeout: float = 5.0) -> LocalInventory:
        said = [ServingRank(place=tier.place, node=tier.record.node) for tier in self.run.nodes]
        return LocalInventory(
            tier=self.run.nodes[rank],
            places=make_map(said),
            rank=rank,
            control=self.run.control,
            store=self.store,
            journal=self.journal,
            attempt=1,
            timeout=timeout,
            peer_timeout=1.0,
        )

    def verified(self, number: int = 0) -> tuple[Assembly, list[str]]:
        for rank in self.ranks:
            rank.answer(number, self.name, self.digest, self.folder)
        return self.ranks[0].gather(number, self.manifest, in_global=False)

    def events(self, kind: type[Any]) -> list[Any]:
        return events_in(self.run.control.path, kind)

    def quarantined(self) -> list[Path]:
        return [path for tier in self.run.nodes for path in tier.quarantined.iterdir()]


@pytest.fixture
def resuming(tmp_path: Path) -> Iterator[Resuming]:
    made = Resuming(tmp_path)
    yield made
    made.journal.close()


# --- claims -------------------------------------------------------------------------------------------------


def test_every_place_says_what_it_has_records_of(resuming: Resuming) -> None:
    for rank in resuming.ranks:
        rank.report()
    assert resuming.ranks[0].claims() == {resuming.name}


def test_a_place_that_says_nothing_is_waited_for_no_longer_than_the_deadline(resuming: Resuming) -> None:
    waiting = resuming.inventory(0, timeout=0.2)
    waiting.report()
    started = time.monotonic()
    with pytest.raises(DecisionTimeoutError, match="node-2"):
        waiting.claims()
    with pytest.raises(DecisionTimeoutError, match="node-1"):
        waiting.gather(0, resuming.manifest, in_global=False)
    assert time.monotonic() - started < 5


def test_a_claim_of_a_checkpoint_that_this_run_never_saved_is_nothing(resuming: Resuming) -> None:
    """It is no rung, and does not stand against a fresh start of a run that has none."""
    control, root = resuming.run.control, CheckpointRoot(resuming.root)
    stranger = CheckpointName(500, "0badf00d")
    ladder = take_inventory(control, root, "auto", force=False, copies={stranger, resuming.name})
    assert [rung.name for rung in ladder.rungs] == [str(resuming.name)]
    assert take_pinned(control, root, str(stranger), force=False, copies={stranger}).rungs == []
    for path in control.attempt(1).glob("commits/*"):
        path.unlink()
    assert take_inventory(control, root, "auto", force=False, copies={stranger}).may_start_fresh


# --- where the manifest is ----------------------------------------------------------------------------------


def test_a_manifest_that_is_not_the_committed_one_is_not_used(resuming: Resuming) -> None:
    """The checkpoint root's own is, if it has the checkpoint."""
    directory = resuming.root / str(resuming.name)
    directory.mkdir(parents=True)
    for file in (MANIFEST, METADATA):
        (directory / file).write_bytes((resuming.folder / file).read_bytes())
    look = resuming.ranks[0].home
    assert look(resuming.name, resuming.digest, directory) == resuming.folder
    other = encode(msgspec.structs.replace(resuming.manifest, created=5.0))[0]
    (resuming.folder / MANIFEST).write_bytes(other)
    assert look(resuming.name, resuming.digest, directory) == directory
    (directory / MANIFEST).unlink()
    assert look(resuming.name, resuming.digest, directory) is None


@pytest.mark.parametrize("damage", ["altered", "gone", "longer"])
def test_metadata_that_is_not_as_listed_is_not_used_either(damage: str, resuming: Resuming) -> None:
    directory = resuming.root / str(resuming.name)
    directory.mkdir(parents=True)
    for file in (MANIFEST, METADATA):
        (directory / file).write_bytes((resuming.folder / file).read_bytes())
    metadata = resuming.folder / METADATA
    if damage == "altered":
        flip(metadata, 3)
    elif damage == "gone":
        metadata.unlink()
    else:
        metadata.write_bytes(metadata.read_bytes() + b"!")
    assert resuming.ranks[0].home(resuming.name, resuming.digest, directory) == directory
    assert resuming.ranks[0].home(resuming.name, resuming.digest, resuming.root / "none") is None


def test_a_manifest_that_changed_since_it_was_proposed_verifies_nothing(resuming: Resuming) -> None:
    other = encode(msgspec.structs.replace(resuming.manifest, created=5.0))[0]
    (resuming.folder / MANIFEST).write_bytes(other)
    assembly, bad = resuming.verified()
    assert not assembly.complete
    assert len(bad) == 2
    assert "could not verify its copies" in bad[0]
    assert not resuming.quarantined(), "the copies are not to blame"


# --- what they hold -----------------------------------------------------------------------------------------


def test_sound_copies_are_sources_on_both_nodes(resuming: Resuming) -> None:
    assembly, bad = resuming.verified()
    assert assembly.complete
    assert not bad
    places = sorted(tier.place for tier in resuming.run.nodes)
    assert set(map(tuple, assembly.sources.values())) == {tuple(places)}


def test_a_bad_copy_is_quarantined_and_the_other_node_is_the_source(resuming: Resuming) -> None:
    tier, other = resuming.run.nodes
    record = tier.find(str(NAME), 0)
    assert record is not None
    flip(tier.image(record), 3100)
    assembly, bad = resuming.verified()
    assert assembly.complete
    assert assembly.sources["__0_0.distcp"] == [other.place]
    assert len(assembly.sources["__1_0.distcp"]) == 2
    assert len(bad) == 1
    assert "own copy of rank 0's part on node-1: altered: __0_1.distcp" in bad[0]
    (event,) = resuming.events(CopyQuarantined)
    assert (event.node, event.kind) == ("node-1", "own")
    assert tier.find(str(NAME), 0) is None
    assert len(resuming.quarantined()) == 1


def test_a_copy_that_is_gone_when_it_is_looked_at_is_not_quarantined(resuming: Resuming) -> None:
    """Its memory may hold a newer copy by now, of the same name or another: nothing is there to keep out."""
    tier, other = resuming.run.nodes
    own, replica = tier.find(str(NAME), 0), tier.find(str(NAME), 1)
    assert own is not None
    assert replica is not None
    stale = tier.records()
    tier.records = lambda rank=None: stale  # type: ignore[method-assign]
    newer = msgspec.structs.replace(own, at=own.at + 1)
    tier.commit(newer)
    tier.image(replica).unlink()
    assembly, bad = resuming.verified()
    assert assembly.complete
    assert {place for places in assembly.sources.values() for place in places} == {other.place}
    assert len(bad) == 2
    assert all(": missing: " in told for told in bad)
    assert tier.find(str(NAME), 0) == newer
    assert not resuming.quarantined()
    assert not resuming.events(CopyQuarantined)


def test_a_copy_made_under_another_manifest_is_refused(resuming: Resuming) -> None:
    """Same name, same digests of the same files: another save all the same."""
    tier, other = resuming.run.nodes
    record = tier.find(str(NAME), 0)
    assert record is not None
    tier.commit(msgspec.structs.replace(record, manifest="f" * 32))
    assembly, bad = resuming.verified()
    assert assembly.sources["__0_0.distcp"] == [other.place]
    assert "was made under manifest ffff" in bad[0]
    assert len(resuming.events(CopyQuarantined)) == 1


def test_copies_of_other_checkpoints_are_left_alone(resuming: Resuming) -> None:
    """A bad copy of a rung that nobody proposes is nobody's business yet."""
    earlier = CheckpointName(60, "00000060")
    resuming.run.commit(manifest_of(name=earlier, run=resuming.run.control.run_id))
    tier = resuming.run.nodes[0]
    record = tier.find(str(earlier), 0)
    assert record is not None
    flip(tier.image(record), 10)
    assembly, bad = resuming.verified()
    assert assembly.complete
    assert not bad
    assert tier.find(str(earlier), 0) == record


def test_what_both_nodes_have_lost_has_no_source(resuming: Resuming) -> None:
    for tier in resuming.run.nodes:
        record = tier.find(str(NAME), 1)
        assert record is not None
        assert tier.drop(record)
    assembly, _ = resuming.verified()
    assert assembly.missing == ["__1_0.distcp", "__1_1.distcp"]
    assert not assembly.complete


def test_each_round_has_answers_of_its_own(resuming: Resuming) -> None:
    """What was sound a proposal ago proves nothing now."""
    assert resuming.verified(0)[0].complete
    for tier in resuming.run.nodes:
        record = tier.find(str(NAME), 0)
        assert record is not None
        flip(tier.image(record), 10)
    assert not resuming.verified(1)[0].complete


# --- the storage alarm --------------------------------------------------------------------------------------


def test_two_unusable_rungs_in_a_row_raise_the_alarm_once(resuming: Resuming) -> None:
    """Scenario 23."""
    resuming.root.mkdir()
    assert blame_storage(resuming.journal, ["a"], resuming.root) == ""
    assert not resuming.events(StorageAlarm)
    assert blame_storage(resuming.journal, ["a", "b"], resuming.root) == "", "the storage itself is well"
    assert blame_storage(resuming.journal, ["a", "b", "c"], resuming.root) == ""
    (alarm,) = resuming.events(StorageAlarm)
    assert alarm.checkpoints == ["a", "b"]
    assert not list(resuming.root.iterdir()), "nothing of the probe is left"


def test_storage_that_cannot_be_written_ends_the_search(resuming: Resuming) -> None:
    why = blame_storage(resuming.journal, ["a", "b"], resuming.root / "gone")
    assert why.startswith("storage alarm: a and b, one after the other, cannot be used")
    assert "No such file" in why
