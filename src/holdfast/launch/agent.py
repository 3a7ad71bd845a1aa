"""The agent of one node: torch's LocalElasticAgent with a run loop of its own.

torch's store, environment and logs of workers stay. What differs is how nodes meet (meeting.py), how workers
start (workers/start.py) and what happens when something ends: an incident is reported by all nodes, decided
once, and followed by an attempt with its own number, epoch and store.

Guarantee: every wait in here has a deadline or is ended by a signal, and workers are gone before the agent
acts on their end.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch
from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from holdfast.cluster import devices_here, environment_of, node_name
from holdfast.config import parse_failure_causes
from holdfast.errors import ControlError, DecisionTimeoutError, ExitCode, HoldfastError
from holdfast.journal.events import RunCreated, Warned, WorkersStarted
from holdfast.launch.context import Interrupted, LaunchContext
from holdfast.launch.in_place import Consent, InProcess
from holdfast.launch.incident import (
    PAUSE_POLL,
    Ends,
    Recovery,
    Vigil,
    await_storage,
    count_oom_kills,
    gather,
    is_starting,
    least_space,
    look_at_hang,
    memory_kill,
    report,
    shared_places,
    stop_and_see,
    tell_store_lost,
    wait_while_paused,
)
from holdfast.launch.nodes import (
    Attempt,
    LeaderLostError,
    MeetingHandler,
    Notice,
    RoundPlace,
    StopRun,
    StoreLostError,
    agree_on_launch,
    follow,
    lead,
    refuse,
)
from holdfast.launch.stops import FINE, Stopping
from holdfast.launch.terminal import say
from holdfast.launch.workers import Workers, launch_store, make_workers, unshared_store
from holdfast.policy import Participant, limits_of
from holdfast.record import (
    PROGRESS,
    FailureRecord,
    SealedStore,
    exclude,
    progress_file,
    reachable_address,
    run_secret,
    stop_asked,
)
from holdfast.stop import StopFile

TO_DECIDE = ("failure", "hang", "node_lost")
"""Notices of ends on which a decision follows."""


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
        handler = self._worker_group.spec.rdzv_handler
        self._meeting = handler if isinstance(handler, MeetingHandler) else None
        self._recovery = Recovery(context, self._meeting, self._worker_group.spec.local_world_size)
        self._ends = Ends(context, self._meeting, self._recovery, self._shutdown)
        self._stopping: Stopping | None = None
        self._stop_file = StopFile(self._settings.stop_file(), say)
        self._rounds = 0
        self._paused = 0.0
        """Seconds for which an operator held the next attempt up."""
        self._warned = False
        self._oom_kills = 0
        self._dead: set[int] = set()
        """Pids of the last attempt's workers, and of what they had started, as far as that was seen."""
        self._in_process: InProcess | None = None

    # -- torch's hooks --------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes, then lead or follow the attempt that this round is."""
        with self._signals.interruptible(), unshared_store():
            if self._meeting is None:
                self._context.gate.insist()  # with a meeting, the meeting parks a node that may not take part
            super()._rendezvous(worker_group)
        self._rounds += 1
        context, spec = self._context, worker_group.spec
        group: Any = worker_group  # torch declares what the rendezvous fills in as None
        store, nodes = group.store, int(group.group_world_size)
        place = RoundPlace(
            node=self._node_name(nodes, group.group_rank),
            group_rank=group.group_rank,
            nodes=nodes,
            world_size=self._active(worker_group.workers[0].world_size),
        )
        secret, run, met = run_secret(context.control), context.control.run_id, spec.rdzv_handler.get_run_id()
        shared = SealedStore(launch_store(store, spec), secret, run, met, self._warn_of_store)
        context.launch = agree_on_launch(shared, context.launch)
        scope = f"{met}/round.{self._rounds}"
        if self._meeting is not None:
            scope = self._meeting.scope
        elif spec.rdzv_handler.get_backend() == "static":
            store = PrefixStore(scope, store)  # a static rendezvous has no rounds of its own
        store = SealedStore(store, secret, run, scope, self._warn_of_store)
        address = spec.master_addr or spec.local_addr or socket.getfqdn()
        attempt = self._begin(place, reachable_address(address, nodes), store)
        group.master_addr, group.master_port = attempt.told.master_addr, attempt.told.master_port
        self._take_places(group, attempt)
        # torch derives TORCHELASTIC_RESTART_COUNT and the log directory's name from this.
        self._remaining_restarts = spec.max_restarts - attempt.told.restarts
        if context.created:
            root = str(self._settings.checkpoint_root().absolute())
            attempt.journal.write(RunCreated(run=context.control.run_id, checkpoint_root=root))
            context.created = False
        if attempt.place.leads:
            context.scheduler.found(attempt.journal, attempt.number, attempt.launch, say)

    def _active(self, started: int) -> int:
        """How many of the started ranks train."""
        chosen = self._settings.inprocess
        return min(started, limits_of(chosen, started).wanted) if chosen.enabled else started

    def _take_places(self, group: Any, attempt: Attempt) -> None:
        """Number the ranks as the leader arranged the nodes, which may differ from how they met."""
        arranged = attempt.told.arrangement
        if self._meeting is None or not arranged.nodes:
            return
        group.group_rank = arranged.place_of(attempt.place.node)
        group.workers = make_workers(self._in_rank_order(attempt), group.group_rank)

    def _in_rank_order(self, attempt: Attempt) -> list[Participant]:
        """The nodes that take part; empty if they do not meet by themselves."""
        members = {one.node: one for one in self._meeting.members} if self._meeting is not None else {}
        return [members[one.node] for one in attempt.told.arrangement.nodes if one.node in members]

    def _begin(self, place: RoundPlace, address: str, store: SealedStore) -> Attempt:
        context = self._context
        context.leads = place.leads
        node_timeout = self._settings.launch.node_timeout
        if place.leads:
            try:
                with self._signals.interruptible():
                    held = context.leadership.claim(context.launch)
                self._recovery.settle_lost(held)
                self._recovery.admit()
                self._attempt = lead(
                    context.control,
                    place,
                    held,
                    address,
                    store,
                    torch.__version__,
                    node_timeout=node_timeout,
                    members=self._meeting.members if self._meeting is not None else [],
                    max_restarts=self._settings.launch.max_restarts,
                    started_with=context.started_with,
                    launched=context.began,
                    paused=self._paused,
                )
            except (HoldfastError, StopRun) as error:
                refuse(store, error)
                raise
        else:
            with self._signals.interruptible():
                self._attempt = follow(
                    context.control,
                    place,
                    context.launch,
                    store,
                    timeout=self._settings.control.decision_timeout,
                    node_timeout=node_timeout,
                    given_up=self._silent_leader,
                )
        context.saves.follow(self._attempt.number, leads=place.leads)
        return self._attempt

    def _warn_of_store(self, text: str) -> None:
        if self._meeting is not None:
            self._meeting.warn(text)
        elif not self._warned:
            self._warned = True
            say(f"warning: {text}")

    def _node_name(self, nodes: int, group_rank: int) -> str:
        if self._meeting is not None:
            return self._meeting.node
        host = node_name(self._settings.launch.node_name)
        return host if nodes == 1 else f"{host}.{group_rank}"

    def _silent_leader(self) -> str:
        return self._meeting.silent_leader() if self._meeting is not None else ""

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Ranks in the order of the nodes, as the meeting knows it; torch would wait for each node again."""
        if self._meeting is None:
            found: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
            return found
        return make_workers(self._meeting.members, group_rank)

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        attempt, context = self._attempt, self._context
        assert attempt is not None
        worker_env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        told, node = attempt.told, attempt.place.node
        handover = context.handover(told, node, local_rank)
        worker_env.update(handover.to_environment())
        told_in = progress_file(context.control.path, int(worker_env["RANK"]))
        with contextlib.suppress(OSError):  # if it fails, progress cannot be told, and nothing else is lost
            told_in.parent.mkdir(exist_ok=True)
        worker_env[PROGRESS] = str(told_in)
        if self._in_process is not None:
            worker_env.update(self._in_process.environment())
        if told.arrangement.nodes:
            virtual = bool(getattr(spec, "virtual_local_rank", False))
            arranged = told.arrangement.devices_of(node)
            worker_env.update(environment_of(arranged, devices_here(), local_rank, virtual=virtual))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._attempt
        assert attempt is not None
        self._begin_evidence()
        self._try_network(worker_group.store)
        self._in_process = None
        if self._settings.inprocess.enabled:
            ranks = [worker.global_rank for worker in worker_group.workers]
            in_all, ordered = worker_group.workers[0].world_size, self._in_rank_order(attempt)
            self._in_process = InProcess(attempt, self._context, ranks, ordered, in_all)
        starter = self._context.starter
        with self._signals.interruptible():
            starter.prepare()
            self._context.gate.await_memory(self._dead, attempt.number, self._signals.check)
        self._context.tend_starter()
        with starter.in_place_of_torch():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        ids = {w.global_rank: pids[w.local_rank] for w in worker_group.workers}
        workers = Workers(ids, self._context.orphans)
        monitor, learner = self._context.monitor, self._context.learner
        self._workers = workers
        if self._in_process is not None:
            self._in_process.started(workers, self._begin_evidence)
        self._signals.hurry = workers.kill
        monitor.begin(ids, learner.begin(attempt.place.node, attempt.number))
        if attempt.place.leads:
            self._context.leadership.guard(workers.kill)
        master = f"{worker_group.master_addr}:{worker_group.master_port}"
        attempt.journal.write(WorkersStarted(node=attempt.place.node, pids=workers.pids, master=master))
        return pids

    def _try_network(self, store: Any) -> None:
        """Only if the agents have met by our own rendezvous: another one does not say who they are."""
        attempt, meeting = self._attempt, self._meeting
        if attempt is not None and meeting is not None:
            names = [member.node for member in meeting.members]
            host = meeting.endpoint.rpartition(":")[0]
            self._context.gate.try_network(store, attempt.place.group_rank, names, host)

    def _begin_evidence(self) -> None:
        """From here on, what the kernel and the devices report belongs to this attempt."""
        attempt = self._attempt
        assert attempt is not None
        self._oom_kills = count_oom_kills()
        self._context.gate.begin(attempt.place.node)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        del worker_group, args, kwargs
        self._shutdown()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """End the workers within the configured grace, and let torch clean up what it made for them."""
        del args, kwargs
        workers, self._workers = self._workers, None
        self._signals.hurry = None
        if self._in_process is not None:
            self._in_process.close()
        if workers is not None:
            dead = workers.stop(self._settings.launch.stop_grace, self._context.monitor.hearing().defer)
            self._dead = workers.dead
            workers.forget()
            self._context.leadership.unguard()
            if not dead:
                started: Any = self._pcontext
                started.abandon()  # waiting for what SIGKILL cannot end would never return
                self._pcontext = None
                self._mark_node("; ".join(str(one) for one in workers.left))
        super()._shutdown(signal.SIGKILL)
        self._pcontext = None

    def _mark_node(self, left: str) -> None:
        """Exclude this node: workers that SIGKILL does not end hold what a new attempt needs."""
        attempt = self._attempt
        why = f"workers hang in the kernel and could not be killed: {left}"
        if attempt is not None:
            attempt.journal.write(Warned(message=f"{attempt.place.node} is excluded: {why}"))
            exclude(attempt.control, attempt.place.node, None, why, "recovery", attempt.number)
        raise StopRun(ExitCode.FAILED, f"{why}. Look at the node, then `holdfast control readmit` it")

    # -- the loop -------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "") -> RunResult:
        del role
        try:
            code = None
            while code is None:
                self._attempt = self._stopping = None
                self._signals.check()
                code = self._hold() if self._rounds else None
                if code is None:
                    code = self._live_once()
        except (Interrupted, SignalException) as interrupt:
            number = getattr(interrupt, "sigval", signal.SIGTERM)
            received = self._signals.received or number
            code = self._ends.interrupted(self._attempt, received, self._stopping)
        except BaseException as error:
            code = self._ends.abandon(self._attempt, error, self._stopping)
            if code is None:
                raise
        self.exit_code = code
        ranks = {worker.global_rank: None for worker in self._worker_group.workers}
        if code == ExitCode.OK:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=ranks)
        return RunResult(state=WorkerState.FAILED)

    def _hold(self) -> int | None:
        """Between two attempts: wait while an operator pauses recovery; an exit code if it takes too long."""
        control, longest = self._context.control, self._settings.launch.max_pause
        began = time.monotonic()
        if wait_while_paused(control, longest, check=self._check_pause, tell=say):
            waited = time.monotonic() - began
            self._paused = waited if waited >= PAUSE_POLL else 0.0
            return None
        code = ExitCode.PAUSED_TOO_LONG
        self._context.last_words = f"recovery stayed paused for {longest:g} s"
        self._ends.tell_meeting(code, self._context.last_words)
        return code

    def _check_pause(self) -> None:
        """Check what ends a pause from outside: a signal here or elsewhere, an operator, the stop file."""
        self._signals.check()
        over = None
        with contextlib.suppress(StoreLostError):  # it will be noticed when the nodes meet again
            over = self._meeting.over() if self._meeting is not None else None
        if over is not None:
            raise StopRun(over.code, f"the run has ended: {over.why}")
        context = self._context
        with contextlib.suppress(ControlError):
            asked = stop_asked(context.control, [context.launch, *context.earlier_launches])
            if asked is not None:
                raise StopRun(ExitCode.STOPPED, f"an operator asked for it, {asked.describe()}")
        if self._stop_file.is_there():
            raise StopRun(ExitCode.STOPPED, f"the stop file {self._stop_file.path} is there")

    def _live_once(self) -> int | None:
        """Live one attempt; returns an exit code, or None if another attempt is to follow."""
        try:
            self._initialize_workers(self._worker_group)
            return self._watch()
        except (StoreLostError, DecisionTimeoutError, LeaderLostError) as error:
            meeting, stopping = self._meeting, self._stopping
            if self._attempt is not None and stopping is not None and stopping.of_all:
                return self._ends.without_others(self._attempt, str(error))
            if meeting is None:
                raise
            lost = meeting.look_at_store()
            if lost:
                self._move(lost)
            elif (self._attempt is not None and self._attempt.lost_leader()) or meeting.silent_leader():
                self._meet_again(str(error))
            else:
                raise
            return None

    def _meet_again(self, why: str) -> None:
        """The leader went before or while this node followed it: the others are at the same point."""
        assert self._meeting is not None
        say(f"{why}; meeting the other nodes again")
        self._meeting.see_gone(0, why)
        self._shutdown()
        if self._attempt is not None:
            self._attempt.close()

    def _move(self, why: str) -> None:
        """The store's host is gone: end the workers and go to the next endpoint. Raises if there is none."""
        assert self._meeting is not None
        attempt, last = self._attempt, max(self._context.monitor.last_steps().values(), default=None)
        self._shutdown()
        if attempt is not None:
            attempt.close()
        # The old group may still be running on the other side of the cut. Under a new launch id the lease
        # decides: nobody takes the run from a leader that is alive.
        self._context.leadership.release()
        self._context.rename_launch()
        with self._signals.interruptible():
            try:
                self._meeting.move(why)
            except StoreLostError as error:
                if attempt is not None:
                    tell_store_lost(self._context, attempt.number, attempt.place.node, str(error), last)
                raise
        where = self._meeting.endpoint
        say(f"the store through which the nodes meet was lost: {why}. Meeting the other nodes at {where}")

    def _watch(self) -> int | None:
        """Watch until something ends this attempt, then take it to its end on this node."""
        attempt, workers = self._attempt, self._workers
        assert attempt is not None
        assert workers is not None
        spec = self._worker_group.spec
        self._stopping = stopping = Stopping(attempt, workers, self._context)
        kept, consent = self._in_process, None
        if kept is not None and attempt.place.leads:
            consent = Consent(
                attempt, workers, self._context, self._recovery, self._meeting, stopping, self._seen_ends
            )
            kept.consult(consent.give)
        notice = Vigil(
            attempt,
            workers,
            self._context,
            self._meeting,
            stopping,
            interval=spec.monitor_interval,
            newcomers=spec.rdzv_handler.num_nodes_waiting,
            in_process=kept,
        ).watch()
        attempt.noticed_at = time.time()
        if kept is not None:
            kept.close()
        self._report_end(attempt, notice, stopping, consent)
        return self._ends.settle(attempt, notice, stopping)

    def _report_end(
        self, attempt: Attempt, notice: Notice, stopping: Stopping, consent: Consent | None
    ) -> None:
        """Stop this node's workers, and report those that failed by themselves."""
        workers, monitor, kept = self._workers, self._context.monitor, self._in_process
        assert workers is not None
        ranks = kept.ranks() if kept is not None else {rank: rank for rank in workers.pids}
        if notice.kind == "hang":
            look_at_hang(attempt, workers.pids, monitor, ranks, workers.ended())
        sections = {ranks.get(one, one): section for one, section in monitor.sections().items()}
        self._recovery.last_step = max(monitor.last_steps().values(), default=None)
        self._context.learner.keep(monitor)
        failed = stop_and_see(
            workers,
            self._error_files(),
            self._settings.launch.stop_grace,
            at_once=monitor.hearing().defer,
            fine=FINE if stopping.request is not None else (0,),
            early=notice.kind == "failure" and kept is None and is_starting(attempt),
            leavers=notice.kind in ("failure", "hang") and kept is None and stopping.request is None,
        )
        if kept is not None:
            failed = {one: code for one, code in failed.items() if not kept.explains(one, code)}
            if consent is not None:
                consent.hand_over(kept)
        failures = self._gather(attempt, workers, failed)
        monitor.begin({})
        self._shutdown()
        attempt.stopped_at = time.time()
        if notice.kind == "lease_lost":
            failures = []  # the run is another's now: record nothing there, and wait for nothing
        self._recovery.storage = None
        if notice.kind in TO_DECIDE:
            self._recovery.storage = await_storage(
                shared_places(self._settings),
                check=self._signals.check if stopping.request is None else lambda: None,
                tell=say,
                least=least_space(self._settings),
            )
            if self._recovery.storage is not None and self._recovery.storage.full:
                self._context.control.give_room_up()
        if failures or notice.kind == "hang":
            self._context.gate.keep_device_errors(attempt.number)
        else:
            self._context.gate.forget()  # between attempts every node is checked anew, wherever it failed
        report(attempt, failures, sections)

    def _gather(self, attempt: Attempt, workers: Workers, failed: Mapping[int, int]) -> list[FailureRecord]:
        """The failures of this node's workers, by the rank that they were started with."""
        local = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        started: Any = self._pcontext
        found = gather(
            attempt.control.attempt(attempt.number),
            attempt.place.node,
            workers.pids,
            failed,
            self._error_files(),
            memory=memory_kill(self._oom_kills),
            devices=attempt.told.arrangement.devices_of_ranks(attempt.place.node, local),
            last_lines=lambda rank: started.last_lines(local[rank]) if started is not None else "",
            seen=workers.seen,
            steps=self._context.monitor.last_steps(),
            causes=parse_failure_causes(self._settings.launch.failure_causes),
        )
        ranks = self._in_process.ranks() if self._in_process is not None else {}
        return [msgspec.structs.replace(one, rank=ranks.get(one.rank, one.rank)) for one in found]

    def _seen_ends(self, members: Collection[int]) -> dict[int, FailureRecord]:
        """The failures of those members of this node that have ended, by member."""
        attempt, workers = self._attempt, self._workers
        assert attempt is not None
        assert workers is not None
        ended = workers.ended()
        return {one: self._gather(attempt, workers, {one: ended[one]})[0] for one in members if one in ended}

    def _error_files(self) -> dict[int, str]:
        if self._pcontext is None:
            return {worker.global_rank: "" for worker in self._worker_group.workers}
        files = self._pcontext.error_files
        return {worker.global_rank: str(files[worker.local_rank]) for worker in self._worker_group.workers}
