"""Launches and attempts played from sequences of faults, held to what every sequence must keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from random import Random

import msgspec
from hypothesis import strategies as st

from holdfast.errors import MEANINGS, ExitCode
from holdfast.policy.budgets import (
    BUDGETS,
    MAX_LAUNCHES,
    MAX_REQUEUES,
    PastAttempt,
    launch_refused,
    most_restarts,
    since_progress,
)
from holdfast.policy.diagnosis import Diagnosis, of_rejection
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
from holdfast.policy.results import Kind, Orders, Place, RankResult, Rejection, Window
from holdfast.policy.signs import Action, Cause
from holdfast.policy.verdicts import open_rerun, open_trial

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
        kept = {"action": str(decision.action), "decided": decision.findings()}
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


def calm(fault: Fault) -> Fault:
    """The same fault, without progress, under a launcher that lives: nobody else starts the job again."""
    return Fault(**{**fault.__dict__, "rise": 0, "launcher_dies": False})


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


class Rejecting(Driver):
    """The launcher of test_recovery_ends.py, whose faults with code 16 come with what was rejected."""

    nan_policy = "warn"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drawn: list[Rejection] = []
        self.suspects: set[str] = set()
        self.acquitted: set[str] = set()

    @property
    def usable_rungs(self) -> list[int]:
        return [one for one in super().usable_rungs if f"step_{one}" not in self.suspects]

    def attempt(self, number: int, fault: Fault) -> PastAttempt:
        made = super().attempt(number, fault)
        if fault.exit_code != ExitCode.RERUN_WANTED or not self.drawn:
            return made
        rejection = self.drawn[number % len(self.drawn)]
        found = of_rejection(Diagnosis(cause=Cause.DEVICE, exit_code=16), rejection)
        none = {"culprit_node": "", "culprit_device": "", "named": False}
        fields = {"cause": found.cause, "began": True, **none}  # a step that is rejected was begun
        return msgspec.structs.replace(made, rejection=rejection, last_step=rejection.step - 1, **fields)

    def situation(self, attempt: PastAttempt, waited: float) -> Situation:
        trial = open_trial(self.history)
        return msgspec.structs.replace(
            super().situation(attempt, waited),
            rungs=[f"step_{step}" for step in self.usable_rungs],
            together=[attempt.rung] if attempt.rung else [],
            skip_bad_data=self.can_requeue,
            nan_policy=self.nan_policy,
            orders=Orders(rerun=open_rerun(self.history), trial=trial),
        )

    def remember(self, attempt: PastAttempt, decision: Decision) -> None:
        super().remember(attempt, decision)
        rejection = attempt.rejection
        if decision.suspect:
            assert rejection is not None
            assert not rejection.finite, "a spike speaks against nothing"
            assert rejection.in_probation or rejection.kind is Kind.PROBATION
            assert len(self.usable_rungs) > len(decision.suspect), "only with a rung below"
        assert set(decision.acquit) <= self.suspects
        if rejection is not None and decision.action is Action.STOP:
            codes = {ExitCode.VALIDATION_FAILED, ExitCode.BUDGET_SPENT}
            if self.gone or self.excluded:
                codes.add(ExitCode.NO_CAPACITY)  # too few are there to go on with, whatever was rejected
            assert decision.exit_code in codes
        self.suspects |= set(decision.suspect)
        self.suspects -= set(decision.acquit)
        times = [one for one in self.history if one.decided.suspect and one.highest_step >= self.highest]
        assert len(times) <= MAX_LOWER_RUNGS


rejections = st.builds(
    Rejection,
    kind=st.sampled_from([Kind.STEP, Kind.STEP, Kind.STEP, *Kind]),
    step=st.sampled_from([51, 52, 60]),
    reasons=st.just(["nan"]),
    ranks=st.lists(
        st.builds(RankResult, rank=st.integers(0, 3), reasons=st.sampled_from([[], ["nan"]])), max_size=3
    ),
    finite=st.sampled_from([False, False, True]),
    in_probation=st.booleans(),
    window=st.none() | st.just(Window(0, 51, 51)),
    accused=st.none() | st.builds(Place, st.sampled_from(["a", "b", "w"]), st.sampled_from(["", "0", "1"])),
).map(lambda one: msgspec.structs.replace(one, finite=one.finite and one.kind is Kind.STEP))
"""Ranks call results finite only of a step that they rejected for them."""

GIVEN = ("max_restarts", "restarts_chosen", "nodes", "spares", "devices", "workers", "min_nodes",
         "may_shrink", "can_requeue", "rungs", "random")  # fmt: skip

often = faults.map(lambda one: Fault(**{**one.__dict__, "exit_code": 16})) | faults
