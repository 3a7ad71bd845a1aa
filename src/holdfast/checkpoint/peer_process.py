"""The process of a place's peer server, started by the place leader; without torch.

It serves on a socket that its leader listens on and keeps, so that another process can take its place at the
same address. A signal that asks a whole job to end does not end it. When its leader is gone or lets go of it,
nobody new is let in, replicas that are on their way may arrive, for at most `linger` seconds, and it ends.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from holdfast.checkpoint.local_tier import LocalTier
from holdfast.checkpoint.peer_server import PeerServer
from holdfast.control.directory import ControlDirectory
from holdfast.control.marks import leave_stopping_to_the_trainer
from holdfast.journal.writer import JournalWriter

LOOK = 0.2
"""Seconds between looks at whether the leader is still there, and at whether anything is still on its way."""


class PeerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a peer process needs to know, given at its start."""

    control: str
    tier: str
    keep: int
    max_bytes: int
    linger: float
    attempt: int


def run(order: PeerOrder, listener: socket.socket, line: socket.socket, parent: int) -> int:
    tier = LocalTier.at(Path(order.tier))
    control = ControlDirectory.open(Path(order.control))
    with tier.in_use():
        journal = JournalWriter(control.journal, f"peer-{tier.place}", order.attempt)
        server = PeerServer(
            listener, control, tier, keep=order.keep, max_bytes=order.max_bytes, journal=journal
        )
        thread = threading.Thread(target=server.serve, name="holdfast-peer-server", daemon=True)
        thread.start()
        # A fork of the leader may still hold its end of the line: then only our parent tells.
        while os.getppid() == parent and thread.is_alive():
            if select.select([line], [], [], LOOK)[0]:
                break
        served = thread.is_alive()
        server.close_door()
        thread.join()
        listener.close()
        ends = time.monotonic() + order.linger
        while server.transfers and time.monotonic() < ends:
            time.sleep(LOOK / 4)
        server.stop()
        journal.close()
    return 0 if served else 1


def main() -> int:
    """`python -m holdfast.checkpoint.peer_process <order> <listener> <line> <parent>`: by PeerHost only."""
    leave_stopping_to_the_trainer()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    order = msgspec.json.decode(sys.argv[1].encode(), type=PeerOrder)
    listener, line = (socket.socket(fileno=int(number)) for number in sys.argv[2:4])
    return run(order, listener, line, int(sys.argv[4]))


if __name__ == "__main__":
    sys.exit(main())
