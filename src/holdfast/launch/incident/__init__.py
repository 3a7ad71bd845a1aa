"""An incident, from the first notice to what is done: watching, evidence, hangs, the decision, the end.

For the agents of an attempt's nodes, and for whoever leads when the leader itself was lost.
Promises: evidence is gathered before anything is killed; the decision is made once, from records that all
could read.
Never: decide before what was seen is written down; wait for a node that may be gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.launch.incident.decision import (
        PAUSE_POLL,
        Recovery,
        await_storage,
        find_trouble,
        is_starting,
        least_space,
        report,
        shared_places,
        tell_store_lost,
        wait_while_paused,
    )
    from holdfast.launch.incident.hang import look_at_hang
    from holdfast.launch.incident.inquest import Questions, count_oom_kills, gather, memory_kill, stop_and_see
    from holdfast.launch.incident.supervision import EndedByStorageError, Ends, Vigil
else:
    __getattr__ = offers(__name__)
