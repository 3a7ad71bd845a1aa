"""What a checkpoint is on disk: manifest, layout, digests and fingerprints, and how all of it is judged.

For whoever writes, reads or judges checkpoint directories; most of it works without torch.
Promises: every byte is covered by a digest; older releases' checkpoints are read; nothing stored is
executed.
Never: write to a checkpoint that it looks at, or follow a link out of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.format import fingerprint, manifest, metadata
    from holdfast.checkpoint.format.failures import (
        FAILURES,
        about,
        describe,
        explain,
        naming,
        needs_more_than_a_fork,
        raise_for_all,
        save_failed,
        together,
    )
    from holdfast.checkpoint.format.layout import (
        READ_SLICE,
        WRITE_BACK,
        Declared,
        Item,
        Layout,
        OpenShard,
        Shard,
        ShardFile,
        ShardSource,
        check_placeholder,
        cut,
        placeholder,
        read_at,
        start_write_back,
        table_digest,
        torn,
    )
    from holdfast.checkpoint.format.manifest import (
        FORMAT,
        LATEST,
        MANIFEST,
        MARKER,
        MAX_MANIFEST_BYTES,
        METADATA,
        OF_THE_JOB,
        PARTS,
        STAGING,
        TRASH,
        CheckpointName,
        CheckpointRoot,
        Chunk,
        Count,
        Digest,
        FileEntry,
        Manifest,
        ManifestError,
        PartEntry,
        Problem,
        Proof,
        Reason,
        Versions,
        Windows,
        World,
        derive_id,
        digest_bytes,
        is_safe_path,
        is_url,
        memory_to_spare,
        parse_name,
        read,
        saver_of,
    )
    from holdfast.checkpoint.format.metadata import (
        Chunks,
        MetadataError,
        Offsets,
        StorageEntry,
        StorageKey,
        StoredChunks,
        StoredMetadata,
        TensorEntry,
        as_torch,
        parse,
        show_key,
    )
    from holdfast.checkpoint.format.pickled import Name, PickleRefusedError, Record, Vocabulary, read_pickle
    from holdfast.checkpoint.format.shards import ArchiveFrame, Frames, check_size, plain, write_shards
    from holdfast.checkpoint.format.structure import (
        READ_SIZE,
        Inspection,
        Progress,
        bad_chunks,
        check_structure,
        checkpoints_under,
        looks_like_checkpoint,
        open_beneath,
        stream,
        verify,
    )
else:
    __getattr__ = offers(__name__)
