"""The plan of a save: who stores what, and where. Made once, used until anything changes.

A plan is kept with a signature of the structure it was made for: every name with its kind, dtype, shape,
place in the whole and world layout. At every save each rank compares its own signature with the plan's; a
change on any rank makes all of them plan again. So a plan can never be used for a state that it does not
describe, and as long as nothing changes, only a few summed integers are exchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from holdfast.base import StorageInfo, create_write_items, flatten_state_dict, has_bytes, local_part
from holdfast.checkpoint.format import (
    FAILURES,
    METADATA,
    ArchiveFrame,
    Declared,
    Frames,
    Item,
    Layout,
    ManifestError,
    MetadataError,
    PartEntry,
    about,
    as_torch,
    check_placeholder,
    cut,
    describe,
    naming,
    placeholder,
)
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.state import OWN, SplitTensor, contents
from holdfast.errors import SaveFailedError
from holdfast.record import Group, gather, scatter

# Which tensors several ranks hold alike, and whether they still do.
#
# One rank stores such a tensor for all. That is right only while their copies are alike, so every save checks
# it: each rank adds one number to a sum over all ranks, and the sum is zero if nothing has drifted apart. For
# each set of ranks that share some tensors, their digests are weighted with random coefficients that add up
# to zero, so that a difference between them goes unseen about once in 2^60.


class Sharing(msgspec.Struct, frozen=True):
    """Names that exactly these ranks hold alike."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]


def find_sharings(digests: Sequence[Mapping[str, str]]) -> list[Sharing]:
    """Pure: from every rank's digests by name, who shares what with the lowest rank that has it."""
    holders: dict[str, list[int]] = {}
    first: dict[str, str] = {}
    for rank, mine in enumerate(digests):
        for name, digest in mine.items():
            if first.setdefault(name, digest) == digest:
                holders.setdefault(name, []).append(rank)
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in sorted(holders.items()):
        if len(ranks) > 1:
            by_ranks.setdefault(tuple(ranks), []).append(name)
    return [Sharing(ranks, tuple(names)) for ranks, names in by_ranks.items()]


class Share(msgspec.Struct, frozen=True):
    """One rank's part in a sharing: all that it has to know of it, however many ranks share."""

    names: tuple[str, ...]
    coefficient: int


def share_out(sharings: Sequence[Sharing], world: int) -> list[list[Share]]:
    """Pure: every rank's parts. The coefficients of a sharing add up to nothing."""
    shares: list[list[Share]] = [[] for _ in range(world)]
    for sharing in sharings:
        *others, last = sharing.ranks
        for rank in others:
            shares[rank].append(Share(sharing.names, _odd(rank)))
        shares[last].append(Share(sharing.names, -sum(map(_odd, others)) % (1 << 64)))
    return shares


def term(shares: Sequence[Share], digests: Mapping[str, str]) -> int:
    """What this rank adds to the sum; all terms add up to 0 modulo 2^64 if ranks still hold the same."""
    total = 0
    for share in shares:
        contents = xxhash.xxh3_64_intdigest("".join(digests[name] for name in share.names).encode())
        total += share.coefficient * contents
    return total % (1 << 64)


def _odd(rank: int) -> int:
    return xxhash.xxh3_64_intdigest(rank.to_bytes(8, "little")) | 1


# DCP's save planner, made safe for tensors that share a name but not their contents.
#
# When several ranks hold a plain tensor under one name, DCP takes it to be replicated and stores one rank's,
# whichever has the least to write. That is right for the parameters under DDP and wrong for whatever ranks
# change on their own, such as BatchNorm's running statistics: on resume, every rank would get some other
# rank's. So each rank sends a digest of every plain tensor along with its plan; where they differ, the lowest
# rank's is stored under the name itself and each other rank's beside it, as `holdfast.own_<rank>.<name>`, for
# that rank.
#
# A distributed tensor says which ranks hold it together. Where others hold one under the same name (experts
# that each have ranks of their own to be sharded over), DCP takes all of them for one tensor, too. Such names
# are found when a plan is made, and only then are digests taken of them: what is not the same as with the
# lowest rank is stored beside it in the same way, as the plain share that the rank holds.


Digests = Mapping[str, str]
"""By name, or by name and offsets of what is a part of a larger tensor."""
Compare = Callable[[frozenset[str]], Digests]
"""Takes the digests of distributed tensors of these names, too."""
_requires_grad = operator.attrgetter("requires_grad")


def own_prefix(rank: int) -> str:
    return f"{OWN}.own_{rank:05d}."


class Holdings(NamedTuple):
    """What a rank says of its tensors along with its plan, so that those of several ranks can be compared."""

    digests: Digests
    """With type and shape: the same bytes may be another tensor."""
    families: Mapping[str, str]
    """By name of a distributed tensor: tells which ranks hold it together, and its whole."""
    compared: Mapping[str, str] = {}
    """By key in `digests`: the name of the distributed tensor of which that is this rank's share."""

    def has(self, name: str) -> bool:
        return name in self.families or name in self.digests


class SnapshotPlanner(DefaultSavePlanner):
    """Plans one state dict. `digests` throughout are those of its plain tensors."""

    def __init__(self, state: dict[str, Any], rank: int, *, is_coordinator: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=False)
        self.differing: list[str] = []
        """On the coordinator, once all have planned: names of what ranks hold differently."""
        self.contested = frozenset[str]()
        """Names of distributed tensors that not all ranks which have one hold together."""
        self._prefix = own_prefix(rank)
        self._compared: dict[str, str] = {}
        flat: dict[str, Any] = {}
        self._unmapped: dict[str, Any] | None = None
        """The state as it was given, where a plan still needs to know how its names were nested."""
        if _flatten(state, "", flat):
            self.state_dict, self.is_coordinator = flat, is_coordinator
            self._unmapped = state
        else:
            self.set_up_planner(state, None, is_coordinator)

    def local_plan(self, digests: Digests) -> SavePlan:
        if self._unmapped is not None:
            _, self.mappings = flatten_state_dict(self._unmapped)
            self._unmapped = None
        try:
            plan = super().create_local_plan()
        except FAILURES as error:
            for name, value in self.state_dict.items():  # DCP does not say which one it was
                with naming(name):
                    _require_bytes(local_part(value))
                    create_write_items(name, value)
            raise error
        _require_width(plan.items)
        # `storage_data` travels to the coordinator; nobody else reads it before the global plan is made.
        return dataclasses.replace(plan, storage_data=self._held(digests))

    def _held(self, digests: Digests) -> Holdings:
        forms = {key: (one.dtype, tuple(one.shape)) for key, one in self.plain_tensors().items()}
        families: dict[str, str] = {}
        known: dict[tuple[int, torch.Size, torch.dtype], str] = {}
        for name, value in self.state_dict.items():
            if isinstance(value, DTensor):
                facts = id(value.device_mesh), value.size(), value.dtype
                if facts not in known:
                    told = f"{value.device_mesh.mesh.flatten().tolist()} {facts[1:]}"
                    known[facts] = xxhash.xxh3_64_hexdigest(told.encode())
                families[name] = known[facts]
        told_forms = {key: f"{digest} {forms.get(key, '')}" for key, digest in digests.items()}
        return Holdings(told_forms, families, self._compared)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if len(all_plans) > 1:
            differing = differing_names([plan.storage_data for plan in all_plans], self.contested)
            _refuse_differing_parts(differing, all_plans)
            self.differing = sorted(set().union(*differing.values()))
            all_plans = [
                _store_own(plan, differing.get(rank, frozenset()), own_prefix(rank))
                for rank, plan in enumerate(all_plans)
            ]
        # DCP looks each name up in one rank's paths after the other's until it finds it.
        paths = {name: path for plan in reversed(all_plans) for name, path in plan.planner_data.items()}
        return super().create_global_plan(
            [
                dataclasses.replace(plan, planner_data={} if rank else paths)
                for rank, plan in enumerate(all_plans)
            ]
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(dataclasses.replace(index, fqn=index.fqn.removeprefix(self._prefix)))

    def tensor_of(self, item: WriteItem) -> torch.Tensor:
        """The live tensor that an item stores: an alias, not a copy."""
        value = self.state_dict.get(item.index.fqn.removeprefix(self._prefix))
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return cast("torch.Tensor", value).detach()
        data: Any = self.resolve_data(item)
        assert isinstance(data, torch.Tensor)
        _require_bytes(data)
        return data.detach()

    def plain_tensors_of(self, names: Sequence[str]) -> list[torch.Tensor] | None:
        """The live tensors that items of these names store, if all of them are plain and stored whole."""
        try:
            found = [self.state_dict[name] for name in names]
        except KeyError:
            return None
        if set(map(type, found)) != {torch.Tensor} or any(map(_requires_grad, found)):
            return None
        return found

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """Those that other ranks may hold under the same name, or as the same part of a whole."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.state_dict.items():
            if type(value) is torch.Tensor and not name.startswith(f"{OWN}."):
                found[name] = value  # the usual case, of which there may be very many
            elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                found |= {} if name.startswith(f"{OWN}.") else contents(name, value)
        return found

    def shares_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """What this rank holds of distributed tensors, which will be compared with what other ranks hold."""
        found: dict[str, torch.Tensor] = {}
        for name in names:
            if isinstance(value := self.state_dict.get(name), DTensor):
                shares = contents(name, value)
                self._compared |= dict.fromkeys(shares, name)
                found |= shares
        return found


def _require_bytes(tensor: torch.Tensor) -> None:
    if not has_bytes(tensor):
        kind = type(tensor).__name__
        raise SaveFailedError(
            f"what this rank holds of it is {'an' if kind[0] in 'AEIOU' else 'a'} {kind}, which has no bytes "
            "of its own to store and does not say of which tensors it is made: give the class "
            "__tensor_flatten__ and __tensor_unflatten__"
        )


def _require_width(items: Sequence[WriteItem]) -> None:
    """torch can neither plan nor write what is of a type of which it does not know the width."""
    known: set[torch.dtype] = set()
    for item in items:
        if item.tensor_data is None or (dtype := item.tensor_data.properties.dtype) in known:
            continue
        try:
            item.tensor_storage_size()
        except (TypeError, KeyError, RuntimeError) as error:
            raise SaveFailedError(
                f"{item.index.fqn} is of {dtype}, which torch cannot store. Keep its bytes as torch.uint8"
            ) from error
        known.add(dtype)


def _flatten(tree: Mapping[str, Any], prefix: str, flat: dict[str, Any]) -> bool:
    """Does what DCP's own does, in a tenth of the time; False if anything needs DCP's own."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):
            if name in flat:
                return False
            flat[name] = value
        elif not isinstance(value, Mapping) or not _flatten(value, f"{name}.", flat):
            return False
    return True


def contested_names(held: Sequence[Holdings]) -> frozenset[str]:
    """Pure: names of distributed tensors that not all ranks which have one hold together."""
    families: dict[str, str] = {}
    found: set[str] = set()
    for one in held:
        found.update(
            name for name, family in one.families.items() if families.setdefault(name, family) != family
        )
    for one in held:
        found |= families.keys() & one.digests.keys()  # a plain tensor here, a distributed one elsewhere
    return frozenset(found)


def differing_names(held: Sequence[Holdings], contested: Collection[str] = ()) -> dict[int, frozenset[str]]:
    """Pure: for each rank, the names whose contents differ from those of the lowest rank that has them.

    A share of a contested name counts as the same only if the ranks that hold the lowest rank's have it.
    """
    first: dict[str, str] = {}
    families: dict[str, str] = {}
    differing: dict[int, set[str]] = {}
    empty: dict[int, dict[str, str]] = {}
    """By rank, names of which it holds nothing, and with whom: there are fewer parts than ranks."""
    for rank, mine in enumerate(held):
        here = {name: mine.families.get(name, "") for name in contested if mine.has(name)}
        strange = {name for name, family in here.items() if families.setdefault(name, family) != family}
        alike: set[str] = set()
        apart: set[str] = set()
        for key, digest in mine.digests.items():
            name = mine.compared.get(key, key)
            if (first.get(key) if name in strange else first.setdefault(key, digest)) == digest:
                alike.add(name)
            else:
                apart.add(name)
        empty[rank] = {name: here[name] for name in strange - alike - apart}
        differing[rank] = apart
    gone = {(name, held[rank].families.get(name, "")) for rank, names in differing.items() for name in names}
    for rank, names in empty.items():  # whoever has nothing goes with those that hold the rest
        differing[rank] |= {name for name, family in names.items() if (name, family) in gone}
    return {rank: frozenset(names) for rank, names in differing.items()}


def _refuse_differing_parts(differing: Mapping[int, frozenset[str]], plans: Sequence[SavePlan]) -> None:
    """Two ranks that declare the same part of a tensor must hold the same: only one of them is stored."""
    named = {item.index.fqn for plan in plans for item in plan.items}
    for rank, names in differing.items():
        if part := next((name for name in sorted(names) if name not in named), None):
            raise SaveFailedError(
                f"{part}: rank {rank} holds something else than a lower rank does, and both say, or layout "
                "declares, that they hold the same part of the same tensor. Declare every dimension along "
                "which it is cut"
            )


def _store_own(plan: SavePlan, names: frozenset[str], prefix: str) -> SavePlan:
    items = [_as_own(item, prefix) if item.index.fqn in names else item for item in plan.items]
    mappings = {
        **plan.planner_data,
        **{prefix + name: (*prefix.rstrip(".").split("."), name) for name in names},
    }
    return dataclasses.replace(plan, items=items, storage_data=None, planner_data=mappings)


def _as_own(item: WriteItem, prefix: str) -> WriteItem:
    """The item as one of this rank alone: a share of a distributed tensor is all of what it stores then."""
    index = dataclasses.replace(item.index, fqn=prefix + item.index.fqn)
    if item.type is not WriteItemType.SHARD or item.tensor_data is None:
        return dataclasses.replace(item, index=index)
    sizes = item.tensor_data.chunk.sizes
    corner = torch.Size([0] * len(sizes))
    data = dataclasses.replace(item.tensor_data, chunk=ChunkStorageMetadata(corner, sizes), size=sizes)
    return dataclasses.replace(
        item, index=dataclasses.replace(index, offset=corner, index=None), tensor_data=data
    )


MOST_TIED = 100
"""Names that a manifest lists of what ties a checkpoint to its number of ranks."""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of its state when a save is planned, besides what it would store."""

    lowest: frozenset[str] = frozenset()
    """Names of tensors of which other numbers of ranks are to take the lowest rank's."""
    idle: frozenset[str] = frozenset()
    """Patterns of the declared layout that match none of its tensors."""
    coordinates: dict[str, tuple[int, int]] = {}
    """By dimension of its device meshes: (this rank's place there, how many there are)."""
    parts: dict[str, PartEntry] = {}
    nested: bool = False
    absent: bool = False


class PlanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the plans of all ranks together show."""

    tied: list[str] = []
    """Tensors that differ between ranks, so that no other number of ranks can take them up; the first few."""
    parts: dict[str, PartEntry] = {}
    """Parts that rank 0 does not track."""
    nested: bool = False
    """Whether some rank's blob holds forms (state/nested.py)."""
    absent: bool = False
    """Whether some rank has nothing of a parameter, and so no state of it in its blob (state/tracked.py)."""
    layout: dict[str, Any] = {}
    """The sizes of the device meshes' dimensions by name, and each rank's coordinates there."""


def combine(differing: Sequence[str], facts: Sequence[RankFacts]) -> PlanFacts:
    """Pure: what all ranks' facts come to; an error if a declaration is about nothing."""
    idle = frozenset.intersection(*(one.idle for one in facts)) if facts else frozenset()
    if idle:
        raise SaveFailedError(
            f"track(layout={{{min(idle)!r}: …}}): no rank has a tensor of that name. Patterns are of full "
            "names, such as model.layers.0.weight"
        )
    lowest = frozenset[str]().union(*(one.lowest for one in facts))
    sizes: dict[str, int] = {}
    for one in facts:
        sizes |= {name: size for name, (_, size) in one.coordinates.items()}
    layout: dict[str, Any] = {}
    if sizes:
        coordinates = {
            name: [one.coordinates[name][0] if name in one.coordinates else None for one in facts]
            for name in sorted(sizes)
        }
        layout = {"sizes": dict(sorted(sizes.items())), "coordinates": coordinates}
    parts: dict[str, PartEntry] = {}
    for one in reversed(facts):
        parts |= one.parts
    return PlanFacts(
        tied=[name for name in differing if name not in lowest][:MOST_TIED],
        layout=layout,
        parts={name: entry for name, entry in parts.items() if name not in facts[0].parts},
        nested=any(one.nested for one in facts),
        absent=any(one.absent for one in facts),
    )


@dataclass(frozen=True)
class Plan:
    """One rank's part in every save of one structure."""

    number: int
    """Counts the plans of an attempt; the same on every rank."""
    signature: str
    items: list[WriteItem]
    frames: list[ArchiveFrame]
    layout: Layout
    shares: list[Share]
    """What this rank holds alike with others."""
    declared: Declared | None
    """Only on rank 0."""
    facts: PlanFacts = field(default_factory=PlanFacts)
    """Only on rank 0."""
    contested: frozenset[str] = frozenset()
    """Distributed tensors that several ranks hold apart: every save compares them."""

    @functools.cached_property
    def names(self) -> list[str]:
        """The items' names, in order."""
        return [item.index.fqn for item in self.items]

    @functools.cached_property
    def digest_keys(self) -> list[str]:
        """Of the items: under which name a digest of the same tensor is known."""
        return [
            f"{item.index.fqn}{list(item.index.offset)}"
            if item.index.offset is not None and item.type is WriteItemType.SHARD
            else item.index.fqn
            for item in self.items
        ]

    @functools.cached_property
    def raw_places(self) -> list[tuple[int, int]]:
        """Where the items' own bytes are in the image, and how many."""
        return [(item.raw_offset, item.raw_length) for item in self.layout.items]


def signature_of(planner: SnapshotPlanner, world: int) -> str:
    """The signature of the structure, not the contents: what makes a plan fit."""
    state = planner.state_dict
    if set(map(type, state.values())) == {torch.Tensor}:  # the usual case, of which there may be very many
        try:
            kinds: Iterable[str] = map(_Kinds().__getitem__, map(_facts, state.values()))
            return _digest(world, state, list(kinds))
        except FAILURES:
            pass  # the slow way names the culprit
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


_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


class _Kinds(dict[tuple[Any, ...], str]):
    """What `_kind` says of plain tensors; even among many, few differ."""

    def __missing__(self, facts: tuple[Any, ...]) -> str:
        self[facts] = found = _plain_kind(*facts)
        return found


def structure_of(planner: SnapshotPlanner) -> str:
    """The same for this rank's tracked tensors alone: what a proof that they resume holds for (proof.py)."""
    kinds = [
        f"{name}\t{_kind(value)}"
        for name, value in planner.state_dict.items()
        if not name.startswith(f"{OWN}.")
    ]
    return xxhash.xxh3_128_hexdigest("\n".join(kinds).encode())


def metadata_of(planner: SnapshotPlanner, plan: Plan) -> Metadata:
    """What `.metadata` says of the state: on rank 0 all of it, elsewhere what this rank has a part in."""
    if plan.declared is not None:
        return as_torch(metadatas.parse(plan.declared.metadata))
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
    if isinstance(value, SplitTensor):
        where = f"{tuple(value.local.shape)} {value.cuts}"
        return f"part {value.dtype} {tuple(value.shape)} {where} {value.requires_grad}"
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
    if layout is not torch.strided or dtype in _QUANTIZED:
        what = f"of layout {layout}" if layout is not torch.strided else f"of type {dtype}"
        raise SaveFailedError(
            f"it is a Tensor {what}, which has no plain bytes to store. Keep what it consists of in dense "
            "tensors, or give the module get_extra_state and set_extra_state for it"
        )
    return f"plain {dtype} {tuple(shape)} {layout} {requires_grad}"


def make_plan(
    group: Group,
    number: int,
    planner: SnapshotPlanner,
    signature: str,
    digests: Digests,
    frames: Frames,
    facts: RankFacts | None = None,
    compare: Compare | None = None,
) -> Plan:
    """Called by all ranks together; all take part in every exchange, whatever went wrong on one of them.

    A failure before the last exchange is raised on every rank; a later one, only on the rank where it occurs.
    """
    contested = frozenset[str]()
    while True:
        reply, declared, found = _exchange(group, planner, digests, frames, facts, contested, compare)
        if isinstance(reply, str):
            raise SaveFailedError(reply)
        answer = pickle.loads(reply)
        if not isinstance(answer, frozenset):
            break
        contested = answer
    mine, shares = answer
    items = planner.finish_plan(mine).items
    layout, used = lay_out(items, group.rank, frames)
    return Plan(number, signature, items, used, layout, shares, declared, found, contested)


def _exchange(
    group: Group,
    planner: SnapshotPlanner,
    digests: Digests,
    frames: Frames,
    facts: RankFacts | None,
    contested: frozenset[str],
    compare: Compare | None,
) -> tuple[bytes | str, Declared | None, PlanFacts]:
    """(this rank's part of the plan, what rank 0 keeps, the same).

    Instead of its part a rank may get names, if some are contested that were not yet: then all plan again.
    """
    local: bytes | str  # pickled here, where a failure can still be reported
    try:
        more = compare(contested) if compare is not None and contested else {}
        local = pickle.dumps((planner.local_plan({**digests, **more}), facts or RankFacts()))
    except FAILURES as error:
        if group.world_size == 1:
            raise
        local = f"rank {group.rank} could not plan its part of the save: {describe(error)}"
    plans = gather(group, local)
    replies: list[bytes | str] | None = None
    declared: Declared | None = None
    found = PlanFacts()
    if plans is not None:
        try:
            told = [_require(plan) for plan in plans]
            names = contested_names([plan.storage_data for plan, _ in told]) if len(told) > 1 else contested
            planner.contested = names
            if names <= contested:
                made, declared = _plan_for_all(planner, [plan for plan, _ in told], frames)
                found = combine(planner.differing, [one for _, one in told])
                replies = [pickle.dumps(reply) for reply in made]
            else:
                replies = [pickle.dumps(names)] * group.world_size
        except FAILURES as error:
            if group.world_size == 1:
                raise
            replies = [f"the save could not be planned: {describe(error)}"] * group.world_size
    return scatter(group, replies), declared, found


def _require(plan: bytes | str) -> tuple[SavePlan, RankFacts]:
    if isinstance(plan, str):
        raise SaveFailedError(plan)
    return cast("tuple[SavePlan, RankFacts]", pickle.loads(plan))


def _plan_for_all(
    planner: SnapshotPlanner, plans: list[SavePlan], frames: Frames
) -> tuple[list[tuple[SavePlan, list[Share]]], Declared]:
    """What each rank is told, which is its own part alone, and what only rank 0 keeps.

    Its time and memory are proportional to the number of items. What could not be read back is refused here,
    before anything is staged.
    """
    sharings = find_sharings([plan.storage_data.digests for plan in plans]) if len(plans) > 1 else []
    final, metadata = planner.create_global_plan(plans)
    layouts = [lay_out(plan.items, rank, frames)[0] for rank, plan in enumerate(final)]
    _check_all_is_laid_out(metadata, final)
    try:
        manifests.check_planned(
            sum(len(plan.items) for plan in final), sum(len(layout.shards) for layout in layouts)
        )
    except ManifestError as error:
        raise SaveFailedError(f"this state cannot be saved: {error}") from error
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
    try:
        metadatas.parse(data)  # what our own reader would refuse at a resume must fail now
    except MetadataError as error:
        raise SaveFailedError(
            f"this state cannot be saved: its {METADATA} could not be read: {error}"
        ) from error
    declared = Declared([layout.declared() for layout in layouts], data)
    told = [dataclasses.replace(plan, planner_data=None) for plan in final]
    return list(zip(told, share_out(sharings, len(plans)), strict=True)), declared


def lay_out(items: Sequence[WriteItem], rank: int, frames: Frames) -> tuple[Layout, list[ArchiveFrame]]:
    """Pure: the image of a rank that stores these items, in this order."""
    places: list[Item] = []
    used: list[ArchiveFrame] = []
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
    found: set[MetadataIndex] = set()
    for plan in plans:
        for item in plan.items:
            if item.index in found:
                raise SaveFailedError(f"{item.index.fqn} at {item.index.offset} would be stored twice")
            found.add(item.index)
    for name, entry in metadata.state_dict_metadata.items():
        offsets = [c.offsets for c in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        for offset in offsets:
            if MetadataIndex(name, offset) not in found:
                raise SaveFailedError(f"{name} at {offset} was declared but no rank would store it")
