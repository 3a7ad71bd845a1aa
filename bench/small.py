"""10,000 tensors of 1 KB: where it is not the bytes that take the time, but what is done for each tensor.

5,000 normalisations of width 256, so 10,000 parameters of 256 float32; Adam has 30,000 entries more. All in
one process, on the host; ours and the alternatives take turns. What is added to a step is measured as in
checks.py.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks import OFF, Side
from torch import nn
from torch.distributed import HashStore
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import holdfast
from holdfast.checkpoint.choose.load import load
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.state.tracked import Tracked

Samples = tuple[list[float], list[float]]
LAYERS, WIDTH = 5_000, 256
PAIRS = 10
WARM = 3
"""Saves that are not counted: the plan is made, and both staging buffers are there."""


class Small(nn.Module):
    """`batch` is as good as none: the pass only makes sure that every parameter has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.fill_(number)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.parameters())) * batch


def saved(work: Path, repeat: int) -> dict[str, list[float]]:
    """Seconds of a first committed save and of a later one, of `dcp.save`, and of `torch.save` with fsync.

    A run's first save also makes the plan that the later ones reuse, and proves that it would resume.
    """
    model, directory = Small(), work / "small"

    def ours(before: int) -> float:
        with _run(directory, {"model": model}) as run:
            run.start()
            for _ in range(before):
                run.save()
            return _timed(run.save)

    def torch_save() -> None:
        directory.mkdir()
        with (directory / "state.pt").open("wb") as file:
            torch.save(model.state_dict(), file)
            os.fsync(file.fileno())

    def clean(measure: Callable[[], float]) -> float:
        os.sync()  # nobody pays for what was left to write back before
        try:
            return measure()
        finally:
            shutil.rmtree(directory)

    return _in_turns(
        repeat,
        {
            "ours": lambda: clean(lambda: ours(1)),
            "first": lambda: clean(lambda: ours(0)),
            "dcp": lambda: clean(
                lambda: _timed(lambda: _dcp(dcp.save, {"model": model.state_dict()}, directory))
            ),
            "torch": lambda: clean(lambda: _timed(torch_save)),
        },
    )


def loaded(work: Path, repeat: int, *, adam: bool) -> dict[str, list[float]]:
    """Seconds of a verified load, of `dcp.load` of the same checkpoint, and of `torch.load`."""
    model, directory = Small(), work / "small"
    parts: dict[str, Any] = {"model": model}
    if adam:
        parts["optimizer"] = optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    try:
        with _run(directory, parts) as run:
            run.start()
            checkpoint = directory / "checkpoints" / str(run.save())
        torch.save({name: part.state_dict() for name, part in parts.items()}, directory / "state.pt")
        _, digest = manifests.read(checkpoint)  # a resume knows it from the commit record
        tracked = Tracked()
        for name, part in parts.items():
            tracked.add(name, part)

        def by_dcp() -> None:
            state: dict[str, Any] = {"model": model.state_dict()}
            if adam:  # as its documentation has it; our checkpoints keep the groups elsewhere
                of_optimizer = get_optimizer_state_dict(model, optimizer)
                state["optimizer"] = {"state": of_optimizer["state"]}
            _dcp(dcp.load, state, checkpoint)
            if adam:
                whole = {**of_optimizer, **state["optimizer"]}
                set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(strict=False))

        def by_torch() -> None:
            state = torch.load(directory / "state.pt", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(state[name])

        return _in_turns(
            repeat,
            {
                "ours": lambda: _timed(lambda: load(checkpoint, digest, tracked, 0, 1).apply()),
                "dcp": lambda: _timed(by_dcp),
                "torch": lambda: _timed(by_torch),
            },
        )
    finally:
        shutil.rmtree(directory)


def blocked(work: Path, repeat: int) -> Samples:
    """Seconds for which an asynchronous save holds training up, and `dcp.async_save`; in steady state."""
    model, directory = Small(), work / "small"
    run = _run(directory, {"model": model}, checkpoint_async_save=True, checkpoint_keep_last=2)
    run.start()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # dcp.async_save wants one

    def ours() -> float:
        taken = _timed(lambda: run.save(wait=False))
        run.wait_for_saves()
        return taken

    def theirs() -> float:
        pending: list[Any] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                taken = _timed(
                    lambda: pending.append(
                        dcp.async_save({"model": model.state_dict()}, checkpoint_id=directory / "dcp")
                    )
                )
                pending[0].result()
            return taken
        finally:
            shutil.rmtree(directory / "dcp")

    try:
        for _ in range(WARM):
            ours()
        found = _in_turns(repeat, {"ours": ours, "dcp": theirs})
        run.close()
        return found["ours"], found["dcp"]
    finally:
        dist.destroy_process_group()
        shutil.rmtree(directory)


def computed(work: Path, repeat: int) -> Samples:
    """Milliseconds that `run.compute` adds to a step, and those of the step without checks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network, batch = Small(), torch.ones(1)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-9, fused=True)
        sides = [Side(work / "on", network, optimizer), Side(work / "off", network, optimizer, **OFF)]
        samples: Samples = ([], [])
        for turn in range(repeat + 1):
            added, plain = [], []
            for number in range(PAIRS):
                order = (0, 1) if number % 2 else (1, 0)
                found = {which: sides[which].step(batch) for which in order}
                added.append(found[0][1] - found[1][1])
                plain.append(sum(found[1]))
            if turn:  # the first warms up
                samples[0].append(statistics.median(added) * 1e3)
                samples[1].append(statistics.median(plain) * 1e3)
        for side in sides:
            side.run.close()
        return samples
    finally:
        torch.set_num_threads(threads)
        for name in ("on", "off"):
            shutil.rmtree(work / name, ignore_errors=True)


def _run(directory: Path, parts: dict[str, Any], **settings: Any) -> holdfast.Run:
    run = holdfast.Run(
        run_dir=str(directory), checkpoint_interval=0, checkpoint_save_at_end=False, **settings
    )
    run.track(**parts)
    return run


def _dcp(function: Callable[..., object], state: dict[str, Any], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        function(state, checkpoint_id=directory, no_dist=True)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _in_turns(repeat: int, ways: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """One warm-up of each, then `repeat` of each, in one order and the other."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            seconds = ways[name]()
            if turn:
                found[name].append(seconds)
    return found
