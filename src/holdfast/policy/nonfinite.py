"""What happens to a non-finite step, and when there were too many in a row. Pure.

Guarantee: a bad step is never to be used, whatever the policy says; after `max_consecutive` bad steps in a
row the answer is `stop` or `roll_back`, the same on every rank that was told the same. A good step, and
nothing else, ends a row.

warn      a bad step is dropped, with a warning
skip      a bad step is dropped
raise     the first bad step stops the run
rollback  a bad step is dropped; too many in a row go back to an earlier state instead of stopping
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

Policy = Literal["warn", "skip", "raise", "rollback"]


class Act(StrEnum):
    USE = "use"
    DROP = "drop"
    STOP = "stop"
    ROLL_BACK = "roll_back"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done with a step; all ranks do the same."""

    act: Act
    warn: bool = False
    """Whether a person is to be told; stopping and going back are told anyway."""
    in_a_row: int = 0
    """Bad steps in a row, this one included."""
    why: str = ""
    """Why the run stops or goes back."""


class Count:
    """Counts bad steps. Nothing but what `after` is told changes it."""

    def __init__(self, policy: Policy, max_consecutive: int) -> None:
        self.policy = policy
        self.max_consecutive = max_consecutive
        self.in_a_row = 0
        self.total = 0

    def after(self, bad: bool) -> Outcome:
        """The step was bad, or was not: what to do with it."""
        if not bad:
            self.in_a_row = 0
            return Outcome(act=Act.USE)
        self.in_a_row += 1
        self.total += 1
        if self.policy == "raise":
            return Outcome(act=Act.STOP, in_a_row=self.in_a_row, why="the policy for a bad step is to raise")
        if self.in_a_row >= self.max_consecutive:
            return Outcome(
                act=Act.ROLL_BACK if self.policy == "rollback" else Act.STOP,
                in_a_row=self.in_a_row,
                why=f"{self.in_a_row} bad steps in a row, {self.max_consecutive} are too many",
            )
        return Outcome(act=Act.DROP, warn=self.policy == "warn", in_a_row=self.in_a_row)

    def began_again(self) -> None:
        """An earlier state was restored: the row is over."""
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.in_a_row, self.total = state.get("in_a_row", 0), state.get("total", 0)
