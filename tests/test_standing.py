"""Standing records: appended in order, the newest counts, and doubt never clears a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.control import standing as standing_module
from holdfast.control.directory import ControlDirectory, read_record
from holdfast.control.lease import Fence, claim
from holdfast.control.standing import Standing, StandingBook, StandingRecord
from holdfast.errors import ControlError, LeaseLostError

CHECKPOINT = "3fa9c1d2"


@pytest.fixture
def control(tmp_path: Path) -> ControlDirectory:
    return ControlDirectory.open_or_create(tmp_path / "run")[0]


@pytest.fixture
def fence(control: ControlDirectory) -> Fence:
    return Fence(control, claim(control, "launch", 5.0).epoch)


@pytest.fixture
def book(control: ControlDirectory) -> StandingBook:
    return StandingBook(control)


def test_a_checkpoint_without_records_is_committed(book: StandingBook) -> None:
    assert book.of(CHECKPOINT) is Standing.COMMITTED


def test_the_newest_record_counts_and_every_one_is_kept(
    control: ControlDirectory, fence: Fence, book: StandingBook
) -> None:
    story = [Standing.VERIFIED, Standing.PROVEN, Standing.SUSPECT, Standing.ACQUITTED, Standing.CONDEMNED]
    for standing in story * 3:  # past nine, where names that are not padded would sort wrongly
        book.append(fence, CHECKPOINT, standing, [f"because of {standing}"])
        assert book.of(CHECKPOINT) is standing
    folder = control.standing / CHECKPOINT
    names = sorted(os.listdir(folder))
    assert names == [f"{n:06d}-{standing}.json" for n, standing in enumerate(story * 3, start=1)]
    record = read_record(folder / names[2], StandingRecord)
    assert record is not None
    assert (record.checkpoint, record.standing, record.evidence, record.epoch) == (
        CHECKPOINT,
        Standing.SUSPECT,
        ["because of suspect"],
        fence.epoch,
    )
    assert book.of("00000000") is Standing.COMMITTED, "another checkpoint's standing is its own"


@pytest.mark.parametrize("contents", [b"", b"garbage", b'{"standing": "proven"}'])
def test_a_condemnation_whose_contents_cannot_be_read_is_still_one(
    control: ControlDirectory, fence: Fence, book: StandingBook, contents: bytes
) -> None:
    book.append(fence, CHECKPOINT, Standing.CONDEMNED, ["NaN three steps after loading it"])
    (control.standing / CHECKPOINT / "000001-condemned.json").write_bytes(contents)
    assert book.of(CHECKPOINT) is Standing.CONDEMNED


@pytest.mark.parametrize(
    "name",
    [
        "000002-blessed.json",
        "000002-.json",
        "000002.json",
        "garbage.json",
        "-proven.json",
        "²²²²²²-proven.json",
    ],
)
def test_a_name_that_says_nothing_known_counts_as_a_condemnation(
    control: ControlDirectory, fence: Fence, book: StandingBook, name: str
) -> None:
    book.append(fence, CHECKPOINT, Standing.PROVEN, [])
    (control.standing / CHECKPOINT / name).write_bytes(b"{}")
    assert book.of(CHECKPOINT) is Standing.CONDEMNED


def test_what_a_killed_writer_left_is_no_record(
    control: ControlDirectory, fence: Fence, book: StandingBook
) -> None:
    book.append(fence, CHECKPOINT, Standing.PROVEN, [])
    (control.standing / CHECKPOINT / ".000002-condemned.json.0123456789ab.tmp").write_bytes(b"{")
    assert book.of(CHECKPOINT) is Standing.PROVEN


def test_a_removed_record_does_not_make_a_new_one_look_old(
    control: ControlDirectory, fence: Fence, book: StandingBook
) -> None:
    for standing in (Standing.VERIFIED, Standing.PROVEN, Standing.SUSPECT):
        book.append(fence, CHECKPOINT, standing, [])
    (control.standing / CHECKPOINT / "000001-verified.json").unlink()
    book.append(fence, CHECKPOINT, Standing.ACQUITTED, [])
    assert (control.standing / CHECKPOINT / "000004-acquitted.json").exists()
    assert book.of(CHECKPOINT) is Standing.ACQUITTED


def test_records_that_an_old_listing_gave_the_same_number_count_as_the_most_careful_one(
    fence: Fence, book: StandingBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may list a directory as it was a while ago."""
    with monkeypatch.context() as patch:
        patch.setattr(standing_module, "list_names", lambda path: [])
        for standing in (Standing.CONDEMNED, Standing.PROVEN, Standing.VERIFIED, Standing.SUSPECT):
            book.append(fence, CHECKPOINT, standing, [])
    assert book.of(CHECKPOINT) is Standing.CONDEMNED


def test_the_same_word_again_takes_the_next_number_even_with_an_old_listing(
    control: ControlDirectory, fence: Fence, book: StandingBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_module, "list_names", lambda path: [])
    for _ in range(2):
        book.append(fence, CHECKPOINT, Standing.SUSPECT, [])
    assert sorted(os.listdir(control.standing / CHECKPOINT)) == [
        "000001-suspect.json",
        "000002-suspect.json",
    ]


def test_an_unreadable_standing_is_an_error_and_not_an_acquittal(
    control: ControlDirectory, book: StandingBook
) -> None:
    control.standing.mkdir()
    (control.standing / CHECKPOINT).touch()
    with pytest.raises(ControlError, match=rf"cannot read .*{CHECKPOINT}"):
        book.of(CHECKPOINT)


@pytest.mark.parametrize("hostile", ["../escape", "a/b", "", "..", ".", "/etc/x", "a\0b", "x" * 200])
def test_an_id_that_is_no_id_is_refused_and_nothing_is_written(
    control: ControlDirectory, fence: Fence, book: StandingBook, hostile: str
) -> None:
    before = sorted(control.path.parent.rglob("*"))
    with pytest.raises(ControlError, match="is not a checkpoint id"):
        book.append(fence, hostile, Standing.PROVEN, [])
    with pytest.raises(ControlError, match="is not a checkpoint id"):
        book.of(hostile)
    assert sorted(control.path.parent.rglob("*")) == before


def test_a_stale_epoch_cannot_change_a_standing(
    control: ControlDirectory, fence: Fence, book: StandingBook
) -> None:
    """Scenario 28."""
    book.append(fence, CHECKPOINT, Standing.SUSPECT, [])
    newer = Fence(control, claim(control, "launch", 5.0).epoch)
    with pytest.raises(LeaseLostError, match=f"refused to record checkpoint {CHECKPOINT} as acquitted"):
        book.append(fence, CHECKPOINT, Standing.ACQUITTED, [])
    assert book.of(CHECKPOINT) is Standing.SUSPECT
    book.append(newer, CHECKPOINT, Standing.CONDEMNED, [])
    assert book.of(CHECKPOINT) is Standing.CONDEMNED
