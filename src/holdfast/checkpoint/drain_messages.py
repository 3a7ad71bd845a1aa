"""What a trainer and its drain process say to each other: one JSON message a packet."""

from __future__ import annotations

import msgspec


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a drain process needs to know, given at its start."""

    control: str
    root: str
    url: str
    epoch: int
    attempt: int
    retry_seconds: float
    """Budget for trying one request again."""
    linger: float
    """Seconds for which it goes on with what it was told after its trainer has died or has left."""


class Push(msgspec.Struct, frozen=True, tag="push"):
    name: str


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    name: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Nothing more will come: end when all is done."""


Message = Push | Delete | Finish


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one job."""

    job: str
    """push or delete."""
    name: str
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    """Why it did not work; empty if it did."""
    note: str = ""
    """Why nothing had to be done; empty if something was."""
