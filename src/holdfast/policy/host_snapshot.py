"""Which way a snapshot is taken of state in host memory: fork or block. Pure.

Guarantee: the same inputs give the same choice, and every choice says what it rests on. `fork` is taken only
if it is asked for by name, where nothing is known that makes it unsafe, and where the host keeps a reserve
beside all that it may cost. What is asked for is obeyed unless it cannot be; `warning` then says so.

fork   the kernel freezes the trainer's memory in a child, which copies while training goes on. Training waits
       for the fork alone, and pays later for every page that it writes: a fault, and a copy of the page where
       the child still has it. In all that was measured it paid more than the copy costs; so it is for those
       who must not be held up at one moment, and never chosen by itself.
block  training waits for the copy. Always possible, and the least work in all.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.journal.render import size
from holdfast.policy.snapshot import Setting, hides, reserve

HostWay = Literal["fork", "block"]

COPY_BYTES_PER_SECOND = 1e9
"""What one core fingerprints and copies from a frozen view; used until one was measured."""
LEAST_CORES = 2
"""Cores that a rank must have before a child is more than a thief of its time."""


class HostChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A way, with what it rests on."""

    way: HostWay
    evidence: list[str]
    warning: str = ""
    """Why a way that was asked for by name is not taken, or what it will cost; empty where neither is so."""


def fork_bytes(private_bytes: int, host_bytes: int) -> int:
    """The free bytes from which on a fork is taken: everything private may be copied once, page by page."""
    return max(0, private_bytes) + reserve(host_bytes)


def choose_on_host(
    setting: Setting,
    *,
    needed_bytes: int,
    private_bytes: int,
    free_bytes: int,
    host_bytes: int = 0,
    cores: int = 1,
    copy_seconds: float | None = None,
    step_seconds: float | None = None,
    obstacle: str = "",
) -> HostChoice:
    """The way to take the next snapshot of state in host memory.

    `needed_bytes` is what a fork would freeze of the snapshot, `private_bytes` all memory of the trainer that
    it would freeze, `free_bytes` this rank's share of what the host, or its job's limit, has left.
    `cores` are those of this rank. `copy_seconds` is the last measured copy by a child and `step_seconds` the
    median step, None if unknown. `obstacle`: why a fork is not safe here, or went wrong before.
    """
    if setting != "fork":
        return HostChoice(way="block", evidence=[f"{setting} was asked for, and a fork only by its name"])
    asked = "fork was asked for"
    room, room_why = _room(private_bytes, free_bytes, host_bytes)
    barred = obstacle or ("" if room else room_why)
    if barred:
        told = f"{asked} and cannot be: {barred}; blocking instead"
        return HostChoice(way="block", evidence=[asked, barred], warning=told)
    hidden, hidden_why = hides(copy_seconds, step_seconds, max(0, needed_bytes) / COPY_BYTES_PER_SECOND)
    enough = cores >= LEAST_CORES
    cores_why = f"{cores} {'cores' if cores != 1 else 'core'} for this rank" + (
        "" if enough else ", all busy"
    )
    against = [why for good, why in ((enough, cores_why), (hidden, hidden_why)) if not good]
    told = f"{asked}, and the next steps may pay for it: {'; '.join(against)}" if against else ""
    evidence = [asked, room_why, f"{size(max(0, needed_bytes))} to copy", cores_why, hidden_why]
    return HostChoice(way="fork", evidence=evidence, warning=told)


def _room(private_bytes: int, free_bytes: int, host_bytes: int) -> tuple[bool, str]:
    wanted = fork_bytes(private_bytes, host_bytes)
    told, free = f"a fork may need {size(wanted)} with its reserve", size(max(0, free_bytes))
    if free_bytes >= wanted:
        return True, f"{told}, {free} are free on the host"
    return False, f"{told}, only {free} are free on the host"
