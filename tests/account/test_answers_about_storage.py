"""Accounts of storage and memory: a save that was cut off, a full or slow disk, a kill for memory."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from holdfast.account.answers import account_of_failure
from holdfast.account.incidents import headline
from holdfast.account.remarks import remarks_of
from holdfast.account.words import Story, closing_line, incident_text
from holdfast.base.lines import size
from holdfast.checkpoint.format.manifest import CheckpointName, parse_name
from holdfast.errors import ExitCode
from holdfast.health.judgements import Trouble, last_words
from holdfast.journal import Event
from holdfast.journal.events import Account, SaveCommitted, SaveFailed, SaveSkipped, SaveStarted
from holdfast.journal.reader import unfinished_save
from holdfast.journal.writer import JournalWriter
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.evidence import KERNEL_OOM, MemoryKill
from holdfast.policy.recovery import Situation, recover
from holdfast.policy.signs import Cause
from holdfast.policy.upkeep import PATIENCE, RATE, is_slow
from holdfast.record.attempts import FailureRecord
from kit.journals import Journal, name_of

MIB = 1 << 20
FULL = Trouble(path="/data/run", full=True, free=4 * MIB, waited=30.2)


def told(
    root: FailureRecord,
    cause: Cause,
    *,
    rungs: tuple[int, ...] = (20, 10),
    cut_off: CheckpointName | None = None,
    storage: Trouble | None = None,
    can_requeue: bool = False,
    last: int = 24,
    max_restarts: int = 3,
) -> Account:
    """As it is decided, not only as it is told."""
    failed = PastAttempt(
        number=1, launch="l", outcome="failed", cause=cause, exit_code=root.exit_code, last_step=last,
        nodes=["a"], began=True, message=root.message,
    )  # fmt: skip
    situation = Situation(
        attempt=failed,
        max_restarts=max_restarts,
        rungs=[name_of(step) for step in rungs],
        storage=storage.brief if storage is not None else "",
        can_requeue=can_requeue,
    )
    return account_of_failure(
        situation, recover([], situation), root, [root], cut_off=cut_off, storage=storage
    )


def ended(code: int, message: str = "", memory: MemoryKill | None = None) -> FailureRecord:
    return FailureRecord(rank=1, node="b", pid=7, exit_code=code, at=1.0, message=message, memory=memory)


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "why", "instead"),
    [
        (
            MemoryKill(kills=1, group="/job", limit=3 * MIB, limited="/job"),
            "rose by 1 in the control group /job, all of whose processes together may use 3.0 MiB",
            "raise the limit of 3.0 MiB",
        ),
        (
            MemoryKill(kills=2, group="/job/step", limit=3 * MIB, limited="/job"),
            "rose by 2 in the control group /job/step, part of /job, which may use 3.0 MiB in all",
            "raise the limit of 3.0 MiB",
        ),
        (
            MemoryKill(kills=1, group="/"),
            "in the control group /, which has no limit: the memory of the whole machine was used up",
            "take a larger machine",
        ),
        (None, "the kernel's out-of-memory counter of this job rose", "take a larger machine"),
    ],
)
def test_a_kill_for_memory_names_the_counter_the_group_and_its_limit(
    memory: MemoryKill | None, why: str, instead: str
) -> None:
    root = ended(-signal.SIGKILL, KERNEL_OOM, memory)
    account = told(root, Cause.JOB)
    assert headline(account) == "rank 1 on b was killed by the kernel in step 25: out of memory"
    assert why in account.why[0]
    assert not any("points to" in text for text in account.why)
    assert account.next.startswith("nothing to do, unless it comes back: use less memory")
    assert account.next.endswith(instead)
    last = told(root, Cause.JOB, max_restarts=0)
    assert last.next.endswith(f"{instead}, then run the same command")


def test_a_loader_that_was_killed_for_memory_is_not_told_as_the_rank() -> None:
    account = told(ended(1, f"{KERNEL_OOM}: DataLoader worker is killed"), Cause.JOB)
    assert (
        account.what == "failed in step 25: the kernel killed a process of its data loader, as memory ran out"
    )


# --- a save that was cut off --------------------------------------------------------------------------------


def write(place: Path, who: str, *events: Event) -> None:
    with contextlib.closing(JournalWriter(place, who, 1)) as journal:
        for event in events:
            journal.write(event)


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ([], True),
        ([SaveSkipped(checkpoint=name_of(20), step=20, reason="no room")], False),
        ([SaveFailed(checkpoint="step_00000020", step=20, error="x", in_a_row=1)], False),
        ([SaveFailed(checkpoint=name_of(10), step=10, error="x", in_a_row=1)], True),
        ([SaveStarted(checkpoint=name_of(30), step=30, background=True)], False),
    ],
)
def test_a_save_that_nothing_ended_is_found(tmp_path: Path, after: list[Event], found: bool) -> None:
    write(tmp_path, "rank-0", SaveStarted(checkpoint=name_of(10), step=10), committed(10))
    write(tmp_path, "rank-0", SaveStarted(checkpoint=name_of(20), step=20))
    write(tmp_path, "rank-0", *after)
    files = [path.name for path in tmp_path.iterdir()]
    assert unfinished_save(tmp_path, files, 1) == (name_of(20) if found else None)
    assert unfinished_save(tmp_path, files, 2) is None


def test_a_save_in_the_background_that_nothing_ended_is_found_by_who_asks_for_one(tmp_path: Path) -> None:
    write(tmp_path, "rank-0", SaveStarted(checkpoint=name_of(10), step=10, background=True), committed(10))
    files = [path.name for path in tmp_path.iterdir()]
    assert unfinished_save(tmp_path, files, 1, background=True) is None
    write(tmp_path, "rank-0", SaveStarted(checkpoint=name_of(20), step=20, background=True))
    files = [path.name for path in tmp_path.iterdir()]
    assert unfinished_save(tmp_path, files, 1, background=True) == name_of(20)
    assert unfinished_save(tmp_path, files, 1) is None


def test_a_save_that_was_cut_off_is_told_and_not_used() -> None:
    name = parse_name(name_of(20))
    account = told(ended(-9), Cause.INFRASTRUCTURE, rungs=(10,), cut_off=name, last=20)
    assert account.what == "was killed by SIGKILL while step 20 was being saved"
    assert account.done == (
        "restarting from step 10, as the save of step 20 was cut off and is not used: "
        "10 steps to redo (restart 1 of 3)"
    )
    assert "comes from outside" in account.why[0], "why it ended comes first"
    assert f"the save of step 20 had begun and was not complete ({name})" in account.why[1]
    first = told(ended(-9), Cause.INFRASTRUCTURE, rungs=(), cut_off=name, last=22)
    assert first.done.startswith("restarting from the beginning, as the save of step 20 was cut off")


# --- a full disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_requeue", [False, True])
def test_a_full_disk_is_told_in_the_same_words_everywhere(can_requeue: bool) -> None:
    root = ended(ExitCode.STORAGE_FAILED, "SaveStorageError: no room")
    account = told(root, Cause.INFRASTRUCTURE, storage=FULL, can_requeue=can_requeue)
    said = last_words(FULL, saved=20, last=24, requeued=can_requeue)
    assert account.what == "could not go on in step 25: the run's storage could not be written"
    assert account.why[0] == FULL.describe()
    assert account.why[1] == "no room", "in words, without the name of a class"
    assert not any("points to" in text for text in account.why)
    assert account.done.endswith(f": {FULL.describe()}")
    assert said.startswith(f"{FULL.describe()}. ")
    assert said.endswith(f" Next: {account.next}.")
    assert account.next.startswith("free space, ")
    shown = incident_text(account, "run")
    assert "restart" not in shown, "none is decided, so none is spoken of"


# --- a slow disk --------------------------------------------------------------------------------------------


def committed(step: int, stored: float = 0.0, *, blocked: float = 0.0, root: str = "") -> SaveCommitted:
    return SaveCommitted(
        checkpoint=name_of(step), step=step, parent=None, bytes=6 * MIB, files=4, seconds=stored,
        blocked_seconds=blocked, stored_seconds=stored, root=root,
    )  # fmt: skip


def test_what_is_slow_depends_on_what_is_stored() -> None:
    assert not is_slow(0, PATIENCE)
    assert is_slow(0, PATIENCE + 0.1)
    assert not is_slow(100 * RATE, 100.0)
    assert is_slow(100 * RATE, 104.0)


@pytest.mark.parametrize("blocked", [0.0, 6.0])
def test_slow_storage_is_told_once_and_at_the_end_with_what_it_cost(blocked: float) -> None:
    journal, story = Journal().start(), Story()
    lines = [
        journal.write(committed(10, 6.0, blocked=blocked, root="/data/run")),
        journal.write(committed(20, 8.0, blocked=blocked, root="/data/run")),
        journal.write(committed(30, 0.5, root="/data/run")),
    ]
    said = [text for line in lines if (text := story.line(line)) is not None]
    assert len(said) == 1
    assert said[0].startswith(f"the storage of /data/run is slow: it took 6.0 s to store the {size(6 * MIB)}")
    assert ("training stood still" in said[0]) == (blocked > 0)
    (one,) = remarks_of(journal.lines)
    assert (one.who, one.did) == (
        "the storage of /data/run",
        "took 7.0 s on average to store a save of 6.0 MiB",
    )
    assert "in 2 of 3 saves; the slowest took 8.0 s" in one.why
    assert one.cost == ("training stood still for 12.0 s in all" if blocked else "training did not wait")
    assert ("async_save" in one.next) == (blocked > 0)
    end = closing_line([], [one], 40, "run")
    assert f"2 slow saves (the storage of /data/run: {one.cost})" in end
    assert "; to do: use faster storage for checkpoints" in end


def test_storage_that_is_quick_and_the_local_tier_are_not_spoken_of() -> None:
    journal = Journal().start()
    journal.write(committed(10, 0.5, root="/data/run"))
    journal.write(committed(20, 90.0))
    assert remarks_of(journal.lines) == []
