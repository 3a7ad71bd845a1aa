"""Snapshots that are still being copied while training goes on: handed over when done, dropped when torn."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save.device import Buffer
from holdfast.checkpoint.save.snapshot import Snapshot, Staged, Stager
from holdfast.checkpoint.state.tracked import Tracked
from holdfast.journal.events import SaveCommitted, SaveFailed, Warned
from kit.harness import wait_until
from kit.runs import events_in
from kit.tiny import a_step


class SlowCopy(Staged):
    """A copy from a device that ends when the test says so."""

    def __init__(self, prints: dict[int, str], landed: threading.Event, torn: str) -> None:
        super().__init__(prints, [], None)
        self._landed_event = landed
        self._why = torn
        self.boundaries = 0

    def done(self) -> bool:
        return self._landed_event.is_set()

    def boundary(self) -> None:
        self.boundaries += 1

    def torn(self) -> str:
        return self._why


class SlowStager(Stager):
    def __init__(self, torn: str = "") -> None:
        super().__init__("block", timeout=5.0, step_seconds=lambda: None, tell=lambda _: None)
        self.landed = threading.Event()
        self.copies: list[SlowCopy] = []
        self.torn_text = torn

    def stage(self, snapshot: Snapshot, buffer: Buffer, tracked: Tracked) -> Staged:
        whole = super().stage(snapshot, buffer, tracked)
        self.copies.append(SlowCopy(whole._prints, self.landed, self.torn_text))
        return self.copies[-1]


def started(tmp_path: Path, **settings: Any) -> tuple[holdfast.Run, torch.nn.Module]:
    model = torch.nn.Linear(8, 8)
    run = holdfast.Run(
        run_dir=tmp_path / "run", checkpoint_async_save=True, checkpoint_interval=0,
        checkpoint_save_at_end=False, **settings,
    )  # fmt: skip
    run.track(model=model)
    run.start()
    return run, model


def slow(run: holdfast.Run, torn: str = "") -> SlowStager:
    stager = SlowStager(torn)
    run._session.saving._saver._stager = stager
    return stager


def bodies(tmp_path: Path, kind: type) -> list[Any]:
    return events_in(tmp_path / "run", kind)


def test_a_copy_in_flight_does_not_hold_the_loop_and_is_handed_over_when_it_lands(tmp_path: Path) -> None:
    run, _ = started(tmp_path)
    stager = slow(run)
    a_step(run)
    name = run.save(wait=False)
    for _ in range(3):
        a_step(run)
    assert stager.copies[0].boundaries == 3, "each step boundary must wait for the copy"
    assert not bodies(tmp_path, SaveCommitted)
    stager.landed.set()
    run.wait_for_saves()
    assert [body.checkpoint for body in bodies(tmp_path, SaveCommitted)] == [str(name)]
    assert verify(tmp_path / "run" / "checkpoints" / str(name)).sound
    run.close()


def test_a_second_save_takes_the_other_buffer_and_a_third_waits(tmp_path: Path) -> None:
    run, _ = started(tmp_path)
    stager = slow(run)
    names = []
    for number in range(3):
        a_step(run)
        if number == 2:
            threading.Timer(0.3, stager.landed.set).start()
        names.append(run.save(wait=False))
        assert stager.landed.is_set() == (number == 2), "only the third may wait"
    run.wait_for_saves()
    assert [body.checkpoint for body in bodies(tmp_path, SaveCommitted)] == list(map(str, names))
    assert any("training waited" in body.message for body in bodies(tmp_path, Warned))
    run.close()


def test_a_copy_that_does_not_end_fails_its_save_only(tmp_path: Path) -> None:
    run, _ = started(tmp_path, checkpoint_timeout=1.0)
    stager = slow(run)
    a_step(run)
    run.save(wait=False)
    wait_until(lambda: _polled(run, tmp_path), 20.0, "the failure to be journalled")
    [failed] = bodies(tmp_path, SaveFailed)
    assert "did not end within 1 s" in failed.error
    stager.landed.set()
    last = run.save()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step_*")] == [str(last)]
    run.close()


def test_a_torn_snapshot_is_never_committed_and_the_next_save_works(tmp_path: Path) -> None:
    run, _ = started(tmp_path)
    stager = slow(run, torn="model.weight was changed while it was copied")
    stager.landed.set()
    a_step(run)
    torn = run.save(wait=False)
    wait_until(lambda: _polled(run, tmp_path), 20.0, "the failure to be journalled")
    assert not (tmp_path / "run" / "checkpoints" / str(torn)).exists()
    [failed] = bodies(tmp_path, SaveFailed)
    assert "model.weight was changed" in failed.error
    stager.torn_text = ""
    a_step(run)
    run.save()
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1
    run.close()


def _polled(run: holdfast.Run, tmp_path: Path) -> bool:
    a_step(run)
    return bool(bodies(tmp_path, SaveFailed))
