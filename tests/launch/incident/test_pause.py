"""A paused recovery: the wait begins, ends when it is taken back, and never lasts longer than allowed."""

from __future__ import annotations

import threading

import pytest

from holdfast.errors import ControlError
from holdfast.launch.incident import storage
from holdfast.launch.incident.storage import wait_while_paused
from holdfast.record import operator
from holdfast.record.directory import ControlDirectory


class StoppedError(Exception):
    pass


def nothing() -> None:
    pass


def test_without_a_pause_nobody_waits_and_nothing_is_said(control: ControlDirectory) -> None:
    told: list[str] = []
    assert wait_while_paused(control, 600.0, check=nothing, tell=told.append)
    assert told == []


def test_the_wait_ends_when_recovery_is_resumed(control: ControlDirectory) -> None:
    operator.pause(control, "the switch is replaced", "alice")
    told: list[str] = []
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            threading.Thread(target=operator.unpause, args=(control, "done", "bob")).start()

    assert wait_while_paused(control, 600.0, check=check, tell=told.append)
    assert told[0].startswith(
        "recovery is paused by alice: the switch is replaced. Nothing is restarted until"
    )
    assert f"holdfast control unpause {control.path}" in told[0]
    assert told[-1].startswith("recovery goes on")


def test_the_wait_has_an_end_of_its_own(control: ControlDirectory) -> None:
    operator.pause(control, "why", "alice")
    told: list[str] = []
    assert not wait_while_paused(control, 0.2, check=nothing, tell=told.append)
    assert "stayed paused" in told[-1]
    assert not wait_while_paused(control, 0.0, check=nothing, tell=told.append)


def test_a_stop_ends_the_wait(control: ControlDirectory) -> None:
    operator.pause(control, "why", "alice")

    def check() -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        wait_while_paused(control, 600.0, check=check, tell=lambda text: None)


def test_records_that_cannot_be_read_for_a_while_are_no_reason_to_go_on(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.pause(control, "why", "alice")
    monkeypatch.setattr(storage, "POLL", 0.01)
    real, looks = storage.paused, 0

    def flaky(control: ControlDirectory) -> operator.Request | None:
        nonlocal looks
        looks += 1
        if looks in (3, 4, 5):
            raise ControlError("the server does not answer")
        if looks == 8:
            operator.unpause(control, "why", "alice")
        return real(control)

    monkeypatch.setattr(storage, "paused", flaky)
    assert wait_while_paused(control, 600.0, check=nothing, tell=lambda text: None)
    assert looks == 8
