"""The lease: one current epoch, whoever races, dies, stops, hangs or comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from harness import Job, finish, job, python, wait_until
from holdfast.control import lease
from holdfast.control.directory import ControlDirectory, create_record
from holdfast.control.holder import Holder, this_process
from holdfast.control.lease import (
    Beat,
    Claim,
    Fence,
    LeaseKeeper,
    claim,
    current_epoch,
    read_beat,
    read_claim,
)
from holdfast.errors import ControlError, LeaseLostError, RunIsLiveError, UsageError
from holdfast.files import replace_atomic


@pytest.fixture
def control(tmp_path: Path) -> ControlDirectory:
    return ControlDirectory.open_or_create(tmp_path / "run")[0]


def held_elsewhere(control: ControlDirectory, *, epoch: int = 1, ttl: float = 0.4, **holder: object) -> Claim:
    """A claim written by hand, of a holder that cannot be seen from here unless `holder` says otherwise."""
    who = {"boot": "another machine", **holder}
    made = Claim(
        epoch=epoch,
        owner="other",
        holder=msgspec.structs.replace(this_process(), **who),
        ttl=ttl,
        at=0.0,
        evidence="by hand",
    )
    assert create_record(control.lease / f"{epoch:08d}.claim", made)
    return made


def beat(control: ControlDirectory, *, epoch: int = 1, count: int = 1, at: float | None = None) -> None:
    record = Beat(count=count, at=time.time() if at is None else at)
    replace_atomic(control.lease / f"{epoch:08d}.beat", msgspec.json.encode(record), durable=False)


def timed(action: Callable[[], Claim]) -> tuple[Claim, float]:
    started = time.monotonic()
    return action(), time.monotonic() - started


HOLDER = """
import json, os, shutil, sys, time
from pathlib import Path
from holdfast.control.attempts import begin_attempt
from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import Fence, LeaseKeeper, claim
from holdfast.control.standing import Standing, StandingBook
from holdfast.errors import HoldfastError
from holdfast.files import replace_atomic

run, out, owner, ttl = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
control = ControlDirectory.open(run)

def wait_for(name):
    deadline = time.monotonic() + 30
    while not (out / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)

wait_for("go")
try:
    held = claim(control, owner, ttl)
except HoldfastError as error:
    print(type(error).__name__, error)
    raise SystemExit(error.exit_code) from None
keeper = LeaseKeeper(control, held, lambda why: (out / "lost").write_text(why))
fence = Fence(control, held.epoch)
(out / f"claimed-{owner}").write_text(str(held.epoch))
wait_for("act")
root = run / "checkpoints"

def commit():
    (root / ".staging" / "new").rename(root / "new")

def delete():
    shutil.rmtree(root / "old")

def move_pointer():
    replace_atomic(root / "latest", b"new")

told = {}
for act in (commit, delete, move_pointer) if root.exists() else ():
    try:
        with fence.guard(act.__name__):
            act()
        told[act.__name__] = "done"
    except HoldfastError as error:
        told[act.__name__] = type(error).__name__
for name, act in {
    "begin": lambda: begin_attempt(control, fence, owner, 1),
    "condemn": lambda: StandingBook(control).append(fence, "3fa9c1d2", Standing.CONDEMNED, ["x"]),
}.items():
    try:
        act()
        told[name] = "done"
    except HoldfastError as error:
        told[name] = type(error).__name__
keeper.release()
print(json.dumps(told))
"""


@contextlib.contextmanager
def holder(control: ControlDirectory, out: Path, owner: str, ttl: float) -> Iterator[Job]:
    script = out / "holder.py"
    if not script.exists():  # an earlier holder may be reading it right now
        script.write_text(HOLDER)
    with job(python(script, str(control.path), str(out), owner, str(ttl)), cwd=out) as running:
        yield running


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# --- claims --------------------------------------------------------------------------------------------


def test_the_first_claim_is_epoch_one_and_releasing_lets_the_next_one_in_at_once(
    control: ControlDirectory,
) -> None:
    assert current_epoch(control) == 0
    held = claim(control, "one", 30.0)
    assert (held.epoch, held.evidence) == (1, "first claim")
    keeper = LeaseKeeper(control, held, pytest.fail)
    with pytest.raises(RunIsLiveError, match=rf"held by pid {os.getpid()} on .*epoch 1.*Stop it first"):
        claim(control, "two", 30.0)
    keeper.release()
    keeper.release()
    next_held, took = timed(lambda: claim(control, "two", 30.0))
    assert (next_held.epoch, next_held.evidence) == (2, "epoch 1 was released")
    assert took < 2


def test_attempts_of_one_launch_follow_each_other_without_waiting(control: ControlDirectory) -> None:
    lost: list[str] = []
    keeper = LeaseKeeper(control, claim(control, "launch", 1.0), lost.append)
    held, took = timed(lambda: claim(control, "launch", 1.0))
    assert held.epoch == 2
    assert "same launch" in held.evidence
    assert took < 0.5
    wait_until(lambda: lost, 2, "the former attempt's keeper says that it lost")
    assert "epoch 2 was claimed over our 1" in lost[0]
    keeper.release()


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf"), lease.MAX_TTL + 1])
def test_a_senseless_time_to_live_is_refused(control: ControlDirectory, ttl: float) -> None:
    with pytest.raises(UsageError, match="time-to-live"):
        claim(control, "one", ttl)
    assert current_epoch(control) == 0


def test_of_processes_that_race_for_a_claim_exactly_one_gets_it(
    tmp_path: Path, control: ControlDirectory
) -> None:
    """A second launcher for a live run is refused, however close they come."""
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(holder(control, tmp_path, f"launch{n}", 10.0)) for n in range(6)]
        (tmp_path / "go").touch()
        wait_until(lambda: sum(one.process.poll() is None for one in jobs) == 1, 20, "all but one end")
        assert len(list(tmp_path.glob("claimed-*"))) == 1
        (tmp_path / "act").touch()
        results = [one.wait(20) for one in jobs]
    assert sorted(result.code for result in results) == [0, 20, 20, 20, 20, 20], [r.text for r in results]
    assert all("RunIsLiveError run " in result.out for result in results if result.code)
    assert current_epoch(control) == 1


TURNS = """
import sys, time
from pathlib import Path
from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import LeaseKeeper, claim, current_epoch
from holdfast.errors import RunIsLiveError

control = ControlDirectory.open(Path(sys.argv[1]))
deadline = time.monotonic() + 30
for _ in range(5):
    while True:
        try:
            held = claim(control, sys.argv[2], 5.0)
            break
        except RunIsLiveError:
            assert time.monotonic() < deadline
    keeper = LeaseKeeper(control, held, lambda why: print("LOST", why))
    assert current_epoch(control) == held.epoch
    print(held.epoch, flush=True)
    keeper.release()
"""


def test_processes_that_release_at_once_take_the_epochs_in_turn(
    tmp_path: Path, control: ControlDirectory
) -> None:
    script = tmp_path / "turns.py"
    script.write_text(TURNS)
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(job(python(script, str(control.path), f"launch{n}"), cwd=tmp_path))
            for n in range(4)
        ]
        results = [one.wait(40) for one in jobs]
    epochs = [int(epoch) for result in results for epoch in result.out.split()]
    assert sorted(epochs) == list(range(1, 21)), [result.text for result in results]


def test_a_holder_that_was_killed_is_followed_at_once(tmp_path: Path, control: ControlDirectory) -> None:
    (tmp_path / "go").touch()
    with holder(control, tmp_path, "killed", 60.0) as running:
        wait_until(lambda: (tmp_path / "claimed-killed").exists(), 10, "the holder claims")
        running.signal(signal.SIGKILL)
        running.process.wait(10)
        held, took = timed(lambda: claim(control, "next", 60.0))
    assert held.epoch == 2
    assert held.evidence == f"holder of epoch 1, pid {running.pid} on {held.holder.host}, is dead"
    assert took < 2


def test_a_stopped_holder_is_fenced_off_after_its_time_to_live_and_can_do_no_harm(
    tmp_path: Path, control: ControlDirectory
) -> None:
    """Scenario 28: commit, deletion and pointer move of a cut-off group are refused."""
    root = control.path / "checkpoints"
    for name in ("old/data", ".staging/new/data", "latest"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    (tmp_path / "go").touch()
    with holder(control, tmp_path, "stopped", 2.0) as running:
        wait_until(lambda: (tmp_path / "claimed-stopped").exists(), 10, "the holder claims")
        running.signal(signal.SIGSTOP)
        with pytest.raises(RunIsLiveError, match=f"held by pid {running.pid} .*alive, last renewed"):
            claim(control, "next", 5.0)

        def try_claim() -> Claim | None:
            with contextlib.suppress(RunIsLiveError):
                return claim(control, "next", 5.0)
            return None

        held, took = timed(lambda: wait_until(try_claim, 15, "the lapsed lease is taken"))
        assert (held.epoch, held.evidence) == (2, "epoch 1 lapsed: no renewal for 2 s")
        assert took >= 2
        before = tree(control.path)
        running.signal(signal.SIGCONT)
        wait_until(lambda: (tmp_path / "lost").exists(), 5, "the old holder learns that it lost")
        (tmp_path / "act").touch()
        result = running.wait(15)
    told = json.loads(result.out)
    assert set(told) == {"commit", "delete", "move_pointer", "begin", "condemn"}
    assert set(told.values()) == {"LeaseLostError"}
    assert tree(control.path) == before, "the old holder changed something"
    with Fence(control, 2).guard("go on"):
        pass


def test_a_holder_elsewhere_that_renews_is_left_alone(control: ControlDirectory) -> None:
    held_elsewhere(control, ttl=10.0)
    beat(control, count=1)
    renewal = threading.Timer(0.3, beat, args=(control,), kwargs={"count": 2})
    renewal.start()
    with pytest.raises(RunIsLiveError, match="renewed the lease while we watched"):
        claim(control, "next", 10.0)
    renewal.join()
    assert current_epoch(control) == 1


@pytest.mark.parametrize("where", [{"boot": "other"}, {"pid_namespace": 1}, {"host": "other"}])
def test_a_holder_elsewhere_is_not_judged_dead_but_waited_for(
    control: ControlDirectory, where: dict[str, object]
) -> None:
    held_elsewhere(control, **{"boot": this_process().boot, "pid": 2**22 + 1, **where})
    beat(control)  # fresh, but its clock means nothing here
    held, took = timed(lambda: claim(control, "next", 5.0))
    assert held.evidence == "epoch 1 lapsed: no renewal for 0.4 s"
    assert 0.4 <= took < 3


def test_a_reused_pid_does_not_keep_the_lease(control: ControlDirectory) -> None:
    me = this_process()
    held_elsewhere(control, boot=me.boot, started=me.started - 1, ttl=60.0)
    beat(control)
    held, took = timed(lambda: claim(control, "next", 5.0))
    assert "is dead" in held.evidence
    assert took < 2


@pytest.mark.parametrize("contents", [None, b"", b"garbage", b'{"count": "x"}', b"[" * 100_000])
def test_a_live_holder_without_a_sound_beat_is_given_its_time_to_live(
    control: ControlDirectory, contents: bytes | None
) -> None:
    """As after a crash between the claim and the first beat: bounded, and not wrongly dead."""
    held_elsewhere(control, boot=this_process().boot)  # this very process, so alive
    if contents is not None:
        (control.lease / "00000001.beat").write_bytes(contents)
    held, took = timed(lambda: claim(control, "next", 5.0))
    assert "lapsed" in held.evidence
    assert 0.4 <= took < 3


def test_a_holder_that_recovers_from_a_garbage_beat_is_alive(control: ControlDirectory) -> None:
    held_elsewhere(control, ttl=10.0)
    (control.lease / "00000001.beat").write_bytes(b"garbage")
    renewal = threading.Timer(0.2, beat, args=(control,))
    renewal.start()
    with pytest.raises(RunIsLiveError, match="renewed"):
        claim(control, "next", 5.0)
    renewal.join()


@pytest.mark.parametrize("jump", [-1e6, +1e6])
def test_a_wall_clock_that_was_set_neither_takes_a_live_lease_nor_refuses_for_ever(
    control: ControlDirectory, jump: float
) -> None:
    held_elsewhere(control, boot=this_process().boot, ttl=10.0)  # this very process, so alive
    beat(control, at=time.time() + jump)
    renewal = threading.Timer(0.2, beat, args=(control,), kwargs={"count": 2, "at": time.time() + jump})
    renewal.start()
    with pytest.raises(RunIsLiveError, match="renewed the lease while we watched"):
        claim(control, "next", 5.0)
    renewal.join()
    held_elsewhere(control, epoch=2, boot=this_process().boot, ttl=0.4)
    beat(control, epoch=2, at=time.time() + jump)
    assert "lapsed" in claim(control, "next", 5.0).evidence


class FakeTime:
    """A clock that a test turns by hand."""

    def __init__(self, on_sleep: Callable[[float], None] = lambda seconds: None) -> None:
        self.now = 1000.0
        self.on_sleep = on_sleep

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep(seconds)


@pytest.mark.parametrize("moment", ["between two looks", "right after a look"])
def test_a_claimant_that_was_itself_stopped_past_the_deadline_looks_once_more(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    held_elsewhere(control, ttl=10.0)
    beat(control, count=1)

    def stopped_for_an_hour() -> None:
        clock.now += 3600
        beat(control, count=2)  # meanwhile the holder went on as usual

    clock = FakeTime(lambda seconds: stopped_for_an_hour())
    monkeypatch.setattr(lease, "time", clock)
    if moment == "right after a look":
        asked: list[Holder] = []

        def is_gone(holder: Holder) -> bool:
            asked.append(holder)
            if len(asked) == 2:  # the first time is before the watch
                stopped_for_an_hour()
            return False

        monkeypatch.setattr(lease, "is_gone", is_gone)
    with pytest.raises(RunIsLiveError, match="renewed"):
        claim(control, "next", 5.0)


@pytest.mark.parametrize("next_holder", ["lives", "releases"])
def test_a_claimant_that_is_overtaken_while_it_waits_judges_the_new_holder(
    control: ControlDirectory, next_holder: str
) -> None:
    held_elsewhere(control, ttl=20.0)

    def overtake() -> None:
        made = held_elsewhere(control, epoch=2, boot=this_process().boot)
        record = Beat(count=1, at=time.time(), released=next_holder == "releases")
        replace_atomic(control.lease / f"{made.epoch:08d}.beat", msgspec.json.encode(record))

    rival = threading.Timer(0.2, overtake)
    rival.start()
    if next_holder == "releases":
        assert claim(control, "me", 5.0).evidence == "epoch 2 was released"
    else:
        with pytest.raises(RunIsLiveError, match="epoch 2"):
            claim(control, "me", 5.0)
    rival.join()


def test_a_claim_that_keeps_losing_the_race_gives_up(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lease.create_record

    def rivals_come_first(path: Path, record: msgspec.Struct) -> bool:
        assert isinstance(record, Claim)
        assert real(path, msgspec.structs.replace(record, owner="rival"))
        replace_atomic(
            path.with_suffix(".beat"),
            msgspec.json.encode(Beat(count=1, at=0.0, released=True)),
            durable=False,
        )
        return real(path, record)

    monkeypatch.setattr(lease, "create_record", rivals_come_first)
    started = time.monotonic()
    with pytest.raises(RunIsLiveError, match="other launchers took every epoch"):
        claim(control, "me", 0.1)
    assert time.monotonic() - started < 3


def test_a_claim_goes_on_from_what_it_knows_when_the_listing_is_old(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may list a directory as it was a while ago."""
    for epoch in (1, 2):
        LeaseKeeper(control, claim(control, "one", 5.0), pytest.fail).release()
        assert current_epoch(control) == epoch
    monkeypatch.setattr(lease, "list_names", lambda path: ["00000001.claim"])
    assert claim(control, "two", 5.0).epoch == 3


@pytest.mark.parametrize("ttl", [0, -1, 1e9, '"x"', "null"])
def test_a_damaged_claim_is_an_error_that_names_the_file(control: ControlDirectory, ttl: object) -> None:
    held_elsewhere(control)
    path = control.lease / "00000001.claim"
    path.write_text(re.sub(r'"ttl":[0-9.]+', f'"ttl":{ttl}', path.read_text()))
    with pytest.raises(ControlError, match=r"00000001\.claim"):
        claim(control, "next", 5.0)
    assert current_epoch(control) == 1


def test_a_claim_under_another_epochs_name_is_damage(control: ControlDirectory) -> None:
    held_elsewhere(control)
    (control.lease / "00000001.claim").rename(control.lease / "00000007.claim")
    with pytest.raises(ControlError, match=r"00000007\.claim says epoch 1"):
        claim(control, "next", 5.0)


def test_other_names_in_the_lease_directory_are_no_epochs(control: ControlDirectory) -> None:
    held_elsewhere(control)
    for name in ("7.claim", "²²²²²²²²².claim", ".00000009.claim.abc.tmp", "00000009.beat", "x.claim"):
        (control.lease / name).touch()
    assert current_epoch(control) == 1


# --- the fence -----------------------------------------------------------------------------------------

STOPS_INSIDE = """
import os, signal, sys
from pathlib import Path
from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import Fence, claim
from holdfast.errors import LeaseLostError

control = ControlDirectory.open(Path(sys.argv[1]))
fence = Fence(control, claim(control, "stopped", 0.5).epoch)
with fence.guard("stop"):
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    with fence.guard("go on"):
        print("WENT ON")
except LeaseLostError:
    print("refused")
"""


def test_a_process_stopped_inside_a_guard_delays_a_claim_by_a_time_to_live_only(
    tmp_path: Path, control: ControlDirectory
) -> None:
    script = tmp_path / "stops.py"
    script.write_text(STOPS_INSIDE)
    with job(python(script, str(control.path)), cwd=tmp_path) as running:
        stat = Path(f"/proc/{running.pid}/stat")
        wait_until(lambda: ") T " in stat.read_text(), 10, "the holder stops inside its guard")
        started = time.monotonic()
        with (
            pytest.raises(ControlError, match=r"00000001\.lock stayed locked for 0\.3 s"),
            Fence(control, 1, timeout=0.3).guard("commit"),
        ):
            pytest.fail("two were inside a guard at once")
        assert 0.3 <= time.monotonic() - started < 3
        held, took = timed(lambda: claim(control, "next", 5.0))
        assert held.epoch == 2
        assert took < 5
        with Fence(control, 2, timeout=0.5).guard("the new attempt works while the old one stays stopped"):
            pass
        running.signal(signal.SIGCONT)
        result = running.wait(10)
    assert result.out == "refused\n", result.text


def test_a_claim_waits_for_whoever_is_inside_a_guard(control: ControlDirectory) -> None:
    fence = Fence(control, claim(control, "launch", 20.0).epoch)
    seen: list[str] = []
    with fence.guard("commit"):
        thread = threading.Thread(target=lambda: seen.append(str(claim(control, "launch", 20.0).epoch)))
        thread.start()
        thread.join(0.3)
        assert current_epoch(control) == 1, "a claim fell between check and act"
        seen.append("committed")
    thread.join(10)
    assert seen == ["committed", "2"]
    with pytest.raises(LeaseLostError, match=r"refused to commit: this attempt holds epoch 1, but epoch 2"):
        fence.check("commit")


FORKS_INSIDE = """
import os, sys, time
from pathlib import Path
from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import Fence, claim

control = ControlDirectory.open(Path(sys.argv[1]))
fence = Fence(control, claim(control, "forks", 5.0).epoch, timeout=1.0)
with fence.guard("fork"):
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
with fence.guard("again"):
    print("again")
os.kill(child, 9)
os.waitpid(child, 0)
"""


def test_a_child_forked_inside_a_guard_does_not_keep_the_lock(
    tmp_path: Path, control: ControlDirectory
) -> None:
    """As a data loader's worker would be, while another thread commits."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS_INSIDE)
    result = finish(python(script, str(control.path)), cwd=tmp_path, timeout=20)
    assert result.out == "again\n", result.text


def test_a_node_whose_listing_is_old_is_fenced_off_by_the_lock_file(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 28, on a network file system that lists a directory as it was a while ago."""
    fence = Fence(control, claim(control, "launch", 5.0).epoch)
    claim(control, "launch", 5.0)
    monkeypatch.setattr(lease, "list_names", lambda path: ["00000001.claim"])
    with pytest.raises(LeaseLostError, match="epoch 2 exists"), fence.guard("commit"):
        pytest.fail("a stale epoch acted")


def test_a_run_directory_that_was_emptied_and_used_again_fences_off_the_old_attempt(
    control: ControlDirectory,
) -> None:
    lost: list[str] = []
    held = claim(control, "old", 1.0)
    fence = Fence(control, held.epoch)
    keeper = LeaseKeeper(control, held, lost.append)
    shutil.rmtree(control.lease)
    with pytest.raises(ControlError, match=r"cannot open .*00000001\.lock"), fence.guard("commit"):
        pytest.fail("acted without a lease directory")
    assert not control.lease.exists(), "a guard must not revive a deleted run"
    assert claim(control, "new", 5.0).epoch == held.epoch
    wait_until(lambda: lost, 2, "the old keeper notices")
    with pytest.raises(LeaseLostError, match="emptied or replaced"), fence.guard("commit"):
        pytest.fail("a stale attempt acted")
    keeper.release()
    assert read_beat(control, 1) is None, "the old keeper wrote into the new run's lease"


def test_an_epoch_that_was_never_claimed_is_refused(control: ControlDirectory) -> None:
    claim(control, "launch", 5.0)
    with pytest.raises(LeaseLostError, match=r"00000007\.claim is gone"):
        Fence(control, 7).check("commit")


# --- the keeper ----------------------------------------------------------------------------------------


def test_a_keeper_renews_and_keeps_the_lease_longer_than_its_time_to_live(control: ControlDirectory) -> None:
    held = claim(control, "one", 1.0)
    keeper = LeaseKeeper(control, held, pytest.fail)
    wait_until(lambda: (read_beat(control, 1) or Beat(count=0, at=0)).count >= 7, 10, "seven renewals")
    with pytest.raises(RunIsLiveError):
        claim(control, "two", 1.0)
    keeper.release()
    released = read_beat(control, 1)
    assert released is not None
    assert released.released


@pytest.mark.parametrize("fate", ["vanishes", "is a file", "cannot be written"])
def test_a_keeper_says_so_before_the_lease_lapses_when_it_cannot_renew(
    control: ControlDirectory, fate: str
) -> None:
    lost: list[tuple[float, str]] = []
    held = claim(control, "one", 2.0)
    keeper = LeaseKeeper(control, held, lambda why: lost.append((time.monotonic(), why)))
    started = time.monotonic()
    if fate == "cannot be written":  # root may write anywhere, so a directory takes the beat's name
        (control.lease / "00000001.beat").unlink()
        (control.lease / "00000001.beat").mkdir()
    else:
        control.lease.rename(control.lease.with_name("moved"))
        if fate == "is a file":
            control.lease.touch()
    wait_until(lambda: lost, 5, "the keeper gives up")
    keeper.release()
    assert len(lost) == 1
    assert lost[0][0] - started < held.ttl
    assert "no renewal for" in lost[0][1]


def test_a_short_outage_does_not_cost_the_lease(control: ControlDirectory) -> None:
    held = claim(control, "one", 2.0)
    keeper = LeaseKeeper(control, held, pytest.fail)
    moved = control.lease.with_name("moved")
    control.lease.rename(moved)
    wait_until(lambda: "gone" in keeper._trouble, 2, "one renewal fails")
    moved.rename(control.lease)
    before = read_beat(control, 1)
    wait_until(lambda: read_beat(control, 1) != before, 2, "the keeper renews again")
    keeper.release()


def test_a_renewal_that_hangs_with_its_file_system_is_noticed_before_the_lease_lapses(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = claim(control, "one", 1.0)
    lost: list[str] = []
    keeper = LeaseKeeper(control, held, lost.append)
    answers = threading.Event()
    started = time.monotonic()
    monkeypatch.setattr(lease, "replace_atomic", lambda *args, **kwargs: answers.wait(30))
    wait_until(lambda: lost, 5, "the watcher gives up")
    assert time.monotonic() - started < held.ttl + 0.3
    assert "does not answer" in lost[0]
    keeper.release()
    answers.set()


def test_an_unexpected_error_in_the_keeper_is_a_loss_and_not_silence(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    keeper = LeaseKeeper(control, claim(control, "one", 0.5), lost.append)

    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(lease, "replace_atomic", broken)
    wait_until(lambda: lost, 5, "the keeper says so")
    keeper.release()
    assert lost == ["renewing failed unexpectedly: ZeroDivisionError('a defect')"]


def test_after_a_loss_release_writes_nothing_and_may_be_called_from_the_handler(
    control: ControlDirectory,
) -> None:
    told: list[str] = []

    def on_lost(why: str) -> None:
        keeper.release()
        told.append(why)
        raise ValueError("a handler that fails must not be a second fault")

    keeper = LeaseKeeper(control, claim(control, "one", 0.5), on_lost)
    claim(control, "one", 5.0)
    wait_until(lambda: told, 5, "the handler ran")
    before = tree(control.lease)
    keeper.release()
    assert tree(control.lease) == before
    assert len(told) == 1
    last = read_beat(control, 1)
    assert last is not None
    assert not last.released


def test_a_keeper_that_was_stopped_stays_silent(control: ControlDirectory) -> None:
    """Between two attempts of one launch: the former epoch is neither renewed nor released nor lost."""
    keeper = LeaseKeeper(control, claim(control, "one", 0.3), pytest.fail)
    keeper.stop()
    keeper._thread.join(5)
    keeper._watcher.join(5)
    before = tree(control.lease)
    keeper.release()
    assert tree(control.lease) == before


def test_a_holder_that_did_not_run_for_a_time_to_live_does_not_renew_even_if_nobody_claimed(
    control: ControlDirectory,
) -> None:
    """A claimant may have watched it lapse and be about to act on that."""
    keeper = LeaseKeeper(control, claim(control, "one", 60.0), pytest.fail)
    keeper.stop()
    before = tree(control.lease)
    keeper._renewed -= 61
    with pytest.raises(LeaseLostError, match=r"did not run for 61\.\d s"):
        keeper._renew()
    assert tree(control.lease) == before


def test_a_keeper_is_not_started_for_an_epoch_that_is_already_over(control: ControlDirectory) -> None:
    held = claim(control, "one", 5.0)
    claim(control, "one", 5.0)
    with pytest.raises(LeaseLostError, match="epoch 2 was claimed over our 1"):
        LeaseKeeper(control, held, pytest.fail)
    assert read_beat(control, 1) is None


EXITS = """
import sys
from pathlib import Path
from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import LeaseKeeper, claim
control = ControlDirectory.open(Path(sys.argv[1]))
LeaseKeeper(control, claim(control, "exits", 600.0), print)
"""


def test_a_keeper_does_not_hold_up_the_end_of_its_process(tmp_path: Path, control: ControlDirectory) -> None:
    script = tmp_path / "exits.py"
    script.write_text(EXITS)
    result = finish(python(script, str(control.path)), cwd=tmp_path, timeout=10)
    assert (result.code, result.out) == (0, ""), result.text


# --- any interleaving ----------------------------------------------------------------------------------


class Interleavings(RuleBasedStateMachine):
    """Holders that claim, renew, release, stop and die in any order, on a clock turned by hand.

    The processes are pretended (a pid and a state), since thousands of real ones would take too long; the
    files and the code under test are real.
    """

    OWNERS = ("a", "b", "c", "d")
    TTL = 10.0

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.control = ControlDirectory.open_or_create(Path(self.folder.name))[0]
        self.state: dict[int, str] = {}
        self.claims: list[Claim] = []
        self.counts = 0
        self.clock = FakeTime(lambda seconds: self.live_ones_renew())
        self.claimant = 0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lease, "time", self.clock)
        self.patch.setattr(lease, "is_here", lambda holder: holder.host == "here")
        self.patch.setattr(lease, "is_gone", self.is_gone)
        self.patch.setattr(lease, "this_process", self.this_process)

    def is_gone(self, holder: Holder) -> bool:
        return holder.host == "here" and self.state[holder.pid] == "dead"

    def this_process(self) -> Holder:
        host = "here" if self.claimant % 2 else "elsewhere"
        return Holder(host=host, boot="b", pid_namespace=1, pid=self.claimant, started=1)

    def write_beat(self, made: Claim, *, released: bool) -> None:
        self.counts += 1
        record = Beat(count=self.counts, at=self.clock.time(), released=released)
        path = self.control.lease / f"{made.epoch:08d}.beat"
        replace_atomic(path, msgspec.json.encode(record), durable=False)

    def live_ones_renew(self) -> None:
        for made in self.claims:
            if self.state[made.holder.pid] == "live":
                self.write_beat(made, released=False)

    @rule(owner=st.sampled_from(OWNERS), beats=st.booleans())
    def someone_claims(self, owner: str, beats: bool) -> None:
        self.claimant += 1
        self.state[self.claimant] = "live"
        before = self.claims[-1] if self.claims else None
        free = (
            before is None
            or before.owner == owner
            or self.state[before.holder.pid] in ("released", "dead", "stopped")
        )
        started = self.clock.now
        try:
            made = claim(self.control, owner, self.TTL)
        except RunIsLiveError:
            assert before is not None
            state = self.state[before.holder.pid]
            # A stopped holder may be refused only on a fresh beat of this host.
            assert not free or (state == "stopped" and before.holder.host == "here")
            return
        finally:
            assert self.clock.now - started <= 2.5 * self.TTL, "a claim waited too long"
        assert free, f"took the lease of a live holder: {made.evidence}"
        assert made.epoch == (before.epoch if before else 0) + 1
        self.claims.append(made)
        if beats:
            self.write_beat(made, released=False)

    @rule(pick=st.integers(0, 5), fate=st.sampled_from(["released", "dead", "stopped", "live"]))
    def something_happens_to_a_holder(self, pick: int, fate: str) -> None:
        if not self.claims:
            return
        made = self.claims[-1 - pick % len(self.claims)]
        state = self.state[made.holder.pid]
        if state in ("dead", "released") or (state == "stopped" and fate == "released"):
            return
        if fate == "released" or fate == "live":
            self.write_beat(made, released=fate == "released")
        self.state[made.holder.pid] = fate

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.live_ones_renew()

    @rule(seconds=st.floats(-1e6, 1e6))
    def the_wall_clock_is_set(self, seconds: float) -> None:
        offset = seconds
        clock = self.clock
        clock.time = lambda: clock.now + offset  # type: ignore[method-assign]

    @invariant()
    def only_the_newest_epoch_may_act(self) -> None:
        assert [made.epoch for made in self.claims] == list(range(1, len(self.claims) + 1))
        for made in self.claims[-4:]:
            fence = Fence(self.control, made.epoch, timeout=1.0)
            if made is self.claims[-1]:
                with fence.guard("act"):
                    pass
            else:
                with pytest.raises(LeaseLostError), fence.guard("act"):
                    pytest.fail("an old epoch acted")
        assert current_epoch(self.control) == len(self.claims)
        assert not self.claims or read_claim(self.control, len(self.claims)) == self.claims[-1]

    def teardown(self) -> None:
        self.patch.undo()
        self.folder.cleanup()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
