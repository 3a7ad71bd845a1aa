"""Staging one rank's snapshot: from live tensors, wherever they are, into a buffer.

Those on a device are copied in the way that the policy chooses: clone, overlap or block (policy/snapshot.py).
That copy may go on while training does; `Staged` then says when it is complete, and whether it can be
believed. Those on the host are copied at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from holdfast.checkpoint.device_stage import DeviceStager, InFlight, Owned, Piece
from holdfast.checkpoint.optimizer_state import uncollected
from holdfast.checkpoint.snapshot import Snapshot
from holdfast.checkpoint.staging import Buffer, is_cpu, stage_from_host
from holdfast.checkpoint.state import Tracked
from holdfast.policy.snapshot import Choice, Setting, Way, choose, owned_enough

log = logging.getLogger("holdfast.checkpoint")

STAGING_THREADS = 8
"""At most so many copy from host memory; a few more fill the memory's bandwidth no further."""


class Staged:
    """A snapshot on its way into a buffer."""

    def __init__(self, prints: dict[int, str], at: list[int], flight: InFlight | None) -> None:
        self._prints = prints
        self._at = at
        """The positions of what is in flight."""
        self._flight = flight

    def done(self) -> bool:
        """Whether the buffer holds all of it. Never blocks."""
        return self._flight is None or self._flight.done()

    def boundary(self) -> None:
        """The next step is about to begin: nothing may change under the copy."""
        if self._flight is not None:
            self._flight.boundary()

    def torn(self) -> str:
        """Why it must not be used; empty if it may. Final once `done`."""
        return self._flight.torn() if self._flight is not None else ""

    def fingerprints(self) -> list[str]:
        """In the layout's order; once it is done. May be called from any thread, unlike all else here."""
        found = dict(self._prints)
        if self._flight is not None:
            found.update(zip(self._at, self._flight.fingerprints(), strict=True))
        return [found[at] for at in range(len(found))]

    def release(self) -> None:
        """Let go of the device; waits until it is done."""
        if self._flight is not None:
            self._flight.release()

    @property
    def copy_seconds(self) -> float:
        """From a device; 0 if nothing was."""
        return self._flight.copy_seconds() if self._flight is not None else 0.0


class Stager:
    """Stages the snapshots of one rank."""

    def __init__(
        self,
        setting: Setting,
        *,
        timeout: float,
        step_seconds: Callable[[], float | None],
        tell: Callable[[Choice], None],
        devices: DeviceStager | None = None,
    ) -> None:
        self._setting = setting
        self._step_seconds = step_seconds
        self._tell = tell
        self._told: Choice | None = None
        self._devices = devices or DeviceStager(timeout=timeout)
        self._copy_seconds: float | None = None
        self._torn = False

    def prepare(self, devices: set[torch.device]) -> None:
        """Pay at the start for what the first snapshot from a device would."""
        for device in devices:
            self._devices.prepare(device)

    @uncollected()
    def stage(self, snapshot: Snapshot, buffer: Buffer, tracked: Tracked) -> Staged:
        """Begin to copy a snapshot into a buffer that was prepared for its plan."""
        tensors, items = snapshot.tensors, snapshot.plan.layout.items
        all_here = all(map(is_cpu, tensors))
        elsewhere = [] if all_here else [at for at, tensor in enumerate(tensors) if not tensor.is_cpu]
        flight: InFlight | None = None
        if elsewhere:  # first: what training may change soonest
            pieces = [Piece(tensors[at], items[at].raw_offset, items[at].raw_length, items[at].name)
                      for at in elsewhere]  # fmt: skip
            owned = Owned(tracked.optimizers())
            way = self._choose(pieces, owned)
            trusted = None if self._torn else owned
            flight = self._devices.begin(pieces, buffer.pinned(), way, trusted)
            for note in flight.notes:
                log.warning("holdfast: %s", note)
        threads = min(STAGING_THREADS, torch.get_num_threads())
        prints = stage_from_host(buffer, snapshot.plan, tensors, snapshot.prints, threads)
        return Staged(prints, elsewhere, flight)

    def note(self, staged: Staged) -> None:
        """A snapshot is done: what it took counts for the next choice."""
        self._copy_seconds = staged.copy_seconds or self._copy_seconds
        if staged.torn():
            self.was_torn()

    def was_torn(self) -> None:
        """A snapshot was changed while it was copied: from now on nothing is copied from live tensors."""
        self._torn = True

    def _choose(self, pieces: list[Piece], owned: Owned) -> Way:
        needed: dict[torch.device, int] = {}
        for piece in pieces:
            needed[piece.tensor.device] = needed.get(piece.tensor.device, 0) + piece.nbytes
        memory = {device: self._devices.memory(device) for device in needed}
        tightest = min(needed, key=lambda device: memory[device].free - needed[device])
        choice = choose(
            self._setting,
            free_bytes=memory[tightest].free,
            needed_bytes=needed[tightest],
            device_bytes=memory[tightest].total,
            copy_seconds=self._copy_seconds,
            step_seconds=self._step_seconds(),
            has_owned=owned_enough(owned.nbytes(pieces), sum(needed.values())),
            torn_before=self._torn,
        )
        if self._told is None or (choice.way, choice.warning) != (self._told.way, self._told.warning):
            self._told = choice
            self._tell(choice)
        return choice.way
