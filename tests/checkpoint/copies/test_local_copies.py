"""What a place keeps of its local copies, and what it gives up for a new one (A6)."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.copies.rules import Held, Room, make_room, memory

GIB = 1024**3
PLENTY = 1000


def held(step: int, nbytes: int = 10, **changes: bool) -> Held:
    flags = {"on_line": True, "complete": True, "busy": False} | changes
    return Held(f"step_{step:08d}-{step:08x}", step, nbytes, **flags)


def steps(room: Room) -> list[int]:
    return [int(checkpoint[5:13]) for checkpoint in room.drop]


def room_for(these: list[Held], needed: int = 10, **changes: int) -> Room:
    return make_room(these, needed=needed, **({"free": PLENTY, "limit": 0, "keep": 2} | changes))


# --- examples -----------------------------------------------------------------------------------------------


def test_where_there_is_room_the_last_ones_stay() -> None:
    assert room_for([held(10), held(20)]) == Room(True, [], [], "")
    assert room_for([]) == Room(True, [], [], "")


def test_what_is_not_on_the_line_goes_first_and_then_what_is_older_than_the_last() -> None:
    """Scenario 27: a node that comes back with copies of an abandoned timeline gives them up."""
    room = room_for([held(40, on_line=False), held(10), held(30), held(20)])
    assert steps(room) == [10, 40]
    assert room.reasons == ["older than the last 2", "not on the line"]


def test_for_want_of_room_the_oldest_goes_even_if_it_is_within_the_last() -> None:
    room = room_for([held(30), held(20), held(10)], keep=3, free=5)
    assert room.fits
    assert steps(room) == [10]
    assert room.reasons == ["its memory is needed: 10 B for a newer one"]
    assert steps(room_for([held(30), held(20), held(10)], keep=3, free=0, needed=20)) == [10, 20]


def test_a_limit_counts_what_is_held_already() -> None:
    assert steps(room_for([held(10), held(20)], limit=30)) == []
    assert steps(room_for([held(10), held(20)], limit=29)) == [10]


def test_the_only_good_one_stays_although_nothing_fits() -> None:
    room = room_for([held(20, GIB), held(30, GIB, complete=False, busy=True)], needed=2 * GIB, free=0)
    assert not room.fits
    assert room.drop == []
    assert room.why == (
        "2.0 GiB are needed on this node and 0 B are free; giving up all that may go would free 0 B; "
        "step_00000020-00000014 (1.0 GiB) stays, as the newest complete one; 1.0 GiB are being drained, sent "
        "or read. To make it fit, give the node 2.0 GiB more (a larger /dev/shm, a higher memory limit of "
        "the job), or lower checkpoint.replication_factor"
    )


def test_a_limit_that_is_too_low_is_said_with_one_that_would_do() -> None:
    these = [held(10), held(20)]
    room = room_for(these, needed=50, limit=59)
    assert not room.fits
    assert "local copies take 20 B of the 59 B that they may" in room.why
    assert "To make it fit, set checkpoint.non_persistent_max_bytes to 60 or more" in room.why
    assert "/dev/shm" not in room.why, "there is enough of it"
    assert room_for(these, needed=50, limit=60).fits
    both = room_for(these, needed=50, limit=59, free=30).why
    assert "give the node 10 B more (a larger /dev/shm" in both
    assert " and set checkpoint.non_persistent_max_bytes to 60" in both


def test_a_save_that_cannot_be_made_costs_no_older_one() -> None:
    """A6: what does not fit is not saved, and costs nothing."""
    these = [held(5), held(10), held(20), held(30, on_line=False)]
    room = room_for(these, needed=500, free=0)
    assert not room.fits
    assert steps(room) == [5, 30], "these go in any case; 10 would go in vain"


def test_what_is_not_complete_never_pushes_out_what_a_resume_could_use() -> None:
    these = [held(10), held(20), held(30, complete=False), held(40, complete=False)]
    assert steps(room_for(these)) == []
    older = held(5, complete=False)
    assert steps(room_for([older, *these])) == [5]
    assert steps(room_for([older, *these, held(50)])) == [5, 10]
    assert steps(room_for([older, held(10)])) == [], "there are not so many yet"


def test_the_newest_is_given_up_if_it_is_not_complete_and_the_older_one_is() -> None:
    these = [held(10), held(20, complete=False)]
    assert steps(room_for(these, free=0)) == [20]


def test_one_that_is_being_read_stays_whatever_it_is() -> None:
    """A6: memory is never reused under a reader."""
    these = [held(10, busy=True), held(20), held(30), held(40), held(50, on_line=False, busy=True)]
    assert steps(room_for(these)) == [20]
    assert steps(room_for(these, free=0, needed=20)) == [20, 30]


def test_the_memory_of_a_rank_is_what_its_slots_and_replicas_take() -> None:
    assert memory(image=GIB, keep=2, factor=1) == 4 * GIB
    assert memory(image=GIB, keep=2, factor=2) == 7 * GIB
    assert memory(image=GIB, keep=3, factor=3) == (5 + 2 * 4) * GIB


# --- properties ---------------------------------------------------------------------------------------------

HELD = st.builds(
    held,
    st.integers(1, 30),
    st.sampled_from([10, 10, 0, 3, 25]),
    on_line=st.sampled_from([True, True, True, False]),
    complete=st.sampled_from([True, True, True, False]),
    busy=st.sampled_from([False, False, False, True]),
)
PLACES = st.lists(HELD, max_size=8, unique_by=lambda one: one.step)
ASKED = st.fixed_dictionaries(
    {
        "needed": st.sampled_from([10, 10, 0, 25, 60]),
        "free": st.sampled_from([0, 5, 10, 40, 500, -3]),
        "limit": st.sampled_from([0, 0, 15, 40, 60]),
        "keep": st.integers(1, 4),
    }
)


def fits(these: list[Held], dropped: list[str], asked: dict[str, int]) -> bool:
    freed = sum(one.nbytes for one in these if one.checkpoint in dropped)
    used = sum(one.nbytes for one in these) - freed
    in_limit = not asked["limit"] or used + asked["needed"] <= asked["limit"]
    return asked["needed"] <= asked["free"] + freed and in_limit


def newest_good(these: list[Held]) -> Held | None:
    good = [one for one in these if one.on_line and one.complete]
    return max(good, key=lambda one: one.step, default=None)


@settings(max_examples=400, deadline=None)
@given(PLACES, ASKED)
def test_the_only_good_one_and_what_is_busy_is_never_given_up(
    these: list[Held], asked: dict[str, int]
) -> None:
    room = make_room(these, **asked)
    by_name = {one.checkpoint: one for one in these}
    assert len(set(room.drop)) == len(room.drop) == len(room.reasons)
    assert all(room.reasons)
    assert not any(by_name[checkpoint].busy for checkpoint in room.drop)
    best = newest_good(these)
    assert best is None or best.checkpoint not in room.drop


@settings(max_examples=400, deadline=None)
@given(PLACES, ASKED)
def test_what_is_given_up_suffices_and_if_it_cannot_nothing_goes_in_vain(
    these: list[Held], asked: dict[str, int]
) -> None:
    room = make_room(these, **asked)
    assert room.fits == fits(these, room.drop, asked)
    assert bool(room.why) != room.fits
    may_go = [one.checkpoint for one in these if not one.busy and one is not newest_good(these)]
    assert room.fits == fits(these, may_go, asked), "it is refused only if nothing would help"
    anyway = make_room(these, needed=0, free=0, limit=0, keep=asked["keep"])
    assert set(anyway.drop) <= set(room.drop)
    if not room.fits:
        assert room.drop == anyway.drop


@settings(max_examples=400, deadline=None)
@given(PLACES, ASKED)
def test_no_more_goes_than_must_and_nothing_newer_before_something_older(
    these: list[Held], asked: dict[str, int]
) -> None:
    room = make_room(these, **asked)
    best = newest_good(these)
    line = sorted((one for one in these if one.on_line), key=lambda one: one.step)
    may_go = [one.checkpoint for one in line if not one.busy and one is not best]
    gone = [checkpoint for checkpoint in may_go if checkpoint in room.drop]
    assert gone == may_go[: len(gone)], "oldest first"
    left = [one for one in line if one.complete and one.checkpoint not in room.drop]
    anyway = make_room(these, needed=0, free=0, limit=0, keep=asked["keep"]).drop
    if for_room := [checkpoint for checkpoint in gone if checkpoint not in anyway]:
        assert not fits(these, [one for one in room.drop if one != for_room[-1]], asked), (
            "the last was needed"
        )
    else:
        good = [one for one in line if one.complete]
        assert left[-asked["keep"] :] == good[-asked["keep"] :], "the last ones are kept without pressure"
    off_line = {one.checkpoint for one in these if not one.on_line and not one.busy}
    assert off_line <= set(room.drop)


@given(PLACES, ASKED, st.randoms())
def test_the_same_place_gives_up_the_same_in_whatever_order_it_was_listed(
    these: list[Held], asked: dict[str, int], random: Any
) -> None:
    room = make_room(these, **asked)
    shuffled = list(these)
    random.shuffle(shuffled)
    assert make_room(shuffled, **asked) == room
    left = [one for one in these if one.checkpoint not in room.drop]
    if room.fits:
        freed = sum(one.nbytes for one in these) - sum(one.nbytes for one in left)
        again = make_room(left, **(asked | {"free": asked["free"] + freed}))
        assert again == Room(True, [], [], ""), "asking again gives up nothing more"
