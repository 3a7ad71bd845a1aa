"""Who is who by a function of the user's: it is found, used, and cannot make a plan that is not one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import ModuleType

import pytest
from test_conductor import arrive, conducting, over, plan

from holdfast.errors import ConfigError
from holdfast.policy.restarts import Assignment, Shortage, reassign
from holdfast.restart.conductor import assigner, sound
from holdfast.restart.messages import OverKind


def backwards(
    nodes: Mapping[int, str], present: AbstractSet[int], before: Sequence[int], **limits: object
) -> Assignment:
    del nodes, before, limits
    return Assignment(order=sorted(present, reverse=True), reserves=[])


def twice(nodes: Mapping[int, str], present: AbstractSet[int], *more: object, **limits: object) -> Assignment:
    del nodes, more, limits
    return Assignment(order=[min(present)] * 2, reserves=[])


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("places_of_mine")
    module.backwards, module.twice, module.number = backwards, twice, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def test_without_a_name_it_is_our_own() -> None:
    assert assigner("") is reassign


def test_a_function_of_the_users_says_who_is_who(mine: str) -> None:
    with conducting(3, assign=f"{mine}:backwards") as (_, store):
        arrive(store, 0, 0, 1, 2)
        assert plan(store, 0).order == [2, 1, 0]


def test_an_answer_that_cannot_be_is_the_end_with_its_reason(mine: str) -> None:
    with conducting(2, assign=f"{mine}:twice") as (_, store):
        arrive(store, 0, 0, 1)
        end = over(store, 0)
        assert end.kind is OverKind.HANDED_OVER
        assert "[0, 0]" in end.reason
        assert "each may be named once" in end.reason


@pytest.mark.parametrize("name", ["no_such_module:f", "{mine}:no_such", "{mine}", "{mine}:number", ":"])
def test_what_cannot_be_found_is_refused_at_the_start(mine: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"inprocess\.assign"):
        assigner(name.format(mine=mine))


@pytest.mark.parametrize(
    "answer",
    [
        Assignment(order=[], reserves=[0]),
        Assignment(order=[0], reserves=[0]),
        Assignment(order=[5], reserves=[]),
        None,
    ],
)
def test_only_members_that_are_there_once_each(answer: Assignment) -> None:
    with pytest.raises(ValueError, match=r"inprocess\.assign"):
        sound(answer, {0, 1})


def test_a_shortage_is_an_answer() -> None:
    found = Shortage(usable=0, needed=2)
    assert sound(found, set()) is found
