"""Where a rank stands in an in-process restart: what may interrupt its main thread, and when.

Guarantees: an interruption is raised in the main thread only, and never inside a critical section: there it
stays pending until the outermost section ends, or until a wait inside asks for it at a safe point
(`leave_if_asked`). So what Holdfast itself does in one piece is done whole or not at all.

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
"""How often, in seconds, a wait looks whether the function is to be left."""

_CURRENT: ContextVar[Scope | None] = ContextVar("holdfast_restart_scope", default=None)


class RestartRequested(BaseException):
    """Unwinds the function so that it can start again. Not an Exception: no error handler may swallow it."""


class Scope:
    """One member's part in one iteration."""

    def __init__(self, *, iteration: int, member: int, rank: int, world_size: int, job: str = "") -> None:
        self.iteration = iteration
        self.member = member
        self.rank = rank
        self.world_size = world_size
        self.job = job
        """The same for all iterations and members of one job, and for no other job. The next iteration may
        take over what one holds, without proof that the holder is dead: the plan of an iteration says that
        the group before it was left."""
        self.stop = ""
        """What had asked a run of the function to stop, if the function was left before the run stopped."""
        self.attempt = 0
        """The attempt of this iteration's run; 0 while there is no run."""
        self.run_dir = ""
        """Where that run keeps its records."""
        self.events: list[msgspec.Struct] = []
        """Events for the first run of this iteration to write into its journal."""
        self.committed = 0
        """The highest step that this member knows to be committed."""
        self.step = 0
        """The last step that this member completed."""
        self.stepped = False
        """Whether a run has completed a step in this iteration."""
        self.request: Callable[[str], None] | None = None
        """Asks for a restart of all members, with a reason; set by whoever runs the iteration."""
        self.on_run: Callable[[], None] | None = None
        """Called when a run is made in the function; set by whoever runs the iteration."""
        self.own_collective_timeout = False
        """Whether Holdfast chose the timeout of the process group, so that it fits the other limits."""
        self.allowance = 0.0
        """Seconds that the main thread may stand still beyond the usual limit: until all ranks have done
        their first step, in which programs are compiled and caches warmed."""
        self._depth = 0
        """How many nested critical sections are open."""
        self._open = 0
        """The depth up to which an interruption is allowed all the same."""
        self._ending = False
        """Whether waits, too, must go on to their end."""
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
        """From any thread: the function is to be left. This alone does not interrupt the main thread."""
        self._asked = self._asked or why

    @property
    def leaves(self) -> bool:
        """Whether `interrupt` would raise."""
        return bool(self._asked) and self._depth <= self._open

    def interrupt(self) -> None:
        """In the main thread, at any point of its code (from a signal handler): leave, if that is safe."""
        if self.leaves:
            self._open = 0  # what remains to be done on the way out must not be interrupted again
            raise RestartRequested(self._asked)

    def leave_if_asked(self) -> None:
        """A point, in a wait for others, at which leaving is safe even inside a critical section."""
        if self._asked and not self._ending and threading.current_thread() is self._main:
            raise RestartRequested(self._asked)

    @contextlib.contextmanager
    def critical(self, at_most: float = 0.0) -> Iterator[None]:
        """A section that is not interrupted; `at_most`: seconds it may take before it counts as a hang."""
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
        """A part of a critical section that may be left at any point, such as a long wait in torch."""
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
        """A critical section whose waits are not left either; for giving back what others wait for."""
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
        """The main thread makes progress. Cheap; for a signal handler, a pending call or any code."""
        self._touched = time.monotonic()

    def idle(self, now: float) -> float:
        """Seconds since the main thread last made progress, beyond what its critical section may take."""
        return max(0.0, now - max(self._touched, min(self._bounded_until, now)))

    def allow(self, seconds: float) -> None:
        """From any thread: set the allowance, and let the main thread's time limit start afresh."""
        self._touched = time.monotonic()
        self.allowance = seconds

    # --- what has to be closed ------------------------------------------------------------------------------

    def on_leave(self, close: Callable[[], object]) -> None:
        """Have this called once the function has been left, newest first, whatever it did itself."""
        self._closers.append(close)

    def closers(self) -> list[Callable[[], object]]:
        """All of them, newest first, once. The function has been left: nothing is interrupted any more."""
        self._depth, self._ending = self._depth + 1, True
        found, self._closers = self._closers[::-1], []
        return found


def current() -> Scope | None:
    """The scope of the iteration that this code runs in; None if there is none."""
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
    """A critical section of the present scope; has no effect outside a scope."""
    scope = _CURRENT.get()
    if scope is None:
        yield
        return
    with scope.critical(at_most):
        yield


@contextlib.contextmanager
def to_the_end() -> Iterator[None]:
    """A section that runs to its end, waits included; has no effect outside a scope."""
    scope = _CURRENT.get()
    if scope is None:
        yield
        return
    with scope.to_the_end():
        yield


@contextlib.contextmanager
def leavable() -> Iterator[None]:
    """A section that may be left at any point, even inside a critical one; has no effect outside a scope."""
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
    """For waits: how much of `seconds` to wait before asking again. Leaves at once if asked to."""
    scope = _CURRENT.get()
    if scope is None:
        return seconds
    scope.leave_if_asked()
    return min(seconds, LOOK)
