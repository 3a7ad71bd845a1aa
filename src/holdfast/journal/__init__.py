"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.journal import events as events
    from holdfast.journal.event import Event as Event
    from holdfast.journal.event import Unknown as Unknown
    from holdfast.journal.event import because as because
    from holdfast.journal.event import event_name as event_name
    from holdfast.journal.events import STOP as STOP
    from holdfast.journal.events import Account as Account
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
    from holdfast.journal.events import FunctionRestarted as FunctionRestarted
    from holdfast.journal.events import HealthFailed as HealthFailed
    from holdfast.journal.events import JobFound as JobFound
    from holdfast.journal.events import LeaseClaimed as LeaseClaimed
    from holdfast.journal.events import LeaseLost as LeaseLost
    from holdfast.journal.events import OperatorActed as OperatorActed
    from holdfast.journal.events import PingFailed as PingFailed
    from holdfast.journal.events import ProbationEnded as ProbationEnded
    from holdfast.journal.events import RejectedOption as RejectedOption
    from holdfast.journal.events import ReplicaFailed as ReplicaFailed
    from holdfast.journal.events import RequeueAsked as RequeueAsked
    from holdfast.journal.events import RestartFaulted as RestartFaulted
    from holdfast.journal.events import RestartHandedOver as RestartHandedOver
    from holdfast.journal.events import RestartPlanned as RestartPlanned
    from holdfast.journal.events import Resumed as Resumed
    from holdfast.journal.events import RunCreated as RunCreated
    from holdfast.journal.events import RunFinished as RunFinished
    from holdfast.journal.events import RungRejected as RungRejected
    from holdfast.journal.events import SaveCommitted as SaveCommitted
    from holdfast.journal.events import SaveFailed as SaveFailed
    from holdfast.journal.events import SaveLines as SaveLines
    from holdfast.journal.events import SaveSkipped as SaveSkipped
    from holdfast.journal.events import SaveStarted as SaveStarted
    from holdfast.journal.events import StandingChanged as StandingChanged
    from holdfast.journal.events import StepRejected as StepRejected
    from holdfast.journal.events import StepsDone as StepsDone
    from holdfast.journal.events import StopAgreed as StopAgreed
    from holdfast.journal.events import StopAsked as StopAsked
    from holdfast.journal.events import StopForced as StopForced
    from holdfast.journal.events import StopHastened as StopHastened
    from holdfast.journal.events import StopSaved as StopSaved
    from holdfast.journal.events import StorageAlarm as StorageAlarm
    from holdfast.journal.events import StragglerFound as StragglerFound
    from holdfast.journal.events import StragglersReported as StragglersReported
    from holdfast.journal.events import ThroughputLow as ThroughputLow
    from holdfast.journal.events import Verdict as Verdict
    from holdfast.journal.events import Warned as Warned
    from holdfast.journal.events import WorkerFailed as WorkerFailed
    from holdfast.journal.events import WorkersStarted as WorkersStarted
    from holdfast.journal.events import decode_loss as decode_loss
    from holdfast.journal.events import encode_loss as encode_loss
    from holdfast.journal.line import EVENT_NAMES as EVENT_NAMES
    from holdfast.journal.line import REPORTER as REPORTER
    from holdfast.journal.line import AnyEvent as AnyEvent
    from holdfast.journal.line import Line as Line
    from holdfast.journal.line import condense as condense
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
    from holdfast.journal.writer import JournalWriter as JournalWriter
else:
    __getattr__ = offers(__name__)
