"""Two ranks that meet nobody within a step, so that only a ping can tell that one of them is gone.

`train_pinged.py SIGNAL`: rank 1 sends it to itself in step 5 of the first attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

import holdfast


def main() -> None:
    dist.init_process_group("gloo")
    attempt = json.loads(os.environ["HOLDFAST_LAUNCH"])["attempt"]
    model = nn.Linear(2, 2)
    run = holdfast.Run(
        run_dir="run",
        checkpoint_interval=0,
        health_nccl_health_check_interval=2,
        health_nccl_health_check_timeout=5.0,
    )
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    for step, _ in run.steps(list(range(8)), until=8):
        if attempt == 1 and step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    assert len(dist.distributed_c10d._world.pg_map) == 1, "the ping's group outlived the run"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
