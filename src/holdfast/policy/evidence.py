"""What an incident left to judge by: plain values, as the agents gathered them.

Whatever is not known is left out, and every field but what identifies a thing has a default; so evidence of
an older release, or of a node that could not say more, is evidence too.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that ended by itself, not because it was stopped."""

    rank: int
    exit_code: int
    """As from waitpid: negative for a signal."""
    at: float = 0.0
    node: str = ""
    device: str = ""
    """The device it ran on, if it had one and that is known."""
    message: str = ""
    error_class: str = ""
    """Of the exception, without its module; empty if there was none, or if the message begins with it."""
    kernel_oom: bool = False


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that gave no sign of life for longer than its limit."""

    rank: int
    at: float = 0.0
    node: str = ""
    device: str = ""
    section: str = ""
    """The innermost open one; empty outside of all."""
    seconds: float = 0.0
    limit: float = 0.0
    missing: list[int] = []
    """Ranks that did not reach the collective in which this one waits, as far as that is known."""
    missing_nodes: list[str] = []
    """The nodes of those ranks."""


class Loss(StrEnum):
    """How a node was lost."""

    CLOSED = "closed"
    """Its connection was closed: its agent or its machine is gone."""
    SILENT = "silent"
    LEFT = "left"
    """It was told to leave, by its scheduler or by an operator."""
    REFUSED = "refused"
    """Its agent would not take part."""


class LostNode(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    how: Loss
    at: float = 0.0
    detail: str = ""


class DeviceError(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver or a kernel log said, during the attempt, about a device that it used."""

    node: str = ""
    device: str = ""
    at: float = 0.0
    xid: int | None = None
    """NVIDIA's number of the error, if it has one."""
    uncorrectable: bool = False
    """Whether memory errors were counted that ECC could not correct."""
    message: str = ""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of what ended an attempt. The order of the lists says nothing."""

    ends: list[WorkerEnd] = []
    hangs: list[Hang] = []
    lost: list[LostNode] = []
    devices: list[DeviceError] = []
    world_size: int = 0
    """0 if not known."""
    rung: str = ""
    """The checkpoint that was loaded; empty for a fresh start, or if that is not known."""
    steps: int | None = None
    """Steps completed since then; None if not known."""


_PASSING = re.compile(
    r"0x[0-9a-fA-F]+|\b(pid|process)[ =:]*\d+|\d+(\.\d+)? ?([KMGT]i?B|bytes)\b", re.IGNORECASE
)


def comparable(message: str) -> str:
    """A message without what differs between two runs of the same thing: addresses, pids, sizes of memory."""
    return _PASSING.sub("…", message)
