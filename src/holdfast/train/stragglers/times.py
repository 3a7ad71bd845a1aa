"""Seconds of a step by section: a rank's own, and those in which it is known to wait for others.

Guarantee: measuring never waits for a device, and no time is counted twice. At any moment exactly one
section's clock runs, the innermost open one's, either as its own time or as waiting.

On the host that is the wall clock, and beside it the time in which the thread had a core. On CUDA it is the
device's clock: an event is recorded on the current stream wherever a section changes, and read once it has
been passed. So a section there costs what the device could not hide behind other work: input that is ready
before the device is costs nothing.

Waits in collectives, which `waits.py` sees, are taken out of the section they happen in, and summed by the
ranks that they were for. On CUDA a collective that runs in a stream beside the step's own takes nothing out
of it: there only the time counts in which any of them is on its way.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast.train.stragglers.scores import OTHER

# Finds the moment of a backward at which a rank's own work is done: when its last gradient is ready.
#
# If gradients are reduced by torch's DDP, or by hand after the backward, what comes after the last gradient
# is waiting for the others. A hook on that one parameter reveals the moment; the first steps, in which all
# parameters have a hook, show which parameter it is. A model whose gradients come another way (FSDP reduces
# its own) shows none, and if the last one differs every time, there is no mark.


AGREE = 2
"""How many steps in a row must end with the same parameter."""
MOST_TRIES = 8
"""Steps before giving up: if they end differently every time, a wrong mark is worse than none."""


class GradientMark:
    """Calls `told` when the last gradient of a step's backward is ready."""

    def __init__(self, models: Iterable[nn.Module], told: Callable[[], None]) -> None:
        self._told = told
        self._parameters = [
            parameter for model in models for parameter in model.parameters() if parameter.requires_grad
        ]
        self._hooks: list[RemovableHandle] = []
        self._last: int | None = None
        self._before: int | None = None
        self._same = self._tries = 0
        self._settled = False
        self.seen = 0
        """How often the mark was seen since this was last set to 0."""
        self._look_for_it()

    def end_step(self) -> None:
        """A step is complete."""
        if self._settled or self._last is None:
            return
        self._same = self._same + 1 if self._last == self._before else 1
        self._before, self._last = self._last, None
        self._tries += 1
        agreed = self._same >= AGREE
        if agreed or self._tries >= MOST_TRIES:
            self.close()
            self._settled = True
        if agreed:
            self._hooks = [_hook(self._parameters[self._before], self._mark)]

    def look_again(self) -> None:
        """The mark is no longer seen, or never was: the model's last gradient may be another one now."""
        if self._settled:
            self.close()
            self._settled = False
            self._before, self._same, self._tries = None, 0, 0
            self._look_for_it()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look_for_it(self) -> None:
        for index, parameter in enumerate(self._parameters):

            def note(tensor: Tensor, index: int = index) -> None:
                del tensor
                self._last = index

            self._hooks.append(_hook(parameter, note))

    def _mark(self, tensor: Tensor) -> None:
        del tensor
        self.seen += 1
        self._told()


def _hook(parameter: Tensor, told: Callable[[Tensor], None]) -> RemovableHandle:
    found: RemovableHandle = parameter.register_post_accumulate_grad_hook(told)  # type: ignore[no-untyped-call]
    return found


Step = dict[str, list[float]]
"""Own, waiting and busy seconds by section."""

Met = dict[str, list[float]]
"""Seconds of a step in which it waited, and how often, by whom it was with (see `waits.group_key`)."""
ASIDE = ""
"""Among those: in which collectives were on their way beside the step, whoever with."""

MOST_STEPS = 4096
"""Most steps kept for one report; if there are more, every second one is dropped, again and again."""
MOST_PENDING = 512
"""Most steps whose events may be unread; older ones are given up."""


class Times(Protocol):
    """One rank's clocks. Every call belongs to the step between `begin` and `end`."""

    on_device: bool

    def begin(self) -> None: ...

    def enter(self, section: str) -> None: ...

    def leave(self, *, waiting: bool = False) -> None:
        """Return to the section around it; `waiting`: what follows is waiting, until `arrived`."""
        ...

    def mark(self) -> None:
        """This rank's own work is done: it waits, until the section ends or something begins. If called again
        in the same section (several backwards), what came before was work, and only the rest is waiting."""
        ...

    def arrived(self) -> None:
        """The waiting is over."""
        ...

    def end(self) -> None: ...

    def waits(self) -> object:
        """It begins to wait in a collective. What this returns belongs in `waited`."""
        ...

    def waited(self, began: object, where: str | None, count: int = 1) -> None:
        """It waited, for the ranks of `where` if that is known."""
        ...

    def take(self) -> list[Step]:
        """The steps measured since this was last called, as far as they are known."""
        ...

    def take_met(self) -> list[Met]:
        """The same steps' waits in collectives; with `take`."""
        ...


T = TypeVar("T")


class _Kept(Generic[T]):
    """The steps of a report, thinned out when there are too many."""

    def __init__(self) -> None:
        self._steps: list[T] = []
        self._every = 1
        self._seen = 0

    def add(self, step: T) -> None:
        self._seen += 1
        if self._seen % self._every:
            return
        self._steps.append(step)
        if len(self._steps) >= MOST_STEPS:
            del self._steps[::2]
            self._every *= 2

    def take(self) -> list[T]:
        taken, self._steps, self._every, self._seen = self._steps, [], 1, 0
        return taken


class HostTimes:
    """By the host's clocks: for work that runs where Python runs."""

    on_device = False

    def __init__(self) -> None:
        self._kept: _Kept[Step] = _Kept()
        self._kept_met: _Kept[Met] = _Kept()
        self._open: list[str] = []
        self._section = OTHER
        self._part = 0
        self._step: Step = {}
        self._met: Met = {}
        self._wall = self._busy = self._waited = 0.0

    def begin(self) -> None:
        self._open.clear()
        self._section, self._part, self._step, self._met = OTHER, 0, {}, {}
        self._waited = 0.0
        self._wall, self._busy = time.perf_counter(), time.thread_time()

    def enter(self, section: str) -> None:
        self._open.append(self._section)
        self._switch(section, 0)

    def leave(self, *, waiting: bool = False) -> None:
        self._switch(self._open.pop() if self._open else OTHER, int(waiting))

    def mark(self) -> None:
        self._part = 0
        self._switch(self._section, 1)

    def arrived(self) -> None:
        if self._part:
            self._switch(self._section, 0)

    def end(self) -> None:
        self._switch(OTHER, 0)
        self._kept.add(self._step)
        self._kept_met.add(self._met)
        self._step, self._met = {}, {}  # what is timed between two steps belongs to none

    def waits(self) -> float:
        return time.perf_counter()

    def waited(self, began: object, where: str | None, count: int = 1) -> None:
        assert isinstance(began, float)
        spent = time.perf_counter() - began
        self._waited += spent
        if where is not None:
            _add(self._met, where, spent, count)

    def take(self) -> list[Step]:
        return self._kept.take()

    def take_met(self) -> list[Met]:
        return self._kept_met.take()

    def _switch(self, section: str, part: int) -> None:
        wall, busy = time.perf_counter(), time.thread_time()
        spent = self._step.get(self._section)
        if spent is None:
            spent = self._step[self._section] = [0.0, 0.0, 0.0]
        spent[self._part] += wall - self._wall - self._waited
        spent[1] += self._waited
        spent[2] += busy - self._busy
        self._section, self._part, self._waited = section, part, 0.0
        self._wall, self._busy = wall, busy


def _add(met: Met, where: str, seconds: float, count: int) -> None:
    found = met.get(where)
    if found is None:
        met[where] = [seconds, count]
    else:
        found[0] += seconds
        found[1] += count


class _Passing:
    """An event on a stream, and what begins there."""

    __slots__ = ("collective", "event", "part", "section")

    def __init__(self, event: torch.cuda.Event, section: str, part: int, *, collective: bool = False) -> None:
        self.event, self.section, self.part = event, section, part
        self.collective = collective
        """Whether it is the waiting in a collective, which is never work."""


class _Meeting:
    """A collective on a device, between two events."""

    __slots__ = ("aside", "begins", "count", "ends", "where")

    def __init__(self, begins: torch.cuda.Event, *, aside: bool) -> None:
        self.begins = begins
        self.ends: torch.cuda.Event | None = None
        self.where: str | None = None
        self.count = 0
        self.aside = aside
        """On another stream than the step's; if not, both events are the step's too."""


def _passed(step: Sequence[_Passing], met: Sequence[_Meeting]) -> bool:
    """Whether the device is past all of it; a section may have been on another stream than the step's end."""
    events = [passing.event for passing in reversed(step)]
    events += [meeting.ends for meeting in met if meeting.aside and meeting.ends is not None]
    return all(event.query() for event in events)  # type: ignore[no-untyped-call]


class DeviceTimes:
    """By the device's clock, through events. They are read only once the device is past them."""

    on_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: _Kept[Step] = _Kept()
        self._kept_met: _Kept[Met] = _Kept()
        self._open: list[str] = []
        self._step: list[_Passing] = []
        self._met: list[_Meeting] = []
        self._stream: torch.cuda.Stream | None = None
        self._pending: deque[tuple[list[_Passing], list[_Meeting]]] = deque()
        self._free: list[torch.cuda.Event] = []

    def begin(self) -> None:
        self._open.clear()
        self._give_back(self._step, self._met)  # of a step that did not end
        self._step, self._met = [], []
        self._stream = torch.cuda.current_stream(self._device)
        self._switch(OTHER, 0)

    def enter(self, section: str) -> None:
        if self._step:
            self._open.append(self._step[-1].section)
            self._switch(section, 0)

    def leave(self, *, waiting: bool = False) -> None:
        if self._step:
            self._switch(self._open.pop() if self._open else OTHER, int(waiting))

    def mark(self) -> None:
        if not self._step:
            return
        section = self._step[-1].section
        for passing in reversed(self._step):
            if passing.section != section or not passing.part:
                break
            passing.part = int(passing.collective)
        self._switch(section, 1)

    def arrived(self) -> None:
        if self._step and self._step[-1].part:
            self._switch(self._step[-1].section, 0)

    def end(self) -> None:
        if not self._step:
            return
        self._switch(OTHER, 0)
        self._pending.append((self._step, [meeting for meeting in self._met if meeting.ends is not None]))
        self._step, self._met = [], []
        self._read()
        if len(self._pending) > MOST_PENDING:
            self._give_back(*self._pending.popleft())

    def waits(self) -> _Meeting | None:
        """None where nothing can be recorded: between two steps, and in a graph that is being captured."""
        if not self._step or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(self._device)
        aside = stream != self._stream
        meeting = _Meeting(self._record(stream), aside=aside)
        if not aside:
            self._step.append(_Passing(meeting.begins, self._step[-1].section, 1, collective=True))
        self._met.append(meeting)
        return meeting

    def waited(self, began: object, where: str | None, count: int = 1) -> None:
        if not isinstance(began, _Meeting) or not self._step:
            return
        began.ends = self._record(torch.cuda.current_stream(self._device))
        began.where, began.count = where, count
        if not began.aside:
            before = next(passing for passing in reversed(self._step) if not passing.collective)
            self._step.append(_Passing(began.ends, before.section, before.part))

    def take(self) -> list[Step]:
        self._read(all_of_them=True)
        return self._kept.take()

    def take_met(self) -> list[Met]:
        return self._kept_met.take()

    def _switch(self, section: str, part: int) -> None:
        self._step.append(_Passing(self._record(torch.cuda.current_stream(self._device)), section, part))

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _read(self, *, all_of_them: bool = False) -> None:
        """Read the oldest step, or all, if the device is past it; never wait for that."""
        while self._pending and _passed(*self._pending[0]):
            step, met = self._pending.popleft()
            times: Step = {}
            for here, after in itertools.pairwise(step):
                spent = times.setdefault(here.section, [0.0, 0.0, 0.0])
                # On two streams the later event may have been passed first: then there was no waiting.
                spent[here.part] += max(0.0, here.event.elapsed_time(after.event)) / 1000
            self._kept.add(times)
            self._kept_met.add(_met_of(step[0].event, met))
            self._give_back(step, met)
            if not all_of_them and len(self._pending) < MOST_PENDING // 2:
                return

    def _give_back(self, step: list[_Passing], met: list[_Meeting]) -> None:
        self._free.extend(passing.event for passing in step)
        for meeting in met:
            if meeting.aside:
                self._free.append(meeting.begins)
                if meeting.ends is not None:
                    self._free.append(meeting.ends)


def _met_of(start: torch.cuda.Event, met: Sequence[_Meeting]) -> Met:
    found: Met = {}
    beside: list[tuple[float, float]] = []
    for meeting in met:
        assert meeting.ends is not None
        if meeting.where is not None:
            seconds = max(0.0, meeting.begins.elapsed_time(meeting.ends)) / 1000
            _add(found, meeting.where, seconds, meeting.count)
        if meeting.aside:
            beside.append((start.elapsed_time(meeting.begins), start.elapsed_time(meeting.ends)))
    if beside:
        _add(found, ASIDE, covered(beside) / 1000, 1)
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    whole = reached = 0.0
    first = True
    for begins, ends in sorted(spans):
        if first or begins > reached:
            whole += max(0.0, ends - begins)
            reached, first = max(begins, ends), False
        elif ends > reached:
            whole += ends - reached
            reached = ends
    return whole


class Section:
    """A `with` block for one section, and whatever else is to go around it; cheaper than a generator."""

    __slots__ = ("_around", "_name", "_times")

    def __init__(self, times: Times, name: str, around: AbstractContextManager[None] | None = None) -> None:
        self._times, self._name, self._around = times, name, around

    def __enter__(self) -> None:
        if self._around is not None:
            self._around.__enter__()
        self._times.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._times.leave()
        if self._around is not None:
            self._around.__exit__(kind, error, trace)
