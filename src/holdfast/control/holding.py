"""Whether somebody holds a run, by a single look: nothing is claimed, and nobody is waited for.

A look can be wrong: a holder on another machine that died a moment ago still counts as alive, until its
time-to-live has passed, and one whose clock is further behind than that counts as dead. Only `lease.claim`,
which goes by one clock alone, decides who may act.
"""

from __future__ import annotations

import time

import msgspec

from holdfast.control.directory import ControlDirectory
from holdfast.control.holder import is_gone
from holdfast.control.lease import Claim, current_epoch, read_beat, read_claim
from holdfast.journal.render import printable

COMMANDS = ("operator-", "gc-")
"""How owners of the lease begin that are no launches, but commands that hold it for a moment."""


class LeaseState(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    holder: str
    alive: bool
    detail: str
    """What that rests on."""


class Holding(msgspec.Struct, frozen=True):
    """The newest claim, and what can be said of who made it."""

    claim: Claim
    lease: LeaseState

    @property
    def is_launch(self) -> bool:
        """Whether the run itself is alive, and not only a command that holds it for a moment."""
        return self.lease.alive and not self.claim.owner.startswith(COMMANDS)


def newest_claim(control: ControlDirectory) -> Claim | None:
    epoch = current_epoch(control)
    return read_claim(control, epoch) if epoch else None


def lease_state(control: ControlDirectory, held: Claim, now: float) -> LeaseState:
    """How the holder of a claim is, as far as that shows from here."""
    beat = read_beat(control, held.epoch)
    age = now - (beat.at if beat is not None else held.at)
    if beat is not None and beat.released:
        alive, detail = False, "released"
    elif is_gone(held.holder):
        alive, detail = False, "its process is gone"
    elif age >= held.ttl:
        alive, detail = False, f"no sign of life for {age:.0f} s"
    else:
        alive, detail = True, f"renewed {max(0.0, age):.1f} s ago"
    return LeaseState(epoch=held.epoch, holder=printable(held.holder.describe()), alive=alive, detail=detail)


def who_holds(control: ControlDirectory) -> Holding | None:
    """Who claimed the run last; None if nobody ever did."""
    held = newest_claim(control)
    return None if held is None else Holding(held, lease_state(control, held, time.time()))
