"""One look at all gradients of some models: their norm, and whether any element is not a number.

Guarantee: if any element of any gradient is NaN or infinite, the norm is not finite. The other way round it
need not be so (squares overflow), which `bad` settles, slowly and exactly. A gradient that is sharded is seen
as far as this rank holds it; nothing here is a collective, and nothing waits for a device but `bad`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

LOOKED_UP_EVERY = 64
"""Looks after which the models' parameters are looked up again: a model may be changed between steps."""
LARGE = 8192
"""Elements from which on a gradient on the host is faster as a product of its own than among others."""
FEW = 16
"""Small gradients of which that is so as well: one call for all of them has to be prepared first."""
NAMED = 3
"""Parameters that a reason names; the others are counted."""
PLAIN = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class Gradients:
    """The gradients of these models, whichever are there at the moment."""

    def __init__(self, models: Iterable[tuple[str, nn.Module]]) -> None:
        self._models = list(models)
        self._places: list[tuple[dict[str, Any], str]] = []
        self._looks = 0

    @torch.no_grad()
    def norms(self) -> list[torch.Tensor | float]:
        """This rank's norm in parts: a number for the host, a tensor on each other device."""
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        squares: list[torch.Tensor] = []
        small = 0
        for gradient in self._gradients():
            dtype = gradient.dtype
            alone = gradient.is_cpu and dtype in WIDE and gradient.is_contiguous()
            if alone and gradient.numel() < LARGE:
                small += 1
                alone = small <= FEW
            if alone:
                flat = gradient.view(-1)
                squares.append(torch.dot(flat, flat))
            else:
                groups.setdefault((gradient.device, dtype), []).append(gradient)
        on_host: list[torch.Tensor] = []
        elsewhere: dict[torch.device, list[torch.Tensor]] = {}
        for (device, dtype), members in groups.items():
            # A half-precision norm is summed in float32 anyway; as float32 it cannot overflow at the end.
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            found = torch._foreach_norm(members, 2, dtype=wide)
            (on_host if device.type == "cpu" else elsewhere.setdefault(device, [])).extend(found)
        parts: list[torch.Tensor | float] = [
            torch.linalg.vector_norm(torch.stack(_alike(found)), dtype=torch.float64)
            for found in elsewhere.values()
        ]
        if on_host or squares:
            parts.append(_host_norm(on_host, squares))
        return parts

    @torch.no_grad()
    def bad(self) -> list[str]:
        """Which parameters' gradients hold something that is no number, in words; waits for the device."""
        found = []
        for name, model in self._models:
            for key, parameter in model.named_parameters():
                if parameter.grad is None:
                    continue
                values = plain(parameter.grad)
                if not bool(torch.isfinite(values).all()):
                    kind = "a NaN" if bool(torch.isnan(values).any()) else "an infinity"
                    found.append((f"{name}.{key}", kind))
        if not found:
            return []
        kind = "a NaN" if any(kind == "a NaN" for _, kind in found) else "an infinity"
        named = ", ".join(key for key, _ in found[:NAMED])
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        return [f"the gradients hold {kind}: {named}{more}"]

    def _gradients(self) -> Iterable[torch.Tensor]:
        # Walking a tree of modules costs more than looking at small gradients, so where parameters are kept
        # is remembered. It is the place that is remembered, not the parameter: FSDP exchanges those.
        if self._looks % LOOKED_UP_EVERY == 0:
            self._places = list(_places(self._models))
        self._looks += 1
        for parameters, name in self._places:
            parameter = parameters.get(name)
            if parameter is None or (gradient := parameter.grad) is None:
                continue
            if (
                type(gradient) is not torch.Tensor
                or gradient.layout is not torch.strided
                or (gradient.dtype not in PLAIN)
            ):
                gradient = plain(gradient)
            if gradient.numel() and not gradient.is_meta:
                yield gradient


WIDE = (torch.float32, torch.float64)


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient that this rank holds, as a dense tensor of real numbers."""
    if isinstance(gradient, DTensor):
        gradient = gradient._local_tensor
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()
    elif gradient.layout is not torch.strided:
        gradient = gradient.values()
    if gradient.dtype.is_complex:
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient if gradient.dtype in PLAIN else gradient.float()


def _places(models: Iterable[tuple[str, nn.Module]]) -> Iterable[tuple[dict[str, Any], str]]:
    """Where each parameter is kept; one that several modules share is there once."""
    seen: set[int] = set()
    for _, model in models:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield module._parameters, name


def _alike(norms: list[torch.Tensor]) -> list[torch.Tensor]:
    """For stacking: of one dtype."""
    dtypes = {norm.dtype for norm in norms}
    return norms if len(dtypes) == 1 else [norm.double() for norm in norms]


def _host_norm(norms: list[torch.Tensor], squares: list[torch.Tensor]) -> float:
    total = 0.0
    if norms:
        total = sum(value * value for value in torch.stack(_alike(norms)).tolist())
    if squares:
        total += sum(torch.stack(_alike(squares)).tolist())
    return math.sqrt(total) if total >= 0 else math.nan
