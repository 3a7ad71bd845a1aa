"""The silent corruption watch: now and then a micro-batch is computed twice, by two devices if possible.

A device that computes wrongly without any error gives numbers that look like any others. Every so many steps
each rank's micro-batch, with its random numbers, goes to the next rank; all ranks compute their neighbour's
together, so that collectives inside the step match; and the two losses are compared. If arguments cannot be
passed on, or a rank is alone, the step is computed twice on the same rank, and the gradients' norms are
compared too.

Guarantee: afterwards gradients, buffers, scalers, random numbers and what was recorded are as they were
before. All ranks take part alike, and know the same outcome. `policy.accuse` says who is accused.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from holdfast.base import TreeSpec, tree_flatten, tree_unflatten
from holdfast.checkpoint.state import Tracked
from holdfast.policy import Place, accuse
from holdfast.record import Group
from holdfast.train.check.checks import read_together, single_number
from holdfast.train.check.gradients import Gradients
from holdfast.train.check.rerun import difference
from holdfast.train.data import capture_rng

# Passes one rank's arguments and random numbers to the next rank, so that it can compute the same thing.
#
# The ranks form a ring: each sends to the next and receives from the one before, over Holdfast's own group.
# Lengths go first, then a description, then the bytes of all tensors in one piece; nothing is pickled. Every
# wait is bounded by the group's own timeout.
#
# Data is sent: tensors, numbers, text. What every rank has its own of (models, optimizers, functions) is not:
# the receiver uses its own. Anything else cannot be passed on, and `pack` says so.


LIMIT = 1024**3
"""A micro-batch of more bytes than this is not passed on."""
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Leaf(msgspec.Struct, frozen=True, omit_defaults=True):
    """One leaf of the arguments."""

    kind: str
    """tensor, value, or own."""
    dtype: str = ""
    shape: list[int] = []
    value: bool | int | float | str | None = None


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the bytes that follow, and holds the sender's generators that are not among them."""

    leaves: list[Leaf]
    python: list[int]
    gauss: float | None
    numpy: list[int] | None
    numpy_gauss: tuple[int, float] = (0, 0.0)
    devices: int = 0
    """How many states of devices' generators follow that of the host's."""


class Packed:
    """Arguments that can be passed on."""

    def __init__(self, leaves: list[Any], spec: TreeSpec, kinds: str) -> None:
        self.leaves = leaves
        self.spec = spec
        self.shape = xxhash.xxh3_64_intdigest(f"{spec}|{kinds}".encode()) >> 2
        """The same on ranks whose arguments have the same structure."""


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
    """Send these to the next rank, with the state of the generators; set the generators to what the previous
    rank sent, and return what it sent as arguments. All ranks call this together."""
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
            received = take(DTYPES[leaf.dtype], leaf.shape).to(own.device)
            leaves.append(received.requires_grad_() if own.requires_grad else received)
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


log = logging.getLogger("holdfast")

ROW = 512
"""Bytes of the row in which a rank reports what it saw."""
PLACE = 150
"""How many characters of a place's name are reported."""

Call = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Computes the micro-batch of these arguments, with whatever it draws for itself served again."""


class Rewindable(Protocol):
    """A rank's state at one moment, to go back to: `Rewind` in rerun.py."""

    def capture(self) -> None: ...

    def restore(self) -> None: ...

    def release(self) -> None: ...


class _Row(msgspec.Struct, frozen=True, array_like=True):
    place: str
    own: float | None
    """The loss of this rank's micro-batch, computed here."""
    neighbours: float | None
    """The loss of the previous rank's micro-batch, computed here."""


class CorruptionWatch:
    """One per rank."""

    def __init__(
        self,
        interval: int,
        tolerance: float,
        *,
        group: Group,
        tracked: Tracked,
        place: Place,
        state: Callable[[], Rewindable],
    ) -> None:
        self._interval = interval
        self._tolerance = tolerance
        self._group = group
        self._place = f"{place.node}/{place.device}" if place.device else place.node
        self._gradients = Gradients(tracked.models())
        self._only_here = group.process_group is None or bool(tracked.generators())
        """Whether to compare on each rank alone; the user's own generators, for one, are not passed on."""
        self._held = False
        self._told: set[str] = set()
        self._make_state = state
        self._before: Rewindable | None = None
        self._after: Rewindable | None = None
        self._random: dict[str, Any] = {}
        self._noted = False
        self.compared = 0
        """How many micro-batches were compared."""

    def due(self, step: int) -> bool:
        """Whether the step's first micro-batch is to be computed twice; the same on all ranks."""
        return self._interval > 0 and step % self._interval == 0

    def before(self) -> None:
        """The micro-batch is about to be computed for the first time."""
        if self._before is None:
            self._before, self._after = self._make_state(), self._make_state()
        self._before.capture()
        self._random = capture_rng()
        self._noted = True

    def compare(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[str]:
        """Compute it a second time; returns what is wrong, on the ranks that are accused. All ranks call this
        together, after `before` and the first computation, which gave `result`."""
        assert self._noted
        assert self._before is not None
        assert self._after is not None
        self._noted = False
        loss, norm = self._read(result)
        self._after.capture()
        try:
            self._before.restore()
            packed = "" if self._only_here else pack(args, kwargs)
            if self._all_can(packed if loss is not None else "the step's result is not a single number"):
                assert not isinstance(packed, str)
                reasons = self._there(call, *exchange(packed, self._random, self._group), loss)
            else:
                reasons = self._here(call, args, kwargs, loss, norm)
        finally:
            self._after.restore()
            self._before.release()
            self._after.release()
        self.compared += 1
        return reasons

    def _here(self, call: Call, args: Any, kwargs: Any, loss: float | None, norm: float | None) -> list[str]:
        again, norm_again = self._read(call(args, kwargs))
        where = f"computed twice on rank {self._group.rank} ({self._place})"
        reasons = []
        if difference(loss, again) > self._tolerance:
            reasons.append(f"the micro-batch gave the loss {loss}, then {again}, {where}")
        if difference(norm, norm_again) > self._tolerance:
            reasons.append(f"the micro-batch gave gradients of norm {norm}, then {norm_again}, {where}")
        return reasons

    def _there(self, call: Call, args: Any, kwargs: Any, loss: float | None) -> list[str]:
        theirs, _ = self._read(call(args, kwargs))
        rows = self._gather(_Row(self._place[:PLACE], loss, theirs))
        world, rank = len(rows), self._group.rank
        differs = [
            difference(rows[i].own, rows[(i + 1) % world].neighbours) > self._tolerance for i in range(world)
        ]
        found = accuse(differs, held_before=self._held)
        self._held = self._held or not any(differs)
        if not found.suits:
            self._only_here = True
            self._tell(
                "the corruption watch compares on each rank alone from now on: the micro-batches of "
                f"{sum(differs)} of {world} ranks gave another loss on the next rank, which no single device "
                "can cause. The model may be split over ranks, a step may take data from elsewhere than its "
                "arguments, or results may differ by more than validation.rerun_tolerance"
            )
            return []
        if rank not in found.accused:
            return []
        return [
            f"the micro-batch of rank {i} gave the loss {rows[i].own} there ({rows[i].place}) and "
            f"{rows[(i + 1) % world].neighbours} on rank {(i + 1) % world} ({rows[(i + 1) % world].place})"
            for i in ((rank - 1) % world, rank)
            if differs[i]
        ]

    def _all_can(self, packed: Any) -> bool:
        """Whether every rank can pass its arguments on, and all have the same structure."""
        if self._group.process_group is None or self._only_here:
            return False
        cannot = isinstance(packed, str)
        shape = 0 if cannot else packed.shape
        numbers = torch.tensor([int(cannot), shape, -shape])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group.process_group)
        some_cannot, highest, lowest = numbers.tolist()
        if not some_cannot and highest == -lowest:
            return True
        why = packed if cannot else "another rank's arguments cannot be passed on, or are built differently"
        self._tell(f"the corruption watch computes twice on each rank, not on a neighbour: {why}")
        return False

    def _gather(self, row: _Row) -> list[_Row]:
        encoded = msgspec.msgpack.encode(row)
        mine = torch.zeros(ROW, dtype=torch.uint8)
        mine[: 1 + 1 + len(encoded)] = torch.tensor([*divmod(len(encoded), 256), *encoded], dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self._group.world_size)]
        dist.all_gather(rows, mine, group=self._group.process_group)
        received = [bytes(row.tolist()) for row in rows]
        return [msgspec.msgpack.decode(raw[2 : 2 + raw[0] * 256 + raw[1]], type=_Row) for raw in received]

    def _read(self, result: Any) -> tuple[float | None, float | None]:
        return read_together(single_number(result), self._gradients.norms())

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning("holdfast: %s", message)
