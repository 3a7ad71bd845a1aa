"""Which device each rank gets, and which nodes the next attempt may use."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.capacity import Cluster, Exclusion, devices_of, fit, layout, usable
from holdfast.policy.rotation import NodeDevices, arrange, arrangements, describe, device_of


def nodes(*counts: int) -> list[NodeDevices]:
    return [
        NodeDevices("abcdefgh"[at], [str(device) for device in range(count)])
        for at, count in enumerate(counts)
    ]


def where(places: list[NodeDevices], shift: int, workers: int) -> list[tuple[str, str]]:
    """The node and device of each global rank."""
    arranged = arrange(places, shift)
    return [(node.node, device_of(node.devices, local)) for node in arranged for local in range(workers)]


# -- rotation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "workers", "shift", "placement"),
    [
        ([4], 4, 0, "a[0,1,2,3]"),
        ([4], 4, 1, "a[1,2,3,0]"),
        ([4], 2, 3, "a[3,0]"),
        ([2, 2], 2, 1, "a[1,0] b[1,0]"),
        ([2, 2], 2, 2, "b[0,1] a[0,1]"),
        ([2, 2], 2, 3, "b[1,0] a[1,0]"),
        ([1, 1, 1], 1, 1, "b[0] c[0] a[0]"),
        ([4, 1], 1, 1, "b[0] a[0]"),
        ([4, 1], 1, 2, "b[0] a[1]"),
        ([0, 0], 2, 1, "b a"),
        ([1], 1, 5, "a[0]"),
        ([], 1, 3, ""),
    ],
)
def test_devices_turn_within_a_node_and_nodes_among_each_other(
    counts: list[int], workers: int, shift: int, placement: str
) -> None:
    assert describe(arrange(nodes(*counts), shift), workers) == placement


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_every_rank_gets_another_device_wherever_there_is_one(counts: list[int], data: st.DataObject) -> None:
    places = nodes(*counts)
    workers = data.draw(st.integers(1, max(1, *counts)))
    many = arrangements(places)
    assert arrange(places, 0) == places
    assert (many > 1) == (len(places) > 1 or counts[0] > 1), "one arrangement only where no rank can move"
    if many > 1:
        shift = data.draw(st.integers(1, many - 1))
        plain, moved = where(places, 0, workers), where(places, shift, workers)
        assert all(before != after for before, after in zip(plain, moved, strict=True))
        assert arrange(places, shift + many) == arrange(places, shift)
        turned = {node.node: sorted(node.devices) for node in arrange(places, shift)}
        assert turned == {node.node: sorted(node.devices) for node in places}, "the same devices, all of them"


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_with_equal_nodes_no_two_shifts_share_a_rank_on_a_device(
    count: int, devices: int, data: st.DataObject
) -> None:
    places = nodes(*[devices] * count)
    shifts = st.integers(0, arrangements(places) - 1)
    one, other = data.draw(shifts), data.draw(shifts)
    same = [a == b for a, b in zip(where(places, one, devices), where(places, other, devices), strict=True)]
    assert all(same) if one == other else not any(same)
    texts = {describe(arrange(places, shift), devices) for shift in range(arrangements(places))}
    assert len(texts) == arrangements(places), "each arrangement has a text of its own"


# -- capacity ------------------------------------------------------------------------------------------------


def cluster(**more: object) -> Cluster:
    return Cluster(**{"nodes": ["a", "b", "c"], **more})  # type: ignore[arg-type]


def test_spares_fill_up_in_their_order_and_no_more_than_needed() -> None:
    found = fit(cluster(spares=["x", "y"]), 4)
    assert (found.nodes, found.spares, found.missing) == (["a", "b", "c", "x"], ["x"], 0)
    found = fit(cluster(spares=["x", "y"]), 3, without={"b"})
    assert (found.nodes, found.spares) == (["a", "c", "x"], ["x"])
    assert fit(cluster(spares=["x"]), 3).spares == []


def test_a_group_gets_smaller_only_if_it_may_and_never_below_its_least() -> None:
    assert fit(cluster(), 4).missing == 1
    shrunk = fit(cluster(may_shrink=True, min_nodes=2), 4)
    assert (shrunk.shrinks, shrunk.nodes) == (True, ["a", "b", "c"])
    assert fit(cluster(may_shrink=True, min_nodes=4), 4).missing == 1
    short = fit(cluster(may_shrink=True, min_nodes=2), 3, without={"a", "b"})
    assert (short.shrinks, short.missing) == (False, 1)


def test_what_is_excluded_is_not_there() -> None:
    bad = cluster(
        spares=["x", "y"],
        devices={"b": ["0", "1"], "c": ["0", "1", "2"]},
        workers_per_node=2,
        excluded=[Exclusion("a"), Exclusion("b", "1"), Exclusion("c", "1"), Exclusion("x")],
    )
    assert [usable(bad, node) for node in "abcxy"] == [False, False, True, False, True]
    assert fit(bad, 3).nodes == ["c", "y"], "b has one device left for two workers"
    assert layout(bad, ["c"]) == [NodeDevices("c", ["0", "2"])]
    assert devices_of(bad, "c", without="2") == ["0"]


some = st.lists(st.sampled_from("abcdef"), unique=True, max_size=6)


@given(
    some,
    some,
    some,
    some,
    st.integers(0, 6),
    st.integers(1, 4),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
)
def test_any_fit_is_of_usable_nodes_and_says_if_they_are_too_few(
    here: list[str],
    spares: list[str],
    out: list[str],
    without: list[str],
    wanted: int,
    least: int,
    most: int,
    may_shrink: bool,
    devices: bool,
) -> None:
    place = Cluster(
        nodes=here,
        spares=spares,
        excluded=[Exclusion(node, "0" if devices else None) for node in out],
        devices={node: ["0"] for node in "abcdef"},
        min_nodes=least,
        max_nodes=most,
        may_shrink=may_shrink,
    )
    found = fit(place, wanted, set(without))
    assert not set(found.nodes) & {*out, *without}
    assert len(set(found.nodes)) == len(found.nodes)
    assert found.missing > 0 or len(found.nodes) >= least
    assert not found.shrinks or (may_shrink and not found.missing and len(found.nodes) < max(wanted, least))
    if found.missing:
        assert len(found.nodes) + found.missing <= max(wanted, least)


def test_workers_that_share_what_devices_there_are_need_no_more_of_them() -> None:
    shared = Cluster(nodes=["a", "b"], devices={"a": ["0"], "b": ["0", "1"]}, workers_per_node=2, min_nodes=2)
    assert [usable(shared, node) for node in "ab"] == [True, True]
    assert not fit(shared, 2).missing
    out = msgspec.structs.replace(shared, excluded=[Exclusion("a", "0"), Exclusion("b", "1")])
    assert [usable(out, node) for node in "ab"] == [False, False]
