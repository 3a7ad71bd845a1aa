"""Trains a little, for runs that are killed and recovered. RECOVERED_CHANGED makes a resume go wrong.

At step RECOVERED_GATE it waits until the file RECOVERED_GO exists, having made RECOVERED_GO.waiting.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast

torch.set_num_threads(1)
GATE = int(os.environ.get("RECOVERED_GATE", "0"))
GO = Path(os.environ.get("RECOVERED_GO", "go"))
CHANGED = os.environ.get("RECOVERED_CHANGED", "")


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(6, generator=torch.Generator().manual_seed(index))


def main() -> None:
    torch.manual_seed(3)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    run = holdfast.Run()
    run.track(model=model, optimizer=optimizer)
    for step, (ids, x) in run.steps(loader, until=24):
        if step == GATE:
            Path(f"{GO}.waiting").touch()
            deadline = time.monotonic() + 60
            while not GO.exists():
                assert time.monotonic() < deadline, "nobody opened the gate"
                time.sleep(0.01)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "samples" in CHANGED:
            ids = ids + 1
        run.record(loss=loss * (3 if "loss" in CHANGED else 1), samples=ids, tokens=x.numel())


if __name__ == "__main__":
    sys.exit(main())
