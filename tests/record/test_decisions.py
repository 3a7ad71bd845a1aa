"""One decision for all, with real c10d stores in real processes."""

from __future__ import annotations

import json
import signal
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from holdfast.errors import ControlError, DecisionTimeoutError, LeaseLostError, UsageError
from holdfast.record.attempts import begin_attempt
from holdfast.record.decisions import Decisions, read_key
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, claim
from kit.harness import finish, job, python, wait_until


class Choice(msgspec.Struct, frozen=True):
    checkpoint: str
    step: int


@pytest.fixture
def fence(control: ControlDirectory, fence: Fence) -> Fence:
    begin_attempt(control, fence, "launch", 4)
    return fence


def durable(control: ControlDirectory, name: str = "resume") -> Choice:
    return msgspec.json.decode((control.attempt(1) / "decisions" / f"{name}.json").read_bytes(), type=Choice)


GROUP = """
import json, multiprocessing, os, sys
from datetime import timedelta
from pathlib import Path
import msgspec
import torch.distributed as dist
from holdfast.record.decisions import Decisions
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence

class Choice(msgspec.Struct, frozen=True):
    checkpoint: str
    step: int

def member(rank, port, barrier, queue):
    control = ControlDirectory.open(Path(sys.argv[1]))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    decisions = Decisions(control, Fence(control, 1), 1, store)
    seen = {}
    for round in range(5):
        barrier.wait(20)
        if (rank + round) % 4 < 3:
            chosen = decisions.decide(f"round{round}", Choice, lambda: Choice(f"of-rank-{rank}", rank))
        else:
            chosen = decisions.await_decision(f"round{round}", Choice, 20)
        seen[round] = msgspec.to_builtins(chosen)
    queue.put((rank, seen))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    barrier, queue, ports = context.Barrier(4), context.Queue(), context.Queue()

    def host():
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports.put(server.port)
        done.wait(60)

    done = context.Event()
    server = context.Process(target=host)
    server.start()
    port = ports.get(timeout=20)
    members = [context.Process(target=member, args=(rank, port, barrier, queue)) for rank in range(4)]
    for process in members:
        process.start()
    seen = dict(queue.get(timeout=30) for _ in members)
    for process in members:
        process.join(20)
    # One that comes late, when everybody else has gone:
    late = dist.TCPStore("127.0.0.1", port, is_master=False)
    control = ControlDirectory.open(Path(sys.argv[1]))
    decisions = Decisions(control, Fence(control, 1), 1, late)
    seen["late"] = {
        n: msgspec.to_builtins(decisions.await_decision(f"round{n}", Choice, 5)) for n in range(5)
    }
    done.set()
    server.join(20)
    print(json.dumps(seen))
"""


def test_processes_that_decide_at_once_all_get_the_same_and_it_is_durable(
    tmp_path: Path, control: ControlDirectory, fence: Fence
) -> None:
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    result = finish(python(script, str(control.path)), cwd=tmp_path, timeout=60)
    assert result.code == 0, result.text
    seen = json.loads(result.out)
    assert len(seen) == 5
    for number in range(5):
        of_round = {json.dumps(choices[str(number)]) for choices in seen.values()}
        assert len(of_round) == 1, f"round {number}: {of_round}"
        assert msgspec.to_builtins(durable(control, f"round{number}")) == json.loads(of_round.pop())


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


def test_the_first_durable_choice_is_everybodys(
    control: ControlDirectory, fence: Fence, store: dist.HashStore
) -> None:
    decisions = Decisions(control, fence, 1, store)
    mine = Choice("3fa9c1d2", 120)
    assert decisions.decide("resume", Choice, lambda: mine) == mine
    assert decisions.decide("resume", Choice, lambda: Choice("00000000", 0)) == mine
    assert decisions.await_decision("resume", Choice, 1.0) == mine
    assert durable(control) == mine
    assert Decisions(control, fence, 2, store).decide("resume", Choice, lambda: Choice("b", 1)).step == 1


def test_a_winner_that_dies_before_the_compare_and_set_has_still_decided(
    control: ControlDirectory, fence: Fence, store: dist.HashStore
) -> None:
    mine = Choice("3fa9c1d2", 120)

    class DiedError(Exception):
        pass

    class Dying(dist.HashStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise DiedError

    with pytest.raises(DiedError):
        Decisions(control, fence, 1, Dying()).decide("resume", Choice, lambda: mine)
    assert durable(control) == mine
    with pytest.raises(DecisionTimeoutError):
        Decisions(control, fence, 1, store).await_decision("resume", Choice, 0.05)
    chosen = Decisions(control, fence, 1, store).decide(
        "resume", Choice, lambda: pytest.fail("nothing is left to choose")
    )
    assert chosen == mine
    assert Decisions(control, fence, 1, store).await_decision("resume", Choice, 1.0) == mine


def test_who_does_not_learn_the_decision_in_time_says_so_and_does_not_choose(
    control: ControlDirectory, fence: Fence, store: dist.HashStore
) -> None:
    started = time.monotonic()
    with pytest.raises(DecisionTimeoutError, match=r"waited 0\.3 s for the decision 'resume'") as caught:
        Decisions(control, fence, 1, store).await_decision("resume", Choice, 0.3)
    assert 0.3 <= time.monotonic() - started < 2
    assert caught.value.exit_code == 21
    assert not (control.attempt(1) / "decisions").exists()


def test_a_stale_epoch_decides_nothing(
    control: ControlDirectory, fence: Fence, store: dist.HashStore
) -> None:
    """Scenario 28."""
    claim(control, "launch", 5.0)
    decisions = Decisions(control, fence, 1, store)
    with pytest.raises(LeaseLostError, match="refused to decide resume"):
        decisions.decide("resume", Choice, lambda: Choice("3fa9c1d2", 120))
    assert not (control.attempt(1) / "decisions").exists()
    assert not store.check(["decision/1/resume"])


def test_a_stale_epoch_does_not_pass_on_an_earlier_decision_either(
    control: ControlDirectory, fence: Fence, store: dist.HashStore
) -> None:
    Decisions(control, fence, 1, dist.HashStore()).decide("resume", Choice, lambda: Choice("a", 1))
    claim(control, "launch", 5.0)
    with pytest.raises(LeaseLostError):
        Decisions(control, fence, 1, store).decide("resume", Choice, lambda: Choice("b", 2))
    assert not store.check(["decision/1/resume"])


def test_a_store_that_contradicts_the_durable_decision_is_an_error(
    control: ControlDirectory, fence: Fence, store: dist.HashStore
) -> None:
    store.set("decision/1/resume", '{"checkpoint":"other","step":7}')
    with pytest.raises(ControlError, match=r"the store says .*other.* but .*resume\.json says .*3fa9c1d2"):
        Decisions(control, fence, 1, store).decide("resume", Choice, lambda: Choice("3fa9c1d2", 120))
    store.set("decision/1/next", "garbage")
    with pytest.raises(ControlError, match="the store's value for the decision 'next' is not a Choice"):
        Decisions(control, fence, 1, store).await_decision("next", Choice, 1.0)


def test_a_damaged_durable_decision_is_an_error_that_names_the_file(
    control: ControlDirectory, fence: Fence, store: dist.HashStore
) -> None:
    decisions = Decisions(control, fence, 1, store)
    decisions.decide("resume", Choice, lambda: Choice("3fa9c1d2", 120))
    (control.attempt(1) / "decisions" / "resume.json").write_bytes(b"{")
    with pytest.raises(ControlError, match=r"decisions/resume\.json is not a Choice"):
        decisions.decide("resume", Choice, lambda: Choice("3fa9c1d2", 120))


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden", "x" * 101])
def test_a_name_that_could_leave_the_directory_is_refused(
    control: ControlDirectory, fence: Fence, store: dist.HashStore, name: str
) -> None:
    decisions = Decisions(control, fence, 1, store)
    with pytest.raises(UsageError, match="a decision's name"):
        decisions.decide(name, Choice, lambda: Choice("3fa9c1d2", 120))
    with pytest.raises(UsageError, match="a decision's name"):
        decisions.await_decision(name, Choice, 0.1)


HOST = """
import sys, time
from pathlib import Path
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
Path(sys.argv[1]).write_text(f"{store.port}\\n")
time.sleep(60)
"""


def test_a_store_whose_host_stops_or_dies_ends_the_wait_in_time(
    tmp_path: Path, control: ControlDirectory, fence: Fence
) -> None:
    """TCPStore's own timeout does not cover `check` and `compare_set`."""
    script = tmp_path / "host.py"
    script.write_text(HOST)
    port = tmp_path / "port"

    def waits_end(client: dist.TCPStore, said: str) -> None:
        decisions = Decisions(control, fence, 1, client, store_timeout=0.5)
        started = time.monotonic()
        with pytest.raises(DecisionTimeoutError, match=said):
            decisions.await_decision("resume", Choice, 0.5)
        with pytest.raises(DecisionTimeoutError, match=said):
            decisions.decide("resume", Choice, lambda: Choice("3fa9c1d2", 120))
        assert time.monotonic() - started < 4

    with job(python(script, str(port)), cwd=tmp_path) as running:
        wait_until(lambda: port.exists() and port.read_text().endswith("\n"), 30, "the store is up")
        first, second = (
            dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, timeout=timedelta(seconds=5))
            for _ in range(2)
        )
        first.set("known", "value")
        assert read_key(second, "known", 1.0, "a key") == b"value"
        running.signal(signal.SIGSTOP)
        waits_end(first, "did not answer for")
        running.signal(signal.SIGKILL)
        running.process.wait(10)
        waits_end(second, "lost the store")
    assert durable(control) == Choice("3fa9c1d2", 120)
