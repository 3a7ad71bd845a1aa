"""Whether two runs did the same, bit for bit, as their journals and checkpoints say.

Guarantee: equality is claimed only for what was found in both and compared. What is missing on either side,
a loss that nobody recorded, a tensor that only one checkpoint has, is a difference, never a match.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.journal import JournalLine
from holdfast.journal.events import StepsDone, decode_loss


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    count: int
    """How many values were compared."""
    unit: str
    difference: str = ""
    """The first difference; empty if there is none."""

    @property
    def equal(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        if self.difference:
            return f"{self.what} differ: {self.difference}"
        return f"{self.what} are bitwise equal ({self.count:,} {self.unit})"


class RankStep(msgspec.Struct, frozen=True):
    """One step of one rank."""

    attempt: int
    loss: float | None
    samples: str


UNSEEDED = (".rng.python", ".rng.numpy")
"""Not compared: the example neither seeds nor uses these generators, so every process has its own."""

Timeline = Mapping[tuple[int, int], RankStep]
"""(step, rank) → what was done there on the run's final timeline."""


def timeline(lines: list[JournalLine]) -> dict[tuple[int, int], RankStep]:
    """Each step of each rank as it finally counts: if a step was done again, the later attempt's."""
    final: dict[tuple[int, int], RankStep] = {}
    for line in lines:
        if not isinstance(line.body, StepsDone) or not line.who.startswith("rank-"):
            continue
        rank = int(line.who.removeprefix("rank-"))
        for number in range(len(line.body.seconds)):
            loss = decode_loss(line.body.loss[number]) if number < len(line.body.loss) else None
            samples = line.body.samples[number] if number < len(line.body.samples) else ""
            place = (line.body.first + number, rank)
            if place not in final or final[place].attempt <= line.attempt:
                final[place] = RankStep(line.attempt, loss, samples)
    return dict(sorted(final.items()))


def loss_curve(lines: list[JournalLine], rank: int = 0) -> list[tuple[int, float]]:
    """(step, loss) of one rank on the final timeline."""
    return [
        (step, done.loss)
        for (step, who), done in timeline(lines).items()
        if who == rank and done.loss is not None
    ]


def compare_losses(one: Timeline, other: Timeline, *, steps: int, ranks: int) -> Comparison:
    """Every rank's loss of every step."""
    compared = 0
    for place in _places(steps, ranks):
        mine, theirs = one.get(place), other.get(place)
        missing = _missing(place, mine, theirs) or _unrecorded(place, mine, theirs, "loss")
        if not missing and mine is not None and theirs is not None:
            assert mine.loss is not None
            assert theirs.loss is not None
            if _bits(mine.loss) != _bits(theirs.loss):
                missing = f"step {place[0]}, rank {place[1]}: {mine.loss!r} against {theirs.loss!r}"
        if missing:
            return Comparison(what="losses", count=compared, unit="values", difference=missing)
        compared += 1
    return Comparison(what="losses", count=compared, unit="values")


def compare_samples(one: Timeline, other: Timeline, *, steps: int, ranks: int) -> Comparison:
    """Which samples each rank took at each step, and in which order, by the digest of their ids."""
    what, unit = "sample orders", "batches"
    compared = 0
    for place in _places(steps, ranks):
        mine, theirs = one.get(place), other.get(place)
        missing = _missing(place, mine, theirs) or _unrecorded(place, mine, theirs, "samples")
        if not missing and mine is not None and theirs is not None and mine.samples != theirs.samples:
            missing = (
                f"step {place[0]}, rank {place[1]}: sample digest {mine.samples} against {theirs.samples}"
            )
        if missing:
            return Comparison(what=what, count=compared, unit=unit, difference=missing)
        compared += 1
    return Comparison(what=what, count=compared, unit=unit)


def _places(steps: int, ranks: int) -> list[tuple[int, int]]:
    return [(step, rank) for step in range(1, steps + 1) for rank in range(ranks)]


def _missing(place: tuple[int, int], mine: RankStep | None, theirs: RankStep | None) -> str:
    if mine is not None and theirs is not None:
        return ""
    where = "both runs" if mine is theirs else "the first run" if mine is None else "the second run"
    return f"step {place[0]}, rank {place[1]} is not in the journal of {where}"


def _unrecorded(place: tuple[int, int], mine: RankStep | None, theirs: RankStep | None, field: str) -> str:
    for done, where in ((mine, "first"), (theirs, "second")):
        if done is not None and getattr(done, field) in (None, ""):
            return f"step {place[0]}, rank {place[1]}: the {where} run recorded no {field}"
    return ""


def _bits(value: float) -> bytes:
    """A float's own bits: 0.0 and -0.0 differ, and a NaN equals itself."""
    return struct.pack("<d", math.nan if math.isnan(value) else value)


# --- checkpoints: everything below needs torch, which is imported when it is called ------------------------


def compare_checkpoints(one: Path, other: Path) -> list[Comparison]:
    """The tensors of two checkpoints (weights, optimizer), and what else they hold for every rank."""
    from holdfast.checkpoint.format import verify

    for directory in (one, other):
        inspection = verify(directory)  # before anything in it is unpickled
        if not inspection.sound or inspection.digests_missing:
            why = str(inspection.problems[0]) if inspection.problems else "it has no digests"
            return [Comparison(what="parameters", count=0, unit="tensors", difference=f"{directory}: {why}")]
    return compare_states(read_state(one), read_state(other))


def read_state(directory: Path) -> dict[str, Any]:
    """Every stored tensor by name, read with stock DCP, in one process."""
    import warnings

    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(directory)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(state, storage_reader=reader, no_dist=True)
    return state


def compare_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Comparison]:
    """Tensors bit by bit; the ranks' own parts (RNG, schedule, data position, counters) value by value."""
    from holdfast.checkpoint.state import OWN, from_blob

    blobs = {name for name in {*one, *other} if name.startswith(f"{OWN}.rank_")}
    tensors = sorted({*one, *other} - blobs)
    difference = next(filter(None, (_tensor_difference(name, one, other) for name in tensors)), "")
    difference = difference if tensors else "none is stored"
    values = sum(one[name].numel() for name in tensors if name in one)
    what = "parameters and optimizer states"
    parts = [Comparison(what=what, count=values, unit="numbers", difference=difference)]
    difference = "" if blobs else "none is stored"
    for name in sorted(blobs):
        if name not in one or name not in other:
            difference = f"{name} is in the {'first' if name in one else 'second'} only"
        else:
            difference = value_difference(from_blob(one[name]), from_blob(other[name]), name)
        if difference:
            break
    what = "torch's random states, schedules and data positions"
    parts.append(Comparison(what=what, count=len(blobs), unit="ranks", difference=difference))
    return parts


def _tensor_difference(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if name not in one or name not in other:
        return f"{name} is in the {'first' if name in one else 'second'} only"
    mine, theirs = one[name], other[name]
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        shapes = f"{mine.dtype} {tuple(mine.shape)} against {theirs.dtype} {tuple(theirs.shape)}"
        return f"{name} is {shapes}"
    import torch

    bytes_differ = mine.reshape(-1).view(torch.uint8) != theirs.reshape(-1).view(torch.uint8)
    if not bool(bytes_differ.any()):
        return ""
    first = int(bytes_differ.nonzero()[0]) // mine.element_size()
    count = int(bytes_differ.view(-1, mine.element_size()).any(dim=1).sum())
    pair = f"{mine.reshape(-1)[first].item()!r} against {theirs.reshape(-1)[first].item()!r}"
    return f"{name}, element {first}: {pair} ({count:,} of {mine.numel():,} elements differ)"


def value_difference(one: Any, other: Any, where: str = "value") -> str:
    """Where two trees of plain values, arrays and tensors first differ; empty if nowhere."""
    if where.endswith(UNSEEDED):
        return ""
    import numpy
    import torch

    if type(one) is not type(other):
        return f"{where} is a {type(one).__name__} against a {type(other).__name__}"
    if isinstance(one, torch.Tensor):
        return _tensor_difference(where, {where: one}, {where: other})
    if isinstance(one, numpy.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return "" if same else f"{where} differs"
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return f"{where} has the keys {sorted(map(str, one))} against {sorted(map(str, other))}"
        inner = ((f"{where}.{key}", one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{where} has {len(one)} entries against {len(other)}"
        inner = ((f"{where}[{n}]", *pair) for n, pair in enumerate(zip(one, other, strict=True)))
    elif isinstance(one, float):
        return "" if _bits(one) == _bits(other) else f"{where} is {one!r} against {other!r}"
    else:
        return "" if one == other else f"{where} is {one!r} against {other!r}"
    return next(filter(None, (value_difference(mine, theirs, name) for name, mine, theirs in inner)), "")
