"""Who is named in sharded training, and which link: the policy, over simulated meshes and made-up reports."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.train.stragglers.reports import (
    LETTER,
    Actions,
    event_of,
    found_event,
    letter_of,
    lines_of,
    read_letter,
)
from holdfast.train.stragglers.scores import (
    COMPUTE,
    Meets,
    RankTimes,
    ScoreKind,
    ScoreLimits,
    Span,
    StragglerFinding,
    StragglerJudge,
    alike,
    average,
    stages,
)
from holdfast.train.stragglers.times import covered
from holdfast.train.stragglers.waits import group_key
from kit.worlds.mesh_worlds import Mesh

SHAPES: list[dict[str, Any]] = [
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"dp": 4, "tp": 2},
    {"pp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 4, "dp": 2},
]
BLAMELESS = ("", "rotating", "imbalance", "phases", "uniform")


def shown(shape: dict[str, Any]) -> str:
    return "x".join(f"{name}{size}" for name, size in shape.items())


def judged(report: list[RankTimes], times: int = 3) -> StragglerFinding:
    judge = StragglerJudge(ScoreLimits())
    return [judge.judge(report) for _ in range(times)][-1]


def rank_of(rank: int, own: float, wait: float, **given: Any) -> RankTimes:
    meets = {name: Meets(*value) for name, value in given.pop("meets", {"0,1,2,3": (wait, 4.0)}).items()}
    return RankTimes(
        rank=rank,
        node="n0",
        steps=100,
        marked=False,
        sections={COMPUTE: Span(own, wait)},
        meets=meets,
        **given,
    )


# --- who is late


@pytest.mark.parametrize("shape", SHAPES, ids=shown)
def test_a_slow_rank_of_a_mesh_is_named_and_no_other(shape: dict[str, Any]) -> None:
    """F3: also the only one of its stage, by its own past."""
    for seed in range(2):
        world = Mesh(seed, fault="rank", **shape).run()
        assert world.named == world.bad
        assert world.links == set()


@pytest.mark.parametrize("fault", BLAMELESS)
def test_where_no_one_is_to_blame_nobody_is_named(fault: str) -> None:
    for seed, shape in enumerate(({"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2})):
        world = Mesh(seed, fault=fault, noise=0.3, **shape).run()
        assert world.named == set(), (fault, shape)
        assert world.links == set(), (fault, shape)


def test_the_rank_that_is_named_is_told_with_what_it_and_the_others_wait() -> None:
    late = judged([rank_of(rank, 0.01 + 0.1 * (rank == 1), 0.1 - 0.1 * (rank == 1)) for rank in range(4)])
    (named,) = late.named
    assert named.key == "rank 1"
    assert (named.waits, named.others_wait) == (0.0, 0.1)
    assert named.describe().endswith("; a step it waits 0 ms in collectives, and they wait 100 ms")
    (fate,) = Actions(tell=print).fates(late.named)
    event = found_event(fate, 7)
    assert (event.waits, event.others_wait, event.ranks) == (0.0, 0.1, [])


def test_ranks_of_stages_with_more_work_by_design_are_not_compared_with_the_others() -> None:
    world = Mesh(3, pp=4, dp=2, uneven=(1.0, 3.0, 0.3, 1.0)).run()
    assert world.named == set()
    assert world.links == set()
    slow = Mesh(3, pp=4, dp=2, uneven=(1.0, 2.0, 0.7, 1.0), fault="rank", factor=4.0).run()
    assert slow.named == slow.bad


def test_of_a_stage_alone_with_its_work_it_is_said_that_it_cannot_be_told() -> None:
    """F3: two stages, one rank each, and one has worked far longer from the beginning."""
    world = Mesh(0, pp=2, uneven=(1.0, 3.0)).run()
    assert world.named == set()
    finding = world.findings[-1]
    assert finding.unclear == [1]
    assert [score.relative for score in finding.scores] == [None, None]
    (line,) = [line for line in lines_of(finding, 5, 9) if "cannot be told" in line]
    assert line.startswith("straggler scores at step 9 (1.00 is full speed): rank 1: far more work")
    assert event_of(world.report(5), finding, 9, 1.0).unclear == [1]
    late = Mesh(0, pp=2, fault="rank", factor=3.0).run().findings[-1]
    assert late.unclear == [], "its own past tells"
    assert late.named


def test_a_stage_that_works_longer_in_its_bubble_is_not_named() -> None:
    """It took the time in which it waited before: nobody waits for it, and a step takes as long."""

    def report(*times: tuple[float, float]) -> list[RankTimes]:
        names = [f"{rank}-{rank + 1}" for rank in range(len(times) - 1)]
        found = []
        for rank, (own, wait) in enumerate(times):
            meets = dict.fromkeys(names[max(rank - 1, 0) : rank + 1], (wait / 2, 4.0))
            found.append(rank_of(rank, own, wait, meets=meets))
        return found

    def named_after(before: list[RankTimes], after: list[RankTimes]) -> list[str]:
        judge = StragglerJudge(ScoreLimits())
        assert all(judge.judge(before).named == [] for _ in range(3))
        return [one.key for one in [judge.judge(after) for _ in range(3)][-1].named]

    before = report((0.05, 0.06), (0.02, 0.09))
    assert named_after(before, report((0.05, 0.06), (0.09, 0.02))) == []
    assert named_after(before, report((0.05, 0.12), (0.16, 0.01))) == ["rank 1"]
    before = report((0.1, 0.01), (0.02, 0.09), (0.1, 0.01), (0.1, 0.01))
    after = report((0.16, 0.01), (0.08, 0.09), (0.1, 0.07), (0.1, 0.07))
    assert "rank 1" not in named_after(before, after), "steps became longer, and that is the doing of rank 0"


# --- who does the same work


def test_stages_are_the_ranks_that_meet_without_sending_to_each_other() -> None:
    def rank(number: int, *names: str) -> RankTimes:
        return RankTimes(rank=number, meets={name: Meets(0.1, 1.0) for name in names})

    world = "0,1,2,3"
    ranks = [
        rank(0, world, "0,1", "0-2"),
        rank(1, world, "0,1", "1-3"),
        rank(2, world, "2,3", "0-2"),
        rank(3, world, "2,3", "1-3"),
    ]
    assert [[one.rank for one in part] for part in stages(ranks)] == [[0, 1], [2, 3]]
    chain = [("0-1",), ("0-1", "1-2"), ("1-2", "2-3"), ("2-3",)]
    ends = [rank(at, world, *pairs, *(["0,3"] if at in (0, 3) else [])) for at, pairs in enumerate(chain)]
    assert [[one.rank for one in part] for part in stages(ends)] == [[0], [1], [2], [3]], "tied weights"
    roles = [rank(0, world, "0,1"), rank(1, world, "0,1"), rank(2, world), rank(3, world)]
    assert [[one.rank for one in part] for part in stages(roles)] == [[0, 1], [2, 3]], "not the same work"
    without = [
        msgspec.structs.replace(one, meets={name: met for name, met in one.meets.items() if "-" not in name})
        for one in ranks
    ]
    assert [[one.rank for one in part] for part in stages(without)] == [[0, 1, 2, 3]]


@given(shape=st.tuples(*[st.integers(1, 3)] * 3), seed=st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_every_rank_is_in_one_stage_and_stages_are_those_of_the_pipeline(
    shape: tuple[int, int, int], seed: int
) -> None:
    pp, dp, tp = shape
    if pp * dp * tp < 2:
        return
    report = Mesh(seed, pp=pp, dp=dp, tp=tp, steps=3).report(0)
    parts = [[one.rank for one in part] for part in stages(report)]
    assert sorted(itertools.chain(*parts)) == list(range(pp * dp * tp))
    stage = [{rank // (dp * tp) for rank in part} for part in parts]
    assert all(len(one) == 1 for one in stage)
    if pp > 1:
        assert len(parts) == pp


def test_ranks_that_did_not_see_the_same_collectives_are_not_taken_to_have_seen_them() -> None:
    """Rank 1 missed half of its waits: they look like work, and it is not named for them."""
    group = "0,1,2"
    ranks = [rank_of(rank, 0.02, 0.08, meets={group: (0.08, 8.0)}) for rank in (0, 2)]
    ranks.append(rank_of(1, 0.06, 0.04, meets={group: (0.04, 4.0)}))
    assert judged(ranks).named == []
    assert [round(one.arrives, 9) for one in alike(ranks)] == [0.1] * 3
    fit = [*ranks[:2], rank_of(1, 0.06, 0.04, meets={group: (0.04, 8.0)})]
    assert [one.key for one in judged(fit).named] == ["rank 1"]


def test_where_only_some_see_their_waits_nobody_is_taken_to_have() -> None:
    sees = [rank_of(rank, 0.02, 0.08) for rank in range(2)]
    blind = [rank_of(rank, 0.10, 0.0, meets={}) for rank in (2, 3)]
    assert judged([*sees, *blind]).named == []


# --- links


@pytest.mark.parametrize("shape", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}], ids=shown)
def test_a_slow_link_is_told_from_a_slow_rank_where_groups_overlap(shape: dict[str, Any]) -> None:
    """F3: the two ranks of it are not late themselves, whoever else they meet."""
    for seed in range(3):
        world = Mesh(seed, fault="link", extra=0.02, **shape).run()
        assert world.named == set()
        assert world.links <= {world.link}
    worlds = [Mesh(seed, fault="link", dp=2, tp=2).run() for seed in range(3)]
    assert [world.links for world in worlds] == [{world.link} for world in worlds]
    (named,) = worlds[0].findings[-1].named
    assert (named.kind, named.rank, named.node) == (ScoreKind.LINK, None, "")
    one, other = worlds[0].link
    assert named.describe().startswith(f"the link between ranks {one}, {other} is slow: even the rank that")


def test_a_rank_all_of_whose_links_are_slow_is_named_as_that() -> None:
    world = Mesh(1, fault="network", dp=2, tp=2).run()
    assert world.links == {(world.cut,)}
    assert world.named == set()
    (named,) = world.findings[-1].named
    assert named.describe().startswith(f"every link of rank {world.cut} is slow")


def test_a_slow_link_is_told_and_nothing_is_done_about_a_rank_for_it() -> None:
    """There is no device to exclude, and no reason to stop: whichever rank went, the link would stay."""
    finding = Mesh(0, fault="link", dp=2, tp=2).run().findings[-1]
    asked: list[object] = []
    for chosen in ({"stop": asked.append}, {"exclude": lambda one, step: asked.append(one)}):
        actions = Actions(tell=print, why_not=lambda one: asked.append(one) or "", **chosen)  # type: ignore[func-returns-value]
        (fate,) = actions.fates(finding.named)
        assert fate.then == "told"
        event = found_event(fate, 3)
        assert (event.kind, event.rank, len(event.ranks)) == ("link", None, 2)
    assert asked == []


def test_no_link_is_named_where_there_is_nothing_like_it_or_a_rank_is_late() -> None:
    alone = Mesh(0, fault="link", dp=4).run()
    assert alone.links == set()
    both = Mesh(0, fault="link", dp=2, tp=2)
    both.bad = {both.link[0]}
    both.fault = "rank"
    both.run()
    assert both.named == both.bad
    assert both.links == set()


def test_a_link_is_not_named_for_what_two_somewhat_late_ranks_explain() -> None:
    """Each is within the threshold; two that are late in different phases make all of a group wait."""

    def report(more: float) -> list[RankTimes]:
        groups = {"0,1": 0.03, "2,3": 0.001, "0,2": 0.002, "1,3": 0.002}
        return [
            rank_of(
                rank,
                0.05 + more * (rank in (0, 3)),
                0.05 - more * (rank in (0, 3)),
                meets={name: (floor, 4.0) for name, floor in groups.items() if str(rank) in name},
            )
            for rank in range(4)
        ]

    assert judged(report(0.02)).named == []
    assert [one.key for one in judged(report(0.0)).named] == ["link 0,1"]


# --- beside the step, on a device


def test_the_rank_that_waits_least_beside_its_step_is_named() -> None:
    """fully_shard on CUDA gathers in a stream of its own: sections are as long on all ranks."""

    def report(late: int, missed: float) -> list[RankTimes]:
        return [
            rank_of(rank, 0.1, 0.0, meets={"0,1,2,3": (0.06, 8.0)}, beside=0.06 - missed * (rank == late))
            for rank in range(4)
        ]

    assert judged(report(2, 0.0)).named == []
    assert judged(report(2, 0.02)).named == [], "a fifth of a step is within the threshold"
    (named,) = judged(report(2, 0.05)).named
    assert named.key == "rank 2"
    assert named.relative == pytest.approx(0.5)
    assert named.others_wait == pytest.approx(0.06)


@given(
    waits=st.lists(st.floats(0.0, 0.09), min_size=2, max_size=8),
    own=st.lists(st.floats(0.0, 0.09), min_size=8, max_size=8),
)
def test_whoever_is_named_waits_less_than_most(waits: list[float], own: list[float]) -> None:
    """F1, F3: over steps that take as long on all ranks, whatever part of them is waiting."""
    ranks = [
        rank_of(
            rank,
            0.1 - own[rank],
            own[rank],
            meets={group_key(range(len(waits))): (own[rank] + wait, 8.0)},
            beside=wait,
        )
        for rank, wait in enumerate(waits)
    ]
    whole = [one.waits + one.beside for one in ranks]
    for named in judged(ranks).named:
        assert named.rank is not None
        others = sorted(value for rank, value in enumerate(whole) if rank != named.rank)
        assert whole[named.rank] <= others[len(others) // 2]


def test_what_is_covered_counts_once() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert covered([]) == 0


@given(spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=8))
def test_covered_time_is_that_of_the_moments_in_it(spans: list[list[int]]) -> None:
    moments = {at for begins, ends in spans for at in range(begins, ends)}
    assert covered((begins, ends) for begins, ends in spans) == len(moments)


# --- as it travels


def test_a_letter_has_the_neighbours_in_a_pipeline_whatever_else_does_not_fit() -> None:
    meets = {group_key([rank, rank + 1]): Meets(0.1, 50.0 + rank) for rank in range(0, 60, 2)}
    meets |= {"0-4": Meets(0.1, 2.0), "4-8": Meets(0.1, 2.0)}
    sections = {f"{'s' * 40}{number}": Span(0.123456789, 0.123456789, 0.123456789) for number in range(16)}
    for name in ("small", "large"):
        mine = RankTimes(rank=4, steps=9, meets=meets, sections=sections if name == "large" else {})
        letter = letter_of(mine)
        assert letter.numel() == LETTER
        read = read_letter(letter, 4)
        assert read.steps == 9
        assert {"0-4", "4-8"} <= set(read.meets) or read.meets == {}
        assert len(read.meets) <= 8
    assert read_letter(letter_of(RankTimes(rank=4, meets=meets)), 4).meets["0-4"] == Meets(0.1, 2.0)


def test_a_step_with_a_pause_does_not_speak_for_all_waits() -> None:
    met = [{"0,1": [0.01, 2]}] * 19 + [{"0,1": [60.0, 2]}]
    assert average(met)["0,1"] == Meets(pytest.approx(0.0115), 2.0)  # type: ignore[arg-type]


# --- many seeds


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_precision_and_recall_over_many_seeded_meshes(capsys: pytest.CaptureFixture[str]) -> None:
    """F3: ranks and links, over 30 seeds a shape; and no alarm where no one is to blame."""
    lines = []
    for fault in ("rank", "two ranks"):
        for shape in SHAPES:
            if fault == "two ranks" and shape == {"pp": 2}:
                continue  # both of two are slow: that is nobody
            worlds = [
                Mesh(seed, fault=fault, noise=(0.05, 0.15, 0.3)[seed % 3], **shape).run()
                for seed in range(30)
            ]
            named = sum(len(world.named) for world in worlds)
            right = sum(len(world.named & world.bad) for world in worlds)
            bad = sum(len(world.bad) for world in worlds)
            lines.append(
                f"{fault:10} {shown(shape):12} precision {right / named:.3f}  recall {right / bad:.3f}"
            )
            assert right == named
            assert all(not world.links for world in worlds)
            if fault == "rank":
                assert right == bad
    for fault in ("link", "network"):
        for shape in SHAPES[1:3] + SHAPES[4:]:
            worlds = [
                Mesh(seed, fault=fault, noise=(0.05, 0.15, 0.3)[seed % 3], **shape).run()
                for seed in range(30)
            ]
            assert all(not world.named for world in worlds)
            told = [world for world in worlds if world.links]
            right = sum(
                all(
                    set(world.link) <= set(ranks) if world.link else ranks == (world.cut,)
                    for ranks in world.links
                )
                for world in told
            )
            precision = f"{right / len(told):.3f}" if told else "-"
            lines.append(
                f"{fault:10} {shown(shape):12} precision {precision}  recall {right / len(worlds):.3f}"
            )
    alarms = runs = 0
    for fault in BLAMELESS:
        for shape in SHAPES:
            for seed in range(30):
                uneven = (1.0, 2.0, 0.5, 1.0) if seed % 2 else ()
                world = Mesh(
                    seed, fault=fault, noise=(0.05, 0.2, 0.5)[seed % 3], uneven=uneven, **shape
                ).run()
                runs += 1
                alarms += bool(world.named or world.links)
    lines.append(f"no one to blame: {alarms} false alarms in {runs} runs")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert alarms == 0
