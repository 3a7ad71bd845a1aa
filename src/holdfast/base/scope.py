"""Where a rank stands in an in-process restart: what may interrupt its main thread, and when.

Guarantees: an interruption is raised in the main thread only, and never inside a critical section: there it
stays pending until the outermost one ends, or until a wait in there asks for it at a point where it is safe
(`leave_if_asked`). So what Holdfast itself does at a stretch, it does as a whole or not at all.

A scope belongs to one iteration. It is found through a context variable rather than handed over, because what
must not be interrupted (a save, a wait for a decision) lies far below what the user calls.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import msgspec

P = ParamSpec("P")
R = TypeVar("R")

LOOK = 0.02
"""Seconds between two looks of a wait at whether the function is to be left."""

_CURRENT: ContextVar[Scope | None] = ContextVar("holdfast_restart_scope", default=None)


class RestartRequested(BaseException):
    """Unwinds the function so that it can start again. No Exception: no handler of errors is to eat it."""


class Scope:
    """One member's part in one iteration."""

    def __init__(self, *, iteration: int, member: int, rank: int, world_size: int, job: str = "") -> None:
        self.iteration = iteration
        self.member = member
        self.rank = rank
        self.world_size = world_size
        self.job = job
        """The same for all iterations and members of one job, and for no other job. What one iteration holds
        the next may take over without a proof that its holder is dead: that the group before was left is
        what the plan of this iteration says."""
        self.stop = ""
        """What had asked a run of the function to stop, and was not followed when the function was left."""
        self.attempt = 0
        """The attempt that a run of this iteration is; 0 while there is none."""
        self.run_dir = ""
        """Where that run keeps its records."""
        self.events: list[msgspec.Struct] = []
        """Events that the first run of this iteration is to write into its journal."""
        self.committed = 0
        """The highest step that this member knows to be committed."""
        self.step = 0
        """The last step that it completed."""
        self.stepped = False
        """Whether a run has completed a step in this iteration."""
        self.request: Callable[[str], None] | None = None
        """Asks for a restart of all, with a reason; set by whoever runs the iteration."""
        self.on_run: Callable[[], None] | None = None
        """Called when a run is made in the function; set by whoever runs the iteration."""
        self.own_collective_timeout = False
        """Whether the timeout of the process group is Holdfast's own, and so fits its other limits."""
        self.allowance = 0.0
        """Seconds by which the main thread may stand still for longer than otherwise: before the first step
        of all ranks is done, in which programs are built and caches warmed."""
        self._depth = 0
        """How many critical sections are open, one in another."""
        self._open = 0
        """Up to which depth an interruption may come all the same."""
        self._ending = False
        """Whether waits, too, go on to their end."""
        self._asked = ""
        self._closers: list[Callable[[], object]] = []
        self._bounded_until = 0.0
        self._touched = time.monotonic()
        self._main = threading.main_thread()

    # --- interruptions --------------------------------------------------------------------------------------

    @property
    def asked(self) -> str:
        """Why the function is to be left; empty while it is not."""
        return self._asked

    def ask(self, why: str) -> None:
        """From any thread: the function is to be left. Who interrupts the main thread comes on top."""
        self._asked = self._asked or why

    @property
    def leaves(self) -> bool:
        """Whether `interrupt` would raise."""
        return bool(self._asked) and self._depth <= self._open

    def interrupt(self) -> None:
        """In the main thread, at any point of its code (a signal's handler): leave, if that is safe."""
        if self.leaves:
            self._open = 0  # what is still to be done on the way out is not to be interrupted again
            raise RestartRequested(self._asked)

    def leave_if_asked(self) -> None:
        """A point at which leaving is safe also in a critical section: in a wait for others."""
        if self._asked and not self._ending and threading.current_thread() is self._main:
            raise RestartRequested(self._asked)

    @contextlib.contextmanager
    def critical(self, at_most: float = 0.0) -> Iterator[None]:
        """What is not to be interrupted; `at_most`: for how long it may take before it counts as a hang."""
        if threading.current_thread() is not self._main:
            yield  # never interrupted anyway
            return
        depth, bounded = self._depth, self._bounded_until
        self._depth = depth + 1
        self._bounded_until = max(bounded, time.monotonic() + at_most if at_most else 0.0)
        try:
            yield
        finally:
            self._bounded_until = bounded
            self._touched = time.monotonic()
            self._depth = depth  # last: from here on an interruption may come
        if sys.exc_info()[0] is None:  # else something is on its way out already
            self.interrupt()

    @contextlib.contextmanager
    def leavable(self) -> Iterator[None]:
        """In a critical section: what may be left at any point after all, such as a long wait in torch."""
        if threading.current_thread() is not self._main:
            yield
            return
        before, self._open = self._open, self._depth
        try:
            self.interrupt()
            yield
        finally:
            self._open = before

    @contextlib.contextmanager
    def to_the_end(self) -> Iterator[None]:
        """A critical section whose waits are not left either: what gives back what others wait for."""
        if threading.current_thread() is not self._main:
            yield
            return
        with self.critical():
            before, self._ending = self._ending, True
            try:
                yield
            finally:
                self._ending = before

    # --- progress -------------------------------------------------------------------------------------------

    def touch(self) -> None:
        """The main thread makes progress. Cheap; from a signal's handler, a pending call or any code."""
        self._touched = time.monotonic()

    def idle(self, now: float) -> float:
        """Seconds since the main thread last made progress, beyond what its critical section may take."""
        return max(0.0, now - max(self._touched, min(self._bounded_until, now)))

    def allow(self, seconds: float) -> None:
        """From any thread: from now on the allowance is this, and the main thread has its whole limit."""
        self._touched = time.monotonic()
        self.allowance = seconds

    # --- what has to be closed ------------------------------------------------------------------------------

    def on_leave(self, close: Callable[[], object]) -> None:
        """Call this once the function was left, newest first, whatever the function did about it itself."""
        self._closers.append(close)

    def closers(self) -> list[Callable[[], object]]:
        """All of them, newest first, once. The function was left: nothing is interrupted any more."""
        self._depth, self._ending = self._depth + 1, True
        found, self._closers = self._closers[::-1], []
        return found


def current() -> Scope | None:
    """The scope of the iteration that this code runs in; None outside of any."""
    return _CURRENT.get()


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    token = _CURRENT.set(scope)
    try:
        yield scope
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def critical(at_most: float = 0.0) -> Iterator[None]:
    """A critical section of the present scope; nothing outside of any."""
    scope = _CURRENT.get()
    if scope is None:
        yield
        return
    with scope.critical(at_most):
        yield


@contextlib.contextmanager
def to_the_end() -> Iterator[None]:
    """What is done to its end, waits included; nothing outside of any scope."""
    scope = _CURRENT.get()
    if scope is None:
        yield
        return
    with scope.to_the_end():
        yield


@contextlib.contextmanager
def leavable() -> Iterator[None]:
    """What may be left at any point also in a critical section; nothing outside of any scope."""
    scope = _CURRENT.get()
    if scope is None:
        yield
        return
    with scope.leavable():
        yield


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Calls of this function are critical sections of the scope in which they are made."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        scope = _CURRENT.get()
        if scope is None:
            return function(*args, **kwargs)
        with scope.critical():
            return function(*args, **kwargs)

    return whole


def leave_if_asked() -> None:
    """For waits: leave at once if the present scope's function is to be left."""
    scope = _CURRENT.get()
    if scope is not None:
        scope.leave_if_asked()


def stretch(seconds: float) -> float:
    """For waits: how much of this to wait before asking again. Leaves at once if that is asked for."""
    scope = _CURRENT.get()
    if scope is None:
        return seconds
    scope.leave_if_asked()
    return min(seconds, LOOK)
