"""A checkpoint is complete by construction: what has state is saved, and a broken or missing one is told."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast.base.torch_internals import local_part
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.format.manifest import Versions
from holdfast.checkpoint.state.adapters import ScheduleState, as_stateful
from holdfast.checkpoint.state.gradient_state import GRADIENTS, LOOKED_AT
from holdfast.checkpoint.state.proof import changes, first_difference
from holdfast.checkpoint.state.tracked import Tracked, from_blob, to_blob
from holdfast.errors import IncompleteStateError, SaveFailedError, UsageError
from holdfast.journal.events import SaveFailed
from holdfast.session import changes_since
from kit.ranks.together import together
from kit.runs import events_in, warnings_of
from kit.tiny import Holds, build, checkpoints


class Tracker:
    """Like the RNG trackers of tensor-parallel code: named generators, no state_dict."""

    def __init__(self) -> None:
        self.generators = {name: torch.Generator().manual_seed(i) for i, name in enumerate(("model", "data"))}

    def get_states(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        for name, state in states.items():
            self.generators[name].set_state(state)


def test_generator_objects_and_named_rng_trackers_resume_exactly(tmp_path: Path) -> None:
    """A10."""

    def draw(run_dir: Path, until: int) -> dict[int, tuple[float, ...]]:
        generator, tracker = torch.Generator().manual_seed(5), Tracker()
        run = holdfast.Run(run_dir=run_dir)
        run.track(model=nn.Linear(1, 1), noise=generator, rng=tracker)
        every = [generator, *tracker.generators.values()]
        return {
            step: tuple(torch.rand((), generator=g).item() for g in every)
            for step, _ in run.steps([1, 2], until=until)
        }

    whole = draw(tmp_path / "whole", 9)
    assert draw(tmp_path / "parts", 4) | draw(tmp_path / "parts", 9) == whole
    assert len({value for values in whole.values() for value in values}) == 27


def save_once(run_dir: Path, **parts: Any) -> None:
    run = holdfast.Run(run_dir=run_dir)
    run.track(model=nn.Linear(1, 1), **parts)
    for _ in run.steps([1], until=1):
        pass


def test_an_object_without_any_state_is_told_at_the_first_save(tmp_path: Path) -> None:
    save_once(tmp_path / "run", good=Holds({"a": [1, 2.5, None]}), empty=Holds({}))
    (told,) = warnings_of(tmp_path / "run")
    assert told.startswith("empty: it has no state at all")
    assert len(checkpoints(tmp_path / "run")) == 1


def test_state_that_cannot_be_stored_is_an_error_that_names_the_part(tmp_path: Path) -> None:
    with pytest.raises(IncompleteStateError, match=r"track\(hook=…\): its state cannot be saved"):
        save_once(tmp_path / "run", hook=Holds({"f": lambda: None}))
    assert not checkpoints(tmp_path / "run")


@pytest.mark.parametrize(
    "state",
    [
        {"nan": math.nan, "inf": math.inf, "t": (1, 2), "bytes": b"x", "none": None, "c": 1j},
        {"tensor": torch.tensor([math.nan, -0.0]), "bf16": torch.ones(2, dtype=torch.bfloat16)},
        {"array": numpy.arange(3), "nested": [{"deep": [torch.zeros(0)]}]},
        {1: "integer keys", "2": "too"},
    ],
)
def test_ordinary_state_survives(state: Any) -> None:
    assert list(changes(state, from_blob(to_blob(state)))) == []


@pytest.mark.parametrize(
    ("a", "b", "where"),
    [
        ({"x": 1}, {"x": 2}, "s.x"),
        ({"x": 1}, {"x": 1.0}, "s.x"),
        ({"x": 1, "y": 2}, {"x": 1}, "s"),
        ([1, [2]], [1, [3]], "s[1][0]"),
        ({"t": torch.zeros(2)}, {"t": -torch.zeros(2)}, "s.t"),
        ({"t": torch.zeros(2)}, {"t": torch.zeros(2, dtype=torch.float64)}, "s.t"),
        ((1, 2), [1, 2], "s"),
    ],
)
def test_the_first_difference_is_named(a: Any, b: Any, where: str) -> None:
    assert first_difference(a, b, "s") == where
    assert first_difference(a, a, "s") == ""


def counting() -> Any:
    calls = 0

    def rate(step: int) -> float:
        nonlocal calls
        calls += 1
        return 1 / (1 + calls)

    return rate


def remembering() -> Any:
    seen: list[int] = []

    def rate(step: int) -> float:
        seen.append(step)
        return 0.9 ** len(seen)

    return rate


class Trainer:
    """A method of it is the rate; `stopped` is none of the rate's business."""

    def __init__(self) -> None:
        self.calls, self.stopped = 0, False

    def rate(self, step: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


@pytest.mark.parametrize("kind", ["counting", "remembering", "method", "nested"])
def test_what_a_schedule_s_function_keeps_is_part_of_its_state(tmp_path: Path, kind: str) -> None:
    """torch leaves functions out: the rate began anew after every resume, and nobody was told."""
    schedules = torch.optim.lr_scheduler
    trainers: list[Trainer] = []

    def rates(run_dir: Path, until: int) -> dict[int, float]:
        model, trainer = nn.Linear(2, 2), Trainer()
        trainers.append(trainer)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        rate = {"remembering": remembering(), "method": trainer.rate}.get(kind) or counting()
        schedule: Any = schedules.LambdaLR(optimizer, rate)
        if kind == "nested":
            later = schedules.LambdaLR(optimizer, lambda step: 0.5**step)
            schedule = schedules.SequentialLR(optimizer, [schedule, later], [8])
        found: dict[int, float] = {}
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, checkpoint_read_back=False)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        for step, _ in run.steps([torch.zeros(1)] * 20, until=until):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
            trainer.stopped = step == until
            found[step] = optimizer.param_groups[0]["lr"]
        return found

    whole = rates(tmp_path / "whole", 10)
    assert rates(tmp_path / "parts", 4) | rates(tmp_path / "parts", 10) == whole
    assert len(set(whole.values())) > 5
    assert [one.calls for one in trainers] == ([11, 5, 11] if kind == "method" else [0, 0, 0])


@pytest.mark.parametrize("tracked", ["nothing", "the inner ones", "it", "an object that has it"])
def test_a_schedule_of_a_tracked_optimizer_that_is_not_tracked_is_told(tmp_path: Path, tracked: str) -> None:
    schedules = torch.optim.lr_scheduler
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inner = [schedules.LinearLR(optimizer), schedules.StepLR(optimizer, 2)]
    whole = schedules.SequentialLR(optimizer, inner, [3])
    holder = Holds({"last": 1})
    holder.schedules = [whole]  # type: ignore[attr-defined]
    parts: dict[str, dict[str, Any]] = {
        "nothing": {},
        "the inner ones": {"first": inner[0], "second": inner[1]},
        "it": {"schedule": whole},
        "an object that has it": {"holder": holder},
    }
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
    run.track(model=model, optimizer=optimizer, **parts[tracked])
    run.start()
    run.save()
    run.finish()
    told = [text for text in warnings_of(tmp_path / "run") if "is not tracked" in text]
    kinds = sorted(text.split()[1] for text in told)
    assert kinds == (["SequentialLR"] if tracked in ("nothing", "the inner ones") else [])
    assert all("track(optimizer=…)" in text for text in told)


def test_what_a_script_sets_for_a_schedule_s_function_stays_the_script_s() -> None:
    def schedule(warmup: int, limits: dict[str, float] | None = None) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
        rate = lambda step: min(1.0, (step + 1) / warmup) * (limits or {"top": 1.0})["top"]  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    before, after = as_stateful(schedule(4)), schedule(8)
    assert before is not None
    state = before.state_dict()
    assert ScheduleState.KEY not in state, "nothing has changed"
    later = as_stateful(after)
    assert later is not None
    later.load_state_dict(state)
    assert after.lr_lambdas[0](0) == 1 / 8
    kept: dict[str, float] = {"top": 1.0}
    stateful = as_stateful(schedule(4, kept))
    assert stateful is not None
    kept["top"] = 0.5
    state = stateful.state_dict()
    assert state[ScheduleState.KEY] == {"lr_lambdas[0]: limits": {"top": 0.5}}
    kept["top"] = 0.25
    stateful.load_state_dict(state)
    assert kept == {"top": 0.5}, "in place"
    plain = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1), 2)
    assert as_stateful(plain) is plain
    step = torch.optim.lr_scheduler.LambdaLR(plain.optimizer, counting())
    counted = as_stateful(step)
    assert counted is not None
    with pytest.raises(IncompleteStateError, match=r"lr_lambdas\[0\]: limits"):
        counted.load_state_dict(step.state_dict() | {ScheduleState.KEY: state[ScheduleState.KEY]})


def test_a_change_since_the_save_is_told_and_no_change_is_not(tmp_path: Path) -> None:
    save_once(tmp_path / "run")
    again = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=7)
    again.track(model=nn.Linear(1, 1))
    for _ in again.steps([1], until=2):
        pass
    assert warnings_of(tmp_path / "run") == ["since this checkpoint was saved: the settings are others"]
    same = Versions(holdfast="1", torch="2", python="3", code="c", config="d")
    assert changes_since(same, same) == []
    other = Versions(holdfast="1", torch="2.1", python="3", code="e", config="")
    assert changes_since(same, other) == ["torch 2 → 2.1", "the main script is another"]


def test_tensors_that_wrap_others_come_back_by_what_they_are_made_of(tmp_path: Path) -> None:
    """A3: tensor subclasses, here one with two tensors inside, as a parameter and in an optimizer's state."""

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        model.register_buffer("pair", TwoTensor(torch.randn(4), torch.randn(4)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def start(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> holdfast.Run:
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model, optimizer=optimizer)
        run.start()
        return run

    model, optimizer = build(1)
    run = start(model, optimizer)
    model.weight.sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    optimizer.state[model.weight]["momentum_buffer"] = TwoTensor(momentum, momentum * 2)
    run.begin_step()
    run.end_step()
    run.finish()
    other, its_optimizer = build(2)
    other.weight.sum().backward()
    its_optimizer.step()
    empty = torch.zeros_like(momentum)
    its_optimizer.state[other.weight]["momentum_buffer"] = TwoTensor(empty, empty.clone())
    start(other, its_optimizer).close()
    for inner in ("a", "b"):
        assert torch.equal(getattr(other.pair, inner), getattr(model.pair, inner))
        found = its_optimizer.state[other.weight]["momentum_buffer"]
        assert isinstance(found, TwoTensor)
        kept = optimizer.state[model.weight]["momentum_buffer"]
        assert torch.equal(getattr(found, inner), getattr(kept, inner))
    metadata = metadatas.read(next((tmp_path / "run" / "checkpoints").glob("step_*")))
    assert {"model.pair.a", "model.pair.b"} <= set(metadata.tensors)


# --- gradients at a step boundary ---------------------------------------------------------------------------

Step = Callable[[nn.Module, torch.optim.Optimizer, int, torch.Tensor], None]


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model.register_parameter("unowned", nn.Parameter(torch.ones(4)))
    return model


def error(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (model(x) + 0.01 * model.unowned - x).square().mean()
    return found


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    error(model, x).backward()
    if step % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()


def clearing_late(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    if step % 4 == 1:
        optimizer.zero_grad()
    error(model, x).backward()
    if step % 4 == 0:
        optimizer.step()


def clearing_first(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    error(model, x).backward()
    optimizer.step()


def zeroing_first(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    """Zeros are no gradient to nobody but a person: momentum moves what has them."""
    optimizer.zero_grad(set_to_none=False)
    (error(model, x) if step % 2 else model[0](x).square().mean()).backward()
    optimizer.step()


def zeroing_last(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    error(model, x).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def never_clearing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    error(model, x).backward()
    optimizer.step()


def stepping_late(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()
    error(model, x).backward()


def decaying(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    error(model, x).backward()
    optimizer.step()


def with_a_graph(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    """What is added to is another tensor afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error(model, x).backward(create_graph=True)
    if step % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()


def with_a_penalty(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
    """Calculates a gradient while the old one lies there, and does not add to it."""
    loss = error(model, x)
    slope = torch.autograd.grad(loss, [model[0].weight], create_graph=True)[0]
    optimizer.zero_grad()
    (loss + slope.square().sum()).backward()
    optimizer.step()


def left(
    run_dir: Path, work: Step, until: int, *, leave_at: int = 0, interval: int = 1
) -> list[bytes | None]:
    """Parameters, then gradients; left at a step, after the one before was saved."""
    torch.manual_seed(0)
    model = net()
    owned = [parameter for name, parameter in model.named_parameters() if name != "unowned"]
    optimizer = torch.optim.SGD(owned, lr=0.1, momentum=0.9)
    data = [torch.randn(2, 4, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=interval)
    run.track(model=model, optimizer=optimizer)
    steps = run.steps(data, until=until)
    for step, x in steps:
        work(model, optimizer, step, x)
        if step == leave_at:
            cast("Generator[Any, Any, Any]", steps).close()
            break
    every = list(model.parameters())
    return [
        None if tensor is None else tensor.detach().numpy().tobytes()
        for tensor in [*every, *(parameter.grad for parameter in every)]
    ]


def stored_gradients(run_dir: Path) -> dict[int, int]:
    """How many gradients each checkpoint holds."""
    found = [manifests.read(path)[0] for path in checkpoints(run_dir)]
    return {one.step: one.parts[GRADIENTS].entries for one in found if GRADIENTS in one.parts}


LOOPS = [
    accumulating,
    clearing_late,
    clearing_first,
    zeroing_first,
    zeroing_last,
    never_clearing,
    stepping_late,
    decaying,
    with_a_graph,
    with_a_penalty,
]


@pytest.mark.parametrize("work", LOOPS, ids=lambda work: work.__name__)
def test_gradients_at_a_boundary_go_on_as_the_loop_uses_them(tmp_path: Path, work: Step) -> None:
    whole = left(tmp_path / "whole", work, 6, interval=0)
    left(tmp_path / "parts", work, 6, leave_at=4, interval=3)
    assert left(tmp_path / "parts", work, 6, interval=3) == whole
    stored = stored_gradients(tmp_path / "parts")
    if work in (clearing_first, zeroing_first, zeroing_last, with_a_penalty):
        assert stored == {3: 1, 6: 1}, "only what no optimizer owns"
    if work is accumulating:
        assert stored[3] == 5
        assert any(
            "gradients are accumulated over more than one step" in t for t in warnings_of(tmp_path / "parts")
        )


def test_a_gradient_that_was_left_out_and_is_used_all_the_same_is_refused(tmp_path: Path) -> None:
    def changing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor) -> None:
        (never_clearing if step == 7 else clearing_first)(model, optimizer, step, x)

    left(tmp_path / "run", changing, 9, leave_at=8, interval=6)
    assert any("the checkpoint of step 6 lacks gradients" in text for text in warnings_of(tmp_path / "run"))
    with pytest.raises(IncompleteStateError, match=r"the gradient model\..* was left out of the checkpoint"):
        left(tmp_path / "run", changing, 9)
    assert [path.name[:13] for path in checkpoints(tmp_path / "run")] == ["step_00000006"]


@pytest.mark.parametrize("then", ["clears", "adds", "steps", "zeroes"])
def test_a_gradient_that_came_as_a_new_tensor_each_time_is_only_glanced_at_after_a_save(then: str) -> None:
    model, x = net(), torch.ones(1, 4)
    optimizer, tracked = torch.optim.SGD(model.parameters(), lr=0.01), Tracked()
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    state = tracked.gradients
    state.start()
    try:
        for step in range(1, LOOKED_AT + 3):
            state.begin_step()
            clearing_first(model, optimizer, step, x)
            state.end_step()

        def save(step: int) -> int:
            tracked.collect()
            return len(state.collect(step)[0])

        assert save(20) == 0
        hooks = [one for p in model.parameters() for one in (p._backward_hooks or ())]
        assert not hooks, "thousands of these would take longer than the save"
        state.begin_step()
        if then == "clears":
            clearing_first(model, optimizer, 21, x)
        elif then == "zeroes":
            zeroing_first(model, optimizer, 21, x)
        elif then == "adds":
            never_clearing(model, optimizer, 21, x)
        else:
            optimizer.step()
            clearing_first(model, optimizer, 21, x)
        state.end_step()
        told = {"clears": "", "steps": "it has used", "adds": "seems to have", "zeroes": "seems to have"}
        doubts = state.take_doubts()
        assert bool(doubts) == bool(told[then])
        assert all("the checkpoint of step 20 lacks gradients" in text for text in doubts)
        assert all(told[then] in text for text in doubts)
        count = len(list(model.parameters()))
        assert save(21) == (0 if then == "clears" else count)
    finally:
        state.close()


def test_a_scaler_in_the_middle_of_its_work_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    run = holdfast.Run(run_dir=tmp_path / "run")
    run.track(model=model, optimizer=optimizer, scaler=scaler)
    run.start()
    run.begin_step()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    run.end_step()
    with pytest.raises(SaveFailedError, match=r"scaler\.update\(\)"):
        run.save()
    assert not checkpoints(tmp_path / "run")
    run.close()


def test_several_batches_a_step_are_exact(tmp_path: Path) -> None:
    def train(run_dir: Path, until: int) -> list[bytes]:
        model, optimizer, _, loader = build()
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=2)
        run.track(model=model, optimizer=optimizer)
        for _, batches in run.steps(loader, until=until, batches=3):  # five batches are an epoch
            for _, x in batches:
                run.compute(lambda x: (model(x) - x).square().mean().div(3).backward(), x)
            optimizer.step()
            optimizer.zero_grad()
        return [value.numpy().tobytes() for value in model.state_dict().values()]

    model, optimizer, _, loader = build()
    drawn = itertools.chain.from_iterable(iter(lambda: iter(loader), None))
    for _ in range(6):
        for _, x in list(itertools.islice(drawn, 3)):
            (model(x) - x).square().mean().div(3).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = [value.numpy().tobytes() for value in model.state_dict().values()]
    assert train(tmp_path / "whole", 6) == plain
    assert [train(tmp_path / "parts", until) for until in (1, 4, 6)][-1] == plain
    assert not stored_gradients(tmp_path / "parts")
    with holdfast.Run(run_dir=tmp_path / "none") as run, pytest.raises(UsageError, match="one batch or more"):
        next(run.steps([1], until=1, batches=0))


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["ddp", "ddp-views", "fsdp", "fsdp-mixed"])
def test_gradients_that_ranks_accumulate_without_a_reduction_resume_exactly(
    tmp_path: Path, kind: str
) -> None:
    def train(run_dir: Path, rank: int, leave_at: int) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        wrapped: Any = model
        if kind.startswith("ddp"):
            wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view="views" in kind)
        else:
            low, high = (torch.bfloat16, torch.float32) if "mixed" in kind else (None, None)
            policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=high)
            fully_shard(model[0], mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=1)
        run.track(model=wrapped, optimizer=optimizer)
        data = [torch.randn(2, 6, generator=torch.Generator().manual_seed(8 * rank + i)) for i in range(8)]
        steps = run.steps(data, until=9)
        for step, x in steps:
            last = step % 4 == 0
            quiet: Any = contextlib.nullcontext()
            if kind.startswith("fsdp"):
                wrapped.set_requires_gradient_sync(last)
            elif not last:
                quiet = wrapped.no_sync()
            with quiet:
                (wrapped(x) - x).square().mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            if step == leave_at:
                cast("Generator[Any, Any, Any]", steps).close()
                break
        return [local_part(value).numpy().tobytes().hex() for value in wrapped.state_dict().values()]

    def work(rank: int) -> list[list[str]]:
        found = [train(tmp_path / "whole", rank, 0)]
        for leave_at in (3, 7, 0):
            dist.barrier()
            found.append(train(tmp_path / "parts", rank, leave_at))
        return found

    for found in together(tmp_path, 2, work):
        assert found[-1] == found[0]
    assert stored_gradients(tmp_path / "parts")[6]


def test_gradients_that_are_not_yet_reduced_between_replicas_are_refused_by_name(tmp_path: Path) -> None:
    """FSDP2 over replicas keeps them where no parameter shows them; a resume without them would differ."""

    def work(rank: int) -> str:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
        model: Any = nn.Linear(3, 3)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model, optimizer=optimizer)
        run.start()
        run.begin_step()
        model.set_requires_all_reduce(False)
        model(torch.ones(2, 3) + rank).sum().backward()
        run.end_step()
        with pytest.raises(SaveFailedError) as refused:
            run.save()
        told = str(refused.value)
        run.begin_step()
        model.set_requires_all_reduce(True)
        model(torch.ones(2, 3) + rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.end_step()
        assert run.save().step == 2
        run.finish()
        return told

    for told in together(tmp_path, 2, work):
        assert "the gradients of model are reduced within each replica" in told
        assert "set_requires_all_reduce(False)" in told


@pytest.mark.parametrize("clear", [None, True, False])
def test_a_gradient_that_is_zero_in_one_ranks_shard_is_judged_alike_by_all(
    tmp_path: Path, clear: bool | None
) -> None:
    """Rows of an embedding that no sample has: what a shard holds must not decide for its rank alone.

    `clear` is what `zero_grad` is told to set gradients to None; without it they are accumulated.
    """

    def train(run_dir: Path, leave_at: int) -> list[str]:
        torch.manual_seed(0)
        model = nn.Embedding(8, 3)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=1)
        run.track(model=model, optimizer=optimizer)
        steps = run.steps([torch.tensor([0, 1]), torch.tensor([1, 2])], until=7)
        for step, ids in steps:
            if clear is not None:
                optimizer.zero_grad(set_to_none=clear)
            model(ids).square().mean().backward()
            if clear is not None or step % 4 == 0:
                optimizer.step()
            if step == leave_at:
                cast("Generator[Any, Any, Any]", steps).close()
                break
        return [local_part(value).numpy().tobytes().hex() for value in model.state_dict().values()]

    def work(rank: int) -> list[list[str]]:
        found = [train(tmp_path / "whole", 0)]
        for leave_at in (3, 6, 0):
            dist.barrier()
            found.append(train(tmp_path / "parts", leave_at))
        return found

    for found in together(tmp_path, 2, work):
        assert found[-1] == found[0]
    for run_dir in (tmp_path / "whole", tmp_path / "parts"):
        bodies = events_in(run_dir)
        assert [body.error for body in bodies if isinstance(body, SaveFailed)] == []
