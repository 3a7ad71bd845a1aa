"""Messages between the agent, the preloaded parent and a forked worker: JSON over a socket pair.

Nothing here is ever written to a socket that has a name, and no message is pickled. Standard library only.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

HEADER = 8
MAX_DESCRIPTORS = 8

Message = dict[str, Any]


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """One message: its length, with the descriptors, and then JSON."""
    body = json.dumps(message).encode()
    socket.send_fds(channel, [len(body).to_bytes(HEADER, "big")], list(descriptors))
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[Message, list[int]]:
    """One message and its descriptors; EOFError when the other side is gone."""
    head, descriptors, _, _ = socket.recv_fds(channel, HEADER, MAX_DESCRIPTORS)
    head += _read(channel, HEADER - len(head))
    return json.loads(_read(channel, int.from_bytes(head, "big"))), list(descriptors)


def _read(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
