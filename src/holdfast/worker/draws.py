"""Batches that a step draws for itself, recorded so that the same step can be run again with the same ones.

They come from the run's data feed, or from an iterator among the step's arguments. Both are recorded for the
time of one call only: nobody has to wrap an iterator, and a save between two calls sees the feed as it is.

What a draw does to the random numbers is part of it: a loader without workers makes its samples here. So the
state of the generators after each draw is kept with it, and is put back when the batch is served again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.torch_internals import tree_leaves
from holdfast.worker.data import DataFeed
from holdfast.worker.rng import Randomness


class _Drawn(NamedTuple):
    item: Any
    ended: bool
    after: Any


class Draws:
    """The draws of one call, by their source."""

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness
        self._drawn: dict[int, list[_Drawn]] = {}
        self._served: dict[int, int] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._on = self._inside = False

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """A call begins; its arguments, with iterators that are recorded."""
        self._drawn, self._served, self._versions = {}, {}, []
        self._on, self._inside = True, False
        wrapped = [self._wrap(value) for value in args], {k: self._wrap(v) for k, v in kwargs.items()}
        self._note(wrapped)
        return wrapped

    def again(self) -> str:
        """The call is made again, with the same batches; why that cannot be, or nothing."""
        self._served = {}
        if any(tensor._version != version for tensor, version in self._versions):
            return "a batch or an argument was changed in place by the step"
        return ""

    def end(self) -> None:
        self._drawn, self._served, self._versions = {}, {}, []
        self._on = False

    def draw(self, source: int, live: Callable[[], Any]) -> Any:
        """The source's next item: one that is to be served again, or a new one."""
        if not self._on or self._inside:  # an iterator may itself draw from the feed: the outer one counts
            return live()
        drawn = self._drawn.setdefault(source, [])
        at = self._served.get(source, 0)
        self._served[source] = at + 1
        if at < len(drawn):
            self._randomness.restore(drawn[at].after)
        else:
            drawn.append(self._new(live))
        if drawn[at].ended:
            raise StopIteration
        return drawn[at].item

    def _new(self, live: Callable[[], Any]) -> _Drawn:
        self._inside = True
        try:
            item, ended = live(), False
        except StopIteration:
            item, ended = None, True
        finally:
            self._inside = False
        self._note(item)
        return _Drawn(item, ended, self._randomness.capture())

    def _note(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
                self._versions.append((leaf, leaf._version))

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, Iterator):
            return _Recorded(self, value)
        if type(value) in (list, tuple) and any(isinstance(item, Iterator) for item in value):
            return type(value)(self._wrap(item) for item in value)
        return value


class _Recorded:
    """An iterator whose items are recorded; everything else about it is as it was."""

    def __init__(self, draws: Draws, iterator: Iterator[Any]) -> None:
        self._draws = draws
        self._iterator = iterator

    def __iter__(self) -> _Recorded:
        return self

    def __next__(self) -> Any:
        return self._draws.draw(id(self._iterator), self._iterator.__next__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class RecordedFeed(DataFeed):
    """A data feed whose batches are recorded while a step computes."""

    draws: Draws | None = None

    def _next_of_epoch(self) -> tuple[Any] | None:
        if self.draws is None:
            return super()._next_of_epoch()
        found: tuple[Any] | None = self.draws.draw(id(self), super()._next_of_epoch)
        return found
