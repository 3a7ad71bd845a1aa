"""A rank under srun without an agent: ends with 31 after SIGUSR1, or with 1 at once if it is told to fail."""

from __future__ import annotations

import os
import signal
import sys
import time

rank = int(os.environ["RANK"])
got: list[int] = []
signal.signal(signal.SIGUSR1, lambda number, _frame: got.append(number))
world, run_dir = os.environ["WORLD_SIZE"], os.environ["HOLDFAST_RUN_DIR"]
where = f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
os.write(1, f"rank {rank} of {world} at {where} in {run_dir}\n".encode())
if os.environ.get("FAILING_RANK") == str(rank):
    sys.exit(1)
deadline = time.monotonic() + 90
while not got and time.monotonic() < deadline:
    time.sleep(0.02)
if rank == 0:
    time.sleep(1.5)  # the last one to end
os.write(1, f"rank {rank} ends\n".encode())
sys.exit(31)
