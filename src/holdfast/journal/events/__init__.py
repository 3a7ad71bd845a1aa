"""The events of a run's journal, by subject; each can show itself as a line of plain text.

For the code that records what happened, and for its readers: the terminal, the report, policies.
Promises: tags and fields of an event stay; an added field has a default, so that older lines can be read.
Never: decide anything, or use more than an event's own fields to say what happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.journal.events.cluster import HealthFailed, JobFound, PingFailed, RequeueAsked
    from holdfast.journal.events.copies import (
        CopiesDropped,
        CopyDeleted,
        CopyDrained,
        CopyFetched,
        CopyQuarantined,
        CopyReadBack,
        CopyReplaced,
        CopyReplicated,
        DrainFailed,
        ReplicaFailed,
        StorageAlarm,
    )
    from holdfast.journal.events.decisions import STOP, Account, DecisionMade, OperatorActed, RejectedOption
    from holdfast.journal.events.results import (
        DataSkipped,
        DeterminismMeasured,
        ProbationEnded,
        StandingChanged,
        StepRejected,
        StepsDone,
        StragglerFound,
        StragglersReported,
        ThroughputLow,
        Verdict,
        decode_loss,
        encode_loss,
    )
    from holdfast.journal.events.run import (
        AttemptEnded,
        AttemptStarted,
        FunctionRestarted,
        LeaseClaimed,
        LeaseLost,
        LoadTimes,
        RankStarted,
        RestartFaulted,
        RestartHandedOver,
        RestartPlanned,
        RunCreated,
        RunFinished,
        StopAgreed,
        StopAsked,
        StopForced,
        StopHastened,
        StopSaved,
        Warned,
        WorkerFailed,
        WorkersStarted,
    )
    from holdfast.journal.events.saves import (
        CadenceChosen,
        CheckpointsDeleted,
        Resumed,
        RungRejected,
        SaveCommitted,
        SaveFailed,
        SaveLines,
        SaveSkipped,
        SaveStarted,
    )
else:
    __getattr__ = offers(__name__)
