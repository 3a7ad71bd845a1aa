"""The liveness ping: real gloo groups, whose members are killed and stopped for real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from holdfast.errors import ExitCode, PingFailedError, UsageError
from holdfast.health.ping import LivenessPing
from holdfast.journal import events
from holdfast.journal.events import PingFailed
from kit.harness import REPO, Job, finish, free_port, job, python, wait_until
from kit.harness import holdfast as holdfast_run
from kit.runs import journalled

TRAIN = REPO / "tests" / "scripts" / "train" / "train_pinged.py"
SCRIPT = REPO / "tests" / "scripts" / "launch" / "ping_ranks.py"


class Ranks:
    def __init__(self, cwd: Path, jobs: list[Job]) -> None:
        self.cwd, self.jobs = cwd, jobs

    def before(self, number: int) -> None:
        """Until every rank is about to make its ping `number`."""
        paths = [self.cwd / f"rank_{rank}.{number}.before" for rank in range(len(self.jobs))]
        wait_until(lambda: all(path.exists() for path in paths), 60, f"all ranks come to ping {number}")

    def go(self) -> None:
        (self.cwd / "go").touch()

    def said(self, rank: int, timeout: float = 60.0) -> dict[str, Any]:
        path = self.cwd / f"rank_{rank}.json"
        wait_until(path.exists, timeout, f"rank {rank} says something")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


@contextlib.contextmanager
def ranks(
    cwd: Path, world: int, pings: int, timeout: float, stop_before: int = 0, host: str = "0"
) -> Iterator[Ranks]:
    store = None
    port = free_port()
    if host == "none":
        store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        port = store.port
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                job(
                    python(SCRIPT, *map(str, (rank, world, port, cwd, pings, timeout, stop_before))),
                    cwd=cwd,
                    env={"PING_STORE_HOST": host},
                    may_leave=True,
                )
            )
            for rank in range(world)
        ]
        yield Ranks(cwd, started)
    del store


def test_everybody_answers_and_the_training_group_is_untouched(tmp_path: Path) -> None:
    """E5: what a ping costs when nothing is wrong is bounded, and training's own group still works."""
    with ranks(tmp_path, 2, 50, 20.0) as group:
        for rank in range(2):
            assert group.jobs[rank].wait(90).code == 0, group.jobs[rank].output().text
            said = group.said(rank)
            assert len(said["took"]) == 50
            assert said["sum"] == 2.0
            assert sorted(said["took"])[25] < 0.5, said["took"]  # 2 ms on a quiet machine


@pytest.mark.drill
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_peer_is_named_within_the_timeout(tmp_path: Path, how: signal.Signals) -> None:
    """Scenario 25: a peer is killed, or stopped → every other rank learns it within the timeout."""
    timeout = 5.0  # also for the pings before, on a machine that is busy
    with ranks(tmp_path, 3, 5, timeout, stop_before=2) as group:
        group.before(2)
        os.kill(group.jobs[1].pid, how)
        group.go()
        for rank in (0, 2):
            said = group.said(rank)
            assert said["missing"] == [1], said
            assert said["seconds"] < timeout + 3.0
            assert "rank 1 did not answer ping 2 within 5 s" in said["text"]
            assert group.jobs[rank].wait(30).code == ExitCode.DECISION_TIMEOUT
        assert not (tmp_path / "rank_1.json").exists()


@pytest.mark.drill
def test_the_stop_of_the_stores_host_is_noticed_within_the_timeout(tmp_path: Path) -> None:
    """Scenario 25: a store whose host is stopped never answers some calls; the ping does not wait for it."""
    with ranks(tmp_path, 2, 5, 5.0, stop_before=2, host="0") as group:
        group.before(2)
        os.kill(group.jobs[0].pid, signal.SIGSTOP)
        group.go()
        said = group.said(1)
        assert said["seconds"] < 9.0
        assert "the store does not answer" in said["text"]
        assert group.jobs[1].wait(30).code == ExitCode.DECISION_TIMEOUT


def test_a_rank_that_dies_in_the_middle_of_the_reduction_is_told_from_one_that_never_came(
    tmp_path: Path,
) -> None:
    """The marks were all there; what failed after that is the backend."""
    store = HashStore()
    ping = LivenessPing(timeout=20.0, store=store, rank=0, world_size=2)
    other = LivenessPing(timeout=20.0, store=store, rank=1, world_size=2)
    ping._group, ping._backend = object(), "gloo"
    ping._reduce = lambda deadline: (_ for _ in ()).throw(RuntimeError("Connection closed by peer"))  # type: ignore[method-assign]
    thread = threading.Thread(target=other.ping, daemon=True)
    thread.start()
    with pytest.raises(PingFailedError, match="all 2 ranks answered ping 1 through the store") as caught:
        ping()
    assert "Connection closed by peer" in str(caught.value)
    thread.join(5)


def test_a_reduction_that_hangs_ends_the_ping_within_the_bound_it_promises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if nothing answers any more: neither the store that knows where, nor the backend."""
    over = threading.Event()
    store = HashStore()
    pings = [LivenessPing(timeout=1.0, store=store, rank=rank, world_size=2) for rank in range(2)]
    ping = pings[0]

    class Group:
        def abort(self) -> None:
            over.wait(60)

    ping._group, ping._backend = Group(), "nccl"
    for name in ("_reduce", "_marked"):
        monkeypatch.setattr(ping, name, lambda _: over.wait(60))
    other = threading.Thread(target=pings[1].ping, daemon=True)
    other.start()
    began = time.monotonic()
    with pytest.raises(PingFailedError, match="no answer at all"):
        ping()
    took = time.monotonic() - began
    over.set()
    other.join(10)
    assert took < 1.0 + 3.0 + 2.0, "its timeout, the three that it promises, and a busy machine"


def test_a_group_that_cannot_be_given_back_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch.distributed as dist

    over = threading.Event()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: over.wait(60))
    monkeypatch.setattr("holdfast.health.ping.CLOSING", 0.3)
    ping = LivenessPing(store=HashStore(), rank=0, world_size=2)
    ping._group = object()
    began = time.monotonic()
    ping.close()
    assert time.monotonic() - began < 10.0
    over.set()
    assert "was not given back within 0.3 s" in caplog.text


def pinged_run(cwd: Path, how: str) -> None:
    """A run whose rank 1 sends this signal to itself in step 5, to its end."""
    command = holdfast_run(
        "run", "--run-dir", "run", "--nproc-per-node", "2", "--no-preload", "--set", "launch.stop_grace=1",
        str(TRAIN), how,
    )  # fmt: skip
    result = finish(command, cwd=cwd, timeout=160)
    assert result.code == 0, result.text
    assert [one.outcome for one in journalled(cwd, events.AttemptEnded)] == ["failed", "finished"]


@pytest.mark.drill
def test_a_run_pings_its_ranks_and_recovers_from_one_that_does_not_answer(tmp_path: Path) -> None:
    """E5, scenario 25: under `holdfast run`; a stopped rank would else be found by a long timeout only."""
    pinged_run(tmp_path, "SIGSTOP")
    (failed,) = journalled(tmp_path, PingFailed)
    assert (failed.step, failed.missing) == (6, [1])
    assert failed.seconds < 8.0
    (end,) = journalled(tmp_path, events.WorkerFailed)
    assert (end.rank, end.exit_code) == (0, ExitCode.DECISION_TIMEOUT)
    assert "rank 1 did not answer ping 3 within 5 s" in end.message


@pytest.mark.drill
def test_a_rank_that_is_killed_is_blamed_by_its_agent_before_any_ping_has_failed(tmp_path: Path) -> None:
    """Scenario 25: the other rank waits in a ping by then, and nobody waits for that to end."""
    pinged_run(tmp_path, "SIGKILL")
    assert journalled(tmp_path, PingFailed) == []
    (end,) = journalled(tmp_path, events.WorkerFailed)
    assert (end.rank, end.exit_code) == (1, -signal.SIGKILL)


def test_a_rank_alone_needs_nobody() -> None:
    ping = LivenessPing(store=HashStore(), rank=0, world_size=1)
    assert ping().seconds == 0.0


def test_a_ping_without_a_group_says_what_it_needs() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        LivenessPing()
    with pytest.raises(UsageError, match="rank and world_size"):
        LivenessPing(store=HashStore())


class _Counting:
    """A store that counts its keys."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.keys: set[str] = set()

    def set(self, key: str, value: str) -> None:
        self.keys.add(key)
        self.store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.keys.add(key)
        return int(self.store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(keys))

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.keys.add(key)
        return bytes(self.store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        self.keys.discard(key)
        return bool(self.store.delete_key(key))


def test_the_store_does_not_grow_with_the_number_of_pings() -> None:
    store = _Counting()
    pings = [LivenessPing(timeout=20.0, store=store, rank=rank, world_size=2) for rank in range(2)]
    sizes = []

    def many(ping: LivenessPing) -> None:
        for _ in range(30):
            ping()

    other = threading.Thread(target=many, args=(pings[1],), daemon=True)
    other.start()
    for _ in range(30):
        pings[0]()
        sizes.append(len(store.keys))
    other.join(20)
    assert max(sizes[5:]) <= 7, store.keys


def test_ranks_that_are_late_are_named_one_by_one_and_may_still_come() -> None:
    """A slow rank is not a dead one: who catches its error may go on, and the numbers still fit."""
    store = HashStore()
    first, second = (
        LivenessPing(timeout=0.3, store=PrefixStore("x", store), rank=rank, world_size=2) for rank in range(2)
    )
    with pytest.raises(PingFailedError) as caught:
        first()
    assert list(caught.value.missing) == [1]
    second()  # its mark completes the first one
    second.timeout = first.timeout = 20.0
    thread = threading.Thread(target=second.ping, daemon=True)
    thread.start()
    assert first().number == 2
    thread.join(10)
