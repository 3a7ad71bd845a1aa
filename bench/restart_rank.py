"""One rank of the benchmarks of the launcher: meets its peer, says when, and dies once.

Argument: a file to write to. Every line is what was reached, the attempt (counted from 0), the rank and the
time. Rank 1 of attempt 0 kills itself.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

log = Path(sys.argv[1])
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])


def say(what: str) -> None:
    with log.open("a") as file:
        file.write(f"{what} {attempt} {rank} {time.time()}\n")


dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert int(total) == int(os.environ["WORLD_SIZE"])
say("together")
if attempt == 0:
    time.sleep(0.5)  # the launch is over, and its traces are gone
    if rank == 1:
        say("crash")
        os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)  # rank 0 of attempt 0 loses its peer here
dist.destroy_process_group()
