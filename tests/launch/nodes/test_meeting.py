"""The meeting of the nodes, on a real store: how long each of them waits, and for what."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from holdfast.errors import DecisionTimeoutError, ExitCode
from holdfast.launch.nodes.attempt import StopRun
from holdfast.launch.nodes.meeting import Endpoints, MeetingHandler, StoreLostError
from holdfast.policy import placement
from holdfast.record import secret
from holdfast.record.group import listen
from holdfast.record.secret import SealedStore, to_cut
from kit.harness import wait_until


@pytest.fixture
def store() -> TCPStore:
    return make_store()


def make_store(port: int = 0) -> TCPStore:
    limit = timedelta(seconds=30)
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=limit)


class Node:
    """One node's part in the meeting, in a thread of its own."""

    def __init__(
        self,
        store: TCPStore,
        name: str,
        *,
        join_timeout: float = 60.0,
        unfit: str = "",
        endpoints: Endpoints | None = None,
        node_timeout: float = 30.0,
        run: str = "run",
    ) -> None:
        self.said: list[str] = []
        self.handler = MeetingHandler(
            endpoints or Endpoints([("127.0.0.1", store.port)], is_host=False, timeout=30.0),
            "meeting",
            run=run,
            secret=run.encode(),
            node=name,
            slots=1,
            role="default",
            min_nodes=2,
            max_nodes=2,
            join_timeout=join_timeout,
            last_call=30.0,
            node_timeout=node_timeout,
            devices=list,
            unfit=lambda: unfit,
            say=self.said.append,
        )

    def meet(self) -> Future[Any]:
        found: Future[Any] = Future()

        def run(call: Callable[[], Any] = self.handler.next_rendezvous) -> None:
            try:
                found.set_result(call())
            except BaseException as error:  # noqa: BLE001 - for whoever asks
                found.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return found


@pytest.mark.drill
def test_a_spare_that_waited_for_long_is_still_there_when_the_group_meets_again(store: TCPStore) -> None:
    """Its time to join begins when there is something to join, not when it was started."""
    one, other, spare = Node(store, "a"), Node(store, "b"), Node(store, "c", join_timeout=5.0)
    for meeting in [one.meet(), other.meet()]:
        meeting.result(30)
    parked = spare.meet()
    wait_until(lambda: spare.said, 30, "the spare is parked")
    started = time.monotonic()
    wait_until(lambda: time.monotonic() - started > 5.2, 30, "its time to join has long passed")
    first = one.meet()  # the other one takes longer to end its workers
    wait_until(lambda: one.handler._read()[0].here.keys() >= {one.handler._agent}, 30, "one is back")
    back = time.monotonic()
    wait_until(lambda: time.monotonic() - back > 0.6, 30, "the spare has seen it")
    assert not parked.done(), parked.exception(0)
    second = other.meet()
    assert {first.result(30).rank, second.result(30).rank} == {0, 1}
    assert not parked.done()
    spare.handler.set_closed()
    with pytest.raises(StopRun, match="the run has ended"):
        parked.result(30)
    for node in (one, other, spare):
        node.handler.shutdown()


GARBAGE = [
    b"garbage",
    b"\xff\xfe\x00",
    b"{}",
    b"[" * 5000,
    b'{"round": 7, "over": {"code": 0, "why": "x"}}',
    b"hf1",
]


def test_what_a_stranger_writes_is_ignored_and_what_it_overwrites_is_written_again(store: TCPStore) -> None:
    stranger = store.clone()
    key = "holdfast.meeting.0/meeting"
    one, other = Node(store, "a"), Node(store, "b")
    stranger.set(key, GARBAGE[0])
    first = one.meet()
    wait_until(lambda: one.handler._read()[0].here, 10, "one is here, over what lay there")
    for garbage in GARBAGE:
        stranger.set(key, garbage)
    second = other.meet()
    assert {first.result(30).rank, second.result(30).rank} == {0, 1}
    for garbage in GARBAGE:
        stranger.set(key, garbage)
        assert one.handler.belongs()
        assert other.handler.over() is None
    stranger.delete_key(key)
    assert other.handler.belongs()
    for agent in (one, other):
        stranger.set(f"holdfast.meeting.0/pulse/{agent.handler._agent}", "no number")
        assert not agent.handler.silent_leader()
        assert not agent.handler.lost
    one.handler.finish(5, "done")
    stranger.set(key, GARBAGE[0])
    assert one.handler.over() == placement.RunOver(code=5, why="done")
    assert len([text for text in one.said if "is ignored" in text]) == 1
    for node in (one, other):
        node.handler.shutdown()


def test_nodes_of_two_runs_are_both_told_and_do_not_wait_for_each_other(store: TCPStore) -> None:
    one, other = Node(store, "a"), Node(store, "b", run="another run")
    waiting = one.meet()
    wait_until(lambda: one.handler._read()[0].here, 10, "one is here")
    for meeting in (other.meet(), waiting):
        with pytest.raises(StopRun, match="must see the same run directory") as stop:
            meeting.result(30)
        assert stop.value.code == ExitCode.CONTROL_UNUSABLE
    for node in (one, other):
        node.handler.shutdown()


def sealed(base: Any, scope: str = "round", told: list[str] | None = None) -> SealedStore:
    return SealedStore(base, b"secret", "run", scope, told.append if told is not None else None)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_sealed_store_says_only_what_the_run_wrote(garbage: bytes) -> None:
    told: list[str] = []
    base = HashStore()
    mine, theirs = sealed(base, told=told), sealed(base)
    base.set("k", garbage)
    assert not mine.check(["k"])
    with pytest.raises(RuntimeError, match="nothing at k"):
        mine.get("k")
    assert mine.compare_set("k", "", "first") == b"first"
    assert theirs.compare_set("k", "", "second") == b"first"
    assert theirs.get("k") == b"first"
    base.set("k", garbage)
    assert mine.compare_set("k", "first", "next") == b"next"
    assert theirs.get("k") == b"next"
    old = bytes(base.get("k"))
    assert theirs.compare_set("k", "next", "last") == b"last"
    for raw in (garbage, old):
        base.set("k", raw)
        assert theirs.get("k") == b"last", "who has seen it writes it again"
        assert mine.get("k") == b"last"
    assert sealed(base, "another round").check(["k"]) is False
    base.set("n", garbage)
    assert [mine.add("n", 1), theirs.add("n", 1), mine.add("n", 0)] == [1, 2, 2]
    base.set("n", garbage)
    assert theirs.add("n", 1) == 3
    assert len(told) == 1


def test_what_a_process_said_is_written_again_also_if_it_never_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secret, "MIND", 0.0)
    base = HashStore()
    mine = sealed(base)
    mine.set("announcement", "attempt 4")
    base.set("announcement", "garbage")
    mine.mind()
    assert sealed(base).get("announcement") == b"attempt 4"


def test_counts_of_many_at_once_are_all_counted(store: TCPStore) -> None:
    stores = [sealed(store.clone()) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: [one.add("n", 1) for _ in range(20)], stores))
    assert stores[0].add("n", 0) == 160


def test_who_never_leaves_off_ends_it_with_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "TRIES", 50)

    class Busy(HashStore):
        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            super().set(key, b"garbage")
            return b"garbage"

    with pytest.raises(DecisionTimeoutError, match="changed 50 times under our hands"):
        sealed(Busy()).compare_set("k", "", "mine")


@pytest.mark.parametrize(
    ("strangers", "cut"),
    [
        ({}, []),
        (dict.fromkeys(range(8), ("a", 0.0)), []),
        (dict.fromkeys(range(3), ("a", -6.0)), [0, 1, 2]),
        (dict.fromkeys(range(10), ("a", -2.0)), [0, 1]),
        (dict.fromkeys(range(100), ("a", -0.5)), []),
        ({i: (f"{i}", -2.0 - i / 1000) for i in range(70)}, [69, 68, 67, 66, 65, 64]),
        ({i: (f"{i}", 0.0) for i in range(258)}, [0, 1]),
    ],
)
def test_of_connections_without_a_proof_the_oldest_go(
    strangers: dict[int, tuple[str, float]], cut: list[int]
) -> None:
    assert to_cut(strangers, 0.0) == cut


@pytest.mark.parametrize(
    ("address", "alone", "bound"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("localhost", False, "127.0.0.1"),
        ("::1", False, "::1"),
        ("", False, ""),
        ("192.0.2.1", False, ""),  # nobody's
        ("no.such.name.invalid", True, ""),
    ],
)
def test_a_socket_listens_where_others_look_for_it(address: str, alone: bool, bound: str) -> None:
    with listen(0, address, alone=alone) as found:
        assert found.getsockname()[0] == (bound or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0"))


def test_a_node_that_may_not_take_part_does_not_wait_for_ever_where_no_group_runs(store: TCPStore) -> None:
    alone = Node(store, "a", join_timeout=1.0, unfit="this node is excluded: ECC errors")
    with pytest.raises(RendezvousTimeoutError, match=r"may not take part: a \(this node is excluded"):
        alone.meet().result(30)
    assert alone.said == ["waiting: this node is excluded: ECC errors"]
    alone.handler.shutdown()


def two(first: TCPStore, second: TCPStore) -> Endpoints:
    endpoints = [("127.0.0.1", first.port), ("127.0.0.1", second.port)]
    return Endpoints(endpoints, is_host=False, timeout=30.0)


def test_who_comes_later_goes_where_the_others_have_moved_to() -> None:
    """Else an agent that is started again meets nobody at the first endpoint, for as long as it waits."""
    first, second = make_store(), make_store()
    there = two(first, second)
    assert there.begin().port == second.port
    assert there.exhausted
    port = second.port
    del second
    wait_until(lambda: not _listens(port), 10, "the second store is gone")
    alone = Endpoints([("127.0.0.1", first.port), ("127.0.0.1", port)], is_host=False, timeout=30.0)
    assert alone.begin().port == first.port


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_who_waits_finds_those_who_had_to_move(store: TCPStore) -> None:
    """After a cut one side still has the first store and waits there, the other side has the second one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoints = Endpoints([("127.0.0.1", store.port), ("127.0.0.1", port)], is_host=False, timeout=30.0)
    node = Node(store, "a", endpoints=endpoints, node_timeout=1.0)
    waiting = node.meet()
    wait_until(lambda: node.handler._read()[0].here, 10, "it waits at the first endpoint")
    assert not waiting.done()
    moved = make_store(port)
    with pytest.raises(StoreLostError, match=f"the other nodes meet at 127.0.0.1:{moved.port}"):
        waiting.result(20)
    node.handler.move(node.handler.look_at_store())
    assert node.handler.endpoint == f"127.0.0.1:{moved.port}"


PULSE = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from holdfast.launch.nodes.meeting import Pulse
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=30))
pulse = Pulse(store, "pulse", 0.2, 1.0)
print("beating", flush=True)
sys.stdin.readline()
print(repr(pulse.lost), flush=True)
"""


@pytest.mark.drill
def test_an_agent_that_was_stopped_itself_does_not_take_the_store_for_lost(store: TCPStore) -> None:
    command = [sys.executable, "-c", PULSE, str(store.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "beating\n"
            for _ in range(3):
                child.send_signal(signal.SIGSTOP)
                time.sleep(2.0)  # longer than its timeout
                child.send_signal(signal.SIGCONT)
                time.sleep(0.5)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "''\n"
        finally:
            child.kill()
