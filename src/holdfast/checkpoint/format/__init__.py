"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.format import fingerprint as fingerprint
    from holdfast.checkpoint.format import manifest as manifest
    from holdfast.checkpoint.format import metadata as metadata
    from holdfast.checkpoint.format.failures import FAILURES as FAILURES
    from holdfast.checkpoint.format.failures import about as about
    from holdfast.checkpoint.format.failures import describe as describe
    from holdfast.checkpoint.format.failures import explain as explain
    from holdfast.checkpoint.format.failures import naming as naming
    from holdfast.checkpoint.format.failures import needs_more_than_a_fork as needs_more_than_a_fork
    from holdfast.checkpoint.format.failures import raise_for_all as raise_for_all
    from holdfast.checkpoint.format.failures import save_failed as save_failed
    from holdfast.checkpoint.format.failures import together as together
    from holdfast.checkpoint.format.layout import READ_SLICE as READ_SLICE
    from holdfast.checkpoint.format.layout import WRITE_BACK as WRITE_BACK
    from holdfast.checkpoint.format.layout import Declared as Declared
    from holdfast.checkpoint.format.layout import Item as Item
    from holdfast.checkpoint.format.layout import Layout as Layout
    from holdfast.checkpoint.format.layout import OpenShard as OpenShard
    from holdfast.checkpoint.format.layout import Shard as Shard
    from holdfast.checkpoint.format.layout import ShardFile as ShardFile
    from holdfast.checkpoint.format.layout import ShardSource as ShardSource
    from holdfast.checkpoint.format.layout import check_placeholder as check_placeholder
    from holdfast.checkpoint.format.layout import cut as cut
    from holdfast.checkpoint.format.layout import placeholder as placeholder
    from holdfast.checkpoint.format.layout import read_at as read_at
    from holdfast.checkpoint.format.layout import start_write_back as start_write_back
    from holdfast.checkpoint.format.layout import table_digest as table_digest
    from holdfast.checkpoint.format.layout import torn as torn
    from holdfast.checkpoint.format.manifest import FORMAT as FORMAT
    from holdfast.checkpoint.format.manifest import LATEST as LATEST
    from holdfast.checkpoint.format.manifest import MANIFEST as MANIFEST
    from holdfast.checkpoint.format.manifest import MARKER as MARKER
    from holdfast.checkpoint.format.manifest import MAX_MANIFEST_BYTES as MAX_MANIFEST_BYTES
    from holdfast.checkpoint.format.manifest import METADATA as METADATA
    from holdfast.checkpoint.format.manifest import OF_THE_JOB as OF_THE_JOB
    from holdfast.checkpoint.format.manifest import PARTS as PARTS
    from holdfast.checkpoint.format.manifest import STAGING as STAGING
    from holdfast.checkpoint.format.manifest import TRASH as TRASH
    from holdfast.checkpoint.format.manifest import CheckpointName as CheckpointName
    from holdfast.checkpoint.format.manifest import CheckpointRoot as CheckpointRoot
    from holdfast.checkpoint.format.manifest import Chunk as Chunk
    from holdfast.checkpoint.format.manifest import Count as Count
    from holdfast.checkpoint.format.manifest import Digest as Digest
    from holdfast.checkpoint.format.manifest import FileEntry as FileEntry
    from holdfast.checkpoint.format.manifest import Manifest as Manifest
    from holdfast.checkpoint.format.manifest import ManifestError as ManifestError
    from holdfast.checkpoint.format.manifest import PartEntry as PartEntry
    from holdfast.checkpoint.format.manifest import Problem as Problem
    from holdfast.checkpoint.format.manifest import Proof as Proof
    from holdfast.checkpoint.format.manifest import Reason as Reason
    from holdfast.checkpoint.format.manifest import Versions as Versions
    from holdfast.checkpoint.format.manifest import Windows as Windows
    from holdfast.checkpoint.format.manifest import World as World
    from holdfast.checkpoint.format.manifest import derive_id as derive_id
    from holdfast.checkpoint.format.manifest import digest_bytes as digest_bytes
    from holdfast.checkpoint.format.manifest import is_safe_path as is_safe_path
    from holdfast.checkpoint.format.manifest import is_url as is_url
    from holdfast.checkpoint.format.manifest import parse_name as parse_name
    from holdfast.checkpoint.format.manifest import read as read
    from holdfast.checkpoint.format.manifest import saver_of as saver_of
    from holdfast.checkpoint.format.metadata import MetadataError as MetadataError
    from holdfast.checkpoint.format.metadata import Offsets as Offsets
    from holdfast.checkpoint.format.metadata import StorageEntry as StorageEntry
    from holdfast.checkpoint.format.metadata import StorageKey as StorageKey
    from holdfast.checkpoint.format.metadata import StoredMetadata as StoredMetadata
    from holdfast.checkpoint.format.metadata import show_key as show_key
    from holdfast.checkpoint.format.metadata import unpickle as unpickle
    from holdfast.checkpoint.format.shards import Frame as Frame
    from holdfast.checkpoint.format.shards import Frames as Frames
    from holdfast.checkpoint.format.shards import check_size as check_size
    from holdfast.checkpoint.format.shards import plain as plain
    from holdfast.checkpoint.format.shards import write_shards as write_shards
    from holdfast.checkpoint.format.structure import ALARM as ALARM
    from holdfast.checkpoint.format.structure import READ_SIZE as READ_SIZE
    from holdfast.checkpoint.format.structure import SIZE as SIZE
    from holdfast.checkpoint.format.structure import Inspection as Inspection
    from holdfast.checkpoint.format.structure import Progress as Progress
    from holdfast.checkpoint.format.structure import StorageWatch as StorageWatch
    from holdfast.checkpoint.format.structure import bad_chunks as bad_chunks
    from holdfast.checkpoint.format.structure import check_structure as check_structure
    from holdfast.checkpoint.format.structure import checkpoints_under as checkpoints_under
    from holdfast.checkpoint.format.structure import looks_like_checkpoint as looks_like_checkpoint
    from holdfast.checkpoint.format.structure import open_beneath as open_beneath
    from holdfast.checkpoint.format.structure import stream as stream
    from holdfast.checkpoint.format.structure import verify as verify
else:
    __getattr__ = offers(__name__)
