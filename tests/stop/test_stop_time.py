"""How long a stop takes, from the signal to the end of the last process."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from holdfast.drill.faults import kill_rank, training
from holdfast.errors import ExitCode
from holdfast.journal.events import StepsDone, StopSaved
from kit.nodes.slurm_runs import EXAMPLE, arguments

BOUND = 5.0
"""Seconds beside the save itself."""


@pytest.mark.drill
@pytest.mark.parametrize("whom", ["agent", "rank"])
def test_two_ranks_of_the_example_have_ended_five_seconds_after_the_signal_and_the_save(
    tmp_path: Path, whom: str
) -> None:
    """A drill because only a machine that does nothing else can keep to seconds."""
    with training(
        EXAMPLE, tmp_path / "run", tmp_path / "log", ranks=2, settings=["journal.step_flush=0.1"],
        arguments=arguments(100_000),
    ) as run:  # fmt: skip
        run.follow(
            lambda: any(isinstance(line.body, StepsDone) and line.body.first > 20 for line in run.lines),
            lambda line: None, timeout=120, quiet=60, what="the first steps",
        )  # fmt: skip
        begun = time.monotonic()
        if whom == "rank":
            kill_rank(run.lines, 1, signal.SIGTERM)
        else:
            run.process.send_signal(signal.SIGTERM)
        run.process.wait(60)
        took = time.monotonic() - begun
        run.poll()
    assert run.process.returncode == ExitCode.STOPPED
    [saved] = [line.body for line in run.lines if isinstance(line.body, StopSaved)]
    print(f"signal to the {whom}: {took:.2f} s to the end, of which the save {saved.seconds:.2f} s")
    assert took < BOUND + saved.seconds
