"""`holdfast run`."""

from __future__ import annotations


def run() -> None:
    """Stub."""
