"""What a resume asks of the remote: which rungs it could fetch, and to fetch one.

Guarantee: all that is fetched during one resume takes at most `timeout` seconds together, so that the other
ranks, which wait for the next proposal longer than that, are not left behind. A rung is fetched at most once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.commit import Owner
from holdfast.checkpoint.identity import CheckpointName, CheckpointRoot, parse_name
from holdfast.checkpoint.ladder import Rung
from holdfast.checkpoint.remote import Remote, open_remote
from holdfast.checkpoint.remote_pull import pull, pull_named, pull_standing_of
from holdfast.checkpoint.remote_retry import RemoteError, RemoteUnavailableError
from holdfast.control.lease import Fence
from holdfast.journal.events import CopyFetched, Warned
from holdfast.journal.writer import JournalWriter


def open_at_start(url: str, *, retry_seconds: float, insist: bool, journal: JournalWriter) -> Remote:
    """The remote of a run that starts, seen to work: an error names checkpoint.remote_root and what to do.

    Without `insist` (a restart of a run that already trains) a store that does not answer is only a warning:
    the local checkpoints may do, and copying begins when it answers again. What no wait can cure is always an
    error.
    """
    remote = open_remote(url, retry_seconds=retry_seconds)
    try:
        remote.check()
    except RemoteUnavailableError as error:
        if insist:
            raise
        journal.write(Warned(message=f"going on without remote copies for now: {error}"))
    return remote


class Fetcher:
    """Fetches for one resume; without a remote it only says that there is none."""

    def __init__(
        self,
        *,
        remote: Callable[[], Remote] | None,
        root: CheckpointRoot,
        run: str,
        fence: Fence,
        attempt: int,
        journal: JournalWriter,
        timeout: float,
        retry_seconds: float,
    ) -> None:
        self._opening = remote
        self._remote: Remote | None = None
        self._root = root
        self._fence = fence
        self._owner = Owner(run=run, attempt=attempt, epoch=fence.epoch)
        self._journal = journal
        self._left = timeout
        self._retry_seconds = retry_seconds
        self._names: set[CheckpointName] = set()
        self._tried: set[str] = set()

    def open(self) -> None:
        """Open the remote, if there is one; an error says what to set or to do."""
        if self._opening is not None and self._remote is None:
            started = time.monotonic()
            self._remote = self._opening()
            self._left -= time.monotonic() - started

    def names(self) -> set[CheckpointName]:
        """Checkpoints that have a copy; none, with a warning, if the remote does not tell."""
        if self._remote is not None:
            started = time.monotonic()
            try:
                self._names = set(self._remote.names(started + self._left))
            except RemoteError as error:
                self._journal.write(Warned(message=f"resuming without remote copies: {error}"))
            self._left -= time.monotonic() - started
        return self._names

    def fetch(self, rung: Rung, problems: list[str]) -> list[str] | None:
        """None if a good copy of the rung is in place now; else what to add to its problems."""
        name = parse_name(rung.name)
        on_line = bool(rung.manifest) and not rung.path
        if self._remote is None or name is None or name not in self._names or not on_line:
            return []
        if rung.name in self._tried:
            return ["its remote copy was fetched, and did not do either"]
        self._tried.add(rung.name)
        started = time.monotonic()
        try:
            pulled = pull(
                self._remote,
                name,
                self._root,
                fence=self._fence,
                owner=self._owner,
                expected=rung.manifest,
                deadline=started + self._left,
            )
        except RemoteError as error:
            return [str(error)]
        except OSError as error:
            return [f"its remote copy could not be stored here: {error}"]
        finally:
            self._left -= time.monotonic() - started
        self._journal.write(
            CopyFetched(
                checkpoint=rung.name,
                step=rung.step,
                remote=self._remote.url,
                bytes=pulled.copied.bytes,
                seconds=pulled.copied.seconds,
                because=problems,
                quarantine=str(pulled.quarantine or ""),
            )
        )
        return None

    @property
    def url(self) -> str:
        """Of the remote; empty if there is none, or it was not opened yet."""
        return self._remote.url if self._remote is not None else ""

    def standing_of(self, url: str) -> Path:
        """Learn what was judged of the checkpoint that a URL names; where it would come to."""
        started = time.monotonic()
        try:
            return pull_standing_of(url, self._root, timeout=self._left, retry_seconds=self._retry_seconds)
        finally:
            self._left -= time.monotonic() - started

    def named(self, url: str) -> Path:
        """The checkpoint that a URL names, as a local directory."""
        return pull_named(
            url,
            self._root,
            fence=self._fence,
            owner=self._owner,
            timeout=self._left,
            retry_seconds=self._retry_seconds,
        )
