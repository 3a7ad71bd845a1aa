"""`holdfast run`: torch elastic's agent, a meeting of nodes, and recovery that is decided once and ends.

For the command, the agent, the gate, watching ranks, stops and alerts. Sub-rooms: `incident`, `nodes`,
`workers`.
Promises: one decision for an incident, durable before anybody acts; every way a run ends has a code and an
account.
Never: a worker that outlives its agent; a restart that no budget bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.launch.alert import EXCLUSION as EXCLUSION
    from holdfast.launch.alert import INCIDENT as INCIDENT
    from holdfast.launch.alert import STOP as STOP
    from holdfast.launch.command import main as main
    from holdfast.launch.context import LaunchContext as LaunchContext
    from holdfast.launch.in_place import InProcess as InProcess
    from holdfast.launch.monitor import Monitor as Monitor
    from holdfast.launch.monitor import Overdue as Overdue
    from holdfast.launch.stops import Stopping as Stopping
    from holdfast.launch.terminal import Decided as Decided
    from holdfast.launch.terminal import line_of_record as line_of_record
    from holdfast.launch.terminal import live_line as live_line
    from holdfast.launch.terminal import next_step as next_step
    from holdfast.launch.terminal import say as say
    from holdfast.launch.terminal import shown_decision as shown_decision
else:
    __getattr__ = offers(__name__)
