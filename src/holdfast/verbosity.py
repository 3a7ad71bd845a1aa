"""How much is printed: HOLDFAST_VERBOSITY in the environment.

It is not a setting of the run: what a run does never depends on it, and whoever looks for an error changes it
without changing what the run was started with.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

VARIABLE = "HOLDFAST_VERBOSITY"


class Verbosity(StrEnum):
    NORMAL = "normal"
    DEBUG = "debug"


def verbosity(environ: Mapping[str, str]) -> Verbosity:
    """What was asked for; what is no such word was refused where the settings were read."""
    asked = environ.get(VARIABLE, "")
    return Verbosity(asked) if asked in set(Verbosity) else Verbosity.NORMAL


def is_known(text: str) -> bool:
    """Whether it is one of the words; empty is as if it were not set."""
    return not text or text in set(Verbosity)
