"""The data feed: the one iterator over the user's loader, and its position.

Run owns the iterator, because a loader's position can only be restored before `iter()` is called. A loader
with `state_dict` and `load_state_dict` (such as StatefulDataLoader) restores its own position. Any other is
replayed: the random state at the epoch's start is restored, the loader is iterated again and the batches
already used are skipped, which gives the same order as before for any loader whose order comes from the
torch, numpy or python generators, or from a sampler with `set_epoch`.

Batches that the run leaves out (control/skips.py) are drawn and thrown away, in every attempt and at every
position, so they count for the position as all others do: what comes after them is the same as if they had
been used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from holdfast.control.skips import Skip
from holdfast.errors import IncompleteStateError, UsageError
from holdfast.policy.rejection import Window
from holdfast.worker.rng import capture_rng, restore_rng


class DataFeed:
    """Batches from a loader, epoch after epoch. `for batch in feed` is one epoch, or the rest of one."""

    def __init__(self, loader: Iterable[Any]) -> None:
        if isinstance(loader, Iterator):
            raise UsageError(
                f"the loader is a one-way iterator ({type(loader).__name__}); its position cannot be set. "
                "Pass the DataLoader or another re-iterable object"
            )
        self._loader = loader
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._iterator: Iterator[Any] | None = None
        self._epoch_start: dict[str, Any] = {}
        self.epoch = 0
        """Epochs completed."""
        self.batches = 0
        """Batches drawn of the present epoch: used, or left out."""
        self._restored: dict[str, Any] | None = None
        self._completed: Callable[[], int] | None = None
        self._skips: list[Skip] = []
        self._told: Callable[[Skip], None] | None = None
        self._passed: list[Skip] = []
        self._window: tuple[int, Window] | None = None
        self.timed: Callable[[], AbstractContextManager[None]] | None = None
        """What measures how long a batch takes, if anything does."""

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._next_of_epoch()) is not None:
            yield batch[0]

    def next(self) -> Any:
        """The next batch, beginning a new epoch where one ends."""
        for _ in range(2 + len(self._skips)):  # a whole epoch may be left out
            batch = self._next_of_epoch()
            if batch is not None:
                return batch[0]
        raise UsageError("the loader gave no batch in a whole epoch; training cannot go on without data")

    def _next_of_epoch(self) -> tuple[Any] | None:
        """The epoch's next batch in a 1-tuple; None once, at its end."""
        if self.timed is None:
            return self._draw()
        with self.timed():
            return self._draw()

    def _draw(self) -> tuple[Any] | None:
        if self._iterator is None:
            self._open()
        assert self._iterator is not None
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator = None
                self.epoch += 1
                self.batches = 0
                return None
            self.batches += 1
            if not self._left_out(self.batches - 1):
                self._note(self.batches - 1)
                return (batch,)

    # --- what is left out, and what the present step uses ---------------------------------------------------

    def follow(
        self,
        completed: Callable[[], int],
        skips: Sequence[Skip] = (),
        told: Callable[[Skip], None] | None = None,
    ) -> None:
        """Leave these out, saying so once for each; `completed` is asked for the steps done by now."""
        self._completed, self._skips, self._told = completed, list(skips), told

    def window(self) -> Window | None:
        """The batches drawn for the present step; if they lie in two epochs, those of the later one."""
        if self._window is None or (self._completed is not None and self._completed() != self._window[0]):
            return None
        return self._window[1]

    def _left_out(self, index: int) -> bool:
        for skip in self._skips:
            window = skip.window
            if window.epoch == self.epoch and window.first <= index <= window.last:
                self._tell(skip)
                return True
        return False

    def _tell(self, skip: Skip) -> None:
        if self._told is not None and skip not in self._passed:
            self._passed.append(skip)
            self._told(skip)

    def _note(self, index: int) -> None:
        completed = self._completed() if self._completed is not None else 0
        first = index
        if self._completed is not None and self._window is not None:
            step, before = self._window
            if step == completed and before.epoch == self.epoch:
                first = before.first
        self._window = completed, Window(self.epoch, first, index)

    # --- the position ---------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._restored is not None:
            self._reopen(self._restored)
            self._restored = None
            return
        self._announce_epoch()
        self._epoch_start = {"rng": capture_rng(), "generators": _generator_states(self._loader)}
        self._iterator = iter(self._loader)

    def _announce_epoch(self) -> None:
        for sampler in _samplers(self._loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)

    def _reopen(self, position: dict[str, Any]) -> None:
        """Open where the position says, leaving the generators as they are now."""
        now = capture_rng()
        generators = _generators(self._loader)
        after = [generator.get_state() for generator in generators]
        self._announce_epoch()
        self._epoch_start = position["epoch_start"]
        if position["loader"] is not None:
            self._iterator = iter(self._loader)
        else:
            restore_rng(self._epoch_start["rng"])
            _set_generator_states(generators, self._epoch_start["generators"])
            self._iterator = iter(self._loader)
            for skipped in range(self.batches):
                if next(self._iterator, _END) is _END:
                    raise IncompleteStateError(
                        f"the loader ended after {skipped} batches; the checkpoint was taken after "
                        f"{self.batches} of epoch {self.epoch}. The data or the batch size has changed"
                    )
            _set_generator_states(generators, position.get("generators_now") or after)
        restore_rng(now)

    def state_dict(self) -> dict[str, Any]:
        """The position between two batches."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "open": self._iterator is not None,
            "epoch_start": self._epoch_start,
            "generators_now": _generator_states(self._loader),
            "is_global": bool(getattr(self._loader, "has_global_position", False)),
            "loader": self._loader.state_dict() if self._stateful else None,  # type: ignore[attr-defined]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a position; the loader is opened there when the next batch is asked for."""
        if (state["loader"] is not None) != self._stateful:
            raise IncompleteStateError(
                "the checkpoint was saved with "
                + ("a loader that keeps" if state["loader"] is not None else "a loader without")
                + " its own state_dict; this script's loader is of the other kind"
            )
        self.epoch, self.batches = state["epoch"], state["batches"]
        self._iterator = None
        self._window = None
        if self._stateful:
            self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        else:
            _set_generator_states(_generators(self._loader), state["generators_now"])
        self._restored = state if state["open"] else None


_END = object()


def _samplers(loader: object) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    unique: list[Any] = []
    for item in found:
        if item is not None and all(item is not other for other in unique):
            unique.append(item)
    return unique


def _generators(loader: object) -> list[torch.Generator]:
    """Generator objects that decide the loader's order."""
    unique: list[torch.Generator] = []
    for item in _samplers(loader):
        generator = getattr(item, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in unique):
            unique.append(generator)
    return unique


def _generator_states(loader: object) -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators(loader)]


def _set_generator_states(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    if len(generators) != len(states):
        raise IncompleteStateError(
            f"the loader has {len(generators)} generators, the checkpoint {len(states)}: it has changed"
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
