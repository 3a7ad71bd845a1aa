"""Probation: the steps after a resume in which what was loaded, and how fast it trains, is watched.

Guarantee: a checkpoint becomes proven only after `validation.probation_steps` accepted steps without a
breach, and a suspect is condemned only by an attempt that began below it, completed the very step at which it
failed, and came nowhere near a discontinuity there itself; in doubt it stays suspect. It is acquitted, here
and now, by an attempt from below it that also fails at that step, or shows the same discontinuity: the
attempt then goes on. A discontinuity that was settled once is no breach in any later attempt. If something
cannot be recorded, the standing stays as it was, with a warning, and the run goes on; a lost lease ends it.

Rank 0 alone compares and records. It compares what the loop recorded of each step with what it had recorded
before the save, like with like; so a breach is found when a step is complete, and reported at the next one.
All ranks count alike, so that `active` is the same everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
import torch.distributed as dist

from holdfast.base import Look
from holdfast.checkpoint.format import OF_THE_JOB, CheckpointName, Manifest, Windows, parse_name
from holdfast.errors import ControlError
from holdfast.health import ComputeProbe, probe_compute
from holdfast.journal import JournalWriter
from holdfast.journal.events import ProbationEnded, StandingChanged, ThroughputLow, Verdict, Warned
from holdfast.policy import (
    IN_DOUBT,
    How,
    Rerun,
    Series,
    Settled,
    Trial,
    discontinuities,
    mismatches,
    settled_as,
    slowdown,
    slower_node,
)
from holdfast.record import (
    Group,
    LaunchInfo,
    Standing,
    StandingBook,
    condemned_with,
    descendants,
    read_timeline,
    record_settled,
)
from holdfast.train.membership import Membership
from holdfast.train.meter import WINDOW

# Low throughput after a resume: rank 0 finds it at the end of probation, then every rank tests its device.
#
# That accuses a node, if one is slower than the others, and never the checkpoint. The probes cost half a
# second, once, and only when steps take twice as long as before.


LETTER = 1024
"""Bytes of the message in which a rank's answer is exchanged."""
LONGEST_NAME = 200


class ProbeAnswer(msgspec.Struct, frozen=True):
    node: str
    probe: ComputeProbe


class Throughput:
    """Step times since a resume, and what to do if they are much longer than `before`."""

    def __init__(
        self, group: Group, journal: JournalWriter, *, node: str, device: torch.device | None
    ) -> None:
        self.before: Sequence[float] = ()
        self._group = group
        self._journal = journal
        self._node = node
        self._device = device
        self._seconds: list[float] = []

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def judge(self) -> None:
        """Call it once, on all ranks at the same step."""
        low = slowdown(self.before, self._seconds) if self._group.is_coordinator else None
        if not self._told_by_rank_0(low is not None):
            return
        answers = self._exchanged(ProbeAnswer(self._node[:LONGEST_NAME], probe_compute(self._device)))
        if low is None:
            return
        self._journal.write(
            ThroughputLow(
                seconds=round(low[0], 6),
                before=round(low[1], 6),
                probes=[
                    f"rank {rank} on {answer.node or 'this node'}, {answer.probe.describe()}"
                    for rank, answer in enumerate(answers)
                ],
                accused=slower_node(_speeds(answers)),
            )
        )

    def _told_by_rank_0(self, low: bool) -> bool:
        if self._group.process_group is None:
            return low
        word = torch.tensor([int(low)])
        dist.broadcast(word, src=0, group=self._group.process_group)
        return bool(word.item())

    def _exchanged(self, mine: ProbeAnswer) -> list[ProbeAnswer]:
        if self._group.process_group is None:
            return [mine]
        written = msgspec.json.encode(mine)[:LETTER].ljust(LETTER)
        letter = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        letters = [torch.empty_like(letter) for _ in range(self._group.world_size)]
        dist.all_gather(letters, letter, group=self._group.process_group)
        return [_read(bytes(got.tolist())) for got in letters]


def _read(letter: bytes) -> ProbeAnswer:
    try:
        return msgspec.json.decode(letter, type=ProbeAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ProbeAnswer("", ComputeProbe(device="?", problem="its answer could not be read"))


def _speeds(answers: Sequence[ProbeAnswer]) -> dict[str, list[float]]:
    """Per node, each rank's speed relative to the fastest rank's; 0 for a rank that failed or was wrong."""
    flops = max((answer.probe.gflops for answer in answers), default=0.0) or 1.0
    copies = max((answer.probe.copy_gbps for answer in answers), default=0.0) or 1.0
    speeds: dict[str, list[float]] = {}
    for answer in answers:
        probe = answer.probe
        speed = min(probe.gflops / flops, probe.copy_gbps / copies) if probe.right else 0.0
        speeds.setdefault(answer.node, []).append(speed)
    return speeds


log = logging.getLogger("holdfast")

TRIES = 3
"""Steps at which recording a standing is tried before giving up."""

Recorded = Callable[[], tuple[float | None, float | None]]
"""Loss and gradient norm that the loop recorded for the step just completed: see `Meter.latest`."""


class Probation:
    """One attempt's probation. `begin` after the resume, `observe` in and `completed` after every step."""

    def __init__(
        self,
        steps: int,
        group: Group,
        member: Membership,
        recorded: Recorded,
        launched: LaunchInfo | None = None,
        *,
        node: str = "",
        device: torch.device | None = None,
    ) -> None:
        self.active = False
        """Whether a bad step must be brought before the launcher: probation, or a trial, is going on."""
        self.in_probation = False
        """Whether probation of what this attempt itself loaded is going on."""
        self._steps = steps
        self._group = group
        self._member = member
        self._recorded = recorded
        self._acts = launched is not None
        """Whether a breach ends the attempt: only where another one is started at once."""
        orders = launched.orders if launched is not None else member.told.orders
        self._trial: Trial | None = orders.trial
        self._tried: Rerun | None = orders.rerun if orders.rerun is not None and orders.rerun.breach else None
        """The breach after which the same checkpoint is tried once more."""
        self._settled: Sequence[Settled] = ()
        self._compares = True
        """Rank 0: whether to look for a discontinuity still."""
        self._acquitted = False
        """Rank 0: whether the trial has acquitted; it goes on, so that all ranks count alike."""
        self.miscounted = False
        """Rank 0: whether the breach concerns the counters."""
        self._throughput = Throughput(group, member.journal, node=node, device=device)
        self._rung: CheckpointName | None = None
        self._windows = Windows()
        self._first = 1
        self._accepted = 0
        self._watched = False
        self._outcome = ""
        self._loss: list[float | None] = []
        self._norm: list[float | None] = []
        self._breach: list[str] = []
        self._to_record: list[Callable[[], None]] = []
        self._tries = 0
        self._recording = Look(lambda: self._to_record[0](), "standing")

    def begin(
        self,
        rung: CheckpointName | None,
        manifest: Manifest | None,
        counters: Mapping[str, int],
        settled: Sequence[Settled] = (),
    ) -> list[str]:
        """Take what was loaded, as its manifest and own counters say; the reasons for an immediate breach.

        `counters` are the job's where the manifest's are, else this rank's.
        """
        named = manifest is not None and rung is not None and bool(rung.id)
        self._rung = rung if named else None  # a plain DCP directory has no standing
        self._first = (rung.step if rung is not None else 0) + 1
        self._settled = settled
        self._watched = self.in_probation = self._rung is not None and self._steps > 0
        self._admit_trial()
        self.active = self.in_probation or self._trial is not None
        if manifest is None:
            return []
        self._windows = manifest.windows
        if not self._watched:
            return []
        expected = {"step": manifest.step}
        same_world = manifest.world.size == self._group.world_size
        if same_world or manifest.counts == OF_THE_JOB:  # otherwise the ranks' own were shared out anew
            expected |= {"samples": manifest.samples, "tokens": manifest.tokens}
        if same_world:
            self._throughput.before = manifest.windows.step_seconds
        if not self._group.is_coordinator:
            return []
        wrong = mismatches(counters, expected)
        self.miscounted = bool(wrong)
        return self._breached(wrong)

    def observe(self) -> list[str]:
        """In every step, on every rank, before the group agrees: the reasons for a breach, on rank 0."""
        self.in_probation = self._watched and self._accepted < self._steps
        self.active = self.in_probation or self._trial is not None
        return self._breach

    def completed(self, step: int, seconds: float) -> None:
        """On every rank after each step that was accepted, not dropped, once the loop has recorded it."""
        self._accepted += 1
        on_probation = self._watched and self._accepted <= self._steps
        if not on_probation and self._trial is None and not self._to_record:
            return
        if self._group.is_coordinator:
            self._note(step)
            if on_probation and not self._outcome:
                before = Series(loss=self._windows.loss, grad_norm=self._windows.grad_norm)
                since = Series(loss=self._loss, grad_norm=self._norm)
                self._discontinuous(discontinuities(before, since, self._first), step)
            self._compare_trial(step)
        if on_probation:
            self._throughput.note(seconds)
            if self._accepted == self._steps:
                self._throughput.judge()
                self._pass(step)
        self._settle_trial(step)
        self._record()

    @property
    def rung(self) -> str:
        """What was loaded, by name; empty for a fresh start, or if it has no standing."""
        return str(self._rung) if self._rung is not None else ""

    @property
    def trial(self) -> Trial | None:
        return self._trial

    def acquit(self, suspects: Sequence[str], evidence: list[str]) -> None:
        """On every rank: this attempt, which began below the suspects, has failed as they did."""
        if not suspects:
            return
        self._trial = None
        if self._group.is_coordinator:
            self._to_record.append(lambda: self._acquit(suspects, evidence))
            self._record()

    def close(self) -> None:
        """The attempt ends: what is not settled is recorded as unsettled."""
        if self._watched and not self._outcome:
            self._end("unsettled", [f"{self._accepted} of {self._steps} steps were completed"])
        self.active = self.in_probation = False

    # --- what the loop recorded, compared with before -------------------------------------------------------

    def _note(self, step: int) -> None:
        loss, norm = self._recorded()
        dropped = [None] * (step - self._first - len(self._loss))
        self._loss += [*dropped, loss]
        self._norm += [*dropped, norm]

    def _compare_trial(self, step: int) -> None:
        if self._trial is None or self._breach or not self._compares or step > self._trial.until:
            return
        tried = ", ".join(self._trial.suspects)
        found = self._as_on_trial(self._trial)
        self._discontinuous([f"{reason}; as after {tried}, on trial" for reason in found], step)

    def _discontinuous(self, reasons: list[str], step: int) -> None:
        """On rank 0: the run does not go on from where it was. A breach, or known to be its own doing?"""
        if not reasons:
            return
        known = settled_as(self._settled, How.SHIFT, step, None, 0)
        trial, tried = self._trial, self._tried
        if trial is not None and self.rung in trial.suspects:
            trial = None  # somebody forced it to be loaded, which acquits it of nothing
        if known is not None:
            self._take_as_it_is(reasons, f"settled before: {known.why}")
        elif trial is not None and max(name.step for name in _names(trial)) < step <= trial.until:
            others = ", ".join(trial.suspects)
            why = f"{self.rung or 'a fresh start'} shows it too, so {others} is not the cause"
            self._acquitted = True
            self._to_record.append(lambda: self._acquit(trial.suspects, [*reasons, why]))
            self._take_as_it_is(reasons, why, step)
        elif tried is not None and tried.settles and not self.miscounted:
            why = f"{self.rung} shows it again, and there is no other checkpoint to compare it with"
            self._take_as_it_is(reasons, why, step)
        else:
            self._breached(reasons)

    def _take_as_it_is(self, reasons: list[str], why: str, step: int = 0) -> None:
        """From here on the level is a different one, and the run goes on; with `step`, that is settled for
        good."""
        self._compares = False
        if not self._outcome:
            self._end("unsettled", [*reasons, why])
        because = "; ".join([*reasons, why])
        self._warn(
            f"what was loaded does not go on from where it was, but the run goes on with it: {because}"
        )
        if step:
            world = self._group.world_size
            settled = Settled(step=step, how=How.SHIFT, world_size=world, shown=True, why=why)
            member = self._member
            self._to_record.append(lambda: record_settled(member.control, member.attempt, settled))

    def _as_on_trial(self, trial: Trial, strictness: float = 1.0) -> list[str]:
        """What is wrong with the very steps in which the suspect was watched, after the same window."""
        at = max(0, max(name.step for name in _names(trial)) + 1 - self._first)
        before = Series(
            loss=[*self._windows.loss, *self._loss[:at]][-WINDOW:],
            grad_norm=[*self._windows.grad_norm, *self._norm[:at]][-WINDOW:],
        )
        since = Series(loss=self._loss[at:], grad_norm=self._norm[at:])
        return discontinuities(before, since, self._first + at, strictness=strictness)

    def _breached(self, reasons: list[str]) -> list[str]:
        if not reasons:
            return []
        self._end("breached", reasons)
        if self._acts:
            self._breach = reasons
            return reasons
        name = str(self._rung)
        self._warn(
            f"what was loaded from {name} does not go on from where it was: {'; '.join(reasons)}. Nobody "
            "acts on this, because the run was not started with `holdfast run`. If it is bad, stop, then "
            f"`holdfast ckpt condemn RUN_DIR {name} --reason …`, and start again"
        )
        return []

    # --- how it ends ----------------------------------------------------------------------------------------

    def _pass(self, step: int) -> None:
        if self._outcome or not self._group.is_coordinator or self._rung is None:
            return
        evidence = [
            f"{self._steps} steps after attempt {self._member.attempt} loaded it, up to {step}, went well"
        ]
        self._end("passed", evidence)
        if self._tried is not None:
            again = f"a resume failed at step {self._tried.step}; the one from {self._rung} goes on well"
            self._member.journal.write(
                Verdict(verdict="transient", step=self._tried.step, evidence=[again, *evidence])
            )
        rung = self._rung
        self._to_record.append(lambda: self._prove(rung, evidence))

    def _prove(self, rung: CheckpointName, evidence: list[str]) -> None:
        now = StandingBook(self._member.control).of(str(rung))
        if now not in (Standing.PROVEN, Standing.SUSPECT, Standing.CONDEMNED):
            self._change(rung, Standing.PROVEN, evidence)

    def _admit_trial(self) -> None:
        """Drop a trial that shows nothing: this attempt must replay the step at which the suspect failed."""
        trial = self._trial
        if trial is not None and not (_names(trial) and self._first <= trial.until):
            suspects = ", ".join(trial.suspects)
            self._warn(
                f"no trial of {suspects}: this attempt begins after step {trial.until}, at which it failed"
            )
            self._trial = None

    def _settle_trial(self, step: int) -> None:
        trial = self._trial
        if trial is None or step < trial.until:
            return
        self._trial = None
        if not self._group.is_coordinator or self._breach or self._acquitted:
            return
        if step > trial.until:
            self._warn(
                f"{', '.join(trial.suspects)} stay suspect: step {trial.until} was dropped in their trial"
            )
            return
        if doubt := self._as_on_trial(trial, IN_DOUBT):
            self._warn(
                f"{', '.join(trial.suspects)} stay suspect: their trial is in doubt: {'; '.join(doubt)}"
            )
            return
        came_from = str(self._rung) if self._rung is not None else "nothing"
        evidence = [
            f"attempt {self._member.attempt}, from {came_from}, replayed the same samples and completed step "
            f"{trial.until}, at which what was loaded from {', '.join(trial.suspects)} failed"
        ]
        self._to_record.append(lambda: self._condemn(trial, evidence))

    def _condemn(self, trial: Trial, evidence: list[str]) -> None:
        """From the newest back: if interrupted, nothing usable descends from what is condemned."""
        book = StandingBook(self._member.control)
        suspects = [name for name in _names(trial) if book.of(str(name)) is Standing.SUSPECT]
        later: dict[CheckpointName, CheckpointName] = {}
        timeline = read_timeline(self._member.control)
        records = timeline.on_line + timeline.abandoned
        for suspect in suspects:
            for record in descendants({suspect.id}, records):
                later.setdefault(CheckpointName(record.step, record.id), suspect)
        if self._rung in {*later, *suspects}:
            self._warn(
                f"{', '.join(trial.suspects)} stay suspect: their trial began from {self._rung}, of their kin"
            )
            return
        guilty = sorted({*later, *suspects}, key=lambda name: name.step, reverse=True)
        for name in guilty:
            if book.of(str(name)) is not Standing.CONDEMNED:
                with_it = [] if name in suspects else [condemned_with(str(later[name]))]
                self._change(name, Standing.CONDEMNED, [*evidence, *with_it])

    def _acquit(self, suspects: Sequence[str], evidence: list[str]) -> None:
        book = StandingBook(self._member.control)
        for name in map(parse_name, suspects):
            if name is not None and book.of(str(name)) is Standing.SUSPECT:
                self._change(name, Standing.ACQUITTED, evidence)

    def _change(self, name: CheckpointName, standing: Standing, evidence: list[str]) -> None:
        member = self._member
        StandingBook(member.control).append(member.fence, str(name), standing, evidence)
        member.journal.write(StandingChanged(checkpoint=str(name), standing=str(standing), evidence=evidence))

    def _record(self) -> None:
        """Write what is settled. A failure is retried after the next steps, then given up, loudly.

        Training does not wait for a file system that does not answer: the outcome is then checked after the
        next steps.
        """
        while self._to_record:
            recorded = self._recording.take()
            if recorded is None:
                return
            try:
                recorded.result()
            except (ControlError, OSError) as error:
                self._tries += 1
                if self._tries < TRIES:
                    return
                self._warn(f"a standing could not be recorded, and stays what it was: {error}")
            self._tries = 0
            self._to_record.pop(0)

    def _end(self, outcome: str, evidence: Sequence[str]) -> None:
        self._outcome = outcome
        if self._group.is_coordinator and self._rung is not None:
            last = self._first + len(self._loss) - 1
            self._member.journal.write(
                ProbationEnded(
                    checkpoint=str(self._rung), outcome=outcome, first=self._first, last=last,
                    evidence=list(evidence),
                )
            )  # fmt: skip

    def _warn(self, message: str) -> None:
        if self._group.is_coordinator:
            log.warning("holdfast: %s", message)
            self._member.journal.write(Warned(message=message))


def _names(trial: Trial) -> list[CheckpointName]:
    return [name for name in map(parse_name, trial.suspects) if name is not None]
