"""A keeper in the test's own process, and small processes without torch as its members."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from torch.distributed import HashStore, Store

from holdfast.config.sections import InProcessSettings
from holdfast.policy.evidence import Fault
from holdfast.restart.keeper import Keeper
from holdfast.restart.messages import End, IterationPlan, Next, end_key, gone_key, plan_key, text
from kit.harness import Job, job, wait_until

NODE = "here"
MEMBER = """
import os, signal, socket, sys, threading, time
import msgspec
from holdfast.restart.messages import Beat, Farewell, MemberHello

path, number = sys.argv[1], int(sys.argv[2])
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel.connect(path)

def say(message):
    channel.send(msgspec.msgpack.encode(message))

def beat_for_ever(**more):
    while True:
        say(Beat(iteration=0, **more))
        time.sleep(0.05)

def await_end_of_connection():
    try:
        assert channel.recv(1) == b""
    except ConnectionResetError:
        pass  # what was said last was not read any more

"""
GREETS = MEMBER + "say(MemberHello(member=number, pid=os.getpid()))\n"
LIVES = GREETS + "beat_for_ever(step=7)"


def settings(**given: object) -> InProcessSettings:
    """Times that no test reaches but those that are given."""
    names = (
        "soft_timeout",
        "hard_timeout",
        "heartbeat_timeout",
        "barrier_timeout",
        "completion_timeout",
    )
    chosen = {**dict.fromkeys(names, 1000.0), "heartbeat_interval": 0.1, "granularity": "rank", **given}
    return InProcessSettings(**chosen)  # type: ignore[arg-type]


@contextlib.contextmanager
def keeping(
    home: Path,
    store: Store | None = None,
    members: Mapping[int, int | None] | None = None,
    told: list[str] | None = None,
    **given: object,
) -> Iterator[tuple[Keeper, Store]]:
    """A keeper of members 0 to 2."""
    chosen = store if store is not None else HashStore()
    awaited = members if members is not None else dict.fromkeys(range(3))
    tell = (told if told is not None else []).append
    keeper = Keeper(chosen, NODE, awaited, settings(**given), home / "keeper", tell=tell)
    try:
        yield keeper, chosen
    finally:
        keeper.close()
        assert not Path(keeper.path).exists()


@contextlib.contextmanager
def member(keeper: Keeper, number: int, home: Path, body: str = LIVES) -> Iterator[Job]:
    """A process that says hello as this member, once the keeper listens to it."""
    with job([sys.executable, "-c", body, keeper.path, str(number)], cwd=home) as running:
        if body.startswith(GREETS):
            wait_until(lambda: keeper._members[number].heard > 0, 20, f"member {number} has said hello")
        try:
            yield running
        finally:
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait(10)


def say_plan(store: Store, order: list[int], reserves: list[int] | None = None, iteration: int = 0) -> None:
    plan = IterationPlan(iteration=iteration, order=order, reserves=reserves or [])
    store.set(plan_key(iteration), text(plan))


def read(store: Store, key: str, timeout: float = 20.0) -> bytes:
    """A key's value as soon as it is there."""
    wait_until(lambda: store.check([key]), timeout, key)
    return store.get(key)


def read_end(store: Store, iteration: int = 0, timeout: float = 20.0) -> End:
    return msgspec.json.decode(read(store, end_key(iteration), timeout), type=End)


def read_gone(store: Store, number: int, timeout: float = 20.0) -> Fault | None:
    return msgspec.json.decode(read(store, gone_key(number), timeout), type=Fault | None)


def read_next(store: Store, iteration: int, timeout: float = 20.0) -> Next:
    return msgspec.json.decode(read(store, plan_key(iteration), timeout), type=Next)


def own_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
