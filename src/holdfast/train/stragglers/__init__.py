"""Which rank the others wait for: measured in each rank's steps, compared, named, reported.

For the detector inside `Run`, or by itself in other loops.
Promises: scores mean the same everywhere; a report never waits for a rank that does not answer.
Never: name a rank without saying what it cost; end a run unless the settings say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.train.stragglers.reports import (
        StragglerDetector,
        Stragglers,
        make_stragglers,
        refuse_straggler_settings,
    )
    from holdfast.train.stragglers.scores import COMPUTE, INPUT, OTHER
else:
    __getattr__ = offers(__name__)
