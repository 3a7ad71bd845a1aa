"""Signals that ask a rank to stop.

Guarantee: a handler does nothing but count. Nothing is saved, logged, locked or raised where a signal happens
to arrive, which may be in the middle of a write. A thread of its own is told at once, through the
interpreter's wakeup descriptor, also while the main thread sits in a collective that has released the
interpreter's lock; and only that thread acts.

Processes that a rank forks (loaders' workers, snapshots) inherit neither the handlers nor the descriptor: a
signal to one of them is none to the rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn

from holdfast.policy.stopping import is_repeated
from holdfast.signal_senders import Seen, named, seen, take, watch
from holdfast.speaking import rendered

log = logging.getLogger("holdfast")

LOOK = 1.0
"""Seconds between two looks at the count, in case somebody takes the wakeup descriptor away later."""
LOOK_UNWOKEN = 0.1
"""The same where the descriptor was somebody else's to begin with."""
PARTING = 2.0
LAST_WORDS = 3.0
"""Seconds for what is told before a second signal ends the process: the disk may be what hangs."""
STDERR = 2


class StopSignals:
    """Takes signals over until `close`: the first asks for a stop, a later one ends this process at once."""

    def __init__(
        self,
        numbers: Iterable[signal.Signals],
        on_first: Callable[[signal.Signals], None],
        on_again: Callable[[signal.Signals], None] | None = None,
        *,
        instead: str = "",
    ) -> None:
        """Both are called on a thread; after `on_again`, or soon if it hangs, the process ends, unflushed.

        `instead`: what a script sets to keep its own handlers; said when one of those is replaced.
        """
        self.numbers = list(numbers)
        self.code: int | None = None
        """What a later signal ends this process with; None for 128 and its number."""
        self._on_first = on_first
        self._on_again = on_again
        self._first: float | None = None
        self._instead = instead
        self._before: dict[signal.Signals, Any] = {}
        self._handled = 0
        self._last = signal.SIGTERM
        self._woken = 0
        self._pid = 0
        self._owns_wakeup = False
        self._closing = False
        self._seen: Seen | None = None
        self._receiver: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def installed(self) -> bool:
        return self._thread is not None

    def takes(self, number: signal.Signals) -> bool:
        """Whether this signal does not end the process any more."""
        return self.installed and number in self._before

    def sender(self, number: signal.Signals, launcher: int | None = None) -> str:
        """Who sent the one that is told just now; empty if that is not known."""
        return named(number, self._seen, launcher)

    def install(self) -> bool:
        """Take the signals over. False, and said, where that cannot be: only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "holdfast: not in the main thread, so signals cannot be taken as requests to stop; "
                "create the run in the main thread, or ask with the stop file"
            )
            return False
        self._pid = os.getpid()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        for number in self.numbers:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
            watch(number)
        replaced = [n.name for n, before in self._before.items() if callable(before)]
        if replaced:
            log.warning(
                "holdfast: the handler that this script had for %s is replaced: the signal asks for a save "
                "and a stop now%s",
                ", ".join(replaced),
                f". To keep the script's own, set {self._instead}" if self._instead else "",
            )
        self._take_wakeup(self._sender.fileno())
        _active.add(self)
        _watch_forks()
        self._thread = threading.Thread(target=self._serve, name="holdfast-stop-signals", daemon=True)
        self._thread.start()
        return True

    def _take_wakeup(self, descriptor: int) -> None:
        previous = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        self._owns_wakeup = previous == -1
        if not self._owns_wakeup:
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
            log.warning(
                "holdfast: another part of this program uses the interpreter's wakeup descriptor; a signal "
                "is then seen only when the main thread runs Python code, not within a long call"
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        # Closed on a thread that could not give it back (this is the main one), or called by a handler that
        # has taken the place of ours.
        if self._closing:
            registered = signal.getsignal(number) == self._handle
            self._give_back()
            if registered:
                signal.raise_signal(number)
            return
        self._last = signal.Signals(number)
        self._handled += 1

    def close(self) -> None:
        """Give the signals back to who had them; from another thread than the main one, when the next comes.

        Until then the descriptors stay open: a signal's number would be written to whatever file has theirs.
        """
        if self._thread is None or os.getpid() != self._pid:
            return
        given_back = threading.current_thread() is threading.main_thread()
        if given_back:
            self._give_back()
        self._closing = True
        with contextlib.suppress(OSError, AttributeError):
            self._sender.send(b"\0")  # type: ignore[union-attr]
        if self._thread is not threading.current_thread():
            self._thread.join(PARTING)
        if given_back and not self._thread.is_alive():
            self._hang_up()
        self._thread = None
        if given_back:
            _active.discard(self)

    def _give_back(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:  # else somebody has replaced ours since
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        if self._owns_wakeup and self._sender is not None:
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._sender.fileno()):
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        self._owns_wakeup = False

    def _hang_up(self) -> None:
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close()

    def forget(self) -> None:
        """In a forked child: the signals mean there what they meant before, and nobody here is told."""
        self._give_back()
        self._hang_up()
        self._thread = None

    # --- the thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        receiver = self._receiver
        assert receiver is not None
        poll = select.poll()
        poll.register(receiver, select.POLLIN)
        told = 0
        while not self._closing:
            poll.poll((LOOK if self._owns_wakeup else LOOK_UNWOKEN) * 1000)
            last = self._read(receiver)
            # Each arrival is seen twice: at once through the descriptor, and when the handler has run. Those
            # of one kind that are pending together are handled once, so the larger count is the true one.
            arrived = max(self._woken, self._handled)
            for _ in range(arrived - told):
                self._call(last or self._last)
            told = arrived

    def _read(self, receiver: socket.socket) -> signal.Signals | None:
        last = None
        with contextlib.suppress(BlockingIOError, OSError):
            for byte in receiver.recv(4096):
                if byte in self.numbers:
                    self._woken += 1
                    last = signal.Signals(byte)
        return last

    def _call(self, number: signal.Signals) -> None:
        now = time.monotonic()
        self._seen = None
        with contextlib.suppress(Exception):  # nothing about the sender may hold a stop up
            self._seen = seen(take(number))
        if self._first is not None:
            if not is_repeated(self._first, now):
                self._end(number)
            return
        self._first = now
        try:
            self._on_first(number)
        except Exception:
            log.exception("holdfast: a request to stop (%s) could not be passed on", number.name)

    def _end(self, number: signal.Signals) -> NoReturn:
        """Now: nothing that is told on the way may hold it up."""
        words = threading.Thread(target=self._last_words, args=(number,), daemon=True)
        words.start()
        words.join(LAST_WORDS)
        os._exit(128 + number if self.code is None else self.code)

    def _last_words(self, number: signal.Signals) -> None:
        state = "without saving" if self.code is None else "its state is saved"
        told = f"{rendered(f'{number.name} came a second time: this process ends now, {state}')}\n"
        with contextlib.suppress(OSError):
            os.write(STDERR, told.encode())
        if self._on_again is not None:
            with contextlib.suppress(Exception):
                self._on_again(number)


_active: weakref.WeakSet[StopSignals] = weakref.WeakSet()
_watched_forks = False
_forking = threading.local()
"""The mask of a thread that forks, as it was before."""


def _watch_forks() -> None:
    """Once a process; what is registered for forks cannot be taken back."""
    global _watched_forks
    if not _watched_forks:
        _watched_forks = True
        os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_in_child)


def _before_fork() -> None:
    # A signal that reaches the child before it has given ours up would be written to the rank's own socket.
    numbers = {number for signals in list(_active) for number in signals.numbers}
    if numbers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock() -> None:
    mask = getattr(_forking, "mask", None)
    if mask is not None:
        _forking.mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    for signals in list(_active):
        with contextlib.suppress(Exception):  # a child must not fail for it
            signals.forget()
    _active.clear()
    _unblock()
