"""TODO"""

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
