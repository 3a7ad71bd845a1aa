"""A worker without torch that does what a test tells it, and says where it is.

The first argument holds one act for each attempt, separated by `;`; the last one is done again. `RANK@act` is
done by that rank alone, and the others wait to be stopped. `FILE?act` is done once that file exists.

ok       exit 0
kill     SIGKILL itself
exit:N   exit with code N
error:M  leave an error file with message M, exit 1

Each worker appends `attempt rank world-size pid node devices` to the file that the second argument names.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def wait(until: Path) -> None:
    deadline = time.monotonic() + 120
    while not until.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {until}")
        time.sleep(0.02)


def main(acts: str, log: str) -> None:
    told = json.loads(os.environ["HOLDFAST_LAUNCH"])
    rank, attempt = os.environ["RANK"], told["attempt"]
    seen = [attempt, rank, os.environ["WORLD_SIZE"], os.getpid(), told["node"]]
    line = " ".join(map(str, [*seen, os.environ.get("CUDA_VISIBLE_DEVICES") or "-"])) + "\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)
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
    if act == "error":
        told = {"message": {"message": value, "extraInfo": {}}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(told))
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:3])
