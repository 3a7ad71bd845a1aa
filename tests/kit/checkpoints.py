"""Builds small, real checkpoints: stock DCP writes them, a manifest with true digests seals them."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    CheckpointName,
    Chunk,
    FileEntry,
    Manifest,
    PartEntry,
    Versions,
    World,
)

STEP, ID, RUN = 120, "3fa9c1d2", "run-a"


def small_state(seed: int = 0, width: int = 8) -> dict[str, Any]:
    """Tensors of several dtypes and shapes (one empty, one without dimensions), and plain objects."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(4, width, generator=generator),
            "half": torch.ones(3, dtype=torch.bfloat16) * seed,
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(seed),
        },
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4, width)}}, "groups": [{"lr": 0.1}]},
        "step": seed,
    }


def save_stock(directory: Path, state: dict[str, Any] | None = None) -> Path:
    """A plain DCP directory, without a manifest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming the intent is to save in a single process"
        dcp.save(small_state() if state is None else state, checkpoint_id=directory, no_dist=True)
    return directory


def list_file(directory: Path, path: str, chunks: list[tuple[int, int]] | None = None) -> FileEntry:
    data = (directory / path).read_bytes()
    return FileEntry(
        path=path,
        size=len(data),
        digest=manifests.digest_bytes(data),
        chunks=[Chunk(o, n, manifests.digest_bytes(data[o : o + n])) for o, n in sorted(chunks or [])],
    )


def seal(directory: Path, *, step: int = STEP, id: str = ID, **changes: Any) -> Manifest:
    """Write the manifest of what lies in `directory`."""
    stored: dict[str, list[tuple[int, int]]] = {}
    for info in pickle.loads((directory / METADATA).read_bytes()).storage_data.values():
        stored.setdefault(info.relative_path, []).append((info.offset, info.length))
    names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    fields: dict[str, Any] = {
        "format": manifests.FORMAT,
        "id": id,
        "step": step,
        "parent": None,
        "run": RUN,
        "attempt": 1,
        "epoch": 1,
        "created": 1_700_000_000.0,
        "world": World(size=1),
        "parts": {"model": PartEntry(kind="model")},
        "files": [list_file(directory, name, stored.get(name)) for name in names if name != MANIFEST],
        "versions": Versions(holdfast="0", torch=str(torch.__version__), python="3"),
    }
    manifest = Manifest(**(fields | changes))
    (directory / MANIFEST).write_bytes(manifests.encode(manifest)[0])
    return manifest


def make_checkpoint(
    root: Path, *, step: int = STEP, id: str = ID, state: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A committed checkpoint under `root`, as a reader finds it."""
    directory = save_stock(root / str(CheckpointName(step, id)), state)
    seal(directory, step=step, id=id, **changes)
    return directory
