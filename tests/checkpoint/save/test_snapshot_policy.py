"""Which way a snapshot is taken from a device: safe, explained, and the same for the same inputs."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.saves import (
    CLONE_SLACK,
    LEAST_RESERVE,
    OUTLASTS,
    Choice,
    Setting,
    choose_snapshot,
    clone_bytes,
    estimated_copy,
    owned_enough,
    reserve,
)

GiB = 1024**3

BYTES = st.integers(0, 200 * GiB)
SECONDS = st.one_of(st.none(), st.floats(0, 1e4), st.just(float("nan")), st.just(float("inf")))
ASKED = st.fixed_dictionaries(
    {
        "free_bytes": st.integers(-GiB, 200 * GiB),
        "needed_bytes": BYTES,
        "device_bytes": BYTES,
        "copy_seconds": SECONDS,
        "step_seconds": SECONDS,
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
