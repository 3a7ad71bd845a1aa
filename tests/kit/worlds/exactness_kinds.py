"""The kinds of training in docs/guides/exactness.md's tables: each a few lines, as a torch script has them.

Nothing here knows of Holdfast. The plain loop and the loop with a `Run` (exactness.py) build the same parts
and do the same with them; `tracked` is what a script would hand to `run.track`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

SAMPLES, WIDTH, BATCH = 20, 6, 4
"""Five steps an epoch."""


@dataclass(frozen=True)
class Place:
    """Where the parts are built."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"


@dataclass
class Parts:
    """What a script has before its loop, and the two halves of its step."""

    tracked: dict[str, Any]
    forward_backward: Callable[[Tensor], Tensor]
    update: Callable[[], None]
    before: Callable[[int], None] = lambda step: None
    """What the script does at the beginning of a step, by its number."""
    watched: dict[str, Any] = field(default_factory=dict)
    """What a script has and does not track, and what must come out the same all the same."""
    batches_a_step: int = 1


MIDDLE: list[Callable[[], None]] = []
"""Called in the middle of an accumulation: where the driver may kill."""


def middle() -> None:
    for call in MIDDLE:
        call()


@dataclass(frozen=True)
class Kind:
    name: str
    build: Callable[[Place], Parts]
    world: int = 1
    data: tuple[str, ...] = ()
    """The only data kinds that it goes with; none: any."""
    needs: str = ""
    """'gpu' if it cannot be tried without one, 'slow' if only the drill has time for it."""
    outcome: str = "exact"
    """'exact'; 'refused'; or 'not seen': different, by what a script has and does not track."""
    words: str = ""
    """What the refusal says, in part."""
    by: int = 3
    """The step by whose end it has ended, with a save every three: that of the first save; for what changes
    later, after as many failed saves as checkpoint.max_failed_saves allows, or at the end."""
    case: dict[str, Any] = field(default_factory=dict)
    """What of a case must be so, for this kind to show anything."""
    shapes: tuple[str, ...] = ("steps", "callback", "compute", "epochs")
    """The loops that it goes with: `compute` needs a step in two halves, `epochs` takes one batch a step."""


KINDS: dict[str, Kind] = {}


def kind(name: str, **facts: Any) -> Callable[[Callable[[Place], Parts]], Callable[[Place], Parts]]:
    def add(build: Callable[[Place], Parts]) -> Callable[[Place], Parts]:
        assert name not in KINDS
        KINDS[name] = Kind(name, build, **facts)
        return build

    return add


def mlp(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, WIDTH))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x + 0.01 * torch.randn_like(x)) - x).square().mean()


def parts(
    model: Any,
    *optimizers: Any,
    schedule: Any = None,
    also: dict[str, Any] | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[], None] = lambda: None,
    before: Callable[[int], None] = lambda step: None,
    watched: dict[str, Any] | None = None,
) -> Parts:
    """The ordinary step: loss, backward; all optimizers, the schedule, and what comes after them."""
    measure = loss if loss is not None else partial(loss_of, model)

    def forward_backward(x: Tensor) -> Tensor:
        value = measure(x)
        value.backward()
        return value.detach()

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
        if schedule is not None:
            schedule.step()
        after()
        for optimizer in optimizers:
            optimizer.zero_grad()

    tracked: dict[str, Any] = {"model": model}
    names = ["optimizer"] if len(optimizers) == 1 else [f"optimizer{n}" for n in range(len(optimizers))]
    tracked |= dict(zip(names, optimizers, strict=True))
    if schedule is not None:
        tracked["schedule"] = schedule
    return Parts(tracked | (also or {}), forward_backward, update, before, watched or {})


# --- optimizers ---------------------------------------------------------------------------------------------


def with_optimizer(
    make: Callable[[Any], optim.Optimizer], model: Callable[[], nn.Module] = mlp
) -> Callable[[Place], Parts]:
    def build(place: Place) -> Parts:
        net = model().to(place.device)
        return parts(net, make(net.parameters()))

    return build


for _name, _make in {
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "SGD fused": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "AdamW with a tensor as its rate": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "RMSprop centred": lambda p: optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2, t0=3),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
}.items():
    kind(_name)(with_optimizer(_make))

kind("Adam capturable", needs="gpu")(with_optimizer(lambda p: optim.Adam(p, lr=1e-2, capturable=True)))


@kind("Muon, with AdamW for the rest")
def muon(place: Place) -> Parts:
    model = mlp().to(place.device)
    flat = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return parts(model, optim.Muon(flat, lr=1e-2), optim.AdamW(rest, lr=1e-2))


@kind("LBFGS", shapes=("steps", "callback", "epochs"))
def lbfgs(place: Place) -> Parts:
    model = nn.Linear(WIDTH, WIDTH).to(place.device)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)

    def whole(x: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            value = (model(x) - x).square().mean()
            value.backward()
            return value

        return optimizer.step(closure).detach()

    return Parts({"model": model, "optimizer": optimizer}, whole, lambda: None)


class Words(nn.Module):
    """Which rows of the embedding have a gradient depends on the batch."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(12, WIDTH, sparse=sparse)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x.abs().mul(3).long().clamp(max=11)).mean(1))


@kind("SparseAdam, with Adam for the rest")
def sparse(place: Place) -> Parts:
    model = Words(sparse=True).to(place.device)
    return parts(
        model,
        optim.SparseAdam(model.words.parameters(), lr=1e-2),
        optim.Adam(model.out.parameters(), lr=1e-2),
    )


@kind("parameters that get their first gradient late")
def late(place: Place) -> Parts:
    model = nn.ModuleDict({"early": mlp(), "late": mlp()}).to(place.device)
    seen = {"step": 0}

    def before(step: int) -> None:
        seen["step"] = step

    def loss(x: Tensor) -> Tensor:
        value = loss_of(model["early"], x)
        return value + loss_of(model["late"], x) if seen["step"] > 4 else value

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), loss=loss, before=before)


@kind("parameter groups with settings of their own")
def groups(place: Place) -> Parts:
    model = mlp().to(place.device)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    free = [p for p in model.parameters() if p.ndim == 1]
    optimizer = optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1, "name": "decayed"},
            {"params": free, "lr": 1e-3, "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    return parts(model, optimizer, schedule=lrs.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1.0]))


class Lookahead(optim.Optimizer):
    """An optimizer around another one, with state of its own: as many repositories have it."""

    def __init__(self, inner: optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, kept in zip(self.inner.param_groups, self.slow, strict=True):
                for p, slow in zip(group["params"], kept, strict=True):
                    slow.lerp_(p.detach(), self.alpha)
                    p.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.slow, self.count = state["slow"], state["count"]


@kind("an optimizer around another, with its own state_dict")
def lookahead(place: Place) -> Parts:
    model = mlp().to(place.device)
    return parts(model, Lookahead(optim.SGD(model.parameters(), lr=0.05, momentum=0.9)))


class Counting(optim.SGD):
    """Keeps a number and a list in its state beside tensors."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["seen"] = state.get("seen", 0) + 1
            state.setdefault("norms", []).append(float(p.grad.norm()))
            p.grad.mul_(1.0 / (1.0 + sum(state["norms"][-3:])) * (0.5 + 0.5 / state["seen"]))
        return super().step(closure)


@kind("an optimizer with numbers and lists in its state")
def counting(place: Place) -> Parts:
    model = mlp().to(place.device)
    return parts(model, Counting(model.parameters(), lr=0.5, momentum=0.9))


@kind("two models and two optimizers (GAN)")
def gan(place: Place) -> Parts:
    maker, judge = (
        mlp().to(place.device),
        nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)).to(place.device),
    )
    makes, judges = optim.Adam(maker.parameters(), lr=1e-2), optim.Adam(judge.parameters(), lr=1e-2)

    def forward_backward(x: Tensor) -> Tensor:
        fake = maker(torch.randn_like(x))
        value = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(x)).mean()
        value.backward()
        fooled = F.softplus(-judge(fake)).mean()
        fooled.backward(inputs=list(maker.parameters()))
        return (value + fooled).detach()

    def update() -> None:
        for optimizer in (makes, judges):
            optimizer.step()
            optimizer.zero_grad()

    return Parts({"maker": maker, "judge": judge, "makes": makes, "judges": judges}, forward_backward, update)


@kind("one optimizer over two models")
def one_over_two(place: Place) -> Parts:
    first, second = mlp().to(place.device), mlp().to(place.device)
    optimizer = optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    made = parts(first, optimizer, loss=lambda x: loss_of(lambda y: second(first(y)), x))
    made.tracked["second"] = second
    return made


# --- models -------------------------------------------------------------------------------------------------


@kind("BatchNorm and dropout")
def batch_norm(place: Place) -> Parts:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, WIDTH)).to(
        place.device
    )
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return parts(model, optimizer, schedule=lrs.StepLR(optimizer, 2, 0.9))


@kind("SyncBatchNorm", needs="gpu")
def sync_batch_norm(place: Place) -> Parts:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, WIDTH))
    )
    model = model.to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 8, bias=False)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, WIDTH, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().t().contiguous())
        self.again = self.head  # the same module under two names

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.body(self.embed(x).unsqueeze(0)))[0]


@kind("a transformer; one module under two names")
def transformer(place: Place) -> Parts:
    model = Tied().to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


class TiedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@kind("tied weights")
def tied(place: Place) -> Parts:
    model = TiedWeight().to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("an LSTM")
def lstm(place: Place) -> Parts:
    model = nn.ModuleDict(
        {"cell": nn.LSTM(WIDTH, 8, num_layers=2, dropout=0.1), "out": nn.Linear(8, WIDTH)}
    ).to(place.device)
    optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
    return parts(model, optimizer, loss=partial(loss_of, lambda x: model["out"](model["cell"](x)[0])))


@kind("convolutions in channels_last")
def channels_last(place: Place) -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)
    )
    model = model.to(place.device, memory_format=torch.channels_last)

    def loss(x: Tensor) -> Tensor:
        image = x[:, None, :, None].expand(-1, 3, -1, WIDTH).contiguous(memory_format=torch.channels_last)
        return loss_of(model, image)

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), loss=loss)


@kind("weight_norm")
def weight_norm(place: Place) -> Parts:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, WIDTH)
    ).to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("weight_norm of the older kind")
def old_weight_norm(place: Place) -> Parts:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, WIDTH))
    model = model.to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("spectral_norm")
def spectral_norm(place: Place) -> Parts:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, WIDTH))
    model = model.to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("spectral_norm of the older kind")
def old_spectral_norm(place: Place) -> Parts:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, WIDTH))
    model = model.to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("orthogonal weights")
def orthogonal(place: Place) -> Parts:
    model = nn.Sequential(
        parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )
    model = model.to(place.device)
    return parts(model, optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@kind("a parametrization of one's own")
def parametrized(place: Place) -> Parts:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    model = model.to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("a lazy module, materialised before track")
def lazy_made(place: Place) -> Parts:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(WIDTH)).to(place.device)
    model(torch.zeros(BATCH, WIDTH, device=place.device))
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("a lazy module, materialised by its first step")
def lazy(place: Place) -> Parts:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(WIDTH)).to(place.device)
    return parts(model, optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


@kind("quantisation-aware training")
def quantised(place: Place) -> Parts:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao import quantization as aoq

        model = nn.Sequential(
            aoq.QuantStub(), nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH), aoq.DeQuantStub()
        )
        model.qconfig = aoq.get_default_qat_qconfig("fbgemm")
        model = aoq.prepare_qat(model.train()).to(place.device)
    return parts(model, optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


class Adapted(nn.Module):
    """LoRA: a frozen layer, and a small one that learns."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


@kind("LoRA: a model that is mostly frozen")
def lora(place: Place) -> Parts:
    model = nn.Sequential(Adapted(nn.Linear(WIDTH, 8)), nn.Tanh(), Adapted(nn.Linear(8, WIDTH))).to(
        place.device
    )
    return parts(model, optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))


@kind("LoRA: an optimizer that was given the frozen weights too")
def lora_all(place: Place) -> Parts:
    model = nn.Sequential(Adapted(nn.Linear(WIDTH, 8)), nn.Tanh(), Adapted(nn.Linear(8, WIDTH))).to(
        place.device
    )
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("bf16 with stochastic layers and checkpointed activations")
def bf16(place: Place) -> Parts:
    from torch.utils.checkpoint import checkpoint

    model = mlp().to(place.device, torch.bfloat16)

    def loss(x: Tensor) -> Tensor:
        return loss_of(lambda y: checkpoint(model, y, use_reentrant=False), x.bfloat16())

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), loss=loss)


@kind("complex and double parameters")
def complex_double(place: Place) -> Parts:
    model = nn.ModuleDict(
        {"wave": nn.Linear(WIDTH, 4, dtype=torch.complex64), "real": nn.Linear(4, WIDTH, dtype=torch.float64)}
    ).to(place.device)
    return parts(
        model,
        optim.Adam(model.parameters(), lr=1e-2),
        loss=partial(loss_of, lambda x: model["real"](model["wave"](x.to(torch.complex64)).abs().double())),
    )


class WithExtraState(nn.Module):
    """What is not a tensor is saved through torch's own door for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * (1 + 1 / self.calls)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@kind("a module with extra state")
def extra_state(place: Place) -> Parts:
    model = WithExtraState().to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


class Remembering(nn.Module):
    """A buffer that training changes and that no state_dict holds."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.net(x - self.mean)


@kind("a buffer that changes and is not persistent")
def non_persistent(place: Place) -> Parts:
    model = Remembering(persistent=False).to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("a buffer that is replaced at every step")
def replaced_buffer(place: Place) -> Parts:
    model = Remembering(persistent=True).to(place.device)

    def replace() -> None:
        model.mean = model.mean * 0.5

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), after=replace)


class Counted(nn.Module):
    """A number that training changes, as a plain attribute of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * (1 + 1 / self.calls)


@kind(
    "a parameter of the loss, in the optimizer and in nothing that is tracked",
    outcome="refused",
    words="is trained, and nothing that is tracked brings its value back",
)
def stray(place: Place) -> Parts:
    model = mlp().to(place.device)
    scale = nn.Parameter(torch.ones((), device=place.device))
    optimizer = optim.AdamW([*model.parameters(), scale], lr=1e-2)
    return parts(model, optimizer, loss=lambda x: loss_of(model, x) * scale.exp() - scale)


@kind(
    "a model whose state_dict leaves out what is trained",
    outcome="refused",
    words="which its state_dict leaves out, is trained",
)
def filtered(place: Place) -> Parts:
    model = Filtered().to(place.device)
    return parts(model, optim.SGD(model.parameters(), lr=1e-2))


class Filtered(nn.Sequential):
    """Gives away its last layer alone."""

    def __init__(self) -> None:
        super().__init__(*mlp())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if name.startswith("3.")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


@kind("a number that changes, as a plain attribute of a module", outcome="not seen")
def counted(place: Place) -> Parts:
    model = Counted().to(place.device)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind(
    "a second optimizer, not tracked",
    outcome="refused",
    words="an AdamW of track(model=…) steps: add run.track(optimizer_2=",
)
def untracked_optimizer(place: Place) -> Parts:
    model = mlp().to(place.device)
    other = optim.AdamW(model[3].parameters(), lr=1e-2)
    optimizer = optim.AdamW(model[0].parameters(), lr=1e-2)
    return parts(model, optimizer, after=lambda: (other.step(), other.zero_grad())[0])


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


# --- gradients ----------------------------------------------------------------------------------------------


def accumulate(model: nn.Module, optimizer: optim.Optimizer) -> Parts:
    made = parts(model, optimizer)

    def forward_backward(x: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        for piece in x.chunk(2):
            value = loss_of(model, piece) / 2
            value.backward()
            total += value.detach()
            middle()
        return total

    made.forward_backward = forward_backward
    return made


@kind("accumulation inside a step")
def accumulating(place: Place) -> Parts:
    model = mlp().to(place.device)
    return accumulate(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("accumulation inside a step, a batch for each piece", shapes=("steps", "callback", "compute"))
def accumulating_batches(place: Place) -> Parts:
    model = mlp().to(place.device)
    made = parts(model, optim.AdamW(model.parameters(), lr=1e-2))
    made.batches_a_step = 2
    return made


def carrying(place: Place, *, every: int = 3) -> Parts:
    """A step for every batch, the optimizer's at every third: gradients are carried over boundaries."""
    model = mlp().to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    count = {"step": 0}

    def before(step: int) -> None:
        count["step"] = step

    def update() -> None:
        if count["step"] % every == 0:
            optimizer.step()
            optimizer.zero_grad()

    made = parts(model, optimizer, before=before)
    made.update = update
    return made


kind("accumulation over several steps", case={"interval": 2, "kills": ("before", 10)})(carrying)


@kind("gradients that the next step would throw away")
def zero_first(place: Place) -> Parts:
    """`zero_grad` at the beginning of a step: at a boundary the gradients of the step before lie about."""
    model = mlp().to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    def forward_backward(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss_of(model, x)
        value.backward()
        return value.detach()

    return Parts({"model": model, "optimizer": optimizer}, forward_backward, optimizer.step)


@kind("gradients that are zeroed, not dropped")
def zeroed(place: Place) -> Parts:
    made = with_optimizer(lambda p: optim.SGD(p, lr=0.05, momentum=0.9))(place)
    optimizer = made.tracked["optimizer"]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    made.update = update
    return made


# --- random numbers -----------------------------------------------------------------------------------------


@kind("python's and numpy's random numbers in the step")
def other_rng(place: Place) -> Parts:
    model = mlp().to(place.device)
    return parts(
        model,
        optim.AdamW(model.parameters(), lr=1e-2),
        loss=lambda x: loss_of(model, x) * (1 + random.random() + float(np.random.rand())),
    )


@kind("a generator of one's own, tracked")
def own_generator(place: Place) -> Parts:
    model = mlp().to(place.device)
    generator = torch.Generator(place.device).manual_seed(3)

    def loss(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        return (model(x + 0.1 * noise) - x).square().mean()

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), also={"noise": generator}, loss=loss)


@kind("a generator of one's own, not tracked", outcome="not seen")
def forgotten_generator(place: Place) -> Parts:
    made = own_generator(place)
    del made.tracked["noise"]
    return made


class Curriculum:
    """An object of the script's own, with a state."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def level(self, value: float) -> float:
        self.seen = [*self.seen[-3:], value]
        return 1 + sum(self.seen) / len(self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


@kind("an object of the script's own with a state_dict")
def curriculum(place: Place) -> Parts:
    model, plan = mlp().to(place.device), Curriculum()

    def loss(x: Tensor) -> Tensor:
        value = loss_of(model, x)
        return value * plan.level(float(value))

    return parts(model, optim.AdamW(model.parameters(), lr=1e-2), also={"curriculum": plan}, loss=loss)


# --- compiled -----------------------------------------------------------------------------------------------


def compiled(
    place: Place, backend: str, *, track_original: bool = False, in_place: bool = False, **options: Any
) -> Parts:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).to(place.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    fast: Any = model
    if in_place:
        model.compile(backend=backend, **options)
    else:
        fast = torch.compile(model, backend=backend, **options)
    made = parts(fast, optimizer, loss=partial(loss_of, fast))
    if track_original:
        made.tracked["model"] = model
    return made


kind("torch.compile, the compiled model tracked")(partial(compiled, backend="aot_eager"))
kind("torch.compile, the original tracked")(partial(compiled, backend="aot_eager", track_original=True))
kind("model.compile()")(partial(compiled, backend="aot_eager", in_place=True))
kind("torch.compile by inductor", needs="slow")(partial(compiled, backend="inductor"))
kind("torch.compile with CUDA graphs", needs="gpu")(
    partial(compiled, backend="inductor", mode="reduce-overhead")
)


@kind("a CUDA graph of the whole step", needs="gpu", shapes=("steps", "callback", "epochs"))
def cuda_graph(place: Place) -> Parts:
    """As torch's notes have it: warm up on a side stream, capture once, then copy in and replay."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).to(place.device)
    optimizer = optim.Adam(model.parameters(), lr=1e-2, capturable=True)
    static, kept = torch.zeros(BATCH, WIDTH, device=place.device), {}

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = (model(static) - static).square().mean()
        value.backward()
        optimizer.step()
        return value

    def capture() -> None:
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept["loss"] = step()
        kept["graph"] = graph
        with torch.no_grad():  # warming up trained: take that back, in place, as the graph has the addresses
            for name, value in model.state_dict().items():
                value.copy_(saved[0][name])
            for index, p in enumerate(model.parameters()):
                for name, value in optimizer.state[p].items():
                    before = saved[1]["state"].get(index, {}).get(name)
                    value.copy_(before) if before is not None else value.zero_()

    def whole(x: Tensor) -> Tensor:
        static.copy_(x)
        if not kept:
            capture()
        kept["graph"].replay()
        return kept["loss"].detach().clone()

    return Parts({"model": model, "optimizer": optimizer}, whole, lambda: None)


# --- several ranks ------------------------------------------------------------------------------------------


@kind("DDP", world=2, data=("distributed",))
def ddp(place: Place) -> Parts:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, WIDTH))
    )
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return parts(model, optimizer, schedule=lrs.StepLR(optimizer, 2, 0.9))


@kind(
    "DDP with ZeroRedundancyOptimizer",
    world=2,
    data=("distributed",),
    outcome="refused",
    words="the state of a ZeroRedundancyOptimizer lies in shares on all ranks",
    by=0,
)
def zero(place: Place) -> Parts:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(mlp())
    return parts(model, ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-2))


def shard(model: nn.Module, place: Place) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh(place.device, (place.world,)))


@kind("FSDP2", world=2, data=("distributed", "global"))
def fsdp(place: Place) -> Parts:
    model = shard(mlp(), place)
    return parts(model, optim.AdamW(model.parameters(), lr=1e-2))


@kind("FSDP2, partly frozen", world=2, data=("distributed",))
def fsdp_lora(place: Place) -> Parts:
    model = nn.Sequential(Adapted(nn.Linear(WIDTH, 8)), nn.Tanh(), Adapted(nn.Linear(8, WIDTH)))
    model = shard(model, place)
    return parts(model, optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))


@kind("FSDP2 at another number of ranks", world=2, data=("global",))
def exact_sums(place: Place) -> Parts:
    """Every number is a small multiple of a power of two, so no sum depends on its order or on the ranks."""
    model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-4, 5, model.weight.shape) / 8)
    shard(model, place)
    optimizer = optim.SGD(model.parameters(), lr=0.125, momentum=0.5)

    def loss(x: Tensor) -> Tensor:
        whole = (x * 4).round().double() / 4
        return (model(whole) - whole).abs().sum() / (8 * len(x))

    return parts(model, optimizer, loss=loss)


# --- data ---------------------------------------------------------------------------------------------------


class Numbers(Dataset[tuple[int, Tensor]]):
    """Each sample is the same whenever it is read."""

    def __init__(self, noisy: bool = False) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        if self.noisy:
            x = x + torch.randn(WIDTH) * 0.1 + random.random() + float(np.random.rand())
        return index, x


class Stream(IterableDataset[tuple[int, Tensor]]):
    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        numbers = Numbers()
        for index in range(SAMPLES):
            yield numbers[index]


class EpochSampler(torch.utils.data.Sampler[int]):
    """Its order is that of the epoch it is told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = torch.Generator().manual_seed(100 + self.epoch)
        return iter(torch.randperm(SAMPLES, generator=order).tolist())


class GlobalOrder:
    """What `holdfast.GlobalBatches(Numbers(), 8, seed=2)` gives, written down once more without it."""

    def __init__(self, place: Place) -> None:
        self.place, self.epoch = place, 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(2 * 1_000_003 + self.epoch))
        self.epoch += 1
        numbers = Numbers()
        for first in range(0, SAMPLES - 7, 8):
            ids = order[first : first + 8][self.place.rank :: self.place.world].tolist()
            yield torch.tensor(ids), torch.stack([numbers[index][1] for index in ids])


def _distributed(place: Place) -> DataLoader[Any]:
    from torch.utils.data.distributed import DistributedSampler

    sampler = DistributedSampler(Numbers(), place.world, place.rank, seed=4)
    return DataLoader(Numbers(), batch_size=BATCH, sampler=sampler)


def _stateful(place: Place) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True)


def _global(place: Place) -> Any:
    return GlobalOrder(place)


DATA: dict[str, Callable[[Place], Any]] = {
    "shuffled": lambda place: DataLoader(Numbers(), batch_size=BATCH, shuffle=True),
    "in order": lambda place: DataLoader(Numbers(), batch_size=BATCH),
    "with a generator": lambda place: DataLoader(
        Numbers(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "augmented": lambda place: DataLoader(Numbers(noisy=True), batch_size=BATCH, shuffle=True),
    "batch sampler": lambda place: DataLoader(
        Numbers(),
        batch_sampler=BatchSampler(
            RandomSampler(Numbers(), generator=torch.Generator().manual_seed(6)), BATCH, False
        ),
    ),
    "set_epoch": lambda place: DataLoader(Numbers(), batch_size=BATCH, sampler=EpochSampler()),
    "weighted": lambda place: DataLoader(
        Numbers(),
        batch_size=BATCH,
        sampler=torch.utils.data.WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES),
    ),
    "stream": lambda place: DataLoader(Stream(), batch_size=BATCH),
    "workers": lambda place: DataLoader(Numbers(noisy=True), batch_size=BATCH, shuffle=True, num_workers=2),
    "persistent workers": lambda place: DataLoader(
        Numbers(), batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stateful": _stateful,
    "distributed": _distributed,
    "global": _global,
}
"""A loader each; 'distributed' and 'global' share the samples out among the ranks."""
ALONE = tuple(name for name in DATA if name != "distributed")
"""Those that go with one rank."""
SLOW_DATA = ("workers", "persistent workers", "stateful")
