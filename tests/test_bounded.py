"""A call that may hang: waited for no longer than it is worth, and nothing of what it said is lost."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from holdfast import bounded
from holdfast.bounded import Bounded, is_table_full


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
    monkeypatch.setattr(bounded, "PATIENCE", 0.01)
    with pytest.raises(RuntimeError) as error:
        Bounded(lambda: 7, "test")
    assert is_table_full(error.value)
    assert is_table_full(BlockingIOError(errno.EAGAIN, "fork"))
    assert not is_table_full(RuntimeError("another"))
