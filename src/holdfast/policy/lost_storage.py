"""What a run says when its storage takes nothing any more, and with what it ends. Pure."""

from __future__ import annotations

import msgspec

from holdfast.journal.text import size
from holdfast.policy.health import SPACE_WARNING


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Storage that a run cannot go on without, and that does not take what is written."""

    path: str
    problem: str = ""
    """What the trial met; empty where only too little space is left."""
    full: bool = False
    """Whether there is no room, and nothing else is known to be wrong with it."""
    free: int | None = None
    """Bytes; None if not known."""
    waited: float = 0.0

    @property
    def brief(self) -> str:
        return "the disk is full" if self.full else "the run's storage takes nothing"

    def describe(self) -> str:
        """`the disk is full (4.0 MiB free in /data/run, 1.0 GiB needed; waited 30 s)`."""
        waited = f"; waited {self.waited:.0f} s" if self.waited >= 1 else ""
        if not self.full:
            return f"the storage of {self.path} takes nothing ({self.problem}{waited})"
        if self.free is None or self.free >= SPACE_WARNING:
            # A quota, or no room for more files: the bytes that are free would only puzzle.
            return f"the disk is full ({self.path}: {self.problem or 'no room'}{waited})"
        found = f"{size(self.free)} free in {self.path}, {size(SPACE_WARNING)} needed"
        return f"the disk is full ({found}{waited})"


def last_words(trouble: Trouble, *, saved: int | None, last: int | None, requeued: bool = False) -> str:
    """The end of a launch in one line. `saved`, `last`: the highest step that is saved, and that was done.

    What is not known is left out.
    """
    words = [f"{trouble.describe()}."]
    if saved is not None:
        kept = f"Saved up to step {saved}" if saved else "Nothing is saved"
        words.append(f"{kept}{_lost(saved, last)}.")
    words.append(f"Next: {what_to_do(trouble, requeued=requeued)}.")
    return " ".join(words)


def what_to_do(trouble: Trouble, *, requeued: bool = False) -> str:
    """`free space, run the same command`."""
    mend = "free space" if trouble.full else "mend the storage"
    then = "the job comes back when it is queued again" if requeued else "run the same command"
    return f"{mend}, {then}"


def _lost(saved: int, last: int | None) -> str:
    if last is None or last < saved:
        return ""
    if last == saved:
        return "; no step is lost" if saved else ""
    first = saved + 1
    return f"; step {first} is lost" if first == last else f"; steps {first}–{last} are lost"
