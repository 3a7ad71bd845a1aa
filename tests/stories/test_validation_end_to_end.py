"""Rejected steps under the real launcher: from the bad result to the verdict, by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ExitCode, RerunWantedError
from holdfast.journal.events import DecisionMade, RunFinished, StepRejected, Verdict
from holdfast.launch.incident.inquest import code_of
from holdfast.record.attempts import attempt_numbers
from holdfast.record.operator import excluded
from holdfast.train.crash import ERROR_FILE, write_error_file
from kit.harness import REPO, Result, finish, holdfast
from kit.ranks.validated import Place

SCRIPT = str(REPO / "tests" / "scripts" / "train" / "train_checked.py")


def launch(tmp_path: Path, kind: str, devices: str, ranks: int = 2, **more: str) -> Result:
    env = {
        "CHECKED_OUT": "out",
        "CUDA_VISIBLE_DEVICES": devices,
        "HOLDFAST_CHECKPOINT_INTERVAL": "2",
        "HOLDFAST_VALIDATION_RERUN_MODE": "validate_results",
        "HOLDFAST_VALIDATION_ERROR_INJECTION_TYPE": kind,
        "HOLDFAST_VALIDATION_ERROR_INJECTION_STEP": "4",
        "HOLDFAST_VALIDATION_ERROR_INJECTION_RANKS": "1",
        **more,
    }
    argv = holdfast("run", "--nproc-per-node", str(ranks), "--run-dir", "run", SCRIPT)
    return finish(argv, cwd=tmp_path, env=env, timeout=150)


@pytest.mark.drill
def test_a_bad_device_is_found_excluded_and_the_run_finishes_without_it(tmp_path: Path) -> None:
    """Scenario 4: three devices, two ranks; the fault is the device's, whoever computes on it."""
    result = launch(tmp_path, "persistent_error", "0,1,2")
    assert result.code == 0, result.text
    place = Place(tmp_path)
    assert [one.device for one in excluded(place.control)] == ["1"]
    assert place.events(RunFinished)[-1].step == 5
    assert attempt_numbers(place.control) == [1, 2, 3], "found by moving the ranks once"
    assert "device" in [one.verdict for one in place.events(Verdict)]


@pytest.mark.drill
def test_work_that_is_bad_everywhere_stops_the_run_within_its_bound(tmp_path: Path) -> None:
    """With nan_policy = raise; with the default the step is dropped, as without any restart."""
    result = launch(tmp_path, "correct_result", "0,1,2", HOLDFAST_VALIDATION_NAN_POLICY="raise")
    assert result.code == ExitCode.VALIDATION_FAILED, result.text
    place = Place(tmp_path)
    assert excluded(place.control) == []
    assert "reproducible" in [one.verdict for one in place.events(Verdict)]
    assert not place.events(RunFinished)
    recovery = [one for one in place.events(DecisionMade) if one.about == "recovery"]
    assert recovery[-1].chosen == "stop"


@pytest.mark.drill
def test_a_transient_fault_costs_one_more_run_of_the_step_and_no_restart(tmp_path: Path) -> None:
    """Scenario 2: a bit that flips once."""
    result = launch(tmp_path, "transient_error", "0,1")
    assert result.code == 0, result.text
    place = Place(tmp_path)
    assert attempt_numbers(place.control) == [1]
    assert [one.then for one in place.events(StepRejected)] == ["rerun"]
    assert [one.verdict for one in place.events(Verdict)] == ["transient"]


def test_a_rank_that_was_stopped_while_it_ended_counts_with_the_code_it_was_ending_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks end with 16 at the same moment; the launcher stops the slower one, which is no other end."""
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    write_error_file(RerunWantedError("again"))
    assert code_of(path) == ExitCode.RERUN_WANTED
    path.unlink()
    write_error_file(ValueError("no"))
    assert code_of(path) == 1
    for damaged in ("", "[]", '{"message": {"extraInfo": {"exit_code": "x"}}}', '{"message": "text"}'):
        path.write_text(damaged)
        assert code_of(path) == 1
