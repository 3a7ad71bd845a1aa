"""A mark of the tracked state that a step begins from, to tell whether two attempts began from the same.

`p:<hex>` is of parameters and optimizer state, which stay as they are until a step is complete; `b:<hex>` of
buffers, where the mark was taken before the step changed any. Only what two marks both hold is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from holdfast.checkpoint import fingerprint as fingerprints
from holdfast.checkpoint.state import Tracked
from holdfast.torch_internals import local_part, tree_leaves
from holdfast.worker.slots import buffer_slots


def mark(tracked: Tracked, *, buffers: bool) -> str:
    """Waits for the devices. Changes nothing: an optimizer that never stepped stays without state."""
    models = [model for _, model in tracked.models()]
    kept: list[torch.Tensor] = [parameter for model in models for parameter in model.parameters()]
    plain: list[str] = []
    for optimizer in tracked.optimizers():
        every: Mapping[Any, Any] = optimizer.state
        entries = [every.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
        entries += [entry for key, entry in every.items() if not isinstance(key, torch.Tensor)]
        for entry in entries:
            state = entry if isinstance(entry, dict) else {"": entry}
            for key in sorted(state, key=str):
                for leaf in tree_leaves(state[key]):
                    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                        kept.append(leaf)
                    else:
                        plain.append(f"{key}={leaf!r}")
    found = f"p:{_digest(kept, plain)}"
    if buffers:
        held = [slot.read() for slot in buffer_slots(models)]
        found += f" b:{_digest([tensor for tensor in held if tensor is not None], [])}"
    return found


def same(one: str, other: str) -> bool | None:
    """Whether the states are equal; None if the marks have nothing in common to compare."""
    first, second = _parts(one), _parts(other)
    common = first.keys() & second.keys()
    return all(first[key] == second[key] for key in common) if common else None


def _digest(tensors: list[torch.Tensor], plain: list[str]) -> str:
    prints = fingerprints.begin([local_part(tensor) for tensor in tensors]).result()
    return xxhash.xxh3_64_hexdigest("\n".join([*prints, *plain]).encode())


def _parts(text: str) -> dict[str, str]:
    return dict(part.split(":", 1) for part in text.split() if ":" in part)
