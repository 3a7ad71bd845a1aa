"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.train.beats import ANSWER_LIMIT as ANSWER_LIMIT
    from holdfast.train.beats import PACKET_LIMIT as PACKET_LIMIT
    from holdfast.train.beats import SOCKET as SOCKET
    from holdfast.train.beats import Answer as Answer
    from holdfast.train.beats import Ask as Ask
    from holdfast.train.beats import Beats as Beats
    from holdfast.train.beats import Bye as Bye
    from holdfast.train.beats import FromRank as FromRank
    from holdfast.train.beats import Halted as Halted
    from holdfast.train.beats import Hello as Hello
    from holdfast.train.beats import Prepare as Prepare
    from holdfast.train.beats import Promise as Promise
    from holdfast.train.beats import Seen as Seen
    from holdfast.train.beats import State as State
    from holdfast.train.beats import StopAt as StopAt
    from holdfast.train.beats import Wish as Wish
    from holdfast.train.crash import CrashHook as CrashHook
    from holdfast.train.crash import chain_of as chain_of
    from holdfast.train.crash import write_error_file as write_error_file
    from holdfast.train.halting import Halting as Halting
    from holdfast.train.membership import Membership as Membership
    from holdfast.train.meter import Meter as Meter
    from holdfast.train.meter import measured_before as measured_before
    from holdfast.train.parts import EXCHANGE_SLACK as EXCHANGE_SLACK
    from holdfast.train.parts import Parts as Parts
    from holdfast.train.parts import Surroundings as Surroundings
    from holdfast.train.probation import Probation as Probation
    from holdfast.train.saves import Saving as Saving
    from holdfast.train.testimony import Frame as Frame
    from holdfast.train.testimony import Pinging as Pinging
    from holdfast.train.testimony import Registered as Registered
    from holdfast.train.testimony import SimulatedFault as SimulatedFault
    from holdfast.train.testimony import Testimony as Testimony
    from holdfast.train.testimony import ThreadStack as ThreadStack
    from holdfast.train.testimony import frames_of as frames_of
    from holdfast.train.testimony import judge_collectives as judge_collectives
    from holdfast.train.testimony import registered as registered
    from holdfast.train.testimony import simulated_fault as simulated_fault
    from holdfast.train.testimony import stacks_path as stacks_path
    from holdfast.train.testimony import start_beats as start_beats
    from holdfast.train.testimony import tell_idle as tell_idle
else:
    __getattr__ = offers(__name__)
