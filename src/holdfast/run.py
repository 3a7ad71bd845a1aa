"""Run: the one object that a training loop holds."""

from __future__ import annotations


class Run: ...
