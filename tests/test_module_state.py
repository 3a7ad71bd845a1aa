"""Modules of every kind go on exactly as if there had been no resume, or are refused by name."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.checkpoint.load import _load_tensors
from holdfast.checkpoint.module_state import RECORD
from holdfast.checkpoint.state import Tracked, check_strict, flatten, from_blob, to_blob

WIDTH = 4
Build = Callable[[], nn.Module]


class Saved:
    """One part's state in a plain DCP directory and a blob, as a checkpoint holds it."""

    def __init__(self, tracked: Tracked) -> None:
        tensors, others = tracked.collect()
        self.blob = to_blob(others)
        self._home = tempfile.TemporaryDirectory()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(tensors, storage_writer=FileSystemWriter(self._home.name), no_dist=True)
        self.reader = FileSystemReader(self._home.name)
        self.metadata = self.reader.read_metadata()

    def load(self, tracked: Tracked) -> dict[str, Any]:
        others = from_blob(self.blob)
        targets = tracked.targets(others, self.metadata)
        check_strict(targets, self.metadata)
        _load_tensors(flatten(targets), self.reader)
        tracked.apply(targets, others)
        return targets


def tracking(**things: object) -> Tracked:
    tracked = Tracked()
    for name, thing in things.items():
        tracked.add(name, thing)
    tracked.begin()
    return tracked


def everything(model: nn.Module) -> dict[str, Any]:
    """All that training may change of a model, also what a state_dict leaves out."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        found[f"{prefix} training"] = module.training
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found[f"{prefix}.{name}"] = (
                    tuple(tensor.shape),
                    tensor.dtype,
                    tensor.requires_grad,
                    tensor.detach().contiguous().view(-1).view(torch.uint8).tolist(),
                )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[f"{prefix} extra"] = repr(module.get_extra_state())
    return found


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, steps: range, change: Callable[[nn.Module, int], None] | None = None) -> None:
    """Plain gradient descent: whatever is trained is in the model."""
    for step in steps:
        if change is not None:
            change(model, step)
        loss = (model(batch(step)) - 1).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
        if hasattr(model, "after_step"):
            model.after_step()


def fresh(build: Build) -> nn.Module:
    torch.manual_seed(3)
    return build()


def goes_on_exactly(build: Build, change: Callable[[nn.Module, int], None] | None = None) -> Saved:
    """Six steps in one go, and three, a save, a fresh object, a load and three more: the same."""
    whole = fresh(build)
    train(whole, range(6), change)
    first = fresh(build)
    tracked = tracking(model=first)
    train(first, range(3), change)
    saved = Saved(tracked)
    torch.manual_seed(99)
    second = build()
    again = tracking(model=second)
    saved.load(again)
    assert everything(second) == everything(first)
    twice = Saved(again)  # right after a load: nothing of the record is lost
    third = build()
    twice.load(tracking(model=third))
    for model in (second, third):
        train(model, range(3, 6), change)
        assert everything(model) == everything(whole)
    return saved


# --- point by point: what a load that writes into state_dict()'s tensors loses -----------------------------


class TensorExtra(nn.Linear):
    """Extra state that is a tensor, and grows."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.mean().item())
        return super().forward(x) + sum(self.seen)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.seen, dtype=torch.float64)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state.tolist()


class MixedExtra(TensorExtra):
    """Nothing at first, then a tensor."""

    def get_extra_state(self) -> Any:
        return super().get_extra_state() if self.seen else None

    def set_extra_state(self, state: Any) -> None:
        self.seen = [] if state is None else state.tolist()


class OwnFormat(nn.Linear):
    """Its value is under another name, in another form, and in as many entries as there are."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.values: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.values.append(x.sum().item())
        return super().forward(x) * (1 + len(self.values)) + self.values[0]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for at, value in enumerate(self.values):
            destination[f"{prefix}values.{at}"] = torch.tensor(value, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        mine = [key for key in state_dict if key.startswith(f"{prefix}values.")]
        self.values = [state_dict.pop(key).item() for key in mine]
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Hooked(nn.Linear):
    """Two parameters under each other's names in the checkpoint, and a count of every hook."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.ran: list[str] = []
        self._register_state_dict_hook(self._swap)
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: self._swap(module, state, prefix)
        )
        self.register_load_state_dict_post_hook(lambda *_: self.ran.append("post"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.other

    def _swap(self, module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        self.ran.append("swap")
        a, b = f"{prefix}weight", f"{prefix}other"
        state[a], state[b] = state[b], state[a]


def inside(kind: Build) -> Build:
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(kind()))


@pytest.mark.parametrize("wrap", [lambda build: build, inside])
@pytest.mark.parametrize("kind", [TensorExtra, MixedExtra, OwnFormat, Hooked])
def test_state_goes_through_load_state_dict(kind: Build, wrap: Callable[[Build], Build]) -> None:
    goes_on_exactly(wrap(kind))


def test_hooks_run_once_and_see_what_was_saved() -> None:
    tracked = tracking(model=Hooked())
    saved = Saved(tracked)
    model = Hooked()
    seen: list[Any] = []
    model.register_load_state_dict_pre_hook(
        lambda module, state, *_: seen.append({k: v.clone() for k, v in state.items()})
    )
    again = tracking(model=model)
    saved.load(again)
    assert model.ran.count("post") == 1
    (state,) = seen
    assert state.keys() == {"weight", "other"}


def test_a_plain_model_is_read_in_place_and_load_state_dict_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build() -> nn.Module:
        block = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), checkpoint_wrapper(nn.Linear(WIDTH, WIDTH))
        )
        return nn.Sequential(block, parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))

    first = build()
    saved = Saved(tracking(model=first))
    second = build()
    monkeypatch.setattr(nn.Module, "load_state_dict", None)
    targets = saved.load(tracking(model=second))
    live = {tensor.data_ptr() for tensor in second.state_dict().values()}
    assert {tensor.data_ptr() for tensor in flatten(targets).values()} == live
    assert everything(second) == everything(first)


# --- every kind of module ----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outward.weight = self.inward.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(self.inward(x))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)])
        self.named = nn.ParameterDict(
            {"scale": nn.Parameter(torch.randn(())), "unused": nn.Parameter(torch.ones(2))}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.several[0] + self.several[1]) * self.named["scale"]


class Buffers(nn.Module):
    """Buffers of every kind that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("growing", torch.zeros(0))
        self.register_buffer("later", None)
        self.register_buffer("dropped", torch.ones(2))
        self.register_buffer("cache", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("constant", torch.ones(WIDTH), persistent=False)
        self.register_buffer("grown_cache", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.cache + self.grown_cache.sum()
        with torch.no_grad():
            self.growing = torch.cat([self.growing, x.mean().view(1)])
            self.later = x.mean(0) if self.later is None else self.later + x.mean(0)
            self.dropped = None
            self.cache.data.add_(0.25)  # not even a version counter sees this
            self.grown_cache = torch.cat([self.grown_cache, x.mean().view(1)])
            if not hasattr(self, "made"):
                self.register_buffer("made", x.mean(0), persistent=False)
            self.made += 1
        return y + self.growing.sum() + self.later + self.made


class Toggled(nn.Module):
    """Thaws a layer at the second step and evaluates another from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.frozen(x)))


def thaw(model: nn.Module, step: int) -> None:
    if step == 1:
        model.frozen.requires_grad_(True)
        model.norm.eval()


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Averaged(nn.Module):
    """A bf16 model with its moving average in fp32, and a plain average beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(torch.bfloat16)
        wide = copy.deepcopy(self.model).float()
        self.ema = AveragedModel(wide, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.swa = AveragedModel(self.model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.to(torch.bfloat16)).float()

    def after_step(self) -> None:
        self.swa.update_parameters(self.model)
        self.ema.update_parameters(copy.deepcopy(self.model).float())


def quantised() -> nn.Module:
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).train()
    model.qconfig = get_default_qat_qconfig(
        "fbgemm"
    )  # a per-channel observer: its buffers change their shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare_qat(model)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def parametrised() -> nn.Module:
    model = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(model, "weight", Doubling())
    return model


def old_spectral() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))


KINDS: dict[str, Build] = {
    "compiled": lambda: torch.compile(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), backend="eager"
    ),
    "compiled inside": lambda: nn.Sequential(
        torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"), TensorExtra()
    ),
    "activation checkpoints": lambda: nn.Sequential(
        checkpoint_wrapper(nn.Linear(WIDTH, WIDTH)), TensorExtra()
    ),
    "checkpointed extra state": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), checkpoint_wrapper(OwnFormat())
    ),
    "parametrised": parametrised,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm, old": old_weight_norm,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm, old": old_spectral,
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.LazyLinear(WIDTH)),
    "quantisation-aware": quantised,
    "synchronised batch norm": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    ).eval(),
    "instance norm": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Unflatten(1, (1, WIDTH)),
        nn.InstanceNorm1d(1, track_running_stats=True),
        nn.Flatten(),
    ),
    "lora": Lora,
    "averaged": Averaged,
    "tied": Tied,
    "parameter lists": Lists,
    "buffers": Buffers,
    "buffers inside": inside(Buffers),
    "buffers, compiled": lambda: torch.compile(nn.Sequential(Buffers()), backend="eager"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_goes_on_exactly(kind: str) -> None:
    goes_on_exactly(KINDS[kind])


def test_what_is_thawed_or_evaluated_during_training_is_so_after_a_resume() -> None:
    saved = goes_on_exactly(Toggled, thaw)
    record = from_blob(saved.blob)["model"][RECORD]
    assert record == {
        "requires_grad": {"frozen.weight": True, "frozen.bias": True},
        "training": {"norm.": False},
    }
