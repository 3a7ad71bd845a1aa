"""`holdfast run`: torch elastic's agent, a meeting of nodes, and recovery that decides once and always ends.

For the command, the agent, the gate, watching ranks, stops and alerts. Sub-rooms: `incident`, `nodes`,
`workers`.
Promises: one decision per incident, durable before anybody acts on it; every end of a run has a code and an
account.
Never: a worker that outlives its agent; a restart that no budget bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.launch.alert import EXCLUSION, INCIDENT, STOP
    from holdfast.launch.command import main
    from holdfast.launch.context import LaunchContext
    from holdfast.launch.in_place import InProcess
    from holdfast.launch.monitor import Monitor, Overdue
    from holdfast.launch.stops import Stopping
    from holdfast.launch.terminal import (
        ShownDecision,
        line_of_record,
        live_line,
        next_step,
        say,
        shown_decision,
    )
else:
    __getattr__ = offers(__name__)
