"""Who holds whose replicas (A7), and what the loss of nodes then costs."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.copies.rules import Replication, replicate, survives


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
        "not all of them may be lost at once"
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
            "only 2 nodes of 2, so that it leads back to the same node; set it to at most 2, or to 0",
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
