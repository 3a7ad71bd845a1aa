"""The store that an attempt's workers meet in.

Guarantee: every attempt has a store of its own, hosted by the leading agent. Nothing that an earlier attempt
wrote can be read in it, and its port cannot be lost to somebody else between being chosen and being used,
because the listening socket is handed over rather than closed and opened again.

torch's agent shares one store among all attempts without a prefix, so that restarted gloo ranks read the
addresses of their dead predecessors; and without sharing, the store lives in rank 0 and dies with it.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

CONNECT_TIMEOUT = timedelta(seconds=60)


class AttemptStore:
    """Hosts one attempt's TCPStore until closed. Workers only ever are its clients."""

    def __init__(self, address: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listening = listen()
        self.address = address
        self.port: int = listening.getsockname()[1]
        try:
            self._store: TCPStore | None = TCPStore(
                host_name=address,
                port=self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=CONNECT_TIMEOUT,
                master_listen_fd=listening.fileno(),
            )
        except BaseException:
            listening.close()
            raise
        listening.detach()  # the store's server closes it

    def close(self) -> None:
        """Stop serving. Clients that are still connected get an error."""
        self._store = None


def listen() -> socket.socket:
    """A listening socket on a free port, for both families where there are two."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


def reachable_address(address: str, nodes: int) -> str:
    """`address`, or the loopback address when a single node cannot resolve its own name."""
    if nodes > 1:
        return address
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        return "127.0.0.1"
    return address
