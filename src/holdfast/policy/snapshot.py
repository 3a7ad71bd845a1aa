"""Which way a snapshot is taken from a device: clone, overlap or block. Pure.

Guarantee: the same inputs give the same choice, and every choice says what it rests on. `clone` is chosen
only where the device keeps a reserve beside the clone, `overlap` only where something is known to wait for
it and no snapshot taken so was ever torn. What is asked for by name is obeyed unless it cannot be; `warning`
then says so.

clone    everything is copied within the device, then to the host while training goes on. Costs memory.
overlap  what torch optimizers own is copied to the host during the next forward and backward; their steps
         wait for it on the device. Costs time only where the copy outlasts forward and backward.
block    training waits for the copy to the host. Always possible.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from holdfast.journal.render import duration, size

Way = Literal["clone", "overlap", "block"]
Setting = Literal["auto", "clone", "overlap", "block"]

COPY_BYTES_PER_SECOND = 50e9
"""What a page-locked copy over PCIe 5 reaches; used until one was measured."""
CLONE_SLACK = 1.05
"""A clone takes this many times the bytes it copies: tensors are aligned, and allocations are rounded up."""
RESERVE_SHARE = 0.02
LEAST_RESERVE = 512 * 1024**2
"""What is left of a device's memory beside a clone: the larger of this share of it and this many bytes."""
OUTLASTS = 1.2
"""A step must be this many times as long as the copy before the copy is hidden behind it."""
ENOUGH_OWNED = 0.8
"""The share of a snapshot's bytes that torch optimizers must own before overlapping is worth while."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A way, with what it rests on."""

    way: Way
    evidence: list[str]
    warning: str = ""
    """Why a way that was asked for by name is not taken, or what it will cost; empty where neither is so."""


def reserve(device_bytes: int) -> int:
    """The bytes of a device that a clone must leave free."""
    return max(LEAST_RESERVE, math.ceil(max(0, device_bytes) * RESERVE_SHARE))


def clone_bytes(needed_bytes: int, device_bytes: int) -> int:
    """The free bytes from which on a clone is taken."""
    return math.ceil(max(0, needed_bytes) * CLONE_SLACK) + reserve(device_bytes)


def owned_enough(owned_bytes: int, needed_bytes: int) -> bool:
    """Whether torch optimizers own so much of a snapshot that overlapping it is worth while."""
    return owned_bytes > 0 and owned_bytes >= ENOUGH_OWNED * needed_bytes


def estimated_copy(needed_bytes: int) -> float:
    """Seconds that the copy to the host will take, where none was measured yet."""
    return max(0, needed_bytes) / COPY_BYTES_PER_SECOND


def choose(
    setting: Setting,
    *,
    free_bytes: int,
    needed_bytes: int,
    device_bytes: int = 0,
    copy_seconds: float | None = None,
    step_seconds: float | None = None,
    has_owned: bool = False,
    torn_before: bool = False,
) -> Choice:
    """The way to take the next snapshot.

    `free_bytes` is what could be allocated on the device (its caching allocator's unused memory included),
    `needed_bytes` what the snapshot holds on it; with several devices, those of the tightest one.
    `copy_seconds` is the last measured copy to the host and `step_seconds` the median step, None if unknown.
    `has_owned`: see `owned_enough`. `torn_before`: an overlapped snapshot was changed under the copy.
    """
    room, room_why = _room(free_bytes, needed_bytes, device_bytes)
    usable, usable_why = _usable(has_owned, torn_before)
    hidden, hidden_why = _hides(copy_seconds, step_seconds, estimated_copy(needed_bytes))

    if setting == "block":
        return Choice(way="block", evidence=["block was asked for"])
    if setting == "overlap":
        if not usable:
            return Choice(
                way="block",
                evidence=["overlap was asked for", *usable_why],
                warning=f"overlap was asked for and cannot be: {'; '.join(usable_why)}; blocking instead",
            )
        cost = "" if hidden else f"overlap was asked for, and steps may wait for the copy: {hidden_why}"
        return Choice(
            way="overlap", evidence=["overlap was asked for", *usable_why, hidden_why], warning=cost
        )
    if room:
        asked = ["clone was asked for"] if setting == "clone" else []
        return Choice(way="clone", evidence=[*asked, room_why])

    way: Way = "overlap" if usable and hidden else "block"
    return Choice(
        way=way,
        evidence=[room_why, *usable_why, *([hidden_why] if usable else [])],
        warning=f"clone was asked for and cannot be: {room_why}; {way} instead" if setting == "clone" else "",
    )


def _known(seconds: float | None) -> bool:
    return seconds is not None and math.isfinite(seconds) and seconds >= 0


def _room(free_bytes: int, needed_bytes: int, device_bytes: int) -> tuple[bool, str]:
    wanted = clone_bytes(needed_bytes, device_bytes)
    told, free = f"a clone needs {size(wanted)} with its reserve", size(max(0, free_bytes))
    if free_bytes >= wanted:
        return True, f"{told}, {free} are free on the device"
    return False, f"{told}, only {free} are free on the device"


def _usable(has_owned: bool, torn_before: bool) -> tuple[bool, list[str]]:
    if torn_before:
        return False, ["an overlapped snapshot of this run was changed while it was copied"]
    if not has_owned:
        return False, ["torch optimizers own too little of the state to wait for its copy"]
    return True, ["torch optimizers own the state and wait for its copy"]


def _hides(copy: float | None, step: float | None, estimate: float) -> tuple[bool, str]:
    """Whether a step outlasts the copy (by `estimate` where none was measured), and what that rests on."""
    measured = copy if _known(copy) else None
    seconds = estimate if measured is None else measured
    told = f"the copy takes {duration(seconds)} ({'estimated' if measured is None else 'measured'})"
    if step is None or not _known(step):
        return False, f"{told}, how long a step takes is not known yet"
    if step >= OUTLASTS * seconds:
        return True, f"{told}, a step {duration(step)}: at least {OUTLASTS} times as long"
    return False, f"{told}, a step only {duration(step)}: less than {OUTLASTS} times as long"
