"""One GPU, world 1: save, kill -9, resume, bitwise equal; and what a CUDA checkpoint must hold."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint.format.structure import verify
from kit.harness import REPO, finish, holdfast

pytestmark = pytest.mark.gpu
SCRIPT = str(REPO / "tests" / "scripts" / "gpu" / "train_cuda.py")


def record(out: Path) -> dict[str, str]:
    found = {"params": (out / "params").read_text()}
    for path in sorted(out.glob("*.log"), key=lambda p: p.stat().st_mtime):
        for line in path.read_text().splitlines():
            step, rest = line.split(" ", 1)
            assert found.get(step, rest) == rest, f"step {step} was done twice, differently"
            found[step] = rest
    return found


def train(directory: Path, name: str, *, launcher: bool, die_at: int = 0, **settings: str) -> int:
    env = {"CUDA_OUT": name, "CUDA_RUN": f"run-{name}", "CUDA_DIE_AT": str(die_at)}
    env |= {f"HOLDFAST_CHECKPOINT_{key.upper()}": value for key, value in settings.items()}
    argv = (
        holdfast("run", "--nproc-per-node", "1", "--run-dir", f"run-{name}", SCRIPT)
        if launcher
        else [sys.executable, SCRIPT]
    )
    result = finish(argv, cwd=directory, env=env, timeout=180)
    if result.code not in (0, -9):
        print(result.text)
    return result.code


def test_a_killed_run_on_the_gpu_resumes_bitwise_equal(tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    assert train(tmp_path, "whole", launcher=False) == 0
    whole = record(tmp_path / "whole")
    scales = {rest.split()[1] for key, rest in whole.items() if key != "params"}
    assert len(scales) > 2, "the scaler skipped and grew, or this shows little"

    assert train(tmp_path, "plain", launcher=False, die_at=21) == -9
    assert train(tmp_path, "plain", launcher=False, die_at=21) == 0
    assert record(tmp_path / "plain") == whole

    assert train(tmp_path, "launched", launcher=True, die_at=30) == 0
    assert record(tmp_path / "launched") == whole
    assert (tmp_path / "launched" / "died").exists()

    newest = sorted((tmp_path / "run-plain" / "checkpoints").glob("step_*"))[-1]
    assert verify(newest).sound
    state = {"model": {"0.weight": torch.zeros(256, 64, device="cuda")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=newest, no_dist=True)
    assert state["model"]["0.weight"].abs().sum() > 0


def test_asynchronous_saves_on_the_gpu_resume_bitwise_equal(tmp_path: Path) -> None:
    """Scenario 29 too: what was staged when the trainer died is committed by its writer."""
    assert train(tmp_path, "whole", launcher=False) == 0
    whole = record(tmp_path / "whole")
    for way in ("clone", "overlap", "block"):
        chosen = {"async_save": "true", "snapshot": way, "handover_timeout": "60"}
        assert train(tmp_path, way, launcher=False, die_at=21, **chosen) == -9
        assert train(tmp_path, way, launcher=False, die_at=21, **chosen) == 0
        assert record(tmp_path / way) == whole, way
        for path in (tmp_path / f"run-{way}" / "checkpoints").glob("step_*"):
            assert verify(path).sound, (way, path)


def test_the_example_trains_and_resumes_on_the_gpu(tmp_path: Path) -> None:
    example = str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py")
    flags = ["--device", "cuda", "--steps"]
    run = holdfast(
        "run", "--nproc-per-node", "1", "--run-dir", "run", "--set", "checkpoint.interval=10", example
    )
    first = finish([*run, *flags, "20"], cwd=tmp_path, timeout=180)
    assert first.code == 0, first.text
    second = finish([*run, *flags, "30"], cwd=tmp_path, timeout=180)
    assert second.code == 0, second.text
    assert [p.name[:13] for p in sorted((tmp_path / "run" / "checkpoints").glob("step_*"))] == [
        "step_00000010",
        "step_00000020",
        "step_00000030",
    ]
