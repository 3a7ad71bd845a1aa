"""What a save costs the loop in all: the call, and the steps after it until the copy is over.

`steps_after_save.py [--size MIB] [--ranks N] [--compute SECONDS] [--steps K] [--repeat R] [--dir D]`. Each
rank holds `--size` MiB of parameters and AdamW state. A step computes for about `--compute` seconds and then
changes all of it. For K steps without a save, after one of ours, and after one by dcp.async_save, taking
turns, it prints a line of JSON: medians of the call, of all K steps with the call, of what that is more than
without a save, and of the longest step; of the slower rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from async_rank import Sharded, slowest
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

import holdfast

WAYS = ("none", "ours", "dcp")
WARM = 2


class Loop:
    """A training on one rank that changes all of its state in every step."""

    def __init__(self, size_mib: int, rank: int, world: int, compute: float) -> None:
        self.model = Sharded(max(48, size_mib) // 3, rank, world)
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
            local = torch.full_like(parameter.to_local(), 1e-3)  # type: ignore[attr-defined]
            parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._a = torch.randn(384, 384)
        self._rounds = 0
        if compute > 0:
            started = time.perf_counter()
            for _ in range(50):
                self._a @ self._a
            self._rounds = max(1, int(compute / ((time.perf_counter() - started) / 50)))

    def step(self) -> float:
        started = time.perf_counter()
        for _ in range(self._rounds):
            self._a @ self._a
        self.optimizer.step()
        return time.perf_counter() - started


def rank_main(arguments: argparse.Namespace) -> None:
    rank, world = arguments.rank, arguments.ranks
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{arguments.port}", rank=rank, world_size=world
    )
    loop = Loop(arguments.size, rank, world, arguments.compute)
    loop.step()
    directory = Path(arguments.dir)
    run = holdfast.Run(
        run_dir=str(directory / "run"),
        checkpoint_interval=0,
        checkpoint_save_at_end=False,
        checkpoint_async_save=True,
        checkpoint_keep_last=2,
    )
    run.track(model=loop.model, optimizer=loop.optimizer)
    run.start()
    group = dist.new_group(backend="gloo")
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for turn in range(arguments.repeat + WARM):
        for way in WAYS:
            pending = None
            target = directory / "dcp"
            if rank == 0:
                os.sync()
            dist.barrier()
            started = time.perf_counter()
            if way == "ours":
                run.save(wait=False)
            elif way == "dcp":
                model, optimizer = get_state_dict(loop.model, loop.optimizer)
                state = {"model": model, "optimizer": optimizer}
                pending = dcp.async_save(state, checkpoint_id=target, process_group=group)
            call = time.perf_counter() - started
            longest = max(loop.step() for _ in range(arguments.steps))
            whole = time.perf_counter() - started
            run.wait_for_saves()
            if pending is not None:
                pending.result()
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(target)
            sample = slowest(call), slowest(whole), slowest(longest)
            if turn >= WARM:
                found[way].append(sample)
    run.close()
    dist.destroy_process_group()
    if rank == 0:
        medians = {
            way: [statistics.median(column) for column in zip(*found[way], strict=True)] for way in WAYS
        }
        plain = medians["none"][1]
        for way, (call, whole, longest) in medians.items():
            told = {"way": way, "call": call, "steps": whole, "more": whole - plain, "longest": longest}
            print(
                json.dumps(
                    {key: value if isinstance(value, str) else round(value, 4) for key, value in told.items()}
                )
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compute", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dir")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank >= 0:
        rank_main(arguments)
        return
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=arguments.dir) as work,
        socket.socket() as probe,
    ):
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [sys.executable, __file__, *sys.argv[1:], "--port", str(port), "--dir", work]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(arguments.ranks)]
        try:
            codes = [rank.wait(900) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
