"""Which checkpoint a start continues from, and loading it: the ladder, the verification, the load.

For resumes, for looking ahead without a lease, for suspicion, and for plain DCP directories.
Promises: one choice for all ranks, by evidence, with the reason why each higher rung was not taken.
Never: unpickle or put into live state what has not been verified; begin anew where a checkpoint was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.choose.ladder import (
        BAD,
        FRESH,
        LOCAL,
        NO_RUNG,
        PROBE_SIZE,
        REFUSED,
        REFUSED_STANDINGS,
        USED,
        RungOutlook,
        first_of,
        highest_committed_step,
        look_at,
        next_orders,
        situation_of,
        still_open,
        take_pinned,
        write_down,
        write_findings,
    )
    from holdfast.checkpoint.choose.load import LoadedState
    from holdfast.checkpoint.choose.plain import is_plain_root
    from holdfast.checkpoint.choose.resolver import (
        Resolution,
        checkpoint_root,
        resolve_plain,
        resolve_resume,
        run_of_root,
    )
    from holdfast.checkpoint.choose.resume import Proposal, ResumeDecision, Resumer, open_at_start
    from holdfast.checkpoint.choose.verifying_reader import VerifyingReader
else:
    __getattr__ = offers(__name__)
