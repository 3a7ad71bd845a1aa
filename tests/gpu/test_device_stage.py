"""Snapshots from a real device: never silently wrong, however early the state changes afterwards.

The side stream is held up before every copy, so that whatever is not ordered after the copy comes before it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from holdfast.checkpoint.save.device import (
    CudaLane,
    DeviceMemory,
    DeviceStager,
    InFlight,
    Mark,
    Owned,
    is_locked,
    pin,
)
from holdfast.policy.upkeep import Way
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
