"""How often to save to the local tier: within the share, at least a commit apart, and without oscillating."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.policy.upkeep import (
    GROWTH,
    LOCAL_SHARE,
    LocalCosts,
    LocalPace,
    choose_local,
    least_local_interval,
    slowdown_of,
)

SECONDS = st.floats(1e-6, 1e4)
COSTS = st.builds(
    LocalCosts,
    step=SECONDS,
    blocked=SECONDS,
    slowdown=st.floats(0, 1e3),
    commit=SECONDS,
    nbytes=st.integers(0, 2**40),
)
SHARES = st.floats(0.001, 0.5)


def gpu(step: float = 0.45, blocked: float = 0.003, slowdown: float = 0.0, commit: float = 0.4) -> LocalCosts:
    return LocalCosts(step=step, blocked=blocked, slowdown=slowdown, commit=commit)


def live(costs: LocalCosts, pace: LocalPace, saves: int, share: float = LOCAL_SHARE) -> LocalPace:
    for _ in range(saves):
        pace = choose_local(costs, share, pace).pace
    return pace


def test_a_cheap_save_is_made_at_every_step() -> None:
    assert live(gpu(), LocalPace(interval=5), 3).interval == 1


def test_a_save_that_blocks_is_made_as_often_as_the_share_allows() -> None:
    costs = gpu(step=1.0, blocked=1.0)
    assert least_local_interval(costs, LOCAL_SHARE) == 99
    assert costs.share(99) == pytest.approx(LOCAL_SHARE)
    assert 99 <= live(costs, LocalPace(interval=5), 10).interval <= 124


def test_what_steps_beside_a_save_take_longer_counts_as_its_cost() -> None:
    costs = gpu(step=0.05, blocked=0.0, slowdown=0.001, commit=0.12)
    assert costs.of_a_save() == pytest.approx(0.003), "three steps run beside it"
    assert live(costs, LocalPace(interval=5), 10).interval == 7


@given(COSTS, SHARES, st.integers(1, 10_000))
@settings(max_examples=200, deadline=None)
def test_in_the_end_the_share_holds_and_commits_fit(costs: LocalCosts, share: float, begin: int) -> None:
    pace = live(costs, LocalPace(interval=begin), 200, share)
    assert pace.interval >= 1
    assert costs.sane().share(pace.interval) <= share * (1 + 1e-6)
    assert pace.interval * costs.sane().step >= costs.sane().commit * (1 - 1e-6)
    assert live(costs, pace, 50, share).interval == pace.interval, "and then it stays"


@given(COSTS, SHARES)
@settings(max_examples=200, deadline=None)
def test_dearer_saves_never_mean_a_shorter_interval(costs: LocalCosts, share: float) -> None:
    from msgspec.structs import replace

    least = least_local_interval(costs, share)
    assert least_local_interval(replace(costs, blocked=costs.blocked * 2), share) >= least
    assert least_local_interval(replace(costs, commit=costs.commit * 2), share) >= least
    assert least_local_interval(costs, share / 2) >= least


@given(st.integers(0, 2**32), st.floats(0.05, 2.0))
@settings(max_examples=50, deadline=None)
def test_costs_that_only_scatter_change_the_interval_a_few_times(seed: int, scatter: float) -> None:
    """However widely they scatter, and though they lie where one step more or less is decided."""
    scattered, pace, changes = random.Random(seed), LocalPace(interval=5), 0
    for _ in range(4000):
        noise = max(0.0, 1 + scatter * scattered.gauss(0, 1))
        costs = gpu(step=1.0, blocked=0.02 * noise, commit=0.9 * max(0.1, noise))
        after = choose_local(costs, LOCAL_SHARE, pace).pace
        changes += after.interval != pace.interval
        pace = after
    assert changes <= 60, f"{changes} changes in 4000 saves"


def test_one_odd_measurement_is_not_followed_far() -> None:
    pace = choose_local(gpu(blocked=100.0), LOCAL_SHARE, LocalPace(interval=2)).pace
    assert pace.interval == 2 * GROWTH


def test_a_commit_that_takes_longer_than_the_interval_raises_it_at_once() -> None:
    pace = choose_local(gpu(commit=2.0), LOCAL_SHARE, LocalPace(interval=1)).pace
    assert pace.interval == 5, "4.4 steps, whatever the growth would allow"


def test_after_a_change_old_steps_are_not_held_against_saves() -> None:
    """Steps became twice as long whatever is saved: what looks like a slowdown must be seen anew first."""
    costs = gpu(slowdown=0.4)
    pace = choose_local(costs, LOCAL_SHARE, LocalPace(interval=1)).pace
    assert pace.interval == GROWTH
    assert live(costs, pace, 3).interval == GROWTH
    assert live(gpu(step=0.9), pace, 20).interval == 1


def test_a_difference_within_the_scatter_of_steps_is_none() -> None:
    scattered = random.Random(3)
    clear = [0.1 + scattered.gauss(0, 0.01) for _ in range(16)]
    beside = [0.1005 + scattered.gauss(0, 0.01) for _ in range(16)]
    assert slowdown_of(beside, clear) == 0.0
    assert slowdown_of([value + 0.05 for value in beside], clear) == pytest.approx(0.04, abs=0.02)
    assert slowdown_of([9.0] * 4, clear) == 0.0, "too few to tell"
    assert slowdown_of([9.0] * 4 + clear, clear) == 0.0, "nor do a few odd ones"


def test_a_choice_says_what_it_rests_on() -> None:
    costs = LocalCosts(step=0.057, blocked=0.004, slowdown=0.001, commit=0.9, nbytes=14_500_000_000)
    told = "; ".join(choose_local(costs, LOCAL_SHARE, LocalPace(interval=1)).evidence)
    for part in ("57 ms", "4 ms", "1 ms longer", "900 ms", "1.00%", "13.5 GiB", "a second"):
        assert part in told, told
