"""One process in a restartable job: the function, over and over, until all have finished or none goes on.

Guarantees: the function runs in the main thread, on all active members under one plan or on none; after a
fault anywhere every member leaves it, and then is at the next barrier, ended by its keeper, or gone; and
every wait in here has a deadline or ends with the iteration, after which this process ends with a documented
code rather than choose for itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from holdfast.account import incident_text
from holdfast.base import RestartRequested, Scope, entered
from holdfast.config import InProcessSettings, Settings, parse_signals
from holdfast.errors import ExitCode, HandedOverError, HoldfastError, Stopped
from holdfast.journal import Event
from holdfast.journal.events import Account, FunctionRestarted
from holdfast.policy import (
    Fault,
    FaultKind,
    Raised,
    collective_limit,
    first_barrier,
    first_step_limit,
    is_symptom,
)
from holdfast.process import watch
from holdfast.record import LaunchInfo, within
from holdfast.restart.entry import Joined
from holdfast.restart.groups import GroupWatch, StoreLine, forget, limit_collectives, watch_groups
from holdfast.restart.lookout import Interruption, KeyWatch, KeyWatcher, Lookout
from holdfast.restart.messages import (
    UNREADABLE,
    End,
    EndKind,
    IterationPlan,
    Next,
    Over,
    OverKind,
    Ready,
    arrived_key,
    done_key,
    end_key,
    fault_key,
    faulted,
    plan_key,
    planned,
    ready_key,
    stepped_key,
)
from holdfast.restart.records import account_of, keep
from holdfast.train import chain_of, frames_of

if TYPE_CHECKING:
    from torch.distributed import Store


# The stages of an iteration that can be replaced, each a small function of the `Iteration`.
#
# `assign` is not among them: who is who is decided once for all members, outside them, by the function
# that `inprocess.assign` names. To do more than a stage does, combine stages: `each(init_group, mine)`.


@dataclass(kw_only=True)
class Iteration:
    """What a stage may know."""

    number: int
    member: int
    """The rank that this process was started with."""
    rank: int
    """-1 for a reserve, or if there is no rank yet."""
    world_size: int
    store: Store
    """The iteration's own part of the store, for the process group."""
    backend: str
    timeout: float
    """The process group's, in seconds; 0 for torch's own."""
    chosen: InProcessSettings
    why: str = ""
    """What ended the iteration before, or this one."""


Stage = Callable[[Iteration], object]


def each(*stages: Stage) -> Stage:
    """One stage that runs several, in this order."""

    def together(iteration: Iteration) -> None:
        for stage in stages:
            stage(iteration)

    return together


def nothing(iteration: Iteration) -> None:
    del iteration


def give_back(iteration: Iteration, value: Any) -> Any:
    """What the function returned, as it is."""
    del iteration
    return value


def init_group(iteration: Iteration) -> None:
    """Initialise torch.distributed with the iteration's ranks and keys of its own."""
    limit = timedelta(seconds=iteration.timeout) if iteration.timeout else None
    dist.init_process_group(
        iteration.backend,
        store=iteration.store,
        rank=iteration.rank,
        world_size=iteration.world_size,
        timeout=limit,
    )


def check_device(iteration: Iteration) -> None:
    """Raise if the device that this process used no longer computes: its context dies with the process."""
    del iteration
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        ones = torch.ones(64, device=torch.cuda.current_device())
        total = float(ones.sum())  # waits for the device; the keeper limits for how long
        if total != 64.0:
            raise RuntimeError(f"the device {torch.cuda.current_device()} counts 64 ones as {total}")


@dataclass(frozen=True, kw_only=True)
class Stages:
    initialize: Stage = init_group
    """Before the function; can be interrupted like the function itself."""
    abort: Stage = nothing
    """After the function was left by a fault, before the groups are torn down."""
    finalize: Stage = nothing
    """After `abort`: deals with what else the function leaves behind."""
    health_check: Stage = check_device
    """Checks whether this process can be part of another iteration; raises if not."""
    complete: Callable[[Iteration, Any], Any] = give_back
    """What the call returns on an active member, once the function has returned on all."""
    terminate: Stage = nothing
    """Before the end of a member that cannot go on here."""


def default_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


# Stop signals while no function runs: they are kept, and reported at the next barrier.
#
# Inside the function they are the function's own affair: a `Run` in there takes them.


class StopBetween:
    """Used in the main thread; does nothing if `stop.exit_signal_handler` is off."""

    def __init__(self, settings: Settings) -> None:
        chosen = settings.stop
        self._numbers = parse_signals(chosen.exit_signal) if chosen.exit_signal_handler else []
        self._before: dict[signal.Signals, Any] = {}
        self.signal = ""
        """The first one that came, by name; empty if none did."""

    def begin(self) -> None:
        for number in self._numbers:
            # The first value counts: a run that the function left behind gives its own back only after this.
            self._before.setdefault(number, signal.signal(number, self._handle))

    def close(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
            if callable(before):
                watch(number)

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """For as long as the function runs."""
        self.close()
        try:
            yield
        finally:
            self.begin()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = self.signal or signal.Signals(number).name


log = logging.getLogger("holdfast")

SLACK = 10.0
"""Seconds beyond a deadline of the conductor's, so that it gets to say so."""
STORE_TIMEOUT = 60.0
"""Seconds for one answer of the store."""
OTHERS_LOOK = 60.0
FINE = (ExitCode.OK, ExitCode.STOPPED)
"""Exit codes with which a function may end its process on purpose: that is not a fault."""
MESSAGE = 4000
STEPPED_LOOK = 1.0
STEPPED_LOOK_EACH = 0.002
"""Seconds between two looks at how many ranks have done their first step; grows with the number of ranks."""
GONE = frozenset({FaultKind.LOST, FaultKind.HARD_TIMEOUT, FaultKind.SILENT, FaultKind.LATE, FaultKind.UNFIT})
"""Faults after which a member can no longer report anything."""
STEPPED_TIMEOUT = 5.0
"""Seconds for the answer: the thread that looks has other things to watch."""

T = TypeVar("T")


class _StopCameError(Exception):
    """A stop signal came between the barrier and the function."""


@dataclass
class _Outcome:
    """How this member came out of the function."""

    value: Any = None
    error: BaseException | None = None
    initialised: bool = False
    """Whether its groups were made."""

    @property
    def done(self) -> bool:
        """Whether it did what it had to: returned, or ended its process on purpose."""
        return self.error is None or (isinstance(self.error, SystemExit) and _code(self.error) in FINE)

    @property
    def leaves(self) -> bool:
        """Whether what it raised ends this process, whatever the others do."""
        return isinstance(self.error, SystemExit | KeyboardInterrupt)


class Member:
    def __init__(
        self, joined: Joined, settings: Settings, stages: Stages, *, backend: str, timeout: float
    ) -> None:
        """`timeout`: the process group's, in seconds, if somebody gave one; 0 to choose one here."""
        assert joined.store is not None
        self._joined, self._store = joined, joined.store
        self._chosen = chosen = settings.inprocess
        self._stages = stages
        self._backend = backend
        self._own_timeout = not timeout and "nccl" not in backend
        soft, hard = chosen.soft_timeout, chosen.hard_timeout
        self._timeout = collective_limit(soft, hard) if self._own_timeout else timeout
        initial = settings.monitor.initial_rank_heartbeat_timeout
        self._first_limit = first_step_limit(initial, soft, hard)
        self._first_barrier = first_barrier(initial, chosen.barrier_timeout)
        self._uses_run = False
        """Whether a run was made in the function: if so, it does steps, and the first may take long."""
        self._counted = False
        self._next_look = 0.0
        self._max_restarts = settings.launch.max_restarts
        self._run_dir = ""
        """The directory of the last run that was made in the function."""
        self._committed = self._step = self._attempt = 0
        self._order: list[int] = []
        """The order in the last plan."""
        self._own: BaseException | None = None
        """What the function last raised here."""
        self._ended_at = time.monotonic()
        self._groups: GroupWatch | None = None
        """The groups of the iteration before, until all members have left them."""
        self._line: StoreLine | None = None
        """The line to the store from the iteration before: a new one costs a name look-up."""
        self._scope: Scope | None = None
        mine = uuid.uuid4().hex
        self._job = self._ask_store(lambda: self._store.compare_set("job", "", mine)).decode()
        self._watcher = KeyWatcher(joined.client())
        self._interruption = Interruption()
        self._between = StopBetween(settings)
        self._lookout = Lookout(
            joined.keeper_path,
            joined.member,
            os.getpid(),
            self._interruption,
            soft_timeout=self._chosen.soft_timeout,
            on_still=self._on_still,
            on_idle=self._on_idle,
            on_stepped=self._on_stepped,
        )

    def run(self, function: Callable[[], T]) -> T | None:
        """Call it until it has returned on all active members; None if this one stayed a reserve."""
        number, unfit = 0, ""
        self._between.begin()
        try:
            while True:
                plan = self._meet(number, unfit)
                self._release_groups()
                iteration = self._take_place(plan)
                events, self._order = self._events(plan, iteration.rank), plan.order
                watch = self._watcher.watch(end_key(number))
                if iteration.rank < 0:
                    outcome, end = _Outcome(), self._wait_for_others(watch, number)
                else:
                    outcome, end = self._live(iteration, function, watch, events)
                self._ended_at = time.monotonic()
                if outcome.leaves and outcome.error is not None:
                    raise outcome.error
                if end.kind is EndKind.COMPLETED:
                    return self._complete(iteration, outcome.value)
                self._own = outcome.error if _is_own(outcome.error) else None
                iteration.why = end.fault.describe() if end.fault is not None else ""
                unfit = self._settle(iteration)
                number += 1
        except BaseException:
            self._stage("terminate", lambda: self._stages.terminate(self._nowhere(number)))
            raise
        finally:
            self._between.close()
            self._lookout.close()
            self._watcher.close()
            self._interruption.close()

    # --- the barrier ----------------------------------------------------------------------------------------

    def _meet(self, number: int, unfit: str) -> IterationPlan:
        """Say that this member is here, and learn who is who; or end."""
        self._lookout.between(number)
        joined = self._joined
        ready = Ready(
            member=joined.member,
            node=joined.node,
            pid=os.getpid(),
            seconds=self._waited(),
            unfit=unfit or self._lookout.alone,
            stop=self._between.signal,
            committed=self._committed,
            attempt=self._attempt,
        )
        self._fix(ready_key(number, joined.member), ready)
        self._ask_store(lambda: self._store.add(arrived_key(number), 1))
        limit = (self._chosen.barrier_timeout if number else self._first_barrier) + self._chosen.hard_timeout
        limit += SLACK
        watch = self._watcher.watch(plan_key(number), within=limit)
        watch.wait(limit + SLACK, self._lookout.touch)
        if watch.value is None:
            why = watch.error or f"it did not come within {limit:g} s"
            self._hand_over(f"the plan for iteration {number} was not received: {why}")
        try:
            following: IterationPlan | Over = msgspec.json.decode(watch.value, type=Next)
        except UNREADABLE as error:
            self._hand_over(f"the plan for iteration {number} was overwritten by somebody else: {error}")
        if isinstance(following, Over):
            self._tell_end(following, number - 1)
            if following.kind is OverKind.STOPPED:
                raise Stopped(self._step, following.reason)
            self._hand_over(following.reason)
        if joined.member not in (*following.order, *following.reserves):
            why = unfit or "the others go on without it"
            self._hand_over(f"rank {joined.member} of {joined.node} has no part in iteration {number}: {why}")
        return following

    def _tell_end(self, over: Over, iteration: int) -> None:
        """Say why the function is not called again: one of those left says it, if no launcher does."""
        if over.kind is OverKind.STOPPED or LaunchInfo.from_environment(os.environ) is not None:
            return
        gone = {fault.member for fault in over.faults if fault.kind in GONE}
        left = next((member for member in self._order if member not in gone), None)
        if left != self._joined.member:
            return
        account = account_of(over, iteration, self._order, self._max_restarts)
        self._tell(account)
        if self._run_dir and account.attempt:
            keep(Path(self._run_dir), account)

    def _tell(self, account: Account) -> None:
        log.warning("holdfast: %s", incident_text(account, self._run_dir or "RUN_DIR"))

    def _hand_over(self, why: str) -> NoReturn:
        """End here: with the error that this member had itself, which says more, or else with the reason."""
        if self._own is not None:
            log.error("holdfast: the function is not started again in these processes: %s", why)
            raise self._own
        raise HandedOverError(
            f"{why}. The function is not started again in this process. A launcher that restarts takes over; "
            "without one, start the run again"
        )

    def _take_place(self, plan: IterationPlan) -> Iteration:
        """This member's part in a plan, which is also set in the environment for what it starts."""
        member = self._joined.member
        rank = plan.order.index(member) if member in plan.order else -1
        if rank >= 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(plan.order)))
        launched = LaunchInfo.from_environment(os.environ)
        if launched is not None and plan.launch:
            merged = {**msgspec.to_builtins(launched), **plan.launch}
            os.environ.update(msgspec.convert(merged, LaunchInfo).to_environment())
        if plan.iteration:
            what = f"calls the function again, as rank {rank} of {len(plan.order)}"
            why = plan.faults[0] if plan.faults else None
            log.warning(
                "holdfast: %s, %.3f s after it was left%s",
                what if rank >= 0 else "waits as a reserve while the others call the function again",
                self._waited(),
                f": {faulted(why, plan.iteration - 1).summary()}" if why is not None else "",
            )
        return Iteration(
            number=plan.iteration,
            member=member,
            rank=rank,
            world_size=len(plan.order),
            store=self._store,
            backend=self._backend,
            timeout=self._timeout,
            chosen=self._chosen,
            why=plan.reason,
        )

    # --- the function ---------------------------------------------------------------------------------------

    def _events(self, plan: IterationPlan, rank: int) -> list[Event]:
        """What a run in the function writes to the journal; a launcher, if there is one, writes the rest."""
        if plan.iteration == 0:
            return []
        again = FunctionRestarted(iteration=plan.iteration, rank=rank, seconds=self._waited(), at=time.time())
        if plan.launch or rank != 0:
            return [again]
        before = plan.iteration - 1
        account = account_of(plan, before, self._order, self._max_restarts)
        self._tell(account)
        return [
            *(faulted(fault, before, ended=plan.ended) for fault in plan.faults),
            *([account] if plan.ended else []),  # otherwise no attempt had begun
            planned(plan, self._order, time.time(), ended=plan.ended),
            again,
        ]

    def _waited(self) -> float:
        return round(time.monotonic() - self._ended_at, 6)

    def _live(
        self, iteration: Iteration, function: Callable[[], Any], watch: KeyWatch, events: list[Event]
    ) -> tuple[_Outcome, End]:
        scope = Scope(
            iteration=iteration.number,
            member=iteration.member,
            rank=iteration.rank,
            world_size=iteration.world_size,
            job=self._job,
        )
        scope.committed, scope.step = self._committed, self._step
        scope.events = list(events)
        scope.request = lambda why: self._give(scope, FaultKind.ASKED, why)
        scope.on_run = lambda: self._await_first_step(scope)
        scope.own_collective_timeout = self._own_timeout
        self._scope = scope
        self._counted, self._next_look = False, 0.0
        with watch_groups() as groups:
            line, self._line = self._line or StoreLine(self._store), None
            iteration.store = PrefixStore(f"group/{iteration.number}", groups.over(line))
            with entered(scope):
                outcome = self._call(iteration, scope, groups, function, watch)
            self._lookout.left()
            self._committed, self._step = max(self._committed, scope.committed), scope.step
            self._attempt, self._run_dir = scope.attempt, scope.run_dir or self._run_dir
            self._between.signal = self._between.signal or scope.stop
            if outcome.initialised and not line.ended:
                self._line = line
            error = outcome.error
            if outcome.done and not scope.asked:
                self._ask_store(lambda: self._store.add(done_key(iteration.number), 1))
            elif error is not None and not isinstance(error, RestartRequested):
                kind = FaultKind.ASKED if isinstance(error, _StopCameError) else FaultKind.EXCEPTION
                self._give(scope, kind, _text(error), error)
            # A member that has returned keeps its groups until the others have: they may still talk to it.
            end = self._await_end(watch, iteration.number)
            self._leave(iteration, scope, groups, outcome)
        return outcome, end

    def _call(
        self,
        iteration: Iteration,
        scope: Scope,
        groups: GroupWatch,
        function: Callable[[], Any],
        watch: KeyWatch,
    ) -> _Outcome:
        outcome = _Outcome()
        if self._between.signal:
            outcome.error = _StopCameError(f"{self._between.signal} came before the function started")
            return outcome
        self._lookout.begin(scope, groups)
        watch.tell(lambda: self._lookout.ask(watch.error or "the iteration has ended on another rank"))
        with self._between.given_back():
            try:
                try:
                    self._interruption.open(scope)
                    self._stages.initialize(iteration)
                    outcome.initialised = True
                    if self._uses_run:
                        self._await_first_step(scope)
                    outcome.value = function()
                finally:
                    self._shut()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the others must learn of it
                self._shut()
                outcome.error = error
        return outcome

    def _shut(self) -> None:
        """Shut the interruption. One more may come while this is being done, but none after it."""
        while True:
            try:
                self._interruption.shut()
                return
            except RestartRequested:
                continue

    def _await_end(self, watch: KeyWatch, number: int) -> End:
        """How the iteration ended for all: after returning, wait for the others, however long they train."""
        chosen = self._chosen
        if not chosen.completion_timeout:
            return self._wait_for_others(watch, number)
        limit = chosen.completion_timeout + chosen.barrier_timeout + SLACK  # the conductor ends it sooner
        watch.wait(limit, self._lookout.touch)
        return self._read_end(watch, number, f"it was not announced within {limit:g} s")

    def _wait_for_others(self, watch: KeyWatch, number: int) -> End:
        """Wait for as long as the others train: the wait ends with the iteration, or with the store."""
        while not watch.wait(OTHERS_LOOK, self._lookout.touch):
            pass
        return self._read_end(watch, number, "")

    def _read_end(self, watch: KeyWatch, number: int, late: str) -> End:
        if watch.value is None:
            self._hand_over(f"the end of iteration {number} was not received: {watch.error or late}")
        try:
            return msgspec.json.decode(watch.value, type=End)
        except UNREADABLE as error:
            self._hand_over(f"the end of iteration {number} was overwritten by somebody else: {error}")

    # --- after it -------------------------------------------------------------------------------------------

    def _leave(self, iteration: Iteration, scope: Scope, groups: GroupWatch, outcome: _Outcome) -> None:
        """Give back what the function held."""
        if not outcome.done:
            groups.abort()
            self._stage("abort", lambda: self._stages.abort(iteration))
        for close in scope.closers():
            self._stage("closing what the function left open", close)
            self._lookout.touch()
        self._scope = None
        forget(outcome.error, self._chosen)
        self._groups = groups  # held until all have left them
        groups.leave()
        self._lookout.touch()

    def _release_groups(self) -> None:
        """Called once there is a plan: by then every member has left the groups of the iteration before."""
        if self._groups is not None:
            self._groups.release()
            self._groups = None

    def _settle(self, iteration: Iteration) -> str:
        """Make this process ready for another iteration; returns the reason if it is not."""
        for name, stage in (
            ("finalize", self._stages.finalize),
            ("health check", self._stages.health_check),
        ):
            problem = self._stage(name, lambda stage=stage: stage(iteration))  # type: ignore[misc]
            self._lookout.touch()
            if problem:
                return problem
        return ""

    def _complete(self, iteration: Iteration, value: T) -> T | None:
        if iteration.rank < 0:
            if self._between.signal:
                raise Stopped(self._step, f"this reserve got {self._between.signal}")
            return None
        completed: T = self._stages.complete(iteration, value)
        return completed

    def _stage(self, name: str, call: Callable[[], object]) -> str:
        """Run a stage; returns what went wrong, in words, if anything did."""
        try:
            call()
        except Exception as error:
            log.exception("holdfast: %s failed", name)
            return f"{name} failed: {type(error).__name__}: {error}"[:MESSAGE]
        return ""

    def _nowhere(self, number: int) -> Iteration:
        return Iteration(
            number=number,
            member=self._joined.member,
            rank=-1,
            world_size=0,
            store=self._store,
            backend=self._backend,
            timeout=self._timeout,
            chosen=self._chosen,
        )

    # --- the first step -------------------------------------------------------------------------------------

    def _await_first_step(self, scope: Scope) -> None:
        """From here until all ranks have done a step, the longer limit for standing still applies."""
        self._uses_run = True
        if scope.stepped or scope.allowance:
            return
        scope.allow(self._first_limit - self._chosen.soft_timeout)
        if self._own_timeout:
            limit_collectives(self._timeout + scope.allowance, self._timeout)

    def _on_stepped(self, scope: Scope) -> None:
        """On the lookout's thread: this rank has done its first step; others may not have done theirs."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + max(STEPPED_LOOK, STEPPED_LOOK_EACH * scope.world_size)
        mine, self._counted = 0 if self._counted else 1, True
        key, what = stepped_key(scope.iteration), "the first step of the others"
        with contextlib.suppress(HoldfastError):  # no store: the wait for the end says so
            done = within(lambda: self._store.add(key, mine), STEPPED_TIMEOUT, what)
            if done >= scope.world_size:
                longer = self._timeout + scope.allowance
                scope.allow(0.0)
                if self._own_timeout:
                    limit_collectives(self._timeout, longer)

    # --- faults ---------------------------------------------------------------------------------------------

    def _on_still(self, seconds: float) -> None:
        """On the lookout's thread."""
        scope = self._scope
        if scope is None:
            return
        places = _standing()
        limit, which = self._chosen.soft_timeout, "inprocess.soft_timeout"
        if scope.allowance:
            limit, which = self._first_limit, "until all ranks have done their first step, the limit"
        detail = f"no progress of its main thread for {seconds:.1f} s ({which} is {limit:g})"
        self._give(scope, FaultKind.SOFT_TIMEOUT, f"{detail}, at {places[0]}" if places else detail)
        _tell_standing(scope.rank, seconds, places)

    def _on_idle(self, seconds: float) -> None:
        """On the lookout's thread."""
        if self._scope is not None:
            _tell_standing(self._scope.rank, seconds, _standing())

    def _give(self, scope: Scope, kind: FaultKind, detail: str, error: BaseException | None = None) -> None:
        """Report a fault here, and end the iteration with it if nothing else has. From any thread."""
        fault = Fault(
            member=scope.member,
            rank=scope.rank,
            node=self._joined.node,
            kind=kind,
            detail=detail,
            error=type(error).__name__ if error is not None else "",
            errors=msgspec.convert(chain_of(error, MESSAGE // 8), list[Raised]) if error is not None else [],
            exit_code=_exit_code(error),
            at=time.time(),
            step=scope.step,
        )
        with contextlib.suppress(HoldfastError):  # no store: the wait for the end says so
            self._fix(fault_key(scope.iteration, scope.member), fault)
            self._fix(end_key(scope.iteration), End(kind=EndKind.FAULT, fault=fault))

    # --- the store ------------------------------------------------------------------------------------------

    def _fix(self, key: str, word: msgspec.Struct) -> None:
        text = msgspec.json.encode(word).decode()
        self._ask_store(lambda: self._store.compare_set(key, "", text))

    def _ask_store(self, call: Callable[[], T]) -> T:
        return within(call, STORE_TIMEOUT, "the other members of this restartable function")


def _is_own(error: BaseException | None) -> bool:
    """Whether an error says more than that another member left."""
    if error is None or isinstance(error, RestartRequested | _StopCameError):
        return False
    return not is_symptom(_exit_code(error), _text(error))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MESSAGE].encode(errors="replace").decode()


def _code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _standing() -> list[str]:
    """Where the main thread is, the innermost place first."""
    stack = frames_of(sys._current_frames().get(threading.main_thread().ident or 0))
    return [f"{frame.file}:{frame.line} in {frame.function}" for frame in stack]


def _tell_standing(rank: int, seconds: float, places: list[str]) -> None:
    """Log it on a thread of its own: whatever reads the log may hang, and the lookout has ranks to free."""
    lines = "\n  ".join(places)
    words = ("holdfast: rank %d has stood still for %.1f s:\n  %s", rank, seconds, lines)
    threading.Thread(target=log.warning, args=words, name="holdfast-standing", daemon=True).start()


def _exit_code(error: BaseException | None) -> int:
    if isinstance(error, HoldfastError):
        return int(error.exit_code)
    return _code(error) if isinstance(error, SystemExit) else int(error is not None)
