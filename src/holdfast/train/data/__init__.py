"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.train.data.feed import DataFeed as DataFeed
    from holdfast.train.data.feed import follow_skips as follow_skips
    from holdfast.train.data.loaders import GlobalBatches as GlobalBatches
    from holdfast.train.data.rng import Randomness as Randomness
    from holdfast.train.data.rng import capture_rng as capture_rng
    from holdfast.train.data.rng import restore_rng as restore_rng
else:
    __getattr__ = offers(__name__)
