"""The words of the design in plain English, for what people read. Pure."""

from __future__ import annotations

from holdfast.policy.actions import Action
from holdfast.policy.signs import Cause
from holdfast.policy.timeouts import CHECKPOINTING, LOADING, SETUP, STEP

_ACTIVITIES = {
    STEP: "in its training step",
    SETUP: "while it set up",
    LOADING: "while it loaded its state",
    CHECKPOINTING: "while it saved",
}
_ORIGINS = {
    Cause.PREEMPTION: "a preemption",
    Cause.INFRASTRUCTURE: "a fault of the machines or the network",
    Cause.DEVICE: "a fault of a device",
    Cause.JOB: "an error of the training script",
    Cause.DATA: "bad data",
    Cause.CHECKPOINT: "a fault of what was loaded",
    Cause.HANG: "a rank that stood still",
    Cause.UNKNOWN: "a failure of unknown cause",
}
_DEEDS = {
    Action.RESTART: "restart",
    Action.ROTATE: "restart on other devices",
    Action.EXCLUDE: "restart without what is at fault",
    Action.LOWER_RUNG: "restart from an older checkpoint",
    Action.SHRINK: "restart with fewer nodes",
    Action.WAIT: "wait for nodes",
    Action.REQUEUE: "give the job back to its scheduler",
    Action.STOP: "stop",
}


def activity(section: str, exiting: bool = False) -> str:
    """What a rank was doing, by the section that it was in; empty: in none."""
    if exiting:
        return f"after its loop, in {section!r}" if section else "between the end of its loop and its exit"
    return _ACTIVITIES.get(section, f"in {section!r}") if section else "between its steps"


def a_collective(name: str) -> str:
    """`an all_reduce`, `a barrier`; `a collective` where its name is not known."""
    name = name or "collective"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def origin(cause: str) -> str:
    """What something came from, by its class."""
    return _ORIGINS[Cause(cause)] if cause in set(Cause) else f"a failure ({cause})"


def deed(action: str) -> str:
    """What was decided. An action of another release is shown by its own name."""
    return _DEEDS[Action(action)] if action in set(Action) else action
