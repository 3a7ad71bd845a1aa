"""A short probe of the device that a rank computes on: is a known product right, and how fast is the device.

Guarantee: at most about half a second, some MiB, no random numbers drawn, and no error raised: what went
wrong is part of the answer. A probe does not say how fast a training step should be; it tells ranks apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

SIZE = 512
"""Rows of the square float32 matrices: small whole numbers, whose product is exact on every device."""
LARGE = 2048
"""Rows of the matrices that keep a device busy; sums of 2048 such products are still exact in float32."""
COPY_MIB = 16
BUDGET = 0.2
"""Seconds for each of the two measurements."""
MOST_ROUNDS = 200


class ComputeProbe(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    gflops: float = 0.0
    copy_gbps: float = 0.0
    right: bool = False
    """Whether every element of the product was right."""
    problem: str = ""

    def describe(self) -> str:
        if self.problem:
            return f"{self.device}: the probe failed: {self.problem}"
        wrong = "" if self.right else ", and a WRONG product"
        return f"{self.device}: {self.gflops:.4g} GFLOP/s, copies at {self.copy_gbps:.3g} GB/s{wrong}"


def probe_compute(device: torch.device | None = None) -> ComputeProbe:
    """Try the device out; the CPU if none is given."""
    device = device if device is not None else torch.device("cpu")
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            right, gflops = _multiply(device)
            return ComputeProbe(device=str(device), gflops=gflops, copy_gbps=_copy(device), right=right)
    except Exception as error:  # noqa: BLE001 - a sick device may fail in any way
        return ComputeProbe(device=str(device), problem=f"{type(error).__name__}: {error}"[:200])


def keeps_computing(device: torch.device, seconds: float, size: int = LARGE) -> bool:
    """Whether every product is right, of as many as fit into so many seconds."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        left, right, values = _factors(device, size)
        expected = size * torch.outer(values, values)
        product = torch.empty_like(expected)
        end = time.perf_counter() + seconds
        while True:
            torch.mm(left, right, out=product)
            if not torch.equal(product, expected):
                return False
            if time.perf_counter() >= end:
                return True


def _factors(device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = torch.arange(size, device=device, dtype=torch.float32)
    values = numbers.remainder(7) + 1
    signs = 1 - 2 * numbers.remainder(2)
    return torch.outer(values, signs), torch.outer(signs, values), values


def _multiply(device: torch.device) -> tuple[bool, float]:
    """Each row holds one value; signs cancel out: element (i, j) must be SIZE · left i · right j."""
    left, right, values = _factors(device, SIZE)
    product = left @ right
    correct = bool(torch.equal(product, SIZE * torch.outer(values, values)))
    rounds, seconds = _repeated(lambda: torch.mm(left, right, out=product), device)
    correct = correct and bool(torch.equal(product, SIZE * torch.outer(values, values)))
    return correct, rounds * 2 * SIZE**3 / seconds / 1e9


def _copy(device: torch.device) -> float:
    source = torch.ones(COPY_MIB * 1024 * 1024 // 4, device=device)
    target = torch.empty_like(source)
    rounds, seconds = _repeated(lambda: target.copy_(source), device)
    return rounds * source.nbytes / seconds / 1e9


def _repeated(work: Callable[[], object], device: torch.device) -> tuple[int, float]:
    """How often the work was done within the budget, and how long that took."""
    work()
    _wait(device)
    began = time.perf_counter()
    rounds = 0
    while rounds < MOST_ROUNDS and time.perf_counter() - began < BUDGET:
        work()
        _wait(device)
        rounds += 1
    return rounds, max(time.perf_counter() - began, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
