"""When storage is so slow that whoever runs on it should know. Pure."""

from __future__ import annotations

PATIENCE = 3.0
"""Seconds that any save may take: small writes and commits on a file system that many nodes share."""
RATE = 50 * 2**20
"""Bytes a second, of all ranks together, that one disk of a desktop computer surpasses."""


def is_slow(stored: int, seconds: float) -> bool:
    """Whether writing and committing so many bytes took longer than usable storage takes."""
    return seconds > PATIENCE + stored / RATE
