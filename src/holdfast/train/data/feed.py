"""The data feed: the one iterator over the user's loader, its position, and data that is left out.

Guarantee: a resumed run gets the batches that it would have got without the interruption, in the same order
and with the same contents, and the training's random numbers go on as if nothing had happened; or the loader
is refused by name. What a loader's construction shows is refused when it is handed over; what only its use
shows makes the save fail; and what nobody could see before makes the resume fail, because the batches that
are replayed are compared with the earlier ones. docs/guides/data.md has a row for each kind of loader.

Run owns the iterator, because a loader's position can only be restored before `iter()` is called. A loader
with `state_dict` and `load_state_dict` (such as StatefulDataLoader) restores its own position. Any other is
replayed: everything random is put where it was at the epoch's start (the global generators, and the
generators and counters that the loader keeps in itself), the loader is iterated again, and the batches
already used are skipped. Workers that live longer than an epoch are started as they first were, with the
generators that they had at the epoch's start (`WorkerStamps`).

Batches that the run leaves out (record/operator.py) are drawn and thrown away, in every attempt and at every
position, so they count for the position as all others do: what comes after them is the same as if they had
been used.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.errors import ControlError, IncompleteStateError, UsageError
from holdfast.journal import JournalWriter
from holdfast.journal.events import DataSkipped
from holdfast.policy import Window
from holdfast.record import ControlDirectory, Group, Skip, read_key, read_skips
from holdfast.train.data.loaders import BatchEvidence, Indices, loses_state, name_of, samples_of, unfit
from holdfast.train.data.rng import LoaderKept, Stamp, WorkerStamps, capture_rng, one_way_parts, restore_rng

log = logging.getLogger("holdfast")

TELL_AFTER, TELL_EVERY = 5.0, 30.0
"""Seconds after which a replay is first reported, and seconds between later reports."""
ACCEPT = "or accept that with checkpoint.data_position = 'trusted'"


class DataFeed:
    """Batches from a loader, epoch after epoch. `for batch in feed` is one epoch, or the rest of one.

    `trusted`: what cannot be shown to be exact gets a warning instead of a refusal.
    """

    def __init__(self, loader: Iterable[Any], *, trusted: bool = False) -> None:
        if isinstance(loader, Iterator):
            raise UsageError(
                f"the loader is a one-way iterator ({type(loader).__name__}); its position cannot be set. "
                "Pass the DataLoader or another re-iterable object"
            )
        self._trusted = trusted
        self.tell: Callable[[str], None] = _say_nothing
        """Takes warnings for the run's journal; they go to the log as well."""
        self.alive: Callable[[], None] = lambda: None
        """Called at each batch of a replay, which may take long."""
        self._said: set[str] = set()
        if why := unfit(loader):
            self._refuse(UsageError(f"{why}; {ACCEPT}"))
        self._loader = loader
        self._stateful = (
            hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not loses_state(loader)
        )
        self._torch: Any = None
        if isinstance(loader, DataLoader):
            self._torch = loader
        self._iterable = self._torch is not None and isinstance(self._torch.dataset, IterableDataset)
        self._workers: int = self._torch.num_workers if self._torch is not None else 0
        self._persistent = bool(self._workers and self._torch.persistent_workers)
        self._stamps: WorkerStamps | None = None
        if self._workers and (self._persistent or self._stateful):
            self._stamps = WorkerStamps()
        self._kept = LoaderKept(loader, own_states=self._stateful)
        self._evidence = BatchEvidence(_generators(loader))
        self._iterator: Iterator[Any] | None = None
        self._epoch_start: dict[str, Any] = {}
        self._announced: dict[int, Any] = {
            at: _epoch_of(sampler) for at, sampler in enumerate(_samplers(loader))
        }
        """The epoch that each sampler was last given, or came with; None once the script sets it itself."""
        self._opened = False
        self._pool: dict[str, Any] | None = None
        """The random state in which the current workers were started, if they outlive an epoch."""
        self._worker_states: dict[int, bytes] = {}
        self._drawing_workers = False
        self._ended: list[int] = []
        """Workers of a StatefulDataLoader that had no more samples when the position was taken."""
        self._ahead: list[torch.Tensor] | None = None
        """The states of the generators of a sampler that is ahead of its position after a resume."""
        self._holds: dict[str, object] = {}
        self._continues = ""
        self.epoch = 0
        """Epochs completed."""
        self.batches = 0
        """Batches drawn in the current epoch: used, or left out."""
        self._restored: dict[str, Any] | None = None
        self._completed: Callable[[], int] | None = None
        self._skips: list[Skip] = []
        self._told: Callable[[Skip], None] | None = None
        self._passed: list[Skip] = []
        self._window: tuple[int, Window] | None = None
        self.first_drawn = 0.0
        """When the first batch was there, the loader opened and replayed (by `time.perf_counter`)."""
        self.timed: Callable[[], AbstractContextManager[None]] | None = None
        """What measures how long a batch takes, if anything does."""
        self.watched: Callable[[], AbstractContextManager[None]] | None = None
        """In the first step: what is to notice each batch that the run itself draws."""

    @property
    def loader(self) -> Iterable[Any]:
        return self._loader

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
        with contextlib.ExitStack() as around:
            for context in (self.watched, self.timed):
                if context is not None:
                    around.enter_context(context())
            return self._draw()

    def _draw(self) -> tuple[Any] | None:
        first = not self._opened
        if self._iterator is None:
            self._open()
        while True:
            batch = self._take()
            _forget_start(self._torch)
            if batch is None:
                self._iterator = None
                self.epoch += 1
                self.batches = 0
                self._ended = []
                self._evidence.begin()
                return None
            self.batches += 1
            if first:
                self.first_drawn = time.perf_counter()
            if self.batches == 1:
                self._look_for_one_way()
            if not self._left_out(self.batches - 1):
                self._note(self.batches - 1)
                return batch

    def _take(self) -> tuple[Any] | None:
        """What the loader gives next, in a 1-tuple, without what its workers attach to it."""
        assert self._iterator is not None
        self._evidence.before()
        try:
            batch = next(self._iterator)
        except StopIteration:
            return None
        if self._stamps is not None:
            batch, told = batch
            stamp = Stamp(*told)
            if stamp.worker in self._ended:
                self._refuse(
                    IncompleteStateError(
                        f"worker {stamp.worker} had given all its samples of epoch {self.epoch} before the "
                        f"checkpoint, but gives more: at its end {name_of(self._torch.dataset)} has the "
                        "same state as at its beginning, so some samples come twice. Resume from another "
                        f"checkpoint, and make load_state_dict tell an end from a beginning, {ACCEPT}"
                    )
                )
            self._drawing_workers = self._drawing_workers or stamp.drew
            if stamp.state:
                self._worker_states[stamp.worker] = stamp.state
        self._evidence.after(batch)
        return (batch,)

    # --- what is left out, and what the current step uses ---------------------------------------------------

    def follow(
        self,
        completed: Callable[[], int],
        skips: Sequence[Skip] = (),
        told: Callable[[Skip], None] | None = None,
    ) -> None:
        """Leave these out, calling `told` once for each; `completed` returns the steps done so far."""
        self._completed, self._skips, self._told = completed, list(skips), told

    def window(self) -> Window | None:
        """The batches drawn for the current step; if they lie in two epochs, those of the later one."""
        if self._window is None or (self._completed is not None and self._completed() != self._window[0]):
            return None
        return self._window[1]

    def samples(self) -> list[int]:
        """The samples of which the current step's batches on this rank were made; empty if not known."""
        window = self.window()
        if window is None or window.epoch != self.epoch or window.last >= self.batches:
            return []
        try:
            return samples_of(
                self._loader,
                window.first,
                window.last,
                epoch=self.epoch,
                start=self._epoch_start,
                generators=_generators(self._loader),
                drawn=self.batches,
                digest=self._evidence.taken,
            )
        except Exception:  # it is only to name them, and the loader is the script's own
            log.debug("holdfast: the samples of a batch could not be worked out", exc_info=True)
            return []

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

    # --- opening --------------------------------------------------------------------------------------------

    def _open(self) -> None:
        position, self._restored = self._restored, None
        if self._persistent and not self._opened:
            self._torch._iterator = None  # workers from an earlier use know nothing of stamps
        self._opened = True
        if position is not None:
            now = capture_rng()
            try:
                self._reopen(position) if position["open"] else self._stand_at_boundary(position)
            finally:
                restore_rng(now)
            self._settle(position)
            if position["open"]:
                return
        self._announce_epoch()
        if self._persistent and self._torch._iterator is None:
            self._pool = {"rng": capture_rng(), "generators": _generator_states(self._loader)}
        self._epoch_start = {
            "rng": capture_rng(),
            "generators": _generator_states(self._loader),
            "kept": self._kept.capture(),
            "announced": dict(self._announced),
            "workers": dict(self._worker_states),
        }
        self._evidence.begin()
        self._holds = self._one_way()
        with self._stamped():
            self._iterator = self._watched(iter(self._loader))

    def _stamped(self) -> AbstractContextManager[None]:
        return self._stamps.around(self._torch) if self._stamps is not None else contextlib.nullcontext()

    def _announce_epoch(self) -> None:
        for at, sampler in enumerate(_samplers(self._loader)):
            if not hasattr(sampler, "set_epoch"):
                continue
            epoch = _epoch_of(sampler)
            if epoch is not None and self._announced.get(at) != epoch:
                self._announced[at] = None  # the script has set another: keep to the script's count
            else:
                sampler.set_epoch(self.epoch)
                now = _epoch_of(sampler)
                self._announced[at] = now if now is not None else _UNREADABLE

    def _reopen(self, position: dict[str, Any]) -> None:
        """Open where the position says. The caller then puts the random numbers right."""
        start = self._epoch_start = position["epoch_start"]
        generators = _generators(self._loader)
        self._ahead = None
        if self._persistent and not self._stateful and self.epoch:
            self._start_workers(position, start.get("workers"))
        self._announce_again(start)
        restore_rng(start["rng"])
        if "generators" in start:
            _set_generator_states(generators, start["generators"])
        self._restore_kept(start.get("kept"))
        self._evidence.begin()
        if self._stateful:
            self._take_up_workers(position.get("workers_now", {}))
            with self._stamped():
                self._iterator = iter(self._loader)
            self._take_up_workers({})
            self._prime(generators)
            _use_up(self._iterator)
        else:
            with self._stamped():
                self._iterator = self._watched(iter(self._loader))
            self._replay(position)

    def _settle(self, position: dict[str, Any]) -> None:
        """The loader stands at its position: its generators and counters go on as they were there."""
        if position["open"]:  # between epochs they were put back at once; the script may have acted since
            self._restore_kept(position.get("kept_now"))
        _set_generator_states(
            _generators(self._loader), self._ahead if self._ahead is not None else position["generators_now"]
        )
        self._worker_states = dict(position.get("workers_now", {}))
        self._pool = position.get("pool")
        self._evidence.go_on(position.get("evidence"))
        if position["open"] and self._stateful:
            self._ended = _ended_workers(position["loader"])

    def _replay(self, position: dict[str, Any]) -> None:
        began = told = time.monotonic()
        for skipped in range(self.batches):
            if self._take() is None:
                raise IncompleteStateError(
                    f"the loader ended after {skipped} batches; the checkpoint was taken after "
                    f"{self.batches} of epoch {self.epoch}. The data or the batch size has changed"
                )
            self.alive()
            now = time.monotonic()
            if now - told >= (TELL_EVERY if told > began else TELL_AFTER):
                told = now
                self._say(
                    f"replaying the data: {skipped + 1} of {self.batches} batches of epoch {self.epoch} in "
                    f"{now - began:.0f} s. A loader with its own state_dict, or holdfast.GlobalBatches, "
                    "need not be replayed"
                )
        if told > began:
            self._say(f"the data was replayed in {time.monotonic() - began:.0f} s")
        differ, contents = self._evidence.differs(position.get("evidence"))
        where = f"the first {self.batches} batches of epoch {self.epoch}"
        if differ:
            self._refuse(
                IncompleteStateError(
                    f"the loader did not give {where} again as they were before the checkpoint: the data, "
                    "the script or the seed has changed, or the order depends on something that is not part "
                    "of the position. Use a loader with state_dict (StatefulDataLoader) or "
                    "holdfast.GlobalBatches, or resume from the start of an epoch, "
                    f"{ACCEPT}"
                )
            )
        elif contents:
            self._say(
                f"{where} came again in the same order with other contents (floating point numbers differ): "
                "another kind of processor may cause that, or a random augmentation that nothing restores"
            )

    def _stand_at_boundary(self, position: dict[str, Any]) -> None:
        """The next epoch is about to begin; its loader is to draw what it would have drawn."""
        if not self.epoch:
            return
        if self._stateful and self._torch is not None and position["loader"]:
            # When asked for its state, a loader that was at an epoch's end makes that epoch's iterator, and
            # draws for it: let it do so now, where it does not count, not when the next epoch is opened.
            self._take_up_workers(position.get("workers_now", {}) if self._persistent else {})
            with self._stamped():
                self._loader.state_dict()  # type: ignore[attr-defined]
            self._take_up_workers({})
            _use_up(self._torch._iterator)
            _forget_start(self._torch)
        elif self._persistent and not self._stateful:
            self._start_workers(position, position.get("workers_now"))

    def _start_workers(self, position: dict[str, Any], states: Mapping[int, bytes] | None) -> None:
        """Start workers that outlive an epoch as they first were, in their state at this epoch's start.

        The loader draws a seed for them when it makes them but not when it reuses them; so they are made
        separately, without a sampler, and the epoch is opened with workers that already live.
        """
        pool = position.get("pool")
        if pool is None or states is None:
            self._refuse(
                IncompleteStateError(
                    "the checkpoint was saved in a later epoch of a DataLoader with persistent_workers=True "
                    "by a release that did not keep what its workers know. Resume from a checkpoint of the "
                    f"first epoch, or set persistent_workers=False and {ACCEPT[3:]}"
                )
            )
            return
        loader = self._torch
        loader._iterator = None
        restore_rng(pool["rng"])
        _set_generator_states(_generators(loader), pool["generators"])
        self._take_up_workers(states)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = vars(loader)[name]
        vars(loader)[name] = ()
        try:
            with self._stamped():
                iterator = iter(loader)
        finally:
            vars(loader)[name] = sampler
        iterator._index_sampler = sampler
        self._take_up_workers({})

    def _take_up_workers(self, states: Mapping[int, bytes]) -> None:
        if self._stamps is not None:
            self._stamps.states = dict(states)

    def _prime(self, generators: list[torch.Generator]) -> None:
        """StatefulDataLoader goes through its sampler again only when first asked for a batch: do it now."""
        ahead = getattr(self._iterator, "_sampler_iter", None)
        if not isinstance(ahead, itertools.islice):
            return
        before = [generator.get_state() for generator in generators]
        first = next(ahead, _END)
        found = iter(()) if first is _END else itertools.chain([first], ahead)
        self._iterator._sampler_iter = found  # type: ignore[union-attr]
        after = [generator.get_state() for generator in generators]
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            self._ahead = after

    def _announce_again(self, start: Mapping[str, Any]) -> None:
        if "announced" not in start:  # an older release announced the epoch to all
            self._announce_epoch()
            return
        self._announced = dict(start["announced"])
        for at, sampler in enumerate(_samplers(self._loader)):
            if hasattr(sampler, "set_epoch") and self._announced.get(at) is not None:
                sampler.set_epoch(self.epoch)

    def _restore_kept(self, kept: Mapping[str, Any] | None) -> None:
        gone = self._kept.restore(kept) if kept is not None else []
        if gone:
            self._refuse(
                IncompleteStateError(
                    f"the checkpoint holds the state of {', '.join(gone)} of the loader, which this script's "
                    f"loader lacks. Build the loader as before, {ACCEPT}"
                )
            )

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        plain = self._torch is not None and not (self._iterable or self._workers or self._stateful)
        if plain and hasattr(iterator, "_sampler_iter"):
            iterator._sampler_iter = Indices(iterator._sampler_iter, self._evidence)
        return iterator

    # --- what cannot be exact -------------------------------------------------------------------------------

    def _refuse(self, error: IncompleteStateError | UsageError) -> None:
        if not self._trusted:
            raise error
        self._say(f"not refused, because checkpoint.data_position = 'trusted': {error}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("holdfast: %s", text)
            self.tell(text)

    def _one_way(self) -> dict[str, object]:
        held = self._iterable and not self._workers and not self._stateful
        return one_way_parts(self._torch.dataset) if held else {}

    def _look_for_one_way(self) -> None:
        """At an epoch's first batch, look for an iterator that existed before the epoch and goes on in it."""
        now = self._one_way()
        same = [name for name, thing in self._holds.items() if now.get(name) is thing]
        if same and self.epoch and not self._continues:
            self._continues = same[0]
        self._holds = {}

    def _judge(self, loader: Any) -> str:
        """Why a resume could not continue exactly from the current position; empty if it could."""
        if self._continues:
            return (
                f"{name_of(self._torch.dataset)}.{self._continues} is an iterator that goes on from epoch to "
                "epoch, and its position cannot be set. Begin anew in __iter__, or give the dataset "
                "state_dict and load_state_dict and use StatefulDataLoader"
            )
        if self._iterator is None:
            return ""
        evidence = self._evidence.state_dict()
        if self._torch is None:
            mixed = [] if self._stateful else evidence["mixed"]
        elif self._workers or not self._iterable:
            mixed = evidence["mixed"] if self._workers else evidence["sampled"]
        else:
            mixed = [] if self._stateful and hasattr(self._torch.dataset, "state_dict") else evidence["mixed"]
        if mixed:
            who = "the sampler" if self._torch is not None and not self._iterable else "the loader"
            return (
                f"{who} ({name_of(self._loader)}) draws from the same random numbers as training in the "
                f"middle of an epoch ({', '.join(mixed)}): replaying the epoch without the training could "
                "give another order. Give it a generator of its own, or draw at the epoch's start"
                + ("" if self._workers else ", or use num_workers=1")
            )
        if self._stateful and self._workers and self._drawing_workers:
            if self._iterable:
                return (
                    f"{name_of(self._torch.dataset)} draws random numbers in workers of a StatefulDataLoader"
                    ", which does not keep them. Use a DataLoader, whose batches are replayed, or derive "
                    "what is random from the sample"
                )
            if loader and loader.get("_steps_since_snapshot"):
                return (
                    f"{name_of(self._torch.dataset)} draws random numbers in workers of a StatefulDataLoader "
                    "that takes its state only every few steps. Set snapshot_every_n_steps=1"
                )
        return ""

    # --- the position ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position between two batches."""
        if self._restored is not None:
            return self._restored  # not in use yet: asking the loader might make it draw random numbers
        loader = None
        if self._stateful:
            unused = self._torch is not None and self._torch._iterator is None
            loader = {} if unused else self._loader.state_dict()  # type: ignore[attr-defined]
        if why := self._judge(loader):
            self._refuse(IncompleteStateError(f"the data position is not exact: {why}; {ACCEPT}"))
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "open": self._iterator is not None,
            "epoch_start": self._epoch_start,
            "generators_now": _generator_states(self._loader),
            "is_global": bool(getattr(self._loader, "has_global_position", False)),
            "loader": loader,
            "kept_now": self._kept.capture(),
            "announced": dict(self._announced),
            "workers_now": dict(self._worker_states),
            "pool": self._pool,
            "evidence": self._evidence.state_dict(),
            "drawing_workers": self._drawing_workers,
            "continues": self._continues,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a position; the loader is opened there when the next batch is asked for."""
        if (state["loader"] is not None) != self._stateful and not self._replays(state):
            raise IncompleteStateError(
                "the checkpoint was saved with "
                + ("a loader that keeps" if state["loader"] is not None else "a loader without")
                + " its own state_dict; this script's loader is of the other kind"
            )
        self.epoch, self.batches = state["epoch"], state["batches"]
        self._iterator = None
        self._opened = False
        self._window = None
        self._drawing_workers = state.get("drawing_workers", False)
        self._continues = state.get("continues", "")
        if self._stateful:
            self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        else:
            _set_generator_states(_generators(self._loader), state["generators_now"])
        if not state["open"]:
            self._restore_kept(state.get("kept_now"))
            self._announced = dict(state.get("announced", self._announced))
            self._worker_states = dict(state.get("workers_now", {}))
            self._pool = state.get("pool")
        self._restored = state

    def _replays(self, state: dict[str, Any]) -> bool:
        """Whether an older release asked this loader for its state, but it is replayed now, which works."""
        return state["loader"] is not None and "rng" in state["epoch_start"]


def _say_nothing(text: str) -> None:
    del text


_END = object()
_UNREADABLE = -1
"""For a sampler that was given an epoch but does not say which one it has."""


def _forget_start(loader: Any) -> None:
    """A Hugging Face dataset that was given a state begins there in every epoch of the same number, also in
    those after a resume (datasets 5.2, `_starting_state_dict`): take the state away once its iterator has it.
    """
    dataset = getattr(loader, "dataset", None)
    if type(dataset).__module__.startswith("datasets.") and vars(dataset).get("_starting_state_dict"):
        dataset.load_state_dict({})  # type: ignore[union-attr]


def _use_up(iterator: Any) -> None:
    """A dataset that was given the state of its end acts on it only when next asked for a sample, and a
    StatefulDataLoader that knows the end does not ask: ask here, or the next epoch would begin at that end.
    """
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    samples = getattr(fetcher, "dataset_iter", None)
    if (
        fetcher is not None
        and samples is not None
        and samples is not fetcher.dataset
        and (fetcher.ended or iterator._finished)
    ):
        next(samples, None)


def _ended_workers(state: Any) -> list[int]:
    """In the state of a StatefulDataLoader over an iterable dataset: the workers with no more samples.

    When it loads that state, it asks them for one more batch all the same (torchdata 0.11, worker.py).
    """
    try:
        workers = state["_snapshot"]["_worker_snapshots"].values()
        return [w["worker_id"] for w in workers if (w["fetcher_state"] or {}).get("fetcher_ended")]
    except (KeyError, TypeError, AttributeError):
        return []


def _epoch_of(sampler: object) -> int | None:
    epoch = getattr(sampler, "epoch", None)
    return epoch if type(epoch) is int else None


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


# Tells a rank's data feed which batches the run leaves out.
#
# All ranks must leave out the same ones, but a network file system may show two ranks different things: so
# rank 0 reads the records and tells the others through the store.


KEY = "skips"


class _SkipsTold(msgspec.Struct, frozen=True, kw_only=True):
    skips: list[Skip] = []
    problem: str = ""


def follow_skips(
    feed: DataFeed,
    control: ControlDirectory,
    group: Group,
    journal: JournalWriter,
    completed: Callable[[], int],
    timeout: float,
) -> None:
    """Call it on all ranks after the resume, before the first batch. `completed`: steps done so far."""
    if group.is_coordinator:
        left_out = _read_for_all(control, group)
    else:
        raw = read_key(group.store, KEY, timeout, "the batches that rank 0 says are left out")
        from_rank_0 = msgspec.json.decode(raw, type=_SkipsTold)
        if from_rank_0.problem:
            raise ControlError(from_rank_0.problem)
        left_out = from_rank_0.skips

    def told(skip: Skip) -> None:
        if group.is_coordinator:
            window = skip.window
            journal.write(
                DataSkipped(
                    step=completed() + 1,
                    epoch=window.epoch,
                    first=window.first,
                    last=window.last,
                    reason=skip.reason,
                )
            )

    feed.follow(completed, left_out, told)


def _read_for_all(control: ControlDirectory, group: Group) -> list[Skip]:
    try:
        found = read_skips(control)
    except ControlError as error:
        group.store.set(KEY, msgspec.json.encode(_SkipsTold(problem=str(error))).decode())
        raise
    group.store.set(KEY, msgspec.json.encode(_SkipsTold(skips=found)).decode())
    return found
