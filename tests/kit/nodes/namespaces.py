"""Nodes with networks of their own: Linux network namespaces joined by a bridge, cut at will. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence

PORT = 29400


def missing() -> str:
    """Why there can be no network namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root; partitions are not tested without"
    if shutil.which("ip") is None:
        return ""  # root can install it: `make test` does, and its absence is a failure
    probe = f"hfprobe{uuid.uuid4().hex[:6]}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"this machine allows no network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class Network:
    """Hosts `0`, `1`, … on one switch."""

    def __init__(self, tag: str, hosts: int) -> None:
        self._tag = tag
        self._hosts = hosts

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def namespace(self, host: int) -> str:
        """The file of a host's namespace, for nsenter."""
        return f"/run/netns/{self._tag}n{host}"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host."""
        return ["ip", "netns", "exec", f"{self._tag}n{host}", *command]

    def cut(self, host: int) -> None:
        """Both directions: pull the plug."""
        _ip("-n", f"{self._tag}hub", "link", "set", f"v{host}", "down")

    def mend(self, host: int) -> None:
        _ip("-n", f"{self._tag}hub", "link", "set", f"v{host}", "up")

    def cut_one_way(self, host: int, other: int) -> None:
        """What `host` sends to `other` is lost; the other direction stays open."""
        _ip("-n", f"{self._tag}n{host}", "route", "add", "blackhole", f"{self.address(other)}/32")

    def set_up(self) -> None:
        hub = f"{self._tag}hub"
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "link", "set", "br0", "up")
        for host in range(self._hosts):
            name = f"{self._tag}n{host}"
            _ip("netns", "add", name)
            _ip("-n", hub, "link", "add", f"v{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", hub, "link", "set", f"v{host}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def take_down(self) -> None:
        for name in [f"{self._tag}hub", *(f"{self._tag}n{host}" for host in range(self._hosts))]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    made = Network(f"hf{uuid.uuid4().hex[:6]}", hosts)
    try:
        made.set_up()
        yield made
    finally:
        made.take_down()
