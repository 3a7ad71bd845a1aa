"""The agent of one node: torch's LocalElasticAgent with a run loop of its own.

torch's parts stay: the rendezvous, the ranks, the environment and the start of workers. What differs is what
happens when something ends. torch's loop counts restarts per node and in memory, waits a literal 30 seconds
for workers that ignore SIGTERM, and lets the next attempt read the last one's store. Here an incident is
reported by all nodes, decided once, and followed by an attempt with its own number, epoch and store.

Guarantee: every wait in here has a deadline or ends with a signal, and workers are gone before the agent acts
on their end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from holdfast.errors import DecisionTimeoutError, HoldfastError
from holdfast.exit_codes import ExitCode
from holdfast.journal.events import LeaseLost, RunCreated, Warned, WorkersStarted
from holdfast.launch.attempt import (
    Attempt,
    Notice,
    Place,
    StopRun,
    agree_on_launch,
    follow,
    lead,
    refuse,
)
from holdfast.launch.attempt_store import reachable_address
from holdfast.launch.context import LaunchContext
from holdfast.launch.evidence import (
    count_oom_kills,
    gather,
    highest_committed_step,
    past_attempts,
    stop_and_see,
)
from holdfast.launch.incident import decide, learn, report
from holdfast.launch.signals import Interrupted
from holdfast.launch.summary import describe, say
from holdfast.launch.workers import Workers
from holdfast.policy.budgets import may_regroup
from holdfast.policy.classify import Cause
from holdfast.policy.recovery import Action

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

REPORT_SLACK = 10.0
"""Seconds beyond the stop grace for the other nodes to report."""
LEAVE = 5.0
"""Seconds to wait at the end for the other nodes to have read the decision: the store may live in here."""


class HoldfastAgent(LocalElasticAgent):
    """Runs attempts until one finishes or recovery decides to stop; then `exit_code` says how it ended."""

    def __init__(self, *args: Any, context: LaunchContext, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exit_code: int = ExitCode.OK
        self._context = context
        self._settings = context.settings
        self._signals = context.signals
        self._attempt: Attempt | None = None
        self._workers: Workers | None = None
        self._rounds = 0
        self._oom_kills = 0

    # -- torch's hooks --------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes, then lead or follow the attempt that this round is."""
        with self._signals.interruptible(), _unshared_store():
            super()._rendezvous(worker_group)
        self._rounds += 1
        context, spec = self._context, worker_group.spec
        group: Any = worker_group  # torch declares what the rendezvous fills in as None
        store, nodes = group.store, int(group.group_world_size)
        host = socket.gethostname()
        place = Place(
            node=host if nodes == 1 else f"{host}.{group.group_rank}",
            group_rank=group.group_rank,
            nodes=nodes,
            world_size=worker_group.workers[0].world_size,
        )
        context.launch = agree_on_launch(_launch_store(store, spec), context.launch)
        if spec.rdzv_handler.get_backend() == "static":
            store = PrefixStore(
                f"round.{self._rounds}", store
            )  # a static rendezvous has no rounds of its own
        address = spec.master_addr or spec.local_addr or socket.getfqdn()
        attempt = self._begin(place, reachable_address(address, nodes), store)
        group.master_addr, group.master_port = attempt.told.master_addr, attempt.told.master_port
        # torch derives TORCHELASTIC_RESTART_COUNT and the log directory's name from this.
        self._remaining_restarts = spec.max_restarts - attempt.told.restarts
        if context.created:
            root = str(self._settings.checkpoint_root().absolute())
            attempt.journal.write(RunCreated(run=context.control.run_id, checkpoint_root=root))
            context.created = False

    def _begin(self, place: Place, address: str, store: Store) -> Attempt:
        context = self._context
        if place.leads:
            try:
                with self._signals.interruptible():
                    held = context.leadership.claim(context.launch)
                self._attempt = lead(context.control, place, held, address, store, torch.__version__)
            except HoldfastError as error:
                refuse(store, error)
                raise
        else:
            timeout = self._settings.control.decision_timeout
            with self._signals.interruptible():
                self._attempt = follow(context.control, place, context.launch, store, timeout)
        return self._attempt

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        attempt, context = self._attempt, self._context
        assert attempt is not None
        worker_env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        handover = context.handover(attempt.number, attempt.told.epoch, attempt.place.node)
        worker_env.update(handover.to_environment())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._oom_kills = count_oom_kills()
        starter = self._context.starter
        with self._signals.interruptible():
            starter.prepare()
        with starter.in_place_of_torch():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        workers = Workers({w.global_rank: pids[w.local_rank] for w in worker_group.workers})
        self._workers = workers
        self._signals.hurry = workers.kill
        attempt = self._attempt
        assert attempt is not None
        if attempt.place.leads:
            self._context.leadership.guard(workers.kill)
        master = f"{worker_group.master_addr}:{worker_group.master_port}"
        attempt.journal.write(WorkersStarted(node=attempt.place.node, pids=workers.pids, master=master))
        return pids

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        del worker_group, args, kwargs
        self._shutdown()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """End the workers within the configured grace, and let torch clean up what it made for them."""
        del args, kwargs
        workers, self._workers = self._workers, None
        self._signals.hurry = None
        if workers is not None:
            dead = workers.stop(self._settings.launch.stop_grace)
            workers.forget()
            self._context.leadership.unguard()
            if not dead:
                started: Any = self._pcontext
                started.abandon()  # waiting for what SIGKILL cannot end would never return
                self._pcontext = None
                left = sorted(set(workers.pids.values()))
                raise StopRun(
                    ExitCode.FAILED,
                    f"workers could not be killed (pids among {left}): they hang in the kernel, and what "
                    "they hold (devices, files) cannot be used by a new attempt. Look at the node",
                )
        super()._shutdown(signal.SIGKILL)
        self._pcontext = None

    # -- the loop -------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "") -> RunResult:
        del role
        try:
            code = None
            while code is None:
                self._attempt = None
                self._signals.check()
                self._initialize_workers(self._worker_group)
                code = self._settle(self._watch())
        except (Interrupted, SignalException) as interrupt:
            number = getattr(interrupt, "sigval", signal.SIGTERM)
            code = self._stopped(self._signals.received or number)
        except BaseException as error:
            self._abandon(error)
            raise
        self.exit_code = code
        ranks = {worker.global_rank: None for worker in self._worker_group.workers}
        if code == ExitCode.OK:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=ranks)
        return RunResult(state=WorkerState.FAILED)

    def _watch(self) -> Notice:
        """Until something ends this attempt: the notice that all nodes act on."""
        attempt, workers = self._attempt, self._workers
        assert attempt is not None
        assert workers is not None
        node = attempt.place.node
        finished: float | None = None
        while True:
            time.sleep(self._worker_group.spec.monitor_interval)
            self._signals.check()
            self._context.starter.tend()
            if self._context.leadership.lost:
                return attempt.give(
                    Notice(kind="lease_lost", node=node, detail=self._context.leadership.lost)
                )
            ended = workers.ended()
            if any(ended.values()):
                return attempt.give(Notice(kind="failure", node=node))
            given = attempt.notice()
            if given is not None:
                return given
            if len(ended) == len(workers.pids):
                if finished is None:
                    finished = time.monotonic()
                    attempt.count_in("finished")
                if attempt.counted("finished") >= attempt.place.nodes:
                    return Notice(kind="finished", node=node)
                if time.monotonic() - finished > self._exit_barrier_timeout:
                    waited = f"{self._exit_barrier_timeout:g} s after {node} finished, other nodes had not"
                    return attempt.give(Notice(kind="failure", node=node, detail=waited))
            elif self._newcomers(attempt):
                return attempt.give(Notice(kind="regroup", node=node))

    def _newcomers(self, attempt: Attempt) -> bool:
        """Whether nodes wait that the group has room for.

        A full group never looks: a node that already waits is never moved to torch's redundancy list, so its
        count would stay above zero and restart the group for ever.
        """
        if attempt.place.nodes >= self._context.max_nodes:
            return False
        if self._worker_group.spec.rdzv_handler.num_nodes_waiting() == 0:
            return False
        return may_regroup(past_attempts(attempt.control, before=attempt.number + 1))

    # -- ends -----------------------------------------------------------------------------------------------

    def _settle(self, notice: Notice) -> int | None:
        """End this attempt as the notice says: an exit code, or None for another attempt."""
        attempt = self._attempt
        assert attempt is not None
        self._report_end(attempt)
        if notice.kind == "finished":
            attempt.end("finished", exit_code=0, cause="", highest_step=self._steps())
            return self._leave(attempt, ExitCode.OK)
        if notice.kind == "lease_lost":
            attempt.journal.write(LeaseLost(epoch=attempt.told.epoch, evidence=notice.detail))
            say(f"attempt {attempt.number} lost the run's lease: {notice.detail}. Its workers were ended")
            return self._leave(attempt, ExitCode.LEASE_LOST)
        if notice.kind == "stopped":
            say(f"attempt {attempt.number} was stopped on {notice.node}: {notice.detail}")
            return self._leave(attempt, notice.exit_code)
        if notice.kind == "regroup":
            say(f"attempt {attempt.number} ends: more nodes joined")
            with self._signals.interruptible():
                attempt.await_all("reported", self._settings.launch.stop_grace + REPORT_SLACK)
            attempt.end("stopped", exit_code=0, cause="", highest_step=self._steps())
            attempt.close()
            return None
        return self._recover(attempt, notice)

    def _recover(self, attempt: Attempt, notice: Notice) -> int | None:
        if attempt.place.leads:
            with self._signals.interruptible():
                reported = attempt.await_all("reported", self._settings.launch.stop_grace + REPORT_SLACK)
            incident = decide(attempt, notice, self._settings, reported)
        else:
            with self._signals.interruptible():
                incident = learn(attempt, self._settings.control.decision_timeout)
        say(describe(incident, str(attempt.control.path)))
        if incident.decision.action == Action.STOP:
            return self._leave(attempt, incident.decision.exit_code)
        attempt.close()
        return None

    def _report_end(self, attempt: Attempt) -> None:
        """Stop this node's workers, and report those that failed by themselves."""
        workers = self._workers
        assert workers is not None
        files = {w.global_rank: self._error_file(w.local_rank) for w in self._worker_group.workers}
        failed = stop_and_see(workers, files, self._settings.launch.stop_grace)
        failures = gather(
            attempt.control.attempt(attempt.number),
            attempt.place.node,
            workers.pids,
            failed,
            files,
            oom_kills=count_oom_kills() - self._oom_kills,
        )
        self._shutdown()
        report(attempt, failures)

    def _error_file(self, local_rank: int) -> str:
        return str(self._pcontext.error_files[local_rank]) if self._pcontext is not None else ""

    def _steps(self) -> int:
        return highest_committed_step(self._settings.checkpoint_root())

    def _leave(self, attempt: Attempt, code: int, *, wait: bool = True) -> int:
        """The last thing of a launch: let the others read what they need before this process is gone."""
        if attempt.place.nodes > 1:
            with contextlib.suppress(DecisionTimeoutError):  # whoever hosts the store has left already
                attempt.count_in("leaving")
                if wait:
                    attempt.await_all("leaving", LEAVE)
        attempt.close()
        return code

    def _stopped(self, number: signal.Signals) -> int:
        """This agent was told to stop: so are its workers, and the run if it leads it."""
        code = 128 + number
        attempt = self._attempt
        if attempt is not None and attempt.place.nodes > 1 and not attempt.ended:
            kind = "stopped" if attempt.place.leads else "left"
            detail = f"the agent on {attempt.place.node} got {number.name}"
            with contextlib.suppress(DecisionTimeoutError):  # no store, nobody to tell
                attempt.give(Notice(kind=kind, node=attempt.place.node, detail=detail, exit_code=code))
        self._shutdown()
        if attempt is not None:
            with contextlib.suppress(DecisionTimeoutError):
                attempt.count_in("reported")  # or the leader would wait for this node
            attempt.end("stopped", exit_code=code, cause="", highest_step=self._steps())
            self._leave(attempt, code, wait=attempt.place.leads)
        say(f"stopped by {number.name}; start the same command again to resume")
        return code

    def _abandon(self, error: BaseException) -> None:
        """Something around the group broke (the store, the control directory): end what can be ended."""
        attempt = self._attempt
        self._shutdown()
        if attempt is None or attempt.ended:
            return
        known = error.code if isinstance(error, StopRun) else getattr(error, "exit_code", None)
        code = int(known or ExitCode.DECISION_TIMEOUT)
        try:
            attempt.end("failed", exit_code=code, cause=Cause.INFRASTRUCTURE, highest_step=self._steps())
        except HoldfastError as refused:
            attempt.journal.write(Warned(message=f"attempt {attempt.number} has no end: {refused}"))
        attempt.close()


@contextlib.contextmanager
def _unshared_store() -> Iterator[None]:
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


def _launch_store(store: Any, spec: WorkerSpec) -> Any:
    """A part of the rendezvous store that all rounds of this launch share."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore(f"holdfast.{spec.rdzv_handler.get_run_id()}", store)
