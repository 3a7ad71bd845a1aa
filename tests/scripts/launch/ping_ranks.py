"""One rank of a group that pings: `ping_ranks.py RANK WORLD PORT DIRECTORY PINGS TIMEOUT [STOP_BEFORE]`.

Leaves `rank_<r>.<n>` after each ping, and `rank_<r>.json` at its end. From ping STOP_BEFORE on it waits for
the file `go` before it pings, so that a test can do something to its peers first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import PingFailedError


def main() -> int:
    rank, world, port, folder, pings, timeout = sys.argv[1:7]
    stop_before = int(sys.argv[7]) if len(sys.argv) > 7 else 0
    host = os.environ.get("PING_STORE_HOST", "0")  # the rank that hosts the store; "none": somebody else
    store = dist.TCPStore(
        "127.0.0.1",
        int(port),
        is_master=rank == host,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world), timeout=limit)
    ping = holdfast.LivenessPing(timeout=float(timeout))
    out = Path(folder)
    took: list[float] = []
    for number in range(1, int(pings) + 1):
        (out / f"rank_{rank}.{number}.before").touch()
        deadline = time.monotonic() + 60
        while stop_before and number >= stop_before and not (out / "go").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        began = time.monotonic()
        try:
            took.append(ping().seconds)
        except PingFailedError as error:
            said = {"missing": list(error.missing), "text": str(error), "seconds": time.monotonic() - began}
            (out / f"rank_{rank}.json.tmp").write_text(json.dumps(said))
            os.rename(out / f"rank_{rank}.json.tmp", out / f"rank_{rank}.json")
            # Training's own group must still be usable by those who are left, so its threads are alive.
            assert bool(torch.ones(1).item())
            os._exit(int(error.exit_code))
    ping.close()
    # The training group was never touched by the pings.
    one = torch.ones(1)
    dist.all_reduce(one)
    (out / f"rank_{rank}.json.tmp").write_text(json.dumps({"took": took, "sum": float(one.item())}))
    os.rename(out / f"rank_{rank}.json.tmp", out / f"rank_{rank}.json")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
