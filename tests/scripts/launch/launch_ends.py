"""A worker without torch and Run: in each attempt rank 1 ends in the next of the comma-separated ways.

import    cannot import a module that rank 0 does not need
abort     writes what NCCL's watchdog writes, and aborts
errno     raises an OSError with ETIMEDOUT out of one that handles it
leave     ends with 0 as soon as rank 0 is connected; rank 0 then fails because its peer is gone
ok        ends with 0, as all ranks do

Meanwhile the others wait to be stopped.
"""

import errno
import json
import os
import signal
import socket
import sys
from pathlib import Path

WATCHDOG = (
    "[rank1]:[E1116 14:20:27.586 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600069 "
    "milliseconds before timing out."
)


def main(acts: str) -> None:
    rank, attempt = int(os.environ["RANK"]), json.loads(os.environ["HOLDFAST_LAUNCH"])["attempt"]
    act = acts.split(",")[min(attempt, acts.count(",") + 1) - 1]
    print(f"attempt {attempt} rank {rank} {act} tty={sys.stderr.isatty()}", file=sys.stderr)
    if act == "ok":
        return
    if act == "leave":
        lose_peer(rank, Path(f"socket-{attempt}"))
    if rank != 1:
        signal.sigwait({signal.SIGUSR1})  # until it is stopped
    if act == "import":
        import a_module_that_is_nowhere  # type: ignore[import-not-found]  # noqa: F401
    if act == "abort":
        frames = "".join(
            f"frame #{number}: somewhere + 0x{number:x} in libtorch.so\n" for number in range(60)
        )
        print(f"{WATCHDOG}\n{frames}", end="", file=sys.stderr)
        os.abort()
    if act == "errno":
        try:
            raise OSError(errno.ETIMEDOUT, "Connection timed out", "/data/shard")
        except OSError as error:
            raise ValueError("no batch") from error


def lose_peer(rank: int, path: Path) -> None:
    if rank == 1:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{path}.new")
            server.listen()
            Path(f"{path}.new").rename(path)  # there is somebody to connect to from here on
            server.accept()
            os._exit(0)
    with socket.socket(socket.AF_UNIX) as peer:
        while True:
            try:
                peer.connect(str(path))
                break
            except FileNotFoundError:
                continue
        peer.settimeout(60)
        if not peer.recv(1):
            raise RuntimeError(f"[gloo/transport/tcp/pair.cc:553] Connection closed by peer [{path}]")


if __name__ == "__main__":
    main(sys.argv[1])
