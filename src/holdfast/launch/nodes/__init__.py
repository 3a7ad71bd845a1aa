"""The nodes of a launch: where they meet, who leads, who watches whom, and the attempt they share.

For agents on different machines, which share a store and a control directory and trust nothing else.
Promises: a round forms from nodes that are present and fit; a lost node is noticed by its connection or its
silence.
Never: two leaders that both act; a spare whose arrival ends a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.launch.nodes.attempt import (
        Arrangement,
        Attempt,
        AttemptAnnouncement,
        LeaderLostError,
        Notice,
        RoundPlace,
        StopRun,
        agree_on_launch,
        follow,
        lead,
        lead_on,
        refuse,
        usable_devices,
        why_unfit,
    )
    from holdfast.launch.nodes.meeting import Endpoints, MeetingHandler, StoreLostError, parse_endpoints
    from holdfast.launch.nodes.watch import Leadership
else:
    __getattr__ = offers(__name__)
