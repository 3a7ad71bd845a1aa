"""Which samples a batch was made of, worked out when somebody asks.

Guarantee: what is named is what the loader gave, or nothing is named. The sampler is gone through once more,
from where the epoch began; where the loader samples in this process the indices are compared with the digest
of those that it drew. Random numbers and generators are afterwards as they were before, so the position and
everything that is drawn later are the same as if nobody had asked. While training runs, this costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from holdfast.worker.batches import GlobalBatches

MOST = 10_000_000
"""Samples of an epoch up to which it is gone through again: of more, its order alone takes much memory."""
_PURE = (SequentialSampler, DistributedSampler)
"""Their order is known from what they are: they draw nothing from generators that others share."""
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def samples_of(
    loader: object,
    first: int,
    last: int,
    *,
    epoch: int,
    start: Mapping[str, Any],
    generators: Sequence[torch.Generator],
    drawn: int,
    digest: str,
) -> list[int]:
    """The indices in batches `first` to `last` of the present epoch, in order; empty if they are not known.

    `start`: the random state at the epoch's start; `drawn`: batches that were drawn since; `digest`: of what
    the sampler gave for them, empty if that was not watched.
    """
    if isinstance(loader, GlobalBatches):
        return loader.samples(first, last) if loader.length <= MOST else []
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return []
    if not _is_known(loader, epoch):
        return []
    torch_now, states = torch.get_rng_state(), [one.get_state() for one in generators]
    try:
        if "torch" not in start.get("rng", {}):
            return []
        torch.set_rng_state(start["rng"]["torch"])
        for generator, state in zip(generators, start.get("generators", states), strict=True):
            generator.set_state(state)
        again: Any = DataLoader(
            _Indices(), **_sampling(loader), generator=loader.generator, collate_fn=_as_it_is
        )
        given = list(itertools.islice(again, drawn))
    finally:
        torch.set_rng_state(torch_now)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    if len(given) < drawn or (digest and _digest(given) != digest):
        return []
    chosen = given[first : last + 1]
    return [int(index) for item in chosen for index in (item if isinstance(item, list) else [item])]


def _sampling(loader: DataLoader[Any]) -> dict[str, Any]:
    if loader.batch_sampler is None:
        return {"sampler": loader.sampler, "batch_size": None}
    return {"batch_sampler": loader.batch_sampler}


def _is_known(loader: DataLoader[Any], epoch: int) -> bool:
    """Whether going through the sampler again gives what it gave, and changes nothing in it."""
    sampler: Any = loader.sampler
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            return False
        sampler = loader.batch_sampler.sampler
    if type(sampler) not in (*_PURE, *_DRAWING) or len(sampler) > MOST:
        return False
    if type(sampler) in _PURE:
        return True
    own = sampler.generator
    if own is None:
        # Workers that live on draw no new seed for themselves in a later epoch, and a new loader does.
        return not (loader.num_workers and loader.persistent_workers and epoch)
    return own is not torch.default_generator and loader.generator in (None, own)


class _Indices(Dataset[int]):
    """In place of the user's: nothing is loaded."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


def _as_it_is(items: Any) -> Any:
    return items


def _digest(given: Sequence[Any]) -> str:
    """As `Evidence.indices` makes it."""
    found = xxhash.xxh3_64()
    for item in given:
        found.update(repr(item).encode())
    return found.hexdigest()
