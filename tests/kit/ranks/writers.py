"""Writer processes for tests: forks of the trainer with something done to them, and ranks as forks too."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import handoff, writer_process
from holdfast.journal.events import SaveCommitted, SaveFailed
from kit.harness import wait_until
from kit.runs import events_in
from kit.tiny import checkpoints, counting_file_operations, die, start_fork, steps_of

Around = Callable[[int], AbstractContextManager[Any]]
"""Given the number of a writer, from 0, what its whole life happens inside."""


class ForkedWriter:
    """A writer process that is a fork; as much of a `subprocess.Popen` as the trainer uses."""

    def __init__(self, descriptor: int, number: int, around: Around) -> None:
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.setsid()
                os.dup2(descriptor, 3)
                os.closerange(4, 4096)  # above all the trainer's end of the socket
                with around(number):
                    code = writer_process.main(3)
            except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
                traceback.print_exc()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        with self._reaping:  # the run's own thread waits for it as well, and only one of them gets its end
            if self.returncode is None:
                done, status = os.waitpid(self.pid, os.WNOHANG)
                if done:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while self.poll() is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise handoff.subprocess.TimeoutExpired("writer", timeout)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Writers(list[ForkedWriter]):
    """Those started so far. The first is started beside the first step: whoever wants it waits for that."""

    def __getitem__(self, at: Any) -> Any:
        wait_until(lambda: len(self) > 0, 10, "a writer is started")
        return super().__getitem__(at)


@contextlib.contextmanager
def forked_writers(around: Around | None = None) -> Iterator[list[ForkedWriter]]:
    """Writers started inside are forks; all of them must be gone at the end."""
    started = Writers()

    def spawn(descriptor: int) -> ForkedWriter:
        started.append(
            ForkedWriter(descriptor, len(started), around or (lambda number: contextlib.nullcontext()))
        )
        return list(started)[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handoff, "spawn", spawn)
        try:
            yield started
        finally:
            for writer in started:
                try:
                    writer.wait(30.0)
                except ChildProcessError:
                    pass
                except handoff.subprocess.TimeoutExpired:
                    writer.kill()
                    raise AssertionError(f"writer {writer.pid} outlived its trainer") from None


def killed_at(point: int, *, writer: int = 0) -> Around:
    """SIGKILL one writer at its file operation number `point`, whichever thread makes it."""

    def on_operation(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == point:
            die()

    def around(number: int) -> AbstractContextManager[Any]:
        if number != writer:
            return contextlib.nullcontext()
        return counting_file_operations(on_operation, any_thread=True)

    return around


@contextlib.contextmanager
def patched(module: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `module.name` by `wrap` of it."""
    original = getattr(module, name)
    setattr(module, name, wrap(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def holding(gate: Path, *, only: str = "") -> Around:
    """Writers wait before they write a shard whose path contains `only`, until the gate file is there."""

    def wrap(write_image: Any) -> Any:
        def slow(path: Path, *args: Any) -> Any:
            if only in str(path):
                gate.with_suffix(".reached").touch()
                deadline = time.monotonic() + 60.0
                while not gate.exists() and time.monotonic() < deadline:
                    time.sleep(0.005)
            return write_image(path, *args)

        return slow

    return lambda number: patched(writer_process, "write_image", wrap)


def ranks(
    directory: Path, world: int, work: Callable[[int], None], *, timeout: float = 60.0, codes: Any = 0
) -> None:
    """Run `work(rank)` in forks that form one gloo group; each must end with its exit code."""
    directory.mkdir(parents=True, exist_ok=True)
    store = directory / f".store-{time.monotonic_ns()}"
    pids = [_fork_rank(store, rank, world, work) for rank in range(world)]
    deadline = time.monotonic() + timeout
    ended: dict[int, int] = {}
    try:
        while len(ended) < world and time.monotonic() < deadline:
            for rank, pid in enumerate(pids):
                if rank not in ended:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        ended[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
    finally:
        for rank, pid in enumerate(pids):
            if rank not in ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        store.unlink(missing_ok=True)
    expected = codes if isinstance(codes, list) else [codes] * world
    assert [ended.get(rank, "still running") for rank in range(world)] == expected


def _fork_rank(store: Path, rank: int, world: int, work: Callable[[int], None]) -> int:
    def grouped() -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        work(rank)

    return start_fork(grouped)


ASYNC: dict[str, Any] = {"checkpoint_async_save": True}


def nothing_in_staging(run_dir: Path) -> None:
    for below in (".staging", ".trash"):
        folder = run_dir / "checkpoints" / below
        left = folder.iterdir() if folder.exists() else ()
        assert [path.name for path in left if not path.name.startswith(".")] == [], f"left in {below}"


def all_committed_once(run_dir: Path, steps: list[int]) -> None:
    assert steps_of(run_dir) == sorted(steps, reverse=True)
    for path in checkpoints(run_dir):
        assert verify(path).sound, verify(path).problems
    committed = events_in(run_dir, SaveCommitted)
    assert sorted(event.step for event in committed) == steps
    chain = sorted(committed, key=lambda event: event.step)
    assert [event.parent for event in chain] == [None, *(event.checkpoint[14:] for event in chain[:-1])]
    assert events_in(run_dir, SaveFailed) == []
    nothing_in_staging(run_dir)
