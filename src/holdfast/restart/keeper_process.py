"""The keeper of a node without the launcher: a process of its own, started by local rank 0.

Guarantees: it survives its starter, and signals sent to its starter's session or process group; and it ends
within seconds once all its members are gone. The keeper on rank 0's node conducts, and hosts the store unless
somebody else does. For that it stays until the other nodes' keepers have left too, but after the conductor
has finished no longer than heartbeat_timeout.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.base import remove
from holdfast.config import InProcessSettings
from holdfast.errors import ExitCode, HandedOverError, HoldfastError
from holdfast.policy import STAYS, Action, PastAttempt, after, decide, failed_iteration, highest_step
from holdfast.process import Companion, Gone, Packets, leave_stopping_to_the_trainer, own_child
from holdfast.record import HostedStore, connect
from holdfast.restart.conductor import Conductor, Denied, Granted, Restart
from holdfast.restart.keeper import SOCKET, Keeper, log_path, stamped
from holdfast.restart.messages import KEEPS, LEFT

if TYPE_CHECKING:
    from torch.distributed import Store


# The history of a job without the launcher: in memory, iteration by iteration.
#
# With `holdfast run` the run's durable history takes its place; the policy is the same.


class Memory:
    """Authorises restarts by what it remembers of earlier ones."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._launch = uuid.uuid4().hex
        self._history: list[PastAttempt] = []
        self._began = time.monotonic()

    def authorise(self, asked: Restart) -> Granted | Denied:
        now = time.monotonic()
        failed = failed_iteration(
            asked.iteration,
            asked.faults,
            launch=self._launch,
            order=asked.order,
            nodes=sorted({asked.nodes[member] for member in asked.order if member in asked.nodes}),
            committed=max(asked.committed, highest_step(self._history)),
            seconds=now - self._began,
            at=time.time(),
        )
        decision = decide(self._history, failed, asked.faults, self._max_restarts)
        self._history.append(after(failed, decision))
        self._began = now
        if decision.action in STAYS:
            return Granted(reason=decision.reason, decision=decision)
        stops = decision.action is Action.STOP
        return Denied(
            reason=decision.reason if stops else f"{decision.action}: {decision.reason}",
            exit_code=decision.exit_code if stops else int(ExitCode.HANDED_OVER),
            decision=decision,
        )


MODULE = "holdfast.restart.keeper_process"
DIRECTORY = "holdfast-keeper-"
STALE = 60.0
"""Seconds after which a directory on whose socket nobody listens counts as left behind."""
LOOK = 0.1
STARTING = 120.0
"""Seconds for it to start: importing torch on many nodes from a network file system can take that long."""
REAPED = 10.0
"""Seconds for the process that forked it to end, once it has answered."""
PORT_PATIENCE = 10.0
"""Seconds for the store's port to become free."""
LINGER = 5.0
"""Seconds for which a keeper waits for members when it has none (any more)."""


class Duties(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper process is started for."""

    node: str
    members: int
    """How many, on all nodes."""
    host: str
    port: int
    """The store's; 0 for any free one."""
    prefix: str
    """The prefix of all keys."""
    hosts: bool
    conducts: bool
    starter: int
    """The member that starts it."""
    pid: int
    """Its process."""
    max_restarts: int
    chosen: InProcessSettings
    first_barrier: float = 0.0
    """Seconds that members may take to reach the first barrier, if more than barrier_timeout."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a keeper process to its starter."""

    path: str = ""
    port: int = 0
    problem: str = ""
    """Why it could not start."""


def start(duties: Duties) -> Started:
    """Start a keeper process, and wait until it listens. Raises HandedOverError."""
    child: Companion[Packets[Started]] = Companion(
        lambda descriptor: _spawn(duties, descriptor), Packets.pair(Started)
    )
    patience = STARTING + duties.chosen.barrier_timeout
    try:
        answer = child.line.receive(patience)
    except Gone as error:
        answer = Started(problem=f"it ended without an answer: {error}")
    child.hang_up()  # if it starts after all, it finds nobody to answer, and ends
    child.wait(0.0 if answer is None else REAPED)  # the keeper detaches: the child ends before the answer
    if answer is None:
        raise HandedOverError(f"the keeper process of {duties.node} did not start within {patience:g} s")
    if answer.problem:
        raise HandedOverError(f"the keeper process of {duties.node} could not start: {answer.problem}")
    return answer


def _spawn(duties: Duties, descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        own_child(MODULE, msgspec.json.encode(duties).decode(), str(descriptor)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def sweep(path: Path) -> None:
    """Remove what a keeper process that was killed could not remove itself."""
    try:
        Packets.connect(path, None, 0.0).close()  # anybody may have left a socket that takes no more
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            remove(path.parent.parent, path.parent.name)
    except OSError:
        pass  # it is already removed, or takes no more connections just now


def sweep_stale() -> None:
    """The same for keepers whose members were killed with them; a keeper that is just starting is spared."""
    for path in Path(tempfile.gettempdir()).glob(f"{DIRECTORY}*/{SOCKET}"):
        with contextlib.suppress(OSError):  # removed meanwhile
            info = path.parent.lstat()
            ours = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()
            if ours and time.time() - info.st_mtime > STALE:
                sweep(path)


# --- the process -------------------------------------------------------------------------------------------


def _log(duties: Duties) -> Callable[[str], None]:
    """How this process says what it sees: in its log, or not at all. Its standard error goes there too."""
    path = log_path(duties.chosen, duties.node)
    target = os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 2)
    os.close(target)

    def tell(message: str) -> None:
        print(stamped(message), file=sys.stderr, flush=True)

    return tell


Answer = Callable[[Started], object]


def _serve(duties: Duties, directory: Path, tell: Callable[[str], None], answer: Answer) -> None:
    from torch.distributed import PrefixStore

    hosted: HostedStore | None = None
    port = duties.port
    try:
        if duties.hosts:
            hosted = _host(duties)
            port = hosted.port
        patience = duties.chosen.barrier_timeout

        def store() -> Store:
            return PrefixStore(duties.prefix, connect(duties.host, port, patience))

        everyone = {**dict.fromkeys(range(duties.members)), duties.starter: duties.pid}
        keeper = Keeper(store(), duties.node, everyone, duties.chosen, directory, tell=tell)
    except (OSError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        what = f"{'hosting' if duties.hosts else 'reaching'} the store at {duties.host}:{port}: {first_line}"
        answer(Started(problem=what))
        return
    conductor: Conductor | None = None
    try:
        if duties.conducts:
            memory = Memory(duties.max_restarts)
            conductor = Conductor(
                store(),
                {},
                duties.members,
                duties.chosen,
                memory.authorise,
                tell,
                first_barrier=duties.first_barrier,
            )
        answer(Started(path=keeper.path, port=port))
        _await_members(keeper)
        if conductor is not None:
            _await_others(keeper, conductor, store(), duties.chosen.heartbeat_timeout)
    finally:
        if conductor is not None:
            conductor.close()
        keeper.close()
        if hosted is not None:
            hosted.close()


def _host(duties: Duties) -> HostedStore:
    """Host the store. The keeper of a job that has just ended may hold its port for a moment longer."""
    deadline = time.monotonic() + PORT_PATIENCE
    while True:
        try:
            return HostedStore(duties.host, duties.port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(LOOK)


def _await_members(keeper: Keeper) -> None:
    """Wait until no member of this node needs a keeper any more."""
    alone = 0.0
    while keeper.watching or not keeper.planned:
        now = time.monotonic()
        alone = 0.0 if keeper.watching else alone or now
        if alone and now - alone > LINGER:
            return
        time.sleep(LOOK)


def _await_others(keeper: Keeper, conductor: Conductor, store: Store, patience: float) -> None:
    """Wait until the members of other nodes need neither store nor conductor any more."""
    over = 0.0
    while not keeper.lost:
        now = time.monotonic()
        if conductor.finished:
            over = over or now
            if now - over > patience or store.add(LEFT, 0) >= store.add(KEEPS, 0) - 1:
                return
        time.sleep(LOOK)


def main() -> int:
    """Detach from whoever started this, and keep."""
    leave_stopping_to_the_trainer()  # here: to the members
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    if os.fork():
        os._exit(0)  # the starter reaps this process only; it would have to reap the keeper as its own child
    duties = msgspec.json.decode(sys.argv[1], type=Duties)
    line: Packets[None] = Packets.at(int(sys.argv[2]), None)
    sweep_stale()
    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY))
    try:
        _serve(duties, directory, _log(duties), line.send)
    except (OSError, HoldfastError) as error:
        with contextlib.suppress(Gone):
            line.send(Started(problem=str(error)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs in a store that does not answer must not keep this process alive
