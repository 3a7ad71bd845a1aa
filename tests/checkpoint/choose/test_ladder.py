"""The lineage and the ladder are pure; any history gives an order that never leaves the timeline."""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.choose.ladder import build_ladder
from holdfast.checkpoint.format.manifest import CheckpointName, derive_id, parse_name
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
