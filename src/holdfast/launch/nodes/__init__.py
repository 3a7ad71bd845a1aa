"""The nodes of a launch: where they meet, who leads, who watches whom, and the attempt they share.

For agents on different machines, which share a store and a control directory and trust nothing else.
Promises: a round forms of nodes that are here and fit; a lost node is noticed by its connection or its
silence.
Never: two leaders who both act; a spare whose arrival ends a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.launch.nodes.attempt import Announcement as Announcement
    from holdfast.launch.nodes.attempt import Arrangement as Arrangement
    from holdfast.launch.nodes.attempt import Attempt as Attempt
    from holdfast.launch.nodes.attempt import LeaderLostError as LeaderLostError
    from holdfast.launch.nodes.attempt import Notice as Notice
    from holdfast.launch.nodes.attempt import Place as Place
    from holdfast.launch.nodes.attempt import StopRun as StopRun
    from holdfast.launch.nodes.attempt import agree_on_launch as agree_on_launch
    from holdfast.launch.nodes.attempt import follow as follow
    from holdfast.launch.nodes.attempt import lead as lead
    from holdfast.launch.nodes.attempt import lead_on as lead_on
    from holdfast.launch.nodes.attempt import refuse as refuse
    from holdfast.launch.nodes.attempt import usable_devices as usable_devices
    from holdfast.launch.nodes.attempt import why_unfit as why_unfit
    from holdfast.launch.nodes.meeting import Endpoints as Endpoints
    from holdfast.launch.nodes.meeting import MeetingHandler as MeetingHandler
    from holdfast.launch.nodes.meeting import StoreLostError as StoreLostError
    from holdfast.launch.nodes.meeting import parse_endpoints as parse_endpoints
    from holdfast.launch.nodes.watch import Leadership as Leadership
else:
    __getattr__ = offers(__name__)
