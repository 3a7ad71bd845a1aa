"""A run without processes, with a truth hidden in it: the real policies have to find it out.

The world plays a launcher and its ranks as far as the policies see them: attempts resume from the newest rung
that may be used, save every tenth step, reject what the truth makes bad, and act on what they were told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from holdfast.errors import ExitCode
from holdfast.policy.budgets import PastAttempt, restarts_left
from holdfast.policy.diagnosis import Diagnosis, of_rejection
from holdfast.policy.placement import (
    Cluster,
    Exclusion,
    NodeDevices,
    arrange,
    describe_devices,
    device_of,
    devices_of,
    layout,
)
from holdfast.policy.recovery import Decision, Situation, recover
from holdfast.policy.results import (
    Act,
    Count,
    How,
    Kind,
    Orders,
    Place,
    Policy,
    RankResult,
    Rejection,
    Rerun,
    Settled,
    Trial,
    Window,
    settled_as,
)
from holdfast.policy.signs import Action, Cause
from holdfast.policy.verdicts import Settling, open_rerun, open_trial, settle

PROBATION = 10
EVERY = 10
"""Steps between saves."""


class Now(msgspec.Struct, frozen=True):
    """One rank in one step, as the truth sees it."""

    attempt: int
    rank: int
    place: Place
    step: int
    batch: int
    poisoned: bool


Truth = Callable[[Now], bool]


@dataclass
class Checkpoint:
    step: int
    serial: int
    head: str
    """What the attempt that saved it came from."""
    parent: str
    poisoned: bool = False
    standing: str = "committed"

    @property
    def name(self) -> str:
        return f"step_{self.step:08d}-{self.serial:08x}"


@dataclass
class World:
    truth: Truth
    nodes: list[str] = field(default_factory=lambda: ["a"])
    spares: list[str] = field(default_factory=list)
    devices: int = 2
    workers: int = 2
    max_restarts: int = 3
    skip_bad_data: bool = False
    finite: bool = False
    steps: tuple[int, ...] = (10, 20)
    """Of the checkpoints that the first launch left."""
    until: int = 60
    poison: frozenset[int] = frozenset()
    """Which of them hold bad state."""
    known_ranks: bool = True
    tampered: bool = False
    """Whether the first rejected attempt's state was damaged in memory: its fingerprint is another."""
    breaches: bool = False
    """Whether what is bad is no NaN in a step, but a level that rank 0 sees to be another one after it."""
    nan_policy: Policy = "warn"
    reruns: bool = True
    """Whether steps are run again in place; without it NaN is the policy's matter outside of probation."""
    crashes: int = 0
    """Attempts of the first launch that were killed before, without progress."""

    def __post_init__(self) -> None:
        self.line: list[Checkpoint] = []
        self.every: list[Checkpoint] = []
        self.serial = 0
        self.history = [PastAttempt(number=1, launch="first", outcome="stopped", highest_step=self.steps[-1])]
        self.history += [
            PastAttempt(number=2 + one, launch="second", outcome="failed", cause="infrastructure")
            for one in range(self.crashes)
        ]
        self.launch = "second"
        self.settled: list[Settled] = []
        self.dropped: set[int] = set()
        self.decisions: list[Decision] = []
        self.excluded: list[Exclusion] = []
        self.skips: list[Window] = []
        self.verdicts: list[tuple[str, Place]] = []
        self.avoid: list[str] = []
        self.group = list(self.nodes)
        self.rotation = 0
        self.code: int | None = None
        for step in self.steps:
            self._save(step, "", any(bad <= step for bad in self.poison))

    # -- what there is --------------------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        names = [str(number) for number in range(self.devices)]
        everyone = [*self.nodes, *self.spares]
        return Cluster(
            nodes=list(self.group),
            spares=[node for node in everyone if node not in self.group],
            devices=dict.fromkeys(everyone, names) if names else {},
            workers_per_node=self.workers,
            min_nodes=len(self.nodes),
            max_nodes=len(self.nodes),
            excluded=list(self.excluded),
        )

    def arranged(self) -> list[NodeDevices]:
        return arrange(layout(self.cluster(), self.group), self.rotation)

    def places(self) -> list[Place]:
        return [
            Place(node.node, device_of(node.devices, local))
            for node in self.arranged()
            for local in range(self.workers)
        ]

    def usable(self) -> list[Checkpoint]:
        """The ladder, newest first."""
        refused = ("suspect", "condemned")
        return [
            one for one in reversed(self.line) if one.standing not in refused and one.name not in self.avoid
        ]

    def standing(self, word: str) -> list[int]:
        return sorted(one.step for one in self.every if one.standing == word)

    def line_at(self, step: int) -> str:
        """The first checkpoint of that step, by name."""
        return next(one.name for one in self.every if one.step == step)

    def by_name(self, name: str) -> Checkpoint:
        return next(one for one in self.every if one.name == name)

    def _save(self, step: int, head: str, poisoned: bool) -> None:
        self.serial += 1
        parent = self.line[-1].name if self.line else ""
        made = Checkpoint(step, self.serial, head, parent, poisoned)
        self.line.append(made)
        self.every.append(made)

    def _together(self, rung: Checkpoint) -> list[str]:
        """As `launch.suspicion.doubtful_with` has it."""
        group = {rung.name}
        above = rung
        while above.head and above.step - self.by_name(above.head).step <= PROBATION:
            above = self.by_name(above.head)
            if above.standing in ("proven", "acquitted"):
                break
            group.add(above.name)
        for one in self.line:
            if one.parent in group:
                group.add(one.name)
        return sorted(group)

    # -- the play -------------------------------------------------------------------------------------------

    def play(self) -> None:
        """One launch, until it finishes (code 0) or stops. To launch again is to call this again."""
        first = self.history[-1].number + 1
        for number in range(first, first + 50):
            rerun = open_rerun(self.history)
            trial = self._open_trial()
            placement = describe_devices(self.arranged(), self.workers)
            rung = self.usable()[0] if self.usable() else None
            if rung is None:
                self.code = int(ExitCode.NO_VALID_RUNG)
                return
            rejection, last = self._attempt(number, rung, rerun, trial)
            if rejection is None:
                self.code = self.ended
                self.history.append(PastAttempt(number=number, launch=self.launch, outcome="failed"))
                return
            found = of_rejection(Diagnosis(cause=Cause.DEVICE, exit_code=16, rung=rung.name), rejection)
            failed = PastAttempt(
                number=number,
                launch=self.launch,
                outcome="failed",
                highest_step=max(
                    one.step for one in self.every if one.standing not in ("suspect", "condemned")
                ),
                nodes=list(self.group),
                node_count=len(self.group),
                world_size=len(self.group) * self.workers,
                placement=placement,
                rotation=self.rotation,
                last_step=last,
                rejection=rejection,
                **msgspec.structs.asdict(found),
            )
            if self._settle(failed, rung):
                return
        raise AssertionError("this does not end")

    def _open_trial(self) -> Trial | None:
        trial = open_trial(self.history)
        if trial is None:
            return None
        left = [name for name in trial.suspects if self.by_name(name).standing == "suspect"]
        return msgspec.structs.replace(trial, suspects=left) if left else None

    def _settle(self, failed: PastAttempt, rung: Checkpoint) -> bool:
        """Whether it is over."""
        situation = Situation(
            attempt=failed,
            max_restarts=self.max_restarts,
            cluster=self.cluster(),
            rungs=[one.name for one in self.usable()],
            lower_rungs=sum(one.step < rung.step for one in self.usable()),
            together=self._together(rung),
            skip_bad_data=self.skip_bad_data,
            nan_policy=self.nan_policy,
            orders=Orders(rerun=open_rerun([*self.history, failed]), trial=self._open_trial()),
        )
        decision = recover(self.history, situation)
        assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision
        self.decisions.append(decision)
        self.history.append(
            msgspec.structs.replace(failed, action=decision.action, decided=decision.findings())
        )
        if decision.verdict:
            accused = decision.exclude[0] if decision.exclude else Exclusion("", "")
            self.verdicts.append((decision.verdict, Place(accused.node, accused.device or "")))
        for name in decision.suspect:
            assert any(one.step < self.by_name(name).step for one in self.usable()), "with a rung below only"
            self.by_name(name).standing = "suspect"
        for name in decision.acquit:
            self.by_name(name).standing = "acquitted"
        if decision.skip is not None:
            self.skips.append(decision.skip)
        self.settled += decision.settled
        self.excluded.extend(decision.exclude)
        self.excluded = [one for one in self.excluded if one.node not in decision.readmit]
        self.avoid = decision.avoid
        if decision.action is Action.STOP:
            self.rotation = decision.rotate_by
            self.code = decision.exit_code
            return True
        assert decision.action.goes_on, decision
        self.group, self.rotation = decision.nodes, decision.rotate_by
        for node in self.group:
            assert not self.devices or len(devices_of(self.cluster(), node)) >= min(
                self.workers, self.devices
            )
        return False

    def _attempt(
        self, number: int, rung: Checkpoint, rerun: Rerun | None, trial: Trial | None
    ) -> tuple[Rejection | None, int]:
        """One life: what it rejected, and the last step that it completed. `ended`: its code without one."""
        self.line = [one for one in self.line if one.step <= rung.step]
        self.ended, self.trial, self.count = 0, trial, Count(self.nan_policy, 10)
        self.shown = self.shifted = False
        places, poisoned, accepted = self.places(), rung.poisoned, 0
        for step in range(rung.step + 1, self.until + 1):
            batch, window = self._batch(step), Window(0, self._batch(step), self._batch(step))
            bad = [
                rank
                for rank, place in enumerate(places)
                if self.truth(Now(number, rank, place, step, batch, poisoned))
            ]
            on_probation = accepted < PROBATION
            breach = self.breaches and bad and (on_probation or self._on_trial(step))
            if breach and not self.shifted and not self._takes_shift(number, rung, rerun, step):
                told = Rejection(kind=Kind.PROBATION, step=step, reasons=["higher"], in_probation=True)
                return told, step
            if bad and not self.breaches:
                found = self._rejection(number, step, batch, bad, places, on_probation)
                if self.finite:
                    told_so = rerun is not None and rerun.accept and rerun.step == step
                    if not told_so and not self._known(How.ACCEPTED, step, window):
                        return found, step - 1
                elif self._dropped(number, step, found, rung, rerun, on_probation, places):
                    self.dropped.add(step)
                    continue
                else:
                    return (None if self.ended else found), step - 1
            self.count.after(bad=False)
            accepted += 1
            if rerun is not None and rerun.step == step and not (rerun.accept or rerun.breach):
                result = self._compare(number, rerun, places)
                if result is not None:
                    return result, step - 1
            if self.trial is not None and step >= self.trial.until:
                if step == self.trial.until and not self.shifted:
                    self._condemn(self.trial)
                self.trial = None
            if accepted == PROBATION and not self.shifted:
                rung.standing = "proven"
                if rerun is not None and rerun.breach:
                    self.verdicts.append(("transient", Place("")))
            if step % EVERY == 0:
                self._save(step, rung.name, poisoned)
        return None, self.until

    def _known(self, how: How, step: int, window: Window | None) -> Settled | None:
        return settled_as(self.settled, how, step, window, len(self.places()))

    def _on_trial(self, step: int) -> bool:
        return self.trial is not None and self.trial.until >= step

    def _takes_shift(self, number: int, rung: Checkpoint, rerun: Rerun | None, step: int) -> bool:
        """As `worker.probation` has it."""
        trial = self.trial
        if self._known(How.SHIFT, step, None):
            self.shifted = True
        elif (
            trial is not None and max(self.by_name(one).step for one in trial.suspects) < step <= trial.until
        ):
            self._acquit(trial.suspects)
            self.shifted = True
        elif rerun is not None and rerun.breach and rerun.settles:
            self.shifted = True
        if self.shifted:
            self.settled.append(Settled(step=step, how=How.SHIFT, shown=True))
        return self.shifted

    def _dropped(
        self,
        number: int,
        step: int,
        found: Rejection,
        rung: Checkpoint,
        rerun: Rerun | None,
        on_probation: bool,
        places: list[Place],
    ) -> bool:
        """As `worker.judging` has it: whether the step is dropped; else the end, by a code or a rejection."""
        bad = {one.rank: one for one in found.ranks}
        everyone = [
            bad.get(rank, RankResult(rank=rank, node=place.node, device=place.device))
            for rank, place in enumerate(places)
        ]
        settling: Settling | None = None
        if self.reruns or on_probation or self.trial is not None:
            settling = settle(
                step,
                everyone,
                rung=rung.name,
                rerun=rerun if rerun is not None and not rerun.breach else None,
                trial=self.trial,
                settled=self._known(How.TOLERATED, step, found.window),
                restarts_left=self._left(number),
                left_out=self.skip_bad_data,
                ran_again=self.reruns,
            )
            if settling is None and self.shown and (not self.reruns or self.count.in_a_row):
                settling = Settling(why="", shown=True)
            if settling is None:
                return False
        if settling is not None and settling.here:
            self.shown = True
            self._acquit(settling.acquit)
            if settling.acquit:
                self.trial = None
        outcome = self.count.after(bad=True)
        shown = settling is not None and settling.shown
        if outcome.act is not Act.DROP:
            if settling is None or shown or self.nan_policy == "raise":
                self.ended = int(ExitCode.VALIDATION_FAILED)
            return False
        known = self._known(How.TOLERATED, step, found.window)
        if known is None or known.shown < shown:
            self.settled.append(
                Settled(
                    step=step, how=How.TOLERATED, window=found.window, world_size=len(places), shown=shown
                )
            )
        return True

    def _left(self, number: int) -> int:
        now = PastAttempt(number=number, launch=self.launch, outcome="failed")
        return restarts_left([*self.history, now], self.max_restarts)

    def _acquit(self, names: list[str]) -> None:
        for name in names:
            if self.by_name(name).standing == "suspect":
                self.by_name(name).standing = "acquitted"

    def _batch(self, step: int) -> int:
        """The step's data: those that are left out push the others forward."""
        batch = step
        for window in sorted(self.skips, key=lambda one: one.first):
            batch += 1 if window.first <= batch else 0
        return batch

    def _rejection(
        self, number: int, step: int, batch: int, bad: list[int], places: list[Place], in_probation: bool
    ) -> Rejection:
        state = f"state of {step}" + (
            f", damaged in {number}" if self.tampered and number == 2 + self.crashes else ""
        )
        results = [
            RankResult(
                rank=rank,
                node=places[rank].node,
                device=places[rank].device,
                reasons=["the loss is nan"] if self.known_ranks else [],
                state=state,
            )
            for rank in bad
        ]
        return Rejection(
            kind=Kind.STEP,
            step=step,
            reasons=["the loss is nan"],
            ranks=results,
            rerun=self.reruns,
            finite=self.finite,
            in_probation=in_probation,
            window=Window(0, batch, batch),
        )

    def _compare(self, number: int, rerun: Rerun, places: list[Place]) -> Rejection | None:
        """The step passes: was it the device that it was on before, or was the state damaged in memory?"""
        for one in rerun.bad:
            before = Place(one.node, one.device)
            if one.state != f"state of {rerun.step}":
                self.verdicts.append(("transient", before))
            elif places[one.rank] != before:
                if rerun.can_exclude:
                    return Rejection(kind=Kind.DEVICE, step=rerun.step, reasons=["follows"], accused=before)
                self.verdicts.append(("device", before))
        return None

    def _condemn(self, trial: Trial) -> None:
        guilty = {name for name in trial.suspects if self.by_name(name).standing == "suspect"}
        for one in self.every:
            if one.name in guilty or one.parent in guilty:
                guilty.add(one.name)
                one.standing = "condemned"
