"""The append-only record of a run's events and decisions.

For writing events as they happen, reading them while they are written, and saying them in a line of text.
Promises: an event is one JSON line, typed, versioned and never changed; older journals are read.
Never: hold a run up because the journal cannot be written; decide by what it says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.journal import events
    from holdfast.journal.events import (
        EVENT_NAMES,
        AnyEvent,
        AttemptEnded,
        AttemptStarted,
        CadenceChosen,
        CheckpointsDeleted,
        CopiesDropped,
        CopyDeleted,
        CopyDrained,
        CopyFetched,
        CopyQuarantined,
        CopyReadBack,
        CopyReplaced,
        CopyReplicated,
        DataSkipped,
        Decision,
        DeterminismMeasured,
        DrainFailed,
        LeaseClaimed,
        LeaseLost,
        Line,
        OperatorActed,
        ProbationEnded,
        RejectedOption,
        ReplicaFailed,
        Resumed,
        RunCreated,
        RunFinished,
        RungRejected,
        SaveCommitted,
        SaveFailed,
        SaveSkipped,
        SaveStarted,
        StandingChanged,
        StepRejected,
        StepsDone,
        StorageAlarm,
        ThroughputLow,
        Unknown,
        Verdict,
        Warned,
        WorkerFailed,
        WorkersStarted,
        decode_loss,
        encode_loss,
        event_name,
    )
    from holdfast.journal.reader import (
        JournalReader,
        batches,
        last_loss,
        last_step,
        nodes_started,
        rate,
        read_journal,
        read_tail,
        tails,
        unfinished_save,
    )
    from holdfast.journal.render import REPORTER, SaveLines, condense, render_event, restart_fault, worker_end
    from holdfast.journal.subjects import (
        STOP,
        Account,
        Event,
        FunctionRestarted,
        HealthFailed,
        JobFound,
        PingFailed,
        RequeueAsked,
        RestartFaulted,
        RestartHandedOver,
        RestartPlanned,
        StopAgreed,
        StopAsked,
        StopForced,
        StopHastened,
        StopSaved,
        StragglerFound,
        StragglersReported,
    )
    from holdfast.journal.writer import JournalWriter
else:
    __getattr__ = offers(__name__)
