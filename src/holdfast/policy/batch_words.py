"""How the data of a step is named to people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.policy.rejection import Window

NAMED = 8
"""Samples, or ranks, that are named one by one."""


def batch_in_words(window: Window | None, samples: Mapping[int, Sequence[int]], world: int) -> str:
    """As in `batch 25 of epoch 1 (samples 96–99)`: batches and epochs counted from 1, samples from 0.

    `samples`: by rank, of those whose batch was bad; empty where they are not known.
    """
    if window is None:
        return ""
    first, last = window.first + 1, window.last + 1
    which = f"batch {first}" if first == last else f"batches {first}–{last}"
    where = f"{which} of epoch {window.epoch + 1}"
    told = [(rank, in_short(indices)) for rank, indices in sorted(samples.items()) if indices]
    if not told:
        return where
    if world == 1:
        return f"{where} ({_samples(samples[told[0][0]])} {told[0][1]})"
    each = [f"{_samples(samples[rank])} {text} on rank {rank}" for rank, text in told[:NAMED]]
    more = f"; and on {len(told) - NAMED} more" if len(told) > NAMED else ""
    return f"{where} ({'; '.join(each)}{more})"


def _samples(indices: Sequence[int]) -> str:
    return "sample" if len(indices) == 1 else "samples"


def in_short(indices: Sequence[int]) -> str:
    """`96–99` for what follows one another, else one by one in their order, as far as there is room."""
    if len(indices) > 1 and list(indices) == list(range(indices[0], indices[0] + len(indices))):
        return f"{indices[0]}–{indices[-1]}"
    named = ", ".join(map(str, indices[:NAMED]))
    return f"{named} and {len(indices) - NAMED} more" if len(indices) > NAMED else named
