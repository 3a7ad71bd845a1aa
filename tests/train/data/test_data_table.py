"""The table of docs/guides/data.md, walked: every kind of loader is exact, or refused by name.

For each row the plain loop, without Holdfast, says what is right: the samples, their contents, and the random
numbers that training draws in between. A feed that is never interrupted must give the same, and so must feeds
that take up positions of it: within an epoch, at its last batch, between epochs, and in later ones.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.errors import IncompleteStateError, SaveFailedError, UsageError
from holdfast.train.data import feed as data
from holdfast.train.data.feed import DataFeed
from holdfast.train.data.rng import capture_rng, restore_rng
from kit.harness import REPO
from kit.runs import warnings_of
from kit.tiny import checkpoints

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = REPO / "docs" / "guides" / "data.md"
SAMPLES, BATCH = 10, 2
BATCHES = SAMPLES // BATCH


def noise() -> list[float]:
    """A random augmentation that uses every global generator."""
    return [torch.rand(1).item(), random.random(), numpy.random.rand()]


class Noisy(Dataset[Any]):
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, torch.tensor([index, *noise()], dtype=torch.float64)


class OwnGenerators(Noisy):
    """Augments from generators of its own, one of which is made when it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = numpy.random.default_rng(3)
        self.other = random.Random(4)
        self.late: torch.Generator | None = None

    def __getitem__(self, index: int) -> Any:
        if self.late is None:
            self.late = torch.Generator().manual_seed(5)
        drawn = [self.rng.random(), self.other.random(), torch.rand(1, generator=self.late).item()]
        return index, torch.tensor([index, *drawn], dtype=torch.float64)


class Counting(Noisy):
    """What it gives depends on how often it was asked."""

    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return index, torch.tensor([index, self.asked])


class Stream(IterableDataset[Any]):
    """Ten samples, shared out to workers; with a random augmentation if `draws`."""

    def __init__(self, draws: bool = True) -> None:
        self.draws = draws

    def ids(self) -> Iterable[int]:
        info = get_worker_info()
        return range(info.id, SAMPLES, info.num_workers) if info is not None else range(SAMPLES)

    def __iter__(self) -> Iterator[Any]:
        for index in self.ids():
            yield index, torch.tensor([index, *(noise() if self.draws else [0.0] * 3)], dtype=torch.float64)


class SizedStream(Stream):
    def __len__(self) -> int:
        return SAMPLES


class LyingStream(Stream):
    def __len__(self) -> int:
        return 4


class Endless(Stream):
    def ids(self) -> Iterable[int]:
        at = 0
        while True:
            yield at
            at += 1


class Counted(Stream):
    """Its order depends on an epoch that it counts itself, and on a position that goes on."""

    def __init__(self) -> None:
        super().__init__(draws=False)
        self.epoch = 0
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        order = list(range(SAMPLES))
        random.Random(self.epoch).shuffle(order)
        for index in order:
            self.given += 1
            yield index, self.given


class OwnShuffle(Stream):
    """A shuffle buffer with a generator of its own."""

    def __init__(self) -> None:
        super().__init__(draws=False)
        self.rng = numpy.random.default_rng(11)

    def __iter__(self) -> Iterator[Any]:
        yield from shuffled(super().__iter__(), lambda n: int(self.rng.integers(n)))


class SharedShuffle(Stream):
    """A shuffle buffer that draws from the global generator, as training does."""

    def __init__(self) -> None:
        super().__init__(draws=False)

    def __iter__(self) -> Iterator[Any]:
        yield from shuffled(super().__iter__(), random.randrange)


def shuffled(source: Iterable[Any], draw: Callable[[int], int]) -> Iterator[Any]:
    buffer: list[Any] = []
    for item in source:
        buffer.append(item)
        if len(buffer) == 4:
            yield buffer.pop(draw(4))
    while buffer:
        yield buffer.pop(draw(len(buffer)))


class Wrapped(IterableDataset[Any]):
    """A generator that somebody has wrapped."""

    def __init__(self, inner: Iterator[Any] | None = None) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        if self.inner is None:
            self.inner = iter(range(1000))
        for _ in range(SAMPLES):
            yield next(self.inner)


class Lengthening(Noisy):
    """Another number of samples in each epoch, as the script says."""


class Chunks(Sampler[int]):
    """Draws its order from the global generator, a few samples at a time."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES // 5):
            yield from torch.randint(SAMPLES, (5,)).tolist()


class Turning(Sampler[int]):
    """Begins each epoch a few samples further; its order is a list that it holds."""

    def __init__(self) -> None:
        self.order = list(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.order = [*self.order[5:], *self.order[:5]]
        return iter(list(self.order))


class ByEpoch(Sampler[int]):
    """A sampler of somebody's own, whose epoch cannot be read."""

    def __init__(self) -> None:
        self._order = list(range(SAMPLES))

    def set_epoch(self, epoch: int) -> None:
        self._order = list(range(SAMPLES))
        random.Random(epoch).shuffle(self._order)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


class Batches:
    """A loader that is no DataLoader."""

    def __init__(self) -> None:
        self.rng = random.Random(8)
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        order = self.rng.sample(range(SAMPLES), SAMPLES)
        for at in range(0, SAMPLES, BATCH):
            yield self.epoch, order[at : at + BATCH]


class OwnState(Batches):
    """The same with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < BATCHES:
            self.at += 1
            yield self.at, random.Random(self.at).random()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulStream(Stream):
    """An iterable dataset that can say where it is."""

    def __init__(self, draws: bool = True) -> None:
        super().__init__(draws)
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        ids = list(self.ids())
        self.at, self.begin = self.begin, 0
        while self.at < len(ids):
            index = ids[self.at]
            self.at += 1
            yield index, torch.tensor([index, *(noise() if self.draws else [0.0])], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


class Forgetful(StatefulStream):
    """One that cannot tell its end from its beginning."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at % len(list(self.ids()))}


def seed_numpy(worker: int) -> None:
    numpy.random.seed((torch.initial_seed() + worker) % 2**32)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(17)


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset if dataset is not None else Noisy(), **{"batch_size": BATCH, **options})


def stateful(dataset: Any = None, **options: Any) -> StatefulDataLoader[Any]:
    dataset = dataset if dataset is not None else Noisy()
    return StatefulDataLoader(dataset, **{"batch_size": BATCH, **options})


WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}
PERSISTENT = {**WORKERS, "persistent_workers": True}


# --- Hugging Face datasets and webdataset, from memory and from files of the test ---------------------------


def hf_map() -> Any:
    from datasets import Dataset as HfDataset

    return HfDataset.from_dict({"id": list(range(SAMPLES)), "text": [f"s{i}" for i in range(SAMPLES)]})


def hf_stream(shuffle: bool = False) -> Any:
    stream = hf_map().to_iterable_dataset(num_shards=2)
    return stream.shuffle(seed=3, buffer_size=4) if shuffle else stream


def hf_interleaved() -> Any:
    from datasets import interleave_datasets

    return interleave_datasets([hf_stream(), hf_stream(True)], probabilities=[0.3, 0.7], seed=5)


def hf_files(tmp_path: Path) -> Any:
    from datasets import load_dataset

    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"id": {i}}}\n' for i in range(SAMPLES)))
    return load_dataset("json", data_files=[str(path)], split="train", streaming=True, cache_dir=tmp_path)


def hf_mapped() -> Any:
    def noisy(example: dict[str, Any]) -> dict[str, Any]:
        return {"id": example["id"], "noise": random.random() + numpy.random.rand()}

    return hf_stream().map(noisy)


def shards(tmp_path: Path) -> list[str]:
    found = []
    for shard in range(5):
        path = tmp_path / f"{shard}.tar"
        if not path.exists():
            with tarfile.open(path, "w") as archive:
                for at in range(SAMPLES // 5):
                    data = f"{shard}-{at}".encode()
                    entry = tarfile.TarInfo(f"{shard}{at}.txt")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
        found.append(str(path))
    return found


def wds(tmp_path: Path, *stages: Any, **options: Any) -> Any:
    import webdataset

    pipeline = webdataset.WebDataset(shards(tmp_path), **{"shardshuffle": False, "seed": 1, **options})
    for stage in stages:
        pipeline = pipeline.compose(stage)
    return pipeline.decode().to_tuple("__key__", "txt")


def wds_shuffled(tmp_path: Path, **options: Any) -> Any:
    import webdataset

    return wds(tmp_path, webdataset.filters.shuffle(6, initial=4, **options))


def wds_det(tmp_path: Path) -> Any:
    import webdataset

    return wds(tmp_path, webdataset.filters.detshuffle(6, 4, seed=2))


def wds_resampled(tmp_path: Path) -> Any:
    return wds(tmp_path, resampled=True)


def web_loader(tmp_path: Path) -> Any:
    import webdataset

    inner = webdataset.WebLoader(wds_shuffled(tmp_path, seed=6), batch_size=BATCH, num_workers=0)
    return inner.compose(webdataset.filters.shuffle(3, initial=2, rng=random.Random(9)))


# --- the cases ----------------------------------------------------------------------------------------------

Script = Callable[[Any, int], None]
"""What the training script does with its loader before an epoch."""


@dataclass(frozen=True)
class Case:
    make: Callable[[Path], Any]
    script: Script = lambda loader, epoch: None
    plain: Script | None = None
    """What the plain loop does, where the run does something for the script."""
    refused: str = ""
    """Words of the error; when: at the start, or else at a save."""


def told(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch)


def told_otherwise(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch + 10)


def dataset_told(loader: Any, epoch: int) -> None:
    loader.dataset.set_epoch(epoch)


def lengthened(loader: Any, epoch: int) -> None:
    loader.dataset.length = SAMPLES if epoch == 0 else SAMPLES + 4 - 6 * (epoch % 2)


def simple(**options: Any) -> Case:
    return Case(lambda tmp_path: loader(**options))


def of(make: Callable[[], Any], **options: Any) -> Case:
    return Case(lambda tmp_path: make(), **options)


def distributed() -> Any:
    return loader(sampler=DistributedSampler(Noisy(), num_replicas=2, rank=1, seed=4), batch_size=1)


def weights() -> list[float]:
    return [1.0 + i for i in range(SAMPLES)]


CASES: dict[str, Case] = {
    "sequential": simple(),
    "shuffle": simple(shuffle=True),
    "generator": of(lambda: loader(shuffle=True, generator=generator())),
    "replacement": of(lambda: loader(sampler=RandomSampler(Noisy(), replacement=True, num_samples=70))),
    "replacement with a generator": of(
        lambda: loader(
            sampler=RandomSampler(Noisy(), replacement=True, num_samples=70, generator=generator())
        )
    ),
    "more samples than data": of(lambda: loader(sampler=RandomSampler(Noisy(), num_samples=14))),
    "subset": of(lambda: loader(sampler=SubsetRandomSampler(range(1, 9)))),
    "weighted": of(lambda: loader(sampler=WeightedRandomSampler(weights(), SAMPLES))),
    "weighted with a generator": of(
        lambda: loader(sampler=WeightedRandomSampler(weights(), SAMPLES, generator=generator()))
    ),
    "batch sampler": of(
        lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 3, drop_last=False))
    ),
    "batch_size=None": simple(batch_size=None, shuffle=True),
    "drop_last": simple(batch_size=3, shuffle=True, drop_last=True),
    "pin_memory": simple(shuffle=True, pin_memory=True),
    "DistributedSampler": of(distributed, script=told),
    "DistributedSampler, not told": of(distributed, plain=told),
    "DistributedSampler, told otherwise": of(distributed, script=told_otherwise),
    "own sampler with set_epoch": of(lambda: loader(sampler=ByEpoch()), plain=told),
    "sampler that shares training's numbers": of(
        lambda: loader(sampler=Chunks()),
        refused="the sampler (DataLoader) draws from the same random numbers",
    ),
    "dataset with generators": of(lambda: loader(OwnGenerators(), shuffle=True)),
    "dataset with counters": of(lambda: loader(Counting(), shuffle=True)),
    "sampler that turns its order": of(lambda: loader(sampler=Turning())),
    "other length in each epoch": of(lambda: loader(Lengthening(), shuffle=True), script=lengthened),
    "workers": simple(shuffle=True, **WORKERS),
    "workers, generator": of(lambda: loader(shuffle=True, generator=generator(), **WORKERS)),
    "workers, worker_init_fn": simple(shuffle=True, worker_init_fn=seed_numpy, **WORKERS),
    "workers, prefetch_factor": of(
        lambda: loader(
            sampler=RandomSampler(Noisy(), replacement=True, num_samples=70, generator=generator()),
            prefetch_factor=4,
            **WORKERS,
        )
    ),
    "workers, dataset with generators": of(lambda: loader(OwnGenerators(), shuffle=True, **WORKERS)),
    "workers, sampler that shares training's numbers": of(
        lambda: loader(sampler=Chunks(), batch_size=1, prefetch_factor=1, **WORKERS),
        refused="the sampler (DataLoader) draws from the same random numbers",
    ),
    "persistent workers": simple(shuffle=True, **PERSISTENT),
    "persistent workers, generator": of(lambda: loader(shuffle=True, generator=generator(), **PERSISTENT)),
    "persistent workers, worker_init_fn": simple(shuffle=True, worker_init_fn=seed_numpy, **PERSISTENT),
    "persistent workers, dataset with generators": of(
        lambda: loader(OwnGenerators(), shuffle=True, **PERSISTENT)
    ),
    "persistent workers, dataset with counters": of(lambda: loader(Counting(), **PERSISTENT)),
    "persistent workers, iterable": of(
        lambda: loader(Stream(), **PERSISTENT), refused="keeps the iterable Stream in workers"
    ),
    "in_order=False": of(
        lambda: loader(in_order=False, **WORKERS), refused="in the order in which 2 workers happen to finish"
    ),
    "in_order=False, one worker": of(
        lambda: loader(shuffle=True, in_order=False, num_workers=1, multiprocessing_context="fork")
    ),
    "iterable": of(lambda: loader(Stream(draws=False))),
    "iterable with a length": of(lambda: loader(SizedStream(draws=False), drop_last=True, batch_size=3)),
    "iterable with a wrong length": of(lambda: loader(LyingStream(draws=False))),
    "endless": of(lambda: loader(Endless(draws=False))),
    "iterable, workers": of(lambda: loader(Stream(), **WORKERS)),
    "iterable with a counter": of(lambda: loader(Counted())),
    "iterable with a generator": of(lambda: loader(OwnShuffle())),
    "iterable that shares training's numbers": of(
        lambda: loader(SharedShuffle()), refused="the loader (DataLoader) draws from the same random numbers"
    ),
    "iterable, workers, global numbers": of(lambda: loader(SharedShuffle(), **WORKERS)),
    "wrapped generator": of(
        lambda: loader(Wrapped(iter(range(1000)))), refused="Wrapped.inner is a one-way iterator"
    ),
    "iterator kept from epoch to epoch": of(
        lambda: loader(Wrapped()), refused="Wrapped.inner is an iterator that goes on from epoch to epoch"
    ),
    "wrapped generator, workers": of(lambda: loader(Wrapped(iter(range(1000))), **WORKERS)),
    "one-way iterator": of(lambda: iter([1, 2]), refused="one-way iterator"),
    "own loader": of(Batches),
    "own loader with state_dict": of(OwnState),
    "GlobalBatches": of(lambda: holdfast.GlobalBatches(Noisy(), BATCH, seed=2)),
    "GlobalBatches, workers": of(lambda: holdfast.GlobalBatches(Noisy(), BATCH, seed=2, **WORKERS)),
    "GlobalBatches, workers, dataset with generators": of(
        lambda: holdfast.GlobalBatches(OwnGenerators(), BATCH, seed=2, **WORKERS),
        refused="rng is a generator of the dataset's own",
    ),
    "GlobalBatches, dataset with generators": of(
        lambda: holdfast.GlobalBatches(OwnGenerators(), BATCH, seed=2)
    ),
    "StatefulDataLoader": of(lambda: stateful(shuffle=True)),
    "StatefulDataLoader, generator": of(lambda: stateful(shuffle=True, generator=generator())),
    "StatefulDataLoader, torch's sampler": of(lambda: stateful(sampler=RandomSampler(Noisy()))),
    "StatefulDataLoader, batch sampler": of(
        lambda: stateful(
            batch_size=1, batch_sampler=BatchSampler(RandomSampler(Noisy(), generator=generator()), 3, False)
        )
    ),
    "StatefulDataLoader, workers": of(lambda: stateful(shuffle=True, **WORKERS)),
    "StatefulDataLoader, persistent workers": of(lambda: stateful(shuffle=True, **PERSISTENT)),
    "StatefulDataLoader, snapshots now and then": of(
        lambda: stateful(shuffle=True, snapshot_every_n_steps=2, **WORKERS),
        refused="takes its state only every few steps",
    ),
    "StatefulDataLoader, iterable": of(lambda: stateful(StatefulStream())),
    "StatefulDataLoader, iterable, last batch not full": of(lambda: stateful(StatefulStream(), batch_size=3)),
    "StatefulDataLoader, iterable without state": of(lambda: stateful(Stream(draws=False))),
    "StatefulDataLoader, iterable, workers": of(lambda: stateful(StatefulStream(draws=False), **WORKERS)),
    "StatefulDataLoader, iterable that draws in workers": of(
        lambda: stateful(StatefulStream(), **WORKERS),
        refused="StatefulStream draws random numbers in workers",
    ),
    "datasets, map": of(lambda: loader(hf_map(), shuffle=True)),
    "datasets, map, workers": of(lambda: loader(hf_map(), shuffle=True, **WORKERS)),
    "datasets, streaming": of(lambda: loader(hf_stream())),
    "datasets, streaming from files": Case(lambda tmp_path: loader(hf_files(tmp_path))),
    "datasets, streaming, shuffled": of(lambda: loader(hf_stream(True))),
    "datasets, streaming, set_epoch": of(lambda: loader(hf_stream(True)), script=dataset_told),
    "datasets, streaming, workers": of(lambda: loader(hf_stream(True), **WORKERS), script=dataset_told),
    "datasets, interleaved": of(lambda: loader(hf_interleaved())),
    "datasets, streaming, StatefulDataLoader": of(lambda: stateful(hf_stream())),
    "datasets, streaming, mapped, StatefulDataLoader": of(lambda: stateful(hf_mapped())),
    "datasets, streaming, StatefulDataLoader, set_epoch": of(
        lambda: stateful(hf_stream()), script=dataset_told
    ),
    "datasets, streaming, shuffled, StatefulDataLoader": of(lambda: stateful(hf_stream(True))),
    "datasets, streaming, StatefulDataLoader, workers": of(lambda: stateful(hf_stream(), **WORKERS)),
    "webdataset": Case(lambda tmp_path: loader(wds_shuffled(tmp_path, seed=5), num_workers=0)),
    "webdataset, seed of the process": Case(
        lambda tmp_path: loader(wds(tmp_path, shardshuffle=4, seed=None), num_workers=0)
    ),
    "webdataset, detshuffle": Case(lambda tmp_path: loader(wds_det(tmp_path))),
    "webdataset, workers": Case(lambda tmp_path: loader(wds_shuffled(tmp_path, seed=5), **WORKERS)),
    "webdataset, shuffle without a seed": Case(
        lambda tmp_path: loader(wds_shuffled(tmp_path)), refused="takes its seed from the clock"
    ),
    "webdataset, resampled": Case(
        lambda tmp_path: loader(wds_resampled(tmp_path)), refused="resampled shards take their seed"
    ),
    "WebLoader": Case(web_loader),
}


# --- walking it ---------------------------------------------------------------------------------------------


def rows() -> dict[str, str]:
    """Kind of loader → what the page says of it."""
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        if match := re.match(r"\| ([^|]+?) \| (exact|refused at [a-z ]+) \|", line):
            name = match[1].replace("`", "")
            assert name not in found, f"two rows for {name}"
            found[name] = match[2]
    return found


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value)


def trained(batch: Any) -> Any:
    """What a step sees, and what it draws itself."""
    seen = [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(batch)]
    return seen, torch.rand(2).tolist(), random.random(), numpy.random.rand()


def drive(
    source: Any,
    script: Callable[[int], None],
    steps: int,
    *,
    epoch: Callable[[], int],
    at: Callable[[int, bool], None] | None = None,
    done: int = 0,
) -> list[Any]:
    record: list[Any] = []
    empty = 0
    while done + len(record) < steps:
        script(epoch())
        before = len(record)
        for batch in source:
            record.append(trained(batch))
            if at is not None:
                at(len(record), True)
            if done + len(record) >= steps:
                return record
        empty = empty + 1 if len(record) == before else 0
        assert empty < 3, "no batches come any more"
        if at is not None:
            at(len(record), False)
    return record


def plainly(case: Case, tmp_path: Path, steps: int) -> list[Any]:
    seed(7)
    source = case.make(tmp_path)
    count = iter(range(1000))
    script = case.plain or case.script
    return drive(source, lambda epoch: script(source, epoch), steps, epoch=lambda: next(count))


STEPS = 13
POSITIONS = [(2, True), (5, True), (5, False), (7, True), (10, False), (12, True)]


def fed(case: Case, tmp_path: Path) -> tuple[list[Any], dict[tuple[int, bool], bytes]]:
    """What an uninterrupted feed gives, and positions of it as a checkpoint would hold them."""
    seed(7)
    source = case.make(tmp_path)
    feed = DataFeed(source)
    kept: dict[tuple[int, bool], bytes] = {}

    def save(step: int, inside: bool) -> None:
        if (step, inside) in POSITIONS:
            kept[step, inside] = pickle.dumps((feed.state_dict(), capture_rng()))

    record = drive(feed, lambda epoch: case.script(source, epoch), STEPS, epoch=lambda: feed.epoch, at=save)
    return record, kept


def resumed(case: Case, tmp_path: Path, position: bytes, done: int) -> list[Any]:
    seed(99)  # nothing may depend on how the process that resumes has begun
    source = case.make(tmp_path)
    feed = DataFeed(source)
    state, rng = pickle.loads(position)
    feed.load_state_dict(state)
    restore_rng(rng)
    feed.state_dict()  # asked for ahead of the first batch: it must change nothing
    return drive(feed, lambda epoch: case.script(source, epoch), STEPS, epoch=lambda: feed.epoch, done=done)


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    assert sorted(rows()) == sorted(CASES)
    assert {name for name, word in rows().items() if word.startswith("refused")} == {
        name for name, case in CASES.items() if case.refused
    }


USUAL = {
    "workers",
    "persistent workers",
    "iterable, workers",
    "GlobalBatches, workers",
    "StatefulDataLoader, persistent workers",
}
"""Of those that start processes, and so take seconds, the ones that every run of the tests goes through."""


def slow(name: str) -> bool:
    return ("worker" in name or name == "StatefulDataLoader, snapshots now and then") and name not in USUAL


def marked(refused: bool) -> list[Any]:
    names = [name for name, case in CASES.items() if bool(case.refused) is refused]
    return [pytest.param(name, marks=[pytest.mark.drill] if slow(name) else []) for name in names]


@pytest.mark.parametrize("name", marked(refused=False))
def test_what_is_called_exact_is_exact(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    right = plainly(case, tmp_path, STEPS)
    record, positions = fed(case, tmp_path)
    assert record == right, "an uninterrupted run is not the plain loop"
    assert positions
    for (done, inside), position in positions.items():
        assert resumed(case, tmp_path, position, done) == right[done:], f"from step {done}, inside {inside}"


@pytest.mark.parametrize("name", marked(refused=True))
def test_what_is_called_refused_is_refused(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    if rows()[name] == "refused at the start":
        with pytest.raises(UsageError, match=re.escape(case.refused)):
            DataFeed(case.make(tmp_path))
    else:
        with pytest.raises(IncompleteStateError, match=re.escape(case.refused)) as caught:
            fed(case, tmp_path)
        assert "checkpoint.data_position = 'trusted'" in str(caught.value)


def test_a_worker_that_had_ended_and_gives_more_is_an_error(tmp_path: Path) -> None:
    """With two workers the first has no more samples after five batches of six."""
    case = of(lambda: stateful(Forgetful(draws=False), **WORKERS))
    _, positions = fed(case, tmp_path)
    with pytest.raises(IncompleteStateError, match="worker 0 had given all its samples of epoch 0"):
        resumed(case, tmp_path, positions[5, True], 5)


@pytest.mark.parametrize("name", ["persistent workers", "iterable with a counter"])
def test_the_same_loader_is_taken_up_again_in_the_same_process(tmp_path: Path, name: str) -> None:
    """As by a restartable function whose loader is made outside of it: workers and counters have gone on."""
    source = CASES[name].make(tmp_path)
    same = of(lambda: source)
    record, positions = fed(same, tmp_path)
    for (done, _), position in positions.items():
        assert resumed(same, tmp_path, position, done) == record[done:]


# --- with a run around it -----------------------------------------------------------------------------------


def ran(run_dir: Path, source: Any, until: int, **settings: object) -> list[Any]:
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, **settings)
    run.track(model=nn.Linear(1, 1))
    return [trained(batch) for _, batch in run.steps(source, until=until)]


def test_a_run_resumes_in_the_second_epoch_of_persistent_workers(tmp_path: Path) -> None:
    """The order was another one, without a word: the replay drew a seed that the epoch had not drawn."""
    case = CASES["persistent workers"]
    seed(7)
    source = case.make(tmp_path)
    nn.Linear(1, 1)  # as in the run, whose model draws its weights too
    right = [trained(batch) for _ in range(2) for batch in source]
    parts: list[Any] = []
    for until in (7, 10):
        seed(7)
        parts += ran(tmp_path / "run", case.make(tmp_path), until)
    assert parts == right


def test_a_position_that_is_not_exact_is_not_saved_unless_it_is_trusted(tmp_path: Path) -> None:
    make = CASES["iterable that shares training's numbers"].make
    with pytest.raises(SaveFailedError, match=r"the data position is not exact: the loader \(DataLoader\)"):
        ran(tmp_path / "run", make(tmp_path), 3)
    assert checkpoints(tmp_path / "run") == []
    assert len(ran(tmp_path / "trusted", make(tmp_path), 3, checkpoint_data_position="trusted")) == 3
    assert [path.name[:13] for path in checkpoints(tmp_path / "trusted")] == ["step_00000003"]
    assert "not refused, because checkpoint.data_position" in " ".join(warnings_of(tmp_path / "trusted"))


def test_other_data_than_before_is_refused_and_names_the_epoch(tmp_path: Path) -> None:
    ran(tmp_path / "run", loader(Stream(draws=False)), 7)

    class Other(Stream):
        def ids(self) -> Iterable[int]:
            return reversed(range(SAMPLES))

    with pytest.raises(IncompleteStateError, match="did not give the first 2 batches of epoch 1 again"):
        ran(tmp_path / "run", loader(Other(draws=False)), 9)
    assert len(ran(tmp_path / "run", loader(Other(draws=False)), 9, checkpoint_data_position="trusted")) == 2


def test_a_long_replay_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "TELL_AFTER", 0.0)
    ran(tmp_path / "run", loader(), 3)
    ran(tmp_path / "run", loader(), 4)
    assert "replaying the data: 1 of 3 batches of epoch 0" in " ".join(warnings_of(tmp_path / "run"))
