"""How another thread makes the main thread leave the function.

A real-time signal to the main thread breaks what it waits for in Python (a sleep, a lock, a read: PEP 475
lets the handler's exception through) and, elsewhere, comes to its handler before the next bytecode. The
handler asks the scope, in the main thread itself, so there is no moment between the question whether leaving
is safe and the leaving. An exception set from outside would have that moment.

C code that waits with signals blocked or retried (a collective) is none of this: see groups.py; and what
nothing can free is ended by the keeper.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

from holdfast.errors import UsageError
from holdfast.scope import Scope

INTERRUPT = signal.SIGRTMAX - 5
"""Far from those that people, schedulers and the C library use."""
AGAIN = 1.0
"""Seconds between two exceptions: code that unwinds must get on with it, code that ate one gets another."""

_WHOLE = frozenset(
    {"<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>", logging.__file__}
)
"""Code that others in this process need whole: a module that was half imported stays so for good, and a log
whose lock was not given back takes nothing more. Who hangs in there is the keeper's affair."""

_Pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Interruption:
    """Installed in the main thread for as long as there are iterations."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "a restartable function was called outside of the main thread, and only there can it be "
                "interrupted. Call it in the main thread"
            )
        self._scope: Scope | None = None
        self._raised = 0.0
        self._looking = False
        self._touch = _Pending(self._progress)
        self._main = threading.main_thread().ident or 0
        self._before: Any = signal.signal(INTERRUPT, self._handle)

    def open(self, scope: Scope) -> None:
        """From here on the function may be left by an exception."""
        self._raised = 0.0
        self._scope = scope

    def shut(self) -> None:
        """From here on nothing is raised any more. The main thread may be interrupted right here."""
        self._scope = None

    def send(self) -> None:
        """From any thread: let the main thread leave the function, if it is open."""
        if self._scope is not None:
            signal.pthread_kill(self._main, INTERRUPT)

    def look(self) -> None:
        """From any thread: the main thread touches the open scope as soon as it runs Python again."""
        if self._scope is not None and not self._looking:
            self._looking = True  # one at a time: the interpreter has room for a few only
            if ctypes.pythonapi.Py_AddPendingCall(self._touch, None) != 0:
                self._looking = False

    def close(self) -> None:
        self.shut()
        signal.signal(INTERRUPT, self._before)

    def _progress(self, unused: object) -> int:
        del unused
        self._looking = False
        scope = self._scope
        if scope is not None:
            scope.touch()
        return 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number
        scope, now = self._scope, time.monotonic()
        if scope is not None and now - self._raised >= AGAIN and not _in_what_stays_whole(frame):
            self._raised = now if scope.leaves else 0.0
            scope.interrupt()


def _in_what_stays_whole(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in _WHOLE:
            return True
        frame = frame.f_back
    return False
