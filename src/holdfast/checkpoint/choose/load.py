"""Loading one checkpoint into the tracked objects, verified, in one pass, at any number of ranks.

`load` reads and verifies everything this rank needs and puts the tensors in place; `LoadedState.apply` then
restores what is not a tensor. The caller lets the group agree between the two. A rank that fails a check
raises CheckpointError: the copy is bad and a lower rung may do. IncompleteStateError means that the script
and the checkpoint do not fit, which no other rung cures.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader

from holdfast.base import read_regular
from holdfast.checkpoint.choose.verifying_reader import VerifyingReader
from holdfast.checkpoint.copies import AssembledShards
from holdfast.checkpoint.format import METADATA, Manifest, ManifestError, MetadataError, unpickle
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.save import own_prefix
from holdfast.checkpoint.state import (
    GRADIENTS,
    OWN,
    Tracked,
    check_parts,
    check_strict,
    first_difference,
    flatten,
    from_blob,
    module,
    rank_key,
)
from holdfast.errors import CheckpointError, IncompleteStateError

# The per-rank parts of a checkpoint at another world size, by stated rules.
#
# Tensors of models and optimizers reshard by themselves: DCP stores them under global names and offsets. For
# what each rank stored of its own:
#
# * tracked objects (schedules, scalers, hyper-parameters) must be the same on all ranks that saved them;
# every   rank of the new world gets that state. One that differs between ranks cannot be shared out: refused.
# * tensors that differed between ranks go on everywhere as the lowest rank's.
# * the data position must be a global one (see train/data/loaders.py), the same on all ranks: refused
# otherwise,   because samples would be repeated or left out silently.
# * gradients that lie there must be the same on all ranks, or sharded ones: refused otherwise.
# * random generators are seeded anew, from run, step, rank and world size.
# * samples and tokens are counted per rank; the ranks of the new world share out their totals.


def reshard(
    blobs: Sequence[dict[str, Any]], *, run: str, step: int, rank: int, world: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(tracked state, Holdfast's own state, what was done in words) for one rank of the new world."""
    was = len(blobs)
    tracked = blobs[0]["tracked"]
    for other, blob in enumerate(blobs[1:], start=1):
        where = first_difference(tracked, blob["tracked"], "")
        if where:
            raise IncompleteStateError(
                f"{where.lstrip('.')} differs between ranks 0 and {other} of the {was} that saved it, so it "
                f"cannot be shared out to {world}. Resume with {was} ranks"
            )
    own = {
        "counters": _share_counters([blob["own"]["counters"] for blob in blobs], rank, world),
        "data": _share_position([blob["own"]["data"] for blob in blobs], world),
        "rng": {"seed": int(xxhash.xxh3_64_hexdigest(f"{run}/{step}/{rank}/{world}".encode())[:15], 16)},
    }
    if (left := blobs[0]["own"].get("gradients")) is not None:
        own["gradients"] = _share_gradients(left, [blob["own"].get("gradients") for blob in blobs], world)
    return tracked, own, [f"{was} ranks saved this, {world} resume it: random generators are seeded anew"]


def _share_gradients(first: dict[str, Any], all_of_them: Sequence[Any], world: int) -> dict[str, Any]:
    entries = first["entries"]
    own = {name for name, entry in entries.items() if entry["kind"] == "local" or name.endswith(".unsharded")}
    alike = all(other is not None and other["entries"] == entries for other in all_of_them)
    if own or first["objects"] or not alike:
        name = min(own | first["objects"].keys(), default="some")
        raise IncompleteStateError(
            f"gradients that {len(all_of_them)} ranks have accumulated on their own cannot be shared out to "
            f"{world} ({name}). Resume with {len(all_of_them)} ranks"
        )
    return {**first, "unsynced": []}


def _share_counters(counters: Sequence[dict[str, int]], rank: int, world: int) -> dict[str, int]:
    shared = {"step": counters[0]["step"]}
    for name in ("samples", "tokens"):
        total = sum(count[name] for count in counters)
        shared[name] = total // world + (rank < total % world)
    return shared


def _share_position(positions: Sequence[dict[str, Any] | None], world: int) -> dict[str, Any] | None:
    first = positions[0]
    if first is None and all(position is None for position in positions):
        return None
    if first is None or not all(position is not None and position.get("is_global") for position in positions):
        raise IncompleteStateError(
            f"the data position of {len(positions)} ranks cannot be shared out to {world}: this loader keeps "
            "one per rank, and samples would be repeated or left out. Use holdfast.GlobalBatches, whose "
            f"position is a global one, or resume with {len(positions)} ranks"
        )
    if any(position["loader"] != first["loader"] for position in positions if position is not None):
        raise IncompleteStateError("the ranks' global data positions differ; the loaders were not used alike")
    return first


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
        fresh: Collection[str] = (),
    ) -> None:
        self.fresh = fresh
        """Parts that begin anew."""
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
        if (left := self.own.get("gradients")) is not None:
            self._tracked.gradients.apply(left, self._tensors[GRADIENTS])


def load(
    directory: Path,
    digest: str,
    tracked: Tracked,
    rank: int,
    world: int,
    *,
    shards: AssembledShards | None = None,
    needs_data: bool | None = None,
    fresh: Collection[str] = (),
) -> LoadedState:
    """Load a committed checkpoint whose manifest has this digest.

    `needs_data`: whether the script has a data feed, None if that is nobody's concern. What `fresh` names
    begins anew, and need not be there. With `shards` only the manifest and `.metadata` are in the directory;
    the shards come from where they are.
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
        if "data" in fresh:
            blobs = [{**blob, "own": {**blob["own"], "data": None}} for blob in blobs]
        others, own, notes = reshard(blobs, run=manifest.run, step=manifest.step, rank=rank, world=world)
    check_fresh(tracked, fresh, there=others)
    others = {name: part for name, part in others.items() if name not in fresh}
    check_parts([name for name in tracked.names() if name not in fresh], others)
    if "data" not in fresh:
        _check_data(own["data"], needs_data)
    seen = _own_instead(metadata, rank) if same_world else metadata
    tensors = tracked.targets(others, seen)
    check_strict(tensors, seen, but=fresh)
    if fresh:
        notes = [*notes, f"{', '.join(sorted(fresh))}: begins anew, as checkpoint.fresh_parts says"]
        if any(name in fresh for name, _ in tracked.named_optimizers()):
            own = {key: part for key, part in own.items() if key != "gradients"}  # they are for its next step
    left = own.get("gradients")
    if left is not None:
        tensors[GRADIENTS] = tracked.gradients.targets(left, seen)
        if not same_world:
            _refuse_gradients_of_ranks(metadata, manifest.world.size)
    wanted = flatten(tensors)
    _load_tensors(_own_first(wanted, metadata, rank) if same_world else wanted, reader)
    rest = reader.shard_paths()[rank::world] if shards is None else shards.rest(manifest.world.size)
    reader.verify_rest(rest)
    return LoadedState(tracked, tensors, others, own, manifest, notes, fresh)


def check_fresh(tracked: Tracked, fresh: Collection[str], *, there: Collection[str]) -> None:
    """What is to begin anew has to be tracked, or to be in the checkpoint and of no concern."""
    if unknown := sorted(set(fresh) - {*tracked.names(), "data", *there}):
        raise IncompleteStateError(
            f"checkpoint.fresh_parts names {', '.join(unknown)}; this script tracks "
            f"{', '.join(tracked.names())}. Name some of these, or data for the position in the data"
        )
    if weights := [name for name, _ in tracked.models() if name in fresh]:
        raise IncompleteStateError(
            f"checkpoint.fresh_parts names {weights[0]}, a model: without its weights there is nothing to "
            "resume from. Leave it out, or start with resume_from = 'fresh'"
        )


def _check_data(position: dict[str, Any] | None, needs_data: bool | None) -> None:
    if needs_data is None or needs_data == (position is not None):
        return
    if needs_data:
        raise IncompleteStateError(
            "the checkpoint holds no data position, and this script has a data feed, which would begin again "
            "with its first batch. To let it, where checkpoint.resume_from names what the run begins with: "
            "checkpoint.fresh_parts = 'data'"
        )
    raise IncompleteStateError(
        "the checkpoint holds a data position; this script has no data feed. Pass the loader to run.steps() "
        "or run.feed(), as before; or leave the position, where checkpoint.resume_from names what the run "
        "begins with: checkpoint.fresh_parts = 'data'"
    )


def _refuse_gradients_of_ranks(metadata: Metadata, was: int) -> None:
    for key in metadata.state_dict_metadata:
        if key.startswith(f"{OWN}.own_") and f".{GRADIENTS}." in key:
            name = key.partition(f".{GRADIENTS}.")[2]
            raise IncompleteStateError(
                f"the accumulated gradient {name} differs between the {was} ranks that saved it, so it "
                f"cannot be shared out. Resume with {was} ranks"
            )


def _own_first(wanted: dict[str, torch.Tensor], metadata: Metadata, rank: int) -> dict[str, Any]:
    """The entries to load: this rank's own version of a tensor where one was stored (see save/plan.py)."""
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


class StockReader(FileSystemReader):
    """torch's reader, but for `.metadata`: no class is made of it but those that metadata consists of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        try:
            found = unpickle(read_regular(Path(self.path) / METADATA, metadatas.MAX_METADATA_BYTES))
        except MetadataError as error:
            raise CheckpointError(f"malformed {METADATA}: {error}") from error
        if not isinstance(found, Metadata):
            raise CheckpointError(f"malformed {METADATA}: it describes no checkpoint")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def load_stock(
    directory: Path, tracked: Tracked, *, needs_data: bool = False, fresh: Collection[str] = ()
) -> LoadedState:
    """Load a plain DCP directory, asked for by name: it has no digests, so nothing vouches for its bytes.

    Models must be there in full, and so must be whatever else `fresh` does not name. The caller has checked
    the directory's completeness without unpickling it.
    """
    reader = StockReader(directory)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    parts = dict.fromkeys(key.partition(".")[0] for key in stored)
    check_fresh(tracked, fresh, there=parts)
    tensors, others = _stock_targets(tracked, metadata)
    for name, model in tracked.models():
        tensors[name] = module.targets(model, name, {}, metadata)
    notes = ["no digests: nothing vouches for these bytes"]
    missing_parts: list[str] = []
    for name in tracked.names():
        if name in fresh:
            tensors.pop(name, None)
            others.pop(name, None)
            notes.append(f"{name}: begins anew, as checkpoint.fresh_parts says")
            continue
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
            missing_parts.append(name)
    if needs_data and "data" not in fresh:
        missing_parts.append("data")
    strangers = [part for part in parts if part not in tracked.names() and part not in fresh]
    unknown = [part for part in strangers if _is_optimizer(part, stored)]
    if missing_parts or unknown:
        raise IncompleteStateError(_stock_misfit(directory, missing_parts, unknown, fresh))
    notes += [f"{part}: in the directory, and not tracked" for part in strangers]
    for key, tensor in flatten(tensors).items():
        entry = stored[key]
        if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.size():
            raise IncompleteStateError(f"{key}: {tuple(tensor.size())} tracked, the directory holds {entry}")
    _load_tensors(tensors, reader)
    notes.append("samples, RNG and data position are not in a plain DCP directory; the step is from its name")
    return LoadedState(tracked, tensors, others, {}, None, notes, fresh)


def _is_optimizer(part: str, stored: Collection[str]) -> bool:
    """Whether a part of a plain DCP directory looks like an optimizer's state."""
    return any(key.startswith((f"{part}.state.", f"{part}.param_groups")) for key in stored)


def _stock_misfit(
    directory: Path, missing: Sequence[str], unknown: Sequence[str], fresh: Collection[str]
) -> str:
    """What to say of a plain DCP directory that lacks tracked parts, or has optimizers that nobody tracks."""
    word = ",".join([*fresh, *missing, *unknown])
    told = f"{directory} is a plain DCP directory and "
    if missing:
        told += (
            f"does not hold {', '.join(missing)}: training would go on with "
            f"{'them' if len(missing) > 1 else 'it'} as at a first start"
        )
    if unknown:
        told += (
            f"{', and it ' if missing else ''}holds {', '.join(unknown)}, an optimizer's state, which is "
            f"not tracked, so this resume would begin it anew: add run.track({unknown[0]}=…), the name that "
            "it has there, before the first step"
        )
    return f"{told}. If that is meant, say so: checkpoint.fresh_parts = {word!r}"


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
