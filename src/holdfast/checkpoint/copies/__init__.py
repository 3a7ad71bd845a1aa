"""The local tier: copies in the nodes' memory or on their disks, and replicas on their peers.

For places, slots and room for them, peer servers and the wire between them, assembling and cleaning.
Promises: a copy counts by the digests taken at the source; a lost node's shards come from a peer.
Never: give up a copy that is the only one; remove what another run may need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.copies import receipt as receipt
    from holdfast.checkpoint.copies import tier as tier
    from holdfast.checkpoint.copies.assembled import AssembledShards as AssembledShards
    from holdfast.checkpoint.copies.assembled import Hello as Hello
    from holdfast.checkpoint.copies.assembled import PlaceMap as PlaceMap
    from holdfast.checkpoint.copies.assembled import make_map as make_map
    from holdfast.checkpoint.copies.clean import Cleaning as Cleaning
    from holdfast.checkpoint.copies.clean import CleaningRuling as CleaningRuling
    from holdfast.checkpoint.copies.clean import Found as Found
    from holdfast.checkpoint.copies.clean import Rules as Rules
    from holdfast.checkpoint.copies.clean import judge as judge
    from holdfast.checkpoint.copies.clean import look as look
    from holdfast.checkpoint.copies.clean import remove as remove
    from holdfast.checkpoint.copies.inspection import TIERS as TIERS
    from holdfast.checkpoint.copies.inspection import CopyInspection as CopyInspection
    from holdfast.checkpoint.copies.inspection import Judge as Judge
    from holdfast.checkpoint.copies.inspection import LocalInventory as LocalInventory
    from holdfast.checkpoint.copies.inspection import list_copies as list_copies
    from holdfast.checkpoint.copies.inspection import verify_copy as verify_copy
    from holdfast.checkpoint.copies.peer_process import PeerHost as PeerHost
    from holdfast.checkpoint.copies.peer_process import own_address as own_address
    from holdfast.checkpoint.copies.peers import send_replica as send_replica
    from holdfast.checkpoint.copies.receipt import Incoming as Incoming
    from holdfast.checkpoint.copies.receipt import NoRoomError as NoRoomError
    from holdfast.checkpoint.copies.room import LocalRoom as LocalRoom
    from holdfast.checkpoint.copies.room import LocalSlots as LocalSlots
    from holdfast.checkpoint.copies.room import Refusal as Refusal
    from holdfast.checkpoint.copies.room import Slot as Slot
    from holdfast.checkpoint.copies.rules import Assembly as Assembly
    from holdfast.checkpoint.copies.rules import Replication as Replication
    from holdfast.checkpoint.copies.rules import duties as duties
    from holdfast.checkpoint.copies.rules import replicate as replicate
    from holdfast.checkpoint.copies.tier import CopyFile as CopyFile
    from holdfast.checkpoint.copies.tier import CopyRecord as CopyRecord
    from holdfast.checkpoint.copies.tier import LocalTier as LocalTier
    from holdfast.checkpoint.copies.tier import Where as Where
    from holdfast.checkpoint.copies.tier import read_recorded as read_recorded
    from holdfast.checkpoint.copies.wire import AnnouncedChunk as AnnouncedChunk
    from holdfast.checkpoint.copies.wire import AnnouncedFile as AnnouncedFile
    from holdfast.checkpoint.copies.wire import Announcement as Announcement
else:
    __getattr__ = offers(__name__)
