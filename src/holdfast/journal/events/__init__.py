"""The events of a journal by subject, each with its fields and how it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.journal.events.cluster import HealthFailed as HealthFailed
    from holdfast.journal.events.cluster import JobFound as JobFound
    from holdfast.journal.events.cluster import PingFailed as PingFailed
    from holdfast.journal.events.cluster import RequeueAsked as RequeueAsked
    from holdfast.journal.events.copies import CopiesDropped as CopiesDropped
    from holdfast.journal.events.copies import CopyDeleted as CopyDeleted
    from holdfast.journal.events.copies import CopyDrained as CopyDrained
    from holdfast.journal.events.copies import CopyFetched as CopyFetched
    from holdfast.journal.events.copies import CopyQuarantined as CopyQuarantined
    from holdfast.journal.events.copies import CopyReadBack as CopyReadBack
    from holdfast.journal.events.copies import CopyReplaced as CopyReplaced
    from holdfast.journal.events.copies import CopyReplicated as CopyReplicated
    from holdfast.journal.events.copies import DrainFailed as DrainFailed
    from holdfast.journal.events.copies import ReplicaFailed as ReplicaFailed
    from holdfast.journal.events.copies import StorageAlarm as StorageAlarm
    from holdfast.journal.events.decisions import FAILURE as FAILURE
    from holdfast.journal.events.decisions import STOP as STOP
    from holdfast.journal.events.decisions import Account as Account
    from holdfast.journal.events.decisions import Decision as Decision
    from holdfast.journal.events.decisions import OperatorActed as OperatorActed
    from holdfast.journal.events.decisions import RejectedOption as RejectedOption
    from holdfast.journal.events.restarts import FunctionRestarted as FunctionRestarted
    from holdfast.journal.events.restarts import RestartFaulted as RestartFaulted
    from holdfast.journal.events.restarts import RestartHandedOver as RestartHandedOver
    from holdfast.journal.events.restarts import RestartPlanned as RestartPlanned
    from holdfast.journal.events.results import DataSkipped as DataSkipped
    from holdfast.journal.events.results import DeterminismMeasured as DeterminismMeasured
    from holdfast.journal.events.results import ProbationEnded as ProbationEnded
    from holdfast.journal.events.results import StandingChanged as StandingChanged
    from holdfast.journal.events.results import StepRejected as StepRejected
    from holdfast.journal.events.results import StepsDone as StepsDone
    from holdfast.journal.events.results import ThroughputLow as ThroughputLow
    from holdfast.journal.events.results import Verdict as Verdict
    from holdfast.journal.events.results import decode_loss as decode_loss
    from holdfast.journal.events.results import encode_loss as encode_loss
    from holdfast.journal.events.run import AttemptEnded as AttemptEnded
    from holdfast.journal.events.run import AttemptStarted as AttemptStarted
    from holdfast.journal.events.run import LeaseClaimed as LeaseClaimed
    from holdfast.journal.events.run import LeaseLost as LeaseLost
    from holdfast.journal.events.run import RunCreated as RunCreated
    from holdfast.journal.events.run import RunFinished as RunFinished
    from holdfast.journal.events.run import Warned as Warned
    from holdfast.journal.events.run import WorkerFailed as WorkerFailed
    from holdfast.journal.events.run import WorkersStarted as WorkersStarted
    from holdfast.journal.events.saves import CadenceChosen as CadenceChosen
    from holdfast.journal.events.saves import CheckpointsDeleted as CheckpointsDeleted
    from holdfast.journal.events.saves import Resumed as Resumed
    from holdfast.journal.events.saves import RungRejected as RungRejected
    from holdfast.journal.events.saves import SaveCommitted as SaveCommitted
    from holdfast.journal.events.saves import SaveFailed as SaveFailed
    from holdfast.journal.events.saves import SaveLines as SaveLines
    from holdfast.journal.events.saves import SaveSkipped as SaveSkipped
    from holdfast.journal.events.saves import SaveStarted as SaveStarted
    from holdfast.journal.events.stops import StopAgreed as StopAgreed
    from holdfast.journal.events.stops import StopAsked as StopAsked
    from holdfast.journal.events.stops import StopForced as StopForced
    from holdfast.journal.events.stops import StopHastened as StopHastened
    from holdfast.journal.events.stops import StopSaved as StopSaved
    from holdfast.journal.events.stragglers import StragglerFound as StragglerFound
    from holdfast.journal.events.stragglers import StragglersReported as StragglersReported
else:
    __getattr__ = offers(__name__)
