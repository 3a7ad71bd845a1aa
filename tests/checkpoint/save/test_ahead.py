"""What saves need is got ready beside the first steps: none of it before them, none of it in a save's way."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.copies import slots as slot_module
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import device, handoff, snapshot, staging
from holdfast.checkpoint.save.device import Buffer
from holdfast.checkpoint.save.staging import GettingReady, choose_readying
from holdfast.checkpoint.state import proof
from holdfast.journal.events import DecisionMade, SaveCommitted, Warned
from kit.harness import wait_until
from kit.nodes.local_tier import local
from kit.ranks.writers import ASYNC, ranks
from kit.runs import events_in
from kit.tiny import Outcome, checkpoints, steps_of, train

NEVER: dict[str, Any] = {**ASYNC, "checkpoint_interval": 0, "checkpoint_save_at_end": False}
PAGE = 4096


def ahead_of(run: holdfast.Run) -> GettingReady:
    found: GettingReady = run._session.saving._saver._ahead  # type: ignore[attr-defined]
    return found


def in_thread() -> bool:
    return threading.current_thread().name == "holdfast-ahead"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "holdfast-ahead"]


def staging_files() -> list[int]:
    """Bytes that each staging buffer of this process really takes."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "holdfast-staging" in str(entry.readlink()):
                about = entry.stat()
                found[about.st_ino] = about.st_blocks * 512
    return sorted(found.values())


def warned(run_dir: Path) -> list[str]:
    """What the journal says of a background that gave up."""
    told = [event.message for event in events_in(run_dir, Warned)]
    return [text for text in told if "what saves need is not got ready beside training" in text]


def mapped() -> bool:
    return "holdfast-staging" in Path("/proc/self/maps").read_text()


def all_ready(run: holdfast.Run) -> None:
    wait_until(lambda: run._session.saving.ready, 20, "what saves need is there")


class Gate:
    """Lets the background take so many slices, and then holds it until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, slices: int) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.taken = 0
        original = device.fault_in

        def fault_in(memory: Any) -> bool:
            if in_thread():
                if self.taken == slices:
                    self.reached.set()
                    assert self.opened.wait(30.0)
                self.taken += 1
            return original(memory)

        patch.setattr(device, "fault_in", fault_in)
        patch.setattr(device, "TAKEN", PAGE)


# --- the thread ---------------------------------------------------------------------------------------------


def test_slices_are_done_in_order_and_none_begins_while_a_save_holds_them() -> None:
    done: list[int] = []
    first = threading.Event()

    def work(*numbers: int) -> Iterator[None]:
        for number in numbers:
            done.append(number)
            first.set()
            yield

    ahead = GettingReady(lambda _: None)
    assert ahead.hold(1.0)
    ahead.add(work(1, 2))
    ahead.add(work(3))
    assert not first.wait(0.1)
    ahead.let_go()
    wait_until(lambda: ahead.done and not threads(), 5, "all is done and the thread has ended")
    assert done == [1, 2, 3]
    ahead.add(work(4))
    wait_until(lambda: done[-1] == 4, 5, "a thread begins again")
    assert ahead.close(5.0) is None


def test_a_save_waits_for_a_short_slice_and_for_a_long_one_only_if_it_needs_that_buffer() -> None:
    ends, begun = threading.Event(), threading.Event()
    mine, other = Buffer(0), Buffer(1)

    def work() -> Iterator[Buffer | None]:
        begun.set()
        assert ends.wait(10.0)
        ends.clear()
        begun.clear()
        yield mine
        begun.set()
        assert ends.wait(10.0)

    ahead = GettingReady(lambda _: None)
    ahead.add(work())
    assert begun.wait(5.0)
    assert not ahead.hold(0.05), "a short slice is waited for"
    ahead.let_go()
    ends.set()
    wait_until(lambda: ahead.is_at(mine) and begun.is_set(), 5, "the long slice")
    assert ahead.hold(0.0), "a long slice holds nobody up"
    assert ahead.leaves(other, 0.0)
    assert not ahead.leaves(mine, 0.05)
    ends.set()
    assert ahead.leaves(mine, 5.0)
    ahead.let_go()
    assert ahead.close(5.0) is None
    mine.close()
    other.close()


def test_an_error_is_told_once_and_ends_the_work() -> None:
    told: list[str] = []
    done: list[int] = []

    def work(number: int) -> Iterator[None]:
        done.append(number)
        yield
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    ahead = GettingReady(told.append)
    assert ahead.hold(0.0)
    ahead.add(work(1))
    ahead.add(work(2))
    ahead.let_go()
    wait_until(lambda: not threads(), 5, "the thread ends")
    assert done == [1]
    (why,) = told
    assert "Cannot allocate memory" in why


def test_close_ends_it_and_a_slice_that_hangs_is_left_to_close_its_buffer_itself() -> None:
    ends, buffer = threading.Event(), Buffer(0)

    def work() -> Iterator[Buffer | None]:
        yield buffer
        assert ends.wait(10.0)
        yield None
        raise AssertionError("it goes on after close")

    ahead = GettingReady(pytest.fail)
    ahead.add(work())
    wait_until(lambda: ahead.is_at(buffer), 5, "the long slice")
    assert ahead.close(0.05) is buffer
    assert buffer.descriptor >= 0
    ends.set()
    wait_until(lambda: not threads(), 5, "the thread ends")
    assert buffer.descriptor == -1
    ahead.add(work())
    assert not threads()


def test_the_thread_has_a_lower_priority_than_training() -> None:
    seen: list[int] = []

    def work() -> Iterator[None]:
        staging.at_low_priority()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        yield

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    ahead = GettingReady(pytest.fail)
    ahead.add(work())
    wait_until(lambda: seen, 5, "the slice")
    assert seen == [max(before, staging.NICE)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


# --- what a save that comes too early does ------------------------------------------------------------------

GB = 10**9


@pytest.mark.parametrize(
    ("missing", "unlocked", "copied", "under_way", "way"),
    [
        (0, 0, 0, False, "wait"),
        (5 * GB, 0, 0, False, "wait"),  # no save can do without memory
        (0, 14 * GB, 14 * GB, False, "block"),  # page-locking it first would take longer than the slow copy
        (0, 4 * GB, 14 * GB, False, "wait"),  # most of it is in place: the fast copy makes up for the rest
        (0, 14 * GB, 1 * GB, False, "block"),  # little of the state is on a device
        (0, 14 * GB, 14 * GB, True, "wait"),  # nothing interrupts the driver
    ],
)
def test_the_quicker_of_waiting_and_blocking_is_chosen(
    missing: int, unlocked: int, copied: int, under_way: bool, way: str
) -> None:
    chosen, evidence = choose_readying(missing=missing, unlocked=unlocked, copied=copied, under_way=under_way)
    assert chosen == way
    assert bool(evidence) == bool(missing or unlocked)


def test_a_buffer_is_taken_slice_by_slice_and_a_save_in_between_makes_only_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "TAKEN", PAGE)
    made: list[int] = []
    original = device.prefault

    def prefault(buffer: torch.Tensor, **more: Any) -> bool:
        made.append(buffer.nbytes)
        return original(buffer, **more)

    monkeypatch.setattr(device, "prefault", prefault)
    buffer = Buffer(0)
    try:
        work = buffer.take(10 * PAGE, lambda: 100 * PAGE)
        for _ in range(3):
            next(work)
        assert (buffer.there, os.fstat(buffer.descriptor).st_blocks * 512) == (3 * PAGE, 3 * PAGE)
        buffer.grow(10 * PAGE)
        assert made == [7 * PAGE]
        assert list(work) == [], "nothing is left to do"
        buffer.grow(10 * PAGE)
        assert made == [7 * PAGE]
        assert os.fstat(buffer.descriptor).st_blocks * 512 == 10 * PAGE
    finally:
        buffer.close()


def test_where_the_kernel_cannot_fault_in_memory_is_allocated_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "fault_in", lambda _: False)
    buffer = Buffer(0)
    try:
        assert len(list(buffer.take(3 * PAGE, lambda: 100 * PAGE))) == 1
        assert os.fstat(buffer.descriptor).st_blocks * 512 == 3 * PAGE
    finally:
        buffer.close()


def test_memory_is_taken_only_while_there_is_room_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "TAKEN", PAGE)
    monkeypatch.setattr(device, "LOOK", PAGE)
    left = iter([5 * PAGE, 4 * PAGE, 2 * PAGE])
    buffer = Buffer(0)
    try:
        with pytest.raises(device.TooLittleError, match=r"12\.0 KiB more are needed and 8\.0 KiB may"):
            list(buffer.take(5 * PAGE, lambda: next(left)))
        buffer.give_back()
        assert os.fstat(buffer.descriptor).st_blocks == 0
        assert (buffer.size, buffer.there) == (0, 0)
    finally:
        buffer.close()


# --- a run --------------------------------------------------------------------------------------------------


def test_nothing_is_taken_before_the_first_step_and_everything_soon_after(tmp_path: Path) -> None:
    """Also in a run that goes on from a checkpoint, which knows its plan from the start."""
    seen: list[tuple[str, Any, Any]] = []

    def taken(when: str, run: holdfast.Run) -> None:
        seen.append((when, staging_files(), run._session.saving._saver._writer.pid is not None))  # type: ignore[attr-defined]

    def at_step(step: int, run: holdfast.Run) -> None:
        if step in (4, 8):
            all_ready(run)
            taken(f"step {step}", run)

    original = holdfast.Run.start

    def start(run: holdfast.Run) -> int:
        step = original(run)
        taken(f"start at {step}", run)
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holdfast.Run, "start", start)
        train(tmp_path / "run", until=6, at_step=at_step, **{**ASYNC, "checkpoint_interval": 6})
        train(tmp_path / "run", until=9, at_step=at_step, **{**ASYNC, "checkpoint_interval": 9})
    whole = seen[1][1]
    assert len(whole) == 2
    assert min(whole) > 0
    assert seen == [
        ("start at 0", [0, 0], False),
        ("step 4", whole, True),
        ("start at 6", [0, 0], False),
        ("step 8", whole, True),
    ]
    assert not threads()
    assert not mapped()


@contextlib.contextmanager
def paid_for(patch: pytest.MonkeyPatch, *where: tuple[Any, str]) -> Iterator[list[str]]:
    """What the thread that trains calls of these meanwhile."""
    told: list[str] = []

    def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                told.append(name)
            return original(*args, **kwargs)

        return call

    with patch.context() as inner:
        for module, name in where:
            inner.setattr(module, name, counted(getattr(module, name), name))
        yield told


DEAR: list[tuple[Any, str]] = [
    (device, "prefault"),
    (device, "pin"),
    (Buffer, "_map_at_least"),
    (Buffer, "frame"),
    (handoff, "spawn"),
    (snapshot, "make_plan"),
]
"""What only the first save of a process would have to do."""


@pytest.mark.parametrize("tier", ["none", "memory"])
@pytest.mark.parametrize("cleared", ["at once", "before the backward"])
def test_the_first_save_does_what_every_save_does(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, tier: str, cleared: str
) -> None:
    """By counting: where the background had time, it neither plans nor maps nor faults in nor spawns."""
    settings = (
        {**local(shm), **NEVER, "checkpoint_non_persistent_save_interval": 0} if tier == "memory" else NEVER
    )
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = holdfast.Run(run_dir=tmp_path / "run", **settings)
    run.track(model=model, optimizer=optimizer)
    run.start()

    def step() -> None:
        run.begin_step()
        if cleared == "before the backward":
            optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        if cleared == "at once":
            optimizer.zero_grad()
        run.end_step()

    for _ in range(4):
        step()
    all_ready(run)
    found: list[list[str]] = []
    for _ in range(3):
        with paid_for(monkeypatch, *DEAR) as told:
            run.save(wait=False)
        found.append(told)
        run.wait_for_saves()
        step()
    run.close()
    assert found == [[], [], []]
    assert [
        event for event in events_in(tmp_path / "run", Warned, DecisionMade) if "stag" in str(event)
    ] == []
    assert all(verify(path).sound for path in checkpoints(tmp_path / "run"))


def test_without_steps_the_first_save_pays_for_everything_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above counts is real."""
    run = holdfast.Run(run_dir=tmp_path / "run", **NEVER)
    run.track(model=torch.nn.Linear(64, 64))
    run.start()
    with paid_for(monkeypatch, *DEAR) as told:
        run.save()
    run.close()
    assert set(told) == {"prefault", "_map_at_least", "frame", "spawn", "make_plan"}


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_a_save_that_comes_too_early_takes_what_there_is_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slices: int, longer_reference: Outcome
) -> None:
    """In the middle of a slice, too: a save waits for that slice, and makes the rest itself."""
    gate = Gate(monkeypatch, slices)

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 3:
            assert gate.reached.wait(20.0)
            threading.Timer(0.05, gate.opened.set).start()

    outcome = train(tmp_path / "run", until=12, at_step=at_step, **ASYNC)
    assert outcome.losses == longer_reference.losses
    assert steps_of(tmp_path / "run") == [12, 9, 6, 3]
    assert all(verify(path).sound for path in checkpoints(tmp_path / "run"))
    (told,) = [one for one in events_in(tmp_path / "run", DecisionMade) if one.about == "staging"]
    assert told.chosen == "wait"
    assert "not there yet" in told.evidence[0]
    assert warned(tmp_path / "run") == []


def no_memory(_: Any) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("fault", ["no memory", "too little left", "no thread", "no page-locking"])
def test_a_background_that_fails_ends_no_run_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, longer_reference: Outcome
) -> None:
    if fault == "no memory":
        monkeypatch.setattr(device, "fault_in", no_memory)
    elif fault == "too little left":
        monkeypatch.setattr(staging, "memory_to_spare", lambda: staging.RESERVE + PAGE)
    elif fault == "no thread":
        original = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name == "holdfast-ahead":
                raise RuntimeError("can't start new thread")
            original(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
    else:

        def lock(buffer: Buffer, which: Any = None) -> None:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(Buffer, "lock", lock)

    def at_step(step: int, run: holdfast.Run) -> None:
        tracked = run._session.tracked
        if fault == "no page-locking":
            monkeypatch.setattr(tracked, "devices", lambda: {torch.device("cuda:0")})

    outcome = train(tmp_path / "run", until=12, at_step=at_step, **{**ASYNC, "checkpoint_interval": 4})
    assert outcome.losses == longer_reference.losses
    assert steps_of(tmp_path / "run") == [12, 8, 4]
    assert len(warned(tmp_path / "run")) == 1
    assert not threads()
    assert not mapped()


def test_memory_that_was_taken_in_part_is_given_back_when_it_becomes_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = itertools.chain([staging.RESERVE + 10**9] * 2, itertools.repeat(staging.RESERVE))
    monkeypatch.setattr(staging, "memory_to_spare", lambda: next(left))
    monkeypatch.setattr(device, "TAKEN", PAGE)
    monkeypatch.setattr(device, "LOOK", PAGE)
    seen: list[list[int]] = []

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            wait_until(lambda: warned(tmp_path / "run"), 10, "it is told")
            seen.append(staging_files())

    train(tmp_path / "run", until=6, at_step=at_step, **{**ASYNC, "checkpoint_interval": 6})
    assert seen == [[0, 0]]
    assert steps_of(tmp_path / "run") == [6]


@pytest.mark.parametrize("how", ["close", "an exception"])
def test_a_run_that_ends_in_the_middle_of_it_leaves_nothing_behind(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = Gate(monkeypatch, 2)
    settings = {**local(shm), **NEVER, "checkpoint_non_persistent_save_interval": 0}
    run = holdfast.Run(run_dir=tmp_path / "run", **settings)
    model = torch.nn.Linear(64, 64)
    run.track(model=model)
    run.start()
    for _ in range(2):
        run.begin_step()
        run.end_step()
    assert gate.reached.wait(10.0)
    ahead = ahead_of(run)

    def open_the_gate() -> None:
        wait_until(lambda: ahead._closed, 10, "the run ends")
        gate.opened.set()

    threading.Thread(target=open_the_gate).start()
    if how == "close":
        run.close()
    else:
        try:
            raise ValueError("the script's own")
        except ValueError:
            run.close()
    assert not threads()
    assert str(shm) not in Path("/proc/self/maps").read_text()
    assert not [entry for entry in shm.rglob("images/*") if how == "close"]
    assert gate.taken <= 3, "at most the slice that was under way"


def test_no_slice_is_under_way_while_the_proof_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, 2)
    seen: list[tuple[bool, bool]] = []
    original = proof.quiet

    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        ahead = ahead_of(runs[0])
        seen.append((ahead._slicing, ahead.done))
        with original():
            yield

    monkeypatch.setattr(proof, "quiet", quiet)
    runs: list[holdfast.Run] = []

    def at_step(step: int, run: holdfast.Run) -> None:
        runs[:] = [run]
        if step == 3:
            assert gate.reached.wait(20.0)
            threading.Timer(0.05, gate.opened.set).start()

    train(tmp_path / "run", until=4, at_step=at_step, **ASYNC)
    assert seen == [(False, False)], "there was something left to do, and nothing of it was done meanwhile"
    (first, *_) = events_in(tmp_path / "run", SaveCommitted)
    assert first.step == 3


def test_a_save_waits_while_its_buffer_is_being_page_locked_and_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's part is a stand-in: there is no CUDA device here."""
    caplog.set_level(logging.INFO, "holdfast.checkpoint")
    begun, ends = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def lock(buffer: Buffer, which: Any = None) -> None:
        assert in_thread()
        assert which == torch.device("cuda:3")
        begun[buffer.index].set()
        assert ends[buffer.index].wait(20.0)
        buffer._pinned = device.Pinned(torch.from_numpy(buffer.bytes), registered=False, locked=True, note="")

    monkeypatch.setattr(Buffer, "lock", lock)
    run = holdfast.Run(run_dir=tmp_path / "run", **NEVER)
    run.track(model=torch.nn.Linear(64, 64))
    run.start()
    monkeypatch.setattr(run._session.tracked, "devices", lambda: {torch.device("cuda:3")})
    ahead = ahead_of(run)
    original = ahead.leaves

    def leaves(buffer: Buffer, timeout: float) -> bool:
        if ahead.is_at(buffer):
            ends[buffer.index].set()
        return original(buffer, timeout)

    monkeypatch.setattr(ahead, "leaves", leaves)
    for _ in range(2):
        run.begin_step()
        run.end_step()
    assert begun[0].wait(10.0)
    run.save()
    assert ends[0].is_set(), "the first save needed that buffer"
    assert begun[1].wait(10.0)
    run.save()
    assert not ends[1].is_set(), "the second one did not need the other"
    ends[1].set()
    run.close()
    assert len(steps_of(tmp_path / "run")) == 2


def test_two_ranks_get_ready_together_though_one_of_them_has_no_memory(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(device, "fault_in", no_memory)
            train(tmp_path / "run", until=6, **{**ASYNC, "checkpoint_interval": 4})

    ranks(tmp_path, 2, work)
    assert steps_of(tmp_path / "run") == [6, 4]
    (told,) = warned(tmp_path / "run")
    assert told.startswith("rank 1: ")


def test_slots_of_a_disk_are_got_ready_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_module, "AT_ONCE", PAGE)
    taken: list[int] = []

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 4:
            all_ready(run)
            taken.extend(path.stat().st_blocks * 512 for path in (tmp_path / "tier").rglob("images/*"))

    settings = {**local(tmp_path / "tier"), "checkpoint_non_persistent_save_interval": 0}
    train(tmp_path / "run", until=5, at_step=at_step, **{**settings, "checkpoint_interval": 5})
    assert len(taken) == 3
    assert max(taken) - min(taken) <= PAGE  # the file system's own block, for a file in many parts
    assert taken[0] > PAGE


def test_a_run_that_ends_while_its_writer_is_being_started_leaves_no_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, started = threading.Event(), []
    original = handoff.spawn

    def spawn(descriptor: int) -> Any:
        begun.set()
        wait_until(lambda: ahead_of(run)._closed, 10, "the run ends")
        started.append(original(descriptor))
        return started[-1]

    monkeypatch.setattr(handoff, "spawn", spawn)
    run = holdfast.Run(run_dir=tmp_path / "run", **NEVER)
    run.track(model=torch.nn.Linear(8, 8))
    run.start()
    run.begin_step()
    run.end_step()
    assert begun.wait(10.0)
    run.close()
    assert [process.poll() for process in started] == [0]
