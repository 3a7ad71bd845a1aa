"""Whether a gradient scaler still lets a training learn. Pure.

Guarantee: what is told here does not come from a healthy run. A scaler that has begun too high leaves out as
many steps as it takes to get down, and one or two now and then later; after `SKIPS` in a row, or with a scale
below `COLLAPSED`, it is not finding its scale any more: the gradients themselves are bad.
"""

from __future__ import annotations

import math

SKIPS = 32
"""Steps left out in a row that are too many: from the usual 65536 down to a hundred-thousandth."""
COLLAPSED = 2.0**-24
"""The smallest number that a half-precision gradient can be: below such a scale all of them vanish."""


class Scale:
    """One scaler's, over time. Nothing but what `observe` is told changes it."""

    def __init__(self, begins_at: float = 1.0) -> None:
        self._floor = COLLAPSED * min(1.0, begins_at)
        self._before: tuple[float, int] | None = None
        self.skipped = 0
        """Steps left out in a row."""

    def observe(self, scale: float, good: int) -> bool:
        """After a step: the scale, and the scaler's count of good steps. Whether that was a bad step.

        A step left out lowers the scale, and nothing else does. A good one raises the count, or the scale.
        """
        before, self._before = self._before, (scale, good)
        updated = before is not None and before != (scale, good)
        if before is not None and scale < before[0]:
            self.skipped += 1
        elif updated:
            self.skipped = 0
        lost = not math.isfinite(scale) or scale < self._floor
        return lost or (updated and self.skipped >= SKIPS)

    @property
    def why(self) -> str:
        """What is wrong with it, as of now; empty if nothing is."""
        if self._before is None:
            return ""
        scale = self._before[0]
        if self.skipped >= SKIPS:
            return (
                f"the gradient scaler has left out {self.skipped} steps in a row, its scale is {scale:.3g}: "
                "the gradients hold a NaN or an infinity whatever the scale, and the weights do not move"
            )
        if not math.isfinite(scale) or scale < self._floor:
            return (
                f"the gradient scaler's scale has collapsed to {scale:.3g}, below {self._floor:.3g}: "
                "gradients vanish at such a scale"
            )
        return ""
