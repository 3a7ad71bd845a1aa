"""What a checkpoint of another project holds, as parts: weights, optimizers, schedules, generators, the rest.

Guarantee: reads only, unpickles nothing, needs no torch, and says where every tensor's bytes lie without
reading them. What a layout keeps for each rank apart (`of_ranks`) is told as such, so that nobody takes one
rank's for another's. What cannot be read becomes a `ForeignError` that names the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.base import escaped
from holdfast.checkpoint.foreign.archive import (
    Archive,
    ArchiveError,
    StoredTensor,
    TensorFileError,
    merged,
    read_archive,
    read_index,
    read_tensor_file,
)
from holdfast.checkpoint.foreign.recognition import (
    WEIGHTS,
    ForeignLayout,
    Recognised,
    rank_files,
    read_json,
)
from holdfast.checkpoint.format import METADATA, MetadataError, Offsets, Record, StoredMetadata
from holdfast.checkpoint.format import metadata as metadatas

MODEL, OPTIMIZER, SCHEDULE, SCALER, RNG, DATA = (
    "model",
    "optimizer",
    "scheduler",
    "scaler",
    "rng",
    "dataloader",
)
"""What parts are called here, whatever a layout calls them."""
_ALIASES = {
    MODEL: ("model", "state_dict", "model_state_dict", "module", "net", "weights"),
    OPTIMIZER: ("optimizer", "optimizer_state_dict", "optim", "optimizer_states"),
    SCHEDULE: ("scheduler", "lr_scheduler", "schedule", "scheduler_state_dict", "lr_scheduler_state_dict"),
    SCALER: ("scaler", "grad_scaler", "scaler_state_dict"),
    RNG: ("rng", "rng_state", "rng_states", "torch_rng_state", "random_state"),
    DATA: ("dataloader", "data", "sampler", "loader"),
}
_STEPS = ("global_step", "step", "iteration", "global_steps", "steps")
_NUMBERED = re.compile(r"optimizer\.state\.(\w+?)\.(.+)")


class ForeignError(Exception):
    """Something of a checkpoint cannot be read; the message says which file, and why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class StoredBox(NamedTuple):
    """A box of a tensor, and where its values lie."""

    offsets: Offsets
    sizes: Offsets
    file: Path
    start: int
    stride: tuple[int, ...] | None
    """Of its values from `start` on; None: an item of DCP, an archive of this one tensor, begins there."""
    length: int = 0
    """Of such an item."""
    row: int | None = None
    """Which row of what is stored it is, where the stored tensor has one dimension more."""


class ForeignTensor(NamedTuple):
    """A stored tensor."""

    shape: Offsets
    dtype: str
    boxes: tuple[StoredBox, ...]


@dataclass
class ForeignPart:
    """One part: of a model its tensors by name, of anything else a tree whose leaves may be tensors."""

    kind: str
    tensors: dict[str, ForeignTensor] = field(default_factory=dict)
    tree: Any = None
    of_ranks: int = 0
    """How many ranks have one of their own; 0: it is the same for all."""
    beside: dict[str, ForeignTensor] = field(default_factory=dict)
    """Of an optimizer: tensors that have no place in it by any rule that is known here."""


@dataclass
class Contents:
    recognised: Recognised
    step: int = 0
    world: int | None = None
    """How many ranks saved it, where that can be known."""
    parts: dict[str, ForeignPart] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def entry_of(tensor: StoredTensor) -> ForeignTensor:
    whole = StoredBox((0,) * len(tensor.shape), tensor.shape, tensor.file, tensor.start, tensor.stride)
    return ForeignTensor(tensor.shape, tensor.dtype, (whole,))


def read_contents(recognised: Recognised, rank: int = 0, *, quick: bool = False) -> Contents:
    """What is in a checkpoint. `rank`: whose part, of what each rank keeps of its own.

    `quick`: without torchtitan's hyper-parameters, which are a dozen small items for each parameter.
    """
    found = Contents(recognised, recognised.step or 0)
    match recognised.layout:
        case ForeignLayout.DCP:
            _dcp(found)
        case ForeignLayout.TORCHTITAN:
            _torchtitan(found, quick=quick)
        case ForeignLayout.KEMPNER_FORGE:
            _kempner(found)
        case ForeignLayout.MEGATRON:
            _megatron(found, rank)
        case ForeignLayout.MEGATRON_LOCAL:
            _megatron_local(found, rank)
        case ForeignLayout.HF_MODEL:
            _hf_model(found)
        case ForeignLayout.HF_TRAINER:
            _hf_trainer(found, rank)
        case ForeignLayout.LIGHTNING | ForeignLayout.TORCH_FILE:
            _torch_file(found)
    return found


def step_within(path: Path) -> int | None:
    """The step that a torch file tells; None if it tells none."""
    try:
        return _step_in(read_archive(path).tree)
    except (ArchiveError, OSError):
        return None


# --- files of torch.save ------------------------------------------------------------------------------------


def _load(file: Path, root: Path) -> Archive:
    name = file.name if file == root else str(file.relative_to(root))
    try:
        return read_archive(file)
    except (ArchiveError, OSError) as error:
        raise ForeignError(name, getattr(error, "strerror", None) or str(error)) from error


def _step_in(tree: Any) -> int | None:
    if not isinstance(tree, dict):
        return None
    return next((step for word in _STEPS if (step := _step(tree.get(word))) is not None), None)


def _step(value: Any) -> int | None:
    """A number of steps, if it can be one."""
    return value if type(value) is int and 0 <= value < 10**12 else None


def _torch_file(found: Contents) -> None:
    """Lightning's `.ckpt`, a dictionary of states, or a state dict alone."""
    path = found.recognised.path
    tree = _load(path, path).tree
    found.step = step if (step := _step_in(tree)) is not None else found.step
    if not isinstance(tree, dict):
        raise ForeignError(path.name, f"it holds {_told(tree)}, and no dictionary of states")
    if "pytorch-lightning_version" in tree:
        found.recognised = found.recognised._replace(layout=ForeignLayout.LIGHTNING)
        _lightning(found, tree)
        return
    found.recognised = found.recognised._replace(layout=ForeignLayout.TORCH_FILE)
    if _is_flat(tree):
        found.parts[MODEL] = ForeignPart(MODEL, _flat(tree))
        return
    for key, value in tree.items():
        if type(key) is str and key not in _STEPS:
            _add(found, key, value)


def _add(found: Contents, key: str, value: Any) -> None:
    """A part of a dictionary of states, by its form first, then by its name."""
    kind = next((kind for kind, names in _ALIASES.items() if key in names), "object")
    if _is_optimizer(value):
        found.parts[key] = ForeignPart(OPTIMIZER, tree=value)
    elif kind == OPTIMIZER and isinstance(value, list) and value and all(map(_is_optimizer, value)):
        _many(found, key, OPTIMIZER, value)
    elif kind == SCHEDULE and isinstance(value, list):
        _many(found, key, SCHEDULE, value)
    elif isinstance(value, dict) and kind in (MODEL, "object") and _is_flat(value):
        found.parts[key] = ForeignPart(MODEL, _flat(value))
    elif kind in (RNG, DATA):
        found.parts[key] = ForeignPart(kind, tree=value, of_ranks=1)
    else:
        found.parts[key] = ForeignPart(kind if kind != MODEL else "object", tree=value)


def _many(found: Contents, key: str, kind: str, values: list[Any]) -> None:
    for at, one in enumerate(values):
        found.parts[key if len(values) == 1 else f"{key}_{at}"] = ForeignPart(kind, tree=one)


def _lightning(found: Contents, tree: dict[Any, Any]) -> None:
    state = tree.get("state_dict")
    if not isinstance(state, dict):
        raise ForeignError(found.recognised.name, "it is Lightning's, and holds no state_dict")
    found.parts[MODEL] = ForeignPart(MODEL, _flat(state))
    for kind, key in ((OPTIMIZER, "optimizer_states"), (SCHEDULE, "lr_schedulers")):
        values = tree.get(key)
        _many(found, kind, kind, values if isinstance(values, list) else [])
    for key, value in tree.items():
        if type(key) is str and "precision" in key.lower() and isinstance(value, dict):
            found.parts[SCALER] = ForeignPart(SCALER, tree=value)
    found.notes.append("Lightning's loops, callbacks and hyper-parameters are left where they are")


def _is_flat(tree: Any) -> bool:
    """Whether it is a state dict of a module: names to tensors, and perhaps to extra states."""
    if not isinstance(tree, dict) or not tree or not all(type(key) is str for key in tree):
        return False
    return all(isinstance(one, StoredTensor) or name.endswith("_extra_state") for name, one in tree.items())


def _flat(tree: Mapping[Any, Any]) -> dict[str, ForeignTensor]:
    return {
        name: entry_of(value)
        for name, value in tree.items()
        if type(name) is str and isinstance(value, StoredTensor)
    }


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys()


def _told(value: Any) -> str:
    if isinstance(value, Record):
        return f"an object of the class {escaped(value.cls)}"
    return "a tensor" if isinstance(value, StoredTensor) else f"a {type(value).__name__}"


# --- Hugging Face -------------------------------------------------------------------------------------------


def weights_of(directory: Path) -> tuple[dict[str, StoredTensor], list[tuple[str, str]]]:
    """The weights of a Hugging Face directory, and (file, what is wrong)."""
    name = next((name for name in WEIGHTS if (directory / name).exists()), None)
    if name is None:
        return {}, [(".", f"none of {', '.join(WEIGHTS)} is here")]
    try:
        if name.endswith(".bin"):
            return _binary(_load(directory / name, directory)), []
        if name == "pytorch_model.bin.index.json":
            index = read_index(directory / name)
            whole: dict[str, StoredTensor] = {}
            for path in sorted(set(index.values())):
                whole |= _binary(_load(directory / path, directory))
            lacking = sorted(index.keys() - whole.keys())[:3]
            return whole, [(name, f"{escaped(one)} is in none of its files") for one in lacking]
        if name.endswith(".index.json"):
            return merged(directory, read_index(directory / name))
        return read_tensor_file(directory / name), []
    except (TensorFileError, OSError) as error:
        return {}, [(name, getattr(error, "strerror", None) or str(error))]
    except ForeignError as error:
        return {}, [(error.path, error.why)]


def _binary(archive: Archive) -> dict[str, StoredTensor]:
    tree = archive.tree if isinstance(archive.tree, dict) else {}
    return {name: one for name, one in tree.items() if type(name) is str and isinstance(one, StoredTensor)}


def _hf_model(found: Contents) -> None:
    path = found.recognised.path
    if path.is_file():
        try:
            tensors, problems = read_tensor_file(path), list[tuple[str, str]]()
        except (TensorFileError, OSError) as error:
            raise ForeignError(path.name, str(error)) from error
    else:
        tensors, problems = weights_of(path)
    if problems:
        raise ForeignError(*problems[0])
    found.parts[MODEL] = ForeignPart(MODEL, {name: entry_of(one) for name, one in tensors.items()})


def _hf_trainer(found: Contents, rank: int = 0) -> None:
    _hf_model(found)
    path = found.recognised.path
    step = _step(read_json(path / "trainer_state.json").get("global_step"))
    found.step = step if step is not None else found.step
    for kind in (OPTIMIZER, SCHEDULE, SCALER):
        if (path / f"{kind}.pt").exists():
            found.parts[kind] = ForeignPart(kind, tree=_load(path / f"{kind}.pt", path).tree)
    if others := sorted(one.name for one in path.glob("global_step*") if one.is_dir()):
        found.notes.append(f"{others[0]}: DeepSpeed's own files, which are not read")
    single, several = path / "rng_state.pth", sorted(path.glob("rng_state_*.pth"))
    if single.exists() or several:
        found.world = len(several) or 1
        mine = single if not several else path / f"rng_state_{rank}.pth"
        tree = _load(mine, path).tree if mine.exists() else None
        found.parts[RNG] = ForeignPart(RNG, tree=tree, of_ranks=found.world)


# --- DCP and what is built on it ----------------------------------------------------------------------------


def _metadata(directory: Path) -> StoredMetadata:
    try:
        return metadatas.read(directory)
    except MetadataError as error:
        raise ForeignError(METADATA, str(error)) from error


def _entries(meta: StoredMetadata, directory: Path) -> dict[str, ForeignTensor]:
    entries: dict[str, ForeignTensor] = {}
    for name, tensor in meta.tensors.items():
        boxes = []
        for offsets, sizes in tensor.chunks:
            place = meta.storage.get((name, offsets))
            if place is not None:
                file = directory / place.path
                boxes.append(StoredBox(offsets, sizes, file, place.offset, None, place.length))
        entries[name] = ForeignTensor(tensor.shape, tensor.dtype, tuple(boxes))
    return entries


def _objects(meta: StoredMetadata, directory: Path, *prefixes: str) -> Iterator[tuple[str, Any]]:
    """The objects whose names begin so, read as data."""
    for name in meta.objects:
        place = meta.storage.get((name, None))
        if place is None or not name.startswith(prefixes):
            continue
        try:
            file = directory / place.path
            yield name, read_archive(file, start=place.offset, length=place.length).tree
        except (ArchiveError, OSError) as error:
            raise ForeignError(place.path, f"{escaped(name)}: {error}") from error


def _ranks_in(meta: StoredMetadata) -> int | None:
    """How many ranks saved it, by the names of their files."""
    numbers = {
        int(match[1])
        for place in meta.storage.values()
        if (match := re.match(r"__(\d+)_\d+\.distcp", place.path))
    }
    return max(numbers) + 1 if numbers else None


def _named_optimizer(entries: Mapping[str, ForeignTensor], groups: Any) -> ForeignPart:
    """An optimizer whose state is kept by its parameters' names: `state.<parameter>.<key>`."""
    state: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if name.startswith("state."):
            parameter, _, key = name.removeprefix("state.").rpartition(".")
            state.setdefault(parameter, {})[key] = entry
    return ForeignPart(OPTIMIZER, tree={"state": state, "param_groups": groups})


def _split(entries: Mapping[str, ForeignTensor], prefix: str) -> dict[str, ForeignTensor]:
    return {name.removeprefix(prefix): one for name, one in entries.items() if name.startswith(prefix)}


def _dcp(found: Contents) -> None:
    path = found.recognised.path
    meta = _metadata(path)
    entries = _entries(meta, path)
    found.world = _ranks_in(meta)
    for part in dict.fromkeys(name.partition(".")[0] for name in entries):
        mine = _split(entries, f"{part}.") or {part: entries[part]}
        if any(name.startswith("state.") for name in mine):
            found.parts[part] = _named_optimizer(mine, None)
        else:
            found.parts[part] = ForeignPart(MODEL, mine)


def _torchtitan(found: Contents, *, quick: bool = False) -> None:
    path = found.recognised.path
    meta = _metadata(path)
    entries = _entries(meta, path)
    found.world = _ranks_in(meta)
    others = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
    weights = {name: one for name, one in entries.items() if not name.startswith(others)}
    found.parts[MODEL] = ForeignPart(MODEL, weights)
    wanted = ["lr_scheduler.", "train_state.", *([] if quick else ["optimizer.param_groups."])]
    objects = dict(_objects(meta, path, *wanted))
    if state := _split(entries, "optimizer."):
        by_parameter: dict[str, dict[str, Any]] = {}
        for name, value in objects.items():
            if name.startswith("optimizer.param_groups."):
                parameter, _, key = name.removeprefix("optimizer.param_groups.").rpartition(".")
                by_parameter.setdefault(parameter, {})[key] = value
        found.parts[OPTIMIZER] = _named_optimizer(state, by_parameter)
    if schedule := {
        name.removeprefix("lr_scheduler."): value
        for name, value in objects.items()
        if name.startswith("lr_scheduler.")
    }:
        found.parts[SCHEDULE] = ForeignPart(SCHEDULE, tree=schedule)
    told = objects.get("train_state.step")
    if (step := _step(told)) is not None:
        found.step = step
    elif isinstance(told, StoredTensor):
        found.notes.append("train_state.step is a tensor; the step is from the directory's name")
    if any(name.startswith("dataloader.") for name in meta.objects):
        found.notes.append("the position of torchtitan's own loader is left where it is")


def _kempner(found: Contents) -> None:
    path = found.recognised.path
    stages = sorted(one for one in path.glob("pp*") if one.is_dir()) or [path]
    entries: dict[str, ForeignTensor] = {}
    groups: Any = None
    for stage in stages:
        meta = _metadata(stage)
        entries |= _entries(meta, stage)
        if len(stages) == 1:  # the groups of several stages have the same numbers
            groups = _groups(dict(_objects(meta, stage, "optimizer.param_groups")))
        ranks = _ranks_in(meta)
        found.world = max(found.world or 0, ranks or 0) or None
    found.parts[MODEL] = ForeignPart(MODEL, _split(entries, "model."))
    if state := _split(entries, "optimizer."):
        found.parts[OPTIMIZER] = _named_optimizer(state, groups)
    told = _step(read_json(path / "metadata.json").get("step"))
    found.step = told if told is not None else found.step
    if (path / "train_state.pt").exists():
        tree = _load(path / "train_state.pt", path).tree
        tree = tree if isinstance(tree, dict) else {}
        found.step = step if (step := _step_in(tree)) is not None else found.step
        for kind in (SCHEDULE, DATA):
            if kind in tree:
                found.parts[kind] = ForeignPart(kind, tree=tree[kind], of_ranks=int(kind == DATA))
        if RNG in tree:
            found.parts[RNG] = ForeignPart(RNG, tree=tree[RNG], of_ranks=1)  # rank 0's, which it gives to all


def _groups(objects: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Parameter groups as DCP stores them: whole, or each value under its group's number."""
    prefix = "optimizer.param_groups"
    if prefix in objects:
        whole = objects[prefix]
        return whole if isinstance(whole, list) else None
    found: dict[int, dict[str, Any]] = {}
    for name, value in objects.items():
        number, _, key = name.removeprefix(f"{prefix}.").partition(".")
        if number.isdecimal() and key:
            found.setdefault(int(number), {})[key] = value
    return [found[number] for number in sorted(found)] or None


def _megatron(found: Contents, rank: int) -> None:
    """`torch_dist`: DCP for what is sharded, `common.pt` for what all ranks share."""
    path = found.recognised.path
    if not (path / METADATA).exists() and (path / "metadata.json").exists():
        backend = read_json(path / "metadata.json").get("sharded_backend")
        raise ForeignError(
            "metadata.json", f"it was saved as {escaped(str(backend))}; only torch_dist is read"
        )
    meta = _metadata(path)
    entries = _entries(meta, path)
    common = _load(path / "common.pt", path).tree
    common = common if isinstance(common, dict) else {}
    found.step = step if (step := _step(common.get("iteration"))) is not None else found.step
    found.world = _world_in(common)
    weights: dict[str, ForeignTensor] = {}
    state: dict[str, dict[str, Any]] = {}
    beside: dict[str, ForeignTensor] = {}
    for name, entry in entries.items():
        bare = re.sub(r"^chained_\d+\.", "", name)
        if match := _NUMBERED.fullmatch(bare):
            state.setdefault(match[2], {})[match[1]] = entry
        elif bare.startswith("optimizer."):
            beside[name] = entry
        else:
            weights[name] = entry
    found.parts[MODEL] = ForeignPart(MODEL, weights)
    if state or beside or isinstance(common.get("optimizer"), dict):
        groups = (
            common["optimizer"].get("param_groups") if isinstance(common.get("optimizer"), dict) else None
        )
        tree = {"state": state, "param_groups": groups}
        found.parts[OPTIMIZER] = ForeignPart(OPTIMIZER, tree=tree, beside=beside)
    if "opt_param_scheduler" in common:
        found.parts[SCHEDULE] = ForeignPart(SCHEDULE, tree=common["opt_param_scheduler"])
    shards = [name for name in meta.objects if name.startswith("rng_state")]
    if shards:
        world = found.world or len(shards)
        kept = generators_kept(shards, rank, world, _arguments_in(common))
        generators: Any = next((one for _, one in _objects(meta, path, kept)), None) if kept else None
        while isinstance(generators, list) and len(generators) == 1:
            generators = generators[0]
        if isinstance(generators, list) and len(generators) == world:  # with --data-parallel-random-init
            generators = generators[rank] if rank < world else None
        found.parts[RNG] = ForeignPart(RNG, tree=generators, of_ranks=world)


def generators_kept(
    names: Sequence[str], rank: int, world: int, arguments: Mapping[Any, Any] | None = None
) -> str | None:
    """Pure: which of Megatron's `rng_state/shard_<place>_<sizes>` is a rank's; None if it is not there.

    Places are those of the pipeline and of tensor parallelism, with experts of data parallelism, too. Ranks
    that differ in another way share one.
    """
    pattern = re.compile(r"rng_state/shard_[\d.]+_(\d+)\.(\d+)(\.\d+)?")
    match = next(filter(None, map(pattern.fullmatch, names)), None)
    if match is None or len(names) == 1:
        return names[0] if len(names) == 1 else None
    told = arguments or {}
    pipeline, tensor = int(match[1]), int(match[2])
    context = told.get("context_parallel_size", 1)
    inner = tensor * (context if type(context) is int and context > 0 else 1)
    data = world // (inner * pipeline)
    if not data or inner * pipeline * data != world:
        return None
    if told.get("use_tp_pp_dp_mapping") is True:
        stage, replica = rank // inner % pipeline, rank // (inner * pipeline)
    else:
        stage, replica = rank // (inner * data), rank // inner % data
    places, sizes = [stage, rank % tensor], [pipeline, tensor]
    if match[3]:
        places, sizes = [*places, replica], [*sizes, data]
    name = f"rng_state/shard_{'.'.join(map(str, places))}_{'.'.join(map(str, sizes))}"
    return name if name in names else None


def _arguments_in(common: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Those with which Megatron was started."""
    arguments = common.get("args")
    state = arguments.state if isinstance(arguments, Record) else None
    return state if isinstance(state, dict) else {}


def _world_in(common: Mapping[Any, Any]) -> int | None:
    """How many ranks there were, as the arguments say."""
    world = _arguments_in(common).get("world_size")
    return world if type(world) is int and world > 0 else None


def _megatron_local(found: Contents, rank: int) -> None:
    """What each rank kept on its node: its own tensors, under their global names.

    Megatron leaves out of a rank's file what another rank keeps as well; that is taken from the other's file.
    """
    files = rank_files(found.recognised.path)
    if rank not in files:
        have = ", ".join(map(str, files)) or "no rank"
        raise ForeignError(found.recognised.name, f"rank {rank}'s file is not here; here are those of {have}")
    mine = _local_state(files[rank])
    tensors, lacking = mine.tensors, set(mine.lacking)
    for other, file in files.items():
        if other != rank and lacking:
            there = _local_state(file).tensors
            tensors |= {key: there[key] for key in lacking & there.keys()}
            lacking -= there.keys()
    if lacking:
        name = escaped(min(lacking)[0])
        raise ForeignError(files[rank].name, f"{name} is left to another rank's file, and none here has it")
    found.step = mine.step if mine.step is not None else found.step
    # A node has only its own ranks' files; Megatron's arguments say how many there are in all.
    found.world = _world_in(mine.common) or max(files) + 1
    found.notes.append(f"the files of {len(files)} of {found.world} ranks are here")
    by_name: dict[str, ForeignTensor] = {}
    for (name, _), one in tensors.items():
        if name in by_name:
            raise ForeignError(
                files[rank].name, f"it holds two parts of {escaped(name)}, which cannot be told apart"
            )
        by_name[name] = one
    weights: dict[str, ForeignTensor] = {}
    by_parameter: dict[str, dict[str, Any]] = {}
    beside: dict[str, ForeignTensor] = {}
    for name, one in by_name.items():
        if match := _NUMBERED.fullmatch(name):
            by_parameter.setdefault(match[2], {})[match[1]] = one
        elif name.startswith("optimizer."):
            beside[name] = one
        else:
            weights[name] = one
    found.parts[MODEL] = ForeignPart(MODEL, weights, of_ranks=found.world)
    if by_parameter or beside:
        tree = {"state": by_parameter, "param_groups": None}
        found.parts[OPTIMIZER] = ForeignPart(OPTIMIZER, tree=tree, of_ranks=found.world, beside=beside)
    if "opt_param_scheduler" in mine.common:
        found.parts[SCHEDULE] = ForeignPart(SCHEDULE, tree=mine.common["opt_param_scheduler"])
    if mine.generators is not None:
        found.parts[RNG] = ForeignPart(RNG, tree=mine.generators, of_ranks=found.world)


_Shard = tuple[str, Offsets]
"""A global name and the place in the global tensor."""


@dataclass
class _LocalState:
    """What one rank's local file holds."""

    common: dict[Any, Any]
    tensors: dict[_Shard, ForeignTensor] = field(default_factory=dict)
    lacking: list[_Shard] = field(default_factory=list)
    """What it leaves to other ranks' files."""
    generators: Any = None

    @property
    def step(self) -> int | None:
        return _step_in(self.common)

    def collect(self, node: Any, prefix: str) -> None:
        """Tensors by their names: Megatron's ShardedTensors say theirs, others have their path."""
        if isinstance(node, StoredTensor):
            self.tensors[prefix.removesuffix(".").removeprefix("model."), ()] = entry_of(node)
        elif isinstance(node, Record) and isinstance(node.state, dict) and type(node.state.get("key")) is str:
            self._collect_shard(node.state)
        elif isinstance(node, dict):
            for key, value in node.items():
                self.collect(value, f"{prefix}{key}.")
        elif isinstance(node, list | tuple):
            for at, value in enumerate(node):
                self.collect(value, f"{prefix}{at}.")

    def _collect_shard(self, state: dict[str, Any]) -> None:
        key, data, offset = state["key"], state.get("data"), state.get("global_offset")
        if "prepend_axis_num" not in state:  # an object
            self.generators = data if key == "rng_state" else self.generators
            return
        if state.get("prepend_axis_num") == 1 and type(offset) is tuple and offset:
            key = re.sub(r"((?:^|\.)layers)\.", rf"\g<1>.{offset[0]}.", key, count=1)  # it is one layer's
        shard = (key, offset if type(offset) is tuple else ())
        if isinstance(data, StoredTensor):
            self.tensors[shard] = entry_of(data)
        else:
            self.lacking.append(shard)


def _local_state(file: Path) -> _LocalState:
    tree = _load(file, file).tree
    state = tree.state if isinstance(tree, Record) and isinstance(tree.state, dict) else tree
    if not isinstance(state, dict):
        raise ForeignError(file.name, f"it holds {_told(tree)}, and no state")
    sharded = state.get("sharded_state_dict", state.get("state_dict", state))
    common = state.get("common", sharded)
    found = _LocalState(common if isinstance(common, dict) else {})
    found.collect(sharded, "")
    return found


def step_told(recognised: Recognised) -> int | None:
    """The step of a checkpoint: as it tells itself, where that is cheap to know, or else as its name says.

    People name files as they like (`epoch3.pt`); a directory of another step than its name's is unsound.
    """
    if recognised.layout in (ForeignLayout.LIGHTNING, ForeignLayout.TORCH_FILE):
        told = step_within(recognised.path)
        return told if told is not None else recognised.step
    if recognised.step is not None:
        return recognised.step
    return _step(read_json(recognised.path / "trainer_state.json").get("global_step"))
