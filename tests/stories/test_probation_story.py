"""Real checkpoints of real trainings, saved with state that was bad already: only probation can see it.

The launcher's part (who is suspect, which rung is next) is played by the test; all else is as in a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.format.manifest import CheckpointName, parse_name
from holdfast.checkpoint.format.manifest import read as read_manifest
from holdfast.checkpoint.format.structure import verify
from holdfast.journal import Event
from holdfast.journal.events import ProbationEnded, RungRejected, StandingChanged, Warned
from holdfast.policy.results import Orders, Trial
from holdfast.record.directory import ControlDirectory
from holdfast.record.launches import LaunchInfo
from holdfast.record.lease import Fence, LeaseKeeper, claim
from holdfast.record.standing import Standing, StandingBook
from holdfast.train.probation import Probation
from kit.runs import events_in
from kit.tiny import checkpoints

E = TypeVar("E", bound=Event)
SAVES = 40
Damage = Callable[[nn.Module, torch.optim.Optimizer], None]


class Points(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64 * 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8.0) * (index + 1))


def zeroed_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def reset_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(4711)
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()


class BreachedError(Exception):
    pass


class Training:
    """A run in this process; each call of `attempt` is one attempt, ended by a breach or at `until`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.breach: list[str] = []
        self.step = self.started = 0

    @property
    def book(self) -> StandingBook:
        return StandingBook(ControlDirectory.open(self.run_dir))

    def events(self, kind: type[E]) -> list[E]:
        return events_in(self.run_dir, kind)

    def saved(self, step: int) -> CheckpointName:
        names = [parse_name(path.name) for path in checkpoints(self.run_dir)]
        return next(name for name in names if name is not None and name.step == step)

    def attempt(
        self,
        until: int,
        *,
        damage: tuple[int, Damage] | None = None,
        jump: int | None = None,
        suspect: CheckpointName | None = None,
        trial: Trial | None = None,
    ) -> None:
        """`damage`: after that step, before it is saved. `jump`: from that step on the data itself is bad."""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        run = holdfast.Run(
            run_dir=self.run_dir, checkpoint_interval=SAVES, control_lease_ttl=5.0,
            validation_probation_steps=0,  # the one of the run itself is off: it has no launcher
        )  # fmt: skip
        run.track(model=model, optimizer=optimizer)
        feed = run.feed(holdfast.GlobalBatches(Points(), 64, seed=2))
        with contextlib.suppress(BreachedError), run:
            self._suspect(suspect)
            self.started = run.start()
            probation = self._probation(run, trial)
            self.breach = []
            while run.step < until:
                step = run.step + 1
                run.begin_step()
                x = feed.next()
                self.breach = probation.observe()
                if self.breach:
                    raise BreachedError  # as the run ends with code 16
                target = x if jump is None or step < jump else x + 3
                loss = (model(x) - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.record(loss=loss, samples=len(x))
                if damage is not None and step == damage[0]:
                    damage[1](model, optimizer)
                run.end_step(last=step >= until)
                self.step = step
                probation.completed(step, 0.01)
            probation.close()

    def _suspect(self, suspect: CheckpointName | None) -> None:
        """What the launcher does between two attempts."""
        if suspect is not None:
            control = ControlDirectory.open(self.run_dir)
            held = claim(control, "launcher", 5.0)
            keeper = LeaseKeeper(control, held, lambda why: None)
            fence = Fence(control, held.epoch)
            StandingBook(control).append(fence, suspect.id, Standing.SUSPECT, self.breach)
            keeper.release()

    def _probation(self, run: holdfast.Run, trial: Trial | None) -> Probation:
        group, member = run._session.group, run._session.member
        launched = LaunchInfo(
            run_dir=str(self.run_dir), run_id=member.control.run_id, launch=member.launch,
            attempt=member.attempt, epoch=member.fence.epoch, node="a", orders=Orders(trial=trial),
        )  # fmt: skip
        probation = Probation(10, group, member, run._meter.latest, launched, node="a")
        manifest = None
        if run.head is not None:
            manifest = read_manifest(self.run_dir / "checkpoints" / str(run.head))[0]
            run._meter.go_on_from(manifest.windows)
        counters = {"step": run.step, "samples": run.samples, "tokens": run.tokens}
        assert probation.begin(run.head, manifest, counters) == []
        return probation


@pytest.mark.parametrize("damage", [zeroed_optimizer, reset_weights])
def test_state_that_was_bad_before_it_was_saved_is_found_tried_and_condemned(
    tmp_path: Path, damage: Damage
) -> None:
    """Cases Megatron-LM#5281 and scenarios 2 and 22, as far as the ranks go."""
    training = Training(tmp_path / "run")
    training.attempt(80, damage=(80, damage))
    bad, good = training.saved(80), training.saved(40)
    assert verify(tmp_path / "run" / "checkpoints" / str(bad)).problems == [], (
        "its bytes are exactly what was saved"
    )

    training.attempt(200)
    assert training.started == 80
    assert training.breach
    assert "the loss is above" in training.breach[0]
    failed_at = training.step
    assert failed_at <= 90
    assert training.book.of(bad.id) is Standing.VERIFIED, "a rank alone makes nothing suspect"

    trial = Trial(suspects=[str(bad)], until=failed_at)
    training.attempt(100, suspect=bad, trial=trial)
    assert training.started == 40
    assert training.breach == []
    assert training.step == 100
    assert training.book.of(bad.id) is Standing.CONDEMNED
    assert training.book.of(good.id) is Standing.PROVEN
    outcomes = [(ended.checkpoint, ended.outcome) for ended in training.events(ProbationEnded)]
    assert outcomes == [(str(bad), "breached"), (str(good), "passed")]
    refused = {event.checkpoint for event in training.events(RungRejected)}
    training.attempt(110)
    assert training.started == 100, "no second cycle from the condemned one"
    assert str(bad) not in refused
    changed = [(event.checkpoint, event.standing) for event in training.events(StandingChanged)]
    assert changed.count((str(bad), "condemned")) == 1


def test_bad_data_fails_from_the_lower_rung_too_and_condemns_nobody(tmp_path: Path) -> None:
    """Scenario 2, second half: the jump follows the samples."""
    training = Training(tmp_path / "run")
    training.attempt(80)
    innocent = training.saved(80)
    training.attempt(200, jump=83)
    assert training.breach
    failed_at = training.step

    training.attempt(100, jump=83, suspect=innocent, trial=Trial(suspects=[str(innocent)], until=failed_at))
    assert training.started == 40
    assert (training.breach, training.step) == ([], 100), "it goes on with what it is"
    (warned,) = [event.message for event in training.events(Warned) if "on trial" in event.message]
    assert f"as after {innocent}, on trial" in warned
    assert training.book.of(innocent.id) is Standing.ACQUITTED
    assert not [event for event in training.events(StandingChanged) if event.standing == "condemned"]


def test_an_undamaged_resume_is_proven(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    training.attempt(80)
    training.attempt(100)
    assert training.started == 80
    assert training.breach == []
    assert training.book.of(training.saved(80).id) is Standing.PROVEN
