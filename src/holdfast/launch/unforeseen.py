"""Tells of ends that no decision follows: of this launch's own, and of a launch that left none.

Guarantee: telling is all it does. What cannot be read or written costs sentences, never the end itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from holdfast.account.endings import launch_lost, lease_taken, store_lost
from holdfast.account.wording import on_the_terminal, one_line
from holdfast.bounded import PATIENCE, Bounded
from holdfast.checkpoint.inventory import highest_committed_step
from holdfast.control.attempts import ACCOUNT, ends_of
from holdfast.control.directory import ControlDirectory, create_record, list_names
from holdfast.control.lease import Claim, current_epoch, read_claim
from holdfast.errors import HoldfastError
from holdfast.journal.account_events import Account
from holdfast.journal.cluster_events import StopAsked, StopSaved
from holdfast.journal.events import RunFinished
from holdfast.journal.reader import JournalReader
from holdfast.journal.tails import last_step
from holdfast.journal.writer import JournalWriter
from holdfast.launch.context import LaunchContext
from holdfast.launch.summary import say


def tell_store_lost(context: LaunchContext, attempt: int, node: str, error: str, step: int | None) -> bool:
    """That nobody is left to meet; whether it could be told."""
    return _tell(context, node, lambda: store_lost(attempt, node, error, step, _saved(context)))


def tell_lease_taken(
    context: LaunchContext, attempt: int, node: str, evidence: str, step: int | None
) -> bool:
    """That another launch has the run now; whether it could be told."""

    def account() -> Account:
        newest = read_claim(context.control, current_epoch(context.control))
        by = newest.holder.describe() if newest is not None else ""
        found = newest.evidence if newest is not None else ""
        return lease_taken(attempt, evidence, by, found, step, _saved(context))

    return _tell(context, node, account)


def tell_launch_lost(context: LaunchContext, held: Claim) -> None:
    """Once: of a launch before this one whose last attempt has no end, which nobody was left to tell of."""

    def account() -> Account | None:
        return _of_lost_launch(context.control, held, _saved(context))

    made = Bounded(account, "lost-launch")
    found = None
    with contextlib.suppress(HoldfastError, OSError):
        found = made.result() if made.ended(PATIENCE) else None
    if found is None:
        return
    with contextlib.closing(
        JournalWriter(context.control.journal, f"agent-{held.owner}", found.attempt)
    ) as journal:
        journal.write(found)
    say(on_the_terminal(found, str(context.control.path)))
    context.saves.fell(found)


def _of_lost_launch(control: ControlDirectory, held: Claim, saved: int | None) -> Account | None:
    newest = next(reversed(ends_of(control)), None)
    if newest is None or newest[1] is not None:
        return None
    number = newest[0].number
    lines = [line for line in JournalReader(control.journal, since=number).poll() if line.attempt == number]
    if any(isinstance(line.body, RunFinished) for line in lines):
        return None
    asked = next((line.body for line in lines if isinstance(line.body, StopAsked)), None)
    if any(isinstance(line.body, StopSaved) for line in lines):
        asked = None
    before = read_claim(control, newest[0].epoch)
    holder = before.holder.describe() if before is not None else ""
    step = last_step(control.journal, list_names(control.journal), number)
    account = launch_lost(number, holder, held.evidence, asked, step, saved)
    return account if create_record(control.attempt(number) / ACCOUNT, account) else None


def _saved(context: LaunchContext) -> int | None:
    return highest_committed_step(context.settings.checkpoint_root(), context.control) or None


def _tell(context: LaunchContext, node: str, make: Callable[[], Account]) -> bool:
    made = Bounded(make, "unforeseen-end")
    try:
        account = made.result() if made.ended(PATIENCE) else None
    except (HoldfastError, OSError):
        account = None
    if account is None:
        return False
    context.last_words = one_line(account)
    context.saves.catch_up()
    say(on_the_terminal(account, str(context.control.path)))
    writer = JournalWriter(context.control.journal, f"agent-{node}", account.attempt)
    written = Bounded(lambda: _write(writer, account), "unforeseen-end-journal")
    written.ended(PATIENCE)
    return True


def _write(writer: JournalWriter, account: Account) -> None:
    with contextlib.closing(writer) as journal:
        journal.write(account)
