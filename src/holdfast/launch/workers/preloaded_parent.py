"""The process that workers are forked from: it has imported what they need, and does nothing else.

Run by path as a script (`python -u`, like a worker) by launch/workers/preload.py. It imports, says that it
is ready, and then forks a worker for each request. A worker is forked twice, so that the agent, as child
subreaper, becomes its parent; it prepares itself (launch/workers/forked_worker.py), tells the agent, and
waits for its word.

Guarantees: nothing of a worker's script runs before the agent has said so. This process dies with its agent,
and so does a worker, at every moment of its start: before its adoption because its connection to the agent
closes, afterwards by the kernel (PR_SET_PDEATHSIG). A fork is refused when this process is not known to be
safe to copy: if it has more than one thread or a device in use, or a file has changed since it was imported.
"""
# ruff: noqa: E402 - the path has to be put right before anything else is imported

import sys

_START = {name: value for name, value in globals().items() if name.startswith("__")}
"""What this interpreter puts into a script's `__main__`."""
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's directory: its neighbours must not hide other modules

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Sequence

from holdfast.launch.workers.forked_worker import (
    ROOTS,
    Ahead,
    Born,
    Chance,
    Fork,
    ForkReady,
    ForkRefused,
    Worker,
    die_with,
    sayable,
)
from holdfast.process import Gone, Stream, proc
from holdfast.train import write_error_file

TAKEN = 30.0
"""Seconds for one message to or from the agent, which should take no time: there is room for it."""
ADOPTION = 30.0
"""Seconds for a worker to become the agent's child."""
QUIET = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that may be sent to all processes of a job; this process ends when its connection does."""
LATER = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.utils.data",
    "holdfast.run",
)
"""What scripts that use holdfast.Run, DCP or FSDP import as well. These are for the next start, and imported
while the first workers run, one at a time, so that a request waits for at most one of them."""
LULL = 3.0
"""Seconds without a request before these imports: workers that have just started need the processors more."""


class Refusal(Exception):  # noqa: N818 - not an error of this process
    """Why no worker may be forked from here."""


class Parent:
    """Imports, and serves requests until the agent is gone."""

    def __init__(self, line: Stream[Fork], agent: int) -> None:
        self._line = line
        self._agent = agent
        self._environment = dict(os.environ)
        self._files: dict[str, tuple[int, int, int]] = {}
        self._chance = Chance()
        self._ahead = Ahead()
        self._spoilt = False
        """Whether one of LATER made forks unsafe."""

    def load(self, modules: Sequence[str]) -> None:
        """Import torch, and what the user named; the first failure is reported, and ends this process."""
        with self._ahead.recorded():
            for name in (*ROOTS, "torch.distributed"):
                with contextlib.suppress(Exception):  # if the script needs it, it fails there, as it should
                    importlib.import_module(name)
        self._chance.remember()
        for name in modules:
            with self._ahead.recorded(name):
                try:
                    importlib.import_module(name)
                except BaseException as error:  # even what it raises to end a process
                    what = traceback.format_exception_only(error)[-1].strip()
                    raise Refusal(f"the import of --preload {name} failed: {what}") from error
        self._chance.compare()
        self._remember_files()

    def serve(self, later: Sequence[str]) -> Worker:
        """Fork workers; returns in each of them, and never in this process."""
        for number in QUIET:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, signal.SIG_IGN)
        gc.collect()
        left = iter(later)
        pause: float | None = None
        while True:
            if not self._line.wait(pause):
                name = next(left, None)
                if name is None:
                    pause = None
                    continue
                pause = 0.0
                with contextlib.suppress(Exception), warnings.catch_warnings(), self._ahead.recorded():
                    importlib.import_module(name)
                self._remember_files()
                try:
                    self.check()
                except Refusal:
                    self._spoilt = True
                continue
            pause = LULL
            try:
                received = self._line.receive(TAKEN)
            except Gone:
                os._exit(0)
            if received is None:
                continue  # the agent was stopped half-way through a message
            request, descriptors = received
            try:
                worker = self._fork(request, descriptors)
            except Refusal as refusal:
                self._line.send(ForkRefused(sayable(str(refusal)), self._spoilt), within=TAKEN)
                worker = None
            if worker is not None:
                return worker
            for descriptor in descriptors:
                os.close(descriptor)

    def check(self) -> None:
        """Raise unless a fork of this process gives a whole and clean copy."""
        if _threads() > 1:
            _fork_for_nothing()  # BLAS libraries end the threads of their pools before a fork
        if (count := _threads()) > 1:
            raise Refusal(f"it has {count} threads ({_thread_names()}); a fork would copy only one of them")
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            raise Refusal("CUDA was initialised by an import, and does not survive a fork")
        if device := _open_device():
            raise Refusal(f"an import has opened {device}; what a driver holds does not survive a fork")
        for path, known in self._files.items():
            if _signature(path) != known:
                raise Refusal(f"{path} has changed since it was imported")

    def _remember_files(self) -> None:
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and path not in self._files and (found := _signature(path)):
                self._files[path] = found

    def _fork(self, request: Fork, descriptors: list[int]) -> Worker | None:
        self.check()
        ctypes.CDLL(None).fflush(None)  # so that what C code has printed is not printed twice
        reader, writer = os.pipe()
        try:
            middle = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            raise Refusal(f"the preloaded parent cannot fork: {error.strerror}") from error
        if middle:
            os.close(writer)
            pid = int(os.read(reader, 32) or b"0")
            os.close(reader)
            os.waitpid(middle, 0)  # from here on the worker has another parent: the agent
            if not pid:
                raise Refusal("a fork of the preloaded parent failed: out of memory, or of processes?")
            self._line.send(Born(pid), within=TAKEN)
            return None
        try:
            middle = os.getpid()
            pid = os.fork()
            if pid:
                os.write(writer, str(pid).encode())
                os._exit(0)
            os.close(reader)
            os.close(writer)
            self._line.close()
            _be_adopted(middle, self._agent)
            return Worker(request, descriptors, _START, self._changes(), self._chance, self._ahead)
        except BaseException:  # noqa: BLE001 - a half-made worker must not go on as a second parent
            os._exit(1)

    def _changes(self) -> dict[str, str | None]:
        """What the imports did to the environment, as they would have done in the worker."""
        names = {*self._environment, *os.environ}
        return {
            name: os.environ.get(name)
            for name in names
            if self._environment.get(name) != os.environ.get(name)
        }


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - thousands of them at every start
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _threads() -> int:
    return len(proc.thread_ids(os.getpid()))


def _thread_names() -> str:
    return ", ".join(sorted({thread.name for thread in proc.threads(os.getpid())}))


def _fork_for_nothing() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _open_device() -> str:
    for descriptor in proc.descriptors():
        with contextlib.suppress(OSError):
            target = proc.file_of(descriptor)
            if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return target
    return ""


def _be_adopted(middle: int, agent: int) -> None:
    """Wait until the agent is this process's parent, then tie its life to the agent's."""
    deadline = time.monotonic() + ADOPTION
    while os.getppid() == middle and time.monotonic() < deadline:
        time.sleep(0.0005)
    die_with(agent)


def _main() -> Worker:
    told = json.loads(sys.argv[1])
    die_with(told["agent"])
    line: Stream[Fork] = Stream.at(told["socket"], Fork)
    if told["first_path"] and not sys.flags.safe_path:
        sys.path.insert(0, told["first_path"])
    parent = Parent(line, told["agent"])
    try:
        parent.load(told["modules"])
        parent.check()
    except Refusal as refusal:
        line.send(ForkRefused(sayable(str(refusal))), within=TAKEN)
        os._exit(0)  # without the exit handlers of what was imported
    line.send(ForkReady(), within=TAKEN)
    worker = parent.serve(LATER if told["later"] else ())
    worker.prepare()
    return worker


if __name__ == "__main__":
    _worker = _main()
    # Here, not in a function, so that only this one frame lies below the script's. A bare `raise` does not
    # add it to the traceback again: what is printed starts with the script, as always.
    try:
        if _worker.module:
            import runpy

            runpy._run_module_as_main(_worker.module, alter_argv=True)  # type: ignore[attr-defined]
        else:
            exec(
                compile(_worker.read(), _worker.path, "exec", dont_inherit=True),
                vars(sys.modules["__main__"]),
            )
    except BaseException as _error:
        if isinstance(_error, Exception):  # even one from before there is a Run, which would write the file
            write_error_file(_error)
        if _error.__traceback__ is not None:
            _error.__traceback__ = _error.__traceback__.tb_next
        raise
