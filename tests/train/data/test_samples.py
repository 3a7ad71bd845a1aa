"""Which samples a batch was made of: what is named is what the loader gave, and asking changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.policy.results import Window, batch_in_words
from holdfast.train.data.feed import DataFeed
from holdfast.train.data.loaders import GlobalBatches
from kit.tiny import Numbers

LENGTH = 40


class Same(Dataset[int]):
    """Each sample is its own index."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH - 1, -1, -1))

    def __len__(self) -> int:
        return LENGTH


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def loader(**given: Any) -> DataLoader[int]:
    return DataLoader(Same(), **{"batch_size": 4, **given})


KNOWN: dict[str, Callable[[], Any]] = {
    "in order": loader,
    "shuffled": lambda: loader(shuffle=True),
    "a generator": lambda: loader(shuffle=True, generator=seeded()),
    "workers": lambda: loader(shuffle=True, num_workers=2),
    "workers with a generator": lambda: loader(shuffle=True, num_workers=2, generator=seeded()),
    "workers that stay": lambda: loader(
        sampler=DistributedSampler(Same(), 2, 1), num_workers=1, persistent_workers=True
    ),
    "with replacement": lambda: loader(sampler=RandomSampler(Same(), replacement=True)),
    "with replacement, a generator": lambda: loader(
        sampler=RandomSampler(Same(), replacement=True, generator=seeded())
    ),
    "a subset": lambda: loader(sampler=SubsetRandomSampler(range(3, 30))),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH)),
    "distributed": lambda: loader(sampler=DistributedSampler(Same(), 2, 1)),
    "no batches": lambda: loader(batch_size=None, shuffle=True),
    "global batches": lambda: GlobalBatches(Same(), 8, rank=1, world_size=2, seed=3),
}


def numbers(batch: Any) -> list[int]:
    return [int(one) for one in torch.as_tensor(batch).reshape(-1)]


def state() -> tuple[bytes, object]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def feed_of(make: Callable[[], Any]) -> tuple[DataFeed, list[int]]:
    torch.manual_seed(1)
    feed, done = DataFeed(make()), [0]
    feed.follow(lambda: done[0])
    return feed, done


@pytest.mark.parametrize("name", KNOWN)
def test_the_samples_of_every_batch_are_named(name: str) -> None:
    """In two epochs, with training that draws in between; then once more after a resume in mid-epoch."""
    feed, done = feed_of(KNOWN[name])
    kept: Any = None
    for step in range(16):
        batch = numbers(feed.next())
        before = state()
        assert feed.samples() == batch, f"step {step}, epoch {feed.epoch}"
        assert state() == before
        torch.rand(3)
        done[0] += 1
        if step == 12:
            kept = feed.state_dict(), torch.get_rng_state()
    wanted = feed.samples()
    again, done = feed_of(KNOWN[name])
    again.load_state_dict(kept[0])
    torch.set_rng_state(kept[1])
    done[0] = 13
    for _ in range(3):
        batch = numbers(again.next())
        assert again.samples() == batch
        torch.rand(3)
        done[0] += 1
    assert again.samples() == wanted == []  # the step is over: there is no batch of this one yet


@pytest.mark.parametrize("name", KNOWN)
def test_the_position_is_the_same_whether_somebody_asked_or_not(name: str) -> None:
    positions, batches = [], []
    for asks in (False, True):
        feed, done = feed_of(KNOWN[name])
        given = []
        for _ in range(14):
            given.append(numbers(feed.next()))
            if asks:
                feed.samples()
            torch.rand(3)
            done[0] += 1
        positions.append(comparable(feed.state_dict()))
        given += [numbers(feed.next()) for _ in range(8)]
        batches.append((given, torch.rand(2).tolist()))
    assert batches[0] == batches[1]
    assert positions[0] == positions[1]


def test_several_batches_of_a_step_are_named_together() -> None:
    feed, done = feed_of(KNOWN["shuffled"])
    feed.next()
    done[0] += 1
    two = numbers(feed.next()) + numbers(feed.next())
    assert feed.window() == Window(0, 1, 2)
    assert feed.samples() == two


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(sampler=Own()),
        lambda: loader(batch_size=None, sampler=Own()),
        lambda: DataLoader(Stream(), batch_size=4),
        lambda: [[1, 2], [3, 4]],
        lambda: loader(shuffle=True, generator=torch.default_generator),
    ],
    ids=["a sampler of the script's", "the same, no batches", "a stream", "a list", "training's generator"],
)
def test_what_is_not_surely_known_is_not_named(make: Callable[[], Any]) -> None:
    feed, _ = feed_of(make)
    feed.next()
    assert feed.samples() == []
    assert feed.window() == Window(0, 0, 0)


def test_workers_that_stay_draw_no_seed_in_a_later_epoch() -> None:
    """A loader that is opened anew draws one: its order would be another, so none is named."""
    feed, done = feed_of(lambda: loader(shuffle=True, num_workers=1, persistent_workers=True))
    for _ in range(LENGTH // 4):
        batch = numbers(feed.next())
        assert feed.samples() == batch
        done[0] += 1
    feed.next()
    assert feed.samples() == []


def test_an_order_that_has_changed_since_is_not_named() -> None:
    """The script has told its sampler another epoch in the midst of one."""
    sampler = DistributedSampler(Same(), 2, 1)
    feed, _ = feed_of(lambda: loader(sampler=sampler))
    batch = numbers(feed.next())
    assert feed.samples() == batch
    sampler.set_epoch(7)
    assert feed.samples() == []


@pytest.mark.parametrize(
    ("window", "samples", "world", "words"),
    [
        (None, {}, 2, ""),
        (Window(0, 24, 24), {}, 2, "batch 25 of epoch 1"),
        (Window(0, 24, 24), {0: [96, 97, 98, 99]}, 1, "batch 25 of epoch 1 (samples 96–99)"),
        (Window(2, 0, 3), {0: [5]}, 1, "batches 1–4 of epoch 3 (sample 5)"),
        (
            Window(0, 1, 1),
            {1: [7, 3], 0: list(range(1, 20, 2))},
            2,
            "batch 2 of epoch 1 (samples 1, 3, 5, 7, 9, 11, 13, 15 and 2 more on rank 0; "
            "samples 7, 3 on rank 1)",
        ),
    ],
)
def test_the_data_of_a_step_in_words(
    window: Window | None, samples: dict[int, list[int]], world: int, words: str
) -> None:
    assert batch_in_words(window, samples, world) == words


# --- the StatefulDataLoader of torchdata --------------------------------------------------------------------


def batches(run_dir: Path, until: int, workers: int) -> dict[int, list[int]]:
    torch.manual_seed(4)
    loader = StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
    run.track(model=nn.Linear(1, 1))
    return {step: ids.tolist() for step, (ids, _) in run.steps(loader, until=until)}


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 9, 10, 11])
def test_it_resumes_where_it_was(tmp_path: Path, stop: int) -> None:
    """Cases meta-pytorch/data#1437, accelerate#2823: five batches an epoch, none twice, none left out."""
    whole = batches(tmp_path / "whole", 15, 0)
    for epoch in (0, 5, 10):
        seen = sorted(i for step in range(epoch + 1, epoch + 6) for i in whole[step])
        assert seen == list(range(20))
    assert whole[1] != whole[6], "epochs differ in their order"
    parts = batches(tmp_path / "parts", stop, 0) | batches(tmp_path / "parts", 15, 0)
    assert parts == whole


def test_it_resumes_with_worker_processes(tmp_path: Path) -> None:
    whole = batches(tmp_path / "whole", 12, 2)
    assert batches(tmp_path / "parts", 7, 2) | batches(tmp_path / "parts", 12, 2) == whole
