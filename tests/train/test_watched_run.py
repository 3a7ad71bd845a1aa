"""Run under a monitor: the loop's own calls are the beats, in both shapes; misuse; simulated faults."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import holdfast
from holdfast.base.scope import Scope, entered
from holdfast.config.sources import load
from holdfast.errors import ConfigError
from holdfast.journal.events import Warned
from holdfast.journal.reader import read_journal
from holdfast.record.attempts import begin_attempt
from holdfast.record.directory import ControlDirectory
from holdfast.record.launches import LaunchInfo
from holdfast.record.lease import Fence, claim
from holdfast.record.limits import UNPROTECTED
from holdfast.train import testimony
from holdfast.train.testimony import choose
from kit.harness import await_child, wait_until
from kit.leftovers import grown, held
from kit.runs import events_in
from kit.tiny import around_scheduled_save, build, checkpoints, train
from kit.watching import FAR, watching

LONG = f"setup:{FAR},step:{FAR},checkpointing:{FAR}"
UNHURRIED = {
    "monitor_rank_section_timeouts": LONG,
    "monitor_rank_out_of_section_timeout": FAR,
    "monitor_rank_heartbeat_timeout": FAR,
}


def launch(run_dir: Path, monitor: Path | str, launch_id: str = "one") -> LaunchInfo:
    """What an agent does before it starts a worker: lease, attempt, hand-over."""
    control, _ = ControlDirectory.open_or_create(run_dir)
    held = claim(control, launch_id, 30.0)
    record = begin_attempt(control, Fence(control, held.epoch), launch_id, 1)
    return LaunchInfo(
        run_dir=str(control.path), run_id=control.run_id, launch=launch_id, attempt=record.number,
        epoch=held.epoch, node="here", monitor=str(monitor),
    )  # fmt: skip


def started(info: LaunchInfo, work: Callable[[], object]) -> int:
    """A worker, as a fork of this process: its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.environ.update(info.to_environment())
        code = forked_main(work)
        os._exit(code)
    return pid


def forked_main(work: Callable[[], object]) -> int:
    try:
        work()
    except holdfast.HoldfastError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    except BaseException as error:  # noqa: BLE001 - the child must end here, whatever happened
        print(repr(error), file=sys.stderr, flush=True)
        return 70
    return 0


@contextlib.contextmanager
def killed_at_the_end(pids: dict[int, int]) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


@pytest.fixture(autouse=True, scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a first run imports is imported here, and not again in every fork."""
    train(tmp_path_factory.mktemp("warm") / "run", until=3)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# --- scenario 11, through Run


def in_setup(run_dir: Path, **settings: object) -> None:
    testimony.check_timeouts = lambda *args: None  # type: ignore[assignment] - a set-up of a second is refused
    holdfast.Run(run_dir=run_dir, **settings)
    stop()


def in_loading(run_dir: Path, **settings: object) -> None:
    run = holdfast.Run(run_dir=run_dir, **settings)
    model, *_ = build()
    run.track(model=model)
    run._session.resume = lambda *joined: stop()  # type: ignore[method-assign]
    run.start()


def in_a_step(run_dir: Path, **settings: object) -> None:
    train(run_dir, at_step=lambda step, run: stop() if step == 3 else None, **settings)


def in_a_save(run_dir: Path, **settings: object) -> None:
    @contextlib.contextmanager
    def stopped() -> Iterator[None]:
        stop()
        yield

    train(run_dir, at_step=lambda step, run: around_scheduled_save(run, stopped), **settings)


def callbacks(run_dir: Path, between: Callable[[holdfast.Run], None], **settings: object) -> None:
    """The shape of frameworks that own the loop."""
    model, optimizer, schedule, loader = build()
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, **settings)
    feed = run.feed(loader)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    run.start()
    for _batch in feed:
        run.begin_step()
        run.end_step()
        if run.step == 2:
            between(run)
    run.finish()


def between_steps(run_dir: Path, **settings: object) -> None:
    callbacks(run_dir, lambda run: stop(), **settings)


def in_a_section_of_the_user(run_dir: Path, **settings: object) -> None:
    def evaluate(run: holdfast.Run) -> None:
        with run.section("eval"):
            run.beat()
            stop()

    callbacks(run_dir, evaluate, **settings)


def failing(run_dir: Path, **settings: object) -> None:
    """An exception leaves the loop; the process then hangs instead of ending."""
    try:
        train(run_dir, at_step=lambda step, run: 1 / 0 if step == 3 else None, **settings)
    except ZeroDivisionError as error:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - its traceback is not news here
        sys.excepthook(type(error), error, error.__traceback__)
    stop()


def after_the_loop(run_dir: Path, **settings: object) -> None:
    """The run has finished; the script hangs before its process ends."""
    train(run_dir, until=3, **settings)
    stop()


def in_a_section_after_the_loop(run_dir: Path, **settings: object) -> None:
    runs: list[holdfast.Run] = []
    train(run_dir, until=3, at_step=lambda step, run: runs.append(run), **settings)
    with runs[0].section("export"):
        stop()


def left_by_break(run_dir: Path, **settings: object) -> None:
    model, optimizer, schedule, loader = build()
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, **settings)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step, _batch in run.steps(loader, until=9):
        if step == 3:
            break
    run.close()
    stop()


SECTIONS, OUT = "monitor_rank_section_timeouts", "monitor_rank_out_of_section_timeout"
EXIT = "monitor_rank_exit_timeout"
PLACES: dict[str, tuple[Callable[..., None], dict[str, object], tuple[str, str, int]]] = {
    "setup": (in_setup, {SECTIONS: f"setup:1,step:{FAR}"}, ("setup", "section", 0)),
    "loading": (in_loading, {SECTIONS: f"{LONG},loading:1"}, ("loading", "section", 0)),
    "step": (in_a_step, {SECTIONS: f"setup:{FAR},step:1"}, ("step", "section", 2)),
    "save": (in_a_save, {SECTIONS: f"setup:{FAR},checkpointing:1"}, ("checkpointing", "section", 3)),
    "between": (between_steps, {OUT: 1}, ("", "out_of_section", 2)),
    "eval": (in_a_section_of_the_user, {"monitor_rank_heartbeat_timeout": 1}, ("eval", "heartbeat", 2)),
    "failing": (failing, {OUT: 1}, ("", "out_of_section", 2)),
    "after": (after_the_loop, {EXIT: 1}, ("", "exiting", 3)),
    "export": (in_a_section_after_the_loop, {SECTIONS: f"{LONG},export:1"}, ("export", "exiting", 3)),
    "break": (left_by_break, {EXIT: 1}, ("", "exiting", 2)),
}


def test_a_rank_that_stops_anywhere_in_its_run_is_found_there(tmp_path: Path) -> None:
    """Scenario 11. The limits are the script's own; the agent knows of them only by what the ranks say."""
    pids: dict[int, int] = {}
    with watching(tmp_path) as watch, killed_at_the_end(pids):
        for rank, (name, (work, limit, _)) in enumerate(PLACES.items()):
            run_dir, settings = tmp_path / name, {**UNHURRIED, **limit}
            pids[rank] = started(launch(run_dir, watch.path), partial(work, run_dir, **settings))
        watch.begin(pids)
        wait_until(lambda: len(watch.overdue()) == len(PLACES), 60, "all hangs are found")
        found = {one.rank: (one.section, one.rule, one.step) for one in watch.overdue()}
        assert found == {rank: outcome for rank, (_, _, outcome) in enumerate(PLACES.values())}


def test_a_run_to_its_end_is_watched_and_changes_nothing(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", until=20)
    pids: dict[int, int] = {}
    outcome = tmp_path / "outcome"

    def work() -> None:
        found = train(tmp_path / "run", until=20, monitor_calc_ft_timeouts=True, **UNHURRIED)
        outcome.write_text(repr(sorted(found.losses.items())))
        threads = [thread for thread in threading.enumerate() if thread.name == "holdfast-beats"]
        assert all(thread.daemon for thread in threads), "it answers until the process ends, and keeps none"

    with watching(tmp_path) as watch, killed_at_the_end(pids):
        pids[0] = started(launch(tmp_path / "run", watch.path), work)
        watch.begin(pids)
        assert await_child(pids.pop(0), 60) == 0
        wait_until(
            lambda: (state := watch.state(0)) is not None and state.exiting, 60, "it has left its loop"
        )
        assert watch.last_steps() == {0: 20}
        assert watch.overdue() == []
        assert watch.hearing().done == {0}, "it has no more to say about a stop"
        assert watch.learns()
        sections, gaps = watch.observed()
        assert set(sections) == {"setup", "step", "checkpointing"}
        assert sections["step"].count == 19, "the first step is not counted"
        assert sections["checkpointing"].count == 7
        assert gaps.count >= 19
        assert watch.dropped() == {}
    assert outcome.read_text() == repr(sorted(plain.losses.items()))
    assert len(checkpoints(tmp_path / "run")) == 7


def test_asynchronous_saves_are_not_learned_from(tmp_path: Path) -> None:
    pids: dict[int, int] = {}
    with watching(tmp_path) as watch, killed_at_the_end(pids):
        work = partial(train, tmp_path / "run", until=6, checkpoint_async_save=True, **UNHURRIED)
        pids[0] = started(launch(tmp_path / "run", watch.path), work)
        watch.begin(pids)
        assert await_child(pids.pop(0), 60) == 0
        wait_until(
            lambda: (state := watch.state(0)) is not None and state.exiting, 60, "it has left its loop"
        )
        assert set(watch.observed()[0]) == {"setup", "step"}


# --- misuse


def test_a_setting_of_the_monitor_without_the_launcher_is_refused(tmp_path: Path) -> None:
    """Scenario 24, the launcher's part; nothing may have been created."""
    with pytest.raises(ConfigError, match=r"monitor\.calc_ft_timeouts = true \(keyword\)"):
        holdfast.Run(run_dir=tmp_path / "run", monitor_calc_ft_timeouts=True)
    assert not (tmp_path / "run").exists()


def test_a_setting_of_the_launcher_without_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch\.alert_command = \"~/page\" \(keyword\)"):
        holdfast.Run(run_dir=tmp_path / "run", launch_alert_command="~/page")
    assert not (tmp_path / "run").exists()


def test_a_setting_that_nothing_reads_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(tmp_path / "run", until=3, straggler_profiling_interval=5)
    told = "straggler.profiling_interval = 5 (keyword): nothing reads this without straggler.enabled = true"
    assert [r.getMessage() for r in caplog.records if "profiling_interval" in r.getMessage()] == [
        f"holdfast: {told}"
    ]
    journal = ControlDirectory.open(tmp_path / "run").journal
    warned = [line.body.message for line in read_journal(journal) if isinstance(line.body, Warned)]
    assert told in warned


def test_without_the_launcher_one_warning_names_what_is_unprotected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(tmp_path / "run", until=3)
    assert [r.getMessage() for r in caplog.records if "not started by `holdfast run`" in r.getMessage()] == [
        f"holdfast: {UNPROTECTED}"
    ]


def test_timeouts_in_the_wrong_order_are_refused_under_the_launcher_only(tmp_path: Path) -> None:
    """Case torchtitan#2899."""
    settings = {"until": 2, "checkpoint_timeout": 3600.0}
    pids: dict[int, int] = {}
    with watching(tmp_path) as watch, killed_at_the_end(pids):
        pids[0] = started(launch(tmp_path / "run", watch.path), partial(train, tmp_path / "run", **settings))
        assert await_child(pids.pop(0), 60) == 2
    assert checkpoints(tmp_path / "run") == []
    assert train(tmp_path / "plain", **settings).losses


# --- simulated faults

FAULT = {
    "monitor_simulate_fault": True,
    "monitor_simulated_fault_base_delay": 0.2,
    "monitor_simulated_fault_rank": 0,
}


def slow(step: int, run: holdfast.Run) -> None:
    time.sleep(0.02)


@pytest.mark.parametrize("kind", ["rank_killed", "rank_hung"])
def test_a_simulated_fault_happens_once_a_launch_and_is_journalled_first(kind: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # It may strike inside a step or between two.
    limit = {SECTIONS: f"setup:{FAR},step:1", OUT: 1}
    settings = {**UNHURRIED, **FAULT, **limit, "monitor_simulated_fault_type": kind}
    pids: dict[int, int] = {}
    with watching(tmp_path) as watch, killed_at_the_end(pids):
        endless = partial(train, run_dir, until=10_000, at_step=slow, checkpoint_interval=0, **settings)
        pids[0] = started(launch(run_dir, watch.path), endless)
        watch.begin(pids)
        if kind == "rank_killed":
            assert await_child(pids.pop(0), 60) == -signal.SIGKILL
        else:
            wait_until(lambda: _stopped(pids[0]), 60, "the rank has stopped itself")
            (found,) = wait_until(watch.overdue, 60, "the hang is found")
            assert found.rank == 0
            os.kill(pids[0], signal.SIGKILL)
            assert await_child(pids.pop(0), 60) == -signal.SIGKILL
        bodies = events_in(run_dir)
        told = [body.message for body in bodies if isinstance(body, Warned) and "simulated" in body.message]
        number = "SIGKILL" if kind == "rank_killed" else "SIGSTOP"
        assert told == [f"simulated fault: {kind}, rank 0 sends itself {number}"]
        again = partial(train, run_dir, until=40, at_step=slow, **settings)
        pids[0] = started(launch(run_dir, watch.path), again)
        watch.begin(pids)
        assert await_child(pids.pop(0), 60) == 0, "the second attempt of the same launch is spared"


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_all_ranks_come_to_the_same_fault_and_it_varies_between_launches() -> None:
    chosen = load(environ={}, keywords={"monitor_simulated_fault_base_delay": 10}).settings.monitor
    assert choose(chosen, "a", 8) == choose(chosen, "a", 8)
    many = [choose(chosen, str(seed), 8) for seed in range(100)]
    assert {fault.rank for fault in many} == set(range(8))
    assert {fault.kind for fault in many} == {"rank_hung", "rank_killed"}
    assert all(10 <= fault.delay <= 12 for fault in many)
    named = load(environ={}, keywords={"monitor_simulated_fault_rank": 8}).settings.monitor
    with pytest.raises(ConfigError, match=r"monitor\.simulated_fault_rank = 8: there are 8 ranks, 0 to 7"):
        choose(named, "a", 8)


@pytest.mark.drill
def test_in_a_restartable_function_one_process_is_one_attempt_after_the_other(tmp_path: Path) -> None:
    """Each run reads anew what the environment says by then, and hangs up when its function is left."""
    pids: dict[int, int] = {}
    starts = tmp_path / "starts"

    def attempt(number: int) -> None:
        scope = Scope(iteration=number, member=0, rank=0, world_size=1)
        with contextlib.suppress(ZeroDivisionError), entered(scope):
            try:
                train(
                    tmp_path / "run",
                    until=20,
                    at_step=fail_at(2 * number + 2),
                    checkpoint_interval=2,
                    **UNHURRIED,
                )
            finally:
                scope.ask("a fault")
        for close in scope.closers():
            close()

    def fail_at(last: int) -> Callable[[int, holdfast.Run], None]:
        def at_step(step: int, run: holdfast.Run) -> None:
            with starts.open("a") as file:
                file.write(f"{run.attempt} {step}\n")
            if step == last:
                raise ZeroDivisionError

        return at_step

    def work() -> None:
        before: dict[str, int] = {}
        for number in range(1, 5):
            if number > 1:
                os.environ.update(launch(tmp_path / "run", watch.path).to_environment())
            attempt(number)
            before = held() if number == 2 else before
        assert grown(before, 5.0) == {}

    with watching(tmp_path) as watch, killed_at_the_end(pids):
        pids[0] = started(launch(tmp_path / "run", watch.path), work)
        watch.begin(pids)
        assert await_child(pids.pop(0), 60) == 0
        wait_until(lambda: (state := watch.state(0)) is not None and state.done, 60, "it has said good-bye")
        assert watch.last_steps() == {0: 9}
    assert starts.read_text().split("\n")[:-1] == [
        f"{number} {step}" for number in range(1, 5) for step in range(2 * number - 1, 2 * number + 3)
    ]
