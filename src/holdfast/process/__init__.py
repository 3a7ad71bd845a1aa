"""Processes of ours and of others: who they are, how they are tied together, and how they talk.

For identities that outlive a pid, children that die with their parent, local sockets, and senders of
signals.
Promises: a child of ours imports nothing from the current directory; an identity never matches another
process.
Never: decide what becomes of a process, or wait without a deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.process import identity
    from holdfast.process.guard import guarded
    from holdfast.process.identity import (
        AGENT,
        OUTLIVES,
        STATES,
        Holder,
        Process,
        Thread,
        Waking,
        is_gone,
        is_here,
        job_of,
        leave_stopping_to_the_trainer,
        outliving,
        own_child,
        started_at,
        stopping_blocked,
        this_process,
    )
    from holdfast.process.senders import Seen, from_whom, named, seen, take, watch
    from holdfast.process.sockets import (
        ANCESTORS,
        Message,
        descends,
        lineage,
        make_private,
        peer_of,
        receive,
        send,
    )
else:
    __getattr__ = offers(__name__)
