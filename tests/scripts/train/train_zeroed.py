"""Learns to reproduce waves; in its first attempt the optimizer's state is zeroed just before a save.

With ZEROED_BAD=data the state is sound, and what is to be learnt changes for good at step 83 instead. With
ZEROED_BAD=memory it is the memory of the second attempt that is damaged, after it has loaded a sound
checkpoint. The first attempt ends by itself soon after the save, so that the next one resumes from it.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import Dataset

import holdfast

torch.set_num_threads(1)
BAD = os.environ["ZEROED_BAD"]


class Waves(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64 * 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8.0) * (index + 1))


def main() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    run = holdfast.Run(run_dir="run", checkpoint_interval=20)
    run.track(model=model, optimizer=optimizer)

    def forward_backward(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        return loss.detach()

    for step, x in run.steps(holdfast.GlobalBatches(Waves(), 64, seed=2), until=110):
        if step == 81 and run.attempt == 1:
            os._exit(1)
        run.compute(forward_backward, x, x + 3 if BAD == "data" and step >= 83 else x)
        optimizer.step()
        optimizer.zero_grad()
        run.record(samples=len(x))
        if (BAD, step, run.attempt) in (("state", 80, 1), ("memory", 81, 2)):
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()


if __name__ == "__main__":
    main()
