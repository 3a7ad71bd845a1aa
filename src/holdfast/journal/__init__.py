"""The append-only record of a run's events and decisions.

For writing events as they happen, reading them while they are written, and saying them in a line of text.
Promises: an event is one JSON line, typed, versioned and never changed; older journals are read.
Never: hold a run up because the journal cannot be written; decide by what it says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.journal import events as events
    from holdfast.journal.events import EVENT_NAMES as EVENT_NAMES
    from holdfast.journal.events import AnyEvent as AnyEvent
    from holdfast.journal.events import AttemptEnded as AttemptEnded
    from holdfast.journal.events import AttemptStarted as AttemptStarted
    from holdfast.journal.events import CadenceChosen as CadenceChosen
    from holdfast.journal.events import CheckpointsDeleted as CheckpointsDeleted
    from holdfast.journal.events import CopiesDropped as CopiesDropped
    from holdfast.journal.events import CopyDeleted as CopyDeleted
    from holdfast.journal.events import CopyDrained as CopyDrained
    from holdfast.journal.events import CopyFetched as CopyFetched
    from holdfast.journal.events import CopyQuarantined as CopyQuarantined
    from holdfast.journal.events import CopyReadBack as CopyReadBack
    from holdfast.journal.events import CopyReplaced as CopyReplaced
    from holdfast.journal.events import CopyReplicated as CopyReplicated
    from holdfast.journal.events import DataSkipped as DataSkipped
    from holdfast.journal.events import Decision as Decision
    from holdfast.journal.events import DeterminismMeasured as DeterminismMeasured
    from holdfast.journal.events import DrainFailed as DrainFailed
    from holdfast.journal.events import LeaseClaimed as LeaseClaimed
    from holdfast.journal.events import LeaseLost as LeaseLost
    from holdfast.journal.events import Line as Line
    from holdfast.journal.events import OperatorActed as OperatorActed
    from holdfast.journal.events import ProbationEnded as ProbationEnded
    from holdfast.journal.events import RejectedOption as RejectedOption
    from holdfast.journal.events import ReplicaFailed as ReplicaFailed
    from holdfast.journal.events import Resumed as Resumed
    from holdfast.journal.events import RunCreated as RunCreated
    from holdfast.journal.events import RunFinished as RunFinished
    from holdfast.journal.events import RungRejected as RungRejected
    from holdfast.journal.events import SaveCommitted as SaveCommitted
    from holdfast.journal.events import SaveFailed as SaveFailed
    from holdfast.journal.events import SaveSkipped as SaveSkipped
    from holdfast.journal.events import SaveStarted as SaveStarted
    from holdfast.journal.events import StandingChanged as StandingChanged
    from holdfast.journal.events import StepRejected as StepRejected
    from holdfast.journal.events import StepsDone as StepsDone
    from holdfast.journal.events import StorageAlarm as StorageAlarm
    from holdfast.journal.events import ThroughputLow as ThroughputLow
    from holdfast.journal.events import Unknown as Unknown
    from holdfast.journal.events import Verdict as Verdict
    from holdfast.journal.events import Warned as Warned
    from holdfast.journal.events import WorkerFailed as WorkerFailed
    from holdfast.journal.events import WorkersStarted as WorkersStarted
    from holdfast.journal.events import decode_loss as decode_loss
    from holdfast.journal.events import encode_loss as encode_loss
    from holdfast.journal.events import event_name as event_name
    from holdfast.journal.reader import JournalReader as JournalReader
    from holdfast.journal.reader import batches as batches
    from holdfast.journal.reader import last_loss as last_loss
    from holdfast.journal.reader import last_step as last_step
    from holdfast.journal.reader import nodes_started as nodes_started
    from holdfast.journal.reader import rate as rate
    from holdfast.journal.reader import read_journal as read_journal
    from holdfast.journal.reader import read_tail as read_tail
    from holdfast.journal.reader import tails as tails
    from holdfast.journal.reader import unfinished_save as unfinished_save
    from holdfast.journal.render import REPORTER as REPORTER
    from holdfast.journal.render import SaveLines as SaveLines
    from holdfast.journal.render import condense as condense
    from holdfast.journal.render import render_event as render_event
    from holdfast.journal.render import restart_fault as restart_fault
    from holdfast.journal.render import worker_end as worker_end
    from holdfast.journal.subjects import STOP as STOP
    from holdfast.journal.subjects import Account as Account
    from holdfast.journal.subjects import Event as Event
    from holdfast.journal.subjects import FunctionRestarted as FunctionRestarted
    from holdfast.journal.subjects import HealthFailed as HealthFailed
    from holdfast.journal.subjects import JobFound as JobFound
    from holdfast.journal.subjects import PingFailed as PingFailed
    from holdfast.journal.subjects import RequeueAsked as RequeueAsked
    from holdfast.journal.subjects import RestartFaulted as RestartFaulted
    from holdfast.journal.subjects import RestartHandedOver as RestartHandedOver
    from holdfast.journal.subjects import RestartPlanned as RestartPlanned
    from holdfast.journal.subjects import StopAgreed as StopAgreed
    from holdfast.journal.subjects import StopAsked as StopAsked
    from holdfast.journal.subjects import StopForced as StopForced
    from holdfast.journal.subjects import StopHastened as StopHastened
    from holdfast.journal.subjects import StopSaved as StopSaved
    from holdfast.journal.subjects import StragglerFound as StragglerFound
    from holdfast.journal.subjects import StragglersReported as StragglersReported
    from holdfast.journal.writer import JournalWriter as JournalWriter
else:
    __getattr__ = offers(__name__)
