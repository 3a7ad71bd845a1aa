"""Whether a snapshot of host memory is taken by a fork or in the call: safe, explained, ever the same."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.host_snapshot import (
    COPY_BYTES_PER_SECOND,
    LEAST_BYTES,
    LEAST_CORES,
    HostChoice,
    choose_on_host,
    fork_bytes,
)
from holdfast.policy.snapshot import LEAST_RESERVE, OUTLASTS, Setting, choose

GiB = 1024**3

BYTES = st.integers(0, 200 * GiB)
SECONDS = st.one_of(st.none(), st.floats(0, 1e4), st.just(float("nan")), st.just(float("inf")))
ASKED = st.fixed_dictionaries(
    {
        "needed_bytes": BYTES,
        "private_bytes": BYTES,
        "free_bytes": st.integers(-GiB, 400 * GiB),
        "host_bytes": BYTES,
        "cores": st.integers(0, 64),
        "copy_seconds": SECONDS,
        "step_seconds": SECONDS,
        "obstacle": st.sampled_from(["", "", "a device is mapped"]),
    }
)
SETTINGS = st.sampled_from(get_args(Setting))


def decide(setting: Setting = "auto", **changed: Any) -> HostChoice:
    """A host of 64 GiB with 4 GiB of state in a trainer of 6 GiB, and steps that outlast the copy."""
    known = {
        "needed_bytes": 4 * GiB,
        "private_bytes": 6 * GiB,
        "free_bytes": 30 * GiB,
        "host_bytes": 64 * GiB,
        "cores": 8,
        "copy_seconds": 2.0,
        "step_seconds": 5.0,
    }
    return choose_on_host(setting, **(known | changed))


@given(SETTINGS, ASKED)
def test_a_choice_is_the_same_for_the_same_inputs_and_says_why(
    setting: Setting, asked: dict[str, Any]
) -> None:
    choice = choose_on_host(setting, **asked)
    assert choice == choose_on_host(setting, **asked)
    assert choice.evidence
    assert all(choice.evidence)
    if setting == "fork" and choice.way == "block":
        assert "cannot be" in choice.warning, "what was asked for is not done, and nobody is told"


@given(SETTINGS, ASKED)
def test_a_fork_is_never_chosen_against_an_obstacle_or_without_room(
    setting: Setting, asked: dict[str, Any]
) -> None:
    choice = choose_on_host(setting, **asked)
    if choice.way == "fork":
        assert setting in ("auto", "fork")
        assert not asked["obstacle"]
        assert asked["free_bytes"] - asked["private_bytes"] >= LEAST_RESERVE


@given(ASKED)
def test_by_itself_it_forks_only_where_training_is_likely_to_gain(asked: dict[str, Any]) -> None:
    if choose_on_host("auto", **asked).way == "fork":
        copy, step = asked["copy_seconds"], asked["step_seconds"]
        if copy is None or copy != copy or copy == float("inf"):
            copy = asked["needed_bytes"] / COPY_BYTES_PER_SECOND
        assert step is not None
        assert step >= OUTLASTS * copy
        assert asked["cores"] >= LEAST_CORES
        assert asked["needed_bytes"] >= LEAST_BYTES


@given(ASKED, st.integers(0, 100 * GiB))
def test_more_free_memory_never_makes_it_block(asked: dict[str, Any], more: int) -> None:
    before = choose_on_host("auto", **asked).way
    after = choose_on_host("auto", **(asked | {"free_bytes": asked["free_bytes"] + more})).way
    assert after in (before, "fork")


def test_every_reason_to_block_is_named() -> None:
    assert decide().way == "fork"
    assert not decide().warning
    for changed, word in [
        ({"obstacle": "a device is mapped"}, "a device is mapped"),
        ({"free_bytes": 6 * GiB}, "only 6.0 GiB are free on the host"),
        ({"needed_bytes": 1024}, "takes no time"),
        ({"cores": 1}, "1 core for this rank, all busy"),
        ({"step_seconds": 2.0}, "less than 1.2 times"),
        ({"step_seconds": None}, "not known"),
    ]:
        choice = decide(**changed)
        assert choice.way == "block"
        assert word in " ".join(choice.evidence)
        assert not choice.warning


def test_what_is_asked_for_is_done_or_it_is_told_why_not() -> None:
    assert decide("fork") == HostChoice(way="fork", evidence=["fork was asked for", *decide().evidence])
    costly = decide("fork", cores=1, step_seconds=0.1, needed_bytes=1024)
    assert costly.way == "fork"
    assert "the next steps may pay for it: 1 core for this rank, all busy; the copy takes" in costly.warning
    for changed in ({"obstacle": "a device is mapped"}, {"free_bytes": GiB}):
        refused = decide("fork", **changed)
        assert refused.way == "block"
        assert "fork was asked for and cannot be" in refused.warning
    for setting in ("clone", "overlap", "block"):
        assert decide(setting).way == "block"


def test_a_fork_is_not_for_devices_and_that_is_told() -> None:
    choice = choose("fork", free_bytes=100 * GiB, needed_bytes=GiB, has_owned=True, step_seconds=9.0)
    assert choice.way == "block"
    assert "does not freeze a device's memory" in choice.warning


def test_a_fork_needs_room_for_everything_that_training_may_write() -> None:
    assert fork_bytes(6 * GiB, 16 * GiB) == 6 * GiB + LEAST_RESERVE
