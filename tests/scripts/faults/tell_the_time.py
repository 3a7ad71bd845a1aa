"""Trains on two ranks and writes down when each part of its start was over, by its own clock."""

import os
import time
from pathlib import Path

began = time.time()
import torch  # noqa: E402 - when that is over is what this is about

torch_there = time.time()
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import holdfast  # noqa: E402

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
time.sleep(0.7)  # stands for building a model
holdfast.Run  # noqa: B018 - imports it
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = holdfast.Run(checkpoint_interval=5)
run.track(model=model, optimizer=optimizer)


class Batches(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            time.sleep(0.3)  # the first batch is slow, each time that the data is gone through again
        return torch.full((8,), index % 7 / 7)


loader = torch.utils.data.DataLoader(Batches(), batch_size=1)
ready = time.time()
for step, batch in run.steps(loader, until=40):
    drawn = time.time()
    if ready:
        time.sleep(0.2)  # stands for what only a first step does
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.record(loss=loss)
    if ready:
        moments = {
            "began": began,
            "import": torch_there,
            "setup": ready,
            "data": drawn,
            "first step": time.time(),
        }
        Path(f"moments-{attempt}-{rank}").write_text(repr(moments))
        ready = 0.0
    Path(f"steps-{attempt}-{rank}").write_text(f"{step} {os.getpid()}")
    time.sleep(0.05)
