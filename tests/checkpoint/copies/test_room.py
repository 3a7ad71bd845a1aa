"""Parts of saves to the local tier, each by itself: digests in place, the schedule, the shelf, the costs."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from holdfast.account.incidents import observed_costs
from holdfast.checkpoint.copies.room import LocalRoom
from holdfast.checkpoint.copies.slots import FIRST_INDEX, LocalSlots
from holdfast.checkpoint.copies.tier import CopyRecord, LocalTier
from holdfast.checkpoint.format import fingerprint
from holdfast.checkpoint.format.layout import Item, Layout, Shard
from holdfast.checkpoint.format.manifest import CheckpointName
from holdfast.checkpoint.save.image import digest_image, write_image
from holdfast.errors import TornSnapshotError
from holdfast.journal import JournalLine
from holdfast.journal.events import SaveCommitted
from holdfast.record.directory import ControlDirectory
from holdfast.record.lineage import SHELF, commits_of, find_commit, shelve
from holdfast.train.schedule import NEVER, Measured, SaveSchedule, _take
from kit.tiny import train

SIZES = [3 << 20, 70_000, 1, 0, 5 << 20, 2_000_000]


def image(kind: str) -> tuple[memoryview, Layout, list[str]]:
    """Items of many sizes, in two shards."""
    items, at = [], 0
    for number, size in enumerate(SIZES):
        items.append(Item(f"t{number}", at, size + 150, at + 100, size))
        at += size + 150
    shards = [
        Shard("__0_0.distcp", 0, items[3].offset, 0, 3),
        Shard("__0_1.distcp", items[3].offset, at - items[3].offset, 3, 3),
    ]
    data = np.random.default_rng(7).integers(0, 256, at, dtype=np.uint8)
    prints = []
    for item in items:
        hasher = fingerprint.Hasher(kind)
        hasher.update(data[item.raw_offset : item.raw_offset + item.raw_length].data)
        prints.append(hasher.done())
    return memoryview(data), Layout(at, items, shards), prints


@pytest.mark.parametrize("kind", [fingerprint.HOST, fingerprint.DEVICE])
@pytest.mark.parametrize("threads", [1, 3])
def test_digests_in_place_are_those_of_the_files_that_would_be_written(
    tmp_path: Path, kind: str, threads: int
) -> None:
    data, layout, prints = image(kind)
    found = digest_image(data, layout, prints, threads)
    assert found == write_image(tmp_path, data, layout, prints, threads)
    for entry, shard in zip(found, layout.shards, strict=True):
        assert entry.digest == xxhash.xxh3_128_hexdigest(data[shard.start : shard.start + shard.size])
    target = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    assert digest_image(data, layout, prints, threads, into=target) == found
    os.close(target)
    assert (tmp_path / "image").read_bytes() == bytes(data)


@pytest.mark.parametrize("kind", [fingerprint.HOST, fingerprint.DEVICE])
def test_a_byte_that_changed_since_its_fingerprint_is_named(kind: str) -> None:
    data, layout, prints = image(kind)
    data[layout.items[4].raw_offset + (4 << 20)] ^= 1
    with pytest.raises(TornSnapshotError, match="t4: its bytes do not match"):
        digest_image(data, layout, prints, 2)


def test_an_image_in_a_mapped_file_is_only_read(tmp_path: Path) -> None:
    data, layout, prints = image(fingerprint.HOST)
    (tmp_path / "image").write_bytes(data)
    descriptor = os.open(tmp_path / "image", os.O_RDONLY)
    mapped = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(descriptor)
    assert digest_image(memoryview(mapped), layout, prints, 2) == digest_image(data, layout, prints, 2)


# --- when ---------------------------------------------------------------------------------------------------


def test_local_saves_are_due_at_multiples_and_a_save_to_the_root_serves_both() -> None:
    schedule = SaveSchedule(6, 0.0, 4)
    schedule._advance(0)
    due = {}
    for step in range(1, 25):
        if what := schedule.due(step):
            due[step] = what
            schedule._advance(step) if what == "global" else schedule.after_save(step, [], what)
    assert due == {
        4: "local", 6: "global", 8: "local", 12: "global", 16: "local", 18: "global", 20: "local",
        24: "global",
    }  # fmt: skip


def test_without_a_local_interval_no_save_is_local_alone() -> None:
    schedule = SaveSchedule(6, 0.0)
    schedule._advance(0)
    assert schedule.next_local == NEVER
    assert [step for step in range(1, 13) if schedule.due(step)] == list(range(6, 13))


# --- what it cost -------------------------------------------------------------------------------------------


def saves() -> list[JournalLine]:
    """Step 2 to the local tier; step 4 there and to the root; step 6 to the root alone."""

    def line(step: int, tier: str, seconds: float, blocked: float) -> JournalLine:
        body = SaveCommitted(
            checkpoint=f"step_{step:08d}-0000000{step}", step=step, parent=None, bytes=1, files=1,
            seconds=seconds, blocked_seconds=blocked, tier=tier,
        )  # fmt: skip
        return JournalLine(v=1, at=float(step), who="writer-0", attempt=1, seq=step, body=body)

    return [
        line(2, "local", 0.5, 0.2),
        line(4, "local", 0.6, 0.3),
        line(4, "global", 9.0, 0.0),
        line(6, "global", 8.0, 0.4),
    ]


def test_the_cadence_goes_by_saves_to_the_root_and_what_they_blocked() -> None:
    found = Measured()
    _take(found, saves())
    assert found.saves == [(0.3, 9.0), (0.4, 8.0)]


def test_observed_costs_count_each_save_once() -> None:
    costs = observed_costs(saves())
    assert costs.blocked is not None
    assert costs.blocked.count == 3
    assert costs.commit is not None
    assert costs.commit.count == 2


# --- the shelf ----------------------------------------------------------------------------------------------


class _Fence:
    def check(self, action: str) -> None:
        pass


def test_a_shelved_commit_still_counts_and_a_torn_line_costs_nothing(tmp_path: Path) -> None:
    train(tmp_path / "run", until=9)
    control = ControlDirectory.open(tmp_path / "run")
    before = commits_of(control, 1)
    fence: Any = _Fence()
    shelve(control, fence, before[0])
    assert commits_of(control, 1) == before
    assert find_commit(control, 1, before[0].step, before[0].id) is None
    shelf = control.attempt(1) / "commits" / SHELF
    with shelf.open("ab") as file:
        file.write(b'{"id":"01234567","st')  # a cut while the next one was written
    assert commits_of(control, 1) == before
    shelve(control, fence, before[1])
    shelve(control, fence, before[1])
    assert commits_of(control, 1) == before
    assert shelf.read_bytes().count(b'"manifest"') == 2


# --- slots --------------------------------------------------------------------------------------------------


@pytest.fixture
def slots(tmp_path: Path) -> tuple[LocalSlots, set[int]]:
    """Of rank 3, on a disk; and the indices of those that a save is at work on."""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    tier = LocalTier.open(tmp_path / "disk", control.run_id, node="here", run_dir=control.path)
    held: set[int] = set()
    room = LocalRoom(
        tier, control, rank=3, here=frozenset({3}), node="here", limit=0, keep=2, tell=lambda _: None
    )
    return LocalSlots(tier, room, rank=3, keep=2, is_free=lambda index: index not in held), held


def commit(slots: LocalSlots, image: str, step: int) -> CopyRecord:
    record = CopyRecord(
        checkpoint=f"step_{step:08d}-{step:08x}", manifest="0" * 32, rank=3, image=image, files=[],
        kind="own", at=float(step),
    )  # fmt: skip
    slots.tier.commit(record)
    return record


def save(slots: LocalSlots, step: int) -> CopyRecord:
    assert slots.reserve(4096) is None
    slot = slots.use(CheckpointName(step, f"{step:08x}"))
    assert not any(record.image == slot.image for record in slots.tier.records())
    return commit(slots, slot.image, step)


def test_slots_are_at_most_two_more_than_are_kept_and_the_oldest_goes_first(
    slots: tuple[LocalSlots, set[int]],
) -> None:
    mine, _ = slots
    for step in range(1, 9):
        save(mine, step)
        assert {record.name.step for record in mine.tier.records()} >= {step, max(1, step - 1)}
    assert mine.count == 3
    assert [record.name.step for record in mine.tier.records()] == [8, 7, 6]


def test_a_slot_that_a_drain_needs_is_left_alone_and_without_any_the_rank_is_busy(
    slots: tuple[LocalSlots, set[int]],
) -> None:
    mine, held = slots
    for step in range(1, 4):
        save(mine, step)
    held.update(range(FIRST_INDEX, FIRST_INDEX + 3))
    save(mine, 4)
    held.add(FIRST_INDEX + 3)
    refused = mine.reserve(4096)
    assert refused is not None
    assert refused.busy
    assert [record.name.step for record in mine.tier.records()] == [4, 3, 2, 1]
    held.remove(FIRST_INDEX + 1)
    save(mine, 5)
    assert [record.name.step for record in mine.tier.records()] == [5, 4, 3, 1]


def test_an_image_that_a_writer_of_an_earlier_attempt_is_at_work_on_is_not_staged_into(
    slots: tuple[LocalSlots, set[int]],
) -> None:
    """It passed the fence before the new attempt claimed its epoch: it may still commit that image."""
    mine, _ = slots
    assert mine.reserve(4096) is None
    image = mine.use(CheckpointName(1, "00000001")).image
    with mine.tier.work_on(image) as descriptor:
        assert descriptor is not None
        assert mine.reserve(4096) is None
        assert mine._reserved is not None
        assert mine._reserved.image != image


def test_what_the_run_has_left_behind_goes_before_its_head(slots: tuple[LocalSlots, set[int]]) -> None:
    mine, _ = slots
    for step in (4, 6, 8):
        save(mine, step)
    again = LocalSlots(mine.tier, mine._room, rank=3, keep=2, is_free=lambda _: True)
    again.resumed_from(CheckpointName(4, "00000004"))
    assert [again.on_line(record) for record in again.tier.records()] == [False, False, True]
    for step in (5, 7):
        save(again, step)
    assert [record.name.step for record in mine.tier.records()] == [7, 5, 4]


def test_the_image_of_a_replica_is_no_slot(slots: tuple[LocalSlots, set[int]]) -> None:
    mine, _ = slots
    (mine.tier.images / "00003.9f21c07a").write_bytes(b"of a peer")
    (mine.tier.images / "00004.0").write_bytes(b"of another rank")
    assert LocalSlots(mine.tier, mine._room, rank=3, keep=2, is_free=lambda _: True).count == 0


def test_after_local_saves_that_failed_the_root_is_saved_to_alone_for_a_while(
    slots: tuple[LocalSlots, set[int]],
) -> None:
    mine, _ = slots
    mine.went_wrong("no such directory")
    assert mine.reserve(4096) is None
    refusals = [mine.reserve(4096, globally=True) for _ in range(4)]
    assert [refused is None for refused in refusals] == [False, False, False, True]
    mine.went_wrong("no such directory")
    refused = mine.reserve(4096)
    assert refused is not None
    assert not refused.busy
    assert "no such directory" in refused.why
    mine.went_well()
    assert mine.reserve(4096) is None
