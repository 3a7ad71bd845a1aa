"""What a run does for the restartable function that it was made in, if it was made in one.

Guarantee: when the function is left, in whatever way, nothing of the run stays behind in the process; and an
attempt that it did not bring to an end has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast import scope
from holdfast.control.attempts import keep_account
from holdfast.errors import ControlError
from holdfast.journal.account_events import Account
from holdfast.journal.base import Event
from holdfast.journal.events import Warned
from holdfast.worker.halting import Halting
from holdfast.worker.membership import Membership
from holdfast.worker.saving import Saving


class Ending(NamedTuple):
    """How a run that has not finished ends."""

    failed: bool
    unseen: bool
    """An exception may be on its way that nobody has seen yet."""


class Surroundings:
    """Of one run. Outside of a restartable function every call does nothing."""

    def __init__(self) -> None:
        self._scope = scope.current()
        if self._scope is not None and self._scope.on_run is not None:
            self._scope.on_run()

    def on_leave(self, *closes: Callable[[], object]) -> None:
        """What gives something back when the function was left; what is named last is called first."""
        if self._scope is not None:
            for close in closes:
                self._scope.on_leave(close)

    def stepped(self, step: int) -> None:
        if self._scope is not None:
            self._scope.step, self._scope.stepped = step, True

    def resumed(self, member: Membership, saving: Saving | None) -> None:
        """The run is part of an attempt, and has its state."""
        if self._scope is None:
            return
        self._scope.attempt, self._scope.run_dir = member.attempt, str(member.control.path)
        told, self._scope.events = self._scope.events, []
        for event in told:
            assert isinstance(event, Event)
            member.journal.write(event)
            if isinstance(event, Account):
                self._keep(member, event)
        self.saved(saving)

    def _keep(self, member: Membership, account: Account) -> None:
        try:
            keep_account(member.control, account)
        except (ControlError, OSError) as error:
            told = f"the account of attempt {account.attempt} is not kept: {error}"
            member.journal.write(Warned(message=told))

    def saved(self, saving: Saving | None) -> None:
        if self._scope is not None and saving is not None:
            self._scope.committed = max(self._scope.committed, saving.committed)

    def judge(self, error: BaseException | None) -> Ending:
        """`error`: what is seen from where the run is closed."""
        # A loop that is left by an exception drops its generator before anyone can see that exception.
        unseen = isinstance(error, GeneratorExit)
        failed = error is not None and not unseen
        if self._scope is None:
            return Ending(failed, unseen)
        asked = bool(self._scope.asked)
        return Ending(failed or unseen or asked, unseen and not asked)  # few leave such a loop by `break`

    def failed(self, halting: Halting) -> None:
        """The run ends without having followed whoever asked it to stop."""
        if self._scope is not None:
            self._scope.stop = halting.asked_by
