"""The control directory: the run's durable memory, and who may act on it.

For the lease and its fence, attempts, decisions, lineage, standing, what operators asked for, and the store
behind it.
Promises: a record is durable before anybody acts on it; whoever was cut off can no longer commit, delete or
decide.
Never: change a record in place where one can be appended; take silence for consent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.record import operator
    from holdfast.record.attempts import (
        ACCOUNT,
        NAME,
        AttemptRecord,
        EndRecord,
        FailureRecord,
        HeadRecord,
        attempt_numbers,
        begin_attempt,
        count_transient,
        device_errors_of,
        diagnosed,
        end_attempt,
        end_of,
        ends_of,
        failures_of,
        keep_account,
        latest_head,
        read_attempt,
        record_crash,
        record_device_errors,
        record_failure,
        record_rejection,
        record_settled,
        rejection_of,
        settled_in,
        settled_steps,
        write_head,
    )
    from holdfast.record.decisions import (
        RECOVERY,
        Decisions,
        DecisionStore,
        await_key,
        decision_path,
        read_key,
        within,
    )
    from holdfast.record.directory import (
        MAX_RECORD_BYTES,
        ControlDirectory,
        append,
        contents,
        create_record,
        entries,
        list_names,
        read_record,
    )
    from holdfast.record.group import (
        Group,
        HostedStore,
        add_up,
        can_bind,
        connect,
        gather,
        hand_out,
        join_group,
        leave_group,
        listen,
        reachable_address,
        scatter,
        share,
    )
    from holdfast.record.history import (
        INCIDENT,
        LAUNCHER_ENDED,
        avoided,
        failed_attempt,
        keep_incident,
        last_decision,
        past_attempts,
        refused_launch,
        rung_of,
        was_kept,
    )
    from holdfast.record.launches import (
        PROGRESS,
        VARIABLE,
        LaunchInfo,
        LaunchRecord,
        RunOrigin,
        applies_again,
        digest_of,
        last_fresh,
        launch_to_repeat,
        newest_launches,
        one_config,
        origin_now,
        progress,
        progress_file,
        read_handover,
        record_launch,
        record_origin,
        told_progress,
    )
    from holdfast.record.lease import (
        COMMANDS,
        HANDOVER,
        Claim,
        Fence,
        LeaseKeeper,
        LeaseState,
        Writing,
        announce,
        claim,
        current_epoch,
        give_up,
        given_up,
        is_busy,
        lease_state,
        lock_for_writer,
        newest_claim,
        read_beat,
        read_claim,
        who_holds,
    )
    from holdfast.record.limits import (
        UNPROTECTED,
        HelloRecord,
        check_timeouts,
        limits_of,
        read_hello,
        read_learned,
        refuse_unknown_to_launcher,
        refuse_without_launcher,
        restart_order,
        store_hello,
        store_learned,
        switched_off,
    )
    from holdfast.record.lineage import (
        CommitRecord,
        DeletedRecord,
        Timeline,
        commits_of,
        condemned_with,
        deleted_names,
        descendants,
        find_commit,
        find_deleted,
        read_timeline,
        record_commit,
        record_deleted,
        record_done,
        shelve,
        tied_to_ranks,
        was_committed,
    )
    from holdfast.record.operator import (
        Controls,
        ExclusionRecord,
        OperatorRequest,
        Pin,
        Skip,
        budget_reset,
        exclude,
        excluded,
        in_force,
        paused,
        pinned,
        read_skips,
        readmit,
        record_requeue,
        record_skip,
        requeues_without_progress,
        stop_asked,
        use_up,
        withdraw_requeue,
    )
    from holdfast.record.secret import SealedStore, prove, proves, run_secret, to_cut
    from holdfast.record.standing import (
        BESIDE,
        RootBook,
        Standing,
        StandingBook,
        StandingRecord,
        known_remote,
        known_root,
        newest,
        note_root,
        words_in,
    )
else:
    __getattr__ = offers(__name__)
