"""A local save at every step of a whole Run on a CUDA device: what it costs a step, and what a fault would.

`python bench/gpu_every_step.py --local /dev/shm/tier`. The workload is that of `gpu_async_run.py` (72 linear
layers of 4096 x 4096 with AdamW, about 14.5 GB of state) with steps of about 57 and 450 ms, by the size of a
batch. For each, a line of JSON for a fixed interval of one step and one for "auto", against the same steps
without saves, in turn, so that what else goes on in the machine hits all three: the delay per step and its
share; how often it saved; and how many steps lay between the newest committed local copy and the present
step at each step's end, the median and the worst. A SIGKILL would have cost that many, less what the writer
still commits of what was staged.

Targets: a delay of at most 15 ms, and at most 1 % a step. State that takes longer to copy to the host than a
step lasts (14.5 GB takes 0.26 s) cannot be saved at each step of 57 ms: there "auto" has the interval that
this allows. `--layers 8` is a model whose state can be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.journal.events import CadenceChosen, SaveCommitted, SaveSkipped
from holdfast.journal.reader import read_journal

OFF, FIXED, AUTO = "off", "every step", "auto"


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def build(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(device())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Loop:
    """One Run with its model, stepped by hand; every step ends when the device has done it."""

    def __init__(self, how: str, where: Path, args: argparse.Namespace, batch: int) -> None:
        self.directory = where / how.replace(" ", "-")
        self.seconds: list[float] = []
        self.behind: deque[int] = deque(maxlen=args.steps * args.repeat)
        """At each step's end: steps since the newest one that is committed in the local tier."""
        self._model, self._optimizer = build(args.layers, args.width)
        self._batch = torch.randn(batch, args.width, device=device())
        interval = {OFF: 0, FIXED: 1, AUTO: "auto"}[how]
        self.run = holdfast.Run(
            run_dir=str(self.directory),
            checkpoint_interval=0,
            checkpoint_save_at_end=False,
            checkpoint_async_save=True,
            checkpoint_keep_last=2,
            checkpoint_non_persistent_ckpt_type="local",
            checkpoint_non_persistent_local_ckpt_dir=args.local,
            checkpoint_non_persistent_save_interval=interval,
            checkpoint_non_persistent_save_share=args.share,
        )
        self.run.track(model=self._model, optimizer=self._optimizer)
        self.run.start()

    def step(self, *, counts: bool) -> None:
        began = time.perf_counter()
        self.run.begin_step()
        loss = self._model(self._batch).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.run.record(loss=loss)
        self.run.end_step()
        synchronize()
        if counts:
            self.seconds.append(time.perf_counter() - began)
            self.behind.append(self.run.step - self.run._session.saving.committed)

    def facts(self) -> dict[str, Any]:
        events = [line.body for line in read_journal(self.directory / "journal")]
        saves = [one for one in events if isinstance(one, SaveCommitted) and one.tier == "local"]
        chosen = [one for one in events if isinstance(one, CadenceChosen)]
        return {
            "saves": len(saves),
            "blocked": round(statistics.median([one.blocked_seconds for one in saves[2:]] or [0.0]), 4),
            "committed_after": round(statistics.median([one.seconds for one in saves[2:]] or [0.0]), 3),
            "skipped": sum(isinstance(one, SaveSkipped) for one in events),
            "interval": chosen[-1].interval if chosen else None,
            "expected_share": round(chosen[-1].overhead, 4) if chosen else None,
            "behind_median": statistics.median(self.behind),
            "behind_worst": max(self.behind),
        }


def measure(where: Path, args: argparse.Namespace, batch: int) -> None:
    """One after the other, each with a Run of its own: two models of this size do not fit beside a clone."""
    found: dict[str, list[float]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for turn in range(args.repeat):
        for how in (OFF, FIXED, AUTO):
            place = where / str(turn)
            loop = Loop(how, place, args, batch)
            try:
                for _ in range(args.warm):
                    loop.step(counts=False)
                for _ in range(args.steps):
                    loop.step(counts=True)
                loop.run.wait_for_saves()
                found.setdefault(how, []).extend(loop.seconds)
                facts[how] = loop.facts()
            finally:
                loop.run.close()
                del loop
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                shutil.rmtree(place, ignore_errors=True)
    plain = statistics.median(found[OFF])
    mean = statistics.fmean(found[OFF])
    for how in (FIXED, AUTO):
        delay = statistics.median(found[how]) - plain
        say(
            batch=batch,
            how=how,
            step=round(plain, 4),
            delay=round(delay, 5),
            delay_of_step=round(delay / plain, 4),
            mean_delay_of_step=round(statistics.fmean(found[how]) / mean - 1, 4),
            worst_step=round(max(found[how]), 4),
            **facts[how],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=72)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batches", default="384,3072", help="for steps of about 57 and 450 ms on an H200")
    parser.add_argument("--steps", type=int, default=60, help="that are measured, in each turn")
    parser.add_argument("--warm", type=int, default=60, help="before them: until the interval has settled")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--local", required=True, help="directory of a local tier, in memory")
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-every-step-", dir=args.dir) as work:
        for batch in map(int, args.batches.split(",")):
            try:
                measure(Path(work), args, batch)
            except Exception as error:  # noqa: BLE001 - the next size is measured all the same
                say(batch=batch, error=f"{type(error).__name__}: {error}"[:2000])


if __name__ == "__main__":
    sys.exit(main())
