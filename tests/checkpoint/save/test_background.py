"""Asynchronous saves: training goes on, nothing staged is lost, and every failure is told."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.format.manifest import CheckpointName
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import writer_process
from holdfast.checkpoint.save.saver import BackgroundSaver, Ended
from holdfast.checkpoint.save.staging import Stager
from holdfast.errors import ExitCode, LeaseLostError, SaveFailedError, SaveStorageError
from holdfast.journal.events import (
    LeaseClaimed,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    StepsDone,
    Warned,
)
from holdfast.journal.reader import read_journal
from holdfast.record import lease
from holdfast.record.attempts import latest_head
from holdfast.record.directory import ControlDirectory
from holdfast.train.saves import to_raise
from kit.harness import REPO, finish, job, python, wait_until
from kit.harness import holdfast as command
from kit.ranks.writers import (
    ASYNC,
    Around,
    all_committed_once,
    forked_writers,
    holding,
    nothing_in_staging,
    patched,
    ranks,
)
from kit.runs import events_in, record
from kit.tiny import Outcome, checkpoints, die, forked, steps_of, train, tree


def reached(gate: Path) -> None:
    wait_until(gate.with_suffix(".reached").exists, 10, "the writer is at work")


def test_training_goes_on_between_the_start_and_the_commit_of_a_save(tmp_path: Path) -> None:
    """Scenario 26: the journal shows steps after the start of a save and before its commit."""
    gate = tmp_path / "gate"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 6:
            reached(gate)
            gate.touch()

    with forked_writers(holding(gate, only="step_00000003")):
        train(
            tmp_path / "run",
            until=8,
            at_step=at_step,
            checkpoint_interval=3,
            journal_step_flush=0.001,
            **ASYNC,
        )
    lines = read_journal(tmp_path / "run" / "journal")
    begun = next(line.at for line in lines if isinstance(line.body, SaveStarted) and line.body.step == 3)
    done = next(line.at for line in lines if isinstance(line.body, SaveCommitted) and line.body.step == 3)
    between = [
        line.body.first + number
        for line in lines
        if isinstance(line.body, StepsDone) and begun < line.at < done
        for number in range(len(line.body.seconds))
    ]
    assert {4, 5} <= set(between)
    all_committed_once(tmp_path / "run", [3, 6, 8])


# --- busy ---------------------------------------------------------------------------------------------------


def test_queue_takes_one_more_snapshot_while_the_last_is_written(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 8:  # steps 3 and 6 are both staged, and training was not held up for either
            assert run._session.saving._background is not None
            assert run._session.saving._background.outstanding == 2
            gate.touch()

    with forked_writers(holding(gate)):
        train(tmp_path / "run", until=9, at_step=at_step, **ASYNC)
    all_committed_once(tmp_path / "run", [3, 6, 9])
    assert events_in(tmp_path / "run", SaveSkipped, Warned) == []


def test_a_third_snapshot_waits_for_memory_and_the_journal_says_so(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 9:
            threading.Timer(0.3, gate.touch).start()

    with forked_writers(holding(gate)):
        train(tmp_path / "run", until=10, at_step=at_step, **ASYNC)
    all_committed_once(tmp_path / "run", [3, 6, 9, 10])
    (warned,) = events_in(tmp_path / "run", Warned)
    assert "training waited" in warned.message
    assert "step_00000009" in warned.message


def test_skip_leaves_a_save_out_and_says_so(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 7:
            gate.touch()
            run.wait_for_saves()

    with forked_writers(holding(gate)):
        train(tmp_path / "run", until=10, at_step=at_step, checkpoint_when_busy="skip", **ASYNC)
    assert steps_of(tmp_path / "run") == [10, 9, 3]
    (skipped,) = events_in(tmp_path / "run", SaveSkipped)
    assert skipped.step == 6
    assert "still being written" in skipped.reason
    assert events_in(tmp_path / "run", SaveFailed) == []


def test_wait_holds_training_up_and_says_so(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 6:
            threading.Timer(0.3, gate.touch).start()
        if step == 7:
            assert gate.exists(), "step 7 began only when step 3 was written"

    with forked_writers(holding(gate)):
        train(tmp_path / "run", until=9, at_step=at_step, checkpoint_when_busy="wait", **ASYNC)
    all_committed_once(tmp_path / "run", [3, 6, 9])
    (warned,) = events_in(tmp_path / "run", Warned)
    assert "step_00000006" in warned.message


@pytest.mark.parametrize("policy", ["queue", "skip", "wait"])
@pytest.mark.parametrize("slow", [0, 1])
def test_all_ranks_do_the_same_when_only_one_is_slow(tmp_path: Path, policy: str, slow: int) -> None:
    gate, run_dir = tmp_path / "gate", tmp_path / "run"

    def work(rank: int) -> None:
        def at_step(step: int, run: holdfast.Run) -> None:
            if rank == slow and step == 6 and policy == "wait":
                threading.Timer(0.3, gate.touch).start()
            if step == 7 and policy != "wait":
                if rank == slow:
                    gate.touch()
                run.wait_for_saves()

        with forked_writers(holding(gate) if rank == slow else None):
            train(run_dir, until=9, at_step=at_step, checkpoint_when_busy=policy, **ASYNC)

    ranks(tmp_path, 2, work)
    assert steps_of(run_dir) == ([9, 3] if policy == "skip" else [9, 6, 3])
    assert all(verify(path).sound for path in checkpoints(run_dir))
    assert [event.step for event in events_in(run_dir, SaveSkipped)] == ([6] if policy == "skip" else [])


# --- what fails ---------------------------------------------------------------------------------------------


def full_disk(number: int) -> Any:
    """The writer of step 6 may write no more than 20,000 bytes to a file (EFBIG instead of ENOSPC)."""

    def wrap(write_image: Any) -> Any:
        def limited(path: Path, *args: Any) -> Any:
            if "step_00000006" not in str(path):
                return write_image(path, *args)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            try:
                return write_image(path, *args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        return limited

    return patched(writer_process, "write_image", wrap)


def test_a_full_disk_is_told_with_its_traceback_and_loses_nothing(
    tmp_path: Path, longer_reference: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    before: list[Any] = []

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            run.wait_for_saves()
            before.append(tree(checkpoints(tmp_path / "run")[0]))

    with caplog.at_level(logging.ERROR), forked_writers(full_disk):
        outcome = train(tmp_path / "run", until=12, at_step=at_step, **ASYNC)
    assert outcome.losses == longer_reference.losses
    assert outcome.parameters == longer_reference.parameters
    assert steps_of(tmp_path / "run") == [12, 9, 3]
    assert tree(checkpoints(tmp_path / "run")[-1]) == before[0]
    (failed,) = events_in(tmp_path / "run", SaveFailed)
    assert (failed.step, failed.in_a_row) == (6, 1)
    for text in (failed.error, caplog.text):
        assert "File too large" in text
        assert "In the writer process:" in text
        assert "in _write_all" in text, "the line that failed"
    parents = {event.step: event.parent for event in events_in(tmp_path / "run", SaveCommitted)}
    assert parents[9] == checkpoints(tmp_path / "run")[-1].name[14:], "not the one that failed"
    nothing_in_staging(tmp_path / "run")


def test_a_root_that_is_replaced_by_a_file_and_comes_back(tmp_path: Path) -> None:
    run_dir, root, away = tmp_path / "run", tmp_path / "root", tmp_path / "away"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            run.wait_for_saves()
            root.rename(away)
            root.write_text("in the way")
        if step == 8:
            with contextlib.suppress(SaveFailedError):  # it may have been told at an earlier step
                run.wait_for_saves()
            assert root.read_text() == "in the way"
            root.unlink()
            away.rename(root)

    with forked_writers():
        train(run_dir, until=9, at_step=at_step, checkpoint_root=str(root), **ASYNC)
    assert sorted(path.name[:13] for path in root.glob("step_*")) == ["step_00000003", "step_00000009"]
    (failed,) = events_in(run_dir, SaveFailed)
    assert failed.step == 6
    assert "is not what the run started with" in failed.error


def test_a_staged_directory_that_is_removed_fails_one_save(tmp_path: Path) -> None:
    gate, run_dir = tmp_path / "gate", tmp_path / "run"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            reached(gate)
            shutil.rmtree(run_dir / "checkpoints" / ".staging")
            gate.touch()

    with forked_writers(holding(gate, only="step_00000003")):
        train(run_dir, until=6, at_step=at_step, **ASYNC)
    assert steps_of(run_dir) == [6]
    (failed,) = events_in(run_dir, SaveFailed)
    assert "No such file or directory" in failed.error
    nothing_in_staging(run_dir)


def broken(number: int) -> Any:
    def fail(*args: Any) -> Any:
        raise OSError(5, "Input/output error")

    return patched(writer_process, "write_image", lambda _: fail)


def test_too_many_failed_saves_in_a_row_stop_the_run(tmp_path: Path) -> None:
    def work() -> None:
        def at_step(step: int, run: holdfast.Run) -> None:
            if step > 3 and step % 3 == 2:
                background = run._session.saving._background  # type: ignore[union-attr]
                wait_until(
                    lambda: background._take(0.01) or background._ended or not background.is_under_way(),
                    10,
                    "the save failed",
                )

        with forked_writers(broken):
            train(tmp_path / "run", until=30, at_step=at_step, checkpoint_max_failed_saves=2, **ASYNC)

    assert forked(work) == ExitCode.STORAGE_FAILED
    assert [(event.step, event.in_a_row) for event in events_in(tmp_path / "run", SaveFailed)] == [
        (3, 1),
        (6, 2),
    ]
    assert steps_of(tmp_path / "run") == []


def test_a_last_save_that_fails_is_raised(tmp_path: Path) -> None:
    def work() -> None:
        with forked_writers(broken):
            train(tmp_path / "run", until=2, **ASYNC)

    assert forked(work) == ExitCode.STORAGE_FAILED


def test_a_failure_that_nobody_asked_about_is_raised_at_the_end(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def late(number: int) -> Any:
        def fail(*args: Any) -> Any:
            wait_until(gate.exists, 30, "no step is left at which it could be told")
            raise OSError(5, "Input/output error")

        return patched(writer_process, "write_image", lambda _: fail)

    def work() -> None:
        wait = BackgroundSaver.wait

        def at_the_end(saver: BackgroundSaver, *args: Any) -> Any:
            gate.touch()
            return wait(saver, *args)

        BackgroundSaver.wait = at_the_end  # type: ignore[method-assign]
        with forked_writers(late):
            train(tmp_path / "run", until=4, checkpoint_save_at_end=False, **ASYNC)

    assert forked(work) == ExitCode.STORAGE_FAILED


def test_close_raises_what_went_wrong_since_the_last_step(tmp_path: Path) -> None:
    with forked_writers(broken):
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0, **ASYNC)
        run.track(model=nn.Linear(2, 2))
        run.start()
        run.save(wait=False)
        with pytest.raises(SaveFailedError, match="Input/output error"):
            run.close()


def test_an_error_is_told_at_the_next_step_though_nothing_is_under_way_any_more(tmp_path: Path) -> None:
    """A skipped save may have taken the news in; they must not wait for the save after it."""
    with forked_writers(broken):
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0, **ASYNC)
        run.track(model=nn.Linear(2, 2))
        run.start()
        run.save(wait=False)
        background = run._session.saving._background  # type: ignore[union-attr]
        assert background is not None
        wait_until(lambda: background._take(0.01) or background._ended, 10, "the save failed")
        assert background.outstanding == 0
        run.begin_step()
        run.end_step()
        assert len(events_in(tmp_path / "run", SaveFailed)) == 1
        run.close()


def failing(*steps: int, gate: Path) -> Any:
    """The writes of these steps fail, once the gate file is there; so they end only when that is wanted."""
    names = [f"step_{step:08d}" for step in steps]

    def wrap(write_image: Any) -> Any:
        def fail(path: Path, *args: Any) -> Any:
            if not any(name in str(path) for name in names):
                return write_image(path, *args)
            wait_until(gate.exists, 30, "the gate")
            raise OSError(5, "Input/output error")

        return fail

    return lambda number: patched(writer_process, "write_image", wrap)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_save_that_is_asked_for_tells_of_itself_and_not_of_the_one_before(tmp_path: Path, bad: int) -> None:
    """It failed on one of two ranks, as the last that `max_failed_saves` allows; the next is committed."""
    run_dir, gate = tmp_path / "run", tmp_path / "gate"

    def work(rank: int) -> None:
        with forked_writers(failing(1, gate=gate) if rank == bad else None):
            run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, checkpoint_max_failed_saves=1, **ASYNC)
            run.track(model=nn.Linear(2, 2))
            run.start()
            for step in (1, 2):
                run.begin_step()
                run.end_step()
                if step == 1:
                    earlier = run.save(wait=False)
            if rank == 0:
                gate.touch()
            mine = run.save()
            assert run.head == mine
            assert mine.step == 2
            run.begin_step()
            run.end_step()  # nor is it too many in a row any more
            run.finish()
            assert earlier.step == 1

    ranks(tmp_path / "group", 2, work)
    assert steps_of(run_dir) == [3, 2]
    (failed,) = events_in(run_dir, SaveFailed)
    assert (failed.step, failed.in_a_row) == (1, 1)
    assert "Input/output error" in failed.error
    assert [event.step for event in events_in(run_dir, SaveCommitted)] == [2, 3], "none was saved twice"


def test_a_save_that_fails_itself_says_so_though_the_one_before_failed_too(tmp_path: Path) -> None:
    run_dir, gate = tmp_path / "run", tmp_path / "gate"
    with forked_writers(failing(0, gate=gate)):
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, checkpoint_max_failed_saves=2, **ASYNC)
        run.track(model=nn.Linear(2, 2))
        run.start()
        earlier = run.save(wait=False)
        gate.touch()
        with pytest.raises(SaveStorageError, match="was not saved") as raised:
            run.save()
        assert str(earlier) not in str(raised.value)
        assert run.head is None
        run.begin_step()
        run.end_step()  # it was told to who asked
        run.finish()
    assert [event.in_a_row for event in events_in(run_dir, SaveFailed)] == [1, 2]
    assert steps_of(run_dir) == [1]


def test_of_several_outcomes_one_s_own_error_is_raised_and_a_lost_lease_always() -> None:
    first, own = CheckpointName(1, "1" * 16), CheckpointName(2, "2" * 16)
    error, lost = SaveFailedError("first"), LeaseLostError("lost")

    def ended(name: CheckpointName, error: Any = None, *, local_only: bool = False) -> Ended:
        return Ended(name=name, diagnostic=False, blocked=0.0, error=error, local_only=local_only)

    assert to_raise([ended(first, error), ended(own)], own) is None
    assert to_raise([ended(first, error), ended(own)]) is error
    assert to_raise([ended(first), ended(own, error)], own) is error
    assert to_raise([ended(first, lost), ended(own)], own) is lost
    assert to_raise([ended(first, lost), ended(own, error)], own) is lost
    assert to_raise([ended(first, error, local_only=True)]) is None
    assert to_raise([], own) is None


def test_too_little_memory_for_staging_is_told_as_such(tmp_path: Path) -> None:
    """On one rank of two: the save fails on both, with the reason, and the next one works."""
    run_dir = tmp_path / "run"
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def work(rank: int) -> None:
        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 3 and rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
            if step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
                with pytest.raises(SaveFailedError):
                    run.wait_for_saves()

        with forked_writers() as writers:
            train(run_dir, until=6, at_step=at_step, **ASYNC)
            assert len(writers) == 1, "the writer did not die of it"

    ranks(tmp_path, 2, work)
    assert steps_of(run_dir) == [6]
    (failed,) = events_in(run_dir, SaveFailed)
    assert "no memory for a staging buffer" in failed.error
    assert "rank 1" in failed.error


# --- torn ---------------------------------------------------------------------------------------------------


def test_a_byte_that_changes_in_staging_memory_fails_the_save_by_name(tmp_path: Path) -> None:
    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 3:
            stager = run._session.saving._background._stager  # type: ignore[union-attr]
            stage = stager.stage

            def stage_and_flip(snapshot: Any, buffer: Any, tracked: Any) -> Any:
                staged = stage(snapshot, buffer, tracked)
                item = next(i for i in snapshot.plan.layout.items if i.name == "model.3.weight")
                buffer.bytes[item.raw_offset + item.raw_length - 1] ^= 0x20
                stager.stage = stage
                return staged

            stager.stage = stage_and_flip

    with forked_writers():
        train(tmp_path / "run", until=6, at_step=at_step, **ASYNC)
    assert steps_of(tmp_path / "run") == [6]
    (failed,) = events_in(tmp_path / "run", SaveFailed)
    assert "model.3.weight: its bytes do not match the fingerprint" in failed.error
    nothing_in_staging(tmp_path / "run")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("torn", [0, 1])
def test_a_tensor_that_changes_while_it_is_saved_is_never_committed(
    tmp_path: Path, asynchronous: bool, torn: int
) -> None:
    """Between its fingerprint and its copy, on one rank of two."""
    run_dir = tmp_path / "run"

    def work(rank: int) -> None:
        from holdfast.checkpoint.save import saver as save

        def changed(snapshot: Any) -> None:
            names = [item.name for item in snapshot.plan.layout.items]
            at = next(at for at, name in enumerate(names) if at in snapshot.prints)
            snapshot.tensors[at].view(torch.uint8).view(-1)[0] ^= 1
            (tmp_path / "name").write_text(names[at])

        def at_step(step: int, run: holdfast.Run) -> None:
            if step != 3 or rank != torn:
                return
            if asynchronous:
                stage = Stager.stage

                def torn_stage(self: Stager, snapshot: Any, *args: Any) -> Any:
                    if snapshot.name.step == 3:
                        changed(snapshot)
                    return stage(self, snapshot, *args)

                Stager.stage = torn_stage  # type: ignore[method-assign]
            else:
                write_shards = save.write_shards

                def torn_write(staged: Path, plan: Any, tensors: Any, prints: Any) -> Any:
                    save.write_shards = write_shards
                    tensors[-1].view(torch.uint8).view(-1)[0] ^= 1
                    (tmp_path / "name").write_text(plan.layout.items[-1].name)
                    return write_shards(staged, plan, tensors, prints)

                save.write_shards = torn_write

        train(run_dir, until=6, at_step=at_step, checkpoint_async_save=asynchronous)

    ranks(tmp_path, 2, work)
    assert steps_of(run_dir) == [6]
    (failed,) = events_in(run_dir, SaveFailed)
    assert f"{(tmp_path / 'name').read_text()}: its bytes do not match the fingerprint" in failed.error


# --- memory, and nothing grows ------------------------------------------------------------------------------


def staging_memory() -> list[int]:
    """Sizes of this process's staging buffers; all of each is really taken."""
    found: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "holdfast-staging" in str(entry.readlink()):
                about = entry.stat()
                assert about.st_blocks * 512 == about.st_size
                found[about.st_ino] = about.st_size
    return list(found.values())


@pytest.mark.parametrize(("policy", "count"), [("queue", 2), ("skip", 1), ("wait", 1)])
def test_staging_memory_is_the_shard_times_the_buffers(tmp_path: Path, policy: str, count: int) -> None:
    seen: list[int] = []

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 8:
            seen.extend(staging_memory())

    gate = tmp_path / "gate"
    gate.touch()
    assert staging_memory() == []
    with forked_writers(holding(gate)):

        def both(step: int, run: holdfast.Run) -> None:
            if step == 3:
                gate.unlink()  # steps 3 and 6 are under way at once where that may be
            if step == 6:
                reached(gate)
                threading.Timer(0.2, gate.touch).start()
            at_step(step, run)

        train(tmp_path / "run", until=9, at_step=both, checkpoint_when_busy=policy, **ASYNC)
    stored = sum(path.stat().st_size for path in checkpoints(tmp_path / "run")[0].glob("*.distcp"))
    assert sorted(seen) == [stored + -stored % mmap.PAGESIZE] * count
    assert staging_memory() == []


def test_nothing_grows_over_200_asynchronous_saves(tmp_path: Path) -> None:
    shared = shared_memory()
    seen: dict[int, Any] = {}
    settings = {"checkpoint_interval": 1, "checkpoint_save_at_end": False, "checkpoint_read_back": False}
    run = holdfast.Run(run_dir=tmp_path / "run", **settings, **ASYNC)
    model = nn.Linear(256, 256)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with forked_writers() as writers:
        for step, _ in run.steps([1, 2, 3], until=201):
            if step in (20, 200):
                run._in_step = False
                run.wait_for_saves()
                run._in_step = True
                writer = Path("/proc") / str(writers[0].pid)
                seen[step] = {
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "threads": threading.active_count(),
                    "memory": _resident(Path("/proc/self")),
                    "buffers": staging_memory(),
                    "writer's descriptors": len(os.listdir(writer / "fd")),
                    "writer's threads": len(os.listdir(writer / "task")),
                    "writer's memory": _resident(writer),
                }
        assert len(writers) == 1
    for what, now in seen[200].items():
        if "memory" in what:
            assert now - seen[20][what] < 20_000, what
        else:
            assert now == seen[20][what], what
    assert len(checkpoints(tmp_path / "run")) == 200
    assert shared_memory() <= shared
    nothing_in_staging(tmp_path / "run")
    assert not list((tmp_path / "run" / "writing").iterdir())


def shared_memory() -> set[str]:
    """What lies in shared memory, but for what tests in other processes make there: nodes, semaphores."""
    theirs = ("holdfast-test-", "sem.mp-")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(theirs)}


def _resident(process: Path) -> int:
    return int((process / "statm").read_text().split()[1]) * mmap.PAGESIZE // 1024


# --- a snapshot outlives its trainer ------------------------------------------------------------------------


SCRIPT = str(REPO / "tests" / "scripts" / "train" / "train_async.py")


def environment(until: int = 12, **more: str) -> dict[str, str]:
    return {"TINY_OUT": "out", "TINY_UNTIL": str(until), "HOLDFAST_CONTROL_LEASE_TTL": "5", **more}


def launch(*flags: str) -> list[str]:
    return command("run", "--nproc-per-node", "2", "--run-dir", "run", *flags, SCRIPT)


def watches_the_writer(pid: int) -> bool:
    """Whether a process has the sign of life of an earlier writer open."""
    with contextlib.suppress(OSError):
        return any("/writing/" in str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


@contextlib.contextmanager
def killed_after_staging(directory: Path, gate: Path) -> Iterator[int]:
    """A run whose trainer was killed when step 6 was staged; yields its writer, which waits at the gate."""

    def work() -> None:
        with forked_writers(holding(gate, only="step_00000006")) as writers:

            def at_step(step: int, run: holdfast.Run) -> None:
                if step == 8:
                    reached(gate)
                    (directory / "writer").write_text(str(writers[0].pid))
                    die()

            train(directory / "run", until=12, at_step=at_step, **ASYNC)

    assert forked(work) == -9
    writer = int((directory / "writer").read_text())
    assert not is_gone(writer), "it outlives its trainer"
    try:
        yield writer
        wait_until(lambda: is_gone(writer), 10, "a writer without a trainer ends")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer, signal.SIGKILL)


def test_a_staged_snapshot_outlives_a_killed_trainer(tmp_path: Path, longer_reference: Outcome) -> None:
    """Scenario 29, one rank: SIGKILL right after staging; the next attempt waits, and goes on from there."""
    run_dir, gate = tmp_path / "run", tmp_path / "gate"
    before: list[int] = []

    def release() -> None:
        wait_until(lambda: watches_the_writer(os.getpid()), 30, "the next attempt waits for the writer")
        before.extend(steps_of(run_dir))
        gate.touch()

    with killed_after_staging(tmp_path, gate):
        releasing = threading.Thread(target=release)
        releasing.start()
        outcome = train(run_dir, until=12, **ASYNC)
        releasing.join(10)
    assert before == [3]
    assert outcome.started_at == 6
    assert outcome.parameters == longer_reference.parameters
    assert outcome.losses == {step: loss for step, loss in longer_reference.losses.items() if step > 6}
    all_committed_once(run_dir, [3, 6, 9, 12])
    assert "its writer finished step_00000006" in events_in(run_dir, LeaseClaimed)[-1].evidence


def starting_at(gate: Path) -> Around:
    """Writers are held before they have done anything, as by a slow file system, until the gate is there."""

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        deadline = time.monotonic() + 60.0
        while not gate.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        yield

    return lambda number: held()


def test_a_staged_snapshot_outlives_its_trainer_also_while_its_writer_is_still_starting(
    tmp_path: Path, longer_reference: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL right after staging, of a trainer whose writer has not even begun; the next attempt waits."""
    run_dir, gate = tmp_path / "run", tmp_path / "gate"
    before: list[int] = []

    def work() -> None:
        with forked_writers(starting_at(gate)) as writers:

            def at_step(step: int, run: holdfast.Run) -> None:
                if step == 4:
                    (tmp_path / "writer").write_text(str(writers[0].pid))
                    die()

            train(run_dir, until=12, at_step=at_step, **ASYNC)

    def release() -> None:
        wait_until(lambda: watches_the_writer(os.getpid()), 30, "the next attempt waits for the writer")
        before.extend(steps_of(run_dir))
        gate.touch()

    assert forked(work) == -9
    writer = int((tmp_path / "writer").read_text())
    assert not is_gone(writer)
    monkeypatch.setattr(lease, "IDLE_PATIENCE", 0.0)  # not even for a moment for one with nothing to do
    releasing = threading.Thread(target=release)
    try:
        releasing.start()
        outcome = train(run_dir, until=12, **ASYNC)
        releasing.join(40)
        wait_until(lambda: is_gone(writer), 10, "a writer without a trainer ends")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer, signal.SIGKILL)
    assert before == []
    assert outcome.started_at == 3
    assert outcome.parameters == longer_reference.parameters
    all_committed_once(run_dir, [3, 6, 9, 12])
    assert "its writer finished step_00000003" in events_in(run_dir, LeaseClaimed)[-1].evidence
    assert not any(
        "staged by a trainer that is gone" in event.message for event in events_in(run_dir, Warned)
    )


def test_the_wait_for_a_writer_is_bounded_and_a_late_commit_is_refused(
    tmp_path: Path, longer_reference: Outcome
) -> None:
    """Scenario 29: the writer hangs; the next attempt takes the older rung; the fence stops the late one."""
    run_dir, gate = tmp_path / "run", tmp_path / "gate"
    with killed_after_staging(tmp_path, gate) as writer:
        os.kill(writer, signal.SIGSTOP)
        started = time.monotonic()
        outcome = train(run_dir, until=12, checkpoint_handover_timeout=0.5, **ASYNC)
        assert 0.5 < time.monotonic() - started < 10
        before = {path.name: tree(path) for path in checkpoints(run_dir)}
        gate.touch()
        os.kill(writer, signal.SIGCONT)
    assert outcome.started_at == 3
    assert outcome.parameters == longer_reference.parameters
    assert {path.name: tree(path) for path in checkpoints(run_dir)} == before
    nothing_in_staging(run_dir)
    assert "was not waited for" in events_in(run_dir, LeaseClaimed)[-1].evidence
    assert any("staged by a trainer that is gone" in event.message for event in events_in(run_dir, Warned))


@pytest.mark.parametrize("unstaged", [0, 1])
def test_a_snapshot_that_one_rank_did_not_stage_is_given_up_soon(tmp_path: Path, unstaged: int) -> None:
    """A rank is killed before it has staged step 6; the other's writer gives up, and nothing half is left."""
    run_dir = tmp_path / "run"

    def work(rank: int) -> None:
        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 4:
                run.wait_for_saves()
                (tmp_path / f"writer{rank}").write_text(str(writers[0].pid))
            if step == 6 and rank == unstaged:
                run._session.saving._background._stager.stage = lambda *args: die()  # type: ignore[union-attr]
            if step == 7:
                die()

        with forked_writers(lambda number: patched(writer_process, "ORPHAN_GRACE", lambda _: 0.5)) as writers:
            train(run_dir, until=9, at_step=at_step, **ASYNC)

    ranks(tmp_path, 2, work, codes=-9)
    writers = [int((tmp_path / f"writer{rank}").read_text()) for rank in (0, 1)]
    wait_until(lambda: all(map(is_gone, writers)), 5, "the writers give up and end")
    assert steps_of(run_dir) == [3]
    nothing_in_staging(run_dir)
    assert any("had staged its part" in event.message for event in events_in(run_dir, Warned))
    ranks(tmp_path, 2, lambda rank: _resumes_at(run_dir, 3))


def _resumes_at(run_dir: Path, step: int) -> None:
    assert train(run_dir, until=6, **ASYNC).started_at == step


def held(directory: Path, *ranks: str) -> bool:
    return all((directory / "out" / f"held-{rank}").exists() for rank in ranks)


def test_ctrl_c_ends_the_trainer_at_once_and_leaves_the_save_to_the_writer(tmp_path: Path) -> None:
    env = environment(SLOW_HOLD="step_00000006", TINY_DIE="0:8:SIGINT")
    with job(python(SCRIPT), cwd=tmp_path, env=env) as running:
        wait_until(lambda: held(tmp_path, "0"), 60, "the writer is at work")
        ended = running.wait(20)
        assert ended.code in (-signal.SIGINT, 128 + signal.SIGINT), ended.text
        assert len(running.processes()) == 1, "the writer is at it"
        assert steps_of(tmp_path / "run") == [3]
        (tmp_path / "out" / "release").touch()
        wait_until(lambda: not running.processes(), 10, "the writer ends")
    assert steps_of(tmp_path / "run") == [6, 3]
    assert verify(checkpoints(tmp_path / "run")[0]).sound


@pytest.mark.drill
def test_a_snapshot_of_two_ranks_outlives_one_of_them_under_the_launcher(tmp_path: Path) -> None:
    """Scenario 29, two ranks: a rank is killed after staging, both writers are slow, the launch goes on."""
    slow = {"TINY_WRAP": "fsdp", "SLOW_HOLD": "step_00000006"}
    (tmp_path / "whole").mkdir()
    result = finish(launch(), cwd=tmp_path / "whole", env=environment(TINY_WRAP="fsdp"), timeout=90)
    assert result.code == 0, result.text
    with job(launch(), cwd=tmp_path, env=environment(TINY_DIE="1:8:SIGKILL", **slow)) as running:
        wait_until(lambda: held(tmp_path, "0", "1"), 60, "both writers are at work")
        wait_until(lambda: watches_the_writer(running.pid), 60, "the launcher waits for the writers")
        assert steps_of(tmp_path / "run") == [3]
        (tmp_path / "out" / "release").touch()
        result = running.wait(90)
        assert result.code == 0, result.text
    head = latest_head(ControlDirectory.open(tmp_path / "run"))
    assert head is not None
    assert head.step == 6
    assert record(tmp_path) == record(tmp_path / "whole")
    all_committed_once(tmp_path / "run", [3, 6, 9, 12])
