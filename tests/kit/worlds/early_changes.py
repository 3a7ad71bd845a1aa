"""Small trainings that change their state as early after a step boundary as they can, on any device.

Shared by the tests of snapshots on a simulated device and on a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from holdfast.checkpoint.format import fingerprint
from holdfast.checkpoint.save.device import InFlight, Owned, TensorPiece

Outcome = Literal["exact", "torn", "seen", "silently wrong"]
"""seen: the bytes are wrong, `torn` does not know it, and the fingerprints do."""

WIDTH = 96


class Training:
    """AdamW on a model with BatchNorm: its statistics change in the forward of the next step."""

    overlapped: Outcome = "exact"
    """What becomes of an overlapped snapshot; cloned and blocked ones must be exact for all."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(7)
        self.device = device
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        ).to(device)
        self.extra: dict[str, torch.Tensor] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.prepare()
        for _ in range(2):
            self.step()

    def prepare(self) -> None:
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.1)]

    def backward(self) -> None:
        self.model(torch.randn(16, WIDTH, device=self.device)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        found = dict(self.extra)
        found |= {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for at, optimizer in enumerate(self.optimizers):
            for key, state in enumerate(optimizer.state.values()):
                found |= {f"optimizer.{at}.{key}.{name}": value for name, value in state.items()}
        return {name: tensor for name, tensor in found.items() if tensor.device == self.device}

    def owned(self) -> Owned:
        return Owned(self.optimizers)


class SkippedScalerStep(Training):
    """The first step after the boundary has infinite gradients: the scaler calls no optimizer, no hook."""

    def prepare(self) -> None:
        super().prepare()
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=8.0)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        loss = self.model(torch.randn(16, WIDTH, device=self.device)).square().mean()
        self.scaler.scale(loss).backward()
        if self.steps % 2 == 1:
            self.model[0].weight.grad.fill_(float("inf"))
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.model.zero_grad()


class Average(Training):
    """An average of the weights, updated before anything else happens in a step."""

    def prepare(self) -> None:
        super().prepare()
        self.extra = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def step(self) -> None:
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                self.extra[name].lerp_(tensor, 0.5)
        super().step()


class OptimizerInBackward(Training):
    """One optimizer a parameter, which steps as soon as that one's gradient is there."""

    def prepare(self) -> None:
        for parameter in self.model.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.1)
            self.optimizers.append(optimizer)
            parameter.register_post_accumulate_grad_hook(self._stepper(optimizer))

    def _stepper(self, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def step(_parameter: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    def step(self) -> None:
        self.backward()


class HandWritten(Training):
    """No torch optimizer at all: parameters and momentum change with no hook, before the forward."""

    def prepare(self) -> None:
        self.extra = {name: torch.ones_like(t) for name, t in self.model.named_parameters()}

    def step(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.extra[name].mul_(0.9).add_(1.0)
                parameter.sub_(self.extra[name], alpha=0.1)
        self.backward()


class Intruder(Training):
    """Parameters that belong to AdamW, also changed by hand right after the boundary."""

    overlapped: Outcome = "torn"

    def step(self) -> None:
        self.intrude()
        super().step()

    def intrude(self) -> None:
        with torch.no_grad():
            self.model[0].weight.mul_(1.5)


class HiddenIntruder(Intruder):
    """The same through `.data`, which moves no version: the fingerprints are left to see it."""

    overlapped: Outcome = "seen"

    def intrude(self) -> None:
        self.model[0].weight.data.mul_(1.5)


def strange(device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of every sort that a copy of bytes could get wrong."""
    torch.manual_seed(5)
    wave = torch.randn(4, dtype=torch.complex64, device=device)
    plain = {
        "scalar": torch.tensor(3.0),
        "nothing": torch.zeros(0, 4),
        "bool": torch.tensor([True, False, True]),
        "bf16": torch.randn(5, 3).bfloat16(),
        "float8": torch.randn(7).to(torch.float8_e4m3fn),
        "int64": torch.arange(9),
        "large": torch.randn(3_000_000),
        "large and odd": torch.randn(9_000_001).to(torch.float8_e4m3fn),
    }
    return {name: tensor.to(device) for name, tensor in plain.items()} | {
        "complex": wave,
        "conjugate": wave.clone().conj(),
        "negative": wave.clone().conj().imag,
        "transposed": torch.randn(6, 5, device=device).t(),
        "sliced": torch.randn(6, 6, device=device)[1:, ::2],
        "misaligned": torch.arange(33, dtype=torch.uint8, device=device)[1:],
    }


def wipe(state: dict[str, torch.Tensor]) -> None:
    """Overwrites everything, also what is only seen through a conjugating or negating view."""
    with torch.no_grad():
        for tensor in state.values():
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8).zero_()
            elif tensor.numel():
                tensor.zero_()


TRAININGS = [
    Training,
    SkippedScalerStep,
    Average,
    OptimizerInBackward,
    HandWritten,
    Intruder,
    HiddenIntruder,
]


def lay_out(state: dict[str, torch.Tensor]) -> tuple[list[TensorPiece], int]:
    """Pieces with gaps of odd sizes between them, and how large a buffer they need."""
    pieces, offset = [], 3
    for name, tensor in state.items():
        pieces.append(TensorPiece(tensor, offset, tensor.nbytes, name))
        offset += tensor.nbytes + 5
    return pieces, offset


def content(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).cpu().numpy().tobytes()


def outcome(
    flight: InFlight, pieces: list[TensorPiece], buffer: torch.Tensor, wanted: list[bytes]
) -> Outcome:
    """What became of a snapshot that is done."""
    staged = [buffer[piece.offset : piece.offset + piece.nbytes].numpy().tobytes() for piece in pieces]
    prints = flight.fingerprints()
    agree = [fingerprint.matches(data, told) for data, told in zip(staged, prints, strict=True)]
    if flight.torn():
        return "torn"
    if staged == wanted:
        return "exact" if all(agree) else "seen"
    return "silently wrong" if all(agree) else "seen"
