"""DCP's save planner, made safe for tensors that share a name but not their contents.

DCP takes a plain tensor that several ranks hold under one name for replicated and stores one rank's,
whichever has the least to write. That is right for the parameters under DDP and wrong for whatever ranks
change on their own, such as BatchNorm's running statistics: a resume would give every rank some other rank's.
So each rank sends a digest of every plain tensor along with its plan; where they differ, the lowest rank's is
stored under the name itself and each other rank's beside it, as `holdfast.own_<rank>.<name>`, for that rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.state import OWN


def own_prefix(rank: int) -> str:
    return f"{OWN}.own_{rank:05d}."


class SnapshotPlanner(DefaultSavePlanner):
    """Collects the state when DCP asks for it, so that a failure to collect is shared like any other."""

    def __init__(self, collect: Callable[[], dict[str, Any]], rank: int, world: int) -> None:
        super().__init__(dedup_save_to_lowest_rank=False)
        self._collect = collect
        self._prefix = own_prefix(rank)
        self._world = world

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        del state_dict
        super().set_up_planner(self._collect(), storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if self._world == 1:
            return plan
        # `storage_data` travels to the coordinator unread by anyone else until the global plan is made.
        return dataclasses.replace(plan, storage_data=_digests(self.state_dict))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._world > 1:
            differing = differing_names([plan.storage_data for plan in all_plans])
            all_plans = [
                _store_own(plan, differing.get(rank, frozenset()), own_prefix(rank))
                for rank, plan in enumerate(all_plans)
            ]
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(dataclasses.replace(index, fqn=index.fqn.removeprefix(self._prefix)))


def differing_names(digests: Sequence[Mapping[str, str]]) -> dict[int, frozenset[str]]:
    """Pure: for each rank, the names whose contents differ from those of the lowest rank that has them."""
    first: dict[str, str] = {}
    differing: dict[int, frozenset[str]] = {}
    for rank, mine in enumerate(digests):
        differing[rank] = frozenset(
            name for name, digest in mine.items() if first.get(name, digest) != digest
        )
        for name, digest in mine.items():
            first.setdefault(name, digest)
    return differing


def _store_own(plan: SavePlan, names: frozenset[str], prefix: str) -> SavePlan:
    items = [
        dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=prefix + item.index.fqn))
        if item.index.fqn in names
        else item
        for item in plan.items
    ]
    mappings = {
        **plan.planner_data,
        **{prefix + name: (*prefix.rstrip(".").split("."), name) for name in names},
    }
    return dataclasses.replace(plan, items=items, storage_data=None, planner_data=mappings)


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    """A digest of each plain tensor, to tell whether two differ; stored bytes have digests of their own."""
    found: dict[str, str] = {}
    on_device: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or name.startswith(f"{OWN}."):
            continue
        tensor = value.detach().resolve_conj().resolve_neg()
        if tensor.is_cpu:
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            found[name] = xxhash.xxh3_64_hexdigest(raw.data)
        elif tensor.numel():
            raw_bytes = tensor.contiguous().reshape(-1).view(torch.uint8)
            on_device[name] = _sum_on_device(raw_bytes)
    if on_device:
        # One read-back for all of them: a device is not waited for tensor by tensor.
        sums = torch.stack(list(on_device.values())).cpu().tolist()
        found.update({name: f"{value:x}" for name, value in zip(on_device, sums, strict=True)})
    return found


def _sum_on_device(raw: torch.Tensor) -> torch.Tensor:
    """A wrapping 64-bit sum of the bytes taken as words, without widening them in memory."""
    whole = raw.numel() // 8 * 8
    words = (
        raw[:whole].view(torch.int64).sum()
        if whole
        else torch.zeros((), dtype=torch.int64, device=raw.device)
    )
    return words + raw[whole:].sum(dtype=torch.int64) * 0x9E3779B1
