"""Ranks that train together until they are stopped; each appends `step` to <log>.<rank>.<pid> in every step.

STOP_EVERY   steps between two saves (1000)
STOP_UNTIL   the last step (100000)
STOP_WAIT    rank:step: this rank waits in that step, out of any collective, until the file `go` exists, which
             leaves the others in an all-reduce; `setup` for the step: before the loop
STOP_PAUSE   seconds of a step (0.02)
STOP_CATCH   the script ends with 0 after it was stopped
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

RANK = int(os.environ["RANK"])
WHO, _, WHERE = os.environ.get("STOP_WAIT", "").partition(":")
UNTIL = int(os.environ.get("STOP_UNTIL", "100000"))


def wait(here: str) -> None:
    if here != WHERE or WHO not in (str(RANK), "all"):
        return
    Path(f"waiting{RANK}").touch()
    deadline = time.monotonic() + 120
    while not Path("go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody made go")
        time.sleep(0.01)


def main(log: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    model = torch.nn.Linear(4, 4)
    run = holdfast.Run(run_dir="run", checkpoint_interval=int(os.environ.get("STOP_EVERY", "1000")))
    run.track(model=model)
    wait("setup")
    with Path(f"{log}.{RANK}.{os.getpid()}").open("w", buffering=1) as lines:
        run.start()
        while run.step < UNTIL:
            run.begin_step()
            step = run.step + 1
            lines.write(f"{step}\n")
            wait(str(step))
            dist.all_reduce(torch.ones(1))
            with torch.no_grad():
                model.weight += 1.0
            time.sleep(float(os.environ.get("STOP_PAUSE", "0.02")))
            run.end_step(last=step >= UNTIL)
        run.finish()
    Path(f"finished{RANK}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[-1])
    except holdfast.Stopped:
        if "STOP_CATCH" not in os.environ:
            raise
