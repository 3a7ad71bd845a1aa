"""A data source whose order and position do not depend on how many ranks share it.

Each epoch has one global order, drawn from seed and epoch alone, cut into global batches; a rank takes its
slice of each. So the position is one number for the whole job: it can be taken up at any world size without
repeating or leaving out a sample, and it costs nothing to restore.

What a dataset draws in worker processes depends on seed, epoch and sample alone: a worker that is started
amid an epoch knows nothing of the samples before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader, Dataset

from holdfast.errors import IncompleteStateError, UsageError


class GlobalBatches:
    """Iterates over one epoch, or the rest of one, yielding this rank's slice of each global batch.

    `batch_size` is that of the whole job. A last batch that is not full is left out. Where the number of
    ranks does not divide `batch_size`, slices differ by one sample. Other keywords go to torch's DataLoader.
    """

    has_global_position = True

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        **loader: Any,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise UsageError(
                "GlobalBatches needs a dataset with a length; an iterable one has no global order"
            )
        if not 1 <= batch_size <= len(dataset):
            raise UsageError(f"batch_size is {batch_size}; the dataset has {len(dataset)} samples")
        grouped = dist.is_available() and dist.is_initialized()
        self._rank = rank if rank is not None else dist.get_rank() if grouped else 0
        self._world = world_size if world_size is not None else dist.get_world_size() if grouped else 1
        if batch_size < self._world:
            raise UsageError(f"batch_size is {batch_size}: {self._world} ranks cannot share it")
        self._dataset = dataset
        self._length = len(dataset)
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._loader = loader
        self._epoch = 0
        self._batch = 0

    @property
    def workers(self) -> int:
        """Worker processes."""
        return int(self._loader.get("num_workers", 0))

    @property
    def length(self) -> int:
        """Samples of the dataset."""
        return self._length

    def samples(self, first: int, last: int) -> list[int]:
        """The indices of this rank's slices of these batches of the present epoch."""
        order = self._order()()
        slices = (
            order[number * self._batch_size : (number + 1) * self._batch_size][self._rank :: self._world]
            for number in range(first, last + 1)
        )
        return [index for one in slices for index in one.tolist()]

    def __len__(self) -> int:
        """Global batches an epoch."""
        return self._length // self._batch_size

    def __iter__(self) -> Iterator[Any]:
        slices = _Slices(self._order(), self._batch_size, self._batch, self._rank, self._world)
        # A DataLoader draws a seed for its workers when it is opened. Not from the training's generator: a
        # resume opens it once more, and everything random after that would differ.
        own = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        chosen = {"generator": own, **self._loader}
        dataset: Dataset[Any] = self._dataset
        if self.workers:
            dataset = _Seeded(dataset, f"{self._seed}/{self._epoch}")
        for batch in DataLoader(dataset, batch_sampler=slices, **chosen):
            self._batch += 1
            yield batch
        self._epoch, self._batch = self._epoch + 1, 0

    def _order(self) -> Callable[[], torch.Tensor]:
        epoch = self._epoch

        def order() -> torch.Tensor:
            if not self._shuffle:
                return torch.arange(self._length)
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            return torch.randperm(self._length, generator=generator)

        return order

    def state_dict(self) -> dict[str, int]:
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "batch_size": self._batch_size,
            "length": self._length,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        now = self.state_dict()
        changed = [name for name in ("batch_size", "length", "seed", "shuffle") if state[name] != now[name]]
        if changed:
            told = ", ".join(f"{name} {state[name]} → {now[name]}" for name in changed)
            raise IncompleteStateError(f"the data position does not fit this GlobalBatches: {told}")
        self._epoch, self._batch = state["epoch"], state["batch"]


class _Seeded(Dataset[Any]):
    """A dataset whose worker's global generators are seeded for each sample; for the rest it is as it was."""

    def __init__(self, inner: Dataset[Any], seed: str) -> None:
        self._inner = inner
        self._seed = seed
        if hasattr(inner, "__getitems__"):
            self.__getitems__ = self._many

    def __getitem__(self, index: int) -> Any:
        self._prepare(index)
        return self._inner[index]

    def _many(self, indices: list[int]) -> Any:
        self._prepare(indices)
        return self._inner.__getitems__(indices)  # type: ignore[attr-defined]

    def _prepare(self, which: int | list[int]) -> None:
        seed = xxhash.xxh3_64_intdigest(f"{self._seed}/{which}".encode())
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also asks for devices
        if "numpy" in sys.modules:
            import numpy

            numpy.random.seed(seed % 2**32)

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "__getitems__"):  # not there: while it is unpickled, or at all
            raise AttributeError(name)
        return getattr(self._inner, name)


class _Slices:
    """One rank's share of the rest of an epoch, as a batch sampler."""

    def __init__(
        self, order: Callable[[], torch.Tensor], batch_size: int, first: int, rank: int, world: int
    ) -> None:
        self._order = order
        self._batch_size = batch_size
        self._first = first
        self._rank = rank
        self._world = world

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for number in range(self._first, len(order) // self._batch_size):
            whole = order[number * self._batch_size : (number + 1) * self._batch_size]
            yield whole[self._rank :: self._world].tolist()
