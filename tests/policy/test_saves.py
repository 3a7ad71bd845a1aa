"""How often to save: the policy against brute force, the ranks' agreement, and whole runs with "auto"."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

import holdfast
from holdfast.errors import ControlError, DecisionTimeoutError
from holdfast.journal.events import CadenceChosen, Warned
from holdfast.journal.reader import read_journal
from holdfast.journal.writer import JournalWriter
from holdfast.policy.upkeep import (
    BELIEVED,
    CLONE_SLACK,
    DEFAULT_MTBF,
    GROWTH,
    LEAST_RESERVE,
    LOCAL_SHARE,
    LONGEST_INTERVAL,
    OUTLASTS,
    Cadence,
    Choice,
    Costs,
    LocalCosts,
    LocalPace,
    Setting,
    bounds,
    choose_interval,
    choose_local,
    choose_snapshot,
    clone_bytes,
    concerns,
    daly,
    estimated_copy,
    least_local_interval,
    mtbf_of,
    optimal,
    overhead,
    owned_enough,
    reserve,
    slowdown_of,
    young,
)
from holdfast.record.attempts import begin_attempt
from holdfast.record.decisions import Decisions, DecisionStore
from holdfast.record.directory import ControlDirectory, read_record
from holdfast.record.lease import Fence, claim
from holdfast.train.schedule import CadenceDecision, Measured, SaveSchedule, measured_before
from kit import tiny

HOUR = 3600.0

POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
SECONDS = st.floats(-4, 5).map(lambda power: 10.0**power)
"""From a tenth of a millisecond to a day."""
MTBF = st.floats(1.5, 7).map(lambda power: 10.0**power)
"""From half a minute to four months."""
COSTS = st.builds(
    lambda step, blocked, more, mtbf, restart: Costs(
        step=step, blocked=blocked, commit=blocked + more, mtbf=mtbf, restart=restart
    ),
    SECONDS,
    SECONDS,
    st.one_of(st.just(0.0), SECONDS),
    MTBF,
    SECONDS,
)


def simple(blocked: float = 1.0, mtbf: float = DEFAULT_MTBF, step: float = 0.01) -> Costs:
    return Costs(step=step, blocked=blocked, commit=blocked, mtbf=mtbf)


# --- the formulas


def test_young_and_daly_are_what_the_papers_say() -> None:
    """A save of 5 min and an MTBF of 24 h: 2 h by Young, and Daly's series a little above less the save."""
    assert young(300, 24 * HOUR) == pytest.approx(7200)
    root = math.sqrt(300 / (2 * 86400))
    assert daly(300, 86400) == pytest.approx(7200 * (1 + root / 3 + root**2 / 9) - 300)
    assert daly(2 * 86400, 86400) == daly(1e9, 86400) == 86400


@settings(deadline=None)
@given(COSTS)
def test_the_optimum_is_the_stationary_point_of_the_model(costs: Costs) -> None:
    """Where the derivative of the expected time is zero: 1 - exp(-(t+d)/M) = t/M."""
    best = optimal(costs)
    slope = -math.expm1(-(best + costs.blocked) / costs.mtbf) - best / costs.mtbf
    for factor, sign in ((0.999, 1), (1.001, -1)):
        near = best * factor
        value = -math.expm1(-(near + costs.blocked) / costs.mtbf) - near / costs.mtbf
        if costs.blocked < costs.mtbf:
            assert sign * value > 0, (slope, value)
    assert best <= costs.mtbf * (1 + 1e-6)


@settings(deadline=None, max_examples=50)
@given(COSTS)
@example(Costs(step=4.869675251658631, blocked=1.0, commit=1.0, mtbf=31.622776601683793, restart=1.0))
def test_the_choice_is_within_a_hair_of_brute_force(costs: Costs) -> None:
    chosen = choose_interval(costs)
    lowest, highest = bounds(costs)
    ratio = (highest / lowest) ** (1 / 2000)
    tried = {min(highest, round(lowest * ratio**power)) for power in range(2001)}
    least = min(overhead(steps * costs.step, costs) for steps in tried)
    assert chosen.expected_overhead <= least * (1 + 1e-3) + 1e-12
    interval = {steps for steps in tried if overhead(steps * costs.step, costs) <= least * 1.02}
    assert min(interval) <= chosen.interval_steps <= max(interval)


def test_the_overhead_is_that_of_simulated_failures() -> None:
    """An exact check of the model by another way: expected time over many random lives of a segment."""
    import random

    dice = random.Random(5)
    costs = Costs(step=1.0, blocked=20.0, commit=20.0, mtbf=600.0, restart=40.0)
    done, spent, span = 0.0, 0.0, 150.0
    for _ in range(40_000):
        need = span + costs.blocked
        while (life := dice.expovariate(1 / costs.mtbf)) < need:
            spent += life
            while (start := dice.expovariate(1 / costs.mtbf)) < costs.restart:
                spent += start
            spent += costs.restart
        spent += need
        done += span
    assert 1 - done / spent == pytest.approx(overhead(span, costs), rel=0.02)


def test_a_slow_commit_costs_work_but_does_not_move_the_optimum() -> None:
    quick, slow = (Costs(step=0.1, blocked=0.3, commit=commit, mtbf=4 * HOUR) for commit in (0.3, 60.0))
    assert optimal(quick) == pytest.approx(optimal(slow), rel=1e-6)
    assert overhead(100.0, slow) - overhead(100.0, quick) == pytest.approx(59.7 / (4 * HOUR), rel=0.02)


# --- what holds for all inputs


@settings(deadline=None)
@given(POSITIVE, POSITIVE, POSITIVE, POSITIVE, POSITIVE)
def test_every_output_is_finite_for_any_positive_input(
    step: float, blocked: float, commit: float, mtbf: float, restart: float
) -> None:
    chosen = choose_interval(Costs(step=step, blocked=blocked, commit=commit, mtbf=mtbf, restart=restart))
    assert chosen.interval_steps >= 1
    assert 0 <= chosen.expected_overhead <= 1
    for name in Cadence.__struct_fields__:
        value = getattr(chosen, name)
        if isinstance(value, float):
            assert math.isfinite(value), name
            assert value >= 0, name
    assert msgspec.json.decode(msgspec.json.encode(chosen), type=Cadence) == chosen


@settings(deadline=None)
@given(COSTS)
def test_the_bounds_hold(costs: Costs) -> None:
    chosen = choose_interval(costs)
    assert chosen.interval_seconds >= costs.commit * (1 - 1e-9)
    assert chosen.interval_steps >= 1
    lowest, _ = bounds(costs)
    if chosen.interval_steps > lowest:
        assert chosen.interval_seconds <= min(costs.mtbf / 2, LONGEST_INTERVAL)
    limited = choose_interval(costs, at_most=7)
    assert limited.interval_steps == max(lowest, min(7, chosen.interval_steps))


@settings(deadline=None)
@given(COSTS, st.floats(0.01, 1))
def test_the_interval_never_rises_when_failures_get_more_frequent_or_saves_cheaper(
    costs: Costs, factor: float
) -> None:
    before = choose_interval(costs)
    noise = 1 + before.interval_steps * 1e-6  # golden section on a flat function
    worse = msgspec.structs.replace(costs, mtbf=costs.mtbf * factor)
    assert choose_interval(worse).interval_steps <= before.interval_steps + noise
    cheaper = msgspec.structs.replace(costs, blocked=costs.blocked * factor)
    assert choose_interval(cheaper).interval_steps <= before.interval_steps + noise


@given(SECONDS, SECONDS, MTBF)
def test_saves_that_cost_nothing_are_taken_as_often_as_they_can_be(
    step: float, commit: float, mtbf: float
) -> None:
    costs = Costs(step=step, blocked=1e-300, commit=commit, mtbf=mtbf)
    assert choose_interval(costs).interval_steps <= max(bounds(costs)[0], math.ceil(0.01 / step))


def test_a_choice_says_what_it_rests_on() -> None:
    chosen = choose_interval(
        Costs(step=0.4, blocked=0.3, commit=12.0), "assumed: 24 h 00 min; nothing is known yet"
    )
    assert chosen.evidence[0] == "a step takes 400 ms; a save blocks for 300 ms and is committed after 12.0 s"
    assert chosen.evidence[1] == "MTBF 24 h 00 min (assumed: 24 h 00 min; nothing is known yet)"
    assert "Young 3 min 48 s, Daly 3 min 47 s" in chosen.evidence[2]
    assert (chosen.interval_steps, chosen.warnings) == (569, [])
    slow = choose_interval(Costs(step=0.4, blocked=0.01, commit=600.0))
    assert "a save must be committed before the next is due" in slow.evidence[-1]
    rare = choose_interval(Costs(step=1.0, blocked=1000.0, commit=1000.0, mtbf=1e9))
    assert "at most 12 h" in rare.evidence[-1]
    assert rare.interval_seconds == LONGEST_INTERVAL


# --- the mean time between failures


def test_a_given_mtbf_counts_before_an_observed_one() -> None:
    assert mtbf_of(1000.0, 10, given=5000.0) == mtbf_of(0.0, 0, given=5000.0)
    assert mtbf_of(1000.0, 10, given=5000.0).seconds == 5000.0


def test_an_unknown_mtbf_is_a_day_and_says_so() -> None:
    unknown = mtbf_of(0.0, 0)
    assert unknown.seconds == DEFAULT_MTBF
    assert unknown.source.startswith("assumed")


def test_few_failures_are_taken_together_with_the_assumption_and_many_alone() -> None:
    assert mtbf_of(24 * HOUR, 1).seconds == 24 * HOUR
    assert mtbf_of(6 * HOUR, 2).seconds == 10 * HOUR
    assert "together with an assumed one" in mtbf_of(6 * HOUR, 2).source
    assert mtbf_of(6 * HOUR, BELIEVED).seconds == 6 * HOUR / BELIEVED
    assert mtbf_of(6 * HOUR, BELIEVED).source == "observed: 3 failures in 6 h 00 min of running"
    assert mtbf_of(48 * HOUR, 0).seconds == 72 * HOUR


@given(st.floats(0, 1e8), st.integers(0, 1000))
def test_more_failures_never_mean_a_longer_mtbf(running: float, failures: int) -> None:
    assert mtbf_of(running, failures + 1).seconds <= mtbf_of(running, failures).seconds


# --- warnings


def test_an_interval_beyond_the_mtbf_is_warned_of() -> None:
    costs = simple(mtbf=HOUR, step=1.0)
    assert concerns(3599, costs) == {}
    (warning,) = concerns(3600, costs).values()
    assert warning.startswith("the interval of 3600 steps (1 h 00 min) is not shorter than the MTBF of 1 h")


def test_a_save_that_outlasts_the_interval_is_warned_of() -> None:
    costs = Costs(step=1.0, blocked=0.1, commit=30.0)
    assert concerns(30, costs) == {}
    assert "slow" not in concerns(1, Costs(step=1.0, blocked=30.0, commit=30.0))  # it holds up the steps too
    (warning,) = concerns(29, costs).values()
    assert warning.startswith("a save takes 30.0 s, longer than the interval of 29 steps")


def test_saves_that_block_for_more_than_a_twentieth_are_warned_of() -> None:
    costs = simple(blocked=5.0, step=1.0)
    assert concerns(95, costs) == {}
    (warning,) = concerns(94, costs).values()
    assert warning.startswith("saving holds training up: typically for 5.0 s, at the interval of 94 steps")
    assert choose_interval(
        simple(blocked=30.0, mtbf=600.0)
    ).warnings  # no choice is good here, and it says so


# --- the ranks agree


class Rank:
    """One rank's schedule, with what it needs around it."""

    def __init__(self, control: ControlDirectory, fence: Fence, store: DecisionStore, number: int) -> None:
        self.journal = JournalWriter(control.journal, f"rank-{number}", 1)
        self.schedule = SaveSchedule("auto", 0.0)
        self.leads = number == 0
        self.store = store
        self.decisions = Decisions(control, fence, 1, store)

    def start(self, step: int, earlier: Measured | None = None, timeout: float = 10.0) -> None:
        def read() -> Measured:
            assert self.leads, "only rank 0 reads the history"
            return earlier or Measured()

        self.schedule.start(
            step,
            leads=self.leads,
            earlier=read,
            store=self.store,
            decisions=self.decisions,
            journal=self.journal,
            timeout=timeout,
        )


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    held = claim(control, "launch", 5.0)
    fence, store = Fence(control, held.epoch), HashStore()
    both = [Rank(control, fence, store, number) for number in range(2)]
    yield both
    for rank in both:
        rank.journal.close()


def test_ranks_with_different_clocks_save_at_the_same_steps(ranks: list[Rank]) -> None:
    """Scenario: every rank measures its own times, yet only rank 0's choice counts."""

    def live(rank: Rank) -> list[int]:
        mine, step, saved = (0.05, 0.0) if rank.leads else (5.0, 9.0), 0, []
        rank.start(step)
        while len(saved) < 6:
            step += 1
            if step >= rank.schedule.next_step:
                saved.append(step)
                rank.schedule.note(blocked=mine[0], commit=mine[0])
                rank.schedule.after_save(step, [0.01 + mine[1]] * 20)
        return saved

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(live, ranks)
    assert first == second
    gaps = [b - a for a, b in itertools.pairwise([0, *first])]
    assert gaps[:4] == [10, 40, 160, 640]  # a probe, then no more than four times as long at each save
    aimed = choose_interval(Costs(step=0.01, blocked=0.05, commit=0.05)).interval_steps
    assert gaps[-1] == pytest.approx(min(aimed, 10 * 4**5), rel=0.01)


def test_a_failed_save_leaves_the_ranks_together(ranks: list[Rank]) -> None:
    """Nothing was measured, so the interval stays; the next save is due on all ranks at one step."""

    def live(rank: Rank) -> int:
        rank.start(30)
        assert rank.schedule.next_step == 40
        rank.schedule.after_save(40, [])
        return rank.schedule.next_step

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(live, ranks)) == [50, 50]


def test_a_rank_that_rank_0_does_not_answer_ends_rather_than_choose_alone(ranks: list[Rank]) -> None:
    ranks[0].start(0)
    ranks[1].start(0, timeout=0.2)
    with pytest.raises(DecisionTimeoutError, match="the interval until the next save"):
        ranks[1].schedule.after_save(10, [])


def test_a_value_that_rank_0_did_not_write_is_refused(ranks: list[Rank]) -> None:
    ranks[0].start(0)
    ranks[1].start(0)
    ranks[1].store.set("cadence/1", "-5")
    with pytest.raises(ControlError, match="not a count of steps"):
        ranks[1].schedule.after_save(10, [])


def test_history_sets_the_first_interval_and_the_mtbf(ranks: list[Rank]) -> None:
    earlier = Measured(steps=[0.1] * 20, saves=[(0.5, 2.0)] * 3, running=4 * HOUR, failures=4, restart=30.0)
    ranks[0].start(100, earlier)
    ranks[1].start(100)
    expected = choose_interval(
        Costs(step=0.1, blocked=0.5, commit=2.0, mtbf=HOUR, restart=30.0)
    ).interval_steps
    assert ranks[0].schedule.next_step == ranks[1].schedule.next_step == 100 + expected
    (event,) = chosen_in(ranks[0].journal.path.parent)
    assert event.interval == expected
    assert any("4 failures in 4 h 00 min" in item for item in event.evidence)


def test_a_small_change_of_the_interval_is_not_journalled(ranks: list[Rank]) -> None:
    rank = ranks[0]
    rank.start(0, Measured(steps=[0.1] * 20, saves=[(0.5, 0.5)] * 9))
    first = rank.schedule.next_step
    rank.schedule.after_save(first, [0.105] * 20)
    assert rank.schedule.next_step != 2 * first
    assert len(chosen_in(rank.journal.path.parent)) == 1
    rank.schedule.after_save(2 * first, [0.2] * 20)
    assert len(chosen_in(rank.journal.path.parent)) == 2


def chosen_in(journal: Path) -> list[CadenceChosen]:
    return [line.body for line in read_journal(journal) if isinstance(line.body, CadenceChosen)]


# --- whole runs


def test_a_run_with_auto_is_the_same_run_and_resumes_exactly(tmp_path: Path) -> None:
    """Scenario 1 with "auto": killed between saves, it ends bitwise equal to one that never saved."""
    whole = tiny.train(tmp_path / "whole", until=60, checkpoint_interval=0)
    settings_ = {"checkpoint_interval": "auto", "checkpoint_mtbf_hours": 1e-4, "journal_step_flush": 0}

    def die_at(step: int, run: holdfast.Run) -> None:
        if step == 25:
            tiny.die()

    code = tiny.forked(
        lambda: void(tiny.train(tmp_path / "cut", until=60, at_step=die_at, **settings_)),
    )
    assert code == -9
    assert any(path.name.startswith("step_00000010") for path in tiny.checkpoints(tmp_path / "cut"))
    rest = tiny.train(tmp_path / "cut", until=60, **settings_)
    assert rest.attempt == 2
    assert 10 <= rest.started_at < 25
    assert rest.losses == {step: loss for step, loss in whole.losses.items() if step > rest.started_at}
    assert rest.parameters == whole.parameters
    events = chosen_in(tmp_path / "cut" / "journal")
    assert events[0].interval == 10
    assert "nothing" not in events[-1].evidence[0]
    assert all(event.interval >= 1 for event in events)


def test_every_attempt_chooses_anew_from_what_the_earlier_ones_measured(tmp_path: Path) -> None:
    """After an incident the cadence is recomputed: the second attempt begins with measured numbers."""
    auto = {"checkpoint_interval": "auto", "journal_step_flush": 0}

    def die_at(step: int, run: holdfast.Run) -> None:
        if step == 15:
            tiny.die()

    assert tiny.forked(lambda: void(tiny.train(tmp_path, until=30, at_step=die_at, **auto))) == -9
    tiny.train(tmp_path, until=30, **auto)
    by_attempt = [
        (line.attempt, line.body)
        for line in read_journal(tmp_path / "journal")
        if isinstance(line.body, CadenceChosen)
    ]
    second = next(event for attempt, event in by_attempt if attempt == 2)
    assert second.seconds > 0
    assert any("1 failure in" in item for item in second.evidence)
    fixed = read_record(tmp_path / "attempts" / "000002" / "decisions" / "cadence.json", CadenceDecision)
    assert fixed is not None
    assert fixed.interval == second.interval


def test_a_fixed_interval_saves_at_its_multiples_also_after_a_resume(tmp_path: Path) -> None:
    tiny.train(tmp_path, until=7, checkpoint_interval=3)
    tiny.train(tmp_path, until=13, checkpoint_interval=3)
    steps = sorted(int(path.name[5:13]) for path in tiny.checkpoints(tmp_path))
    assert steps == [3, 6, 7, 9, 12, 13]
    assert not chosen_in(tmp_path / "journal")


def test_a_fixed_interval_beyond_the_mtbf_is_warned_of_once(tmp_path: Path) -> None:
    settings_ = {"checkpoint_interval": 5, "checkpoint_mtbf_hours": 1e-9, "journal_step_flush": 0}
    tiny.train(tmp_path, until=16, **settings_)
    told = [line.body.message for line in read_journal(tmp_path / "journal") if isinstance(line.body, Warned)]
    assert len([text for text in told if "is not shorter than the MTBF" in text]) == 1
    assert any(text.endswith("(MTBF given)") for text in told)


def test_what_saves_cost_is_judged_from_the_third_on(tmp_path: Path) -> None:
    """The first save of a process is slower than the rest, and says little."""

    def complaints(until: int) -> int:
        tiny.train(tmp_path / str(until), until=until, checkpoint_interval=1, checkpoint_save_at_end=False)
        lines = read_journal(tmp_path / str(until) / "journal")
        return sum(
            isinstance(line.body, Warned) and "holds training up" in line.body.message for line in lines
        )

    assert complaints(3) == 0  # two saves: the last step's is left to the end
    assert complaints(4) == complaints(6) == 1


def test_a_damaged_history_costs_the_estimate_and_not_the_run(tmp_path: Path) -> None:
    auto = {"checkpoint_interval": "auto", "journal_step_flush": 0}
    tiny.train(tmp_path, until=12, **auto)
    end = tmp_path / "attempts" / "000001" / "end.json"
    end.write_bytes(end.read_bytes()[:10])
    control = ControlDirectory.open(tmp_path)
    found = measured_before(control, 2, "launch")
    assert found.problems
    assert (found.steps, found.failures) == ([], 0)


def test_attempts_that_never_trained_are_no_failures_of_training(tmp_path: Path) -> None:
    tiny.train(tmp_path, until=12, checkpoint_interval=5)
    control = ControlDirectory.open(tmp_path)
    fence = Fence(control, claim(control, "again", 5.0).epoch)
    begin_attempt(control, fence, "again", 1)
    found = measured_before(control, 3, "again")
    assert found.failures == 0
    assert found.running > 0
    assert len(found.steps) == 12
    assert len(found.saves) == 3


def void(_: object) -> None:
    """For a fork's work, whose result stays with it."""


# --- snapshots ----------------------------------------------------------------------------------------------


GiB = 1024**3

BYTES = st.integers(0, 200 * GiB)
MEASURED = st.one_of(st.none(), st.floats(0, 1e4), st.just(float("nan")), st.just(float("inf")))
ASKED = st.fixed_dictionaries(
    {
        "free_bytes": st.integers(-GiB, 200 * GiB),
        "needed_bytes": BYTES,
        "device_bytes": BYTES,
        "copy_seconds": MEASURED,
        "step_seconds": MEASURED,
        "has_owned": st.booleans(),
        "torn_before": st.booleans(),
    }
)


def decide(setting: Setting = "auto", **changed: Any) -> Choice:
    """A device of 140 GiB with 10 GiB of state, of which torch optimizers own enough."""
    known = {
        "free_bytes": 5 * GiB,
        "needed_bytes": 10 * GiB,
        "device_bytes": 140 * GiB,
        "copy_seconds": 0.2,
        "step_seconds": 1.0,
        "has_owned": True,
    }
    return choose_snapshot(setting, **(known | changed))


@given(st.sampled_from(get_args(Setting)), ASKED)
def test_a_choice_is_the_same_for_the_same_inputs_and_says_why(
    setting: Setting, asked: dict[str, Any]
) -> None:
    choice = choose_snapshot(setting, **asked)
    assert choice == choose_snapshot(setting, **asked)
    assert choice.evidence
    assert all(choice.evidence)
    if setting not in ("auto", choice.way):
        assert choice.warning, "what was asked for is not done, and nobody is told"


@given(st.sampled_from(get_args(Setting)), ASKED)
def test_no_way_is_chosen_that_is_not_safe(setting: Setting, asked: dict[str, Any]) -> None:
    way = choose_snapshot(setting, **asked).way
    if way == "clone":
        left = asked["free_bytes"] - CLONE_SLACK * asked["needed_bytes"]
        assert left >= max(LEAST_RESERVE, 0.02 * asked["device_bytes"]) - 1
    if way == "overlap":
        assert asked["has_owned"]
        assert not asked["torn_before"]
    if setting in ("block", "overlap") and way != setting:
        assert (setting, way) == ("overlap", "block")


@given(ASKED)
def test_by_itself_it_clones_where_there_is_room_and_overlaps_only_behind_a_long_step(
    asked: dict[str, Any],
) -> None:
    way = choose_snapshot("auto", **asked).way
    room = asked["free_bytes"] >= clone_bytes(asked["needed_bytes"], asked["device_bytes"])
    assert (way == "clone") == room
    if way == "overlap":
        copy = asked["copy_seconds"]
        if copy is None or copy != copy or copy == float("inf"):
            copy = estimated_copy(asked["needed_bytes"])
        assert asked["step_seconds"] is not None
        assert asked["step_seconds"] >= OUTLASTS * copy


@given(ASKED, st.integers(0, 100 * GiB))
def test_more_free_memory_never_makes_it_block_more(asked: dict[str, Any], more: int) -> None:
    before = choose_snapshot("auto", **asked).way
    after = choose_snapshot("auto", **(asked | {"free_bytes": asked["free_bytes"] + more})).way
    assert after in (before, "clone")


def test_every_reason_to_fall_back_is_named() -> None:
    assert decide(free_bytes=20 * GiB).way == "clone"
    assert decide().way == "overlap"
    assert "measured" in " ".join(decide().evidence)
    assert "estimated" in " ".join(decide(copy_seconds=None).evidence)
    for changed, word in [
        ({"step_seconds": 0.23}, "less than 1.2 times"),
        ({"step_seconds": None}, "not known"),
        ({"has_owned": False}, "own too little"),
        ({"torn_before": True}, "was changed while it was copied"),
    ]:
        choice = decide(**changed)
        assert choice.way == "block"
        assert word in " ".join(choice.evidence)
        assert not choice.warning


def test_what_is_asked_for_is_done_or_it_is_told_why_not() -> None:
    assert decide("block", free_bytes=100 * GiB) == Choice(way="block", evidence=["block was asked for"])
    assert decide("clone", free_bytes=20 * GiB).warning == ""
    assert decide("clone").way == "overlap"
    assert "only 5.0 GiB are free" in decide("clone").warning
    assert decide("overlap", free_bytes=100 * GiB).way == "overlap"
    slow = decide("overlap", step_seconds=0.1)
    assert slow.way == "overlap"
    assert "steps may wait" in slow.warning
    for changed in ({"torn_before": True}, {"has_owned": False}):
        refused = decide("overlap", free_bytes=100 * GiB, **changed)
        assert refused.way == "block"
        assert "cannot be" in refused.warning


def test_the_reserve_grows_with_the_device_and_small_ones_keep_half_a_gigabyte() -> None:
    assert reserve(0) == reserve(16 * GiB) == LEAST_RESERVE
    assert reserve(141 * GiB) == pytest.approx(2.82 * GiB, rel=1e-6)
    assert owned_enough(80, 100)
    assert not owned_enough(79, 100)
    assert not owned_enough(0, 0)


# --- how often to save to the local tier --------------------------------------------------------------------

LOCAL_SECONDS = st.floats(1e-6, 1e4)
LOCAL_COSTS = st.builds(
    LocalCosts,
    step=LOCAL_SECONDS,
    blocked=LOCAL_SECONDS,
    slowdown=st.floats(0, 1e3),
    commit=LOCAL_SECONDS,
    nbytes=st.integers(0, 2**40),
)
LOCAL_SHARES = st.floats(0.001, 0.5)


def local(
    step: float = 0.45, blocked: float = 0.003, slowdown: float = 0.0, commit: float = 0.4
) -> LocalCosts:
    return LocalCosts(step=step, blocked=blocked, slowdown=slowdown, commit=commit)


def live_on(costs: LocalCosts, pace: LocalPace, saves: int, share: float = LOCAL_SHARE) -> LocalPace:
    for _ in range(saves):
        pace = choose_local(costs, share, pace).pace
    return pace


def test_a_cheap_save_is_made_at_every_step() -> None:
    assert live_on(local(), LocalPace(interval=5), 3).interval == 1


def test_a_save_that_blocks_is_made_as_often_as_the_share_allows() -> None:
    costs = local(step=1.0, blocked=1.0)
    assert least_local_interval(costs, LOCAL_SHARE) == 99
    assert costs.share(99) == pytest.approx(LOCAL_SHARE)
    assert 99 <= live_on(costs, LocalPace(interval=5), 10).interval <= 124


def test_what_steps_beside_a_save_take_longer_counts_as_its_cost() -> None:
    costs = local(step=0.05, blocked=0.0, slowdown=0.001, commit=0.12)
    assert costs.of_a_save() == pytest.approx(0.003), "three steps run beside it"
    assert live_on(costs, LocalPace(interval=5), 10).interval == 7


@given(LOCAL_COSTS, LOCAL_SHARES, st.integers(1, 10_000))
@settings(max_examples=200, deadline=None)
def test_in_the_end_the_share_holds_and_commits_fit(costs: LocalCosts, share: float, begin: int) -> None:
    pace = live_on(costs, LocalPace(interval=begin), 200, share)
    assert pace.interval >= 1
    assert costs.sane().share(pace.interval) <= share * (1 + 1e-6)
    assert pace.interval * costs.sane().step >= costs.sane().commit * (1 - 1e-6)
    assert live_on(costs, pace, 50, share).interval == pace.interval, "and then it stays"


@given(LOCAL_COSTS, LOCAL_SHARES)
@settings(max_examples=200, deadline=None)
def test_dearer_saves_never_mean_a_shorter_interval(costs: LocalCosts, share: float) -> None:
    least = least_local_interval(costs, share)
    assert least_local_interval(msgspec.structs.replace(costs, blocked=costs.blocked * 2), share) >= least
    assert least_local_interval(msgspec.structs.replace(costs, commit=costs.commit * 2), share) >= least
    assert least_local_interval(costs, share / 2) >= least


@given(st.integers(0, 2**32), st.floats(0.05, 2.0))
@settings(max_examples=50, deadline=None)
def test_costs_that_only_scatter_change_the_interval_a_few_times(seed: int, scatter: float) -> None:
    """However widely they scatter, and though they lie where one step more or less is decided."""
    scattered, pace, changes = random.Random(seed), LocalPace(interval=5), 0
    for _ in range(4000):
        noise = max(0.0, 1 + scatter * scattered.gauss(0, 1))
        costs = local(step=1.0, blocked=0.02 * noise, commit=0.9 * max(0.1, noise))
        after = choose_local(costs, LOCAL_SHARE, pace).pace
        changes += after.interval != pace.interval
        pace = after
    assert changes <= 60, f"{changes} changes in 4000 saves"


def test_one_odd_measurement_is_not_followed_far() -> None:
    pace = choose_local(local(blocked=100.0), LOCAL_SHARE, LocalPace(interval=2)).pace
    assert pace.interval == 2 * GROWTH


def test_a_commit_that_takes_longer_than_the_interval_raises_it_at_once() -> None:
    pace = choose_local(local(commit=2.0), LOCAL_SHARE, LocalPace(interval=1)).pace
    assert pace.interval == 5, "4.4 steps, whatever the growth would allow"


def test_after_a_change_old_steps_are_not_held_against_saves() -> None:
    """Steps became twice as long whatever is saved: what looks like a slowdown must be seen anew first."""
    costs = local(slowdown=0.4)
    pace = choose_local(costs, LOCAL_SHARE, LocalPace(interval=1)).pace
    assert pace.interval == GROWTH
    assert live_on(costs, pace, 3).interval == GROWTH
    assert live_on(local(step=0.9), pace, 20).interval == 1


def test_a_difference_within_the_scatter_of_steps_is_none() -> None:
    scattered = random.Random(3)
    clear = [0.1 + scattered.gauss(0, 0.01) for _ in range(16)]
    beside = [0.1005 + scattered.gauss(0, 0.01) for _ in range(16)]
    assert slowdown_of(beside, clear) == 0.0
    assert slowdown_of([value + 0.05 for value in beside], clear) == pytest.approx(0.04, abs=0.02)
    assert slowdown_of([9.0] * 4, clear) == 0.0, "too few to tell"
    assert slowdown_of([9.0] * 4 + clear, clear) == 0.0, "nor do a few odd ones"


def test_the_choice_of_the_local_tier_says_what_it_rests_on() -> None:
    costs = LocalCosts(step=0.057, blocked=0.004, slowdown=0.001, commit=0.9, nbytes=14_500_000_000)
    told = "; ".join(choose_local(costs, LOCAL_SHARE, LocalPace(interval=1)).evidence)
    for part in ("57 ms", "4 ms", "1 ms longer", "900 ms", "1.00%", "13.5 GiB", "a second"):
        assert part in told, told
