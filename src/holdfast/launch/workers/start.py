"""Starts the workers of an attempt on this node, forked from the preloaded parent or cold, and shows output.

torch's agent computes ranks, environments and arguments and would then call `start_processes`;
`Starter.start` replaces that call. Workers are forked only when that is known to be as good as a cold start;
otherwise they start cold, and the reason is given once. Guarantee: either all workers of an attempt are
forked or all start cold, and each is a child of this process that leads a session and a process group of its
own and dies with this process. A forked worker whose script turns out to need a new interpreter becomes one
by itself; the attempts after that start cold.

Log directories and files are laid out by torch's own LogsSpecs and tailed by its own TailLog. Standard error
that goes to no such file is caught in memory and passed on from there, so that the last lines of a rank that
aborts without an error file are known. Standard error on a terminal is not caught: whoever sits there sees
it, and programs write differently to a terminal. Guarantee: a worker that writes is never held up and never
fails because of this, whatever becomes of this process or of the reader of its output, because it writes to a
file in memory. What it wrote is passed on whole and in order, together with standard output if both go to the
same place. Output is left out only if nobody takes it for a long time, and that is reported: at most
`MOST_WAITING` bytes of each rank are kept. The memory of what was passed on is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from holdfast.base import processors_near
from holdfast.cluster import devices_here, index_of
from holdfast.launch.workers.forked_worker import may_differ, processors_matter
from holdfast.launch.workers.preload import REPLACEMENTS, ColdStart, Preload, PreloadedParent, Request, Script
from holdfast.policy import Participant, ranks_of
from holdfast.process import guarded


def make_workers(members: Sequence[Participant], place: int) -> list[Worker]:
    """The workers of the node at `place`, with their ranks."""
    ranks = ranks_of(list(members), place)
    return [
        Worker(
            local_rank=local_rank,
            global_rank=ranks.first + local_rank,
            role_rank=ranks.first_of_role + local_rank,
            world_size=ranks.world_size,
            role_world_size=ranks.role_world_size,
        )
        for local_rank in range(members[place].slots)
    ]


@contextlib.contextmanager
def unshared_store() -> Iterator[None]:
    """Keep torch's rendezvous from sharing its store with the workers, which have one of their own here.

    With sharing (torch 2.13), a node caches the address of the first round and does not publish it again, so
    a node that joins later waits for it in vain. The variable must not reach the workers.
    """
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def launch_store(store: Any, spec: WorkerSpec) -> Any:
    """A part of the rendezvous store that all rounds of this launch share."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore(f"holdfast.{spec.rdzv_handler.get_run_id()}", store)


LATE = 2
"""For how many attempts before the present one the output of processes that they left is still shown."""
REAP = 10.0
"""Seconds for killed workers to be reaped."""


class StartedWorkers:
    """The workers of one attempt. Has the methods of torch's PContext that its agent uses."""

    def __init__(
        self, pids: Mapping[int, int], handlers: Sequence[SubprocessHandler], logs: Logs, *, warm: bool
    ) -> None:
        self.error_files: dict[int, str] = dict(logs.destinations.error_files)
        self.warm = warm
        self._pids = dict(pids)
        self._handlers = handlers
        self._logs = logs

    def pids(self) -> dict[int, int]:
        """The process ids by local rank."""
        return dict(self._pids)

    def last_lines(self, local_rank: int) -> str:
        """What a worker last wrote to its standard error, as far as that is caught."""
        return self._logs.last_lines(local_rank)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = REAP) -> None:
        """Reap the workers, which have ended or are killed now, and finish their logs."""
        del death_sig
        deadline = time.monotonic() + min(timeout, REAP)
        if self.warm:
            for pid in self._pids.values():
                _reap(pid, deadline)
        else:
            for handler in self._handlers:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    handler.close(signal.SIGKILL)
                    handler.proc.wait(max(0.0, deadline - time.monotonic()))
        self.abandon()

    def abandon(self) -> None:
        """Finish the logs only: somebody has found that the workers cannot be ended."""
        self._logs.close()


def _reap(pid: int, deadline: float) -> None:
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(0.005)


class Starter:
    """Starts workers for as long as a launch lasts. `close` ends the preloaded parent."""

    def __init__(
        self,
        *,
        modules: Sequence[str] = (),
        parent: PreloadedParent | None = None,
        enabled: bool = True,
        notes: Path | None = None,
        say: Callable[[str], None],
    ) -> None:
        """`parent`: one that was started ahead of time; used if it fits what the workers turn out to need.

        `notes`: a directory for what workers say about their start.
        """
        self._modules = tuple(modules)
        self._parent = parent
        self._enabled = enabled
        self._note = notes / "starts-over" if notes is not None else None
        self._say = say
        self._said: set[str] = set()
        self._started = 0 if parent is None else 1
        self._preload: Preload | None = None
        self._outputs: list[Logs] = []
        if not enabled:
            self._drop()

    @property
    def parent_pid(self) -> int | None:
        """The pid of a child of this process that is neither a worker nor an orphan."""
        return self._parent.pid if self._parent is not None else None

    # -- the parent -----------------------------------------------------------------------------------------

    def expect(self, command: Sequence[str], *, numa: bool = False) -> None:
        """Workers will run this command with this process's environment: get a parent that fits."""
        if not self._enabled:
            return
        try:
            if numa and processors_matter(os.environ):
                raise ColdStart(
                    "workers are bound to NUMA nodes, and OMP_NUM_THREADS is not set: torch counts the "
                    "processors while it is imported",
                    lasting=True,
                )
            script = Script.of(command)
            wanted = Preload(self._modules, script.first_path, dict(os.environ))
            if self._parent is not None:
                found = self._parent.preload
                other = found.modules != wanted.modules or found.first_path != wanted.first_path
                if other or found.differs(wanted.environment):
                    self._drop()
            self._preload = wanted
            self._have_parent()
        except ColdStart as cold:
            self._go_cold(cold)

    def prepare(self) -> None:
        """Wait until the parent has imported; a failure is reported and makes the next start cold."""
        self._read_note()
        if self._parent is not None:
            try:
                self._parent.wait()
            except ColdStart as cold:
                self._go_cold(cold)

    def tend(self) -> None:
        """Look after the parent while workers run: one that died is replaced ahead of the next start."""
        self._read_note()
        if self._parent is not None and (how := self._parent.ended()):
            self._drop()
            self._have_parent()
            if self._parent is not None:
                self._say_once(f"{how}; another one is getting ready for the next restart")

    def close(self) -> None:
        self._drop()
        self._finish_outputs(0)

    def _finish_outputs(self, keep: int) -> None:
        while len(self._outputs) > keep:
            self._outputs.pop(0).finish()

    def _read_note(self) -> None:
        """If a worker has found that its script needs a new interpreter, all of them do."""
        if self._enabled and self._note is not None and self._note.exists():
            self._go_cold(ColdStart(self._note.read_text() or "a worker had to start over", lasting=True))

    def _have_parent(self) -> None:
        if self._parent is not None or self._preload is None or not self._enabled:
            return
        if self._started > REPLACEMENTS:
            self._enabled = False
            self._say(f"{self._started} preloaded parents were of no use; workers start cold from now on")
            return
        self._started += 1
        try:
            self._parent = PreloadedParent(self._preload)
        except ColdStart as cold:
            self._go_cold(cold)

    def _go_cold(self, cold: ColdStart) -> None:
        self._drop()
        if cold.lasting:
            self._enabled = False
        if cold.spoilt and self._preload is not None:
            self._preload = self._preload._replace(later=False)
        self._say_once(f"workers start cold (slower, but otherwise the same): {cold}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _drop(self) -> None:
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    # -- the workers ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_place_of_torch(self) -> Iterator[None]:
        """Within this, torch's agent starts its workers through `start`."""
        names = vars(local_elastic_agent)
        theirs = names["start_processes"]
        names["start_processes"] = self.start
        try:
            yield
        finally:
            names["start_processes"] = theirs

    def start(
        self,
        name: str,
        entrypoint: str,
        args: Mapping[int, Sequence[Any]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
        **others: Any,
    ) -> StartedWorkers:
        """Like torch's start_processes, whose parameters these are."""
        del others  # how to start a function: there is none
        destinations = logs_specs.reify(envs)
        logs = Logs(name, destinations, log_line_prefixes, duplicate_stdout_filters, duplicate_stderr_filters)
        self._outputs.append(logs)
        self._finish_outputs(1 + LATE)
        commands = {rank: [entrypoint, *map(str, args[rank])] for rank in envs}
        try:
            started = self._start_warm(commands, envs, logs, numa_options)
            if started is None:
                started = _start_cold(commands, envs, logs, numa_options)
                self._have_parent()
            logs.show()
        except BaseException:
            logs.close()
            raise
        return started

    def _start_warm(
        self,
        commands: Mapping[int, list[str]],
        envs: Mapping[int, Mapping[str, str]],
        logs: Logs,
        numa_options: Any,
    ) -> StartedWorkers | None:
        """None if they have to start cold."""
        if self._parent is None:
            return None
        requests, here = {}, devices_here() if numa_options is not None else []
        try:
            for rank, command in commands.items():
                environment = {**os.environ, **envs[rank]}
                requests[rank] = Request(
                    Script.of(command),
                    environment,
                    logs.streams(rank),
                    processors=_processors(index_of(environment, here, rank), numa_options),
                    note=str(self._note) if self._note is not None else "",
                )
            forked = self._parent.fork(requests)
        except ColdStart as cold:
            if self._preload is not None and requests:
                self._preload = self._preload._replace(environment=_shared(requests[0].environment))
            self._go_cold(cold)
            return None
        started = StartedWorkers(forked.pids, [], logs, warm=True)
        forked.go()
        return started


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    """What all workers share of one worker's environment; the rest comes from this process."""
    own = {name for name in environment if may_differ(name)}
    rest = {name: value for name, value in environment.items() if name not in own}
    return {**{name: os.environ[name] for name in own if name in os.environ}, **rest}


class _Handler(SubprocessHandler):
    """torch's handler, with descriptors that are already open instead of files that it opens."""

    def __init__(self, streams: Mapping[int, int], **others: Any) -> None:
        self._streams = streams
        super().__init__(**others)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        out, err = self._streams.get(1), self._streams.get(2)
        return subprocess.Popen(args, env=env, stdout=out, stderr=err, start_new_session=True)


def _processors(index: int, numa_options: Any) -> list[int]:
    """The processors near this device, to which torch would have `numactl` bind its worker, if asked to."""
    if numa_options is None:
        return []
    try:
        found = processors_near(index, numa_options)
    except AttributeError as error:
        raise ColdStart("this torch binds workers to NUMA nodes in a way of its own", lasting=True) from error
    except Exception as error:  # a cold start by torch's own code reports whatever is wrong
        raise ColdStart(f"the processors near device {index} are not known: {error}") from error
    if not found:
        raise ColdStart(f"there are no processors near device {index}")
    return found


def _start_cold(
    commands: Mapping[int, list[str]], envs: Mapping[int, dict[str, str]], logs: Logs, numa_options: Any
) -> StartedWorkers:
    handlers: dict[int, SubprocessHandler] = {}
    here = devices_here() if numa_options is not None else []
    try:
        for rank, command in commands.items():
            program, *arguments = guarded(command)
            handlers[rank] = _Handler(
                logs.streams(rank),
                entrypoint=program,
                args=tuple(arguments),
                env=envs[rank],
                stdout=None,
                stderr=None,
                # Used only to choose the processors, which should be near the rank's device.
                local_rank_id=index_of(envs[rank], here, rank),
                numa_options=numa_options,
            )
    except BaseException:
        for handler in handlers.values():
            handler.close(signal.SIGKILL)
            handler.proc.wait(REAP)
        raise
    pids = {rank: handler.proc.pid for rank, handler in handlers.items()}
    return StartedWorkers(pids, list(handlers.values()), logs, warm=False)


LAST = 16 * 1024
"""Bytes of a rank's standard error that are kept: an abort writes its stack after what it has to say."""
MOST_WAITING = 64 * 1024 * 1024
"""Bytes of a rank's output that may wait for the reader of our standard error."""
PAUSE = 0.05
"""Seconds between two looks at what was written."""
PARTING = 5.0
"""Seconds at the end for the reader of our standard error to take some more of what is left."""
AT_ONCE = 4096
"""Bytes that a pipe takes without blocking if it takes any."""
FREED = 1024 * 1024
"""Bytes that are freed at a time."""
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, which wants FALLOC_FL_KEEP_SIZE


class Logs:
    """Where the output of an attempt's workers goes, and which part of it is shown here."""

    def __init__(
        self,
        name: str,
        destinations: LogsDest,
        prefixes: dict[int, str] | None,
        stdout_filters: Sequence[str] | None,
        stderr_filters: Sequence[str] | None,
    ) -> None:
        self.destinations = destinations
        self._tails = [
            TailLog(name, destinations.tee_stdouts, sys.stdout, prefixes),
            TailLog(name, destinations.tee_stderrs, sys.stderr, prefixes),
        ]
        self._files: list[TextIO] = []
        self._handed: list[TextIO] = []
        self._streams: dict[int, dict[int, int]] = {}
        self._caught: dict[int, _Caught] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        for filters, tees, path in (
            (stdout_filters, destinations.tee_stdouts, getattr(destinations, "filtered_stdout", "")),
            (stderr_filters, destinations.tee_stderrs, getattr(destinations, "filtered_stderr", "")),
        ):
            if filters:
                file = Path(path).open("w", errors="replace", buffering=1)  # noqa: SIM115 - closed in close()
                self._files.append(file)
                self._tails.append(TailLog(name, tees, file, prefixes, log_line_filter=_any_of(filters)))

    def streams(self, local_rank: int) -> dict[int, int]:
        """The descriptors that a worker's standard streams become, by number; the others are inherited."""
        if local_rank not in self._streams:
            self._streams[local_rank] = self._open(local_rank)
        return self._streams[local_rank]

    def _open(self, local_rank: int) -> dict[int, int]:
        paths = {1: self.destinations.stdouts[local_rank], 2: self.destinations.stderrs[local_rank]}
        found = {}
        for number, path in paths.items():
            if path and not (number == 2 and path == os.devnull):
                file = Path(path).open("w")  # noqa: SIM115 - closed when the workers have it
                self._handed.append(file)
                found[number] = file.fileno()
        if 2 not in found:
            caught = _catch(local_rank, show=paths[2] != os.devnull)
            if caught is None and paths[2]:
                file = Path(paths[2]).open("w")  # noqa: SIM115 - as above
                self._handed.append(file)
                found[2] = file.fileno()
            elif caught is not None:
                self._caught[local_rank] = caught
                found[2] = caught.fd
                if 1 not in found and caught.shown and _same_place(1, 2):
                    found[1] = caught.fd  # in order with standard error
        return found

    def last_lines(self, local_rank: int) -> str:
        """The end of what a worker wrote to its standard error, as far as that is known here."""
        caught = self._caught.get(local_rank)
        if caught is not None:
            return caught.last().decode(errors="replace")
        path = self.destinations.stderrs[local_rank]
        if not path:
            return ""
        with contextlib.suppress(OSError), Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST))
            return file.read(LAST).decode(errors="replace")
        return ""

    def show(self) -> None:
        """The workers have their streams: show what they write, from now on until `close`."""
        for file in self._handed:
            file.close()
        for tail in self._tails:
            tail.start()
        self._begin()

    def _begin(self) -> None:
        if self._caught:
            self._closing.clear()
            thread = threading.Thread(target=self._hand_on, name="holdfast-output", daemon=True)
            thread.start()
            self._thread = thread  # not before: a thread that did not start cannot be joined

    def _hand_on(self) -> None:
        while not self._closing.wait(PAUSE):
            while self._hand_on_all() and not self._closing.is_set():
                self._await_reader()

    def _hand_on_all(self) -> bool:
        """Pass on what can be; returns whether anything is left of any of them."""
        left = [caught.hand_on() for caught in self._caught.values()]
        return any(left)

    def _await_reader(self) -> None:
        """Wait, for a moment at most, until the reader of our standard error takes more."""
        next(caught for caught in self._caught.values() if caught.shown).await_reader(PAUSE)

    def _pause(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """The workers are gone: show what is left of their output, as long as somebody takes it.

        The output of what they left running (a writer that finishes a save) is shown until `finish`.
        """
        for tail in self._tails:
            tail.stop()
        for file in [*self._files, *self._handed]:
            file.close()
        self._pause()
        before, deadline = -1, time.monotonic() + PARTING
        while self._hand_on_all() and time.monotonic() < deadline:
            done = sum(caught.done for caught in self._caught.values())
            if done != before:
                before, deadline = done, time.monotonic() + PARTING
            self._await_reader()
        with contextlib.suppress(RuntimeError):  # no room for a thread: the rest is shown at the end
            self._begin()

    def finish(self) -> None:
        """Show nothing more. A second call does nothing."""
        self._pause()
        for caught in self._caught.values():
            caught.hand_on()
            caught.close()
        self._caught = {}


def _any_of(needles: Sequence[str]) -> Callable[[str], bool]:
    return lambda line: any(needle in line for needle in needles)


class _Caught:
    """What one worker writes, held in memory on its way to our own standard error."""

    def __init__(self, local_rank: int, fd: int, sink: int | None) -> None:
        """`sink`: where it is passed on to; None for nowhere."""
        self.fd = fd
        self.shown = sink is not None
        self._rank = local_rank
        self._sink = sink
        self.done = 0
        """Bytes that were passed on, or left out."""
        self._freed = self._omitted = 0
        self._last = b""

    def hand_on(self) -> bool:
        """Pass on what can be written without waiting. True if some is left."""
        if self.fd < 0:
            return False
        size = os.fstat(self.fd).st_size
        if size < self.done:
            self.done = self._freed = 0  # somebody reopened and emptied it
        if self._sink is None:
            self.done = size
        while self.done < size and _takes(self._sink):
            self._tell_omitted()
            data = os.pread(self.fd, min(AT_ONCE, size - self.done), self.done)
            if not data:
                break
            written = self._write(data)
            self.done += written
            if not written:
                break
        if size - self.done > MOST_WAITING:
            self._leave_out(size - self.done - MOST_WAITING // 2)
        self._free()
        return self.done < size

    def await_reader(self, timeout: float) -> None:
        _takes(self._sink, timeout)

    def _write(self, data: bytes) -> int:
        """Returns how much of it is dealt with: all of it if nobody will ever take it."""
        try:
            return os.write(self._sink, data) if self._sink is not None else len(data)
        except BlockingIOError:
            return 0
        except OSError:  # a full disk, a reader that is gone: not the worker's affair
            return len(data)

    def _leave_out(self, count: int) -> None:
        self.done += count
        self._omitted += count

    def _tell_omitted(self) -> None:
        """Say what was left out, as soon as somebody takes output again, and where it is missing."""
        if self._omitted:
            count, self._omitted = self._omitted, 0
            told = f"{count} bytes that local rank {self._rank} wrote are left out: nobody took them"
            self._write(f"\nholdfast: {told}\n".encode())

    def _free(self) -> None:
        """Free the memory of what was passed on, except for the last of it."""
        end = (self.done - LAST) // FREED * FREED
        if end > self._freed:
            libc = ctypes.CDLL(None, use_errno=True)
            begin, length = ctypes.c_int64(self._freed), ctypes.c_int64(end - self._freed)
            libc.fallocate(self.fd, PUNCH_HOLE, begin, length)
            self._freed = end

    def last(self) -> bytes:
        if self.fd < 0:
            return self._last
        size = os.fstat(self.fd).st_size
        return os.pread(self.fd, LAST, max(0, size - LAST))

    def close(self) -> None:
        """Let go of the file, which workers that were left keep. A second call does nothing."""
        if self.fd < 0:
            return
        self._last = self.last()
        os.close(self.fd)
        self.fd = -1
        if self._sink is not None:
            os.close(self._sink)


def _catch(local_rank: int, *, show: bool) -> _Caught | None:
    """Catch a worker's standard error; None if that would do harm, or cannot be done."""
    try:
        limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
        if (show and os.isatty(2)) or limited:  # the file grows, though what was passed on takes no memory
            return None
        sink = os.dup(2) if show else None
    except OSError:  # there is no standard error
        return None
    try:
        fd = os.memfd_create(f"holdfast-stderr-{local_rank}")
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    except OSError:
        if sink is not None:
            os.close(sink)
        return None
    return _Caught(local_rank, fd, sink)


def _same_place(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def _takes(sink: int | None, timeout: float = 0.0) -> bool:
    """Whether, within the timeout, bytes can be written without waiting, or writing would fail at once."""
    if sink is None:
        return False
    poll = select.poll()
    poll.register(sink, select.POLLOUT)
    return bool(poll.poll(1000 * timeout))
