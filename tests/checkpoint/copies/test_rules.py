"""Who holds whose replicas (A7), and what the loss of nodes then costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.copies.rules import (
    GLOBAL,
    Assembly,
    HeldCheckpoint,
    Replication,
    Room,
    assemble,
    describe_assembly,
    make_room,
    memory,
    order,
    replicate,
    share,
    survives,
)
from holdfast.checkpoint.format.manifest import saver_of


def world(*ranks: int) -> list[str]:
    """Nodes a, b, c … with so many ranks each, one after the other."""
    return ["abcdefghijklmnopqrstuvwxyz"[at] for at, count in enumerate(ranks) for _ in range(count)]


def by_node(places: list[str], replication: Replication) -> dict[str, str]:
    found = {place: "".join(targets) for place, targets in zip(places, replication.targets, strict=True)}
    assert all(
        found[place] == "".join(targets) for place, targets in zip(places, replication.targets, strict=True)
    ), "the ranks of a node go to the same places"
    return found


# --- examples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "factor", "jump", "expected"),
    [
        ([2, 2], 2, 0, "a:b b:a"),
        ([2, 2], 2, 2, "a:b b:a"),
        ([8, 8, 8, 8], 2, 0, "a:b b:a c:d d:c"),
        ([8, 8, 8, 8], 2, 16, "a:c b:d c:a d:b"),
        ([1] * 6, 3, 0, "a:bc b:ca c:ab d:ef e:fd f:de"),
        ([1] * 6, 3, 2, "a:ce b:df c:ea d:fb e:ac f:bd"),
        ([1] * 8, 2, 2, "a:c b:d c:a d:b e:g f:h g:e h:f"),
        # What does not divide makes the last group of a class larger, and that one a ring.
        ([4, 4, 4], 2, 0, "a:b b:c c:a"),
        ([1] * 5, 2, 0, "a:b b:a c:d d:e e:c"),
        ([1] * 5, 3, 0, "a:bc b:cd c:de d:ea e:ab"),
        ([1] * 5, 2, 2, "a:c b:d c:e d:b e:a"),
        # Nodes that differ.
        ([4, 4, 2], 2, 0, "a:b b:c c:a"),
        ([8, 7, 8, 8], 2, 16, "a:c b:d c:a d:b"),
        ([3, 1], 5, 0, "a:b b:a"),
        ([2, 2], 1, 0, "a: b:"),
        ([2, 2], 1, 3, "a: b:"),
        ([4], 2, 0, "a:"),
        ([4], 2, 4, "a:"),
    ],
)
def test_groups_of_nodes_hold_each_others_shards(
    ranks: list[int], factor: int, jump: int, expected: str
) -> None:
    places = world(*ranks)
    found = by_node(places, replicate(places, factor=factor, jump=jump))
    assert " ".join(f"{node}:{targets}" for node, targets in sorted(found.items())) == expected


def test_ranks_of_a_node_need_not_follow_each_other() -> None:
    assert replicate(["b", "a", "b", "a"], factor=2, jump=0).targets == [["a"], ["b"], ["a"], ["b"]]
    turned = replicate(["d", "a", "c", "b"] * 2, factor=2, jump=4)
    assert turned.targets[:4] == [["c"], ["b"], ["d"], ["a"]], "nodes are ordered by their first rank"


def test_nothing_is_asked_of_nobody() -> None:
    assert replicate([], factor=2, jump=0) == Replication([], 1, [])


def test_what_is_served_as_asked_has_no_note() -> None:
    for places, factor, jump in [
        (world(2, 2), 2, 0),
        (world(*[8] * 7), 3, 16),
        (world(4), 1, 0),
        (world(4, 4), 1, 4),
        (world(2, 2, 1), 3, 0),
    ]:
        assert replicate(places, factor=factor, jump=jump).notes == []
        assert replicate(places, factor=factor, jump=jump).factor == factor


def test_one_node_has_no_replicas_and_that_is_said() -> None:
    alone = replicate(world(8), factor=2, jump=0)
    assert alone == Replication(
        [[]] * 8,
        1,
        [
            "checkpoint.replication_factor is 2, but the ranks are on 1 node: there are no replicas, and "
            "local copies do not survive the loss of their node"
        ],
    )


def test_fewer_nodes_than_the_factor_hold_what_they_can() -> None:
    """A world that has shrunk must go on."""
    few = replicate(world(2, 2), factor=3, jump=0)
    assert (few.factor, few.targets) == (2, [["b"], ["b"], ["a"], ["a"]])
    assert few.notes == [
        "checkpoint.replication_factor is 3, but the ranks are on 2 nodes: each local copy lies on 2, and "
        "they must not all be lost at once"
    ]


@pytest.mark.parametrize(
    ("ranks", "jump", "said"),
    [
        ([8, 8], 4, "checkpoint.replication_jump is 4 ranks, but a node has 8, .*multiple of 8, or to 0"),
        ([8, 8, 8], 12, "checkpoint.replication_jump is 12 ranks, but a node has 8"),
        ([4, 2, 2], 2, "but a node has 4"),
        (
            [2, 2],
            4,
            "only 2 nodes of 2, so it leads back to the same node; set it to at most 2, or to 0",
        ),
        ([2, 2], 6, "only 2 nodes of 2"),
    ],
)
def test_a_jump_that_leads_to_no_other_node_is_refused(ranks: list[int], jump: int, said: str) -> None:
    places = world(*ranks)
    with pytest.raises(ValueError, match=said):
        replicate(places, factor=2, jump=jump)
    relaxed = replicate(places, factor=2, jump=jump, strict=False)
    assert relaxed.targets == replicate(places, factor=2, jump=0).targets
    assert "Until then replicas go to the next nodes" in relaxed.notes[0]
    assert "checkpoint.replication_jump" in relaxed.notes[0]


@pytest.mark.parametrize(("factor", "jump"), [(0, 0), (2, -1)])
def test_senseless_numbers_are_refused(factor: int, jump: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        replicate(world(1, 1), factor=factor, jump=jump)


def test_a_jump_that_not_every_node_can_make_is_served_and_noted() -> None:
    places = world(4, 4, 4)
    odd = replicate(places, factor=2, jump=8)
    assert by_node(places, odd) == {"a": "c", "c": "b", "b": "a"}
    assert odd.notes == [
        "checkpoint.replication_jump is 8 ranks, but on 3 nodes of 4 not every node has 1 other that far "
        "away: some replicas are nearer. A jump of at most 4 avoids this"
    ]
    assert replicate(places, factor=2, jump=4).notes == []


def test_a_group_in_which_all_hold_all_survives_what_a_ring_does_not() -> None:
    places = world(*[1] * 8)
    cliques = replicate(places, factor=2, jump=0)
    ring = Replication([[places[(rank + 1) % 8]] for rank in range(8)], 2, [])
    fatal = [
        sum(not survives(one, places, pair) for pair in combinations("abcdefgh", 2))
        for one in (cliques, ring)
    ]
    assert fatal == [4, 8]


# --- properties ---------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[str], int, int]:
    """Places, a factor, and a jump that can be served."""
    ranks = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=9) | st.integers(1, 9).map(lambda n: [2] * n)
    )
    places = draw(st.permutations(world(*ranks)))
    jump = draw(st.integers(0, max(0, len(ranks) - 1))) * max(ranks)
    return places, draw(st.integers(1, 5)), jump


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_every_loss_that_the_factor_covers_leaves_a_copy_of_every_rank(
    asked: tuple[list[str], int, int],
) -> None:
    """Every pattern of node loss that the factor covers, for every subset (A7)."""
    places, factor, jump = asked
    found = replicate(places, factor=factor, jump=jump)
    nodes = sorted(set(places))
    assert found.factor == min(factor, len(nodes))
    assert len(found.targets) == len(places)
    for own, targets in zip(places, found.targets, strict=True):
        assert len({own, *targets}) == found.factor == len(targets) + 1, "no place twice, never its own"
        assert set(targets) <= set(nodes)
    for count in range(found.factor):
        for lost in combinations(nodes, count):
            assert survives(found, places, lost)
    assert not survives(found, places, {places[0], *found.targets[0]}), "without all that hold it, it is gone"


@given(worlds())
def test_every_place_holds_as_much_for_others_as_others_hold_for_it(
    asked: tuple[list[str], int, int],
) -> None:
    places, factor, jump = asked
    found = replicate(places, factor=factor, jump=jump)
    ranks = Counter(places)
    held = Counter(target for targets in found.targets for target in targets)
    for place in ranks:
        sources = {own for own, targets in zip(places, found.targets, strict=True) if place in targets}
        assert len(sources) == found.factor - 1
        assert held[place] <= (found.factor - 1) * max(ranks.values())
    if len(set(ranks.values())) == 1:
        assert all(held[place] == (found.factor - 1) * ranks[place] for place in ranks)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(2, 4))
def test_members_of_a_group_are_a_jump_apart_where_the_numbers_divide(
    ranks: int, blocks: int, step: int, factor: int
) -> None:
    """As users of other systems know it: blocks of jump × factor ranks, members one jump apart."""
    nodes = blocks * step * factor
    places = [f"{node:012x}" for node in range(nodes) for _ in range(ranks)]
    found = replicate(places, factor=factor, jump=step * ranks)
    assert found.notes == []
    for rank, targets in enumerate(found.targets):
        block, inside = divmod(rank // ranks, step * factor)
        group = {block * step * factor + inside % step + member * step for member in range(factor)}
        assert {int(target, 16) for target in targets} == group - {rank // ranks}


def test_ten_thousand_ranks_are_served() -> None:
    places = [f"{rank // 8:012x}" for rank in range(10_000)]
    found = replicate(places, factor=3, jump=64)
    assert found.notes == []
    assert all(len(targets) == 2 for targets in found.targets)


# --- what a place keeps -------------------------------------------------------------------------------------


GIB = 1024**3
PLENTY = 1000


def held(step: int, nbytes: int = 10, **changes: bool) -> HeldCheckpoint:
    flags = {"on_line": True, "complete": True, "busy": False} | changes
    return HeldCheckpoint(f"step_{step:08d}-{step:08x}", step, nbytes, **flags)


def steps(room: Room) -> list[int]:
    return [int(checkpoint[5:13]) for checkpoint in room.drop]


def room_for(these: list[HeldCheckpoint], needed: int = 10, **changes: int) -> Room:
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


def fits(these: list[HeldCheckpoint], dropped: list[str], asked: dict[str, int]) -> bool:
    freed = sum(one.nbytes for one in these if one.checkpoint in dropped)
    used = sum(one.nbytes for one in these) - freed
    in_limit = not asked["limit"] or used + asked["needed"] <= asked["limit"]
    return asked["needed"] <= asked["free"] + freed and in_limit


def newest_good(these: list[HeldCheckpoint]) -> HeldCheckpoint | None:
    good = [one for one in these if one.on_line and one.complete]
    return max(good, key=lambda one: one.step, default=None)


@settings(max_examples=400, deadline=None)
@given(PLACES, ASKED)
def test_the_only_good_one_and_what_is_busy_is_never_given_up(
    these: list[HeldCheckpoint], asked: dict[str, int]
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
    these: list[HeldCheckpoint], asked: dict[str, int]
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
    these: list[HeldCheckpoint], asked: dict[str, int]
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
    these: list[HeldCheckpoint], asked: dict[str, int], random: Any
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


# --- where each file comes from -----------------------------------------------------------------------------


FILES = [f"__{rank}_{shard}.distcp" for rank in range(4) for shard in range(2)]
NODES = {"a": "node-a", "b": "node-b", "c": "node-c", "d": "node-d"}
SAVED_AT = {path: "abcd"[rank // 2] for rank, path in enumerate(FILES)}


def files_of(*ranks: int) -> list[str]:
    return [path for path in FILES if int(path[2]) in ranks]


# --- examples -----------------------------------------------------------------------------------------------


def test_each_file_comes_from_whoever_holds_it() -> None:
    found = assemble(FILES, {"b": files_of(1, 0), "a": files_of(0, 1), "c": files_of(2, 3)}, in_global=False)
    assert found.complete
    assert found.sources["__0_0.distcp"] == ["a", "b"]
    assert found.sources["__3_1.distcp"] == ["c"]


def test_a_node_that_is_gone_with_all_that_held_its_shards_leaves_files_missing() -> None:
    found = assemble(FILES, {"a": files_of(0, 1), "b": files_of(0, 1, 2)}, in_global=False)
    assert not found.complete
    assert found.missing == files_of(3)


def test_the_global_tier_has_what_no_place_has() -> None:
    """Node losses that the replication does not cover fall to the global tier."""
    found = assemble(FILES, {"a": files_of(0)}, in_global=True)
    assert found.complete
    assert order(found, "__0_1.distcp", "a", 0) == ["a", GLOBAL]
    assert order(found, "__3_0.distcp", "a", 0) == [GLOBAL]


def test_files_that_the_checkpoint_does_not_have_count_for_nothing() -> None:
    """A place that comes back with other copies claims what it likes."""
    found = assemble(["x"], {"a": ["y", "../x", "x ", ""], "b": ["y", "x", "x"]}, in_global=False)
    assert found == Assembly({"x": ["b"]}, False, [])


@given(
    places=st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=8),
    held=st.dictionaries(st.sampled_from("abcd"), st.sets(st.sampled_from(FILES)), max_size=4),
    verified=st.booleans(),
    saved_world=st.integers(1, 8),
)
def test_what_no_place_has_read_is_read_by_exactly_one_rank(
    places: list[str], held: dict[str, set[str]], verified: bool, saved_world: int
) -> None:
    """A rung counts only if every byte of it was read in this resume, also what nobody needs to load."""
    found = assemble(FILES, held, in_global=True, verified=verified)
    shares = [
        share(found, places, rank, saver=saver_of, saved_world=saved_world) for rank in range(len(places))
    ]
    read = sorted(path for mine in shares for path in mine)
    assert read == [path for path in FILES if not (verified and found.sources[path])]
    if saved_world == len(places) == 4 and not verified:
        assert shares == [files_of(rank) for rank in range(4)], "who saved it needs most of it anyway"


def test_in_another_world_a_file_is_read_to_its_end_where_it_lies() -> None:
    found = assemble(FILES, {"a": files_of(0, 2), "b": files_of(1, 3)}, in_global=False, verified=False)
    shares = [share(found, ["b", "a"], rank, saver=saver_of, saved_world=4) for rank in range(2)]
    assert shares == [files_of(1, 3), files_of(0, 2)]


def test_whoever_holds_nothing_asks_its_peers_in_turn() -> None:
    """A spare with an empty directory; four ranks of it do not all ask the same peer."""
    found = assemble(["x"], {place: ["x"] for place in "abc"}, in_global=True)
    assert [order(found, "x", "spare", rank) for rank in range(4)] == [
        ["a", "b", "c", GLOBAL],
        ["b", "c", "a", GLOBAL],
        ["c", "a", "b", GLOBAL],
        ["a", "b", "c", GLOBAL],
    ]
    assert order(found, "x", "b", 7) == ["b", "c", "a", GLOBAL]


def test_a_file_that_is_not_in_the_checkpoint_has_no_order() -> None:
    with pytest.raises(KeyError, match="y"):
        order(assemble(["x"], {}, in_global=True), "y", "a", 0)


def test_the_evidence_says_from_where_and_what_is_missing() -> None:
    whole = {place: files_of("abcd".index(place)) for place in "abcd"}
    assert describe_assembly(assemble(FILES, whole, in_global=True), NODES, SAVED_AT) == [
        "8 of 8 files on the node that saved them"
    ]
    replaced = {"a": files_of(0, 1), "c": files_of(2, 3), "d": files_of(3)}
    assert describe_assembly(assemble(FILES, replaced, in_global=False), NODES, SAVED_AT) == [
        "6 of 8 files on the node that saved them, 2 on peers only",
        "no longer held where they were saved: node-b (2 files)",
    ]
    assert describe_assembly(assemble(FILES, {"a": files_of(0)}, in_global=False), NODES, SAVED_AT) == [
        "2 of 8 files on the node that saved them, 6 nowhere",
        "no longer held where they were saved: node-b (2 files), node-c (2 files), node-d (2 files)",
        "no copy anywhere: __1_0.distcp, __1_1.distcp, __2_0.distcp, __2_1.distcp and 2 more",
    ]
    assert describe_assembly(
        assemble(FILES, {"e": files_of(0)}, in_global=True), {}, {"__0_0.distcp": "a"}
    ) == [
        "0 of 8 files on the node that saved them, 2 on peers only, 6 in the global tier only",
        "no longer held where they were saved: a (1 file)",
    ]


# --- properties ---------------------------------------------------------------------------------------------

PATHS = st.sampled_from("uvwxyz")
PATHS_HELD = st.dictionaries(st.sampled_from("abcde"), st.lists(PATHS, max_size=8))


@settings(max_examples=300, deadline=None)
@given(st.lists(PATHS, unique=True), PATHS_HELD, st.booleans(), st.randoms())
def test_a_file_has_a_source_exactly_where_one_holds_it(
    files: list[str], held: dict[str, list[str]], in_global: bool, random: Any
) -> None:
    found = assemble(files, held, in_global=in_global)
    assert list(found.sources) == files
    for path in files:
        assert found.sources[path] == sorted(place for place in held if path in held[place])
    assert found.missing == [path for path in files if not found.sources[path] and not in_global]
    assert found.complete == (in_global or all(found.sources.values()))
    answered = list(held.items())
    random.shuffle(answered)
    shuffled = {place: random.sample(paths, len(paths)) for place, paths in answered}
    assert assemble(files, shuffled, in_global=in_global) == found, "in whatever order they answered"


@given(st.lists(PATHS, unique=True, min_size=1), PATHS_HELD, st.booleans(), st.sampled_from("abcdef"))
def test_the_own_place_comes_first_the_global_tier_last_and_every_peer_is_first_for_somebody(
    files: list[str], held: dict[str, list[str]], in_global: bool, here: str
) -> None:
    found = assemble(files, held, in_global=in_global)
    for path in files:
        peers = [place for place in found.sources[path] if place != here]
        firsts = set()
        for rank in range(12):
            asked = order(found, path, here, rank)
            assert sorted(asked) == sorted(found.sources[path] + [GLOBAL] * in_global), "each once"
            assert (asked[:1] == [here]) == (here in found.sources[path])
            assert (asked[-1:] == [GLOBAL]) == in_global
            firsts.add(next((place for place in asked if place in peers), None))
        assert firsts == set(peers) or not peers
        assert bool(asked) == (path not in found.missing)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 4), st.booleans())
def test_what_replication_covers_can_be_put_together_again_and_only_that(
    ranks: list[int], factor: int, in_global: bool
) -> None:
    """For every layout and every subset of nodes that is lost (A7)."""
    places = [f"{node:012x}" for node, count in enumerate(ranks) for _ in range(count)]
    replication = replicate(places, factor=factor, jump=0)
    files = [f"__{rank}_0.distcp" for rank in range(len(places))]
    held: dict[str, list[str]] = {place: [] for place in places}
    for own, targets, path in zip(places, replication.targets, files, strict=True):
        for place in (own, *targets):
            held[place].append(path)
    for count in range(len(ranks) + 1):
        for lost in combinations(held, count):
            left = {place: paths for place, paths in held.items() if place not in lost}
            found = assemble(files, left, in_global=in_global)
            assert found.complete == (in_global or survives(replication, places, lost))
            assert count >= replication.factor or found.complete


# --- cost ---------------------------------------------------------------------------------------------------


class Counted(list[str]):
    """Says how often its items were looked at."""

    looked = 0

    def __iter__(self) -> Iterator[str]:
        for item in super().__iter__():
            Counted.looked += 1
            yield item


def test_each_claim_is_looked_at_once() -> None:
    """Ten thousand ranks, two copies, four files each: linear, whatever the clock says."""
    files = [f"__{rank}_{shard}.distcp" for rank in range(10_000) for shard in range(4)]
    claims = [Counted(files[at : at + 64]) for at in range(0, len(files), 32)]
    held = {f"{place:012x}": claimed for place, claimed in enumerate(claims)}
    Counted.looked = 0
    assert assemble(files, held, in_global=False).complete
    assert Counted.looked == sum(len(claimed) for claimed in claims)
