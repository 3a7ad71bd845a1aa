"""Judging a copy of the local tier by its checkpoint's manifest."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.copies import inspection
from holdfast.checkpoint.copies.inspection import verify_copy
from holdfast.checkpoint.copies.tier import CopyRecord, LocalTier
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import CheckpointName, FileEntry, Manifest, Reason
from kit.damage import flip
from kit.nodes.local_places import CHUNKS, NAME, SHARD, SHARDS, keep_copy, manifest_of, place

MANIFEST = manifest_of()


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return place(tmp_path)


@pytest.fixture
def record(tier: LocalTier) -> CopyRecord:
    return keep_copy(tier, 1, MANIFEST)


def found(tier: LocalTier, record: CopyRecord, manifest: Manifest = MANIFEST) -> list[tuple[Reason, str]]:
    return [(problem.reason, problem.path) for problem in verify_copy(tier, record, manifest)]


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_sound_copy_has_no_problem_and_every_byte_of_it_is_read(
    tier: LocalTier, record: CopyRecord, threads: int
) -> None:
    read: list[int] = []
    digest = manifests.encode(MANIFEST)[1]
    assert verify_copy(tier, record, MANIFEST, digest=digest, threads=threads, progress=read.append) == []
    assert sum(read) == record.nbytes == SHARDS * SHARD


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, SHARDS * SHARD - 1))
def test_a_flipped_byte_at_any_position_is_found_in_its_shard_and_chunk(tier: LocalTier, at: int) -> None:
    """Issue 5: a copy altered after its digest was taken is never taken for sound."""
    record = keep_copy(tier, 1, MANIFEST)
    flip(tier.image(record), at)
    (problem,) = verify_copy(tier, record, MANIFEST)
    assert (problem.reason, problem.path) == (Reason.ALTERED, f"__1_{at // SHARD}.distcp")
    ((start, length),) = [(o, n) for o, n in CHUNKS if o <= at % SHARD < o + n]
    assert problem.detail.endswith(f"bad chunks at bytes {start}–{start + length}")


def test_the_room_behind_the_last_shard_is_nobodys(tier: LocalTier, record: CopyRecord) -> None:
    flip(tier.image(record), SHARDS * SHARD)
    assert found(tier, record) == []


def test_each_bad_shard_is_named_in_the_order_of_the_record(tier: LocalTier, record: CopyRecord) -> None:
    flip(tier.image(record), SHARD + 5)
    flip(tier.image(record), 2500)
    assert found(tier, record) == [(Reason.ALTERED, "__1_0.distcp"), (Reason.ALTERED, "__1_1.distcp")]


@pytest.mark.parametrize(
    ("size", "bad"), [(SHARDS * SHARD - 1, [1]), (SHARD, [1]), (SHARD - 1, [0, 1]), (0, [0, 1])]
)
def test_a_truncated_image_is_named_by_the_shards_that_it_no_longer_holds(
    tier: LocalTier, record: CopyRecord, size: int, bad: list[int]
) -> None:
    os.truncate(tier.image(record), size)
    assert found(tier, record) == [(Reason.TRUNCATED, f"__1_{n}.distcp") for n in bad]


def test_a_copy_of_another_step_is_refused_unread(tier: LocalTier) -> None:
    other = CheckpointName(140, "aaaaaaaa")
    record = keep_copy(tier, 1, manifest_of(name=other))
    (problem,) = verify_copy(tier, record, MANIFEST)
    assert problem.reason is Reason.WRONG_NAME
    assert str(other) in problem.detail
    assert str(NAME) in problem.detail


def test_a_copy_made_under_another_manifest_is_refused(tier: LocalTier, record: CopyRecord) -> None:
    """The same name committed twice, as after a rollback that reaches the same id, is two checkpoints."""
    (problem,) = verify_copy(tier, record, MANIFEST, digest="f" * 32)
    assert problem.reason is Reason.ALTERED
    assert record.manifest in problem.detail
    assert "f" * 32 in problem.detail


def _listing(record: CopyRecord, how: str) -> CopyRecord:
    first, second = record.files
    return msgspec.structs.replace(
        record,
        files={
            "another digest": [msgspec.structs.replace(first, digest="0" * 32), second],
            "another size": [msgspec.structs.replace(first, size=SHARD - 1), second],
            "a file that the manifest lacks": [first, second, msgspec.structs.replace(first, path="evil")],
            "a shard twice": [first, first, second],
            "a shard left out": [second],
        }[how],
    )


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("another digest", (Reason.ALTERED, "__1_0.distcp")),
        ("another size", (Reason.ALTERED, "__1_0.distcp")),
        ("a file that the manifest lacks", (Reason.UNLISTED, "evil")),
        ("a shard twice", (Reason.ALTERED, "__1_0.distcp")),
        ("a shard left out", (Reason.INCOMPLETE, "__1_0.distcp")),
    ],
)
def test_a_record_that_disagrees_with_the_manifest_is_refused(
    tier: LocalTier, record: CopyRecord, how: str, expected: tuple[Reason, str]
) -> None:
    """The bytes are all there and right: it is the list that cannot be believed."""
    wrong = _listing(record, how)
    tier.commit(wrong)
    assert found(tier, wrong) == [expected]


def test_a_shard_at_a_wrong_place_of_the_image_is_altered(tier: LocalTier, record: CopyRecord) -> None:
    first, second = record.files
    swapped = [msgspec.structs.replace(first, start=SHARD), msgspec.structs.replace(second, start=0)]
    wrong = msgspec.structs.replace(record, files=swapped)
    tier.commit(wrong)
    assert found(tier, wrong) == [(Reason.ALTERED, "__1_0.distcp"), (Reason.ALTERED, "__1_1.distcp")]


def test_an_image_that_was_replaced_by_another_ranks_is_altered(tier: LocalTier, record: CopyRecord) -> None:
    other = keep_copy(tier, 0, MANIFEST)
    os.replace(tier.image(other), tier.image(record))
    assert {reason for reason, _ in found(tier, record)} == {Reason.ALTERED}


def test_an_image_that_is_gone_is_missing(tier: LocalTier, record: CopyRecord) -> None:
    tier.image(record).unlink()
    assert found(tier, record) == [(Reason.MISSING, f"images/{record.image}")]


def test_a_link_in_place_of_the_image_is_not_followed(tier: LocalTier, record: CopyRecord) -> None:
    elsewhere = tier.path / "elsewhere"
    os.replace(tier.image(record), elsewhere)
    tier.image(record).symlink_to(elsewhere)
    assert found(tier, record) == [(Reason.NOT_A_FILE, f"images/{record.image}")]


def test_a_pipe_in_place_of_the_image_is_not_waited_for(tier: LocalTier, record: CopyRecord) -> None:
    tier.image(record).unlink()
    os.mkfifo(tier.image(record))
    assert found(tier, record) == [(Reason.NOT_A_FILE, f"images/{record.image}")]


def test_a_record_that_was_taken_back_meanwhile_is_missing_and_not_altered(
    tier: LocalTier, record: CopyRecord
) -> None:
    """Its memory may hold the next snapshot already: that must not be told as damage."""
    assert tier.take_back(record)
    flip(tier.image(record), 0)
    ((reason, _),) = found(tier, record)
    assert reason is Reason.MISSING


def test_a_record_that_was_replaced_meanwhile_is_missing(tier: LocalTier, record: CopyRecord) -> None:
    tier.commit(msgspec.structs.replace(record, image="00001.1"))
    ((reason, _),) = found(tier, record)
    assert reason is Reason.MISSING


def test_a_copy_that_is_being_taken_back_is_missing(tier: LocalTier, record: CopyRecord) -> None:
    with tier.image(record).open() as image:
        fcntl.flock(image, fcntl.LOCK_EX)
        ((reason, _),) = found(tier, record)
    assert reason is Reason.MISSING
    assert found(tier, record) == []


def test_the_memory_cannot_be_reused_while_a_copy_is_judged(tier: LocalTier, record: CopyRecord) -> None:
    refused: list[bool] = []
    progress = lambda _count: refused.append(tier.take_back(record))  # noqa: E731
    assert verify_copy(tier, record, MANIFEST, progress=progress) == []
    assert refused
    assert not any(refused)
    assert tier.take_back(record)


def test_a_rank_without_shards_has_a_sound_copy(tier: LocalTier) -> None:
    manifest = manifest_of(world=1)
    image = "00007.0"
    (tier.images / image).touch()
    record = msgspec.structs.replace(keep_copy(tier, 0, manifest), rank=7, image=image, files=[])
    tier.commit(record)
    assert verify_copy(tier, record, manifest) == []


def test_an_empty_shard_is_judged_too(tier: LocalTier, record: CopyRecord) -> None:
    empty = FileEntry(path="__1_2.distcp", size=0, digest=manifests.digest_bytes(b""))
    manifest = msgspec.structs.replace(MANIFEST, files=[*MANIFEST.files, empty])
    last = msgspec.structs.replace(record.files[1], path=empty.path, size=0, digest=empty.digest)
    longer = msgspec.structs.replace(record, files=[*record.files, last])
    tier.commit(longer)
    assert verify_copy(tier, longer, manifest) == []


def test_an_image_that_shrinks_while_it_is_read_is_truncated(
    tier: LocalTier, record: CopyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "READ_SIZE", 100)
    progress = lambda _count: os.truncate(tier.image(record), 150)  # noqa: E731
    problems = verify_copy(tier, record, MANIFEST, threads=1, progress=progress)
    assert [problem.reason for problem in problems] == [Reason.TRUNCATED, Reason.TRUNCATED]
    assert problems[0].detail.endswith("read 150")


def test_a_record_that_points_beyond_anything_is_truncated(tier: LocalTier, record: CopyRecord) -> None:
    first, second = record.files
    far = msgspec.structs.replace(record, files=[msgspec.structs.replace(first, start=2**63 - 1), second])
    tier.commit(far)
    assert found(tier, far) == [(Reason.TRUNCATED, "__1_0.distcp")]
