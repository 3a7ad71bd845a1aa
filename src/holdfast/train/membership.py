"""Which attempt this process belongs to, and its right to act.

Under `holdfast run` the agent has claimed the lease and numbered the attempt; a worker only takes both over.
Under plain `python` or torchrun there is no such agent: rank 0 claims the lease, settles what was left open
(`alone.py`), numbers the attempt, renews the lease from a thread, and tells the others through the store.
torchrun's restarts are attempts of one launch; each start of plain python is a launch of its own.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from holdfast.base import scope
from holdfast.config import Settings
from holdfast.errors import ConfigError, ControlError, ExitCode, HoldfastError, StorageError, UsageError
from holdfast.journal import JournalWriter
from holdfast.journal.events import AttemptStarted, LeaseClaimed, RunCreated, Warned
from holdfast.record import (
    Claim,
    ControlDirectory,
    EndRecord,
    FailureRecord,
    Fence,
    Group,
    LaunchInfo,
    LeaseKeeper,
    begin_attempt,
    claim,
    end_attempt,
    latest_head,
    read_attempt,
    read_key,
    record_crash,
)
from holdfast.train.alone import Here, Told, begin
from holdfast.train.crash import text_of

log = logging.getLogger("holdfast")


class _Told(msgspec.Struct, frozen=True):
    run: str
    attempt: int
    epoch: int
    launch: str
    begun: Told
    shift: int = 0


@dataclass
class Membership:
    control: ControlDirectory
    fence: Fence
    attempt: int
    launch: str
    journal: JournalWriter
    keeper: LeaseKeeper | None = None
    """Held by rank 0 when there is no launcher."""
    told: Told = field(default_factory=Told)
    """What earlier attempts have left for this one: by the launcher, or by rank 0 where there is none."""
    node: str = ""
    """Of the process that numbered the attempt itself."""
    ended: EndRecord | None = None
    """The end that this process has written."""

    @functools.cached_property
    def is_restart(self) -> bool:
        """Whether an earlier attempt of this very launch already trained."""
        head = latest_head(self.control, before=self.attempt)
        return head is not None and read_attempt(self.control, head.attempt).launch == self.launch

    def leave(self, end: EndRecord | None) -> None:
        """Record the end and give the lease back, where this process is the one to do so."""
        keeper, self.keeper = self.keeper, None
        try:
            if keeper is not None and end is not None:
                end_attempt(self.control, self.fence, self.attempt, end)
                self.ended = end
        except StorageError as error:  # a run that has reached its end has not failed for want of a record
            log.error("holdfast: attempt %d has no record of its end: %s", self.attempt, error)
        finally:
            if keeper is not None:
                keeper.release()
            self.journal.close()

    def crashed(self, error: BaseException) -> None:
        """An error ends this process. A loop that it has left dropped its generator first, and so ended the
        attempt before anyone could see the error: then this is what became of the attempt."""
        end = self.ended
        if end is None or (end.outcome, end.exit_code) != ("stopped", ExitCode.FAILED):
            return
        if not isinstance(error, Exception):
            return  # somebody has interrupted it
        message, now = f"{type(error).__name__}: {text_of(error)}", time.time()
        failure = FailureRecord(
            rank=0, node=self.node, pid=os.getpid(), exit_code=int(ExitCode.FAILED), at=now, message=message
        )
        try:
            failed = msgspec.structs.replace(end, outcome="failed", at=now)
            record_crash(self.control, self.attempt, failed, failure)
        except (HoldfastError, OSError) as problem:
            log.warning("holdfast: attempt %d counts as stopped, not as failed: %s", self.attempt, problem)


def join_attempt(
    settings: Settings,
    group: Group,
    launched: LaunchInfo | None,
    here: Here | None,
    on_lost: Callable[[str], None],
) -> Membership:
    """Become part of the run's present attempt. `here`: what this process was started with, if not by the
    launcher."""
    run_dir, ttl = Path(settings.run.dir), settings.control.lease_ttl
    if launched is not None:
        if run_dir.absolute() != Path(launched.run_dir):
            raise ConfigError(
                f"run.dir is {run_dir.absolute()} in this script, but `holdfast run` was started for "
                f"{launched.run_dir}. Set it in one place, or give both the same"
            )
        control = _same_run(run_dir, launched.run_id, "its agent", group.rank)
        fence = Fence(control, launched.epoch, timeout=ttl)
        journal = JournalWriter(control.journal, f"rank-{group.rank}", launched.attempt)
        told = Told(orders=launched.orders)
        return Membership(control, fence, launched.attempt, launched.launch, journal, told=told)
    assert here is not None
    if group.is_coordinator:
        return _begin(settings, group, here, on_lost)
    return _follow(settings, group, here)


def _follow(settings: Settings, group: Group, here: Here) -> Membership:
    patience = settings.control.decision_timeout
    raw = read_key(group.store, "attempt", patience, "the attempt that rank 0 begins")
    told = msgspec.json.decode(raw, type=_Told)
    told.begun.insist()
    if told.shift != here.shift:
        raise UsageError(
            f"rank {group.rank} has turned its devices by {here.shift}, rank 0 by {told.shift}: two ranks "
            f"may share one. {here.stays or 'Rank 0 came too late for it'}: make the Run at the same place "
            "in every rank's script, before CUDA is asked for anything"
        )
    control = _same_run(Path(settings.run.dir), told.run, "rank 0", group.rank)
    journal = JournalWriter(control.journal, f"rank-{group.rank}", told.attempt)
    fence = Fence(control, told.epoch, timeout=settings.control.lease_ttl)
    return Membership(control, fence, told.attempt, told.launch, journal, told=told.begun)


def _same_run(run_dir: Path, run: str, who: str, rank: int) -> ControlDirectory:
    """Open the run directory; the random run id in it proves that it is the one the others see."""
    control = ControlDirectory.open(run_dir.absolute())
    if control.run_id != run:
        raise ControlError(
            f"rank {rank} sees run {control.run_id} in {control.path}, {who} sees run {run}. "
            "All ranks must see the same run directory: put it on a shared file system"
        )
    return control


def _begin(settings: Settings, group: Group, here: Here, on_lost: Callable[[str], None]) -> Membership:
    control, created = ControlDirectory.open_or_create(Path(settings.run.dir))
    around = scope.current()
    launch = (around.job if around is not None else "") or here.launch or uuid.uuid4().hex[:12]
    held = claim(control, launch, settings.control.lease_ttl, handover=settings.handover())
    fence = Fence(control, held.epoch, timeout=held.ttl)
    journals: list[JournalWriter] = []

    def on_trouble(told: str) -> None:
        log.error("holdfast: %s", told)
        for journal in journals:
            journal.write(Warned(message=told))

    def announce(attempt: int, begun: Told) -> None:
        told = _Told(control.run_id, attempt, held.epoch, launch, begun, here.shift)
        group.store.set("attempt", msgspec.json.encode(told).decode())

    keeper = LeaseKeeper(control, held, on_lost, on_trouble)
    try:
        begun = begin(control, fence, settings, here, launch)
        if begun.refused:
            announce(0, begun)
            begun.insist()
        number = begin_attempt(
            control,
            fence,
            launch,
            group.world_size,
            nodes=[here.node] if here.workers else [],
            placement=here.placement(control),
            rotation=here.shift,
            started_with=here.started_with,
        ).number
        journal = JournalWriter(control.journal, f"rank-{group.rank}", number)
        if created:
            journal.write(RunCreated(run=control.run_id, checkpoint_root=str(settings.checkpoint_root())))
        _tell(journal, held, group.world_size)
        announce(number, begun)
    except BaseException:
        keeper.release()  # else this very process would keep the next attempt from the lease
        raise
    journals.append(journal)
    return Membership(control, fence, number, launch, journal, keeper, begun, here.node)


def _tell(journal: JournalWriter, held: Claim, world_size: int) -> None:
    journal.write(LeaseClaimed(epoch=held.epoch, owner=held.owner, evidence=held.evidence))
    journal.write(
        AttemptStarted(
            epoch=held.epoch,
            world_size=world_size,
            launcher="torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "none",
            torch=str(torch.__version__),
        )
    )
