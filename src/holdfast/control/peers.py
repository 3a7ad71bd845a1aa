"""Who is at the other end of a local socket, and whether it belongs to us.

A path in an owner-only directory keeps other users out; the kernel's word on the peer's process (SO_PEERCRED)
tells which of our own processes speaks.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

ANCESTORS = 64
"""How far up a process's parents are followed."""


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


def _parent_of(pid: int) -> int:
    """The parent's process id; 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def lineage(pid: int) -> Iterator[int]:
    """A process, its parent, that one's parent …"""
    for _ in range(ANCESTORS):
        if pid <= 1:
            return
        yield pid
        pid = _parent_of(pid)


def descends(pid: int, ancestor: int) -> bool:
    return ancestor in lineage(pid)
