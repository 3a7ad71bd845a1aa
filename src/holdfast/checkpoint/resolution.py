"""What a resume would make of each checkpoint of a run: the answer of `resolver`, and its words."""

from __future__ import annotations

import msgspec

from holdfast.control.holding import LeaseState
from holdfast.errors import NoValidRungError, RunIsLiveError
from holdfast.exit_codes import ExitCode

FRESH, REFUSED = "fresh start", "refused"
USED, BAD, LOWER, NO_RUNG = "would be used", "refused", "lower than the one used", "not a rung"
LOCAL = "would be used if its nodes still hold it"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, and what a resume would make of it."""

    name: str
    step: int | None
    verdict: str
    """`would be used`, `would be used if its nodes still hold it`, `refused`, `lower than the one used` or
    `not a rung`."""
    reasons: list[str] = []
    path: str | None = None
    """Where its bytes are: a directory, or a URL of the object store. None if only nodes may hold them."""
    tier: str = "global"
    """global, remote or local."""
    local: str | None = None
    """Where the local tier's copies should be, as recorded."""
    world: int | None = None
    """How many ranks saved it, where its manifest was read."""
    standing: str = ""
    bytes: int = 0


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
    """What a start would end with: 0, 18 (no valid rung) or 20 (somebody holds the run)."""

    @property
    def usable(self) -> bool:
        return self.exit_code == 0

    def require(self) -> Resolution:
        """Itself, or the error that the start would end with."""
        if self.exit_code == ExitCode.RUN_IS_LIVE:
            raise RunIsLiveError("; ".join(self.why))
        if self.exit_code:
            raise NoValidRungError("; ".join(self.why))
        return self
