"""Puts together what validates a run's results, from its settings; refuses settings that cannot work."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.checkpoint.state import Tracked
from holdfast.config import Effective
from holdfast.control.devices import own_place
from holdfast.control.group import Group
from holdfast.control.handover import LaunchInfo
from holdfast.errors import ConfigError
from holdfast.settings_validation import ValidationSettings
from holdfast.worker.agreement import Agreement
from holdfast.worker.checking import Checks
from holdfast.worker.corruption_watch import CorruptionWatch
from holdfast.worker.draws import RecordedFeed
from holdfast.worker.injection import Injection
from holdfast.worker.judging import Judging
from holdfast.worker.membership import Membership
from holdfast.worker.meter import Meter
from holdfast.worker.probation import Probation
from holdfast.worker.rejecting import Rejecting
from holdfast.worker.replayed import Replayed
from holdfast.worker.rerun import Rewind
from holdfast.worker.validation import Validation


def refuse_contradictions(effective: Effective, launched: LaunchInfo | None) -> None:
    """Raise what is wrong with the settings of validation, all of it."""
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
        member.told.rerun,
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
