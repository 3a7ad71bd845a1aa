"""A call that may hang: waited for no longer than it is worth, and nothing of what it said is lost."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from holdfast.base import bounded
from holdfast.base.bounded import Aside, Bounded, Look, is_table_full
from kit.harness import wait_until


def test_what_hangs_is_left_behind_at_its_deadline() -> None:
    over = threading.Event()
    hanging = Bounded(lambda: over.wait(60), "hanging")
    began = time.monotonic()
    assert not hanging.ended(0.2)
    assert not hanging.ended()
    assert time.monotonic() - began < 5.0
    over.set()
    assert hanging.ended(20.0)
    assert hanging.result() is True


def test_what_it_returns_or_raises_reaches_who_waits() -> None:
    done = Bounded(lambda: None, "done")
    assert done.ended(20.0)
    assert done.result() is None

    def fails() -> None:
        raise OSError(5, "Input/output error")

    failed = Bounded(fails, "failed")
    assert failed.ended(20.0)
    with pytest.raises(OSError, match="Input/output error"):
        failed.result()


def test_a_look_that_hangs_costs_its_news_and_not_its_asker() -> None:
    answers, looks = threading.Event(), list[int]()

    def ask() -> int:
        answers.wait(60)
        looks.append(len(looks))
        return looks[-1]

    look = Look(ask, "look", patience=0.2)
    began = time.monotonic()
    assert [look.take() for _ in range(50)] == [None] * 50
    assert time.monotonic() - began < 5.0, "only the first waits"
    answers.set()
    found = wait_until(look.take, 20, "it ends")
    assert found is not None
    assert found.result() == 0, "one at a time"
    again = look.take()
    assert again is not None
    assert again.result() == 1


def test_work_aside_is_done_when_it_is_handed_in_and_waits_when_it_hangs() -> None:
    done: list[int] = []
    aside = Aside("aside", most=3, patience=0.2)
    for number in range(3):
        assert aside.do(lambda number=number: done.append(number))  # type: ignore[misc]
        assert done[-1] == number
    answers, began = threading.Event(), time.monotonic()
    assert aside.do(lambda: answers.wait(60) and done.append(3))
    for number in (4, 5, 6, 7):
        taken = aside.do(lambda number=number: done.append(number))  # type: ignore[misc]
        assert taken == (number < 6), "what waits is bounded"
    assert time.monotonic() - began < 5.0
    assert aside.hangs
    assert done == [0, 1, 2]
    answers.set()
    wait_until(lambda: done == [0, 1, 2, 3, 4, 5], 20, "the rest is done in its order")
    assert aside.do(lambda: done.append(8), last=True)
    assert not aside.hangs
    assert done[-1] == 8
    wait_until(lambda: aside._thread is None, 20, "the thread ends")


def test_a_process_table_that_is_full_for_a_moment_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    start, full = threading.Thread.start, [1, 2, 3]

    def fails_at_first(thread: threading.Thread) -> None:
        if full and thread.name == "holdfast-test":
            full.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_at_first)
    monkeypatch.setattr(bounded, "RETRY", 0.001)
    called = Bounded(lambda: 7, "test")
    assert called.ended(10)
    assert called.result() == 7
    full.extend(range(10_000))
    monkeypatch.setattr(bounded, "TABLE_PATIENCE", 0.01)
    with pytest.raises(RuntimeError) as error:
        Bounded(lambda: 7, "test")
    assert is_table_full(error.value)
    assert is_table_full(BlockingIOError(errno.EAGAIN, "fork"))
    assert is_table_full(RuntimeError("Resource temporarily unavailable"))  # as C++ says it
    assert not is_table_full(RuntimeError("another"))
