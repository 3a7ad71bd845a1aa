"""Slurm's short form for many nodes, `n[1-3,07-09]`, spelt out.

Guarantee: what is not understood is an error, never a guess, and the number of names is bounded: the text
comes from outside.
"""

from __future__ import annotations

import re
from itertools import product

MOST = 65_536
"""Names in one list; more than any Slurm has nodes."""
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand(text: str) -> list[str]:
    """The names that a list stands for, in its order, each as often as it is named. Empty text is no names.

    `n[1-3,07-09]`, `rack[0-1]n[0-7]`, `a,b[2-3]`. The width of the low end is kept: `n[08-10]` is n08 to n10.
    ValueError says what is wrong with a text.
    """
    found: list[str] = []
    for part in _split(text.strip()):
        found += _expand_one(part, MOST - len(found))
    return found


def _split(text: str) -> list[str]:
    """The parts between commas that are in no brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
        if depth not in (0, 1):
            raise ValueError(f"{_short(text)}: brackets do not match")
    if depth:
        raise ValueError(f"{_short(text)}: brackets do not match")
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _expand_one(part: str, most: int) -> list[str]:
    pieces: list[list[str]] = []
    count = 1
    for piece in re.split(r"(\[[^\]]*\])", part):
        if not piece:
            continue
        pieces.append(_numbers(piece[1:-1], most) if piece.startswith("[") else [piece])
        count *= len(pieces[-1])
        if count > most:
            raise ValueError(f"{_short(part)} stands for more than {MOST} names")
    if any(character.isspace() for piece in pieces for one in piece for character in one):
        raise ValueError(f"{_short(part)}: a name has no spaces")
    return ["".join(chosen) for chosen in product(*pieces)]


def _numbers(text: str, most: int) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"[{_short(text)}]: {_short(part)!r} is neither a number nor a range LOW-HIGH")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ValueError(f"[{_short(text)}]: the range {part} runs backwards")
        if int(high) - int(low) >= most - len(found):
            raise ValueError(f"[{_short(text)}] stands for more than {MOST} names")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
