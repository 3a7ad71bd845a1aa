"""Writing one rank's shards straight from live tensors, digesting them in the same pass.

This is how a save without background writing stores its bytes; the files it leaves are the same, byte for
byte, as those that a writer process makes from a staged snapshot (see image.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from holdfast.checkpoint import fingerprint as fingerprints
from holdfast.checkpoint.digesting import DigestingFile
from holdfast.checkpoint.failures import FAILURES, about
from holdfast.checkpoint.layout import Item, Shard, torn
from holdfast.checkpoint.manifest import FileEntry
from holdfast.errors import SaveFailedError, TornSnapshotError

if TYPE_CHECKING:
    from holdfast.checkpoint.plan import Plan  # which plans what is tracked, and so builds on this


def write_shards(
    directory: Path, plan: Plan, tensors: Sequence[torch.Tensor], prints: Sequence[str]
) -> list[FileEntry]:
    """Write, digest and fsync; the files there are now, which is none for a rank with nothing to store."""
    return [_write_one(directory, plan, shard, tensors, prints) for shard in plan.layout.shards]


def _write_one(
    directory: Path, plan: Plan, shard: Shard, tensors: Sequence[torch.Tensor], prints: Sequence[str]
) -> FileEntry:
    with DigestingFile(directory / shard.path) as file:
        for at in range(shard.first, shard.first + shard.count):
            item, frame = plan.layout.items[at], plan.frames[at]
            try:
                raw = host_bytes(tensors[at])
            except FAILURES as error:
                raise about(item.name, error) from error
            check_size(item, raw.nbytes)
            if not fingerprints.matches(raw, prints[at]):
                raise TornSnapshotError(torn(item.name))
            file.begin_chunk()
            file.write(frame.before)
            file.write(raw)
            file.write(frame.after)
            file.end_chunk(prints[at])
        return file.finish()


def check_size(item: Item, found: int) -> None:
    if item.raw_length != found:
        raise SaveFailedError(f"{item.name} has {found} bytes, {item.raw_length} were planned")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own elements, contiguous, as plain bytes that say all by themselves; on its device.

    A lazy conjugate or negative keeps its sign in a flag beside the bytes, unseen by a reader of the bytes.
    """
    if type(tensor) is not torch.Tensor:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    raw = plain(tensor)
    return raw.cpu().numpy().data if raw.numel() else memoryview(b"")
