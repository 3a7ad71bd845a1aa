"""The per-rank parts of a checkpoint, shared out to other ranks by stated rules. Pure.

Tensors of models and optimizers reshard by themselves: DCP stores them under global names and offsets. For
what each rank stored for itself:

* tracked objects (schedules, scalers, hyper-parameters) must be the same on all ranks that tracked them;
  every rank of the new world that tracks one gets that state. One that differs is refused.
* of a model or an optimizer that is the same part on all ranks with other names in it (pipeline stages,
  experts), each rank of the new world gets what belongs to the names that it has.
* generators and named trackers that a run tracks keep their state if all ranks had the same (of a tracker,
  each name by itself); else they are seeded anew, from run, step, name, rank and world size. So are Python's,
  numpy's and torch's own.
* plain tensors that differ between ranks are refused, unless all are to take the lowest rank's: as
  `track(layout=…)` says, and of the buffers that DDP hands from rank 0 to all.
* the data position must be a global one (see train/data/loaders.py), the same on all ranks: refused
  otherwise, because samples would be repeated or left out silently.
* saved gradients must be the same on all ranks, or sharded: refused otherwise.
* samples and tokens are counted per rank; the ranks of the new world share out their totals.

As many ranks as saved it may still hold other parts than they did (tensor parallel ranks in place of pipeline
stages). Then each keeps its generators, data position and counters, and the rest follows the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from holdfast.checkpoint.state import RECORD, first_difference
from holdfast.errors import IncompleteStateError


def reshard(
    blobs: Sequence[dict[str, Any]],
    *,
    run: str,
    step: int,
    rank: int,
    world: int,
    kinds: Mapping[str, str],
    names: Mapping[str, Collection[str]] | None = None,
    generators: Collection[str] = (),
    absent: Mapping[str, Collection[str]] | None = None,
    same_size: bool = False,
) -> Shared:
    """One rank's share in the new world.

    `kinds` of the parts that this rank tracks, `names` of the parameters and modules in its models and
    optimizers, which of its parts are `generators`, and by optimizer the parameters of which it has nothing.
    """
    was, mine = len(blobs), blobs[rank]["own"] if same_size else {}
    names = names or {}
    tracked: dict[str, Any] = {}
    every: dict[str, list[int]] = {}
    taken: set[str] = set()
    for part in dict.fromkeys(part for blob in blobs for part in blob["tracked"]):
        holders = {at: blob["tracked"][part] for at, blob in enumerate(blobs) if part in blob["tracked"]}
        first = next(iter(holders.values()))
        where = {at: first_difference(first, one, part) for at, one in holders.items()}
        other = next((at for at, found in where.items() if found), None)
        kind = kinds.get(part, "object")
        if part not in kinds:
            pass
        elif other is None:
            tracked[part] = first
        elif part in generators and same_size and rank in holders:
            tracked[part] = holders[rank]
        elif part in generators:
            alike = _alike(list(holders.values())) if len(holders) == was else {}
            tracked[part] = {"seed": _seed(run, step, part, rank, world), **alike}
        elif kind in ("model", "optimizer"):
            merge = _merge_models if kind == "model" else _merge_optimizers
            tracked[part] = merge(part, list(holders.values()), was, world)
        else:
            raise _differs(where[other], next(iter(holders)), other, was, world)
        for at, state in holders.items():
            for name in _names_in(part, [state]):
                every.setdefault(name, []).append(at)
        if part in kinds and part in names:
            only = _only_model if kind == "model" else _only_optimizer
            tracked[part] = only(tracked[part], names[part])
        if part in kinds and absent and part in absent:
            tracked[part] = _without_state(tracked[part], absent[part])
        if part in kinds:
            whole = kind not in ("model", "optimizer")
            taken |= set(_names_in(part, holders.values() if whole else [tracked[part]]))
    tracked = {part: state for part, state in tracked.items() if part in kinds}
    own = mine or {
        "counters": _share_counters([blob["own"]["counters"] for blob in blobs], rank, world),
        "data": _share_position([blob["own"]["data"] for blob in blobs], world),
        "rng": {"seed": _seed(run, step, "", rank, world)},
    }
    if (left := blobs[0]["own"].get("gradients")) is not None:
        shared = _share_gradients(left, [blob["own"].get("gradients") for blob in blobs], world)
        own = {**own, "gradients": shared}
    note = f"{was} ranks saved this, {world} resume it: random generators are seeded anew"
    if same_size:
        note = f"{was} ranks saved this, and hold other parts of it now: they are shared out by name"
    return Shared(
        tracked=tracked,
        own=own,
        notes=[note],
        names=list(every),
        left={name: ranks for name, ranks in every.items() if name not in taken},
    )


class Shared(NamedTuple):
    """What a rank of the new world gets."""

    tracked: dict[str, Any]
    own: dict[str, Any]
    notes: list[str]
    """What was done, in words."""
    names: list[str]
    """All that has to be tracked besides tensors, the same on all ranks."""
    left: dict[str, list[int]]
    """What of it this rank does not track, and which ranks had saved it."""


def _names_in(part: str, states: Iterable[Any]) -> list[str]:
    """What there is of a part besides tensors, by names that tell: of an optimizer, its parameters."""
    found: dict[str, None] = {part: None}
    for state in states:
        if isinstance(state, Mapping) and isinstance(groups := state.get("param_groups"), list):
            members = (name for group in groups for name in group.get("params", ()))
            found |= {f"{part}.param_groups.{name}": None for name in members}
        elif isinstance(state, Mapping):
            found |= {f"{part}.{key}": None for key in state if key != RECORD}
    return list(found)


def _seed(run: str, step: int, part: str, rank: int, world: int) -> int:
    told = f"{run}/{step}/{rank}/{world}" + (f"/{part}" if part else "")
    return int(xxhash.xxh3_64_hexdigest(told.encode())[:15], 16)


def _alike(states: Sequence[Any]) -> dict[str, Any]:
    """Of trackers with several named states, those that are the same on all ranks.

    Tensor parallel ranks draw from such a one what they must all have alike.
    """
    if not all(isinstance(one, Mapping) and isinstance(one.get("states"), Mapping) for one in states):
        return {}
    first, *others = (one["states"] for one in states)
    kept = {
        name: state
        for name, state in first.items()
        if all(name in one and not first_difference(state, one[name], name) for one in others)
    }
    return {"states": kept} if kept else {}


def cure(was: int, world: int) -> str:
    """What to do where a checkpoint of so many ranks cannot be shared out to these."""
    if was == world:
        return f"Let each of the {was} ranks hold the parts that it held when it saved this"
    return f"Resume with {was} ranks"


def _differs(where: str, one: int, other: int, was: int, world: int) -> IncompleteStateError:
    return IncompleteStateError(
        f"{where} differs between ranks {one} and {other} of the {was} that saved it, so it cannot be shared "
        f"out to {world}. {cure(was, world)}"
    )


# --- one part, of which each rank had other names ---------------------------------------------------------


def _united(part: str, dicts: Sequence[Mapping[Any, Any]], was: int, world: int) -> dict[Any, Any]:
    """All entries; one that several ranks have must be the same on all of them."""
    found: dict[Any, Any] = {}
    for one in dicts:
        for key, value in one.items():
            if key in found and first_difference(found[key], value, "it"):
                raise IncompleteStateError(
                    f"{part}: {key} differs between the {was} ranks that saved it, so it cannot be shared "
                    f"out to {world}. {cure(was, world)}"
                )
            found.setdefault(key, value)
    return found


def _listed(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """All members, each once, in the ranks' order."""
    return list(dict.fromkeys(one for each in lists for one in each))


def _merge_models(part: str, states: Sequence[dict[str, Any]], was: int, world: int) -> dict[str, Any]:
    merged = _united(part, [{k: v for k, v in one.items() if k != RECORD} for one in states], was, world)
    records = [one.get(RECORD, {}) for one in states]
    record: dict[str, Any] = {}
    for what in dict.fromkeys(key for one in records for key in one):
        each = [one[what] for one in records if what in one]
        lists = isinstance(each[0], list)
        record[what] = _listed(each) if lists else _united(f"{part}, {what}", each, was, world)
    return {**merged, RECORD: record} if record else merged


def _merge_optimizers(part: str, states: Sequence[dict[str, Any]], was: int, world: int) -> dict[str, Any]:
    if any("packed" in one for one in states):
        raise IncompleteStateError(
            f"{part} is stored as a whole by each of the {was} ranks that saved it, and differs between "
            f"them, so it cannot be shared out to {world}. {cure(was, world)}"
        )
    groups = [one["param_groups"] for one in states]
    if len({len(each) for each in groups}) > 1:
        raise IncompleteStateError(
            f"{part} has another number of parameter groups on each of the {was} ranks that saved it, so it "
            f"cannot be shared out to {world}. {cure(was, world)}"
        )
    merged: dict[str, Any] = {"param_groups": []}
    for at, same in enumerate(zip(*groups, strict=True)):
        plain = [{k: v for k, v in one.items() if k not in ("params", "param_names")} for one in same]
        group = _united(f"{part}, group {at}", plain, was, world)
        merged["param_groups"].append({**group, "params": _listed([one["params"] for one in same])})
    for what in dict.fromkeys(key for one in states for key in one if key != "param_groups"):
        each = [one[what] for one in states if what in one]
        if what == "keys":
            forms = dict.fromkeys(form for one in each for form in one)
            merged[what] = {form: _listed([one.get(form, []) for one in each]) for form in forms}
        elif isinstance(each[0], list):
            merged[what] = list({repr(one): one for listed in each for one in listed}.values())
        else:
            merged[what] = _united(f"{part}, {what}", each, was, world)
    return merged


def _only_model(state: dict[str, Any], here: Collection[str]) -> dict[str, Any]:
    """What is about modules that this rank has; `here` are their names, with a dot at the end."""

    def is_here(name: str) -> bool:
        return name[: name.rfind(".") + 1] in here

    found = {key: value for key, value in state.items() if key != RECORD and is_here(key)}
    record: dict[str, Any] = {}
    for what, values in state.get(RECORD, {}).items():
        if isinstance(values, list):
            kept: Any = [name for name in values if is_here(name)]
        else:
            kept = {name: value for name, value in values.items() if is_here(name)}
        if kept:
            record[what] = kept
    return {**found, RECORD: record} if record else found


def _without_state(state: dict[str, Any], absent: Collection[str]) -> dict[str, Any]:
    """The parameters stay in their groups, but nothing is kept of these."""
    if "packed" in state:
        return state
    here = {name for group in state["param_groups"] for name in group["params"]} - set(absent)
    return {**_only_optimizer(state, here), "param_groups": state["param_groups"]}


def _only_optimizer(state: dict[str, Any], here: Collection[str]) -> dict[str, Any]:
    """What is about parameters that this rank has."""
    if "packed" in state:
        return state
    found = dict(state)
    groups = [
        {**group, "params": [name for name in group["params"] if name in here]}
        for group in state["param_groups"]
    ]
    found["param_groups"] = [
        group for group, all_of_it in zip(groups, state["param_groups"], strict=True)
        if group["params"] or not all_of_it["params"]
    ]  # fmt: skip
    for what in ("state", "nested", "whole"):
        if what in found:
            found[what] = {name: value for name, value in found[what].items() if name in here}
    if "keys" in found:
        found["keys"] = {
            form: [name for name in named if name in here] for form, named in found["keys"].items()
        }
    if "tensors" in found:
        found["tensors"] = {
            path: facts for path, facts in found["tensors"].items() if path[0] != "state" or path[1] in here
        }
    if "made" in found:
        found["made"] = [one for one in found["made"] if one[0] in here]
    return found


# --- Holdfast's own -----------------------------------------------------------------------------------------


def _share_gradients(first: dict[str, Any], all_of_them: Sequence[Any], world: int) -> dict[str, Any]:
    every = [other["entries"] if other is not None else {} for other in all_of_them]
    parts = _parts_of_gradients(every)
    entries = {**first["entries"], **parts}
    own = {name for name, entry in entries.items() if entry["kind"] == "local" or name.endswith(".unsharded")}
    alike = None not in all_of_them and all({**one, **parts} == entries for one in every)
    if own or first["objects"] or not alike:
        name = min(own | first["objects"].keys(), default="some")
        raise IncompleteStateError(
            f"gradients that {len(all_of_them)} ranks have accumulated on their own cannot be shared out to "
            f"{world} ({name}). {cure(len(all_of_them), world)}"
        )
    return {**first, "entries": entries, "unsynced": []}


def _parts_of_gradients(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks stored as parts of one gradient; one that held nothing of a parameter says nothing of it."""
    found: dict[str, Any] = {}
    for entries in every:
        for name, entry in entries.items():
            if entry.get("parts") and found.setdefault(name, entry) != entry:
                raise IncompleteStateError(
                    f"the gradient {name} was kept by some of the {len(every)} ranks that saved it as "
                    f"{found[name]['kind']}, by others as {entry['kind']}, so it cannot be put together. "
                    f"Resume with {len(every)} ranks that divide the parameter as they did"
                )
    return found


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
