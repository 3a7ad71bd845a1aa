"""Without the launcher: real members start keeper processes, meet through them, and leave nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from torch.distributed import Store

from holdfast.errors import HandedOverError, UsageError
from holdfast.policy.evidence import FaultKind
from holdfast.record.group import HostedStore
from holdfast.restart import lookout
from holdfast.restart.entry import Joined, KeeperHandover, Ranks, join
from holdfast.restart.keeper import SOCKET
from holdfast.restart.keeper_process import DIRECTORY, sweep, sweep_stale
from holdfast.restart.messages import (
    Beat,
    EndKind,
    Farewell,
    IterationPlan,
    MemberHello,
    Over,
    Ready,
    arrived_key,
    done_key,
    end_key,
    ready_key,
    text,
)
from kit.harness import free_port, is_alive, wait_until
from kit.keeping import read_end, read_next, settings
from kit.ranks.stopping_ranks import Ranks as Forked
from kit.ranks.stopping_ranks import ranks

QUICK: dict[str, object] = {"hard_timeout": 20.0, "barrier_timeout": 40.0, "heartbeat_timeout": 20.0}
LIMIT = 60.0


def live(place: Path, **given: object) -> None:
    """A member: takes part in iterations until one completes. It returns from them once `finish` is there."""
    joined = join(settings(monitor_process_logdir=str(place), **given), max_restarts=3)
    number = joined.member
    watched = joined.client()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(joined.keeper_path)
    channel.send(msgspec.msgpack.encode(MemberHello(member=number, pid=os.getpid())))
    (place / f"keeper{number}").write_text(joined.keeper_path)

    leaving = threading.Event()

    def listen() -> None:
        channel.recv(1)
        if not leaving.is_set():
            end(33)

    def beat() -> None:
        with contextlib.suppress(OSError):
            while True:
                channel.send(msgspec.msgpack.encode(Beat(iteration=0)))
                time.sleep(0.05)

    def end(code: int) -> NoReturn:
        joined.close()
        os._exit(code)

    for target in (listen, beat):
        threading.Thread(target=target, daemon=True).start()
    try:
        code = iterate(place, joined, watched)
    except RuntimeError:  # the store is gone
        code = 33
    leaving.set()
    with contextlib.suppress(OSError):
        channel.send(msgspec.msgpack.encode(Farewell()))
    end(code)


def iterate(place: Path, joined: Joined, watched: Store) -> int:
    """Until all have finished, or there is no place for this member any more."""
    number, store = joined.member, joined.store
    assert store is not None
    for iteration in itertools.count():
        ready = Ready(member=number, node=joined.node, pid=os.getpid())
        store.compare_set(ready_key(iteration, number), "", text(ready))
        store.add(arrived_key(iteration), 1)
        plan = read_next(watched, iteration, LIMIT)
        (place / f"plan{iteration}.{number}").write_text(text(plan))
        if isinstance(plan, Over):
            return plan.exit_code
        if number not in (*plan.order, *plan.reserves):
            return 33
        if number in plan.order:
            wait_until(
                lambda now=iteration: (place / "finish").exists() or store.check([end_key(now)]),
                LIMIT,
                "finish",
            )
            store.add(done_key(iteration), 1)
        if read_end(watched, iteration, LIMIT).kind is EndKind.COMPLETED:
            break
    return 0


def keepers(place: Path) -> list[int]:
    """Keeper processes of the job that logs here."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().decode() if entry.name.isdigit() else ""
            if "keeper_process" in line and f'"{place}"' in line and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


class Job:
    def __init__(self, place: Path, forked: Forked) -> None:
        self._place = place
        self.ranks = forked

    def await_plan(self, iteration: int, *members: int) -> IterationPlan:
        """The plan, once these members have it."""
        for member in members:
            path = self._place / f"plan{iteration}.{member}"
            what = f"member {member} has plan {iteration}: {self.ranks.errors()}"
            wait_until(lambda path=path: path.exists() and path.stat().st_size > 0, LIMIT, what)  # type: ignore[misc]
        found: IterationPlan | Over = msgspec.json.decode(path.read_bytes(), type=IterationPlan | Over)
        assert isinstance(found, IterationPlan), found
        return found

    def finish(self) -> None:
        (self._place / "finish").touch()

    def keeper(self, node: str = "") -> int:
        """The keeper process of a node."""
        (found,) = [
            pid
            for pid in keepers(self._place)
            if f'"node":"{node}' in Path(f"/proc/{pid}/cmdline").read_text().replace(" ", "")
        ]
        return found

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self._place.glob("keeper-*.log")))


Environment = Callable[[int], Mapping[str, str]]


@contextlib.contextmanager
def members(
    place: Path, count: int, environment: Environment | None = None, **given: object
) -> Iterator[Job]:
    """Members on one node; `environment` says what else each of them finds. All is gone afterwards."""
    port = free_port()

    def work(number: int) -> None:
        os.environ.update(
            RANK=str(number),
            WORLD_SIZE=str(count),
            LOCAL_RANK=str(number),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        os.environ.update(environment(number) if environment is not None else {})
        live(place, **{**QUICK, **given})

    with ranks(place, count, work, meet=False) as forked:
        job = Job(place, forked)
        try:
            yield job
            wait_until(lambda: not keepers(place), 10, "no keeper is left")
            # A member that ends while the kernel still takes a killed keeper apart leaves it to the next one
            # who looks.
            for path in [Path(found.read_text()) for found in place.glob("keeper[0-9]")]:
                wait_until(lambda path=path: sweep(path) or not path.parent.exists(), 10, f"{path} is gone")
        finally:
            for pid in keepers(place):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.drill
def test_members_go_on_without_the_one_that_started_their_keeper(tmp_path: Path) -> None:
    """And the keeper heeds no signal that is meant for them."""
    with members(tmp_path, 3, active_world_size=2) as job:
        first = job.await_plan(0, 0, 1, 2)
        assert (first.order, first.reserves) == ([0, 1], [2])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(job.keeper(), number)
        job.ranks.signal(signal.SIGKILL, 0)
        second = job.await_plan(1, 1, 2)
        assert (second.order, second.reserves) == ([2, 1], [])
        assert second.faults[0].exit_code == -9
        assert second.reason == "death by SIGKILL (infrastructure) may not happen again"
        job.finish()
        assert job.ranks.wait() == [-9, 0, 0]
        assert "member 0 (process" in job.log()


def test_a_plain_process_has_a_keeper_too_and_ends_when_that_is_killed(tmp_path: Path) -> None:
    def alone(number: int) -> Mapping[str, str]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        return {}

    with members(tmp_path, 1, alone) as job:
        assert job.await_plan(0, 0).order == [0]
        os.kill(job.keeper(), signal.SIGKILL)
        assert job.ranks.wait(10) == [33]


@pytest.mark.drill
def test_the_store_of_torchrun_is_used_where_there_is_one(tmp_path: Path) -> None:
    hosted = HostedStore("127.0.0.1")
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(hosted.port)}
    for restart in ("0", "1"):  # torchrun starts its workers again, and its store goes on
        place = tmp_path / restart
        place.mkdir()
        with members(place, 2, lambda number, n=restart: {**env, "TORCHELASTIC_RESTART_COUNT": n}) as job:
            job.await_plan(0, 0, 1)
            job.finish()
            assert job.ranks.wait() == [0, 0]
    hosted.close()


def two_nodes(number: int) -> Mapping[str, str]:
    """Members 0 and 1 on one node, 2 and 3 on the other."""
    return {
        "LOCAL_RANK": str(number % 2),
        "SLURMD_NODENAME": "node",
        "GROUP_RANK": str(number // 2),
        "GROUP_WORLD_SIZE": "2",
    }


@pytest.mark.drill
def test_a_node_whose_keeper_is_stopped_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    with members(tmp_path, 4, two_nodes, min_world_size=2, heartbeat_timeout=2.0) as job:
        assert job.await_plan(0, 0, 1, 2, 3).order == [0, 1, 2, 3]
        stopped = job.keeper("node.1")
        os.kill(stopped, signal.SIGSTOP)
        second = job.await_plan(1, 0, 1)
        assert second.order == [0, 1]
        assert {fault.kind for fault in second.faults} == {FaultKind.SILENT}
        job.finish()
        assert job.ranks.wait() == [0, 0, 33, 33]
        os.kill(stopped, signal.SIGCONT)


@pytest.mark.drill
def test_a_keeper_that_is_stopped_for_a_while_takes_it_out_on_nobody(tmp_path: Path) -> None:
    with members(tmp_path, 2, hard_timeout=2.0, barrier_timeout=20.0) as job:
        job.await_plan(0, 0, 1)
        keeper = job.keeper()
        os.kill(keeper, signal.SIGSTOP)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 4, 10, "twice hard_timeout passes")
        os.kill(keeper, signal.SIGCONT)
        wait_until(lambda: "was itself stopped" in job.log(), 5, "the keeper says so")
        job.finish()
        assert job.ranks.wait() == [0, 0]


@pytest.mark.drill
def test_the_store_outlives_all_members_of_its_node(tmp_path: Path) -> None:
    with members(tmp_path, 4, two_nodes, active_world_size=2, granularity="node") as job:
        assert job.await_plan(0, 0, 1, 2, 3).order == [0, 1]
        job.ranks.signal(signal.SIGKILL, 0, 1)
        assert job.await_plan(1, 2, 3).order == [2, 3]
        job.finish()
        assert job.ranks.wait() == [-9, -9, 0, 0]


@pytest.mark.drill
def test_the_end_of_the_keeper_that_hosts_the_store_is_the_end_of_all(tmp_path: Path) -> None:
    with members(tmp_path, 4, two_nodes, active_world_size=2, hard_timeout=5.0) as job:
        job.await_plan(0, 0, 1, 2, 3)
        os.kill(job.keeper("node.0"), signal.SIGKILL)
        codes = job.ranks.wait(20)
        assert codes[:2] == [33, 33]
        assert 0 not in codes


def test_what_a_killed_keeper_left_is_removed_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places = {name: tmp_path / f"{DIRECTORY}{name}" for name in ("left", "new", "live")}
    listening = []
    for name, place in places.items():
        place.mkdir()
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.bind(str(place / SOCKET))
        if name == "live":
            channel.listen(1)
            listening.append(channel)
        else:
            channel.close()
        if name != "new":
            os.utime(place, (0, 0))
    sweep_stale()
    assert {name for name, place in places.items() if place.exists()} == {"new", "live"}
    for channel in listening:
        channel.close()


# --- joining, without processes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}, (3, 4, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, (0, 1, 0)),
    ],
    ids=["alone", "torchrun", "srun", "batch script"],
)
def test_who_a_process_is(environ: dict[str, str], expected: tuple[int, int, int]) -> None:
    found = Ranks.from_environment(environ)
    assert (found.member, found.members, found.local_rank) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is '', which is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', which is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "set MASTER_ADDR and MASTER_PORT"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK 0 has to be LOCAL_RANK 0",
        ),
        ({"HOLDFAST_RESTART": "{"}, "HOLDFAST_RESTART in the environment is not what"),
    ],
)
def test_what_does_not_fit_together_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        join(settings(), environ)


def test_a_member_of_the_launcher_finds_all_handed_over() -> None:
    hosted = HostedStore("127.0.0.1")
    handed = KeeperHandover(host="127.0.0.1", port=hosted.port, keeper="/somewhere", members=4, node="n7")
    joined = join(settings(), {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **handed.to_environment()})
    assert (joined.member, joined.members, joined.local_rank) == (1, 4, 1)
    assert (joined.node, joined.keeper_path) == ("n7", "/somewhere")
    assert joined.store is not None
    joined.store.set("a", "b")
    assert joined.client().get("a") == b"b"
    joined.close()
    hosted.close()


def test_who_cannot_join_says_what_it_waited_for() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    nowhere = {**environ, "MASTER_PORT": str(free_port())}
    with pytest.raises(HandedOverError, match="cannot reach the store at ") as refused:
        join(settings(barrier_timeout=0.5), nowhere)
    assert refused.value.exit_code == 33
    hosted = HostedStore("127.0.0.1")
    without_keeper = {**environ, "MASTER_PORT": str(hosted.port)}
    with pytest.raises(HandedOverError, match=r"waited 0\.5 s for the keeper of"):
        join(settings(barrier_timeout=0.5), without_keeper)
    hosted.close()


def test_a_keeper_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with pytest.raises(HandedOverError, match=rf"cannot be reached at {tmp_path}/none: No such file"):
        lookout._connect(str(tmp_path / "none"))


@pytest.mark.drill
def test_a_keeper_that_cannot_start_says_why() -> None:
    with pytest.raises(HandedOverError, match=r"inprocess\.assign = 'no_such_module:f' cannot be found"):
        join(settings(assign="no_such_module:f"), {})
