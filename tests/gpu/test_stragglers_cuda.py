"""Sections on a real device: by its clock, without waiting for it. One device, so a world of one."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from holdfast.config.sections import StragglerSettings
from holdfast.record.group import join_group
from holdfast.train.stragglers.reports import Actions, Stragglers
from holdfast.train.stragglers.scores import COMPUTE, INPUT, OTHER
from holdfast.train.stragglers.times import DeviceTimes, GradientMark, Section

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CYCLES = 200_000_000
"""At least 0.1 s."""


def busy(cycles: int = CYCLES) -> None:
    torch.cuda._sleep(cycles)


def idle() -> bool:
    return bool(torch.cuda.current_stream(CUDA).query())


def test_measuring_never_waits_for_the_device() -> None:
    times = DeviceTimes(CUDA)
    torch.cuda.synchronize()
    busy()
    for _ in range(20):
        times.begin()
        with Section(times, COMPUTE):
            pass
        times.end()
    assert times.take() == []  # nothing is past yet, and nothing was waited for
    assert not idle()
    torch.cuda.synchronize()
    assert len(times.take()) == 20


def test_a_section_has_the_devices_time_and_not_the_hosts() -> None:
    times = DeviceTimes(CUDA)
    torch.cuda.synchronize()
    times.begin()
    with Section(times, COMPUTE):
        busy()  # the host is back at once
    with Section(times, INPUT):
        time.sleep(0.02)  # hidden behind the device's work
    times.end()
    torch.cuda.synchronize()
    (step,) = times.take()
    assert step[COMPUTE][0] > 0.05
    assert step[INPUT][0] < 0.01
    assert step[OTHER][0] < 0.01


def test_input_that_the_device_waits_for_counts() -> None:
    times = DeviceTimes(CUDA)
    torch.cuda.synchronize()
    times.begin()
    with Section(times, INPUT):
        time.sleep(0.05)
    with Section(times, COMPUTE):
        busy(1000)
    times.end()
    torch.cuda.synchronize()
    (step,) = times.take()
    assert step[INPUT][0] >= 0.045


def test_a_section_on_another_stream_is_read_when_the_device_is_past_it_there_too() -> None:
    times, side = DeviceTimes(CUDA), torch.cuda.Stream(CUDA)
    torch.cuda.synchronize()
    times.begin()
    with torch.cuda.stream(side):
        busy()
        with Section(times, INPUT):
            pass
    times.end()
    torch.cuda.current_stream(CUDA).synchronize()
    assert times.take() == []  # the step's own stream is past it, the section's is not
    torch.cuda.synchronize()
    (step,) = times.take()
    assert min(min(spent) for spent in step.values()) >= 0


def test_what_the_device_does_after_the_last_gradient_is_waiting() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(CUDA)
    times = DeviceTimes(CUDA)
    mark = GradientMark([model], times.mark)
    for _ in range(4):
        times.begin()
        times.enter(COMPUTE)
        model(torch.ones(4, 64, device=CUDA)).sum().backward()
        busy()  # as a collective would be that waits for another rank
        times.leave(waiting=True)
        times.arrived()
        times.end()
        mark.end_step()
    torch.cuda.synchronize()
    steps = times.take()
    assert len(steps) == 4
    for step in steps[2:]:
        own, wait, _ = step[COMPUTE]
        assert wait > 0.05
        assert own < 0.05
    mark.close()


def test_a_rank_that_gets_slower_is_named_against_its_own_past() -> None:
    told: list[object] = []
    chosen = StragglerSettings(enabled=True, report_time_interval=0.2)
    found = Stragglers(chosen, join_group(10.0), device=CUDA, actions=Actions(tell=told.append))
    model = nn.Linear(64, 64).to(CUDA)
    deadline = time.monotonic() + 60
    steps = 0

    def work(cycles: int) -> None:
        model(torch.ones(4, 64, device=CUDA)).sum().backward()
        busy(cycles)

    while time.monotonic() < deadline:
        slow = found.finding is not None and found.finding.enough and len(told) >= 2
        found.begin_step()
        found.around(work)(CYCLES // 20 if slow else CYCLES // 100)
        found.arrived()
        torch.cuda.synchronize()
        found.end_step()
        steps += 1
        finding = found.meet(steps)
        if finding is not None and finding.named:
            break
    assert found.finding is not None
    assert [(one.rank, one.section) for one in found.finding.named] == [(0, COMPUTE)]
    found.close()


def test_events_are_used_again() -> None:
    times = DeviceTimes(CUDA)
    for _ in range(2000):
        times.begin()
        with Section(times, COMPUTE):
            pass
        times.end()
    torch.cuda.synchronize()
    assert len(times.take()) <= 2000
    assert len(times._free) < 5000
