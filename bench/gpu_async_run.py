"""Asynchronous saves of a whole Run on a CUDA device: what they cost training, how soon they are committed.

`python bench/gpu_async_run.py --dir /dev/shm`. The workload is 72 linear layers of 4096 x 4096 with AdamW,
about 14.5 GB of state. For each way to take a snapshot: steps with a save among them against steps without,
and the time from the call to the commit. One line of JSON for each, as it is measured.

Before that, a line about the first save of the run, which is the first of the process for the first way: how
long `run.start()` took (`start`); the time from the first step until staging memory was page-locked and all
else was ready (`ready_after`), with the median and the longest step meanwhile and the steps after it
(`step_beside`, `longest_beside`, `step`); what the first save delayed training by (`first_delay`), of which
the proof that it would resume took `proof`, and its time to the commit, and to the local copy. With
`--early N` the first save is called for after N steps instead, whatever is ready by then.

With `--local DIR` (in memory: `/dev/shm`) the same with a local tier there: `local_after` is then the time
from the call to a committed local copy, every digest taken and every fingerprint checked, and
`committed_after` the one to the commit of its drained copy in the checkpoint root. A save is called for while
the device still works on the step before, which the copy has to wait for; `idle_local_after` is the same save
called for when the device has nothing left to do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.checkpoint.save import snapshot
from holdfast.journal.events import DecisionMade, SaveCommitted
from holdfast.journal.reader import read_journal

READY = 180.0
"""Seconds within which staging memory is there."""


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def build(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def measure(way: str, where: Path, model: nn.Module, optimizer: torch.optim.Optimizer, args: Any) -> None:
    run = holdfast.Run(
        run_dir=str(where / way),
        checkpoint_interval=0,
        checkpoint_save_at_end=False,
        checkpoint_async_save=True,
        checkpoint_when_busy="wait",
        checkpoint_snapshot=way,
        checkpoint_keep_last=2,
        journal_step_flush=1000.0,
        **(tier_settings(args.local) if args.local else {}),
    )
    run.track(model=model, optimizer=optimizer)
    started = time.perf_counter()
    run.start()
    start = time.perf_counter() - started
    batch = torch.randn(args.batch, args.width, device="cuda")

    def step() -> None:
        run.begin_step()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.end_step()

    def steps(count: int, *, save: bool) -> tuple[float, float]:
        """Seconds of so many steps with the device idle before and after; and those the call of save took."""
        torch.cuda.synchronize()
        started, call = time.perf_counter(), 0.0
        for number in range(count):
            step()
            if save and number == 0:
                called = time.perf_counter()
                save_now()
                call = time.perf_counter() - called
        torch.cuda.synchronize()
        return time.perf_counter() - started, call

    def save_now() -> None:
        if args.local:  # to the local tier alone, as its own interval has it done
            run._session.saving.scheduled_locally()
        else:
            run.save(wait=False)

    def told(tier: str) -> list[SaveCommitted]:
        lines = read_journal(where / way / "journal")
        return [
            line.body for line in lines if isinstance(line.body, SaveCommitted) and line.body.tier == tier
        ]

    def idle_save() -> float:
        step()
        torch.cuda.synchronize()
        save_now()
        run.wait_for_saves()
        return told("local")[-1].seconds

    beside: list[float] = []
    began = time.perf_counter()
    while not run._session.saving.ready if not args.early else len(beside) < args.early:
        one, _ = steps(1, save=False)
        beside.append(one)
        if time.perf_counter() - began > READY:
            raise RuntimeError(f"staging memory was not there after {READY:g} s")
    ready_after = time.perf_counter() - began
    without, _ = steps(args.steps, save=False) if not args.early else (args.steps * min(beside), 0.0)
    with timed_proof() as proof:
        with_save, first_call = steps(args.steps, save=True)
    run.wait_for_saves()
    first, first_local = told("global"), told("local")
    chosen = [line.body for line in read_journal(where / way / "journal")]
    say(
        way=way,
        start=round(start, 2),
        ready_after=None if args.early else round(ready_after, 2),
        step_beside=round(statistics.median(beside), 4),
        longest_beside=round(max(beside[1:], default=0.0), 4),
        step=round(without / args.steps, 4),
        first_delay=round(with_save - without, 4),
        first_call=round(first_call, 4),
        proof=round(sum(proof), 4),
        first_committed_after=round(first[-1].seconds, 3) if first else None,
        first_local_after=round(first_local[-1].seconds, 3) if first_local else None,
        early=[
            [one.chosen, *one.evidence]
            for one in chosen
            if isinstance(one, DecisionMade) and one.about == "staging"
        ],
    )
    if not first:
        run.save()  # once to the root, for what is told of it below
    for _ in range(args.warm):  # every slot of the local tier is in use, and locked, after some saves
        step()
        save_now()
        run.wait_for_saves()
    for _ in range(args.repeat):
        without, _ = steps(args.steps, save=False)
        with_save, call = steps(args.steps, save=True)
        run.wait_for_saves()
        one = without / args.steps
        committed, local = told("global")[-1], told("local")
        after = {"local_after": round(local[-1].seconds, 3)} if local else {}
        if args.local:
            after["idle_local_after"] = round(idle_save(), 3)
        say(
            way=way,
            step=round(one, 4),
            delay=round(with_save - without, 4),
            delay_of_step=round((with_save - without) / one, 4),
            in_flight_ratio=round(with_save / without, 4),
            call=round(call, 4),
            committed_after=round(committed.seconds, 3),
            **after,
            bytes=committed.bytes,
        )
    run.close()


@contextlib.contextmanager
def timed_proof() -> Iterator[list[float]]:
    """The seconds of each proof that is made meanwhile."""
    original, taken = snapshot.prove, []

    def prove(subject: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(subject)
        finally:
            taken.append(time.perf_counter() - started)

    snapshot.prove = prove
    try:
        yield taken
    finally:
        snapshot.prove = original


def tier_settings(directory: str) -> dict[str, Any]:
    return {
        "checkpoint_non_persistent_ckpt_type": "local",
        "checkpoint_non_persistent_local_ckpt_dir": directory,
    }


def pinned_copy(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of the bare copy of all state into page-locked memory, one tensor's worth of it reused."""
    tensors: list[torch.Tensor] = list(model.parameters())
    tensors += [t for state in optimizer.state.values() for t in state.values() if t.is_cuda]
    target = torch.empty(max(t.nbytes for t in tensors), dtype=torch.uint8, pin_memory=True)
    best = 1e9
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for tensor in tensors:
            raw = tensor.detach().reshape(-1).view(torch.uint8)
            target[: raw.numel()].copy_(raw, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=72)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=3072)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--ways", default="clone,overlap,block")
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--local", default="", help="directory of a local tier")
    parser.add_argument("--early", type=int, default=0, help="steps before the first save, ready or not")
    parser.add_argument("--warm", type=int, default=0, help="saves before the first that is measured")
    args = parser.parse_args()
    model, optimizer = build(args.layers, args.width)
    model(torch.randn(8, args.width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    say(pinned_copy=round(pinned_copy(model, optimizer), 4))
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-", dir=args.dir) as work:
        for way in args.ways.split(","):
            try:
                measure(way, Path(work), model, optimizer, args)
            except Exception as error:  # noqa: BLE001 - the next way is measured all the same
                say(way=way, error=f"{type(error).__name__}: {error}"[:2000])
            shutil.rmtree(Path(work) / way, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
