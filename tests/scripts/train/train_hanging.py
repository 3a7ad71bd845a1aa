"""Two ranks that train a little together; in the first attempt one of them stops at a given place.

step           in the middle of a step, while the other waits for it in an all-reduce
setup          before the loop
checkpointing  in a save
outside        between two steps
sleep          in a step, but awake: it can still be asked
slow           in its first step, after what it does together with the other; it goes on after a while
after          after its loop, in no section
export         after its loop, in a section with a limit
unheard        in the second attempt, before it has said hello; the first one fails
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.record.launches import LaunchInfo

SLOW = 3.5

place, log = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])
launched = LaunchInfo.from_environment(os.environ)
if place == "unheard" and rank == 1 and launched is not None and launched.attempt == 2:
    log.with_suffix(".hung").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
run = holdfast.Run()
first = run._session.launched is not None and run._session.launched.attempt == 1


def hang(here: str) -> None:
    if first and rank == 1 and here == place:
        log.with_suffix(".hung").write_text(str(os.getpid()))
        if place in ("sleep", "slow"):
            time.sleep(SLOW if place == "slow" else 600)
            return
        os.kill(os.getpid(), signal.SIGSTOP)


class Slow:
    """Something tracked whose state takes long to give, for once."""

    def state_dict(self) -> dict[str, int]:
        if run.step >= 4:
            hang("checkpointing")
        return {"one": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


dist.init_process_group("gloo", timeout=timedelta(seconds=120))
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer, slow=Slow())
hang("setup")
for step, _ in run.steps(range(1000), until=8):
    if step == 4:
        hang("step")
        hang("sleep")
    loss = model(torch.ones(4)).sum()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    run.record(loss=loss.detach())
    if step == 1:
        hang("slow")
    if step == 2 and place == "unheard" and first and rank == 1:
        raise RuntimeError("a fault of the first attempt")
    if step == 5:
        hang("outside")
hang("after")
with run.section("export"):
    hang("export")
with log.open("a") as file:
    file.write(f"{rank} {float(model.weight.sum())}\n")
dist.destroy_process_group()
