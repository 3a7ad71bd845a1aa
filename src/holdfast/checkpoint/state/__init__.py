"""The state of what a run tracks, as checkpoint state and back: models, optimizers, gradients and the rest.

For collecting state, putting it back, and the proof at the first save that what is stored would resume.
Promises: what training changes comes back bit for bit, or its save or load is refused by name.
Never: keep half of a state; change what training uses while looking at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.state import module
    from holdfast.checkpoint.state.adapters import OwnEntry, SplitTensor, flatten
    from holdfast.checkpoint.state.division import Split, contents, coordinates
    from holdfast.checkpoint.state.gradient_state import GRADIENTS, is_placeholder
    from holdfast.checkpoint.state.module import LOOSE, RECORD
    from holdfast.checkpoint.state.nested import NESTED
    from holdfast.checkpoint.state.optimizer import uncollected
    from holdfast.checkpoint.state.proof import Initial, Report, Subject, first_difference, merge, prove
    from holdfast.checkpoint.state.tracked import (
        ABSENT,
        OWN,
        LeftOut,
        Tracked,
        UnreadObjectsError,
        check_parts,
        check_strict,
        from_blob,
        has_form,
        misfit,
        rank_key,
        to_be_tracked,
        to_blob,
        tracked_by_nobody,
    )
    from holdfast.checkpoint.state.untracked import (
        alive,
        has_schedule,
        held_by,
        in_question,
        parameters_of,
        untracked_schedules,
    )
else:
    __getattr__ = offers(__name__)
