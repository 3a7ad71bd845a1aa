"""Loading one checkpoint into the tracked objects, verified, in one pass, at any number of ranks.

`load` reads and verifies everything this rank needs and puts the tensors in place; `LoadedState.apply` then
restores what is not a tensor. Between the two, the caller lets the group agree. A rank that fails a check
raises CheckpointError: the copy is bad and a lower rung may do. IncompleteStateError means that the script
and the checkpoint do not fit, which no other rung cures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from holdfast.base import local_part
from holdfast.checkpoint.choose.sharing import cure, reshard
from holdfast.checkpoint.choose.verifying_reader import VerifyingReader
from holdfast.checkpoint.copies import AssembledShards
from holdfast.checkpoint.format import METADATA, Manifest, ManifestError, MetadataError, as_torch
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.save import own_prefix
from holdfast.checkpoint.state import (
    GRADIENTS,
    OWN,
    LeftOut,
    OwnEntry,
    Tracked,
    check_parts,
    check_strict,
    flatten,
    from_blob,
    module,
    rank_key,
    to_be_tracked,
)
from holdfast.errors import CheckpointError, IncompleteStateError
from holdfast.journal.events import LoadTimes


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
        left_out: LeftOut | None = None,
        names: Sequence[str] = (),
        times: LoadTimes | None = None,
    ) -> None:
        self.times = times
        """Where the time went, of a load that digested what it read."""
        self.fresh = fresh
        """Parts that begin anew."""
        self.left_out = left_out if left_out is not None else LeftOut()
        """Of the `names` of all that has to be tracked, those that this rank does not track."""
        self.names = names
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


class Heads(NamedTuple):
    """The files of a checkpoint that are about all of it: with very many chunks they are large."""

    manifest: bytes
    metadata: bytes


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
    heads: Heads | None = None,
) -> LoadedState:
    """Load a committed checkpoint whose manifest has this digest.

    `needs_data`: whether the script has a data feed, None if that does not matter. What `fresh` names begins
    anew, and need not be in the checkpoint. With `shards` only the manifest and `.metadata` are in the
    directory; the shards come from wherever they are. `heads`: what is about the whole of it, if rank 0 has
    read that for all.
    """
    try:
        manifest, found, tables = manifests.read_lazily(directory, heads.manifest if heads else None)
    except ManifestError as error:
        raise CheckpointError(f"unreadable-manifest: {error}") from error
    if found != digest:
        raise CheckpointError(
            f"altered holdfast.json: its digest is {found}; {digest} was committed under this name"
        )
    opened = shards.open if shards is not None else None
    reader = VerifyingReader(directory, manifest, opened, tables, heads.metadata if heads else None)
    metadata = reader.read_metadata()
    notes: list[str] = []
    plain: list[str] = []
    left: dict[str, list[int]] = {}
    as_saved = manifest.world.size == world
    if as_saved:
        blob = _read_blob(reader, metadata, rank)
        held = {name: one for name, one in tracked.held.items() if name not in fresh}
        gone = blob["tracked"].keys() - {*tracked.names(), *fresh}  # another rank may track it now
        as_saved = held.items() <= blob.get("held", held).items() and (world == 1 or not gone)
        if blob.get("laid", tracked.laid) != tracked.laid:
            as_saved = as_saved and not _own_shares(tracked, metadata)
    if as_saved:
        others, own = blob["tracked"], blob["own"]
        there = set(others)
    else:
        # Other ranks, or as many that hold other parts than they did.
        _refuse_other_tensors(tracked, metadata, manifest.world.size, world)
        blobs = [_read_blob(reader, metadata, saved) for saved in range(manifest.world.size)]
        if "data" in fresh:
            blobs = [{**blob, "own": {**blob["own"], "data": None}} for blob in blobs]
        shared = reshard(
            blobs,
            run=manifest.run,
            step=manifest.step,
            rank=rank,
            world=world,
            kinds={name: tracked.kind(name) for name in tracked.names() if name not in fresh},
            names=tracked.names_within(),
            generators=tracked.generator_names(),
            absent=tracked.absent(),
            same_size=manifest.world.size == world,
        )
        others, own, notes = shared.tracked, shared.own, shared.notes
        there = {name for blob in blobs for name in blob["tracked"]}
        left = {name: ranks for name, ranks in shared.left.items() if name.partition(".")[0] not in fresh}
        if manifest.world.size != world:  # else other ranks may have looked at nothing but their own
            plain = [name for name in shared.names if name.partition(".")[0] not in fresh]
    check_fresh(tracked, fresh, there=there)
    others = {name: part for name, part in others.items() if name not in fresh}
    check_parts([name for name in tracked.names() if name not in fresh], others)
    if "data" not in fresh:
        _check_data(own["data"], needs_data)
    seen = _own_instead(metadata, rank) if as_saved else metadata
    tensors = tracked.targets(others, seen)
    check_strict(tensors, seen, but=fresh)
    wanted = flatten(tensors)
    entries = to_be_tracked(metadata, but=fresh)
    names = [*entries, *plain]
    left_out = LeftOut.of({*left, *(name for name in entries if name not in wanted)}, names)
    if not as_saved and manifest.world.size == world:
        left_out = msgspec.structs.replace(left_out, saved_by=left)
    if fresh:
        notes = [*notes, f"{', '.join(sorted(fresh))}: begins anew, as checkpoint.fresh_parts says"]
        if any(name in fresh for name, _ in tracked.named_optimizers()):
            own = {key: part for key, part in own.items() if key != "gradients"}  # they are for its next step
    gradients = own.get("gradients")
    if gradients is not None:
        tensors[GRADIENTS] = tracked.gradients.targets(gradients, seen)
        if not as_saved:
            _refuse_gradients_of_ranks(metadata, manifest.world.size, world)
    wanted = flatten(tensors)  # with the gradients
    _load_tensors(_own_first(wanted, metadata, rank) if as_saved else wanted, reader)
    rest = reader.shard_paths()[rank::world] if shards is None else shards.rest(manifest.world.size)
    reader.verify_rest(rest)
    return LoadedState(
        tracked, tensors, others, own, manifest, notes, fresh, left_out, names, reader.times.as_elapsed()
    )


def check_fresh(tracked: Tracked, fresh: Collection[str], *, there: Collection[str]) -> None:
    """A part that begins anew must be tracked, or be one that only the checkpoint has."""
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
            "with its first batch. To allow that, if checkpoint.resume_from names what the run begins with, "
            "set checkpoint.fresh_parts = 'data'"
        )
    raise IncompleteStateError(
        "the checkpoint holds a data position; this script has no data feed. Pass the loader to run.steps() "
        "or run.feed(), as before; or to drop the position, if checkpoint.resume_from names what the run "
        "begins with, set checkpoint.fresh_parts = 'data'"
    )


def _refuse_gradients_of_ranks(metadata: Metadata, was: int, world: int) -> None:
    for key in metadata.state_dict_metadata:
        if key.startswith(f"{OWN}.own_") and f".{GRADIENTS}." in key:
            name = key.partition(f".{GRADIENTS}.")[2]
            raise IncompleteStateError(
                f"the accumulated gradient {name} differs between the {was} ranks that saved it, so it "
                f"cannot be shared out. {cure(was, world)}"
            )


def _refuse_other_tensors(tracked: Tracked, metadata: Metadata, was: int, world: int) -> None:
    """Of tensors that differed between ranks, only the lowest rank's has the plain name (save/plan.py)."""
    own = [key for key in metadata.state_dict_metadata if key.startswith(f"{OWN}.own_")]
    names = {key.split(".", 2)[2]: int(key.split(".", 2)[1].removeprefix("own_")) for key in reversed(own)}
    refused = sorted(
        name for name in names.keys() - tracked.lowest(names) if not name.startswith(f"{GRADIENTS}.")
    )
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise IncompleteStateError(
            f"{refused[0]}{more} differs between the {was} ranks that saved it: rank {names[refused[0]]} has "
            f"one of its own. Nothing says of which whole these are parts, so {world} ranks cannot share "
            f"them out. {cure(was, world)}; for checkpoints from then on, declare how they are divided: "
            f"run.track(layout={{{refused[0]!r}: holdfast.Split(group, dimension)}}). If every rank may take "
            f"the lowest rank's: layout={{{refused[0]!r}: 'lowest'}}"
        )


def _own_first(wanted: dict[str, torch.Tensor], metadata: Metadata, rank: int) -> dict[str, Any]:
    """The entries to load: this rank's own version of a tensor where one was stored (see save/plan.py)."""
    own = {name: key for name in wanted if (key := own_prefix(rank) + name) in metadata.state_dict_metadata}
    found: dict[str, Any] = {name: tensor for name, tensor in wanted.items() if name not in own}
    for name, key in own.items():
        found[key] = local_part(wanted[name]) if isinstance(wanted[name], DTensor) else wanted[name]
    return found


def _own_shares(tracked: Tracked, metadata: Metadata) -> bool:
    """Whether ranks stored shares of distributed tensors for themselves, or what belongs to these."""
    own = [key for key in metadata.state_dict_metadata if key.startswith(f"{OWN}.own_")]
    names = {name.partition(".")[2] for name in tracked.distributed} if own else set()
    return any(f".{name}." in f"{key}." for key in own for name in names)


def _own_instead(metadata: Metadata, rank: int) -> Metadata:
    """The metadata as this rank will read it: its own version of a tensor may have a different shape."""
    prefix = own_prefix(rank)
    entries = metadata.state_dict_metadata
    own = {
        key.removeprefix(prefix): OwnEntry(entry.properties, entry.size, entry.chunks)
        for key, entry in entries.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
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

    For our own checkpoints DCP is left only what is stored in parts, because it is slow over each entry.
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
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            if isinstance(reader, VerifyingReader):
                stack.enter_context(reader.planning(rest))
            dcp_load(rest, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise cause from error


class StockReader(FileSystemReader):
    """torch's reader, but for `.metadata`, which is read as data: nothing in it is ever executed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        try:
            found = as_torch(metadatas.read(Path(self.path)))
        except MetadataError as error:
            raise CheckpointError(f"malformed {METADATA}: {error}") from error
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


def load_stock(
    directory: Path, tracked: Tracked, *, needs_data: bool = False, fresh: Collection[str] = ()
) -> LoadedState:
    """Load a plain DCP directory, asked for by name: it has no digests, so nothing vouches for its bytes.

    Models must be there in full, and so must everything else that `fresh` does not name. The caller has
    checked the directory's completeness without unpickling it.
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
    text = f"{directory} is a plain DCP directory and "
    if missing:
        text += (
            f"does not hold {', '.join(missing)}: training would go on with "
            f"{'them' if len(missing) > 1 else 'it'} as at a first start"
        )
    if unknown:
        text += (
            f"{', and it ' if missing else ''}holds {', '.join(unknown)}, an optimizer's state, which is "
            f"not tracked, so this resume would begin it anew: add run.track({unknown[0]}=…), the name that "
            "it has there, before the first step"
        )
    return f"{text}. If that is intended, say so: checkpoint.fresh_parts = {word!r}"


def _stock_targets(tracked: Tracked, metadata: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors to read into, all else) by part, for a plain DCP directory. For a part that is in neither
    nothing can be read, and it is not touched: a schedule, or an optimizer without tensors there."""
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
