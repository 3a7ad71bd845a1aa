"""Standing records: appended in order, the newest counts, and doubt never clears a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ControlError, LeaseLostError
from holdfast.record import standing as standing_module
from holdfast.record.directory import ControlDirectory, read_record
from holdfast.record.lease import Fence, claim
from holdfast.record.standing import JUDGED, RootBook, Standing, StandingBook, StandingRecord, Word, merged

CHECKPOINT = "3fa9c1d2"


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


# --- beside the checkpoints ---------------------------------------------------------------------------------

NAME = "step_00000120-3fa9c1d25be07461"


def root_of(control: ControlDirectory, name: str = NAME) -> Path:
    root = control.path / "checkpoints"
    (root / name).mkdir(parents=True, exist_ok=True)
    return root


def other_run(tmp_path: Path) -> tuple[ControlDirectory, Fence]:
    control = ControlDirectory.open_or_create(tmp_path / "other")[0]
    return control, Fence(control, claim(control, "other", 5.0).epoch)


def test_what_was_judged_lies_beside_the_checkpoint_and_nothing_else_does(
    control: ControlDirectory, fence: Fence, book: StandingBook
) -> None:
    root = root_of(control)
    for standing in (Standing.VERIFIED, Standing.ABANDONED, Standing.SUSPECT, Standing.CONDEMNED):
        book.append(fence, NAME, standing, ["seen"])
    assert RootBook(root).files(NAME) == ["000001-suspect.json", "000002-condemned.json"]
    assert (RootBook(root).of(NAME), RootBook(root).evidence_of(NAME)) == (Standing.CONDEMNED, ["seen"])
    assert book.of(NAME) is book.of("3fa9c1d25be07461") is Standing.CONDEMNED


def test_another_run_that_looks_there_sees_it_and_an_acquittal_too(
    tmp_path: Path, control: ControlDirectory, fence: Fence, book: StandingBook
) -> None:
    root = root_of(control)
    theirs = StandingBook(other_run(tmp_path)[0], root)
    book.append(fence, NAME, Standing.CONDEMNED, ["bad"])
    assert (theirs.of(NAME), theirs.evidence_of(NAME)) == (Standing.CONDEMNED, ["bad"])
    book.append(fence, NAME, Standing.ACQUITTED, ["operator: it was the data"])
    book.append(fence, NAME, Standing.PROVEN, [])
    assert theirs.of(NAME) is Standing.ACQUITTED
    assert book.of(NAME) is Standing.PROVEN, "a run's own way goes on"


def test_the_owner_obeys_what_another_run_has_found_and_may_overrule_it(
    tmp_path: Path, control: ControlDirectory, fence: Fence, book: StandingBook
) -> None:
    root = root_of(control)
    book.append(fence, NAME, Standing.PROVEN, [])
    other, their_fence = other_run(tmp_path)
    StandingBook(other, root).append(their_fence, NAME, Standing.CONDEMNED, ["it diverges"])
    assert book.of(NAME) is Standing.CONDEMNED
    book.append(fence, NAME, Standing.ACQUITTED, ["operator: their data was bad"])
    assert book.of(NAME) is StandingBook(other, root).of(NAME) is Standing.ACQUITTED
    StandingBook(other, root).append(their_fence, NAME, Standing.CONDEMNED, ["again"])
    assert book.of(NAME) is Standing.CONDEMNED, "who spoke last knew of all the others"


def test_an_operator_may_overrule_records_beside_a_root_that_cannot_be_written(
    tmp_path: Path, control: ControlDirectory, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_of(control)
    StandingBook(control).append(fence, NAME, Standing.CONDEMNED, ["bad"])
    other, their_fence = other_run(tmp_path)

    def refuses(self: RootBook, name: str, record: StandingRecord) -> None:
        raise ControlError("read-only")

    monkeypatch.setattr(RootBook, "add", refuses)
    mine = StandingBook(other, root)
    mine.append(their_fence, NAME, Standing.ACQUITTED, ["operator: fine"])
    assert mine.of(NAME) is Standing.ACQUITTED
    assert StandingBook(control).of(NAME) is RootBook(root).of(NAME) is Standing.CONDEMNED
    assert "read-only" in mine.publish(their_fence, NAME)


def test_what_could_not_be_written_beside_it_is_made_up_for(
    control: ControlDirectory, fence: Fence, book: StandingBook
) -> None:
    book.append(fence, "3fa9c1d25be07461", Standing.CONDEMNED, ["by an older release"])
    root = root_of(control)
    assert RootBook(root).names() == []
    for _ in range(2):  # the second time there is nothing to do
        assert book.publish_all(fence, [NAME, "step_00000130-00000000"]) == []
    assert RootBook(root).files(NAME) == ["000001-condemned.json"]
    assert RootBook(root).evidence_of(NAME) == ["by an older release"]


@pytest.mark.parametrize("damage", ["contents", "name", "folder"])
def test_a_record_beside_it_that_cannot_be_read_counts_as_a_condemnation(
    tmp_path: Path, control: ControlDirectory, fence: Fence, book: StandingBook, damage: str
) -> None:
    root = root_of(control)
    book.append(fence, NAME, Standing.CONDEMNED, [])
    folder = RootBook(root).folder(NAME)
    (record,) = folder.iterdir()
    if damage == "contents":
        record.write_bytes(b"\0\0")
    elif damage == "name":
        record.rename(folder / "acquitted.json")
    else:
        record.unlink()
        folder.rmdir()
        folder.touch()
    assert StandingBook(other_run(tmp_path)[0], root).of(NAME) is Standing.CONDEMNED


WORDS = st.lists(
    st.tuples(st.sampled_from(sorted(Standing)), st.booleans(), st.booleans()), min_size=1, max_size=12
)


@given(WORDS)
def test_who_speaks_last_having_heard_all_decides(story: list[tuple[Standing, bool, bool]]) -> None:
    """Two runs in turn; each publishes, or cannot. Where both heard each other, the last judgement counts."""
    books: dict[bool, list[Word]] = {True: [], False: []}
    beside: list[Word] = []
    last: dict[bool, Standing] = {}
    heard = True
    for standing, who, published in story:
        own = books[who]
        seen = frozenset(word.origin for word in beside)
        said = Word(len(own) + 1, standing, f"{who}:{len(own) + 1:06d}-{standing}", None, seen)
        own.append(said)
        if standing in JUDGED:
            last[who] = standing
            if published:
                beside.append(said._replace(number=len(beside) + 1))
            heard = published
        for one in (True, False):
            found = merged(books[one], beside)
            refused = {Standing.CONDEMNED, Standing.SUSPECT}
            if standing in JUDGED and one == who:
                assert found is not None
                assert found.standing is standing, "a run always hears itself"
            if standing in JUDGED and heard and standing in refused:
                assert found is not None
                assert found.standing in refused, "what was condemned is condemned everywhere"
