"""The kinds of training in docs/guides/exactness.md's tables: each a few lines, as a torch script has them.

Nothing here knows of Holdfast. The plain loop and the loop with a `Run` (exactness.py) build the same parts
and do the same with them; `tracked` is what a script would hand to `run.track`.
"""

from __future__ import annotations

# The kinds are tried and listed in the order in which these modules add them.
# isort: off
from kit.worlds.kinds import optimizers, models, changes, steps

# isort: on
from kit.worlds.kinds.data import ALONE, DATA, SLOW_DATA, Numbers
from kit.worlds.kinds.kind import KINDS, MIDDLE, Kind, Parts, Place, middle

__all__ = [
    "ALONE", "DATA", "KINDS", "MIDDLE", "SLOW_DATA", "Kind", "Numbers", "Parts", "Place", "changes", "middle",
    "models", "optimizers", "steps",
]  # fmt: skip
