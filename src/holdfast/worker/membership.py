"""Which attempt this process belongs to, and its right to act.

Under `holdfast run` the agent has claimed the lease and numbered the attempt; a worker only takes both over.
Under plain `python` or torchrun there is no such agent: rank 0 claims the lease, numbers the attempt, renews
the lease from a thread, and tells the others through the store.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from holdfast import scope
from holdfast.control.attempts import EndRecord, begin_attempt, end_attempt
from holdfast.control.decisions import read_key
from holdfast.control.directory import ControlDirectory
from holdfast.control.group import Group
from holdfast.control.handover import LaunchInfo
from holdfast.control.lease import Claim, Fence, LeaseKeeper, claim
from holdfast.errors import ConfigError, ControlError, StorageError
from holdfast.journal.events import AttemptStarted, LeaseClaimed, RunCreated, Warned
from holdfast.journal.writer import JournalWriter

log = logging.getLogger("holdfast")


class _Told(msgspec.Struct, frozen=True):
    run: str
    attempt: int
    epoch: int
    launch: str


@dataclass
class Membership:
    control: ControlDirectory
    fence: Fence
    attempt: int
    launch: str
    journal: JournalWriter
    keeper: LeaseKeeper | None = None
    """Held by rank 0 when there is no launcher."""

    def leave(self, end: EndRecord | None) -> None:
        """Record the end and give the lease back, where this process is the one to do so."""
        keeper, self.keeper = self.keeper, None
        try:
            if keeper is not None and end is not None:
                end_attempt(self.control, self.fence, self.attempt, end)
        except StorageError as error:  # a run that has reached its end has not failed for want of a record
            log.error("holdfast: attempt %d has no record of its end: %s", self.attempt, error)
        finally:
            if keeper is not None:
                keeper.release()
            self.journal.close()


def join_attempt(
    run_dir: Path,
    root: Path,
    group: Group,
    launched: LaunchInfo | None,
    *,
    ttl: float,
    timeout: float,
    handover: float,
    on_lost: Callable[[str], None],
) -> Membership:
    """Become part of the run's present attempt."""
    if launched is not None:
        if run_dir.absolute() != Path(launched.run_dir):
            raise ConfigError(
                f"run.dir is {run_dir.absolute()} in this script, but `holdfast run` was started for "
                f"{launched.run_dir}. Set it in one place, or give both the same"
            )
        control = _same_run(run_dir, launched.run_id, "its agent", group.rank)
        fence = Fence(control, launched.epoch, timeout=ttl)
        journal = JournalWriter(control.journal, f"rank-{group.rank}", launched.attempt)
        return Membership(control, fence, launched.attempt, launched.launch, journal)
    if group.is_coordinator:
        return _begin(run_dir, root, group, ttl=ttl, handover=handover, on_lost=on_lost)
    raw = read_key(group.store, "attempt", timeout, "the attempt that rank 0 begins")
    told = msgspec.json.decode(raw, type=_Told)
    control = _same_run(run_dir, told.run, "rank 0", group.rank)
    journal = JournalWriter(control.journal, f"rank-{group.rank}", told.attempt)
    return Membership(control, Fence(control, told.epoch, timeout=ttl), told.attempt, told.launch, journal)


def _same_run(run_dir: Path, run: str, who: str, rank: int) -> ControlDirectory:
    """Open the run directory; the random run id in it proves that it is the one the others see."""
    control = ControlDirectory.open(run_dir.absolute())
    if control.run_id != run:
        raise ControlError(
            f"rank {rank} sees run {control.run_id} in {control.path}, {who} sees run {run}. "
            "All ranks must see the same run directory: put it on a shared file system"
        )
    return control


def _begin(
    run_dir: Path,
    root: Path,
    group: Group,
    *,
    ttl: float,
    handover: float,
    on_lost: Callable[[str], None],
) -> Membership:
    control, created = ControlDirectory.open_or_create(run_dir)
    around = scope.current()
    launch = (around.job if around is not None else "") or uuid.uuid4().hex[:12]
    held = claim(control, launch, ttl, handover=handover)
    journals: list[JournalWriter] = []

    def on_trouble(told: str) -> None:
        log.error("holdfast: %s", told)
        for journal in journals:
            journal.write(Warned(message=told))

    keeper = LeaseKeeper(control, held, on_lost, on_trouble)
    try:
        member = _announce(control, root, group, held, keeper, created=created)
    except BaseException:
        keeper.release()  # else this very process would keep the next attempt from the lease
        raise
    journals.append(member.journal)
    return member


def _announce(
    control: ControlDirectory, root: Path, group: Group, held: Claim, keeper: LeaseKeeper, *, created: bool
) -> Membership:
    fence = Fence(control, held.epoch, timeout=held.ttl)
    record = begin_attempt(control, fence, held.owner, group.world_size)
    journal = JournalWriter(control.journal, f"rank-{group.rank}", record.number)
    if created:
        journal.write(RunCreated(run=control.run_id, checkpoint_root=str(root)))
    journal.write(LeaseClaimed(epoch=held.epoch, owner=held.owner, evidence=held.evidence))
    journal.write(
        AttemptStarted(
            epoch=held.epoch,
            world_size=group.world_size,
            launcher="torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "none",
            torch=str(torch.__version__),
        )
    )
    told = _Told(control.run_id, record.number, held.epoch, held.owner)
    group.store.set("attempt", msgspec.json.encode(told).decode())
    return Membership(control, fence, record.number, held.owner, journal, keeper)
