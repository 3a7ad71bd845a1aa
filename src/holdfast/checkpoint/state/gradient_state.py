"""The gradients that exist at a step boundary, as part of a checkpoint.

Guarantee: a resume goes on with every gradient that the next step makes use of, or is refused at the moment
of that use. Three kinds of loop have to be told apart, and none says which one it is:

* gradients are accumulated over several steps (`if step % 4 == 0: opt.step()`): they are state like all else,
  and are stored;
* they are left over from a step that an optimizer has taken, and the next step clears them before it adds to
  them (`opt.zero_grad()` first): they do not matter, and storing them would make every save larger;
* they are left over and never cleared, or used late: they matter.

So the loop is watched. After a boundary a gradient is marked, and the first backward that reaches its
parameter, or the first optimizer that steps it, finds it as it was (it is used again) or not (it was
cleared). That is done in the first steps of an attempt, and again in the step after each save that has left
something out. As hooks on thousands of gradients take longer than the rest of a save, gradients that came as
a new tensor after each backward are then watched less closely: it is enough that the tensor is a new one, and
if it is not, the close watch begins anew. A gradient is left out only if a torch optimizer has stepped it
since the boundary before, and it was seen cleared, and never used, until then. In its place a resume puts a
placeholder of NaNs: a loop that clears gradients clears it too, and using it is an error that names it.
A gradient of all zeros is not stored either, but comes back as zeros: an optimizer treats these differently
from no gradient. If ranks share a gradient out among themselves, no rank judges by what its own part holds.

Where they are kept: a gradient in its parameter's `grad`, plain or a DTensor; under DDP's `no_sync` each rank
has its own, which the planner stores apart; what FSDP2 has accumulated without a reduction is in its own
record of the parameter, unsharded, and different on each rank. A sparse one is stored in the rank's blob.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holdfast.base import (
    ShardedParameter,
    compute_local_shape_and_global_offset,
    flat_handle,
    has_partial_reduction,
    has_unreduced_gradient,
    is_traceable_wrapper_subclass,
    local_part,
    scaler_findings,
    sharded_parameters,
)
from holdfast.checkpoint.state.adapters import SplitTensor, child_names
from holdfast.checkpoint.state.division import Placed
from holdfast.errors import CheckpointError, IncompleteStateError, SaveFailedError

if TYPE_CHECKING:
    from holdfast.checkpoint.state.tracked import Tracked

GRADIENTS = "holdfast_gradients"
"""Reserved top-level name of the stored gradients, of their part in the manifest, and of what it `needs`."""
LOOKED_AT = 16
"""Steps of an attempt for which gradients are watched; later, only after a save that leaves some out."""
PATTERN = (
    "To keep them out of checkpoints take several batches a step: `for step, batches in run.steps(loader, "
    "until=…, batches=4)`, with one backward for each and one opt.step() and opt.zero_grad() at the end"
)
_MARK = "_holdfast_mark"
_SPENT = "_holdfast_spent"

_WRAPPED_IN = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which wrappers keep the module that they wrap; not part of a parameter's own name."""


def is_placeholder(gradient: torch.Tensor) -> bool:
    """Whether a gradient stands in for one that no checkpoint holds: its NaNs say nothing about training."""
    return getattr(gradient, _SPENT, False)


def may_leave_out(*, owned: bool, stepped: bool, seen_used: bool | None) -> bool:
    """Pure: whether a gradient need not be stored.

    `owned`: only torch's optimizers make use of it; `stepped`: one has, since the boundary before;
    `seen_used`: whether it was ever used again, None if that was never watched.
    """
    return owned and stepped and seen_used is False


@dataclass(frozen=True)
class _Place:
    """Where a gradient is kept."""

    name: str
    parameter: torch.Tensor
    by_autograd: bool
    """Whether autograd adds to it, so that hooks on the parameter see that. FSDP2 sets its own gradients."""
    hidden: ShardedParameter | None = None
    """Set where this is about what FSDP2 keeps to itself."""

    def read(self) -> torch.Tensor | None:
        return self.parameter.grad if self.hidden is None else self.hidden.gradient()

    def write(self, gradient: torch.Tensor | None) -> None:
        if self.hidden is None:
            self.parameter.grad = gradient
        else:
            self.hidden.set_gradient(gradient)


@dataclass(eq=False)
class _Watch:
    """What becomes of one gradient until it is used or cleared."""

    place: _Place
    token: object
    version: int
    placeholder: bool
    hooks: list[Any] = field(default_factory=list)
    gone: bool = False
    """Whether a backward found no gradient: it had been set to None."""
    found: bool = False
    """Whether the last backward that reached it found it uncleared; it need not have added to it."""
    used: bool | None = None

    def look(self) -> bool | None:
        """Whether it is there, uncleared; None if nothing has touched it at all."""
        gradient = self.place.read()
        if gradient is None:
            return False
        if getattr(gradient, _MARK, None) is not self.token:
            # FSDP2 adds in place to what is there, so another tensor is a new one. Elsewhere a script set it.
            return self.place.by_autograd and not all_zero(gradient)
        if _version(gradient) == self.version:
            return None
        return _is_shared_out(gradient) or not all_zero(gradient)

    def before_use(self) -> None:
        """Autograd is about to add to it, or only calculates a gradient: `after_use` shows which."""
        self.gone = self.place.read() is None
        self.found = not self.gone and self.look() is not False

    def after_use(self) -> None:
        self.decide(self.found)

    def decide(self, used: bool) -> None:
        if self.used is None:
            self.used = used
            if used and self.placeholder:
                raise IncompleteStateError(
                    f"the gradient {self.place.name} was left out of the checkpoint that this run has "
                    "resumed from, because each step until then had cleared it first, but now it was used "
                    "before being cleared (by a backward that adds to it, or by an optimizer). Resume from "
                    f"another checkpoint (checkpoint.resume_from). {PATTERN}"
                )

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


class _Glance(NamedTuple):
    """A gradient that was left out of a save, and was a new tensor whenever it was watched."""

    place: _Place
    version: int


@dataclass(frozen=True)
class _Layout:
    """Where gradients are kept; valid for as long as no model is changed."""

    places: list[_Place]
    replicas: list[tuple[str, nn.parallel.DistributedDataParallel]]
    sharded: list[tuple[str, nn.Module]]
    """Modules at which FSDP2 shards."""
    flattened: list[tuple[str, nn.Module]]
    """Modules whose parameters FSDP1 has made into a flat one."""


class GradientState:
    """The gradients of a run's tracked models and optimizers."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._watches: dict[str, _Watch] = {}
        self._used: dict[str, bool] = {}
        """By name: whether it was ever seen used again."""
        self._renewed: set[str] = set()
        """Those that were None before a backward, and a new tensor after it."""
        self._looked_at: set[int] = set()
        """Parameters, by id, whose gradients' use is known."""
        self._look_until = LOOKED_AT
        self._left_out: set[str] = set()
        """Those that the last save left out."""
        self._glances: list[_Glance] = []
        self._token = object()
        self._layout: _Layout | None = None
        self._layout_of: object = None
        self._saved = 0
        self._steps = 0
        self._in_step = False
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._now: dict[int, torch.optim.Optimizer] = {}
        """Optimizers that have stepped since the last boundary; and below, in the step before it."""
        self._before: dict[int, torch.optim.Optimizer] = {}
        self._once: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Untracked optimizers that have stepped in some step; and below, those that did so in several."""
        self._often: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._doubts: list[str] = []
        self._told: set[str] = set()

    # --- the loop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The run has resumed, and is about to train."""
        self._known.update(self._tracked.optimizers())
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for watch in self._watches.values():
            watch.close()
        self._hooks, self._watches, self._glances = [], {}, []
        self._layout = self._layout_of = None
        self._now, self._before = {}, {}

    def begin_step(self) -> None:
        self._in_step = True

    def end_step(self) -> None:
        """A step is complete: see what became of the earlier gradients, and which ones exist now."""
        self._in_step = False
        self._steps += 1
        self._before, self._now = self._now, {}
        self._note_untracked()
        for watch in list(self._watches.values()):
            self._settle(watch)
        glances, self._glances = self._glances, []
        self._glance(glances, stepping=False)
        if self._steps <= self._look_until:
            ours = self._owned(self._known) & self._owned(self._before.values())
            if not ours <= self._looked_at:
                for place in self._places():
                    if id(place.parameter) not in ours:
                        continue
                    if place.name in self._used:
                        self._looked_at.add(id(place.parameter))
                    else:
                        self._watch(place)

    def untracked(self) -> list[torch.optim.Optimizer]:
        """Optimizers that are not tracked but have stepped in several steps, so that they live on.

        One that is made anew in each step, as for the inner loop of meta-learning, carries nothing over.
        """
        return list(self._often)

    def _note_untracked(self) -> None:
        ours = {id(optimizer) for optimizer in self._tracked.optimizers()}
        for optimizer in self._before.values():
            if id(optimizer) not in ours:
                (self._often if optimizer in self._once else self._once).add(optimizer)

    def stepped(self) -> list[torch.optim.Optimizer]:
        """Optimizers, tracked or not, that have stepped between the last two boundaries."""
        return list(self._before.values())

    def take_doubts(self) -> list[str]:
        """What there is to warn of; each is returned only once."""
        doubts, self._doubts = self._doubts, []
        return doubts

    def _settle(self, watch: _Watch) -> None:
        name = watch.place.name
        if watch.used is None and (used := watch.look()) is not None:
            watch.decide(used)
        if watch.used is None and watch.placeholder:
            return
        del self._watches[name]
        watch.close()
        if watch.used is None:
            return
        self._used[name] = self._used.get(name, False) or watch.used
        gradient = watch.place.read()
        if watch.gone and gradient is not None and getattr(gradient, _MARK, None) is not watch.token:
            self._renewed.add(name)
        else:
            self._renewed.discard(name)
        if watch.used and name in self._left_out:
            self._tell_of_lack(name, "has")

    def _tell_of_lack(self, name: str, has: str) -> None:
        self._tell(
            "wrong",
            f"the checkpoint of step {self._saved} lacks gradients that the step after it {has} used "
            f"(first {name}): earlier steps had cleared them, so they were left out. A resume from it "
            f"will be refused; later checkpoints hold them. {PATTERN}",
        )

    def _glance(self, glances: list[_Glance], *, stepping: bool) -> None:
        """Check that these were cleared, as always before. `stepping`: an optimizer is about to use them."""
        for glance in glances:
            gradient = glance.place.read()
            if gradient is None or getattr(gradient, _MARK, None) is not self._token:
                continue
            name, touched = glance.place.name, _version(gradient) != glance.version
            if touched and all_zero(gradient):
                continue
            if touched:  # added to; or cleared in another way than before, and then added to
                self._used.pop(name, None)  # so it is stored until it is known which
                self._renewed.discard(name)
                self._looked_at.clear()
                self._look_until = self._steps + LOOKED_AT
                self._tell_of_lack(name, "seems to have")
            elif stepping:
                self._used[name] = True
                self._tell_of_lack(name, "has")

    def _watch(self, place: _Place, *, placeholder: bool = False) -> None:
        gradient = place.read()
        if gradient is None or place.name in self._watches:
            return
        token = object()  # not the watch itself: a gradient that leads to its parameter would be a cycle
        setattr(gradient, _MARK, token)
        watch = _Watch(place, token, _version(gradient), placeholder)
        parameter: Any = place.parameter
        if place.by_autograd and parameter.requires_grad:
            watch.hooks = [
                parameter.register_hook(lambda _: watch.before_use()),
                parameter.register_post_accumulate_grad_hook(lambda _: watch.after_use()),
            ]
        self._watches[place.name] = watch

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._watches or self._glances:
            mine = self._owned([optimizer])
            glances = [glance for glance in self._glances if id(glance.place.parameter) in mine]
            if glances:
                self._glances = [glance for glance in self._glances if id(glance.place.parameter) not in mine]
                self._glance(glances, stepping=True)
            for watch in self._watches.values():
                if watch.used is None and id(watch.place.parameter) in mine:
                    watch.decide(watch.look() is not False)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if id(optimizer) not in self._now:
            self._now[id(optimizer)] = optimizer
            self._known.add(optimizer)

    def _owned(self, optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
        return set(self._parameters_of(optimizers))

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._doubts.append(text)

    def _now_laid_out(self) -> _Layout:
        """The layout, at a save, when the models have just been looked at."""
        known = self._tracked.unchanged()
        of = (known, self._parameters_of(self._tracked.optimizers())) if known is not None else None
        if self._layout is None or of is None or of != self._layout_of:
            modules = [one for name, model in self._tracked.models() for one in _modules(model, name, set())]
            sharded = [(path, module) for path, module in modules if sharded_parameters(module)]
            flattened = [(path, module) for path, module in modules if flat_handle(module) is not None]
            self._layout = _Layout(list(self._places()), list(self._replicas()), sharded, flattened)
            self._layout_of = of
        return self._layout

    def _parameters_of(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[int]:
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        return list(map(id, itertools.chain.from_iterable(groups)))

    def _places(self) -> Iterator[_Place]:
        """Every place with a gradient; a parameter that several modules share counts once."""
        seen: set[int] = set()
        for name, model in self._tracked.models():
            modules = list(_modules(model, name, set()))
            paths = {id(module): path for path, module in modules}
            for path, module in modules:
                for sharded in sharded_parameters(module):
                    if id(sharded.record) not in seen:
                        home, key = sharded.place
                        where = f"{paths.get(id(home), path)}.{key}"
                        seen |= {id(sharded.record), id(sharded.parameter), id(sharded.whole)}
                        yield _Place(where, sharded.parameter, by_autograd=False)
                        yield _Place(f"{where}.unsharded", sharded.parameter, False, sharded)
            for path, module in modules:
                for key, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield _Place(f"{path}.{key}", parameter, by_autograd=True)
        for name, optimizer in self._tracked.named_optimizers():
            for at, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield _Place(f"{name}.{at}.{index}", parameter, by_autograd=True)

    # --- a save ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, step: int | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors to store, by name; what a resume needs to know of all gradients). No step: only plan."""
        if self._in_step:  # a diagnostic save: nothing ever resumes from it
            return {}, {"entries": {}, "objects": {}, "unsynced": []}
        self._refuse_half_a_scaling()
        entries: dict[str, dict[str, Any]] = {}
        objects: dict[str, torch.Tensor] = {}
        doubtful: list[tuple[_Place, torch.Tensor]] = []
        if step is not None:
            self._left_out, self._saved = set(), step
            self._glances, self._token = [], object()
        owned, stepped = self._owned(self._known), self._owned(self._before.values())
        layout = self._now_laid_out()
        _refuse_half_a_reduction(layout)
        ours, described = owned & stepped, _Described()
        for place in layout.places:
            gradient = place.parameter.grad if place.hidden is None else place.read()
            if gradient is None:
                continue
            name, mine = place.name, id(place.parameter)
            if _stored_whole(gradient):
                objects[name] = gradient.detach()
            elif (self._watches and self._is_untouched_placeholder(place)) or (
                place.hidden is None
                and may_leave_out(owned=mine in owned, stepped=mine in ours, seen_used=self._used.get(name))
            ):
                part = self._tracked.division.place(name, gradient) if place.hidden is None else None
                entries[name] = described("spent", gradient if part is None else part.of(gradient.detach()))
                if step is None:
                    continue
                self._left_out.add(name)
                if name in self._renewed and name not in self._watches:
                    setattr(gradient, _MARK, self._token)
                    self._glances.append(_Glance(place, _version(gradient)))
                else:
                    self._watch(place)
            else:
                doubtful.append((place, gradient))
        place_of = self._tracked.division.place
        zeros = _all_zero([gradient for _, gradient in doubtful])
        tensors: dict[str, torch.Tensor] = {}
        for (place, gradient), is_zero in zip(doubtful, zeros, strict=True):
            part = place_of(place.name, gradient) if place.hidden is None else None
            if part is not None:
                gradient = part.of(gradient.detach())
            left_out = is_zero and not _is_shared_out(gradient)
            kind = "zero" if left_out else "stored"
            if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
                kind = "zero" if left_out else "local"  # a sum not yet made: of each rank's own
            entries[place.name] = described(kind, gradient)
            if left_out:
                continue
            mine = id(place.parameter)
            seen = step is not None and mine in owned and not is_zero
            if seen and (mine not in stepped or self._used.get(place.name)):
                self._tell("accumulated", _accumulated(place.name, step or 0))
            tensors[place.name] = local_part(gradient) if kind == "local" else gradient.detach()
        return tensors, {"entries": entries, "objects": objects, "unsynced": _unsynced(layout)}

    def _is_untouched_placeholder(self, place: _Place) -> bool:
        watch = self._watches.get(place.name)
        return watch is not None and watch.placeholder and watch.look() is None

    def _refuse_half_a_scaling(self) -> None:
        for scaler in self._tracked.scalers():
            for state in scaler_findings(scaler).values():
                if state["stage"].value:
                    raise SaveFailedError(
                        "a gradient scaler is in the middle of its work: scaler.unscale_() or scaler.step() "
                        "was called in this step, and scaler.update() was not. A checkpoint cannot hold "
                        "that: call scaler.update() before the step ends"
                    )

    def _replicas(self) -> Iterator[tuple[str, nn.parallel.DistributedDataParallel]]:
        for name, model in self._tracked.models():
            for path, module in _modules(model, name, set()):
                if isinstance(module, nn.parallel.DistributedDataParallel):
                    yield path, module

    # --- a resume -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def targets(self, described: Mapping[str, Any], metadata: Metadata) -> dict[str, torch.Tensor]:
        """Tensors to read the stored gradients into, by name."""
        places = {place.name: place for place in self._places()}
        wanted = described.get("entries", {})
        if strange := sorted((wanted.keys() | described.get("objects", {}).keys()) - places.keys()):
            raise IncompleteStateError(
                f"the checkpoint holds {len(strange)} gradients of parameters that this script does not "
                f"have, first {strange[0]}. Build the model as it was"
            )
        targets: dict[str, torch.Tensor] = {}
        for name, entry in wanted.items():
            if entry["kind"] in ("stored", "local"):
                stored = metadata.state_dict_metadata.get(f"{GRADIENTS}.{name}")
                if not isinstance(stored, TensorStorageMetadata):
                    raise CheckpointError(f"incomplete: the gradient {name} is missing from this checkpoint")
                place = places[name]
                part = self._part_of(place, entry)
                whole = _made(place, entry, torch.empty_like, part)
                if part is not None:
                    whole = part.of(whole)
                targets[name] = local_part(whole) if entry["kind"] == "local" else whole
        return targets

    def _part_of(self, place: _Place, entry: Mapping[str, Any]) -> Placed | None:
        """This rank's part of a gradient, where that is of a whole that was stored as such."""
        if place.hidden is not None:
            return None
        part = self._tracked.division.place(place.name, place.parameter)
        return part if part is not None and tuple(entry["shape"]) == tuple(part.whole) else None

    @torch.no_grad()
    def apply(self, described: Mapping[str, Any], loaded: Mapping[str, torch.Tensor]) -> None:
        """Put every gradient where it was; a parameter that had none gets none."""
        entries, objects = described["entries"], described["objects"]
        for place in list(self._places()):
            gradient: torch.Tensor | None = None
            entry = entries.get(place.name)
            part = self._part_of(place, entry) if entry is not None else None
            if part is not None and not part.seen.numel():
                entry = None  # FSDP1 has none where it has nothing of the parameter
            if place.name in objects:
                gradient = objects[place.name].to(place.parameter.device)
            elif entry is not None and entry["kind"] == "zero":
                gradient = _made(place, entry, torch.zeros_like, part)
            elif entry is not None and entry["kind"] == "spent":
                gradient = _made(place, entry, _nans, part)
                setattr(gradient, _SPENT, True)
            elif entry is not None:
                gradient = loaded[place.name]
                if part is not None and isinstance(gradient, SplitTensor):
                    gradient = gradient.held.detach()
                if entry["kind"] == "local":
                    gradient = _around(place.parameter, gradient, entry["placements"])
            if gradient is not None or place.read() is not None:
                place.write(gradient)
            if gradient is not None and is_placeholder(gradient):
                self._watch(place, placeholder=True)
        for path, replica in self._replicas():
            if path in described["unsynced"]:
                replica.require_forward_param_sync = False


def _refuse_half_a_reduction(layout: _Layout) -> None:
    for path, module in layout.sharded:
        if has_partial_reduction(module):
            raise SaveFailedError(
                f"the gradients of {path} are reduced within each replica but not yet between the replicas "
                "(set_requires_all_reduce(False)). A checkpoint cannot hold that: end the step after the "
                f"micro-batch that reduces them. {PATTERN}"
            )
    for path, module in layout.flattened:
        if has_unreduced_gradient(module):
            raise SaveFailedError(
                f"FullyShardedDataParallel has gradients of {path} that are not reduced yet (no_sync). A "
                "checkpoint cannot hold these: end the step after the micro-batch that reduces them. "
                f"{PATTERN}"
            )


def _accumulated(name: str, step: int) -> str:
    return (
        f"gradients are accumulated over more than one step (first {name}): step {step} was saved with them, "
        f"which makes checkpoints that much larger. {PATTERN}"
    )


def _modules(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under a name that does not depend on what wraps it."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    replica = isinstance(module, nn.parallel.DistributedDataParallel)
    called = child_names(module)
    for name, child in module.named_children():
        wraps = name in _WRAPPED_IN or (replica and name == "module")
        yield from _modules(child, path if wraps else f"{path}.{called.get(name, name)}", seen)


def _is_shared_out(gradient: torch.Tensor) -> bool:
    """Whether each rank holds a part of it: then what is in one part must not decide, or ranks would differ,
    and a checkpoint that holds only some of its parts cannot be planned."""
    if isinstance(gradient, SplitTensor):
        return True
    return isinstance(gradient, DTensor) and any(p.is_shard() for p in gradient.placements)


def _version(gradient: torch.Tensor) -> int:
    if type(gradient) is torch.Tensor:
        return gradient._version
    return local_part(gradient)._version


def _stored_whole(gradient: torch.Tensor) -> bool:
    """Whether it is of a kind that cannot be stored as plain bytes under a name."""
    if type(gradient) is torch.Tensor:  # as most are
        return gradient.layout is not torch.strided
    local: Any = local_part(gradient)
    return local.layout is not torch.strided or is_traceable_wrapper_subclass(local)


def all_zero(gradient: torch.Tensor) -> bool:
    """By its bits: -0.0 is not what a cleared gradient holds."""
    if _stored_whole(gradient):
        return False
    return _all_zero([gradient])[0]


@torch.no_grad()
def _all_zero(gradients: list[torch.Tensor]) -> list[bool]:
    """For each whether it is, with only one wait for each device."""
    answers: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for at, gradient in enumerate(gradients):
        local = local_part(gradient).contiguous()
        found = local.view(-1).view(torch.uint8).any()
        answers.setdefault(local.device, []).append((at, found))
    zero = [False] * len(gradients)
    for several in answers.values():
        for (at, _), some in zip(several, torch.stack([a for _, a in several]).tolist(), strict=True):
            zero[at] = not some
    return zero


def _unsynced(layout: _Layout) -> list[str]:
    """DDP replicas that will not send rank 0's buffers before their next forward, after `no_sync`."""
    return [path for path, replica in layout.replicas if not replica.require_forward_param_sync]


class _Described:
    """What a resume needs to know of a gradient; gradients that are alike share one and the same object."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def __call__(self, kind: str, gradient: torch.Tensor) -> dict[str, Any]:
        placements = None if type(gradient) is torch.Tensor else getattr(gradient, "placements", None)
        alike = (kind, gradient.dtype, gradient.shape, placements, isinstance(gradient, SplitTensor))
        found = self._known.get(alike)
        if found is None:
            found = {"kind": kind, "dtype": gradient.dtype, "shape": tuple(gradient.shape)}
            found["placements"] = placements
            if isinstance(gradient, SplitTensor):
                found["parts"] = True
            self._known[alike] = found
        return found


def _made(
    place: _Place, entry: Mapping[str, Any], fill: Callable[..., torch.Tensor], part: Placed | None = None
) -> torch.Tensor:
    """A gradient as it is described, for this parameter; or this rank's part of it."""
    parameter, shape = place.parameter, tuple(entry["shape"] if part is None else part.seen)
    if shape != tuple(parameter.shape):
        raise IncompleteStateError(
            f"the gradient {place.name} has shape {shape} in the checkpoint; the parameter's is "
            f"{tuple(parameter.shape)}. Build the model as it was"
        )
    local, placements = local_part(parameter), entry["placements"]
    size = tuple(local.shape) if place.hidden is None else shape
    if isinstance(parameter, DTensor) and place.hidden is None:
        mesh = parameter.device_mesh
        if placements is not None and len(placements) == mesh.ndim:
            size = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)[0]
        else:  # it was laid out differently then, or not at all
            placements = None
    if size == tuple(local.shape):  # the order in memory is the parameter's, too
        made = fill(local, dtype=entry["dtype"])
    else:
        made = fill(local.new_empty(size), dtype=entry["dtype"])
    return made if place.hidden is not None else _around(parameter, made, placements)


def _around(parameter: torch.Tensor, local: torch.Tensor, placements: Any) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        placements if placements is not None else parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _nans(like: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    return torch.full_like(like, float("nan"), dtype=dtype)
