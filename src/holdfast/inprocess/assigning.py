"""The stage that says who is who: `policy.reassignment.reassign`, or a function that the settings name.

Guarantee: whatever that function does, no plan has a member twice, one that is not there, or none at all: an
answer that would is an error with its reason, and the job is handed over.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from holdfast.errors import ConfigError
from holdfast.policy.reassignment import Assignment, Shortage, reassign

Assign = Callable[..., Assignment | Shortage]


def assigner(name: str) -> Assign:
    """The function that `inprocess.assign` names, as package.module:function; our own if it names none."""
    if not name:
        return reassign
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"inprocess.assign = {name!r} is not to be found: {error}. Name a function that can be imported "
            "where the launcher runs, as package.module:function"
        ) from error
    if not callable(found):
        raise ConfigError(f"inprocess.assign = {name!r} is a {type(found).__name__}, and no function")
    assign: Assign = found
    return assign


def sound(found: Assignment | Shortage, present: AbstractSet[int]) -> Assignment | Shortage:
    """An answer that a plan can be made of; ValueError says what is wrong with any other."""
    if isinstance(found, Shortage):
        return found
    if not isinstance(found, Assignment):
        raise ValueError(f"inprocess.assign answered {found!r:.100}, and no Assignment or Shortage")
    named = [*found.order, *found.reserves]
    if not found.order or len(set(named)) < len(named) or not set(named) <= present:
        raise ValueError(
            f"inprocess.assign answered {found.order} with reserves {found.reserves}; present are "
            f"{sorted(present)}, each may be named once, and somebody has to train"
        )
    return found
