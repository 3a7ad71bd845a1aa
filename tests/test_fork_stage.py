"""Snapshots of host memory by a fork: exact whatever training does, bounded, and nothing is left of them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from early_changes import TRAININGS, Training, content, lay_out, strange, wipe
from forking_snapshots import Taken, alive, children, gated, taken
from harness import wait_until
from holdfast.checkpoint import fingerprint, fork_child, fork_stage, frozen_memory
from holdfast.checkpoint.frozen_memory import Frozen, Mapping, frozen
from holdfast.errors import SaveFailedError
from holdfast.launch import orphans, processes
from tiny import die, forked

CPU = torch.device("cpu")
MiB = 1024**2
by_name = pytest.mark.parametrize("kind", TRAININGS, ids=lambda kind: kind.__name__)


# --- exact --------------------------------------------------------------------------------------------------


@by_name
def test_a_thread_that_copies_while_training_goes_on_is_silently_wrong(kind: type[Training]) -> None:
    """What the fork is for: the fingerprints are taken with the copy, and agree with what is torn."""
    training = kind(CPU)
    pieces, _ = lay_out(training.state())
    wanted = [content(piece.tensor) for piece in pieces]
    found: list[bytes] = []
    prints: list[str] = []
    begin = threading.Event()

    def copy() -> None:
        begin.wait(10)
        for piece in pieces:
            found.append(content(piece.tensor))
            prints.append(fingerprint.of_bytes(found[-1], "x"))

    thread = threading.Thread(target=copy)
    thread.start()
    training.step()
    begin.set()
    thread.join(10)
    assert found != wanted
    assert all(fingerprint.matches(data, told) for data, told in zip(found, prints, strict=True))


@by_name
def test_a_fork_is_exact_though_the_child_copies_only_after_two_steps(kind: type[Training]) -> None:
    training = kind(CPU)
    with gated() as gate, taken(training.state()) as snapshot:
        for _ in range(2):
            training.step()
        assert not snapshot.flight.done()
        gate.open()
        assert snapshot.outcome() == "exact"


@pytest.mark.parametrize("shares", [1, 3])
def test_every_sort_of_tensor_arrives_as_its_bytes_and_nothing_beside_them_is_touched(shares: int) -> None:
    state = strange(CPU)
    with gated() as gate, taken(state, shares=shares) as snapshot:
        wipe(state)
        gate.open()
        assert snapshot.outcome() == "exact"


def test_work_is_divided_by_bytes_and_nothing_is_left_out() -> None:
    tensors = {str(at): torch.full((size,), at, dtype=torch.uint8) for at, size in enumerate([9, 1, 5, 5, 2])}
    with taken(tensors, shares=3) as snapshot:
        works = snapshot.flight._works
        shares = fork_child.share_out(works, 3)
        assert sorted(work.place for share in shares for work in share) == [0, 1, 2, 3, 4]
        assert sorted(sum(work.source.nbytes for work in share) for share in shares) == [6, 7, 9]
        assert snapshot.outcome() == "exact"
    assert fork_child.share_out([], 4) == [[]]


def test_it_works_beside_threads_that_hold_locks_and_compute() -> None:
    """Scenario 26: logging, allocations and torch's own threads go on in the trainer while it forks."""
    over = threading.Event()
    log = logging.getLogger("holdfast.test.busy")
    log.addHandler(logging.NullHandler())
    log.propagate = False

    def busy(work: Callable[[], object]) -> threading.Thread:
        def loop() -> None:
            while not over.is_set():
                work()

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    a, b = torch.randn(128, 128), torch.randn(64, 64, requires_grad=True)
    threads = [
        busy(lambda: log.warning("still there")),
        busy(lambda: a @ a),
        busy(lambda: (b @ b).sum().backward()),
        busy(lambda: [bytearray(4096) for _ in range(100)]),
    ]
    try:
        training = Training(CPU)
        for _ in range(8):
            with taken(training.state(), shares=2) as snapshot:
                training.step()
                assert snapshot.outcome() == "exact"
    finally:
        over.set()
        for thread in threads:
            thread.join(10)


# --- what a fork does not freeze ----------------------------------------------------------------------------


def held(tensor: torch.Tensor) -> bool:
    return frozen().holds(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def test_shared_memory_and_mapped_files_are_not_taken_to_be_frozen(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    torch.save({"weight": torch.ones(4096)}, tmp_path / "saved")
    shared = mmap.mmap(-1, 8192)
    assert held(torch.ones(8192))
    assert held(torch.ones(3 * MiB))
    assert held(torch.ones(8)[2:3])
    assert held(torch.frombuffer(mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE), dtype=torch.uint8))
    assert not held(torch.frombuffer(shared, dtype=torch.uint8))
    assert not held(torch.ones(8192).share_memory_())
    assert not held(torch.from_file(str(tmp_path / "file"), shared=True, size=2048))
    assert not held(torch.from_file(str(tmp_path / "file"), shared=False, size=2048))
    assert not held(torch.load(tmp_path / "saved", mmap=True)["weight"])


def test_a_range_is_frozen_only_if_all_of_it_is() -> None:
    view = Frozen(
        [
            Mapping(0x1000, 0x3000, True, ""),
            Mapping(0x3000, 0x4000, True, "[heap]"),
            Mapping(0x4000, 0x5000, False, "/dev/shm/x"),
            Mapping(0x6000, 0x7000, True, ""),
        ]
    )
    assert view.holds(0x1000, 0x4000)
    assert view.holds(0x2FFF, 0x3001)
    assert not view.holds(0x0800, 0x2000)
    assert not view.holds(0x3FFF, 0x4001)
    assert not view.holds(0x6000, 0x7001)
    assert not view.holds(0x8000, 0x8001)
    assert not Frozen([]).holds(0, 1)
    assert view.device == ""
    for path in ("/dev/nvidia0", "/dev/infiniband/uverbs0", "/dev/kfd"):
        assert Frozen([Mapping(0x1000, 0x2000, False, path)]).device == path


@pytest.mark.parametrize(
    ("advice", "told"),
    [(10, "was not given to the child"), (18, "is wiped in a child")],
    ids=["MADV_DONTFORK", "MADV_WIPEONFORK"],
)
def test_memory_that_is_kept_from_children_is_refused_by_the_child(advice: int, told: str) -> None:
    memory = mmap.mmap(-1, 64 * 1024, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
    assert held(tensor), "what only the child can tell is left to it"
    with taken({"plain": torch.ones(10), "odd": tensor}) as snapshot:
        snapshot.await_done()
        with pytest.raises(SaveFailedError, match=told):
            snapshot.flight.fingerprints()


def test_the_child_looks_for_shared_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with taken({"shared": torch.ones(4096).share_memory_()}) as snapshot:
        snapshot.await_done()
        assert "is shared" in snapshot.flight.problem


# --- what a child must not do -------------------------------------------------------------------------------


def test_the_child_keeps_no_descriptor_but_its_own_two(tmp_path: Path) -> None:
    """A dead trainer's peers must see its sockets close, and its locks must be free."""
    with gated() as gate, taken({"a": torch.ones(10)}, shares=2) as snapshot:
        wait_until(lambda: gate.reached, 10, "the child is at work")
        pids = [snapshot.flight.pid, *below(snapshot.flight.pid)]
        assert len(pids) == 1, "one tensor is not divided"
        kept = sorted(str(path.readlink()) for path in Path(f"/proc/{pids[0]}/fd").iterdir())
        assert [name.partition(":")[0].partition("memfd")[0] for name in kept] == ["/", "pipe"]
        gate.open()
        assert snapshot.outcome() == "exact"


def below(pid: int) -> list[int]:
    return [process.pid for process in processes.descendants([pid], processes.everyone())]


class Noisy:
    """Leaves a mark where it is destroyed outside of its own process."""

    def __init__(self, path: Path) -> None:
        self.path, self.pid, self.circle = path, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.path.write_text("destroyed in the child")


def test_no_exit_hook_destructor_or_signal_handler_of_the_trainer_runs_in_the_child(tmp_path: Path) -> None:
    mark, handled = tmp_path / "mark", tmp_path / "handled"

    def at_exit() -> None:
        mark.write_text("an exit hook ran")

    def handler(number: int, frame: object) -> None:
        (handled if os.getpid() == me else mark).write_text("a signal handler ran")

    me = os.getpid()
    atexit.register(at_exit)
    before = signal.signal(signal.SIGUSR1, handler)
    gc.collect()
    circle = Noisy(mark)
    del circle  # only the collector finds it from here on
    try:
        with gated() as gate, taken({"a": torch.ones(MiB)}) as snapshot:
            wait_until(lambda: gate.reached, 10, "the child is at work")
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(snapshot.flight.pid, number)  # as what ends a whole session does
            gate.open()
            assert snapshot.outcome() == "exact"
            snapshot.flight.settle()
            assert snapshot.flight._how == "code 0", "it ended by itself, at once"
        assert not mark.exists()
        os.kill(me, signal.SIGUSR1)
        wait_until(handled.exists, 5, "the trainer's own handler still works")
        assert gc.isenabled()
    finally:
        signal.signal(signal.SIGUSR1, before)
        atexit.unregister(at_exit)


@pytest.mark.parametrize("shares", [1, 2])
def test_the_child_dies_with_its_trainer(tmp_path: Path, shares: int) -> None:
    def trainer() -> None:
        with gated() as gate:
            snapshot = Taken({"a": torch.ones(10), "b": torch.ones(10)}, shares=shares)
            wait_until(lambda: gate.reached, 10, "the child is at work")
            wait_until(lambda: len(below(snapshot.flight.pid)) == shares - 1, 10, "and its helpers")
            pids = [snapshot.flight.pid, *below(snapshot.flight.pid)]
            (tmp_path / "pids").write_text(" ".join(map(str, pids)))
            die()

    assert forked(trainer) == -signal.SIGKILL
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == shares
    wait_until(lambda: not any(map(alive, pids)), 5, "no child outlives its trainer")


def test_a_launcher_does_not_take_the_child_for_one_that_may_outlive_its_trainer() -> None:
    with gated(), taken({"a": torch.ones(10)}) as snapshot:
        found = processes.read(snapshot.flight.pid)
        assert found is not None
        assert orphans.recognise(found) == ("", 0)


# --- a child that fails -------------------------------------------------------------------------------------


def test_a_child_that_does_not_report_in_time_is_ended() -> None:
    with gated(), taken({"a": torch.ones(10)}, timeout=0.2) as snapshot:
        snapshot.await_done(10)
        with pytest.raises(SaveFailedError, match="did not report within 0 s, and was ended"):
            snapshot.flight.fingerprints()
        assert not alive(snapshot.flight.pid), "and cannot write any more"
        assert snapshot.flight.copy_seconds() == 0.0


def test_a_child_that_dies_is_noticed_with_its_signal() -> None:
    with gated() as gate, taken({"a": torch.ones(10)}) as snapshot:
        wait_until(lambda: gate.reached, 10, "the child is at work")
        os.kill(snapshot.flight.pid, signal.SIGKILL)
        snapshot.await_done(10)
        with pytest.raises(SaveFailedError, match=r"without a word \(signal 9\)"):
            snapshot.flight.fingerprints()


def test_a_helper_that_dies_fails_the_snapshot() -> None:
    state = {"a": torch.ones(10), "b": torch.ones(10)}
    with gated() as gate, taken(state, shares=2) as snapshot:
        wait_until(lambda: below(snapshot.flight.pid), 10, "a helper is there")
        os.kill(below(snapshot.flight.pid)[0], signal.SIGKILL)
        gate.open()
        snapshot.await_done(10)
        with pytest.raises(SaveFailedError, match=r"helpers of it ended with \[-9\]"):
            snapshot.flight.fingerprints()


def test_an_error_in_the_child_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: Any) -> None:
        raise RuntimeError("something new")

    monkeypatch.setattr(fork_child, "_copy", broken)
    with taken({"a": torch.ones(10)}) as snapshot:
        snapshot.await_done()
        assert snapshot.flight.problem == "RuntimeError: something new"


def test_a_snapshot_that_is_let_go_of_too_early_is_ended_and_not_believed() -> None:
    with gated():
        snapshot = Taken({"a": torch.ones(10)})
        snapshot.close()
        assert not alive(snapshot.flight.pid)
        with pytest.raises(SaveFailedError, match="before it was done"):
            snapshot.flight.fingerprints()


# --- the trainer's own business -----------------------------------------------------------------------------


@contextlib.contextmanager
def on_child(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def reap_all(number: int, frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, reap_all], ids=["ignored", "all are reaped"])
def test_whatever_the_script_does_about_ended_children_the_outcome_is_right(handler: Any) -> None:
    with on_child(handler), taken({"a": torch.ones(MiB)}) as snapshot:
        assert snapshot.outcome() == "exact"
    with on_child(handler), gated() as gate, taken({"a": torch.ones(10)}) as snapshot:
        wait_until(lambda: gate.reached, 10, "the child is at work")
        os.kill(snapshot.flight.pid, signal.SIGKILL)
        snapshot.await_done(10)
        assert "without a word" in snapshot.flight.problem


def test_nothing_is_left_of_many_snapshots() -> None:
    state = {str(at): torch.ones(1000) for at in range(5)}

    def once() -> None:
        with taken(state, shares=2) as snapshot:
            assert snapshot.outcome() == "exact"
            snapshot.flight.settle()

    once()
    descriptors, threads, before = len(os.listdir("/proc/self/fd")), threading.active_count(), children()
    for _ in range(15):
        once()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert children() == before, "a zombie was left"


def test_the_memory_of_a_fork_is_bounded_by_what_was_private_before_it() -> None:
    """docs/guides/async-saves.md: what training writes meanwhile is held twice, and nothing else."""
    state = {"weights": torch.ones(16 * MiB), "moments": torch.ones(8 * MiB)}
    before = frozen_memory.host_memory()
    with gated() as gate, taken(state) as snapshot:
        wait_until(lambda: gate.reached, 10, "the child is at work")
        for tensor in state.values():
            tensor.add_(1)
        rollup = frozen_memory._kilobytes(f"/proc/{snapshot.flight.pid}/smaps_rollup")
        own = rollup["Private_Clean"] + rollup["Private_Dirty"]
        assert 96 * MiB <= own <= before.private + 16 * MiB
        gate.open()
        assert snapshot.outcome() == "exact"
        snapshot.flight.settle()
        snapshot.wanted.clear()
    assert frozen_memory.host_memory().private <= before.private + 16 * MiB, "and all is given back"


def test_the_pages_are_taken_back_before_training_needs_them() -> None:
    """Without that, every page costs a fault at its next write: see docs/design/benchmarks.md."""

    def faults() -> int:
        usage = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return int(usage[7])

    memory = mmap.mmap(-1, 32 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    state = {"weights": torch.frombuffer(memory, dtype=torch.float32).fill_(1)}
    counted = []
    for settles in (False, True):
        with taken(state) as snapshot:
            assert snapshot.outcome() == "exact"
            if settles:
                snapshot.flight.settle()
            before = faults()
            state["weights"].add_(1)
            counted.append(faults() - before)
    assert counted[0] > 4000
    assert counted[1] < 400


def test_a_fork_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    descriptors = len(os.listdir("/proc/self/fd"))
    staging = os.memfd_create("test")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refused)
        with pytest.raises(OSError, match="temporarily"):
            fork_stage.begin([], staging, [], shares=1, timeout=5)
    os.close(staging)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert fork_stage.missing_here() == ""
