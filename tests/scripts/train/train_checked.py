"""The training of tests/kit/ranks/validated.py as a script, for whole runs under `holdfast run`.

Settings come from the environment.
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

torch.set_num_threads(1)

from kit.ranks.validated import Training, train_rank  # noqa: E402

if __name__ == "__main__":
    out = Path(os.environ["CHECKED_OUT"]) / uuid.uuid4().hex[:8]
    out.mkdir(parents=True)
    world = int(os.environ["WORLD_SIZE"])
    wrap = "ddp" if world > 1 else "none"
    train_rank(Path("run"), out, Training(wrap, until=5), int(os.environ["RANK"]), world, store="env://")
