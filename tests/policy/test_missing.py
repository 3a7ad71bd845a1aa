"""Who is missing from the collective that others wait in: a pure question."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.evidence import (
    Missing,
    Position,
    Positions,
    describe_missing,
    find_missing,
    ranks,
    suspects,
)


def at(
    entered: int, *, waits: bool = False, group: str = "0", name: str = "all_reduce", of: int = 0
) -> Position:
    members = tuple(range(of))
    return Position(
        group=group, entered=entered, name=name, waits_in=entered if waits else 0, members=members
    )


def test_the_ranks_that_did_not_come_are_named() -> None:
    said: Positions = {
        rank: [at(411 if rank in (3, 5) else 412, waits=rank not in (3, 5), of=6)] for rank in range(6)
    }
    (one,) = find_missing(said)
    assert describe_missing(one) == "ranks 3, 5 did not reach the all_reduce that ranks 0-2, 4 wait in"
    assert suspects(said) == (3, 5)


def test_a_rank_that_cannot_testify_is_named_but_not_accused() -> None:
    said: Positions = {0: [at(9, waits=True, of=3)], 1: [at(8, of=3)], 2: None}
    (one,) = find_missing(said)
    assert (one.missing, one.silent) == ((1,), (2,))
    assert describe_missing(one).endswith("that rank 0 waits in; rank 2 could not say where it is")
    assert suspects(said) == (1,)
    assert suspects({0: [at(9, waits=True, of=2)], 1: None}) == (1,), "then it is all there is to go by"


def test_who_is_missing_because_it_waits_elsewhere_is_no_suspect() -> None:
    """0 waits for 1 in group A, 1 waits for 2 in group B, 2 does something else."""
    said: Positions = {
        0: [at(5, waits=True, group="A", of=2)],
        1: [at(4, group="A", of=2), Position(group="B", entered=7, waits_in=7, members=(1, 2))],
        2: [Position(group="B", entered=6, members=(1, 2))],
    }
    assert [(one.group, one.missing) for one in find_missing(said)] == [("A", (1,)), ("B", (2,))]
    assert suspects(said) == (2,)


def test_a_member_that_never_used_the_group_is_missing_and_others_are_not() -> None:
    said: Positions = {0: [Position(group="g", entered=1, waits_in=1, members=(0, 2))], 1: [], 2: []}
    (one,) = find_missing(said)
    assert one.missing == (2,)


def test_one_that_went_ahead_is_not_missing() -> None:
    """A broadcast's root does not wait for those that receive."""
    said: Positions = {0: [at(7, waits=True, of=3)], 1: [at(5, waits=True, of=3)], 2: [at(4, of=3)]}
    (one,) = find_missing(said)
    assert (one.number, one.waiting, one.missing) == (5, (1,), (2,))


def test_backends_of_a_group_are_not_compared_with_each_other() -> None:
    both = (0, 1)
    said: Positions = {
        0: [Position(group="0", backend="gloo", entered=3, waits_in=3, members=both)],
        1: [
            Position(group="0", backend="gloo", entered=2, members=both),
            Position(group="0", backend="nccl", entered=900, members=both),
        ],
    }
    assert [(one.backend, one.missing) for one in find_missing(said)] == [("gloo", (1,))]


def test_one_whose_entries_are_no_longer_recorded_is_judged_by_the_groups_count() -> None:
    waits = Position(group="0", backend="gloo", entered=3, waits_in=3, members=(0, 1, 2))
    said: Positions = {0: [waits], 1: [at(3, name="", of=3)], 2: [at(2, name="", of=3)]}
    assert [one.missing for one in find_missing(said)] == [(2,)]
    done = Position(group="0", backend="gloo", entered=3, members=(0, 1))
    assert find_missing({0: [done], 1: [at(3, name="", of=2)]}) == []


def test_all_came_but_not_for_the_same() -> None:
    said: Positions = {0: [at(3, waits=True, of=2)], 1: [at(3, waits=True, of=2, name="broadcast")]}
    (one,) = find_missing(said)
    assert describe_missing(one) == (
        "all ranks that are known reached the all_reduce, and ranks 0-1 still wait in it; "
        "they do not do the same there: all_reduce, broadcast"
    )


def test_without_a_recorder_only_the_counts_speak() -> None:
    said: Positions = {0: [at(4, name="", of=2)], 1: [at(3, name="", of=2)]}
    (one,) = find_missing(said)
    assert not one.certain
    assert describe_missing(one) == "rank 1 did not reach the collective that rank 0 did"
    assert find_missing({0: [at(4, of=2)], 1: [at(4, of=2)]}) == []


def test_ranks_are_written_short() -> None:
    assert ranks([4, 2, 1, 0, 2]) == "ranks 0-2, 4"
    assert ranks([3]) == "rank 3"
    assert ranks([]) == "no rank"


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, list[Position] | None], int, set[int], set[int]]:
    """One group in which some ranks wait in a collective, some have not come, and some say nothing."""
    world = draw(st.integers(1, 8))
    number = draw(st.integers(1, 1000))
    here = {0} | set(draw(st.lists(st.integers(0, world - 1))))
    silent = set(draw(st.lists(st.integers(0, world - 1)))) - {0}
    said: dict[int, list[Position] | None] = {}
    for rank in range(world):
        if rank in silent:
            said[rank] = None
        elif rank in here:
            ahead = draw(st.integers(0, 3))  # more of them are scheduled behind the one that is waited in
            said[rank] = [
                Position(group="0", entered=number + ahead, waits_in=number, members=tuple(range(world)))
            ]
        else:
            behind = draw(st.integers(0, number - 1))
            said[rank] = [at(behind, of=world)] if behind else []
    return said, number, here - silent, silent


@given(jobs(), st.randoms())
def test_whoever_is_missing_is_found_in_any_order(
    job: tuple[dict[int, list[Position] | None], int, set[int], set[int]], chance: random.Random
) -> None:
    said, number, here, silent = job
    (one,) = find_missing(said)
    assert (one.number, set(one.waiting), set(one.silent)) == (number, here, silent)
    assert set(one.missing) == set(said) - here - silent
    shuffled = list(said.items())
    chance.shuffle(shuffled)
    assert find_missing(dict(shuffled)) == [one]
    assert suspects(dict(shuffled)) == suspects(said)


positions = st.builds(
    Position,
    group=st.sampled_from("abc"),
    backend=st.sampled_from(["", "gloo", "nccl"]),
    entered=st.integers(0, 5),
    waits_in=st.integers(0, 5),
    name=st.sampled_from(["", "all_reduce", "broadcast"]),
    members=st.sampled_from([(), (0, 1), (0, 1, 2, 3), (7, 9)]),
)


@given(st.dictionaries(st.integers(0, 5), st.none() | st.lists(positions, max_size=3)), st.randoms())
def test_any_testimony_gives_an_answer_that_fits_itself(said: Positions, chance: random.Random) -> None:
    found = find_missing(said)
    shuffled = list(said.items())
    chance.shuffle(shuffled)
    assert find_missing(dict(shuffled)) == found
    for one in found:
        assert isinstance(one, Missing)
        assert not set(one.missing) & set(one.waiting)
        assert not set(one.silent) & (set(one.missing) | set(one.waiting))
        assert set(one.missing) | set(one.waiting) | set(one.silent) <= set(said)
        assert all(said[rank] is None for rank in one.silent)
        assert describe_missing(one)
    assert set(suspects(said)) <= set(said)
