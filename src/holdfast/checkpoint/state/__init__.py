"""The state of what a run tracks, as checkpoint state and back: models, optimizers, gradients and the rest.

For collecting state, putting it back, and the proof at the first save that what is stored would resume.
Promises: what training changes comes back bit for bit, or its save or load is refused by name.
Never: keep half of a state; change what training uses while it looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.state import module as module
    from holdfast.checkpoint.state.adapters import flatten as flatten
    from holdfast.checkpoint.state.gradients import GRADIENTS as GRADIENTS
    from holdfast.checkpoint.state.gradients import is_placeholder as is_placeholder
    from holdfast.checkpoint.state.module import LOOSE as LOOSE
    from holdfast.checkpoint.state.optimizer import uncollected as uncollected
    from holdfast.checkpoint.state.proof import Initial as Initial
    from holdfast.checkpoint.state.proof import Report as Report
    from holdfast.checkpoint.state.proof import Subject as Subject
    from holdfast.checkpoint.state.proof import first_difference as first_difference
    from holdfast.checkpoint.state.proof import merge as merge
    from holdfast.checkpoint.state.proof import prove as prove
    from holdfast.checkpoint.state.tracked import OWN as OWN
    from holdfast.checkpoint.state.tracked import Tracked as Tracked
    from holdfast.checkpoint.state.tracked import UnreadObjectsError as UnreadObjectsError
    from holdfast.checkpoint.state.tracked import check_parts as check_parts
    from holdfast.checkpoint.state.tracked import check_strict as check_strict
    from holdfast.checkpoint.state.tracked import from_blob as from_blob
    from holdfast.checkpoint.state.tracked import rank_key as rank_key
    from holdfast.checkpoint.state.tracked import to_blob as to_blob
    from holdfast.checkpoint.state.untracked import alive as alive
    from holdfast.checkpoint.state.untracked import has_schedule as has_schedule
    from holdfast.checkpoint.state.untracked import held_by as held_by
    from holdfast.checkpoint.state.untracked import in_question as in_question
    from holdfast.checkpoint.state.untracked import parameters_of as parameters_of
    from holdfast.checkpoint.state.untracked import untracked_schedules as untracked_schedules
else:
    __getattr__ = offers(__name__)
