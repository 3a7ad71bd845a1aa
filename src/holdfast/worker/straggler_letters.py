"""A rank's part in a report on stragglers as it travels: a letter that is as long for everybody."""

from __future__ import annotations

import msgspec
import torch

from holdfast.policy.straggler_times import COMPUTE, INPUT, OTHER, RankTimes, Span

LETTER = 2048
"""Bytes of a letter."""
MOST_SECTIONS = 16
LONGEST_NAME = 48
LONGEST_PLACE = 160


def letter_of(mine: RankTimes) -> torch.Tensor:
    """With names of bounded length; without any if they are of more bytes than characters."""
    shown = msgspec.structs.replace(
        mine,
        node=mine.node[:LONGEST_PLACE],
        device=mine.device[:LONGEST_PLACE],
        sections=_few(mine.sections),
    )
    written = msgspec.json.encode(shown)
    if len(written) > LETTER:  # better no names than no figures
        whole = Span(mine.arrives, mine.waits, mine.busy)
        written = msgspec.json.encode(
            msgspec.structs.replace(mine, node="", device="", sections={OTHER: whole})
        )
    return padded(written)


def read_letter(letter: torch.Tensor, rank: int) -> RankTimes:
    try:
        return msgspec.json.decode(letter.numpy().tobytes(), type=RankTimes)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return RankTimes(rank=rank)  # without steps: a report that says nothing


def padded(written: bytes) -> torch.Tensor:
    """As many bytes for everybody; spaces after JSON mean nothing."""
    if len(written) > LETTER:
        raise ValueError(f"a letter of {len(written)} bytes is longer than {LETTER}, which all ranks expect")
    return torch.frombuffer(bytearray(written.ljust(LETTER)), dtype=torch.uint8)


def _few(sections: dict[str, Span]) -> dict[str, Span]:
    """At most so many sections, under names of bounded length; the smallest are counted as `other`."""
    shown: dict[str, Span] = {}
    order = sorted(sections, key=lambda name: (name in (INPUT, COMPUTE, OTHER), sections[name].own))
    for at, name in enumerate(reversed(order)):
        key = name[:LONGEST_NAME] if at < MOST_SECTIONS else OTHER
        shown[key] = _sum(shown[key], sections[name]) if key in shown else sections[name]
    return {name: _short(span) for name, span in shown.items()}


def _short(span: Span) -> Span:
    return Span(round(span.own, 7), round(span.wait, 7), None if span.busy is None else round(span.busy, 7))


def _sum(one: Span, other: Span) -> Span:
    busy = None if one.busy is None or other.busy is None else one.busy + other.busy
    return Span(one.own + other.own, one.wait + other.wait, busy)
