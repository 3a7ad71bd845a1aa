"""The store in which a launch's agents meet: hosted by the first endpoint's node, or by the next one's.

Guarantee: connecting is bounded, and whoever cannot reach an endpoint says which. With several endpoints
(`--rdzv-endpoint one:29400,two:29400`) the loss of the store's host moves everybody to the next one in the
list, in the same order everywhere, and who comes later goes where they are. With one, it ends the launch with
a code that says "start it again".
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import TYPE_CHECKING

from holdfast.bounded import is_table_full
from holdfast.control.hosted_store import HostedStore, can_bind, connect
from holdfast.errors import HoldfastError, UsageError
from holdfast.exit_codes import ExitCode

if TYPE_CHECKING:
    from torch.distributed import TCPStore

DEFAULT_PORT = 29400
PROBE = 2.0
"""Seconds to find out whether an endpoint is in use."""


class StoreLostError(HoldfastError):
    """The store that the agents meet in cannot be reached, and there is no other one."""

    exit_code = ExitCode.STORE_LOST


def parse_endpoints(text: str) -> list[tuple[str, int]]:
    """`host[:port]`, or several separated by commas; an address of IPv6 in brackets."""
    found = []
    for part in (part.strip() for part in text.split(",")):
        host, colon, port = part.rpartition(":")
        if not colon or "]" in port:
            host, port = part, str(DEFAULT_PORT)
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(
                f"--rdzv-endpoint {text}: {part!r} is not HOST or HOST:PORT. Write host:port, or several "
                "separated by commas"
            )
        found.append((host, int(port)))
    if len(set(found)) < len(found):
        raise UsageError(f"--rdzv-endpoint {text}: an endpoint is named twice")
    return found


class Endpoints:
    """Connects to the endpoints of a launch, one after the other as they fail."""

    def __init__(
        self,
        endpoints: list[tuple[str, int]],
        *,
        is_host: bool | None,
        timeout: float,
        alone: bool = False,
    ) -> None:
        """`alone`: no other node will come."""
        self.all = endpoints
        self._is_host = is_host
        self._alone = alone
        self._timeout = timeout
        self._next = 0
        self.index = -1
        """Which endpoint is in use; rises with every move."""
        self.hosting = False
        self._hosted: HostedStore | None = None
        self.port = 0
        self.failures: list[str] = []

    @property
    def name(self) -> str:
        host, port = self.all[self.index]
        return f"{host}:{port}"

    @property
    def exhausted(self) -> bool:
        return self._next >= len(self.all)

    def begin(self) -> TCPStore:
        """The store to meet in at the start: where the others have moved to, if they had to."""
        self.look_ahead()
        return self.connect()

    def look_ahead(self) -> str:
        """Where others meet, if that is at a later endpoint than this one: `connect` goes there next."""
        for index in range(len(self.all) - 1, max(self.index, 0), -1):
            host, port = self.all[index]
            if _answers(host, port):
                self._next = index
                return f"{host}:{port}"
        return ""

    def connect(self) -> TCPStore:
        """The store of the next endpoint that answers. Raises StoreLostError when none is left."""
        while not self.exhausted:
            self.index = self._next
            self._next += 1
            host, port = self.all[self.index]
            try:
                return self._open(host, port)
            except (RuntimeError, TimeoutError, OSError) as error:
                if is_table_full(error):
                    raise  # it is this machine that has no room for a thread, whichever endpoint is next
                first = str(error).partition("\n")[0]
                self.failures.append(f"{host}:{port}: {first}")
        tried = "; ".join(self.failures) or f"{self.name} was the only one"
        raise StoreLostError(
            f"no endpoint at which the nodes could meet is left ({tried}). Nothing of the run is "
            "lost: start the same command again, and give several endpoints if the loss of one host "
            "must be survived"
        )

    def _open(self, host: str, port: int) -> TCPStore:
        if self._hosted is not None:
            self._hosted.close()
            self._hosted = None
        ours = is_this_machine(host) if self._is_host is None else self._is_host
        if ours:
            try:
                self._hosted = HostedStore(host, port, alone=self._alone)
            except OSError as error:
                if self._is_host or error.errno != errno.EADDRINUSE:
                    raise
                # Several agents on one machine: the first one hosts it, this one is a client.
        self.hosting = self._hosted is not None
        store = connect(host, self._hosted.port if self._hosted is not None else port, self._timeout)
        self.port = store.port
        return store


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there already."""
    try:
        socket.create_connection((host, port), timeout=PROBE).close()
    except OSError:
        return False
    return True


def is_this_machine(host: str) -> bool:
    """Whether an endpoint's host is this machine, so that the store is to be hosted here."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is not None and address.is_loopback:
        return True
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(can_bind(str(one)) for one in found)
