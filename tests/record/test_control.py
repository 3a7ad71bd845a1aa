"""The control directory's records, its attempts, and who a process is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import ControlError, LeaseLostError
from holdfast.process import proc
from holdfast.process.proc import Holder, is_gone, is_here, this_process
from holdfast.record import attempts, directory
from holdfast.record.attempts import (
    AttemptRecord,
    EndRecord,
    FailureRecord,
    HeadRecord,
    attempt_numbers,
    begin_attempt,
    end_attempt,
    ends_of,
    failures_of,
    latest_head,
    record_failure,
    write_head,
)
from holdfast.record.directory import ControlDirectory, RunRecord, create_record, read_record
from holdfast.record.lease import Fence, claim
from kit.harness import finish, job, python, wait_until
from kit.nodes.machines import inside_mounts

# --- the directory and its records ---------------------------------------------------------------------


def test_a_run_is_created_once_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, created = ControlDirectory.open_or_create(Path("deep/run"))
    assert created
    assert first.path == tmp_path / "deep" / "run"
    again, created = ControlDirectory.open_or_create(tmp_path / "deep" / "run")
    assert not created
    assert first.run_id == again.run_id == ControlDirectory.open(Path("deep/run")).run_id


CREATOR = """
import sys, time
from pathlib import Path
from holdfast.record.directory import ControlDirectory

place = Path(sys.argv[1])
(place / f"ready-{sys.argv[2]}").touch()
deadline = time.monotonic() + 20
while not (place / "go").exists():
    assert time.monotonic() < deadline
for number in range(10):
    control, created = ControlDirectory.open_or_create(place / f"run{number}")
    print(control.run_id, int(created))
"""


def test_processes_that_create_a_run_at_once_agree_on_its_id(tmp_path: Path) -> None:
    script = tmp_path / "creator.py"
    script.write_text(CREATOR)
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(job(python(script, str(tmp_path), str(n)), cwd=tmp_path)) for n in range(4)
        ]
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 4, 20, "every process is ready")
        (tmp_path / "go").touch()
        lines = [running.wait(20).out.splitlines() for running in jobs]
    for of_one_run in zip(*lines, strict=True):
        seen = [line.split() for line in of_one_run]
        assert len({run for run, _ in seen}) == 1
        assert sum(int(created) for _, created in seen) == 1


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match=r"not a run directory: it has no run\.json"):
        ControlDirectory.open(tmp_path)


@pytest.mark.parametrize("number", [0, directory.CONTROL_FORMAT + 1])
def test_a_run_of_another_format_is_refused(tmp_path: Path, number: int) -> None:
    create_record(tmp_path / "run.json", RunRecord(format=number, run="r", created=0.0))
    for open_it in (ControlDirectory.open, ControlDirectory.open_or_create):
        with pytest.raises(ControlError, match=f"has format {number}"):
            open_it(tmp_path)


def test_a_run_below_a_file_is_refused_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ControlError, match=r"file/run/run\.json: Not a directory"):
        ControlDirectory.open_or_create(tmp_path / "file" / "run")


DAMAGE = {
    "empty": b"",
    "text": b"hello",
    "wrong types": b'{"format": "one", "run": 3, "created": []}',
    "missing field": b'{"format": 1}',
    "not UTF-8": b'{"format": 1, "run": "\xff", "created": 0}',
    "nested deeply": b"[" * 200_000,
    "nested deeply inside": b'{"format": 1, "run": "r", "created": 0, "x": ' + b"[" * 200_000,
    "huge": b" " * (directory.MAX_RECORD_BYTES + 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_an_error_that_names_the_file_and_never_a_guess(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(DAMAGE[damage])
    with pytest.raises(ControlError) as caught:
        read_record(path, RunRecord)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_symlink_for_a_record_is_refused(tmp_path: Path) -> None:
    create_record(tmp_path / "elsewhere", RunRecord(format=1, run="r", created=0.0))
    (tmp_path / "run.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ControlError, match="symbolic link"):
        read_record(tmp_path / "run.json", RunRecord)


def test_a_record_that_could_not_be_read_back_is_refused_before_it_is_written(tmp_path: Path) -> None:
    class Odd(msgspec.Struct):
        number: float = 0.0
        text: str = ""

    for record in (Odd(number=float("nan")), Odd(text="\udc80"), Odd(text="x" * directory.MAX_RECORD_BYTES)):
        with pytest.raises(ControlError, match=r"refused to write .*odd\.json") as caught:
            create_record(tmp_path / "odd.json", record)
        assert len(str(caught.value)) < 1000
    assert os.listdir(tmp_path) == []


# --- holders -------------------------------------------------------------------------------------------

ASK = """
from holdfast.process.proc import this_process
import msgspec, sys, time
sys.stdout.write(msgspec.json.encode(this_process()).decode() + "\\n"); sys.stdout.flush()
time.sleep(60)
"""


def test_a_holder_is_gone_only_when_it_is_known_to_be_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ASK], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        holder = msgspec.json.decode(child.stdout.readline(), type=Holder)
        assert holder.pid == child.pid
        assert is_here(holder)
        assert not is_gone(holder)
        child.send_signal(signal.SIGSTOP)
        assert not is_gone(holder), "a stopped process is not dead"
    finally:
        child.kill()
    wait_until(lambda: is_gone(holder), 5, "a zombie counts as dead")
    child.wait(5)
    assert is_gone(holder), "and so does a process that was reaped"


def test_a_reused_pid_is_told_by_its_start_time() -> None:
    me = this_process()
    assert is_gone(msgspec.structs.replace(me, started=me.started - 1))
    assert not is_gone(msgspec.structs.replace(me, started=0)), "an unknown start time proves nothing"


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"boot": "other"},
        {"boot": ""},
        {"pid_namespace": 1},
        {"pid_namespace": 0},
        {"host": "other"},
    ],
)
def test_a_process_that_cannot_be_seen_from_here_is_never_called_dead(elsewhere: dict[str, object]) -> None:
    holder = msgspec.structs.replace(this_process(), pid=2**22 + 1, **elsewhere)
    assert not is_here(holder)
    assert not is_gone(holder)


@pytest.mark.parametrize(("part", "unknown"), [("boot_id", ""), ("pid_namespace", 0)])
def test_unknown_does_not_equal_unknown(monkeypatch: pytest.MonkeyPatch, part: str, unknown: object) -> None:
    """Two machines without /proc must not take each other's processes for their own."""
    monkeypatch.setattr(proc, part, lambda: unknown)
    nobody = msgspec.structs.replace(this_process(), pid=2**22 + 1)
    assert not is_here(nobody)
    assert not is_gone(nobody)


def test_a_process_hidden_from_this_user_is_not_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc mounted with hidepid shows nothing of other users' processes."""
    me = this_process()
    monkeypatch.setattr(proc, "read", lambda pid: None)
    assert not is_gone(me)


@pytest.mark.parametrize("pid", [0, -1, -(2**22) - 1, 2**40])
def test_a_senseless_pid_is_not_called_dead_and_signals_nobody(pid: int) -> None:
    assert not is_gone(msgspec.structs.replace(this_process(), pid=pid))


# --- attempts ------------------------------------------------------------------------------------------

BEGINNER = """
import sys
from pathlib import Path
from holdfast.record.attempts import begin_attempt
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence

control = ControlDirectory.open(Path(sys.argv[1]))
fence = Fence(control, int(sys.argv[2]))
print(*[begin_attempt(control, fence, sys.argv[3], 2).number for _ in range(8)])
"""


def test_attempts_that_begin_at_once_get_different_numbers(
    tmp_path: Path, control: ControlDirectory, fence: Fence
) -> None:
    script = tmp_path / "beginner.py"
    script.write_text(BEGINNER)
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                job(python(script, str(control.path), str(fence.epoch), str(n)), cwd=tmp_path)
            )
            for n in range(4)
        ]
        results = [running.wait(20) for running in jobs]
    numbers = [int(number) for result in results for number in result.out.split()]
    assert sorted(numbers) == list(range(1, 33)), [result.text for result in results]
    assert [record.number for record, _ in ends_of(control)] == list(range(1, 33))


def test_an_attempt_is_begun_headed_and_ended_once(control: ControlDirectory, fence: Fence) -> None:
    record = begin_attempt(control, fence, "launch", 4)
    assert (record.number, record.epoch, record.world_size) == (1, fence.epoch, 4)
    head = HeadRecord(attempt=1, checkpoint="3fa9c1d2", step=120)
    write_head(control, fence, head)
    write_head(control, fence, head)  # the same again is no contradiction
    path = control.attempt(1) / "head.json"
    before = path.read_bytes()
    with pytest.raises(ControlError, match=r"head\.json exists and does not name checkpoint 00000000"):
        write_head(control, fence, HeadRecord(attempt=1, checkpoint="00000000", step=120))
    assert path.read_bytes() == before
    end = EndRecord(outcome="failed", exit_code=1, cause="job", highest_step=120, at=1.0)
    assert end_attempt(control, fence, 1, end)
    assert not end_attempt(control, fence, 1, msgspec.structs.replace(end, outcome="finished"))
    assert ends_of(control) == [(record, end)]


def test_a_fresh_start_is_a_head_too_and_attempts_without_one_are_passed_over(
    control: ControlDirectory, fence: Fence
) -> None:
    assert latest_head(control) is None
    for _ in range(4):
        begin_attempt(control, fence, "launch", 1)
    first = HeadRecord(attempt=1, checkpoint=None, step=0)
    third = HeadRecord(attempt=3, checkpoint="3fa9c1d2", step=50)
    write_head(control, fence, first)
    assert latest_head(control) == first
    write_head(control, fence, third)
    assert latest_head(control) == third
    assert latest_head(control, before=3) == first
    assert latest_head(control, before=1) is None


def test_an_attempt_that_died_before_its_record_is_skipped_but_its_number_is_not_reused(
    control: ControlDirectory, fence: Fence
) -> None:
    begin_attempt(control, fence, "launch", 1)
    control.attempt(2).mkdir()
    (control.attempts / "notes").mkdir()  # not a number: nothing to do with us
    (control.attempts / "²").mkdir()
    assert attempt_numbers(control) == [1, 2]
    assert [record.number for record, _ in ends_of(control)] == [1]
    assert begin_attempt(control, fence, "launch", 1).number == 3


def test_a_number_that_an_old_listing_does_not_show_is_not_given_out_twice(
    control: ControlDirectory, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may list a directory as it was a while ago."""
    first = begin_attempt(control, fence, "launch", 1)
    monkeypatch.setattr(attempts, "list_names", lambda path: [])
    assert begin_attempt(control, fence, "launch", 1).number == 2
    assert read_record(control.attempt(1) / "attempt.json", AttemptRecord) == first


@pytest.mark.parametrize("name", ["attempt.json", "head.json", "end.json"])
def test_a_damaged_attempt_is_an_error_that_names_the_file(
    control: ControlDirectory, fence: Fence, name: str
) -> None:
    begin_attempt(control, fence, "launch", 1)
    path = control.attempt(1) / name
    path.write_bytes(b'{"attempt": ')
    read = latest_head if name == "head.json" else ends_of
    with pytest.raises(ControlError, match=name):
        read(control)


def test_an_unreadable_attempts_directory_is_not_an_empty_one(control: ControlDirectory) -> None:
    control.attempts.touch()
    for read in (attempt_numbers, latest_head, ends_of):
        with pytest.raises(ControlError, match=r"cannot read .*attempts"):
            read(control)


def test_failures_are_kept_by_rank_and_the_first_one_stays(control: ControlDirectory) -> None:
    failure = FailureRecord(rank=1, node="a", pid=7, exit_code=-9, at=1.0, message="killed")
    record_failure(control, 1, failure)
    record_failure(control, 1, msgspec.structs.replace(failure, exit_code=1, message="later"))
    odd = FailureRecord(rank=0, node="a", pid=8, exit_code=1, at=2.0, message="\udc80" + "x" * 10**6)
    record_failure(control, 1, odd)
    found = failures_of(control, 1)
    assert [found[0].rank, found[1]] == [0, failure]
    assert found[0].message.startswith("?xxx")
    assert len(found[0].message) == attempts.MAX_MESSAGE
    assert failures_of(control, 2) == []


def test_last_words_that_are_damaged_are_left_out_and_told_of(
    control: ControlDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    failure = FailureRecord(rank=1, node="a", pid=7, exit_code=-9, at=1.0, message="killed")
    record_failure(control, 3, failure)
    (control.attempt(3) / "failures" / "rank_000000.json").write_bytes(b"\0" * 40)
    assert failures_of(control, 3) == [failure]
    assert re.search(r"attempt 3 is left out: .*rank_000000\.json is not a FailureRecord", caplog.text)


def test_a_stale_epoch_can_neither_begin_nor_head_nor_end_an_attempt(
    control: ControlDirectory, fence: Fence
) -> None:
    """Scenario 28."""
    begin_attempt(control, fence, "launch", 1)
    claim(control, "launch", 5.0)
    before = sorted(str(path) for path in control.attempts.rglob("*"))
    end = EndRecord(outcome="finished", exit_code=0, cause="", highest_step=9, at=1.0)
    for act in (
        lambda: begin_attempt(control, fence, "launch", 1),
        lambda: write_head(control, fence, HeadRecord(attempt=1, checkpoint=None, step=0)),
        lambda: end_attempt(control, fence, 1, end),
    ):
        with pytest.raises(LeaseLostError, match="epoch 2 exists"):
            act()
    assert sorted(str(path) for path in control.attempts.rglob("*")) == before


def test_records_are_plain_json_for_whoever_must_look_with_other_tools(
    control: ControlDirectory, fence: Fence
) -> None:
    begin_attempt(control, fence, "launch", 3)
    assert json.loads((control.attempt(1) / "attempt.json").read_text())["world_size"] == 3


@pytest.mark.usefixtures("mount_namespaces")
def test_an_end_can_be_written_down_on_a_disk_that_is_full_to_the_last_byte(tmp_path: Path) -> None:
    code = (
        "import errno, sys\n"
        "from pathlib import Path\n"
        "from holdfast.errors import ControlError\n"
        "from holdfast.record import ControlDirectory, create_record\n"
        "from holdfast.record.directory import RESERVE, RunRecord\n"
        "control, _ = ControlDirectory.open_or_create(Path('disk/run'))\n"
        "record = RunRecord(format=1, run='x' * 4096, created=0.0)\n"
        "control.set_room_aside()\n"
        "assert (control.path / RESERVE).stat().st_size > 100_000\n"
        "with Path('disk/filler').open('wb', buffering=0) as file:\n"
        "    try:\n"
        "        while True: file.write(bytes(4096))\n"
        "    except OSError as error:\n"
        "        assert error.errno == errno.ENOSPC\n"
        "try:\n"
        "    create_record(control.path / 'end.json', record)\n"
        "    sys.exit('there was room')\n"
        "except ControlError as error:\n"
        "    assert 'No space left' in str(error), error\n"
        "control.give_room_up()\n"
        "assert create_record(control.path / 'end.json', record)\n"
        "assert not (control.path / RESERVE).exists()\n"
        "control.give_room_up()\n"
    )
    (tmp_path / "disk").mkdir()
    full = inside_mounts("mount -t tmpfs -o size=20m tmpfs disk", [sys.executable, "-c", code])
    result = finish(full, cwd=tmp_path)
    assert result.code == 0, result.text


@pytest.mark.usefixtures("mount_namespaces")
def test_where_there_is_little_room_nothing_is_set_aside(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from holdfast.record import ControlDirectory\n"
        "control, _ = ControlDirectory.open_or_create(Path('disk/run'))\n"
        "control.set_room_aside()\n"
        "assert sorted(path.name for path in control.path.iterdir()) == ['run.json']\n"
    )
    (tmp_path / "disk").mkdir()
    small = inside_mounts("mount -t tmpfs -o size=8m tmpfs disk", [sys.executable, "-c", code])
    result = finish(small, cwd=tmp_path)
    assert result.code == 0, result.text
