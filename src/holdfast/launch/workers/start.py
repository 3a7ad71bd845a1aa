"""Starts the workers of an attempt on this node: forked from the preloaded parent, or cold.

torch's agent computes ranks, environments and arguments and would then call `start_processes`; this takes
that call's place. What they write is output.py's affair. Workers are forked only when that is known to be as
good as a cold start; otherwise they start cold, and the reason is said once.

Guarantee: either all workers of an attempt are forked or all start cold, and each is a child of this process
that leads a session and a process group of its own and dies with this process. A forked worker whose script
turns out to need a new interpreter becomes one by itself; the attempts after that start cold.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec
from torch.distributed.elastic.multiprocessing.api import LogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from holdfast.base import processors_near
from holdfast.cluster import devices_here, index_of
from holdfast.launch.workers.forked_worker import may_differ, processors_matter
from holdfast.launch.workers.output import Logs
from holdfast.launch.workers.preload import REPLACEMENTS, ColdStart, Preload, PreloadedParent, Request, Script
from holdfast.policy import Member, ranks_of
from holdfast.process import guarded

# What the agent needs of torch elastic's own parts, and where it works around them.


def make_workers(members: Sequence[Member], place: int) -> list[Worker]:
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
    that a node which joins later waits for it in vain. The variable must not reach the workers.
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
"""Attempts before the present one of which it is still shown what their processes write that were left."""
REAP = 10.0
"""Seconds for killed workers to be reaped."""


class Started:
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
        """By local rank."""
        return dict(self._pids)

    def last_lines(self, local_rank: int) -> str:
        """What a worker wrote last to its standard error, as far as that is caught."""
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

        `notes`: a directory for what workers say of their start.
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
        """A child of this process that is no worker and no orphan."""
        return self._parent.pid if self._parent is not None else None

    # -- the parent -----------------------------------------------------------------------------------------

    def expect(self, command: Sequence[str], *, numa: bool = False) -> None:
        """Workers will run this command with this process's environment: have a parent that fits."""
        if not self._enabled:
            return
        try:
            if numa and processors_matter(os.environ):
                raise ColdStart(
                    "workers are bound to NUMA nodes, and OMP_NUM_THREADS is not set: torch counts the "
                    "processors as it is imported",
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
        """Wait until the parent has imported; what goes wrong is said and makes the next start cold."""
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
                self._say_once(f"{how}; another one gets ready for the next restart")

    def close(self) -> None:
        self._drop()
        self._finish_outputs(0)

    def _finish_outputs(self, keep: int) -> None:
        while len(self._outputs) > keep:
            self._outputs.pop(0).finish()

    def _read_note(self) -> None:
        """A worker has found that its script needs a new interpreter: then all of them do."""
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
        self._say_once(f"workers start cold (slower, and otherwise the same): {cold}")

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
    ) -> Started:
        """As torch's start_processes, whose parameters these are."""
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
    ) -> Started | None:
        """None: they have to start cold."""
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
        started = Started(forked.pids, [], logs, warm=True)
        forked.go()
        return started


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    """What all workers have of one worker's environment; what is its own comes from this process."""
    own = {name for name in environment if may_differ(name)}
    rest = {name: value for name, value in environment.items() if name not in own}
    return {**{name: os.environ[name] for name in own if name in os.environ}, **rest}


class _Handler(SubprocessHandler):
    """torch's, with descriptors that are open already in place of files that it opens."""

    def __init__(self, streams: Mapping[int, int], **others: Any) -> None:
        self._streams = streams
        super().__init__(**others)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        out, err = self._streams.get(1), self._streams.get(2)
        return subprocess.Popen(args, env=env, stdout=out, stderr=err, start_new_session=True)


def _processors(index: int, numa_options: Any) -> list[int]:
    """Those near this device, to which torch would have `numactl` bind its worker; none if not asked for."""
    if numa_options is None:
        return []
    try:
        found = processors_near(index, numa_options)
    except AttributeError as error:
        raise ColdStart("this torch binds workers to NUMA nodes in a way of its own", lasting=True) from error
    except Exception as error:  # whatever torch's own start makes of it, it is told there
        raise ColdStart(f"the processors near device {index} are not known: {error}") from error
    if not found:
        raise ColdStart(f"there are no processors near device {index}")
    return found


def _start_cold(
    commands: Mapping[int, list[str]], envs: Mapping[int, dict[str, str]], logs: Logs, numa_options: Any
) -> Started:
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
                # Used for the choice of processors only; they are to be near the device that the rank has.
                local_rank_id=index_of(envs[rank], here, rank),
                numa_options=numa_options,
            )
    except BaseException:
        for handler in handlers.values():
            handler.close(signal.SIGKILL)
            handler.proc.wait(REAP)
        raise
    pids = {rank: handler.proc.pid for rank, handler in handlers.items()}
    return Started(pids, list(handlers.values()), logs, warm=False)
