"""Modules of every kind go on exactly as if there had been no resume, or are refused by name."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.checkpoint.choose.load import _load_tensors, _own_instead
from holdfast.checkpoint.save.plan import SnapshotPlanner, own_prefix, signature_of
from holdfast.checkpoint.state import module as module_state
from holdfast.checkpoint.state.adapters import flatten
from holdfast.checkpoint.state.module import RECORD
from holdfast.checkpoint.state.tracked import (
    Tracked,
    check_strict,
    from_blob,
    misfit,
    to_be_tracked,
    to_blob,
)
from holdfast.checkpoint.state.unchanged import Known
from holdfast.errors import IncompleteStateError, SaveFailedError
from kit.ranks.together import together
from kit.tiny import forked

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
        if lost := sorted({*to_be_tracked(self.metadata)} - flatten(targets).keys()):
            raise misfit([f"{name}: in the checkpoint, but not tracked" for name in lost])
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
            if tensor is not None and not tensor.is_sparse:
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
        self.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)  # has no plain bytes

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


class Blocks(nn.Module):
    """What large models are made of."""

    def __init__(self, *, extra: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = checkpoint_wrapper(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = TensorExtra() if extra else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.second(self.first(x))))


def sharded(*, extra: bool, reshard: bool = True) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    model = Blocks(extra=extra)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(*, extra: bool) -> nn.Module:
    model = Blocks(extra=extra)
    return parallelize_module(model, init_device_mesh("cpu", (1,)), {"first": ColwiseParallel()})


def test_what_large_models_are_wrapped_in_is_read_in_place(tmp_path: Path) -> None:
    """Memory matters there: only what cannot be read in place gets memory of its own."""

    def work() -> None:
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
        builds: list[Callable[..., nn.Module]] = [
            sharded,
            lambda **how: sharded(**how, reshard=False),
            lambda **how: torch.compile(sharded(**how), backend="eager"),
            tensor_parallel,
            lambda **how: nn.parallel.DistributedDataParallel(Blocks(**how)),
        ]
        for build in builds:
            for extra in (False, True):
                model = build(extra=extra)
                tracked = tracking(model=model)
                model(batch(0)).sum().backward()
                saved = Saved(tracked)
                assert list(tracked.collect()[0]["model"]) == list(get_model_state_dict(model))
                again = build(extra=extra)
                live = {memory(tensor) for tensor in again.state_dict().values()}
                targets = saved.load(tracking(model=again))["model"]
                elsewhere = [name for name, tensor in targets.items() if memory(tensor) not in live]
                assert elsewhere == (["last._extra_state"] if extra else [])
                assert local(again) == local(model)
        distributed.destroy_process_group()

    assert forked(work) == 0


def memory(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def local(model: nn.Module) -> dict[str, Any]:
    state = get_model_state_dict(model)
    return {n: (t.to_local() if isinstance(t, DTensor) else t).tolist() for n, t in state.items()}


def test_a_rank_reads_its_own_version_of_a_tensor_whatever_shape_that_has() -> None:
    def entry(*shape: int) -> TensorStorageMetadata:
        return TensorStorageMetadata(TensorProperties(), torch.Size(shape), [])

    stored = {"model.a": entry(2), "model.b": entry(3), f"{own_prefix(1)}model.a": entry(5)}
    metadata = Metadata(state_dict_metadata=stored)
    assert {k: v.size for k, v in _own_instead(metadata, 1).state_dict_metadata.items()} == {
        "model.a": (5,),
        "model.b": (3,),
        f"{own_prefix(1)}model.a": (5,),
    }
    assert _own_instead(metadata, 0) == metadata


def test_a_buffer_that_only_another_rank_changed_is_left_as_it_is() -> None:
    model = Buffers()
    tracked = tracking(model=model)
    train(model, range(2))
    saved = Saved(tracked)
    others = from_blob(saved.blob)
    assert others["model"][RECORD]["loose"] == ["cache", "grown_cache", "made"]
    others["model"][RECORD]["loose"] = [
        "grown_cache",
        "made",
    ]  # as a rank says that has not changed the first
    saved.blob = to_blob(others)
    again = Buffers()
    saved.load(tracking(model=again))
    assert again.cache.tolist() == [0] * WIDTH
    assert again.grown_cache.tolist() == model.grown_cache.tolist()


def test_a_module_that_is_used_again_is_recorded_as_changed_still() -> None:
    """A restart within the process may find the model as training left it; one in a new process will not."""

    def build() -> nn.Module:
        return nn.ModuleList([Buffers(), Toggled()])

    model = build()
    tracked = tracking(model=model)
    train(model[0], range(2))
    train(model[1], range(2), thaw)
    again = tracking(model=model)
    Saved(tracked).load(again)
    saved = Saved(again)
    fresh_model = build()
    saved.load(tracking(model=fresh_model))
    assert everything(fresh_model) == everything(model)


class Versioned(nn.Linear):
    _version = 1

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata["version"] == 1 < self._version:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].neg()
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def test_a_module_is_told_the_version_that_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, again = nn.Sequential(Versioned(2, 2)), nn.Sequential(Versioned(2, 2))
    saved = Saved(tracking(model=model))
    monkeypatch.setattr(Versioned, "_version", 2)
    saved.load(tracking(model=again))
    assert torch.equal(again[0].weight, -model[0].weight)
    assert torch.equal(again[0].bias, model[0].bias)


class MadeInside(nn.Linear):
    """Makes a part of itself at its first call, which has nothing but what it makes anew each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "rotary"):
            self.rotary = nn.Module()
            self.rotary.register_buffer("cos", torch.cos(torch.arange(WIDTH)), persistent=False)
        return super().forward(x) * self.rotary.cos


def test_a_module_made_at_the_first_call_that_has_no_state_is_nothing_to_refuse() -> None:
    model = MadeInside(WIDTH, WIDTH)
    tracked = tracking(model=model)
    train(model, range(2))
    again = MadeInside(WIDTH, WIDTH)
    saved = Saved(tracked)
    saved.load(tracking(model=again))
    for one in (model, again):
        train(one, range(2, 4))
    assert everything(again) == everything(model)


def test_names_are_those_of_torch_whatever_is_wrapped() -> None:
    inner = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))), nn.BatchNorm1d(2))
    model = torch.compile(
        nn.Sequential(inner, torch.compile(nn.Linear(2, 2)), AveragedModel(nn.Linear(2, 2)))
    )
    tensors, others = tracking(model=model).collect()
    assert list(tensors["model"]) == list(get_model_state_dict(model))
    assert others == {"model": {}}


def test_a_run_goes_on_exactly_with_state_that_only_load_state_dict_restores(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(TensorExtra(), OwnFormat(), Hooked(), Buffers(), nn.LazyLinear(WIDTH))

    def run_to(where: Path, until: int) -> dict[str, Any]:
        torch.manual_seed(3)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        run = holdfast.Run(run_dir=where, checkpoint_interval=2)
        run.track(model=model, optimizer=optimizer)
        for step, _ in run.steps(range(100), until=until):
            (model(batch(step)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model)

    whole = run_to(tmp_path / "whole", 7)
    run_to(tmp_path / "parts", 4)
    assert run_to(tmp_path / "parts", 7) == whole


class OfItsRank(TensorExtra):
    """As many values as the rank has seen, which sees more the higher it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [0.5] * distributed.get_rank()
        return super().forward(x)


def test_ranks_have_extra_state_of_different_sizes(tmp_path: Path) -> None:
    def run_to(where: Path, until: int) -> list[Any]:
        def work(rank: int) -> list[float]:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), OfItsRank())
            run = holdfast.Run(run_dir=where, checkpoint_interval=2)
            run.track(model=model)
            for step, _ in run.steps(range(100), until=until):
                train(model, range(step, step + 1))
            return [*model[1].seen, *model[1].weight.flatten().tolist()]

        place = tmp_path / f"{where.name} to {until}"  # where the ranks meet, once
        place.mkdir()
        return together(place, 2, work)

    whole = run_to(tmp_path / "whole", 3)
    run_to(tmp_path / "parts", 2)
    assert run_to(tmp_path / "parts", 3) == whole
    assert len(whole[0]) < len(whole[1])


# --- refused, by name --------------------------------------------------------------------------------------


class Forgetting(TensorExtra):
    def set_extra_state(self, state: torch.Tensor) -> None:
        del state


class ForgettingNumbers(nn.Linear):
    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        del state


class Rounding(OwnFormat):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.values = [round(value, 2) for value in self.values]


class Resetting(nn.BatchNorm1d):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_load_state_dict_post_hook(lambda module, _: module.reset_running_stats())


@pytest.mark.parametrize(
    ("build", "name", "kind"),
    [
        (
            Forgetting,
            "model.1._extra_state",
            "Forgetting did not take it.* Make Forgetting's set_extra_state",
        ),
        (
            lambda: ForgettingNumbers(WIDTH, WIDTH),
            "model.1._extra_state",
            "ForgettingNumbers did not take it",
        ),
        (Rounding, "model.1.values.0", "Rounding did not take it"),
        (lambda: Resetting(WIDTH), "model.1.running_mean", "Resetting did not take it"),
    ],
)
def test_what_a_module_does_not_take_is_refused_by_name(build: Build, name: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), build())
    tracked = tracking(model=model)
    train(model, range(2))
    if isinstance(model[1], ForgettingNumbers):
        model[1].count = 41
    saved = Saved(tracked)
    with pytest.raises(IncompleteStateError, match=f"{name}: {kind}"):
        saved.load(tracking(model=nn.Sequential(nn.Linear(WIDTH, WIDTH), build())))


class Clock(nn.Linear):
    """Its state is another whenever it is asked for."""

    asked = 0

    def get_extra_state(self) -> dict[str, Any]:
        self.asked += 1
        return {"asked": self.asked}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class Converting(nn.Linear):
    """It keeps what it was given, in other types and another order."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.value: Any = [0, {"b": 1, "a": 2}]

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = (float(state[0]), dict(sorted(state[1].items())))


@pytest.mark.parametrize("kind", [Clock, Converting])
def test_state_that_is_no_certain_difference_is_not_refused(kind: type[nn.Linear]) -> None:
    saved = Saved(tracking(model=kind(2, 2)))
    saved.load(tracking(model=kind(2, 2)))


def test_a_load_that_the_module_refuses_says_which_and_why() -> None:
    class Picky(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None:
            raise ValueError("format 1 is no longer read")

    saved = Saved(tracking(model=Picky(2, 2)))
    with pytest.raises(
        IncompleteStateError, match=r"track\(model=…\): Picky.load_state_dict.*format 1 is no longer"
    ):
        saved.load(tracking(model=Picky(2, 2)))
    saved = Saved(tracking(model=TensorExtra()))
    with pytest.raises(IncompleteStateError, match=r"model._extra_state: in the checkpoint, but not tracked"):
        saved.load(tracking(model=nn.Linear(WIDTH, WIDTH)))
    saved = Saved(tracking(model=nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(IncompleteStateError, match=r"TensorExtra.load_state_dict.*Missing.*_extra_state"):
        saved.load(tracking(model=TensorExtra()))


def add(model: Any) -> None:
    model.more = nn.Parameter(torch.ones(2))


def replace(model: Any) -> None:
    model.inward.weight = nn.Parameter(torch.ones(WIDTH, 2 * WIDTH))
    model.outward.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def take_away(model: Any) -> None:
    model.outward = None


def untie(model: Any) -> None:
    model.outward.weight = nn.Parameter(model.outward.weight.detach().clone())


def narrow(model: Any) -> None:
    model.bfloat16()


def prune(model: Any) -> None:
    parametrize.register_parametrization(model.inward, "bias", Doubling())


def add_norm(model: Any) -> None:
    model.norm = nn.BatchNorm1d(WIDTH, affine=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (add, "model.more, a parameter of Tied, was added"),
        (
            replace,
            r"model.inward.weight, a parameter of Linear, became torch.float32 \(4, 8\); it was .* \(4, 4\)",
        ),
        (take_away, "model.outward.bias, a parameter, was removed"),
        (untie, "model.outward.weight, a parameter of Linear, is no longer the same as inward.weight"),
        (narrow, r"model.inward.weight, a parameter of Linear, became torch.bfloat16"),
        (
            prune,
            r"model.inward.parametrizations.bias.original, a parameter of ParametrizationList, was added",
        ),
        (add_norm, r"model.norm.running_mean, a buffer, is in a module that was added"),
    ],
)
def test_a_save_that_no_fresh_model_would_take_is_refused_by_name(
    change: Callable[[Any], None], told: str
) -> None:
    model = Tied()
    tracked = tracking(model=model)
    tracked.collect()
    change(model)
    with pytest.raises(SaveFailedError, match=f"{told}.*before the first step"):
        tracked.collect()


def test_what_the_script_changes_before_the_first_step_is_no_change() -> None:
    model = Tied()
    tracked = Tracked()
    tracked.add("model", model)
    add(model)
    tracked.collect()
    tracked.begin()
    saved = Saved(tracked)
    fresh_model = Tied()
    add(fresh_model)
    saved.load(tracking(model=fresh_model))
    assert everything(fresh_model) == everything(model)


def test_a_module_set_to_none_and_back_and_a_parameter_registered_again_are_exact() -> None:
    def change(model: Any, step: int) -> None:
        outward, model.outward = model.outward, None
        model.outward = outward
        model.inward.bias = nn.Parameter(model.inward.bias.detach() + 1)

    goes_on_exactly(Tied, change)


def test_an_optimizer_that_is_left_with_parameters_of_no_model_is_refused_by_name() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracked = tracking(model=model, optimizer=optimizer)
    tracked.collect()
    model.inward.bias = nn.Parameter(model.inward.bias.detach().clone())  # its optimizer is not told
    with pytest.raises(SaveFailedError, match=r"track\(optimizer=…\).*belongs to no tracked model"):
        tracked.collect()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    tracked.collect()


def test_parameters_that_have_no_shape_yet_are_named_at_a_save() -> None:
    tensors, _ = tracking(model=nn.Sequential(nn.LazyLinear(WIDTH))).collect()
    with pytest.raises(SaveFailedError, match=r"model.0.weight: .*uninitialized.*Call `forward`"):
        signature_of(SnapshotPlanner(tensors, 0, is_coordinator=True), 1)


# --- what one save has found out, and the next makes use of -------------------------------------------------


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Sequential(nn.LayerNorm(WIDTH)))


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "contents": lambda model: model[0].weight.data.add_(1),
    "memory": lambda model: setattr(model[0].weight, "data", torch.ones(WIDTH, WIDTH)),
    "frozen": lambda model: model[0].requires_grad_(False),
    "evaluating": lambda model: model[2].eval(),
    "parameter replaced": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
    "tied": lambda model: setattr(model[2][0], "bias", model[0].bias),
    "of another shape": lambda model: setattr(model[0], "bias", nn.Parameter(torch.ones(WIDTH + 1))),
    "of another dtype": lambda model: model[0].bfloat16(),
    "parameter added": lambda model: model[0].register_parameter("more", nn.Parameter(torch.ones(1))),
    "parameter gone": lambda model: setattr(model[0], "bias", None),
    "buffer added": lambda model: model[0].register_buffer("more", torch.ones(1)),
    "loose buffer": lambda model: model[0].register_buffer("more", torch.ones(1), persistent=False),
    "buffer made loose": lambda model: model[1]._non_persistent_buffers_set.add("running_mean"),
    "buffer replaced": lambda model: setattr(model[1], "running_mean", torch.ones(WIDTH)),
    "buffer larger": lambda model: setattr(model[1], "running_mean", torch.ones(WIDTH + 1)),
    "buffer gone": lambda model: setattr(model[1], "running_mean", None),
    "module replaced": lambda model: model.__setitem__(0, nn.Linear(WIDTH, WIDTH)),
    "module of another class": lambda model: model[2].__setitem__(0, nn.RMSNorm(WIDTH)),
    "module added": lambda model: model.append(nn.LayerNorm(WIDTH)),
    "module taken away": lambda model: model[2].__delitem__(0),
    "module twice": lambda model: model.__setitem__(2, model[1]),
    "own state_dict": lambda model: setattr(model, "state_dict", lambda *a, **k: {"one": torch.ones(1)}),
    "a hook": lambda model: model._register_state_dict_hook(lambda m, state, *a: state.__delitem__("0.bias")),
    "a hook within": lambda model: model[2].register_state_dict_post_hook(
        lambda m, state, prefix, *a: state.update({prefix + "0.bias": torch.zeros(WIDTH)})
    ),
    "a hook of loading": lambda model: model.register_load_state_dict_pre_hook(lambda *a: None),
    "extra state": lambda model: setattr(model[0], "get_extra_state", lambda: {"number": 1}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_last_save_found_out_is_never_used_for_a_model_that_has_changed(
    change: Callable[[Any], object],
) -> None:
    model = _model()
    built, known = module_state.look_at(model), Known()
    known.collect(model, "model", built)
    assert known.holds, "a plain model is one whose next save is told to be like the last"
    change(model)

    def outcome(collect: Callable[..., Any]) -> object:
        try:
            tensors, others = collect(model, "model", built)
        except SaveFailedError as error:
            return str(error)
        # By contents where a hook makes them: then it is other memory each time.
        where = [t.tolist() if t.data_ptr() not in registered else t.data_ptr() for t in tensors.values()]
        kinds = [(t.shape, t.dtype, t.requires_grad) for t in tensors.values()]
        return list(tensors), where, kinds, others

    registered = {t.data_ptr() for t in [*model.parameters(), *model.buffers()]}
    assert outcome(known.collect) == outcome(module_state.collect)
