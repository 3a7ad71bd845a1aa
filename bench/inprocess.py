"""From a fault to the first step again, in the same script: in place, by `holdfast run`, and by torchrun."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

CHILD_DEADLINE = 300.0
FLAGS = ["--nproc-per-node", "2", "--max-restarts", "1"]


@functools.cache
def restarts(work: Path, repeat: int) -> dict[str, list[float]]:
    """Seconds from the fault of one of two ranks until both have made a step again, in turns."""
    # A directory of its own each time: to a run that had the same fault before, it would be the same again.
    ours = [sys.executable, "-m", "holdfast", "run", *FLAGS, "--run-dir", str(work / "restarted")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *FLAGS]
    commands = {"in place": (ours, "in_place"), "in job": (ours, "in_job"), "torchrun": (torchrun, "in_job")}
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(repeat + 1):
        for name, (command, how) in commands.items():
            sample = _measure(work, command, how)
            if turn:  # the first of each warms the caches
                found[name].append(sample)
    return found


def _measure(work: Path, command: list[str], how: str) -> float:
    log, output = work / "inprocess.log", work / "inprocess.out"
    script = str(Path(__file__).with_name("inprocess_rank.py"))
    # Without the variable torchrun's own restart fails: new ranks read the addresses of dead ones.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    if how == "in_place":
        environment["HOLDFAST_INPROCESS_ENABLED"] = "true"
    deadline = time.time() + CHILD_DEADLINE
    try:
        with output.open("wb") as file:
            subprocess.run(
                [*command, script, str(log), how],
                env=environment,
                stdout=file,
                stderr=file,
                timeout=max(1.0, deadline - time.time()),
            )
        lines = [line.split() for line in log.read_text().splitlines()]
        fault = next(float(at) for what, _, _, at in lines if what == "fault")
        again = [float(at) for what, life, _, at in lines if (what, life) == ("stepped", "1")]
        if len(again) != 2:
            raise RuntimeError(f"{command[2]} did not start both ranks again:\n{output.read_text()}")
        return max(again) - fault
    finally:
        log.unlink(missing_ok=True)
        shutil.rmtree(work / "restarted", ignore_errors=True)
