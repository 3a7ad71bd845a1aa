"""Staging memory that is page-locked beside the first steps of a real training on a device."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import device
from holdfast.checkpoint.save.device import Buffer, is_locked
from holdfast.journal.events import DecisionMade
from kit.harness import wait_until
from kit.runs import events_in
from kit.tiny import checkpoints

pytestmark = pytest.mark.gpu
WIDTH = 2048


class Trained:
    """Some layers under AdamW, about 200 MB of state."""

    def __init__(self, run_dir: Path) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.run = holdfast.Run(
            run_dir=run_dir,
            checkpoint_interval=0,
            checkpoint_save_at_end=False,
            checkpoint_async_save=True,
            checkpoint_snapshot="clone",
        )
        self.run.track(model=self.model, optimizer=self.optimizer)
        self.run.start()

    def step(self) -> None:
        self.run.begin_step()
        self.model(torch.ones(8, WIDTH, device="cuda")).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.end_step()

    def buffers(self) -> list[Buffer]:
        found: list[Buffer] = self.run._session.saving._saver._memory._buffers  # type: ignore[attr-defined]
        return found


def test_the_first_save_finds_memory_that_was_page_locked_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locked_by: list[str] = []
    original = device.pin

    def pin(buffer: torch.Tensor, **more: Any) -> device.Pinned:
        locked_by.append(threading.current_thread().name)
        assert torch.cuda.current_device() == 0
        return original(buffer, **more)

    monkeypatch.setattr(device, "pin", pin)
    caplog.set_level(logging.WARNING, "holdfast.checkpoint")
    one = Trained(tmp_path / "run")
    assert [buffer.there for buffer in one.buffers()] == [0, 0]
    for _ in range(4):
        one.step()
    wait_until(lambda: one.run._session.saving.ready, 60, "staging memory")
    assert locked_by == ["holdfast-ahead", "holdfast-ahead"]
    assert all(is_locked(buffer.memory()) for buffer in one.buffers())
    name = one.run.save()
    one.step()
    one.run.save()
    assert len(locked_by) == 2
    assert "staging" not in [event.about for event in events_in(tmp_path / "run", DecisionMade)]
    assert not [record for record in caplog.records if "page-locked" in record.message]
    one.run.close()
    assert all(verify(path).sound for path in checkpoints(tmp_path / "run"))
    state = {name: torch.zeros_like(value) for name, value in one.model.state_dict().items()}
    torch.distributed.checkpoint.load(
        {"model": state}, checkpoint_id=tmp_path / "run" / "checkpoints" / str(name), no_dist=True
    )
    assert all(value.isfinite().all() for value in state.values())


@pytest.mark.parametrize("way", ["wait", "block"])
def test_a_save_that_comes_before_the_memory_is_locked_is_whole_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    from holdfast.checkpoint.save import saver

    monkeypatch.setattr(saver, "choose_readying", lambda **_: (way, ["said by the test"]))
    monkeypatch.setattr(saver.Ahead, "add", lambda self, work: None)
    one = Trained(tmp_path / "run")
    one.step()
    one.run.save()
    (told,) = [event for event in events_in(tmp_path / "run", DecisionMade) if event.about == "staging"]
    assert told.chosen == way
    assert one.buffers()[0].locked == (way == "wait")
    wanted = {name: value.clone() for name, value in one.model.state_dict().items()}
    one.run.close()
    again = Trained(tmp_path / "run")
    found = again.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    again.run.close()


def test_a_run_that_ends_while_memory_is_page_locked_leaves_none_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Event(), []
    original, release = device.pin, device.Pinned.release

    def pin(buffer: torch.Tensor, **more: Any) -> device.Pinned:
        begun.set()
        return original(buffer, **more)

    def counted(pinned: device.Pinned) -> str:
        released.append(pinned.locked)
        return release(pinned)

    monkeypatch.setattr(device, "pin", pin)
    monkeypatch.setattr(device.Pinned, "release", counted)
    one = Trained(tmp_path / "run")
    for _ in range(2):
        one.step()
    assert begun.wait(60.0)
    before = time.monotonic()
    one.run.close()
    assert time.monotonic() - before < 10.0
    assert released
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-ahead"]
    assert "holdfast-staging" not in Path("/proc/self/maps").read_text()
