"""A device that lags behind its host as far as a test wants."""

from __future__ import annotations

from typing import Any

from holdfast.train.check import checks as deferring
from holdfast.train.check.checks import Ring


class LateRing(Ring):
    """A device that has come as far as it is told to."""

    def __init__(self) -> None:
        self.device = deferring.HOST
        self.put_in: list[tuple[int, float, float]] = []
        self.done = 0
        self.waited = 0

    def put(self, at: int, loss: Any, norm: Any) -> None:
        self.put_in.append((at, float(loss), float(norm)))

    def _number(self, at: int) -> int:
        return max(number for number, row in enumerate(self.put_in) if row[0] == at)

    def ready(self, at: int) -> bool:
        return self._number(at) < self.done

    def wait(self, at: int) -> None:
        if not self.ready(at):
            self.waited += 1
            self.done = self._number(at) + 1

    def read(self, at: int) -> tuple[float, float]:
        assert self.ready(at)
        return self.put_in[self._number(at)][1:]
