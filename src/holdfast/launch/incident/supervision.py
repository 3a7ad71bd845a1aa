"""Supervises one attempt on this node: watches it until something ends it, then settles it accordingly.

Guarantee of the watch: it returns a notice, the same one on every node that can still be reached, or raises
StoreLostError when the other nodes can no longer be reached. It ends nothing, and never waits for the run's
storage: if that does not answer, what lies on it is unknown for a while. An attempt that is asked to stop
(launch/stops.py) is looked at more often, until its ranks have ended or its deadline is over. A node whose
workers are done waits for the others as long as their agents live and none of their ranks hangs: how long
they train is their script's affair, and no time limit ends that wait.

Guarantee of the end: it is either another attempt or a documented exit code, which the other nodes and the
run's records learn first. A run that was asked to stop is never started again by its own launch.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping

from holdfast.account import account_of_stop, stop_text
from holdfast.base import Bounded, Look
from holdfast.checkpoint.choose import highest_committed_step
from holdfast.errors import ControlError, DecisionTimeoutError, ExitCode, HoldfastError, StorageError
from holdfast.health import nearest, try_storage
from holdfast.journal import last_step
from holdfast.journal.events import Account, LeaseLost, Warned
from holdfast.launch import InProcess, LaunchContext, Overdue, Stopping, next_step, say
from holdfast.launch.incident.decision import (
    DecidedIncident,
    Recovery,
    lost_nodes,
    report_timeout,
    tell_lease_taken,
)
from holdfast.launch.incident.hang import RollCall
from holdfast.launch.nodes import Attempt, LeaderLostError, MeetingHandler, Notice, StopRun, StoreLostError
from holdfast.launch.workers import Workers
from holdfast.policy import (
    CHECKPOINTING,
    LOADING,
    Action,
    Cause,
    Source,
    StillRunning,
    StopRequest,
    leaves,
    may_regroup,
)
from holdfast.process import from_whom
from holdfast.record import attempt_numbers, list_names, past_attempts, tied_to_ranks

STORAGE_PATIENCE = 5.0
"""Seconds within which storage must take a few bytes, when a rank is late with a save or a load."""
TENDING = 5.0
"""Seconds between two looks at all processes of the node."""


class StorageDoubt:
    """Whether a rank that saves or loads is late because the checkpoints' storage does not answer.

    If so, the rank itself does not hang, and a new attempt would wait there as well. Once the storage
    answers, the rank has its limit again. Bounded by checkpoint.timeout, which ends a save that takes longer.

    Guarantee: an answer counts until it is old, not only in the look that brought it. Each node is asked
    about its ranks at times of its own, and must give the same answer every time.
    """

    def __init__(self, ask: Callable[[], object], longest: float, tell: Callable[[str], None]) -> None:
        self._look = Look(ask, "storage", patience=0.0)
        self._longest = longest
        self._tell = tell
        self._asked = self._answered = self._stalled = -math.inf
        """When it was asked the question that is still open; when it last answered; when an answer was last
        overdue."""

    def __call__(self, one: Overdue) -> bool:
        if one.section not in (CHECKPOINTING, LOADING) or one.stopped:
            return False
        if one.seconds > self._longest + one.limit:
            return False
        now = time.monotonic()
        if self._look.take() is not None:
            self._asked, self._answered = -math.inf, now
        elif self._asked == -math.inf:
            self._asked = now
        if now - self._answered > STORAGE_PATIENCE:
            if now - self._asked < STORAGE_PATIENCE:
                return True  # it may answer yet
            if self._stalled == -math.inf:
                self._tell(f"{one}; but the storage that it needs does not answer, so it is waited for")
            self._stalled = now
        return now - self._stalled < one.limit


class Vigil:
    """One attempt as its node's agent watches it."""

    def __init__(
        self,
        attempt: Attempt,
        workers: Workers,
        context: LaunchContext,
        meeting: MeetingHandler | None,
        stopping: Stopping,
        *,
        interval: float,
        newcomers: Callable[[], int],
        in_process: InProcess | None = None,
    ) -> None:
        """`newcomers` says how many nodes wait for which the group has room."""
        self._attempt = attempt
        self._workers = workers
        self._context = context
        self._meeting = meeting
        self._stopping = stopping
        self._interval = interval
        self._newcomers = newcomers
        self._in_process = in_process
        self._roll_call = RollCall(attempt)
        self._tended = time.monotonic()
        self._history = Look(self._may_regroup, "history")
        root = context.settings.checkpoint_root()
        self._waits_for_storage = StorageDoubt(
            lambda: try_storage(nearest(root)), context.settings.checkpoint.timeout, self._tell
        )

    def watch(self) -> Notice:
        """Watch until something ends the attempt; returns the notice that all nodes act on."""
        while True:
            self._pause(min(self._interval, self._stopping.pause or self._interval))
            self._tend()
            self._context.tend_starter()
            notice = self._look()
            if notice is not None:
                return notice

    def _pause(self, seconds: float) -> None:
        if self._in_process is not None:
            self._in_process.pause(seconds)
        else:
            time.sleep(seconds)

    def _tend(self) -> None:
        """Every now and then, reap what was left behind, and see that the keeper is alive."""
        if time.monotonic() - self._tended < TENDING:
            return
        self._tended = time.monotonic()
        self._context.orphans.tend()
        self._context.learner.poll(self._context.monitor)
        keeper, text = self._context.keeper.check()
        if keeper is not None:
            self._context.orphans.own(keeper)
        if text:
            self._attempt.journal.write(Warned(message=text))

    def _look(self) -> Notice | None:
        attempt, node = self._attempt, self._attempt.place.node
        lost = self._context.leadership.lost
        if lost:
            return attempt.give(Notice(kind="lease_lost", node=node, detail=lost))
        if self._meeting is not None and self._meeting.lost:
            raise StoreLostError(f"the store through which the nodes meet is lost: {self._meeting.lost}")
        ended, between = self._workers.ended(), False
        if self._in_process is not None:
            self._in_process.look()
            ended = self._in_process.counted(ended)
            between = self._in_process.between
        stopped = self._stopping.poll(ended, between=between)
        if stopped is not None:
            return stopped
        if self._stopping.failed(ended):
            return attempt.give(Notice(kind="failure", node=node, at=time.time()))
        seen = self._lost()
        if seen is not None:
            return attempt.give(seen)
        given = attempt.notice()
        if given is not None:
            return given
        hang = self._roll_call.look(self._standing(ended, between=between))
        if hang is not None:
            return attempt.give(hang)
        if between:
            return None
        if self._stopping.request is not None:
            return None
        if len(ended) == len(self._workers.pids):
            return self._finish()
        if self._may_grow():
            return attempt.give(Notice(kind="regroup", node=node))
        return None

    def _standing(self, ended: Mapping[int, int], *, between: bool) -> StillRunning:
        """What this node has to say about its ranks."""
        node, kept = self._attempt.place.node, self._in_process
        if between:  # which member must be where by when is the conductor's affair
            return StillRunning(node=node, in_time=0)
        ranks = kept.ranks() if kept is not None else None
        return self._context.monitor.standing(node, ended, ranks, excused=self._waits_for_storage)

    def _tell(self, told: str) -> None:
        self._attempt.journal.write(Warned(message=told))
        say(f"warning: {told}")

    def _finish(self) -> Notice | None:
        """This node's workers are done; the attempt is done when all nodes' workers are."""
        attempt, node = self._attempt, self._attempt.place.node
        attempt.count_in("finished")
        lost = len(attempt.lost_nodes())  # those that the others went on without
        if attempt.counted("finished") >= attempt.place.nodes - lost:
            # Given as a notice, so that a node that is asked to stop at this very moment learns of it too.
            return attempt.give(Notice(kind="finished", node=node))
        return None

    def _lost(self) -> Notice | None:
        """A notice of the nodes that this agent has just lost sight of."""
        attempt = self._attempt
        lost = attempt.lost_nodes()
        if lost:
            names = {rank: self._name_of(rank) for rank in sorted(lost)}
            if self._in_process is not None and self._in_process.lose({names[r]: lost[r] for r in names}):
                return None
            detail = "; ".join(f"node {name} was lost: {lost[rank]}" for rank, name in names.items())
            nodes = list(names.values())
            return Notice(kind="node_lost", node=nodes[0], nodes=nodes, at=time.time(), detail=detail)
        why = attempt.lost_leader()
        if why:
            name = self._name_of(0)
            detail = f"the leading node {name} was lost: {why} (seen by {attempt.place.node})"
            return Notice(kind="leader_lost", node=name, nodes=[name], at=time.time(), detail=detail)
        return None

    def _name_of(self, group_rank: int) -> str:
        members = self._meeting.members if self._meeting is not None else []
        return members[group_rank].node if group_rank < len(members) else f"of group rank {group_rank}"

    def _may_grow(self) -> bool:
        """Whether nodes wait for which the group has room, and another regrouping is allowed.

        A full group never looks: it has no room, whoever waits.
        """
        attempt = self._attempt
        if attempt.place.nodes >= self._context.max_nodes or self._newcomers() == 0:
            return False
        looked = self._history.take()
        return looked is not None and looked.result()

    def _may_regroup(self) -> bool:
        attempt = self._attempt
        try:
            if tied_to_ranks(attempt.control):  # a larger group could not go on either
                return False
            return may_regroup(past_attempts(attempt.control, before=attempt.number + 1))
        except ControlError:  # it is tried again; a group that trains is not ended to let others join
            return False


LAST_WORDS = 30.0
"""Seconds for what is written when an attempt is abandoned: its storage may be what does not answer."""
LEAVE = 5.0
"""Seconds to wait at the end for the other nodes to read the decision: this process may host the store."""


class EndedByStorageError(StorageError):
    """The message is all that is left to say about a launch whose storage cannot be written."""


class Ends:
    """Settles the ends of attempts; one for all attempts of an agent."""

    def __init__(
        self,
        context: LaunchContext,
        meeting: MeetingHandler | None,
        recovery: Recovery,
        shutdown: Callable[[], None],
    ) -> None:
        """`shutdown` ends this node's workers if they still run."""
        self._context = context
        self._settings = context.settings
        self._signals = context.signals
        self._meeting = meeting
        self._recovery = recovery
        self._shutdown = shutdown

    def settle(self, attempt: Attempt, notice: Notice, stopping: Stopping) -> int | None:
        """End this attempt as the notice says: an exit code, or None for another attempt."""
        if notice.kind == "finished":
            attempt.end("finished", exit_code=0, cause="", highest_step=self._steps())
            return self._leave(attempt, ExitCode.OK)
        if notice.kind == "lease_lost":
            attempt.journal.write(LeaseLost(epoch=attempt.told.epoch, evidence=notice.detail))
            number, node, last = attempt.number, attempt.place.node, self._recovery.last_step
            if not tell_lease_taken(self._context, number, node, notice.detail, last):
                text = f"attempt {number} no longer holds the run: {notice.detail}"
                say(f"{text}. Its workers were ended", attempt=number)
            return self._leave(attempt, ExitCode.LEASE_LOST)
        if notice.kind == "leader_lost":
            return self._without_leader(attempt, notice, stopping)
        if notice.kind == "stopped":
            return self._stop(attempt, notice, stopping)
        if notice.kind in ("regroup", "left"):
            return self._regroup(attempt, notice)
        return self._recover(attempt, notice, stopping)

    # -- on request -----------------------------------------------------------------------------------------

    def _stop(self, attempt: Attempt, notice: Notice, stopping: Stopping) -> int:
        """The whole run was asked to stop, or a node cannot take part at all."""
        code = notice.exit_code
        asked = stopping.request is not None or code in (ExitCode.STOPPED, ExitCode.STOPPED_UNSAVED)
        if asked and attempt.place.leads:
            self._await_reports(attempt)
            attempt.end("stopped", exit_code=code, cause="", highest_step=self._steps())
        self._context.last_words = f"attempt {attempt.number} was stopped: {notice.detail}"
        text, account = f"{self._context.last_words}\n  next: {next_step(code)}", None
        if asked and attempt.place.leads and stopping.request is not None:
            account = self._account_of(attempt, stopping.request, notice)
            if account is not None:
                attempt.journal.write(account)
                text = stop_text(account, str(self._context.control.path))
            self._requeue_after(attempt, stopping.request)
        say(text, attempt=attempt.number, account=account)
        return self._leave(attempt, code)

    def _account_of(self, attempt: Attempt, request: StopRequest, notice: Notice) -> Account | None:
        """Made once, by the leading agent, when all ranks have ended; None if storage does not answer."""
        control, code, detail = self._context.control, notice.exit_code, notice.detail

        def make() -> Account:
            step = last_step(control.journal, list_names(control.journal), attempt.number)
            saved = self._steps() or None
            return account_of_stop(attempt.number, request, code, detail=detail, step=step, saved=saved)

        look = Bounded(make, "account-of-stop")
        if not look.ended(LAST_WORDS):
            return None
        try:
            return look.result()
        except (HoldfastError, OSError):
            return None

    def _requeue_after(self, attempt: Attempt, request: StopRequest) -> None:
        """At the very end of this launch, the scheduler may be asked to queue the job again."""
        context = self._context
        context.scheduler.after_stop(attempt.number, request, self._steps(), context.excluded_nodes())

    def _regroup(self, attempt: Attempt, notice: Notice) -> int | None:
        """Nodes join or leave; the others go on at once."""
        gone = notice.nodes if notice.kind == "left" else []
        what = f"{', '.join(gone)} was told to leave" if gone else "more nodes joined"
        say(f"attempt {attempt.number} ends: {what}", attempt=attempt.number)
        self._await_reports(attempt)
        attempt.end("stopped", exit_code=0, cause="", highest_step=self._steps())
        meeting = self._meeting
        if attempt.place.node in gone:
            if meeting is not None:
                with contextlib.suppress(StoreLostError):
                    meeting.leave(notice.detail)
            return self._leave(attempt, notice.exit_code, wait=False)
        if attempt.place.leads:
            self._recovery.keep_size(attempt.place.nodes)
        if meeting is not None:
            for rank, member in enumerate(meeting.members):
                if member.node in gone:
                    meeting.see_gone(rank, notice.detail)
        attempt.close()
        return None

    def _await_reports(self, attempt: Attempt) -> None:
        """Wait until the workers of all nodes are gone; a signal no longer interrupts this."""
        if attempt.place.nodes > 1:
            attempt.await_all("reported", report_timeout(self._settings))

    def interrupted(self, attempt: Attempt | None, number: signal.Signals, stopping: Stopping | None) -> int:
        """A signal came while no workers run here: end this node, and the run if it cannot do without it."""
        failed = stopping is not None and stopping.request is not None  # its workers were unable to save
        code = int(ExitCode.STOPPED_UNSAVED if failed else ExitCode.STOPPED)
        context, meeting = self._context, self._meeting
        leads = attempt.place.leads if attempt is not None else meeting is not None and meeting.leads
        alone = leaves(leads=leads, elastic=context.elastic)
        sender = from_whom(context.signals.sender)
        if attempt is not None and attempt.place.nodes > 1 and not attempt.ended:
            node = attempt.place.node
            detail = f"the agent on {node} got {number.name}{sender}"
            notice = Notice(
                kind="left" if alone else "stopped",
                node=node,
                nodes=[node] if alone else [],
                detail=detail,
                exit_code=code,
            )
            with contextlib.suppress(DecisionTimeoutError):  # without a store, nobody can be told
                attempt.give(notice)
        self._shutdown()
        if meeting is not None:
            why = f"its agent got {number.name}{sender}"
            with contextlib.suppress(StoreLostError):
                if leads or (not alone and meeting.belongs()):
                    meeting.finish(code, f"{meeting.node} ends: {why}")
                else:
                    meeting.leave(why)
        if attempt is not None:
            with contextlib.suppress(DecisionTimeoutError):
                attempt.count_in("reported")  # otherwise the leader would wait for this node
            attempt.end("stopped", exit_code=code, cause="", highest_step=self._steps())
            self._leave(attempt, code, wait=attempt.place.leads)
        if leads:
            self._requeue_between(attempt, number)
        context.last_words = f"stopped by {number.name}{sender}"
        say(f"stopped by {number.name}{sender}; start the same command again to resume")
        return code

    def _requeue_between(self, attempt: Attempt | None, number: signal.Signals) -> None:
        """A scheduler's signal means the same while no workers run: the job may be queued again."""
        context = self._context
        node = self._meeting.node if self._meeting is not None else ""
        sender = context.signals.sender
        request = StopRequest(
            source=Source.SIGNAL,
            detail=f"{number.name}{from_whom(sender)} to the leading agent, between two attempts",
            signal=number.name,
            sender=sender,
            node=node,
            at=time.time(),
        )
        newest = attempt.number if attempt is not None else max(attempt_numbers(context.control), default=0)
        context.scheduler.after_stop(newest, request, self._steps(), context.excluded_nodes())

    # -- failures -------------------------------------------------------------------------------------------

    def _without_leader(self, attempt: Attempt, notice: Notice, stopping: Stopping) -> int | None:
        """The leader of the next round decides about this one.

        If the leader is still there, it was stopped or cut off. The others go on without it, and it must not
        end the run for them: it comes to the meeting, learns that it was taken for gone, and joins anew.
        """
        say(f"attempt {attempt.number} ends: {notice.detail}", attempt=attempt.number)
        if stopping.of_all:
            return self.without_others(attempt, notice.detail)
        if self._meeting is None:
            raise LeaderLostError(
                f"{notice.detail}, and with --rdzv-backend static no other node can take its place. "
                "Start the same command again, or use --rdzv-backend c10d"
            )
        if attempt.place.leads:
            attempt.journal.write(LeaseLost(epoch=attempt.told.epoch, evidence=notice.detail))
        else:
            self._recovery.keep_size(attempt.place.nodes)
            self._meeting.see_gone(0, notice.detail)
            self._recovery.lost_leader = lost_nodes(notice)
        attempt.close()
        return None

    def without_others(self, attempt: Attempt, why: str) -> int:
        """The leader or the store was lost during a stop: nobody can say any longer what was saved."""
        self._shutdown()
        self._context.last_words = f"the stop could not be completed: {why}"
        say(f"{self._context.last_words}\n  next: {next_step(ExitCode.STOPPED_UNSAVED)}")
        if self._meeting is not None and not self._meeting.lost:
            with contextlib.suppress(StoreLostError):
                self._meeting.leave(why)
        attempt.close()
        return ExitCode.STOPPED_UNSAVED

    def _recover(self, attempt: Attempt, notice: Notice, stopping: Stopping) -> int | None:
        request = stopping.request if stopping.of_all else None
        with contextlib.nullcontext() if request is not None else self._signals.interruptible():
            incident = self._recovery.settle(attempt, notice, request.detail if request is not None else "")
        if self._meeting is not None:
            for rank, why in attempt.lost_nodes().items():
                self._meeting.see_gone(rank, why)
        if request is not None and attempt.place.leads:
            self._requeue_after(attempt, request)
        return self._act(attempt, incident)

    def _act(self, attempt: Attempt, incident: DecidedIncident) -> int | None:
        """Do what was decided; returns an exit code, or None for another attempt."""
        decision = incident.decision
        self._context.learned_exclusions.extend(decision.exclude)
        if attempt.place.leads:
            self._recovery.tell(incident)
        if decision.action in (Action.STOP, Action.REQUEUE):
            return self._leave(attempt, decision.exit_code)
        if attempt.place.leads:
            self._recovery.keep_size(attempt.place.nodes)
        attempt.close()
        return None

    # -- taking leave ---------------------------------------------------------------------------------------

    def _leave(self, attempt: Attempt, code: int, *, wait: bool = True) -> int:
        """The last act of a launch: let the others read what they need before this process is gone."""
        if wait and self._meeting is not None:
            with contextlib.suppress(StoreLostError):
                self._meeting.finish(code, f"attempt {attempt.number} ended with code {code}")
        if attempt.place.nodes > 1:
            with contextlib.suppress(DecisionTimeoutError):  # the store's host has left already
                attempt.count_in("leaving")
                if wait:
                    attempt.await_all("leaving", LEAVE)
        attempt.close()
        return code

    def abandon(self, attempt: Attempt | None, error: BaseException, stopping: Stopping | None) -> int | None:
        """Something around the group broke (the store, the control directory): end what can be ended.

        Returns the code to end with if the run was to stop anyway and only its storage failed; else None.
        Raises EndedByStorageError instead of an error that only says which record could not be written.
        """
        self._shutdown()
        request = stopping.request if stopping is not None and stopping.of_all else None
        if request is None or not isinstance(error, StorageError):
            self._abandon(attempt, error)
            if isinstance(error, StorageError) and self._recovery.storage is not None:
                raise EndedByStorageError(self._recovery.storage_words()) from error
            return None
        code = ExitCode.STOPPED_UNSAVED
        text = f"the run was to stop ({request.detail}), but could not save: {error}"
        self._context.last_words = text
        say(f"{text}\n  next: {next_step(code)}")
        self.tell_meeting(code, str(error).partition("\n")[0])
        if attempt is not None and attempt.place.leads:
            number, scheduler = attempt.number, self._context.scheduler
            last = Bounded(
                lambda: scheduler.after_stop(number, request, self._steps(), self._excluded()), "last-words"
            )
            last.ended(LAST_WORDS)
            attempt.close()
        return code

    def _excluded(self) -> list[str]:
        try:
            return self._context.excluded_nodes()
        except HoldfastError:
            return []

    def _abandon(self, attempt: Attempt | None, error: BaseException) -> None:
        known = error.code if isinstance(error, StopRun) else getattr(error, "exit_code", None)
        code = int(known or ExitCode.DECISION_TIMEOUT)
        why = str(error).partition("\n")[0]
        self.tell_meeting(code, why)
        last = Bounded(lambda: self._end_abandoned(attempt, code, why), "last-words")
        if last.ended(LAST_WORDS):
            last.result()

    def _end_abandoned(self, attempt: Attempt | None, code: int, why: str) -> None:
        """Write what is left to be written, on storage that may not answer."""
        if code == ExitCode.STORAGE_FAILED:
            self._requeue_for_storage(attempt, why)
        if attempt is None or attempt.ended:
            return
        try:
            told, cause = self._recovery.storage is not None, Cause.INFRASTRUCTURE
            attempt.end("failed", exit_code=code, cause=cause, highest_step=self._steps(), quiet=told)
        except HoldfastError as refused:
            attempt.journal.write(Warned(message=f"attempt {attempt.number} has no end: {refused}"))
        attempt.close()

    def _requeue_for_storage(self, attempt: Attempt | None, why: str) -> None:
        """Ask for it at the very end of this launch; by the leading agent, or by all if nobody leads yet."""
        context, meeting = self._context, self._meeting
        if attempt is not None and not attempt.place.leads:
            return
        if attempt is None and meeting is not None and not meeting.leads:
            return
        number = attempt.number if attempt is not None else 0
        with contextlib.suppress(HoldfastError):
            number = number or max(attempt_numbers(context.control), default=0)
        context.scheduler.storage_failed(number, why, self._steps(), self._excluded())

    def tell_meeting(self, code: int, why: str) -> None:
        """If the leader's launch ends, the run ends for all; any other node only takes its leave."""
        meeting = self._meeting
        if meeting is None:
            return
        with contextlib.suppress(StoreLostError):
            if meeting.leads:
                meeting.finish(code, why)
            else:
                meeting.leave(why)

    def _steps(self) -> int:
        return highest_committed_step(self._settings.checkpoint_root(), self._context.control)
