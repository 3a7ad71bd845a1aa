"""Kinds of training that differ in the model, and in what of it a script tracks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler as lrs

from kit.worlds.kinds.kind import BATCH, WIDTH, Parts, Place, kind, loss_of, mlp, parts


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
