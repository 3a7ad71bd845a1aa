"""Kinds of training that differ in the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as lrs

from kit.worlds.kinds.kind import WIDTH, Parts, Place, kind, loss_of, mlp, parts


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
