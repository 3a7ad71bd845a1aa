"""Two gloo ranks with a Run; in the first attempt rank 1 is killed while rank 0 waits for it.

`--in-the-way`: rank 0 first puts a file where tracebacks would go. `--group-first`: the group is made before
the Run, so that torch's hook for uncaught exceptions is the inner one.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.record.launches import LaunchInfo


def main() -> None:
    info = LaunchInfo.from_environment(os.environ)
    assert info is not None
    if "--group-first" in sys.argv:
        dist.init_process_group("gloo")
    run = holdfast.Run(run_dir="run")
    if "--group-first" not in sys.argv:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0 and "--in-the-way" in sys.argv:
        Path(info.run_dir, "attempts", f"{info.attempt:06d}", "errors").touch()
    dist.barrier()
    if info.attempt == 1 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    run.close()


if __name__ == "__main__":
    main()
