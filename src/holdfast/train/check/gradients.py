"""One look at all gradients of some models: whether any element is not a number.

Guarantee: if any element of any gradient is NaN or infinite, a sounding is not finite. The converse need not
hold (sums and squares overflow); `bad` settles that, slowly and exactly. Of a sharded gradient, only what
this rank holds is seen; nothing here is a collective, and only `bad` waits for a device.

With many small gradients it is Python that takes the time, so where they lie is found out once
(`_PlainLook`), and after that no Python runs for each of them. Reading thousands of modules is a good part of
that time, so parameters are read from their optimizers if these are known: what an optimizer currently holds
is always looked at; a parameter that has since been put into a module, but into no optimizer, is seen within
the next `LOOKED_UP_EVERY` looks.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.base import local_part
from holdfast.checkpoint.state import is_placeholder

LOOKED_UP_EVERY = 64
"""Number of looks after which the models' parameters are found anew: a model may change between steps."""
NAMED = 3
"""How many parameters a reason names; the others are counted."""
WIDE = frozenset({torch.float32, torch.float64})
PLAIN = WIDE | {torch.float16, torch.bfloat16}
HOST = torch.device("cpu")
SMALL = 32 * 1024
"""Gradients of up to this many bytes are summed together, while they are in the processor's cache."""
TOGETHER = 512 * 1024
"""Bytes of small gradients that are summed at a time."""

Group = tuple[torch.device, torch.dtype]
Kind = tuple[type, torch.layout, torch.dtype, torch.device]

_kind = operator.attrgetter("__class__", "layout", "dtype", "device")
_grad = operator.attrgetter("grad")
_USUAL = (torch.Tensor, torch.strided, torch.float32, HOST)


class Gradients:
    """The gradients of these models, whichever exist at the moment."""

    def __init__(
        self, models: Iterable[tuple[str, nn.Module]], optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._places: list[tuple[dict[str, Any], str]] = []
        self._usual: _PlainLook | None = None
        self._looks = 0
        self._placeholders = True
        """Whether there were any at the last look: only a resume creates some."""

    def soundings(self) -> list[torch.Tensor | float]:
        """A few numbers, all finite only if every element is: the sum of float32 on the host, else norms."""
        self._look_up()
        if self._placeholders:
            self._there()
        usual = None if self._placeholders else self._usual
        total = usual.total() if usual is not None else None
        if usual is not None and usual.outgrown:
            self._looks = 0
            self._look_up()
        return [*total] if total is not None else self._norms()

    def norms(self) -> list[torch.Tensor | float]:
        """This rank's norm in parts: a number for the host, a tensor on each other device."""
        self._look_up()
        return self._norms()

    def _norms(self) -> list[torch.Tensor | float]:
        there = self._there()
        return _norms(there, set(map(_kind, there)))

    @torch.no_grad()
    def bad(self) -> list[str]:
        """Which parameters' gradients hold something that is not finite, in words; waits for the device."""
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

    def _look_up(self) -> None:
        """Find out where the parameters are kept, every so often."""
        # Walking a tree of modules costs more than looking at small gradients, so where parameters are kept
        # is remembered. The place is remembered, not the parameter: FSDP replaces parameters.
        if self._looks % LOOKED_UP_EVERY == 0:
            modules = dict.fromkeys(module for _, model in self._models for module in model.modules())
            kept = [module._parameters for module in modules if module._parameters]
            sources = _Sources(self._optimizers, kept)
            if self._usual is None or not self._usual.is_of(sources):
                self._places = list(_places(kept))
                self._usual = _PlainLook.at(sources)
        self._looks += 1

    def _there(self) -> list[torch.Tensor]:
        """All gradients that exist, without placeholders."""
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


class _Sources:
    """Where parameters are read from: their optimizers, then the modules whose parameters have none."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], kept: list[dict[str, Any]]) -> None:
        self._optimizers = optimizers
        self._modules: list[dict[str, Any]] = []
        held = set(map(id, self.parameters()))
        self._modules = [
            parameters for parameters in kept if not held.issuperset(map(id, parameters.values()))
        ]

    def parameters(self) -> list[Any]:
        """All of them as they are now; None where a module has set one to None."""
        groups = (group["params"] for optimizer in self._optimizers for group in optimizer.param_groups)
        return list(itertools.chain(*groups, *map(dict.values, self._modules)))

    def is_same(self, other: _Sources) -> bool:
        return list(map(id, self._modules)) == list(map(id, other._modules))


class _PlainLook:
    """The usual case: all parameters are plain float32 on the host. Anything else is noticed."""

    def __init__(self, sources: _Sources) -> None:
        self._sources = sources
        self.outgrown = False
        """Whether the number of parameters has changed, or the kind of thing in some place."""
        self._form = _form(sources.parameters())
        alone: list[int] = []
        alike: dict[tuple[int, ...], list[int]] = {}
        parameters = [_NONE if parameter is None else parameter for parameter in sources.parameters()]
        for at, parameter in enumerate(parameters):
            if isinstance(self._form[at], int):
                continue
            small = 0 < parameter.nbytes <= SMALL and parameter.dim()
            (alike.setdefault(tuple(parameter.shape[1:]), []) if small else alone).append(at)
        batches: list[list[int]] = []
        for members in alike.values():
            size = TOGETHER
            for at in members:
                if size + parameters[at].nbytes > TOGETHER:
                    batches.append([])
                    size = 0
                batches[-1].append(at)
                size += parameters[at].nbytes
        alone += [batch[0] for batch in batches if len(batch) == 1]
        self._alone = sorted(alone)
        self._batches = [_items(batch) for batch in batches if len(batch) > 1]

    @classmethod
    def at(cls, sources: _Sources) -> _PlainLook | None:
        """None if it is not the usual case."""
        usual = all(
            parameter is None or (type(parameter) is nn.Parameter and _kind(parameter)[1:] == _USUAL[1:])
            for parameter in sources.parameters()
        )
        return cls(sources) if usual else None

    def is_of(self, sources: _Sources) -> bool:
        """Whether these are the places, with parameters of the same shapes."""
        return self._sources.is_same(sources) and _form(sources.parameters()) == self._form

    def total(self) -> list[float] | None:
        """The sum of all gradients, if there are any; None if this is no longer the usual case."""
        parameters = self._sources.parameters()
        if len(parameters) != len(self._form):
            self.outgrown = True
            return None
        total, found = 0.0, False
        try:
            for at in self._alone:
                if (parameter := parameters[at]) is not None and (gradient := parameter.grad) is not None:
                    if _kind(gradient) != _USUAL:
                        return None
                    total += gradient.sum().item()
                    found = True
            for pick in self._batches:
                # Read and summed batch by batch, while what was read is still in the cache.
                together = _together(list(map(_grad, pick(parameters))))
                if together is not None:
                    if _kind(together) != _USUAL:
                        return None
                    total += together.sum().item()
                    found = True
        except AttributeError:  # a parameter that is None by now
            self.outgrown = True
            return None
        except RuntimeError:  # gradients of several devices or layouts
            return None
        return [total] if found else []


def _together(gradients: list[Any]) -> torch.Tensor | None:
    """All of them as one tensor; None if there are none."""
    try:
        return torch.cat(gradients)
    except TypeError:  # looking for None in each of them would cost as much as reading them
        existing = [gradient for gradient in gradients if gradient is not None]
        return torch.cat(existing) if existing else None


def _form(parameters: list[Any]) -> list[torch.Size | int | None]:
    """For each parameter its shape; for one that occurred before, under another name, where that was."""
    found: list[torch.Size | int | None] = []
    first: dict[int, int] = {}
    for at, parameter in enumerate(parameters):
        if parameter is None:
            found.append(None)
        else:
            before = first.setdefault(id(parameter), at)
            found.append(parameter.shape if before == at else before)
    return found


def _items(positions: list[int]) -> Callable[[Sequence[Any]], Any]:
    """Picks two or more items out of a sequence; at equal distances a slice is several times faster."""
    apart = positions[1] - positions[0]
    if positions == list(range(positions[0], positions[-1] + 1, apart)):
        return operator.itemgetter(slice(positions[0], positions[-1] + 1, apart))
    return operator.itemgetter(*positions)


_NONE = torch.empty(0)
"""Stands in for a parameter that a module has set to None."""


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient that this rank holds, as a dense tensor of real numbers."""
    if isinstance(gradient, DTensor):
        gradient = local_part(gradient)
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()
    elif gradient.layout is not torch.strided:
        gradient = gradient.values()
    if gradient.dtype.is_complex:
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient if gradient.dtype in PLAIN else gradient.float()


def _places(kept: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str]]:
    """Where each parameter is kept; one that several modules share appears once."""
    seen: set[int] = set()
    for parameters in kept:
        for name, parameter in parameters.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameters, name


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
    """The gradients, grouped with those that are alike, so that one call looks at many."""
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
    """The norms in one dtype, for stacking."""
    dtypes = {norm.dtype for norm in norms}
    return norms if len(dtypes) == 1 else [norm.double() for norm in norms]
