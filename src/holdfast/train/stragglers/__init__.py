"""Which rank the others wait for: measured in a rank's steps, compared, named, told.

For the detector inside `Run`, and alone in other loops.
Promises: scores mean the same everywhere; a report never waits for a rank that does not answer.
Never: name a rank without saying what it cost; end a run unless the settings say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.train.stragglers.detector import StragglerDetector as StragglerDetector
    from holdfast.train.stragglers.detector import make_stragglers as make_stragglers
    from holdfast.train.stragglers.detector import refuse_straggler_settings as refuse_straggler_settings
    from holdfast.train.stragglers.reports import Stragglers as Stragglers
    from holdfast.train.stragglers.scores import COMPUTE as COMPUTE
    from holdfast.train.stragglers.scores import INPUT as INPUT
    from holdfast.train.stragglers.scores import OTHER as OTHER
else:
    __getattr__ = offers(__name__)
