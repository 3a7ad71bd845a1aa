"""Sends replicas of what was committed locally to the peers, beside everything else.

Guarantee: no save ever waits for a replica. One checkpoint is sent at a time; if another is committed while
one waits for its turn, the older is left out and that is said. Whatever goes wrong is journalled and touches
neither the own copy nor the run. The place that holds a replica has verified it against the digests that were
taken here, before it says so.
"""

from __future__ import annotations

import threading
import time

from holdfast.checkpoint import local_manifest
from holdfast.checkpoint.handoff import PeerTarget, UsePeers
from holdfast.checkpoint.local_save import LocalCommit
from holdfast.checkpoint.local_tier import LocalTier
from holdfast.control.directory import ControlDirectory
from holdfast.errors import AlteredCopyError, HoldfastError
from holdfast.journal.events import CopyQuarantined, CopyReplicated, ReplicaFailed
from holdfast.journal.writer import JournalWriter

SUPERSEDED = "superseded: a newer checkpoint was committed before this one's turn came"


class ReplicaSender:
    """One rank's sender, a thread of its writer process."""

    def __init__(self, control: ControlDirectory, tier: LocalTier, journal: JournalWriter) -> None:
        self._control = control
        self._tier = tier
        self._journal = journal
        self._peers: UsePeers | None = None
        self._waiting: LocalCommit | None = None
        self._sending = False
        self._changed = threading.Condition()

    def use(self, peers: UsePeers) -> None:
        with self._changed:
            self._peers = peers

    def send(self, committed: LocalCommit) -> None:
        """Send it when what is being sent is done; never waits."""
        with self._changed:
            if self._peers is None or not self._peers.targets:
                return
            superseded, self._waiting = self._waiting, committed
            targets = self._peers.targets
            if not self._sending:
                self._sending = True
                threading.Thread(target=self._work, name="holdfast-replicas", daemon=True).start()
        if superseded is not None:
            for target in targets:
                self._failed(superseded, target, SUPERSEDED)

    def _work(self) -> None:
        while True:
            with self._changed:
                committed, self._waiting = self._waiting, None
                if committed is None or self._peers is None:
                    self._sending = False
                    self._changed.notify_all()
                    return
                peers = self._peers
            deadline = time.monotonic() + peers.timeout
            for target in peers.targets:
                self._send(committed, target, deadline)

    def _send(self, committed: LocalCommit, target: PeerTarget, deadline: float) -> None:
        from holdfast.checkpoint.peer_send import send_replica  # most writers never need it

        record, began = committed.record, time.monotonic()
        try:
            address = (target.host, target.port)
            place = send_replica(
                address, self._control, self._tier, record, committed.files, deadline=deadline
            )
        except AlteredCopyError as error:
            self._tier.quarantine(record, str(error))
            self._journal.write(
                CopyQuarantined(
                    checkpoint=record.checkpoint,
                    node=self._tier.record.node,
                    kind=record.kind,
                    reasons=[str(error)],
                )
            )
            self._failed(committed, target, str(error))
        except (HoldfastError, OSError) as error:
            self._failed(committed, target, str(error))
        else:
            local_manifest.confirm_replica(self._control, record.name, record.rank, place)
            if record.rank == 0:  # one word a save is enough; who confirmed what is in the records
                self._journal.write(
                    CopyReplicated(
                        checkpoint=record.checkpoint,
                        step=record.name.step,
                        rank=record.rank,
                        node=target.node,
                        seconds=time.monotonic() - began,
                    )
                )

    def _failed(self, committed: LocalCommit, target: PeerTarget, why: str) -> None:
        record = committed.record
        self._journal.write(
            ReplicaFailed(
                checkpoint=record.checkpoint,
                step=record.name.step,
                rank=record.rank,
                node=target.node,
                error=why,
            )
        )

    def close(self, timeout: float) -> None:
        """Wait until nothing is being sent, at most so long."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._sending and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
