"""Where a rank waits for others: the calls of torch.distributed that block, told to the rank's clocks.

Under `fully_shard`, tensor parallelism and pipelines a rank waits in the middle of its forward and backward,
and to the host's or the device's clock that looks like work. All of it goes through few doors, which are
named below and nowhere else: every `wait` on a work (those of torch's own synchronous calls, of FSDP2, of a
pipeline's sends and receives) and every `wait_tensor` (DTensor, functional collectives). While a step is
measured, what passes through them is timed, and counted for the ranks that it was waited for with.

Guarantee: a call does what it did without this. Nothing is kept of it but numbers, no tensor and no group
lives longer, calls of other threads pass untouched, and `close` puts back what was there. What is not seen
here (a wait in compiled code, or in C++ as in DDP's reducer) counts as work, on all ranks alike.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash

from holdfast.base import functional_collectives, group_of_name, in_backward

WORK_WAITS = ("wait",)
"""Of a work: they return when it is done, on its device or on the host."""
TENSOR_WAITS = ("wait_tensor", "wait_tensors")
"""The same of functional collectives, which have no work. The second is there from torch 2.15 on."""
SENDS = ("send", "recv")
"""Of a process group: with one other rank, the second argument."""
COLLECTIVES = (
    "_allgather_base",
    "_end_coalescing",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""The same with all ranks of the group. A release of torch has those that it has."""
RESOLVERS = ("_resolve_group", "_resolve_group_name")
"""Of functional collectives: whatever comes next is one of the group that these return."""
WRAPPERS = ("_maybe_wrap_tensor", "_maybe_wrap_tensors")
"""Of functional collectives: they get the results that will be waited for."""

MOST_OPEN = 4096
"""Works and tensors that nobody has waited for yet; beyond that their groups are forgotten."""
SHOWN = 6
"""Ranks of a group that are listed; a larger one has its first and last, and a digest of all."""


def group_key(ranks: Sequence[int]) -> str:
    """The same text for the same ranks, on all of them; without a hyphen, which is in that of a pair."""
    ordered = sorted(ranks)
    listed = ",".join(map(str, ordered))
    if len(ordered) <= SHOWN:
        return listed
    return f"{ordered[0]}..{ordered[-1]} ({len(ordered)}) #{xxhash.xxh32_hexdigest(listed.encode())}"


def pair_key(one: int, other: int) -> str:
    """Of two ranks that send to each other."""
    return f"{min(one, other)}-{max(one, other)}"


class WaitClock(Protocol):
    """Who is told; see `times.Times`."""

    on_device: bool

    def waits(self) -> Any: ...

    def waited(self, began: Any, where: str | None, count: int = 1) -> None: ...


class Waits:
    """Times this process's waits while `on` is set. One at a time in a process, as the detector itself."""

    def __init__(self, clock: WaitClock, ours: dist.ProcessGroup | None = None) -> None:
        """`ours`: a group of Holdfast's own, which says nothing about training."""
        self.on = False
        self.count = 0
        """Waits timed in this report."""
        self._clock = clock
        self._ours = ours
        self._thread = threading.get_ident()
        self._inside = False
        self._groups: weakref.WeakKeyDictionary[Any, tuple[str | None, list[int]]] = (
            weakref.WeakKeyDictionary()
        )
        self._works: dict[int, str | None] = {}
        self._tensors: dict[int, str | None] = {}
        self._named: dict[str, str | None] = {}
        self._group: str | None = None
        self._last: str | None = None
        self._changed: list[tuple[Any, str, Any, Any]] = []
        for name in WORK_WAITS:
            self._change(dist.Work, name, self._work_wait)
        for name in (*SENDS, *COLLECTIVES):
            self._change(dist.ProcessGroup, name, self._issue)
        functional = functional_collectives()
        for name in TENSOR_WAITS:
            self._change(functional, name, self._tensor_wait)
        for name in RESOLVERS:
            self._change(functional, name, self._resolve)
        for name in WRAPPERS:
            self._change(functional, name, self._wrap)

    def begin_step(self, *, measured: bool) -> None:
        self.on = measured
        self._thread = threading.get_ident()
        if len(self._works) > MOST_OPEN:
            self._works.clear()
        if len(self._tensors) > MOST_OPEN:
            self._tensors.clear()

    def begin_report(self) -> None:
        """A group that is made anew may have the name of an earlier one."""
        self.count = 0
        self._named.clear()

    def close(self) -> None:
        """Where somebody else has changed the same since, ours stays under theirs and passes it on."""
        self.on = False
        for owner, name, before, ours in reversed(self._changed):
            if vars(owner).get(name) is ours:
                setattr(owner, name, before)
        self._changed = []
        for known in (self._works, self._tensors, self._named, self._groups):
            known.clear()

    def _change(self, owner: Any, name: str, made: Callable[[Any], Any]) -> None:
        before = vars(owner).get(name) if owner is not None else None
        if before is not None:  # this release of torch may not have it
            ours = made(before)
            setattr(owner, name, ours)
            self._changed.append((owner, name, before, ours))

    def _sees(self) -> bool:
        """Whether this is training: its thread, or one of autograd's, which works while that one waits."""
        return threading.get_ident() == self._thread or in_backward()

    # --- the calls that wait --------------------------------------------------------------------------------

    def _time(self, where: str | None, call: Callable[[], Any]) -> Any:
        self._inside = True
        self.count += 1
        clock = self._clock
        began = clock.waits()
        try:
            return call()
        finally:
            clock.waited(began, where)
            self._inside = False

    def _work_wait(self, before: Any) -> Any:
        @functools.wraps(before)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on or self._inside or not self._sees():
                return before(work, *args, **kwargs)
            where = self._works.pop(id(work), None)
            return self._time(where, lambda: before(work, *args, **kwargs))

        return wait

    def _tensor_wait(self, before: Any) -> Any:
        @functools.wraps(before)
        def wait_tensor(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self.on or self._inside or not self._sees():
                return before(*args, **kwargs)
            found = [self._tensors.pop(address, None) for address in _addresses(args, kwargs)]
            return self._time(found[0] if found else None, lambda: before(*args, **kwargs))

        return wait_tensor

    # --- whom they wait for ---------------------------------------------------------------------------------

    def _issue(self, before: Any) -> Any:
        name = before.__name__

        @functools.wraps(before)
        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on or self._inside or not self._sees():
                return before(group, *args, **kwargs)
            where = self._where(name, group, args)
            if self._clock.on_device and _runs_in_this_stream(args, kwargs):
                began, work = self._clock.waits(), None
                try:
                    work = before(group, *args, **kwargs)
                finally:
                    unwaited = work is None  # NCCL gives none for what the stream itself waits for
                    self.count += unwaited
                    self._clock.waited(began, where, int(unwaited))  # else counted where it is waited for
            else:
                work = before(group, *args, **kwargs)
            if work is not None:
                self._works[id(work)] = where
            return work

        return issue

    def _where(self, name: str, group: Any, args: tuple[Any, ...]) -> str | None:
        if name == "_end_coalescing":  # of what was issued just before
            return self._last
        key, ranks = self._known(group)
        if name in SENDS and key is not None:
            peer = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
            key = pair_key(dist.get_rank(), ranks[peer]) if 0 <= peer < len(ranks) else None
        self._last = key
        return key

    def _known(self, group: Any) -> tuple[str | None, list[int]]:
        known = self._groups.get(group)
        if known is None:
            ranks: list[int] = []
            if group is not self._ours:
                try:
                    ranks = dist.get_process_group_ranks(group)
                except (KeyError, RuntimeError, ValueError):  # one that torch does not know
                    ranks = []
            known = self._groups[group] = (group_key(ranks) if len(ranks) > 1 else None, ranks)
        return known

    def _resolve(self, before: Any) -> Any:
        @functools.wraps(before)
        def resolve(*args: Any, **kwargs: Any) -> Any:
            group = before(*args, **kwargs)
            if not torch.compiler.is_compiling() and self.on and self._sees():
                self._group = self._of_name(group) if isinstance(group, str) else self._known(group)[0]
            return group

        return resolve

    def _of_name(self, name: str) -> str | None:
        if name not in self._named:
            try:
                key = self._known(group_of_name(name))[0]
            except (AttributeError, LookupError, RuntimeError, ValueError):
                key = None
            self._named[name] = key
        return self._named[name]

    def _wrap(self, before: Any) -> Any:
        @functools.wraps(before)
        def wrap(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self.on and self._sees():
                self._tensors.update(dict.fromkeys(_addresses(args, kwargs), self._group))
            return before(*args, **kwargs)

        return wrap


def _addresses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Of the memory of the tensor, or the tensors, that a call is given: what is waited for may be another
    object for the same tensor. Some have none."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    given = first if isinstance(first, (list, tuple)) else [first]
    return [tensor.data_ptr() for tensor in given if type(tensor) is torch.Tensor]


def _runs_in_this_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a device's collective is one that its caller does not wait for later."""
    options = kwargs.get("opts", args[-1] if args else None)
    return getattr(options, "asyncOp", None) is False
