"""Where the copies of a checkpoint in the local tier are, as the control directory has it.

What is recorded is no proof: a node may have lost its memory since. It tells people where to look.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from holdfast.checkpoint import local_manifest
from holdfast.checkpoint.identity import CheckpointName
from holdfast.checkpoint.local_manifest import REPLICAS
from holdfast.control.directory import ControlDirectory


class PlaceCopies(msgspec.Struct, frozen=True, kw_only=True):
    """What one place was given of a checkpoint, by the ranks that saved it."""

    place: str
    node: str
    own: list[int]
    planned: list[int]
    """Ranks of which it was to get a replica."""
    confirmed: list[int]
    """Those of which it has said that it holds one, verified."""


class Recorded(msgspec.Struct, frozen=True):
    places: list[PlaceCopies]
    """By the lowest rank that each saved."""
    ranks: int
    """How many ranks saved the checkpoint; 0 if `where.json` cannot be read."""

    @property
    def nodes(self) -> int:
        return sum(bool(place.own) for place in self.places)

    @property
    def planned(self) -> int:
        return sum(len(place.planned) for place in self.places)

    @property
    def confirmed(self) -> int:
        """Of the planned ones."""
        return sum(len({*place.planned} & {*place.confirmed}) for place in self.places)


def read_recorded(control: ControlDirectory, name: CheckpointName) -> Recorded:
    """Every place that saved or was to get something of a checkpoint; what cannot be read is left out."""
    where = local_manifest.read_where(control, name)
    nodes = dict(where.nodes) if where is not None else {}
    own: dict[str, list[int]] = {}
    planned: dict[str, list[int]] = {}
    for rank, saved in enumerate(where.ranks if where is not None else ()):
        nodes.setdefault(saved.place, saved.node)
        own.setdefault(saved.place, []).append(rank)
        for target in saved.targets:
            planned.setdefault(target, []).append(rank)
    confirmed = _confirmed(control, name)
    order = dict.fromkeys((*own, *planned, *confirmed))
    places = [
        PlaceCopies(
            place=place,
            node=nodes.get(place, ""),
            own=own.get(place, []),
            planned=planned.get(place, []),
            confirmed=confirmed.get(place, []),
        )
        for place in order
    ]
    return Recorded(places, len(where.ranks) if where is not None else 0)


def _confirmed(control: ControlDirectory, name: CheckpointName) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(local_manifest.folder(control, name) / REPLICAS):
            rank, _, place = entry.partition(".")
            if rank.isdecimal() and place:
                found.setdefault(place, []).append(int(rank))
    return {place: sorted(ranks) for place, ranks in sorted(found.items())}
