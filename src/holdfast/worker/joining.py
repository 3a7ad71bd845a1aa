"""Puts together a rank's part in an attempt, from its settings, and takes it apart at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from holdfast.checkpoint.identity import CheckpointRoot
from holdfast.checkpoint.save import SaveFacts
from holdfast.checkpoint.state import Tracked
from holdfast.control.attempts import EndRecord, latest_head, read_attempt
from holdfast.control.group import Group, join_group
from holdfast.control.handover import LaunchInfo
from holdfast.errors import LeaseLostError
from holdfast.exit_codes import ExitCode
from holdfast.scope import to_the_end
from holdfast.settings import Settings
from holdfast.worker.alone import Deciding, look_around
from holdfast.worker.assembly import make_saving, make_schedule
from holdfast.worker.checking import Checks
from holdfast.worker.draws import RecordedFeed
from holdfast.worker.forgotten import Forgotten
from holdfast.worker.membership import Membership, join_attempt
from holdfast.worker.meter import Meter
from holdfast.worker.places import LocalPlaces, join_places
from holdfast.worker.resuming import resume
from holdfast.worker.rng import capture_rng
from holdfast.worker.saving import Saving
from holdfast.worker.validating import make_validation
from holdfast.worker.validation import Validation
from holdfast.worker.versions import current_versions, tell_doubts

log = logging.getLogger("holdfast")

EXCHANGE_SLACK = 30.0
"""Seconds that ranks wait for each other beyond a save's own limit: who sees that pass must get to say so."""


def is_restart(member: Membership) -> bool:
    """Whether an earlier attempt of this very launch already trained."""
    head = latest_head(member.control, before=member.attempt)
    return head is not None and read_attempt(member.control, head.attempt).launch == member.launch


class Parts:
    """What a rank trains with in an attempt. The settings make it, `Run` drives it."""

    def __init__(
        self, settings: Settings, root: CheckpointRoot, launched: LaunchInfo | None, *, given: Settings
    ) -> None:
        """`given`: the settings as they were written, which is what they are recognised by later."""
        self._settings = settings
        self._root = root
        self._launched = launched
        self.here = look_around(settings, given) if launched is None else None
        self._versions = current_versions(given)
        self.tracked = Tracked()
        self.meter = Meter(settings.journal.step_flush)
        self.schedule = make_schedule(settings)
        self.checks = Checks(settings.validation, self.tracked)
        self.feed: RecordedFeed | None = None
        self.places: LocalPlaces | None = None
        self.saving: Saving | None = None
        self.validation: Validation | None = None
        self.forgotten: Forgotten | None = None

    def join(self, on_lost: Callable[[str], None]) -> tuple[Group, Membership]:
        """Become part of the run's present attempt. All ranks call this together."""
        settings = self._settings
        group = join_group(settings.checkpoint.timeout + EXCHANGE_SLACK)
        return group, join_attempt(settings, self._root.path, group, self._launched, self.here, on_lost)

    def make(
        self,
        group: Group,
        member: Membership,
        *,
        diagnose: Callable[[], str],
        on_rerun: Callable[[], None],
    ) -> None:
        """Fill in the rest, in this order: if one cannot be made, `leave` gives back those before it."""
        if group.is_coordinator:
            tell_doubts(member)
        settings, launched = self._settings, self._launched
        node = launched.node if launched else settings.launch.node_name
        self.places = join_places(settings, group, member, node, insist=not is_restart(member))
        self.saving = make_saving(
            settings,
            self._root,
            group,
            member,
            tracked=self.tracked,
            own=self._own_state,
            facts=self._facts,
            schedule=self.schedule,
            step_seconds=self.meter.median_step,
            meter=self.meter,
            places=self.places,
        )
        here, decide = self.here, None
        if here is not None:
            decide = Deciding(member.control, member.fence, member.journal, member.attempt, settings, here)
        self.validation = make_validation(
            settings.validation,
            group,
            member,
            launched,
            node=here.node if here is not None else node,
            decide=decide,
            tracked=self.tracked,
            checks=self.checks,
            meter=self.meter,
            feed=self.feed,
            diagnose=diagnose,
            on_rerun=on_rerun,
        )

    def resume(self, group: Group, member: Membership) -> None:
        """Put this rank where the run goes on from."""
        assert self.saving is not None
        assert self.validation is not None
        own = resume(
            self._settings,
            self._root,
            group,
            member,
            tracked=self.tracked,
            avoid=member.told.avoid,
            insist=not is_restart(member),
            meter=self.meter,
            feed=self.feed,
            validation=self.validation,
            saving=self.saving,
            schedule=self.schedule,
            places=self.places,
            versions=self._versions,
        )
        self.forgotten = Forgotten(
            self.tracked, self.feed, group, self.validation.agreement, member.journal, own_checkpoint=own
        )

    def _facts(self, parent: str | None, reason: str) -> SaveFacts:
        return SaveFacts(
            step=self.meter.step,
            parent=parent,
            reason=reason,
            windows=self.meter.windows(),
            versions=self._versions,
        )

    def _own_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "rng": capture_rng(),
            "data": self.feed.state_dict() if self.feed is not None else None,
            "counters": self.meter.state_dict(),
        }
        if self.validation is not None and (kept := self.validation.state_dict()):
            own["validation"] = kept
        return own

    def leave(self, member: Membership, outcome: str, code: ExitCode, *, unseen: bool) -> None:
        """Give everything back, and the lease; record the attempt's end where that is for this process."""
        self.tracked.gradients.close()
        if self.forgotten is not None:
            self.forgotten.close()
        try:
            if self.validation is not None:
                self.validation.close()
            if self.saving is not None:
                self.saving.close(outcome, unseen=unseen)
        finally:
            with to_the_end():
                self._part(member, outcome, code)

    def _part(self, member: Membership, outcome: str, code: ExitCode) -> None:
        if self.places is not None:
            self.places.close()
        head = self.saving.head if self.saving is not None else None
        end = EndRecord(
            outcome=outcome,
            exit_code=int(code),
            cause="",
            highest_step=head.step if head is not None else 0,
            at=time.time(),
        )
        try:
            member.leave(end)
        except LeaseLostError as error:
            log.warning("holdfast: %s", error)
