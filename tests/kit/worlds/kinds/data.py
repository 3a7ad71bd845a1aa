"""The loaders that every kind of training may get its batches from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from kit.worlds.kinds.kind import BATCH, SAMPLES, WIDTH, Place


class Numbers(Dataset[tuple[int, Tensor]]):
    """Each sample is the same whenever it is read."""

    def __init__(self, noisy: bool = False) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        if self.noisy:
            x = x + torch.randn(WIDTH) * 0.1 + random.random() + float(np.random.rand())
        return index, x


class Stream(IterableDataset[tuple[int, Tensor]]):
    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        numbers = Numbers()
        for index in range(SAMPLES):
            yield numbers[index]


class EpochSampler(torch.utils.data.Sampler[int]):
    """Its order is that of the epoch it is told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = torch.Generator().manual_seed(100 + self.epoch)
        return iter(torch.randperm(SAMPLES, generator=order).tolist())


class GlobalOrder:
    """What `holdfast.GlobalBatches(Numbers(), 8, seed=2)` gives, written down once more without it."""

    def __init__(self, place: Place) -> None:
        self.place, self.epoch = place, 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(2 * 1_000_003 + self.epoch))
        self.epoch += 1
        numbers = Numbers()
        for first in range(0, SAMPLES - 7, 8):
            ids = order[first : first + 8][self.place.rank :: self.place.world].tolist()
            yield torch.tensor(ids), torch.stack([numbers[index][1] for index in ids])


def _distributed(place: Place) -> DataLoader[Any]:
    from torch.utils.data.distributed import DistributedSampler

    sampler = DistributedSampler(Numbers(), place.world, place.rank, seed=4)
    return DataLoader(Numbers(), batch_size=BATCH, sampler=sampler)


def _stateful(place: Place) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True)


def _global(place: Place) -> Any:
    return GlobalOrder(place)


DATA: dict[str, Callable[[Place], Any]] = {
    "shuffled": lambda place: DataLoader(Numbers(), batch_size=BATCH, shuffle=True),
    "in order": lambda place: DataLoader(Numbers(), batch_size=BATCH),
    "with a generator": lambda place: DataLoader(
        Numbers(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "augmented": lambda place: DataLoader(Numbers(noisy=True), batch_size=BATCH, shuffle=True),
    "batch sampler": lambda place: DataLoader(
        Numbers(),
        batch_sampler=BatchSampler(
            RandomSampler(Numbers(), generator=torch.Generator().manual_seed(6)), BATCH, False
        ),
    ),
    "set_epoch": lambda place: DataLoader(Numbers(), batch_size=BATCH, sampler=EpochSampler()),
    "weighted": lambda place: DataLoader(
        Numbers(),
        batch_size=BATCH,
        sampler=torch.utils.data.WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES),
    ),
    "stream": lambda place: DataLoader(Stream(), batch_size=BATCH),
    "workers": lambda place: DataLoader(Numbers(noisy=True), batch_size=BATCH, shuffle=True, num_workers=2),
    "persistent workers": lambda place: DataLoader(
        Numbers(), batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stateful": _stateful,
    "distributed": _distributed,
    "global": _global,
}
"""A loader each; 'distributed' and 'global' share the samples out among the ranks."""
ALONE = tuple(name for name in DATA if name != "distributed")
"""Those that go with one rank."""
SLOW_DATA = ("workers", "persistent workers", "stateful")
