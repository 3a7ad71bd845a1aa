"""Claims: one current epoch, whoever races, dies, stops or comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.base.files import replace_atomic
from holdfast.errors import ControlError, RunIsLiveError, UsageError
from holdfast.process.proc import Holder, this_process
from holdfast.record import lease
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Claim, Fence, LeaseBeat, LeaseKeeper, claim, current_epoch
from kit.control import FakeTime, beat, held_elsewhere, timed, tree
from kit.harness import Job, job, python, wait_until

HOLDER = """
import json, os, shutil, sys, time
from pathlib import Path
from holdfast.record.attempts import begin_attempt
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, LeaseKeeper, claim
from holdfast.record.standing import Standing, StandingBook
from holdfast.errors import HoldfastError
from holdfast.base.files import replace_atomic

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
    keeper = LeaseKeeper(control, claim(control, "launch", 6.0), lost.append)
    held, took = timed(lambda: claim(control, "launch", 6.0))
    assert held.epoch == 2
    assert "same launch" in held.evidence
    assert took < 3
    wait_until(lambda: lost, 10, "the former attempt's keeper says that it lost")
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
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import LeaseKeeper, claim, current_epoch
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
        record = LeaseBeat(count=1, at=time.time(), released=next_holder == "releases")
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
            msgspec.json.encode(LeaseBeat(count=1, at=0.0, released=True)),
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
