"""The agent's side of the preloaded parent: it is started early, asked for workers, and replaced.

Imports little: the parent is started before the agent imports torch itself, so that both import side by side.

Guarantee: `fork` gives all the workers that it was asked for, each a child of this process that dies with it
and waits for the word to go; or it raises ColdStart and leaves none of them. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.base import FORMAT_VARIABLE as LOG_FORMAT
from holdfast.base import is_format
from holdfast.errors import NoProcessesError
from holdfast.launch.workers.forked_worker import (
    Born,
    Failed,
    Fork,
    ForkRefused,
    FromParent,
    FromWorker,
    Go,
    may_differ,
)
from holdfast.process import Companion, Gone, Stream, proc

# Starts the preloaded parent before torch is imported here, from a quick look at the command line.
#
# torchrun's own parser needs torch, which takes longer to import than all the rest of a launch. So this only
# guesses: a wrong guess is noticed once the command line has been read properly, and costs a second parent.


WITHOUT_VALUE = (
    "--standalone", "--module", "-m", "--no-python", "--run-path", "--use-env", "--virtual-local-rank",
    "--no-preload", "--help", "-h",
)  # fmt: skip


ROOM = 14
"""Threads and processes that a launcher with one worker needs at least, besides its first thread."""


def insist_on_room() -> None:
    """Raise NoProcessesError, before anything is made, if not even the launcher's threads can be started."""
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(ROOM):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        what = f"there is room for {len(started)}, at least {ROOM} are needed"
        raise NoProcessesError(what, proc.threads_of(os.getuid())) from error
    finally:
        over.set()
        for thread in started:
            thread.join()


def choose_format(argv: Sequence[str]) -> None:
    """Have lines that are written before the command line has been read in the form that it asks for too, and
    set what the workers inherit before their parent is started. The parser refuses any other word.
    """
    asked = (_split(argv)[0].get("--log-format") or [""])[-1]
    if asked and is_format(asked):
        os.environ[LOG_FORMAT] = asked


def start_early(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> PreloadedParent | None:
    """A parent for the workers of this command line; None if none is wanted, or if that is not clear."""
    preload = guess(argv, dict(os.environ) if environment is None else dict(environment))
    if preload is None:
        return None
    try:
        return PreloadedParent(preload)
    except ColdStart:
        return None  # it is tried again, and reported, when the workers are about to start


def guess(argv: Sequence[str], environment: dict[str, str]) -> Preload | None:
    flags, rest = _split(argv)
    if not rest or {"--help", "-h", "--no-python", "--run-path", "--no-preload"} & {*flags}:
        return None
    if environment.get("PET_NO_PRELOAD", "0") != "0":
        return None
    program = environment.get("PYTHON_EXEC", sys.executable)
    as_module = ["-m"] if {"-m", "--module"} & {*flags} else []
    try:
        script = Script.of([program, "-u", *as_module, *rest])
    except ColdStart:
        return None
    workers = (flags.get("--nproc-per-node") or [environment.get("PET_NPROC_PER_NODE", "1")])[-1]
    if workers != "1" and "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = "1"  # as torchrun sets it for more than one worker
    return Preload(tuple(flags.get("--preload", ())), script.first_path, environment)


def _split(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The flags with their values, and what follows them: the script and its own arguments."""
    flags: dict[str, list[str]] = {}
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "-":
        name, equals, value = argv[position].partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if not equals and name not in WITHOUT_VALUE:
            position += 1
            value = argv[position] if position < len(argv) else ""
        flags.setdefault(name, []).append(value)
        position += 1
    return flags, list(argv[position:])


IMPORTS = 120.0
"""Seconds for the imports, from the start of the parent; a cold start would take about as long."""
ANSWER = 30.0
"""Seconds for the parent to fork, and for a worker to prepare itself."""
REPLACEMENTS = 3
"""How many parents one launch starts to replace others."""
RUN_PATH = str(Path(__file__).resolve().with_name("run_path.py"))
"""The script that runs the user's script with `--run-path`."""
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37


class ColdStart(Exception):  # noqa: N818 - not an error
    """Why workers cannot be forked now.

    `lasting`: a new parent would not help. `spoilt`: one that imports only what it must would.
    """

    def __init__(self, reason: str, *, lasting: bool = False, spoilt: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting
        self.spoilt = spoilt


class Preload(NamedTuple):
    """What a parent must be like for the workers of a command."""

    modules: tuple[str, ...]
    first_path: str
    """The first entry of the workers' sys.path."""
    environment: Mapping[str, str]
    later: bool = True
    """Whether it imports more while workers run."""

    def differs(self, environment: Mapping[str, str]) -> list[str]:
        """Variables that differ in a worker's environment and that an import may have read."""
        names = {*self.environment, *environment}
        return sorted(
            name
            for name in names
            if self.environment.get(name) != environment.get(name) and not may_differ(name)
        )


class Script(NamedTuple):
    """A worker's command, as Python understands it."""

    command: tuple[str, ...]
    module: str
    script: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, command: Sequence[str]) -> Script:
        """Raises ColdStart if the command is not one that a forked Python can become."""
        if not command or command[0] != sys.executable:
            interpreter = command[0] if command else "nothing"
            raise ColdStart(f"the workers are run by {interpreter}, not by {sys.executable}", lasting=True)
        if list(command[1:3]) == ["-u", "-m"] and len(command) > 3:
            return cls(tuple(command), command[3], "", tuple(command[4:]))
        if command[1:2] != ["-u"] or len(command) < 3 or command[2].startswith("-"):
            raise ColdStart(f"the workers' command has another form: {' '.join(command)}", lasting=True)
        script = command[2]
        if not Path(script).is_file() or script.endswith(".pyc") or zipfile.is_zipfile(script):
            raise ColdStart(f"{script} is not a Python source file", lasting=True)
        return cls(tuple(command), "", script, tuple(command[3:]))

    @property
    def first_path(self) -> str:
        if self.module:
            return str(Path.cwd())
        # --run-path: the real script is an argument, and its folder is what counts.
        script = self.arguments[0] if self.script == RUN_PATH and self.arguments else self.script
        return str(Path(script).resolve().parent)


class Request(NamedTuple):
    """One worker."""

    script: Script
    environment: Mapping[str, str]
    stdio: Mapping[int, int]
    """Descriptor in the worker → descriptor here; the others are inherited."""
    processors: Sequence[int] = ()
    """The processors that it is bound to; none means the same as the parent."""
    note: str = ""
    """The file in which it says, once, why it started over as a new interpreter."""


class PreloadedParent:
    """One parent process."""

    def __init__(self, preload: Preload) -> None:
        self.preload = preload
        self._ready = False
        self._deadline = time.monotonic() + IMPORTS
        try:
            self._child: Companion[Stream[FromParent]] = Companion(self._spawn, Stream.pair(FromParent))
        except OSError as error:
            raise ColdStart(f"the preloaded parent cannot be started: {error}") from error

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        """Start it as a worker is started, not as our other children are: a worker is what it becomes."""
        handover = {
            "socket": descriptor,
            "agent": os.getpid(),
            "first_path": self.preload.first_path,
            "modules": self.preload.modules,
            "later": self.preload.later,
        }
        # Room for the command line that a worker shows in place of this one.
        room = " " * (256 + sum(len(os.fsencode(part)) + 1 for part in sys.argv))
        path = str(Path(__file__).resolve().with_name("preloaded_parent.py"))
        return subprocess.Popen(
            [sys.executable, "-u", path, json.dumps(handover), room],
            env=dict(self.preload.environment),
            pass_fds=[descriptor],
            start_new_session=True,  # the terminal's signals are for the agent
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait(self) -> None:
        """Wait until it has imported everything, or raise ColdStart."""
        if self._ready:
            return
        answer = self._answer(self._deadline - time.monotonic(), "had not finished its imports")
        if isinstance(answer, ForkRefused):
            raise ColdStart(answer.why, lasting=True)
        self._ready = True

    def fork(self, requests: Mapping[int, Request]) -> Forked:
        """A prepared worker for each request, none of which runs before `Forked.go`; or raises ColdStart."""
        self.wait()
        for request in requests.values():
            if names := self.preload.differs(request.environment):
                raise ColdStart(f"{', '.join(names)} changed since the parent was started")
        forked = Forked()
        with _subreaper():
            try:
                for rank, request in requests.items():
                    with forked.connect(rank) as theirs:
                        self._send(request, theirs.fileno())
                for rank in requests:
                    answer = self._answer(ANSWER, "did not fork a worker")
                    if isinstance(answer, ForkRefused):
                        raise ColdStart(answer.why, spoilt=answer.spoilt)
                    if isinstance(answer, Born):
                        forked.pids[rank] = answer.pid
                forked.await_ready()
            except BaseException:
                forked.end()
                raise
        return forked

    def _send(self, request: Request, connection: int) -> None:
        script = request.script
        message = Fork(
            command=[os.fsencode(part) for part in script.command],
            module=os.fsencode(script.module),
            script=os.fsencode(script.script),
            arguments=[os.fsencode(part) for part in script.arguments],
            environment={os.fsencode(k): os.fsencode(v) for k, v in request.environment.items()},
            stdio=list(request.stdio),
            processors=list(request.processors),
            note=os.fsencode(request.note),
            cwd=os.fsencode(Path.cwd()),
            umask=int(proc.status(os.getpid()).get("Umask", "0022"), 8),
            ignored=[
                int(number)
                for number in signal.valid_signals()
                if signal.getsignal(number) == signal.SIG_IGN
                and number not in (signal.SIGPIPE, signal.SIGXFSZ)
            ],
            blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        )
        try:
            self._child.line.send(message, [connection, *request.stdio.values()], within=ANSWER)
        except OSError as error:
            raise ColdStart(self._end_of_parent()) from error

    def _answer(self, timeout: float, silent: str) -> FromParent:
        try:
            received = self._child.line.receive(timeout)
        except Gone as error:
            raise ColdStart(self._end_of_parent()) from error
        if received is None:
            raise ColdStart(f"the preloaded parent {silent} in time")
        return received[0]

    def _end_of_parent(self) -> str:
        code = self._child.wait(1.0)
        if code is None:
            return "the preloaded parent closed its connection"
        how = f"with {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f"the preloaded parent ended {how}"

    def ended(self) -> str:
        """How it ended; empty while it is alive."""
        return self._end_of_parent() if self._child.code is not None else ""

    def close(self) -> None:
        """End it. Workers that it forked are not its children, and stay."""
        self._child.kill(ANSWER)


class Forked:
    """Prepared workers, by local rank. They run after `go`, and end if this process ends before that."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self._lines: dict[int, Stream[FromWorker]] = {}

    def connect(self, rank: int) -> socket.socket:
        """Returns the other end of the line, for the worker."""
        self._lines[rank], theirs = Stream[FromWorker].pair(FromWorker)
        return theirs

    def await_ready(self) -> None:
        for rank, line in self._lines.items():
            received = None
            with contextlib.suppress(Gone):
                received = line.receive(ANSWER)
            if received is None:
                raise ColdStart(f"the forked worker {rank} ended, or did not answer, as it started")
            if isinstance(received[0], Failed):
                raise ColdStart(f"the forked worker {rank} could not be prepared: {received[0].why}")

    def go(self) -> None:
        """Let them run. A worker that is gone by now is treated like any worker that ended."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(Go(), within=ANSWER)
            line.close()
        self._lines = {}

    def end(self) -> None:
        """End them: none may be left."""
        for line in self._lines.values():
            line.close()
        deadline = time.monotonic() + ANSWER
        for pid in self.pids.values():
            with contextlib.suppress(ChildProcessError):  # not our child (any more): its id may be another's
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.kill(pid, signal.SIGKILL)
                while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                    time.sleep(0.005)
        self._lines, self.pids = {}, {}


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Orphans among this process's descendants become its children, while workers are made."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
