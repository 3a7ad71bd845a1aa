"""Sections and waits on a real device: by its clock, without waiting for it.

One device: a world of one, or two ranks that share it over gloo.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.config.sections import StragglerSettings
from holdfast.record.group import join_group
from holdfast.train.stragglers.reports import Actions, Stragglers
from holdfast.train.stragglers.scores import COMPUTE, INPUT, OTHER
from holdfast.train.stragglers.times import ASIDE, DeviceTimes, GradientMark, Section
from holdfast.train.stragglers.waits import Waits
from kit.ranks.late_on_device import LIMIT, named_by_rank_0

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


# --- waits in collectives


@pytest.fixture
def nccl() -> Iterator[None]:
    """A group of one, whose communicator is there."""
    torch.cuda.set_device(CUDA)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device=CUDA))
    torch.cuda.synchronize()
    yield
    dist.destroy_process_group()


def collectives() -> None:
    """In the step's stream, in one beside it, and in NCCL's own."""
    numbers, side = torch.ones(64, device=CUDA), torch.cuda.Stream(CUDA)
    dist.all_reduce(numbers)
    with torch.cuda.stream(side):
        dist.all_reduce(numbers)
    work = dist.all_reduce(numbers, async_op=True)
    assert work is not None
    work.wait()


def test_timing_collectives_waits_neither_for_them_nor_for_the_device(nccl: None) -> None:
    times = DeviceTimes(CUDA)
    waits = Waits(times)
    collectives()  # their memory and streams are there
    torch.cuda.synchronize()
    times.begin()
    waits.begin_step(measured=True)
    with Section(times, COMPUTE):
        busy()
        collectives()
    times.end()
    assert not idle()
    assert times.take() == []
    torch.cuda.synchronize()
    (step,), (met,) = times.take(), times.take_met()
    assert waits.count == 3
    assert step[COMPUTE][0] > 0.05  # work is work, though a collective came after it
    assert step[COMPUTE][1] < 0.05
    assert set(met) <= {ASIDE}  # a group of one waits for nobody
    waits.close()


def test_what_the_device_waits_in_a_collective_is_no_work() -> None:
    """In the step's stream it is taken out of its section."""
    times = DeviceTimes(CUDA)
    torch.cuda.synchronize()
    times.begin()
    with Section(times, COMPUTE):
        began = times.waits()
        busy()  # as a collective does until the last rank comes
        times.waited(began, "0,1")
    times.end()
    torch.cuda.synchronize()
    (step,), (met,) = times.take(), times.take_met()
    own, wait, _ = step[COMPUTE]
    assert own < 0.02
    assert wait > 0.05
    assert met["0,1"] == [pytest.approx(wait, rel=0.05), 1]
    assert ASIDE not in met


def test_a_collective_beside_the_step_takes_nothing_out_of_it() -> None:
    times, side = DeviceTimes(CUDA), torch.cuda.Stream(CUDA)
    torch.cuda.synchronize()
    times.begin()
    with Section(times, COMPUTE), torch.cuda.stream(side):
        for where in ("0,1", "0,1", "0,2"):
            began = times.waits()
            busy()
            times.waited(began, where)
    times.end()
    torch.cuda.current_stream(CUDA).synchronize()
    assert times.take() == []  # the stream beside it is not past it
    torch.cuda.synchronize()
    (step,), (met,) = times.take(), times.take_met()
    assert sum(spent[1] for spent in step.values()) == 0
    assert met["0,1"][0] == pytest.approx(2 * met["0,2"][0], rel=0.3)
    assert met[ASIDE][0] == pytest.approx(met["0,1"][0] + met["0,2"][0], rel=0.1)


def test_nothing_is_recorded_in_a_graph_that_is_captured() -> None:
    times, numbers, graph = DeviceTimes(CUDA), torch.ones(4, device=CUDA), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    times.begin()
    with torch.cuda.graph(graph):
        began = times.waits()
        numbers += 1
        times.waited(began, "0,1")
    times.end()
    assert began is None
    graph.replay()
    torch.cuda.synchronize()
    assert len(times.take()) == 1
    assert times.take_met() == [{}]
    assert numbers.tolist() == [2.0] * 4


def test_the_late_one_of_two_ranks_on_one_device_is_named(tmp_path: Path) -> None:
    """F3: both wait for each other amid their forward, over gloo; rank 1 comes 50 ms late each time."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=named_by_rank_0, args=(rank, str(tmp_path), 0.05)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(LIMIT)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    named = (tmp_path / "named").read_text().splitlines()
    assert len(named) == 1
    assert named[0].startswith("rank 1 (here")
    assert " is slow in compute: " in named[0]
    assert "a step it waits" in named[0]
