"""Passes one rank's arguments and random numbers to the next rank, so that it can compute the same.

The ranks form a ring: each sends to the next and receives from the one before, over Holdfast's own group.
Lengths go first, then a description, then the bytes of all tensors in one piece; nothing is pickled. Every
wait is bounded by the group's own timeout.

What is data is sent: tensors, numbers, texts. What stands for itself on every rank (models, optimizers,
functions) is not: the receiver uses its own. Anything else cannot be passed on, and `pack` says so.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from holdfast.control.group import Group
from holdfast.torch_internals import TreeSpec, tree_flatten, tree_unflatten

LIMIT = 1024**3
"""Bytes of one micro-batch above which it stays where it is."""
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Leaf(msgspec.Struct, frozen=True, omit_defaults=True):
    """One leaf of the arguments."""

    kind: str
    """tensor, value, or own."""
    dtype: str = ""
    shape: list[int] = []
    value: bool | int | float | str | None = None


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Describes what follows, and what the sender made of it."""

    leaves: list[Leaf]
    python: list[int]
    gauss: float | None
    numpy: list[int] | None
    numpy_gauss: tuple[int, float] = (0, 0.0)
    devices: int = 0
    """How many states of devices' generators follow the host's."""


class Packed:
    """Arguments that can be passed on."""

    def __init__(self, leaves: list[Any], spec: TreeSpec, kinds: str) -> None:
        self.leaves = leaves
        self.spec = spec
        self.shape = xxhash.xxh3_64_intdigest(f"{spec}|{kinds}".encode()) >> 2
        """Alike on ranks whose arguments are built alike."""


def pack(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed | str:
    """The arguments, ready to be passed on; or why they cannot be."""
    leaves, spec = tree_flatten((list(args), dict(kwargs)))
    kinds = [_kind(leaf) for leaf in leaves]
    for leaf, kind in zip(leaves, kinds, strict=True):
        if not kind:
            return f"an argument is a {type(leaf).__name__}"
    tensors = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == "tensor"]
    if not tensors:
        return "no tensor is among the arguments"
    if (size := sum(tensor.nbytes for tensor in tensors)) > LIMIT:
        return f"the arguments have {size} bytes, at most {LIMIT} are passed on"
    return Packed(leaves, spec, ",".join(kinds))


def exchange(packed: Packed, randomness: Mapping[str, Any], group: Group) -> tuple[list[Any], dict[str, Any]]:
    """Send these to the next rank, together with the state of the generators; return what the rank before
    sent, as arguments, after putting the generators where its were. All ranks call this together."""
    header, payload = _sent(packed, randomness)
    got_header, got_payload = _pass_on(header, payload, group)
    note = msgspec.msgpack.decode(got_header, type=Note)
    at = 0

    def take(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        nonlocal at
        tensor = torch.empty(list(shape), dtype=dtype)
        piece = got_payload[at : at + tensor.nbytes]
        at += tensor.nbytes
        return piece.clone().view(dtype).view(list(shape)) if tensor.nbytes else tensor

    leaves: list[Any] = []
    for own, leaf in zip(packed.leaves, note.leaves, strict=True):
        if leaf.kind == "tensor":
            there = take(DTYPES[leaf.dtype], leaf.shape).to(own.device)
            leaves.append(there.requires_grad_() if own.requires_grad else there)
        else:
            leaves.append(own if leaf.kind == "own" else leaf.value)
    _seed(note, [_take_state(take) for _ in range(1 + note.devices)])
    args, kwargs = tree_unflatten(leaves, packed.spec)
    return args, kwargs


def _kind(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        simple = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
        return "tensor" if simple and str(leaf.dtype) in DTYPES and not leaf.is_quantized else ""
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return "value" if -(2**63) <= leaf < 2**63 else ""
    if leaf is None or type(leaf) in (bool, float, str):
        return "value"
    if isinstance(leaf, Iterator):
        return ""
    stands_for_itself = isinstance(leaf, nn.Module | torch.optim.Optimizer | torch.device | torch.dtype)
    return "own" if stands_for_itself or callable(leaf) else ""


def _sent(packed: Packed, randomness: Mapping[str, Any]) -> tuple[bytes, torch.Tensor]:
    described: list[Leaf] = []
    pieces: list[torch.Tensor] = []
    for leaf in packed.leaves:
        kind = _kind(leaf)
        if kind == "tensor":
            described.append(Leaf("tensor", str(leaf.dtype), list(leaf.shape)))
            pieces.append(_bytes(leaf))
        else:
            described.append(Leaf(kind, value=leaf if kind == "value" else None))
    _, python, gauss = randomness["python"]
    states = [randomness["torch"], *randomness.get("cuda", [])]
    for state in states:
        pieces += [_bytes(torch.tensor(state.numel())), _bytes(state)]
    numpy, numpy_gauss = None, (0, 0.0)
    if "numpy" in randomness:
        _, keys, position, has_gauss, cached = randomness["numpy"]
        numpy, numpy_gauss = [*keys.tolist(), int(position)], (int(has_gauss), float(cached))
    note = Note(
        leaves=described,
        python=list(python),
        gauss=gauss,
        numpy=numpy,
        numpy_gauss=numpy_gauss,
        devices=len(states) - 1,
    )
    return msgspec.msgpack.encode(note), torch.cat(pieces)


def _pass_on(header: bytes, payload: torch.Tensor, group: Group) -> tuple[bytes, torch.Tensor]:
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    lengths = torch.tensor([len(header), payload.numel()])
    got_lengths = torch.empty_like(lengths)
    _both_ways(lengths, after, got_lengths, before, group)
    header_length, payload_length = got_lengths.tolist()
    got_header = torch.empty(header_length, dtype=torch.uint8)
    _both_ways(torch.frombuffer(bytearray(header), dtype=torch.uint8), after, got_header, before, group)
    got_payload = torch.empty(payload_length, dtype=torch.uint8)
    _both_ways(payload, after, got_payload, before, group)
    return bytes(got_header.tolist()), got_payload


def _both_ways(sent: torch.Tensor, after: int, got: torch.Tensor, before: int, group: Group) -> None:
    sending = dist.isend(sent, after, group=group.process_group)
    dist.recv(got, before, group=group.process_group)
    if sending is not None:
        sending.wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _take_state(take: Any) -> torch.Tensor:
    state: torch.Tensor = take(torch.uint8, [int(take(torch.int64, []))])
    return state


def _seed(note: Note, states: list[torch.Tensor]) -> None:
    random.setstate((3, tuple(note.python), note.gauss))
    torch.set_rng_state(states[0])
    if note.numpy is not None and "numpy" in sys.modules:
        import numpy

        *keys, position = note.numpy
        numpy.random.set_state(("MT19937", numpy.array(keys, numpy.uint32), position, *note.numpy_gauss))
    if len(states) > 1 and torch.cuda.is_available():
        own = torch.cuda.current_device()
        torch.cuda.set_rng_state(states[1 + min(own, len(states) - 2)])
