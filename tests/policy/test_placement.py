"""Which device each rank gets, and which nodes the next attempt may use."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.devices import Card, devices_seen, environment_of, index_of, own_place, read_cards
from holdfast.launch.nodes.attempt import usable_devices, why_unfit
from holdfast.policy import placement
from holdfast.policy.placement import (
    Cluster,
    Exclusion,
    Meeting,
    NodeDevices,
    Participant,
    arrange,
    arrangements,
    describe_devices,
    device_of,
    devices_of,
    fit,
    layout,
    usable,
)
from holdfast.policy.results import Place
from holdfast.record.launches import LaunchInfo
from holdfast.record.operator import Exclusion as KeptOut


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
    assert describe_devices(arrange(nodes(*counts), shift), workers) == placement


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
    texts = {describe_devices(arrange(places, shift), devices) for shift in range(arrangements(places))}
    assert len(texts) == arrangements(places), "each arrangement has a text of its own"


# -- how ranks see devices -----------------------------------------------------------------------------------

A, B, C = (f"GPU-{one * 8}-d33d-2b2c-524d-9e3d8d2b8a77" for one in "abc")


def card(minor: int, uuid: str = "", model: str = "H200") -> Card:
    return Card(minor=minor, bus=f"0000:{minor + 16:02x}:00.0", uuid=uuid, model=model)


@pytest.mark.parametrize(
    ("environ", "cards", "seen"),
    [
        # A container: the host's fourth and fifth are CUDA's first two, whatever `/dev` calls them.
        ({}, [card(4), card(5)], [("4", "0", ["0"]), ("5", "1", ["1"])]),
        (
            {},
            [card(4, A), card(5, B)],
            [("GPU-aaaaaaaa", "0", ["4", "0"]), ("GPU-bbbbbbbb", "1", ["5", "1"])],
        ),
        ({}, [card(1, A), card(2, B)], [("GPU-aaaaaaaa", "0", ["1", "0"]), ("GPU-bbbbbbbb", "1", ["2"])]),
        ({"NVIDIA_VISIBLE_DEVICES": "4"}, [card(4)], [("4", "0", ["0"])]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [card(4, A), card(5, B)], [("GPU-bbbbbbbb", "1", ["1"])]),
        # A whole machine.
        ({}, [card(0), card(1)], [("0", "0", []), ("1", "1", [])]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, [card(0), card(1)], [("1", "1", []), ("0", "0", [])]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, [card(0), card(1)], [("1", "1", [])]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [card(0)], []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, [card(0)], []),
        ({"CUDA_VISIBLE_DEVICES": B}, [card(0, A), card(1, B)], [("GPU-bbbbbbbb", B, [B])]),
        ({"CUDA_VISIBLE_DEVICES": A}, [], [("GPU-aaaaaaaa", A, [A])]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1/2/0"}, [card(0, A)], [("MIG-1/2/0", "MIG-1/2/0", [])]),
        # Stand-ins on a CPU.
        ({"CUDA_VISIBLE_DEVICES": "0, x"}, [], [("0", "0", []), ("x", "x", [])]),
        # Different models: only CUDA knows its order.
        ({}, [card(0, A), card(1, B, "T4")], [("0", "0", []), ("1", "1", [])]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [card(0, A), card(1, B, "T4")], [("1", "1", [])]),
        (
            {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            [card(0, A), card(1, B, "T4")],
            [("GPU-bbbbbbbb", "1", ["1"])],
        ),
    ],
)
def test_what_devices_are_called_and_how_cuda_takes_them(
    environ: dict[str, str], cards: list[Card], seen: list[tuple[str, str, list[str]]]
) -> None:
    found = devices_seen(environ, list(reversed(cards)))
    assert [(one.name, one.handle, one.former) for one in found] == seen


def test_what_an_older_release_excluded_by_a_number_stays_out() -> None:
    here = devices_seen({}, [card(4, A), card(5, B)])
    for name in ("5", "GPU-bbbbbbbb", B, "1"):
        assert usable_devices(here, "n", [KeptOut(node="n", device=name)]) == ["GPU-aaaaaaaa"], name
    for name in ("6", "GPU-b", C, None):
        assert len(usable_devices(here, "n", [KeptOut(node="n", device=name)])) == 2, name
    assert len(usable_devices(here, "n", [KeptOut(node="m", device="5")])) == 2
    told = why_unfit(here, "n", 2, [KeptOut(node="n", device="5", reason="ECC")])
    assert "1 devices are left for 2 workers" in told
    assert why_unfit(here, "n", 1, [KeptOut(node="n", device="5", reason="ECC")]) == ""


def device_given(worker: dict[str, str], inherited: dict[str, str], local_rank: int, count: int) -> int:
    """Which physical device a worker's `cuda:LOCAL_RANK` is, of `count`; as torch and CUDA go about it."""
    shown = {**inherited, **worker}.get("CUDA_VISIBLE_DEVICES")
    order = list(range(count)) if shown is None else [int(one) for one in shown.split(",")]
    return order[local_rank % len(order)]


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_rotation_moves_the_ranks_and_puts_no_two_on_one_device(
    count: int, workers: int, virtual: bool, uuids: bool, given_by_variable: bool, data: st.DataObject
) -> None:
    """With and without --virtual-local-rank, in a container or not, under any name."""
    first = data.draw(st.integers(0, 4), label="first minor")
    cards = [
        card(first + one, f"GPU-{one:08d}-d33d-2b2c-524d-9e3d8d2b8a77" if uuids else "")
        for one in range(count)
    ]
    order = data.draw(st.permutations(range(count)), label="the variable")
    inherited = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, order))} if given_by_variable else {}
    here = devices_seen(inherited, cards)
    out = data.draw(
        st.sets(st.sampled_from([one.name for one in here]), max_size=max(0, count - workers)),
        label="excluded",
    )
    usable = usable_devices(here, "n", [KeptOut(node="n", device=one) for one in out])
    places = [NodeDevices("n", usable)]
    shift = data.draw(st.integers(0, arrangements(places) - 1), label="shift")

    def devices(turned: int) -> list[int]:
        arranged = arrange(places, turned)[0].devices
        found = []
        for rank in range(workers):
            local = {"LOCAL_RANK": "0"} if virtual else {"LOCAL_RANK": str(rank)}
            worker = {**local, **environment_of(arranged, here, rank, virtual=virtual)}
            found.append(device_given(worker, inherited, int(worker["LOCAL_RANK"]), count))
            named = device_of(arranged, rank)
            assert usable_devices(here, "n", []).index(named) == index_of({**inherited, **worker}, here, rank)
            plain = order if given_by_variable else list(range(count))
            assert found[-1] == plain[[one.name for one in here].index(named)], (
                "on the device it is said to have"
            )
        return found

    before, after = devices(0), devices(shift)
    assert len(set(after)) == len(set(before)) == min(workers, len(usable)), (
        "no two share one, unless they did"
    )
    if shift:
        assert all(one != other for one, other in zip(before, after, strict=True))


INFORMATION = """\
Model: \t\t NVIDIA H200
IRQ:   \t\t 41
GPU UUID: \t {uuid}
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def test_the_kernels_files_are_read_and_the_driver_is_asked_only_for_what_they_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev, proc, programs = tmp_path / "dev", tmp_path / "gpus", tmp_path / "bin"
    unknown = "GPU-????????-????-????-????-????????????"
    for minor, uuid in ((4, A), (5, unknown), (6, C)):
        place = proc / f"0000:{minor}B:00.0"
        place.mkdir(parents=True)
        (place / "information").write_text(INFORMATION.format(uuid=uuid, bus=place.name, minor=minor))
    dev.mkdir()
    programs.mkdir()
    for name in ("nvidia4", "nvidia5", "nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    smi = programs / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '00000000:5B:00.0, {B}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    found = read_cards(dev, proc)
    assert [(one.minor, one.bus, one.uuid, one.model) for one in found] == [
        (4, "0000:4b:00.0", A, "NVIDIA H200"),
        (5, "0000:5b:00.0", B, "NVIDIA H200"),
    ], "what is not in /dev is not there"
    assert read_cards(tmp_path / "none", proc) == ()


def test_a_worker_has_the_name_that_the_launcher_gives_its_device() -> None:
    info = LaunchInfo(
        run_dir="/r", run_id="i", launch="l", attempt=1, epoch=1, node="n", device="GPU-aaaaaaaa"
    )
    # As with --virtual-local-rank: by its environment alone it would be device 0 of 1.
    worker = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}
    assert own_place("n", {**worker, **info.to_environment()}) == Place("n", "GPU-aaaaaaaa")
    assert own_place("n", worker) == Place("n", "3")
    assert own_place("n", {"CUDA_VISIBLE_DEVICES": "1,0", "LOCAL_RANK": "1"}) == Place("n", "0")


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


def test_a_group_whose_state_is_tied_to_its_ranks_does_not_get_smaller() -> None:
    """Experts that only their own ranks have: a smaller group could not resume, so nodes are waited for."""
    tied = "model.experts differs between ranks"
    found = fit(cluster(may_shrink=True, min_nodes=2, tied=tied), 4)
    assert (found.shrinks, found.missing) == (False, 1)
    assert fit(cluster(may_shrink=True, min_nodes=2, tied=tied), 3).missing == 0


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


# --- rounds -------------------------------------------------------------------------------------------------


AGENTS = [f"agent{number}" for number in range(6)]
OPERATIONS = st.one_of(
    st.tuples(st.just("arrive"), st.sampled_from(AGENTS), st.sampled_from(["", "", "", "excluded: sick"])),
    st.tuples(st.just("remove"), st.sampled_from(AGENTS), st.just("")),
    st.tuples(st.just("form"), st.sampled_from(["", "enough"]), st.just("")),
)


def arrive_all(meeting: Meeting, *agents: str) -> Meeting:
    for agent in agents:
        meeting = placement.arrive(meeting, agent, f"node-{agent}")
    return meeting


@settings(max_examples=300)
@given(st.lists(OPERATIONS, max_size=40), st.integers(1, 3), st.integers(0, 3))
def test_whatever_happens_a_round_is_one_that_may_be(
    operations: list[tuple[str, str, str]], low: int, more: int
) -> None:
    high = low + more
    meeting = Meeting()
    for what, who, why in operations:
        before = meeting
        if what == "arrive":
            # One host for all of them: names must still differ.
            meeting = placement.arrive(meeting, who, "host", unfit=why)
        elif what == "remove":
            meeting = placement.remove(meeting, {who: "lost"})
        else:
            formed = placement.form(meeting, min_nodes=low, max_nodes=high, enough=who == "enough")
            if formed is None:
                continue
            meeting = formed
            chosen = [m.agent for m in meeting.members]
            assert meeting.round == before.round + 1
            assert low <= len(chosen) <= high
            assert len(set(chosen)) == len(chosen)
            assert not set(chosen) & set(meeting.gone)
            assert not set(chosen) & set(meeting.here)
            assert all(not m.unfit for m in meeting.members)
            assert not placement.awaited(before), "everybody of the round before was back or gone"
            assert len(chosen) == high or who == "enough"
        names = [m.node for m in [*meeting.here.values(), *meeting.members] if m.agent not in meeting.gone]
        by_agent = {m.agent: m.node for m in [*meeting.here.values(), *meeting.members]}
        assert len({by_agent[agent] for agent in by_agent if agent not in meeting.gone}) == len(
            {agent for agent in by_agent if agent not in meeting.gone}
        ), names
        assert not set(meeting.here) & set(meeting.gone)
        assert msgspec.json.decode(msgspec.json.encode(meeting), type=Meeting) == meeting


@settings(max_examples=200)
@given(st.lists(OPERATIONS, max_size=30), st.integers(1, 3))
def test_if_the_living_come_back_and_suffice_the_round_forms(
    operations: list[tuple[str, str, str]], low: int
) -> None:
    meeting = Meeting()
    for what, who, why in operations:
        if what == "arrive":
            meeting = placement.arrive(meeting, who, who, unfit=why)
        elif what == "remove":
            meeting = placement.remove(meeting, {who: "lost"})
        else:
            meeting = placement.form(meeting, min_nodes=low, max_nodes=6, enough=True) or meeting
    living = [agent for agent in AGENTS if agent not in meeting.gone]
    for agent in living:
        meeting = placement.arrive(meeting, agent, agent)
    meeting = placement.remove(meeting, {agent: "lost" for agent in AGENTS if agent not in living})
    formed = placement.form(meeting, min_nodes=low, max_nodes=6, enough=True)
    assert (formed is not None) == (len(living) >= low)


def test_a_round_that_must_have_a_size_has_that_and_no_other_whatever_the_launch_allows() -> None:
    meeting = arrive_all(msgspec.structs.replace(Meeting(), size=2), "a")
    assert placement.form(meeting, min_nodes=1, max_nodes=3, enough=True) is None
    meeting = arrive_all(meeting, "b", "c")
    formed = placement.form(meeting, min_nodes=1, max_nodes=3, enough=False)
    assert formed is not None
    assert [m.agent for m in formed.members] == ["a", "b"]
    assert formed.size == 0, "it holds for one round"


def test_old_members_keep_their_order_and_spares_come_after_them() -> None:
    meeting = arrive_all(Meeting(), "b", "a", "c", "d")
    first = placement.form(meeting, min_nodes=3, max_nodes=3, enough=False)
    assert first is not None
    assert [m.agent for m in first.members] == ["b", "a", "c"]
    assert [m.agent for m in placement.spares(first)] == ["d"]
    assert "spare" in placement.parked(first, "d")
    again = arrive_all(placement.remove(first, {"b": "killed"}), "c", "a")
    second = placement.form(again, min_nodes=3, max_nodes=3, enough=False)
    assert second is not None
    assert [m.agent for m in second.members] == ["a", "c", "d"]
    assert placement.spares(second) == []


def test_a_round_waits_for_its_old_members_even_if_there_are_enough_others() -> None:
    """Else a node that only takes longer to end its workers would lose its place to a spare."""
    first = placement.form(arrive_all(Meeting(), "a", "b"), min_nodes=2, max_nodes=2, enough=False)
    assert first is not None
    meeting = arrive_all(first, "a", "c")
    assert placement.form(meeting, min_nodes=2, max_nodes=2, enough=True) is None
    assert [m.agent for m in placement.awaited(meeting)] == ["b"]


def test_who_was_declared_gone_cannot_come_back_under_the_same_name() -> None:
    meeting = placement.remove(arrive_all(Meeting(), "a"), {"a": "silent"})
    assert arrive_all(meeting, "a") == meeting
    assert arrive_all(meeting, "b").here["b"].node == "node-b"


def test_nobody_joins_what_is_over_and_the_first_word_counts() -> None:
    meeting = placement.finish(placement.finish(arrive_all(Meeting(), "a"), 0, "finished"), 1, "failed")
    assert meeting.over == placement.RunOver(code=0, why="finished")
    assert arrive_all(meeting, "b") == meeting
    assert placement.form(meeting, min_nodes=1, max_nodes=1, enough=True) is None


def test_ranks_follow_the_order_of_the_nodes_by_role() -> None:
    members = [
        Participant(agent="a", node="a", ticket=1, slots=2, role="trainer"),
        Participant(agent="b", node="b", ticket=2, slots=1, role="reader"),
        Participant(agent="c", node="c", ticket=3, slots=3, role="trainer"),
    ]
    ranks = placement.ranks_of(members, 2)
    assert (ranks.first, ranks.world_size, ranks.first_of_role, ranks.role_world_size) == (3, 6, 2, 5)
