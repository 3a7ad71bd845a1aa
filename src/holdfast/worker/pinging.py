"""The liveness ping of a run: at a step's end, every `health.nccl_health_check_interval` steps.

It comes before anything else is done at the boundary, because there the ranks are closest together: whoever
saves, evaluates or logs does so after it.
"""

from __future__ import annotations

from holdfast.control.group import Group
from holdfast.errors import PingFailedError
from holdfast.health.ping import LivenessPing
from holdfast.journal.cluster_events import PingFailed
from holdfast.journal.writer import JournalWriter
from holdfast.settings_cluster import HealthSettings


class Pinging:
    """One for an attempt. All ranks make it together."""

    def __init__(self, settings: HealthSettings, group: Group, journal: JournalWriter) -> None:
        self._every = settings.nccl_health_check_interval if group.world_size > 1 else 0
        self._journal = journal
        self._ping = LivenessPing(timeout=settings.nccl_health_check_timeout) if self._every else None

    def at_boundary(self, step: int) -> None:
        """After a step; raises PingFailedError, which ends the rank with 21, if a peer does not answer."""
        if self._ping is None or step % self._every:
            return
        try:
            self._ping()
        except PingFailedError as error:
            missing = list(error.missing)
            self._journal.write(PingFailed(step=step, missing=missing, seconds=round(error.seconds, 3)))
            told = PingFailedError(f"after step {step}: {error}")
            told.missing, told.seconds = missing, error.seconds
            raise told from None

    def close(self) -> None:
        """After the last step, on all ranks alike."""
        if self._ping is not None:
            self._ping.close()
            self._ping = None
