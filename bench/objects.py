"""State of an object that is not torch's: how long an asynchronous save of it holds training up.

Prints JSON: for every turn the seconds of `Run.save(wait=False)`, and those of `torch.save` into memory,
which is the least that pickling such a state takes.

    python bench/objects.py DIRECTORY MIB REPEAT
"""

from __future__ import annotations

import io
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast

WARM = 3
"""Saves that are not counted: the first is proven, two are for the staging buffers."""


class FlatState:
    """As an optimizer with flat buffers has it: a few large tensors in nested containers."""

    def __init__(self, size_mib: int) -> None:
        each = size_mib * 256 * 1024 // 4
        self.buffers = [{"moment": torch.rand(each), "square": torch.rand(each)} for _ in range(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"buffers": self.buffers, "step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, read in zip(self.buffers, state["buffers"], strict=True):
            for key, value in mine.items():
                value.copy_(read[key])


def main(directory: Path, size_mib: int, repeat: int) -> None:
    warnings.filterwarnings("ignore")
    state = FlatState(size_mib)
    run = holdfast.Run(
        run_dir=str(directory / "run"),
        checkpoint_interval=0,
        checkpoint_save_at_end=False,
        checkpoint_async_save=True,
        checkpoint_keep_last=2,
    )
    run.track(model=nn.Linear(1, 1), state=state)
    run.start()

    def ours() -> float:
        run.wait_for_saves()
        started = time.perf_counter()
        run.save(wait=False)
        return time.perf_counter() - started

    def pickled() -> float:
        run.wait_for_saves()
        started = time.perf_counter()
        torch.save(state.state_dict(), io.BytesIO())
        return time.perf_counter() - started

    found: dict[str, list[float]] = {"ours": [], "pickled": []}
    for turn in range(WARM + repeat):
        pairs = [("ours", ours), ("pickled", pickled)]
        for name, measure in pairs if turn % 2 else reversed(pairs):
            seconds = measure()
            if turn >= WARM:
                found[name].append(seconds)
    run.wait_for_saves()
    run.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
