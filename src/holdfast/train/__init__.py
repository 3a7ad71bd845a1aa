"""What runs inside a rank, between the user's loop and the rooms below.

For joining an attempt, saving, resuming, counting, signs of life, probation and ends. Sub-rooms: `data`,
`check`, `stragglers`.
Promises: ranks agree before they act; without the launcher the same things hold as far as one process can
see.
Never: change the training's numbers; kill a healthy run because something in Holdfast failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.train.beats import (
        ANSWER_LIMIT,
        SOCKET,
        AnswerPart,
        Ask,
        Beats,
        Bye,
        FromRank,
        Halted,
        Hello,
        Prepare,
        Promise,
        Seen,
        State,
        StopAt,
        StopWish,
    )
    from holdfast.train.crash import CrashHook, chain_of, write_error_file
    from holdfast.train.forgotten import Forgotten
    from holdfast.train.halting import Halting
    from holdfast.train.membership import Deciding, Membership, join_attempt, look_around
    from holdfast.train.meter import Meter
    from holdfast.train.place import LocalPlaces, join_places
    from holdfast.train.probation import Probation
    from holdfast.train.saves import Saving
    from holdfast.train.schedule import SaveSchedule, measured_before
    from holdfast.train.testimony import (
        Pinging,
        Registered,
        SimulatedFault,
        StackFrame,
        Testimony,
        ThreadStack,
        frames_of,
        registered,
        simulated_fault,
        stacks_path,
        start_beats,
    )
else:
    __getattr__ = offers(__name__)
