"""Who trains under which rank after a fault: nobody twice, who stays keeps its rank, and never too few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.restarts import Assignment, Shortage, reassign

PAIRS = {member: f"n{member // 2}" for member in range(6)}


def assign(present: set[int], before: list[int], **more: object) -> Assignment | Shortage:
    given = {"wanted": 4, "least": None, "whole_nodes": False, **more}
    return reassign(PAIRS, present, before, **given)  # type: ignore[arg-type]


def test_the_first_ranks_are_the_members_in_order_and_the_rest_waits() -> None:
    assert assign({0, 1, 2, 3, 4, 5}, []) == Assignment(order=[0, 1, 2, 3], reserves=[4, 5])
    assert assign({1, 2, 3, 4, 5}, []) == Assignment(order=[1, 2, 3, 4], reserves=[5])
    assert assign({1, 2, 3, 4, 5}, [], whole_nodes=True) == Assignment(order=[2, 3, 4, 5], reserves=[])


def test_a_reserve_of_the_lost_ones_own_node_comes_first() -> None:
    found = assign({0, 1, 2, 4, 5}, [0, 1, 2, 4])
    assert found == Assignment(order=[0, 1, 2, 4], reserves=[5])
    found = assign({0, 1, 2, 3, 5}, [0, 1, 2, 4])
    assert found == Assignment(order=[0, 1, 2, 5], reserves=[3], promoted=[5])


def test_a_lost_rank_takes_its_node_along_where_nodes_count() -> None:
    found = assign({0, 1, 2, 4, 5}, [0, 1, 2, 3], whole_nodes=True)
    assert found == Assignment(order=[0, 1, 4, 5], reserves=[], promoted=[4, 5])


def test_it_shrinks_only_where_that_is_allowed_and_grows_again_when_it_can() -> None:
    assert assign({0, 1, 3}, [0, 1, 2, 3]) == Shortage(usable=3, needed=4)
    found = assign({0, 1, 3}, [0, 1, 2, 3], least=3)
    assert found == Assignment(order=[0, 1, 3], reserves=[], shrinks=True)
    assert assign({0, 1}, [0, 1, 2, 3], least=3) == Shortage(usable=2, needed=3)
    assert assign({0, 1, 3, 5}, [0, 1, 3], least=3) == Assignment(
        order=[0, 1, 3, 5], reserves=[], promoted=[5]
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, str], set[int], list[int], int, int | None, bool]:
    members = draw(st.integers(1, 10))
    nodes = {member: f"n{draw(st.integers(0, 3))}" for member in range(members)}
    present = draw(st.sets(st.integers(0, members - 1)))
    wanted = draw(st.integers(1, members))
    before = draw(st.permutations(range(members)))[: draw(st.integers(0, wanted))]
    least = draw(st.none() | st.integers(1, wanted))
    return nodes, present, before, wanted, least, draw(st.booleans())


@given(worlds())
def test_what_is_guaranteed(world: tuple[dict[int, str], set[int], list[int], int, int | None, bool]) -> None:
    nodes, present, before, wanted, least, whole_nodes = world
    found = reassign(nodes, present, before, wanted=wanted, least=least, whole_nodes=whole_nodes)
    broken = {nodes[member] for member in nodes if member not in present} if whole_nodes else set()
    usable = {member for member in present if nodes[member] not in broken}
    if isinstance(found, Shortage):
        assert found.usable == len(usable) < found.needed
        assert found.needed == (wanted if least is None else least)
        return
    everyone = [*found.order, *found.reserves]
    assert len(everyone) == len(set(everyone))  # nobody twice
    assert set(everyone) == usable  # nobody who is not usable, and nobody who is forgotten
    assert len(found.order) == wanted or (found.shrinks and least is not None and len(found.order) >= least)
    assert len(found.order) <= wanted
    assert found.shrinks == (len(found.order) < wanted)
    assert set(found.promoted) == (set(found.order) - set(before) if before else set())
    if not found.shrinks:
        for rank, member in enumerate(before):
            if member in usable:
                assert found.order[rank] == member  # who stays keeps its rank
    else:
        stays = [member for member in before if member in usable]
        assert [member for member in found.order if member in stays] == stays  # and their order


@given(worlds())
def test_a_lost_ones_place_is_taken_from_its_own_node_if_that_has_a_reserve(
    world: tuple[dict[int, str], set[int], list[int], int, int | None, bool],
) -> None:
    nodes, present, before, wanted, least, whole_nodes = world
    found = reassign(nodes, present, before, wanted=wanted, least=least, whole_nodes=whole_nodes)
    if isinstance(found, Shortage) or found.shrinks:
        return
    for rank, lost in enumerate(before):
        if found.order[rank] != lost and nodes[found.order[rank]] != nodes[lost]:
            near = [member for member in found.reserves if nodes[member] == nodes[lost]]
            assert not near, (rank, lost, near)
