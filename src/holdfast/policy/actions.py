"""What may be done after an attempt failed. Pure."""

from __future__ import annotations

from enum import StrEnum


class Action(StrEnum):
    RESTART = "restart"
    """As before; on spares in the place of nodes that are gone."""
    ROTATE = "rotate"
    """Each rank on another device."""
    EXCLUDE = "exclude"
    """Without the device or node that is at fault, on a spare in its place."""
    LOWER_RUNG = "lower_rung"
    """From an older checkpoint."""
    SHRINK = "shrink"
    """With fewer nodes."""
    WAIT = "wait"
    """Then decide again."""
    REQUEUE = "requeue"
    """End, to be started again by the scheduler."""
    STOP = "stop"

    @property
    def goes_on(self) -> bool:
        """Whether another attempt follows at once."""
        return self not in (Action.WAIT, Action.REQUEUE, Action.STOP)
