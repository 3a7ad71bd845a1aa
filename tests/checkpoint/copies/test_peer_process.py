"""The peer server's process: replaced at the same address, ends with its leader, lingers for what comes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.checkpoint.copies.peer_process import REPLACEMENTS, PeerHost, own_address
from holdfast.checkpoint.copies.peers import PeerReader
from holdfast.checkpoint.copies.tier import IN_USE, LocalTier
from holdfast.errors import PeerError
from holdfast.journal.events import Warned
from kit.harness import is_alive, job, wait_until
from kit.nodes.peering import MIB, Lab, await_arrival, holds, leader, left, proxy, send, sender


def in_use(tier: LocalTier) -> bool:
    """Whether somebody uses a place, as `holdfast clean` asks."""
    with (tier.path / IN_USE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_process_takes_replicas_gives_them_out_and_ends(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours)
    with lab.host(theirs) as host:
        assert send(lab, host.address[1], ours, copy) == theirs.place
        assert holds(theirs, copy[0])
        assert in_use(theirs)
        pid = host.pid
        assert pid is not None
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in mapped, "it needs no torch"
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        reader = PeerReader(host.address, lab.control, timeout=5)
        assert len(reader.copies()) == 1
        reader.close()
        assert is_alive(pid)
    assert not is_alive(pid)
    assert not in_use(theirs)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(host.address, timeout=1)
    assert not [event for event in lab.journal() if isinstance(event, Warned)]


def test_a_server_killed_mid_transfer_is_replaced_and_the_transfer_goes_on(lab: Lab) -> None:
    """A5: resumable after a peer restarts. The new process has the same address."""
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=6 * MIB)
    with lab.host(theirs) as host, proxy(host.address[1]) as between:
        between.hold(4 * MIB)
        with job(sender(lab, between.port, ours, copy), cwd=lab.folder) as sending:
            await_arrival(theirs, ours.image(copy[0]).read_bytes()[: 3 * MIB])
            first = host.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: host.poll() is None and host.pid != first, 10, "it is replaced")
            assert theirs.records() == []
            between.release()
            done = sending.wait(30)
        assert done.out.strip() == theirs.place, done.text
        assert len(between.sent) >= 2
        assert between.sent[-1] < 4 * MIB, "what was there was not sent again"
    assert holds(theirs, copy[0])
    assert left(theirs) == []
    (warned,) = [event.message for event in lab.journal() if isinstance(event, Warned)]
    assert "the peer server of node b ended with code -9" in warned


def test_a_server_that_is_stopped_costs_at_most_the_deadline_and_goes_on_afterwards(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=16 * MIB)
    with lab.host(theirs) as host:
        send(lab, host.address[1], ours, lab.copy(ours, rank=4))
        pid = host.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(PeerError):
                send(lab, host.address[1], ours, copy, seconds=1.0)
            assert time.monotonic() - began < 2.0
        finally:
            os.kill(pid, signal.SIGCONT)
        assert theirs.find(copy[0].checkpoint, 3) is None
        send(lab, host.address[1], ours, copy)
    assert holds(theirs, copy[0])


def test_after_a_few_deaths_peers_are_refused_at_once(lab: Lab) -> None:
    theirs = lab.place("b")
    with lab.host(theirs) as host:
        for _ in range(REPLACEMENTS + 1):
            pid = host.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: host.poll() is None and host.pid != pid, 10, "its end is seen to")  # noqa: B023
        assert host.pid is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(host.address, timeout=1)
    warned = [event.message for event in lab.journal() if isinstance(event, Warned)]
    assert len(warned) == REPLACEMENTS + 1
    assert "it takes no replicas and gives out none until the next start" in warned[-1]


def test_a_server_ends_soon_after_its_leader_and_frees_its_port(lab: Lab) -> None:
    theirs = lab.place("b")
    with leader(lab, theirs, linger=30) as (process, _, port, pid):
        PeerReader(("127.0.0.1", port), lab.control, timeout=10).copies()
        process.kill()
        process.wait(10)
        wait_until(lambda: not is_alive(pid), 5, "it ends, with nothing on its way")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)
    assert not in_use(theirs)


def test_a_replica_on_its_way_arrives_although_the_leader_is_gone(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=4 * MIB)
    with leader(lab, theirs, linger=30) as (process, _, port, pid), proxy(port) as between:
        between.hold(2 * MIB)
        sending = threading.Thread(target=send, args=(lab, between.port, ours, copy))
        sending.start()
        await_arrival(theirs, ours.image(copy[0]).read_bytes()[:MIB])
        process.kill()
        process.wait(10)

        def shut() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return False
            return True

        wait_until(shut, 5, "nobody new is let in")
        assert is_alive(pid)
        between.release()
        sending.join(10)
        wait_until(lambda: not is_alive(pid), 5, "then it ends")
    assert holds(theirs, copy[0])


def test_a_transfer_that_stalls_keeps_a_server_no_longer_than_its_time_to_linger(lab: Lab) -> None:
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=4 * MIB)
    with leader(lab, theirs, linger=0.5) as (process, _, port, pid), proxy(port) as between:
        between.hold(2 * MIB)
        with job(sender(lab, between.port, ours, copy, 30), cwd=lab.folder, may_leave=True) as sending:
            await_arrival(theirs, ours.image(copy[0]).read_bytes()[:MIB])
            process.kill()
            process.wait(10)
            wait_until(lambda: not is_alive(pid), 5, "it ends all the same")
            sending.signal(signal.SIGKILL)
    assert theirs.records() == []
    assert [name.rsplit(".")[-1] for name in left(theirs)] == ["json", "part"]


def test_ones_own_address_is_the_one_that_others_reach() -> None:
    assert own_address("") == own_address("localhost") == own_address("127.0.0.1") == "127.0.0.1"
    found = own_address("192.0.2.7")
    with socket.socket() as probe:
        probe.bind((found, 0))  # one of ours
    assert own_address("no.such.host.invalid") in (found, "127.0.0.1")


def test_nothing_here_needs_torch() -> None:
    modules = ", ".join(f"holdfast.checkpoint.copies.{name}" for name in ("wire", "peer_process", "peers"))
    told = subprocess.run(
        [sys.executable, "-c", f"import {modules}, sys; print('torch' in sys.modules)"],
        stdout=subprocess.PIPE, check=True, timeout=30,
    )  # fmt: skip
    assert told.stdout.strip() == b"False"


def test_a_host_that_was_never_started_closes(lab: Lab) -> None:
    host = PeerHost(
        control=lab.control, tier=lab.place("b"), attempt=1, journal=None, host="127.0.0.1", keep=2  # type: ignore[arg-type]
    )  # fmt: skip
    host.poll()
    host.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(host.address, timeout=1)
