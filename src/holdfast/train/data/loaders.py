"""Loaders: one that any number of ranks can share, whether a loader can repeat itself, and a batch's samples.

`unfit` recognises loaders whose position nothing could restore. `BatchEvidence` keeps digests of an epoch's
batches, so that a replay can be compared with what it repeats, and notes who draws random numbers when: a
loader that draws from a generator between two draws of training would draw something else in a replay, where
nobody trains.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
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

from holdfast.base import tree_leaves
from holdfast.errors import IncompleteStateError, UsageError
from holdfast.train.data.rng import generators_in, host_generators, one_way_parts, walk

# A data source whose order and position do not depend on how many ranks share it.
#
# Each epoch has one global order, drawn from seed and epoch alone, cut into global batches; a rank takes its
# slice of each. So the position is one number for the whole job: any world size can continue from it without
# repeating or leaving out a sample, and it costs nothing to restore.
#
# What a dataset draws in worker processes depends on seed, epoch and sample alone: a worker that is started
# in the middle of an epoch knows nothing of the samples before.


class GlobalBatches:
    """Iterates over one epoch, or the rest of one, yielding this rank's slice of each global batch.

    `batch_size` is that of the whole job. A last batch that is not full is left out. If the number of ranks
    does not divide `batch_size`, slices differ by one sample. Other keywords go to torch's DataLoader.
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
        """The number of worker processes."""
        return int(self._loader.get("num_workers", 0))

    @property
    def length(self) -> int:
        """The number of samples in the dataset."""
        return self._length

    def samples(self, first: int, last: int) -> list[int]:
        """The indices in this rank's slices of these batches of the current epoch."""
        order = self._order()()
        slices = (
            order[number * self._batch_size : (number + 1) * self._batch_size][self._rank :: self._world]
            for number in range(first, last + 1)
        )
        return [index for part in slices for index in part.tolist()]

    def __len__(self) -> int:
        """Global batches per epoch."""
        return self._length // self._batch_size

    def __iter__(self) -> Iterator[Any]:
        slices = _Slices(self._order(), self._batch_size, self._batch, self._rank, self._world)
        # A DataLoader draws a seed for its workers when it is opened. That must not come from the training's
        # generator: a resume opens it once more, and everything random after that would differ.
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
            differences = ", ".join(f"{name} {state[name]} → {now[name]}" for name in changed)
            raise IncompleteStateError(f"the data position does not fit this GlobalBatches: {differences}")
        self._epoch, self._batch = state["epoch"], state["batch"]


class _Seeded(Dataset[Any]):
    """A dataset that seeds its worker's global generators for each sample, and is otherwise unchanged."""

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
        if name in ("_inner", "__getitems__"):  # missing: while it is being unpickled, or altogether
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


class BatchEvidence:
    """What is known of the current epoch's batches: digests of them, and who drew random numbers when."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self._generators = generators
        self.begin()

    def begin(self) -> None:
        """A new epoch begins, or one is replayed."""
        self._order, self._floats, self._taken = xxhash.xxh3_64(), xxhash.xxh3_64(), xxhash.xxh3_64()
        self._watches_indices = False
        self._trained: set[str] = set()
        self._mixed: set[str] = set()
        self._sampled: set[str] = set()
        self._before: dict[str, bytes] = {}
        self._last: dict[str, bytes] | None = None

    def before(self) -> None:
        self._before = host_generators(self._generators)
        self._note_training(self._before)

    def _note_training(self, now: dict[str, bytes]) -> None:
        if self._last is not None:
            self._trained |= _changed(self._last, now)

    def indices(self, item: Any) -> None:
        """The sampler has just given this."""
        self._watches_indices = True
        self._taken.update(repr(item).encode())
        self._sampled |= _changed(self._before, host_generators(self._generators)) & self._trained

    @property
    def taken(self) -> str:
        """A digest of what the sampler has given in this epoch; empty if that is not watched."""
        return self._taken.hexdigest() if self._watches_indices else ""

    def after(self, batch: Any) -> None:
        self._last = host_generators(self._generators)
        self._mixed |= _changed(self._before, self._last) & self._trained
        _digest(batch, self._order, self._floats)

    def state_dict(self) -> dict[str, Any]:
        self._note_training(host_generators(self._generators))
        return {
            "order": self._order.hexdigest(),
            "floats": self._floats.hexdigest(),
            "indices": self.taken,
            "trained": sorted(self._trained),
            "mixed": sorted(self._mixed),
            "sampled": sorted(self._sampled),
        }

    def differs(self, saved: Mapping[str, Any] | None) -> tuple[bool, bool]:
        """Whether the batches given differ from those; and, if not, whether numbers in them differ."""
        if saved is None:
            return False, False
        now = self.state_dict()
        if saved["indices"] and now["indices"] != saved["indices"]:
            return True, False
        if saved["mixed"]:
            return False, False  # what was drawn in between is not repeated, and the contents depend on it
        return now["order"] != saved["order"], now["floats"] != saved["floats"]

    def go_on(self, saved: Mapping[str, Any] | None) -> None:
        """Earlier batches were replayed, or left to the loader: who drew what is as it was then."""
        self._last = None
        self._trained = set(saved["trained"] if saved else ())
        self._mixed = set(saved["mixed"] if saved else ())
        self._sampled = set(saved["sampled"] if saved else ())


def _changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {name for name, state in after.items() if before.get(name, state) != state}


class Indices:
    """A sampler's iterator, with its indices noted."""

    def __init__(self, inner: Iterator[Any], evidence: BatchEvidence) -> None:
        self._inner = inner
        self._evidence = evidence

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> Any:
        item = next(self._inner)
        self._evidence.indices(item)
        return item


SAMPLED = 1024
"""How many numbers of a large tensor its digest samples, besides as many at its beginning and its end."""


def _digest(batch: Any, order: xxhash.xxh3_64, floats: xxhash.xxh3_64) -> None:
    """What identifies the samples goes into `order`; floating point numbers, which need not be the same to
    the last bit on another kind of processor, go into `floats`, unless there is nothing else."""
    numbers = xxhash.xxh3_64()
    named = False
    for leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor):
            order.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or not leaf.numel():
                continue  # this must wait neither for a device nor for other ranks
            inexact = leaf.is_floating_point() or leaf.is_complex()
            (numbers if inexact else order).update(_sample(leaf))
            named = named or not inexact
        elif isinstance(leaf, float):
            numbers.update(repr(leaf).encode())
        elif isinstance(leaf, str | bytes | int | None):
            order.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
            named = True
        else:
            order.update(type(leaf).__qualname__.encode())
    floats.update(numbers.digest())
    if not named:
        order.update(numbers.digest())


def _leaves(batch: Any) -> Iterator[Any]:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):  # such as Hugging Face's BatchEncoding
            yield from _leaves(dict(leaf))
        elif type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
            try:
                yield torch.as_tensor(leaf)
            except TypeError:
                yield str(leaf)
        else:
            yield leaf


def _sample(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return b""
    flat = tensor.detach().resolve_conj().resolve_neg()
    if flat.numel() > 4 * SAMPLED:
        if not flat.is_contiguous():
            flat = flat[(0,) * (flat.dim() - 1)]
        flat = flat.reshape(-1)
        step = max(1, flat.numel() // SAMPLED)
        flat = torch.cat([flat[:SAMPLED], flat[-SAMPLED:], flat[::step]])
    return flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- what a loader is made of -------------------------------------------------------------------------------


def unfit(loader: object) -> str:
    """Why no position of this loader could be restored exactly, as far as can be seen now; else empty."""
    for part in walk(loader):
        thing = part.thing
        if isinstance(thing, random.SystemRandom):
            return f"{part.path} draws from the operating system's random numbers, which cannot be repeated"
        if part.called:
            continue
        if thing is loader and (why := _unfit_global(thing)):
            return why
        if isinstance(thing, DataLoader) and (why := _unfit_loader(thing, nested=thing is not loader)):
            return why
        if type(thing).__module__.startswith("webdataset") and (why := _unfit_stage(thing)):
            return why
    return ""


def _unfit_loader(loader: Any, *, nested: bool) -> str:
    kind, dataset = type(loader).__name__, loader.dataset
    iterable = isinstance(dataset, IterableDataset)
    if not getattr(loader, "in_order", True) and loader.num_workers > 1:
        return (
            f"{kind}(in_order=False) gives its batches in the order in which {loader.num_workers} workers "
            "happen to finish them. Set in_order=True, or num_workers=1"
        )
    if loader.num_workers and loader.persistent_workers and (iterable or nested):
        what = f"the iterable {name_of(dataset)}" if iterable else "a loader within another one"
        return (
            f"{kind}(persistent_workers=True) keeps {what} in workers whose state nothing can restore after "
            "the first epoch. Set persistent_workers=False"
        )
    keeps = hasattr(loader, "load_state_dict") and hasattr(dataset, "load_state_dict")
    if iterable and not loader.num_workers and not keeps and (held := one_way_parts(dataset)):
        name, thing = next(iter(held.items()))
        return (
            f"{name_of(dataset)}.{name} is a one-way iterator ({type(thing).__name__}); its position cannot "
            "be set. Make it in __iter__, or give the dataset state_dict and load_state_dict and use "
            "StatefulDataLoader"
        )
    return ""


def _unfit_global(loader: Any) -> str:
    """Holdfast's own GlobalBatches seeds the global generators of its workers, but no others."""
    if not isinstance(loader, GlobalBatches) or not loader.workers or not (found := generators_in(loader)):
        return ""
    return (
        f"{found[0].removeprefix('_dataset.')} is a generator of the dataset's own; each worker of "
        "GlobalBatches has a copy of it that begins anew after a resume. Draw from the global generators, or "
        "set num_workers=0"
    )


def _unfit_stage(stage: Any) -> str:
    """Stages of a webdataset pipeline that take their seed from the clock."""
    held = getattr(stage, "__dict__", {})
    if getattr(held.get("f"), "__name__", "") == "_shuffle":
        options, rest = held.get("kw", {}), held.get("args", ())
        if options.get("seed") is None and options.get("rng") is None and len(rest) < 3:
            return "webdataset's shuffle() takes its seed from the clock. Give it one: shuffle(…, seed=…)"
    if type(stage).__name__ == "ResampledShards" and not held.get("deterministic"):
        return (
            "webdataset's resampled shards take their seed from the clock. Use "
            "ResampledShards(…, deterministic=True)"
        )
    return ""


def loses_state(loader: object) -> bool:
    """Whether this loader's own state is known to leave something out, so that only a replay is exact.

    Hugging Face's streaming datasets leave out the contents of shuffle buffers, and may leave out a batch
    where a batched map is combined with a format; they say so in `IterableDataset.load_state_dict`.
    """
    dataset = getattr(loader, "dataset", None)
    if not type(dataset).__module__.startswith("datasets."):
        return False
    for part in walk(dataset):
        name = type(part.thing).__name__
        if name == "BufferShuffledExamplesIterable":
            return True
        if name == "MappedExamplesIterable" and part.thing.batched and part.thing.formatting is not None:
            return True
    return False


def name_of(thing: object) -> str:
    return type(thing).__name__


# Which samples a batch was made of, worked out when somebody asks.
#
# Guarantee: what is named is what the loader gave, or nothing is named. The sampler is run through once
# more, from where the epoch began; if the loader samples in this process, the indices are compared with the
# digest of those that it drew. Afterwards random numbers and generators are as they were before, so the
# position and everything drawn later are the same as if nobody had asked. While training runs, this costs
# nothing.


MOST = 10_000_000
"""Longest epoch, in samples, that is run through again: the order alone of a longer one takes much memory."""
_PURE = (SequentialSampler, DistributedSampler)
"""Samplers whose order is known from what they are: they draw nothing from shared generators."""
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
    """The indices in batches `first` to `last` of the current epoch, in order; empty if they are not known.

    `start`: the random state at the epoch's start; `drawn`: batches drawn since; `digest`: that of what the
    sampler gave for them, empty if that was not watched.
    """
    if isinstance(loader, GlobalBatches):
        return loader.samples(first, last) if loader.length <= MOST else []
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return []
    if not _is_known(loader, epoch):
        return []
    torch_now, states = torch.get_rng_state(), [generator.get_state() for generator in generators]
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
    if len(given) < drawn or (digest and _digest_of(given) != digest):
        return []
    chosen = given[first : last + 1]
    return [int(index) for item in chosen for index in (item if isinstance(item, list) else [item])]


def _sampling(loader: DataLoader[Any]) -> dict[str, Any]:
    if loader.batch_sampler is None:
        return {"sampler": loader.sampler, "batch_size": None}
    return {"batch_sampler": loader.batch_sampler}


def _is_known(loader: DataLoader[Any], epoch: int) -> bool:
    """Whether running through the sampler again gives what it gave, and changes nothing in it."""
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
        # A loader whose workers live on draws no new seed for them in a later epoch, but a new loader does.
        return not (loader.num_workers and loader.persistent_workers and epoch)
    return own is not torch.default_generator and loader.generator in (None, own)


class _Indices(Dataset[int]):
    """Stands in for the user's dataset: nothing is loaded."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


def _as_it_is(items: Any) -> Any:
    return items


def _digest_of(given: Sequence[Any]) -> str:
    """The digest, made as `BatchEvidence.indices` makes it."""
    found = xxhash.xxh3_64()
    for item in given:
        found.update(repr(item).encode())
    return found.hexdigest()
