"""Stop signals while no function runs: they are kept, and told at the next barrier.

Inside the function they are the function's own affair, as a `Run` in there takes them.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from holdfast.settings import Settings
from holdfast.settings_cluster import parse_signals
from holdfast.signal_senders import watch


class StopBetween:
    """In the main thread; nothing where `stop.exit_signal_handler` is off."""

    def __init__(self, settings: Settings) -> None:
        chosen = settings.stop
        self._numbers = parse_signals(chosen.exit_signal) if chosen.exit_signal_handler else []
        self._before: dict[signal.Signals, Any] = {}
        self.signal = ""
        """The first one that came, by name; empty if none did."""

    def begin(self) -> None:
        for number in self._numbers:
            # The first one counts: a run that the function left behind gives its own back only after this.
            self._before.setdefault(number, signal.signal(number, self._handle))

    def close(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
            if callable(before):
                watch(number)

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """For as long as the function runs."""
        self.close()
        try:
            yield
        finally:
            self.begin()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = self.signal or signal.Signals(number).name
