"""A worker without torch: each attempt does the next of the comma-separated acts, then the last one again.

ok        exit 0
kill      start a child that would live on, then SIGKILL itself
exit:N    exit with code N
error:M   leave an error file with message M, exit 1
torn      leave half an error file, exit 1
commit:N  leave a committed checkpoint of step N, then as `kill`
tell:N    say that it has got to step N, then as `kill`
wait      ignore SIGTERM, start a child that would live on, say `ready`, and wait
dump      write environment and arguments
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(acts: str, log: str) -> None:
    rank = os.environ["RANK"]
    attempt = json.loads(os.environ["HOLDFAST_LAUNCH"])["attempt"] if "HOLDFAST_LAUNCH" in os.environ else 1
    act, _, value = acts.split(",")[min(attempt, acts.count(",") + 1) - 1].partition(":")
    with Path(log).open("a") as file:
        file.write(f"{attempt} {rank} {os.environ['WORLD_SIZE']} {os.getpid()}\n")
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    if act == "commit":
        place = Path("run/checkpoints") / f"step_{int(value):08d}-0000000{attempt}"
        place.mkdir(parents=True)
        (place / "holdfast.json").write_text("{}")
    if act == "tell":
        Path(os.environ["HOLDFAST_PROGRESS"]).write_text(f"{value}\n")
    if act in ("kill", "commit", "tell", "wait"):
        subprocess.Popen(["sleep", "300"])
    if act in ("kill", "commit", "tell"):
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "exit":
        sys.exit(int(value))
    if act == "error":
        error_file.write_text(json.dumps({"message": {"message": value, "extraInfo": {}}}))
        sys.exit(1)
    if act == "torn":
        error_file.write_text('{"message": {"mess')
        sys.exit(1)
    if act == "wait":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(f"{log}.ready").touch()
        time.sleep(300)
    if act == "dump":
        seen = {"env": dict(os.environ), "argv": sys.argv, "file": __file__, "ppid": os.getppid()}
        Path(f"{log}.{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:3])
