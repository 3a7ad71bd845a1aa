"""The per-rank parts of a checkpoint at another world size, by stated rules.

Tensors of models and optimizers reshard by themselves: DCP stores them under global names and offsets. For
what each rank stored of its own:

* tracked objects (schedules, scalers, hyper-parameters) must be the same on all ranks that saved them; every
  rank of the new world gets that state. One that differs between ranks cannot be shared out: refused.
* tensors that differed between ranks go on everywhere as the lowest rank's.
* the data position must be a global one (see worker/batches.py), the same on all ranks: refused otherwise,
  because samples would be repeated or left out silently.
* gradients that lie there must be the same on all ranks, or sharded ones: refused otherwise.
* random generators are seeded anew, from run, step, rank and world size.
* samples and tokens are counted per rank; the ranks of the new world share out their totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from holdfast.checkpoint.roundtrip import first_difference
from holdfast.errors import IncompleteStateError


def reshard(
    blobs: Sequence[dict[str, Any]], *, run: str, step: int, rank: int, world: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(tracked state, Holdfast's own state, what was done in words) for one rank of the new world."""
    was = len(blobs)
    tracked = blobs[0]["tracked"]
    for other, blob in enumerate(blobs[1:], start=1):
        where = first_difference(tracked, blob["tracked"], "")
        if where:
            raise IncompleteStateError(
                f"{where.lstrip('.')} differs between ranks 0 and {other} of the {was} that saved it, so it "
                f"cannot be shared out to {world}. Resume with {was} ranks"
            )
    own = {
        "counters": _share_counters([blob["own"]["counters"] for blob in blobs], rank, world),
        "data": _share_position([blob["own"]["data"] for blob in blobs], world),
        "rng": {"seed": int(xxhash.xxh3_64_hexdigest(f"{run}/{step}/{rank}/{world}".encode())[:15], 16)},
    }
    if (left := blobs[0]["own"].get("gradients")) is not None:
        own["gradients"] = _share_gradients(left, [blob["own"].get("gradients") for blob in blobs], world)
    return tracked, own, [f"{was} ranks saved this, {world} resume it: random generators are seeded anew"]


def _share_gradients(first: dict[str, Any], all_of_them: Sequence[Any], world: int) -> dict[str, Any]:
    entries = first["entries"]
    own = {name for name, entry in entries.items() if entry["kind"] == "local" or name.endswith(".unsharded")}
    alike = all(other is not None and other["entries"] == entries for other in all_of_them)
    if own or first["objects"] or not alike:
        name = min(own | first["objects"].keys(), default="some")
        raise IncompleteStateError(
            f"gradients that {len(all_of_them)} ranks have accumulated on their own cannot be shared out to "
            f"{world} ({name}). Resume with {len(all_of_them)} ranks"
        )
    return {**first, "unsynced": []}


def _share_counters(counters: Sequence[dict[str, int]], rank: int, world: int) -> dict[str, int]:
    shared = {"step": counters[0]["step"]}
    for name in ("samples", "tokens"):
        total = sum(count[name] for count in counters)
        shared[name] = total // world + (rank < total % world)
    return shared


def _share_position(positions: Sequence[dict[str, Any] | None], world: int) -> dict[str, Any] | None:
    first = positions[0]
    if first is None and all(position is None for position in positions):
        return None
    if first is None or not all(position is not None and position.get("is_global") for position in positions):
        raise IncompleteStateError(
            f"the data position of {len(positions)} ranks cannot be shared out to {world}: this loader keeps "
            "one per rank, and samples would be repeated or left out. Use holdfast.GlobalBatches, whose "
            f"position is a global one, or resume with {len(positions)} ranks"
        )
    if any(position["loader"] != first["loader"] for position in positions if position is not None):
        raise IncompleteStateError("the ranks' global data positions differ; the loaders were not used alike")
    return first
