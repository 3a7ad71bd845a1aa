"""What becomes of a rejected result: shared with all ranks, compared with earlier attempts, judged.

Guarantee: what is not finite is dropped, or ends the attempt, on every rank alike, and never reaches an
optimizer (with deferred checks it already has when it is seen: then the run rolls back, or says so). A value
that is finite and merely odd is accepted, with a warning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from holdfast.checkpoint.state import Tracked
from holdfast.config import ValidationSettings
from holdfast.errors import ControlError, RerunWantedError, ValidationFailedError
from holdfast.journal import Event
from holdfast.journal.events import StepRejected, Verdict, Warned, encode_loss
from holdfast.policy import (
    Act,
    Count,
    How,
    Kind,
    Place,
    RankResult,
    Rejection,
    ReplayFinding,
    Rerun,
    Settled,
    Settling,
    Trial,
    Window,
    batch_in_words,
    judge_replay,
    settle,
    settled_as,
)
from holdfast.record import (
    NAME,
    ControlDirectory,
    Group,
    count_transient,
    read_key,
    record_rejection,
    record_settled,
    settled_steps,
    share,
)
from holdfast.train import Membership, Meter, Probation
from holdfast.train.check.checks import Severity, StepLook
from holdfast.train.check.rerun import Dropping, Locator, difference, mark, same
from holdfast.train.data import DataFeed

# How the ranks tell each other what was bad, and how an attempt ends because of it.
#
# Guarantee: what is rejected is recorded before any rank ends, so that it is found when the next attempt is
# decided about; without the launcher that happens here as well (train/membership.py). Every rank ends with
# the same error. If recording failed, that error says so, and hides nothing else.


log = logging.getLogger("holdfast")

MOST_REASONS = 8


class RankReport(msgspec.Struct, frozen=True):
    """One rank's own result, and what else it saw: gradients of the whole group, for example."""

    result: RankResult
    seen: list[str] = []
    samples: list[int] = []
    """For a result that is not finite: the samples in this rank's batch, as far as known."""
    window: Window | None = None
    """The step's data, as this rank counts them: what is known about the step goes by rank 0's."""


class Rejecting:
    def __init__(
        self,
        group: Group,
        member: Membership,
        *,
        launched: bool,
        max_transients: int,
        decide: Callable[[], tuple[str, str]] | None = None,
    ) -> None:
        """`decide`: without the launcher, what follows from a rejection once it is recorded."""
        self._group = group
        self._member = member
        self.launched = launched
        self._decide = decide
        self._max_transients = max_transients

    def tell(self, event: Event) -> None:
        """Write it into the journal, once for all ranks."""
        if self._group.is_coordinator:
            self._member.journal.write(event)

    def warn(self, message: str) -> None:
        self.tell(Warned(message=message))
        if self._group.is_coordinator:
            log.warning("holdfast: %s", message)

    def exchange(self, own: RankReport) -> list[RankReport]:
        """Every rank's report, on every rank, in order."""
        found = share(self._group, msgspec.json.encode(own))
        return [msgspec.json.decode(raw, type=RankReport) for raw in found]

    def exchange_texts(self, own: str) -> list[str]:
        return share(self._group, own)

    def transient(self, findings: Sequence[ReplayFinding], step: int) -> None:
        """Count it against its device. A device that has had too many is accused, and the attempt ends."""
        accused: list[tuple[str, str, int]] = []
        if self._group.is_coordinator:
            for finding in findings:
                place = finding.place or Place("")
                self.tell(
                    Verdict(
                        verdict="transient",
                        step=step,
                        evidence=[finding.evidence],
                        node=place.node,
                        device=place.device,
                    )
                )
                if finding.place is None:
                    continue
                count = self._count(finding.place, step, finding.evidence)
                if count >= self._max_transients:
                    accused.append((place.node, place.device, count))
        accused = share(self._group, accused)[0]
        if not accused:
            return
        node, device, count = accused[0]
        shown = f"{node or 'this node'}{f', device {device}' if device else ''}"
        reason = f"{shown} had {count} transient faults, {self._max_transients} are too many"
        if self.launched:
            self.reject(Rejection(kind=Kind.DEVICE, step=step, reasons=[reason], accused=Place(node, device)))
        self.warn(f"{reason}; without `holdfast run` nothing keeps it out of the run")

    def _count(self, place: Place, step: int, evidence: str) -> int:
        try:
            return count_transient(
                self._member.control, place, attempt=self._member.attempt, step=step, evidence=[evidence]
            )
        except (ControlError, OSError) as error:
            self.warn(f"a transient fault of step {step} could not be counted: {error}")
            return 0

    def settle(self, settled: Settled) -> None:
        """Keep a verdict on a step for every later attempt. Without it, that step would be judged again."""
        if not self._group.is_coordinator:
            return
        try:
            record_settled(self._member.control, self._member.attempt, settled)
        except (ControlError, OSError) as error:
            self.warn(f"what was settled about step {settled.step} could not be recorded: {error}")

    def reject(self, rejection: Rejection) -> NoReturn:
        """Record it, then end every rank with code 16; without the launcher with 17, if that is the end."""
        problem = then = end = ""
        if self._group.is_coordinator:
            try:
                if not record_rejection(self._member.control, self._member.attempt, rejection):
                    problem = "; this attempt had already rejected something, and that is what counts"
            except (ControlError, OSError) as error:
                problem = f"; it could not be recorded: {error}"
            if self._decide is not None and not problem:
                then, end = self._decide()
        problem, then, end = share(self._group, (problem, then, end))[0]  # nobody ends before it is recorded
        if end:
            raise ValidationFailedError(f"step {rejection.step}: {in_words(rejection.reasons)}. {end}")
        wanted = {
            Kind.STEP: "it has to be run again by another attempt",
            Kind.PROBATION: "it has to be tried again, then another checkpoint",
            Kind.ROLLBACK: "the run has to go back past its newest checkpoint",
            Kind.DEVICE: "that device has to be kept out",
        }[rejection.kind]
        about = "after step" if rejection.kind is Kind.PROBATION else "step"
        next_start = f" ({then})" if then else ""
        raise RerunWantedError(
            f"{about} {rejection.step}: {in_words(rejection.reasons)}; {wanted}. `holdfast run` does so by "
            f"itself; otherwise start the run again{next_start}. Evidence: {NAME} of attempt "
            f"{self._member.attempt}{problem}"
        )


def in_words(reasons: Sequence[str]) -> str:
    shown = "; ".join(reasons[:MOST_REASONS])
    return f"{shown}; and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else shown


def summary(reports: Sequence[RankReport]) -> list[str]:
    """Why a step was rejected, rank by rank; what all ranks saw appears only once."""
    alone = len(reports) == 1
    reasons = [
        reason if alone else f"rank {report.result.rank}: {reason}"
        for report in reports
        for reason in report.result.reasons
    ]
    if not reasons:
        reasons = list(dict.fromkeys(reason for report in reports for reason in report.seen))
    return reasons[: 4 * MOST_REASONS]


def batch_of(reports: Sequence[RankReport]) -> str:
    """The data of a rejected step in words, with the samples of the ranks whose own results were bad."""
    samples = {report.result.rank: report.samples for report in reports if report.result.reasons}
    return batch_in_words(reports[0].window, samples, len(reports))


def bad_ranks(reports: Sequence[RankReport]) -> list[int]:
    return [report.result.rank for report in reports if report.result.reasons]


# Steps that are replayed: what earlier attempts settled about them, and the one whose rejection made this
# attempt necessary, compared with how it was.
#
# All ranks know the same: what the launcher told all of them, and what rank 0 read from the records.
#
# Before such a step is computed, every rank that was bad then takes a mark of the state it begins from. When
# the step is complete and was accepted at once, marks and devices say whether it was the device (see
# policy/verdicts.py).


KEY = "settled"


class Replayed:
    def __init__(
        self,
        rerun: Rerun | None,
        tracked: Tracked,
        group: Group,
        place: Place,
        rejecting: Rejecting,
        *,
        restarts_left: int | None = None,
        leaves_out: bool = False,
    ) -> None:
        """`leaves_out`: the launcher may leave a step's data out."""
        self._rerun = rerun if rerun is not None and not rerun.breach else None
        self._restarts_left = restarts_left
        self._leaves_out = leaves_out
        self.settled: list[Settled] = []
        """What is known of steps, from every attempt before this one."""
        self._tracked = tracked
        self._group = group
        self._place = place
        self._rejecting = rejecting
        self._now: list[tuple[Place, str]] | None = None
        """Each rank's place and mark."""

    def learn(self, control: ControlDirectory, timeout: float) -> None:
        """On all ranks after the resume: rank 0 reads what was settled, and tells the others."""
        if self._group.is_coordinator:
            self.settled = settled_steps(control)
            self._group.store.set(KEY, msgspec.json.encode(self.settled).decode())
            return
        raw = read_key(self._group.store, KEY, timeout, "the verdicts on steps that rank 0 has read")
        self.settled = msgspec.json.decode(raw, type=list[Settled])

    def known(self, how: How, step: int, window: Window | None) -> Settled | None:
        return settled_as(self.settled, how, step, window, self._group.world_size)

    def accepts(self, step: int, window: Window | None) -> bool:
        """Whether this step is to be accepted if it is rejected once more for a value that is finite."""
        ordered = self._rerun is not None and self._rerun.step == step and self._rerun.accept
        return ordered or self.known(How.ACCEPTED, step, window) is not None

    def settle(
        self,
        step: int,
        results: Sequence[RankResult],
        window: Window | None,
        *,
        rung: str,
        trial: Trial | None,
        ran_again: bool,
    ) -> Settling | None:
        """Why a step that is not finite needs no further attempt; None if the launcher has to be asked."""
        return settle(
            step,
            results,
            rung=rung,
            rerun=self._rerun,
            trial=trial,
            settled=self.known(How.TOLERATED, step, window),
            restarts_left=self._restarts_left,
            left_out=self._leaves_out and window is not None,
            ran_again=ran_again,
        )

    def before(self, step: int) -> None:
        """The step is about to be computed, on all ranks."""
        if self._rerun is None or self._rerun.step != step:
            return
        was_bad = any(result.rank == self._group.rank for result in self._rerun.bad)
        own = mark(self._tracked, buffers=True) if was_bad else ""
        texts = self._rejecting.exchange_texts(f"{self._place.node}\n{self._place.device}\n{own}")
        self._now = []
        for text in texts:
            node, device, state = text.split("\n")
            self._now.append((Place(node, device), state))

    def passed(self, step: int) -> None:
        """The step is complete, with nothing in it rejected; every rank comes to the same verdict."""
        rerun, now = self._rerun, self._now
        if rerun is None or rerun.step != step or now is None:
            return
        self._rerun = None
        places = {rank: place for rank, (place, _) in enumerate(now)}
        states = {one.rank: same(one.state, now[one.rank][1]) for one in rerun.bad if one.rank in places}
        findings = judge_replay(rerun, places, states)
        guilty = [finding for finding in findings if finding.verdict == "device"]
        self._rejecting.transient([f for f in findings if f.verdict != "device"], step)
        for finding in guilty:
            assert finding.place is not None
            self._rejecting.tell(
                Verdict(
                    verdict="device",
                    step=step,
                    evidence=[finding.evidence],
                    node=finding.place.node,
                    device=finding.place.device,
                )
            )
        if not guilty:
            return
        evidence = [finding.evidence for finding in guilty]
        if rerun.can_exclude and self._rejecting.launched:
            self._rejecting.reject(
                Rejection(kind=Kind.DEVICE, step=step, reasons=evidence, accused=guilty[0].place)
            )
        self._rejecting.warn(
            f"{in_words(evidence)}. The run cannot go on without that device, so it keeps using it"
        )


@dataclass
class Done:
    """What one run of a call returned, on this rank."""

    result: Any
    look: StepLook

    @property
    def severity(self) -> Severity:
        return severity_of(self.look)


def severity_of(look: StepLook) -> Severity:
    if not look.reasons:
        return Severity.FINE
    return Severity.ODD if look.finite else Severity.NONFINITE


class Judging:
    """One per attempt. Every rank calls it alike."""

    def __init__(
        self,
        chosen: ValidationSettings,
        tracked: Tracked,
        group: Group,
        *,
        place: Place,
        rejecting: Rejecting,
        probation: Probation,
        replayed: Replayed,
        meter: Meter,
        feed: DataFeed | None,
    ) -> None:
        self._chosen = chosen
        self._tracked = tracked
        self._group = group
        self._place = place
        self._rejecting = rejecting
        self._probation = probation
        self._replayed = replayed
        self._shown = False
        """Whether this attempt has shown a step to fail whatever was loaded."""
        self._meter = meter
        self._feed = feed
        self.count = Count(chosen.nan_policy, chosen.max_consecutive)
        self.dropping = Dropping(tracked)

    def judge(self, done: Done, severity: Severity, step: int) -> None:
        """Judge a step that is not run again: accept it, drop it, or end here."""
        if severity is Severity.ODD:
            reports = self._rejecting.exchange(self.report(done))
            self.tell(reports, step, "accepted")
            self._rejecting.warn(
                f"step {step} is accepted although it is odd: {in_words(summary(reports))}. "
                "validation.rerun_mode = validate_results would run it again"
            )
            return
        self.dropping.drop()
        self._meter.told.add(step)
        in_doubt = self._in_doubt
        reports = self._rejecting.exchange(self.report(done, marked=in_doubt))
        settling = self._settle(reports, step) if in_doubt else None
        if in_doubt and settling is None:
            self._ask(reports, step, "none: the step was not run again")
        self._drop(reports, step, settling)

    def judge_again(self, reports: Sequence[RankReport], step: int) -> bool:
        """Not finite even when run again: returns whether that is settled, and the step dropped."""
        settling = self._settle(reports, step, ran_again=True)
        if settling is None:
            return False
        self.dropping.drop()
        self._meter.told.add(step)
        self._drop(reports, step, settling)
        return True

    @property
    def _in_doubt(self) -> bool:
        """Whether what was loaded may be the cause, and there is a launcher to find out."""
        return self._probation.active and self._rejecting.launched

    def _settle(
        self, reports: Sequence[RankReport], step: int, *, ran_again: bool = False
    ) -> Settling | None:
        """Why a step that is not finite needs no further attempt; the same on every rank."""
        probation = self._probation
        found = self._replayed.settle(
            step,
            [report.result for report in reports],
            reports[0].window,
            rung=probation.rung,
            trial=probation.trial,
            ran_again=ran_again,
        )
        if found is None and self._shown and (not ran_again or self.count.in_a_row):
            found = Settling(why="an earlier step of this attempt failed whatever was loaded", shown=True)
        if found is not None and found.here:
            self._shown = True
            evidence = [*summary(reports), found.why]
            self._rejecting.tell(Verdict(verdict="reproducible", step=step, evidence=evidence))
            probation.acquit(found.acquit, evidence)
        return found

    def _ask(self, reports: Sequence[RankReport], step: int, diagnostic: str) -> NoReturn:
        """Leave it to the launcher to find out what is at fault."""
        self.tell(reports, step, "restart")
        self.reject(reports, Severity.NONFINITE, step, diagnostic=diagnostic)

    def _drop(self, reports: Sequence[RankReport], step: int, settling: Settling | None) -> None:
        """Do what the user's policy says about a step that is not finite."""
        outcome = self.count.after(bad=True)
        reasons = summary(reports)
        if outcome.act is Act.ROLL_BACK:
            self.tell(reports, step, "restart")
            self.roll_back(reports, step, outcome.why)
        if outcome.act is Act.STOP:
            if settling is not None and not settling.shown and self.count.policy != "raise":
                # Step after step is bad: so it may well be what was loaded, and nobody has checked that yet.
                self._ask(reports, step, "none: the step was not run again")
            self.tell(reports, step, "stop")
            if settling is not None and settling.shown:
                self._end(reports, step, f"{settling.why}; {outcome.why}")
            self.stop(step, reasons, outcome.why)
        self.tell(reports, step, "dropped", in_a_row=outcome.in_a_row if outcome.warn else 0)
        why = settling.why if settling is not None else ""
        self._keep(reports, step, why or f"it was dropped: {in_words(reasons)}", settling)
        if outcome.warn and not self._rejecting.launched:  # otherwise the launcher reports it
            batch = batch_of(reports)
            self._rejecting.warn(
                f"step {step}{f', {batch},' if batch else ''} is dropped on all ranks, "
                f"{outcome.in_a_row} in a row: {in_words(reasons)}" + (f"; {why}" if why else "")
            )

    def _keep(self, reports: Sequence[RankReport], step: int, why: str, settling: Settling | None) -> None:
        window = reports[0].window
        known = self._replayed.known(How.TOLERATED, step, window)
        shown = settling is not None and settling.shown
        if known is not None and known.shown >= shown:
            return
        world = self._group.world_size
        self._rejecting.settle(
            Settled(step=step, how=How.TOLERATED, window=window, world_size=world, shown=shown, why=why)
        )

    def _end(self, reports: Sequence[RankReport], step: int, why: str) -> None:
        """Record that any further start of the run would come to the same end."""
        world, window = self._group.world_size, reports[0].window
        self._rejecting.settle(
            Settled(step=step, how=How.FATAL, window=window, world_size=world, shown=True, why=why)
        )

    def accepted(self, reports: Sequence[RankReport], step: int, why: str) -> None:
        """A finite step that was rejected everywhere is accepted, in this and every later attempt."""
        world, window = self._group.world_size, reports[0].window
        if self._replayed.known(How.ACCEPTED, step, window) is None:
            self._rejecting.settle(
                Settled(step=step, how=How.ACCEPTED, window=window, world_size=world, shown=True, why=why)
            )

    def judge_used(self, look: StepLook, severity: Severity, step: int, *, bad: int, used: str) -> list[str]:
        """The same for a step that was complete before it was looked at; returns why it is bad, alike on all.

        `bad` steps in a row are not finite; `used` says in words why none was dropped.
        """
        done = Done(None, look)
        shared = self._rejecting.exchange(self.report(done))
        reports = [msgspec.structs.replace(report, window=None) for report in shared]  # the data has moved on
        reasons = summary(reports)
        if severity is Severity.NONFINITE:
            self._meter.told.add(step)
            if self._in_doubt:
                settling = self._settle(reports, step)
                if settling is None:
                    self._ask(reports, step, "none: the state has moved on")
                self._keep(reports, step, settling.why, settling)
            if self._chosen.nan_policy == "rollback":
                self.tell(reports, step, "restart")
                self.roll_back(reports, step, used)
            if self._chosen.nan_policy == "raise":
                self.tell(reports, step, "stop")
                self.stop(step, reasons, f"the policy for a bad step is to raise; {used}")
            for _ in range(max(1, bad)):
                outcome = self.count.after(bad=True)
            if outcome.act is Act.STOP:
                self.tell(reports, step, "stop")
                self.stop(step, reasons, f"{outcome.why}; {used}")
        self.tell(reports, step, "accepted")
        self._rejecting.warn(f"step {step} is bad: {in_words(reasons)}; {used}")
        return reasons

    def stop(self, step: int, reasons: Sequence[str], why: str) -> NoReturn:
        raise ValidationFailedError(
            f"step {step} is not finite: {in_words(reasons)}. The run stops because {why} "
            f"(validation.nan_policy = {self._chosen.nan_policy}). Look at the data and the learning rate, "
            "then start the run again"
        )

    def roll_back(self, reports: Sequence[RankReport], step: int, why: str) -> NoReturn:
        self._rejecting.reject(
            Rejection(
                kind=Kind.ROLLBACK,
                step=step,
                reasons=[why, *summary(reports)],
                ranks=[report.result for report in reports if report.result.reasons],
                in_probation=self._probation.in_probation,
                window=self._window(),
            )
        )

    def breached(self) -> NoReturn:
        """What was loaded does not go on from where it was; rank 0 knows why."""
        texts = self._rejecting.exchange_texts("\n".join(self._probation.observe()))
        reasons = next(text for text in texts if text).split("\n")
        self._rejecting.reject(
            Rejection(
                kind=Kind.PROBATION,
                step=self._meter.step,
                reasons=reasons,
                in_probation=True,
                counters=self._probation.miscounted,  # rank 0 knows, and it records this
            )
        )

    def reject(
        self,
        reports: Sequence[RankReport],
        severity: Severity,
        step: int,
        *,
        rerun: bool = False,
        diagnostic: str,
    ) -> NoReturn:
        results = [report.result for report in reports]
        self._rejecting.reject(
            Rejection(
                kind=Kind.STEP,
                step=step,
                reasons=summary(reports),
                ranks=[one for one in results if one.reasons or one.differs],
                rerun=rerun,
                finite=severity is Severity.ODD,
                in_probation=self._probation.in_probation,
                window=self._window(),
                diagnostic=diagnostic,
            )
        )

    def report(self, done: Done, *, marked: bool = False) -> RankReport:
        """This rank's report. Only its loss gives it its own reasons: gradients may be the whole group's."""
        look = done.look
        own_loss = look.loss is not None and not math.isfinite(look.loss)
        own = self._group.world_size == 1 or own_loss or look.finite
        reasons = list(look.reasons) if own else []
        state = mark(self._tracked, buffers=False) if reasons and marked else ""
        result = self._result(reasons, state, first=look.loss)
        return RankReport(result, look.reasons, self._samples(look), self._window())

    def report_again(
        self, first: Done, second: Done, locator: Locator, *, tolerance: float, buffers: bool
    ) -> RankReport:
        """The same for a step that was run again, now that its state is what it began from.

        A gradient that was bad before being reduced is this rank's own, too.
        """
        look = second.look
        where = locator.where
        if not where and locator.own_gradient:
            where = f"the gradient of {locator.own_gradient}"
        reasons = list(look.reasons) if where else self.report(second).result.reasons
        result = self._result(
            reasons,
            mark(self._tracked, buffers=buffers) if reasons else "",
            first=first.look.loss,
            again=look.loss,
            differs=difference(first.look.loss, look.loss) > tolerance,
            where=where,
        )
        return RankReport(result, look.reasons, self._samples(look), self._window())

    def _result(
        self,
        reasons: list[str],
        state: str,
        *,
        first: float | None,
        again: float | None = None,
        differs: bool = False,
        where: str = "",
    ) -> RankResult:
        return RankResult(
            rank=self._group.rank,
            node=self._place.node,
            device=self._place.device,
            reasons=reasons,
            first=encode_loss(first),
            again=encode_loss(again),
            differs=differs,
            state=state,
            where=where,
        )

    def tell(self, reports: Sequence[RankReport], step: int, then: str, *, in_a_row: int = 0) -> None:
        self._rejecting.tell(
            StepRejected(
                step=step,
                reasons=summary(reports),
                ranks=bad_ranks(reports),
                then=then,
                batch=batch_of(reports),
                in_a_row=in_a_row,
            )
        )

    def _samples(self, look: StepLook) -> list[int]:
        return self._feed.samples() if self._feed is not None and not look.finite else []

    def _window(self) -> Window | None:
        return self._feed.window() if self._feed is not None else None
