"""In-process restart on a GPU with NCCL. There is one device, so the world is 1: what several ranks do is
shown with gloo only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kit.harness import REPO

pytestmark = pytest.mark.gpu
SCRIPT = REPO / "tests" / "scripts" / "gpu" / "restart_cuda.py"
LIMIT = 120


def run(place: Path, wrong: str) -> subprocess.CompletedProcess[str]:
    place.mkdir()
    command = [sys.executable, str(SCRIPT), str(place / "run"), wrong]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=place, check=False)


def test_an_exception_restarts_the_function_in_the_same_process_and_nothing_of_it_shows(
    tmp_path: Path,
) -> None:
    plain, restarted = run(tmp_path / "plain", "nothing"), run(tmp_path / "restarted", "exception")
    assert plain.returncode == restarted.returncode == 0, restarted.stderr
    assert restarted.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1], "bitwise the same loss"
    calls = [line.split()[1:] for line in restarted.stdout.splitlines() if line.startswith("call")]
    assert len({pid for _, pid, *_ in calls}) == 1
    again, once_more = (next(call for call in calls if call[0] == number) for number in ("1", "2"))
    assert [again[2], once_more[2]] == ["5", "7"], "each goes on from the newest checkpoint"
    assert int(once_more[4]) <= int(again[4]), "what a call held on the device is given back"
    print(f"from the fault to a step again: {again[3]} s, {once_more[3]} s; held {again[4]}, {once_more[4]}")


def test_a_device_that_computes_no_more_is_not_used_again(tmp_path: Path) -> None:
    ended = run(tmp_path / "assert", "assert")
    assert ended.returncode == 1, ended.stderr
    assert "health check failed" in ended.stderr
    assert "call 1" not in ended.stdout
