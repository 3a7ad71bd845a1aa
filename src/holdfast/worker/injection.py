"""Rehearsing bad results: a false one is made up where, when and as often as the settings say.

* `correct_result`: the work itself gives it, so every rank that is named gets it again on any device.
* `transient_error`: it appears once, and not when the step is run again, nor when a later attempt replays it.
* `persistent_error`: a device gives it, whoever computes on it. Which one that is, is remembered in the run
  directory: the next attempt puts the same ranks on other devices.

A false result is a loss that is NaN. Gradients are left as they are.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from holdfast.control.appended import append, contents, entries
from holdfast.control.directory import ControlDirectory
from holdfast.policy.rejection import Place
from holdfast.settings_validation import ValidationSettings, parse_ranks

TRANSIENT = "transient_error"
PERSISTENT = "persistent_error"


class _Injected(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int
    step: int
    rank: int
    node: str = ""
    device: str = ""


class Injection:
    """What one rank makes up."""

    def __init__(
        self, chosen: ValidationSettings, control: ControlDirectory, *, attempt: int, rank: int, place: Place
    ) -> None:
        self._chosen = chosen
        self._folder = control.path / "injections"
        self._run = control.run_id
        self._attempt = attempt
        self._rank = rank
        self._place = place
        self._ranks = parse_ranks(chosen.error_injection_ranks)
        self.wanted = chosen.error_injection_rate > 0 or chosen.error_injection_step > 0
        self._false = False

    def falsify(self, result: Any, step: int, *, again: bool) -> Any:
        """The result, or a false one. `again`: the same call is made for another time."""
        if not again:
            self._false = self._is_due(step)
        elif self._chosen.error_injection_type == TRANSIENT:
            self._false = False
        if not self._false:
            return result
        return torch.full_like(result, math.nan) if isinstance(result, torch.Tensor) else math.nan

    def _is_due(self, step: int) -> bool:
        chosen = self._chosen
        if not (step == chosen.error_injection_step or self._drawn(step) < chosen.error_injection_rate):
            return False
        named = not self._ranks or self._rank in self._ranks
        if chosen.error_injection_type == PERSISTENT:
            return self._device_is_bad(step, named=named)
        if chosen.error_injection_type == TRANSIENT:
            return named and self._first_time(step)
        return named

    def _drawn(self, step: int) -> float:
        """The same on every rank and in every attempt."""
        return xxhash.xxh3_64_intdigest(f"{self._run}/{step}".encode()) / 2.0**64

    def _first_time(self, step: int) -> bool:
        folder = self._folder / f"rank_{self._rank}"
        word = f"step_{step}"
        if any(entry.word == word for entry in entries(folder)):
            return False
        self._remember(folder, word, step)
        return True

    def _device_is_bad(self, step: int, *, named: bool) -> bool:
        if self._chosen.error_injection_device:
            known = {self._place.device, f"{self._place.node}/{self._place.device}"}
            return self._chosen.error_injection_device in known
        folder = self._folder / "devices"
        found = [contents(entry, _Injected) for entry in entries(folder)]
        bad = [one for one in found if one is not None]
        if any((one.node, one.device) == (self._place.node, self._place.device) for one in bad):
            return True
        if named and all((one.attempt, one.step) == (self._attempt, step) for one in bad):
            self._remember(folder, f"rank_{self._rank}", step)
            return True
        return False

    def _remember(self, folder: Path, word: str, step: int) -> None:
        record = _Injected(
            attempt=self._attempt,
            step=step,
            rank=self._rank,
            node=self._place.node,
            device=self._place.device,
        )
        append(folder, word, record)
