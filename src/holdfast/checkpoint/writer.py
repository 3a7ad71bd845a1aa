"""Writing one rank's shard straight from live tensors, digesting it in the same pass.

This is how a save without background writing stores its bytes; the file it leaves is the same, byte for byte,
as the one that a writer process makes from a staged snapshot (see image.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from holdfast.checkpoint import fingerprint as fingerprints
from holdfast.checkpoint.digesting import DigestingFile
from holdfast.checkpoint.layout import Layout, torn
from holdfast.checkpoint.manifest import FileEntry
from holdfast.checkpoint.plan import Plan
from holdfast.errors import SaveFailedError, TornSnapshotError


def write_shard(
    directory: Path, plan: Plan, tensors: Sequence[torch.Tensor], prints: Sequence[str]
) -> list[FileEntry]:
    """Write, digest and fsync; the files there are now, which is none for a rank with nothing to store."""
    if not plan.items:
        return []
    with DigestingFile(directory / plan.layout.path) as file:
        places = zip(plan.layout.items, plan.frames, tensors, prints, strict=True)
        for item, frame, tensor, expected in places:
            raw = host_bytes(tensor)
            check_size(plan.layout, item.name, item.raw_length, raw.nbytes)
            if not fingerprints.matches(raw, expected):
                raise TornSnapshotError(torn(item.name))
            file.begin_chunk()
            file.write(frame.before)
            file.write(raw)
            file.write(frame.after)
            file.end_chunk(expected)
        return [file.finish()]


def check_size(layout: Layout, name: str, expected: int, found: int) -> None:
    if expected != found:
        raise SaveFailedError(f"{layout.path}: {name} has {found} bytes, {expected} were planned")


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
