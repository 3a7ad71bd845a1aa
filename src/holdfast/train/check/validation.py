"""Checking a step's result, on all ranks together, before an optimizer uses it.

Guarantee: a result that any rank found not to be finite reaches no tracked optimizer on any rank; all ranks
come to the same end, by the same calls. A rejected step that is run again begins from exactly the state it
began from before (see rerun.py); it is run again once, never more. What ends this attempt is a rejection that
was recorded first, or an error that says what is wrong.

Each call of `run.compute` is checked by itself: with several in a step (micro-batches), each is run again
alone, and once one of them is dropped the rest of the step is dropped as well. Each costs one small exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.checkpoint.format import OF_THE_JOB, CheckpointName, Manifest
from holdfast.checkpoint.state import Tracked
from holdfast.cluster import own_place
from holdfast.config import Effective, ValidationSettings
from holdfast.errors import ConfigError, UsageError, ValidationFailedError
from holdfast.journal.events import Verdict
from holdfast.policy import Place, ReplayFinding
from holdfast.record import ControlDirectory, Group, LaunchInfo
from holdfast.train import Membership, Meter, Probation
from holdfast.train.check.checks import (
    AgreedResult,
    Agreement,
    Checks,
    Deferred,
    Injection,
    Scales,
    Severity,
    StepLook,
    single_number,
)
from holdfast.train.check.corruption import CorruptionWatch
from holdfast.train.check.judgement import (
    Done,
    Judging,
    RankReport,
    Rejecting,
    Replayed,
    in_words,
    severity_of,
    summary,
)
from holdfast.train.check.rerun import Determinism, Draws, Locator, RecordedFeed, Rewind, difference
from holdfast.train.data import Randomness

DEFERRED_EVERY = 16
"""Steps between exchanges in which the ranks share what deferred checks, and gradient scalers, have shown."""
DEFERRED = "an optimizer has used it by then, because validation.deferred is on"
RECORDED = (
    "an optimizer has used it by then, because it was only recorded: run.compute() and run.check() look at a "
    "result before that"
)
SCALED = "the scaler has left its optimizer's steps out"

Diagnose = Callable[[], str]
"""Makes a diagnostic save of the state as it is, on all ranks; returns its name, or why there is none."""


@dataclass
class _Call:
    """One call of the step's function."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Validation:
    """Stands between a rank's results and its optimizers. Every rank makes the same calls in one order."""

    def __init__(
        self,
        chosen: ValidationSettings,
        tracked: Tracked,
        *,
        agreement: Agreement,
        checks: Checks,
        probation: Probation,
        injection: Injection,
        rejecting: Rejecting,
        judging: Judging,
        replayed: Replayed,
        watch: CorruptionWatch | None,
        meter: Meter,
        feed: RecordedFeed | None,
        diagnose: Diagnose,
        on_rerun: Callable[[], None],
    ) -> None:
        self._chosen = chosen
        self._tracked = tracked
        self.agreement = agreement
        self._checks = checks
        self._probation = probation
        self._injection = injection
        self._rejecting = rejecting
        self._judging = judging
        self._dropping = judging.dropping
        self._replayed = replayed
        self._watch = watch
        self._meter = meter
        self._feed = feed
        self._diagnose = diagnose
        self._on_rerun = on_rerun
        self._deferred = Deferred(checks) if chosen.deferred else None
        self._recorded = self._deferred or Deferred(checks)
        """Looks at losses that are recorded, and at nothing else about their steps."""
        self._scales: Scales | None = None
        self.scaled = False
        """Whether some rank has a gradient scaler to look at; the same on every rank."""
        self._heard = self._heard_here = False
        """Whether a call of this step gave a loss on any rank; and on this rank."""
        self._still = Severity.FINE
        self._settled = -1
        """The step up to which every rank knows all results."""
        self._doubts: list[str] = []
        self._reruns = chosen.rerun_mode == "validate_results"
        self._measures = chosen.rerun_mode == "report_determinism_stats"
        self._draws = Draws(Randomness(tracked))
        self._rewind: Rewind | None = None
        self._after: Rewind | None = None
        self._determinism = Determinism(agreement.ranks)
        self._tells_breaches = chosen.probation_steps > 0 and rejecting.launched
        self._calls = 0
        self._was_rejected = False
        self._warned_of_step = False
        if feed is not None and (self._reruns or self._measures or watch is not None):
            feed.draws = self._draws

    @property
    def dropped(self) -> bool:
        """Whether the current step was dropped."""
        return self._dropping.dropped

    def doubt(self, least: Severity) -> str:
        """Why the current state must not be saved as a good one; empty if it may be. The same on every rank.

        `least`: the least severity that counts as a reason.
        """
        if self._still < least:
            return ""
        return f"the last result that is known is bad: {in_words(self._doubts)}"

    @property
    def tolerance(self) -> float:
        """The relative difference up to which two runs of a step count as equal."""
        measured = self._determinism.largest
        return max(self._chosen.rerun_tolerance, measured if math.isfinite(measured) else 0.0)

    # --- the loop -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._calls = 0
        self._dropping.dropped = self._was_rejected = False
        self._heard = self._heard_here = False

    def compute(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The function's result, once accepted; that of a dropped step too, but with its gradients gone."""
        self._enter()
        if self.dropped:
            result = function(*args, **kwargs)
            self._dropping.drop()
            return result
        if not self._wanted():
            return function(*args, **kwargs)
        if self._deferred is not None:
            result = function(*args, **kwargs)
            self._deferred.note(self._step, result)
            self._heard_here = self._heard_here or single_number(result) is not None
            return result
        rewinds = self._reruns or self._measures
        if not (rewinds or self._is_watched()):
            return self._checked(_Call(function, args, kwargs))
        if rewinds:
            if self._rewind is None:
                self._rewind = Rewind(self._tracked, self._meter)
            self._rewind.capture()
        args, kwargs = self._draws.begin(args, kwargs)
        try:
            return self._checked(_Call(function, args, kwargs))
        finally:
            self._draws.end()
            if self._rewind is not None:
                self._rewind.release()

    def check(self, loss: Any) -> bool:
        """Check a loss and the gradients as they are: whether to use the step. Nothing is run again."""
        self._enter()
        if self.dropped:
            self._dropping.drop()
        elif self._wanted() and self._deferred is not None:
            self._deferred.note(self._step, loss)
            self._heard_here = self._heard_here or single_number(loss) is not None
        elif self._wanted():
            done = Done(loss, self._checks.look(self._injected(loss, again=False)))
            agreed = self._agree(done)
            if agreed.severity:
                self._was_rejected = True
                self._judging.judge(done, agreed.severity, self._step)
            self._accept(done, agreed)
        return not self.dropped

    def completed(self, step: int) -> None:
        """The step is complete, and counted."""
        self._note(step)
        looks, found = self._looks_back(step), Severity.FINE
        if looks and self._deferred is None:
            found = self._look_back()
        if not self.dropped and found is not Severity.NONFINITE:
            if self._still is not Severity.NONFINITE:
                self._judging.count.after(bad=False)
            self._probation.completed(step, self._meter.seconds)
            if not self._was_rejected:
                self._replayed.passed(step)
        if looks and self._deferred is not None:
            self._look_back()

    def before_save(self) -> None:
        """The state is about to be saved: first judge all steps that led to it."""
        if self._looks_back(None) and self._settled != self._meter.step:
            self._look_back(wait=True)
        self._tell_measured()

    def _note(self, step: int) -> None:
        """Note what no call of this step has looked at: a loss that was recorded, and the scales."""
        if self._scales is None:
            self._scales = Scales(self._tracked.scalers())
        self._scales.note(step)
        heard = self._heard_here if self._deferred is not None else self._heard
        loss = self._meter.loss
        if loss is not None and not heard and not self.dropped and self._checks.judges_losses:
            self._recorded.note(step, loss, gradients=False)

    def _looks_back(self, step: int | None) -> bool:
        """Whether the ranks now share what is known about completed steps; the same on every rank.

        They do at the end of a step in which no call has done so, or every so many steps, and before a save.
        """
        if self._deferred is None and not self._heard and not self.dropped:
            return self._checks.judges_losses or self._tells_breaches
        seldom = self._deferred is not None or self.scaled
        return seldom and (step is None or step % DEFERRED_EVERY == 0)

    def close(self) -> None:
        self._tell_measured()
        self._probation.close()
        self._dropping.close()
        if self._feed is not None:
            self._feed.draws = None

    def state_dict(self) -> dict[str, Any]:
        """Empty if there is nothing to remember; holds nothing about re-running, in any mode."""
        found: dict[str, Any] = {}
        if checks := self._checks.state_dict():
            found["checks"] = checks
        if self._judging.count.in_a_row:
            found["nonfinite"] = self._judging.count.state_dict()
        return found

    def resumed(
        self,
        name: CheckpointName | None,
        manifest: Manifest | None,
        state: Mapping[str, Any] | None,
        *,
        control: ControlDirectory,
        timeout: float,
    ) -> None:
        """What the run goes on from; `state`: what `state_dict` gave at that save, if anything."""
        if state and "checks" in state:
            self._checks.load_state_dict(state["checks"])
        if state and "nonfinite" in state:
            self._judging.count.load_state_dict(state["nonfinite"])
        if manifest is not None:
            self._checks.begin_from(manifest.windows.loss)
        self._replayed.learn(control, timeout)
        counted = self._meter.state_dict()
        if manifest is not None and manifest.counts == OF_THE_JOB:
            counted["samples"], counted["tokens"] = self._meter.of_the_job()
        self._probation.begin(name, manifest, counted, self._replayed.settled)  # a step reports any breach

    # --- one call -------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        """The step that is being computed."""
        return self._meter.step + 1

    def _enter(self) -> None:
        self._calls += 1
        if self._calls == 1:
            self._replayed.before(self._step)

    def _wanted(self) -> bool:
        """The same on every rank: it depends on settings, and on checks that all ranks add alike."""
        return (
            self._checks.wanted
            or self._injection.wanted
            or self._measures
            or self._tells_breaches
            or self._watch is not None
        )

    def _is_watched(self) -> bool:
        return self._watch is not None and self._calls == 1 and self._watch.due(self._step)

    def _checked(self, call: _Call) -> Any:
        done = self._run(call, again=False)
        agreed = self._agree(done)
        if agreed.severity:
            done = self._rejected(call, done, agreed.severity)
        self._accept(done, agreed)
        if self._measures and not self.dropped:
            self._measure(call, done)
        return done.result

    def _run(self, call: _Call, *, again: bool, locator: Locator | None = None) -> Done:
        watched = self._watch if self._is_watched() else None
        if watched is not None:
            watched.before()
        self._dropping.stepped = False
        if locator is not None:
            with locator:
                result = call.function(*call.args, **call.kwargs)
        else:
            result = call.function(*call.args, **call.kwargs)
        if self._dropping.stepped:
            self._stepped_inside()
        result = self._injected(result, again=again)
        look = self._checks.look(result)
        if watched is not None and not self._cannot_run_again():
            look.reasons = [
                *look.reasons,
                *watched.compare(self._again(call), call.args, call.kwargs, result),
            ]
        return Done(result, look)

    def _again(self, call: _Call) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            self._draws.again()
            return self._injected(call.function(*args, **kwargs), again=True)

        return run

    def _injected(self, result: Any, *, again: bool) -> Any:
        if not self._injection.wanted or self._calls > 1 or single_number(result) is None:
            return result
        return self._injection.falsify(result, self._step, again=again)

    def _agree(self, done: Done, *, again: bool = False) -> AgreedResult:
        breach = not again and bool(self._probation.observe())
        heard = done.look.loss is not None
        agreed = self.agreement.agree(
            AgreedResult(done.severity, breach, heard), self._step, self._calls, again=again
        )
        self._heard = self._heard or agreed.heard
        return agreed

    def _accept(self, done: Done, agreed: AgreedResult) -> None:
        if agreed.breach:
            self._judging.breached()
        if not self.dropped:
            self._checks.accepted(done.look)

    def _stepped_inside(self) -> None:
        misuse = (
            f"an optimizer was stepped inside run.compute() in step {self._step}, before its result could be "
            "checked. Call compute() with the forward and backward only, and step the optimizer afterwards"
        )
        if self._reruns or self._measures or self._watch is not None:
            raise UsageError(f"{misuse}: such a step cannot be run again")
        if not self._warned_of_step:
            self._warned_of_step = True
            self._rejecting.warn(f"{misuse}: a result that is not finite has been used by then")

    # --- rejected -------------------------------------------------------------------------------------------

    def _rejected(self, call: _Call, first: Done, severity: Severity) -> Done:
        """Every rank is here. Returns the run of the step to go on with, or ends this attempt."""
        self._was_rejected = True
        if not self._reruns or self._cannot_run_again():
            self._judging.judge(first, severity, self._step)
            return first
        assert self._rewind is not None
        reports = self._rejecting.exchange(self._judging.report(first))
        self._judging.tell(reports, self._step, "rerun")
        self._on_rerun()
        self._rewind.restore()
        locator = Locator([model for _, model in self._tracked.models()])
        second = self._run(call, again=True, locator=locator)
        severity = self._agree(second, again=True).severity
        if severity is Severity.FINE:
            self._transient(reports)
        elif severity is Severity.ODD and self._replayed.accepts(self._step, reports[0].window):
            self._accept_oddity(second)
        elif not (severity is Severity.NONFINITE and self._is_settled(first, second, locator)):
            self._rejected_again(first, second, severity, locator)
        return second

    def _is_settled(self, first: Done, second: Done, locator: Locator) -> bool:
        """Whether enough is known to go on without this step."""
        report = self._judging.report_again(first, second, locator, tolerance=self.tolerance, buffers=False)
        return self._judging.judge_again(self._rejecting.exchange(report), self._step)

    def _cannot_run_again(self) -> bool:
        """Whether some rank has changed a batch, from which something else would then be computed."""
        for rank, why in enumerate(self._rejecting.exchange_texts(self._draws.again())):
            if why:
                self._rejecting.warn(f"step {self._step} cannot be run again: rank {rank}: {why}")
                return True
        return False

    def _transient(self, reports: Sequence[RankReport]) -> None:
        after = f"not when step {self._step} was run again"
        findings = [
            ReplayFinding(
                verdict="transient",
                place=Place(report.result.node, report.result.device),
                evidence=f"rank {report.result.rank}: {in_words(report.result.reasons)}; {after}",
            )
            for report in reports
            if report.result.reasons
        ]
        if not findings:
            evidence = f"{in_words(summary(reports))}; {after}"
            findings = [ReplayFinding(verdict="transient", place=None, evidence=evidence)]
        self._rejecting.transient(findings, self._step)
        if self._chosen.on_transient == "stop":
            raise ValidationFailedError(
                f"step {self._step} gave a bad result, and a good one when it was run again: "
                f"{findings[0].evidence}. validation.on_transient is stop; look at the device, then start "
                "the run again"
            )

    def _accept_oddity(self, second: Done) -> None:
        """It is finite, and the same wherever it was computed: it comes from the work, and is no fault."""
        reports = self._rejecting.exchange(self._judging.report(second))
        evidence = [*summary(reports), "finite, and the same on every device that it was computed on"]
        self._judging.tell(reports, self._step, "accepted")
        self._judging.accepted(reports, self._step, evidence[-1])
        self._rejecting.tell(Verdict(verdict="reproducible", step=self._step, evidence=evidence))
        self._rejecting.warn(f"step {self._step} is accepted although it was rejected: {in_words(evidence)}")

    def _rejected_again(self, first: Done, second: Done, severity: Severity, locator: Locator) -> NoReturn:
        assert self._rewind is not None
        self._rewind.restore()
        report = self._judging.report_again(
            first, second, locator, tolerance=self.tolerance, buffers=self._calls == 1
        )
        reports = self._rejecting.exchange(report)
        self._judging.tell(reports, self._step, "restart")
        diagnostic = self._diagnose()
        self._judging.reject(reports, severity, self._step, rerun=True, diagnostic=diagnostic)

    # --- later ----------------------------------------------------------------------------------------------

    def _look_back(self, *, wait: bool = False) -> Severity:
        """Share what has been found so far in completed steps; returns the worst of it."""
        found = self._recorded.settle() if wait else self._recorded.bad()
        used = DEFERRED if self._deferred is not None else RECORDED
        still = severity_of(self._recorded.last)
        stuck = self._scales.found(wait=wait) if self._scales is not None else []
        if self._scales is not None and (why := self._scales.why()):
            look = StepLook(reasons=why, finite=False)
            found += [(step, look) for step in stuck]
            used, still = SCALED, Severity.NONFINITE
        worst = max(found, key=lambda one: severity_of(one[1]), default=None)
        own = AgreedResult(
            severity_of(worst[1]) if worst is not None else Severity.FINE,
            bool(self._probation.observe()),
            bad=sum(not look.finite for _, look in found),
            still=still,
            pending=bool(self._recorded.pending or (self._scales is not None and self._scales.pending)),
        )
        agreed = self.agreement.agree(own, self._meter.step, 0, again=wait)
        self._still = agreed.still
        self._settled = -1 if agreed.pending else self._meter.step
        if agreed.severity:
            self._was_rejected = True
            step, look = worst if worst is not None else (0, StepLook())
            steps = [int(text) for text in self._rejecting.exchange_texts(str(step))]
            first = min(number for number in steps if number)
            self._doubts = self._judging.judge_used(look, agreed.severity, first, bad=agreed.bad, used=used)
        if agreed.breach:
            self._judging.breached()
        return agreed.severity

    def _measure(self, call: _Call, done: Done) -> None:
        """Run it once more and compare; training goes on with the first result as if alone."""
        assert self._rewind is not None
        if why := self._draws.again():
            raise UsageError(f"step {self._step} cannot be run twice: {why}")
        if self._after is None:
            self._after = Rewind(self._tracked, self._meter)
        self._after.capture()
        self._rewind.restore()
        try:
            second = single_number(call.function(*call.args, **call.kwargs))
        finally:
            self._after.restore()
            self._after.release()
        own = difference(done.look.loss, None if second is None else float(second))
        self._determinism.measure(*self.agreement.worst(own, self._determinism.largest))

    def _tell_measured(self) -> None:
        report = self._determinism.report()
        if report is not None:
            self._rejecting.tell(report)


# Puts together what validates a run's results, from its settings; refuses settings that cannot work.


def refuse_contradictions(effective: Effective, launched: LaunchInfo | None) -> None:
    """Raise all that is wrong with the settings of validation."""
    chosen, sources = effective.settings.validation, effective.sources
    problems: list[str] = []

    def problem(name: str, why: str) -> None:
        key = f"validation.{name}"
        problems.append(f"{key} = {effective.settings.get(key)} ({sources[key]}): {why}")

    if chosen.nan_policy == "rollback" and launched is None:
        problem("nan_policy", "going back needs the launcher; start the script with `holdfast run`")
    injects = chosen.error_injection_rate > 0 or chosen.error_injection_step > 0
    if injects and chosen.rerun_mode == "disabled":
        name = "error_injection_step" if chosen.error_injection_step else "error_injection_rate"
        problem(name, "a rehearsal needs validation.rerun_mode = validate_results")
    if chosen.error_injection_device and chosen.error_injection_type != "persistent_error":
        problem("error_injection_device", "only validation.error_injection_type = persistent_error has one")
    if chosen.deferred and chosen.corruption_watch_interval:
        problem("deferred", "the corruption watch looks at once; set corruption_watch_interval = 0")
    if problems:
        raise ConfigError("\n  ".join(["validation cannot work like this; nothing was started:", *problems]))


def make_validation(
    chosen: ValidationSettings,
    group: Group,
    member: Membership,
    launched: LaunchInfo | None,
    *,
    node: str,
    decide: Callable[[], tuple[str, str]] | None,
    tracked: Tracked,
    checks: Checks,
    meter: Meter,
    feed: RecordedFeed | None,
    diagnose: Callable[[], str],
    on_rerun: Callable[[], None],
) -> Validation:
    """What stands between this rank's results and its optimizers, and watches it after a resume."""
    place = own_place(node)
    rejecting = Rejecting(
        group,
        member,
        launched=launched is not None,
        max_transients=chosen.max_transients,
        decide=decide,
    )
    device = next(iter(tracked.devices()), None)
    probation = Probation(
        chosen.probation_steps,
        group,
        member,
        meter.latest,
        launched,
        node=node,
        device=device,
    )
    replayed = Replayed(
        member.told.orders.rerun,
        tracked,
        group,
        place,
        rejecting,
        restarts_left=launched.restarts_left if launched is not None else None,
        leaves_out=chosen.skip_bad_data,
    )
    judging = Judging(
        chosen,
        tracked,
        group,
        place=place,
        rejecting=rejecting,
        probation=probation,
        replayed=replayed,
        meter=meter,
        feed=feed,
    )
    watch = None
    if chosen.corruption_watch_interval:
        watch = CorruptionWatch(
            chosen.corruption_watch_interval,
            chosen.rerun_tolerance,
            group=group,
            tracked=tracked,
            place=place,
            state=lambda: Rewind(tracked, meter),
        )
    return Validation(
        chosen,
        tracked,
        agreement=Agreement(group),
        checks=checks,
        probation=probation,
        injection=Injection(chosen, member.control, attempt=member.attempt, rank=group.rank, place=place),
        rejecting=rejecting,
        judging=judging,
        replayed=replayed,
        watch=watch,
        meter=meter,
        feed=feed,
        diagnose=diagnose,
        on_rerun=on_rerun,
    )
