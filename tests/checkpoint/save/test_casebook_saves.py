"""Real failures of other systems around saving, each shown not to happen here."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import holdfast
from holdfast.checkpoint.choose import load as loading
from holdfast.checkpoint.choose.verifying_reader import VerifyingReader
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import saver as saving
from holdfast.journal.events import SaveFailed
from kit.harness import wait_until
from kit.runs import events_in
from kit.tiny import Numbers, a_step, checkpoints, train


def started(run_dir: Path, **settings: Any) -> tuple[holdfast.Run, torch.nn.Module]:
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 6)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, checkpoint_save_at_end=False, **settings)
    run.track(model=model)
    return run, model


def test_an_asynchronous_save_moves_the_pointer_and_deletes_only_after_its_commit(tmp_path: Path) -> None:
    """Case KempnerForge#102: `latest` moved and the old deleted before the new was durable."""
    run, _ = started(
        tmp_path / "run", checkpoint_async_save=True, checkpoint_keep_last=2, checkpoint_read_back=False
    )
    run.start()
    kept = []
    for _ in range(2):
        a_step(run)
        kept.append(str(run.save()))
    root = tmp_path / "run" / "checkpoints"
    assert run._session.saving._background is not None
    writer = run._session.saving._background._writer.pid
    assert writer is not None
    os.kill(writer, signal.SIGSTOP)
    try:
        a_step(run)
        new = str(run.save(wait=False))
        for _ in range(5):
            a_step(run)
        assert (root / "latest").read_text().strip() == kept[-1]
        assert {path.name for path in root.glob("step_*")} == set(kept)
    finally:
        os.kill(writer, signal.SIGCONT)
    run.wait_for_saves()
    assert (root / "latest").read_text().strip() == new
    wait_until(lambda: {p.name for p in root.glob("step_*")} == {kept[-1], new}, 20, "retention")
    run.close()


@pytest.mark.parametrize("lost", ["file", "record", "item"])
def test_a_save_with_a_shard_missing_is_not_reported_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Case dlrover#1135: what was declared is compared with what was written, before the commit."""
    real = saving.write_shards

    def forgetful(directory: Path, *args: Any) -> Any:
        written = real(directory, *args)
        if directory.name.startswith("step_00000006"):
            if lost == "file":
                (directory / written[0].path).unlink()
            elif lost == "record":
                return []
            else:
                written[0].chunks.pop()
        return written

    monkeypatch.setattr(saving, "write_shards", forgetful)
    train(tmp_path / "run", until=9)
    assert sorted(path.name[:13] for path in checkpoints(tmp_path / "run")) == [
        "step_00000003", "step_00000009",
    ]  # fmt: skip
    [failed] = events_in(tmp_path / "run", SaveFailed)
    assert failed.step == 6


@pytest.mark.parametrize("background", [False, True])
def test_every_part_of_a_checkpoint_is_of_the_same_step(tmp_path: Path, background: bool) -> None:
    """Case torchtitan#4686: the model of step 500 beside the loader of step 501."""
    train(tmp_path / "run", until=9, checkpoint_async_save=background, checkpoint_interval=2)
    found = checkpoints(tmp_path / "run")
    assert len(found) == 5
    for path in found:
        assert verify(path).sound
        manifest, _ = manifests.read(path)
        reader = VerifyingReader(path, manifest)
        blob = loading._read_blob(reader, reader.read_metadata(), 0)
        assert blob["own"]["counters"]["step"] == manifest.step
        assert blob["own"]["counters"]["samples"] == manifest.samples == 4 * manifest.step
        assert blob["tracked"]["schedule"]["last_epoch"] == manifest.step
        states = blob["tracked"]["optimizer"]["state"]
        assert states.keys(), "the optimizer's own counters are in the same commit"


def test_steps_of_several_micro_batches_resume_at_the_right_sample(tmp_path: Path) -> None:
    """Case gpt-neox#308: skipping counted calls where it should have counted samples."""

    def micro_batches(run_dir: Path, until: int) -> dict[int, list[list[int]]]:
        run, _ = started(run_dir)
        feed = run.feed(DataLoader(Numbers(), batch_size=2, shuffle=True))
        torch.manual_seed(5)
        seen: dict[int, list[list[int]]] = {}
        step = run.start()
        while step < until:
            run.begin_step()
            seen[step + 1] = [feed.next()[0].tolist() for _ in range(3)]
            run.record(samples=[id for batch in seen[step + 1] for id in batch])
            run.end_step()
            step = run.step
        run.save()
        assert run.samples == 6 * until
        run.close()
        return seen

    whole = micro_batches(tmp_path / "whole", 8)
    parts = micro_batches(tmp_path / "parts", 3) | micro_batches(tmp_path / "parts", 8)
    assert parts == whole
