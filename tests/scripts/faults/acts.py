"""A worker without torch that does what a test tells it, and says where it is.

The first argument holds one act for each attempt, separated by `;`; the last one is done again. `RANK@act` is
done by that rank alone, and the others wait to be stopped. `FILE?act` is done once that file exists.

ok       exit 0
kill     SIGKILL itself
exit:N   exit with code N
error:M  leave an error file with message M, exit 1
reject:S:device=D  reject step S because of the ranks on device D of this node (or rank=R), exit 16
accuse:S:D  reject step S and accuse device D of this node, exit 16

Each worker appends `attempt rank world-size pid node devices` to the file that the second argument names.
Rank 0 appends what the launcher told it to `told`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def wait(until: Path) -> None:
    deadline = time.monotonic() + 120
    while not until.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {until}")
        time.sleep(0.02)


def reject(told: dict[str, Any], rejection: dict[str, Any], *, rank: str) -> None:
    """As rank 0 of a group does that agreed on it; the others end when it is on record."""
    record = Path(told["run_dir"]) / "attempts" / f"{told['attempt']:06d}" / "rejection.json"
    if rank == "0":
        fresh = record.with_suffix(".new")
        fresh.write_text(json.dumps({"reasons": ["the loss is nan"], **rejection}))
        fresh.rename(record)
    wait(record)
    sys.exit(16)


def bad_ranks(whose: str, node: str) -> list[dict[str, Any]]:
    kind, _, value = whose.partition("=")
    devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[: int(os.environ["WORLD_SIZE"])]
    return [
        {"rank": rank, "node": node, "device": device, "reasons": ["the loss is nan"]}
        for rank, device in enumerate(devices)
        if value == (device if kind == "device" else str(rank))
    ]


def append(path: str, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def main(acts: str, log: str) -> None:
    told = json.loads(os.environ["HOLDFAST_LAUNCH"])
    rank, attempt = os.environ["RANK"], told["attempt"]
    seen = [attempt, rank, os.environ["WORLD_SIZE"], os.getpid(), told["node"]]
    append(log, " ".join(map(str, [*seen, os.environ.get("CUDA_VISIBLE_DEVICES") or "-"])) + "\n")
    if rank == "0":
        append("told", os.environ["HOLDFAST_LAUNCH"] + "\n")
    chosen = acts.split(";")[min(attempt, acts.count(";") + 1) - 1]
    whose, at, act = chosen.rpartition("@")
    if at and whose != rank:
        wait(Path("never"))
    gate, _, act = act.rpartition("?")
    if gate:
        wait(Path(gate))
    act, _, value = act.partition(":")
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "exit":
        sys.exit(int(value))
    step, _, whose = value.partition(":")
    if act == "reject":
        bad = bad_ranks(whose, told["node"])
        reject(told, {"kind": "step", "step": int(step), "rerun": True, "ranks": bad}, rank=rank)
    if act == "accuse":
        accused = {"node": told["node"], "device": whose}
        reject(told, {"kind": "device", "step": int(step), "accused": accused}, rank=rank)
    if act == "error":
        told = {"message": {"message": value, "extraInfo": {}}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(told))
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:3])
