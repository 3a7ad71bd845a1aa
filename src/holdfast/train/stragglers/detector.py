"""A straggler detector from a run's settings, and `StragglerDetector`, without a Run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import msgspec
import torch
from torch import nn

from holdfast.checkpoint.state import Tracked
from holdfast.cluster import node_name, own_place
from holdfast.config import Effective, Settings, StragglerSettings
from holdfast.errors import ConfigError, ControlError, UsageError
from holdfast.journal import Event
from holdfast.policy import Kind, Place, Rejection
from holdfast.record import Group, LaunchInfo, join_group, leave_group, read_attempt, rejection_of
from holdfast.train import Membership
from holdfast.train.check import Rejecting
from holdfast.train.stragglers.reports import Actions, Stragglers, refuse_another, to_the_log, to_the_terminal
from holdfast.train.stragglers.scores import COMPUTE, Named, StragglerFinding

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


# StragglerDetector: finds the rank that the others wait for, without a Run.
#
# ```python
# detector = holdfast.StragglerDetector(models=[model], optimizers=[optimizer], report_time_interval=60)
# for step in range(steps):
#     detector.begin_step()
#     with detector.section("input"):
#         batch = next(batches)
#     with detector.compute():
#         model(batch).sum().backward()
#     optimizer.step()
#     finding = detector.end_step()
# detector.close()
# ```
# Every rank makes the same calls. `end_step` returns what a report came to, on rank 0 and only where one was
# made; the ranks it names are those that are late, never those that wait.


EXCHANGE = 600.0
"""Seconds that ranks wait for each other in an exchange of theirs."""


class StragglerDetector:
    """The straggler detector by itself. The settings are those of section `straggler`, without `enabled`,
    `stop_if_detected` and `exclude_if_detected`: what is done about a rank is the script's to say."""

    def __init__(
        self,
        *,
        models: Iterable[nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
        device: torch.device | None = None,
        on_found: Callable[[Named], object] | None = None,
        node: str = "",
        **settings: object,
    ) -> None:
        """`models`: whose gradients show when a rank's own work is done; `optimizers`: whose step ends the
        waiting for them. `device`: a CUDA device, to measure by its clock. `on_found` is called on rank 0."""
        refuse_another()
        self._chosen = _settings(settings)
        self._on_found = on_found
        self._group: Group | None = join_group(EXCHANGE)
        self._stragglers = Stragglers(
            self._chosen,
            self._group,
            models=models,
            optimizers=optimizers,
            place=own_place(node_name(node)),
            device=device,
            actions=Actions(tell=_untold),
        )
        self._step = 0

    def begin_step(self) -> None:
        self._stragglers.begin_step()

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span of the step. `input` and `compute` have their meaning; it should not wait for others,
        but for `compute`, whose end may, after its last gradient."""
        return self._stragglers.section(name)

    def compute(self) -> AbstractContextManager[None]:
        return self._stragglers.section(COMPUTE)

    def end_step(self) -> StragglerFinding | None:
        """The step is complete. What a report came to, on rank 0, if one was due."""
        self._step += 1
        self._stragglers.end_step()
        finding = self._stragglers.meet(self._step)
        if finding is not None and self._on_found is not None:
            for named in finding.fresh:
                self._on_found(named)
        return finding

    @property
    def finding(self) -> StragglerFinding | None:
        """What the last report came to, on rank 0."""
        return self._stragglers.finding

    def close(self) -> None:
        """Give everything back, on all ranks together."""
        self._stragglers.close()
        if self._group is not None:
            leave_group(self._group)
            self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        if kind is None:
            self.close()
        else:
            self._stragglers.close()


def _settings(given: dict[str, object]) -> StragglerSettings:
    allowed = {field.name for field in msgspec.structs.fields(StragglerSettings)}
    allowed -= {"enabled", "stop_if_detected", "exclude_if_detected"}
    if unknown := sorted(set(given) - allowed):
        raise UsageError(
            f"StragglerDetector({', '.join(unknown)}=…): there is no such setting; there are "
            f"{', '.join(sorted(allowed))}"
        )
    try:
        return msgspec.convert({**given, "enabled": True}, StragglerSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"StragglerDetector: {error}") from error


def _untold(event: Event) -> None:
    """Without a run there is no journal."""
    del event
