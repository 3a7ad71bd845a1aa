"""How times, sizes and any other text are shown to people."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

MAX_TEXT = 500


@dataclass(frozen=True)
class Rendered:
    text: str
    style: str
    """fault, warning, decision, saved, good, progress or plain; what it looks like is the shower's choice."""
    details: list[str] = field(default_factory=list)
    """Lines that belong under the text: evidence and rejected options."""


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Any text as one harmless line."""
    line = " ".join(text[: limit * 4].split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def escaped(text: str, limit: int = 200) -> str:
    """`text` as it is, with escapes for control characters and lone surrogates, cut to `limit`: safe to print
    and to encode. Unlike `printable` it keeps every space, so that a path can be copied."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def duration(seconds: float) -> str:
    """A length of time with about three digits: 42 ms, 3.2 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def moment(at: float) -> str:
    """A point in time by the clock of this machine, whatever number a record has for it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "a time out of range"


def size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def number(value: float | None) -> str:
    """A loss for people."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
