"""Where an interruption may come, and where it waits: the scope of an in-process restart."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from holdfast.base.files import read_regular
from holdfast.base.scope import (
    RestartRequested,
    Scope,
    critical,
    entered,
    leavable,
    stretch,
    to_the_end,
    uninterrupted,
)
from holdfast.record.decisions import await_key, read_key
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, Writing, claim, let_writer_finish
from holdfast.stop.agreement import Stopping
from kit.harness import wait_until

QUICK = 1.0


def a_scope(*, asked: bool = True) -> Scope:
    scope = Scope(iteration=1, member=0, rank=0, world_size=1)
    if asked:
        scope.ask("a rank was lost")
    return scope


def is_left(scope: Scope, work: Callable[[], object]) -> bool:
    """Whether the work was left by a request to restart."""
    try:
        with entered(scope):
            work()
    except RestartRequested as left:
        return str(left) == scope.asked
    return False


def is_left_soon(work: Callable[[], object]) -> bool:
    """The same, of a critical section, where the request comes while the work waits."""
    scope = a_scope(asked=False)
    timer = threading.Timer(0.1, scope.ask, ("a rank was lost",))
    started = time.monotonic()
    timer.start()
    with scope.critical():
        left = is_left(scope, work)
        scope._asked = ""
    timer.join()
    return left and time.monotonic() - started < QUICK


def test_an_interruption_waits_for_the_end_of_the_outermost_critical_section() -> None:
    scope, done = a_scope(), []

    def work() -> None:
        with critical():
            scope.interrupt()
            with critical():
                scope.interrupt()
            scope.interrupt()
            done.append("all of it")
        done.append("beyond it")

    assert is_left(scope, work)
    assert done == ["all of it"]


def test_what_is_leavable_can_be_left_in_a_critical_section_and_a_critical_section_in_it_cannot() -> None:
    scope, done = a_scope(asked=False), []

    def work() -> None:
        with critical(), leavable():
            with critical():
                scope.ask("now")
                scope.interrupt()
                done.append("the inner one")
            done.append("beyond it")

    assert is_left(scope, work)
    assert done == ["the inner one"]
    assert scope._depth == scope._open == 0


def test_what_was_leavable_is_not_once_it_is_over() -> None:
    scope, done = a_scope(asked=False), []

    def work() -> None:
        with critical():
            with leavable():
                pass
            scope.ask("now")
            scope.interrupt()
            done.append("the rest")

    assert is_left(scope, work)
    assert done == ["the rest"]


def test_a_wait_is_left_in_a_critical_section_but_not_in_what_is_done_to_the_end() -> None:
    scope, done = a_scope(), []

    def work() -> None:
        with critical():
            with to_the_end():
                done.append(stretch(5.0) < 1.0)
                scope.interrupt()
            stretch(5.0)
            done.append(False)

    assert is_left(scope, work)
    assert done == [True]
    assert stretch(5.0) == 5.0, "outside of any scope"


def test_nothing_is_raised_on_top_of_what_is_on_its_way_out() -> None:
    scope = a_scope()

    def work() -> None:
        try:
            raise KeyError("first")
        finally:
            with critical():
                pass

    with pytest.raises(KeyError), entered(scope):
        work()


def test_a_function_is_called_as_a_whole() -> None:
    @uninterrupted
    def work(scope: Scope | None) -> int:
        if scope is not None:
            scope.interrupt()
            done.append(scope)
        return 7

    done: list[Scope] = []
    assert work(None) == 7
    scope = a_scope()
    assert is_left(scope, lambda: work(scope))
    assert done == [scope]


def test_once_the_function_was_left_what_closes_is_not_interrupted() -> None:
    scope, order = a_scope(), []
    scope.on_leave(lambda: order.append("first"))
    scope.on_leave(lambda: order.append("second"))

    def work() -> None:
        for close in scope.closers():
            with critical():
                close()
            stretch(1.0)
            scope.interrupt()

    assert not is_left(scope, work)
    assert order == ["second", "first"]
    assert scope.closers() == []


def test_a_critical_section_counts_as_progress_for_as_long_as_it_may_take() -> None:
    scope = a_scope(asked=False)
    now = time.monotonic()
    with entered(scope):
        with critical(at_most=100.0):
            assert scope.idle(now + 90) == 0.0
            with critical(at_most=1.0):
                assert scope.idle(now + 90) == 0.0, "the longer one counts"
            assert scope.idle(now + 110) == pytest.approx(10, abs=1)
        assert scope.idle(now + 90) == pytest.approx(90, abs=1)


def test_waits_for_others_end_as_soon_as_the_function_is_to_be_left(tmp_path: Path) -> None:
    store = HashStore()
    asked = Stopping(lambda: 3)
    asked.prepare("a signal")
    assert is_left_soon(lambda: read_key(store, "never", 60.0, "what never comes"))
    assert is_left_soon(
        lambda: await_key(store, "never", 60.0, "what never comes", patience=60.0, given_up=lambda: "")
    )
    assert is_left_soon(lambda: asked.reached(4, 60.0))
    wait_until(
        lambda: not any(thread.name == "holdfast-store" for thread in threading.enumerate()),
        5,
        "the threads that asked the store end too",
    )


def test_a_claim_that_waits_for_a_holder_a_writer_or_a_lock_can_be_left(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    held = claim(control, "one", 60.0)
    writing = Writing(control, held.epoch)
    fence = Fence(control, held.epoch, timeout=60.0)

    def lock_twice() -> None:
        with fence.guard("hold the lock"), fence.guard("wait for it"):
            pytest.fail("two at once")

    with writing.busy_with("step_00000003-x"):
        assert is_left_soon(lambda: let_writer_finish(control, held.epoch, 60.0))
    assert is_left_soon(lock_twice)
    assert is_left_soon(lambda: claim(control, "two", 60.0)), "nothing is known of a holder without a beat"
    with fence.guard("go on"):  # nobody has kept the lock
        pass
    writing.close()


def test_what_was_just_opened_is_closed_when_the_function_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every interruption at that point would cost a descriptor, and keep the locks on it."""
    scope = Scope(iteration=1, member=0, rank=0, world_size=1)
    (tmp_path / "file").write_bytes(b"x")
    really = os.open

    def interrupted(*given: Any, **more: Any) -> int:
        number = really(*given, **more)
        scope.ask("a test")
        scope.interrupt()  # as the signal's handler does before the next instruction
        return number

    before = os.listdir("/proc/self/fd")
    with suppress(RestartRequested), entered(scope), monkeypatch.context() as patch, scope.critical():
        patch.setattr(os, "open", interrupted)
        with scope.leavable():
            read_regular(tmp_path / "file", 10)
            pytest.fail("it was not left")
    assert os.listdir("/proc/self/fd") == before
