"""Many saves in one process leave nothing behind: no descriptors, threads, files, and no growing memory."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import torch
from torch import nn

import holdfast
from kit.tiny import checkpoints


def test_nothing_grows_over_200_saves(tmp_path: Path) -> None:
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=1, checkpoint_save_at_end=False)
    model = nn.Linear(256, 256)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    seen: dict[int, tuple[int, int, int]] = {}
    for step, _ in run.steps([1, 2, 3], until=201):
        if step in (20, 200):
            kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seen[step] = (len(os.listdir("/proc/self/fd")), threading.active_count(), kept)
    line = run._saving is not None and run._saving._read_back is not None  # to the process that reads back
    assert seen[200][0] - seen[20][0] in (0, int(line)), "descriptors"
    assert seen[200][1] == seen[20][1], "threads"
    assert seen[200][2] - seen[20][2] < 20_000, "kilobytes of memory"
    assert len(checkpoints(tmp_path / "run")) == 200
    assert not list((tmp_path / "run" / "checkpoints" / ".staging").iterdir())
