"""The largest values that a setting of the tree in `settings.py` may have."""

from __future__ import annotations

LARGEST_COUNT = 10**12 - 1
"""Twelve digits, as many as a checkpoint's name holds for its step."""
LONGEST_WAIT = 31_536_000.0
"""A year in seconds. Every wait has a deadline, and longer ones overflow the platform's timers."""
