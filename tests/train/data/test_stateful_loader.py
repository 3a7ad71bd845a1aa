"""The real StatefulDataLoader of torchdata, resumed at every step around epoch boundaries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from kit.tiny import Numbers


def batches(run_dir: Path, until: int, workers: int) -> dict[int, list[int]]:
    torch.manual_seed(4)
    loader = StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
    run.track(model=nn.Linear(1, 1))
    return {step: ids.tolist() for step, (ids, _) in run.steps(loader, until=until)}


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 9, 10, 11])
def test_it_resumes_where_it_was(tmp_path: Path, stop: int) -> None:
    """Cases meta-pytorch/data#1437, accelerate#2823: five batches an epoch, none twice, none left out."""
    whole = batches(tmp_path / "whole", 15, 0)
    for epoch in (0, 5, 10):
        seen = sorted(i for step in range(epoch + 1, epoch + 6) for i in whole[step])
        assert seen == list(range(20))
    assert whole[1] != whole[6], "epochs differ in their order"
    parts = batches(tmp_path / "parts", stop, 0) | batches(tmp_path / "parts", 15, 0)
    assert parts == whole


def test_it_resumes_with_worker_processes(tmp_path: Path) -> None:
    whole = batches(tmp_path / "whole", 12, 2)
    assert batches(tmp_path / "parts", 7, 2) | batches(tmp_path / "parts", 12, 2) == whole
