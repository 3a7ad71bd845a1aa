"""A worker whose device reports an error: in the first attempt it writes a line as the driver would into the
file that stands in for the kernel's log, and fails; later it ends well. Arguments: FILE LOG XID."""

import json
import os
import sys
import time
from pathlib import Path


def main(kernel_log: str, log: str, xid: str) -> int:
    attempt = json.loads(os.environ["HOLDFAST_LAUNCH"])["attempt"]
    with Path(log).open("a") as file:
        file.write(f"{attempt} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n")
    if attempt > 1:
        return 0
    stamp = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    with Path(kernel_log).open("a") as file:
        file.write(f"3,900,{stamp},-;NVRM: Xid (PCI:0000:3b:00): {xid}, pid='<unknown>', name=<unknown>\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
