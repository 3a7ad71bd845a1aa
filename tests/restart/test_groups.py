"""Leaving process groups after a fault: who waits in one is freed, new ones can be made, nothing is left."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.config.sections import InProcessSettings
from holdfast.restart.groups import GroupWatch, forget, gloo_devices, watch_groups
from kit.harness import wait_until
from kit.ranks.group_ranks import LIMIT, Rank, aborted_when, started

AT_ONCE = 2.0
"""Seconds that a freed call may take on a busy machine; the groups' own timeout is 15."""


def freed(watch: GroupWatch, wait: Callable[[], object], when: Callable[[], bool]) -> None:
    """This waits for ever, is freed by an abort from another thread, and that at once."""
    with aborted_when(watch, when) as since:
        with pytest.raises((RuntimeError, dist.DistError)):
            wait()
        assert since() < AT_ONCE


def in_the_kernel(seconds: float = 0.2) -> Callable[[], bool]:
    """Whether the main thread has been asleep for so long: then it waits for somebody else."""
    me = Path(f"/proc/self/task/{os.getpid()}/stat")
    since = time.monotonic()

    def asked() -> bool:
        nonlocal since
        if me.read_text().rpartition(")")[2].split()[0] != "S":
            since = time.monotonic()
        return time.monotonic() - since > seconds

    return asked


def lines() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection of the user's own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def works(*pairs: tuple[socket.socket, socket.socket]) -> bool:
    for one, other in pairs:
        one.sendall(b"there")
        other.settimeout(5)
        assert other.recv(5) == b"there"
    return True


@pytest.mark.parametrize("which", ["default", "new_group"])
def test_who_waits_for_a_stopped_peer_is_freed_at_once(tmp_path: Path, which: str) -> None:
    def work(rank: Rank) -> None:
        with watch_groups() as watch:
            before = lines()
            meanwhile: list[tuple[socket.socket, socket.socket]] = []
            made = threading.Event()

            def open_lines() -> None:
                while not made.is_set():
                    meanwhile.append(lines())

            opening = threading.Thread(target=open_lines)
            opening.start()
            rank.join(watch, "first", 3)
            group = dist.new_group([0, 1, 2]) if which == "new_group" else None
            made.set()
            opening.join()
            after = lines()
            dist.all_reduce(torch.ones(1), group=group)
            if rank.number == 2:
                rank.mark("stopping")
                os.kill(os.getpid(), signal.SIGSTOP)
            freed(watch, lambda: dist.all_reduce(torch.ones(1), group=group), in_the_kernel())
            assert works(before, after, *meanwhile)
            group = None
            watch.leave()
            assert not dist.is_initialized()
            assert not gloo_devices()
            rank.store.set(f"left{rank.number}", "yes")
            rank.join(watch, "second", 2)
            value = torch.ones(1)
            dist.all_reduce(value)
            assert value.item() == 2
            dist.barrier()
            watch.leave()

    with started(tmp_path, work, 0, 1, 2) as ranks:
        ranks.marked("stopping", 2)
        assert ranks.ended(0, 1) == [0, 0]


def test_a_send_that_is_stuck_half_way_is_freed_at_once(tmp_path: Path) -> None:
    """gloo itself would tell it nothing of the connection's end."""

    def work(rank: Rank) -> None:
        large = torch.ones(64 << 20, dtype=torch.uint8)
        with watch_groups() as watch:
            rank.join(watch, "first", 2)
            if rank.number == 1:
                dist.irecv(large, src=0)
                rank.store.set("pid", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            stat = Path("/proc") / rank.store.get("pid").decode() / "stat"
            wait_until(
                lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", LIMIT, "rank 1 is stopped"
            )
            freed(watch, lambda: (dist.send(large, dst=1), dist.all_reduce(torch.ones(1))), in_the_kernel())
            watch.leave()
            assert not gloo_devices()

    with started(tmp_path, work, 0, 1) as ranks:
        assert ranks.ended(0) == [0]


def test_who_waits_for_a_peer_that_never_came_is_freed_at_once(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        with watch_groups() as watch:
            freed(watch, lambda: rank.join(watch, "first", 2), in_the_kernel())
            watch.leave()
            assert rank.store.add("there", 1) == 1
            rank.join(watch, "second", 1)
            dist.all_reduce(torch.ones(1))
            assert dist.distributed_c10d._world.group_count == 1
            watch.leave()

    with started(tmp_path, work, 0) as ranks:
        assert ranks.ended(0) == [0]


def test_who_waits_for_a_peer_that_died_while_the_group_was_made_is_freed_at_once(tmp_path: Path) -> None:
    """The peer has told its address, was to connect to us, and is gone."""

    def work(rank: Rank) -> None:
        with watch_groups() as watch:
            if rank.number == 1:
                rank.join(watch, "first", 2)  # and waits for rank 0's address, until it is killed
            wait_until(lambda: (tmp_path / "dead").exists(), LIMIT, "rank 1 is dead")
            freed(
                watch, lambda: rank.join(watch, "first", 2) or dist.all_reduce(torch.ones(1)), in_the_kernel()
            )
            watch.leave()
            assert not gloo_devices()
            rank.join(watch, "second", 1)
            watch.leave()

    with started(tmp_path, work, 0, 1) as ranks:
        store = dist.TCPStore("127.0.0.1", ranks.port, is_master=False)
        key = "first/0//cpu//0/1"
        address = store.get(key)
        os.kill(ranks.pids[1], signal.SIGKILL)
        ranks.ended(1)
        # Of two devices the one with the higher port connects to the other: so this was to be the dead one.
        at = address.index(socket.inet_aton("127.0.0.1"))
        store.set(key, address[: at - 2] + struct.pack(">H", 0xFFFF) + address[at:])
        (tmp_path / "dead").touch()
        assert ranks.ended(0) == [0]


def census() -> tuple[int, int, int]:
    """Threads, descriptors and groups of this process."""
    return (
        len(list(Path("/proc/self/task").iterdir())),
        len(list(Path("/proc/self/fd").iterdir())),
        len(dist.distributed_c10d._world.pg_map),
    )


def interrupted_rounds(rank: Rank, rounds: int) -> None:
    """Each ends by an error on one rank, in the midst of what both do."""
    counts, hook = [], sys.excepthook  # an earlier test's own process group may have changed it
    for number in range(rounds):
        with watch_groups() as watch:
            rank.join(watch, f"round{number}", 2)
            other = dist.new_group([0, 1])
            error: BaseException | None = None
            try:
                with aborted_when(watch, lambda key=f"end{number}": rank.store.check([key])):
                    under_way = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(4)]
                    if number % 2 == rank.number:
                        rank.store.set(f"end{number}", "yes")
                        raise ValueError("this rank's own")
                    for work in under_way:
                        work.wait()
                    dist.all_reduce(torch.ones(1), group=other)
            except (RuntimeError, ValueError) as raised:
                error = raised
            assert error is not None
            under_way, other = [], None
            forget(error, InProcessSettings())
            watch.leave()
        counts.append(census())
    # What is kept open for the peers is closed when the next group is made, so all rounds are alike.
    settled = [max(one) for one in zip(*counts[:3], strict=True)]
    assert all(now <= most for now, most in zip(counts[-1], settled, strict=True)), counts
    assert sys.excepthook is hook


@pytest.mark.drill
def test_rounds_of_errors_amid_collectives_leave_nothing_behind(tmp_path: Path) -> None:
    with started(tmp_path, lambda rank: interrupted_rounds(rank, 5), 0, 1) as ranks:
        assert ranks.ended(0, 1) == [0, 0]


@pytest.mark.drill
def test_fifty_rounds_of_errors_amid_collectives_leave_nothing_behind(tmp_path: Path) -> None:
    with started(tmp_path, lambda rank: interrupted_rounds(rank, 50), 0, 1) as ranks:
        assert ranks.ended(0, 1, within=300) == [0, 0]


class InterruptedStepError(Exception):
    pass


def train(kind: str, rank: int, at: str) -> list[str]:
    """Three steps of a small model, exactly; `at` says where in the second it is left on rank 1."""
    torch.manual_seed(7)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 32)
    )
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    losses = []

    def leave(*_: object) -> None:
        if rank == 1 and len(losses) == 1:
            raise InterruptedStepError

    inner = model[2] if kind == "fsdp" else model.module[2]
    if at == "forward":
        inner.register_forward_pre_hook(leave)
    elif at == "backward":
        inner.register_full_backward_pre_hook(leave)
    for _ in range(3):
        if at == "step":
            leave()
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_after_an_error_in_the_midst_of_a_step_training_is_bitwise_that_of_a_new_process(
    tmp_path: Path, kind: str
) -> None:
    def work(rank: Rank) -> None:
        seen = {}
        for at in ("", "forward", "backward", "step", "again"):
            with watch_groups() as watch:
                rank.join(watch, f"group{at}", 2)
                error: BaseException | None = None
                with aborted_when(watch, lambda key=f"end{at}": rank.store.check([key])):
                    try:
                        seen[at] = train(kind, rank.number, at)
                    except (RuntimeError, InterruptedStepError) as raised:
                        error = raised
                        rank.store.set(f"end{at}", "yes")
                forget(error, InProcessSettings())
                watch.leave()
                assert not gloo_devices(), f"after {at!r}"
        assert list(seen) == ["", "again"]
        assert seen[""] == seen["again"]

    with started(tmp_path, work, 0, 1) as ranks:
        assert ranks.ended(0, 1) == [0, 0]


def test_an_error_is_forgotten_but_for_its_words() -> None:
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)

    def fails(kept: Held) -> None:
        def inside() -> None:
            assert kept
            raise ValueError("of no use")

        try:
            inside()
        except ValueError as error:
            raise RuntimeError("and that") from error

    with pytest.raises(RuntimeError) as raised:
        fails(held)
    error = raised.value
    del raised, held
    assert gone() is not None
    forget(error, InProcessSettings())
    assert gone() is None
    assert isinstance(error.__cause__, ValueError)
    assert "in inside" in "".join(traceback.format_exception(error))


def test_a_backend_with_nothing_to_abort_is_left_too() -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    with watch_groups() as watch:
        for _ in range(2):
            dist.init_process_group("fake", rank=0, world_size=4)
            dist.new_group([0, 1])
            watch.abort()
            watch.leave()
            assert not dist.is_initialized()


def test_only_gloo_s_own_event_loops_are_taken_for_gloo_s() -> None:
    reading, writing = os.pipe()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        select.epoll() as loop,
        os.fdopen(reading, "rb"),
        os.fdopen(writing, "wb"),
    ):
        loop.register(server, select.EPOLLIN)
        loop.register(reading, select.EPOLLIN)
        assert gloo_devices() == set()
