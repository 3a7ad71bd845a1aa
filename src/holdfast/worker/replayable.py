"""Whether a loader can give the same batches again: told by its looks, and by its use.

`unfit` knows what no position could be taken up of. `Evidence` keeps digests of an epoch's batches, so that a
replay can be compared with what it repeats, and sees who draws random numbers when: a loader that draws from
a generator between two draws of training would draw something else in a replay, where nobody trains.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from holdfast.torch_internals import tree_leaves
from holdfast.worker.batches import GlobalBatches
from holdfast.worker.rng import generators_in, host_generators, one_way_parts, walk


class Evidence:
    """What is known of the present epoch's batches: digests of them, and who drew random numbers when."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self._generators = generators
        self.begin()

    def begin(self) -> None:
        """A new epoch, or one that is gone through again."""
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
        """The sampler has given this."""
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
        """Whether other batches were given than those; and, if not, whether numbers in them differ."""
        if saved is None:
            return False, False
        now = self.state_dict()
        if saved["indices"] and now["indices"] != saved["indices"]:
            return True, False
        if saved["mixed"]:
            return False, False  # what was drawn in between is not repeated, and the contents hang on it
        return now["order"] != saved["order"], now["floats"] != saved["floats"]

    def go_on(self, saved: Mapping[str, Any] | None) -> None:
        """The batches before were replayed, or left to the loader: who drew what is as it was then."""
        self._last = None
        self._trained = set(saved["trained"] if saved else ())
        self._mixed = set(saved["mixed"] if saved else ())
        self._sampled = set(saved["sampled"] if saved else ())


def _changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {name for name, state in after.items() if before.get(name, state) != state}


class Indices:
    """A sampler's iterator whose indices are noted."""

    def __init__(self, inner: Iterator[Any], evidence: Evidence) -> None:
        self._inner = inner
        self._evidence = evidence

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> Any:
        item = next(self._inner)
        self._evidence.indices(item)
        return item


SAMPLED = 1024
"""Numbers of a large tensor that its digest looks at, besides as many at its beginning and its end."""


def _digest(batch: Any, order: xxhash.xxh3_64, floats: xxhash.xxh3_64) -> None:
    """Which samples these are goes into `order`; floating point numbers, which need not be the same to the
    last bit on another kind of processor, go into `floats`, unless there is nothing else."""
    numbers = xxhash.xxh3_64()
    named = False
    for leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor):
            order.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or not leaf.numel():
                continue  # neither a device nor other ranks are to be waited for
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
    """Why no position of this loader could be taken up exactly, as far as its looks tell; else empty."""
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
    """Holdfast's own GlobalBatches seeds the global generators of its workers, and no others."""
    if not isinstance(loader, GlobalBatches) or not loader.workers or not (found := generators_in(loader)):
        return ""
    return (
        f"{found[0].removeprefix('_dataset.')} is a generator of the dataset's own, of which each worker of "
        "GlobalBatches has a copy that begins anew after a resume. Draw from the global generators, or set "
        "num_workers=0"
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
    """Whether this loader's own state is known to leave something out, so that replaying it is what is exact.

    Hugging Face's streaming datasets leave out the contents of shuffle buffers, and may leave out a batch
    where a batched map meets a format; they say so in `IterableDataset.load_state_dict`.
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
