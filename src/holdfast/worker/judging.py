"""What becomes of a result that was rejected and is not, or not any more, run again.

Guarantee: what is not finite is dropped, or ends the attempt, on every rank alike, and never reaches an
optimizer (with deferred checks it did before it was seen: then it is gone back from, or said). A value that
is finite and only odd is accepted, with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from holdfast.checkpoint.state import Tracked
from holdfast.control.group import Group
from holdfast.errors import ValidationFailedError
from holdfast.journal.events import StepRejected, Verdict, encode_loss
from holdfast.policy.nonfinite import Act, Count
from holdfast.policy.rejection import How, Kind, Place, RankResult, Rejection, Settled, Window
from holdfast.policy.replay import Settling
from holdfast.settings_validation import ValidationSettings
from holdfast.worker.agreement import Severity
from holdfast.worker.checking import Look
from holdfast.worker.data import DataFeed
from holdfast.worker.determinism import difference
from holdfast.worker.dropping import Dropping
from holdfast.worker.locating import Locator
from holdfast.worker.meter import Meter
from holdfast.worker.probation import Probation
from holdfast.worker.rejecting import Rejecting, Report, bad_ranks, batch_of, in_words, summary
from holdfast.worker.replayed import Replayed
from holdfast.worker.state_mark import mark


@dataclass
class Done:
    """What one run of a call gave, on this rank."""

    result: Any
    look: Look

    @property
    def severity(self) -> Severity:
        return severity_of(self.look)


def severity_of(look: Look) -> Severity:
    if not look.reasons:
        return Severity.FINE
    return Severity.ODD if look.finite else Severity.NONFINITE


class Judging:
    """One for an attempt. Every rank calls it alike."""

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
        """Whether this attempt has shown that a step fails whatever was loaded."""
        self._meter = meter
        self._feed = feed
        self.count = Count(chosen.nan_policy, chosen.max_consecutive)
        self.dropping = Dropping(tracked)

    def judge(self, done: Done, severity: Severity, step: int) -> None:
        """A step that is not run again: accept it, drop it, or end here."""
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

    def judge_again(self, reports: Sequence[Report], step: int) -> bool:
        """Not finite, also when it was run again: whether that is settled, and the step dropped."""
        settling = self._settle(reports, step, ran_again=True)
        if settling is None:
            return False
        self.dropping.drop()
        self._meter.told.add(step)
        self._drop(reports, step, settling)
        return True

    @property
    def _in_doubt(self) -> bool:
        """Whether what was loaded may be the cause, and somebody is there to find out."""
        return self._probation.active and self._rejecting.launched

    def _settle(self, reports: Sequence[Report], step: int, *, ran_again: bool = False) -> Settling | None:
        """Why no other attempt is needed for a step that is not finite; the same on every rank."""
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

    def _ask(self, reports: Sequence[Report], step: int, diagnostic: str) -> NoReturn:
        """The launcher finds out what is at fault."""
        self.tell(reports, step, "restart")
        self.reject(reports, Severity.NONFINITE, step, diagnostic=diagnostic)

    def _drop(self, reports: Sequence[Report], step: int, settling: Settling | None) -> None:
        """What the user's policy says of a step that is not finite."""
        outcome = self.count.after(bad=True)
        reasons = summary(reports)
        if outcome.act is Act.ROLL_BACK:
            self.tell(reports, step, "restart")
            self.roll_back(reports, step, outcome.why)
        if outcome.act is Act.STOP:
            if settling is not None and not settling.shown and self.count.policy != "raise":
                # One step after the other: so it may well be what was loaded, and nobody has looked yet.
                self._ask(reports, step, "none: the step was not run again")
            self.tell(reports, step, "stop")
            if settling is not None and settling.shown:
                self._end(reports, step, f"{settling.why}; {outcome.why}")
            self.stop(step, reasons, outcome.why)
        self.tell(reports, step, "dropped", in_a_row=outcome.in_a_row if outcome.warn else 0)
        why = settling.why if settling is not None else ""
        self._keep(reports, step, why or f"it was dropped: {in_words(reasons)}", settling)
        if outcome.warn and not self._rejecting.launched:  # else the launcher tells it
            batch = batch_of(reports)
            self._rejecting.warn(
                f"step {step}{f', {batch},' if batch else ''} is dropped on all ranks, "
                f"{outcome.in_a_row} in a row: {in_words(reasons)}" + (f"; {why}" if why else "")
            )

    def _keep(self, reports: Sequence[Report], step: int, why: str, settling: Settling | None) -> None:
        window = reports[0].window
        known = self._replayed.known(How.TOLERATED, step, window)
        shown = settling is not None and settling.shown
        if known is not None and known.shown >= shown:
            return
        world = self._group.world_size
        self._rejecting.settle(
            Settled(step=step, how=How.TOLERATED, window=window, world_size=world, shown=shown, why=why)
        )

    def _end(self, reports: Sequence[Report], step: int, why: str) -> None:
        """Whoever starts the run again would come to the same end."""
        world, window = self._group.world_size, reports[0].window
        self._rejecting.settle(
            Settled(step=step, how=How.FATAL, window=window, world_size=world, shown=True, why=why)
        )

    def accepted(self, reports: Sequence[Report], step: int, why: str) -> None:
        """A finite step that was rejected everywhere is accepted, from now on in every attempt."""
        world, window = self._group.world_size, reports[0].window
        if self._replayed.known(How.ACCEPTED, step, window) is None:
            self._rejecting.settle(
                Settled(step=step, how=How.ACCEPTED, window=window, world_size=world, shown=True, why=why)
            )

    def judge_used(self, look: Look, severity: Severity, step: int, *, bad: int, used: str) -> list[str]:
        """The same for a step that was complete before it was looked at; why it is bad, for all ranks alike.

        `bad` of them are not finite, in a row; `used` says in words why none was dropped.
        """
        done = Done(None, look)
        told = self._rejecting.exchange(self.report(done))
        reports = [msgspec.structs.replace(one, window=None) for one in told]  # the data have moved on
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

    def roll_back(self, reports: Sequence[Report], step: int, why: str) -> NoReturn:
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
        told = self._rejecting.exchange_texts("\n".join(self._probation.observe()))
        reasons = next(text for text in told if text).split("\n")
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
        reports: Sequence[Report],
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

    def report(self, done: Done, *, marked: bool = False) -> Report:
        """This rank's share. Reasons of its own are those of its loss: gradients may be the whole group's."""
        look = done.look
        own_loss = look.loss is not None and not math.isfinite(look.loss)
        own = self._group.world_size == 1 or own_loss or look.finite
        reasons = list(look.reasons) if own else []
        state = mark(self._tracked, buffers=False) if reasons and marked else ""
        result = self._result(reasons, state, first=look.loss)
        return Report(result, look.reasons, self._samples(look), self._window())

    def report_again(
        self, first: Done, second: Done, locator: Locator, *, tolerance: float, buffers: bool
    ) -> Report:
        """The same of a step that was run again, now that its state is what it began from.

        A gradient that was bad before it was reduced is this rank's own, too.
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
        return Report(result, look.reasons, self._samples(look), self._window())

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

    def tell(self, reports: Sequence[Report], step: int, then: str, *, in_a_row: int = 0) -> None:
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

    def _samples(self, look: Look) -> list[int]:
        return self._feed.samples() if self._feed is not None and not look.finite else []

    def _window(self) -> Window | None:
        return self._feed.window() if self._feed is not None else None
