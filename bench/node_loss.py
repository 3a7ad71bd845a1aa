"""How long a group of nodes stands still when an agent is killed: ours against torch elastic.

Three agents on this machine may form groups of two or three (`--nnodes 2:3`), each with one worker that talks
to the others all the time. When all of them run, the last one's agent and worker are killed with SIGKILL, as
by the loss of their node; the clock runs until every worker of the next group has begun. (An agent that is
killed alone is not noticed by torch at all: its worker lives on.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

WORKER = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
dist.barrier()
words = (time.time(), os.environ["WORLD_SIZE"], os.environ["RANK"], os.getppid(), os.getpid())
with open(sys.argv[1], "a") as log:
    log.write(" ".join(map(str, words)) + "\\n")
value = torch.zeros(1)
while True:
    dist.all_reduce(value)
    time.sleep(0.05)
"""
LIMIT = 180.0


def seen(log: Path, world: int) -> list[list[str]]:
    if not log.exists():
        return []
    return [words for words in map(str.split, log.read_text().splitlines()) if words[1] == str(world)]


def wait_for(log: Path, world: int) -> None:
    deadline = time.monotonic() + LIMIT
    while len(seen(log, world)) < world:
        if time.monotonic() > deadline:
            raise SystemExit(f"{world} workers did not begin within {LIMIT:g} s")
        time.sleep(0.01)


def once(ours: bool, place: Path) -> float:
    """Seconds from the kill until the last worker of the group of two has begun."""
    from torch.distributed import TCPStore

    place.mkdir()
    script, log = place / "worker.py", place / "log"
    script.write_text(WORKER)
    limit = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    head = [sys.executable, "-m"]
    head += ["holdfast", "run", "--run-dir", str(place / "run")] if ours else ["torch.distributed.run"]
    common = [
        *head, "--nnodes", "2:3", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "bench",
        "--rdzv-endpoint", f"127.0.0.1:{store.port}",
    ]  # fmt: skip
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = []
    try:
        for _ in range(3):
            command = [*common, "--rdzv-conf", "is_host=0", str(script), str(log)]
            out = (place / f"agent{len(agents)}.log").open("wb")
            agents.append(
                subprocess.Popen(command, env=quiet, stdout=out, stderr=out, start_new_session=True)
            )
        wait_for(log, 3)
        last = max(seen(log, 3), key=lambda words: int(words[2]))
        victim = next((agent for agent in agents if agent.pid == int(last[3])), agents[-1])
        killed = time.time()
        victim.send_signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(last[4]), signal.SIGKILL)
        wait_for(log, 2)
        return max(float(words[0]) for words in seen(log, 2)) - killed
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
        for agent in agents:
            agent.wait(30)
        for words in seen(log, 3) + seen(log, 2):
            with contextlib.suppress(ProcessLookupError):  # torch's outlive their agents
                os.kill(int(words[4]), signal.SIGKILL)
