"""The control directory: the run's durable memory, and who may act on it.

For the lease and its fence, attempts, decisions, lineage, standing, what operators asked, and the store
behind it.
Promises: a record is durable before anybody acts on it; who was cut off can no longer commit, delete or
decide.
Never: change a record in place where it can be appended; take silence for consent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.record import operator as operator
    from holdfast.record.attempts import ACCOUNT as ACCOUNT
    from holdfast.record.attempts import AttemptRecord as AttemptRecord
    from holdfast.record.attempts import EndRecord as EndRecord
    from holdfast.record.attempts import FailureRecord as FailureRecord
    from holdfast.record.attempts import HeadRecord as HeadRecord
    from holdfast.record.attempts import attempt_numbers as attempt_numbers
    from holdfast.record.attempts import begin_attempt as begin_attempt
    from holdfast.record.attempts import end_attempt as end_attempt
    from holdfast.record.attempts import end_of as end_of
    from holdfast.record.attempts import ends_of as ends_of
    from holdfast.record.attempts import failures_of as failures_of
    from holdfast.record.attempts import keep_account as keep_account
    from holdfast.record.attempts import latest_head as latest_head
    from holdfast.record.attempts import read_attempt as read_attempt
    from holdfast.record.attempts import record_crash as record_crash
    from holdfast.record.attempts import record_failure as record_failure
    from holdfast.record.attempts import write_head as write_head
    from holdfast.record.decisions import RECOVERY as RECOVERY
    from holdfast.record.decisions import Decisions as Decisions
    from holdfast.record.decisions import Group as Group
    from holdfast.record.decisions import Store as Store
    from holdfast.record.decisions import add_up as add_up
    from holdfast.record.decisions import await_key as await_key
    from holdfast.record.decisions import decision_path as decision_path
    from holdfast.record.decisions import gather as gather
    from holdfast.record.decisions import join_group as join_group
    from holdfast.record.decisions import leave_group as leave_group
    from holdfast.record.decisions import read_key as read_key
    from holdfast.record.decisions import scatter as scatter
    from holdfast.record.decisions import share as share
    from holdfast.record.decisions import within as within
    from holdfast.record.directory import MAX_RECORD_BYTES as MAX_RECORD_BYTES
    from holdfast.record.directory import ControlDirectory as ControlDirectory
    from holdfast.record.directory import append as append
    from holdfast.record.directory import contents as contents
    from holdfast.record.directory import create_record as create_record
    from holdfast.record.directory import entries as entries
    from holdfast.record.directory import list_names as list_names
    from holdfast.record.directory import read_record as read_record
    from holdfast.record.findings import NAME as NAME
    from holdfast.record.findings import count_transient as count_transient
    from holdfast.record.findings import device_errors_of as device_errors_of
    from holdfast.record.findings import diagnosed as diagnosed
    from holdfast.record.findings import record_device_errors as record_device_errors
    from holdfast.record.findings import record_rejection as record_rejection
    from holdfast.record.findings import record_settled as record_settled
    from holdfast.record.findings import rejection_of as rejection_of
    from holdfast.record.findings import settled_in as settled_in
    from holdfast.record.findings import settled_steps as settled_steps
    from holdfast.record.history import INCIDENT as INCIDENT
    from holdfast.record.history import LAUNCHER_ENDED as LAUNCHER_ENDED
    from holdfast.record.history import keep_incident as keep_incident
    from holdfast.record.history import last_decision as last_decision
    from holdfast.record.history import own_measure as own_measure
    from holdfast.record.history import past_attempts as past_attempts
    from holdfast.record.history import refused_launch as refused_launch
    from holdfast.record.history import rung_of as rung_of
    from holdfast.record.history import was_kept as was_kept
    from holdfast.record.hosted_store import HostedStore as HostedStore
    from holdfast.record.hosted_store import can_bind as can_bind
    from holdfast.record.hosted_store import connect as connect
    from holdfast.record.hosted_store import listen as listen
    from holdfast.record.hosted_store import reachable_address as reachable_address
    from holdfast.record.launches import PROGRESS as PROGRESS
    from holdfast.record.launches import VARIABLE as VARIABLE
    from holdfast.record.launches import LaunchInfo as LaunchInfo
    from holdfast.record.launches import LaunchRecord as LaunchRecord
    from holdfast.record.launches import Origin as Origin
    from holdfast.record.launches import applies_again as applies_again
    from holdfast.record.launches import digest_of as digest_of
    from holdfast.record.launches import last_fresh as last_fresh
    from holdfast.record.launches import launch_to_repeat as launch_to_repeat
    from holdfast.record.launches import newest_launches as newest_launches
    from holdfast.record.launches import one_config as one_config
    from holdfast.record.launches import origin_now as origin_now
    from holdfast.record.launches import progress as progress
    from holdfast.record.launches import progress_file as progress_file
    from holdfast.record.launches import read_handover as read_handover
    from holdfast.record.launches import record_launch as record_launch
    from holdfast.record.launches import record_origin as record_origin
    from holdfast.record.launches import told_progress as told_progress
    from holdfast.record.lease import COMMANDS as COMMANDS
    from holdfast.record.lease import HANDOVER as HANDOVER
    from holdfast.record.lease import Claim as Claim
    from holdfast.record.lease import Fence as Fence
    from holdfast.record.lease import LeaseKeeper as LeaseKeeper
    from holdfast.record.lease import LeaseState as LeaseState
    from holdfast.record.lease import claim as claim
    from holdfast.record.lease import current_epoch as current_epoch
    from holdfast.record.lease import lease_state as lease_state
    from holdfast.record.lease import newest_claim as newest_claim
    from holdfast.record.lease import read_beat as read_beat
    from holdfast.record.lease import read_claim as read_claim
    from holdfast.record.lease import who_holds as who_holds
    from holdfast.record.limits import UNPROTECTED as UNPROTECTED
    from holdfast.record.limits import HelloRecord as HelloRecord
    from holdfast.record.limits import check_timeouts as check_timeouts
    from holdfast.record.limits import limits_of as limits_of
    from holdfast.record.limits import read_hello as read_hello
    from holdfast.record.limits import read_learned as read_learned
    from holdfast.record.limits import refuse_unknown_to_launcher as refuse_unknown_to_launcher
    from holdfast.record.limits import refuse_without_launcher as refuse_without_launcher
    from holdfast.record.limits import restart_order as restart_order
    from holdfast.record.limits import store_hello as store_hello
    from holdfast.record.limits import store_learned as store_learned
    from holdfast.record.limits import switched_off as switched_off
    from holdfast.record.lineage import CommitRecord as CommitRecord
    from holdfast.record.lineage import DeletedRecord as DeletedRecord
    from holdfast.record.lineage import Timeline as Timeline
    from holdfast.record.lineage import commits_of as commits_of
    from holdfast.record.lineage import condemned_with as condemned_with
    from holdfast.record.lineage import deleted_names as deleted_names
    from holdfast.record.lineage import descendants as descendants
    from holdfast.record.lineage import find_commit as find_commit
    from holdfast.record.lineage import find_deleted as find_deleted
    from holdfast.record.lineage import read_timeline as read_timeline
    from holdfast.record.lineage import record_commit as record_commit
    from holdfast.record.lineage import record_deleted as record_deleted
    from holdfast.record.lineage import record_done as record_done
    from holdfast.record.lineage import shelve as shelve
    from holdfast.record.lineage import was_committed as was_committed
    from holdfast.record.operator import Controls as Controls
    from holdfast.record.operator import Exclusion as Exclusion
    from holdfast.record.operator import Pin as Pin
    from holdfast.record.operator import Request as Request
    from holdfast.record.operator import Skip as Skip
    from holdfast.record.operator import budget_reset as budget_reset
    from holdfast.record.operator import exclude as exclude
    from holdfast.record.operator import excluded as excluded
    from holdfast.record.operator import in_force as in_force
    from holdfast.record.operator import paused as paused
    from holdfast.record.operator import pinned as pinned
    from holdfast.record.operator import read_skips as read_skips
    from holdfast.record.operator import readmit as readmit
    from holdfast.record.operator import record_requeue as record_requeue
    from holdfast.record.operator import record_skip as record_skip
    from holdfast.record.operator import requeues_without_progress as requeues_without_progress
    from holdfast.record.operator import stop_asked as stop_asked
    from holdfast.record.operator import use_up as use_up
    from holdfast.record.operator import withdraw_requeue as withdraw_requeue
    from holdfast.record.secret import SealedStore as SealedStore
    from holdfast.record.secret import prove as prove
    from holdfast.record.secret import proves as proves
    from holdfast.record.secret import run_secret as run_secret
    from holdfast.record.secret import to_cut as to_cut
    from holdfast.record.standing import BESIDE as BESIDE
    from holdfast.record.standing import RootBook as RootBook
    from holdfast.record.standing import Standing as Standing
    from holdfast.record.standing import StandingBook as StandingBook
    from holdfast.record.standing import StandingRecord as StandingRecord
    from holdfast.record.standing import known_remote as known_remote
    from holdfast.record.standing import known_root as known_root
    from holdfast.record.standing import newest as newest
    from holdfast.record.standing import note_root as note_root
    from holdfast.record.standing import words_in as words_in
    from holdfast.record.writers import Writing as Writing
    from holdfast.record.writers import announce as announce
    from holdfast.record.writers import give_up as give_up
    from holdfast.record.writers import given_up as given_up
    from holdfast.record.writers import is_busy as is_busy
    from holdfast.record.writers import lock_for_writer as lock_for_writer
else:
    __getattr__ = offers(__name__)
