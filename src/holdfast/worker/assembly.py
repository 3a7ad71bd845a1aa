"""Puts together what saves for a run, from its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.checkpoint.drain import Drain
from holdfast.checkpoint.identity import CheckpointRoot
from holdfast.checkpoint.read_back import ReadBack
from holdfast.checkpoint.retention import Retainer
from holdfast.checkpoint.save import SaveContext
from holdfast.checkpoint.state import Tracked
from holdfast.control.group import Group
from holdfast.policy.retention import Rules
from holdfast.settings import Settings
from holdfast.worker.membership import Membership
from holdfast.worker.meter import Meter
from holdfast.worker.places import LocalPlaces
from holdfast.worker.saving import Facts, Saving
from holdfast.worker.schedule import SaveSchedule


def make_saving(
    settings: Settings,
    root: CheckpointRoot,
    group: Group,
    member: Membership,
    *,
    tracked: Tracked,
    own: Callable[[], dict[str, Any]],
    facts: Facts,
    schedule: SaveSchedule,
    step_seconds: Callable[[], float | None],
    meter: Meter,
    places: LocalPlaces | None,
) -> Saving:
    """What saves for this rank; on rank 0 with what deletes, and what copies to a remote if there is one."""
    drain = _drain(settings, root, member) if group.is_coordinator else None
    read_back = _read_back(settings, root, member) if group.is_coordinator else None
    retainer = _retainer(settings, root, member, drain, read_back) if group.is_coordinator else None
    return Saving(
        SaveContext(
            root=root, control=member.control, fence=member.fence, group=group, attempt=member.attempt
        ),
        settings.checkpoint,
        lease_ttl=settings.control.lease_ttl,
        tracked=tracked,
        own=own,
        facts=facts,
        schedule=schedule,
        step_seconds=step_seconds,
        meter=meter,
        retainer=retainer,
        drain=drain,
        read_back=read_back,
        journal=member.journal,
        local=places.saving(settings.checkpoint, group.rank) if places is not None else None,
    )


def make_schedule(settings: Settings) -> SaveSchedule:
    """When to save to the checkpoint root, and when to the local tier, if there is one."""
    chosen = settings.checkpoint
    local = chosen.non_persistent_save_interval if chosen.non_persistent_ckpt_type == "local" else 0
    return SaveSchedule(chosen.interval, chosen.mtbf_hours, local)


def _drain(settings: Settings, root: CheckpointRoot, member: Membership) -> Drain | None:
    chosen = settings.checkpoint
    if not chosen.remote_root:
        return None
    return Drain(
        control=member.control,
        root=root,
        remote_url=chosen.remote_root,
        epoch=member.fence.epoch,
        attempt=member.attempt,
        journal=member.journal,
        retry_seconds=chosen.remote_retry_seconds,
        linger=chosen.timeout,
    )


def _read_back(settings: Settings, root: CheckpointRoot, member: Membership) -> ReadBack | None:
    chosen = settings.checkpoint
    if not chosen.read_back:
        return None
    return ReadBack(
        control=member.control,
        root=root,
        epoch=member.fence.epoch,
        attempt=member.attempt,
        rate=chosen.read_back_rate * 1e6,
        journal=member.journal,
    )


def _retainer(
    settings: Settings,
    root: CheckpointRoot,
    member: Membership,
    drain: Drain | None,
    read_back: ReadBack | None,
) -> Retainer:
    chosen = settings.checkpoint
    return Retainer(
        control=member.control,
        root=root,
        rules=Rules(
            keep_last=chosen.keep_last,
            keep_every_steps=chosen.keep_every_steps,
            keep_every_hours=chosen.keep_every_hours,
            await_read_back=chosen.read_back,
        ),
        fence=member.fence,
        attempt=member.attempt,
        journal=member.journal,
        on_deleted=drain.delete if drain is not None else None,
        on_waiting=read_back.hurry if read_back is not None else None,
    )
