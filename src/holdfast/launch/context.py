"""What the parts of one `holdfast run` share, with its signals, its scheduler and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from holdfast.base import duration, plural
from holdfast.cluster import (
    Asked,
    SlurmJob,
    TimeLimit,
    ask_on_record,
    job_found,
    may_requeue,
    node_name,
    requeue_after_stop,
    requeue_by_decision,
)
from holdfast.config import Settings
from holdfast.errors import ControlError, HoldfastError, StorageError
from holdfast.journal import JournalWriter
from holdfast.journal.events import Warned
from holdfast.launch.alert import Alerts
from holdfast.launch.gate import Gate
from holdfast.launch.monitor import Learner, Monitor
from holdfast.launch.nodes import AttemptAnnouncement, Leadership
from holdfast.launch.terminal import SavesTold
from holdfast.launch.workers import OrphanKeeper, Orphans, Starter
from holdfast.policy import (
    MAX_REQUEUES,
    Exclusion,
    Grace,
    StopRequest,
    does_not_fit,
    is_repeated,
    say_grace,
)
from holdfast.process import SeenSender, began_at, named, seen, take, watch
from holdfast.record import (
    ControlDirectory,
    LaunchInfo,
    excluded,
    record_launch,
    requeues_without_progress,
)
from holdfast.train import measured_before

# Signals that ask the launcher to stop.
#
# While an attempt runs, a first signal is a request: the ranks agree on a step, save and end (stops.py). A
# handler that raises anywhere would tear a durable write apart; one that only sets a flag would let a
# rendezvous wait for minutes. So a signal raises only inside `interruptible()`, which wraps the long waits
# while no attempt runs, and is otherwise kept until the launcher looks.
#
# A second signal means "now": `hurry` is called, which kills. Within `REPEATED` of the first it is the same
# request arriving by another route, and ignored; but pressing Ctrl-C twice is meant.


ALSO = (signal.SIGUSR1, signal.SIGUSR2)
"""Taken besides those that torchrun takes: schedulers announce the end of a job with them."""


class Interrupted(BaseException):
    """A stop signal arrived during a wait.

    Not an `Exception`, because it can be raised anywhere within the wait: code that handles what can go wrong
    there, such as `threading.Thread.start` when no thread can be had, must not mistake it for that.
    """


class LaunchSignals:
    def __init__(self, names: str) -> None:
        """`names`: as torchrun's --signals-to-handle takes them, e.g. `SIGTERM,SIGINT`."""
        named = [name.strip() for name in names.split(",")]
        known = [signal.Signals[name] for name in named if name in signal.Signals.__members__]
        self._numbers = list(dict.fromkeys([*known, *ALSO]))
        self._may_raise = False
        self._at = 0.0
        self.received: signal.Signals | None = None
        """The first signal."""
        self.again: signal.Signals | None = None
        """The signal that meant "now"."""
        self._seen: dict[str, SeenSender | None] = {}
        self._named: dict[str, str] = {}
        self.hurry: Callable[[], None] | None = None

    def install(self) -> None:
        """Take the signals over."""
        for number in self._numbers:
            signal.signal(number, self._handle)
            watch(number)

    @property
    def sender(self) -> str:
        """Who sent the first one; empty if that is not known. The handler never waits for this."""
        return self._name("first", self.received)

    @property
    def sender_again(self) -> str:
        return self._name("again", self.again)

    def _name(self, which: str, number: signal.Signals | None) -> str:
        if number is None:
            return ""
        if which not in self._named:
            self._named[which] = named(number, self._seen.get(which))
        return self._named[which]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        sender = None
        with contextlib.suppress(Exception):  # nothing about the sender may hold a stop up
            sender = seen(take(number))
        if self.received is not None:
            if number != signal.SIGINT and is_repeated(self._at, time.monotonic()):
                return
            self._seen.setdefault("again", sender)
            self.again = self.again or signal.Signals(number)
            if self.hurry is not None:
                self.hurry()
            return
        self._at = time.monotonic()
        self._seen["first"] = sender
        self.received = signal.Signals(number)
        if self._may_raise:
            raise Interrupted

    def check(self) -> None:
        """Raise if a signal has arrived."""
        if self.received is not None:
            raise Interrupted

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        self._may_raise = True
        try:
            self.check()
            yield
        finally:
            self._may_raise = False


# The scheduler as agents see it: which job this is, when it ends, and whether to queue it again.
#
# Guarantee: without a scheduler everything here is silent and says no. The scheduler is asked to queue the
# job again at most once per launch, by the leading agent alone, as the very last thing: a job that is queued
# again is ended.


NAME = "Slurm"
ANSWER = 1.0
"""Seconds that an attempt's start may wait to be able to say how much time is left."""


class Scheduler:
    """One for a launch."""

    def __init__(self, control: ControlDirectory, settings: Settings, job: SlurmJob | None) -> None:
        self.job = job
        self._lead = settings.slurm.preempt_time
        self._limit: TimeLimit | None = None
        self._control = control
        self._setting = settings.slurm.requeue
        self._last: Callable[[Callable[[str], None]], None] | None = None

    @property
    def ends_at(self) -> float | None:
        """When the job will be ended, if this agent has asked the scheduler: the leading agent does.

        The environment alone is as old as the job: somebody may have extended the job's limit since.
        """
        return self._limit.ends_at if self._limit is not None else None

    @property
    def grace(self) -> Grace | None:
        """The time that the scheduler leaves between SIGTERM and SIGKILL, if this agent has asked it."""
        return self._limit.grace if self._limit is not None else None

    def due(self) -> StopRequest | None:
        """The request to stop ahead of the time limit. For one agent only: calling it asks the scheduler."""
        return self._watch().due(time.time())

    def ask_again(self) -> None:
        """A stop was asked for, maybe by the scheduler, which then ends the job sooner. Returns at once."""
        if self.job is not None:
            self._watch().ask_again()

    def _watch(self) -> TimeLimit:
        if self._limit is None:
            self._limit = TimeLimit(self.job, self._lead)
        return self._limit

    def _first_answer(self) -> float | None:
        """When the job ends; once per launch, the scheduler gets a moment to say so."""
        fresh = self._limit is None
        return self._watch().first_answer(ANSWER if fresh else 0.0)

    def found(self, journal: JournalWriter, attempt: int, launch: str, tell: Callable[[str], None]) -> None:
        """An attempt of this agent begins: journal and print the job it runs in, and whether a save fits."""
        job = self.job
        if job is None:
            return
        ends_at = self._first_answer()
        self.job = job = self._watch().job or job
        journal.write(job_found(job, ends_at, self._setting))
        parts = [f"{NAME} job {job.label}"]
        parts += [f"restart {job.restarts}"] if job.restarts else []
        parts += [plural(len(job.nodes), "node")] if job.nodes else []
        parts += [f"{duration(max(0.0, ends_at - time.time()))} left"] if ends_at is not None else []
        tell(", ".join(parts))
        if (grace := self.grace) is not None:
            saves = measured_before(self._control, attempt, launch).saves
            took = saves[-1][1] if saves else None
            if does_not_fit(grace, took):
                journal.write(Warned(message=say_grace(grace, took)))
                tell(f"warning: {say_grace(grace, took)}")
            else:
                tell(say_grace(grace, took))

    def can_requeue(self, step: int) -> bool:
        """Whether the job would be started again, and was not requeued too often without progress."""
        return self.job is not None and may_requeue(self.job, self._setting, self._stalled(step))

    def after_stop(self, attempt: int, request: StopRequest, step: int, exclude: Sequence[str]) -> None:
        """The run stops on request: at the end of this launch the job may be queued again."""
        setting, stalled = self._setting, self._stalled(step)

        def ask(job: SlurmJob) -> Asked:
            return requeue_after_stop(job, setting, request, exclude=exclude, stalled=stalled)

        self._at_last(attempt, step, ask)

    def by_decision(
        self, attempt: int, reason: str, step: int, exclude: Sequence[str], *, stalled: int = 0
    ) -> None:
        """Recovery decided that the job is to be queued again; its own budget has counted already."""

        def ask(job: SlurmJob) -> Asked:
            return requeue_by_decision(job, self._setting, reason, exclude=exclude, stalled=stalled)

        self._at_last(attempt, step, ask)

    def storage_failed(self, attempt: int, reason: str, step: int, exclude: Sequence[str]) -> None:
        """The run's storage cannot be written, not even to record a decision: at the end of this launch the
        job may be queued again."""
        self.by_decision(attempt, reason, step, exclude, stalled=self._stalled(step))

    def part(self, tell: Callable[[str], None]) -> None:
        """The last act of a launch, when nothing else is left to do."""
        if self._limit is not None:
            self._limit.close()
        last, self._last = self._last, None
        if last is None:
            return
        try:
            last(tell)
        except (HoldfastError, OSError) as error:  # how the run ended is settled: an error must not hide it
            label = self.job.label if self.job else ""
            tell(f"warning: it is not known whether job {label} is queued again: {error}")

    def _at_last(self, attempt: int, step: int, ask: Callable[[SlurmJob], Asked]) -> None:
        job = self.job
        if job is None:
            return

        def last(tell: Callable[[str], None]) -> None:
            done = ask_on_record(self._control, "launcher", job, attempt, step, lambda: ask(job))
            asked = "asked" if done.asked else "not asked"
            tell(f"{NAME} was {asked} to queue job {job.label} again: {done.reason}")

        self._last = last

    def _stalled(self, step: int) -> int:
        try:
            return requeues_without_progress(self._control, step)
        except StorageError:  # take Slurm's own count instead, which is never lower
            return self.job.restarts if self.job is not None else 0
        except ControlError:
            return MAX_REQUEUES


# The record that a launch leaves, for whoever has to start the run again.


def keep_launch(
    context: LaunchContext, argv: Sequence[str], workers_per_node: int, tell: Callable[[str], None]
) -> None:
    """Write down how this launch was started; if that cannot be done, say so, and the launch goes on."""
    settings = context.settings
    problem = record_launch(
        context.control,
        context.launch,
        argv,
        node=node_name(settings.launch.node_name),
        min_nodes=context.min_nodes,
        max_nodes=context.max_nodes,
        workers_per_node=workers_per_node,
        root=settings.checkpoint.root,
        remote=settings.checkpoint.remote_root,
        resume_from=settings.checkpoint.resume_from,
        force=settings.checkpoint.force,
    )
    if problem:
        tell(problem)


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # somebody has deleted it
        return ""


@dataclass(kw_only=True)
class LaunchContext:
    control: ControlDirectory
    created: bool
    """Whether this agent created the run's directory and still has to journal that."""
    settings: Settings
    config: str
    command_line: dict[str, str]
    restarts_chosen: bool
    """Whether somebody set launch.max_restarts, rather than leave it at its default."""
    launch: str
    """The launch's id: first this agent's proposal, then what all agents of the launch agreed on."""
    min_nodes: int
    max_nodes: int
    started_with: str
    """A digest of what this launch starts: see `launches.digest_of`."""
    alerts: Alerts
    signals: LaunchSignals
    scheduler: Scheduler
    gate: Gate
    leadership: Leadership
    orphans: Orphans
    keeper: OrphanKeeper
    starter: Starter
    monitor: Monitor
    learner: Learner
    saves: SavesTold
    leads: bool = False
    """Whether this agent led the last attempt."""
    last_words: str = ""
    """Why the launch ends, if its code alone does not say it."""
    began: float = field(default_factory=lambda: began_at(os.getpid()))
    """When this launch began, in seconds since 1970; 0 if that is not known."""
    directory: str = field(default_factory=_here)
    """The directory in which this agent was started, and is."""
    earlier_launches: list[str] = field(default_factory=list)
    """Ids under which these agents met before the store's host was lost."""
    learned_exclusions: list[Exclusion] = field(default_factory=list)
    """What decisions of this launch excluded: known here before their record can be read everywhere."""

    @property
    def elastic(self) -> bool:
        """Whether the group may go on with fewer nodes than it began with."""
        return self.min_nodes < self.max_nodes

    def tend_starter(self) -> None:
        """Look after the parent of the workers; it is a child that is neither a worker nor an orphan."""
        self.starter.tend()
        if self.starter.parent_pid is not None:
            self.orphans.own(self.starter.parent_pid)

    def rename_launch(self) -> None:
        """A new id for what goes on after the loss of the store."""
        self.earlier_launches.append(self.launch)
        self.launch = uuid.uuid4().hex[:12]

    def exclusions(self) -> list[Exclusion]:
        """The nodes and devices that are kept out of the run now."""
        found = excluded(self.control)
        known = {(one.node, one.device) for one in found}
        fresh = [one for one in self.learned_exclusions if (one.node, one.device) not in known]
        # Once its record can be read here, the records alone count: somebody may readmit what was excluded.
        self.learned_exclusions = fresh
        return [*found, *fresh]

    def excluded_nodes(self) -> list[str]:
        """Whole nodes that are kept out, for whoever chooses the nodes of the next start."""
        return sorted({one.node for one in self.exclusions() if one.device is None})

    def handover(self, told: AttemptAnnouncement, node: str, local_rank: int) -> LaunchInfo:
        return LaunchInfo(
            run_dir=str(self.control.path),
            run_id=self.control.run_id,
            launch=self.launch,
            attempt=told.attempt,
            epoch=told.epoch,
            node=node,
            config=self.config,
            command_line=self.command_line,
            directory=self.directory,
            lease_ttl=self.settings.control.lease_ttl,
            orders=told.orders,
            restarts_left=told.restarts_left,
            device=told.arrangement.devices_of_ranks(node, {0: local_rank}).get(0, ""),
            monitor=str(self.monitor.path),
        )
