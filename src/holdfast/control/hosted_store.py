"""A store that lives in no rank: hosted by an agent or a keeper, and met in by ranks as its clients.

Guarantee: every attempt of the launcher has a store of its own, hosted by the leading agent. Nothing that an
earlier attempt wrote can be read in it, and its port cannot be lost to somebody else between being chosen and
being used, because the listening socket is handed over rather than closed and opened again.

torch's agent shares one store among all attempts without a prefix, so that restarted gloo ranks read the
addresses of their dead predecessors; and without sharing, the store lives in rank 0 and dies with it.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

CONNECT_TIMEOUT = 60.0


class HostedStore:
    """Hosts a TCPStore until closed. Ranks only ever are its clients."""

    def __init__(self, address: str, port: int = 0) -> None:
        """`port`: 0 for a free one. Raises OSError where it is taken."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listening = listen(port)
        self.address = address
        self.port: int = listening.getsockname()[1]
        try:
            self._store: TCPStore | None = TCPStore(
                host_name=address,
                port=self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=CONNECT_TIMEOUT),
                master_listen_fd=listening.fileno(),
            )
        except BaseException:
            listening.close()
            raise
        listening.detach()  # the store's server closes it

    def close(self) -> None:
        """Stop serving. Clients that are still connected get an error."""
        self._store = None


def connect(address: str, port: int, timeout: float = CONNECT_TIMEOUT) -> TCPStore:
    """A client of a store hosted elsewhere. Raises torch's RuntimeError if it is not reached in time."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        host_name=address,
        port=port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )


def listen(port: int = 0) -> socket.socket:
    """A listening socket, on a free port unless one is given, for both families where there are two."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)


def reachable_address(address: str, nodes: int) -> str:
    """`address`, or the loopback address when a single node cannot resolve its own name."""
    if nodes > 1:
        return address
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        return "127.0.0.1"
    return address
