"""Waits in collectives as a rank sees them: in which calls, for whom, and what is left behind: nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from holdfast.train.stragglers import waits as waits_module
from holdfast.train.stragglers.times import HostTimes
from holdfast.train.stragglers.waits import Waits, group_key, pair_key
from kit.ranks.together import together

LATE = 0.05


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one: its collectives are real, and wait for nobody."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def originals() -> list[object]:
    found: list[object] = []
    for owner, names in (
        (dist.Work, waits_module.WORK_WAITS),
        (dist.ProcessGroup, (*waits_module.SENDS, *waits_module.COLLECTIVES)),
        (functional, (*waits_module.TENSOR_WAITS, *waits_module.RESOLVERS, *waits_module.WRAPPERS)),
    ):
        found += [vars(owner).get(name) for name in names]
    return found


def measured(clock: HostTimes, waits: Waits, work: Any) -> dict[str, list[float]]:
    """What one step of `work` met."""
    clock.begin()
    waits.begin_step(measured=True)
    work()
    waits.on = False
    clock.end()
    clock.take()
    (met,) = clock.take_met()
    return met


def every_way(rank: int, group: Any, how: str) -> dict[str, Any]:
    """Ways of waiting, by whom they are with; each time rank 1 comes late."""
    mine = torch.ones(4)

    def late() -> None:
        if rank == 1:
            time.sleep(LATE)

    def synchronous() -> None:
        late()
        dist.all_reduce(mine, group=group)

    def asynchronous() -> None:
        late()
        work = dist.all_gather([torch.empty(4), torch.empty(4)], mine, group=group, async_op=True)
        assert work is not None
        work.wait()

    def functionally() -> None:
        late()
        (functional.all_reduce(mine, "sum", group) + 1).sum()

    def in_a_list() -> None:
        late()
        for one in functional.all_gather_into_tensor_coalesced([mine, mine], group):
            one.sum()

    def sending() -> None:
        late()
        send, receive = (dist.isend, dist.irecv)
        ops = [dist.P2POp(send, mine, 1 - rank), dist.P2POp(receive, torch.empty(4), 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def barrier() -> None:
        late()
        dist.barrier(group=group)

    if how == "functional":
        return {"0,1": [functionally, in_a_list]}
    return {"0,1": [synchronous, asynchronous, barrier], "0-1": [sending]}


@pytest.mark.parametrize("how", ["calls", pytest.param("functional", marks=pytest.mark.drill)])
def test_every_way_of_waiting_is_seen_with_whom_and_is_not_own_time(tmp_path: Path, how: str) -> None:
    """F3: synchronous and asynchronous calls, sends and receives; functional collectives, as DTensor has
    them, whose first call imports for seconds."""

    def work(rank: int) -> Any:
        clock = HostTimes()
        group = dist.new_group([0, 1])
        for ways in every_way(rank, group, how).values():  # connections are made at first use
            for way in ways:
                way()
        waits, found = Waits(clock), []
        for expected, ways in every_way(rank, group, how).items():
            for way in ways:
                clock.begin()
                waits.begin_step(measured=True)
                way()
                waits.on = False
                clock.end()
                ((step,), (met,)) = clock.take(), clock.take_met()
                own = sum(times[0] for times in step.values())
                found.append([way.__name__, expected, own, {name: one[0] for name, one in met.items()}])
        waits.close()
        return found

    early, late = together(tmp_path, 2, work)
    for (name, expected, own, met), (_, _, late_own, late_met) in zip(early, late, strict=True):
        assert set(met) == set(late_met) == {expected}, name
        assert met[expected] > LATE / 2 > late_met[expected], name
        assert late_own > LATE > 2 * own, name


def test_what_was_changed_is_put_back(alone: None) -> None:
    before = originals()
    waits = Waits(HostTimes())
    assert originals() != before
    waits.close()
    assert originals() == before
    waits.close()
    assert originals() == before


def test_what_somebody_else_put_over_it_stays_and_still_works(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HostTimes()
    waits = Waits(clock)
    ours = dist.Work.wait
    calls: list[int] = []

    def theirs(work: Any, *args: Any) -> Any:
        calls.append(1)
        return ours(work, *args)

    monkeypatch.setattr(dist.Work, "wait", theirs)
    waits.close()
    assert dist.Work.wait is theirs
    dist.all_reduce(torch.ones(1))
    assert calls == [1]
    monkeypatch.undo()
    dist.Work.wait = vars(ours)["__wrapped__"]  # type: ignore[method-assign]


def test_only_the_steps_that_are_measured_and_the_thread_that_trains_count(alone: None) -> None:
    clock = HostTimes()
    waits = Waits(clock)

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
        thread.start()
        thread.join()

    dist.all_reduce(torch.ones(1))
    assert waits.count == 0
    measured(clock, waits, elsewhere)
    assert waits.count == 0
    measured(clock, waits, lambda: dist.all_reduce(torch.ones(1)))
    assert waits.count == 1
    waits.close()


def test_a_collective_that_fails_fails_as_before_and_the_next_one_is_seen(alone: None) -> None:
    clock = HostTimes()
    waits = Waits(clock)

    def work() -> None:
        with pytest.raises(RuntimeError):  # as it is issued
            dist.all_gather([torch.empty(3)], torch.ones(2))
        with pytest.raises(RuntimeError, match="the other rank has died"):  # as it is waited for
            waits._work_wait(broken)(object())
        dist.all_reduce(torch.ones(1))

    def broken(work: object) -> None:
        raise RuntimeError("the other rank has died")

    measured(clock, waits, work)
    assert waits.count == 2
    waits.close()


def test_a_group_of_our_own_and_a_group_of_one_say_nothing_of_whom(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        ours, single = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][rank]
        clock = HostTimes()
        waits = Waits(clock, ours)

        def step() -> None:
            dist.all_reduce(torch.ones(1), group=ours)
            dist.all_reduce(torch.ones(1), group=single)

        met = measured(clock, waits, step)
        waits.close()
        return [met, waits.count]

    assert together(tmp_path, 2, work) == [[{}, 2]] * 2


def test_a_torch_without_functional_collectives_has_the_other_waits(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_module, "functional_collectives", lambda: None)
    monkeypatch.setattr(waits_module, "COLLECTIVES", ("allreduce", "not_there"))
    clock = HostTimes()
    waits = Waits(clock)
    measured(clock, waits, lambda: dist.all_reduce(torch.ones(1)))
    assert waits.count == 1
    waits.close()


def test_a_call_may_name_its_arguments_as_before(alone: None) -> None:
    clock, numbers = HostTimes(), torch.ones(2)
    waits = Waits(clock)
    measured(clock, waits, lambda: functional.wait_tensor(tensor=numbers))
    assert waits.count == 1
    waits.close()


def test_no_group_and_no_work_lives_longer(alone: None) -> None:
    clock = HostTimes()
    waits = Waits(clock)
    group: Any = dist.new_group([0])
    seen = weakref.ref(group)
    pending: list[Any] = []

    def step() -> None:
        for _ in range(3):
            pending.append(dist.all_reduce(torch.ones(1), group=group, async_op=True))

    measured(clock, waits, step)
    works = [weakref.ref(work) for work in pending]
    for work in pending:
        work.wait()
    pending.clear()
    del work
    dist.destroy_process_group(group)
    group = None
    gc.collect()
    assert seen() is None
    assert [one() for one in works] == [None] * 3
    waits.close()


def test_works_that_nobody_waits_for_are_forgotten(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_module, "MOST_OPEN", 4)
    clock = HostTimes()
    waits = Waits(clock)
    kept: list[Any] = []
    for _ in range(6):
        measured(
            clock,
            waits,
            lambda: kept.append([dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]),
        )
    assert len(waits._works) <= 4 + 3
    waits.close()


@pytest.mark.drill
def test_compiled_code_has_no_part_of_it(alone: None) -> None:
    """A graph is the same while waits are timed, and its results are."""
    group = dist.group.WORLD
    assert group is not None

    def reduced(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", group) + 1

    clock = HostTimes()
    waits = Waits(clock)
    compiled = torch.compile(reduced, backend="aot_eager", fullgraph=True)
    found: list[torch.Tensor] = []
    measured(clock, waits, lambda: found.append(compiled(torch.ones(3))))
    assert torch.equal(found[0], torch.full((3,), 3.0))
    waits.close()
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))


def test_a_group_has_one_name_on_all_its_ranks_and_a_pair_another() -> None:
    assert group_key([2, 0, 1]) == group_key([0, 1, 2]) == "0,1,2"
    assert pair_key(3, 1) == pair_key(1, 3) == "1-3"
    large = [
        group_key(range(0, 800, 8)),
        group_key(range(1, 801, 8)),
        group_key([*range(0, 784, 8), 784, 792]),
    ]
    assert large[0] == large[2] != large[1]
    assert large[0].startswith("0..792 (100) #")
    assert all("-" not in name and len(name) < 48 for name in large)
