"""How the ranks tell each other what was bad, and how an attempt ends because of it.

Guarantee: what is rejected is recorded before any rank ends, so whoever decides about the next attempt finds
it; without the launcher that is decided as well (`alone.py`). Every rank ends with the same error. What could
not be recorded is said in that error, and hides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from holdfast.control.exchange import share
from holdfast.control.group import Group
from holdfast.control.rejections import NAME, record_rejection, record_settled
from holdfast.control.transients import count_transient
from holdfast.errors import ControlError, RerunWantedError, ValidationFailedError
from holdfast.journal.events import Event, Verdict, Warned
from holdfast.policy.batch_words import batch_in_words
from holdfast.policy.rejection import Kind, Place, RankResult, Rejection, Settled, Window
from holdfast.policy.replay import Finding
from holdfast.worker.membership import Membership

log = logging.getLogger("holdfast")

MOST_REASONS = 8


class Report(msgspec.Struct, frozen=True):
    """One rank's own result, and what else it saw: gradients of the whole group, for example."""

    result: RankResult
    seen: list[str] = []
    samples: list[int] = []
    """Of a result that is not finite: what this rank's batch was made of, as far as that is known."""
    window: Window | None = None
    """The data of the step, as this rank counts them: what is known of the step goes by rank 0's."""


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
        """Into the journal, once for all ranks."""
        if self._group.is_coordinator:
            self._member.journal.write(event)

    def warn(self, message: str) -> None:
        self.tell(Warned(message=message))
        if self._group.is_coordinator:
            log.warning("holdfast: %s", message)

    def exchange(self, own: Report) -> list[Report]:
        """Every rank's report, on every rank, in order."""
        found = share(self._group, msgspec.json.encode(own))
        return [msgspec.json.decode(raw, type=Report) for raw in found]

    def exchange_texts(self, own: str) -> list[str]:
        return share(self._group, own)

    def transient(self, findings: Sequence[Finding], step: int) -> None:
        """Count it where it happened. A device that has had too many is accused, and the attempt ends."""
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
        self.warn(f"{reason}; without `holdfast run` nobody keeps it out of the run")

    def _count(self, place: Place, step: int, evidence: str) -> int:
        try:
            return count_transient(
                self._member.control, place, attempt=self._member.attempt, step=step, evidence=[evidence]
            )
        except (ControlError, OSError) as error:
            self.warn(f"a transient fault of step {step} could not be counted: {error}")
            return 0

    def settle(self, settled: Settled) -> None:
        """Keep a verdict on a step for every later attempt. Without it that step is judged once more."""
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
                    problem = "; this attempt had rejected something before, which is what counts"
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
        told = f" ({then})" if then else ""
        raise RerunWantedError(
            f"{about} {rejection.step}: {in_words(rejection.reasons)}; {wanted}. `holdfast run` does so by "
            f"itself; else start the run again{told}. Evidence: {NAME} of attempt "
            f"{self._member.attempt}{problem}"
        )


def in_words(reasons: Sequence[str]) -> str:
    shown = "; ".join(reasons[:MOST_REASONS])
    return f"{shown}; and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else shown


def summary(reports: Sequence[Report]) -> list[str]:
    """Why a step was rejected, rank by rank; what all saw alike only once."""
    alone = len(reports) == 1
    reasons = [
        reason if alone else f"rank {report.result.rank}: {reason}"
        for report in reports
        for reason in report.result.reasons
    ]
    if not reasons:
        reasons = list(dict.fromkeys(reason for report in reports for reason in report.seen))
    return reasons[: 4 * MOST_REASONS]


def batch_of(reports: Sequence[Report]) -> str:
    """The data of a rejected step in words, with the samples of the ranks whose own results were bad."""
    samples = {one.result.rank: one.samples for one in reports if one.result.reasons}
    return batch_in_words(reports[0].window, samples, len(reports))


def bad_ranks(reports: Sequence[Report]) -> list[int]:
    return [report.result.rank for report in reports if report.result.reasons]
