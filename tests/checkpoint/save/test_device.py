"""Snapshots from a device: none is silently wrong, shown on a simulated one.

The simulated device does the work of its side stream as late as ordering allows: what is not made to wait for
a copy comes before it. `tests/gpu/test_device_stage.py` shows the same on a real one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, get_args

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from holdfast.checkpoint.save.device import (
    DeviceMemory,
    DeviceStager,
    InFlight,
    Mark,
    Owned,
    TensorPiece,
    copy_within,
    pin,
    prefault,
)
from holdfast.errors import SaveFailedError, UsageError
from holdfast.policy.upkeep import Way
from kit.worlds.early_changes import (
    TRAININGS,
    Intruder,
    OptimizerInBackward,
    Training,
    content,
    lay_out,
    outcome,
    strange,
    wipe,
)

GiB = 1024**3
CPU = torch.device("cpu")
WAYS: list[Way] = list(get_args(Way))


class SimulatedMark:
    def __init__(self, lane: SimulatedLane, position: int) -> None:
        self.lane, self.position = lane, position

    def query(self) -> bool:
        return self.lane.passed >= self.position


class SimulatedLane:
    """Work of the training stream is done at once, work of the side stream when something waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.work: list[Callable[[], None]] = []
        self.passed = 0
        self.aside = False
        self.locked = True
        self.free = 100 * GiB
        self.holds = True
        self.allocated: list[int] = []
        self.graph = False

    def advance(self, position: int) -> None:
        while self.passed < position:
            self.work[self.passed]()
            self.passed += 1

    def finish(self) -> None:
        self.advance(len(self.work))

    def guard(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        self.aside = True
        yield
        self.aside = False

    def fork(self) -> None:
        pass

    def mark(self) -> SimulatedMark:
        return SimulatedMark(self, len(self.work) if self.aside else 0)

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, SimulatedMark)
        if self.holds:
            self.advance(mark.position)

    def capturing(self) -> bool:
        return self.graph

    def seconds(self, start: Mark, end: Mark) -> float:
        return 0.5

    def recycle(self, marks: Iterable[Mark]) -> None:
        pass

    def memory(self) -> DeviceMemory:
        return DeviceMemory(free=self.free, total=0)

    def empty(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def pinned(self, buffer: torch.Tensor) -> bool:
        return self.locked

    def within(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        assert not self.aside
        copy_within(to, source)

    def to_host(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        def copy() -> None:
            torch._foreach_copy_(list(to), list(source))

        if not to:
            return
        if self.aside:
            self.work.append(copy)
        else:
            copy()


class Bench:
    """A stager with one simulated device, and a snapshot of a training on it."""

    def __init__(self, **changed: Any) -> None:
        self.lane = SimulatedLane(CPU)
        for name, value in changed.items():
            setattr(self.lane, name, value)
        self.stager = DeviceStager(timeout=5, lane=lambda _device: self.lane)

    def begin(self, state: dict[str, torch.Tensor], way: Way, owned: Owned | None = None) -> InFlight:
        self.pieces, size = lay_out(state)
        self.buffer = torch.full((size,), 170, dtype=torch.uint8)
        self.wanted = [content(piece.tensor) for piece in self.pieces]
        self.hooks = list(torch_optimizer._global_optimizer_pre_hooks)
        return self.stager.begin(self.pieces, self.buffer, way, owned)

    def outcome(self, flight: InFlight) -> str:
        self.lane.finish()
        assert flight.wait(5)
        found = outcome(flight, self.pieces, self.buffer, self.wanted)
        flight.release()
        assert list(torch_optimizer._global_optimizer_pre_hooks) == self.hooks, "a hook was left behind"
        return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TRAININGS, ids=lambda kind: kind.__name__)
def test_a_snapshot_is_the_state_at_the_boundary_or_known_to_be_torn(kind: type[Training], way: Way) -> None:
    bench = Bench()
    training = kind(CPU)
    flight = bench.begin(training.state(), way, training.owned())
    assert flight.way == way
    assert not flight.notes
    assert flight.done() == (way == "block")
    for _ in range(2):
        training.step()
        flight.boundary()
    assert bench.outcome(flight) == (kind.overlapped if way == "overlap" else "exact")


@pytest.mark.parametrize("kind", [Training, OptimizerInBackward], ids=lambda kind: kind.__name__)
def test_without_the_wait_in_the_hook_the_same_trainings_do_tear(kind: type[Training]) -> None:
    """What the tests above rely on: with nothing waiting, overlapped copies are wrong, and seen to be."""
    bench = Bench(holds=False)
    training = kind(CPU)
    flight = bench.begin(training.state(), "overlap", training.owned())
    training.step()
    flight.boundary()
    assert bench.outcome(flight) == "seen"


def test_a_torn_snapshot_says_what_was_changed() -> None:
    bench = Bench()
    training = Intruder(CPU)
    flight = bench.begin(training.state(), "overlap", training.owned())
    assert flight.torn() == ""
    training.step()
    assert "model.0.weight was changed" in flight.torn()
    flight.boundary()
    assert bench.outcome(flight) == "torn"


def test_a_change_without_a_hook_is_seen_at_the_boundary() -> None:
    bench = Bench()
    training = Training(CPU)
    flight = bench.begin(training.state(), "overlap", training.owned())
    with torch.no_grad():
        training.model[0].bias.add_(1)
        training.model[3].bias.add_(1)
    flight.boundary()
    assert "(and 1 other)" in flight.torn()
    assert bench.outcome(flight) == "torn"


def test_a_change_is_seen_when_the_copy_ends_before_any_boundary() -> None:
    bench = Bench()
    training = Training(CPU)
    flight = bench.begin(training.state(), "overlap", training.owned())
    with torch.no_grad():
        training.model[0].bias.add_(1)
    assert bench.outcome(flight) == "torn"


def test_a_change_after_the_copy_does_no_harm() -> None:
    bench = Bench()
    training = Training(CPU)
    flight = bench.begin(training.state(), "overlap", training.owned())
    bench.lane.finish()
    assert flight.done()
    with torch.no_grad():
        training.model[0].bias.add_(1)
    training.step()
    flight.boundary()
    assert bench.outcome(flight) == "exact"


def test_a_step_that_is_captured_into_a_graph_opens_nothing() -> None:
    """Its replays call no hook, so that overlapping is not safe for such a training, and must be told so."""
    bench = Bench(graph=True)
    training = Training(CPU)
    flight = bench.begin(training.state(), "overlap", training.owned())
    training.step()
    assert bench.lane.passed == 0
    flight.boundary()
    assert bench.outcome(flight) == "torn"


def test_the_hook_is_gone_after_the_boundary() -> None:
    bench = Bench()
    training = Training(CPU)
    flight = bench.begin(training.state(), "overlap", training.owned())
    assert len(torch_optimizer._global_optimizer_pre_hooks) == 1
    flight.boundary()
    assert not torch_optimizer._global_optimizer_pre_hooks
    training.step()
    assert bench.outcome(flight) == "exact"


def test_a_parameter_whose_memory_is_replaced_is_copied_as_it_was() -> None:
    bench = Bench()
    training = Training(CPU)
    flight = bench.begin(training.state(), "overlap", training.owned())
    training.model[0].weight.data = torch.zeros(96, 96)
    bench.lane.finish()
    assert bench.outcome(flight) == "exact"


@pytest.mark.parametrize("way", WAYS)
def test_every_sort_of_tensor_arrives_as_its_bytes_and_nothing_beside_them_is_touched(way: Way) -> None:
    bench = Bench()
    parameter = torch.nn.Parameter(torch.randn(8, 8).t())
    state = strange(CPU) | {"transposed parameter": parameter}
    flight = bench.begin(state, way, Owned([torch.optim.SGD([parameter], lr=1.0)]))
    wipe(state)
    flight.boundary()
    found = bench.outcome(flight)
    assert found == "exact", (found, flight.torn())
    covered = torch.zeros(bench.buffer.numel(), dtype=torch.bool)
    for piece in bench.pieces:
        covered[piece.offset : piece.offset + piece.nbytes] = True
    assert (bench.buffer[~covered] == 170).all()


def test_small_tensors_are_copied_together_at_any_address() -> None:
    memory = torch.frombuffer(bytearray(range(200)), dtype=torch.uint8)
    lead = (1 - memory.data_ptr()) % 8
    base = torch.frombuffer(bytearray(range(200)), dtype=torch.uint8, offset=lead)
    sources = [memory[at : at + count] for at in range(9) for count in (0, 1, 8, 31, 64)]
    sources += [base[at : at + 64] for at in range(9)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_within(targets, sources, large=40)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_what_does_not_fit_falls_back_and_is_told() -> None:
    training = Training(CPU)
    bench = Bench(free=0)
    flight = bench.begin(training.state(), "clone", training.owned())
    assert flight.way == "overlap"
    assert "overlap instead of clone" in flight.notes[0]
    assert "training waits" in flight.notes[1]
    training.step()
    assert bench.outcome(flight) == "exact"

    bench = Bench(free=0)
    flight = bench.begin(training.state(), "clone")
    assert flight.way == "block"
    assert bench.outcome(flight) == "exact"

    bench = Bench(locked=False)
    flight = bench.begin(training.state(), "clone", training.owned())
    assert flight.way == "block"
    assert "not page-locked" in flight.notes[0]
    assert bench.outcome(flight) == "exact"

    bench = Bench()
    flight = bench.begin(training.state(), "overlap")
    assert flight.way == "block"
    assert "no torch optimizer" in flight.notes[0]
    assert bench.outcome(flight) == "exact"


def test_an_allocation_that_fails_all_the_same_falls_back_and_is_told() -> None:
    training = Training(CPU)
    bench = Bench()

    def no_memory(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"{nbytes} bytes")

    bench.lane.empty = no_memory  # type: ignore[method-assign]
    flight = bench.begin(training.state(), "clone")
    assert flight.way == "block"
    assert "could not be allocated" in flight.notes[0]
    assert bench.outcome(flight) == "exact"


def test_a_clone_is_made_of_buckets_and_given_back_when_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.checkpoint.save.device.BUCKET", 4096)
    bench = Bench()
    state = {str(at): torch.full((at * 40,), at, dtype=torch.int32) for at in range(40)}
    flight = bench.begin(state, "clone")
    assert len(bench.lane.allocated) > 10
    assert all(nbytes <= 4096 or nbytes < 4 * 40 * 40 + 512 for nbytes in bench.lane.allocated)
    for tensor in state.values():
        tensor.zero_()
    assert bench.outcome(flight) == "exact"
    assert not flight._held
    assert flight.copy_seconds() == 0.5


def test_a_copy_that_never_ends_is_reported_and_not_waited_for_for_ever() -> None:
    bench = Bench()
    bench.stager = DeviceStager(timeout=0.05, lane=lambda _device: bench.lane)
    flight = bench.begin(Training(CPU).state(), "clone")
    assert not flight.wait(0.01)
    with pytest.raises(UsageError, match="before it was done"):
        flight.fingerprints()
    with pytest.raises(SaveFailedError, match="did not end within"):
        flight.release()
    bench.lane.finish()
    flight.release()


def test_pieces_that_do_not_fit_the_buffer_are_refused() -> None:
    stager = DeviceStager(lane=SimulatedLane)
    tensor = torch.zeros(4)
    for piece in (
        TensorPiece(tensor, 0, 15),
        TensorPiece(tensor, 9, 16, "weight"),
        TensorPiece(tensor, -1, 16),
    ):
        with pytest.raises(UsageError, match="was to be staged"):
            stager.begin([piece], torch.zeros(24, dtype=torch.uint8), "block")
    with pytest.raises(UsageError, match="overlap: one ends at 16, the next begins at 12"):
        stager.begin(
            [TensorPiece(tensor, 12, 16), TensorPiece(tensor, 0, 16)],
            torch.zeros(28, dtype=torch.uint8),
            "block",
        )
    with pytest.raises(UsageError, match="flat uint8"):
        stager.begin([], torch.zeros(4), "block")


def test_what_optimizers_own_is_known_through_views_and_not_guessed() -> None:
    class Deaf(torch.optim.Optimizer):
        """Does not call torch's constructor, which is what installs the hooks."""

        def __init__(self, params: list[torch.Tensor]) -> None:
            self.param_groups = [{"params": params}]
            self.state = {}

        def step(self, closure: Any = None) -> None:
            pass

    parameter, other = torch.nn.Parameter(torch.ones(6)), torch.ones(6)
    owned = Owned([torch.optim.SGD([parameter], lr=1.0, momentum=0.9), Deaf([other])])
    assert owned.owner(parameter.detach()) is parameter
    assert owned.owner(parameter.detach()[:3]) is None
    assert owned.owner(other) is None
    assert owned.nbytes([TensorPiece(parameter, 0, 24), TensorPiece(other, 24, 24)]) == 24


def test_done_may_be_asked_from_another_thread() -> None:
    bench = Bench()
    training = Training(CPU)
    flight = bench.begin(training.state(), "overlap", training.owned())
    seen: list[bool] = []
    watcher = threading.Thread(target=lambda: seen.append(flight.wait(10)))
    watcher.start()
    training.step()
    flight.boundary()
    bench.lane.finish()
    watcher.join(10)
    assert seen == [True]
    assert bench.outcome(flight) == "exact"


def test_memory_that_cannot_be_page_locked_is_told_and_works() -> None:
    buffer = torch.zeros(100_000, dtype=torch.uint8)
    pinned = pin(buffer)
    assert pinned.locked == (pinned.note == "")
    assert pinned.buffer is buffer
    assert pinned.release() == ""
    assert pinned.release() == ""


def test_faulting_pages_in_changes_nothing_in_them() -> None:
    buffer = torch.randint(0, 255, (1_000_001,), dtype=torch.uint8)
    before = buffer.clone()
    assert prefault(buffer, threads=2)
    assert torch.equal(buffer, before)
