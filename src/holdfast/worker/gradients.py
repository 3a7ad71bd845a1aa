"""One look at all gradients of some models: whether any element is not a number.

Guarantee: if any element of any gradient is NaN or infinite, a sounding is not finite. The other way round
it need not be so (sums and squares overflow), which `bad` settles, slowly and exactly. A gradient that is
sharded is seen as far as this rank holds it; nothing here is a collective, and nothing waits for a device but
`bad`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.gradient_state import is_placeholder

LOOKED_UP_EVERY = 64
"""Looks after which the models' parameters are looked up again: a model may be changed between steps."""
NAMED = 3
"""Parameters that a reason names; the others are counted."""
WIDE = frozenset({torch.float32, torch.float64})
PLAIN = WIDE | {torch.float16, torch.bfloat16}
HOST = torch.device("cpu")

Group = tuple[torch.device, torch.dtype]
Kind = tuple[type, torch.layout, torch.dtype, torch.device]

_kind = operator.attrgetter("__class__", "layout", "dtype", "device")
_USUAL = {(torch.Tensor, torch.strided, torch.float32, HOST)}


class Gradients:
    """The gradients of these models, whichever are there at the moment."""

    def __init__(self, models: Iterable[tuple[str, nn.Module]]) -> None:
        self._models = list(models)
        self._places: list[tuple[dict[str, Any], str]] = []
        self._looks = 0
        self._placeholders = True
        """Whether there were any when this was last looked at: only a resume puts some there."""

    def soundings(self) -> list[torch.Tensor | float]:
        """Few numbers, all finite only if every element is: the sum of float32 on the host, else norms."""
        there = self._there()
        kinds = set(map(_kind, there))
        # After a step hardly anything of Python's is in the processor's cache, so the usual case does little.
        if kinds == _USUAL:
            return [sum([gradient.sum().item() for gradient in there])]
        return _norms(there, kinds)

    def norms(self) -> list[torch.Tensor | float]:
        """This rank's norm in parts: a number for the host, a tensor on each other device."""
        there = self._there()
        return _norms(there, set(map(_kind, there)))

    @torch.no_grad()
    def bad(self) -> list[str]:
        """Which parameters' gradients hold something that is no number, in words; waits for the device."""
        found = []
        for name, model in self._models:
            for key, parameter in model.named_parameters():
                if parameter.grad is None or is_placeholder(parameter.grad):
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

    def _there(self) -> list[torch.Tensor]:
        """All gradients that there are."""
        # Walking a tree of modules costs more than looking at small gradients, so where parameters are kept
        # is remembered. It is the place that is remembered, not the parameter: FSDP exchanges those.
        if self._looks % LOOKED_UP_EVERY == 0:
            self._places = list(_places(self._models))
        self._looks += 1
        found = [
            gradient
            for parameters, name in self._places
            if (parameter := parameters.get(name)) is not None and (gradient := parameter.grad) is not None
        ]
        if self._placeholders and found:
            real = [gradient for gradient in found if not is_placeholder(gradient)]
            self._placeholders = len(real) < len(found)
            return real
        return found


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


@torch.no_grad()
def _norms(there: list[torch.Tensor], kinds: set[Kind]) -> list[torch.Tensor | float]:
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for (device, dtype), members in _groups(there, kinds).items():
        # A half-precision norm is summed in float32 anyway; as float32 it cannot overflow at the end.
        wide = None if dtype in WIDE else torch.float32
        parts.setdefault(device, []).extend(torch._foreach_norm(members, 2, dtype=wide))
    here = parts.pop(HOST, None)
    found: list[torch.Tensor | float] = [
        torch.linalg.vector_norm(torch.stack(_alike(norms)), dtype=torch.float64) for norms in parts.values()
    ]
    return found if here is None else [*found, math.hypot(*[norm.item() for norm in here])]


def _groups(there: list[torch.Tensor], kinds: set[Kind]) -> dict[Group, list[torch.Tensor]]:
    """Those that are alike together: one call looks at many."""
    if len(kinds) == 1:
        ((cls, layout, dtype, device),) = kinds
        if cls is torch.Tensor and layout is torch.strided and dtype in PLAIN and device.type != "meta":
            return {(device, dtype): there}
    groups: dict[Group, list[torch.Tensor]] = {}
    for gradient in map(plain, there):
        if not gradient.is_meta:
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return groups


def _alike(norms: list[torch.Tensor]) -> list[torch.Tensor]:
    """For stacking: of one dtype."""
    dtypes = {norm.dtype for norm in norms}
    return norms if len(dtypes) == 1 else [norm.double() for norm in norms]
