"""The writer process dies, fails or hangs at any point: the save is committed once or told to have failed."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import handoff, saver, writer_process
from holdfast.checkpoint.save.handoff import Start, ToTrainer, ToWriter, UseBuffer
from holdfast.errors import SaveFailedError
from holdfast.journal.events import SaveFailed
from holdfast.process import Stream
from holdfast.record.lease import give_up, given_up
from kit.harness import wait_until
from kit.ranks.writers import (
    ASYNC,
    all_committed_once,
    forked_writers,
    holding,
    killed_at,
    nothing_in_staging,
    patched,
    ranks,
)
from kit.runs import events_in
from kit.tiny import Outcome, checkpoints, counting_file_operations, die, forked, steps_of, train
from kit.worlds.powercut import READINGS, Operation, check_cuts, recording


def shards(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}


# --- it dies ------------------------------------------------------------------------------------------------


def operations_of_a_writer(run_dir: Path) -> list[str]:
    """Those of the whole life of a writer that saves steps 3, 6 and 9."""
    seen = run_dir.parent / f"{run_dir.name}.seen"

    def around(number: int) -> Any:
        return counting_file_operations(lambda number, name, args: _append(seen, name), any_thread=True)

    with forked_writers(around):
        train(run_dir, until=9, **ASYNC)
    return seen.read_text().split()


def _append(path: Path, word: str) -> None:
    with path.open("a") as file:
        file.write(f"{word}\n")


def kill_a_writer_at(points: Iterable[int], directory: Path, reference: Outcome) -> int:
    """How many of the kills came while there was something to replace the writer for."""
    reference_dir = directory / "foreground"
    train(reference_dir, until=9)
    replaced = 0
    for point in points:
        run_dir = directory / f"run-{point}"
        with forked_writers(killed_at(point)) as writers:
            outcome = train(run_dir, until=9, **ASYNC)
            replaced += len(writers) > 1
        assert outcome.losses == reference.losses
        assert outcome.parameters == reference.parameters
        all_committed_once(run_dir, [3, 6, 9])
        for ours, theirs in zip(checkpoints(run_dir), checkpoints(reference_dir), strict=True):
            assert shards(ours) == shards(theirs), ours.name
        shutil.rmtree(run_dir)
    return replaced


def test_a_writer_killed_at_points_all_over_its_work_is_replaced_and_the_save_committed_once(
    tmp_path: Path, reference: Outcome
) -> None:
    """SIGKILL at every 48th file operation and around a commit; the rest in `make drill`."""
    seen = operations_of_a_writer(tmp_path / "count")
    assert {"open", "pwrite", "fsync", "rename", "link", "mkdir"} <= set(seen)
    renames = [at for at, name in enumerate(seen) if name == "rename"]
    points = sorted({*range(0, len(seen), 48), *(renames[0] + d for d in (-1, 0, 1))})
    assert kill_a_writer_at(points, tmp_path, reference) >= len(points) - 2


@pytest.mark.drill
def test_a_writer_killed_at_every_operation(tmp_path: Path, reference: Outcome) -> None:
    seen = operations_of_a_writer(tmp_path / "count")
    assert kill_a_writer_at(range(len(seen)), tmp_path, reference) >= len(seen) - 4


def two_ranks_with_a_killed_writer(directory: Path, rank: int, point: int) -> None:
    run_dir = directory / f"run-{rank}-{point}"

    def work(me: int) -> None:
        with forked_writers(killed_at(point) if me == rank else None):
            train(run_dir, until=6, **ASYNC)

    ranks(directory, 2, work)
    all_committed_once(run_dir, [3, 6])


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.drill)])
def test_with_two_ranks_either_writer_may_die(tmp_path: Path, rank: int) -> None:
    for point in (2, 9, 17, 24):
        two_ranks_with_a_killed_writer(tmp_path, rank, point)


@pytest.mark.drill
@pytest.mark.parametrize("rank", [0, 1])
def test_with_two_ranks_either_writer_may_die_at_any_operation(tmp_path: Path, rank: int) -> None:
    for point in range(90 if rank == 0 else 40):
        two_ranks_with_a_killed_writer(tmp_path, rank, point)


def test_a_writer_killed_while_idle_is_replaced_at_the_next_save(tmp_path: Path, reference: Outcome) -> None:
    with forked_writers() as writers:

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 5:
                run.wait_for_saves()
                writers[0].kill()
                writers[0].wait(10)

        assert train(tmp_path / "run", until=9, at_step=at_step, **ASYNC).losses == reference.losses
        assert len(writers) == 2
    all_committed_once(tmp_path / "run", [3, 6, 9])


def test_a_writer_that_dies_between_two_hand_overs_is_given_both_jobs_again(tmp_path: Path) -> None:
    """It is killed at work on step 3, and the trainer notices only when it hands step 6 over."""
    gate = tmp_path / "gate"

    def around(number: int) -> Any:
        return holding(gate, only="step_00000003")(number) if number == 0 else contextlib.nullcontext()

    with forked_writers(around) as writers:

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 6:
                wait_until(gate.with_suffix(".reached").exists, 10, "the writer holds step 3")
                background = run._session.saving._saver
                stage = background._stager.stage

                def stage_and_kill(*args: Any) -> Any:
                    staged = stage(*args)
                    writers[0].kill()
                    os.waitid(os.P_PID, writers[0].pid, os.WEXITED | os.WNOWAIT)
                    background._stager.stage = stage
                    return staged

                background._stager.stage = stage_and_kill

        train(tmp_path / "run", until=9, at_step=at_step, **ASYNC)
        assert len(writers) == 2
    all_committed_once(tmp_path / "run", [3, 6, 9])


def test_what_a_dead_writer_had_written_is_committed_though_its_buffer_was_used_again(tmp_path: Path) -> None:
    """Killed between the part record and the commit, when the buffer already holds the next snapshot."""
    gate = tmp_path / "gate"

    def wrap(finish: Any) -> Any:
        def stuck(*args: Any, **kwargs: Any) -> Any:
            gate.touch()
            time.sleep(60)

        return stuck

    def around(number: int) -> Any:
        return patched(writer_process.commits, "finish", wrap) if number == 0 else contextlib.nullcontext()

    with forked_writers(around) as writers:

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 4:
                wait_until(gate.exists, 10, "the part of step 3 is written")
            if step == 7:  # step 6 was staged into the same buffer, the only one
                writers[0].kill()

        train(tmp_path / "run", until=9, at_step=at_step, checkpoint_when_busy="wait", **ASYNC)
        assert len(writers) == 2
    all_committed_once(tmp_path / "run", [3, 6, 9])


def test_a_replaced_writer_does_not_touch_a_shard_that_is_being_committed(tmp_path: Path) -> None:
    """Rank 1's writer dies after its part record, and its successor comes while rank 0 commits."""
    run_dir, mark = tmp_path / "run", tmp_path / "mark"

    def left_then_killed(number: int) -> Any:
        def wrap(leave_part: Any) -> Any:
            def leave_and_die(*args: Any, **kwargs: Any) -> None:
                leave_part(*args, **kwargs)
                die()

            return leave_and_die

        if number > 0:
            return patched(
                writer_process, "write_image", lambda _: lambda *args: mark.write_text("rewritten")
            )
        return patched(writer_process.commits, "leave_part", wrap)

    def work(rank: int) -> None:
        with forked_writers(left_then_killed if rank == 1 else None) as writers:

            def at_step(step: int, run: holdfast.Run) -> None:
                if step == 4:
                    run.wait_for_saves()
                    raise SystemExit(0)

            try:
                train(run_dir, until=9, at_step=at_step, **ASYNC)
            finally:
                assert len(writers) == (2 if rank == 1 else 1)

    ranks(tmp_path, 2, work)
    assert not mark.exists()
    assert steps_of(run_dir) == [3]
    assert verify(checkpoints(run_dir)[0]).sound


def test_a_writer_that_dies_again_and_again_fails_the_save_and_the_next_one_works(
    tmp_path: Path, reference: Outcome
) -> None:
    def around(number: int) -> Any:
        broken = number <= saver.RESTARTS
        return (
            patched(writer_process, "write_image", lambda _: lambda *a: die())
            if broken
            else contextlib.nullcontext()
        )

    with forked_writers(around) as writers:

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 4:
                with pytest.raises(SaveFailedError, match="the writer process ended 4 times"):
                    run.wait_for_saves()

        outcome = train(tmp_path / "run", until=9, at_step=at_step, **ASYNC)
        assert len(writers) == saver.RESTARTS + 2
    assert outcome.losses == reference.losses
    assert steps_of(tmp_path / "run") == [9, 6]
    (failed,) = events_in(tmp_path / "run", SaveFailed)
    assert (failed.step, failed.in_a_row) == (3, 1)
    assert "signal 9" in failed.error


def test_a_rank_whose_writer_gives_up_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    """Rank 1's writers die until its trainer gives the save up; rank 0's writer learns of it at once."""
    run_dir = tmp_path / "run"

    def around(number: int) -> Any:
        broken = number <= saver.RESTARTS
        return (
            patched(writer_process, "write_image", lambda _: lambda *a: die())
            if broken
            else contextlib.nullcontext()
        )

    def work(rank: int) -> None:
        started = time.monotonic()
        with forked_writers(around if rank == 1 else None):

            def at_step(step: int, run: holdfast.Run) -> None:
                if step == 4:
                    with pytest.raises(SaveFailedError):
                        run.wait_for_saves()

            train(run_dir, until=6, at_step=at_step, **ASYNC)
        assert time.monotonic() - started < 30

    ranks(tmp_path, 2, work)
    assert steps_of(run_dir) == [6]
    (failed,) = events_in(run_dir, SaveFailed)
    assert "rank 1: SaveFailedError: the writer process ended 4 times" in failed.error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_that_fails_on_one_rank_fails_the_save_for_all_at_once(tmp_path: Path, rank: int) -> None:
    """Also when it fails before the other rank's writer has taken the job up."""
    run_dir = tmp_path / "run"

    def wrap(write_image: Any) -> Any:
        def failing(path: Path, *args: Any) -> Any:
            if "step_00000003" in str(path):
                raise OSError(28, "No space left on device", str(path))
            return write_image(path, *args)

        return failing

    def late(number: int) -> Any:  # the other rank's writer is slow to start
        (tmp_path / f"go-{number}").touch()
        return patched(
            writer_process.Writer, "_enter", lambda enter: lambda *a: (time.sleep(0.3), enter(*a))[1]
        )

    def work(me: int) -> None:
        started = time.monotonic()
        with forked_writers((lambda n: patched(writer_process, "write_image", wrap)) if me == rank else late):

            def at_step(step: int, run: holdfast.Run) -> None:
                if step == 4:
                    with pytest.raises(SaveFailedError):
                        run.wait_for_saves()

            train(run_dir, until=6, at_step=at_step, **ASYNC)
        assert time.monotonic() - started < 30

    ranks(tmp_path, 2, work)
    assert steps_of(run_dir) == [6]
    (failed,) = events_in(run_dir, SaveFailed)
    assert "No space left on device" in failed.error
    assert "Traceback" in failed.error
    assert "failing" in failed.error, "the original traceback"
    nothing_in_staging(run_dir)


def test_a_given_up_save_is_told_until_a_later_one_is_asked_for(tmp_path: Path) -> None:
    assert given_up(tmp_path, 1, 0, 5) == ""
    give_up(tmp_path, 1, 0, 5, "no space")
    assert [given_up(tmp_path, 1, 0, serial) for serial in (4, 5, 6)] == ["no space", "no space", ""]
    assert given_up(tmp_path, 1, 1, 5) == given_up(tmp_path, 2, 0, 5) == ""
    (tmp_path / "writing" / "00000001.0.failed").write_bytes(b"{torn")
    assert given_up(tmp_path, 1, 0, 5) == ""


# --- it hangs, or cannot be reached -------------------------------------------------------------------------


def test_a_stuck_writer_at_the_end_is_an_error_after_the_timeout_and_not_a_hang(tmp_path: Path) -> None:
    def work() -> None:
        with forked_writers(holding(tmp_path / "never")) as writers:
            started = time.monotonic()
            try:
                train(tmp_path / "run", until=3, checkpoint_timeout=0.5, **ASYNC)
            finally:
                assert time.monotonic() - started < 5
                writers[0].kill()

    assert forked(work) == holdfast.errors.SaveFailedError.exit_code


def test_a_writer_past_its_deadline_is_ended_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "LATE", 0.0)

    def around(number: int) -> Any:
        return holding(tmp_path / "never")(number) if number == 0 else contextlib.nullcontext()

    with forked_writers(around) as writers:

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 5:
                wait_until((tmp_path / "never.reached").exists, 10, "the writer is at work")
                time.sleep(0.4)

        train(tmp_path / "run", until=6, at_step=at_step, checkpoint_timeout=0.3, **ASYNC)
        assert writers[0].returncode == -9
    assert steps_of(tmp_path / "run") == [6]
    (failed,) = events_in(tmp_path / "run", SaveFailed)
    assert "did not answer in time" in failed.error


def test_a_writer_that_reads_nothing_fails_the_save_and_not_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped writer and more to say than the socket holds: never half a message followed by another."""
    monkeypatch.setattr("holdfast.checkpoint.save.handoff.SEND_TIMEOUT", 0.3)
    big = [torch.nn.Linear(2, 2) for _ in range(3000)]
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0, checkpoint_save_at_end=False, **ASYNC)
    run.track(model=torch.nn.ModuleList(big))
    with forked_writers() as writers:
        run.start()
        run._session.saving.stepping()
        os.kill(writers[0].pid, signal.SIGSTOP)
        run.save(wait=False)
        with pytest.raises(SaveFailedError, match="read nothing for"):
            run.wait_for_saves()
        assert writers[0].returncode == -9
        run.save()
        run.finish()
    assert steps_of(tmp_path / "run") == [0]


def test_a_writer_that_cannot_be_started_fails_the_save_and_training_goes_on(tmp_path: Path) -> None:
    def no_more_processes(descriptor: int) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with forked_writers() as writers, pytest.MonkeyPatch.context() as patch:

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 2:
                writers[0].kill()
                writers[0].wait(5)
                patch.setattr(handoff, "spawn", no_more_processes)
            if step == 5:
                patch.undo()

        train(tmp_path / "run", until=6, at_step=at_step, **ASYNC)
    assert steps_of(tmp_path / "run") == [6]
    (failed,) = events_in(tmp_path / "run", SaveFailed)
    assert "cannot be started" in failed.error


# --- its own end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_that_end_a_whole_job_do_not_end_a_writer(tmp_path: Path, number: int) -> None:
    gate = tmp_path / "gate"
    with forked_writers(holding(gate)) as writers:

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 4:
                wait_until(gate.with_suffix(".reached").exists, 10, "the writer is at work")
                os.kill(writers[0].pid, number)
                gate.touch()

        train(tmp_path / "run", until=6, at_step=at_step, **ASYNC)
        assert len(writers) == 1
        assert writers[0].wait(10) == 0
    all_committed_once(tmp_path / "run", [3, 6])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nor_do_they_end_one_that_is_still_starting(number: int) -> None:
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = handoff.spawn(theirs.fileno())
        try:
            os.kill(writer.pid, number)
            assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), (
                "the trainer takes it as before"
            )
            theirs.close()
            ours.close()
            assert writer.wait(30) == 0
        finally:
            writer.kill()
            writer.wait(10)


def test_a_writer_ends_with_its_trainer_though_a_child_of_that_holds_the_socket(tmp_path: Path) -> None:
    """A data loader's worker is a fork of the trainer: it holds every descriptor that the trainer had."""
    child = tmp_path / "child"

    def work() -> None:
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0, **ASYNC)
        run.track(model=torch.nn.Linear(2, 2))
        run.start()
        (tmp_path / "writer").write_text(str(run._session.saving._saver._writer.pid))
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        child.write_text(str(pid))
        die()

    assert forked(work) == -9
    writer = Path("/proc") / (tmp_path / "writer").read_text()
    try:
        wait_until(lambda: not writer.exists() or b"writer_process" not in _command(writer), 10, "it ends")
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


def _command(process: Path) -> bytes:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes()
    return b""


def test_the_writer_module_does_not_import_torch_and_starts_fast(tmp_path: Path) -> None:
    """In processor time, so that other work here is not taken for its own."""
    code = (
        "import sys, time; t = time.process_time(); import holdfast.checkpoint.save.writer_process;"
        "assert 'torch' not in sys.modules; print(time.process_time() - t)"
    )
    taken = [
        float(
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60).stdout
        )
        for _ in range(3)
    ]
    assert min(taken) < 0.3, taken


def test_a_writer_takes_nothing_but_a_start_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(writer_process, "leave_stopping_to_the_trainer", lambda: None)  # this is the test's
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line: Stream[ToTrainer] = Stream(ours, ToTrainer)
        line.send(UseBuffer(0, 4096), [os.open("/dev/null", os.O_RDONLY)], within=1.0)
        assert writer_process.main(os.dup(theirs.fileno())) == 1
    ours, theirs = socket.socketpair()
    ours.close()
    assert writer_process.main(theirs.detach()) == 0


def test_a_writer_of_another_run_refuses(tmp_path: Path) -> None:
    import socket

    train(tmp_path / "run", until=1)
    ours, theirs = socket.socketpair()
    start = Start(run_dir=str(tmp_path / "run"), run="another", attempt=1, epoch=1, lease_ttl=5.0,
                  root=str(tmp_path / "root"), rank=0, world=1, threads=1)  # fmt: skip
    with ours, theirs, pytest.raises(SaveFailedError, match="not another"):
        writer_process.Writer(start, Stream(theirs, ToWriter))


# --- power cuts ---------------------------------------------------------------------------------------------


def recorded_save(directory: Path) -> tuple[Path, list[Operation]]:
    """A run before its save of step 6, and what the writer then did to the disk."""

    @contextlib.contextmanager
    def recorded(number: int) -> Iterator[None]:
        trace: list[Operation] = []
        with recording(trace, any_thread=True):
            yield
        (directory / "trace").write_bytes(pickle.dumps(trace))

    def work() -> None:
        with forked_writers(recorded):

            def at_step(step: int, run: holdfast.Run) -> None:
                if step == 6:
                    run.wait_for_saves()
                    shutil.copytree(directory / "run", directory / "before", symlinks=True)
                if step == 7:
                    run.wait_for_saves()
                    raise SystemExit(0)

            with contextlib.suppress(SystemExit):
                train(directory / "run", until=9, at_step=at_step, **ASYNC)

    assert forked(work) == 0
    trace: list[Operation] = pickle.loads((directory / "trace").read_bytes())
    first = next(at for at, (_, args) in enumerate(trace) if "step_00000006" in repr(args))
    return directory / "before", trace[first:]


@pytest.mark.drill
def test_power_cuts_all_over_the_work_of_a_writer(tmp_path: Path, reference: Outcome) -> None:
    started = check_cuts(
        tmp_path, recorded_save(tmp_path), lambda count: [*range(0, count, 16), count], reference
    )
    assert started["names_first"] == started["torn"] == {3, 6}, "both sides of the commit were cut"
    assert 3 in started["strict"]


@pytest.mark.drill
def test_a_power_cut_at_every_operation_of_a_writer(tmp_path: Path, reference: Outcome) -> None:
    started = check_cuts(tmp_path, recorded_save(tmp_path), lambda count: range(count + 1), reference)
    assert started == {reading: {3, 6} for reading in READINGS}
