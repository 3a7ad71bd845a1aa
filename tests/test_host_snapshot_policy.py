"""Whether a snapshot of host memory is taken by a fork or in the call: safe, explained, ever the same."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.host_snapshot import (
    HostChoice,
    choose_on_host,
    fork_bytes,
)
from holdfast.policy.snapshot import LEAST_RESERVE, Setting, choose

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


def decide(setting: Setting = "fork", **changed: Any) -> HostChoice:
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
        assert setting == "fork", "it costs the steps after it more than it saves: only by its name"
        assert not asked["obstacle"]
        assert asked["free_bytes"] - asked["private_bytes"] >= LEAST_RESERVE


@given(ASKED, st.integers(0, 100 * GiB))
def test_more_free_memory_never_makes_it_block(asked: dict[str, Any], more: int) -> None:
    before = choose_on_host("fork", **asked).way
    after = choose_on_host("fork", **(asked | {"free_bytes": asked["free_bytes"] + more})).way
    assert after in (before, "fork")


def test_what_is_asked_for_is_done_or_it_is_told_why_not() -> None:
    assert decide().way == "fork"
    assert not decide().warning
    for changed, word in [
        ({"cores": 1}, "1 core for this rank, all busy"),
        ({"step_seconds": 2.0}, "less than 1.2 times"),
        ({"step_seconds": None}, "not known"),
    ]:
        costly = decide(**changed)
        assert costly.way == "fork"
        assert costly.warning.startswith("fork was asked for, and the next steps may pay for it")
        assert word in costly.warning
    for changed, word in [
        ({"obstacle": "a device is mapped"}, "a device is mapped"),
        ({"free_bytes": 6 * GiB}, "only 6.0 GiB are free on the host"),
    ]:
        refused = decide(**changed)
        assert refused.way == "block"
        assert "fork was asked for and cannot be" in refused.warning
        assert word in " ".join(refused.evidence)
    for setting in ("auto", "clone", "overlap", "block"):
        assert decide(setting).way == "block"
        assert not decide(setting).warning


def test_a_fork_is_not_for_devices_and_that_is_told() -> None:
    choice = choose("fork", free_bytes=100 * GiB, needed_bytes=GiB, has_owned=True, step_seconds=9.0)
    assert choice.way == "block"
    assert "does not freeze a device's memory" in choice.warning


def test_a_fork_needs_room_for_everything_that_training_may_write() -> None:
    assert fork_bytes(6 * GiB, 16 * GiB) == 6 * GiB + LEAST_RESERVE
