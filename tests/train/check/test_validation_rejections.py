"""Rejected and rejected again: what the ranks record before they end, and what the next attempt makes of it.

The launcher's part is played by the tests: they hand over what it would (`LaunchInfo`), on devices that are
only names.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.checkpoint.format.structure import verify
from holdfast.errors import ExitCode
from holdfast.journal.events import DecisionMade, StepRejected, Verdict, Warned
from holdfast.policy.results import How, Kind, Orders, RankResult, Rejection, Rerun, Trial, Window
from holdfast.policy.results import Place as Device
from holdfast.record import operator
from holdfast.record.attempts import (
    SETTLED,
    HeadRecord,
    attempt_numbers,
    ends_of,
    read_attempt,
    record_settled,
    settled_steps,
    transients_of,
)
from holdfast.record.directory import read_record
from holdfast.record.operator import excluded
from holdfast.record.standing import Standing, StandingBook
from holdfast.train import membership
from kit.harness import REPO, finish
from kit.ranks.validated import Ended, Place, Training
from kit.tiny import checkpoints

RERUN = {"validation_rerun_mode": "validate_results"}


def injected(kind: str, step: int = 3, ranks: str = "1", **more: Any) -> dict[str, Any]:
    return {
        **RERUN,
        "validation_error_injection_type": kind,
        "validation_error_injection_step": step,
        "validation_error_injection_ranks": ranks,
        **more,
    }


def codes(ended: list[Ended]) -> set[int]:
    return {one.code for one in ended}


def rejected(place: Place, attempt: int) -> Rejection:
    found = place.rejection(attempt)
    assert found is not None
    return found


def persistent(tmp_path: Path, wrap: str = "ddp") -> tuple[Place, Training, Rejection]:
    """A device gave a bad result, twice: the first attempt has ended."""
    place = Place(tmp_path)
    training = Training(wrap, settings=injected("persistent_error"))
    ended = place.train(training, 2, launched=place.launched(world=2), devices="0,1")
    assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
    assert all(sorted(one.steps) == [1, 2] for one in ended)
    return place, training, rejected(place, 1)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_step_rejected_twice_is_recorded_with_its_evidence_before_any_rank_ends(
    tmp_path: Path, wrap: str
) -> None:
    """D3: the report names rank, device, both losses and the state; the diagnostic save lives apart."""
    place, _, rejection = persistent(tmp_path, wrap)
    assert (rejection.kind, rejection.step, rejection.rerun, rejection.finite) == (Kind.STEP, 3, True, False)
    (bad,) = rejection.bad
    assert (bad.rank, bad.node, bad.device, bad.first, bad.again) == (1, "n", "1", "nan", "nan")
    assert not bad.differs
    assert bad.state.startswith("p:")
    assert rejection.window is not None
    assert (rejection.window.first, rejection.window.last) == (2, 2)
    assert [(one.then, one.ranks) for one in place.events(StepRejected)] == [("rerun", [1]), ("restart", [1])]
    saved = place.run_dir / "checkpoints" / "diagnostic" / rejection.diagnostic
    assert verify(saved).sound
    assert place.events(Verdict) == [], "nobody has judged it yet"


def test_a_diagnostic_save_that_fails_is_said_and_hides_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path)

    def prepare(run: holdfast.Run) -> None:
        start = run.start

        def start_and_break() -> int:
            done = start()

            def fail(*args: object, **kwargs: object) -> None:
                raise OSError("no space left")

            run._session.saving.save = fail  # type: ignore[method-assign, assignment]
            return done

        run.start = start_and_break  # type: ignore[method-assign]

    training = Training(settings=injected("persistent_error", ranks="0"), prepare=prepare)
    (ended,) = place.train(training, launched=place.launched(), devices="0")
    assert ended.code == ExitCode.RERUN_WANTED, ended.error
    assert rejected(place, 1).diagnostic == "none: OSError: no space left"


def test_the_fault_that_follows_the_device_is_rejected_on_the_other_rank(tmp_path: Path) -> None:
    place, training, first = persistent(tmp_path)
    told = Rerun(step=3, bad=first.bad, can_exclude=True)
    ended = place.train(
        training, 2, launched=place.launched(world=2, orders=Orders(rerun=told)), devices="1,0"
    )
    assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
    (bad,) = rejected(place, 2).bad
    assert (bad.rank, bad.device) == (0, "1")


@pytest.mark.parametrize("can_exclude", [True, False])
def test_a_step_that_passes_elsewhere_from_the_same_state_condemns_the_device(
    tmp_path: Path, can_exclude: bool
) -> None:
    """Verdict device: excluded if the run can go on without it; else said, and the run goes on."""
    place, training, first = persistent(tmp_path)
    told = Rerun(step=3, bad=first.bad, can_exclude=can_exclude)
    ended = place.train(
        training, 2, launched=place.launched(world=2, orders=Orders(rerun=told)), devices="2,0"
    )
    (verdict,) = place.events(Verdict)
    assert (verdict.verdict, verdict.node, verdict.device) == ("device", "n", "1")
    if can_exclude:
        assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
        second = rejected(place, 2)
        assert (second.kind, second.accused) == (Kind.DEVICE, Device("n", "1"))
    else:
        assert codes(ended) == {0}, ended[0].error
        assert place.rejection(2) is None
        assert any("cannot go on without that device" in one.message for one in place.events(Warned))


def test_a_step_that_passes_from_another_state_was_transient_and_counts_against_the_old_device(
    tmp_path: Path,
) -> None:
    place, training, first = persistent(tmp_path)
    (bad,) = first.bad
    damaged = RankResult(rank=1, node="n", device="1", reasons=bad.reasons, state="p:0123456789abcdef")
    told = Rerun(step=3, bad=[damaged], can_exclude=True)
    ended = place.train(
        training, 2, launched=place.launched(world=2, orders=Orders(rerun=told)), devices="2,0"
    )
    assert codes(ended) == {0}, ended[0].error
    (verdict,) = place.events(Verdict)
    assert (verdict.verdict, verdict.device) == ("transient", "1")
    assert "damaged in the memory" in verdict.evidence[0]
    assert transients_of(place.control, Device("n", "1")) == 1


def test_work_that_is_bad_is_bad_on_every_device_and_in_every_attempt(tmp_path: Path) -> None:
    place = Place(tmp_path)
    training = Training("ddp", settings=injected("correct_result"))
    for attempt, devices in ((1, "0,1"), (2, "1,0")):
        ended = place.train(training, 2, launched=place.launched(world=2), devices=devices)
        assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
        (bad,) = rejected(place, attempt).bad
        assert (bad.rank, bad.device) == (1, "01"[attempt % 2])


def test_too_many_transient_faults_accuse_the_device_across_attempts(tmp_path: Path) -> None:
    """Counted durably: the second attempt's first one is the device's second."""
    place = Place(tmp_path)
    settings = {"validation_max_transients": 2, "checkpoint_save_at_end": True}
    first = Training("ddp", until=2, settings=injected("transient_error", step=2, **settings))
    ended = place.train(first, 2, launched=place.launched(world=2), devices="0,1")
    assert codes(ended) == {0}, ended[0].error
    assert transients_of(place.control, Device("n", "1")) == 1
    again = Training("ddp", settings=injected("transient_error", step=3, **settings))
    ended = place.train(again, 2, launched=place.launched(world=2), devices="0,1")
    assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
    second = rejected(place, 2)
    assert (second.kind, second.accused) == (Kind.DEVICE, Device("n", "1"))
    assert transients_of(place.control, Device("n", "0")) == 0


def test_a_transient_fault_stops_the_run_where_the_setting_says_so(tmp_path: Path) -> None:
    place = Place(tmp_path)
    settings = injected("transient_error", validation_on_transient="stop")
    ended = place.train(Training("ddp", settings=settings), 2)
    assert codes(ended) == {ExitCode.VALIDATION_FAILED}
    assert all("validation.on_transient is stop" in one.error for one in ended)
    assert place.rejection() is None


def test_where_a_nan_begins_is_found_and_whose_gradients_it_is(tmp_path: Path) -> None:
    """The loss stays finite: only gradients are bad, on all ranks once they are reduced."""
    place = Place(tmp_path)

    def spoil(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        if step == 3 and rank == 1:
            loss.register_hook(lambda gradient: gradient * math.nan)
        return loss

    training = Training("ddp", settings=RERUN, spoil=spoil)
    ended = place.train(training, 2, launched=place.launched(world=2), devices="0,1")
    assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
    first, again = place.events(StepRejected)
    assert (first.ranks, again.ranks) == ([], [1]), "before it was run again nobody could know"
    (bad,) = rejected(place, 1).bad
    assert (bad.rank, bad.where) == (1, "the gradient of 3.bias")


def test_the_first_part_of_the_model_with_a_bad_output_is_named(tmp_path: Path) -> None:
    place = Place(tmp_path)
    training = Training(settings=RERUN, breaks=3)
    (ended,) = place.train(training, launched=place.launched(), devices="0")
    assert ended.code == ExitCode.RERUN_WANTED, ended.error
    (bad,) = rejected(place, 1).bad
    assert bad.where == "3"


def odd_from(first: int) -> Any:
    def prepare(run: holdfast.Run) -> None:
        run.add_check("odd", lambda loss: run.step + 1 == first)

    return prepare


def test_a_finite_value_rejected_again_is_marked_as_such_and_accepted_when_told_to(tmp_path: Path) -> None:
    """A false alarm costs at most the re-runs."""
    place = Place(tmp_path)
    training = Training("ddp", settings=RERUN, prepare=odd_from(3))
    ended = place.train(training, 2, launched=place.launched(world=2), devices="0,1")
    assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
    first = rejected(place, 1)
    assert (first.kind, first.finite, len(first.bad)) == (Kind.STEP, True, 2)
    told = Rerun(step=3, bad=first.bad, accept=True)
    ended = place.train(
        training, 2, launched=place.launched(world=2, orders=Orders(rerun=told)), devices="1,0"
    )
    assert codes(ended) == {0}, ended[0].error
    (verdict,) = place.events(Verdict)
    assert verdict.verdict == "reproducible"
    assert place.rejection(2) is None
    ended = place.train(training, 2, launched=place.launched(world=2), devices="0,1")
    assert codes(ended) == {0}, "what was accepted stays accepted, though nobody tells this attempt"
    assert place.rejection(3) is None
    other = msgspec.structs.replace(settled_steps(place.control)[0], window=Window(9, 2, 2))
    (place.control.attempt(2) / SETTLED).unlink()
    record_settled(place.control, 2, other)
    ended = place.train(training, 2, launched=place.launched(world=2), devices="0,1")
    assert codes(ended) == {ExitCode.RERUN_WANTED}, "of other data nothing is known"


def test_inside_probation_a_nan_is_brought_before_the_launcher_whatever_the_policy(tmp_path: Path) -> None:
    place = Place(tmp_path)
    settings = {"checkpoint_save_at_end": True, "validation_nan_policy": "skip"}

    def spoil(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * math.nan if step in (2, 4) and rank == 1 else loss

    ended = place.train(
        Training("ddp", until=2, settings=settings, spoil=spoil), 2, launched=place.launched(world=2)
    )
    assert codes(ended) == {0}, "outside of probation it is dropped"
    ended = place.train(Training("ddp", settings=settings, spoil=spoil), 2, launched=place.launched(world=2))
    assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
    found = rejected(place, 2)
    assert (found.kind, found.step, found.in_probation, found.rerun) == (Kind.STEP, 4, True, False)
    assert [one.rank for one in found.bad] == [1]


def test_a_breach_of_probation_ends_every_rank_with_the_last_completed_step(tmp_path: Path) -> None:
    place = Place(tmp_path)
    settings = {"checkpoint_save_at_end": True}
    assert codes(place.train(Training("ddp", until=2, settings=settings), 2)) == {0}

    def prepare(run: holdfast.Run) -> None:
        load = run._meter.load_state_dict

        def wrong(state: dict[str, int]) -> None:
            load({**state, "samples": state["samples"] + 5})

        run._meter.load_state_dict = wrong  # type: ignore[method-assign]

    training = Training("ddp", settings=settings, prepare=prepare)
    ended = place.train(training, 2, launched=place.launched(world=2))
    assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
    found = rejected(place, 2)
    assert (found.kind, found.step, found.in_probation) == (Kind.PROBATION, 2, True)


def test_contradicting_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for settings, told in (
        ({"validation_error_injection_step": 2}, "a rehearsal needs"),
        ({**RERUN, "validation_deferred": True}, "after the optimizer used it"),
        (injected("transient_error", validation_error_injection_device="0"), "persistent_error"),
    ):
        with pytest.raises(holdfast.HoldfastError, match=told):
            holdfast.Run(run_dir=tmp_path / "run", **settings)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


# --- without the launcher: every start finds what those before it rejected ---------------------------------


STRICT = {**RERUN, "validation_nan_policy": "raise"}
"""What comes from the work is not tolerated: else the third start would drop the step and go on."""


def spoiled(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
    del rank
    return loss * math.nan if step == 5 else loss


def diagnostics(place: Place) -> list[str]:
    return [path.name for path in (place.run_dir / "checkpoints" / "diagnostic").glob("step_*")]


def test_plain_starts_vary_the_rung_and_are_then_refused_with_the_verdict(tmp_path: Path) -> None:
    """The demanding user's six starts: six times 16 from the same step, a diagnostic save each."""
    place = Place(tmp_path)
    training = Training(until=8, spoil=spoiled, settings={**STRICT, "checkpoint_interval": 2})
    ended = [place.train(training)[0] for _ in range(6)]
    assert [one.code for one in ended] == [16, 16, 17, 17, 17, 17], ended[2].error
    assert [sorted(one.steps) for one in ended] == [[1, 2, 3, 4], [], [3, 4], [], [], []], (
        "the last ones: none"
    )
    assert attempt_numbers(place.control) == [1, 2, 3], "what is refused is no attempt"
    assert "verdict: reproducible" in ended[5].error
    assert "reset-budget" in ended[5].error
    steps = [(one.checkpoint or "", one.step) for one in heads(place)]
    assert [step for _, step in steps] == [0, 4, 2], "the rung varied"
    assert len(diagnostics(place)) == 1, "one, however often the step is come to"
    book = StandingBook(place.control)
    assert book.of(steps[1][0]) is Standing.ACQUITTED, "the lower rung failed at the same step"
    decided = [one.chosen for one in place.events(DecisionMade) if one.about == "recovery"]
    assert decided == ["restart", "lower_rung"], "then the ranks knew, and the policy ended it"

    operator.reset_budget(place.control, "the data were mended", "me")
    assert place.train(training)[0].code == 16, "somebody who mended it is let in"
    mended = Training(until=8, settings={**training.settings, "checkpoint_keep_last": 5})
    assert place.train(mended)[0].code == 0, "and so is another setting, without a word to anybody"


def heads(place: Place) -> list[HeadRecord]:
    found = [
        read_record(place.control.attempt(number) / "head.json", HeadRecord)
        for number in attempt_numbers(place.control)
    ]
    return [one for one in found if one is not None]


@pytest.mark.usefixtures("a_script")
def test_a_changed_setting_opens_a_verdict_at_once(tmp_path: Path) -> None:
    place = Place(tmp_path)
    training = Training(until=8, spoil=spoiled, settings={**STRICT, "checkpoint_interval": 0})
    assert [place.train(training)[0].code for _ in range(3)] == [16, 17, 17], "there is no rung to vary"
    other = {**training.settings, "checkpoint_keep_last": 5}
    ended = [place.train(Training(until=8, spoil=spoiled, settings=other))[0] for _ in range(3)]
    assert [one.code for one in ended] == [17, 17, 17], "the verdict on the step stays"
    assert [bool(one.steps) for one in ended] == [True, False, False], "but it was let in, once"


def test_all_ranks_are_refused_alike(tmp_path: Path) -> None:
    place = Place(tmp_path)
    training = Training("ddp", until=8, spoil=spoiled, settings={**STRICT, "checkpoint_interval": 0})
    assert [codes(place.train(training, 2)) for _ in range(3)] == [{16}, {17}, {17}]
    assert attempt_numbers(place.control) == [1, 2]


def test_who_dies_before_it_could_decide_leaves_that_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    training = Training(until=8, spoil=spoiled, settings={**STRICT, "checkpoint_interval": 0})
    with monkeypatch.context() as patch:
        patch.setattr(membership.Deciding, "about", lambda *_: os._exit(9))
        assert place.train(training)[0].code == 9
    assert not (place.control.attempt(1) / "decisions" / "recovery.json").exists()
    assert [place.train(training)[0].code for _ in range(2)] == [17, 17], "both attempts were counted"
    assert attempt_numbers(place.control) == [1, 2]


def test_a_plain_start_moves_to_another_device_where_it_sees_more_than_one(tmp_path: Path) -> None:
    place = Place(tmp_path)
    training = Training(
        settings=injected("persistent_error", ranks="0", checkpoint_interval=0, validation_nan_policy="raise")
    )
    first = place.train(training, devices="0,1")[0]
    assert first.code == ExitCode.RERUN_WANTED, first.error
    assert "every rank on another device" in first.error
    second = place.train(training, devices="0,1")[0]
    assert second.code == 0, second.error
    placed = [read_attempt(place.control, number) for number in (1, 2)]
    assert [one.rotation for one in placed] == [0, 1]
    assert [one.placement.partition("[")[2] for one in placed] == ["0]", "1]"]
    assert "device" in [one.verdict for one in place.events(Verdict)]


def test_plain_ranks_find_a_bad_device_by_moving_and_then_do_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    place = Place(tmp_path)
    training = Training("ddp", settings=injected("persistent_error", checkpoint_interval=0))
    ended = [codes(place.train(training, 2, devices="0,1,2")) for _ in range(3)]
    assert ended == [{16}, {16}, {0}]
    assert [one.device for one in excluded(place.control)] == ["1"]
    placed = [read_attempt(place.control, number).placement.partition("[")[2] for number in (1, 2, 3)]
    assert placed == ["0,1]", "1,2]", "2,0]"]


def test_devices_that_were_asked_for_before_the_run_was_made_stay_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "in_use", lambda: "CUDA was in use before the run was made")
    place = Place(tmp_path)
    training = Training(
        settings=injected("persistent_error", ranks="0", checkpoint_interval=0, validation_nan_policy="raise")
    )
    assert [place.train(training, devices="0,1")[0].code for _ in range(3)] == [16, 17, 17]
    told = next(one for one in place.events(DecisionMade) if one.about == "recovery")
    assert "no rank can move: CUDA was in use before the run was made" in told.evidence
    assert {read_attempt(place.control, number).rotation for number in (1, 2)} == {0}


@pytest.mark.drill
def test_under_torchrun_the_step_is_computed_as_often_as_under_the_launcher(tmp_path: Path) -> None:
    """A reproducible rejection and `--max-restarts 8`: nine times 16, nine diagnostic saves."""
    env = {
        "CHECKED_OUT": "out",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "HOLDFAST_CHECKPOINT_INTERVAL": "2",
        "HOLDFAST_VALIDATION_RERUN_MODE": "validate_results",
        "HOLDFAST_VALIDATION_NAN_POLICY": "raise",
        "HOLDFAST_VALIDATION_ERROR_INJECTION_TYPE": "correct_result",
        "HOLDFAST_VALIDATION_ERROR_INJECTION_STEP": "5",
        "HOLDFAST_VALIDATION_ERROR_INJECTION_RANKS": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "5"]
    script = str(REPO / "tests" / "scripts" / "train" / "train_checked.py")
    result = finish([*torchrun, "--nproc-per-node", "2", script], cwd=tmp_path, env=env, timeout=240)
    assert result.code != 0, result.text
    place = Place(tmp_path)
    numbers = attempt_numbers(place.control)
    assert numbers == [1, 2, 3], result.text
    assert len({read_attempt(place.control, number).launch for number in numbers}) == 1, "one launch"
    assert [end.exit_code for _, end in ends_of(place.control) if end is not None] == [16, 16, 17]
    assert len(diagnostics(place)) == 1
    assert result.err.count("a start would end the same way") >= 3, "what restarts were left were refused"


# --- what the ranks settle without another attempt ----------------------------------------------------------


def nan_at(*steps: int) -> Callable[[int, int, torch.Tensor], torch.Tensor]:
    def spoil(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * math.nan if step in steps and rank == 1 else loss

    return spoil


def saved_before(tmp_path: Path, *bad: int, **settings: Any) -> tuple[Place, Training]:
    """A run of two ranks that has saved at step 2; from step 3 on each attempt is in its probation."""
    place, every = Place(tmp_path), {"checkpoint_interval": 2, **settings}
    first = Training("ddp", until=2, settings={**every, "checkpoint_save_at_end": True})
    ended = place.train(first, 2, launched=place.launched(world=2))
    assert codes(ended) == {0}, ended[0].error
    return place, Training("ddp", until=5, settings=every, spoil=nan_at(*bad))


BAD = [RankResult(rank=1, node="n", device="1", reasons=["nan"])]


@pytest.mark.parametrize(
    ("told", "devices"),
    [
        ({"orders": Orders(rerun=Rerun(step=4, bad=BAD, settles=True))}, "1,0"),
        ({"orders": Orders(rerun=Rerun(step=4, bad=BAD, settles=True))}, "0,1"),
        ({"orders": Orders(trial=Trial(suspects=["step_00000003-00000003"], until=4))}, "0,1"),
        ({"restarts_left": 0}, "0,1"),
    ],
    ids=["other devices", "the same devices", "a lower rung", "no restart left"],
)
def test_a_nan_that_is_not_the_checkpoints_is_left_to_the_policy_and_stays_so(
    tmp_path: Path, told: dict[str, Any], devices: str
) -> None:
    """Point 4: on all ranks alike, without another attempt, and known to every later one."""
    place, training = saved_before(tmp_path, 4)
    ended = place.train(training, 2, launched=place.launched(world=2, **told), devices=devices)
    assert codes(ended) == {0}, ended[0].error
    assert [(one.step, one.then) for one in place.events(StepRejected)] == [(4, "dropped")]
    assert place.rejection(2) is None
    (settled,) = settled_steps(place.control)
    assert (settled.step, settled.how, settled.world_size) == (4, How.TOLERATED, 2)
    assert settled.shown is ("restarts_left" not in told)
    assert settled.window is not None
    for later in checkpoints(place.run_dir):
        if not later.name.startswith("step_00000002"):
            shutil.rmtree(later)
    ended = place.train(training, 2, launched=place.launched(world=2), devices="0,1")
    assert codes(ended) == {0}, "replayed from the lower rung, it is dropped at once"


def test_a_nan_that_follows_its_device_is_never_settled_by_the_ranks(tmp_path: Path) -> None:
    """The rank that was bad there is well elsewhere, and another one is bad there now."""
    place, training = saved_before(tmp_path, 4)
    then = [RankResult(rank=0, node="n", device="0", reasons=["nan"])]
    told = Rerun(step=4, bad=then, settles=True)
    ended = place.train(
        training, 2, launched=place.launched(world=2, orders=Orders(rerun=told)), devices="1,0"
    )
    assert codes(ended) == {ExitCode.RERUN_WANTED}
    assert settled_steps(place.control) == []


def test_a_row_of_them_is_brought_before_the_launcher_unless_it_was_shown_to_be_the_work(
    tmp_path: Path,
) -> None:
    """A bad state makes the steps after it fail as well: then what was loaded is asked about after all."""
    place, training = saved_before(tmp_path, 3, 4, 5, validation_max_consecutive=3)
    ended = place.train(training, 2, launched=place.launched(world=2, restarts_left=0), devices="0,1")
    assert codes(ended) == {ExitCode.RERUN_WANTED}, ended[0].error
    assert rejected(place, 2).step == 5
    told = Rerun(step=5, bad=BAD, settles=True)
    ended = place.train(
        training, 2, launched=place.launched(world=2, orders=Orders(rerun=told)), devices="1,0"
    )
    assert codes(ended) == {ExitCode.VALIDATION_FAILED}, "and then it is the policy that ends it"


def test_the_policy_raise_is_obeyed_once_the_checkpoint_is_not_the_cause(tmp_path: Path) -> None:
    place, training = saved_before(tmp_path, 4, validation_nan_policy="raise")
    told = Rerun(step=4, bad=BAD, settles=True)
    ended = place.train(
        training, 2, launched=place.launched(world=2, orders=Orders(rerun=told)), devices="1,0"
    )
    assert codes(ended) == {ExitCode.VALIDATION_FAILED}
    assert "validation.nan_policy = raise" in ended[0].error
