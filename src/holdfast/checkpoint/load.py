"""Loading one checkpoint into the tracked objects, verified, in one pass, without talking to other ranks.

`load` reads and verifies everything this rank needs and puts the tensors in place; `LoadedState.apply` then
restores what is not a tensor. The caller lets the group agree between the two. A rank that fails a check
raises CheckpointError: the copy is bad and a lower rung may do. IncompleteStateError means that the script
and the checkpoint do not fit, which no other rung cures.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint import module_state
from holdfast.checkpoint.adapters import flatten
from holdfast.checkpoint.assembled import AssembledShards
from holdfast.checkpoint.manifest import Manifest, ManifestError
from holdfast.checkpoint.planner import own_prefix
from holdfast.checkpoint.reader import VerifyingReader
from holdfast.checkpoint.reshard import reshard
from holdfast.checkpoint.state import (
    OWN,
    Tracked,
    check_parts,
    check_strict,
    from_blob,
    rank_key,
)
from holdfast.errors import CheckpointError, IncompleteStateError


class LoadedState:
    """Verified state of one rank: tensors are in place, the rest waits for `apply`."""

    def __init__(
        self,
        tracked: Tracked,
        tensors: dict[str, Any],
        others: dict[str, Any],
        own: dict[str, Any],
        manifest: Manifest | None,
        notes: list[str],
    ) -> None:
        self.notes = notes
        """What was done that a plain load would not do, in words."""
        self.manifest = manifest
        """None for a plain DCP directory."""
        self._tracked = tracked
        self._tensors = tensors
        self._others = others
        self.own = own
        """Holdfast's own parts: rng, data, counters."""

    def apply(self) -> None:
        self._tracked.apply(self._tensors, self._others)


def load(
    directory: Path,
    digest: str,
    tracked: Tracked,
    rank: int,
    world: int,
    *,
    shards: AssembledShards | None = None,
) -> LoadedState:
    """Load a committed checkpoint whose manifest has this digest.

    With `shards` only the manifest and `.metadata` are in the directory; the shards come from where they are.
    """
    try:
        manifest, found = manifests.read(directory)
    except ManifestError as error:
        raise CheckpointError(f"unreadable-manifest: {error}") from error
    if found != digest:
        raise CheckpointError(
            f"altered holdfast.json: its digest is {found}; {digest} was committed under this name"
        )
    reader = VerifyingReader(directory, manifest, shards.open if shards is not None else None)
    metadata = reader.read_metadata()
    notes: list[str] = []
    same_world = manifest.world.size == world
    if same_world:
        blob = _read_blob(reader, metadata, rank)
        others, own = blob["tracked"], blob["own"]
    else:
        blobs = [_read_blob(reader, metadata, saved) for saved in range(manifest.world.size)]
        others, own, notes = reshard(blobs, run=manifest.run, step=manifest.step, rank=rank, world=world)
    check_parts(tracked.names(), others)
    seen = _own_instead(metadata, rank) if same_world else metadata
    tensors = tracked.targets(others, seen)
    check_strict(tensors, seen)
    wanted = flatten(tensors)
    _load_tensors(_own_first(wanted, metadata, rank) if same_world else wanted, reader)
    rest = reader.shard_paths()[rank::world] if shards is None else shards.rest(manifest.world.size)
    reader.verify_rest(rest)
    return LoadedState(tracked, tensors, others, own, manifest, notes)


def _own_first(wanted: dict[str, torch.Tensor], metadata: Metadata, rank: int) -> dict[str, Any]:
    """The entries to load: this rank's own version of a tensor where one was stored (see planner.py)."""
    prefix = own_prefix(rank)
    there = metadata.state_dict_metadata
    return {prefix + name if prefix + name in there else name: tensor for name, tensor in wanted.items()}


def _own_instead(metadata: Metadata, rank: int) -> Metadata:
    """The metadata as this rank will read it: its own version of a tensor may have a shape of its own."""
    prefix = own_prefix(rank)
    entries = metadata.state_dict_metadata
    own = {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}
    return dataclasses.replace(metadata, state_dict_metadata={**entries, **own})


def _read_blob(reader: VerifyingReader, metadata: Metadata, rank: int) -> dict[str, Any]:
    key = f"{OWN}.{rank_key(rank)}"
    entry = metadata.state_dict_metadata.get(key)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"incomplete: {key} is missing; rank {rank} left no state in this checkpoint")
    holder = {OWN: {rank_key(rank): torch.empty(entry.size, dtype=torch.uint8)}}
    _load_tensors(holder, reader)
    blob = from_blob(holder[OWN][rank_key(rank)])
    if not isinstance(blob, dict) or not {"tracked", "own"} <= blob.keys():
        raise CheckpointError(f"incomplete: {key} does not hold a rank's state")
    return blob


def _load_tensors(state: dict[str, Any], reader: StorageReader) -> None:
    """DCP's load of exactly these entries, by this rank alone.

    Of a checkpoint of ours DCP is left only what is stored in parts: it takes its time over each entry.
    """
    flat = flatten(state)
    if not flat:
        return
    rest = reader.expect(flat) if isinstance(reader, VerifyingReader) else state
    if not rest:
        assert isinstance(reader, VerifyingReader)
        reader.read_expected()
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp_load(rest, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise cause from error


def load_stock(directory: Path, tracked: Tracked) -> LoadedState:
    """Load a plain DCP directory, asked for by name: it has no digests, so nothing vouches for its bytes.

    Models must be there in full. Whatever else the directory does not hold keeps its initial state; the
    notes say so. The caller has checked the directory's completeness without unpickling it.
    """
    reader = FileSystemReader(directory)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    tensors, others = _stock_targets(tracked, metadata)
    for name, model in tracked.models():
        tensors[name] = module_state.targets(model, name, {}, metadata)
    notes = ["no digests: nothing vouches for these bytes"]
    for name in tracked.names():
        wanted = flatten(tensors.get(name, {}), f"{name}.")
        there = [key for key in wanted if key in stored]
        if tracked.kind(name) == "model" and len(there) < len(wanted):
            missing = sorted(wanted.keys() - stored.keys())
            raise IncompleteStateError(
                f"{directory} lacks {len(missing)} tensors of {name}, first {missing[0]}. "
                f"It holds {sorted(stored)[:6]} …"
            )
        if not wanted:
            tensors.pop(name, None)
            if tracked.kind(name) != "model":
                others.pop(name, None)
            notes.append(f"{name}: not in the directory; it keeps its initial state")
    for key, tensor in flatten(tensors).items():
        entry = stored[key]
        if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.size():
            raise IncompleteStateError(f"{key}: {tuple(tensor.size())} tracked, the directory holds {entry}")
    _load_tensors(tensors, reader)
    notes.append("samples, RNG and data position are not in a plain DCP directory; the step is from its name")
    return LoadedState(tracked, tensors, others, {}, None, notes)


def _stock_targets(tracked: Tracked, metadata: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors to read into, all else) by part, for a plain DCP directory. Of a part that is in neither
    nothing can be read, and it is not touched: a schedule, an optimizer without tensors there."""
    tensors, others = tracked.collect()
    for name in tracked.names():
        if tracked.kind(name) == "model":
            continue
        found = tracked.stock_targets(name, metadata)
        if found is None:
            others.pop(name, None)
        else:
            tensors[name], others[name] = found
    return tensors, others
