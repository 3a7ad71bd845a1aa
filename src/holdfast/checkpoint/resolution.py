"""What a resume would make of each checkpoint of a run: the answer of `resolver`."""

from __future__ import annotations

import msgspec

from holdfast.control.holding import LeaseState
from holdfast.errors import ControlError, NoValidRungError, RunIsLiveError
from holdfast.exit_codes import ExitCode
from holdfast.policy.rungs import Candidate


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; fields are only ever added."""

    run: str
    """The run's id; empty if there is none yet."""
    run_dir: str
    root: str
    chosen: str
    """A checkpoint's name, `fresh start` or `refused`."""
    step: int | None = None
    path: str | None = None
    tier: str = ""
    without_local: str = ""
    """What would be chosen if the nodes hold nothing any more."""
    why: list[str] = []
    candidates: list[Candidate] = []
    """In the order of the ladder; then what is no rung."""
    digests_read: bool = True
    asked: str = "auto"
    """`resume_from`, as it was asked with."""
    pinned: str | None = None
    live: LeaseState | None = None
    """Who holds the run, if somebody does."""
    storage_alarm: list[str] = []
    """Checkpoints in a row whose bytes were wrong, if so many were that the storage must be tried."""
    unseen: list[str] = []
    """Places that could not be looked at, and why."""
    samples: int | None = None
    tokens: int | None = None
    world: int | None = None
    exit_code: int = 0
    """What a start would end with: 0, 18 (no valid rung), 20 (somebody holds the run) or 24 (the directory
    of a run that was there before is not)."""

    @property
    def usable(self) -> bool:
        return self.exit_code == 0

    def require(self) -> Resolution:
        """Itself, or the error that the start would end with."""
        if self.exit_code == ExitCode.RUN_IS_LIVE:
            raise RunIsLiveError("; ".join(self.why))
        if self.exit_code == ExitCode.CONTROL_UNUSABLE:
            raise ControlError("; ".join(self.why))
        if self.exit_code:
            raise NoValidRungError("; ".join(self.why))
        return self
