"""Running a step again: everything that it changes in a rank, the way back, and dropping it.

A gradient is in its parameter's `grad`. FSDP2 keeps what was accumulated without a reduction elsewhere, out
of sight between two calls: `torch_internals` knows where.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import xxhash
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from holdfast.base import local_part, scaler_findings, sharded_parameters, tree_leaves
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.state import Tracked
from holdfast.journal.events import DeterminismMeasured
from holdfast.train import Meter
from holdfast.train.data import DataFeed, Randomness

# How much two runs of one step differ, and what was measured of that.


KEPT = 10_000
"""How many measurements, the newest, percentiles are taken of."""


def difference(one: float | None, other: float | None) -> float:
    """Relative to the larger. NaN equals NaN, an infinity equals only itself; otherwise infinite."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


class Determinism:
    """Differences between two runs of every step, in one attempt: for each step, its worst rank's."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._kept: deque[float] = deque(maxlen=KEPT)
        self._told = 0
        self._rank = 0
        self.steps = 0
        self.largest = 0.0

    def measure(self, found: float, rank: int = 0) -> None:
        """The largest difference that any rank found in a step, and which rank; the same on all ranks."""
        self._kept.append(found)
        self.steps += 1
        if found > self.largest:
            self.largest, self._rank = found, rank

    def report(self) -> DeterminismMeasured | None:
        """What is known by now; None if there is nothing new."""
        if self.steps == self._told:
            return None
        self._told = self.steps
        ordered = sorted(self._kept)

        def percentile(share: float) -> float:
            return _finite(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)])

        return DeterminismMeasured(
            steps=self.steps,
            p50=percentile(0.5),
            p90=percentile(0.9),
            p99=percentile(0.99),
            p999=percentile(0.999),
            largest=_finite(self.largest),
            ranks=self._ranks,
            worst_rank=self._rank,
        )


def _finite(value: float) -> float:
    """JSON has no infinity, so this huge number says that a result was finite in only one of two runs."""
    return value if math.isfinite(value) else 1e308


class TensorSlot(NamedTuple):
    """A place that holds a tensor, or None."""

    read: Callable[[], torch.Tensor | None]
    write: Callable[[torch.Tensor | None], None]


StepHook = Callable[[torch.optim.Optimizer, Any, Any], None]


def before_steps(optimizers: Sequence[torch.optim.Optimizer], call: StepHook) -> list[RemovableHandle]:
    """Make `call` run before each step of these optimizers.

    An optimizer that was made without torch's constructor, around another one, takes no hooks: then the inner
    one's steps, which are for the same parameters, count as its own.
    """
    handles: list[RemovableHandle] = []
    without: list[torch.optim.Optimizer] = []
    for optimizer in optimizers:
        try:
            handles.append(optimizer.register_step_pre_hook(call))
        except (AttributeError, TypeError):
            without.append(optimizer)
    if not without:
        return handles

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        theirs = {id(p) for outer in without for group in outer.param_groups for p in group["params"]}
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(optimizer is known for known in optimizers) and theirs & mine:
            call(optimizer, args, kwargs)

    return [*handles, register_optimizer_step_pre_hook(before)]


def gradient_slots(models: Iterable[nn.Module]) -> list[TensorSlot]:
    """Every place with a gradient, each parameter's only once."""
    slots: list[TensorSlot] = []
    seen: set[int] = set()
    for model in models:
        for parameter in model.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                slots.append(
                    TensorSlot(partial(getattr, parameter, "grad"), partial(setattr, parameter, "grad"))
                )
        for module in model.modules():
            for sharded in sharded_parameters(module):
                if id(sharded.record) not in seen:
                    seen.add(id(sharded.record))
                    slots.append(TensorSlot(sharded.gradient, sharded.set_gradient))
    return slots


def buffer_slots(models: Iterable[nn.Module]) -> list[TensorSlot]:
    """Every buffer, even those that no checkpoint holds; by place, because a module may replace a buffer."""
    slots: list[TensorSlot] = []
    seen: set[tuple[int, str]] = set()
    for model in models:
        for module in model.modules():
            for name in module._buffers:
                if (id(module), name) not in seen:
                    seen.add((id(module), name))
                    buffers: Any = module._buffers
                    slots.append(TensorSlot(partial(buffers.get, name), partial(buffers.__setitem__, name)))
    return slots


class SlotCopies:
    """What was in some slots at one moment. The memory of the copies is reused."""

    def __init__(self, slots: Sequence[TensorSlot]) -> None:
        self._slots = slots
        self._held: list[torch.Tensor | None] = [None] * len(slots)
        """The very tensors that were in the slots: views of a bucket must stay views of it."""
        self._copies: list[torch.Tensor | None] = [None] * len(slots)

    def capture(self) -> None:
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for at, slot in enumerate(self._slots):
            tensor = self._held[at] = slot.read()
            if tensor is None:
                continue
            local = local_part(tensor)
            if local.layout is not torch.strided:  # a sparse one has no fixed size
                self._copies[at] = local.clone()
                continue
            copy = self._copies[at]
            if copy is None or not _alike(copy, local):
                copy = self._copies[at] = torch.empty_like(local)
            sources.append(local)
            targets.append(copy)
        if targets:
            torch._foreach_copy_(targets, sources)

    def restore(self) -> None:
        with torch.no_grad():
            for slot, tensor, copy in zip(self._slots, self._held, self._copies, strict=True):
                if tensor is not None:
                    assert copy is not None
                    if copy.layout is not torch.strided:
                        tensor = copy.clone()
                    else:
                        local_part(tensor).copy_(copy)
                if slot.read() is not tensor:
                    slot.write(tensor)

    def release(self) -> None:
        """Let go of the tensors that were in the slots; only the memory of the copies is kept."""
        self._held = [None] * len(self._slots)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.layout is torch.strided
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.device == other.device
    )


# A mark of the tracked state that a step begins from, to tell whether two attempts began from the same state.
#
# `p:<hex>` stands for parameters and optimizer state, which stay as they are until a step is complete;
# `b:<hex>` for buffers, if the mark was taken before the step changed any. Only what both marks hold is
# compared.


def mark(tracked: Tracked, *, buffers: bool) -> str:
    """Waits for the devices. Changes nothing: an optimizer that has never stepped stays without state."""
    models = [model for _, model in tracked.models()]
    kept: list[torch.Tensor] = [parameter for model in models for parameter in model.parameters()]
    plain: list[str] = []
    for optimizer in tracked.optimizers():
        every: Mapping[Any, Any] = optimizer.state
        entries = [every.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
        entries += [entry for key, entry in every.items() if not isinstance(key, torch.Tensor)]
        for entry in entries:
            state = entry if isinstance(entry, dict) else {"": entry}
            for key in sorted(state, key=str):
                for leaf in tree_leaves(state[key]):
                    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                        kept.append(leaf)
                    else:
                        plain.append(f"{key}={leaf!r}")
    found = f"p:{_digest(kept, plain)}"
    if buffers:
        held = [slot.read() for slot in buffer_slots(models)]
        found += f" b:{_digest([tensor for tensor in held if tensor is not None], [])}"
    return found


def same(one: str, other: str) -> bool | None:
    """Whether the states are equal; None if the marks have nothing in common to compare."""
    first, second = _parts(one), _parts(other)
    common = first.keys() & second.keys()
    return all(first[key] == second[key] for key in common) if common else None


def _digest(tensors: list[torch.Tensor], plain: list[str]) -> str:
    prints = fingerprints.begin([local_part(tensor) for tensor in tensors]).result()
    return xxhash.xxh3_64_hexdigest("\n".join([*prints, *plain]).encode())


def _parts(text: str) -> dict[str, str]:
    return dict(part.split(":", 1) for part in text.split() if ":" in part)


# Batches that a step draws for itself, recorded so that the same step can be run again with the same ones.
#
# They come from the run's data feed, or from an iterator among the step's arguments. Both are recorded only
# for the duration of one call: nobody has to wrap an iterator, and a save between two calls sees the feed as
# it is.
#
# What a draw does to the random numbers is part of it: a loader without workers makes its samples here. So
# the state of the generators after each draw is kept with it, and restored when the batch is served again.


class _Drawn(NamedTuple):
    item: Any
    ended: bool
    after: Any


class Draws:
    """The draws of one call, by their source."""

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness
        self._drawn: dict[int, list[_Drawn]] = {}
        self._served: dict[int, int] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._on = self._inside = False

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """A call begins; returns its arguments, with their iterators recorded."""
        self._drawn, self._served, self._versions = {}, {}, []
        self._on, self._inside = True, False
        wrapped = [self._wrap(value) for value in args], {k: self._wrap(v) for k, v in kwargs.items()}
        self._note(wrapped)
        return wrapped

    def again(self) -> str:
        """The call is made again, with the same batches; returns why that is impossible, if it is."""
        self._served = {}
        if any(tensor._version != version for tensor, version in self._versions):
            return "a batch or an argument was changed in place by the step"
        return ""

    def end(self) -> None:
        self._drawn, self._served, self._versions = {}, {}, []
        self._on = False

    def draw(self, source: int, live: Callable[[], Any]) -> Any:
        """The source's next item: a recorded one, or a new one."""
        if not self._on or self._inside:  # an iterator may itself draw from the feed: the outer draw counts
            return live()
        drawn = self._drawn.setdefault(source, [])
        at = self._served.get(source, 0)
        self._served[source] = at + 1
        if at < len(drawn):
            self._randomness.restore(drawn[at].after)
        else:
            drawn.append(self._new(live))
        if drawn[at].ended:
            raise StopIteration
        return drawn[at].item

    def _new(self, live: Callable[[], Any]) -> _Drawn:
        self._inside = True
        try:
            item, ended = live(), False
        except StopIteration:
            item, ended = None, True
        finally:
            self._inside = False
        self._note(item)
        return _Drawn(item, ended, self._randomness.capture())

    def _note(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
                self._versions.append((leaf, leaf._version))

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, Iterator):
            return _Recorded(self, value)
        if type(value) in (list, tuple) and any(isinstance(item, Iterator) for item in value):
            return type(value)(self._wrap(item) for item in value)
        return value


class _Recorded:
    """An iterator whose items are recorded; everything else about it is as it was."""

    def __init__(self, draws: Draws, iterator: Iterator[Any]) -> None:
        self._draws = draws
        self._iterator = iterator

    def __iter__(self) -> _Recorded:
        return self

    def __next__(self) -> Any:
        return self._draws.draw(id(self._iterator), self._iterator.__next__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class RecordedFeed(DataFeed):
    """A data feed whose batches are recorded while a step computes."""

    draws: Draws | None = None

    def _next_of_epoch(self) -> tuple[Any] | None:
        if self.draws is None:
            return super()._next_of_epoch()
        found: tuple[Any] | None = self.draws.draw(id(self), super()._next_of_epoch)
        return found


# Where in a model a result that is not finite first appears. Only looked for while a step is run again.
#
# It watches the outputs of every module, and the gradients of every parameter as this rank computed them,
# before any reduction: a NaN that came from another rank's gradients is not this rank's.


MOST_CHARACTERS = 200


class Locator:
    """Watches models for as long as the `with` block lasts."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._handles: list[Any] = []
        self._seen: dict[int, torch.Tensor] = {}
        self.where = ""
        """The first part whose output was not finite although its input was; empty if none was found."""
        self.own_gradient = ""
        """The first parameter whose gradient, as this rank itself computed it, was not finite."""

    def __enter__(self) -> Self:
        for model in self._models:
            for name, module in model.named_modules():
                shown = _shown(name)
                self._handles.append(module.register_forward_pre_hook(self._parameters_hook(shown)))
                self._handles.append(module.register_forward_hook(self._output_hook(shown)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], {}

    def _output_hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            del module
            if not self.where and not _is_finite(output) and _is_finite(inputs):
                self.where = name or "the model"

        return look

    def _parameters_hook(self, name: str) -> Any:
        """Parameters are found on use: those with which FSDP2 computes exist only from then on."""

        def watch(module: nn.Module, inputs: Any) -> None:
            del inputs
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and id(parameter) not in self._seen:
                    self._seen[id(parameter)] = parameter  # held, so that its id stays its own
                    shown = f"{name}.{key}" if name else key
                    self._handles.append(parameter.register_hook(self._gradient_hook(shown)))  # type: ignore[no-untyped-call]

        return watch

    def _gradient_hook(self, name: str) -> Any:
        def look(gradient: torch.Tensor) -> None:
            if not self.own_gradient and not _is_finite(gradient):
                self.own_gradient = name

        return look


def _is_finite(tree: Any) -> bool:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            values = leaf.detach()
            values = values._values() if values.is_sparse else values
            if not bool(torch.isfinite(values).all()):
                return False
    return True


def _shown(name: str) -> str:
    return name.removeprefix("module.").removesuffix("module")[-MOST_CHARACTERS:] if name != "module" else ""


# Everything that a forward and backward changes in a rank, and the way back.
#
# Guarantee: after `restore` a call of the same function with the same batches gives what it gave the first
# time, bit for bit, as far as the device's own kernels do. It puts back: random numbers of every kind
# (python, numpy, torch, every CUDA device, tracked generators and trackers), the buffers of models, gradients
# as they were on entry (none stays none), the state of gradient scalers, and what the loop recorded of the
# step. It does not put back parameters and optimizer state: a step that changes them while it computes cannot
# be undone, and is refused. Nor does it put back what only the user's own objects know.


class Rewind:
    """The state of this rank at one moment, to go back to. Every `capture` replaces the one before."""

    def __init__(self, tracked: Tracked, meter: Meter | None = None) -> None:
        self._randomness = Randomness(tracked)
        models = [model for _, model in tracked.models()]
        self._gradients = SlotCopies(gradient_slots(models))
        self._buffers = SlotCopies(buffer_slots(models))
        self._scalers = [_ScalerState(scaler) for scaler in tracked.scalers() if scaler.is_enabled()]
        self._replicas = [
            module
            for model in models
            for module in model.modules()
            if isinstance(module, nn.parallel.DistributedDataParallel)
        ]
        self._syncs: list[bool] = []
        """Whether DDP is to send rank 0's buffers before its next forward; after `no_sync` it is not."""
        self._meter = meter
        self._random: Any = None
        self._recorded: Any = None

    def capture(self) -> None:
        self._random = self._randomness.capture()
        with torch.no_grad():
            self._gradients.capture()
            self._buffers.capture()
        self._syncs = [replica.require_forward_param_sync for replica in self._replicas]
        for scaler in self._scalers:
            scaler.capture()
        if self._meter is not None:
            self._recorded = self._meter.recorded()

    def restore(self) -> None:
        self._gradients.restore()
        self._buffers.restore()
        for replica, syncs in zip(self._replicas, self._syncs, strict=True):
            replica.require_forward_param_sync = syncs
        for scaler in self._scalers:
            scaler.restore()
        if self._meter is not None:
            self._meter.back_to(self._recorded)
        self._randomness.restore(self._random)

    def release(self) -> None:
        """Keep nothing of the training's, only the memory of the copies."""
        self._gradients.release()
        self._buffers.release()


class _ScalerState:
    """A gradient scaler's scale, and which optimizers' gradients it has unscaled in this step.

    Its state_dict knows nothing of the latter, and reading it would wait for the device.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler: Any = scaler
        self._numbers: dict[str, tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._optimizers: dict[int, dict[str, Any]] = {}

    def capture(self) -> None:
        for name in ("_scale", "_growth_tracker"):
            tensor = getattr(self._scaler, name)
            kept = self._numbers.get(name)
            if tensor is None:
                self._numbers[name] = None
            elif kept is not None and kept[0] is tensor:
                kept[1].copy_(tensor)
            else:
                self._numbers[name] = tensor, tensor.clone()
        self._optimizers = {
            key: {**state, "found_inf_per_device": dict(state["found_inf_per_device"])}
            for key, state in scaler_findings(self._scaler).items()
        }

    def restore(self) -> None:
        for name, kept in self._numbers.items():
            if kept is not None:
                kept[0].copy_(kept[1])
            setattr(self._scaler, name, kept[0] if kept is not None else None)
        states = scaler_findings(self._scaler)
        states.clear()
        for key, state in self._optimizers.items():
            states[key] = {**state, "found_inf_per_device": dict(state["found_inf_per_device"])}


# Dropping a step: its gradients never reach an optimizer.
#
# Guarantee: after `drop` and until the next step the tracked optimizers of torch's own kind change nothing.
# Without gradients they leave a parameter and its state alone. If a gradient scaler is tracked, the gradients
# stay, and one of each optimizer's is made infinite on every rank: then `scaler.step` skips on all of them,
# and `update` backs off once, alike everywhere (without any gradient it would raise). An optimizer that is
# stepped all the same, without the scaler or with gradients that came later, loses them at that moment.


class Dropping:
    """Stands in front of the tracked optimizers, from when the run starts until it ends."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._slots: Sequence[TensorSlot] | None = None
        self.dropped = False
        """Whether the current step was dropped."""
        self.stepped = False
        """Whether an optimizer has stepped since this was last set to False."""
        self._hooks = before_steps(tracked.optimizers(), self._before_step)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self.stepped = True
        if self.dropped:
            _forget(optimizer)

    def drop(self) -> None:
        """Take this step's gradients away from the optimizers."""
        self.dropped = True
        scalers = [scaler for scaler in self._tracked.scalers() if scaler.is_enabled()]
        if scalers:
            for optimizer in self._tracked.optimizers():
                _spoil(optimizer)
                for scaler in scalers:
                    _tell(scaler, optimizer)
            return
        if self._slots is None:
            self._slots = gradient_slots(model for _, model in self._tracked.models())
        for slot in self._slots:
            if slot.read() is not None:
                slot.write(None)
        for optimizer in self._tracked.optimizers():  # some of its parameters may belong to no tracked model
            _forget(optimizer)


def _forget(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _spoil(optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    candidates = [parameter for parameter in parameters if local_part(parameter).numel()]
    chosen = next((parameter for parameter in candidates if parameter.grad is not None), None)
    if chosen is None and candidates:
        chosen = candidates[0]
        chosen.grad = torch.zeros_like(chosen)
    if chosen is not None:
        gradient = local_part(chosen.grad)
        values = gradient._values() if gradient.is_sparse else gradient
        if values.numel():
            values.view(-1)[:1].fill_(math.inf) if values.is_contiguous() else values.fill_(math.inf)


def _tell(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Gradients that the step has already unscaled are not looked at again, so change the finding itself."""
    for found in scaler_findings(scaler).get(id(optimizer), {}).get("found_inf_per_device", {}).values():
        found.fill_(1.0)
