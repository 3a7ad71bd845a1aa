"""A function that starts again in the same processes: scenarios 15 and 16, and faults of the restarts."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.base.scope import RestartRequested, Scope
from holdfast.errors import ExitCode
from holdfast.policy.evidence import FaultKind
from holdfast.restart.member import Iteration, each, init_group
from holdfast.restart.messages import OverKind
from kit.harness import wait_until
from kit.ranks.restarting import LIMIT, QUICK, Hook, expected, members

RESTARTS = 50


def at(iteration: int, rank: int, step: int, do: Hook) -> Hook:
    """Do something once, at this point."""

    def hook(scope: Scope, now: int) -> None:
        if (scope.iteration, scope.rank, now) == (iteration, rank, step):
            do(scope, now)

    return hook


def fail(scope: Scope, step: int) -> None:
    raise ValueError(f"a fault of rank {scope.rank} in step {step}")


def sleep(scope: Scope, step: int) -> None:
    del scope, step
    time.sleep(1000)


def hold_the_interpreter(scope: Scope, step: int) -> None:
    del scope, step
    ctypes.PyDLL(None).sleep(1000)  # a PyDLL keeps the interpreter's lock: no thread of this process runs


def stop_itself(scope: Scope, step: int) -> None:
    del scope, step
    os.kill(os.getpid(), signal.SIGSTOP)


def die(scope: Scope, step: int) -> None:
    del scope, step
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_exception_on_one_rank_restarts_all_in_the_same_processes(tmp_path: Path) -> None:
    """Scenario 15."""
    with members(tmp_path, 3, at(0, 1, 4, fail)) as job:
        assert job.wait() == [0, 0, 0], job.errors()
        for member in range(3):
            assert job.returned(member) == expected(3)
            assert job.iterations(member) == [0, 1]
        assert job.keeper.gone() == {}
        plan = job.conductor.plan
        assert plan is not None
        assert plan.order == [0, 1, 2]
        assert [fault.kind for fault in plan.faults if fault.member == 1] == [FaultKind.EXCEPTION]
        assert plan.faults[0].detail == "ValueError: a fault of rank 1 in step 4"
        assert "rank 1 on here raised: ValueError: a fault of rank 1 in step 4" in job.errors()


def test_a_killed_rank_is_replaced_by_a_reserve(tmp_path: Path) -> None:
    with members(tmp_path, 3, at(0, 1, 4, die), inprocess_active_world_size=2) as job:
        assert job.wait() == [0, -signal.SIGKILL, 0], job.errors()
        assert job.returned(0) == job.returned(2) == expected(2)
        assert {line[1] for line in job.said(2)} == {"1"}, "the reserve takes the lost rank's place"


def test_a_rank_that_sleeps_is_freed_and_stays(tmp_path: Path) -> None:
    """Scenario 16, first half: a hang with the interpreter's lock released ends in a restart only."""

    def work_and_sleep(scope: Scope, step: int) -> None:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            pass  # so that the other one, which waits for it, is the first to have stood still for too long
        sleep(scope, step)

    with members(tmp_path, 2, at(0, 1, 4, work_and_sleep), inprocess_soft_timeout=3.0) as job:
        assert job.wait() == [0, 0], job.errors()
        assert job.returned(1) == expected(2)
        plan = job.conductor.plan
        assert plan is not None
        assert plan.faults[0].kind is FaultKind.SOFT_TIMEOUT
        assert re.search(
            r"rank 1 has stood still for \d\.\d s:\n  .*test_restartable\.py:\d+ in sleep\n", job.errors()
        )


def test_what_the_ranks_say_may_hang_without_keeping_any_of_them(tmp_path: Path) -> None:
    """Nobody reads what they say, and the one that waits and the one that sleeps are freed all the same."""

    class Stuck(logging.Handler):
        def createLock(self) -> None:  # noqa: N802 - the name is logging's
            self.lock = None  # what else is said gets through

        def emit(self, record: logging.LogRecord) -> None:
            if "has stood still" in record.getMessage():
                threading.Event().wait(LIMIT)

    def hook(scope: Scope, step: int) -> None:
        if (scope.iteration, step) == (0, 4):
            logging.getLogger("holdfast").addHandler(Stuck())
            if scope.rank == 1:
                sleep(scope, step)

    with members(tmp_path, 2, hook, inprocess_soft_timeout=2.0, inprocess_hard_timeout=6.0) as job:
        assert job.wait() == [0, 0], job.errors()
        assert job.keeper.gone() == {}


def test_a_collective_is_given_up_only_after_who_stands_still_is_told_of(tmp_path: Path) -> None:
    def note(iteration: Iteration) -> None:
        (tmp_path / "timeout").write_text(str(iteration.timeout))

    with members(tmp_path, 1, stages={"initialize": each(note, init_group)}) as job:
        assert job.wait() == [0], job.errors()
    soft, hard = float(str(QUICK["inprocess_soft_timeout"])), float(str(QUICK["inprocess_hard_timeout"]))
    assert soft < float((tmp_path / "timeout").read_text()) < hard


@pytest.mark.parametrize("how", [stop_itself, hold_the_interpreter])
def test_a_rank_that_cannot_leave_is_ended_and_a_reserve_promoted(tmp_path: Path, how: Hook) -> None:
    """Scenario 16, second half."""
    limits = {"inprocess_soft_timeout": 2.0, "inprocess_hard_timeout": 4.0}
    with members(tmp_path, 3, at(0, 0, 3, how), inprocess_active_world_size=2, **limits) as job:
        assert job.wait() == [-signal.SIGKILL, 0, 0], job.errors()
        assert job.returned(1) == job.returned(2) == expected(2)
        assert job.keeper.gone()[0].kind is FaultKind.HARD_TIMEOUT
        assert job.iterations(1) == [0, 1]


def test_the_same_error_again_and_again_ends_with_that_error(tmp_path: Path) -> None:
    def always(scope: Scope, step: int) -> None:
        if scope.rank == 1 and step == 2:
            fail(scope, step)

    with members(tmp_path, 2, always) as job:
        codes = job.wait()
        assert codes == [int(ExitCode.HANDED_OVER), 70], job.errors()
        assert "ValueError: a fault of rank 1 in step 2" in job.errors()
        over = job.conductor.over
        assert over is not None
        assert over.kind is OverKind.HANDED_OVER
        assert job.iterations(0) == [0, 1], "an error that says what it is is not tried a third time"
        assert not (tmp_path / "returned0").exists()


def test_without_a_reserve_the_rest_hands_over(tmp_path: Path) -> None:
    with members(tmp_path, 2, at(0, 1, 4, die)) as job:
        assert job.wait() == [int(ExitCode.HANDED_OVER), -signal.SIGKILL], job.errors()
        assert "1 ranks are left that can train, and 2 are needed" in job.errors()


def test_the_world_shrinks_where_that_is_allowed(tmp_path: Path) -> None:
    with members(tmp_path, 3, at(0, 0, 4, die), inprocess_min_world_size=2) as job:
        assert job.wait() == [-signal.SIGKILL, 0, 0], job.errors()
        assert job.returned(1) == expected(2)


def test_a_request_of_the_function_restarts_all(tmp_path: Path) -> None:
    def ask(scope: Scope, step: int) -> None:
        assert scope.request is not None
        scope.request(f"step {step} looked odd")

    with members(tmp_path, 2, at(0, 0, 4, ask)) as job:
        assert job.wait() == [0, 0], job.errors()
        plan = job.conductor.plan
        assert plan is not None
        assert plan.faults[0].kind is FaultKind.ASKED
        assert plan.faults[0].detail == "step 4 looked odd"


def test_code_that_eats_the_interruption_gets_another_one(tmp_path: Path) -> None:
    def stubborn(scope: Scope, step: int) -> None:
        if scope.iteration == 0 and scope.rank == 1 and step == 3:
            fail(scope, step)
        if scope.iteration == 0 and scope.rank == 0 and step == 3:
            try:
                time.sleep(1000)
            except BaseException as eaten:  # noqa: BLE001 - what is tried here
                Path(tmp_path / "eaten").write_text(type(eaten).__name__)
            time.sleep(1000)

    with members(tmp_path, 2, stubborn) as job:
        assert job.wait() == [0, 0], job.errors()
        assert (tmp_path / "eaten").read_text() == RestartRequested.__name__


def test_a_critical_section_is_never_interrupted(tmp_path: Path) -> None:
    def guarded(scope: Scope, step: int) -> None:
        if scope.iteration == 0 and scope.rank == 1 and step == 3:
            wait_until((tmp_path / "inside").exists, 30, "it is inside")
            fail(scope, step)
        if scope.iteration == 0 and scope.rank == 0 and step == 3:
            with scope.critical(at_most=20):
                (tmp_path / "inside").touch()
                wait_until(lambda: scope.asked, 30, "the end is known")
                until = time.monotonic() + 0.7
                while time.monotonic() < until:
                    pass
                (tmp_path / "whole").touch()
            (tmp_path / "beyond").touch()

    with members(tmp_path, 2, guarded) as job:
        assert job.wait() == [0, 0], job.errors()
        assert (tmp_path / "whole").exists()
        assert not (tmp_path / "beyond").exists()


def test_an_import_is_never_interrupted(tmp_path: Path) -> None:
    """A module that was half imported would stay so in every later call."""
    (tmp_path / "slow_to_import.py").write_text(
        "import pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'importing')!r}).touch()\n"
        "until = time.monotonic() + 1.5\n"
        "while time.monotonic() < until: pass\n"
        "whole = True\n"
    )

    def importing(scope: Scope, step: int) -> None:
        if scope.iteration == 0 and scope.rank == 1 and step == 3:
            wait_until((tmp_path / "importing").exists, 30, "the other one imports")
            fail(scope, step)
        if scope.rank == 0 and step == 3:
            sys.path.insert(0, str(tmp_path))
            import slow_to_import  # type: ignore[import-not-found]

            assert slow_to_import.whole
            assert scope.iteration == 1, "the interruption comes after the import"

    with members(tmp_path, 2, importing) as job:
        assert job.wait() == [0, 0], job.errors()


def test_who_has_returned_starts_again_with_the_others(tmp_path: Path) -> None:
    def function() -> float:
        scope = holdfast.restart_scope()
        assert scope is not None
        value = torch.ones(1)
        dist.all_reduce(value)
        if scope.rank == 0 and scope.iteration == 0:
            raise ValueError("after the other one was done")
        (tmp_path / f"done{scope.iteration}-{scope.rank}").touch()
        return float(value)

    with members(tmp_path, 2, function=function) as job:
        assert job.wait() == [0, 0], job.errors()
        assert job.returned(0) == job.returned(1) == 2.0
        assert (tmp_path / "done1-1").exists()


@pytest.mark.parametrize("stage", ["initialize", "abort", "finalize", "health_check"])
def test_a_fault_in_a_stage_of_the_restart_ends_well(tmp_path: Path, stage: str) -> None:
    """Rank 1 fails, and again while it restarts: a reserve takes its place, or it restarts once more."""

    def bad(iteration: Iteration) -> None:
        if iteration.member == 1 and iteration.number == (1 if stage == "initialize" else 0):
            raise OSError(f"a fault in {stage}")

    stages = {stage: each(bad, init_group) if stage == "initialize" else bad}
    with members(tmp_path, 3, at(0, 1, 4, fail), inprocess_active_world_size=2, stages=stages) as job:
        codes = job.wait()
        finishers = [member for member in range(3) if (tmp_path / f"returned{member}").exists()]
        assert codes[0] == codes[2] == 0, job.errors()
        assert all(job.returned(member) in (expected(2), None) for member in finishers)
        assert codes[1] == {"initialize": 0, "abort": 0}.get(stage, 70), job.errors()


def test_two_ranks_at_once(tmp_path: Path) -> None:
    def both(scope: Scope, step: int) -> None:
        if scope.iteration == 0 and step == 4 and scope.rank in (0, 2):
            die(scope, step)

    with members(tmp_path, 5, both, inprocess_active_world_size=3) as job:
        assert job.wait() == [-signal.SIGKILL, 0, -signal.SIGKILL, 0, 0], job.errors()
        assert job.returned(1) == job.returned(3) == job.returned(4) == expected(3)


def test_a_reserve_that_dies_while_it_is_promoted(tmp_path: Path) -> None:
    def dies(iteration: Iteration) -> None:
        if iteration.member == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    stages = {"initialize": each(dies, init_group)}
    limits = {"inprocess_soft_timeout": 3.0, "inprocess_hard_timeout": 6.0}
    with members(
        tmp_path, 4, at(0, 1, 4, die), inprocess_active_world_size=2, stages=stages, **limits
    ) as job:
        assert job.wait() == [0, -signal.SIGKILL, -signal.SIGKILL, 0], job.errors()
        assert job.returned(0) == job.returned(3) == expected(2)


def test_a_stop_signal_during_a_restart_stops_all(tmp_path: Path) -> None:
    def signalled(iteration: Iteration) -> None:
        if iteration.member == 0 and iteration.number == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    with members(tmp_path, 2, at(0, 1, 4, fail), stages={"finalize": signalled}) as job:
        assert job.wait() == [int(ExitCode.STOPPED)] * 2, job.errors()
        assert job.iterations(0) == [0]


def test_a_function_that_exits_on_purpose_is_done(tmp_path: Path) -> None:
    def leave(scope: Scope, step: int) -> None:
        if step == 3:
            raise SystemExit(0)

    with members(tmp_path, 3, leave, inprocess_active_world_size=2) as job:
        assert job.wait() == [0, 0, 0], job.errors()
        assert job.iterations(0) == [0]


def test_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    """Fifty restarts: same process, as many threads, descriptors and groups as after the first few."""

    def function() -> list[int]:
        scope = holdfast.restart_scope()
        assert scope is not None
        value = torch.ones(1)
        dist.all_reduce(value)
        dist.new_group()
        counts = [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), os.getpid()]
        with (tmp_path / f"counts{scope.member}").open("a") as file:
            file.write(" ".join(map(str, [scope.iteration, *counts])) + "\n")
        scope.committed = scope.iteration + 1  # progress: the budget is refunded
        dist.all_reduce(value)  # so that both have counted
        if scope.iteration < RESTARTS and scope.rank == scope.iteration % 2:
            raise ValueError(f"fault {scope.iteration}")
        dist.all_reduce(value)
        return counts

    with members(tmp_path, 2, function=function) as job:
        assert job.wait() == [0, 0], job.errors()
        for member in range(2):
            with (tmp_path / f"counts{member}").open() as file:
                counts = [list(map(int, line.split())) for line in file]
            assert [row[0] for row in counts] == list(range(RESTARTS + 1))
            assert len({row[3] for row in counts}) == 1, "one process all along"
            for what in (1, 2):  # threads, descriptors
                early, late = counts[5:15], counts[-10:]
                # What is being closed at the moment varies by a few; what stays behind would add up.
                usual = statistics.median(row[what] for row in late)
                assert usual <= max(row[what] for row in early), counts
