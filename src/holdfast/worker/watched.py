"""How a rank comes to be watched, as its settings say and where there is somebody to watch it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast import scope
from holdfast.config import Effective, idle
from holdfast.control.group import Group
from holdfast.control.handover import LaunchInfo
from holdfast.control.limits import (
    UNPROTECTED,
    check_timeouts,
    limits_of,
    refuse_unknown_to_launcher,
    refuse_without_launcher,
)
from holdfast.journal.events import Warned
from holdfast.policy.timeouts import SETUP, STEP
from holdfast.settings import parse_section_timeouts
from holdfast.torch_internals import collective_timeout
from holdfast.worker import testimony
from holdfast.worker.beats import Beats
from holdfast.worker.halting import Halting
from holdfast.worker.joining import is_restart
from holdfast.worker.membership import Membership
from holdfast.worker.simulated import SimulatedFault, choose, is_first_attempt

log = logging.getLogger("holdfast")


def start_beats(
    effective: Effective,
    launched: LaunchInfo | None,
    testify: Callable[[Sequence[str]], bytes] = testimony.testify,
    halting: Halting | None = None,
) -> Beats:
    """Begin to be watched, in section `setup`; without a launcher, say what that leaves unprotected."""
    if launched is None:
        unread = refuse_without_launcher(effective, kept=scope.current() is not None)
        if unread and os.environ.get("RANK", "0") == "0":
            log.warning("holdfast: %s", "; ".join(unread))
        if os.environ.get("RANK", "0") == "0" and scope.current() is None:  # else a keeper watches
            log.warning("holdfast: %s", UNPROTECTED)
        return Beats()
    refuse_unknown_to_launcher(effective, launched.config)
    if not launched.monitor:
        return Beats()
    check_timeouts(effective, os.environ)
    learn = effective.settings.monitor.calc_ft_timeouts
    stacks = testimony.install(Path(launched.monitor).parent, int(os.environ.get("RANK", "0")))
    around = scope.current()
    if around is not None and stacks is not None:
        around.on_leave(stacks.close)

    def answer(kept: testimony.Installed | None = stacks) -> bytes:
        del kept  # the signal's file must stay open for as long as somebody may ask
        return testify(beats.open_sections())

    beats = Beats.connect(
        launched.monitor,
        limits_of(effective),
        learn=learn,
        testify=answer,
        heeds=halting,
        defers_sigterm=halting is not None and halting.takes_sigterm,
    )
    beats.enter(SETUP)
    return beats


def simulated_fault(effective: Effective, group: Group, member: Membership) -> SimulatedFault | None:
    """The fault that this rank is to simulate, if any."""
    chosen = effective.settings.monitor
    if not chosen.simulate_fault:
        return None
    fault = choose(chosen, f"{member.control.run_id}/{member.launch}/{member.attempt}", group.world_size)
    if fault.rank != group.rank or not is_first_attempt(member.control, member.attempt, member.launch):
        return None
    return SimulatedFault(fault, member.journal)


def tell_idle(effective: Effective, group: Group, member: Membership) -> None:
    """Say once a launch which settings somebody gave and nothing reads, with what would switch them on."""
    if not group.is_coordinator or is_restart(member):
        return
    for told in idle(effective):
        member.journal.write(Warned(message=told))
        log.warning("holdfast: %s", told)


def judge_collectives(effective: Effective, group: Group, member: Membership) -> None:
    """Say so when collectives time out before a hung step is found: then the wrong ranks end first."""
    around = scope.current()
    if around is not None and around.own_collective_timeout:
        return  # in-process restart finds who stands still before that, and chose it so
    limit = parse_section_timeouts(effective.settings.monitor.rank_section_timeouts).get(STEP, 0.0)
    timeout = collective_timeout()
    if group.is_coordinator and timeout is not None and limit and timeout <= limit:
        told = (
            f"the process group's timeout of {timeout:g} s is not longer than the {limit:g} s that a step "
            "may take: in a hang the healthy ranks end first, and which one hung may not be known. The right "
            f"order is: limit of {STEP} in monitor.rank_section_timeouts < timeout of init_process_group"
        )
        member.journal.write(Warned(message=told))
        log.warning("holdfast: %s", told)
