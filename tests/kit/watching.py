"""A monitor in the test's own process as the agent, and small processes as its ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.launch.monitor import Monitor
from holdfast.policy.timeouts import Limits
from holdfast.record.launches import LaunchInfo
from holdfast.train.beats import FromAgent, FromRank, Hello
from kit.harness import Job, job, wait_until

FAR = 1000.0
"""Seconds that no test lasts."""

PRELUDE = """
import os, signal, socket, sys, threading, time
from holdfast.record.launches import LaunchInfo
from holdfast.policy.timeouts import Limits
from holdfast.train.beats import Beats

path = LaunchInfo.from_environment(os.environ).monitor

def hello(limits=None, learn=False, testify=None):
    return Beats.connect(path, limits, learn=learn, testify=testify)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def mark(name):
    open(name, "w").close()

def until(name):
    while not os.path.exists(name):
        time.sleep(0.01)

"""


def limits(**sections: float) -> Limits:
    """Limits that no test reaches but those that are given."""
    rest = {name: sections.pop(name, FAR) for name in ("initial", "heartbeat", "out_of_section")}
    return Limits(sections={"setup": FAR, "step": FAR, "checkpointing": FAR, **sections}, **rest)


def handover(monitor: Path | str) -> dict[str, str]:
    info = LaunchInfo(
        run_dir="/nowhere", run_id="r", launch="l", attempt=1, epoch=1, node="n", monitor=str(monitor)
    )
    return info.to_environment()


@contextlib.contextmanager
def watching(home: Path, limit: Limits | None = None, told: list[str] | None = None) -> Iterator[Monitor]:
    watch = Monitor(home / "agent", limit or limits(), (told if told is not None else []).append)
    try:
        yield watch
    finally:
        watch.close()
    assert not watch.path.exists()


@contextlib.contextmanager
def speaking(home: Path, monitor: Path | str, code: str) -> Iterator[Job]:
    """A process that can say hello to the monitor; killed at the end, wherever it is then."""
    with job(
        [sys.executable, "-c", PRELUDE + code], cwd=home, env=handover(monitor), may_leave=True
    ) as running:
        try:
            yield running
        finally:
            running.kill_everything()


class Rank:
    """A rank that speaks to the monitor out of the test's own process."""

    def __init__(self, monitor: Monitor, *, defers: bool = True) -> None:
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(20)
        self.channel.connect(str(monitor.path))
        self.say(Hello(pid=os.getpid(), at=time.monotonic(), defers_sigterm=defers))

    def say(self, word: FromRank) -> None:
        self.channel.send(msgspec.msgpack.encode(word))

    def hear(self) -> FromAgent:
        return msgspec.msgpack.decode(self.channel.recv(4096), type=FromAgent)


def heard(watch: Monitor, rank: int, section: str = "", timeout: float = 60.0) -> None:
    """Wait until a rank has said that it is in this section."""

    def there() -> bool:
        state = watch.state(rank)
        return state is not None and state.section == section

    wait_until(there, timeout, f"rank {rank} in section {section!r}")
