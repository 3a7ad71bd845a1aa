"""The checks on losses and gradients: what is rejected, and what never is."""

from __future__ import annotations

import logging
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.checkpoint.state.tracked import Tracked
from holdfast.config.sections import ValidationSettings
from holdfast.errors import UsageError
from holdfast.policy.results import (
    ENOUGH,
    MEMORY,
    WINDOW,
    AcceptedLosses,
    Act,
    CheckRules,
    Count,
    Policy,
    judge,
    not_finite,
    outlier_bar,
)
from holdfast.train.check.checks import Checks, read_together
from holdfast.train.check.gradients import LOOKED_UP_EVERY, Gradients
from kit.ranks.together import together
from kit.worlds.curves import curves

NAN, INF = math.nan, math.inf
BOTH = CheckRules(spike=10.0, outlier=12.0)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def seen(*losses: float) -> AcceptedLosses:
    found = AcceptedLosses()
    found.add_all(losses)
    return found


def alarms(losses: list[float], rules: CheckRules) -> list[tuple[int, list[str]]]:
    """Every alarm along a curve, in which honest values are accepted whatever the checks say."""
    before = AcceptedLosses()
    found = []
    for step, loss in enumerate(losses):
        if reasons := judge(loss, rules, before):
            found.append((step, reasons))
        before.add(loss)
    return found


# --- losses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "kind"), [(NAN, "NaN"), (INF, "+Inf"), (-INF, "-Inf")])
def test_a_loss_that_is_no_number_is_rejected_from_the_first_one_on(loss: float, kind: str) -> None:
    """D2."""
    assert judge(loss, CheckRules(), AcceptedLosses()) == [f"the loss is {kind}"]
    assert judge(loss, CheckRules(nan=False, spike=2.0, outlier=2.0), seen(*[1.0] * 99)) == []


def test_a_spike_is_told_above_the_factor_times_the_largest_and_not_before() -> None:
    """D2."""
    before = seen(*[1.0, 3.0] * ENOUGH)
    assert judge(30.0, CheckRules(spike=10.0), before) == []
    assert "spike: more than 10 times the largest seen, 3" in judge(30.01, CheckRules(spike=10.0), before)[0]
    assert judge(30.01, CheckRules(), before) == []


def test_the_largest_loss_is_that_of_the_whole_run_not_of_a_window() -> None:
    assert judge(30.0, CheckRules(spike=10.0), seen(9.0, *[1.0] * 10 * MEMORY)) == []


def test_a_loss_around_zero_has_no_spikes() -> None:
    assert judge(1e6, CheckRules(spike=10.0), seen(*[-0.1, 0.1] * ENOUGH)) == []


def test_too_few_losses_are_compared_with_nothing() -> None:
    assert judge(1e6, BOTH, seen(*[1.0] * (ENOUGH - 1))) == []
    assert len(judge(1e6, BOTH, seen(*[1.0] * ENOUGH))) == 2


def test_an_outlier_is_told_in_a_quiet_window_long_before_it_is_a_spike() -> None:
    """A robust test under its own name."""
    quiet = seen(*[2.5 + 0.05 * math.sin(step) for step in range(WINDOW)])
    assert judge(2.7, BOTH, quiet) == []
    (reason,) = judge(6.0, BOTH, quiet)
    assert "outlier" in reason
    assert judge(-6.0, BOTH, quiet) == [] == judge(0.0, BOTH, quiet)


def test_one_wild_value_in_the_window_does_not_hide_the_next_wilder_one() -> None:
    """Robust: the spread is not moved by a single value, only the reach."""
    window = [2.5 + 0.05 * math.sin(step) for step in range(WINDOW)]
    window[10] = 8.0
    assert judge(8.5, BOTH, seen(*window)) == []
    assert judge(24.0, BOTH, seen(*window)) != []


def test_more_than_2000_noisy_and_healthy_curves_raise_no_alarm() -> None:
    """Must hold: noisy but healthy loss curves (seeded, many) raise none, at the default factors."""
    number = 0
    for kind, seed, losses in curves(120):
        number += 1
        assert alarms(losses, BOTH) == [], f"{kind}, seed {seed}"
    assert number >= 2000


@given(st.lists(st.floats(-1e300, 1e300), min_size=ENOUGH, max_size=300), st.floats(1.001, 1e6))
def test_no_loss_up_to_the_largest_recent_one_is_ever_an_outlier(losses: list[float], factor: float) -> None:
    bar = outlier_bar(losses[-MEMORY:], factor)
    assert bar >= max(losses[-MEMORY:]) or math.isclose(bar, max(losses[-MEMORY:]), rel_tol=1e-9)
    assert judge(max(losses[-MEMORY:]), CheckRules(outlier=factor), seen(*losses)) == []


@given(st.lists(FLOATS, max_size=300), FLOATS)
def test_what_is_judged_leaves_what_was_seen_as_it_is(losses: list[float], loss: float) -> None:
    before = seen(*losses)
    state = before.state_dict()
    judge(loss, BOTH, before)
    assert before.state_dict() == state
    assert all(math.isfinite(value) for value in before.recent)


@given(st.lists(FLOATS, max_size=300), FLOATS)
def test_a_restored_history_judges_as_the_one_that_was_saved(losses: list[float], loss: float) -> None:
    """From the first step after a resume on."""
    before, after = seen(*losses), AcceptedLosses()
    after.load_state_dict(before.state_dict())
    assert judge(loss, BOTH, after) == judge(loss, BOTH, before)


# --- what a non-finite step leads to ------------------------------------------------------------------------


@given(st.sampled_from(["warn", "skip", "raise", "rollback"]), st.integers(1, 5), st.lists(st.booleans()))
def test_a_bad_step_is_never_used_and_too_many_in_a_row_always_end(
    policy: Policy, most: int, steps: list[bool]
) -> None:
    """D5: a non-finite step never reaches the optimizer; then stop, or roll back if set."""
    count, row = Count(policy, most), 0
    for bad in steps:
        outcome = count.after(bad)
        row = row + 1 if bad else 0
        assert outcome.in_a_row == count.in_a_row == row
        if not bad:
            assert outcome.act is Act.USE
        elif policy == "raise" or (row >= most and policy != "rollback"):
            assert outcome.act is Act.STOP
        elif row >= most:
            assert outcome.act is Act.ROLL_BACK
        else:
            assert outcome.act is Act.DROP
            assert outcome.warn == (policy == "warn")
    assert count.total == sum(steps)
    again = Count(policy, most)
    again.load_state_dict(count.state_dict())
    assert again.after(True) == count.after(True)


# --- gradients ----------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Gradients of every kind that a rank may meet."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(100, 200))
        self.small = nn.Parameter(torch.zeros(7))
        self.narrow = nn.Parameter(torch.zeros(33, dtype=torch.float16))
        self.brain = nn.Parameter(torch.zeros(33, 3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.zeros(9000, dtype=torch.float64))
        self.wave = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.zeros(3))
        self.turned = nn.Parameter(torch.zeros(200, 100))
        self.words = nn.Embedding(50, 4, sparse=True)


def odd_tracked() -> tuple[Odd, Tracked]:
    torch.manual_seed(3)
    model = Odd()
    for name, parameter in model.named_parameters():
        if name == "words.weight":
            indices = torch.tensor([[3, 7, 3]])
            parameter.grad = torch.sparse_coo_tensor(
                indices, torch.randn(3, 4), (50, 4), check_invariants=True
            )
        elif name == "turned":
            parameter.grad = torch.randn(100, 200).t()
        elif name != "unused":
            parameter.grad = torch.randn_like(parameter)
    tracked = Tracked()
    tracked.add("model", model)
    return model, tracked


def numbers_of(model: Odd) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.numel()}
    return {name: grad._values() if grad.is_sparse else grad for name, grad in found.items()}


def test_every_single_bad_element_of_every_kind_of_gradient_is_seen() -> None:
    """D2: gradients too. First, last and middle element; NaN and both infinities; and nothing else."""
    model, tracked = odd_tracked()
    checks = Checks(ValidationSettings(), tracked)
    assert checks.look(1.0).reasons == []
    for name, values in numbers_of(model).items():
        flat = torch.view_as_real(values).view(-1) if values.is_complex() else values.reshape(-1)
        whole = values.t() if name == "turned" else values
        flat = whole.view(-1) if not values.is_complex() else flat
        for at in {0, flat.numel() // 2, flat.numel() - 1}:
            for value, kind in ((NAN, "a NaN"), (INF, "an infinity"), (-INF, "an infinity")):
                kept = flat[at].item()
                flat[at] = value
                look = checks.look(1.0)
                assert look.reasons == [f"the gradients hold {kind}: model.{name}"]
                assert not look.finite
                flat[at] = kept
    look = checks.look(1.0)
    assert look.reasons == []
    assert look.finite


def test_of_many_small_gradients_each_is_looked_at() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(33)])
    for number, parameter in enumerate(model):
        parameter.grad = torch.full((3,), float(number))
    gradients = Gradients([("model", model)])

    def sounding() -> float:
        (found,) = gradients.soundings()
        return float(found)

    assert gradients.norms() == [pytest.approx(math.sqrt(sum(3 * number**2 for number in range(33))))]
    for number, parameter in enumerate(model):
        assert parameter.grad is not None
        parameter.grad[1] = NAN
        assert math.isnan(sounding()), number
        parameter.grad[1] = number
    assert math.isfinite(sounding())


def test_the_norm_is_that_of_all_gradients() -> None:
    model, tracked = odd_tracked()
    expected = math.sqrt(
        sum(values.abs().double().square().sum().item() for values in numbers_of(model).values())
    )
    _, found = read_together(None, Gradients(tracked.models()).norms())
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mixed", [False, True])
def test_huge_gradients_that_overflow_together_are_not_called_infinite(mixed: bool) -> None:
    """Sums and squares of them do, whichever is taken."""
    model, tracked = odd_tracked()
    if not mixed:
        model = nn.ParameterDict({"large": nn.Parameter(torch.zeros(100_000))})
        tracked = Tracked()
        tracked.add("model", model)
    model.large.grad = torch.full_like(model.large, 1e38)
    (sounding,) = Gradients(tracked.models()).soundings()
    assert not math.isfinite(sounding)
    look = Checks(ValidationSettings(), tracked).look(1.0)
    assert (look.reasons, look.finite) == ([], True)


def test_infinities_that_cancel_out_are_found() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.tensor([[INF, 1.0], [1.0, -INF]])
    tracked = Tracked()
    tracked.add("model", model)
    assert Checks(ValidationSettings(), tracked).look(1.0).reasons == [
        "the gradients hold an infinity: model.weight"
    ]


def test_gradients_that_have_a_graph_of_their_own_are_looked_at() -> None:
    """For derivatives of derivatives."""
    model = nn.Linear(2, 2, bias=False)
    loss = model(torch.ones(2)).square().sum()
    (model.weight.grad,) = torch.autograd.grad(loss, [model.weight], create_graph=True)
    assert model.weight.grad is not None
    assert model.weight.grad.requires_grad
    tracked = Tracked()
    tracked.add("model", model)
    checks = Checks(ValidationSettings(), tracked)
    assert checks.look(model.weight.grad.sum()).reasons == []
    model.weight.grad = model.weight.grad * NAN
    assert checks.look(1.0).reasons == ["the gradients hold a NaN: model.weight"]


def test_the_reason_names_some_parameters_and_counts_the_others() -> None:
    model, tracked = odd_tracked()
    for values in numbers_of(model).values():
        values.fill_(NAN)
    (reason,) = Checks(ValidationSettings(), tracked).look(1.0).reasons
    assert reason == "the gradients hold a NaN: model.large, model.small, model.narrow and 6 more"


def test_a_shared_parameter_counts_once() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    first.weight.grad = torch.full((3, 3), 2.0)
    gradients = Gradients([("m", nn.Sequential(first, second))])
    assert (gradients.norms(), gradients.soundings()) == ([6.0], [18.0])


def test_a_parameter_that_was_exchanged_is_looked_at() -> None:
    """FSDP exchanges parameters of a module between the calls."""
    model = nn.Linear(2, 2, bias=False)
    gradients = Gradients([("m", model)])
    assert (gradients.norms(), gradients.soundings()) == ([], [])
    model.weight = nn.Parameter(torch.zeros(2, 2))
    model.weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert (gradients.norms(), gradients.soundings()) == ([5.0], [7.0])


def test_parameters_that_only_an_optimizer_or_only_a_module_holds_are_looked_at() -> None:
    """They are read from the optimizers; what those do not hold is read from the modules all the same."""
    model = nn.Sequential(*(nn.LayerNorm(8) for _ in range(6)))
    optimizer = torch.optim.SGD([model[at].weight for at in range(4)])
    gradients = Gradients([("m", model)], [optimizer])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert gradients.soundings() == [12 * 8]
    later = nn.LayerNorm(8)
    model.append(later)
    optimizer.add_param_group({"params": [later.weight]})
    later.weight.grad = torch.full((8,), NAN)
    assert not math.isfinite(*gradients.soundings()), "added to the optimizer a moment ago"
    later.weight.grad = None
    for parameter in [*model[0].parameters(), model[5].bias]:
        parameter.grad = torch.full((8,), NAN)
        assert not math.isfinite(*gradients.soundings())
        parameter.grad = None
    replaced = nn.Parameter(torch.zeros(8))
    optimizer.param_groups[0]["params"][1] = model[1].weight = replaced
    replaced.grad = torch.full((8,), NAN)
    assert not math.isfinite(*gradients.soundings()), "replaced in both"


@pytest.mark.parametrize("held", [False, True])
def test_one_bad_element_among_many_small_gradients_is_found(held: bool) -> None:
    """They are looked at together; each still counts, whatever else is there, is not, or comes later."""
    layers = [nn.LayerNorm(256) for _ in range(700)] + [nn.Linear(5, 3, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(200, 200))
    gradients = Gradients([("m", model)], [torch.optim.SGD(model.parameters())] if held else [])
    parameters = list(model.parameters())
    for at, parameter in enumerate(parameters):
        parameter.grad = torch.ones_like(parameter) if at % 7 else None
    expected = sum(p.numel() for at, p in enumerate(parameters) if at % 7)
    for _ in range(LOOKED_UP_EVERY + 2):
        assert gradients.soundings() == [expected]
    for at in (1, 699, 1399, 1401, len(parameters) - 2, len(parameters) - 1):
        parameter = parameters[at]
        before = parameter.grad
        for value in (NAN, INF, -INF):
            parameter.grad = torch.ones_like(parameter)
            parameter.grad.view(-1)[-1] = value
            assert not math.isfinite(*gradients.soundings()), f"{at}: {value}"
        parameter.grad = before
    model[3].weight = nn.Parameter(torch.zeros(256))  # exchanged, and of another type: looked at all the same
    model[3].weight.grad = torch.full((256,), NAN)
    looks = LOOKED_UP_EVERY if held else 1  # an optimizer that does not know it does not use it either
    assert any(math.isnan(*gradients.soundings()) for _ in range(looks))
    model[3].weight = nn.Parameter(torch.zeros(256, dtype=torch.float64))
    model[3].weight.grad = torch.full((256,), 1e100, dtype=torch.float64)
    assert all(map(math.isfinite, gradients.soundings()))


def test_with_a_scaler_that_is_on_its_own_overflow_is_not_rejected() -> None:
    """A scaler's own overflow is the scaler's matter; a bad loss is not."""
    for enabled in (True, False):
        model, tracked = odd_tracked()
        tracked.add("scaler", torch.amp.GradScaler("cpu", enabled=enabled))
        assert model.small.grad is not None
        model.small.grad[0] = INF
        checks = Checks(ValidationSettings(), tracked)
        assert bool(checks.look(1.0).reasons) is not enabled
        assert checks.look(NAN).reasons[0] == "the loss is NaN"


def test_gradients_are_left_alone_where_that_is_set() -> None:
    model, tracked = odd_tracked()
    assert model.small.grad is not None
    model.small.grad[0] = NAN
    checks = Checks(ValidationSettings(check_for_nan_in_grad=False), tracked)
    assert checks.look(1.0).reasons == []
    assert checks.wanted
    off = Checks(ValidationSettings(check_for_nan_in_grad=False, check_for_nan_in_loss=False), tracked)
    assert not off.wanted


# --- what a loss may be -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_as", "loss"),
    [
        (2.5, 2.5),
        (2, 2.0),
        (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        (torch.tensor([[2.5]], requires_grad=True), 2.5),
        (torch.tensor(0.1, dtype=torch.float64), 0.1),
        (None, None),
        ("text", None),
        (True, None),
        ((torch.tensor(1.0), {}), None),
        (torch.ones(3), None),
        (torch.tensor(1j), None),
    ],
)
def test_a_single_number_is_a_loss_and_nothing_else_is(given_as: Any, loss: float | None) -> None:
    tracked = Tracked()
    tracked.add("model", nn.Linear(2, 2))
    look = Checks(ValidationSettings(), tracked).look(given_as)
    assert (look.loss, look.reasons) == (loss, [])


def test_a_loss_that_only_a_collective_could_read_is_refused() -> None:
    class Spread(torch.Tensor):
        def full_tensor(self) -> None:
            raise AssertionError("a collective")

    tracked = Tracked()
    tracked.add("model", nn.Linear(2, 2))
    with pytest.raises(UsageError, match="full_tensor"):
        Checks(ValidationSettings(), tracked).look(torch.tensor(1.0).as_subclass(Spread))


# --- a user's own checks, and what is remembered ------------------------------------------------------------


def simple(**settings: Any) -> Checks:
    tracked = Tracked()
    tracked.add("model", nn.Linear(2, 2))
    return Checks(ValidationSettings(**settings), tracked)


def test_a_users_own_check_rejects_by_true_or_by_a_text() -> None:
    """Users add their own checks in one line."""
    checks = simple()
    checks.add("too small", lambda loss: loss < 0)
    checks.add("even", lambda loss: "it is even" if loss % 2 == 0 else None)
    assert checks.look(1.0).reasons == []
    assert checks.look(-1.0).reasons == ["too small (loss -1)"]
    look = checks.look(-2.0)
    assert look.reasons == ["too small (loss -2)", "even: it is even"]
    assert look.finite
    with pytest.raises(UsageError, match="too small"):
        checks.add("too small", lambda loss: True)


def test_a_users_check_that_fails_is_told_once_and_never_ends_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checks = simple()
    checks.add("broken", lambda loss: 1 / 0)
    checks.add("two answers", lambda loss: torch.ones(2))
    checks.add("works", lambda loss: True)
    with caplog.at_level(logging.WARNING, "holdfast"):
        for _ in range(3):
            assert checks.look(1.0).reasons == ["works (loss 1)"]
    assert [("broken" in message, "two answers" in message) for message in caplog.messages] == [
        (True, False),
        (False, True),
    ]


def test_only_what_was_accepted_moves_what_is_compared_with() -> None:
    checks = simple(check_for_spiky_loss=True)
    for _ in range(ENOUGH):
        checks.accepted(checks.look(1.0))
    for _ in range(3):
        assert "spike" in checks.look(11.0).reasons[0]
    checks.accepted(checks.look(11.0))
    assert checks.look(11.0).reasons == []


def test_nothing_is_left_in_a_checkpoint_by_checks_that_remember_nothing() -> None:
    """D1: adds nothing to a checkpoint."""
    plain = simple()
    plain.accepted(plain.look(1.0))
    plain.begin_from([1.0] * 20)
    assert plain.state_dict() == {}


def test_a_resume_compares_from_its_first_step_on() -> None:
    """D2: from the checkpoint's own windows, or else from the manifest's, in which gaps are None."""
    first = simple(check_for_spiky_loss=True)
    for _ in range(ENOUGH):
        first.accepted(first.look(1.0))
    own = simple(check_for_spiky_loss=True)
    own.load_state_dict(first.state_dict())
    own.begin_from([100.0] * 64)
    assert own.look(11.0).reasons != []
    from_manifest = simple(check_for_spiky_loss=True)
    from_manifest.load_state_dict({})
    from_manifest.begin_from([1.0, None] * ENOUGH)
    assert from_manifest.look(11.0).reasons != []


def test_the_kinds_of_what_is_no_number_are_told_apart() -> None:
    assert [not_finite(value) for value in (1.0, NAN, INF, -INF)] == ["", "NaN", "+Inf", "-Inf"]


# --- several ranks, and what it costs -----------------------------------------------------------------------


def test_a_rank_looks_alone_and_sees_its_own_shard_only(tmp_path: Path) -> None:
    """Nothing in a look is a collective: rank 1 looks four times, rank 0 twice."""

    def work(rank: int) -> Any:
        torch.manual_seed(1)
        mesh = init_device_mesh("cpu", (2,))

        def sharded(local: torch.Tensor) -> DTensor:
            return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

        model = nn.Module()
        model.weight = nn.Parameter(sharded(torch.zeros(2, 3)))
        model.weight.grad = sharded(torch.full((2, 3), 2.0 + rank))
        tracked = Tracked()
        tracked.add("model", model)
        checks = Checks(ValidationSettings(), tracked)
        for _ in range(2 * rank):
            assert checks.look(1.0).reasons == []
        _, norm = read_together(None, checks.gradients().norms())
        if rank:
            gradient: Any = model.weight.grad
            gradient._local_tensor[0, 0] = NAN
        return checks.look(1.0).reasons, norm

    first, second = together(tmp_path, 2, work)
    assert first == [[], pytest.approx(2 * math.sqrt(6))]
    assert second == [["the gradients hold a NaN: model.weight"], pytest.approx(3 * math.sqrt(6))]


def test_looking_again_and_again_keeps_no_memory() -> None:
    """Nothing allocated per step that is not reused."""
    checks = simple(check_for_spiky_loss=True, check_for_outlier_loss=True)
    model = checks.gradients()._models[0][1]
    model(torch.ones(2)).sum().backward()
    loss = torch.tensor(1.0)

    def looks(number: int) -> None:
        for _ in range(number):
            checks.accepted(checks.look(loss))

    looks(MEMORY + 64)
    tracemalloc.start()
    try:
        looks(64)
        before = tracemalloc.get_traced_memory()[0]
        looks(640)
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()
