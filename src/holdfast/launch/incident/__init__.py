"""An incident, from the first notice to what is done: watching, evidence, hangs, the decision, the end.

For the agents of an attempt's nodes, and for whoever leads when the leader itself was lost.
Promises: evidence is gathered before anything is killed; the decision is made once, from records all could
read.
Never: decide without what was seen written down; wait for a node that may be gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.launch.incident.decision import Recovery as Recovery
    from holdfast.launch.incident.decision import is_starting as is_starting
    from holdfast.launch.incident.decision import report as report
    from holdfast.launch.incident.decision import tell_store_lost as tell_store_lost
    from holdfast.launch.incident.ends import EndedByStorageError as EndedByStorageError
    from holdfast.launch.incident.ends import Ends as Ends
    from holdfast.launch.incident.evidence import Questions as Questions
    from holdfast.launch.incident.evidence import count_oom_kills as count_oom_kills
    from holdfast.launch.incident.evidence import gather as gather
    from holdfast.launch.incident.evidence import memory_kill as memory_kill
    from holdfast.launch.incident.evidence import stop_and_see as stop_and_see
    from holdfast.launch.incident.hang import look_at_hang as look_at_hang
    from holdfast.launch.incident.storage import await_storage as await_storage
    from holdfast.launch.incident.storage import find_trouble as find_trouble
    from holdfast.launch.incident.storage import least_space as least_space
    from holdfast.launch.incident.storage import shared_places as shared_places
    from holdfast.launch.incident.storage import wait_while_paused as wait_while_paused
    from holdfast.launch.incident.vigil import Vigil as Vigil
else:
    __getattr__ = offers(__name__)
