"""Processes of ours and of others: who they are, how they are tied together, and how they talk.

For identities that outlive a pid, children that die with their parent, the wire between local processes, and
the senders of signals.
Promises: a child of ours imports nothing from the current directory; an identity never matches another
process; whoever speaks over the wire learns in bounded time whether it was heard.
Never: decide what becomes of a process, or wait without a deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.process import proc
    from holdfast.process.companion import (
        AGENT,
        BEHIND,
        BESIDE,
        LAST,
        OUTLIVES,
        Companion,
        leave_stopping_to_the_trainer,
        own_child,
        start_child,
        step_aside,
    )
    from holdfast.process.guard import guarded
    from holdfast.process.local_wire import PACKET_LIMIT, Garbage, Gone, Listener, Packets, Stream
    from holdfast.process.proc import (
        ANCESTORS,
        STATES,
        Holder,
        MemoryMapping,
        Process,
        Thread,
        Waking,
        began_at,
        descends,
        is_gone,
        is_here,
        job_of,
        lineage,
        started_at,
        this_process,
    )
    from holdfast.process.senders import SeenSender, from_whom, named, seen, take, watch
else:
    __getattr__ = offers(__name__)
