"""Snapshots from a real device: never silently wrong, however early the state changes afterwards.

The side stream is held up before every copy, so that whatever is not ordered after the copy comes before it.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.optim import optimizer as torch_optimizer

import holdfast
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import device, saver
from holdfast.checkpoint.save.device import (
    Buffer,
    CudaLane,
    DeviceMemory,
    DeviceStager,
    InFlight,
    Mark,
    Owned,
    is_locked,
    pin,
)
from holdfast.journal.events import DecisionMade
from holdfast.policy.upkeep import Way
from kit.harness import wait_until
from kit.runs import events_in
from kit.tiny import checkpoints
from kit.worlds.early_changes import (
    TRAININGS,
    OptimizerInBackward,
    Training,
    content,
    lay_out,
    outcome,
    strange,
    wipe,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
WAYS: list[Way] = list(get_args(Way))
MiB = 1024**2
BUFFER = 192 * MiB
CYCLES = 200_000_000
"""At least 0.1 s."""


class SlowLane(CudaLane):
    """Its side stream first sleeps, then copies."""

    def fork(self) -> None:
        super().fork()
        with self.side():
            torch.cuda._sleep(CYCLES)


class LawlessLane(SlowLane):
    """Nothing ever waits for a copy."""

    def hold(self, mark: Mark) -> None:
        pass


class BoastfulLane(CudaLane):
    """Says that there is always room."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory(free=1 << 60, total=0)


def shared_memory(nbytes: int) -> torch.Tensor:
    """As the writer process will map it: shared, anonymous."""
    descriptor = os.memfd_create("snapshot")
    try:
        os.ftruncate(descriptor, nbytes)
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module")
def buffer() -> Iterator[torch.Tensor]:
    assert torch.cuda.is_available()
    pinned = pin(shared_memory(BUFFER))
    assert pinned.locked, pinned.note
    assert pinned.note == ""
    stager = DeviceStager()
    stager.prepare(CUDA)
    for way in WAYS:  # kernels are loaded at their first use, which may wait for the device
        training = Training(CUDA)
        state = training.state() | strange(CUDA)
        flight = stager.begin(lay_out(state)[0], pinned.buffer, way, training.owned())
        training.step()
        flight.boundary()
        flight.release()
    yield pinned.buffer
    torch.cuda.synchronize()
    assert pinned.release() == ""
    assert not is_locked(pinned.buffer)


class Bench:
    """Takes one snapshot and compares it with what the state was."""

    def __init__(self, buffer: torch.Tensor, lane: Any = SlowLane) -> None:
        self.buffer = buffer
        self.stager = DeviceStager(timeout=30, lane=lane)

    def begin(self, state: dict[str, torch.Tensor], way: Way, owned: Owned | None = None) -> InFlight:
        self.pieces, size = lay_out(state)
        assert size <= self.buffer.numel()
        self.wanted = [content(piece.tensor) for piece in self.pieces]
        self.hooks = list(torch_optimizer._global_optimizer_pre_hooks)
        self.buffer[:size].fill_(170)
        return self.stager.begin(self.pieces, self.buffer, way, owned)

    def outcome(self, flight: InFlight) -> str:
        assert flight.wait(30)
        found = outcome(flight, self.pieces, self.buffer, self.wanted)
        flight.release()
        assert list(torch_optimizer._global_optimizer_pre_hooks) == self.hooks, "a hook was left behind"
        return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TRAININGS, ids=lambda kind: kind.__name__)
def test_a_snapshot_is_the_state_at_the_boundary_or_known_to_be_torn(
    kind: type[Training], way: Way, buffer: torch.Tensor
) -> None:
    bench = Bench(buffer)
    training = kind(CUDA)
    flight = bench.begin(training.state(), way, training.owned())
    assert flight.way == way
    assert not flight.notes
    assert flight.done() == (way == "block")
    for _ in range(2):
        training.step()
        flight.boundary()
    assert bench.outcome(flight) == (kind.overlapped if way == "overlap" else "exact")


@pytest.mark.parametrize("kind", [Training, OptimizerInBackward], ids=lambda kind: kind.__name__)
def test_without_the_wait_in_the_hook_the_same_trainings_do_tear(
    kind: type[Training], buffer: torch.Tensor
) -> None:
    """What the tests above rely on: with nothing waiting, overlapped copies are wrong, and seen to be."""
    bench = Bench(buffer, LawlessLane)
    training = kind(CUDA)
    flight = bench.begin(training.state(), "overlap", training.owned())
    training.step()
    flight.boundary()
    assert bench.outcome(flight) == "seen"


@pytest.mark.parametrize("way", ["clone", "overlap"])
def test_the_host_goes_on_while_the_copy_waits(way: Way, buffer: torch.Tensor) -> None:
    bench = Bench(buffer)
    training = Training(CUDA)
    training.step()
    flight = bench.begin(training.state(), way, training.owned())
    training.step()
    flight.boundary()
    assert not flight.done(), "the host waited for the side stream somewhere"
    assert bench.outcome(flight) == "exact"
    assert flight.copy_seconds() > 0


@pytest.mark.parametrize("way", WAYS)
def test_every_sort_of_tensor_arrives_as_its_bytes_and_nothing_beside_them_is_touched(
    way: Way, buffer: torch.Tensor
) -> None:
    bench = Bench(buffer)
    parameter = torch.nn.Parameter(torch.randn(8, 8, device=CUDA).t())
    state = strange(CUDA) | {"transposed parameter": parameter}
    flight = bench.begin(state, way, Owned([torch.optim.SGD([parameter], lr=1.0)]))
    wipe(state)
    flight.boundary()
    assert bench.outcome(flight) == "exact", flight.torn()
    end = 0
    for piece in bench.pieces:
        assert (buffer[end : piece.offset] == 170).all()
        end = piece.offset + piece.nbytes


def test_two_snapshots_may_be_in_flight(buffer: torch.Tensor) -> None:
    first, second = Bench(buffer[: BUFFER // 2]), Bench(buffer[BUFFER // 2 :])
    second.stager = first.stager
    training = Training(CUDA)
    one = first.begin(training.state(), "overlap", training.owned())
    training.step()
    one.boundary()
    two = second.begin(training.state(), "clone", training.owned())
    training.step()
    one.boundary()
    two.boundary()
    assert first.outcome(one) == "exact"
    assert second.outcome(two) == "exact"


def test_a_clone_is_given_back_when_the_copy_is_done(buffer: torch.Tensor) -> None:
    state = {"large": torch.randn(32 * MiB // 4, device=CUDA), "small": torch.randn(MiB // 4, device=CUDA)}
    bench = Bench(buffer)
    before = torch.cuda.memory_allocated(CUDA)
    flight = bench.begin(state, "clone")
    assert torch.cuda.memory_allocated(CUDA) >= before + 33 * MiB
    wipe(state)
    assert bench.outcome(flight) == "exact"
    assert torch.cuda.memory_allocated(CUDA) < before + MiB


def test_a_device_without_room_is_told_and_training_goes_on(buffer: torch.Tensor) -> None:
    """The allocator itself says no, after the look at the free memory said yes."""
    state = {"large": torch.randn(64 * MiB // 4, device=CUDA)}
    bench = Bench(buffer, BoastfulLane)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(CUDA) + 8 * MiB) / total, CUDA)
    try:
        flight = bench.begin(state, "clone")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    assert flight.way == "block"
    assert "could not be allocated" in flight.notes[0]
    assert bench.outcome(flight) == "exact"


def test_memory_that_is_not_page_locked_is_told_and_works(buffer: torch.Tensor) -> None:
    bench = Bench(torch.zeros(BUFFER // 4, dtype=torch.uint8))
    training = Training(CUDA)
    flight = bench.begin(training.state(), "clone", training.owned())
    assert flight.way == "block"
    assert "not page-locked" in flight.notes[0]
    assert bench.outcome(flight) == "exact"


def test_page_locking_is_done_once_undone_once_and_a_failure_harms_nobody() -> None:
    whole = shared_memory(8 * MiB)
    half = pin(whole[4 * MiB :])
    assert half.locked
    again = pin(half.buffer)
    assert again.locked
    assert "already" in again.note
    assert again.release() == ""
    assert is_locked(half.buffer), "what another one locked was unlocked"

    failed = pin(whole)
    assert not failed.locked
    assert "could not be page-locked" in failed.note
    assert torch.ones(4, device=CUDA).sum().item() == 4, "the failure was left for the next launch to find"
    assert failed.release() == ""

    assert half.release() == ""
    assert half.release() == ""
    assert not is_locked(half.buffer)


def test_a_stagers_view_of_the_device_is_sane() -> None:
    memory = DeviceStager().memory(CUDA)
    assert 0 < memory.free <= memory.total


# --- staging memory that is page-locked beside the first steps ----------------------------------------------

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
    monkeypatch.setattr(saver, "choose_readying", lambda **_: (way, ["said by the test"]))
    monkeypatch.setattr(saver.GettingReady, "add", lambda self, work: None)
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
