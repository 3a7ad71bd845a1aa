"""Saves to the local tier: staged into what becomes the copy, committed, drained, fixed under a record."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.room import is_in_memory, memory_left
from holdfast.checkpoint.copies.rules import memory
from holdfast.checkpoint.format.manifest import read
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import local as local_save
from holdfast.checkpoint.save import writer_process
from holdfast.journal.events import (
    CopyQuarantined,
    LeaseClaimed,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    Warned,
)
from holdfast.record.directory import ControlDirectory
from holdfast.record.lineage import read_timeline, was_committed
from kit.harness import is_alive, wait_until
from kit.nodes.local_tier import committed, copies, is_sound, local, place, settle
from kit.ranks.writers import forked_writers, holding, killed_at, nothing_in_staging, patched, ranks
from kit.runs import events_in
from kit.tiny import checkpoints, counting_file_operations, die, forked, steps_of, train

# --- two tiers ----------------------------------------------------------------------------------------------


def test_each_tier_has_its_own_interval_and_both_have_the_same_manifest(tmp_path: Path, shm: Path) -> None:
    """Local saves every 2 steps, every third of them goes to the root too; stock dcp.load reads that."""
    run_dir = tmp_path / "run"
    with forked_writers():
        outcome = train(run_dir, until=13, **local(shm))
    reference = train(tmp_path / "reference", until=13)
    assert outcome.losses == reference.losses
    assert committed(run_dir) == {"local": [2, 4, 6, 8, 10, 12, 13], "global": [6, 12, 13]}
    assert steps_of(run_dir) == [13, 12, 6]
    for event in events_in(run_dir, SaveCommitted):
        assert (event.blocked_seconds > 0) == (event.tier == "local")
    chain = sorted((e for e in events_in(run_dir, SaveCommitted) if e.tier == "local"), key=lambda e: e.step)
    assert [event.parent for event in chain] == [None, *(event.checkpoint[14:] for event in chain[:-1])]
    found = copies(shm, run_dir)
    assert set(found) >= {12, 13}
    control = ControlDirectory.open(run_dir)
    for path in checkpoints(run_dir):
        assert verify(path).sound
    for record in place(shm).records():
        if record.name.step in (12, 13):
            assert read(run_dir / "checkpoints" / record.checkpoint)[1] == record.manifest
    line = {record.step: was_committed(control, record) for record in read_timeline(control).on_line}
    assert line == {step: step in (6, 12, 13) for step in (2, 4, 6, 8, 10, 12, 13)}
    state = {"model": {"3.bias": torch.zeros(6)}}
    dcp.load({"model.3.bias": state["model"]["3.bias"]}, checkpoint_id=checkpoints(run_dir)[0], no_dist=True)
    assert state["model"]["3.bias"].numpy().tobytes() == outcome.parameters["3.bias"]
    assert events_in(run_dir, SaveFailed, SaveSkipped) == []
    nothing_in_staging(run_dir)


def test_two_ranks_commit_one_manifest_and_each_its_own_copy(tmp_path: Path, shm: Path) -> None:
    run_dir = tmp_path / "run"

    def work(rank: int) -> None:
        with forked_writers():
            train(run_dir, until=7, **local(shm))

    ranks(tmp_path, 2, work)
    assert committed(run_dir) == {"local": [2, 4, 6, 7], "global": [6, 7]}
    found = copies(shm, run_dir)
    assert found[7] == found[6] == [0, 1]
    assert {record.image[:5] for record in place(shm).records()} == {"00000", "00001"}
    assert all(verify(path).sound for path in checkpoints(run_dir))


def test_the_staged_snapshot_is_the_copy_and_nothing_is_written_again(tmp_path: Path, shm: Path) -> None:
    """The image's inode is the one that the trainer has mapped, and the writer writes no image."""
    run_dir, seen = tmp_path / "run", tmp_path / "seen"

    def around(number: int) -> Any:
        def note(at: int, name: str, args: tuple[Any, ...]) -> None:
            with seen.open("a") as file:
                file.write(f"{name} {args[0]!r:.200}\n")

        return counting_file_operations(note, any_thread=True)

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            settle(run)
            slots = run._session.saving._saver._memory.slots  # type: ignore[union-attr]
            mapped = {os.fstat(slot.buffer.descriptor).st_ino for slot in slots._slots}
            for record in place(shm).records():
                assert place(shm).image(record).stat().st_ino in mapped

    with forked_writers(around):
        train(run_dir, until=5, at_step=at_step, checkpoint_save_at_end=False, **local(shm))
    assert committed(run_dir)["local"] == [2, 4]
    assert "pwrite" not in seen.read_text().replace("pwrite 3", "").replace("pwrite 4", "")
    assert is_in_memory(shm)
    assert not is_in_memory(tmp_path)


def test_a_directory_on_a_disk_works_too(tmp_path: Path) -> None:
    disk, run_dir = tmp_path / "disk", tmp_path / "run"
    with forked_writers():
        train(run_dir, until=13, **local(disk))
    assert committed(run_dir) == {"local": [2, 4, 6, 8, 10, 12, 13], "global": [6, 12, 13]}
    assert set(copies(disk, run_dir)) >= {12, 13}
    assert all(verify(path).sound for path in checkpoints(run_dir))
    assert len(list(place(disk).images.iterdir())) <= 4


def test_a_diagnostic_save_and_a_save_that_is_asked_for(tmp_path: Path, shm: Path) -> None:
    run_dir = tmp_path / "run"
    with forked_writers():
        run = holdfast.Run(run_dir=run_dir, **local(shm, checkpoint_interval=0))
        run.track(model=nn.Linear(2, 2))
        run.start()
        name = run.save()
        assert run.head == name
        run.save(diagnostic=True)
        assert run.head == name
        run.close()
    assert committed(run_dir) == {"local": [0], "global": [0, 0]}
    assert [record.checkpoint for record in place(shm).records()] == [str(name)]


# --- bytes never change under a record ----------------------------------------------------------------------


@pytest.mark.drill
def test_bytes_never_change_while_a_record_stands(tmp_path: Path, shm: Path) -> None:
    """200 saves, and a reader that leases, verifies every digest and lets go, all the time."""
    run_dir, stop = tmp_path / "run", threading.Event()
    checked: list[bool] = []
    seen: dict[int, Any] = {}

    def read_all() -> None:
        while not stop.is_set():
            try:
                tier, control = place(shm), ControlDirectory.open(run_dir)
            except Exception:  # noqa: BLE001 - it is not there yet
                continue
            for record in tier.records():
                with contextlib.suppress(local_manifest.ManifestError):  # forgotten, with its copies
                    sound = is_sound(tier, control, record)
                    if sound is not None:
                        checked.append(sound)

    run = holdfast.Run(
        run_dir=run_dir,
        checkpoint_save_at_end=False,
        **local(shm, checkpoint_interval=50, checkpoint_non_persistent_save_interval=1),
    )
    model = nn.Linear(64, 64)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    reader = threading.Thread(target=read_all)
    reader.start()
    try:
        with forked_writers() as writers:
            for step, _ in run.steps([1, 2, 3], until=201):
                with torch.no_grad():
                    model.weight.add_(0.001)
                if step in (60, 200):
                    settle(run)
                    writer = Path("/proc") / str(writers[0].pid)
                    seen[step] = {
                        "descriptors": len(os.listdir("/proc/self/fd")),
                        "threads": threading.active_count(),
                        "writer's descriptors": len(os.listdir(writer / "fd")),
                        "writer's threads": len(os.listdir(writer / "task")),
                        "slots": len(list(place(shm).images.iterdir())) <= 4,
                        "records": len(list(place(shm).copies.iterdir())) <= 4,
                        "manifests": len(list((run_dir / "local").iterdir())) <= 5,
                    }
            assert len(writers) == 1
    finally:
        stop.set()
        reader.join(30)
    assert len(checked) > 50
    assert all(checked), "a copy was changed under its record"
    assert committed(run_dir)["global"] == [50, 100, 150, 200]
    control = ControlDirectory.open(run_dir)
    assert [record.step for record in read_timeline(control).on_line] == list(range(200, 0, -1))
    assert len(list(run_dir.glob("attempts/*/commits/*.json"))) <= 4 + 5, "the others are on the shelf"
    for what in ("threads", "writer's threads", "slots", "records", "manifests"):
        assert seen[200][what] == seen[60][what], what
    for what in ("descriptors", "writer's descriptors"):
        assert abs(seen[200][what] - seen[60][what]) <= 4, what  # a slot more, and what the reader has open
    assert seen[200]["slots"]
    assert seen[200]["records"]
    assert seen[200]["manifests"]


def test_a_readers_lease_makes_the_trainer_take_another_slot(tmp_path: Path, shm: Path) -> None:
    run_dir = tmp_path / "run"
    held: list[Any] = []

    def at_step(step: int, run: holdfast.Run) -> None:
        if step in (3, 13):
            settle(run)
        if step == 3:
            (record,) = place(shm).records()
            lease = place(shm).lease(record)
            descriptor = lease.__enter__()
            assert descriptor is not None
            held.extend([lease, record, os.pread(descriptor, 1 << 20, 0)])
        if step == 13:
            lease, record, before = held
            assert place(shm).find(record.checkpoint, 0) == record, "it was not taken back while it was read"
            assert place(shm).image(record).read_bytes() == before
            lease.__exit__(None, None, None)

    with forked_writers():
        train(run_dir, until=17, at_step=at_step, **local(shm, checkpoint_interval=0))
    assert committed(run_dir)["local"] == [2, 4, 6, 8, 10, 12, 14, 16, 17]
    assert 2 not in copies(shm, run_dir), "it was taken back when it was not read any more"


def test_a_local_save_that_finds_all_slots_read_is_skipped_or_waits(tmp_path: Path, shm: Path) -> None:
    run_dir = tmp_path / "run"
    locks: list[int] = []

    def at_step(step: int, run: holdfast.Run) -> None:
        if step in (9, 11):
            settle(run)
        if step == 9:
            for path in place(shm).images.iterdir():
                locks.append(os.open(path, os.O_RDONLY))
                fcntl.flock(locks[-1], fcntl.LOCK_SH)
        if step == 13:
            for descriptor in locks:
                os.close(descriptor)

    settings = local(shm, checkpoint_interval=0, checkpoint_when_busy="skip", checkpoint_save_at_end=False)
    with forked_writers():
        train(run_dir, until=15, at_step=at_step, **settings)
    # One more slot may have been left to make at step 10; at step 12 there is none.
    assert set(committed(run_dir)["local"]) - {10} == {2, 4, 6, 8, 14}
    (skipped,) = events_in(run_dir, SaveSkipped)
    assert skipped.step in (10, 12)


# --- what dies ----------------------------------------------------------------------------------------------


def test_a_snapshot_staged_before_the_trainer_died_is_committed_locally_and_drained(
    tmp_path: Path, shm: Path
) -> None:
    """Scenario 29 for the local tier: SIGKILL right after staging step 6; the writer does the rest alone."""
    run_dir, gate = tmp_path / "run", tmp_path / "gate"

    def around(number: int) -> Any:
        def wrap(digest_image: Any) -> Any:
            def slow(*args: Any, **kwargs: Any) -> Any:
                if (tmp_path / "hold").exists():
                    gate.with_suffix(".reached").touch()
                    wait_until(gate.exists, 30, "the gate opens")
                return digest_image(*args, **kwargs)

            return slow

        return patched(local_save, "digest_image", wrap)

    def work() -> None:
        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 6:
                settle(run)
                (tmp_path / "hold").touch()
            if step == 7:
                wait_until(gate.with_suffix(".reached").exists, 20, "the writer is at it")
                (tmp_path / "writer").write_text(str(writers[0].pid))
                die()

        with forked_writers(around) as writers:
            train(run_dir, until=12, at_step=at_step, **local(shm))

    assert forked(work) == -9
    writer = int((tmp_path / "writer").read_text())
    assert is_alive(writer)
    assert 6 not in copies(shm, run_dir)
    gate.touch()
    wait_until(lambda: not is_alive(writer), 20, "the writer ends when all is done")
    assert 6 in copies(shm, run_dir)
    assert steps_of(run_dir) == [6]
    assert train(run_dir, until=12, **local(shm)).started_at == 6
    assert committed(run_dir) == {"local": [2, 4, 6, 8, 10, 12], "global": [6, 12]}


def test_the_next_attempt_does_not_wait_for_a_drain_and_the_fence_ends_it(tmp_path: Path, shm: Path) -> None:
    """The checkpoint is committed locally; the long drain by a dead trainer's writer is refused, cleared."""
    run_dir, gate = tmp_path / "run", tmp_path / "gate"

    def work() -> None:
        with forked_writers(holding(gate, only="step_00000006")) as writers:

            def at_step(step: int, run: holdfast.Run) -> None:
                if step == 8:
                    wait_until(gate.with_suffix(".reached").exists, 20, "it drains")
                    (tmp_path / "writer").write_text(str(writers[0].pid))
                    die()

            train(run_dir, until=12, at_step=at_step, **local(shm, checkpoint_non_persistent_save_interval=6))

    assert forked(work) == -9
    writer = int((tmp_path / "writer").read_text())
    assert copies(shm, run_dir) == {6: [0]}
    started = time.monotonic()
    run = holdfast.Run(run_dir=run_dir, control_lease_ttl=5.0, checkpoint_handover_timeout=60.0)
    run.track(model=nn.Linear(2, 2))
    with contextlib.suppress(holdfast.HoldfastError):
        run.start()
    assert time.monotonic() - started < 15, "it did not wait for the drain"
    run.close()
    gate.touch()
    wait_until(lambda: not is_alive(writer), 20, "the writer ends")
    assert steps_of(run_dir) == []
    assert "step_" not in events_in(run_dir, LeaseClaimed)[-1].evidence
    assert not list((run_dir / "checkpoints" / ".staging").glob("step_*"))


def check_after_kill(run_dir: Path, shm: Path) -> None:
    assert committed(run_dir) == {"local": [2, 4, 6, 7], "global": [6, 7]}
    assert set(copies(shm, run_dir)) >= {6, 7}
    assert all(verify(path).sound for path in checkpoints(run_dir))
    assert events_in(run_dir, SaveFailed) == []
    nothing_in_staging(run_dir)


def operations_of_a_writer(run_dir: Path, shm: Path) -> int:
    seen = run_dir.parent / "seen"

    def around(number: int) -> Any:
        def note(at: int, name: str, args: tuple[Any, ...]) -> None:
            with seen.open("a") as file:
                file.write("x")

        return counting_file_operations(note, any_thread=True)

    with forked_writers(around):
        train(run_dir, until=7, **local(shm))
    return seen.stat().st_size


@pytest.mark.drill
def test_a_writer_killed_at_points_all_over_its_work_leaves_no_bad_record(tmp_path: Path, shm: Path) -> None:
    """No record without the right bytes, every save committed once in each tier, no older copy lost."""
    count = operations_of_a_writer(tmp_path / "count", shm / "count")
    for point in range(0, count, max(1, count // 9)):
        directory = shm / str(point)
        with forked_writers(killed_at(point)):
            train(tmp_path / str(point), until=7, **local(directory))
        check_after_kill(tmp_path / str(point), directory)


@pytest.mark.drill
def test_a_writer_killed_at_every_operation_leaves_no_bad_record(tmp_path: Path, shm: Path) -> None:
    count = operations_of_a_writer(tmp_path / "count", shm / "count")
    for point in range(count):
        directory = shm / str(point)
        with forked_writers(killed_at(point)):
            train(tmp_path / str(point), until=7, **local(directory))
        check_after_kill(tmp_path / str(point), directory)
        # What a killed writer had begun may end a little later.
        wait_until(lambda gone=directory: remove(gone), 10, f"{directory} is gone")


def remove(directory: Path) -> bool:
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.drill), 1])
def test_with_two_ranks_either_writer_may_die(tmp_path: Path, shm: Path, rank: int) -> None:
    for point in (3, 11):
        run_dir, directory = tmp_path / f"run-{point}", shm / str(point)

        def work(me: int, point: int = point, run_dir: Path = run_dir, directory: Path = directory) -> None:
            with forked_writers(killed_at(point) if me == rank else None):
                train(run_dir, until=7, **local(directory))

        ranks(tmp_path, 2, work)
        check_after_kill(run_dir, directory)


def test_a_byte_that_changes_in_a_slot_before_the_commit_is_never_committed(
    tmp_path: Path, shm: Path
) -> None:
    """Torn: nothing is committed in either tier, and the copies before it stay."""
    run_dir = tmp_path / "run"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 6:
            stager = run._session.saving._saver._stager  # type: ignore[union-attr]
            stage = stager.stage

            def stage_and_flip(snapshot: Any, buffer: Any, tracked: Any) -> Any:
                staged = stage(snapshot, buffer, tracked)
                item = next(i for i in snapshot.plan.layout.items if i.name == "model.3.weight")
                buffer.bytes[item.raw_offset + 3] ^= 0x20
                stager.stage = stage
                return staged

            stager.stage = stage_and_flip

    with forked_writers():
        train(run_dir, until=9, at_step=at_step, **local(shm))
    assert committed(run_dir) == {"local": [2, 4, 8, 9], "global": [9]}
    (failed,) = events_in(run_dir, SaveFailed)
    assert "model.3.weight: its bytes do not match the fingerprint" in failed.error
    assert 6 not in copies(shm, run_dir)
    assert not list((run_dir / "local").glob("step_00000006*"))
    nothing_in_staging(run_dir)


def test_a_copy_that_changes_after_its_commit_is_not_drained_but_quarantined(
    tmp_path: Path, shm: Path
) -> None:
    run_dir = tmp_path / "run"

    def around(number: int) -> Any:
        def wrap(write_image: Any) -> Any:
            def altered(staged: Path, image: memoryview, *args: Any) -> Any:
                if "step_00000006" in str(staged):
                    (record,) = [r for r in place(shm).records() if r.name.step == 6]
                    with place(shm).image(record).open("r+b") as file:
                        file.seek(40)  # in what surrounds the first tensor: no fingerprint covers it
                        file.write(b"\xff")
                return write_image(staged, image, *args)

            return altered

        return patched(writer_process, "write_image", wrap)

    with forked_writers(around):
        train(run_dir, until=9, **local(shm))
    assert committed(run_dir) == {"local": [2, 4, 6, 8, 9], "global": [9]}
    (event,) = events_in(run_dir, CopyQuarantined)
    assert event.checkpoint.startswith("step_00000006")
    assert 6 not in copies(shm, run_dir)
    assert steps_of(run_dir) == [9]


def test_a_manifest_that_lists_other_bytes_than_a_rank_holds_makes_no_copy(tmp_path: Path, shm: Path) -> None:
    run_dir = tmp_path / "run"

    def around(number: int) -> Any:
        def wrap(seal: Any) -> Any:
            def other(self: Any, *args: Any) -> Any:
                manifest, digest = seal(self, *args)
                first = msgspec.structs.replace(manifest.files[0], digest="0" * 32)
                return msgspec.structs.replace(manifest, files=[first, *manifest.files[1:]]), digest

            return other

        return patched(local_save.LocalCommitter, "seal", wrap)

    with forked_writers(around):
        train(run_dir, until=3, **local(shm, checkpoint_save_at_end=False))
    assert place(shm).records() == []
    (failed,) = events_in(run_dir, SaveFailed)
    assert "the copy does not count" in failed.error


def test_a_local_save_that_fails_does_not_fail_the_drain_before_it(tmp_path: Path, shm: Path) -> None:
    """Rank 1 gives the save of step 8 up while its drain of step 6 is held; that drain is not given up."""
    run_dir, gate = tmp_path / "run", tmp_path / "gate"

    def work(rank: int) -> None:
        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 8 and rank == 1:
                wait_until(gate.with_suffix(".reached").exists, 20, "rank 1 drains step 6")
                stager = run._session.saving._saver._stager  # type: ignore[union-attr]
                stage = stager.stage

                def fail(*args: Any) -> Any:
                    stager.stage = stage
                    raise OSError("no copy of this one")

                stager.stage = fail
            if step == 10:
                if rank == 0:
                    wait_until(lambda: told_failed(run), 20, "the failure of step 8 is told")
                    gate.touch()
                with contextlib.suppress(holdfast.HoldfastError):
                    settle(run)
                run._in_step = True

        def told_failed(run: holdfast.Run) -> bool:
            run._session.saving.at_boundary()  # type: ignore[union-attr]
            return bool(events_in(run_dir, SaveFailed))

        with forked_writers(holding(gate, only="step_00000006") if rank == 1 else None):
            train(run_dir, until=11, at_step=at_step, **local(shm, checkpoint_save_at_end=False))

    ranks(tmp_path, 2, work)
    assert committed(run_dir) == {"local": [2, 4, 6, 10], "global": [6]}
    (failed,) = events_in(run_dir, SaveFailed)
    assert failed.step == 8
    assert all(verify(path).sound for path in checkpoints(run_dir))


def test_a_local_tier_that_does_not_work_stops_no_run(tmp_path: Path, shm: Path) -> None:
    """Its directory of records is gone: local saves fail and are told, the root gets its checkpoints."""
    run_dir = tmp_path / "run"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 3:
            settle(run)
            shutil.rmtree(place(shm).copies)
            place(shm).copies.write_text("")

    with forked_writers():
        train(run_dir, until=24, at_step=at_step, **local(shm, checkpoint_max_failed_saves=4))
    assert committed(run_dir)["local"] == [2]
    assert 24 in committed(run_dir)["global"]
    assert events_in(run_dir, SaveFailed)
    assert any("no local copy" in event.reason for event in events_in(run_dir, SaveSkipped))


def test_a_save_that_is_asked_for_goes_to_the_root_alone_if_the_local_tier_fails_it(
    tmp_path: Path, shm: Path
) -> None:
    """What must not be lost does not depend on the local tier: on both ranks, though one has failed."""
    run_dir = tmp_path / "run"

    def work(rank: int) -> None:
        with forked_writers():
            directory = shm / str(rank)
            run = holdfast.Run(run_dir=run_dir, **local(directory, checkpoint_interval=0))
            run.track(model=nn.Linear(2, 2))
            run.start()
            if rank == 1:
                shutil.rmtree(place(directory).copies)
                place(directory).copies.write_text("")
            name = run.save()
            assert run.head == name
            run.close()

    ranks(tmp_path, 2, work)
    (path,) = checkpoints(run_dir)
    assert verify(path).sound
    assert any("to the checkpoint root alone" in event.message for event in events_in(run_dir, Warned))


# --- room ---------------------------------------------------------------------------------------------------


def image_bytes(shm: Path) -> int:
    return max(path.stat().st_size for path in place(shm).images.iterdir())


def test_without_room_a_local_save_is_left_out_and_training_goes_on(tmp_path: Path, shm: Path) -> None:
    """The root still gets its checkpoints, from a staging buffer; the reason is told once."""
    run_dir = tmp_path / "run"
    with forked_writers():
        outcome = train(run_dir, until=13, **local(shm, checkpoint_non_persistent_max_bytes=4096))
    assert outcome.losses == train(tmp_path / "reference", until=13).losses
    assert committed(run_dir) == {"local": [], "global": [6, 12, 13]}
    (skipped,) = events_in(run_dir, SaveSkipped)
    assert skipped.step == 2
    assert "non_persistent_max_bytes" in skipped.reason
    assert copies(shm, run_dir) == {}
    assert all(verify(path).sound for path in checkpoints(run_dir))


def test_room_for_two_keeps_the_newest_one_and_goes_on(tmp_path: Path, shm: Path) -> None:
    """Under pressure fewer are kept than asked for, but never none."""
    run_dir, least = tmp_path / "run", []
    with forked_writers():
        train(tmp_path / "first", until=2, **local(shm / "first"))
        size = image_bytes(shm / "first")

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 5:
                settle(run)
            if step >= 5:
                least.append(len(place(shm / "run").records()))

        settings = local(shm / "run", checkpoint_interval=0, checkpoint_non_persistent_max_bytes=2 * size)
        train(run_dir, until=13, at_step=at_step, **settings)
    assert min(least) >= 1
    assert committed(run_dir)["local"] == [2, 4, 6, 8, 10, 12, 13]
    assert len(list(place(shm / "run").images.iterdir())) == 2


def test_on_two_ranks_both_skip_when_one_has_no_room(tmp_path: Path, shm: Path) -> None:
    run_dir = tmp_path / "run"

    def work(rank: int) -> None:
        limit = 4096 if rank == 1 else 0
        with forked_writers():
            settings = local(shm / str(rank), checkpoint_non_persistent_max_bytes=limit)
            train(run_dir, until=7, **settings)

    ranks(tmp_path, 2, work)
    assert committed(run_dir) == {"local": [], "global": [6, 7]}
    assert len(events_in(run_dir, SaveSkipped)) == 1


def test_the_memory_of_the_local_tier_is_within_its_formula(tmp_path: Path, shm: Path) -> None:
    most = [0]

    def at_step(step: int, run: holdfast.Run) -> None:
        used = [path.stat().st_blocks * 512 for path in place(shm).images.iterdir()] if step > 3 else []
        most[0] = max(most[0], sum(used))

    with forked_writers():
        settings = local(shm, checkpoint_interval=2, checkpoint_non_persistent_keep_last=3)
        train(tmp_path / "run", until=30, at_step=at_step, **settings)
    assert 0 < most[0] <= memory(image=image_bytes(shm), keep=3, factor=1)


def test_the_memory_limit_of_a_job_counts(tmp_path: Path) -> None:
    """As cgroups say it, of both versions, the tightest of the groups above included."""
    own = tmp_path / "own"
    groups = tmp_path / "groups"
    inner = groups / "job" / "step"
    inner.mkdir(parents=True)
    for folder, limit, used in ((inner, "max", 0), (inner.parent, "1000", 700)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 40\nactive_file 10\n")
    own.write_text("0::/job/step\n")
    assert memory_left(own, groups) == 350
    old = groups / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("500\n")
    (old / "memory.usage_in_bytes").write_text("450\n")
    (old / "memory.stat").write_text("inactive_file 0\n")
    own.write_text("3:cpu,memory:/job\n0::/\n")
    assert memory_left(own, groups) == 50
    assert memory_left(tmp_path / "none", groups) > 1 << 60


# --- slots of earlier attempts ------------------------------------------------------------------------------


def test_the_next_attempt_uses_the_slots_again_and_keeps_what_they_hold_until_then(
    tmp_path: Path, shm: Path
) -> None:
    run_dir = tmp_path / "run"
    with forked_writers():
        train(run_dir, until=12, **local(shm))
        before = {path.name for path in place(shm).images.iterdir()}
        held = copies(shm, run_dir)
        assert {10, 12} <= set(held)

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 13:
                assert copies(shm, run_dir) == held, "a start takes nothing back"

        assert train(run_dir, until=18, at_step=at_step, **local(shm)).started_at == 12
    assert len({path.name for path in place(shm).images.iterdir()} | before) <= 4
    assert {16, 18} <= set(copies(shm, run_dir))


def test_copies_of_steps_that_were_left_behind_go_first(tmp_path: Path, shm: Path) -> None:
    """A run that goes back to step 6 keeps its copy of 6, and gives up those of 8 and later."""
    run_dir = tmp_path / "run"
    with forked_writers():
        train(run_dir, until=8, **local(shm, checkpoint_interval=2))
        assert {6, 8} <= set(copies(shm, run_dir))
        seen: list[set[int]] = []

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 8:
                settle(run)
                seen.append({r.name.step for r in place(shm).records() if r.checkpoint in line})

        line = {path.name for path in checkpoints(run_dir) if path.name.startswith("step_00000006")}
        settings = local(shm, checkpoint_interval=0, checkpoint_resume_from="6")
        train(run_dir, until=9, at_step=at_step, **settings)
    assert seen == [{6}], "the head is still there after the first save of the new way"
