"""What can befall a process whose training function starts again in place: the evidence of such a restart."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast.policy.evidence import Raised


class FaultKind(StrEnum):
    EXCEPTION = "exception"
    """The function raised on this member."""
    LOST = "lost"
    """Its process has ended."""
    SOFT_TIMEOUT = "soft_timeout"
    """Its main thread made no progress for so long; the process may still restart."""
    HARD_TIMEOUT = "hard_timeout"
    """It did not leave the function in time, or its interpreter stood still: its keeper ended it."""
    SILENT = "silent"
    """Nothing was heard from its node's keeper any more."""
    LATE = "late"
    """It did not come to the barrier before the others went on."""
    UNFIT = "unfit"
    """Its health check failed."""
    ASKED = "asked"
    """The function itself asked for a restart."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What befell a member."""

    member: int
    """-1 where it is not known which."""
    rank: int = -1
    """Under which it trained; -1 for a reserve."""
    node: str = ""
    kind: FaultKind
    detail: str = ""
    """In words; for an exception its type and message."""
    error: str = ""
    """Class of the exception, without its module."""
    errors: list[Raised] = []
    """That exception and those that led to it, as in `evidence.WorkerEnd`."""
    exit_code: int = 0
    """Of the error or of the process, as from waitpid, where that is known."""
    at: float = 0.0
    """Seconds since 1970."""
    step: int = 0
    """The last step that it completed, as far as is known."""

    def describe(self) -> str:
        if self.member < 0:
            return f"{self.kind}: {self.detail}"
        who = f"rank {self.rank}" if self.rank >= 0 else f"reserve {self.member}"
        where = f" on {self.node}" if self.node else ""
        return f"{who}{where}: {self.kind}{f' ({self.detail})' if self.detail else ''}"
