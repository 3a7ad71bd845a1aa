"""A liveness ping: do all ranks still answer, and if not, which ones do not?

Guarantee: `ping` returns when every rank has answered, or raises PingFailedError with the ranks that did not,
within its timeout plus three seconds (and 1.5 ms for each rank): one in which a late call may still say who
is missing, and two, after a failed reduction, to learn where it failed and to take it back.

It never waits in a collective of training: the ranks first leave marks in the store, and only when all have
done so is the backend tried, with a reduction of one number in a separate group. So a lost rank is found
without a collective that would hang or bring its group down.

Usable alone:

```python
ping = holdfast.LivenessPing(timeout=10.0)   # on every rank, after init_process_group
ping()                                       # on every rank, as often as wanted
```
Each rank's mark is one key, which holds the number of its last ping, so the store does not grow with pings
that everybody answers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import msgspec

from holdfast.base import Bounded
from holdfast.errors import PingFailedError, UsageError

log = logging.getLogger("holdfast.health")

POLL = 0.002
SLOWEST_POLL = 0.05
GROUP_TIMEOUT = timedelta(minutes=30)
"""Timeout of the ping's own group: far beyond a ping's, because NCCL's watchdog then ends the process."""

FIRST = 300.0
"""Seconds for a communicator to be made."""
NAMING = 2000
"""How many marks are looked at per second, at least, to name who is missing."""
GRACE = 1.0
"""Seconds beyond its deadline that a call has to say what it knows."""
AFTERWARDS = 2.0
"""Seconds to learn where a reduction failed and to take it back."""
CLOSING = 10.0
"""Seconds for the ping's group to be given back."""
LAST = 0.5
"""Seconds that rank 0 stays for the others to learn who is missing."""


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """A ping that everybody answered."""

    number: int
    seconds: float
    waited: float
    """Seconds until all marks were there: how far apart the ranks were."""
    backend: str
    """The backend of the reduction; empty if there was none."""


class LivenessPing:
    """Belongs to one rank. Every rank makes as many pings as the others, in the same order."""

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        backend: str | None = "",
        device: Any = None,
    ) -> None:
        """Without arguments, it uses the default group: its store, its ranks and its backend.

        With `store`, `rank` and `world_size` it needs no group. `backend=None` leaves the reduction out;
        otherwise all ranks must construct it together.
        """
        if timeout <= 0:
            raise UsageError(f"the timeout of a liveness ping must be above 0, not {timeout:g}")
        self.timeout = timeout
        self._number = 0
        self._group: Any = None
        self._backend = ""
        self._device = device
        if store is not None and (rank is None or world_size is None):
            raise UsageError("a ping with a store of its own needs rank and world_size, too")
        if store is None:
            store, rank, world_size = _default_store()
            if world_size > 1 and backend is not None:
                self._make_group(backend)
        assert rank is not None
        assert world_size is not None
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._connect()

    def _make_group(self, backend: str) -> None:
        import torch
        import torch.distributed as dist

        name, cuda = str(backend or dist.get_backend()), torch.cuda.is_available()
        if ":" in name or name == "undefined":  # one backend per kind of device: the ping needs a single one
            name = "nccl" if cuda else "gloo"
        self._group = dist.new_group(backend=name, timeout=GROUP_TIMEOUT)
        self._backend = name
        if self._device is None:
            on_host = name in ("gloo", "mpi") or not cuda
            self._device = "cpu" if on_host else torch.device("cuda", torch.cuda.current_device())

    def _connect(self) -> None:
        """Make the communicator now: the first collective does that, and takes longer than a ping may."""
        if self._backend in ("", "gloo"):
            return
        began = time.monotonic()
        problem = self._bounded(lambda: self._reduce(began + FIRST), began + FIRST)
        if problem:
            raise self._failed_backend(problem, began)

    def __call__(self) -> Pong:
        return self.ping()

    def ping(self) -> Pong:
        """Call it on all ranks. Returns when all have answered; PingFailedError names those that have not."""
        began = time.monotonic()
        self._number += 1
        if self.world_size == 1:
            return Pong(number=self._number, seconds=0.0, waited=0.0, backend="")
        deadline = began + self.timeout
        seen: set[int] = set()
        marks = deadline - min(1.0, 0.1 * self.timeout)  # the rest is for naming who is missing
        problem = self._bounded(lambda: self._await_marks(marks, seen), deadline)
        if problem or len(seen) < self.world_size:
            raise self._failed(seen, began, problem)
        waited = time.monotonic() - began
        if self._group is not None:
            problem = self._bounded(lambda: self._reduce(deadline), deadline)
            if problem:
                raise self._failed_backend(problem, began)
        return Pong(
            number=self._number,
            seconds=time.monotonic() - began,
            waited=waited,
            backend=self._backend,
        )

    # --- marks in the store ---------------------------------------------------------------------------------

    def _await_marks(self, deadline: float, seen: set[int]) -> None:
        """Leave this rank's mark, and wait until all marks are there, or put those that are into `seen`.

        Whoever arrives last says so for all: so the others need one look each, and not one for every rank.
        """
        store, number = self._store, self._number
        store.set(f"mark/{self.rank}", str(number))
        arrived = int(store.add("count", 1))
        complete = f"all/{number}"
        if self.rank == 0 and number > 2:
            # Whoever is in this ping has left the one before; nobody reads the key of the one before that.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(f"all/{number - 2}")
        if arrived >= number * self.world_size:
            store.set(complete, "1")
        if self._poll(lambda: store.check([complete]), deadline):
            seen |= set(range(self.world_size))
        else:
            seen |= self._name(number) | {self.rank}

    def _name(self, number: int) -> set[int]:
        """The ranks that have reached this ping. One rank looks at all marks; the others read what it found.

        Rank 0 may host the store: it leaves last, or nobody else could learn who is missing.
        """
        store, told = self._store, f"found/{number}"
        chosen = bytes(store.compare_set(f"looks/{number}", "", str(self.rank))).decode()
        grace = 0.2 + self.world_size / NAMING
        found: set[int] = set()
        if chosen != str(self.rank) and self._poll(lambda: store.check([told]), time.monotonic() + grace):
            found = {int(rank) for rank in bytes(store.get(told)).decode().split(",") if rank}
        found = found or self._marked("mark")
        if chosen == str(self.rank):
            store.set(told, ",".join(map(str, sorted(found))))
        store.add(f"told/{number}", 1)
        if self.rank == 0:
            wanted = len(found | {0})
            self._poll(lambda: int(store.add(f"told/{number}", 0)) >= wanted, time.monotonic() + LAST)
        return found

    @staticmethod
    def _poll(condition: Callable[[], bool], deadline: float) -> bool:
        pause = POLL
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(1.5 * pause, SLOWEST_POLL)
        return True

    def _marked(self, kind: str) -> set[int]:
        """The ranks that have reached this ping, by their marks."""
        found = set()
        for rank in range(self.world_size):
            key = f"{kind}/{rank}"
            if self._store.check([key]) and int(self._store.get(key)) >= self._number:
                found.add(rank)
        return found

    # --- the backend ----------------------------------------------------------------------------------------

    def _reduce(self, deadline: float) -> None:
        """Reduce one number in the ping's own group. It is polled, not waited for: a wait may never end."""
        import torch
        import torch.distributed as dist

        with torch.no_grad():
            if self._device != "cpu":
                torch.cuda.set_device(self._device)  # this thread may not have one yet
            one = torch.ones(1, dtype=torch.int32, device=self._device)
            work = dist.all_reduce(one, group=self._group, async_op=True)
            assert work is not None
            pause = POLL / 10
            while not work.is_completed():
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"the reduction over {self._backend} did not end in time")
                time.sleep(pause)
                pause = min(1.5 * pause, SLOWEST_POLL)
            work.wait()
            total = int(one.item())
        if total != self.world_size:
            raise RuntimeError(f"{self.world_size} ranks added 1 each, and the sum is {total}")
        self._store.set(f"reduced/{self.rank}", str(self._number))

    def _bounded(self, call: Callable[[], None], deadline: float) -> str:
        """Call it in a thread that may be left behind. Returns why it failed, or nothing.

        A store whose host is stopped never answers some calls, and a sick device never ends its work.
        """
        called = Bounded(call, "ping")
        grace = GRACE + 2 * self.world_size / NAMING
        if not called.ended(max(0.0, deadline - time.monotonic()) + grace):
            return "no answer at all"
        try:
            called.result()
        except Exception as error:  # noqa: BLE001 - whoever pinged gets it, whatever it is
            return str(error).partition("\n")[0][:300] or type(error).__name__
        return ""

    # --- failures -------------------------------------------------------------------------------------------

    def _failed(self, seen: set[int], began: float, problem: str) -> PingFailedError:
        missing = [rank for rank in range(self.world_size) if rank not in seen] if seen else []
        took = time.monotonic() - began
        if problem:
            text = (
                f"ping {self._number} failed after {took:.1f} s: the store does not answer ({problem}). Its "
                "host, rank 0 unless a launcher hosts it, is gone, stopped or cut off"
            )
        else:
            text = (
                f"{_ranks(missing)} did not answer ping {self._number} within {self.timeout:g} s; the other "
                f"{len(seen)} of {self.world_size} ranks did. Look for what ended or stopped "
                f"{'it' if len(missing) == 1 else 'them'}, or raise health.nccl_health_check_timeout if "
                "ranks may be that far apart"
            )
        return _with(PingFailedError(text), missing, took)

    def _failed_backend(self, problem: str, began: float) -> PingFailedError:
        """All ranks are alive, but the backend between them does not work."""
        took = time.monotonic() - began
        looking = Bounded(lambda: self._marked("reduced"), "ping")
        missing: list[int] = []
        with contextlib.suppress(Exception):  # the store may be what failed
            if looking.ended(AFTERWARDS / 2 + self.world_size / NAMING):
                missing = sorted(set(range(self.world_size)) - looking.result())
        self._abort(AFTERWARDS / 2)
        text = (
            f"all {self.world_size} ranks answered ping {self._number} through the store, but a reduction "
            f"over {self._backend} failed after {took:.1f} s ({problem}); it did not end on "
            f"{_ranks(missing)}. A rank died or stopped in between, or the network or a device of theirs is "
            "ill: run `holdfast doctor`"
        )
        return _with(PingFailedError(text), missing, took)

    def _abort(self, seconds: float) -> None:
        """Abort the hanging reduction, so that it does not hold up this process when it ends."""
        abort = getattr(self._group, "abort", None)
        if self._backend == "nccl" and abort is not None:
            Bounded(abort, "ping-abort").ended(seconds)

    def close(self) -> None:
        """Give the ping's group back, on all ranks alike; waits for that no longer than CLOSING."""
        if self._group is None:
            return
        import torch.distributed as dist

        group, self._group = self._group, None
        if not dist.is_initialized():
            return
        closing = Bounded(lambda: dist.destroy_process_group(group), "ping-close")
        if closing.ended(CLOSING):
            closing.result()
        else:
            log.warning("holdfast: the ping's group was not given back within %g s; going on", CLOSING)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def _default_store() -> tuple[Any, int, int]:
    """The default group's store, through a client of our own if there can be one."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore

    from holdfast.base import default_store

    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "a liveness ping needs torch.distributed.init_process_group first, or a store with rank and "
            "world_size"
        )
    default = default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    number = int(default.add(f"holdfast/pings/{rank}", 1))  # all ranks make their pings in the same order
    return PrefixStore(f"holdfast/ping/{number}", own_client(default)), rank, world


def own_client(store: Any) -> Any:
    """A second client of the given store: a call that hangs blocks its client for everybody else."""
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    try:
        return clone()
    except (RuntimeError, NotImplementedError):
        return store


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "an unknown rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _with(error: PingFailedError, missing: list[int], seconds: float) -> PingFailedError:
    error.missing, error.seconds = missing, seconds
    return error
