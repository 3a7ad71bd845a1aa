"""The lineage and the ladder are pure; any history gives an order that never leaves the timeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from holdfast.checkpoint.choose.ladder import build_ladder, take_inventory, take_pinned
from holdfast.checkpoint.choose.resume import blame_storage
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.assembled import ServingRank, make_map
from holdfast.checkpoint.copies.inspection import LocalInventory
from holdfast.checkpoint.copies.rules import Assembly
from holdfast.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    CheckpointName,
    CheckpointRoot,
    derive_id,
    encode,
    parse_name,
)
from holdfast.errors import DecisionTimeoutError
from holdfast.journal.events import CopyQuarantined, StorageAlarm
from holdfast.journal.writer import JournalWriter
from holdfast.record.attempts import HeadRecord
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.lineage import (
    CommitRecord,
    DeletedRecord,
    Timeline,
    commits_of,
    deleted_names,
    record_deleted,
    timeline,
)
from holdfast.record.standing import Standing
from kit.damage import flip
from kit.nodes.local_places import NAME, LocalRun, local_run, manifest_of
from kit.runs import events_in


def commit(attempt: int, step: int) -> CommitRecord:
    id = derive_id("run", attempt, step, 1)
    return CommitRecord(id=id, step=step, parent=None, attempt=attempt, manifest="0" * 32)


def head(attempt: int, source: CommitRecord | None) -> HeadRecord:
    return HeadRecord(
        attempt=attempt, checkpoint=source.id if source else None, step=source.step if source else 0
    )


def test_after_a_rollback_only_the_new_timeline_counts() -> None:
    """Scenario 27: 110 and 120 of attempt 1 are off the line once attempt 2 went back to 100."""
    c100, c110, c120 = commit(1, 100), commit(1, 110), commit(1, 120)
    again = commit(2, 110)
    heads = {1: head(1, None), 2: head(2, c100)}
    line = timeline(heads, {1: [c100, c110, c120], 2: [again]})
    assert line == [again, c100]


def test_a_late_commit_by_a_cut_off_attempt_is_not_on_the_line() -> None:
    """Scenario 28: the old group's rename went through after the new one had its head."""
    c100 = commit(1, 100)
    heads = {1: head(1, None), 2: head(2, c100)}
    assert timeline(heads, {1: [c100, commit(1, 120)], 2: []}) == [c100]


def test_an_attempt_that_never_got_a_head_changes_nothing() -> None:
    c100 = commit(1, 100)
    assert timeline({1: head(1, None)}, {1: [c100], 2: []}) == [c100]


def test_of_two_saves_of_one_step_the_later_comes_first() -> None:
    """State may change between the two: an evaluation draws random numbers, gradients are added."""
    once = [msgspec.structs.replace(commit(1, 100), id=id, created=at) for id, at in (("a", 2.0), ("b", 1.0))]
    for order in (once, once[::-1]):
        line = timeline({1: head(1, None)}, {1: order})
        assert [record.id for record in line] == ["a", "b"]
        names = frozenset((record.step, record.id) for record in line)
        there = [CheckpointName(*name) for name in names]
        ladder = build_ladder(Timeline(line, [], None), {}, there, names)
        assert [rung.id for rung in ladder.rungs] == ["a", "b"]


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[int, HeadRecord], dict[int, list[CommitRecord]]]:
    """Attempts that each resume from any earlier commit, or from nothing, and save at rising steps."""
    heads: dict[int, HeadRecord] = {}
    commits: dict[int, list[CommitRecord]] = {}
    everything: list[CommitRecord] = []
    for attempt in range(1, draw(st.integers(1, 6)) + 1):
        source = draw(st.sampled_from([None, *everything])) if everything else None
        if draw(st.booleans()) or attempt == 1:
            heads[attempt] = head(attempt, source)
            start = source.step if source else 0
            steps = draw(st.lists(st.integers(1, 9), max_size=4))
            mine = [commit(attempt, start + 10 * sum(steps[: i + 1])) for i in range(len(steps))]
        else:
            mine = []
        commits[attempt] = mine
        everything += mine
    return heads, commits


@given(histories())
def test_the_timeline_is_one_strictly_falling_line_through_the_heads(
    history: tuple[dict[int, HeadRecord], dict[int, list[CommitRecord]]],
) -> None:
    heads, commits = history
    line = timeline(heads, commits)
    steps = [record.step for record in line]
    assert steps == sorted(set(steps), reverse=True), "one checkpoint a step, newest first"
    newest = max(heads)
    assert all(record in line for record in commits[newest])
    source = heads[newest].checkpoint
    assert source is None or source in {record.id for record in line}
    by_id = {record.id: record for records in commits.values() for record in records}
    attempt, limit = newest, None
    allowed = set()
    while True:
        allowed |= {r.id for r in commits[attempt] if limit is None or r.step <= limit}
        source = heads[attempt].checkpoint
        if source is None:
            break
        attempt, limit = by_id[source].attempt, by_id[source].step
    assert {record.id for record in line} == allowed


@given(histories(), st.data())
def test_the_ladder_offers_only_present_uncondemned_checkpoints_of_the_line(
    history: tuple[dict[int, HeadRecord], dict[int, list[CommitRecord]]], data: st.DataObject
) -> None:
    heads, commits = history
    line = timeline(heads, commits)
    every = [record for records in commits.values() for record in records]
    present = [r for r in every if data.draw(st.booleans())]
    condemned = {(r.step, r.id): Standing.CONDEMNED for r in every if data.draw(st.booleans())}
    off_line = [record for record in every if record not in line]
    names = [CheckpointName(record.step, record.id) for record in present]
    committed = frozenset((record.step, record.id) for record in every)
    ladder = build_ladder(Timeline(line, off_line, None), condemned, names, committed)
    offered = [rung.id for rung in ladder.rungs]
    assert offered == [r.id for r in line if r in present and (r.step, r.id) not in condemned]
    assert ladder.may_start_fresh == (not line)
    told = {option.option for option in ladder.rejected} | {rung.name for rung in ladder.rungs}
    assert {str(name) for name in names} <= told, "every checkpoint is a rung or has a reason"


def test_a_save_cut_before_its_rename_never_existed() -> None:
    record = commit(1, 10)
    ladder = build_ladder(Timeline([record], [], None), {}, [], frozenset())
    assert ladder.may_start_fresh
    assert ladder.rungs == ladder.rejected == []
    lost = build_ladder(Timeline([record], [], None), {}, [], frozenset({(record.step, record.id)}))
    assert not lost.may_start_fresh


HEX = "0123456789abcdef"


@given(
    st.integers(0, 10**12 - 1),
    st.sampled_from([8, 16]).flatmap(lambda n: st.text(HEX, min_size=n, max_size=n)),
)
def test_names_round_trip_also_those_of_older_releases(step: int, id: str) -> None:
    assert parse_name(str(CheckpointName(step, id))) == CheckpointName(step, id)


def test_ids_do_not_collide_in_as_many_saves_as_a_fleet_makes() -> None:
    """Issue point 19: with 32 bits, 15 pairs of 400,000 saves had the same id."""
    ids = {derive_id(f"run-{run}", 1, step, step) for run in range(40) for step in range(10_000)}
    assert len(ids) == 400_000
    assert len({id[:8] for id in ids}) < 400_000, "or this would show nothing"


def test_two_checkpoints_of_an_older_release_with_the_same_id_are_both_there(tmp_path: Path) -> None:
    """One that retention deleted, or that was cut, hides no other one."""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    one = CommitRecord(id="3fa9c1d2", step=10, parent=None, attempt=1, manifest="0" * 32)
    two, three = msgspec.structs.replace(one, step=20), msgspec.structs.replace(one, step=30)
    for record in (one, two, three):
        create_record(control.attempt(1) / "commits" / f"{record.step:012d}-{record.id}.json", record)
    assert [record.step for record in commits_of(control, 1)] == [10, 20, 30]
    record_deleted(control, one, DeletedRecord(id=one.id, step=10, reason="", epoch=1, at=0.0))
    heads = {1: head(1, None), 2: HeadRecord(attempt=2, checkpoint=one.id, step=20)}
    line = timeline(heads, {1: commits_of(control, 1), 2: []})
    assert line == [two, one], "the head is the one of its step"
    there = [CheckpointName(20, two.id)]
    ladder = build_ladder(
        Timeline(line, [three], None),
        {(10, one.id): Standing.CONDEMNED},
        there,
        frozenset({(20, two.id)}),
        deleted=deleted_names(control),
    )
    assert [rung.step for rung in ladder.rungs] == [20]


@given(st.text(max_size=40))
def test_other_names_are_not_checkpoints(name: str) -> None:
    parsed = parse_name(name)
    assert parsed is None or str(parsed) == name


def test_what_only_the_local_tier_had_forbids_a_fresh_start_only_if_nobody_has_looked() -> None:
    record = commit(1, 100)
    timeline_, local = Timeline([record], [], None), frozenset({(100, record.id)})
    lost = build_ladder(timeline_, {}, [], frozenset(), local=local)
    assert (lost.rungs, lost.may_start_fresh) == ([], True)
    assert lost.rejected[0].why[0].startswith("lost: ")
    unseen = build_ladder(timeline_, {}, [], frozenset(), local=local, local_unseen=True)
    assert (unseen.rungs, unseen.may_start_fresh) == ([], False)
    assert unseen.rejected[0].why[0].startswith("not seen: ")
    there = build_ladder(timeline_, {}, [CheckpointName(100, record.id)], frozenset(), local=local)
    assert [rung.step for rung in there.rungs] == [100]


# --- what places say they hold ------------------------------------------------------------------------------


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
