"""What the first step of a run shows to be part of the training, although nobody has tracked it.

Guarantee: an untracked optimizer that steps, a schedule of one that steps or is tracked, a gradient scaler
that scales, or a torch loader that is iterated without the run, ends the run at the end of its first step, on
all ranks alike, with a message that names each and says which line to add; unless it was given to
`run.ignore`. A run that goes on from a checkpoint of its own, or is past its first step, is never ended for
this: it only gets a warning. An optimizer that is made within a step and used in no other carries nothing
over, as in the inner loop of meta-learning, and is left alone.

Optimizers are seen by torch's own hook, scalers and loaders' iterators through their classes, until the
first step is over. If an optimizer has a schedule, schedules are searched for once among all objects; if no
optimizer has stepped, optimizers are, too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from holdfast.base import LoaderIterator
from holdfast.checkpoint.state import (
    Tracked,
    alive,
    has_schedule,
    held_by,
    parameters_of,
    untracked_schedules,
)
from holdfast.errors import IncompleteStateError
from holdfast.journal import JournalWriter
from holdfast.journal.events import Warned
from holdfast.record import Group, share
from holdfast.train.check import AgreedResult, Agreement
from holdfast.train.data import DataFeed

log = logging.getLogger("holdfast")

MOST_TOLD = 6
"""How many forgotten parts are named; and how many optimizers that step only later."""
_OWN = str(Path(__file__).resolve().parents[1])


class Forgotten:
    """Looks at one attempt, on one rank. Every rank makes the same calls."""

    def __init__(
        self,
        tracked: Tracked,
        feed: DataFeed | None,
        group: Group,
        agreement: Agreement,
        journal: JournalWriter,
        *,
        own_checkpoint: bool,
    ) -> None:
        """`own_checkpoint`: the run goes on from a checkpoint that it saved itself."""
        self._tracked = tracked
        self._feed = feed
        self._group = group
        self._agreement = agreement
        self._journal = journal
        self._only_told = own_checkpoint
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._later = 0
        self._first: FirstStep | None = FirstStep(feed)

    def close(self) -> None:
        if self._first is not None:
            self._first.close()
            self._first = None

    def at_boundary(self, step: int) -> bool | None:
        """Call it after each step. After the first it says whether some rank has a gradient scaler."""
        if self._first is None:
            self._look_later()
            return None
        texts: list[str] = []
        try:
            texts = self._find(self._first)
            if texts:
                gc.collect()  # nothing uses what is garbage by now
                texts = self._find(self._first)
        except Exception as error:  # noqa: BLE001 - a look around must not end a run that is well
            log.warning("holdfast: could not look for forgotten parts: %s: %s", type(error).__name__, error)
        finally:
            self.close()
        scalers = any(scaler.is_enabled() for scaler in self._tracked.scalers())
        agreed = self._agreement.agree(AgreedResult(forgot=bool(texts), scales=scalers), step, 0)
        if agreed.forgot:
            self._tell(share(self._group, texts))
        return agreed.scales

    def _tell(self, texts: Sequence[Sequence[str]]) -> None:
        """Report, on every rank, what all of them have found."""
        by_text: dict[str, list[int]] = {}
        for rank, found in enumerate(texts):
            for text in found:
                by_text.setdefault(text, []).append(rank)
        lines = [f"{self._where(ranks)}{text}" for text, ranks in by_text.items()]
        more = [f"and {len(lines) - MOST_TOLD} more"] if len(lines) > MOST_TOLD else []
        shown = [*lines[:MOST_TOLD], *more]
        if not self._only_told:
            head = "this run trains with things that are not tracked, so a resume would begin them anew:"
            raise IncompleteStateError("\n  ".join([head, *shown]))
        if self._group.is_coordinator:
            for line in shown:
                self._warn(f"not tracked, so this resume has begun it anew: {line}")

    def _where(self, ranks: Sequence[int]) -> str:
        if len(ranks) == self._group.world_size:
            return ""
        more = " …" if len(ranks) > MOST_TOLD else ""
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_TOLD]))}{more}: "

    def _warn(self, text: str) -> None:
        self._journal.write(Warned(message=text))
        log.warning("holdfast: %s", text)

    # --- the search -----------------------------------------------------------------------------------------

    def _find(self, first: FirstStep) -> list[str]:
        given = self._tracked.given().values()
        known, ignored = held_by(given), held_by(self._tracked.ignored)
        stepped = [*dict.fromkeys([*self._tracked.gradients.stepped(), *first.scaled])]
        self._stepped.update(one for one in stepped if one not in first.made)
        optimizers = [
            one for one in stepped if one not in first.made and self._is_forgotten(one, known, ignored)
        ]
        scalers = [one for one in first.scalers if id(one) not in known and id(one) not in ignored]
        ours = [one for one in (*known.values(), *stepped) if isinstance(one, torch.optim.Optimizer)]
        waiting: list[torch.optim.Optimizer] = []
        schedules: list[LRScheduler] = []
        if any(map(has_schedule, ours)) or not stepped:
            everything = alive(LRScheduler, torch.optim.Optimizer)
            strangers = [one for one in everything if id(one) not in known and id(one) not in ignored]
            waiting = self._waiting(strangers, ours) if not stepped else []
            schedules = untracked_schedules([*given, *stepped, *waiting], self._tracked.ignored, strangers)
        self._tracked.looked_around = True
        iterators = first.iterators()
        if not (optimizers or waiting or schedules or scalers or iterators):
            return []
        script = _Script(self._tracked.names(), named=not self._only_told)
        found = [f"{self._an(one)} steps: {script.line('optimizer', one)}" for one in optimizers]
        found += [
            f"{self._an(one)} exists, and no other trains its parameters: {script.line('optimizer', one)}"
            for one in waiting
        ]
        found += [f"{_a(one)} of {_a(one.optimizer)}: {script.line('schedule', one)}" for one in schedules]
        found += [f"{_a(one)} scales: {script.line('scaler', one)}" for one in scalers]
        return found + self._loaders(iterators, known, ignored, script)

    def _waiting(
        self, strangers: list[Any], ours: list[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        """Optimizers of tracked models that nothing else trains. For when none has stepped in the first step,
        because gradients are accumulated over several."""
        models = [model for _, model in self._tracked.models()]
        trained = {id(one) for model in models for one in model.parameters() if one.requires_grad}
        free = trained - parameters_of(ours)
        return [
            one
            for one in strangers
            if isinstance(one, torch.optim.Optimizer)
            and getattr(one, "param_groups", None)
            and parameters_of([one]) & free
        ]

    def _is_forgotten(
        self, one: torch.optim.Optimizer, known: dict[int, object], ignored: dict[int, object]
    ) -> bool:
        if id(one) in known or id(one) in ignored:
            return False
        inner = [part for number, part in held_by([one]).items() if number in known]
        wraps = [part for part in inner if isinstance(part, torch.optim.Optimizer)]
        # A wrapper that keeps nothing of its own is no loss.
        return not (wraps and (not one.state or any(one.state is part.state for part in wraps)))

    def _loaders(
        self, iterators: list[Any], known: dict[int, object], ignored: dict[int, object], script: _Script
    ) -> list[str]:
        given = held_by([self._feed.loader] if self._feed is not None else [])
        fine = {id(one._index_sampler) for one in _loaders_of(known, ignored, given)}
        found: list[str] = []
        for one in iterators:
            if id(sampler := getattr(one, "_index_sampler", None)) in fine:
                continue
            loader = next((own for own in alive(DataLoader) if own._index_sampler is sampler), None)
            name = script.name(loader)
            found.append(
                f"{_a(loader if loader is not None else one)} over {_a(getattr(one, '_dataset', None))} is "
                f"iterated without the run: iterate over run.steps({name}, until=…) or run.feed({name}), or "
                f"add run.ignore({name}) if its position does not matter"
            )
        return list(dict.fromkeys(found))

    # --- later ----------------------------------------------------------------------------------------------

    def _an(self, optimizer: torch.optim.Optimizer) -> str:
        """An optimizer, with the tracked models that it has parameters of, in words."""
        own = parameters_of([optimizer])
        models = [name for name, model in self._tracked.models() if own & {id(p) for p in model.parameters()}]
        of = f"track({', '.join(f'{name}=…' for name in models)})" if models else "no tracked model"
        return f"{_a(optimizer)} of {of}"

    def _look_later(self) -> None:
        """Warn of an untracked optimizer that begins to step only now, once it has stepped a second time."""
        new = [one for one in self._tracked.gradients.untracked() if one not in self._stepped]
        if not new:
            return
        self._stepped.update(new)
        known, ignored = held_by(self._tracked.given().values()), held_by(self._tracked.ignored)
        for one in new:
            if self._later < MOST_TOLD and self._is_forgotten(one, known, ignored):
                self._later += 1
                line = _Script(self._tracked.names(), named=False).line("optimizer", one)
                what = f"{self._an(one)} steps now, but is not tracked"
                self._warn(f"{what}, so a resume would begin it anew. For the next start: {line}")


class Calls:
    """Watches calls of a method on any object of a class, for which torch has no hook.

    Until `close` the class has another method, which reports the object and does what the original did.
    """

    def __init__(self, kind: type, method: str, tell: Callable[..., None]) -> None:
        self._kind, self._method = kind, method
        self._before: Callable[..., Any] = getattr(kind, method)
        self._tell: Callable[..., None] | None = tell

        @functools.wraps(self._before)
        def told(itself: Any, *args: Any, **kwargs: Any) -> Any:
            if self._tell is not None:
                self._tell(itself, *args)
            return self._before(itself, *args, **kwargs)

        self._now = told
        setattr(kind, method, told)

    def close(self) -> None:
        self._tell = None
        if getattr(self._kind, self._method) is self._now:  # otherwise another wraps this one, and calls it
            setattr(self._kind, self._method, self._before)


class FirstStep:
    """Which torch loaders are iterated other than by the run's feed; which scalers scale, and for whom."""

    def __init__(self, feed: DataFeed | None) -> None:
        self._feed = feed
        self._drawing = 0
        self._fed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._moved: weakref.WeakSet[Any] = weakref.WeakSet()
        self.scalers: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        self.scaled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that scalers were told to step, whether they did or skipped it."""
        self.made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that were made during the step."""
        self._calls = [
            Calls(LoaderIterator, "__next__", self._moves),
            Calls(torch.amp.GradScaler, "scale", self._scales),
            Calls(torch.amp.GradScaler, "step", self._steps),
            Calls(torch.optim.Optimizer, "__init__", self._makes),
        ]
        if feed is not None:
            feed.watched = self._draws

    def _moves(self, iterator: Any) -> None:
        (self._fed if self._drawing else self._moved).add(iterator)

    def _makes(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.made.add(optimizer)

    def _scales(self, scaler: torch.amp.GradScaler, *_: Any) -> None:
        if scaler.is_enabled():
            self.scalers.add(scaler)

    def _steps(self, scaler: torch.amp.GradScaler, optimizer: Any = None, *_: Any) -> None:
        self._scales(scaler)
        if isinstance(optimizer, torch.optim.Optimizer):
            self.scaled.add(optimizer)

    @contextlib.contextmanager
    def _draws(self) -> Iterator[None]:
        self._drawing += 1
        try:
            yield
        finally:
            self._drawing -= 1

    def iterators(self) -> list[Any]:
        """Those that the feed has never moved and that have a position to lose: still in use, and not at
        their end."""
        return [one for one in self._moved if one not in self._fed and not _is_over(one)]

    def close(self) -> None:
        for calls in reversed(self._calls):
            calls.close()
        if self._feed is not None:
            self._feed.watched = None


def _is_over(iterator: Any) -> bool:
    try:
        return bool(getattr(iterator, "_num_yielded", 0) >= len(iterator))
    except (TypeError, NotImplementedError):
        return False


def _loaders_of(*held: dict[int, object]) -> list[DataLoader[Any]]:
    return [one for things in held for one in things.values() if isinstance(one, DataLoader)]


def _a(thing: object) -> str:
    """Its class with the right article: an Adam, a Linear, an SGD, an RAdam."""
    name = type(thing).__name__
    spelled = name[:2].isupper() and len(name) > 1  # letter by letter: es, ar, en
    return f"{'an' if name[:1] in ('AEFHILMNORSX' if spelled else 'AEIOU') else 'a'} {name}"


class _Script:
    """The names that the functions on the stack, except Holdfast's, have for things."""

    def __init__(self, taken: Sequence[str], *, named: bool) -> None:
        """`named`: names are looked up when wanted. That keeps alive what functions hold until they return,
        so it is only for a run that is ending."""
        self._taken = set(taken)
        self._named = named

    def line(self, kind: str, thing: object) -> str:
        """The line to write in the script."""
        word, number = kind, 2
        while word in self._taken:
            word, number = f"{kind}_{number}", number + 1
        self._taken.add(word)
        name = self.name(thing)
        return f"add run.track({word}={name}) before the first step, or run.ignore({name}) if that is meant"

    def name(self, thing: object) -> str:
        """The name of a variable, or an attribute of a `self`, that is this object."""
        for frame in _frames() if self._named else ():
            for space in (frame.f_locals, frame.f_globals):
                for name, value in list(space.items()):
                    if value is thing and not name.startswith("_"):
                        return name
            for name, value in list(getattr(frame.f_locals.get("self"), "__dict__", {}).items()):
                if value is thing:
                    return f"self.{name}"
        return "…"


def _frames() -> Iterator[FrameType]:
    """From the innermost out."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OWN):
            yield frame
        frame = frame.f_back
