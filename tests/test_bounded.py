"""A call that may hang: waited for no longer than it is worth, and nothing of what it said is lost."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.bounded import Bounded


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
