"""Meets its peers with gloo; then, in each attempt, rank `--rank` does the next of the acts in `--fail`.

An act is `kill` or `raise`; after the last act the run finishes. Each rank and attempt writes one line to
`--log`: attempt, rank, sum over ranks, restart count.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from holdfast.record.launches import LaunchInfo


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--fail", required=True)
    parser.add_argument("--rank", type=int, required=True)
    args = parser.parse_args()
    info = LaunchInfo.from_environment(os.environ)
    assert info is not None
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    rank = dist.get_rank()
    with args.log.open("a") as file:
        file.write(f"{info.attempt} {rank} {int(total)} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
    dist.barrier()
    act = dict(enumerate(args.fail.split(","), start=1)).get(info.attempt)
    if rank == args.rank and act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == args.rank and act == "raise":
        raise ValueError("bad sample")
    dist.barrier()  # peers of a dead rank fail here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
