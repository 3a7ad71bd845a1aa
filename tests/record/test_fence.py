"""The fence, through which an attempt acts, and the keeper, which renews its lease."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from holdfast.errors import ControlError, LeaseLostError, RunIsLiveError
from holdfast.record import lease
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, LeaseBeat, LeaseKeeper, claim, current_epoch, read_beat
from kit.control import timed, tree
from kit.harness import finish, job, python, wait_until

STOPS_INSIDE = """
import os, signal, sys
from pathlib import Path
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, claim
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
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, claim

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
    wait_until(lambda: (read_beat(control, 1) or LeaseBeat(count=0, at=0)).count >= 7, 10, "seven renewals")
    with pytest.raises(RunIsLiveError):
        claim(control, "two", 1.0)
    keeper.release()
    released = read_beat(control, 1)
    assert released is not None
    assert released.released


@pytest.mark.parametrize("fate", ["vanishes", "is a file"])
def test_a_lease_that_is_taken_away_is_lost_before_it_lapses(control: ControlDirectory, fate: str) -> None:
    lost: list[tuple[float, str]] = []
    held = claim(control, "one", 2.0)
    keeper = LeaseKeeper(control, held, lambda why: lost.append((time.monotonic(), why)))
    started = time.monotonic()
    control.lease.rename(control.lease.with_name("moved"))
    if fate == "is a file":
        control.lease.touch()
    wait_until(lambda: lost, 5, "the keeper gives up")
    keeper.release()
    assert len(lost) == 1
    assert lost[0][0] - started < held.ttl
    assert "00000001.claim is gone" in lost[0][1]


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


def test_a_run_directory_that_is_away_as_a_whole_is_waited_for(control: ControlDirectory) -> None:
    """As when its file system is unmounted for a while: nobody can have claimed anything there."""
    told: list[str] = []
    keeper = LeaseKeeper(control, claim(control, "one", 0.3), pytest.fail, told.append)
    away = control.path.with_name("away")
    control.path.rename(away)
    wait_until(lambda: time.monotonic() - keeper._renewed > 1, 5, "three times-to-live pass")
    away.rename(control.path)
    wait_until(lambda: len(told) == 2, 5, "it is over")
    keeper.release()
    assert "claim is gone" in told[0]
    assert "renewed again" in told[1]


def test_a_renewal_takes_neither_a_new_file_nor_space(control: ControlDirectory) -> None:
    keeper = LeaseKeeper(control, claim(control, "one", 0.5), pytest.fail)
    path = control.lease / "00000001.beat"

    def look() -> tuple[int, int, int, list[str]]:
        found = path.stat()
        return found.st_ino, found.st_size, found.st_blocks, sorted(tree(control.lease))

    before, first = look(), read_beat(control, 1)
    assert first is not None
    with path.open() as same:  # held open, so that its number is not given to another
        wait_until(lambda: (read_beat(control, 1) or first).count > first.count + 3, 10, "three renewals")
        assert look() == before
        keeper.release()
        assert look() == before
        assert '"released":true' in same.read()
    released = read_beat(control, 1)
    assert released is not None
    assert released.released


def test_a_beat_that_was_read_while_it_was_written_is_read_again(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(control, "one", 5.0)
    path = control.lease / "00000001.beat"
    path.write_bytes(b'{"count":1,"at"')
    whole = iter([False, True])
    real = lease.read_record

    def torn_once(asked: Path, kind: type[LeaseBeat]) -> LeaseBeat | None:
        if next(whole):
            path.write_bytes(b'{"count":2,"at":3.0}\n')
        return real(asked, kind)

    monkeypatch.setattr(lease, "read_record", torn_once)
    assert read_beat(control, 1) == LeaseBeat(count=2, at=3.0)


@pytest.mark.parametrize("kind", ["ENOSPC", "EDQUOT", "EIO", "ESTALE", "EROFS", "a defect"])
def test_storage_that_cannot_be_written_is_told_and_waited_out_and_is_no_lost_lease(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    told: list[tuple[float, str]] = []
    held = claim(control, "one", 0.3)
    keeper = LeaseKeeper(control, held, pytest.fail, lambda text: told.append((time.monotonic(), text)))
    healthy, real = threading.Event(), os.pwrite

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if healthy.is_set():
            return real(fd, data, at)
        if kind == "a defect":
            raise ZeroDivisionError(kind)
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

    monkeypatch.setattr(os, "pwrite", pwrite)
    wait_until(lambda: time.monotonic() - keeper._renewed > 4 * held.ttl, 10, "four times-to-live pass")
    assert len(told) == 1, "told at once, and not every time"
    began = told[0][0] - keeper._renewed
    assert began < held.ttl, "told too late"
    assert (kind if kind == "a defect" else os.strerror(getattr(errno, kind))) in told[0][1]
    healthy.set()
    wait_until(lambda: len(told) == 2, 5, "it is told that it is over")
    assert "renewed again, after 1." in told[1][1]
    with pytest.raises(RunIsLiveError):
        claim(control, "two", 1.0)
    keeper.release()
    assert current_epoch(control) == 1


def test_a_renewal_that_hangs_with_its_file_system_hangs_alone(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    keeper = LeaseKeeper(control, claim(control, "one", 0.3), pytest.fail, told.append)
    answers, real = threading.Event(), lease.overwrite

    def hang(path: Path, data: bytes) -> None:
        answers.wait(30)
        real(path, data)

    monkeypatch.setattr(lease, "overwrite", hang)
    wait_until(lambda: time.monotonic() - keeper._renewed > 1, 10, "three times-to-live pass")
    assert len(told) == 1
    assert "the file system does not answer" in told[0]
    answers.set()
    wait_until(lambda: len(told) == 2, 5, "it is told that it is over")
    answers.clear()
    started = time.monotonic()
    keeper.release()
    assert time.monotonic() - started < 3, "an end must not wait for a file system that does not answer"
    answers.set()


def test_trouble_that_lasts_is_told_again_ever_more_rarely(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SAID_AGAIN", 0.2)
    told: list[float] = []
    keeper = LeaseKeeper(
        control, claim(control, "one", 0.2), pytest.fail, lambda text: told.append(time.monotonic())
    )

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lease, "overwrite", full)
    wait_until(lambda: len(told) == 4, 10, "four words")
    keeper.release()
    between = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert between[0] > 0.2
    assert between[1] > 0.4
    assert between[2] > 0.8


@pytest.mark.parametrize("listing", ["fresh", "old"])
def test_who_cannot_write_learns_of_another_claim_as_soon_as_it_can_read(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    lost: list[str] = []
    held = claim(control, "one", 0.4)
    keeper = LeaseKeeper(control, held, lost.append, lambda told: None)
    fence = Fence(control, 1)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lease, "overwrite", full)
    monkeypatch.setattr(lease, "is_here", lambda holder: False)  # the other claims from another machine
    monkeypatch.setattr(lease, "is_gone", lambda holder: False)
    wait_until(lambda: time.monotonic() - keeper._renewed > 0.8, 5, "the lease lapses")
    assert not lost
    if listing == "old":
        real = lease.list_names
        monkeypatch.setattr(
            lease, "list_names", lambda path: [name for name in real(path) if not name.startswith("00000002")]
        )
    newer = claim(control, "two", 5.0)
    assert (newer.epoch, "lapsed" in newer.evidence) == (2, True)
    wait_until(lambda: lost, 2, "the first holder learns of it")
    assert lost == ["epoch 2 was claimed over our 1"]
    with pytest.raises(LeaseLostError), fence.guard("commit"):
        pytest.fail("a fenced holder acted")
    before = tree(control.lease)
    keeper.release()
    assert tree(control.lease) == before


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


def test_a_holder_that_did_not_run_for_a_time_to_live_goes_on_if_nobody_claimed(
    control: ControlDirectory,
) -> None:
    """A claimant that watched it lapse may be about to act on that: the fence then refuses the old one."""
    told: list[str] = []
    keeper = LeaseKeeper(control, claim(control, "one", 0.5), pytest.fail, told.append)
    keeper._renewed -= 61
    wait_until(lambda: told and "renewed again, after 6" in told[-1], 5, "it is told")
    keeper.release()
    released = read_beat(control, 1)
    assert released is not None
    assert released.released


def test_a_keeper_is_not_started_for_an_epoch_that_is_already_over(control: ControlDirectory) -> None:
    held = claim(control, "one", 5.0)
    claim(control, "one", 5.0)
    with pytest.raises(LeaseLostError, match="epoch 2 was claimed over our 1"):
        LeaseKeeper(control, held, pytest.fail)
    assert read_beat(control, 1) is None


EXITS = """
import sys
from pathlib import Path
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import LeaseKeeper, claim
control = ControlDirectory.open(Path(sys.argv[1]))
LeaseKeeper(control, claim(control, "exits", 600.0), print)
"""


def test_a_keeper_does_not_hold_up_the_end_of_its_process(tmp_path: Path, control: ControlDirectory) -> None:
    script = tmp_path / "exits.py"
    script.write_text(EXITS)
    result = finish(python(script, str(control.path)), cwd=tmp_path, timeout=10)
    assert (result.code, result.out) == (0, ""), result.text
