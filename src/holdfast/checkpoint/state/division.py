"""Plain tensors that are parts of larger ones, as `run.track(layout=…)` declares them.

Tensor-parallel and expert-parallel ranks hold different plain tensors under one name. Nothing in such a
tensor says so: without a declaration it is kept for its rank and refused at another number of ranks. With
one, each rank stores its part at the place that it has in the whole, and any number of ranks reads what it
needs of that whole.

Guarantee: a part is stored where the sizes of all parts put it, never where a name or a rank number
suggests. Parts that do not fit together (other sizes in other dimensions, a pattern that no rank's tensors
match, two ranks that declare the same part and hold different values) are refused by name.

How far the others' parts reach is asked once, when the run begins, within the groups that were declared.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from holdfast.checkpoint.state.adapters import SplitTensor, Wrapped
from holdfast.errors import UsageError

LOWEST = "lowest"
"""Said of tensors that differ between ranks: at another number of ranks all take the lowest rank's."""


@dataclass(frozen=True)
class Split:
    """A plain tensor is a part of a larger one, cut across the ranks of a process group or a device mesh.

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

    @property
    def name(self) -> str:
        return f"{self.part}.{self.entry}"


class _PlaceInWhole(NamedTuple):
    """Where the part of one tensor lies, with its own size."""

    whole: torch.Size
    offsets: torch.Size
    local: torch.Size

    def of(self, tensor: torch.Tensor) -> SplitTensor:
        return SplitTensor(tensor, self.whole, self.offsets)


Rule = Split | str


class Division:
    """How this rank's tracked tensors are divided among the ranks, where they do not say so themselves."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._places: dict[str, dict[str, _PlaceInWhole]] = {}
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

    def settle(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Find out where each declared part lies, together with the ranks that hold the others.

        `models`: the tensors of each tracked model, by name.
        """
        if not self._rules:
            return
        self._places = {}
        members: dict[str, list[_DeclaredTensor]] = {pattern: [] for pattern in self._rules}
        self.idle = set(self._rules)
        for part, entries in models.items():
            for entry, value in entries.items():
                name = f"{part}.{entry}"
                self.idle -= {pattern for pattern in self.idle if fnmatch.fnmatchcase(name, pattern)}
                pattern = self._pattern_of(name)
                if pattern is None or not isinstance(self._rules[pattern], Split):
                    continue
                if not _is_plain(value):
                    kind = type(value.whole if isinstance(value, Wrapped) else value).__name__
                    raise UsageError(
                        f"track(layout=…): {name} is a {kind}, which says itself how it is divided or "
                        "consists of other tensors; declare plain tensors only"
                    )
                members[pattern].append(_DeclaredTensor(part, entry, value.size()))
        # In the order of the declarations, and also where this rank has none: the others wait for its answer.
        for pattern, rule in self._rules.items():
            if isinstance(rule, Split):
                for one, place in zip(members[pattern], _placed(rule, members[pattern]), strict=True):
                    self._places.setdefault(one.part, {})[one.entry] = place

    # --- between what this rank holds and what is stored ----------------------------------------------------

    def cut(self, tensors: Mapping[str, Any], owners: Mapping[str, str]) -> dict[str, Any]:
        """The same tensors by part, the declared ones as pieces. `owners`: the model of each optimizer."""
        found = dict(tensors)
        for part, places in self._places.items():
            if part in found:
                found[part] = {
                    entry: places[entry].of(value) if entry in places and _is_plain(value) else value
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

    def __bool__(self) -> bool:
        return bool(self._places)


def _placed(rule: Split, members: Sequence[_DeclaredTensor]) -> Iterator[_PlaceInWhole]:
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
        yield _PlaceInWhole(torch.Size(whole), torch.Size(offset), one.size)


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


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor | SplitTensor)


def _cut(node: Any, place: _PlaceInWhole) -> Any:
    """An optimizer's state of a parameter: what has the parameter's shape is cut as the parameter is."""
    if isinstance(node, Wrapped):
        return node
    if not isinstance(node, Mapping):
        return place.of(node) if _is_plain(node) and node.size() == place.local else node
    return {key: _cut(one, place) for key, one in node.items()}


def _mended(node: Any) -> Any:
    if isinstance(node, SplitTensor):
        return node.local
    if isinstance(node, Mapping) and not isinstance(node, Wrapped):
        return {key: _mended(one) for key, one in node.items()}
    return node


def _localise(entries: dict[str, Any], key: str, place: _PlaceInWhole) -> None:
    entry = entries.get(key)
    if isinstance(entry, TensorStorageMetadata) and entry.size == place.whole:
        entries[key] = replace(entry, size=place.local)


def split_name(name: str, tensor: torch.Tensor) -> str:
    """What a tensor's contents are known by among ranks: parts of one tensor are different things."""
    return f"{name}{list(tensor.offsets)}" if isinstance(tensor, SplitTensor) else name


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
