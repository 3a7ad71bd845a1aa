"""A rank that hangs in one of several ways, and testifies over a socket if it can.

hang_rank.py DIRECTORY RANK HOW [ARGUMENT]

sleep      in time.sleep, below a function `forward`
gil        in a C call (library ARGUMENT) that holds the interpreter's lock
vfork      likewise, in one that waits in the kernel for a vforked child
gloo       rank 0 in an all_reduce that rank 1 never joins; ARGUMENT is the store's file
mute       in time.sleep, without the stack signal and without an answer
deaf       with the stack signal, without an answer
"""

import ctypes
import os
import socket
import sys
import threading
import time
from pathlib import Path

from holdfast.train import testimony


def answer(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(testimony.testify(["train", "step"]))


def forward(how: str, rank: int, argument: str, ready: Path) -> None:
    if how == "gloo":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{argument}", rank=rank, world_size=2)
        for _ in range(3):
            dist.all_reduce(torch.ones(2, 3))
        ready.touch()
        if rank == 0:
            dist.all_reduce(torch.ones(2, 3))
        else:
            wait_for_data()
    ready.touch()
    if how == "gil":
        ctypes.PyDLL(argument).hang_in_sleep(600)
    elif how == "vfork":
        ctypes.PyDLL(argument).hang_in_vfork(600)
    else:
        time.sleep(600)


def wait_for_data() -> None:
    time.sleep(600)


def main(directory: str, rank: str, how: str, argument: str = "") -> None:
    place, number = Path(directory), int(rank)
    if how != "mute":
        assert testimony.install(place, number) is not None
    if how not in ("mute", "deaf"):
        threading.Thread(
            target=answer, args=(place / f"{number}.sock",), name="holdfast-answers", daemon=True
        ).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    forward(how, number, argument, place / f"{number}.ready")


if __name__ == "__main__":
    main(*sys.argv[1:])
