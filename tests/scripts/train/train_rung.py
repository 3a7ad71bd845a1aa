"""A training run of nine steps that saves every third one and leaves `attempt first-step pid` in a log.

bad   step 7 fails, with the same error each time, unless this attempt has come from step 3
gate  step 8 waits until the file `go` exists, unless this attempt has come from a checkpoint
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import holdfast


def main(act: str, log: str) -> None:
    model = nn.Linear(4, 4)
    run = holdfast.Run(run_dir="run", checkpoint_interval=3)
    run.track(model=model)
    first = 0
    for step, batch in run.steps([torch.ones(2, 4)] * 9, until=9):
        if not first:
            first = step
            with Path(log).open("a") as file:
                attempt = json.loads(os.environ["HOLDFAST_LAUNCH"])["attempt"]
                file.write(f"{attempt} {first} {os.getpid()}\n")
        if act == "bad" and step == 7 and first != 4:
            raise ValueError("the loss is not a number")
        if act == "gate" and step == 8 and first == 1:
            Path("waiting").touch()
            deadline = time.monotonic() + 120
            while not Path("go").exists():
                if time.monotonic() > deadline:
                    raise TimeoutError("nobody made go")
                time.sleep(0.02)
        loss = model(batch).square().mean()
        loss.backward()
        with torch.no_grad():  # by hand: torch.optim takes a second to import
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None


if __name__ == "__main__":
    main(*sys.argv[1:3])
