"""Loading a checkpoint of another project into the tracked objects: which part is whose, and what is refused.

Guarantee: every tracked part is filled, or begins anew because somebody said so, or the load is refused with
the part's name; no stored weight or optimizer is dropped silently. One rank's own state (its generators, its
local checkpoint) is never given to a job of another size. Tensors reshard, where the layout stores whole
ones.

Parts are assigned by name, else by kind and order: the first tracked model takes the first weights, the first
optimizer the first optimizer's state, schedules and scalers likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.base import escaped, local_part, plural
from holdfast.checkpoint.choose.load import LoadedState, check_fresh
from holdfast.checkpoint.foreign import (
    DATA,
    MODEL,
    OPTIMIZER,
    RNG,
    SCALER,
    SCHEDULE,
    BoxReader,
    Contents,
    ForeignError,
    ForeignLayout,
    ForeignPart,
    ForeignTensor,
    NameFunction,
    Recognised,
    StoredTensor,
    entry_of,
    generators_of,
    read_contents,
    read_into,
    tracked_names,
    unstacked,
    values_of,
)
from holdfast.checkpoint.state import Tracked, flatten, module
from holdfast.errors import CheckpointError, IncompleteStateError

SHOWN = 6


def load_foreign(
    recognised: Recognised,
    tracked: Tracked,
    rank: int,
    world: int,
    *,
    needs_data: bool = False,
    fresh: Collection[str] = (),
    names: NameFunction | None = None,
) -> LoadedState:
    """Load a checkpoint that was recognised, whose structure the caller has checked."""
    try:
        contents = read_contents(recognised, rank)
    except ForeignError as error:
        raise CheckpointError(f"incomplete: {error}") from error
    return _Taking(contents, tracked, rank, world, fresh, names).load(needs_data=needs_data)


class _Taking:
    """One load."""

    def __init__(
        self,
        contents: Contents,
        tracked: Tracked,
        rank: int,
        world: int,
        fresh: Collection[str],
        names: NameFunction | None,
    ) -> None:
        self._contents = contents
        self._layout = contents.recognised.layout
        self._path = contents.recognised.path
        self._tracked = tracked
        self._rank = rank
        self._world = world
        self._fresh = fresh
        self._names = names
        self._notes = ["no digests: nothing vouches for these bytes", *contents.notes]
        self._entries: dict[str, ForeignTensor] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        self._mapped: dict[str, str] = {}
        """Stored names of the weights, and the tracked ones; optimizers go by them too."""

    def load(self, *, needs_data: bool) -> LoadedState:
        tracked, fresh = self._tracked, self._fresh
        check_fresh(tracked, fresh, there=[*self._contents.parts, RNG])
        taken = self._assign(needs_data)
        generators = self._generators()
        for name, part in taken.items():
            if part.of_ranks and part.of_ranks != self._world:
                raise self._of_others(name, part.of_ranks)
        models = {name: model for name, model in tracked.models() if name in taken}
        for name, model in models.items():
            self._place_weights(name, model, taken[name])
        groups = {
            name: self._place_optimizer(name, thing, taken[name])
            for name, thing in tracked.named_optimizers()
            if name in taken and tracked.kind(name) == "optimizer"
        }
        reader = BoxReader(self._entries, self._paths, for_training=True)
        metadata = reader.read_metadata()
        tensors, others = tracked.collect()
        for name in tracked.names():
            if name not in taken:
                tensors.pop(name, None)
                others.pop(name, None)
            elif name in models:
                tensors[name] = self._model_targets(name, models[name], metadata)
            elif name in groups:
                found = tracked.stock_targets(name, metadata)
                assert found is not None
                tensors[name], others[name] = found
                saved, plain = groups[name]
                kept = [
                    {**live, **mine} for live, mine in zip(others[name]["param_groups"], saved, strict=True)
                ]
                state = {**{one: {} for one in plain}, **others[name]["state"]}
                others[name]["param_groups"] = kept
                others[name]["state"] = {one: {**state[one], **plain.get(one, {})} for one in state}
            else:
                tensors.pop(name, None)
                others[name] = values_of(taken[name].tree, name)
        read_into(flatten(tensors), reader)
        own = {"rng": generators} if generators is not None else {}
        return LoadedState(tracked, tensors, others, own, None, self._notes, fresh)

    # --- which part is whose ----------------------------------------------------------------------------

    def _assign(self, needs_data: bool) -> dict[str, ForeignPart]:
        """The part that each tracked object takes; whatever is missing or left over is refused together."""
        wanted = [name for name in self._tracked.names() if name not in self._fresh]
        parts = {name: part for name, part in self._contents.parts.items() if part.kind not in (RNG, DATA)}
        free = {name: part for name, part in parts.items() if name not in self._fresh}
        taken: dict[str, ForeignPart] = {}
        for name in wanted:
            if name in free and _alike(free[name].kind, self._kind(name)):
                taken[name] = free.pop(name)
        for name in wanted:
            kind = self._kind(name)
            match = next((one for one, part in free.items() if part.kind == kind != "object"), None)
            if name not in taken and match is not None:
                taken[name] = free.pop(match)
        missing = [name for name in wanted if name not in taken]
        if needs_data and "data" not in self._fresh:
            missing.append("data")
        left = [name for name, part in free.items() if part.kind in (MODEL, OPTIMIZER)]
        if missing or left:
            raise IncompleteStateError(self._misfit(missing, left))
        self._notes += [f"{name}: in the checkpoint, and not tracked" for name in free]
        self._notes += [f"{name}: begins anew, as checkpoint.fresh_parts says" for name in self._fresh]
        return taken

    def _kind(self, name: str) -> str:
        thing = self._tracked.given()[name]
        if isinstance(thing, nn.Module):
            return MODEL
        if isinstance(thing, torch.optim.Optimizer):
            return OPTIMIZER
        if isinstance(thing, torch.amp.GradScaler):
            return SCALER
        is_schedule = isinstance(thing, LRScheduler) or "sched" in f"{name} {type(thing).__name__}".lower()
        return SCHEDULE if is_schedule else "object"

    def _misfit(self, missing: list[str], left: list[str]) -> str:
        word = ",".join([*self._fresh, *missing, *left])
        told = f"{self._path} ({self._layout}) "
        if missing:
            told += (
                f"does not hold {', '.join(missing)}: training would go on with "
                f"{'them' if len(missing) > 1 else 'it'} as at a first start"
            )
        if left:
            told += (
                f"{', and it ' if missing else ''}holds {', '.join(left)}, which nothing that is tracked "
                f"takes, "
                "so that it would be lost: track what it is of, before the first step"
            )
        return f"{told}. If that is meant, say so: checkpoint.fresh_parts = {word!r}"

    def _of_others(self, name: str, ranks: int) -> IncompleteStateError:
        return IncompleteStateError(
            f"{self._path} ({self._layout}): its {name} is of {plural(ranks, 'rank')} alone, and "
            f"{plural(self._world, 'rank')} would resume: nobody else's can be made of it. Resume with "
            f"{plural(ranks, 'rank')}, or let it begin anew: checkpoint.fresh_parts = "
            f"{','.join([*self._fresh, name])!r}"
        )

    def _generators(self) -> dict[str, Any] | None:
        """This rank's random generators, if the layout keeps them and they are not to begin anew."""
        part = next((one for one in self._contents.parts.values() if one.kind == RNG), None)
        if part is None:
            self._notes.append("random generators are not in it: they go on as the script seeded them")
            return None
        if RNG in self._fresh:
            return None
        if part.of_ranks != self._world:
            raise self._of_others(RNG, part.of_ranks)
        if part.tree is None:
            raise CheckpointError(f"missing: the random generators of rank {self._rank}")
        found = generators_of(part.tree)
        if found is None:
            self._notes.append("its random generators are in a form that is not known here, and are left")
        return found

    # --- weights ------------------------------------------------------------------------------------------

    def _place_weights(self, name: str, model: nn.Module, part: ForeignPart) -> None:
        live = flatten({"": module.targets(model, name, {}, BoxReader({}).read_metadata())})
        wanted = {one.removeprefix("."): tensor for one, tensor in live.items()}
        entries = part.tensors
        if self._layout in (ForeignLayout.MEGATRON, ForeignLayout.MEGATRON_LOCAL):
            entries = unstacked(entries, wanted)
        shared = _shared(wanted)
        mapped = tracked_names(entries, wanted, function=self._names, dispensable=shared)
        there = {mapped[one]: entry for one, entry in entries.items() if one in mapped}
        missing = [one for one in wanted if one not in there and shared.get(one) not in there]
        strange = [one for one in there if one not in wanted]
        problems = [f"{name}.{one}: tracked, and not in the checkpoint" for one in missing]
        problems += [f"{escaped(one)}: in the checkpoint, and not in the tracked {name}" for one in strange]
        for one, entry in there.items():
            if one in wanted and tuple(wanted[one].size()) != entry.shape:
                shape = tuple(wanted[one].size())
                problems.append(f"{name}.{one}: shape {shape} tracked, {entry.shape} in the checkpoint")
        if problems:
            more = f"\n  … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            shown = "\n  ".join(problems[:SHOWN])
            raise IncompleteStateError(
                f"{self._path} ({self._layout}) does not fit the tracked {name} "
                f"({len(problems)} differences):\n  {shown}{more}\nBuild the model as it was; or say which "
                f"stored "
                "name is which with a function of your own, which answers None for what is to be left out: "
                "checkpoint.names = 'package.module:function'"
            )
        cast = [one for one in there if str(wanted[one].dtype) != f"torch.{there[one].dtype}"]
        if cast:
            first = cast[0]
            to = str(wanted[first].dtype).removeprefix("torch.")
            told = f"such as {first} from {there[first].dtype} to {to}"
            self._notes.append(f"{plural(len(cast), 'tensor')} of {name} cast, {told}")
        self._mapped |= mapped
        self._entries |= {f"{name}.{one}": entry for one, entry in there.items()}

    def _model_targets(self, name: str, model: nn.Module, metadata: Any) -> dict[str, Any]:
        """What to read into. A tensor in the memory of one that is stored is filled with that one."""
        found = module.targets(model, name, {}, metadata)
        return {
            one: value for one, value in found.items() if _is_there(f"{name}.{one}", value, self._entries)
        }

    # --- optimizers ---------------------------------------------------------------------------------------

    def _place_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, part: ForeignPart
    ) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """Put its tensors where they are read from; (hyper-parameters by group, state that is no tensor)."""
        if part.beside:
            first = next(iter(part.beside))
            raise IncompleteStateError(
                f"{self._path} ({self._layout}): {plural(len(part.beside), 'tensor')} of {name}, first "
                f"{escaped(first)}, belong to no parameter by name, and cannot be taken. Let it begin anew: "
                f"checkpoint.fresh_parts = {','.join([*self._fresh, name])!r}"
            )
        state, saved = part.tree["state"], part.tree["param_groups"]
        live = self._live_groups(name, optimizer)
        shapes = {one: tuple(parameter.size()) for group in live for one, parameter in group.items()}
        numbered = any(type(key) is int for key in state) or (isinstance(saved, list) and _is_numbered(saved))
        if numbered:
            self._check_groups(name, live, saved)
            order = [number for group in saved for number in group["params"]]
            by_name = dict(zip(order, shapes, strict=True))
            mine = {by_name[number]: one for number, one in state.items() if number in by_name}
        else:
            mine = self._by_name(state, shapes)
        if strange := sorted(mine.keys() - shapes.keys()):
            raise IncompleteStateError(
                f"{self._path} ({self._layout}): {name} holds state of {escaped(strange[0])} and "
                f"{len(strange) - 1} others, which the tracked optimizer does not step"
            )
        plain: dict[str, dict[str, Any]] = {}
        for one, entries in mine.items():
            for key, value in entries.items():
                entry = entry_of(value) if isinstance(value, StoredTensor) else value
                if not isinstance(entry, ForeignTensor):
                    plain.setdefault(one, {})[key] = values_of(value, f"{name}.state.{one}.{key}")
                    continue
                if key.startswith("exp_avg") and entry.shape != shapes[one]:
                    raise IncompleteStateError(
                        f"{name}: {key} of {one} has the shape {entry.shape} in the checkpoint, the "
                        f"parameter "
                        f"{shapes[one]}: it is another parameter's, or one rank's part of it"
                    )
                self._entries[f"{name}.state.{one}.{key}"] = entry
                self._paths[f"{name}.state.{one}.{key}"] = (name, "state", one, key)
        if lacking := [one for one in shapes if one not in mine] if mine else []:
            self._notes.append(f"{name}: no state of {plural(len(lacking), 'parameter')}, first {lacking[0]}")
        return self._hyper_parameters(name, live, saved, numbered=numbered), plain

    def _live_groups(self, name: str, optimizer: torch.optim.Optimizer) -> list[dict[str, nn.Parameter]]:
        found = self._tracked.stock_targets(name, BoxReader({}).read_metadata())
        assert found is not None
        return [
            dict(zip(group["params"], live["params"], strict=True))
            for group, live in zip(found[1]["param_groups"], optimizer.param_groups, strict=True)
        ]

    def _check_groups(self, name: str, live: list[dict[str, nn.Parameter]], saved: Any) -> None:
        counts = [len(group) for group in live]
        held = [len(group.get("params", ())) for group in saved] if isinstance(saved, list) else []
        if counts != held:
            raise IncompleteStateError(
                f"{self._path} ({self._layout}): {name} keeps its parameters by number, in groups of "
                f"{held}; the "
                f"tracked optimizer has groups of {counts}. Give it the groups that it had, in their order; "
                f"or "
                f"let it begin anew: checkpoint.fresh_parts = {','.join([*self._fresh, name])!r}"
            )

    def _by_name(
        self, state: Mapping[str, Mapping[str, Any]], shapes: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        """State under its parameters' tracked names, as the weights' names were found."""
        found: dict[str, dict[str, Any]] = {}
        for key in dict.fromkeys(key for entries in state.values() for key in entries):
            column = {one: entries[key] for one, entries in state.items() if key in entries}
            if self._layout in (ForeignLayout.MEGATRON, ForeignLayout.MEGATRON_LOCAL):
                column = unstacked(column, shapes)
            for one, value in column.items():
                found.setdefault(self._mapped.get(one, one), {})[key] = value
        return found

    def _hyper_parameters(
        self, name: str, live: list[dict[str, nn.Parameter]], saved: Any, *, numbered: bool
    ) -> list[dict[str, Any]]:
        """For each group what was saved of it, without its parameters."""
        groups: list[dict[str, Any]] = [{} for _ in live]
        if isinstance(saved, dict):  # torchtitan: for each parameter by its name
            by_name = {self._mapped.get(one, one): value for one, value in saved.items()}
            for at, group in enumerate(live):
                values = [values_of(by_name.get(one, {}), f"{name}.param_groups") for one in group]
                if any(value != values[0] for value in values):
                    raise IncompleteStateError(
                        f"{name}: parameters of group {at} were saved with different hyper-parameters; give "
                        f"the "
                        "optimizer the groups that it had"
                    )
                groups[at] = values[0] if values else {}
        elif isinstance(saved, list) and (numbered or len(saved) == len(live)):
            if not numbered and not self._same_groups(live, saved):
                self._notes.append(
                    f"{name}: its groups are not known by name; hyper-parameters are the script's"
                )
                return groups
            groups = [values_of(dict(one), f"{name}.param_groups") for one in saved]
        else:
            self._notes.append(f"{name}: hyper-parameters are not in it; they are the script's")
        return [{k: v for k, v in one.items() if k not in ("params", "param_names")} for one in groups]

    def _same_groups(self, live: list[dict[str, nn.Parameter]], saved: list[Any]) -> bool:
        """Whether the saved groups name the parameters that the tracked ones have."""
        mine = [
            {self._mapped.get(one, one) for one in group.get("params", ()) if type(one) is str}
            for group in saved
            if isinstance(group, dict)
        ]
        return mine == [set(group) for group in live]


def _alike(stored: str, tracked: str) -> bool:
    """Whether a part of one kind can be an object of the other, if they have the same name."""
    return stored == tracked or not {stored, tracked} & {MODEL, OPTIMIZER}


def _is_numbered(groups: list[Any]) -> bool:
    return all(
        isinstance(group, dict) and all(type(one) is int for one in group.get("params", [None]))
        for group in groups
    )


def _shared(wanted: Mapping[str, Any]) -> dict[str, str]:
    """Names of tensors that lie in the same memory as one before them, and that one's name; both ways."""
    found: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in wanted.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.numel() or tensor.device.type == "meta":
            continue
        local = local_part(tensor)
        if type(local) is not torch.Tensor or not local.numel():
            continue
        place = (local.untyped_storage().data_ptr(), local.storage_offset(), tensor.size(), local.stride())
        if place in first:
            found[name], found[first[place]] = first[place], name
        else:
            first[place] = name
    return found


def _is_there(name: str, value: Any, entries: Mapping[str, ForeignTensor]) -> bool:
    return all(inner in entries for inner in flatten({name: value}))
