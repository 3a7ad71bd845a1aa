"""A run inside a restartable function, which is left at any point and called again in the same processes."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.account.incidents import incidents_of
from holdfast.base.scope import RestartRequested, Scope, entered
from holdfast.base.torch_internals import collective_timeout
from holdfast.journal.events import Account, FunctionRestarted, LeaseClaimed, RestartFaulted, RestartPlanned
from holdfast.journal.reader import read_journal
from holdfast.observe.status import status_of
from holdfast.policy.evidence import FaultKind
from holdfast.record.attempts import ACCOUNT, ends_of
from holdfast.record.directory import ControlDirectory, read_record
from holdfast.record.lease import claim
from holdfast.restart.conductor import Denied, Granted, Restart
from holdfast.train.halting import Halting
from kit.harness import wait_until
from kit.leftovers import grown, held
from kit.nodes.local_tier import memory
from kit.ranks.restarting import Members, members
from kit.runs import control_of, events_in
from kit.tiny import build, checkpoints

UNTIL = 20
LIMIT = 60.0
SETTINGS: dict[str, Any] = {"checkpoint_interval": 4, "control_lease_ttl": 20.0}

Hook = Callable[[Scope, holdfast.Run, int], None]
"""(scope, run, step), in the middle of every step."""


def counting(place: Path, settings: dict[str, Any]) -> Callable[[], int]:
    """A function that fails at step 10 the first time; returns where it began the second time."""

    def function() -> int:
        scope = holdfast.restart_scope()
        assert scope is not None
        model, optimizer, schedule, loader = build()
        run = holdfast.Run(run_dir=place / "run", **{**SETTINGS, **settings})
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        begun = -1
        for step, _ in run.steps(loader, until=12):
            begun = step - 1 if begun < 0 else begun
            if scope.iteration == 0 and step == 10:
                raise ValueError("a fault")
        return begun

    return function


def granted(restart: Restart) -> Granted | Denied:
    """As often as any test here needs."""
    return Granted() if restart.iteration < 60 else Denied(reason="a test that fails every time")


def train(place: Path, hook: Hook | None = None, *, until: int = UNTIL, **settings: Any) -> str:
    """Each step's loss and samples go to `losses<rank>`; the parameters are returned, exactly."""
    scope = holdfast.restart_scope()
    assert scope is not None
    model, optimizer, schedule, loader = build()
    torch.manual_seed(7 + scope.rank)
    run = holdfast.Run(run_dir=place / "run", **{**SETTINGS, **settings})
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    with (place / f"losses{scope.rank}").open("a", buffering=1) as log:
        for step, (ids, x) in run.steps(loader, until=until):
            loss = (model(x + 0.01 * torch.randn_like(x)) - x).square().mean() + random.random() * 1e-3
            loss.backward()
            if hook is not None:
                hook(scope, run, step)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.record(loss=loss, samples=ids)
            log.write(f"{step} {loss.item().hex()} {ids.tolist()}\n")
    return str([value.numpy().tobytes().hex() for value in model.state_dict().values()])


def losses(place: Path, rank: int) -> dict[int, str]:
    """By step; one that was done twice must have been the same."""
    found: dict[int, str] = {}
    for line in (place / f"losses{rank}").read_text().splitlines():
        step, rest = line.split(" ", 1)
        assert found.setdefault(int(step), rest) == rest, f"step {step} was done twice, differently"
    return found


def outcome(job: Members, world: int) -> list[tuple[dict[int, str], Any]]:
    return [(losses(job.place, rank), job.returned(rank)) for rank in range(world)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[tuple[dict[int, str], Any]]]:
    """By world size: what every rank does if nothing interrupts it."""
    found = {}
    for world in (1, 2):
        place = tmp_path_factory.mktemp(f"undisturbed{world}")
        with members(place, world, function=lambda place=place: train(place)) as job:
            assert job.wait() == [0] * world, job.errors()
            found[world] = outcome(job, world)
    return found


class Interrupted:
    """A training that is interrupted on all members, so many times in a row, at random moments."""

    def __init__(self, place: Path, times: int, seed: int, longest: float, **settings: Any) -> None:
        self._place, self._times, self._settings = place, times, settings
        drawn = random.Random(seed)
        self._moments = [drawn.uniform(0.0, longest) for _ in range(times)]
        self._before: dict[str, int] = {}

    def __call__(self) -> str:
        scope = holdfast.restart_scope()
        assert scope is not None
        if scope.iteration == 2:  # what torch keeps for good is there by then
            self._before = held()
        elif scope.iteration == self._times:
            more = grown(self._before, 3.0)
            (self._place / f"grown{scope.member}").write_text(json.dumps(more))
        timer = None
        if scope.iteration < self._times and scope.rank == scope.iteration % scope.world_size:
            assert scope.request is not None
            timer = threading.Timer(self._moments[scope.iteration], scope.request, ("a test",))
            timer.start()
        try:
            return train(self._place, self._hold, **self._settings)
        finally:
            if timer is not None:
                timer.cancel()

    def _hold(self, scope: Scope, run: holdfast.Run, step: int) -> None:
        """None of these iterations comes to the end of the training before its interruption comes."""
        del run
        if scope.iteration < self._times and step > min(2 * (scope.iteration + 1), UNTIL - 2):
            time.sleep(LIMIT)
            pytest.fail("the interruption did not come")


def check_interrupted(
    place: Path, expected: list[tuple[dict[int, str], Any]], times: int, **settings: Any
) -> None:
    world = len(expected)
    function = Interrupted(place, times, 100 * world + times, 0.4, **settings)
    with members(place, world, function=function, authorise=granted) as job:
        assert job.wait(300.0) == [0] * world, job.errors()
        assert outcome(job, world) == expected
        for rank in range(world):
            assert json.loads((place / f"grown{rank}").read_text()) == {}, job.errors()


@pytest.mark.parametrize(
    ("world", "background"), [pytest.param(1, True, marks=pytest.mark.drill), (2, False), (2, True)]
)
def test_interrupted_at_random_it_trains_as_if_nothing_had_been_and_nothing_is_left_over(
    tmp_path: Path, undisturbed: dict[int, list[tuple[dict[int, str], Any]]], world: int, background: bool
) -> None:
    check_interrupted(tmp_path, undisturbed[world], 8, checkpoint_async_save=background)


@pytest.mark.drill
@pytest.mark.parametrize(("world", "background"), [(1, False), (2, True)])
def test_interrupted_50_times(
    tmp_path: Path, undisturbed: dict[int, list[tuple[dict[int, str], Any]]], world: int, background: bool
) -> None:
    check_interrupted(tmp_path, undisturbed[world], 50, checkpoint_async_save=background)


@pytest.mark.drill
@pytest.mark.parametrize("where", ["before", "after"])
def test_the_first_step_may_stand_still_for_longer_and_so_may_who_waits_for_it(
    tmp_path: Path, where: str
) -> None:
    """One rank builds something in its first step, before or after what all do there together.

    Once all have done a step, soft_timeout counts: a rank that stands still then makes all restart, and the
    first step of that iteration is a first step again.
    """
    slow, soft = 3.0, 2.0
    ordinary = pytest.approx(soft + 1.0)

    def function() -> float:
        scope = holdfast.restart_scope()
        assert scope is not None
        model, optimizer, schedule, loader = build()
        if scope.iteration == 1 and scope.rank == 1 and where == "before":
            time.sleep(slow)  # that there will be a run is known from the first iteration
        run = holdfast.Run(run_dir=tmp_path / "run", **SETTINGS)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        for step, _ in run.steps(loader, until=9):
            builds = scope.iteration == 0 and step == 1 and scope.rank == 1
            if builds and where == "before":
                time.sleep(slow)
            dist.all_reduce(torch.ones(1))
            if builds and where == "after":
                time.sleep(slow)
            if step == 2:
                wait_until(lambda: not scope.allowance, LIMIT, "all know that all have done a step")
                wait_until(lambda: collective_timeout() == ordinary, LIMIT, "so does the process group")
            if scope.iteration == 0 and step == 6 and scope.rank == 1:
                (tmp_path / "still").write_text(str(time.time()))
                time.sleep(LIMIT)
        return collective_timeout() or 0.0

    limits: dict[str, Any] = {"inprocess_soft_timeout": soft, "inprocess_hard_timeout": soft + 4.0}
    with members(tmp_path, 2, function=function, **limits) as job:
        assert job.wait() == [0, 0], job.errors()
        assert job.keeper.gone() == {}
        plan = job.conductor.plan
    assert plan is not None
    assert plan.iteration == 1, plan.faults
    assert plan.faults[0].kind is FaultKind.SOFT_TIMEOUT
    found = plan.faults[0].at - float((tmp_path / "still").read_text())
    assert soft - 1.5 < found < 20.0, "then the limit is that of every step"


def test_a_run_that_is_left_open_is_closed_as_failed_and_its_snapshot_is_committed(tmp_path: Path) -> None:
    def function() -> int:
        scope = holdfast.restart_scope()
        assert scope is not None
        model, optimizer, schedule, loader = build()
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_async_save=True, **SETTINGS)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        feed = run.feed(loader)
        begun = run.start()
        if scope.iteration == 0:
            for _ in range(3):
                run.begin_step()
                feed.next()
                run.end_step()
            run.save(wait=False)
            raise ValueError("nothing here closes the run")
        assert scope.committed == 3
        return begun

    with members(tmp_path, 1, function=function, authorise=granted) as job:
        assert job.wait() == [0], job.errors()
        assert job.returned(0) == 3
    ends = ends_of(control_of(tmp_path))
    assert [end.outcome for _, end in ends if end is not None] == ["failed", "failed"]
    assert len({record.launch for record, _ in ends}) == 1


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.drill), 1])
def test_a_reserve_goes_on_from_local_copies_alone_where_a_killed_rank_was(
    tmp_path: Path, undisturbed: dict[int, list[tuple[dict[int, str], Any]]], lost: int
) -> None:
    begun = tmp_path / "begun"

    def hook(scope: Scope, run: holdfast.Run, step: int) -> None:
        if scope.iteration == 0 and scope.rank == lost and step == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        if scope.iteration == 1 and not begun.exists():
            places = run._session.places
            assert places is not None
            assert places.places.usable()[0].port, "somebody serves this node's copies to others"
            begun.write_text(str(step))

    with memory() as place:
        settings = {
            "checkpoint_async_save": True,
            "checkpoint_interval": 1000,
            "checkpoint_save_at_end": False,
            "checkpoint_non_persistent_ckpt_type": "local",
            "checkpoint_non_persistent_save_interval": 2,
            "checkpoint_non_persistent_local_ckpt_dir": str(place),
        }
        with members(
            tmp_path,
            3,
            function=lambda: train(tmp_path, hook, **settings),
            authorise=granted,
            inprocess_active_world_size=2,
        ) as job:
            codes = job.wait()
            assert codes == [-signal.SIGKILL if member == lost else 0 for member in range(3)], job.errors()
            order = [2 if rank == lost else rank for rank in range(2)]
            told = [(losses(tmp_path, rank), job.returned(member)) for rank, member in enumerate(order)]
            assert told == undisturbed[2]
    assert int(begun.read_text()) > 8, "it went on from what was in memory"
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    claims = events_in(control_of(tmp_path).path)
    evidence = [body.evidence for body in claims if isinstance(body, LeaseClaimed)]
    assert "epoch 1" in evidence[1]


def test_a_wish_for_a_checkpoint_holds_for_the_first_iteration_only(tmp_path: Path) -> None:
    with members(tmp_path, 1, function=lambda: train(tmp_path, until=8)) as job:
        assert job.wait() == [0], job.errors()
    four = next(path for path in checkpoints(tmp_path / "run") if "00000004" in path.name)
    wish = {"checkpoint_resume_from": str(four)}
    with members(tmp_path, 1, function=counting(tmp_path, wish), authorise=granted) as job:
        assert job.wait() == [0], job.errors()
        assert job.returned(0) == 8, "not the one that was wished for, which would cost steps at every fault"


def test_the_journal_tells_of_the_restart(tmp_path: Path) -> None:
    """Without the launcher the next run does: what befell whom, who goes on, and how long it took."""
    with members(tmp_path, 1, function=counting(tmp_path, {})) as job:
        assert job.wait() == [0], job.errors()
    lines = events_in(tmp_path / "run")
    (fault,) = [one for one in lines if isinstance(one, RestartFaulted)]
    assert (fault.kind, fault.rank, fault.ended, fault.step) == ("exception", 0, 1, 9)
    assert fault.detail == "ValueError: a fault"
    (plan,) = [one for one in lines if isinstance(one, RestartPlanned)]
    assert (plan.iteration, plan.world_size, plan.ended) == (1, 1, 1)
    (again,) = [one for one in lines if isinstance(one, FunctionRestarted)]
    assert (again.iteration, again.rank) == (1, 0)
    assert 0 < again.seconds < LIMIT


def test_a_lease_passes_on_within_a_job_and_not_to_another(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    held_elsewhere = claim(control, "this job", 30.0)
    path = control.lease / "00000001.claim"
    holder = msgspec.structs.replace(held_elsewhere.holder, host="elsewhere")
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(held_elsewhere, holder=holder)))

    def start(job: str) -> float:
        model, optimizer, _, _ = build()
        begun = time.monotonic()
        scope = Scope(iteration=1, member=0, rank=0, world_size=1, job=job)
        threading.Timer(1.5, scope.ask, ("it waits",)).start()
        try:
            with entered(scope):
                run = holdfast.Run(run_dir=tmp_path / "run", control_lease_ttl=30.0)
                run.track(model=model, optimizer=optimizer)
                run.start()
        finally:
            for close in scope.closers():
                close()
        return time.monotonic() - begun

    with pytest.raises(RestartRequested):
        start("another job")
    assert start("this job") < 1.5
    claims = events_in(control.path)
    assert [body.evidence for body in claims if isinstance(body, LeaseClaimed)] == [
        "epoch 1 belongs to the same launch"
    ]


def test_a_request_to_stop_that_was_not_followed_is_not_lost(tmp_path: Path) -> None:
    scope = Scope(iteration=0, member=0, rank=0, world_size=1, job="job")
    before = sys.excepthook
    with entered(scope):
        run = holdfast.Run(run_dir=tmp_path / "run", **SETTINGS)
        run.track(model=build()[0])
        run.start()
        assert sys.excepthook != before
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: run._halting.asked_by, 10, "the signal is seen")
        for close in scope.closers():
            close()
    assert scope.stop == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert sys.excepthook == before
    assert Halting._newest is None, "it would keep the model alive"
    run._halting.deadline.disarm()


def failing(place: Path, iterations: int, *, with_run: bool = True) -> Callable[[], None]:
    """A function that fails on rank 1 in so many of its calls: in step 10, or before there is a run."""

    def fail(scope: Scope) -> None:
        if scope.rank == 1 and scope.iteration < iterations:
            raise ValueError("a fault")
        dist.all_reduce(torch.ones(1))

    def function() -> None:
        scope = holdfast.restart_scope()
        assert scope is not None
        if not with_run:
            fail(scope)
            return
        model, optimizer, schedule, loader = build()
        run = holdfast.Run(run_dir=place / "run", **SETTINGS)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        for step, _ in run.steps(loader, until=12):
            if step == 10:
                fail(scope)

    return function


def accounts_of(place: Path) -> list[Account]:
    lines = read_journal(control_of(place).journal)
    return [line.body for line in lines if isinstance(line.body, Account)]


def test_without_a_launcher_a_restart_is_told_by_the_five_answers(tmp_path: Path) -> None:
    with members(tmp_path, 2, function=failing(tmp_path, 1)) as job:
        assert job.wait() == [0, 0], job.errors()
        said = job.errors()
    control, (account,) = control_of(tmp_path), accounts_of(tmp_path)
    assert (account.attempt, account.who, account.cause) == (1, "rank 1 on here", "job")
    assert account.what == "failed in step 10 with ValueError: a fault"
    assert account.why[0].startswith("raised at ")
    assert account.why[0].endswith(": this points to the training script")
    assert account.done == (
        "calling the function again in the same processes, from step 8: 1 step to redo (restart 1 of 3)"
    )
    assert account.next.startswith("nothing to do, unless it comes back: mend ")
    assert (account.step, account.saved, account.exit_code) == (9, 8, 0)
    assert read_record(control.attempt(1) / ACCOUNT, Account) == account
    (incident,) = incidents_of(read_journal(control.journal))
    assert (incident.account, incident.steps_lost, incident.open) == (account, 1, False)
    shown = status_of(control).incident
    assert shown is not None
    assert "calling the function again" in shown.text
    assert said.count("rank 1 on here failed in step 10 with ValueError: a fault") == 1


@pytest.mark.parametrize("with_run", [True, False])
def test_without_a_launcher_the_end_is_told_once(tmp_path: Path, with_run: bool) -> None:
    """The same error again: nobody calls the function for a third time, and the account says why."""
    with members(tmp_path, 2, function=failing(tmp_path, 9, with_run=with_run)) as job:
        assert 0 not in job.wait(), job.errors()
        said = job.errors()
    assert said.count("done: stopped: ") == 1, said
    if not with_run:
        assert not (tmp_path / "run").exists(), "there is no journal to write it into"
        return
    told = accounts_of(tmp_path)
    assert [one.attempt for one in told] == [1, 2]
    assert told[1].done == "stopped: the same error repeated without progress"
    assert (told[1].exit_code, told[1].saved, told[1].step) == (1, 8, 9)
    assert "attempt 1 ended with the same error at the same step" in told[1].why
    assert read_record(control_of(tmp_path).attempt(2) / ACCOUNT, Account) == told[1]


def test_without_a_launcher_the_loss_of_a_rank_that_nobody_can_replace_is_told(tmp_path: Path) -> None:
    def function() -> None:
        scope = holdfast.restart_scope()
        assert scope is not None
        model, optimizer, schedule, loader = build()
        run = holdfast.Run(run_dir=tmp_path / "run", **SETTINGS)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        for step, _ in run.steps(loader, until=12):
            if step == 10 and scope.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))

    with members(tmp_path, 2, function=function) as job:
        assert 0 not in job.wait(), job.errors()
    (account,) = accounts_of(tmp_path)
    assert account.who == "rank 1 on here"
    assert account.what.startswith("was killed by SIGKILL")
    assert account.done == "ended these processes: 1 ranks are left that can train, and 2 are needed"
    assert account.exit_code == 33
    assert "the launcher restarts" in account.next
