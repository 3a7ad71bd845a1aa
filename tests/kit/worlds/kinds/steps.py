"""Kinds of training that differ in the step: accumulation, random numbers, compiled, on several ranks."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as lrs

from kit.worlds.kinds.kind import BATCH, WIDTH, Parts, Place, kind, loss_of, middle, mlp, parts
from kit.worlds.kinds.models import Adapted
from kit.worlds.kinds.optimizers import with_optimizer

# --- gradients ----------------------------------------------------------------------------------------------


def accumulate(model: nn.Module, optimizer: optim.Optimizer) -> Parts:
    made = parts(model, optimizer)

    def forward_backward(x: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        for piece in x.chunk(2):
            value = loss_of(model, piece) / 2
            value.backward()
            total += value.detach()
            middle()
        return total

    made.forward_backward = forward_backward
    return made


@kind("accumulation inside a step")
def accumulating(place: Place) -> Parts:
    model = mlp().to(place.device)
    return accumulate(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("accumulation inside a step, a batch for each piece", shapes=("steps", "callback", "compute"))
def accumulating_batches(place: Place) -> Parts:
    model = mlp().to(place.device)
    made = parts(model, optim.AdamW(model.parameters(), lr=1e-2))
    made.batches_a_step = 2
    return made


def carrying(place: Place, *, every: int = 3) -> Parts:
    """A step for every batch, the optimizer's at every third: gradients are carried over boundaries."""
    model = mlp().to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    count = {"step": 0}

    def before(step: int) -> None:
        count["step"] = step

    def update() -> None:
        if count["step"] % every == 0:
            optimizer.step()
            optimizer.zero_grad()

    made = parts(model, optimizer, before=before)
    made.update = update
    return made


kind("accumulation over several steps", case={"interval": 2, "kills": ("before", 10)})(carrying)


@kind("gradients that the next step would throw away")
def zero_first(place: Place) -> Parts:
    """`zero_grad` at the beginning of a step: at a boundary the gradients of the step before lie about."""
    model = mlp().to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    def forward_backward(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss_of(model, x)
        value.backward()
        return value.detach()

    return Parts({"model": model, "optimizer": optimizer}, forward_backward, optimizer.step)


@kind("gradients that are zeroed, not dropped")
def zeroed(place: Place) -> Parts:
    made = with_optimizer(lambda p: optim.SGD(p, lr=0.05, momentum=0.9))(place)
    optimizer = made.tracked["optimizer"]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    made.update = update
    return made


# --- random numbers -----------------------------------------------------------------------------------------


@kind("python's and numpy's random numbers in the step")
def other_rng(place: Place) -> Parts:
    model = mlp().to(place.device)
    return parts(
        model,
        optim.AdamW(model.parameters(), lr=1e-2),
        loss=lambda x: loss_of(model, x) * (1 + random.random() + float(np.random.rand())),
    )


@kind("a generator of one's own, tracked")
def own_generator(place: Place) -> Parts:
    model = mlp().to(place.device)
    generator = torch.Generator(place.device).manual_seed(3)

    def loss(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        return (model(x + 0.1 * noise) - x).square().mean()

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), also={"noise": generator}, loss=loss)


@kind("a generator of one's own, not tracked", outcome="not seen")
def forgotten_generator(place: Place) -> Parts:
    made = own_generator(place)
    del made.tracked["noise"]
    return made


class Curriculum:
    """An object of the script's own, with a state."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def level(self, value: float) -> float:
        self.seen = [*self.seen[-3:], value]
        return 1 + sum(self.seen) / len(self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


@kind("an object of the script's own with a state_dict")
def curriculum(place: Place) -> Parts:
    model, plan = mlp().to(place.device), Curriculum()

    def loss(x: Tensor) -> Tensor:
        value = loss_of(model, x)
        return value * plan.level(float(value))

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), also={"curriculum": plan}, loss=loss)


# --- compiled -----------------------------------------------------------------------------------------------


def compiled(
    place: Place, backend: str, *, track_original: bool = False, in_place: bool = False, **options: Any
) -> Parts:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    fast: Any = model
    if in_place:
        model.compile(backend=backend, **options)
    else:
        fast = torch.compile(model, backend=backend, **options)
    made = parts(fast, optimizer, loss=partial(loss_of, fast))
    if track_original:
        made.tracked["model"] = model
    return made


kind("torch.compile, the compiled model tracked")(partial(compiled, backend="aot_eager"))
kind("torch.compile, the original tracked")(partial(compiled, backend="aot_eager", track_original=True))
kind("model.compile()")(partial(compiled, backend="aot_eager", in_place=True))
kind("torch.compile by inductor", needs="slow")(partial(compiled, backend="inductor"))
kind("torch.compile with CUDA graphs", needs="gpu")(
    partial(compiled, backend="inductor", mode="reduce-overhead")
)


@kind("a CUDA graph of the whole step", needs="gpu", shapes=("steps", "callback", "epochs"))
def cuda_graph(place: Place) -> Parts:
    """As torch's notes have it: warm up on a side stream, capture once, then copy in and replay."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).to(place.device)
    optimizer = optim.Adam(model.parameters(), lr=1e-2, capturable=True)
    static, kept = torch.zeros(BATCH, WIDTH, device=place.device), {}

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = (model(static) - static).square().mean()
        value.backward()
        optimizer.step()
        return value

    def capture() -> None:
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept["loss"] = step()
        kept["graph"] = graph
        with torch.no_grad():  # warming up trained: take that back, in place, as the graph has the addresses
            for name, value in model.state_dict().items():
                value.copy_(saved[0][name])
            for index, p in enumerate(model.parameters()):
                for name, value in optimizer.state[p].items():
                    before = saved[1]["state"].get(index, {}).get(name)
                    value.copy_(before) if before is not None else value.zero_()

    def whole(x: Tensor) -> Tensor:
        static.copy_(x)
        if not kept:
            capture()
        kept["graph"].replay()
        return kept["loss"].detach().clone()

    return Parts({"model": model, "optimizer": optimizer}, whole, lambda: None)


# --- several ranks ------------------------------------------------------------------------------------------


@kind("DDP", world=2, data=("distributed",))
def ddp(place: Place) -> Parts:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, WIDTH))
    )
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return parts(model, optimizer, schedule=lrs.StepLR(optimizer, 2, 0.9))


@kind(
    "DDP with ZeroRedundancyOptimizer",
    world=2,
    data=("distributed",),
    outcome="refused",
    words="the state of a ZeroRedundancyOptimizer lies in shares on all ranks",
    by=0,
)
def zero(place: Place) -> Parts:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(mlp())
    return parts(model, ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-2))


def shard(model: nn.Module, place: Place) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh(place.device, (place.world,)))


@kind("FSDP2", world=2, data=("distributed", "global"))
def fsdp(place: Place) -> Parts:
    model = shard(mlp(), place)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("FSDP2, partly frozen", world=2, data=("distributed",))
def fsdp_lora(place: Place) -> Parts:
    model = nn.Sequential(Adapted(nn.Linear(WIDTH, 8)), nn.Tanh(), Adapted(nn.Linear(8, WIDTH)))
    model = shard(model, place)
    return parts(model, optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))


@kind("FSDP2 at another number of ranks", world=2, data=("global",))
def exact_sums(place: Place) -> Parts:
    """Every number is a small multiple of a power of two, so no sum depends on its order or on the ranks."""
    model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-4, 5, model.weight.shape) / 8)
    shard(model, place)
    optimizer = optim.SGD(model.parameters(), lr=0.125, momentum=0.5)

    def loss(x: Tensor) -> Tensor:
        whole = (x * 4).round().double() / 4
        return (model(whole) - whole).abs().sum() / (8 * len(x))

    return parts(model, optimizer, loss=loss)
