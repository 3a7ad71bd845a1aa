"""What asks a rank to stop: signals and the stop file; by when it must have ended; loaders that live on.

Guarantee: a handler does nothing but count. Nothing is saved, logged, locked or raised where a signal happens
to arrive, which may be in the middle of a write. A separate thread learns of it at once, through the
interpreter's wakeup descriptor, even while the main thread sits in a collective that has released the
interpreter's lock; and only that thread acts.

Processes that a rank forks (loaders' workers, proofs) inherit neither the handlers nor the descriptor, nor
the deadline's timer: a signal to one of them is not a signal to the rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from holdfast.base import Look, rendered
from holdfast.errors import ExitCode, UsageError
from holdfast.policy import REPEATED, Deadline, Source, StopRequest, is_repeated, sooner
from holdfast.process import SeenSender, named, seen, take, watch

# The file whose appearance asks for a stop.
#
# Guarantee: looking for it never ends a run, nor holds one up. It may be on a file system that answers with
# an error for a while, or not at all (a stale handle, a lost server): then it asks nobody to stop, and that
# is said once.


class StopFile:
    """The stop file, for callers that look for it again and again."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path = path
        self._tell = tell
        self._told = False
        self._look = Look(lambda: _exists(self.path), "stop-file")

    def request(self) -> StopRequest | None:
        """What the file asks for, once it is there."""
        if not self.is_there():
            return None
        return StopRequest(source=Source.STOP_FILE, detail=f"{self.path} is there", at=time.time())

    def is_there(self) -> bool:
        looked = self._look.take()
        if looked is None:
            return self._cannot("its file system does not answer")
        try:
            return looked.result()
        except OSError as error:
            return self._cannot(str(error.strerror or error))

    def _cannot(self, why: str) -> bool:
        if not self._told:
            self._told = True
            self._tell(
                f"the stop file {self.path} cannot be looked for: {why}; until it can, it asks for nothing"
            )
        return False


def refuse_stop_file(path: Path) -> None:
    """A stop file that is there before the start would end the run at once; somebody forgot to remove it."""
    try:
        there = _exists(path)
    except OSError as error:
        raise UsageError(
            f"the stop file {path} cannot be looked for: {error.strerror or error}. Set stop.stop_file to a "
            "path that can be looked for"
        ) from error
    if there:
        raise UsageError(
            f"the stop file {path} is there already, so this run would stop before it trains. Remove it "
            "when the run is to go on, then start again"
        )


def _exists(path: Path) -> bool:
    """Whether it exists; unlike `Path.exists`, which in some Python releases takes any error for a no."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


# Data loaders' worker processes that do not die of a request to stop, where the settings say so.
#
# A scheduler signals every process of a job. A loader's worker that dies of the signal ends the step that
# the rank still has to do before it stops. So workers ignore such a signal if their rank is stopping, which
# they learn from a byte that they share with it. If the rank is not stopping, the signal was meant for the
# worker itself, like the one with which multiprocessing ends its children, and the worker ends, a few seconds
# later than it would have.


LOADER_LOOK = 0.05


class LoaderSignals:
    """What a rank shares with the workers of its loaders."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = [int(number) for number in numbers]
        self._flags: list[Any] = []
        self._asked = False

    def spare(self, loader: Any) -> None:
        """Include the workers that this loader will start; does nothing for any other object."""
        if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
            return
        context = getattr(loader, "multiprocessing_context", None) or multiprocessing
        flag = context.RawValue("b", 0)
        self._flags.append(flag)
        flag.value = int(self._asked)  # in this order: `asked`, called meanwhile, sets all in the list
        loader.worker_init_fn = SparedWorker(loader.worker_init_fn, self._numbers, flag)

    def asked(self) -> None:
        """The rank is to stop."""
        self._asked = True
        for flag in self._flags:
            flag.value = 1


class SparedWorker:
    """A loader's `worker_init_fn`: takes the signals, then calls the user's own. Can be pickled."""

    def __init__(self, inner: Callable[[int], object] | None, numbers: list[int], flag: Any) -> None:
        self._inner = inner
        self._numbers = numbers
        self._flag = flag

    def __call__(self, worker: int) -> None:
        for number in self._numbers:
            signal.signal(number, self._handle)
        if self._inner is not None:
            self._inner(worker)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self._flag.value:
            threading.Thread(target=self._end_unless_stopping, args=(number,), daemon=True).start()

    def _end_unless_stopping(self, number: int) -> None:
        deadline = time.monotonic() + REPEATED
        while not self._flag.value:
            if time.monotonic() >= deadline:
                os._exit(128 + number)
            time.sleep(LOADER_LOOK)


# The deadline by which a rank that was asked to stop must have ended, whatever its threads do.
#
# Guarantee: once armed with a limit, the process ends by it. A thread of its own first writes down what every
# thread was doing, to standard error and to a file, then ends the process at once: no clean-up that could
# hang. If the main thread never gives the interpreter's lock back, the fault handler's timer, which needs no
# lock, ends the process a little later. A snapshot that the writer process holds is committed all the same.


log = logging.getLogger("holdfast")

BEHIND = 5.0
"""Seconds after the deadline at which the fault handler's timer ends what the thread could not."""
LAST_WORDS = 3.0
"""Seconds for what is written at the end: the disk may be what hangs."""
STDERR = 2


class StopDeadline:
    """A rank's deadline. Every method may be called from any thread; the shortest limit counts."""

    def __init__(self, on_forced: Callable[[str, str], None] | None = None) -> None:
        """`on_forced`: called right before the end with the reason and the file of the stacks, if any."""
        self._on_forced = on_forced
        self._stacks: Path | None = None
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._ends: float | None = None
        self._why = ""
        self._thread: threading.Thread | None = None
        self._over = False
        self.saved = False
        """Whether the state is safe: a process that does not end by itself has still stopped as asked."""

    def write_to(self, path: Path) -> None:
        """Where the stacks go."""
        self._stacks = path

    def arm(self, seconds: float | None, why: str) -> None:
        """From now on, so many seconds are left; None means no limit."""
        if seconds is None:
            return
        with self._moved:
            ends = time.monotonic() + seconds
            if self._over or (self._ends is not None and self._ends <= ends):
                return
            self._ends, self._why = ends, why
            _armed.add(self)
            _watch_forks()
            self._set_timer()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="holdfast-deadline", daemon=True)
                self._thread.start()
            self._moved.notify_all()

    def hasten(self, lead: float) -> Deadline | None:
        """The scheduler leaves so many seconds: returns the new deadline, if that has come closer."""
        found = sooner(self.left, lead)
        if found is not None:
            self.arm(found.seconds, found.why)
        return found

    def _set_timer(self) -> None:
        assert self._ends is not None
        seconds = max(0.0, self._ends - time.monotonic()) + BEHIND
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)

    def after_fork(self) -> None:
        """The timer was cancelled for the fork; in the parent, it is set again."""
        with self._moved:
            if not self._over and self._ends is not None:
                self._set_timer()

    @property
    def left(self) -> float | None:
        """Seconds left; None for no limit."""
        ends = self._ends
        return None if ends is None else max(0.0, ends - time.monotonic())

    def disarm(self) -> None:
        """There is no deadline any more: nothing has to be stopped."""
        with self._moved:
            self._over = True
            _armed.discard(self)
            if self._ends is not None:
                faulthandler.cancel_dump_traceback_later()
            self._moved.notify_all()

    def _watch(self) -> None:
        with self._moved:
            while not self._over:
                assert self._ends is not None
                left = self._ends - time.monotonic()
                if left <= 0:
                    break
                self._moved.wait(left)
            if self._over:
                return
        self._force()

    def _force(self) -> None:
        why = f"the deadline has passed ({self._why})"
        if self.saved:
            why = f"its state is saved, but the process did not end: {why}"
        words = threading.Thread(target=self._last_words, args=(why,), name="holdfast-forced", daemon=True)
        words.start()
        words.join(LAST_WORDS)
        os._exit(int(ExitCode.STOPPED if self.saved else ExitCode.STOPPED_UNSAVED))

    def _last_words(self, why: str) -> None:
        with contextlib.suppress(OSError):
            os.write(STDERR, f"{rendered(f'{why}; what every thread was doing:')}\n".encode())
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
        written = ""
        with contextlib.suppress(Exception):
            if self._stacks is not None:
                self._stacks.parent.mkdir(parents=True, exist_ok=True)
                with self._stacks.open("wb", buffering=0) as file:
                    file.write(f"{why}\n\n".encode())
                    faulthandler.dump_traceback(file=file, all_threads=True)
                written = str(self._stacks)
        with contextlib.suppress(Exception):
            if self._on_forced is not None:
                self._on_forced(why, written)


LOOK = 1.0
"""Seconds between two looks at the count, in case somebody takes the wakeup descriptor away later."""
LOOK_UNWOKEN = 0.1
"""The same where the descriptor already belonged to somebody else."""
PARTING = 2.0


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

        `instead`: what a script sets to keep its own handlers; named when one of those is replaced.
        """
        self.numbers = list(numbers)
        self.code: int | None = None
        """The exit code with which a later signal ends this process; None for 128 plus its number."""
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
        self._seen: SeenSender | None = None
        self._receiver: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def installed(self) -> bool:
        return self._thread is not None

    def takes(self, number: signal.Signals) -> bool:
        """Whether this signal no longer ends the process."""
        return self.installed and number in self._before

    def sender(self, number: signal.Signals, launcher: int | None = None) -> str:
        """Who sent the signal that is being reported just now; empty if that is not known."""
        return named(number, self._seen, launcher)

    def install(self) -> bool:
        """Take the signals over. False, with a warning, if that is not possible: only a main thread can."""
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
                "holdfast: the handler that this script had for %s is replaced: the signal now asks for a "
                "save and a stop%s",
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
                "holdfast: another part of this program uses the interpreter's wakeup descriptor; so a "
                "signal is seen only when the main thread runs Python code, not within a long call"
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        # Either `close` ran on a thread that could not give the signals back (this is the main one), or a
        # handler that has taken the place of ours calls this one.
        if self._closing:
            registered = signal.getsignal(number) == self._handle
            self._give_back()
            if registered:
                signal.raise_signal(number)
            return
        self._last = signal.Signals(number)
        self._handled += 1

    def close(self) -> None:
        """Give the signals back to whoever had them; off the main thread, that is done at the next signal.

        Until then the descriptors stay open: otherwise a signal's number would be written to whatever file
        has been given theirs.
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
        """In a forked child: the signals mean what they meant before, and nobody here hears of them."""
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
            # Each arrival is seen twice: at once through the descriptor, and when the handler has run.
            # Signals of one kind that are pending together are handled once, so the larger count is the
            # true one.
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
        """End the process now: nothing that is said on the way may hold that up."""
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
_armed: weakref.WeakSet[StopDeadline] = weakref.WeakSet()
_watched_forks = False
_forking = threading.local()
"""The signal mask of a thread that forks, as it was before."""


def _watch_forks() -> None:
    """Once per process: what is registered for forks cannot be unregistered."""
    global _watched_forks
    if not _watched_forks:
        _watched_forks = True
        os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def _before_fork() -> None:
    # The fault handler has one timer and a thread for it. A forked child has that thread no more, and setting
    # or cancelling a timer there would wait for it for ever, holding the interpreter's lock.
    if list(_armed):
        faulthandler.cancel_dump_traceback_later()
    # A signal that reached the child before it had given up our handlers would be written to the rank's own
    # socket.
    numbers = {number for signals in list(_active) for number in signals.numbers}
    if numbers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _in_parent() -> None:
    for deadline in list(_armed):
        deadline.after_fork()
    _unblock()


def _unblock() -> None:
    mask = getattr(_forking, "mask", None)
    if mask is not None:
        _forking.mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    for signals in list(_active):
        with contextlib.suppress(Exception):  # a child must not fail because of it
            signals.forget()
    _active.clear()
    _armed.clear()
    _unblock()
