"""Each rank trains a weight of its own under one name. The first attempt goes on until it is ended from
outside, once it has said `saved`; the second makes two more steps."""

import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast

SAVED, LONG = 3, 60.0


def main(log: str) -> None:
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), json.loads(os.environ["HOLDFAST_LAUNCH"])["attempt"]
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(100.0 * (rank + 1))
    run = holdfast.Run(checkpoint_interval=SAVED)
    run.track(model=model)
    begun = run.start()
    with Path(log).open("a") as file:
        file.write(f"{attempt} {rank} {dist.get_world_size()} {begun} {model.weight[0, 0].item():g}\n")
    until = SAVED if attempt == 1 else begun + 2
    while run.step < until:
        run.begin_step()
        with torch.no_grad():
            model.weight += 1
        run.end_step()
    if attempt == 1:
        with Path(log).open("a") as file:
            file.write(f"saved {rank}\n")
        threading.Event().wait(LONG)  # the test ends it before
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2])
