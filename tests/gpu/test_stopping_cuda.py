"""Stopping on request with a device: saved once and resumed exactly; and a kernel that does not end."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.format import manifest as manifests
from holdfast.errors import ExitCode
from kit.harness import REPO, finish, holdfast, job, wait_until

pytestmark = pytest.mark.gpu
SCRIPT = str(REPO / "tests" / "scripts" / "gpu" / "train_cuda.py")
STUCK = """
import pathlib, torch, holdfast
with holdfast.ShutdownHandler(timeout=2.0, stacks="stacks") as stop:
    torch.cuda._sleep(10**14)
    pathlib.Path("waiting").touch()
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("launcher", [False, True])
@pytest.mark.parametrize("background", ["false", "true"])
def test_a_run_on_the_gpu_that_is_asked_to_stop_goes_on_exactly(
    tmp_path: Path, launcher: bool, background: str
) -> None:
    def train(name: str, die_at: int) -> int:
        env = {
            "CUDA_OUT": name,
            "CUDA_RUN": f"run-{name}",
            "CUDA_DIE_AT": str(die_at),
            "CUDA_DIE_BY": "SIGTERM",
            "CUDA_UNTIL": "500",  # a step takes 4 ms, and the agent looks ten times a second
            "HOLDFAST_CHECKPOINT_ASYNC_SAVE": background,
        }
        launch = holdfast("run", "--nproc-per-node", "1", "--run-dir", f"run-{name}", SCRIPT)
        argv = launch if launcher else [sys.executable, SCRIPT]
        return finish(argv, cwd=tmp_path, env=env, timeout=180).code

    assert train("whole", 0) == 0
    assert train("asked", 21) == int(ExitCode.STOPPED)
    newest = sorted((tmp_path / "run-asked" / "checkpoints").glob("step_*"))[-1]
    assert manifests.read(newest)[0].reason == "stop"
    assert train("asked", 21) == 0
    assert (tmp_path / "asked" / "params").read_text() == (tmp_path / "whole" / "params").read_text()


def test_a_kernel_that_does_not_end_is_left_by_the_deadline(tmp_path: Path) -> None:
    with job([sys.executable, "-c", STUCK], cwd=tmp_path) as stuck:
        wait_until((tmp_path / "waiting").exists, 120, "the kernel runs")
        stuck.signal(signal.SIGTERM)
        result = stuck.wait(60)
        assert result.code == int(ExitCode.STOPPED_UNSAVED), result.text
    assert "synchronize" in (tmp_path / "stacks").read_text()
