"""A forked process becomes the worker that `python -u script` would have become.

What an exec would have done is done here by hand, and what it would have inherited comes with the agent's
request: session, directory, mask, descriptors, signals, environment, arguments, `__main__` and fresh random
state. docs/fast-restarts.md lists what still differs. Standard library only.

Guarantee: when something cannot be done, the process tells the agent and ends; it never runs half-prepared.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import importlib.machinery
import os
import random
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.launch.messages import Message, receive, send

WORD = 60.0
"""Seconds that a prepared worker waits for the agent's word."""
PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; end at once if it is not `parent` any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Chance:
    """Random state as after a cold start: fresh in every worker, unless a module was meant to seed it."""

    def __init__(self) -> None:
        self._before: dict[str, object] = {}
        self._seeded: dict[str, bool] = {}
        self._python: Any = None

    def remember(self) -> None:
        self._before = self._state()

    def compare(self) -> None:
        now = self._state()
        self._seeded = {name: now[name] != self._before.get(name) for name in now}
        self._python = random.getstate()

    @staticmethod
    def _state() -> dict[str, object]:
        state: dict[str, object] = {"random": random.getstate()}
        if "numpy.random" in sys.modules:
            state["numpy"] = sys.modules["numpy.random"].get_state()[1].tobytes()
        if "torch" in sys.modules:
            state["torch"] = sys.modules["torch"].initial_seed()
        return state

    def refresh(self) -> None:
        """In a worker. Python's own `random` seeds itself after every fork."""
        if self._seeded.get("random"):
            random.setstate(self._python)
        if not self._seeded.get("numpy", True):
            sys.modules["numpy.random"].seed()
        if not self._seeded.get("torch", True):
            sys.modules["torch"].default_generator.seed()
        if "multiprocessing.process" in sys.modules:
            process = sys.modules["multiprocessing.process"]
            process.current_process().authkey = os.urandom(32)


class Worker:
    """A forked process that becomes what `python -u` would have become."""

    def __init__(
        self,
        request: Message,
        descriptors: Sequence[int],
        main: Mapping[str, object],
        changes: Mapping[str, str | None],
        chance: Chance,
    ) -> None:
        """`descriptors`: the connection to the agent, then one for each of request["stdio"]. `main`: what
        the interpreter puts into a script's `__main__`. `changes`: what imports did to the environment."""
        self._main = main
        self._request = request
        self._changes = changes
        self._chance = chance
        self._channel = socket.socket(fileno=descriptors[0])
        self._stdio = dict(zip(request["stdio"], descriptors[1:], strict=True))
        self.module: str = request["module"]
        self.script: str = request["script"]
        self.path = ""

    def prepare(self) -> None:
        """Everything but running the script; then wait for the agent's word. Ends the process on a fault."""
        try:
            self._channel.settimeout(WORD)
            self._settle()
            self._set_up_main()
            send(self._channel, {"ready": os.getpid()})
            receive(self._channel)
            self._channel.close()
        except BaseException as error:  # noqa: BLE001 - told, and the agent starts a worker of the other kind
            with contextlib.suppress(OSError):
                send(self._channel, {"failed": traceback.format_exception_only(error)[-1].strip()})
            os._exit(1)

    def _settle(self) -> None:
        """What an exec would have done or left: session, directory, descriptors, signals, environment."""
        request = self._request
        os.setsid()
        os.umask(request["umask"])
        os.chdir(request["cwd"])
        for target, descriptor in self._stdio.items():
            os.dup2(descriptor, target)
            os.close(descriptor)
        ignored = set(request["ignored"])
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError):  # those that the C library keeps for itself
                if number in (signal.SIGPIPE, signal.SIGXFSZ):
                    continue  # Python ignores them whatever it inherits
                if number in ignored:
                    signal.signal(number, signal.SIG_IGN)
                elif number == signal.SIGINT:
                    signal.signal(number, signal.default_int_handler)
                elif signal.getsignal(number) == signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set(request["blocked"]))
        wanted: dict[str, str | None] = {**request["environment"], **self._changes}
        for name in [name for name in os.environ if wanted.get(name) is None]:
            del os.environ[name]
        os.environ.update({name: value for name, value in wanted.items() if value is not None})

    def _set_up_main(self) -> None:
        command = self._request["command"]
        sys.orig_argv[:] = command
        sys.argv[:] = ["-m" if self.module else self.script, *self._request["arguments"]]
        _show_command(command)
        self._chance.refresh()
        main_thread = threading.main_thread()
        if hasattr(main_thread, "_set_native_id"):
            main_thread._set_native_id()  # Python does not do it after a fork
        importlib.invalidate_caches()
        main = types.ModuleType("__main__")
        vars(main).update(self._main, __doc__=None, __builtins__=builtins)
        if "__annotations__" in self._main:
            vars(main)["__annotations__"] = {}
        if not self.module:  # runpy fills in the rest for a module
            self.path = os.path.join(os.getcwd(), self.script)  # noqa: PTH109, PTH118 - as Python does it
            main.__file__ = self.path
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", self.path)
        replaced = sys.modules["__main__"]
        for name, module in list(sys.modules.items()):
            if module is replaced:  # also the name that multiprocessing has for it
                sys.modules[name] = main
            elif getattr(module, "__dict__", {}).get("__main__") is replaced:
                module.__dict__["__main__"] = main  # `import __main__`

    def read(self) -> bytes:
        try:
            with open(self.path, "rb") as file:  # noqa: PTH123
                return file.read()
        except OSError as error:
            what = f"[Errno {error.errno}] {error.strerror}"
            print(f"{sys.executable}: can't open file {self.path!r}: {what}", file=sys.stderr)
            sys.exit(2)


def _show_command(command: list[str]) -> None:
    """Let `ps` show the worker's own command line, as far as there is room where this one's stands."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        text = b"\0".join(os.fsencode(part) for part in command)[: end - start - 1]
        if start:
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, text, len(text))
