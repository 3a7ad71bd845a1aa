"""Puts together a run's straggler detector from its settings; refuses settings that cannot work."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.checkpoint.state import Tracked
from holdfast.config import Effective
from holdfast.control.attempts import read_attempt
from holdfast.control.devices import own_place
from holdfast.control.group import Group
from holdfast.control.handover import LaunchInfo
from holdfast.control.rejections import rejection_of
from holdfast.errors import ConfigError, ControlError
from holdfast.policy.rejection import Kind, Place, Rejection
from holdfast.policy.straggler_times import Named
from holdfast.settings import Settings
from holdfast.worker.membership import Membership
from holdfast.worker.rejecting import Rejecting
from holdfast.worker.straggler_actions import Actions, to_the_log, to_the_terminal
from holdfast.worker.stragglers import Stragglers, refuse_another

SAVED_FOR = "straggler"
"""Reason of the save that comes before a device is left."""


def refuse_straggler_settings(effective: Effective, launched: LaunchInfo | None) -> None:
    """Raise what is wrong with the settings of the detector, all of it; and if another one is at work."""
    chosen, sources = effective.settings.straggler, effective.sources
    problems: list[str] = []

    def problem(name: str, why: str) -> None:
        key = f"straggler.{name}"
        problems.append(f"{key} = {effective.settings.get(key)} ({sources[key]}): {why}")

    for name in ("stop_if_detected", "exclude_if_detected"):
        if getattr(chosen, name) and not chosen.enabled:
            problem(name, "nothing is detected; set straggler.enabled = true")
    if chosen.exclude_if_detected and chosen.stop_if_detected:
        problem("exclude_if_detected", "the run either stops or goes on; set one of the two")
    if chosen.exclude_if_detected and launched is None:
        problem("exclude_if_detected", "excluding needs the launcher; start the script with `holdfast run`")
    if chosen.exclude_if_detected and not effective.settings.launch.max_restarts:
        problem("exclude_if_detected", "it takes a restart, and launch.max_restarts = 0 allows none")
    if chosen.stop_if_detected and launched is not None and not effective.settings.stop.exit_signal_handler:
        problem(
            "stop_if_detected",
            "with stop.exit_signal_handler = false `holdfast run` cannot ask the ranks to save and would end "
            "them unsaved; set stop.exit_signal_handler = true",
        )
    if chosen.enabled and not (chosen.calc_relative_gpu_perf or chosen.calc_individual_gpu_perf):
        problem("enabled", "set calc_relative_gpu_perf or calc_individual_gpu_perf, else nothing is compared")
    if problems:
        raise ConfigError(
            "\n  ".join(["stragglers cannot be found like this; nothing was started:", *problems])
        )
    if chosen.enabled:
        refuse_another()


def make_stragglers(
    settings: Settings,
    group: Group,
    member: Membership,
    launched: LaunchInfo | None,
    tracked: Tracked,
    *,
    stop: Callable[[str], None],
    save: Callable[[str], object],
) -> Stragglers:
    """The detector of this rank. `stop` asks for a graceful stop; `save` saves, on all ranks together."""
    chosen = settings.straggler
    place = own_place(launched.node if launched else settings.launch.node_name)
    rejecting = Rejecting(group, member, launched=launched is not None, max_transients=1)

    def exclude(named: Named, step: int) -> None:
        save(SAVED_FOR)
        rejecting.reject(
            Rejection(
                kind=Kind.DEVICE,
                step=step,
                reasons=[named.describe()],
                accused=_accused(named),
                optional=True,
            )
        )

    def why_not(named: Named) -> str:
        if not named.node:
            return "its node has no name, so it cannot be excluded"
        asked = _asked_before(member, named)
        if asked is None:
            return ""
        return (
            f"attempt {asked} of this launch asked to exclude it, and it is in use all the same; when a "
            "spare can take its place, start the run again"
        )

    return Stragglers(
        chosen,
        group,
        models=[model for _, model in tracked.models()],
        optimizers=tracked.optimizers(),
        place=place,
        device=next((one for one in sorted(tracked.devices(), key=str) if one.type == "cuda"), None),
        actions=Actions(
            tell=member.journal.write,
            say=to_the_terminal if launched is not None else to_the_log,
            stop=stop if chosen.stop_if_detected else None,
            exclude=exclude if chosen.exclude_if_detected else None,
            why_not=why_not,
        ),
    )


def _accused(named: Named) -> Place:
    return Place(named.node, named.device if named.rank is not None else "")


def _asked_before(member: Membership, named: Named) -> int | None:
    """The attempt of this launch that asked to leave a place which is in use all the same: once is enough."""
    for number in range(member.attempt - 1, 0, -1):
        try:
            if read_attempt(member.control, number).launch != member.launch:
                continue
            before = rejection_of(member.control, number)
        except (ControlError, OSError):
            continue
        if before is not None and before.optional and before.accused == _accused(named):
            return number
    return None
