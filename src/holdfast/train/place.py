"""This rank's place in the local tier: opened, served to peers, and made known to all ranks.

Guarantee: after `join_places` either every rank knows the same map of places, or every rank knows that there
is no local tier in this attempt, and why. A node that cannot use its local directory refuses a first start,
because that is a mistake to be fixed. A restart goes on: what the other nodes hold is read all the same, but
saves leave the local tier out until the next attempt, on all nodes, because without that node's part there
is no complete checkpoint. A peer server that dies is replaced at once, even during a resume or a long step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.base import scope
from holdfast.checkpoint.choose import Proposal
from holdfast.checkpoint.copies import (
    LocalInventory,
    LocalTier,
    PeerHost,
    PlaceMap,
    Replication,
    ServingRank,
    duties,
    make_map,
    own_address,
    replicate,
)
from holdfast.checkpoint.save import LocalTarget, MendCopies, PeerTarget
from holdfast.config import CheckpointSettings, Settings
from holdfast.errors import HoldfastError, UsageError
from holdfast.journal.events import Warned
from holdfast.record import Group, read_key, within
from holdfast.train.membership import Membership
from holdfast.train.saves import Saving

log = logging.getLogger("holdfast")

WATCH = 0.25
"""Seconds between checks that the peer server lives."""


class _Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's message: the map, unless no node has a place; and which nodes have none, with the reason."""

    map: PlaceMap | None
    problem: str = ""


class LocalPlaces:
    """What a rank has of the local tier, for one attempt: made by `join_places`."""

    places: PlaceMap
    replication: Replication

    def __init__(self, settings: Settings, group: Group, member: Membership, node: str) -> None:
        self.tier: LocalTier | None = None
        """None if this node cannot use its directory."""
        self._chosen = settings.checkpoint
        self._patience = settings.control.decision_timeout
        self._group = group
        self._member = member
        self._node = node or platform.node()
        self._held = contextlib.ExitStack()
        """What `close` gives back."""
        self._host: PeerHost | None = None
        self._closing = threading.Event()
        self._watching: threading.Thread | None = None

    def join(self) -> bool:
        """Open this rank's place and agree with all others on the map; False if no node has a place."""
        agreed = self._agree(self._open())
        insist = not self._member.is_restart
        if agreed.problem and insist:
            raise UsageError(agreed.problem)
        if agreed.map is None:
            self._tell(f"going on without a local tier: {agreed.problem}")
            return False
        if agreed.problem:
            self._tell(
                f"{agreed.problem}. Local copies of other nodes are used; saves of this attempt go to the "
                "checkpoint root only, because a local one without that node would not be complete"
            )
        self.places = agreed.map
        self.replication = _replication(self._chosen, agreed.map, insist=insist)
        for note in self.replication.notes:
            self._tell(note)
        if self._host is not None:
            self._watching = threading.Thread(
                target=self._watch, args=(self._host,), name="holdfast-peer-watch", daemon=True
            )
            self._watching.start()
        return True

    @property
    def whole(self) -> bool:
        """Whether every node can use its directory; otherwise there are no local saves."""
        return len(self.places.usable()) == len(self.places.places)

    def inventory(self) -> LocalInventory:
        return LocalInventory(
            tier=self.tier,
            places=self.places,
            rank=self._group.rank,
            control=self._member.control,
            store=self._group.store,
            journal=self._member.journal,
            attempt=self._member.attempt,
            timeout=self._chosen.timeout,
            peer_timeout=self._chosen.replication_timeout,
        )

    def saving(self) -> LocalTarget | None:
        """What saves need to know about the place; None, on all ranks alike, if they leave the tier out."""
        if not self.whole or self.tier is None:
            return None
        rank = self._group.rank
        at = self.places.ranks[rank]
        return LocalTarget(
            tier=self.tier,
            node=self.places.of(rank).node,
            keep=self._chosen.non_persistent_keep_last,
            max_bytes=self._chosen.non_persistent_max_bytes,
            here=frozenset(other for other, place in enumerate(self.places.ranks) if place == at),
        )

    def use_peers(self, saving: Saving) -> None:
        """The run has resumed: from now on local copies are replicated."""
        if not self.whole:
            return
        rank = self._group.rank
        found = [self.places.find(place) for place in self.replication.targets[rank]]
        targets = [
            PeerTarget(info.place, info.node, info.host, info.port)
            for info in found
            if info is not None and info.port
        ]
        saving.use_peers(targets, self.places.where(self.replication.targets) if rank == 0 else None)

    def mend(self, saving: Saving, taken: Proposal | None, saved_world: int) -> None:
        """The run has resumed from local copies: those that were lost are made again, beside training."""
        if self.tier is None or taken is None or taken.rung is None or not taken.assembly:
            return
        rank, where = self._group.rank, self.places.by_rank()
        ranks = duties(where, self.replication.targets, saved_world=saved_world, rank=rank)
        saving.mend(
            MendCopies(
                checkpoint=taken.rung.name,
                manifest=taken.rung.manifest,
                home=taken.path,
                assembly=taken.assembly,
                directory=taken.directory,
                rank=rank,
                ranks=ranks,
                places=self.places,
                tier=str(self.tier.path),
                node=self.places.of(rank).node,
                keep=self._chosen.non_persistent_keep_last,
                max_bytes=self._chosen.non_persistent_max_bytes,
                timeout=self._chosen.replication_timeout,
            )
        )

    def close(self) -> None:
        self._closing.set()
        if self._watching is not None:
            self._watching.join(5.0)
        self._held.close()

    def _watch(self, host: PeerHost) -> None:
        while not self._closing.wait(WATCH):
            host.poll()

    # --- joining --------------------------------------------------------------------------------------------

    def _open(self) -> ServingRank:
        """Open this rank's place, and serve it if that is its task; returns what the others are told."""
        hello = ServingRank(node=self._node)
        try:
            tier = self.tier = LocalTier.open(
                Path(self._chosen.non_persistent_local_ckpt_dir),
                self._member.control.run_id,
                node=self._node,
                run_dir=self._member.control.path,
            )
            # Before its id is announced: until then it may be cleaned away.
            self._held.enter_context(tier.in_use())
            hello = ServingRank(node=self._node, place=tier.place)
            if self._serves(tier.place):
                host = self._host = self._serve(tier)
                address, port = host.address
                hello = msgspec.structs.replace(hello, host=address, port=port)
        except (HoldfastError, OSError) as error:
            self.tier = self._host = None
            hello = ServingRank(node=self._node, problem=str(error))
        return hello

    def _serves(self, place: str) -> bool:
        """Whether this rank serves its place: the first local rank does, if none can be missing."""
        if scope.current() is None:
            return int(os.environ.get("LOCAL_RANK", "0") or "0") == 0
        store: Any = self._group.store
        key = f"places/serving/{place}"
        first: int = within(lambda: store.add(key, 1), self._patience, "who serves this place")
        return first == 1

    def _serve(self, tier: LocalTier) -> PeerHost:
        host = PeerHost(
            tier=tier,
            control=self._member.control,
            attempt=self._member.attempt,
            journal=self._member.journal,
            host=own_address(os.environ.get("MASTER_ADDR", "")),
            keep=self._chosen.non_persistent_keep_last,
            max_bytes=self._chosen.non_persistent_max_bytes,
            linger=self._chosen.replication_timeout,
        )
        self._held.callback(host.close)
        host.start()
        return host

    def _agree(self, hello: ServingRank) -> _Agreed:
        store, patience = self._group.store, self._patience
        if not self._group.is_coordinator:
            store.set(f"places/hello/{self._group.rank}", msgspec.json.encode(hello).decode())
            raw = read_key(store, "places/all", 2 * patience, "the map of places, from rank 0")
            return msgspec.json.decode(raw, type=_Agreed)
        hellos = [hello]
        deadline = time.monotonic() + patience
        for rank in range(1, self._group.world_size):
            left = max(0.0, deadline - time.monotonic())
            raw = read_key(store, f"places/hello/{rank}", left, f"the place of rank {rank}")
            hellos.append(msgspec.json.decode(raw, type=ServingRank))
        wrong = [
            f"rank {rank} on {said.node}: {said.problem}" for rank, said in enumerate(hellos) if said.problem
        ]
        made = make_map(hellos)
        agreed = _Agreed(map=made if made.usable() else None, problem="; ".join(wrong[:4]))
        store.set("places/all", msgspec.json.encode(agreed).decode())
        return agreed

    def _tell(self, text: str) -> None:
        if self._group.is_coordinator:
            self._member.journal.write(Warned(message=text))
            log.warning("holdfast: %s", text)


def join_places(settings: Settings, group: Group, member: Membership, node: str) -> LocalPlaces | None:
    """Take part in the local tier; None if there is none. Every rank calls this at the same point."""
    if settings.checkpoint.non_persistent_ckpt_type != "local":
        return None
    places = LocalPlaces(settings, group, member, node)
    joined = False
    try:
        joined = places.join()
    finally:
        if not joined:
            places.close()
    return places if joined else None


def _replication(chosen: CheckpointSettings, places: PlaceMap, *, insist: bool) -> Replication:
    # A rank without a place counts as belonging to another node, which then looks after what it had saved.
    usable = [info.place for info in places.usable()]
    hosts = [place or usable[rank % len(usable)] for rank, place in enumerate(places.by_rank())]
    try:
        found = replicate(
            hosts,
            factor=chosen.replication_factor,
            jump=chosen.replication_jump,
            strict=insist,  # a world that has shrunk goes on with whatever replication it can have
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    pairs = zip(places.by_rank(), hosts, found.targets, strict=True)
    targets = [given if place else [host, *given] for place, host, given in pairs]
    return msgspec.structs.replace(found, targets=targets)
