"""Which rank is at which place, and how each place's peer server is reached.

All ranks of an attempt agree on one map, made by rank 0 from what every rank says of itself. It is small: a
place is told once, however many ranks it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.checkpoint.local_manifest import RankPlace, Where


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself."""

    place: str = ""
    node: str = ""
    host: str = ""
    port: int = 0
    """Of the peer server that this rank has started; 0 if it has not."""
    problem: str = ""
    """Why this rank cannot use its local directory."""


class PlaceInfo(msgspec.Struct, frozen=True, array_like=True):
    place: str
    """Its id; empty if its local directory cannot be used."""
    node: str
    host: str
    port: int
    leader: int
    """The lowest rank there: it speaks for the place."""


class PlaceMap(msgspec.Struct, frozen=True):
    """The places of an attempt."""

    places: list[PlaceInfo]
    ranks: list[int]
    """By rank: its place's position in `places`."""

    def of(self, rank: int) -> PlaceInfo:
        return self.places[self.ranks[rank]]

    def leads(self, rank: int) -> bool:
        return self.of(rank).leader == rank

    def by_rank(self) -> list[str]:
        """The place of each rank, as `policy.replication` wants it; empty for one that has none."""
        return [self.places[at].place for at in self.ranks]

    def usable(self) -> list[PlaceInfo]:
        return [info for info in self.places if info.place]

    def find(self, place: str) -> PlaceInfo | None:
        return next((info for info in self.places if info.place == place), None)

    def nodes(self) -> dict[str, str]:
        """Place → node."""
        return {info.place: info.node for info in self.usable()}

    def where(self, targets: Sequence[Sequence[str]]) -> Where:
        """What is kept with each local checkpoint, for people to see where its copies are."""
        return Where(
            ranks=[
                RankPlace(self.of(rank).place, self.of(rank).node, list(given))
                for rank, given in enumerate(targets)
            ],
            nodes=self.nodes(),
        )


def make_map(hellos: Sequence[Hello]) -> PlaceMap:
    """Pure: one map from what all ranks said, by rank."""
    positions: dict[tuple[str, str], int] = {}
    places: list[PlaceInfo] = []
    ranks: list[int] = []
    for rank, hello in enumerate(hellos):
        key = (hello.place, "" if hello.place else hello.node)  # nodes without a place are not one place
        if key not in positions:
            positions[key] = len(places)
            places.append(PlaceInfo(hello.place, hello.node, hello.host, hello.port, rank))
        at = positions[key]
        if hello.port and not places[at].port:  # the one that serves need not be the first
            places[at] = msgspec.structs.replace(places[at], host=hello.host, port=hello.port)
        ranks.append(at)
    return PlaceMap(places, ranks)
