"""The data of a rank: the one iterator over the loader, its position, and every random generator.

For batches, their digests and samples, replays after a resume, and data that a run leaves out.
Promises: a resumed run draws the batches and numbers of one that was never interrupted, or is refused by
name.
Never: skip or repeat a sample silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.train.data.feed import DataFeed, follow_skips
    from holdfast.train.data.loaders import GlobalBatches
    from holdfast.train.data.rng import Randomness, capture_rng, restore_rng
else:
    __getattr__ = offers(__name__)
