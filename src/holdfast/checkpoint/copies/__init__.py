"""The local tier: copies in the nodes' memory or on their disks, and replicas on their peers.

For places, slots and room for them, peer servers and the wire between them, assembling and cleaning.
Promises: a copy counts by the digests taken at the source; a lost node's shards come from a peer.
Never: give up the only copy; remove what another run may need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.copies import receipt, tier
    from holdfast.checkpoint.copies.assembled import AssembledShards, PlaceMap, ServingRank, make_map
    from holdfast.checkpoint.copies.inspection import (
        TIERS,
        CopyInspection,
        Judge,
        LocalInventory,
        list_copies,
        verify_copy,
    )
    from holdfast.checkpoint.copies.peer_process import PeerHost, own_address
    from holdfast.checkpoint.copies.peers import send_replica
    from holdfast.checkpoint.copies.receipt import Incoming, NoRoomError
    from holdfast.checkpoint.copies.room import LocalRoom
    from holdfast.checkpoint.copies.rules import Assembly, Replication, duties, replicate
    from holdfast.checkpoint.copies.slots import LocalSlots, Slot, SlotRefusal
    from holdfast.checkpoint.copies.tier import (
        Cleaning,
        CleaningRuling,
        CopyFile,
        CopyRecord,
        FoundPlace,
        LocalTier,
        Rules,
        Where,
        confirmed_replicas,
        judge,
        look,
        read_recorded,
        remove,
    )
    from holdfast.checkpoint.copies.wire import AnnouncedChunk, AnnouncedFile, Announcement
else:
    __getattr__ = offers(__name__)
