"""Which limit rules a rank, what is learned, and which timeouts contradict each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.config.settings import FIELDS
from holdfast.config.sources import Effective, load
from holdfast.errors import ConfigError
from holdfast.policy.timeouts import (
    ENOUGH,
    FLOOR,
    FLOORS,
    HELLO_FACTOR,
    SETTLE,
    Late,
    Learned,
    Limits,
    Observed,
    OpenSection,
    RankState,
    StillRunning,
    apply,
    hanging,
    hello_limit,
    learn,
    longest_of,
    ruling,
)
from holdfast.record.directory import ControlDirectory
from holdfast.record.limits import (
    check_timeouts,
    limits_of,
    read_ft_state,
    read_learned,
    refuse_unknown_to_launcher,
    refuse_without_launcher,
    store_learned,
)

LIMITS = Limits(
    initial=1800,
    heartbeat=300,
    sections={"setup": 600, "step": 180, "checkpointing": 420},
    out_of_section=200,
)


def rank(*sections: OpenSection, trained: bool = True, sign: float = 0.0, **more: object) -> RankState:
    return RankState(sign=sign, left=0.0, trained=trained, sectioned=True, sections=sections, **more)


def at(name: str, since: float = 0.0, spent: float = 0.0, at_least: float = 0.0) -> OpenSection:
    return OpenSection(name, since, spent, at_least)


# --- which rule holds


@pytest.mark.parametrize(
    ("state", "rule", "limit"),
    [
        (rank(trained=False), "initial", 1800),
        (rank(at("step"), trained=False), "initial", 1800),
        (rank(at("checkpointing"), trained=False), "initial", 1800),
        (rank(at("setup"), trained=False), "section", 600),
        (rank(at("setup"), at("loading"), trained=False), "initial", 1800),
        (rank(at("step")), "section", 180),
        (rank(at("checkpointing")), "section", 420),
        (rank(at("eval")), "heartbeat", 300),
        (rank(at("step"), at("eval")), "heartbeat", 300),
        (rank(at("eval"), at("step")), "section", 180),
        (rank(), "out_of_section", 200),
        (RankState(sign=0.0, left=0.0), "initial", 1800),
        (RankState(sign=0.0, left=0.0, trained=True), "heartbeat", 300),
    ],
)
def test_exactly_one_rule_holds(state: RankState, rule: str, limit: float) -> None:
    held = ruling(state, LIMITS, 50.0)
    assert (held.rule, held.limit, held.seconds, held.overdue) == (rule, limit, 50.0, False)
    assert ruling(state, LIMITS, limit + 1).overdue
    assert not ruling(state, LIMITS, limit).overdue


def test_a_first_step_that_compiles_longer_than_a_step_may_take_lives() -> None:
    compiling = rank(at("step"), trained=False)
    assert not ruling(compiling, LIMITS, 1700.0).overdue
    assert ruling(compiling, LIMITS, 1801.0).overdue


def test_an_outer_clock_stands_still_while_an_inner_section_is_open() -> None:
    """170 of the step's 180 s are used up; what `checkpointing` inside takes is not taken from the rest."""
    inside = rank(at("step", spent=170.0), at("checkpointing", since=1000.0))
    held = ruling(inside, LIMITS, 1400.0)
    assert (held.section, held.seconds, held.overdue) == ("checkpointing", 400.0, False)
    assert ruling(inside, LIMITS, 1421.0).overdue
    back = rank(at("step", since=5000.0, spent=170.0))
    assert not ruling(back, LIMITS, 5009.0).overdue
    assert ruling(back, LIMITS, 5011.0).overdue


WHOLE = Limits(sections={"eval": 60.0, "batch": 10.0, "step": 180.0}, whole={"eval": 60.0, "batch": 10.0})


def test_a_limit_that_was_given_holds_for_all_that_is_inside_its_section() -> None:
    """`eval:60`, in which sections open and close without end; none of them is ever late itself."""

    def evaluating(inside: dict[str, float], inner: OpenSection) -> RankState:
        eval_ = OpenSection("eval", since=0.0, spent=5.0, began=1.0, inside=inside)
        return rank(eval_, inner, sign=999.0)

    held = ruling(evaluating({"read": 54.0}, at("read", since=999.0)), WHOLE, 1000.0)
    assert not held.overdue, "5 + 54 + 1 s"
    held = ruling(evaluating({"read": 54.5}, at("read", since=999.0)), WHOLE, 1000.0)
    assert (held.rule, held.section, held.limit, held.seconds) == ("section", "eval", 60.0, 60.5)
    limited = at("batch", since=999.0)
    assert not ruling(evaluating({"batch": 64.0}, limited), WHOLE, 1000.0).overdue, "10 s are its own"
    assert ruling(evaluating({"batch": 64.5}, limited), WHOLE, 1000.0).section == "eval"
    deadline = at("checkpointing", since=0.0, at_least=5000.0)
    assert not ruling(evaluating({}, deadline), WHOLE, 900.0).overdue, "it has a deadline of its own"
    before = msgspec.structs.replace(evaluating({"read": 900.0}, at("read")), trained=False)
    assert ruling(before, WHOLE, 1000.0).rule == "initial"
    default = rank(OpenSection("step", 0.0, 5.0, 0.0, 1.0, {"read": 900.0}), at("read"), sign=999.0)
    assert ruling(default, WHOLE, 1000.0).rule == "heartbeat", "nobody gave that limit"
    starved = evaluating({"read": 900.0}, at("read", since=999.0))
    assert not ruling(starved, WHOLE, 1000.0, fresh=980.0).overdue, "the agent saw 20 s of it"


def test_after_the_loop_a_limit_of_its_own_holds_and_those_of_sections() -> None:
    limits = msgspec.structs.replace(LIMITS, exiting=3600.0)
    for state in (rank(exiting=True), rank(at("export"), exiting=True), rank(exiting=True, trained=False)):
        held = ruling(state, limits, 3600.0)
        assert (held.rule, held.limit, held.overdue) == ("exiting", 3600.0, False)
        assert ruling(state, limits, 3601.0).overdue
    beaten = rank(at("export"), exiting=True, sign=3000.0)
    assert not ruling(beaten, limits, 6600.0).overdue
    assert ruling(rank(at("checkpointing"), exiting=True), limits, 421.0).overdue
    assert ruling(rank(at("checkpointing"), exiting=True, trained=False), limits, 421.0).overdue
    off = msgspec.structs.replace(limits, exiting=0.0)
    assert not ruling(rank(exiting=True), off, 1e9).overdue
    assert rank(step=7, exiting=True).progress > rank(step=7).progress, "who has left the loop is ahead"


def test_the_limits_are_those_of_the_settings(tmp_path: Path) -> None:
    assert limits_of(settings()).whole == {}, "a default of ours holds for the section alone"
    given_ = limits_of(settings(**{SECTIONS: "eval:5"}, monitor_rank_exit_timeout=7))
    assert (given_.whole, given_.sections, given_.exiting) == ({"eval": 5.0}, {"eval": 5.0}, 7.0)
    learned = apply(Learned(sections={"eval": 1.0}), given_)
    assert (learned.whole, learned.sections, learned.exiting) == ({"eval": 5.0}, {"eval": 1.0}, 7.0)
    off = limits_of(settings(monitor_enable_ft_package=False, **{SECTIONS: "eval:5"}))
    for state in (rank(), rank(at("eval")), rank(trained=False), rank(exiting=True)):
        assert not ruling(state, off, 1e9).overdue


def test_a_beat_helps_where_the_heartbeat_rules_and_nowhere_else() -> None:
    assert not ruling(rank(at("eval"), sign=1000.0), LIMITS, 1299.0).overdue
    assert ruling(rank(at("step"), sign=1000.0), LIMITS, 1000.0).overdue


def test_zero_switches_a_limit_off() -> None:
    off = Limits(initial=0, heartbeat=0, sections={"step": 0.0, "setup": 0.0}, out_of_section=0)
    for state in (rank(), rank(at("step")), rank(at("eval")), rank(at("setup"), trained=False)):
        assert not ruling(state, off, 1e9).overdue
    # A set-up without a limit of its own is still a start.
    mixed = Limits(initial=1800, sections={"setup": 0.0})
    assert ruling(rank(at("setup"), trained=False), mixed, 1801.0).rule == "initial"


def test_a_wait_with_a_deadline_of_its_own_gets_at_least_that() -> None:
    waiting = rank(at("checkpointing", at_least=3600.0))
    assert not ruling(waiting, LIMITS, 3599.0).overdue
    assert ruling(waiting, LIMITS, 3601.0).overdue
    loading = rank(at("loading", at_least=4000.0), trained=False)
    assert not ruling(loading, LIMITS, 3999.0).overdue
    named = Limits(sections={"loading": 60.0})
    assert ruling(loading, named, 61.0).overdue, "a limit that somebody gave to loading is meant"


# --- when an overdue rank is a hang


def late(rank: int, step: int, limit: float = 4.0, *, stopped: bool = False) -> Late:
    return Late(rank=rank, step=step, limit=limit, stopped=stopped)


def hung(*standings: StillRunning, until: dict[int, float] | None = None, now: float = 100.0) -> set[int]:
    return {one.rank for _, one in hanging(standings, until or {}, now)[0]}


def test_a_rank_that_waits_for_one_that_is_in_time_is_in_time() -> None:
    """`step:4`, rank 1 is in its first step with its initial limit, rank 0 waits for it in step 2."""
    waiting = [late(0, step=1)]
    assert hung(StillRunning(late=waiting, in_time=0)) == set()
    assert hung(StillRunning(node="a", late=waiting), StillRunning(node="b", in_time=0)) == set()
    assert hung(StillRunning(late=waiting, in_time=1)) == set(), (
        "rank 1 saves, which may take longer than a step"
    )
    assert hung(StillRunning(late=waiting)) == {0}, "nobody is in time"
    assert hung(StillRunning(late=[*waiting, late(1, step=0, limit=1800.0)])) == {0, 1}


def test_nobody_waits_for_a_rank_that_is_ahead_nor_does_a_stopped_process() -> None:
    """So a hang is found within its own limit also where the others do not need that rank, or do not yet."""
    for standing in (
        StillRunning(late=[late(0, step=1)], in_time=2),
        StillRunning(late=[late(0, step=1, stopped=True)], in_time=0),
    ):
        found, until = hanging([standing], {}, 100.0)
        assert not found, "what the two said of themselves may be of different moments"
        assert hung(standing, until=until, now=100.0 + SETTLE + 0.1) == {0}


def test_whom_a_late_rank_waited_for_has_come_it_has_its_limit_once_more() -> None:
    excused = hanging([StillRunning(late=[late(0, step=1)], in_time=1)], {}, 100.0)[1]
    gone_ahead = StillRunning(late=[late(0, step=1)], in_time=2)
    assert hung(gone_ahead, until=excused, now=103.9) == set()
    assert hung(gone_ahead, until=excused, now=104.1) == {0}
    assert hanging([StillRunning(in_time=2)], excused, 104.0)[1] == {}, "it is not late any more"
    # In that time it may be waited for: the other one is late somewhere with a shorter limit.
    both = StillRunning(late=[late(0, step=1), late(1, step=2, limit=0.5)])
    found, until = hanging([both], hanging([gone_ahead], excused, 101.0)[1], 102.0)
    assert found == []
    assert hung(both, until=until, now=104.1) == {0, 1}


def test_whom_a_late_rank_waited_for_is_late_itself_both_hang() -> None:
    excused = hanging([StillRunning(late=[late(0, step=1)], in_time=1)], {}, 100.0)[1]
    both = StillRunning(late=[late(0, step=1), late(1, step=1)])
    assert hung(both, until=excused, now=101.0) == {0, 1}
    third_is_ahead = StillRunning(late=both.late, in_time=5)
    found, until = hanging([third_is_ahead], excused, 101.0)
    assert found == []
    assert hung(third_is_ahead, until=until, now=101.1 + SETTLE) == {0, 1}


RANKS = st.lists(
    st.tuples(
        st.integers(0, 3),  # the step it has completed
        st.floats(0.5, 50.0),  # its limit
        st.floats(0.0, 100.0),  # when its clock started
        st.integers(0, 2),  # its node
    ),
    min_size=1,
    max_size=6,
)


def standings_at(ranks: list[tuple[int, float, float, int]], now: float) -> list[StillRunning]:
    found = []
    for node in range(3):
        mine = [(number, one) for number, one in enumerate(ranks) if one[3] == node]
        overdue = [
            late(number, step, limit) for number, (step, limit, since, _) in mine if now > since + limit
        ]
        in_time = [step for _, (step, limit, since, _) in mine if now <= since + limit]
        found.append(StillRunning(node=str(node), late=overdue, in_time=min(in_time, default=None)))
    return found


@given(RANKS, st.floats(0.1, 5.0))
def test_a_group_that_stands_still_is_found_when_its_last_rank_is_overdue_and_no_group_before_it_should(
    ranks: list[tuple[int, float, float, int]], pause: float
) -> None:
    """The bound: nobody hangs while somebody that it may wait for is in time, and every group ends."""
    last = max(since + limit for _, limit, since, _ in ranks)
    now, until = 0.0, dict[int, float]()
    while True:
        found, until = hanging(standings_at(ranks, now), until, now)
        if found:
            break
        assert now <= last + max(pause, SETTLE), "some rank is overdue, and none is in time"
        now += pause
    for _, one in found:
        step, limit, since, _ = ranks[one.rank]
        assert now > since + limit, "its own limit is over"
        others = [other for number, other in enumerate(ranks) if number != one.rank]
        assert all(other[0] > step or now > other[1] + other[2] for other in others)


STEP_LIMIT, FIRST_LIMIT, LOOK = 4.0, 40.0, 0.3
WORK = st.lists(  # by rank, by step: shares of the limit that its own work takes before and after a barrier
    st.lists(st.tuples(st.floats(0.0, 0.45), st.floats(0.0, 0.45)), min_size=4, max_size=4),
    min_size=2,
    max_size=4,
)


def spans(work: list[list[tuple[float, float]]]) -> list[list[tuple[float, float]]]:
    """By rank, by step: from when to when it is in that step, where all meet in the middle of each.

    Who is not late when all have met is through within its limit: what it waited before that counts.
    """
    began = [0.0] * len(work)
    found: list[list[tuple[float, float]]] = [[] for _ in work]
    for step in range(4):
        limit = FIRST_LIMIT if step == 0 else STEP_LIMIT
        met = max(start + limit * mine[step][0] for start, mine in zip(began, work, strict=True))
        for rank, mine in enumerate(work):
            end = met + limit * mine[step][1]
            if met <= began[rank] + limit + LOOK:
                end = max(met, min(end, began[rank] + limit))
            found[rank].append((began[rank], end))
            began[rank] = end
    return found


@given(WORK)
def test_a_group_each_of_whose_ranks_works_within_its_limits_never_hangs(
    work: list[list[tuple[float, float]]],
) -> None:
    """However long they wait for each other: in the first step, and for the rest of a step after it."""
    ranks = spans(work)
    now, until = 0.0, dict[int, float]()
    while now < max(steps[-1][1] for steps in ranks):
        overdue, in_time = [], []
        for rank, steps in enumerate(ranks):
            done = sum(end <= now for _, end in steps)
            if done < len(steps):
                limit = STEP_LIMIT if done else FIRST_LIMIT
                if now > steps[done][0] + limit:
                    overdue.append(late(rank, done, limit))
                else:
                    in_time.append(done)
        standing = StillRunning(late=overdue, in_time=min(in_time, default=None))
        found, until = hanging([standing], until, now)
        assert not found, now
        now += LOOK


@given(RANKS)
def test_who_is_on_which_node_does_not_matter(ranks: list[tuple[int, float, float, int]]) -> None:
    assume(len(ranks) > 1)
    together = [(step, limit, since, 0) for step, limit, since, _ in ranks]
    for now in (10.0, 60.0, 120.0):
        apart = {one.rank for _, one in hanging(standings_at(ranks, now), {}, now)[0]}
        assert apart == {one.rank for _, one in hanging(standings_at(together, now), {}, now)[0]}


def test_a_rank_may_take_to_its_hello_what_the_slowest_took_before_and_more() -> None:
    assert hello_limit(1800.0, 10.0) == 1800.0
    assert hello_limit(1800.0, 3600.0) == HELLO_FACTOR * 3600.0
    assert hello_limit(0.0, 3600.0) == 0.0, "off stays off"


def test_a_rank_that_said_good_bye_is_never_overdue() -> None:
    assert not ruling(rank(done=True), LIMITS, 1e9).overdue


NAMES = st.sampled_from(["setup", "loading", "step", "checkpointing", "eval"])
SECONDS = st.floats(0, 1e6)


@given(
    st.lists(st.tuples(NAMES, SECONDS, SECONDS), max_size=4), st.booleans(), st.booleans(), SECONDS, SECONDS
)
def test_a_fresh_start_excuses_everything_before_it(
    stack: list[tuple[str, float, float]], trained: bool, sectioned: bool, sign: float, fresh: float
) -> None:
    """Whatever the rank's state, no time before the fresh start counts if its clocks began before it."""
    sections = tuple(OpenSection(name, min(since, fresh), spent) for name, since, spent in stack)
    state = RankState(
        sign=min(sign, fresh),
        left=0.0,
        trained=trained,
        sectioned=sectioned or bool(stack),
        sections=sections,
    )
    late = fresh + 10.0
    assert ruling(state, LIMITS, fresh, fresh).seconds <= (0.0 if not sections else sections[-1].spent)
    if not sections or sections[-1].since < fresh:
        assert ruling(state, LIMITS, late, fresh).seconds <= late - fresh + 1e-3


# --- learning


def test_a_limit_is_learned_from_enough_samples_only() -> None:
    few = learn({"step": Observed(ENOUGH["step"] - 1, 100.0), "eval": Observed(2, 50.0)}, Observed(15, 9.0))
    assert few == Learned()
    found = learn({"step": Observed(16, 100.0), "eval": Observed(3, 50.0)}, Observed(16, 9.0))
    assert found == Learned(sections={"step": 500.0, "eval": 250.0}, out_of_section=45.0)


def test_a_learned_limit_is_smoothed_with_the_one_before_and_never_below_its_floor() -> None:
    before = Learned(sections={"step": 100.0, "eval": 77.0})
    found = learn({"step": Observed(20, 60.0), "setup": Observed(1, 0.5)}, Observed(), before)
    assert found.sections == {"step": 200.0, "eval": 77.0, "setup": FLOORS["setup"]}
    assert learn({"step": Observed(99, 0.001)}, Observed(99, 0.0)).sections["step"] == FLOOR


@given(longest=st.floats(0.001, 1e5), earlier=st.floats(0, 1e5))
def test_a_learned_limit_leaves_room_above_the_longest_seen(longest: float, earlier: float) -> None:
    found = learn({"step": Observed(16, longest)}, Observed(), Learned(sections={"step": earlier}))
    assert found.sections["step"] >= 2 * longest


def test_a_given_limit_is_only_lowered_and_a_default_gives_way_to_what_was_seen() -> None:
    learned = Learned(sections={"step": 900.0, "checkpointing": 70.0}, out_of_section=250.0)
    by_default = apply(learned, LIMITS)
    assert by_default.sections == {"setup": 600, "step": 900.0, "checkpointing": 70.0}
    assert by_default.out_of_section == 250.0
    given_ = Limits(sections={"step": 180.0, "checkpointing": 420.0}, given=["sections"])
    assert apply(learned, given_).sections == {"step": 180.0, "checkpointing": 70.0}
    assert apply(Learned(sections={"step": 1e6}), LIMITS).sections["step"] == LIMITS.initial


def test_learning_turns_nothing_on_that_was_switched_off_and_loosens_nothing() -> None:
    off = Limits(initial=0, heartbeat=0, sections={"step": 0.0}, out_of_section=0)
    assert apply(Learned(sections={"step": 50.0, "eval": 50.0}, out_of_section=9.0), off) == off
    assert apply(Learned(sections={"eval": 50.0}), LIMITS).sections["eval"] == 50.0
    assert "eval" not in apply(Learned(sections={"eval": 301.0}), LIMITS).sections


def test_of_several_nodes_the_longest_counts() -> None:
    one = Learned(sections={"step": 40.0, "eval": 90.0}, out_of_section=31.0)
    other = Learned(sections={"step": 50.0}, out_of_section=30.0)
    assert longest_of([one, other]) == Learned(sections={"step": 50.0, "eval": 90.0}, out_of_section=31.0)
    assert longest_of([]) == Learned()


def test_what_was_learned_is_kept_by_node_and_a_damaged_file_is_told_and_left_out(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    assert read_learned(control) == (Learned(), [])
    store_learned(control, "a/../b", 3, Learned(sections={"step": 40.0}))
    store_learned(control, "host.1", 3, Learned(sections={"step": 60.0}))
    store_learned(control, "host.1", 4, Learned(sections={"step": 50.0}))
    store_learned(control, "left-long-ago", -20, Learned(sections={"step": 999.0}))
    folder = control.path / "timeouts"
    (folder / "bad.json").write_text('{"node": 3')
    (folder / ".host.json.123.tmp").write_text("left by a kill")
    learned, problems = read_learned(control)
    assert learned.sections == {"step": 50.0}
    assert len(problems) == 1
    assert "bad.json" in problems[0]
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) == [
        "a_.._b.json", "bad.json", "host.1.json", "left-long-ago.json",
    ]  # fmt: skip


# --- another system's file

FT_STATE = {
    "current_timeouts": {
        "heartbeat": {"initial": 90.5, "subsequent": 44.0, "were_calculated": True},
        "section": {
            "section": {"setup": 33.0, "step": 7.5, "checkpointing": 420.0},
            "out_of_section": 12.5,
            "calculated_sections": ["setup", "step"],
            "is_out_of_section_calculated": True,
        },
    }
}


def test_an_ft_state_is_read_in_both_of_its_forms(tmp_path: Path) -> None:
    file = tmp_path / "ft_state.json"
    file.write_text(json.dumps(FT_STATE))
    assert read_ft_state(file) == Learned(
        initial=90.5, heartbeat=44.0, sections={"setup": 33.0, "step": 7.5}, out_of_section=12.5
    )
    old = {"current_timeouts": {"initial": 90.5, "subsequent": 44.0, "were_calculated": True}}
    file.write_text(json.dumps(old))
    assert read_ft_state(file) == Learned(initial=90.5, heartbeat=44.0)
    file.write_text(json.dumps({"current_timeouts": {}}))
    assert read_ft_state(file) == Learned()


def test_an_imported_ft_state_gives_the_limits(tmp_path: Path) -> None:
    file = tmp_path / "ft_state.json"
    file.write_text(json.dumps(FT_STATE))
    limits = limits_of(settings(monitor_import_ft_state=file))
    assert limits.sections == {"setup": 33.0, "step": 7.5, "checkpointing": 420.0}
    assert (limits.initial, limits.heartbeat, limits.out_of_section) == (90.5, 44.0, 12.5)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"current_timeouts": {"section": {"section": 5}}}'])
def test_an_unusable_ft_state_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "ft_state.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"monitor\.import_ft_state = '.*ft_state\.json': cannot be used"):
        limits_of(settings(monitor_import_ft_state=file))


# --- all timeouts together


def settings(**keywords: object) -> Effective:
    return load(environ={}, keywords=keywords)


def test_the_defaults_fit_each_other() -> None:
    check_timeouts(settings(), {})
    check_timeouts(settings(), {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480"})
    check_timeouts(settings(), {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "garbage"})


SECTIONS = "monitor_rank_section_timeouts"


@pytest.mark.parametrize(
    ("keywords", "environ", "names", "order"),
    [
        (
            {SECTIONS: "setup:600,step:2000,checkpointing:420"},
            {},
            ["initial_rank_heartbeat_timeout = 1800 (default)", "step:2000 in monitor.rank_section_timeouts"],
            "initial ≥ step",
        ),
        (
            {"monitor_rank_heartbeat_timeout": 1900},
            {},
            ["monitor.rank_heartbeat_timeout = 1900 (keyword)", "= 1800 (default)"],
            "initial ≥ heartbeat",
        ),
        (
            {"checkpoint_timeout": 3600},
            {},
            ["checkpoint.timeout = 3600 (keyword)", "checkpointing:420", "(default)"],
            "checkpoint.timeout < the limit of checkpointing",
        ),
        (
            {"control_decision_timeout": 700},
            {},
            ["control.decision_timeout = 700 (keyword)", "setup:600"],
            "control.decision_timeout < the limit of setup",
        ),
        (
            {},
            {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "200"},
            [
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC = 200 (environment)",
                "rank_heartbeat_timeout = 300 (default)",
            ],
            "monitor's limits < the watchdog",
        ),
        (
            {"launch_stop_grace": 290},
            {},
            ["launch.stop_grace = 290 (keyword)", "control.decision_timeout = 300 (default)"],
            "launch.stop_grace + 10 < control.decision_timeout",
        ),
    ],
)
def test_a_timeout_that_would_hide_another_is_refused_with_the_right_order(
    keywords: dict[str, object], environ: dict[str, str], names: list[str], order: str
) -> None:
    """Case torchtitan#2899: days were lost to timeouts in the wrong order."""
    with pytest.raises(ConfigError) as caught:
        check_timeouts(settings(**keywords), environ)
    message = str(caught.value)
    assert message.startswith("1 contradiction among the timeouts; nothing was started")
    for part in (*names, f"the right order is {order}" if "initial" not in order else order):
        assert part in message


def test_what_is_switched_off_hides_nothing() -> None:
    check_timeouts(settings(monitor_initial_rank_heartbeat_timeout=0, monitor_rank_heartbeat_timeout=9e6), {})
    off = "setup:0,step:0,checkpointing:0"
    check_timeouts(settings(**{SECTIONS: off, "checkpoint_timeout": 9e6}), {})
    watchdog = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5"}
    check_timeouts(settings(**{SECTIONS: off, "monitor_rank_heartbeat_timeout": 0}), watchdog)


def test_a_setting_of_the_monitor_without_the_launcher_names_key_value_source_and_fix(tmp_path: Path) -> None:
    """Scenario 24, the launcher's part."""
    refuse_without_launcher(settings(checkpoint_timeout=5))
    initial = settings(monitor_initial_rank_heartbeat_timeout=600)
    refuse_without_launcher(initial, kept=True)  # by which a keeper goes
    with pytest.raises(ConfigError, match="initial_rank_heartbeat_timeout"):
        refuse_without_launcher(initial)
    file = tmp_path / "h.toml"
    file.write_text("monitor.calc_ft_timeouts = true\n")
    with pytest.raises(ConfigError) as caught:
        refuse_without_launcher(
            load(file, environ={"HOLDFAST_MONITOR_RANK_HEARTBEAT_TIMEOUT": "300"}, keywords={SECTIONS: "a:1"})
        )
    for part in (
        f"monitor.calc_ft_timeouts = true (file {file})",
        "monitor.rank_heartbeat_timeout = 300.0 (environment HOLDFAST_MONITOR_RANK_HEARTBEAT_TIMEOUT)",
        'monitor.rank_section_timeouts = "a:1" (keyword)',
        "Start it with `holdfast run`",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("wanted", [True, False])
def test_enable_ft_package_without_the_launcher_is_refused_and_found_under_its_own_name(wanted: bool) -> None:
    """B12: who asks for it by name is told that nobody is there to do it; the default alone is a warning."""
    with pytest.raises(ConfigError, match=r"monitor\.enable_ft_package = \w+ \(keyword\)"):
        refuse_without_launcher(settings(monitor_enable_ft_package=wanted))
    with pytest.raises(ConfigError, match="did you mean monitor_enable_ft_package"):
        settings(enable_ft_package=wanted)


LAUNCHERS_OWN = [key for key in FIELDS if key.startswith(("launch.", "health.gate", "health.command"))]


@pytest.mark.parametrize("key", LAUNCHERS_OWN)
def test_a_setting_of_the_launcher_itself_is_refused_where_it_would_do_nothing(
    tmp_path: Path, key: str
) -> None:
    """By python and torchrun. In the environment, which a site may set for all, and in a file, which
    `holdfast run` may be given another time, it is told."""
    field = FIELDS[key]
    of_kind: dict[type, object] = {int: 7, float: 7.0, str: "x:y", bool: False}
    special = {
        "health.gate": "warn", "launch.alert_url": "https://x", "launch.failure_causes": "job: y"
    }  # fmt: skip
    value = special.get(key, of_kind[field.kind])
    by_keyword = settings(**{field.keyword: value})
    by_variable = load(environ={field.environment: "0" if value is False else str(value)})
    if key in ("launch.node_name", "launch.max_restarts"):  # which a rank without the launcher goes by
        assert refuse_without_launcher(by_keyword) == refuse_without_launcher(by_variable) == []
    else:
        with pytest.raises(ConfigError, match=re.escape(f"{key} = ") + r".* \(keyword\)"):
            refuse_without_launcher(by_keyword)
        file = tmp_path / "h.toml"
        file.write_text(f"{key} = {msgspec.json.encode(value).decode()}\n")
        for effective in (by_variable, load(file, environ={})):
            (told,) = refuse_without_launcher(effective)
            assert f"{key} = " in told
            assert "https" not in told
            assert "does nothing here: only `holdfast run` reads it" in told
    with pytest.raises(ConfigError, match="without knowing these settings"):
        refuse_unknown_to_launcher(by_keyword, "")
    refuse_unknown_to_launcher(by_variable, "")
    refuse_unknown_to_launcher(settings(checkpoint_interval=5), "")


def test_a_settings_file_that_the_launcher_was_not_given_cannot_set_it(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text("launch.stop_grace = 5\n")
    with pytest.raises(ConfigError, match="Give them to it: with --config FILE"):
        refuse_unknown_to_launcher(load(file, environ={}), "")
    refuse_unknown_to_launcher(load(file, environ={}), str(file))
