"""One GPU, world 1: a step that is run again leaves no trace, whatever lives on the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_cuda_resume import SCRIPT, record

from holdfast.journal import events
from holdfast.journal.reader import read_journal
from kit.harness import finish, holdfast

pytestmark = pytest.mark.gpu


def train(directory: Path, name: str, *flags: str, launcher: bool = False, **settings: str) -> int:
    env = {"CUDA_OUT": name, "CUDA_RUN": f"run-{name}"}
    env |= {f"HOLDFAST_VALIDATION_{key.upper()}": value for key, value in settings.items()}
    run = holdfast("run", "--nproc-per-node", "1", "--run-dir", f"run-{name}", *flags, SCRIPT)
    result = finish(run if launcher else [sys.executable, SCRIPT], cwd=directory, env=env, timeout=180)
    if result.code:
        print(result.text)
    return result.code


def seen(directory: Path, name: str) -> list[object]:
    return [line.body for line in read_journal(directory / f"run-{name}" / "journal")]


def test_steps_that_are_run_again_on_the_gpu_leave_no_trace(tmp_path: Path) -> None:
    """CUDA generators, half precision, BatchNorm on the device, a scaler that skips and grows."""
    assert train(tmp_path, "whole", check_for_nan_in_loss="false", check_for_nan_in_grad="false") == 0
    whole = record(tmp_path / "whole")
    again = {"rerun_mode": "validate_results", "error_injection_step": "12"}
    assert train(tmp_path, "transient", **again) == 0
    assert record(tmp_path / "transient") == whole
    (verdict,) = [body for body in seen(tmp_path, "transient") if isinstance(body, events.Verdict)]
    assert (verdict.verdict, verdict.step) == ("transient", 12)

    assert train(tmp_path, "twice", rerun_mode="report_determinism_stats") == 0
    assert record(tmp_path / "twice") == whole
    measured = [body for body in seen(tmp_path, "twice") if isinstance(body, events.DeterminismMeasured)]
    assert measured
    assert {one.largest for one in measured} == {0.0}, "this training is deterministic"

    assert train(tmp_path, "watched", corruption_watch_interval="5") == 0
    assert record(tmp_path / "watched") == whole
    assert train(tmp_path, "deferred", deferred="true") == 0
    assert record(tmp_path / "deferred") == whole
    for name in ("twice", "watched", "deferred"):
        assert not [body for body in seen(tmp_path, name) if isinstance(body, events.StepRejected)]


def test_a_device_that_stays_bad_and_is_the_only_one_ends_in_few_attempts(tmp_path: Path) -> None:
    """Scenario 3 on a real device."""
    bad = {
        "rerun_mode": "validate_results",
        "error_injection_type": "persistent_error",
        "error_injection_step": "12",
    }
    assert train(tmp_path, "bad", "--max-restarts", "100", launcher=True, **bad) == 0, "left to nan_policy"
    rejected = [body for body in seen(tmp_path, "bad") if isinstance(body, events.StepRejected)]
    assert [one.step for one in rejected if one.then == "dropped"] == [12]
    attempts = [body for body in seen(tmp_path, "bad") if isinstance(body, events.AttemptStarted)]
    assert 2 <= len(attempts) <= 6
    assert not [body for body in seen(tmp_path, "bad") if isinstance(body, events.StandingChanged)
                and body.standing == "condemned"]  # fmt: skip
