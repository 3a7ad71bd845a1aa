"""Kinds of training in which something changes on the way: parameters, schedules, averages, scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

from kit.worlds.kinds.kind import WIDTH, Parts, Place, kind, loss_of, mlp, parts

# --- what changes during training ---------------------------------------------------------------------------


@kind("a layer unfrozen during training, its group added")
def unfrozen(place: Place) -> Parts:
    model = mlp().to(place.device)
    model[0].requires_grad_(False)
    optimizer = optim.AdamW(model[3].parameters(), lr=1e-2)

    def before(step: int) -> None:
        if step == 5:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})

    return parts(model, optimizer, before=before)


@kind("a layer unfrozen during training, in the optimizer from the beginning")
def thawed(place: Place) -> Parts:
    model = mlp().to(place.device)
    model[0].requires_grad_(False)

    def before(step: int) -> None:
        if step == 5:
            model[0].requires_grad_(True)

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), before=before)


@kind("a layer unfrozen by the step's number, whenever it comes")
def thawed_by_number(place: Place) -> Parts:
    model = mlp().to(place.device)

    def before(step: int) -> None:
        model[0].requires_grad_(step >= 5)

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), before=before)


@kind(
    "a layer added during training",
    outcome="refused",
    words="since the script built the model: model.4.weight, a parameter of Linear, was added",
    by=12,
)
def grown(place: Place) -> Parts:
    model = mlp().to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    def before(step: int) -> None:
        if step == 5:
            model.append(nn.Linear(WIDTH, WIDTH).to(place.device))
            optimizer.add_param_group({"params": list(model[-1].parameters())})

    return parts(model, optimizer, before=before)


@kind("a parameter registered again during training")
def re_registered(place: Place) -> Parts:
    model = mlp().to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    def before(step: int) -> None:
        if step == 5:
            old = model[3].weight
            model[3].weight = nn.Parameter(old.detach() * 0.5)
            for group in optimizer.param_groups:
                group["params"] = [model[3].weight if p is old else p for p in group["params"]]
            optimizer.state.pop(old, None)

    return parts(model, optimizer, before=before)


@kind(
    "a parameter registered again, and its optimizer not told",
    outcome="refused",
    words="of optimizer belongs to no tracked model any more",
    by=12,
)
def re_registered_untold(place: Place) -> Parts:
    model = mlp().to(place.device)

    def before(step: int) -> None:
        if step == 5:
            model[3].weight = nn.Parameter(model[3].weight.detach() * 0.5)

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), before=before)


@kind("an optimizer made again during training")
def reset(place: Place) -> Parts:
    model = mlp().to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    def before(step: int) -> None:
        if step == 5:
            optimizer.state.clear()

    return parts(model, optimizer, before=before)


@kind("a rate that the script sets at every step")
def set_rate(place: Place) -> Parts:
    model = mlp().to(place.device)
    optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def before(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)

    return parts(model, optimizer, before=before)


# --- schedules ----------------------------------------------------------------------------------------------


def with_schedule(make: Callable[[optim.Optimizer], Any], momentum: bool = False) -> Callable[[Place], Parts]:
    def build(place: Place) -> Parts:
        model = mlp().to(place.device)
        optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        return parts(model, optimizer, schedule=make(optimizer))

    return build


def warm_then_steps(optimizer: optim.Optimizer) -> lrs.SequentialLR:
    warm, then = lrs.LinearLR(optimizer, 0.1, total_iters=3), lrs.StepLR(optimizer, 2, 0.5)
    return lrs.SequentialLR(optimizer, [warm, then], [3])


class Warm:
    """A schedule's function as an object: torch saves its attributes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + epoch + 0.1 * self.calls)


for _name, _schedule in {
    "SequentialLR": warm_then_steps,
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, 4), lrs.ExponentialLR(o, 0.9)]
    ),
    "ChainedScheduler of SequentialLR": lambda o: lrs.ChainedScheduler(
        [warm_then_steps(o), lrs.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=30),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9, 2.0),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.95),
    "LambdaLR of an object": lambda o: lrs.LambdaLR(o, Warm()),
}.items():
    kind(_name)(with_schedule(_schedule))


@kind(
    "a schedule that is not tracked", outcome="refused", words="a CosineAnnealingLR of an SGD: add run.track("
)
def untracked_schedule(place: Place) -> Parts:
    model = mlp().to(place.device)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return parts(model, optimizer, after=lrs.CosineAnnealingLR(optimizer, 7).step)


@kind("ReduceLROnPlateau")
def plateau(place: Place) -> Parts:
    model = mlp().to(place.device)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = lrs.ReduceLROnPlateau(optimizer, factor=0.7, patience=1, cooldown=1)
    last: list[float] = []

    def loss(x: Tensor) -> Tensor:
        value = loss_of(model, x)
        last[:] = [float(value)]
        return value

    return parts(
        model, optimizer, also={"schedule": schedule}, loss=loss, after=lambda: schedule.step(last[0])
    )


# --- averages, scalers, precision ---------------------------------------------------------------------------


@kind("SWA with SWALR")
def swa(place: Place) -> Parts:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, WIDTH)).to(place.device)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averaged = swa_utils.AveragedModel(model, use_buffers=True)
    schedule, count = swa_utils.SWALR(optimizer, 0.01, anneal_epochs=4), {"step": 0}

    def before(step: int) -> None:
        count["step"] = step

    def after() -> None:
        if count["step"] > 3:
            averaged.update_parameters(model)
            schedule.step()

    return parts(
        model, optimizer, also={"averaged": averaged, "schedule": schedule}, after=after, before=before
    )


@kind("EMA in fp32 of a bf16 model")
def ema(place: Place) -> Parts:
    model = mlp().to(place.device, torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    averaged = copy.deepcopy(model).float().requires_grad_(False)

    @torch.no_grad()
    def after() -> None:
        for kept, new in zip(averaged.parameters(), model.parameters(), strict=True):
            kept.lerp_(new.float(), 0.1)

    return parts(
        model, optimizer, also={"ema": averaged}, after=after, loss=lambda x: loss_of(model, x.bfloat16())
    )


@kind("EMA by AveragedModel")
def averaged_ema(place: Place) -> Parts:
    model = mlp().to(place.device)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return parts(model, optimizer, also={"ema": averaged}, after=lambda: averaged.update_parameters(model))


@kind("master weights in fp32 under a bf16 model")
def master(place: Place) -> Parts:
    model = mlp().to(place.device, torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = optim.AdamW(masters, lr=1e-2)

    class Masters:
        def state_dict(self) -> dict[str, Any]:
            return {"weights": [p.detach() for p in masters]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            for p, saved in zip(masters, state["weights"], strict=True):
                p.detach().copy_(saved)

    def forward_backward(x: Tensor) -> Tensor:
        value = loss_of(model, x.bfloat16())
        value.backward()
        return value.detach()

    def update() -> None:
        with torch.no_grad():
            for p, own in zip(model.parameters(), masters, strict=True):
                own.grad = p.grad.float()
            optimizer.step()
            for p, own in zip(model.parameters(), masters, strict=True):
                p.copy_(own)
        model.zero_grad()

    return Parts({"model": model, "masters": Masters(), "optimizer": optimizer}, forward_backward, update)


@kind("GradScaler that skips steps")
def scaled(place: Place) -> Parts:
    model = mlp().to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(
        place.device, init_scale=2.0**120, growth_interval=2, backoff_factor=2.0**-30
    )

    def forward_backward(x: Tensor) -> Tensor:
        # With float16 the same inputs would overflow at any scale.
        dtype, factor = (torch.bfloat16, 1e3) if place.device == "cpu" else (torch.float16, 1.0)
        with torch.autocast(place.device, dtype):
            value = loss_of(model, x * factor)
        scaler.scale(value).backward()
        return value.detach()

    def update() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Parts({"model": model, "optimizer": optimizer, "scaler": scaler}, forward_backward, update)
