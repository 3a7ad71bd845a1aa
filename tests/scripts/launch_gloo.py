"""Meets its peers with gloo, then does what `--fail` says until attempt `--until` is reached.

Writes one line per rank and attempt to `--log`: attempt, rank, sum over ranks, restart count.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from holdfast.launch.handover import LaunchInfo


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--fail", default="none", choices=["none", "kill", "raise", "hang"])
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--until", type=int, default=99)
    args = parser.parse_args()
    info = LaunchInfo.from_environment(os.environ)
    assert info is not None
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    rank = dist.get_rank()
    line = f"{info.attempt} {rank} {int(total)} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()}\n"
    with args.log.open("a") as file:
        file.write(line)
    if args.fail == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        args.log.with_name(f"ready_{rank}").touch()
        time.sleep(600)
    dist.barrier()
    if info.attempt < args.until and rank == args.rank:
        if args.fail == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.fail == "raise":
            raise ValueError(f"bad sample in attempt {info.attempt if args.until < 99 else 'any'}")
    dist.barrier()  # peers of a dead rank fail here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
