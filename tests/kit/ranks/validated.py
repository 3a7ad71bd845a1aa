"""A small training whose results are checked, on forked ranks, with an exact record of what it did.

It draws random numbers of every kind in every step, has dropout and BatchNorm, and gets its batches in one of
several ways; so whatever a re-run does not put back shows in the record.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy
import torch
import torch._dynamo  # an optimizer imports it: once here, and not in every fork
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import holdfast
import holdfast.run
from holdfast.checkpoint.state.tracked import from_blob
from holdfast.journal.event import Event
from holdfast.policy.results import Rejection, Rerun, Trial
from holdfast.record.attempts import begin_attempt, rejection_of
from holdfast.record.directory import ControlDirectory
from holdfast.record.launches import VARIABLE, LaunchInfo
from holdfast.record.lease import Fence, claim
from kit.harness import await_child
from kit.runs import events_in
from kit.tiny import checkpoints

E = TypeVar("E", bound=Event)


class Noisy(Dataset[tuple[int, torch.Tensor]]):
    """Samples that are made in the training's own process, with its random numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        fixed = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return index, fixed + 0.01 * torch.randn(6) + 0.01 * random.random()


@dataclass
class Training:
    """What is trained, and how a step gets its batches."""

    wrap: str = "none"
    """none, ddp or fsdp."""
    shape: str = "one"
    """one: a batch a step; calls: two calls of compute; inside: one call that draws two batches from the
    feed; iterator: one call with an iterator of the script's own; check: no compute at all."""
    scaler: bool = False
    until: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    spoil: Callable[[int, int, torch.Tensor], torch.Tensor] | None = None
    """(step, rank, loss) → the loss that backward is called on."""
    false_at: int = 0
    """The step whose loss is told as NaN, with gradients that are fine."""
    prepare: Callable[[holdfast.Run], None] | None = None
    in_place: bool = False
    """The step changes its batch in place."""
    steps_inside: bool = False
    """The optimizer is stepped where it should not be."""
    breaks: int = 0
    """The step from which on the model's last layer gives infinities."""
    bypass: bool = False
    """Optimizer steps are not taken through the scaler."""
    uneven: bool = False
    """Rank 1 calls compute once more in every step."""


@dataclass
class Ended:
    code: int
    steps: dict[int, dict[str, Any]]
    error: str

    def field(self, name: str) -> list[Any]:
        return [self.steps[step][name] for step in sorted(self.steps)]


@dataclass
class Place:
    """A run directory, and attempts in it."""

    path: Path

    @property
    def run_dir(self) -> Path:
        return self.path / "run"

    @property
    def control(self) -> ControlDirectory:
        return ControlDirectory.open(self.run_dir)

    def events(self, kind: type[E]) -> list[E]:
        return events_in(self.run_dir, kind)

    def rejection(self, attempt: int = 1) -> Rejection | None:
        return rejection_of(self.control, attempt)

    def own_parts(self) -> list[dict[str, Any]]:
        """What each checkpoint holds of Holdfast's own, on rank 0."""
        found = []
        for path in checkpoints(self.run_dir):
            state = {"holdfast": {"rank_00000": torch.zeros(_blob_size(path), dtype=torch.uint8)}}
            dcp.load(state, checkpoint_id=path, no_dist=True)
            found.append(from_blob(state["holdfast"]["rank_00000"])["own"])
        return found

    def launched(self, **told: Any) -> LaunchInfo:
        """What `holdfast run` would hand over to the next attempt, with a lease that this process holds."""
        control, _ = ControlDirectory.open_or_create(self.run_dir)
        held = claim(control, uuid.uuid4().hex[:12], 0.2, handover=0.0)
        fence = Fence(control, held.epoch, timeout=5.0)
        record = begin_attempt(control, fence, "launch", told.pop("world", 1))
        return LaunchInfo(
            run_dir=str(self.run_dir.absolute()), run_id=control.run_id, launch="launch",
            attempt=record.number, epoch=held.epoch, node="n", **told,
        )  # fmt: skip

    def train(
        self,
        training: Training,
        world: int = 1,
        *,
        launched: LaunchInfo | None = None,
        devices: str = "",
    ) -> list[Ended]:
        """Train in forks of this process; how each rank ended."""
        out = self.path / f"out-{uuid.uuid4().hex[:8]}"
        out.mkdir(parents=True)
        torch.set_num_threads(1)
        children = []
        for rank in range(world):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                code = 70
                error = ""
                try:
                    os.environ |= {
                        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                        "CUDA_VISIBLE_DEVICES": devices,
                    }  # fmt: skip
                    if launched is not None:
                        os.environ[VARIABLE] = msgspec.json.encode(launched).decode()
                    train_rank(self.run_dir, out, training, rank, world)
                    code = 0
                except holdfast.HoldfastError as raised:
                    error = str(raised)
                    code = int(raised.exit_code)
                except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
                    error = traceback.format_exc()
                finally:
                    (out / f"error{rank}").write_text(error)
                    print(error, file=sys.stderr)
                    sys.stderr.flush()
                    os._exit(code)
            children.append(pid)
        codes = [await_child(pid, 90) for pid in children]
        return [
            Ended(code, _read(out / f"rank{rank}"), _text(out / f"error{rank}"))
            for rank, code in enumerate(codes)
        ]


def _blob_size(path: Path) -> int:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["holdfast.rank_00000"]
    assert isinstance(metadata, TensorStorageMetadata)
    return metadata.size.numel()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""  # who was killed has left no word


def _read(path: Path) -> dict[int, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {one["step"]: one for one in map(json.loads, lines)}


def local_bytes(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    found: bytes = local.detach().numpy().tobytes()
    return found


def digest(model: nn.Module, generator: torch.Generator) -> tuple[str, str]:
    """Of parameters and buffers, and of all random numbers to come."""
    weights = xxhash.xxh3_64()
    for tensor in [*model.parameters(), *model.buffers()]:
        weights.update(local_bytes(tensor))
    chance = xxhash.xxh3_64(torch.get_rng_state().numpy().tobytes() + generator.get_state().numpy().tobytes())
    chance.update(repr((random.getstate(), numpy.random.get_state())).encode())
    return weights.hexdigest(), chance.hexdigest()


def train_rank(run_dir: Path, out: Path, training: Training, rank: int, world: int, store: str = "") -> None:
    if world > 1:
        store = store or f"file://{out / 'store'}"
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 6))
    last = model[3]
    if training.wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif training.wrap == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + rank)
    generator = torch.Generator().manual_seed(200 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=training.scaler)
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True)
    settings = {"checkpoint_save_at_end": False, "control_lease_ttl": 5.0, **training.settings}
    run = holdfast.Run(run_dir=run_dir, **settings)
    run.track(model=model, optimizer=optimizer, generator=generator)
    if training.scaler:
        run.track(scaler=scaler)
    if training.shape == "iterator":
        run.ignore(loader)
    if training.prepare is not None:
        training.prepare(run)
    seen: list[list[int]] = []

    def forward_backward(batch: Any) -> torch.Tensor:
        ids, x = batch
        seen.append(ids.tolist())
        if training.in_place:
            x.mul_(1.0)
        run.record(tokens=x.numel())
        noise = random.random() + numpy.random.random() + torch.rand(1, generator=generator)
        target = x + 0.01 * torch.randn_like(x) + 0.01 * noise
        if training.breaks and run.step + 1 >= training.breaks:
            with torch.no_grad():
                last.bias.fill_(math.inf)
        loss = (model(x) - target).square().mean()
        if training.spoil is not None:
            loss = training.spoil(run.step + 1, rank, loss)
        scaler.scale(loss).backward()
        if training.shape == "one" and training.scaler and not training.bypass:
            scaler.unscale_(optimizer)  # which nobody may do twice in a step
        if training.steps_inside:
            optimizer.step()
        return loss.detach() * (math.nan if run.step + 1 == training.false_at else 1.0)

    def two_of(batches: Iterator[Any]) -> torch.Tensor:
        with no_sync(model, on=False):
            first = forward_backward(next(batches))
        return first + forward_backward(next(batches))

    log = (out / f"rank{rank}").open("w", buffering=1)
    feed: Any = run.feed(loader) if training.shape != "iterator" else None

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    class FromFeed:
        def __next__(self) -> Any:
            return feed.next()

    batches = endless()
    run.start()
    with contextlib.closing(run):
        while run.step < training.until:
            run.begin_step()
            seen.clear()
            if training.shape == "one":
                loss = run.compute(forward_backward, feed.next())
            elif training.shape == "calls":
                with no_sync(model):
                    loss = run.compute(forward_backward, feed.next())
                loss = loss + run.compute(forward_backward, feed.next())
            elif training.shape == "inside":
                loss = run.compute(two_of, FromFeed())
            elif training.shape == "iterator":
                loss = run.compute(two_of, batches)
            else:
                loss = forward_backward(feed.next())
                run.check(loss)
            if training.uneven and rank == 1:
                run.compute(forward_backward, feed.next())
            if training.bypass:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            dropped = run.dropped
            optimizer.zero_grad()
            run.end_step(last=run.step + 1 >= training.until)
            weights, chance = digest(model, generator)
            batches_of_step = 1 if training.shape in ("one", "check") else 2
            told = {
                "step": run.step,
                "loss": float(loss).hex(),
                "ids": [ids for ids, _ in itertools.groupby(seen)][-batches_of_step:],
                "weights": weights,
                "rng": chance,
                "parameters": xxhash.xxh3_64(b"".join(map(local_bytes, model.parameters()))).hexdigest(),
                "tokens": run.tokens,
                "scale": scaler.get_scale(),
                "dropped": dropped,
                "exchanges": run._session.validation.agreement.exchanges,
            }
            log.write(json.dumps(told) + "\n")
        run.finish()
    if world > 1:
        dist.destroy_process_group()


@contextlib.contextmanager
def no_sync(model: nn.Module, *, on: bool = True) -> Iterator[None]:
    """Gradients of micro-batches but the last one are not reduced."""
    if on and isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
    elif on and hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


__all__ = ["Ended", "Place", "Rerun", "Training", "Trial"]
