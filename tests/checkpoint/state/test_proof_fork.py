"""The fork that a proof runs in: nothing of the trainer runs there, and the trainer goes on undisturbed."""

from __future__ import annotations

import atexit
import contextlib
import gc
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import Proof
from holdfast.checkpoint.save import snapshot
from holdfast.checkpoint.state import proof
from holdfast.checkpoint.state.proof import Mappings, Report, Subject
from holdfast.launch.workers import orphans
from holdfast.process import MemoryMapping, proc
from kit.harness import wait_until
from kit.tiny import checkpoints, train


def shared(tensor: torch.Tensor) -> bool:
    return Mappings(proc.mapped()).shares(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def test_memory_that_a_fork_would_write_to_for_all_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    assert not shared(torch.ones(8192))
    assert not shared(torch.frombuffer(mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE), dtype=torch.uint8))
    assert not shared(torch.from_file(str(tmp_path / "file"), shared=False, size=2048))
    assert shared(torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.uint8))
    assert shared(torch.ones(8192).share_memory_())
    assert shared(torch.from_file(str(tmp_path / "file"), shared=True, size=2048))


def test_a_range_is_shared_if_any_of_it_is() -> None:
    view = Mappings(
        [
            MemoryMapping(0x1000, 0x4000, "[heap]", shared=False),
            MemoryMapping(0x4000, 0x5000, "/dev/shm/x", shared=True),
            MemoryMapping(0x6000, 0x7000, "", shared=False),
        ]
    )
    assert view.shares(0x4000, 0x5000)
    assert view.shares(0x3FFF, 0x4001)
    assert view.shares(0x1000, 0x7000)
    assert not view.shares(0x1000, 0x4000)
    assert not view.shares(0x5000, 0x7000)
    assert not Mappings([]).shares(0, 1)


def test_a_network_adapter_is_found_behind_a_gpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    gpu = "200000000-200200000 rw-s 00000000 00:06 486 /dev/nvidia0\n"
    maps.write_text(gpu)
    assert Mappings(proc.mapped(maps)).network_adapter == ""
    maps.write_text(f"{gpu}7f0000000000-7f0000001000 rw-s 00000000 00:06 512 /dev/infiniband/uverbs0\n")
    found = proc.mapped(maps)
    monkeypatch.setattr(proc, "mapped", lambda: found)
    told = "this process has memory of a network adapter mapped (/dev/infiniband/uverbs0), and is not forked"
    assert proven(tmp_path, monkeypatch, Report).why_not == told


def proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[], Report]) -> Proof:
    """What a run's first save says of its proof, where this is all that the proof does."""
    monkeypatch.setattr(proof._Proof, "run", lambda self: work())
    train(tmp_path / "run", until=3)
    (path,) = checkpoints(tmp_path / "run")
    found = manifests.read(path)[0].proof
    assert found is not None
    return found


class Noisy:
    """Leaves a mark where it is destroyed outside of its own process."""

    def __init__(self, path: Path) -> None:
        self.path, self.pid, self.circle = path, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.path.write_text("destroyed in the fork")


def test_no_exit_hook_destructor_or_signal_handler_of_the_trainer_runs_in_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, handled = tmp_path / "mark", tmp_path / "handled"
    me = os.getpid()

    def at_exit() -> None:
        mark.write_text("an exit hook ran")

    def handler(number: int, frame: object) -> None:
        (handled if os.getpid() == me else mark).write_text("a signal handler ran")

    def work() -> Report:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)  # as what ends a whole session does
        assert len([[] for _ in range(1_000_000)]) == 1_000_000  # a collector that is on runs here
        return Report(parts={"model": proof.VALUE})

    atexit.register(at_exit)
    before = signal.signal(signal.SIGUSR1, handler)
    gc.collect()
    original = proof.prove

    def with_litter(subject: Subject) -> Report:
        Noisy(mark)  # only the collector finds it from here on
        return original(subject)

    monkeypatch.setattr(snapshot, "prove", with_litter)
    try:
        assert proven(tmp_path, monkeypatch, work).parts == {"model": proof.VALUE}
        assert not mark.exists()
        os.kill(me, signal.SIGUSR1)
        wait_until(handled.exists, 5, "the trainer's own handler still works")
        assert gc.isenabled()
    finally:
        signal.signal(signal.SIGUSR1, before)
        atexit.unregister(at_exit)


def reap_all(number: int, frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, reap_all], ids=["ignored", "all are reaped"])
@pytest.mark.parametrize("killed", [False, True])
def test_whatever_the_script_does_about_ended_children_the_outcome_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Any, killed: bool
) -> None:
    def work() -> Report:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return Report(parts={"model": proof.VALUE})

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        found = proven(tmp_path, monkeypatch, work)
    finally:
        signal.signal(signal.SIGCHLD, before)
    if killed:
        assert "its process ended without a word" in found.why_not
    else:
        assert found.parts == {"model": proof.VALUE}


def test_a_launcher_does_not_take_the_fork_for_one_that_may_outlive_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> Report:
        found = proc.read(os.getpid())
        assert found is not None
        return Report(why_not=f"taken for {orphans.recognise(found)}")

    assert proven(tmp_path, monkeypatch, work).why_not == "taken for ('', 0)"
