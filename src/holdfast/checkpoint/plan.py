"""The plan of a save: who stores what, where. Made once, used until anything changes.

A plan is kept with a signature of the structure it was made for: every name with its kind, dtype, shape,
place in the whole and world layout. At every save each rank compares its own signature with the plan's; a
change on any rank makes all of them plan again. So a plan can never be used for a state that it does not
describe, and while nothing changes, nothing but a few summed integers is exchanged.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import metadata as metadatas
from holdfast.checkpoint.failures import FAILURES, about, describe
from holdfast.checkpoint.frames import Frame, Frames
from holdfast.checkpoint.layout import (
    Declared,
    Item,
    Layout,
    check_placeholder,
    cut,
    placeholder,
)
from holdfast.checkpoint.planner import Digests, SnapshotPlanner
from holdfast.checkpoint.sharing import Sharing, find_sharings
from holdfast.checkpoint.state import OWN
from holdfast.control.exchange import gather, scatter
from holdfast.control.group import Group
from holdfast.errors import SaveFailedError
from holdfast.torch_internals import StorageInfo


@dataclass(frozen=True)
class Plan:
    """One rank's part in every save of one structure."""

    number: int
    """Counts the plans of an attempt; the same on every rank."""
    signature: str
    items: list[WriteItem]
    frames: list[Frame]
    layout: Layout
    sharings: list[Sharing]
    """Those that this rank has a part in."""
    declared: Declared | None
    """On rank 0."""

    @functools.cached_property
    def names(self) -> list[str]:
        """Of the items."""
        return [item.index.fqn for item in self.items]

    @functools.cached_property
    def raw_places(self) -> list[tuple[int, int]]:
        """Where the items' own bytes are in the image, and how many."""
        return [(item.raw_offset, item.raw_length) for item in self.layout.items]


def signature_of(planner: SnapshotPlanner, world: int) -> str:
    """Of the structure, not the contents: what makes a plan fit."""
    state = planner.state_dict
    if set(map(type, state.values())) == {torch.Tensor}:  # the usual case, of which there may be very many
        try:
            kinds: Iterable[str] = map(_Kinds().__getitem__, map(_facts, state.values()))
            return _digest(world, state, list(kinds))
        except FAILURES:
            pass  # the slow way names the one that it was
    kinds = []
    for name, value in state.items():
        try:
            kinds.append(_kind(value))
        except FAILURES as error:
            raise about(name, error) from error
    return _digest(world, state, kinds)


def _digest(world: int, names: Iterable[str], kinds: Iterable[str]) -> str:
    lines = "\n".join(map("\t".join, zip(names, kinds, strict=True)))
    return xxhash.xxh3_128_hexdigest(f"{world}\n{lines}".encode())


_facts = operator.attrgetter("dtype", "shape", "layout", "requires_grad")


class _Kinds(dict[tuple[Any, ...], str]):
    """What `_kind` says of plain tensors; of many few differ."""

    def __missing__(self, facts: tuple[Any, ...]) -> str:
        self[facts] = found = _plain_kind(*facts)
        return found


def structure_of(planner: SnapshotPlanner) -> str:
    """The same of this rank's tracked tensors alone: what a proof that they resume holds for (proof.py)."""
    kinds = [
        f"{name}\t{_kind(value)}"
        for name, value in planner.state_dict.items()
        if not name.startswith(f"{OWN}.")
    ]
    return xxhash.xxh3_128_hexdigest("\n".join(kinds).encode())


def metadata_of(planner: SnapshotPlanner, plan: Plan) -> Metadata:
    """What `.metadata` says of the state: on rank 0 that itself, elsewhere what this rank has a part in."""
    if plan.declared is not None:
        found = pickle.loads(plan.declared.metadata)
        assert isinstance(found, Metadata)
        return found
    return Metadata(
        {
            name: TensorStorageMetadata(_properties(value), value.size(), [])
            for name, value in planner.state_dict.items()
            if isinstance(value, torch.Tensor)
        }
    )


def _properties(tensor: torch.Tensor) -> TensorProperties:
    """Not `create_from_tensor`: that asks a DTensor whether it is pinned, which torch 2.11 cannot answer."""
    return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad)


def _kind(value: object) -> str:
    if isinstance(value, DTensor):
        mesh, local = value.device_mesh, value.to_local()
        where = f"{value.placements} {tuple(mesh.mesh.shape)} {mesh.mesh.flatten().tolist()}"
        return (
            f"sharded {value.dtype} {tuple(value.shape)} {tuple(local.shape)} {value.requires_grad} {where}"
        )
    if isinstance(value, torch.Tensor):
        return _plain_kind(value.dtype, value.shape, value.layout, value.requires_grad)
    return f"other {type(value).__qualname__}"


def _plain_kind(dtype: object, shape: Iterable[int], layout: object, requires_grad: bool) -> str:
    return f"plain {dtype} {tuple(shape)} {layout} {requires_grad}"


def make_plan(
    group: Group, number: int, planner: SnapshotPlanner, signature: str, digests: Digests, frames: Frames
) -> Plan:
    """All ranks together, and all take part in every exchange, whatever went wrong on one of them.

    A failure before the last exchange is raised on every rank; one after it, on the rank that it befell.
    """
    local: bytes | str  # pickled here, where a failure can still be told
    try:
        local = pickle.dumps(planner.local_plan(digests))
    except FAILURES as error:
        if group.world_size == 1:
            raise
        local = f"rank {group.rank} could not plan its part of the save: {describe(error)}"
    plans = gather(group, local)
    replies: list[bytes | str] | None = None
    declared: Declared | None = None
    if plans is not None:
        try:
            made, declared = _plan_for_all(planner, [_require(plan) for plan in plans], frames)
            replies = [pickle.dumps(reply) for reply in made]
        except FAILURES as error:
            if group.world_size == 1:
                raise
            replies = [f"the save could not be planned: {describe(error)}"] * group.world_size
    reply = scatter(group, replies)
    if isinstance(reply, str):
        raise SaveFailedError(reply)
    mine, sharings = pickle.loads(reply)
    items = planner.finish_plan(mine).items
    layout, used = lay_out(items, group.rank, frames)
    return Plan(number, signature, items, used, layout, sharings, declared)


def _require(plan: bytes | str) -> SavePlan:
    if isinstance(plan, str):
        raise SaveFailedError(plan)
    return cast("SavePlan", pickle.loads(plan))


def _plan_for_all(
    planner: SnapshotPlanner, plans: list[SavePlan], frames: Frames
) -> tuple[list[tuple[SavePlan, list[Sharing]]], Declared]:
    sharings = find_sharings([plan.storage_data for plan in plans]) if len(plans) > 1 else []
    final, metadata = planner.create_global_plan(plans)
    layouts = [lay_out(plan.items, rank, frames)[0] for rank, plan in enumerate(final)]
    _check_all_is_laid_out(metadata, final)
    metadata.storage_data = {
        item.index: StorageInfo(shard.path, place.offset - shard.start, place.length)
        for plan, layout in zip(final, layouts, strict=True)
        for shard in layout.shards
        for item, place in zip(plan.items[shard.first :], layout.items_of(shard), strict=False)
    }
    metadata.version = "1.0.0"
    metadata.storage_meta = StorageMeta(checkpoint_id=placeholder())
    data = pickle.dumps(metadata)
    check_placeholder(data)
    metadatas.parse(data)  # what our own reader would refuse at a resume must fail now
    declared = Declared([layout.declared() for layout in layouts], data)
    replies = [(plan, [s for s in sharings if rank in s.ranks]) for rank, plan in enumerate(final)]
    return replies, declared


def lay_out(items: Sequence[WriteItem], rank: int, frames: Frames) -> tuple[Layout, list[Frame]]:
    """Pure: the image of a rank that stores these items, in their order."""
    places: list[Item] = []
    used: list[Frame] = []
    at = 0
    for item in items:
        if item.tensor_data is None:
            raise SaveFailedError(f"{item.index.fqn} is not a tensor; only tensors are stored by name")
        frame = frames.of(item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))
        places.append(Item(item.index.fqn, at, frame.length, at + len(frame.before), frame.raw))
        used.append(frame)
        at += frame.length
    return cut(rank, places), used


def _check_all_is_laid_out(metadata: Metadata, plans: Sequence[SavePlan]) -> None:
    """Everything that `.metadata` declares is stored by exactly one rank."""
    stored = [item.index for plan in plans for item in plan.items]
    found = {MetadataIndex(index.fqn, index.offset) for index in stored}
    if len(found) != len(stored):
        twice = next(index for index in stored if stored.count(index) > 1)
        raise SaveFailedError(f"{twice.fqn} at {twice.offset} would be stored twice")
    for name, entry in metadata.state_dict_metadata.items():
        offsets = [c.offsets for c in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        for offset in offsets:
            if MetadataIndex(name, offset) not in found:
                raise SaveFailedError(f"{name} at {offset} was declared but no rank would store it")
