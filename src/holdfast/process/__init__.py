"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.process import proc as proc
    from holdfast.process.companion import AGENT as AGENT
    from holdfast.process.companion import OUTLIVES as OUTLIVES
    from holdfast.process.companion import Companion as Companion
    from holdfast.process.companion import leave_stopping_to_the_trainer as leave_stopping_to_the_trainer
    from holdfast.process.companion import outliving as outliving
    from holdfast.process.companion import own_child as own_child
    from holdfast.process.companion import start_child as start_child
    from holdfast.process.companion import stopping_blocked as stopping_blocked
    from holdfast.process.guard import guarded as guarded
    from holdfast.process.identity import Holder as Holder
    from holdfast.process.identity import Waking as Waking
    from holdfast.process.identity import is_gone as is_gone
    from holdfast.process.identity import is_here as is_here
    from holdfast.process.identity import job_of as job_of
    from holdfast.process.identity import this_process as this_process
    from holdfast.process.proc import ANCESTORS as ANCESTORS
    from holdfast.process.proc import STATES as STATES
    from holdfast.process.proc import MemoryMapping as MemoryMapping
    from holdfast.process.proc import Process as Process
    from holdfast.process.proc import Thread as Thread
    from holdfast.process.proc import descends as descends
    from holdfast.process.proc import lineage as lineage
    from holdfast.process.proc import started_at as started_at
    from holdfast.process.senders import Seen as Seen
    from holdfast.process.senders import from_whom as from_whom
    from holdfast.process.senders import named as named
    from holdfast.process.senders import seen as seen
    from holdfast.process.senders import take as take
    from holdfast.process.senders import watch as watch
    from holdfast.process.sockets import Message as Message
    from holdfast.process.sockets import make_private as make_private
    from holdfast.process.sockets import peer_of as peer_of
    from holdfast.process.sockets import receive as receive
    from holdfast.process.sockets import send as send
    from holdfast.process.sockets import short_address as short_address
else:
    __getattr__ = offers(__name__)
