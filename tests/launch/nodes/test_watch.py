"""Agents that watch each other: closed connections, silence, goodbyes, and strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from holdfast.launch.nodes import watch
from holdfast.launch.nodes.watch import HELLO, FollowerWatch, LeaderWatch
from kit.harness import wait_until

SECRET = b"s" * 64
FOLLOWER = """
import sys, time
from holdfast.launch.nodes.watch import FollowerWatch
FollowerWatch(("127.0.0.1", int(sys.argv[1])), b"s" * 64, attempt=1, epoch=1, rank=1, timeout=3.0)
print("watching", flush=True)
time.sleep(300)
"""
LEADER = """
import sys
from holdfast.launch.nodes.watch import LeaderWatch
leader = LeaderWatch(b"s" * 64, attempt=1, epoch=1, nodes=2, timeout=2.0, patience=60.0)
print(leader.port, flush=True)
sys.stdin.readline()
print(leader.lost(), flush=True)
"""


@pytest.fixture
def leader() -> Iterator[LeaderWatch]:
    found = LeaderWatch(SECRET, attempt=1, epoch=1, nodes=2, timeout=3.0, patience=60.0)
    yield found
    found.close()


def follow(leader: LeaderWatch, secret: bytes = SECRET, **more: int) -> FollowerWatch:
    given = {"attempt": 1, "epoch": 1, "rank": 1, **more}
    return FollowerWatch(("127.0.0.1", leader.port), secret, timeout=3.0, **given)


def known(leader: LeaderWatch) -> None:
    wait_until(lambda: not leader._awaited, 10, "the leader knows the node")


def test_who_says_nothing_keeps_nobody_out_and_costs_nobody_its_place(leader: LeaderWatch) -> None:
    mine = follow(leader)
    known(leader)
    silent = [socket.create_connection(("127.0.0.1", leader.port)) for _ in range(300)]
    wait_until(lambda: len(leader._peers) <= 1 + 8, 20, "few of one address are left")
    assert not leader.lost()
    assert not mine.lost
    for one in silent:
        one.close()
    mine.close()


@pytest.mark.drill
def test_both_live_for_longer_than_the_timeout_and_part_without_a_loss(leader: LeaderWatch) -> None:
    mine = follow(leader)
    known(leader)
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        assert not leader.lost()
        assert not mine.lost
        time.sleep(0.05)
    mine.close()
    wait_until(lambda: 1 in leader._left, 10, "the leader reads the goodbye")
    assert leader.lost() == {}


def test_a_killed_follower_is_lost_at_once_and_a_stopped_one_by_its_silence() -> None:
    for number, why in ((signal.SIGKILL, "closed"), (signal.SIGSTOP, "nothing was heard")):
        leader = LeaderWatch(SECRET, attempt=1, epoch=1, nodes=2, timeout=3.0, patience=60.0)
        command = [sys.executable, "-c", FOLLOWER, str(leader.port)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "watching\n"
            known(leader)
            child.send_signal(number)
            lost = wait_until(leader.lost, 20, f"the leader notices {number.name}")
            assert why in lost[1] or "reset" in lost[1]
        finally:
            child.kill()
            child.wait(10)
            assert child.stdout is not None
            child.stdout.close()
            leader.close()


def test_the_leaders_end_is_seen_and_its_goodbye_is_none(leader: LeaderWatch) -> None:
    mine = follow(leader)
    known(leader)
    for peer in list(leader._peers.values()):
        peer.connection.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that was killed
    assert "closed" in wait_until(lambda: mine.lost, 10, "the follower notices")
    mine.close()

    other = LeaderWatch(SECRET, attempt=1, epoch=1, nodes=2, timeout=3.0, patience=60.0)
    second = follow(other)
    known(other)
    other.close()
    wait_until(lambda: second.left, 10, "the follower reads the goodbye")
    assert second.lost == ""
    second.close()


def test_a_leader_that_says_nothing_is_lost_by_its_silence() -> None:
    """A cut in one direction: what we send arrives, nothing comes back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        connection, mine = None, None
        import threading

        def accept() -> None:
            nonlocal connection
            connection, _ = server.accept()
            connection.sendall(os.urandom(watch.NONCE))

        thread = threading.Thread(target=accept)
        thread.start()
        mine = FollowerWatch(server.getsockname(), SECRET, attempt=1, epoch=1, rank=1, timeout=1.0)
        thread.join(10)
        assert "nothing was heard" in wait_until(lambda: mine.lost, 20, "its silence is noticed")
        assert connection is not None
        connection.settimeout(10)
        while connection.recv(4096):  # ends: the other side was told
            pass
        mine.close()
        connection.close()


@pytest.mark.parametrize(
    ("secret", "more"),
    [(b"x" * 64, {}), (SECRET, {"attempt": 2}), (SECRET, {"epoch": 2}), (SECRET, {"rank": 7})],
    ids=["another secret", "another attempt", "another epoch", "no such node"],
)
def test_a_stranger_is_not_listened_to(leader: LeaderWatch, secret: bytes, more: dict[str, int]) -> None:
    stranger = follow(leader, secret, **more)
    wait_until(lambda: stranger.lost, 10, "the stranger is sent away")
    assert leader.lost() == {}
    assert leader._awaited == {1}
    stranger.close()


def test_a_proof_cannot_be_used_twice(leader: LeaderWatch) -> None:
    """Each connection has a nonce of its own: what was heard on one proves nothing on another."""
    with socket.create_connection(("127.0.0.1", leader.port)) as first:
        nonce = first.recv(watch.NONCE)
        from holdfast.record.secret import prove

        hello = HELLO.pack(1, 1, 1, prove(SECRET, *watch._said(nonce, 1, 1, 1)))
        with socket.create_connection(("127.0.0.1", leader.port)) as second:
            second.settimeout(10)
            second.recv(watch.NONCE)
            second.sendall(hello)
            assert second.recv(10) == b"", "sent away"
        first.sendall(hello)
        known(leader)
    wait_until(leader.lost, 10, "and the true one is missed when it goes")


def test_garbage_and_half_a_hello_do_no_harm(leader: LeaderWatch) -> None:
    with socket.create_connection(("127.0.0.1", leader.port)) as garbage:
        garbage.sendall(os.urandom(100_000))
        with socket.create_connection(("127.0.0.1", leader.port)) as half:
            half.sendall(b"\0" * 10)
            mine = follow(leader)
            known(leader)
            assert leader.lost() == {}
            mine.close()


def test_a_node_that_never_connects_is_lost_after_the_patience() -> None:
    leader = LeaderWatch(SECRET, attempt=1, epoch=1, nodes=3, timeout=1.0, patience=0.5)
    mine = follow(leader, rank=2)
    lost = wait_until(leader.lost, 20, "the missing one is noticed")
    assert list(lost) == [1]
    assert "did not connect" in lost[1]
    mine.close()
    leader.close()


def test_nobody_is_lost_because_this_process_did_not_run() -> None:
    """A suspended leader (SIGSTOP, a laptop's lid) must not take everybody else for silent."""
    child = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    port = int(child.stdout.readline())
    mine = FollowerWatch(("127.0.0.1", port), SECRET, attempt=1, epoch=1, rank=1, timeout=60.0)
    try:
        time.sleep(0.5)  # some words are exchanged
        child.send_signal(signal.SIGSTOP)
        time.sleep(3.0)  # longer than the leader's timeout
        child.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "{}\n"
    finally:
        mine.close()
        child.kill()
        child.wait(10)
        child.stdin.close()
        child.stdout.close()
