"""What a run tracks, as checkpoint state and back.

A checkpoint holds three kinds of state:

* tensors of models and optimizers, under their fully qualified names, so any world size can read them;
* one blob a rank, `holdfast.rank_<rank>`: everything else that is tracked (schedules, scalers, optimizer
  hyper-parameters …) and Holdfast's own RNG, data position and counters. It is a uint8 tensor around a
  torch.save archive: DCP itself never has to unpickle anything of ours;
* nothing else. What cannot be captured is an error on saving, not a surprise on resuming.
"""

from __future__ import annotations

import functools
import io
import operator
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import xxhash
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint.format import PartEntry, naming
from holdfast.checkpoint.state import module, nested, optimizer, optimizer_load
from holdfast.checkpoint.state.adapters import (
    GeneratorState,
    OwnEntry,
    Stateful,
    TrackerState,
    as_stateful,
    flatten,
)
from holdfast.checkpoint.state.division import Division
from holdfast.checkpoint.state.gradient_state import GRADIENTS, GradientState
from holdfast.checkpoint.state.unchanged import Known
from holdfast.errors import IncompleteStateError, SaveFailedError, UsageError

OWN = "holdfast"
"""Reserved top-level name of the per-rank blobs."""
ABSENT = "holdfast_absent"
"""What a manifest needs where some rank held nothing of a parameter: its blob lacks what others say of it."""
BLOB_STEP = 16 * 1024
"""A blob's length is a multiple of this; a plan holds only as long as every length stays the same."""


def rank_key(rank: int) -> str:
    return f"rank_{rank:05d}"


class Tracked:
    """The tracked objects of a run, by the names the user gave them."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._given: dict[str, object] = {}
        self._built: dict[str, module.Built] = {}
        self._known: dict[str, Known] = {}
        self.division = Division()
        """What is declared of tensors that do not say themselves how they are divided."""
        self.gradients = GradientState(self)
        """What lies between backward and optimizer at a step boundary."""
        self._kinds: dict[str, str] = {}
        """The objects' kinds when the run began; and below, at the last `collect`."""
        self._last_kinds: dict[str, str] = {}
        self.ignored: list[object] = []
        """What the script has said is not to be kept."""
        self.held: dict[str, str] = {}
        """By part, a digest of the names that this rank held of it when the run began, and of those of which
        it had nothing. Where a save's is another, other ranks' blobs are needed, too."""
        self.distributed: frozenset[str] = frozenset()
        """The names of distributed parameters and buffers; below, a digest of where each of them lies."""
        self.laid = ""
        self.looked_around = False
        """Whether a search was made for things that the script trains with but does not track."""

    def ignore(self, thing: object) -> None:
        """This is not to be kept, and no warning is to say that it is not."""
        if any(thing is given for given in self._given.values()):
            raise UsageError(f"ignore(…): this {type(thing).__name__} is tracked; drop one of the two calls")
        self.ignored.append(thing)

    def add(self, name: str, thing: object) -> None:
        if name in (OWN, GRADIENTS) or not name.isidentifier():
            raise UsageError(f"track({name}=…): the name must be a plain identifier other than {OWN!r}")
        if name in self._given and self._given[name] is not thing:
            raise UsageError(f"track({name}=…): something else is tracked under that name already")
        stateful = as_stateful(thing)
        if stateful is None:
            raise UsageError(
                f"track({name}=…): a {type(thing).__name__} has no state_dict and load_state_dict; "
                "give it both, or track the object that has them"
            )
        if isinstance(thing, nn.Module):
            optimizer.refuse_flat_parameters(name, thing)
        if isinstance(thing, torch.optim.Optimizer):
            optimizer.refuse_what_cannot_be_taken(name, thing)
        self._given[name], self._objects[name] = thing, stateful

    def begin(self) -> None:
        """The script has built everything: this is what every resume loads its checkpoint into."""
        self.division.describe(dict(self.models()))  # first: it may number modules
        self._built = {name: module.look_at(model) for name, model in self.models()}
        self._known = {name: Known() for name in self._built}
        self._kinds = {name: self.kind(name) for name in self._objects}
        self.held = self._names_held()
        laid = {
            f"{part}.{name}": f"{tensor.placements} {tensor.device_mesh.mesh.tolist()}"
            for part, model in self.models()
            for name, tensor in module.registered(module.members(model)).items()
            if isinstance(tensor, DTensor)
        }
        self.distributed = frozenset(laid)
        self.laid = xxhash.xxh3_64_hexdigest(repr(sorted(laid.items())).encode())
        if self.division.declared:
            self.division.settle(
                {name: module.collect(model, name, None)[0] for name, model in self.models()}
            )

    def names(self) -> list[str]:
        return list(self._objects)

    def items(self) -> list[tuple[str, Stateful]]:
        return list(self._objects.items())

    def kind(self, name: str) -> str:
        thing = self._objects[name]
        return _kind(thing, self._owner(thing))

    def _owners(self) -> dict[str, str]:
        """By optimizer, the model that has all of its parameters."""
        names = {id(model): name for name, model in self.models()}
        found = {name: self._owner(thing) for name, thing in self._objects.items()}
        return {name: names[id(owner)] for name, owner in found.items() if owner is not None}

    def _owner(self, thing: object, *, just_collected: bool = False) -> nn.Module | None:
        """The tracked model that holds all of an optimizer's parameters, if there is one."""
        if not isinstance(thing, torch.optim.Optimizer):
            return None
        wanted = {id(parameter) for group in thing.param_groups for parameter in group["params"]}
        for name, model in self.models():
            known = self._known.get(name) if just_collected else None
            held = known.parameter_ids if known is not None and known.holds else None
            if wanted <= (held if held is not None else {id(p) for p in model.parameters()}):
                return model
        return None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The tracked optimizers that are torch's own kind."""
        return [thing for thing in self._objects.values() if isinstance(thing, torch.optim.Optimizer)]

    def named_optimizers(self) -> list[tuple[str, torch.optim.Optimizer]]:
        """The same, by name."""
        return [
            (name, thing) for name, thing in self._objects.items() if isinstance(thing, torch.optim.Optimizer)
        ]

    def loose_optimizers(self) -> list[tuple[str, torch.optim.Optimizer]]:
        """Those whose parameters did not all belong to one tracked model at the last `collect`."""
        return [
            (name, optimizer)
            for name, optimizer in self.named_optimizers()
            if self._last_kinds.get(name) == "object"
        ]

    def models(self) -> list[tuple[str, nn.Module]]:
        """The tracked models, by name."""
        return [(name, thing) for name, thing in self._objects.items() if isinstance(thing, nn.Module)]

    def scalers(self) -> list[torch.amp.GradScaler]:
        """The tracked gradient scalers that are torch's own kind."""
        return [thing for thing in self._objects.values() if isinstance(thing, torch.amp.GradScaler)]

    def generators(self) -> list[Stateful]:
        """Tracked generators of random numbers, and trackers of several."""
        return [t for t in self._objects.values() if isinstance(t, GeneratorState | TrackerState)]

    def given(self) -> dict[str, object]:
        """The tracked objects themselves, as they were given."""
        return dict(self._given)

    def devices(self) -> set[torch.device]:
        """The devices other than the host that tracked models are on."""
        found = {parameter.device for _, model in self.models() for parameter in model.parameters()}
        return {device for device in found if device.type not in ("cpu", "meta")}

    def collect(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(tensors by part, everything else by part). The tensors alias live state; they are not copies."""
        tensors: dict[str, Any] = {}
        others: dict[str, Any] = {}
        models: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        for name, model in self.models():  # first, because optimizers rely on what is found here
            with naming(f"track({name}=…), in its state_dict"):
                models[name] = self._collect_model(name, model)
        self._last_kinds = {}
        for name, thing in self._objects.items():
            with naming(f"track({name}=…), in its state_dict"):
                owner = self._owner(thing, just_collected=True)
                self._last_kinds[name] = _kind(thing, owner)
                self._refuse_another_kind(name, self._last_kinds[name])
                if name in models:
                    tensors[name], others[name] = models[name]
                elif isinstance(thing, torch.optim.Optimizer) and owner is not None:
                    names = self._names_in(owner)
                    tensors[name], others[name] = optimizer.collect(name, thing, owner, names)
                    if "packed" in others[name]:  # a form of its own, which may hold as much
                        tensors[name], left = nested.lift(thing, others[name]["packed"])
                        others[name] = {"packed": left}
                else:
                    tensors[name], others[name] = nested.lift(thing, thing.state_dict())
        if self.division:
            tensors = self.division.cut(tensors, self._owners())
        return tensors, others

    def _names_in(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters, by name, of a model that was just collected."""
        known = next(self._known.get(name) for name, one in self.models() if one is model)
        if known is None or not known.holds:
            return optimizer.parameter_names(model)
        if known.parameters is None:
            known.parameters = optimizer.parameter_names(model)
        return known.parameters

    def _collect_model(self, name: str, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        if name not in self._built:
            return module.collect(model, name, None)
        return self._known[name].collect(model, name, self._built[name])

    def unchanged(self) -> tuple[int, ...] | None:
        """Stays the same as long as `collect` finds in every model the parts that it had before."""
        serials = tuple(known.serial for known in self._known.values() if known.holds)
        return serials if len(serials) == len(self.models()) else None

    def _refuse_another_kind(self, name: str, kind: str) -> None:
        """An optimizer is saved by its parameters' names only as long as a tracked model has all of them."""
        was, thing = self._kinds.get(name), self._objects[name]
        if was in (None, kind):
            return
        if was == "optimizer" and isinstance(thing, torch.optim.Optimizer):
            optimizer.refuse_strangers(name, thing, self.models())
        raise SaveFailedError(
            "its parameters were replaced or moved since the run began, so that one tracked model no longer "
            "has them all, or now does. A resume starts as the script does, and would not take this "
            "checkpoint. Give model and optimizer their final parameters before the first step"
        )

    def targets(self, others: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
        """The tensors, by part, that a load of this checkpoint reads into. `others` is all else in it."""
        tensors: dict[str, Any] = {}
        if self.division:
            metadata = self.division.local(metadata, self._owners())
        for name, model in self.models():  # first, because optimizers look at the parameters' shapes
            module.materialise(model, name, metadata)
            tensors[name] = module.targets(model, name, others[name], metadata)
        for name, thing in self._objects.items():
            if name not in others:
                continue  # it begins anew
            if isinstance(thing, torch.optim.Optimizer) and (owner := self._owner(thing)) is not None:
                tensors[name] = optimizer.targets(name, thing, owner, others[name], metadata)
                if nested.is_lifted(packed := others[name].get("packed")):
                    tensors[name] = nested.targets(name, packed, metadata)
            elif nested.is_lifted(others[name]):
                tensors[name] = nested.targets(name, others[name], metadata)
        return self.division.cut(tensors, self._owners()) if self.division else tensors

    def stock_targets(self, name: str, metadata: Metadata) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """(tensors, all else) that a plain DCP directory may hold of an optimizer; None for anything else."""
        thing = self._objects[name]
        if not isinstance(thing, torch.optim.Optimizer) or (owner := self._owner(thing)) is None:
            return None
        return optimizer.stock_targets(name, thing, owner, metadata)

    def apply(self, tensors: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Put loaded state into the tracked objects: `tensors` are the targets, which have been read into.

        An object that nothing was loaded for stays as it is.
        """
        for name in self._objects:
            if name in others:
                self.apply_part(name, tensors, others)

    def apply_part(self, name: str, tensors: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """The same for one part."""
        thing = self._objects[name]
        tensors = self.division.mended(tensors) if self.division else tensors
        if nested.is_lifted(others[name]):
            others = {**others, name: nested.whole(others[name], tensors.get(name, {}))}
        elif _is_packed(others[name]):
            packed = nested.whole(others[name]["packed"], tensors.get(name, {}))
            others = {**others, name: {"packed": packed}}
        if isinstance(thing, nn.Module):
            module.apply(thing, name, tensors.get(name, {}), others[name], self._built.get(name))
        elif isinstance(thing, torch.optim.Optimizer) and (owner := self._owner(thing)) is not None:
            optimizer_load.apply(name, thing, owner, tensors[name], others[name])
        elif isinstance(thing, torch.optim.Optimizer):
            optimizer_load.load_packed(name, thing, others[name])
        else:
            thing.load_state_dict(others[name])

    def generator_names(self) -> list[str]:
        """The tracked generators of random numbers, and trackers of several."""
        return [name for name, one in self._objects.items() if isinstance(one, GeneratorState | TrackerState)]

    def names_within(self) -> dict[str, frozenset[str]]:
        """By part: the prefixes of a model's modules, and the names of an optimizer's parameters."""
        found: dict[str, frozenset[str]] = {}
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                found[name] = frozenset(one.name for one in module.members(thing))
            elif (owner := self._owner(thing)) is not None:
                found[name] = frozenset(optimizer.parameter_names(owner))
        return found

    def absent(self) -> dict[str, frozenset[str]]:
        """By optimizer, names of parameters of which this rank holds nothing, and so has no state either.

        FSDP1 leaves it without a gradient; a state that it kept all the same would fall behind the others'.
        """
        found = {name: self.division.absent(owner) for name, owner in self._owners().items()}
        return {name: names for name, names in found.items() if names}

    def _names_held(self) -> dict[str, str]:
        models = dict(self.models())
        names = {name: sorted(module.registered(module.members(model))) for name, model in models.items()}
        for name, owner in self._owners().items():
            names[name] = sorted(optimizer.parameter_names(models[owner]))
        absent = self.absent()
        return {
            name: xxhash.xxh3_64_hexdigest(repr((names.get(name), sorted(absent.get(name, ())))).encode())
            for name in self._objects
        }

    def lowest(self, names: Iterable[str]) -> frozenset[str]:
        """Those of these full names of which other numbers of ranks are to take the lowest rank's tensor.

        As declared, and of DDP's buffers: it hands rank 0's to all ranks before every forward.
        """
        names = list(names)
        broadcast = self._broadcast_buffers() if names else frozenset()
        return frozenset(name for name in names if name in broadcast or self.division.is_lowest(name))

    def _broadcast_buffers(self) -> frozenset[str]:
        from holdfast.checkpoint.state.untracked import alive  # it builds on this

        handed: set[int] = set()
        for ddp in alive(DistributedDataParallel):
            if ddp.broadcast_buffers:
                handed |= {id(buffer) for buffer in ddp.module.buffers()}
        return frozenset(
            f"{part}.{name}"
            for part, model in self.models()
            for name, buffer in module.named_buffers(model)
            if id(buffer) in handed
        )

    def parts(self, tensors: Mapping[str, Any]) -> dict[str, PartEntry]:
        """The manifest's entries for what `collect` has just returned."""
        return {
            name: PartEntry(kind=self._last_kinds[name], entries=_count(tensors.get(name, {})))
            for name in self._objects
        }


def _kind(thing: object, owner: nn.Module | None) -> str:
    if isinstance(thing, nn.Module):
        return "model"
    return "optimizer" if owner is not None else "object"


def _count(tree: Mapping[str, Any]) -> int:
    """How many entries `flatten` would give."""
    return sum(
        1 if type(value) is torch.Tensor or not isinstance(value, Mapping) else _count(value)
        for value in tree.values()
    )


class LeftOut(msgspec.Struct, frozen=True):
    """What a rank does not track of what a checkpoint holds; together the ranks say what nobody tracks.

    A set of bits over the names of all that has to be tracked, which all ranks know alike; empty if it is
    nothing.
    """

    bits: bytes = b""
    saved_by: dict[str, list[int]] | None = None
    """Of what is no tensor, where as many ranks resume as saved it: which ranks had it. A rank that takes up
    what it saved itself has looked at nothing else, and says None."""

    @classmethod
    def of(cls, left: Collection[str], names: Sequence[str]) -> LeftOut:
        if not left:
            return cls()
        mask = bytearray(len(names) // 8 + 1)
        for at, name in enumerate(names):
            mask[at // 8] |= (name in left) << at % 8
        return cls(zlib.compress(mask))

    def mask(self) -> int:
        return int.from_bytes(zlib.decompress(self.bits), "little") if self.bits else 0


def tracked_by_nobody(left_out: Iterable[LeftOut], names: Sequence[str]) -> list[str]:
    """Pure: the names that all ranks have left out."""
    left_out = list(left_out)
    mask = functools.reduce(operator.and_, (one.mask() for one in left_out))
    found = [name for at, name in enumerate(names) if mask >> at & 1] if mask else []
    others = [one.saved_by for one in left_out if one.saved_by is not None]
    as_saved = {rank for rank, one in enumerate(left_out) if one.saved_by is None}
    for name, ranks in others[0].items() if others else ():
        if all(name in one for one in others) and as_saved.isdisjoint(ranks):
            found.append(name)
    return found


def to_be_tracked(metadata: Metadata, *, but: Collection[str] = ()) -> list[str]:
    """The names of the entries that some rank has to track, sorted."""
    ours = tuple(f"{part}." for part in (OWN, GRADIENTS, *but))
    return sorted(
        key
        for key in metadata.state_dict_metadata
        if not key.startswith(ours) and f".{module.LOOSE}" not in key  # a rank reads those that it stored
    )


def check_strict(tensors: Mapping[str, Any], metadata: Metadata, *, but: Collection[str] = ()) -> None:
    """All that is tracked is there, by name, shape and dtype: DCP casts dtypes silently.

    The other direction is for all ranks together to check: see `LeftOut`. `but` names parts that do not
    matter.
    """
    wanted = flatten(tensors)
    stored = metadata.state_dict_metadata
    ignored = tuple(f"{part}." for part in (OWN, GRADIENTS, *but))
    problems: list[str] = []
    for key in sorted(wanted):
        entry, tensor = stored.get(key), wanted[key]
        if entry is None or key.startswith(ignored):
            problems.append(f"{key}: tracked, but not in the checkpoint")
        elif not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{key}: a tensor is tracked, the checkpoint holds an object")
        elif (entry.size_as(tensor) if isinstance(entry, OwnEntry) else entry.size) != tensor.size():
            problems.append(
                f"{key}: shape {tuple(tensor.size())} tracked, {tuple(entry.size)} in the checkpoint"
            )
        elif entry.properties.dtype != tensor.dtype:
            problems.append(f"{key}: {tensor.dtype} tracked, {entry.properties.dtype} in the checkpoint")
    if problems:
        raise misfit(problems)


def misfit(problems: Sequence[str]) -> IncompleteStateError:
    """Of what is tracked and what is in a checkpoint, in both directions."""
    more = f"\n  … and {len(problems) - 12} more" if len(problems) > 12 else ""
    shown = "\n  ".join(problems[:12]) + more
    return IncompleteStateError(
        f"the tracked state does not fit the checkpoint ({len(problems)} differences):\n  {shown}\n"
        "Make the script track what was saved, or start with resume_from = 'fresh'"
    )


def check_parts(names: list[str], parts: Mapping[str, Any]) -> None:
    """Check that the tracked names are exactly those that were saved."""
    missing = sorted(set(names) - parts.keys())
    extra = sorted(parts.keys() - set(names))
    if missing or extra:
        raise IncompleteStateError(
            f"the checkpoint holds {sorted(parts)}; this script tracks {sorted(names)}. "
            f"Missing from the checkpoint: {missing or 'nothing'}; not tracked any more: "
            f"{extra or 'nothing'}. Track what was saved; or let a part begin anew, where "
            "checkpoint.resume_from names what the run begins with: checkpoint.fresh_parts = "
            f"{','.join(missing or extra)!r}"
        )


def to_blob(value: Any, at_least: int = 0) -> torch.Tensor:
    """Its length is a multiple of BLOB_STEP, and `at_least` if possible, so that it seldom changes.

    A zip comment pads the archive; it can be no longer than 65,535 bytes.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = bytearray(buffer.getbuffer())
    length = len(data) + -len(data) % BLOB_STEP
    if length < at_least <= len(data) + 0xFFFF:
        length = at_least
    data[-2:] = (length - len(data)).to_bytes(2, "little")
    data.extend(bytes(length - len(data)))
    return torch.frombuffer(data, dtype=torch.uint8)


def has_form(others: Any) -> bool:
    """Whether what is left of a part is, or has in it, what `nested.lift` leaves."""
    return nested.is_lifted(others) or _is_packed(others)


def _is_packed(others: Any) -> bool:
    """Whether an optimizer's state_dict has a form of its own, and its tensors are stored by themselves."""
    return isinstance(others, Mapping) and others.keys() == {"packed"} and nested.is_lifted(others["packed"])


class UnreadObjectsError(Exception):
    """A rank's state holds objects that could run any code when read; the message names their classes."""


def from_blob(blob: torch.Tensor, *, objects: bool = True) -> Any:
    """Only ever called on bytes that matched their digest.

    Nothing that torch can read with `weights_only` is unpickled freely: tensors, numbers, text, containers,
    and numpy's arrays, of which its generators consist. What remains are objects of other classes in what
    was tracked; without `objects` they are refused, since reading them may run any code.
    """
    data = blob.numpy().tobytes()
    try:
        with torch.serialization.safe_globals(_arrays()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - whatever it was: what was saved must be read as it always was
        if not objects:
            raise UnreadObjectsError(
                ", ".join(classes_in(data)) or "something that is not an archive"
            ) from None
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def classes_in(data: bytes) -> list[str]:
    """The classes and functions in an archive that only unrestricted unpickling would read."""
    try:
        with torch.serialization.safe_globals(_arrays()):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except Exception:  # noqa: BLE001 - it is only for a message
        return []


@functools.cache
def _arrays() -> list[Any]:
    """What numpy's arrays and numbers are pickled as, before 2.0 too; reading these runs nothing."""
    import numpy as np

    try:
        from numpy._core import multiarray
    except ImportError:
        from numpy.core import multiarray  # type: ignore[no-redef]
    makers = [(getattr(multiarray, name), name) for name in ("_reconstruct", "scalar")]
    named = [(one, f"numpy.{core}.multiarray.{name}") for one, name in makers for core in ("core", "_core")]
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}
    return [np.ndarray, np.dtype, *sorted(kinds, key=lambda kind: kind.__name__), *named]
