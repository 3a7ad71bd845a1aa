"""The account of a restart that no launcher decided about, from what its plan says.

Under `holdfast run` the leading agent tells, and nothing of this is used.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.account.answers import answers
from holdfast.control.attempts import keep_account
from holdfast.control.directory import ControlDirectory
from holdfast.errors import HoldfastError
from holdfast.exit_codes import ExitCode
from holdfast.inprocess.messages import Over, Plan
from holdfast.inprocess.records import as_evidence
from holdfast.journal.account_events import Account
from holdfast.journal.text import printable
from holdfast.journal.writer import JournalWriter
from holdfast.policy.actions import Action
from holdfast.policy.faults import Fault, FaultKind
from holdfast.policy.inprocess import failed_iteration
from holdfast.policy.plain_words import deed
from holdfast.policy.recovery import Decision, Situation

log = logging.getLogger("holdfast")

WHO = "members"
"""Who journals what is told when no run of the function is open."""


def account_of(following: Plan | Over, iteration: int, order: Sequence[int], max_restarts: int) -> Account:
    """Of the iteration that ended by the faults that `following` names, and of what comes after it.

    `order`: its members by rank.
    """
    faults = following.faults
    decision = _decided(following)
    said = {fault.describe() for fault in faults}
    decision = msgspec.structs.replace(
        decision, evidence=[text for text in decision.evidence if text not in said]
    )
    failed = failed_iteration(
        iteration,
        faults,
        launch="",
        order=order,
        nodes=sorted({fault.node for fault in faults}),
        committed=following.committed,
        seconds=0.0,
        at=time.time(),
    )
    last = max([fault.step for fault in faults] + [following.committed], default=0)
    failed = msgspec.structs.replace(failed, number=following.ended, began=last > 0, last_step=last or None)
    found = as_evidence(following.ended, faults, world_size=len(order), pids={}, devices={}, ends={})
    failures = sorted([*found.ended, *found.raised], key=lambda one: one.at)
    root = next((one for one in failures if one.rank == failed.root_rank), None)
    account = answers(
        Situation(attempt=failed, max_restarts=max_restarts),
        decision,
        root,
        failures,
        hangs=found.hangs,
        lost=found.lost,
        seen=found.facts,
        detail="" if root is not None else failed.message,
        in_place=isinstance(following, Plan),
        newest=following.committed or None,
    )
    first = faults[0] if faults else None
    return _asked(account, first) if first is not None and first.kind is FaultKind.ASKED else account


def _decided(following: Plan | Over) -> Decision:
    """What was decided; where these processes cannot do it, that they end."""
    known = following.decision
    if known is not None and (isinstance(following, Plan) or known.action is Action.STOP):
        return known
    reason = f"{deed(known.action)}: {known.reason}" if known is not None else following.reason
    if isinstance(following, Plan):  # somebody else's conductor, which gave no reasons
        plain = Decision(action=Action.RESTART, exit_code=0, reason=reason, evidence=[], restarts_left=0)
    else:
        code = following.exit_code or int(ExitCode.HANDED_OVER)
        plain = Decision(action=Action.STOP, exit_code=code, reason=reason, evidence=[], restarts_left=0)
    return plain if known is None else msgspec.structs.replace(plain, evidence=known.evidence)


def _asked(account: Account, fault: Fault) -> Account:
    """Nothing had failed: the function wanted to be called again."""
    why = printable(fault.detail) or "no reason given"
    return msgspec.structs.replace(
        account,
        who=f"rank {fault.rank} on {printable(fault.node)}",
        what=f"asked for a restart in step {(account.step or 0) + 1}: {why}",
        why=["the training function itself asked for it", *account.why[1:]],
        next="nothing to do",
    )


def keep(run_dir: Path, account: Account) -> None:
    """In the run's records, where the run of the function is closed already."""
    try:
        control = ControlDirectory.open(run_dir)
        with contextlib.closing(JournalWriter(control.journal, WHO, account.attempt)) as journal:
            journal.write(account)
        keep_account(control, account)
    except (HoldfastError, OSError) as error:
        log.warning("holdfast: the account of attempt %d is not kept: %s", account.attempt, error)
