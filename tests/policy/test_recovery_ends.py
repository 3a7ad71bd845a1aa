"""Recovery always ends: the policies played against any sequence of faults, without processes.

The driver is a launcher reduced to what the policies see of one: it starts attempts as it is told, lets each
end with the next fault, and keeps the history that a control directory would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from random import Random

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import MEANINGS, ExitCode
from holdfast.policy.budgets import (
    BUDGETS,
    MAX_LAUNCHES,
    MAX_REQUEUES,
    MOST_IDENTICAL,
    PastAttempt,
    launch_refused,
    most_restarts,
    since_progress,
)
from holdfast.policy.placement import (
    MAX_LOWER_RUNGS,
    Cluster,
    Exclusion,
    arrange,
    cycle,
    describe_devices,
    devices_of,
    fit,
    layout,
    usable,
)
from holdfast.policy.recovery import Decision, Situation, recover
from holdfast.policy.signs import Action, Cause

ENOUGH = 1000
"""Attempts after which a test gives up on a driver that should have ended."""


@dataclass(frozen=True)
class Fault:
    """How an attempt ends."""

    cause: Cause = Cause.INFRASTRUCTURE
    exit_code: int = 1
    message: str = ""
    section: str = ""
    culprit: int | None = None
    """Which of its nodes, by place."""
    device: int | None = None
    named: bool = False
    alike: bool = False
    began: bool = True
    steps: int | None = None
    rise: int = 0
    """By how much it raised the highest committed step before that."""
    leaves: bool = False
    """Whether the culprit is gone for good."""
    arrives: bool = False
    """Whether a new node comes while the launcher waits."""
    seconds: float = 60.0
    launcher_dies: bool = False


@dataclass
class Driver:
    """Plays attempts to their end."""

    max_restarts: int
    restarts_chosen: bool = False
    nodes: list[str] = field(default_factory=lambda: ["a"])
    spares: list[str] = field(default_factory=list)
    devices: int = 0
    workers: int = 1
    min_nodes: int = 1
    may_shrink: bool = False
    can_requeue: bool = False
    stopping: str = ""
    started_with: str = "script"
    rungs: list[int] = field(default_factory=list)
    """Steps of the committed checkpoints, newest first."""
    random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        self.history: list[PastAttempt] = []
        self.decisions: list[Decision] = []
        self.excluded: list[Exclusion] = []
        self.gone: set[str] = set()
        self.avoid: list[str] = []
        self.rotation = 0
        self.clock = 1e9
        self.launch = 1
        self.made = 0
        self.group = list(self.nodes)
        self.wanted = len(self.nodes)

    # -- what there is --------------------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        here = [node for node in self.group if node not in self.gone]
        waiting = [node for node in [*self.nodes, *self.spares] if node not in {*here, *self.gone}]
        names = [str(number) for number in range(self.devices)]
        return Cluster(
            nodes=here,
            spares=waiting,
            devices=dict.fromkeys([*here, *waiting], names) if names else {},
            workers_per_node=self.workers,
            min_nodes=self.min_nodes,
            max_nodes=self.wanted,
            may_shrink=self.may_shrink,
            excluded=list(self.excluded),
        )

    @property
    def usable_rungs(self) -> list[int]:
        return [step for step in self.rungs if f"step_{step}" not in self.avoid]

    @property
    def rung(self) -> str:
        return f"step_{self.usable_rungs[0]}" if self.usable_rungs else ""

    @property
    def highest(self) -> int:
        return max(self.rungs, default=0)

    @property
    def most_restarts(self) -> int:
        """Without progress: for the whole run, but where somebody chose a number for a script without a Run,
        for each launch."""
        if not self.restarts_chosen:
            return most_restarts(self.max_restarts)
        return self.launch * self.max_restarts + BUDGETS[Cause.PREEMPTION].restarts

    # -- the play -------------------------------------------------------------------------------------------

    def play_launch(self, faults: Iterator[Fault]) -> None:
        """One launch, to whatever end it comes to; what it was started by starts it again, or not."""
        mine = self.launch
        for fault in faults:
            self.play([fault])
            if self.launch != mine or not self.decisions or not self.decisions[-1].action.goes_on:
                break
        if self.launch == mine:
            self.relaunch()

    def play(self, faults: Iterable[Fault]) -> Decision | None:
        """Until it stops; None if the faults are over before."""
        for number, fault in enumerate(faults, start=len(self.history) + 1):
            assert number <= ENOUGH, "this does not end"
            attempt = self.attempt(number, fault)
            if fault.launcher_dies:
                self.history.append(
                    PastAttempt(
                        number=number,
                        launch=attempt.launch,
                        started_with=self.started_with,
                        outcome="lost",
                        highest_step=attempt.highest_step,
                        action="",
                    )
                )
                self.relaunch()
                continue
            decision = self.settle(attempt, fault)
            self.remember(attempt, decision)
            self.decisions.append(decision)
            self.check(attempt, decision)
            if decision.action is Action.STOP:
                return decision
            self.excluded.extend(decision.exclude)
            self.avoid = decision.avoid
            if decision.action is Action.REQUEUE:
                self.relaunch()
            else:
                self.group, self.rotation = decision.nodes, decision.rotate_by
        return None

    def remember(self, attempt: PastAttempt, decision: Decision) -> None:
        kept = {"avoid": decision.avoid, "action": str(decision.action)}
        self.history.append(msgspec.structs.replace(attempt, **kept))

    def relaunch(self) -> None:
        """Somebody, or the scheduler, starts it again, with as many nodes as there were."""
        self.launch += 1
        self.rotation = 0
        for node in sorted(self.gone):
            self.spares.append(f"{node}'")
        self.group = fit(msgspec.structs.replace(self.cluster(), nodes=[]), self.wanted).nodes or self.group

    def attempt(self, number: int, fault: Fault) -> PastAttempt:
        if fault.rise:
            self.rungs.insert(0, self.highest + fault.rise)
        placed = arrange(layout(self.cluster(), self.group), self.rotation)
        culprit = self.group[fault.culprit % len(self.group)] if fault.culprit is not None else ""
        if culprit and fault.leaves:
            self.gone.add(culprit)
        self.clock += fault.seconds
        here = fault.device is not None and self.devices
        return PastAttempt(
            number=number,
            launch=str(self.launch),
            started_with=self.started_with,
            outcome="failed",
            cause=fault.cause,
            exit_code=fault.exit_code,
            message=fault.message,
            section=fault.section,
            highest_step=self.highest,
            culprit_node=culprit,
            culprit_device=str((fault.device or 0) % self.devices) if here else "",
            named=fault.named and bool(culprit),
            alike=fault.alike,
            began=fault.began,
            seconds=fault.seconds,
            at=self.clock,
            nodes=self.group,
            node_count=len(self.group),
            world_size=len(self.group) * self.workers,
            placement=describe_devices(placed, self.workers),
            rotation=self.rotation,
            rung=self.rung,
            steps=fault.steps,
        )

    def settle(self, attempt: PastAttempt, fault: Fault) -> Decision:
        """The decision after all waiting."""
        waited = 0.0
        for _ in range(3):
            situation = self.situation(attempt, waited)
            decision = recover(self.history, situation)
            shuffled = self.random.sample(self.history, len(self.history))
            assert decision == recover(shuffled, situation), "the same history, the same decision"
            assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision
            if decision.action is not Action.WAIT:
                return decision
            assert decision.wait_seconds > 0
            waited += decision.wait_seconds
            self.clock += decision.wait_seconds
            if fault.arrives:
                self.made += 1
                self.spares.append(f"new{self.made}")
        raise AssertionError("waiting does not end")

    def situation(self, attempt: PastAttempt, waited: float) -> Situation:
        return Situation(
            attempt=attempt,
            max_restarts=self.max_restarts,
            restarts_chosen=self.restarts_chosen,
            cluster=self.cluster(),
            lower_rungs=max(0, len(self.usable_rungs) - 1),
            can_requeue=self.can_requeue,
            stopping=self.stopping,
            waited=waited,
        )

    def check(self, attempt: PastAttempt, decision: Decision) -> None:
        """What holds of every decision."""
        assert decision.restarts_left >= 0
        assert decision.reason
        if decision.action is Action.STOP:
            assert decision.exit_code in MEANINGS
            assert decision.exit_code != ExitCode.OK
            return
        if decision.action is Action.REQUEUE:
            storage = attempt.exit_code == ExitCode.STORAGE_FAILED and not decision.exclude
            wanted = ExitCode.STORAGE_FAILED if storage else ExitCode.REQUEUE_WANTED
            assert decision.exit_code == wanted
            return
        assert decision.exit_code == 0
        after = msgspec.structs.replace(self.cluster(), excluded=[*self.excluded, *decision.exclude])
        assert all(usable(after, node) for node in decision.nodes), "what is excluded is never chosen again"
        assert all(
            len(devices_of(after, node)) >= self.workers or not self.devices for node in decision.nodes
        )
        assert len(decision.nodes) >= self.min_nodes
        if not self.may_shrink:
            assert len(decision.nodes) >= len(attempt.nodes)
        assert not set(decision.exclude) & set(self.excluded), "nothing is excluded twice"
        went_on = [(before, after) for before, after in since_progress(self.history) if before is not None]
        restarts = sum(
            before.launch == after.launch and before.outcome == "failed" for before, after in went_on
        )
        assert restarts + 1 <= self.most_restarts
        if attempt.exit_code == ExitCode.STORAGE_FAILED and len(decision.nodes) >= len(attempt.nodes):
            assert not decision.exclude, "bad storage accuses nobody"
            assert set(decision.avoid) <= set(self.avoid)
        actions = Counter(past.action for past in self.history if past.highest_step >= self.highest)
        assert actions["lower_rung"] <= MAX_LOWER_RUNGS
        assert actions["requeue"] <= MAX_REQUEUES

    def cycles(self) -> Counter[object]:
        return Counter(cycle(attempt) for attempt in self.history if attempt.outcome == "failed")


faults = st.builds(
    Fault,
    cause=st.sampled_from(Cause),
    exit_code=st.sampled_from([-15, -11, -9, -6, 0, 1, 2, 16, 21, 23, 34]),
    message=st.sampled_from(["", "ValueError: x", "KeyError: y", "port 17", "port 18"]),
    section=st.sampled_from(["", "step"]),
    culprit=st.none() | st.integers(0, 3),
    device=st.none() | st.integers(0, 3),
    named=st.booleans(),
    alike=st.booleans(),
    began=st.sampled_from([True, True, False]),
    steps=st.none() | st.integers(0, 30),
    rise=st.sampled_from([0, 0, 0, 1, 10]),
    leaves=st.booleans(),
    arrives=st.booleans(),
    seconds=st.sampled_from([1.0, 600.0, 5000.0]),
    launcher_dies=st.sampled_from([False, False, False, False, True]),
)
drivers = st.builds(
    lambda count, spares, devices, workers, least, max_restarts, chosen, **more: Driver(
        max_restarts=min(max_restarts, 10) if chosen else max_restarts,
        restarts_chosen=chosen,
        nodes=list("abcd"[:count]),
        spares=list("wxyz"[:spares]),
        devices=devices,
        workers=min(workers, devices) if devices else workers,
        min_nodes=min(least, count),
        **more,
    ),
    count=st.integers(1, 4),
    spares=st.integers(0, 2),
    devices=st.integers(0, 4),
    workers=st.integers(1, 4),
    least=st.integers(1, 4),
    max_restarts=st.sampled_from([0, 1, 3, 10, 100, 10**6]),
    chosen=st.booleans(),
    may_shrink=st.booleans(),
    can_requeue=st.booleans(),
    rungs=st.sampled_from([[], [10], [50, 40, 30, 20, 10]]).map(list),
    random=st.randoms(use_true_random=False),
)


@settings(deadline=None)
@given(drivers, st.lists(faults, min_size=1, max_size=60))
def test_any_sequence_of_faults_keeps_every_promise(driver: Driver, sequence: list[Fault]) -> None:
    driver.play(sequence)


@settings(deadline=None)
@given(drivers, st.lists(faults, min_size=1, max_size=5))
@example(
    driver=Driver(max_restarts=10**6, can_requeue=True, min_nodes=2, nodes=["a", "b"]),
    pattern=[Fault(culprit=1, leaves=True, arrives=True, message="x", cause=Cause.PREEMPTION)],
)
def test_without_progress_every_pattern_of_faults_ends_within_the_stated_bound(
    driver: Driver, pattern: list[Fault]
) -> None:
    decision = driver.play(calm(fault) for again in repeat(pattern) for fault in again)
    assert decision is not None
    assert decision.action is Action.STOP
    launches = 1 + MAX_REQUEUES
    assert len(driver.history) <= launches + driver.most_restarts


def calm(fault: Fault) -> Fault:
    """The same fault, without progress, under a launcher that lives: nobody else starts the job again."""
    return Fault(**{**fault.__dict__, "rise": 0, "launcher_dies": False})


@settings(deadline=None)
@given(
    drivers,
    st.lists(faults, min_size=1, max_size=5),
    st.sampled_from(["same", "reset", "edited"]),
)
@example(driver=Driver(max_restarts=3), pattern=[Fault(launcher_dies=True)], how="same")
def test_launches_that_nobody_watches_end_and_whoever_fixed_something_is_let_in(
    driver: Driver, pattern: list[Fault], how: str
) -> None:
    launch_again_and_again(driver, pattern, how)


def launch_again_and_again(driver: Driver, pattern: list[Fault], how: str) -> None:
    """A pod's restart policy: whatever code a launch ended with, or none, the same thing is started again."""
    told = (Fault(**{**one.__dict__, "rise": 0}) for again in repeat(pattern) for one in again)
    started, reset, launched = "script", 0, 0
    rows = 1 if how == "same" else 2
    most = rows * MAX_LAUNCHES + 1  # what was there before the first one counts as its progress
    for row in range(rows):
        while not launch_refused(driver.history, started, reset):
            launched += 1
            assert launched <= most, "this does not end"
            driver.started_with = started
            driver.play_launch(told)
        # The very next one is refused as well, and costs no attempt.
        assert launch_refused(driver.history, started, reset)
        if how == "reset":
            reset = len(driver.history)
        elif how == "edited":
            started = f"mended {row}"
        if how != "same":
            assert not launch_refused(driver.history, started, reset), "who fixed it is never locked out"
    assert len(driver.history) <= launched + driver.most_restarts


@settings(deadline=None)
@given(drivers, st.lists(faults, min_size=1, max_size=30))
def test_launches_that_get_on_are_never_refused(driver: Driver, sequence: list[Fault]) -> None:
    for fault in sequence:
        assert not launch_refused(driver.history, driver.started_with)
        driver.play_launch(iter([Fault(**{**fault.__dict__, "rise": 1, "launcher_dies": False})]))


@settings(deadline=None)
@given(drivers, faults)
def test_one_repeating_fault_is_met_in_the_same_setting_only_a_few_times(
    driver: Driver, fault: Fault
) -> None:
    """`max_restarts=100` must not mean 100 identical cycles."""
    driver.max_restarts, driver.restarts_chosen = 100, False
    decision = driver.play(repeat(calm(fault)))
    assert decision is not None
    most = max(driver.cycles().values())
    launches = 1 + sum(past.action == "requeue" for past in driver.history)
    if fault.cause is Cause.PREEMPTION and fault.exit_code != ExitCode.RERUN_WANTED:
        assert most <= launches + BUDGETS[Cause.PREEMPTION].restarts
    else:
        assert most <= MOST_IDENTICAL + launches - 1, (
            "each launch by the scheduler has one attempt of its own"
        )


@settings(deadline=None)
@given(drivers, faults, st.text(min_size=1, max_size=20))
def test_whatever_fails_during_a_stop_nothing_is_started_again(
    driver: Driver, fault: Fault, why: str
) -> None:
    driver.stopping = why
    decision = driver.settle(driver.attempt(1, fault), fault)
    assert decision.action is Action.STOP
    assert decision.exit_code == ExitCode.STOPPED_UNSAVED
    assert not decision.exclude


records = st.builds(
    PastAttempt,
    number=st.integers(1, 50),
    launch=st.sampled_from(["1", "2"]),
    outcome=st.sampled_from(["failed", "failed", "lost", "stopped", "finished"]),
    cause=st.sampled_from(["", *Cause]),
    exit_code=st.sampled_from([-9, 0, 1, 16, 17]),
    message=st.sampled_from(["", "ValueError: x"]),
    highest_step=st.integers(0, 3),
    culprit_node=st.sampled_from(["", "a", "b"]),
    at=st.sampled_from([0.0, 1e9]),
    nodes=st.sampled_from([[], ["a"], ["a", "b"]]),
    rotation=st.integers(-3, 9),
    rung=st.sampled_from(["", "step_10"]),
    action=st.sampled_from(["", "wait", "other", *Action]),
    avoid=st.sampled_from([[], ["step_10"]]),
)


@settings(deadline=None)
@given(drivers, st.lists(records, max_size=30, unique_by=lambda r: r.number), faults)
def test_from_any_state_whatever_one_reads_a_repeating_fault_ends(
    driver: Driver, state: list[PastAttempt], fault: Fault
) -> None:
    """Also from records that no launcher of this release would write."""
    driver.can_requeue = False
    history = list(state)
    went_on = 0
    for number in range(51, 51 + ENOUGH):
        attempt = driver.attempt(number, calm(fault))
        driver.history = history
        decision = driver.settle(attempt, fault)
        history.append(msgspec.structs.replace(attempt, action=str(decision.action), avoid=decision.avoid))
        if not decision.action.goes_on:
            break
        driver.excluded.extend(decision.exclude)
        driver.group, driver.rotation, driver.avoid = decision.nodes, decision.rotate_by, decision.avoid
        went_on += 1
    assert decision.action is Action.STOP
    # What is in the state may raise the highest step late, but only once: at its first attempt here.
    assert went_on <= 1 + driver.most_restarts


# -- faults that stay with something are got rid of --------------------------------------------------------


def test_a_fault_that_stays_with_a_node_ends_when_the_node_is_replaced() -> None:
    driver = Driver(max_restarts=100, nodes=["a", "b"], spares=["c"], min_nodes=2)
    driver.play([Fault(culprit=1, exit_code=-9)] * 2)
    assert driver.group == ["a", "c"]
    assert [(e.node, e.device) for e in driver.excluded] == [("b", None)]


def test_a_fault_that_stays_with_a_device_ends_when_no_rank_runs_on_it() -> None:
    """The device is met under whatever rank runs on it; after the second time it is known."""
    driver = Driver(max_restarts=100, devices=3, workers=2)
    bad, met = "1", 0
    for _ in range(10):
        placed = arrange(layout(driver.cluster(), driver.group), driver.rotation)[0]
        if bad not in placed.devices[:2]:
            break
        met += 1
        attempt = driver.attempt(met, Fault(cause=Cause.DEVICE, exit_code=16, culprit=0, device=1))
        decision = driver.settle(attempt, Fault())
        driver.history.append(msgspec.structs.replace(attempt, action=str(decision.action)))
        driver.excluded.extend(decision.exclude)
        driver.rotation = decision.rotate_by
    assert met <= 2
    assert bad not in arrange(layout(driver.cluster(), driver.group), driver.rotation)[0].devices[:2]


def test_a_fault_that_stays_with_a_checkpoint_ends_on_a_lower_rung() -> None:
    """Scenario 2: the newest is bad; no second identical cycle after it is known."""
    driver = Driver(max_restarts=100, rungs=[120, 100, 80])
    nan = Fault(cause=Cause.JOB, message="FloatingPointError: the loss is nan", steps=3)
    driver.play([nan, nan])
    assert driver.rung == "step_100"
    assert [decision.action for decision in driver.decisions] == [Action.RESTART, Action.LOWER_RUNG]


def test_progress_pays_back_and_a_run_that_makes_it_is_never_stopped() -> None:
    driver = Driver(max_restarts=1, nodes=["a", "b"], min_nodes=2)
    assert driver.play([Fault(exit_code=-9, rise=1)] * 200) is None
    assert all(decision.restarts_left == 0 for decision in driver.decisions)
