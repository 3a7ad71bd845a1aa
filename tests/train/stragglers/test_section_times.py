"""What a rank measures of a step: its sections, its waiting, and the mark of the last gradient."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from holdfast.config.sections import StragglerSettings
from holdfast.record.group import join_group
from holdfast.train.stragglers import times as section_times
from holdfast.train.stragglers.reports import Actions, Stragglers
from holdfast.train.stragglers.scores import COMPUTE, INPUT, OTHER
from holdfast.train.stragglers.times import (
    MOST_STEPS,
    MOST_TRIES,
    DeviceTimes,
    GradientMark,
    HostTimes,
    Section,
)


class Clock:
    """Time that passes when told to; `busy` is the part of it on a core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.worked = 0.0
        fake = types.SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.worked)
        monkeypatch.setattr(section_times, "time", fake)

    def passes(self, seconds: float, busy: float = 0.0) -> None:
        self.now += seconds
        self.worked += busy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_section_has_what_was_spent_in_it_and_not_in_those_inside_it(clock: Clock) -> None:
    times = HostTimes()
    times.begin()
    clock.passes(1)
    with Section(times, "outer"):
        clock.passes(2, busy=1)
        with Section(times, "inner"):
            clock.passes(4, busy=3)
        clock.passes(8)
    times.end()
    assert times.take() == [{OTHER: [1, 0, 0], "outer": [10, 0, 1], "inner": [4, 0, 3]}]


def test_what_comes_after_the_mark_is_waiting_until_the_section_ends(clock: Clock) -> None:
    times = HostTimes()
    times.begin()
    times.enter(COMPUTE)
    clock.passes(1)
    times.mark()
    clock.passes(2)
    times.leave(waiting=True)
    clock.passes(4)
    times.arrived()
    clock.passes(8)
    times.end()
    assert times.take() == [{OTHER: [8, 4, 0], COMPUTE: [1, 2, 0]}]


def test_with_several_backwards_only_what_comes_after_the_last_is_waiting(clock: Clock) -> None:
    times = HostTimes()
    times.begin()
    times.enter(COMPUTE)
    for _ in range(3):
        clock.passes(5)
        times.mark()
    clock.passes(2)
    times.leave()
    times.end()
    assert times.take()[0][COMPUTE] == [15, 2, 0]


def test_the_optimizers_step_ends_the_waiting_for_gradients(clock: Clock) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    chosen = StragglerSettings(enabled=True)
    actions = Actions(tell=lambda event: None)
    stragglers = Stragglers(chosen, join_group(5.0), optimizers=[optimizer], actions=actions)
    stragglers.begin_step()
    clock.passes(1)
    stragglers._times.mark()
    clock.passes(2)
    optimizer.step()
    clock.passes(4)
    stragglers.end_step()
    assert stragglers._times.take() == [{OTHER: [5, 2, 0]}]
    stragglers.close()
    assert not optimizer._optimizer_step_pre_hooks


def test_waits_in_collectives_are_waiting_wherever_they_are_and_are_counted_once(clock: Clock) -> None:
    """F3: in the middle of a section, after the mark, and between two marks, where the rest was work."""
    times = HostTimes()

    def wait(seconds: float, where: str | None) -> None:
        began = times.waits()
        clock.passes(seconds)
        times.waited(began, where)

    times.begin()
    times.enter(COMPUTE)
    clock.passes(1)
    wait(10, "0,1")
    clock.passes(2)
    times.mark()
    wait(20, "0,2")
    clock.passes(4)
    times.mark()
    clock.passes(8)
    wait(40, "0,1")
    wait(80, None)
    times.leave()
    times.end()
    assert times.take() == [{OTHER: [0, 0, 0], COMPUTE: [1 + 2 + 4, 10 + 20 + 8 + 40 + 80, 0]}]
    assert times.take_met() == [{"0,1": [50, 2], "0,2": [20, 1]}]
    times.begin()
    times.end()
    assert times.take_met() == [{}]


def test_a_report_keeps_a_bounded_number_of_steps() -> None:
    times = HostTimes()
    for _ in range(3 * MOST_STEPS):
        times.begin()
        times.end()
    assert MOST_STEPS / 2 <= len(times.take()) <= MOST_STEPS
    assert times.take() == []


def test_time_between_two_steps_belongs_to_none() -> None:
    times = HostTimes()
    times.begin()
    times.end()
    with Section(times, "eval"):
        pass
    times.begin()
    times.end()
    assert all("eval" not in step for step in times.take())


class Event:
    """A device's event: passed at a time, or not yet."""

    made: list[Event] = []  # noqa: RUF012 - of one test

    def __init__(self, **given: object) -> None:
        del given
        self.at: float | None = None
        Event.made.append(self)

    def record(self, stream: object) -> None:
        del stream

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, after: Event) -> float:
        if self.at is None or after.at is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return after.at - self.at


def test_a_step_is_read_when_the_device_is_past_all_of_it_on_whichever_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real thing is in tests/gpu: a section on a stream of its own, which is behind the step's."""
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    times = DeviceTimes(torch.device("cuda", 0))
    times.begin()
    with Section(times, INPUT):
        pass
    times.end()
    begun, entered, left, ended = Event.made
    begun.at, ended.at = 0.0, 3.0
    assert times.take() == []
    entered.at, left.at = 4.0, 5.0
    assert times.take() == [{OTHER: [0.004, 0, 0], INPUT: [0.001, 0, 0]}]


class Streams:
    """What a device does, moment by moment: an event is passed when it is recorded, or never yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.current, self.capturing, streams = 0.0, "main", False, self

        class Recorded(Event):
            def record(self, stream: object) -> None:
                self.at = streams.now

        monkeypatch.setattr(Event, "made", [])
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Recorded())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: streams.capturing)


def test_on_a_device_a_collective_takes_its_time_out_of_the_section_that_it_is_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F3; the real thing is in tests/gpu. Between two marks what was no collective was work."""
    device = Streams(monkeypatch)
    times = DeviceTimes(torch.device("cuda", 0))

    def wait(milliseconds: float, where: str | None, count: int = 1) -> None:
        began = times.waits()
        device.now += milliseconds
        times.waited(began, where, count)

    times.begin()
    times.enter(COMPUTE)
    device.now += 1
    wait(10, "0,1")
    wait(5, "0,1", 0)  # the other half of a call, which is counted once
    device.now += 2
    times.mark()
    wait(20, "0,2")
    device.now += 4
    times.mark()
    device.now += 8
    wait(40, None)
    times.leave()
    times.end()
    (step,), (met,) = times.take(), times.take_met()
    assert step[COMPUTE] == [pytest.approx(0.007), pytest.approx(0.083), 0]
    assert met == {"0,1": [pytest.approx(0.015), 1], "0,2": [pytest.approx(0.02), 1]}
    made = len(Event.made)
    times.begin()
    wait(1, "0,1")
    times.end()
    assert len(Event.made) == made, "events are used again"


def test_on_a_device_collectives_beside_the_step_are_counted_while_any_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Streams(monkeypatch)
    times = DeviceTimes(torch.device("cuda", 0))
    times.begin()
    times.enter(COMPUTE)
    device.current = "gathers"
    first = times.waits()
    device.now += 10
    device.current = "reduces"
    second = times.waits()
    device.now += 5
    device.current = "gathers"
    times.waited(first, "0,1")
    device.current = "reduces"
    device.now += 20
    times.waited(second, "0,1")
    device.current = "main"
    times.leave()
    times.end()
    (step,), (met,) = times.take(), times.take_met()
    assert step[COMPUTE] == [pytest.approx(0.035), 0, 0]
    assert met == {"0,1": [pytest.approx(0.015 + 0.025), 2], "": [pytest.approx(0.035), 1]}
    assert len({id(event) for event in times._free}) == len(times._free) == len(Event.made)
    device.capturing = True
    times.begin()
    assert times.waits() is None
    times.waited(None, "0,1")
    times.end()
    assert times.take_met() == [{}]


def test_the_last_gradient_of_a_backward_is_the_mark() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[list[bool]] = []

    def told() -> None:
        seen.append([parameter.grad is not None for parameter in model.parameters()])

    mark = GradientMark([model], told)
    for _ in range(5):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        mark.end_step()
    assert len(seen) == 3 == mark.seen  # two steps to find out which one it is
    assert all(all(there) for there in seen)
    mark.close()
    model(torch.ones(2, 4)).sum().backward()
    assert len(seen) == 3


def hooked(model: nn.Module) -> int:
    return sum(bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters())


def test_where_the_last_gradient_is_another_every_time_there_is_no_mark_and_no_hook() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
    seen: list[int] = []
    mark = GradientMark([model], lambda: seen.append(0))

    def step(head: int) -> None:
        model[head](torch.ones(1, 2)).sum().backward()
        mark.end_step()

    for number in range(MOST_TRIES):
        assert hooked(model) == 2
        step(number % 2)
    assert hooked(model) == 0
    for number in range(4):
        step(number % 2)
    assert seen == []
    mark.look_again()  # with the next report: by then it may be always the same
    for _ in range(3):
        step(1)
    assert len(seen) == 1 == mark.seen
    assert hooked(model) == 1
    mark.close()
    assert hooked(model) == 0
