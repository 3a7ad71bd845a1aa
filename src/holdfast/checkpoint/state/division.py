"""Plain tensors that are parts of larger ones: as `run.track(layout=…)` declares them, or as they say.

Tensor-parallel and expert-parallel ranks hold different plain tensors under one name. As long as nothing
says of which whole such a tensor is a part, it is kept for its rank and refused at another number of ranks.
Once that is known, each rank stores its part at the place that it has in the whole, and any number of ranks
reads what it needs of that whole. It is known from

* `layout`: the script declares it, by patterns of names;
* FSDP1, which keeps of each parameter a stretch of its elements: boxes of the whole, in the order of memory;
* `global_shape` and what goes with it on a parameter (`CheckpointableTensor` in torch's DCP);
* `sharded_state_dict` of a model, as Megatron-core's have it.

Guarantee: a part is stored where the sizes of all parts put it, never where a name or a rank number
suggests. Parts that do not fit together (other sizes in other dimensions, a pattern that no rank's tensors
match, two ranks that declare the same part and hold different values) are refused by name.

How far the others' parts reach is asked once, when the run begins, within the groups that were declared; all
else is known to the rank itself.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn.parameter import is_lazy

from holdfast.base import flat_stretches, local_part
from holdfast.checkpoint.state.adapters import Cut, SplitTensor, Wrapped, number_children
from holdfast.checkpoint.state.module import members, registered
from holdfast.errors import UsageError

log = logging.getLogger("holdfast.checkpoint")

LOWEST = "lowest"
"""Said of tensors that differ between ranks: at another number of ranks all take the lowest rank's."""


@dataclass(frozen=True)
class Split:
    """A tensor is a part of a larger one, cut across the ranks of a process group or a device mesh.

    It is a plain tensor; or a DTensor, which some ranks hold together while others hold the other parts.

    `dims`: the dimension along which it is cut across a group, or one placement for each dimension of a mesh,
    as DTensor has them. The parts follow each other in the order of the ranks there.
    """

    across: DeviceMesh | dist.ProcessGroup
    dims: int | Sequence[Placement]

    def cuts(self) -> list[tuple[dist.ProcessGroup, int]]:
        """(group, dimension), the innermost first."""
        if not isinstance(self.across, DeviceMesh):
            if not isinstance(self.dims, int):
                raise UsageError("Split(group, …): name the one dimension along which the group cuts")
            return [(self.across, self.dims)]
        placements = [Shard(self.dims)] if isinstance(self.dims, int) else list(self.dims)
        if len(placements) != self.across.ndim:
            raise UsageError(
                f"Split(mesh, …): the mesh has {self.across.ndim} dimensions, {len(placements)} placements "
                "are given"
            )
        if any(placement.is_partial() for placement in placements):
            raise UsageError("Split(mesh, …): a partial tensor is no part of a larger one; reduce it first")
        cut = [
            (self.across.get_group(at), placement.dim)
            for at, placement in enumerate(placements)
            if isinstance(placement, Shard)
        ]
        return cut[::-1]


class _DeclaredTensor(NamedTuple):
    """A tensor that a rule is about."""

    part: str
    entry: str
    size: torch.Size
    shares: tuple[Cut, ...]
    """What this rank holds of it."""

    local: torch.Size
    distributed: bool

    @classmethod
    def of(cls, part: str, entry: str, tensor: torch.Tensor) -> _DeclaredTensor:
        local = local_part(tensor).size()
        return cls(part, entry, tensor.size(), _shares(tensor), local, isinstance(tensor, DTensor))

    @property
    def name(self) -> str:
        return f"{self.part}.{self.entry}"


class Placed(NamedTuple):
    """Where in the whole a rank's part of one tensor lies, and what size that part has."""

    whole: torch.Size
    cuts: tuple[Cut, ...]
    local: torch.Size
    """The size of what this rank holds; below, the size that it has for the model."""
    seen: torch.Size
    distributed: bool = False
    """Whether the part is itself a DTensor, of which this rank holds a share."""

    def of(self, tensor: torch.Tensor) -> SplitTensor:
        return SplitTensor(tensor, self.whole, self.cuts)

    def fits(self, tensor: Any) -> bool:
        """Whether a tensor is divided as this one is."""
        if not self.distributed:
            return _is_plain(tensor) and bool(tensor.size() == self.seen)
        if not isinstance(tensor, DTensor) or any(one.is_partial() for one in tensor.placements):
            return False
        return (tensor.size(), local_part(tensor).size()) == (self.seen, self.local)


Rule = Split | str


class Division:
    """How this rank's tracked tensors are divided among the ranks, where they do not say so themselves."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._places: dict[str, dict[str, Placed]] = {}
        """By model and the name of the entry in it."""
        self.idle: set[str] = set()
        """Patterns that match no tensor of this rank; another rank may have some."""

    @property
    def declared(self) -> bool:
        return bool(self._rules)

    def declare(self, layout: object) -> None:
        """Add what `track(layout=…)` says: rules by pattern."""
        if not isinstance(layout, Mapping):
            raise UsageError(
                f"track(layout=…): a {type(layout).__name__} is given; give a dictionary of patterns of "
                "names, such as {'model.experts.*': holdfast.Split(mesh, 0)}"
            )
        for pattern, rule in layout.items():
            if not isinstance(rule, Split) and rule != LOWEST:
                raise UsageError(
                    f"track(layout={{{pattern!r}: …}}): {rule!r} is neither a holdfast.Split nor {LOWEST!r}"
                )
            if isinstance(rule, Split):
                rule.cuts()
            self._rules[str(pattern)] = rule

    def _pattern_of(self, name: str) -> str | None:
        """The first that was declared of those that match a full name."""
        return next((pattern for pattern in self._rules if fnmatch.fnmatchcase(name, pattern)), None)

    def is_lowest(self, name: str) -> bool:
        """Whether other numbers of ranks are to take the lowest rank's tensor of this full name."""
        pattern = self._pattern_of(name)
        return pattern is not None and self._rules[pattern] == LOWEST

    def describe(self, models: Mapping[str, nn.Module]) -> None:
        """Take up what the tensors of these models say of themselves; nothing is asked of other ranks."""
        found = {part: _described(part, model) for part, model in models.items()}
        self._places = {part: places for part, places in found.items() if places}

    def settle(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Find out where each declared part lies, together with the ranks that hold the others.

        `models`: the tensors of each tracked model, by name. What they say of themselves was found before.
        """
        if not self._rules:
            return
        declared: dict[str, list[_DeclaredTensor]] = {pattern: [] for pattern in self._rules}
        self.idle = set(self._rules)
        for part, entries in models.items():
            for entry, value in entries.items():
                name = f"{part}.{entry}"
                self.idle -= {pattern for pattern in self.idle if fnmatch.fnmatchcase(name, pattern)}
                pattern = self._pattern_of(name)
                if pattern is None or not isinstance(self._rules[pattern], Split):
                    continue
                if entry in self._places.get(part, {}):
                    raise UsageError(
                        f"track(layout=…): {name} says itself of what it is a part "
                        "(FullyShardedDataParallel, CheckpointableTensor or sharded_state_dict); drop it "
                        "from the layout"
                    )
                if isinstance(value, Wrapped):
                    raise UsageError(
                        f"track(layout=…): {name} is a {type(value.whole).__name__}, which consists of other "
                        "tensors; declare plain or distributed tensors only"
                    )
                if isinstance(value, DTensor) and any(one.is_partial() for one in value.placements):
                    raise UsageError(f"track(layout=…): {name} is a partial DTensor; reduce it first")
                declared[pattern].append(_DeclaredTensor.of(part, entry, value))
        # In the order of the declarations, and also where this rank has none: the others wait for its answer.
        for pattern, rule in self._rules.items():
            if isinstance(rule, Split):
                for one, place in zip(declared[pattern], _placed(rule, declared[pattern]), strict=True):
                    self._places.setdefault(one.part, {})[one.entry] = place

    # --- between what this rank holds and what is stored ----------------------------------------------------

    def cut(self, tensors: Mapping[str, Any], owners: Mapping[str, str]) -> dict[str, Any]:
        """The same tensors by part, the declared ones as pieces. `owners`: the model of each optimizer."""
        found = dict(tensors)
        for part, places in self._places.items():
            if part in found:
                found[part] = {
                    entry: places[entry].of(value)
                    if entry in places
                    and (isinstance(value, DTensor) if places[entry].distributed else _is_plain(value))
                    else value
                    for entry, value in found[part].items()
                }
        for part, owner in owners.items():
            places = self._places.get(owner, {})
            if places and part in found and isinstance(state := found[part].get("state"), Mapping):
                cut = {
                    name: _cut(node, places[name]) if name in places else node for name, node in state.items()
                }
                found[part] = {**found[part], "state": cut}
        return found

    def mended(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The other way round: pieces as the plain tensors that they are on this rank."""
        if not self._places:
            return dict(tensors)
        return {part: _mended(tree) for part, tree in tensors.items()}

    def local(self, metadata: Metadata, owners: Mapping[str, str]) -> Metadata:
        """The metadata as this rank sees it: of a declared tensor it will hold no more than its part."""
        if not self._places:
            return metadata
        entries = dict(metadata.state_dict_metadata)
        for part, places in self._places.items():
            for entry, place in places.items():
                _localise(entries, f"{part}.{entry}", place)
        for part, owner in owners.items():
            places = self._places.get(owner, {})
            longest = sorted(places, key=len, reverse=True)
            for key in [key for key in entries if key.startswith(f"{part}.state.")] if places else []:
                rest = key.removeprefix(f"{part}.state.")
                if name := next((name for name in longest if rest.startswith(f"{name}.")), None):
                    _localise(entries, key, places[name])
        return replace(metadata, state_dict_metadata=entries)

    def absent(self, model: str) -> frozenset[str]:
        """Names of a model's parameters of which this rank holds nothing, though others do."""
        places = self._places.get(model, {})
        return frozenset(name for name, one in places.items() if not one.seen.numel() and one.whole.numel())

    def place(self, name: str, tensor: torch.Tensor) -> Placed | None:
        """Where a gradient of the parameter of this full name lies; None if it is of another size."""
        if not self._places:
            return None
        part, _, entry = name.partition(".")
        found = self._places.get(part, {}).get(entry)
        return found if found is not None and found.fits(tensor) else None

    def __bool__(self) -> bool:
        return bool(self._places)


def _placed(rule: Split, members: Sequence[_DeclaredTensor]) -> Iterator[Placed]:
    """Where these parts lie, from the sizes of all parts: those in the same innermost group first."""
    wholes = [list(one.size) for one in members]
    offsets = [[0] * len(one.size) for one in members]
    names = [one.name for one in members]
    for group, dim in rule.cuts():
        for name, size in zip(names, wholes, strict=True):
            if not -len(size) <= dim < len(size):
                raise UsageError(f"track(layout=…): {name} has {len(size)} dimensions and is cut along {dim}")
        told: list[Any] = [None] * group.size()
        dist.all_gather_object(told, list(zip(names, map(tuple, wholes), strict=True)), group=group)
        everyone = cast("list[list[tuple[str, tuple[int, ...]]]]", told)
        mine = group.rank()
        _check_fit(names, everyone, dim, dist.get_process_group_ranks(group))
        for at, (size, offset) in enumerate(zip(wholes, offsets, strict=True)):
            along = [sizes[at][1][dim] for sizes in everyone]
            offset[dim] += sum(along[:mine])
            size[dim] = sum(along)
    for one, whole, offset in zip(members, wholes, offsets, strict=True):
        moved = (
            share._replace(offsets=tuple(a + b for a, b in zip(offset, share.offsets, strict=True)))
            for share in one.shares
        )
        yield Placed(torch.Size(whole), tuple(moved), one.local, one.size, one.distributed)


def _shares(tensor: torch.Tensor) -> tuple[Cut, ...]:
    """The box that a rank holds of a tensor: all of a plain one."""
    if not isinstance(tensor, DTensor):
        return (Cut((0,) * tensor.dim(), tuple(tensor.size()), (0,) * tensor.dim()),)
    if tensor.device_mesh.get_coordinate() is None:
        return ()
    held: Any = tensor
    (chunk,) = held.__create_chunk_list__()
    return (Cut(tuple(chunk.offsets), tuple(chunk.sizes), (0,) * tensor.dim()),)


def _check_fit(
    names: Sequence[str],
    everyone: Sequence[Sequence[tuple[str, tuple[int, ...]]]],
    dim: int,
    ranks: Sequence[int],
) -> None:
    """That the ranks of a group declare the same names, with sizes that differ along the cut alone."""
    for rank, theirs in zip(ranks, everyone, strict=True):
        if other := sorted({name for name, _ in theirs} ^ set(names)):
            raise UsageError(
                f"track(layout=…): {other[0]} is declared on only some of the ranks {list(ranks)} that share "
                f"it (rank {rank} differs from this one). Every rank of the group needs all of its parts"
            )
    for name in names:
        sizes = [dict(theirs)[name] for theirs in everyone]
        if len({(*size[: dim % len(size)], *size[dim % len(size) + 1 :]) for size in sizes}) > 1:
            told = ", ".join(f"rank {rank}: {size}" for rank, size in zip(ranks, sizes, strict=True))
            raise UsageError(
                f"track(layout=…): the parts of {name} are declared to be cut along dimension {dim} and "
                f"differ in another one ({told})"
            )


# --- what tensors say of themselves -------------------------------------------------------------------------


def _described(part: str, model: nn.Module) -> dict[str, Placed]:
    """By name, where a model's parameters and buffers lie that somebody else than the script divided."""
    found: dict[str, Placed] = {}
    flat = {id(one.parameter): one for module in model.modules() for one in flat_stretches(module)}
    sharded = _by_memory(_sharded_state(part, model))
    for module in model.modules():
        if sharded and isinstance(module, nn.ModuleList):
            _number_by_place(module, sharded)
    for name, tensor in registered(members(model)).items():
        if (stretch := flat.get(id(tensor))) is not None:
            if type(tensor) is not nn.Parameter:
                raise UsageError(
                    f"track({part}=…): {name} is a {type(tensor).__name__} in FullyShardedDataParallel, "
                    "whose parts are known of plain parameters only; use fully_shard instead"
                )
            cuts = tuple(boxes(stretch.shape, stretch.start, stretch.local.numel()))
            found[name] = Placed(stretch.shape, cuts, stretch.local.size(), stretch.local.size())
        elif _is_plain(tensor) and not is_lazy(tensor):
            place = _own_description(f"{part}.{name}", tensor) or _sharded_place(tensor, sharded)
            if place is not None:
                found[name] = place
    return found


def boxes(shape: Sequence[int], start: int, length: int) -> Iterator[Cut]:
    """Pure: a stretch of a tensor's elements, in memory order, as the fewest boxes that follow each other."""
    if not math.prod(shape):
        yield Cut((0,) * len(shape), tuple(shape), 0)
        return
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    at = 0
    while at < length:
        first, left = start + at, length - at
        # The outermost dimension along which the rest begins, and goes on for at least one step.
        dim = next((d for d, n in enumerate(inner) if first % n == 0 and left >= n), None)
        if dim is None:  # no dimensions at all
            yield Cut((), (), at)
            return
        index = [first // n % size for n, size in zip(inner, shape, strict=True)]
        count = min(left // inner[dim], shape[dim] - index[dim])
        offsets = (*index[: dim + 1], *(0 for _ in shape[dim + 1 :]))
        yield Cut(offsets, (*(1 for _ in shape[:dim]), count, *shape[dim + 1 :]), at)
        at += count * inner[dim]


def _own_description(name: str, tensor: torch.Tensor) -> Placed | None:
    """What a parameter says as torch's `CheckpointableTensor` does: by attributes, whatever the release."""
    said = [getattr(tensor, fact, None) for fact in _FACTS]
    if any(one is None for one in said):
        return None
    try:
        whole, offsets, corners, sizes = cast("list[Any]", said)
        whole = torch.Size(whole)
        cuts = [
            Cut(tuple(offset), tuple(size), tuple(corner))
            for offset, size, corner in zip(offsets, sizes, corners, strict=True)
        ]
        fits = all(
            _is_within(cut.offsets, cut.size, whole) and _is_within(corner, cut.size, tensor.size())
            for cut, corner in zip(cuts, corners, strict=True)
        )
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name} does not say properly of what it is a part ({error}): {_told(said)}"
        ) from None
    if not fits:
        raise UsageError(
            f"{name}, of shape {tuple(tensor.size())}, says that it has parts which reach beyond it or "
            f"beyond the whole: {_told(said)}"
        )
    return Placed(whole, tuple(cuts), tensor.size(), tensor.size())


def _is_within(corner: Sequence[int], size: Sequence[int], outer: Sequence[int]) -> bool:
    if not len(corner) == len(size) == len(outer):
        return False
    return all(at >= 0 and at + n <= most for at, n, most in zip(corner, size, outer, strict=True))


_FACTS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def _told(said: Sequence[Any]) -> str:
    return ", ".join(f"{fact} {one}" for fact, one in zip(_FACTS, said, strict=True))


def _sharded_state(part: str, model: nn.Module) -> Iterator[Any]:
    """What the outermost modules with a `sharded_state_dict` give: objects like Megatron's ShardedTensor."""
    outermost: list[str] = []
    for member in members(model):
        if member.raw.startswith(tuple(outermost)) or not hasattr(member.module, "sharded_state_dict"):
            continue
        outermost.append(member.raw or ".")
        try:
            # By itself each layer is an entry of its own, whatever part of the model is on this rank.
            given = cast("Any", member.module).sharded_state_dict(metadata={"non_homogeneous_layers": True})
            yield from _leaves(given)
        except Exception as error:  # noqa: BLE001 - somebody else's code, without which the run can go on
            log.warning(
                "holdfast: track(%s=…): its sharded_state_dict failed (%s: %s), so what is divided among "
                "ranks is kept for each of them, and no other number of ranks can resume",
                part,
                type(error).__name__,
                " ".join(str(error).split()),
            )
        if not member.raw:
            return


def _leaves(given: Any) -> Iterator[Any]:
    """The sharded tensors in a state, those that are stored in several parts by these."""
    if isinstance(given, Mapping):
        for one in given.values():
            yield from _leaves(one)
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _leaves(one)
    elif callable(build := getattr(given, "build", None)):
        yield from _leaves(build())
    elif isinstance(getattr(given, "data", None), torch.Tensor) and hasattr(given, "global_offset"):
        yield given


class _ShardedBox(NamedTuple):
    """What a sharded tensor says: a box of a whole, and the number of that whole among others of its kind."""

    data: torch.Tensor
    whole: torch.Size
    offsets: tuple[int, ...]
    number: int | None


_Sharded = Mapping[int, Sequence[_ShardedBox]]
"""By the address of the memory in which they lie."""


def _by_memory(sharded: Iterable[Any]) -> _Sharded:
    """By the memory in which they lie. Left out is what is no box of a tensor of the same dimensions.

    Experts are slices of one tensor, along a first dimension that only the whole has: each is a whole here.
    """
    found: dict[int, list[_ShardedBox]] = {}
    for one in sharded:
        added = getattr(one, "prepend_axis_num", 0)
        if added > 1 or getattr(one, "flattened_range", None) is not None:
            continue
        number = int(one.global_offset[0]) if added else None
        whole, offsets = torch.Size(one.global_shape[added:]), tuple(one.global_offset[added:])
        box = _ShardedBox(one.data, whole, offsets, number)
        found.setdefault(one.data.untyped_storage().data_ptr(), []).append(box)
    return found


def _boxes_in(tensor: torch.Tensor, sharded: _Sharded) -> list[tuple[_ShardedBox, int]]:
    """The boxes that lie within a tensor, each with the place of its first element there.

    Megatron keeps many parameters in one buffer: the same memory alone says little.
    """
    there = sharded.get(tensor.untyped_storage().data_ptr(), [])
    placed = [(box, int(box.data.storage_offset() - tensor.storage_offset())) for box in there]
    return [(box, first) for box, first in placed if 0 <= first < tensor.numel()]


def _number_by_place(module: nn.ModuleList, sharded: _Sharded) -> None:
    """Number its children if they are slices of larger tensors, each with all of its parameters."""
    numbers: dict[str, int] = {}
    for name, child in module.named_children():
        found: set[int | None] = set()
        for parameter in child.parameters():
            found.update([box.number for box, _ in _boxes_in(parameter, sharded)] or [None])
        if len(found) != 1 or (number := found.pop()) is None:
            return
        numbers[name] = number
    if numbers and len(set(numbers.values())) == len(numbers):
        number_children(module, numbers)


def _sharded_place(tensor: torch.Tensor, sharded: _Sharded) -> Placed | None:
    """Where a tensor lies by what its model says of it; None if that does not account for all of it.

    None also for what is no part but the whole: other ranks may have it as a replica.
    """
    if not sharded or not tensor.is_contiguous() or not tensor.numel():
        return None
    cuts: list[Cut] = []
    whole = tensor.size()
    for box, first in _boxes_in(tensor, sharded):
        if box.data.dim() != tensor.dim() or box.data.stride() != tensor.stride():
            return None
        along = zip(tensor.stride(), tensor.size(), strict=True)
        corner = tuple(first // stride % size for stride, size in along)
        cuts.append(Cut(box.offsets, tuple(box.data.size()), corner))
        whole = box.whole
    if whole == tensor.size() or sum(math.prod(cut.size) for cut in cuts) != tensor.numel():
        return None
    return Placed(whole, tuple(cuts), tensor.size(), tensor.size())


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor | SplitTensor)


def _cut(node: Any, place: Placed) -> Any:
    """An optimizer's state of a parameter: what has the parameter's shape is cut as the parameter is."""
    if isinstance(node, Wrapped):
        return node
    if not isinstance(node, Mapping):
        return place.of(node) if place.fits(node) else node
    return {key: _cut(one, place) for key, one in node.items()}


def _mended(node: Any) -> Any:
    if isinstance(node, SplitTensor):
        return node.held
    if isinstance(node, Mapping) and not isinstance(node, Wrapped):
        return {key: _mended(one) for key, one in node.items()}
    return node


def _localise(entries: dict[str, Any], key: str, place: Placed) -> None:
    entry = entries.get(key)
    if isinstance(entry, TensorStorageMetadata) and entry.size == place.whole:
        entries[key] = replace(entry, size=place.seen)


def contents(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a rank holds, by what it is known by among ranks: parts of one tensor are different things.

    An empty part is none: it lies where another rank's begins.
    """
    if isinstance(tensor, DTensor):
        held: Any = tensor
        (chunk,) = held.__create_chunk_list__()
        return {f"{name}{list(chunk.offsets)}": local_part(tensor)} if chunk.sizes.numel() else {}
    if not isinstance(tensor, SplitTensor):
        return {name: tensor}
    return {f"{name}{list(cut.offsets)}": piece for cut, piece in tensor.pieces() if piece.numel()}


def coordinates() -> dict[str, tuple[int, int]]:
    """By the names of the dimensions of this process's device meshes: (this rank's place, how many places).

    Of a dimension that several meshes have, the largest mesh says it.
    """
    from holdfast.checkpoint.state.untracked import alive  # it builds on this

    found: dict[str, tuple[int, int]] = {}
    for mesh in sorted(alive(DeviceMesh), key=lambda mesh: -mesh.size()) if dist.is_initialized() else []:
        place = mesh.get_coordinate()
        for at, name in enumerate(mesh.mesh_dim_names or ()):
            if place is not None:
                found.setdefault(name, (place[at], mesh.size(at)))
    return found
