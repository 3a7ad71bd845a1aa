"""torch's private parts: all that Holdfast touches are named here; those that change are touched only here.

Guarantee: a part that a release of torch has renamed or removed costs the feature that needed it, never a
step. `missing` looks for all of them when a run starts, and says which are missing and what is done without
them. Private parts that have not changed for many releases (`SETTLED`) are used where they are needed; a test
finds every other use outside this module.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from holdfast.errors import IncompleteStateError

if TYPE_CHECKING:
    from torch.distributed._shard._utils import narrow_tensor_by_index as narrow_tensor_by_index
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        ActivationWrapper as ActivationWrapper,
    )
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten_state_dict
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_unflatten as tree_unflatten

_IMPORTED = {
    "ActivationWrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "InstanceNorm": "torch.nn.modules.instancenorm:_InstanceNorm",
    "LoaderIterator": "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "NormBase": "torch.nn.modules.batchnorm:_NormBase",
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "TreeSpec": "torch.utils._pytree",
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils",
    "create_write_items": "torch.distributed.checkpoint.planner_helpers:_create_write_items",
    "flatten_state_dict": "torch.distributed.checkpoint._nested_dict",
    "get_addr_and_port": "torch.distributed.launcher.api:_get_addr_and_port",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch",
    "narrow_tensor_by_index": "torch.distributed._shard._utils",
    "tree_flatten": "torch.utils._pytree",
    "tree_leaves": "torch.utils._pytree",
    "tree_unflatten": "torch.utils._pytree",
}
"""What other modules import from here, and where torch has it. Imported on first use: some of it takes half a
second, and the launcher needs none of that."""


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, private = _IMPORTED[name].partition(":")
    try:
        found = getattr(import_module(module), private or name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} has no {private or name} in {module}, without which Holdfast cannot "
            f"work. Install a release that Holdfast has been run on: {', '.join(SHOWN)}"
        ) from error
    globals()[name] = found
    return found


SHOWN = ("2.11", "2.13", "2.15")
"""Releases of torch that the tests ran on; those between have the same parts: docs/reference/torch.md."""


@dataclass(frozen=True)
class Part:
    """Something private to torch that a feature needs."""

    owner: str
    """A module, or a class in one: `torch.nn:Module`."""
    names: tuple[str, ...]
    without: str
    """What a run does if it is missing, in words."""

    def absent(self) -> list[str]:
        """Those of its names that this torch lacks. A module that nobody has imported does not count."""
        module, _, kind = self.owner.partition(":")
        owner: Any = sys.modules.get(module)
        if owner is not None and kind:
            owner = getattr(owner, kind, object)
        if owner is None:
            return []
        where = self.owner.replace(":", ".")
        return [f"{where}.{name}" for name in self.names if not hasattr(owner, name)]


_MODULES = "modules are saved, and a model that is not as plain as it looks may be read in place"
PARTS = (
    Part(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
        ("init_unsharded_param", "init_all_gather_outputs", "free_unsharded_param", "all_gather_inputs"),
        "gradients that FSDP2 keeps unreduced between steps cannot be resumed; such a checkpoint is refused",
    ),
    Part(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
        ("lazy_init",),
        "gradients that FSDP2 keeps unreduced between steps cannot be resumed; such a checkpoint is refused",
    ),
    Part(
        "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule",
        ("_get_fsdp_state",),
        "gradients that FSDP2 keeps unreduced are not seen: do not end a step between two micro-batches",
    ),
    Part(
        "torch.distributed.fsdp._flat_param:FlatParamHandle",
        ("uses_sharded_strategy", "reshard"),
        "a model in FullyShardedDataParallel cannot be tracked",
    ),
    Part(
        "torch.distributed.distributed_c10d",
        ("_get_default_group", "_get_default_store", "_world"),
        "the ranks cannot agree on anything",
    ),
    Part(
        "torch.distributed:ProcessGroup",
        ("_device_types", "_get_backend", "_get_sequence_number_for_group"),
        "the report of a hang does not say which collective each rank has reached",
    ),
    Part(
        "torch.distributed.distributed_c10d",
        ("_new_process_group_helper", "_set_pg_timeout", "_update_default_pg"),
        "a fault restarts the processes; no function is called again in place",
    ),
    Part(
        "torch._C._distributed_c10d",
        ("_unregister_all_process_groups",),
        "a fault restarts the processes; no function is called again in place",
    ),
    Part(
        "torch.distributed._functional_collectives",
        ("wait_tensor", "_maybe_wrap_tensor", "_resolve_group_name"),
        "waits in tensor parallelism look like work to the straggler detector: it names nobody for them",
    ),
    Part(
        "torch._C",
        ("_current_graph_task_id",),
        "waits in a backward on a device look like work to the straggler detector",
    ),
    Part(
        "torch.amp:GradScaler",
        ("_lazy_init_scale_growth_tracker", "_check_inf_per_device"),
        "a dropped step is not told to a gradient scaler, which then sees to it by itself",
    ),
    Part("torch.nn:Module", ("_load_from_state_dict", "_save_to_state_dict"), _MODULES),
    Part("torch:Tensor", ("_version", "_values"), "what a save may leave out is not recognised"),
    Part("torch", ("_foreach_copy_", "_foreach_norm"), "copies and norms cannot be made in one go"),
    Part(
        "torch.utils.data.dataloader:_BaseDataLoaderIter",
        ("_next_index",),
        "a resumed loader is compared by its batches alone, and not by the indices it has drawn",
    ),
)
"""The parts looked for at start. Names that only instances have are looked for where they are used."""

SETTLED = frozenset(
    {
        # nn.Module: what it holds, and how it is saved and loaded
        "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_metadata", "_extra_state",
        "_load_from_state_dict", "_save_to_state_dict", "_state_dict_hooks", "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
        # tensors
        "_version", "_values", "_foreach_copy_", "_foreach_norm",
        # wrappers, by the name of what they wrap
        "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module",
        # optimizers, schedules, scalers
        "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
        "_wrapped_by_lr_sched", "_schedulers", "_scale", "_growth_tracker", "_per_optimizer_states",
        # a loader's iterator, torchdata's StatefulDataLoader and Hugging Face's datasets
        "_sampler_iter", "_index_sampler", "_num_yielded", "_dataset_fetcher", "_finished", "_iterator",
        "_snapshot", "_worker_snapshots", "_starting_state_dict", "_steps_since_snapshot", "_epoch",
        # torch's elastic agent, of which ours is a subclass
        "_worker_group", "_initialize_workers",
    }
)  # fmt: skip
"""Private names of torch, and of libraries built on it, that may be used anywhere."""


def missing() -> list[str]:
    """One sentence for each part that this torch does not have."""
    found = []
    for part in PARTS:
        if absent := part.absent():
            found.append(
                f"torch {torch.__version__} has no {', '.join(absent)}, which Holdfast needs: {part.without}"
            )
    return found


def unproven(version: str) -> str:
    """A sentence if this release is newer or older than all in `SHOWN`, else nothing."""
    release = _release(version)
    if _release(SHOWN[0]) <= release <= _release(SHOWN[-1]):
        return ""
    side = "newer" if release > _release(SHOWN[-1]) else "older"
    return (
        f"torch {version} is {side} than every release that Holdfast was tested on ({', '.join(SHOWN)}). "
        "Before you rely on it, train, kill a rank, resume and compare, or run `make compat` of its sources"
    )


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.partition("+")[0].split(".")
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


# --- tensors -----------------------------------------------------------------------------------------------


@functools.cache
def _dtensor() -> type[torch.Tensor]:
    from torch.distributed.tensor import DTensor

    return DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is on this rank, detached. Unlike `to_local` this waits for nothing."""
    if isinstance(tensor, _dtensor()):
        part: torch.Tensor = getattr(tensor, "_local_tensor")  # noqa: B009 - unknown to type checkers
        return part.detach()  # detaching the whole takes hundreds of times as long
    if (own := getattr(tensor, "__local_part__", None)) is not None:  # a part of a plain tensor
        return cast("torch.Tensor", own()).detach()
    return tensor.detach()


T = TypeVar("T", bound=torch.Tensor)


def wrapper_around(kind: type[T], local: torch.Tensor, size: torch.Size) -> T:
    """A tensor of this class and size without memory of its own, of the type and on the device of another."""
    made: T = torch.Tensor._make_wrapper_subclass(
        kind, size, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
    )
    return made


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own; one that only wraps others has none."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


# --- FSDP2 -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """FSDP2's own record of a parameter.

    It holds the gradient that was accumulated but not reduced. Up to torch 2.13 that is an attribute of the
    record; in 2.15 it is the gradient of the unsharded parameter, which exists from the first forward on.
    """

    record: Any
    group: Any
    """FSDP2's record of the parameters that it gathers together with this one."""

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter as the model shows it."""
        found: torch.Tensor = self.record.sharded_param
        return found

    @property
    def whole(self) -> nn.Parameter | None:
        """The parameter as the forward uses it; None before the first forward."""
        return getattr(self.record, "_unsharded_param", None)

    @property
    def place(self) -> tuple[nn.Module | None, str]:
        """The module that holds it, and its name there."""
        info = getattr(self.record, "_module_info", None)
        return getattr(info, "module", None), str(getattr(info, "param_name", "parameter"))

    def gradient(self) -> torch.Tensor | None:
        """What was accumulated and has not been reduced yet."""
        found: torch.Tensor | None = getattr(self.record, "unsharded_accumulated_grad", None)
        if found is None and (whole := self.whole) is not None:
            found = whole.grad
        return found

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        if _keeps_gradients_apart(type(self.record)):
            self.record.unsharded_accumulated_grad = gradient
            gradient = None  # the other place is to be empty: a gradient in both would be added twice
        elif gradient is not None and self.whole is None:
            self._make_whole()
        if (whole := self.whole) is not None:
            whole.grad = gradient

    def _make_whole(self) -> None:
        """Make it as the first forward does, without the values, which FSDP2 gathers later."""
        record = self.record
        try:
            self.group.lazy_init()  # it may be called again
            given = record.all_gather_inputs
            sizes, dtypes = [one.numel() for one in given], [one.dtype for one in given]
            record.init_all_gather_outputs(sizes, dtypes, record.mesh_info.shard_mesh_size, record.device)
            record.init_unsharded_param()
            record.free_unsharded_param()
        except Exception as error:
            raise IncompleteStateError(
                f"the checkpoint holds a gradient of {self.place[1]} that FSDP2 has not reduced, and torch "
                f"{torch.__version__} has no place for it before the first forward ({error}). End a step "
                "only after its gradients are reduced, or resume with the release that saved it"
            ) from error


def _keeps_gradients_apart(kind: type) -> bool:
    """Whether records of this kind have an attribute of their own for unreduced gradients."""
    return not isinstance(getattr(kind, "unsharded_accumulated_grad", None), property)


def _sharded_groups(module: nn.Module) -> list[Any]:
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return []
    found = state()
    groups = getattr(found, "_fsdp_param_groups", None)
    if groups is None:
        single = getattr(found, "_fsdp_param_group", None)
        groups = [single] if single is not None else []
    return list(groups)


def sharded_parameters(module: nn.Module) -> list[ShardedParameter]:
    """The records of the parameters that FSDP2 shards at this very module."""
    return [
        ShardedParameter(record, group) for group in _sharded_groups(module) for record in group.fsdp_params
    ]


def has_partial_reduction(module: nn.Module) -> bool:
    """Whether gradients that FSDP2 has reduced within a replica are still to be reduced between replicas."""
    return any(
        getattr(group, "_partial_reduce_output", None) is not None for group in _sharded_groups(module)
    )


# --- FSDP1 -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatStretch:
    """What FSDP1 has of a parameter on this rank: a stretch of its elements, in memory shared with others."""

    parameter: nn.Parameter
    shape: torch.Size
    """Of the whole parameter."""
    local: torch.Tensor
    """The stretch, flat; empty if other ranks have all of it."""
    start: int
    """The stretch's first element, among those of the whole."""


def flat_handle(module: nn.Module) -> Any:
    """FSDP1's record of the parameters that it has flattened at this very module; None if there are none."""
    return getattr(module, "_handle", None) if isinstance(module, _fsdp1()) else None


def hides_parameters(module: nn.Module) -> bool:
    """Whether FSDP1 shows one flat parameter here in place of the module's own."""
    handle = flat_handle(module)
    return handle is not None and not handle._use_orig_params


def flat_stretches(module: nn.Module) -> list[FlatStretch]:
    """The parameters that FSDP1 shards at this very module. What it does not shard is a plain parameter.

    FSDP1 may show a whole parameter for a while, but what is trained is always this rank's stretch.
    """
    handle = flat_handle(module)
    if handle is None or not handle.uses_sharded_strategy:
        return []
    flat = handle.flat_param
    shard = getattr(flat, "_local_shard", flat).detach()  # before the first forward there is nothing else
    found = []
    described = zip(flat._params, flat._shapes, flat._shard_param_infos, flat._contiguities, strict=True)
    for parameter, shape, place, in_order in described:
        if not in_order:
            raise IncompleteStateError(
                f"FullyShardedDataParallel has flattened a parameter of shape {tuple(shape)} in an order "
                "other than that of its dimensions (channels_last?). Make it contiguous before it is wrapped"
            )
        start, length = (place.offset_in_shard, place.numel_in_shard) if place.in_shard else (0, 0)
        first = place.intra_param_start_idx if place.in_shard else 0
        found.append(FlatStretch(parameter, torch.Size(shape), shard[start : start + length], first))
    return found


def forget_gathered(module: nn.Module) -> None:
    """What FSDP1 has gathered of this module's parameters is out of date: the next forward gathers anew."""
    handle = flat_handle(module)
    if handle is not None and handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):
        handle.reshard(free_unsharded_flat_param=True)


def has_unreduced_gradient(module: nn.Module) -> bool:
    """Whether FSDP1 keeps a gradient of the whole of what it has flattened here, which `no_sync` leaves."""
    handle = flat_handle(module)
    if handle is None or not handle.uses_sharded_strategy:
        return False
    gradient, size = handle.flat_param.grad, getattr(handle.flat_param, "_unpadded_unsharded_size", None)
    return gradient is not None and size is not None and gradient.size() == size


@functools.cache
def _fsdp1() -> type[nn.Module]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel


# --- process groups ----------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store over which the default group was made."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def collective_timeout() -> float | None:
    """Seconds after which a collective of the default group gives up; None where torch does not say."""
    from torch.distributed import distributed_c10d

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:
        group: Any = distributed_c10d._get_default_group()
        backend = group._get_backend(next(iter(group._device_types)))
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError, StopIteration):
        return None


def functional_collectives() -> Any:
    """The module whose functions DTensor calls by name; None where this torch has none."""
    try:
        return import_module("torch.distributed._functional_collectives")
    except ImportError:
        return None


def group_of_name(name: str) -> Any:
    """A group as functional collectives name it; raises LookupError, RuntimeError or ValueError."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def in_backward() -> bool:
    """Whether this thread is in a backward: on a device that is one of autograd's own."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


# --- starting workers --------------------------------------------------------------------------------------


def processors_near(index: int, numa_options: Any) -> list[int]:
    """The processors to which torch would bind a device's worker. AttributeError if torch does not say."""
    from torch.numa import binding

    choose = binding._get_logical_cpus_to_bind_to
    device = "device_index" if "device_index" in inspect.signature(choose).parameters else "gpu_index"
    return sorted(choose(**{device: index, "numa_options": numa_options}))


# --- gradient scalers --------------------------------------------------------------------------------------


def scaler_findings(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """What a scaler has found in each optimizer's gradients since its last update; by the optimizer's id."""
    found: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return found
