"""Faults on purpose (monitor.simulate_fault): a rank that stops or kills itself, to see that a run survives.

Only in the first attempt of a launch, and journalled before it happens. All ranks derive the same choice from
names they share, so nothing has to be exchanged.
"""

from __future__ import annotations

import os
import random
import signal
import threading

import msgspec

from holdfast.control.attempts import ends_of
from holdfast.control.directory import ControlDirectory
from holdfast.errors import ConfigError
from holdfast.journal.events import Warned
from holdfast.journal.writer import JournalWriter
from holdfast.settings import MonitorSettings

RANDOM_SHARE = 0.2
"""The delay is the base delay and up to this share of it more."""
_SIGNALS = {"rank_hung": signal.SIGSTOP, "rank_killed": signal.SIGKILL}


class Fault(msgspec.Struct, frozen=True):
    kind: str
    """rank_hung or rank_killed."""
    rank: int
    delay: float
    """Seconds from the first completed step."""


def choose(settings: MonitorSettings, seed: str, world_size: int) -> Fault:
    """The fault that every rank of an attempt comes to."""
    chance = random.Random(seed)
    kind, rank = chance.choice(sorted(_SIGNALS)), chance.randrange(world_size)
    delay = settings.simulated_fault_base_delay * (1 + RANDOM_SHARE * chance.random())
    if settings.simulated_fault_type != "random":
        kind = settings.simulated_fault_type
    if isinstance(settings.simulated_fault_rank, int):
        rank = settings.simulated_fault_rank
    if rank >= world_size:
        raise ConfigError(
            f"monitor.simulated_fault_rank = {rank}: there are {world_size} ranks, 0 to {world_size - 1}"
        )
    return Fault(kind, rank, delay)


def is_first_attempt(control: ControlDirectory, attempt: int, launch: str) -> bool:
    """Whether no earlier attempt belongs to this launch."""
    return not any(record.launch == launch and record.number < attempt for record, _ in ends_of(control))


class SimulatedFault:
    """The fault of the rank that is to have it. `arm` after each step: the first one starts the clock."""

    def __init__(self, fault: Fault, journal: JournalWriter) -> None:
        self._fault = fault
        self._journal = journal
        self._timer: threading.Timer | None = None

    def arm(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._fault.delay, self._happen)
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _happen(self) -> None:
        number = _SIGNALS[self._fault.kind]
        told = f"simulated fault: {self._fault.kind}, rank {self._fault.rank} gets {number.name} from itself"
        self._journal.write(Warned(message=told))
        os.kill(os.getpid(), number)
