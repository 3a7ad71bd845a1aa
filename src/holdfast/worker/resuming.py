"""Puts together what resumes a run, from its settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from holdfast.checkpoint.identity import CheckpointRoot
from holdfast.checkpoint.remote import Remote
from holdfast.checkpoint.remote_fetch import open_at_start
from holdfast.checkpoint.resume import Resumer
from holdfast.checkpoint.state import Tracked
from holdfast.control.group import Group
from holdfast.settings import Settings
from holdfast.worker.membership import Membership
from holdfast.worker.places import LocalPlaces


def make_resumer(
    settings: Settings,
    root: CheckpointRoot,
    group: Group,
    member: Membership,
    *,
    tracked: Tracked,
    avoid: Collection[str],
    insist: bool,
    places: LocalPlaces | None,
) -> Resumer:
    """What resumes this rank. `insist`: a remote that does not answer is an error."""
    chosen = settings.checkpoint
    remote: Callable[[], Remote] | None = None
    if chosen.remote_root and group.is_coordinator:
        remote = functools.partial(
            open_at_start,
            chosen.remote_root,
            retry_seconds=chosen.remote_retry_seconds,
            insist=insist,
            journal=member.journal,
        )
    return Resumer(
        control=member.control,
        fence=member.fence,
        group=group,
        root=root,
        attempt=member.attempt,
        tracked=tracked,
        journal=member.journal,
        load_timeout=chosen.timeout,
        decision_timeout=settings.control.decision_timeout,
        remote=remote,
        retry_seconds=chosen.remote_retry_seconds,
        avoid=avoid,
        local_unseen=places is None and chosen.non_persistent_ckpt_type == "local",
        local=None
        if places is None
        else places.inventory(group, member, timeout=chosen.timeout, peer_timeout=chosen.replication_timeout),
    )
