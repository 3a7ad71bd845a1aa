"""Who is at the other end of a local socket, and messages over a socket pair.

A path in an owner-only directory keeps other users out; the kernel's word on the peer's process (SO_PEERCRED)
tells which of our own processes speaks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

UNIX_PATH = 100
"""Characters from which on the path of a socket is reached through its directory: the kernel takes 107."""


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """The path of a socket in a form that the kernel takes, whatever its length."""
    if len(os.fsencode(path)) < UNIX_PATH:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def peer_of(channel: socket.socket) -> tuple[int, int]:
    """Process id and user id of whoever connected. Raises OSError."""
    raw = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def make_private(directory: Path) -> None:
    """Make the directory, or see to it that nobody else can get at an existing one."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.lstat()
    if info.st_uid != os.geteuid() or not directory.is_dir() or directory.is_symlink():
        raise PermissionError(f"{directory} belongs to somebody else; a socket of ours may not lie there")
    if info.st_mode & 0o077:
        directory.chmod(0o700)


# Messages between the agent, the preloaded parent and a forked worker: JSON over a socket pair.
#
# Nothing here is ever written to a socket that has a name, and no message is pickled. Standard library only.


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
