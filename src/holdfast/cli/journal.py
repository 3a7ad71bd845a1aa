"""`holdfast journal`."""

from __future__ import annotations


def journal() -> None:
    """Stub."""
