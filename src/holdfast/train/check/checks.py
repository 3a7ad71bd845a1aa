"""The checks on one rank's own result, at once or deferred, and what the ranks agree on in a step.

Guarantee: `look` waits for a device at most once, however many tensors there are, unless something is wrong;
it makes no collective call; no check that a user added can end the run by failing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash

from holdfast.checkpoint.save import Pinned, pin
from holdfast.checkpoint.state import Tracked
from holdfast.config import ValidationSettings, parse_ranks
from holdfast.errors import UsageError
from holdfast.policy import AcceptedLosses, CheckRules, Place, Scale, judge, not_finite
from holdfast.record import ControlDirectory, Group, append, contents, entries
from holdfast.train.check.gradients import Gradients

# What the ranks have to agree on in a step, in one small exchange.
#
# Guarantee: every rank gets the same answer, the gravest that any rank gave, and only for the same call of
# the same step: ranks that are elsewhere get an error, instead of being paired up wrongly. A single rank
# exchanges nothing. The exchange runs over the group that Holdfast made for itself; its deadline is that
# group's own, and a rank that is gone ends it at once.


_CALLS = 1 << 20
"""More calls than any step has."""


class Severity(IntEnum):
    FINE = 0
    ODD = 1
    """Finite, yet rejected by some check: a spike, an outlier, a check of the user's own."""
    NONFINITE = 2


class AgreedResult(NamedTuple):
    severity: Severity = Severity.FINE
    breach: bool = False
    """What was loaded does not go on from where it was."""
    heard: bool = False
    """A result was a single number, so it was looked at as a loss."""
    bad: int = 0
    """How many completed steps were found not to be finite: the most on any one rank."""
    still: Severity = Severity.FINE
    """And how bad the last one was."""
    pending: bool = False
    """For some of them a device has not answered yet."""
    forgot: bool = False
    """A part of the training is not tracked."""
    scales: bool = False
    """There is a gradient scaler to look at."""


class Agreement:
    """One per attempt; the few numbers that are exchanged are always in the same memory."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._numbers = torch.zeros(10, dtype=torch.int64)
        self.exchanges = 0

    def agree(self, own: AgreedResult, step: int, call: int, *, again: bool = False) -> AgreedResult:
        """`again`: this is about the same call, made for a second time."""
        if self._group.process_group is None:
            return own
        at = step * _CALLS + 2 * call + again
        numbers = self._numbers
        numbers.copy_(torch.tensor([*own, at, -at], dtype=torch.int64))
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group.process_group)
        self.exchanges += 1
        *found, highest, lowest = numbers.tolist()
        if highest != -lowest:
            raise UsageError(
                f"rank {self._group.rank} is in step {step}, in its call {call} of run.compute() or "
                f"run.check(); another rank is in step {highest // _CALLS}, call {highest % _CALLS // 2}. "
                "Every rank must make as many calls in a step as the others"
            )
        severity, breach, heard, bad, still, *flags = found
        return AgreedResult(
            Severity(severity), bool(breach), bool(heard), bad, Severity(still), *map(bool, flags)
        )

    @property
    def ranks(self) -> int:
        return self._group.world_size

    def worst(self, own: float, known: float) -> tuple[float, int]:
        """The largest value of all ranks, and, if that is more than `known`, the first rank that has it.

        `known` is the same on all ranks, and so is the answer.
        """
        if self._group.process_group is None:
            return own, self._group.rank
        value = torch.tensor([own], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group.process_group)
        largest = float(value.item())
        if largest <= known:
            return largest, 0
        rank = torch.tensor([self._group.rank if own == largest else self._group.world_size])
        dist.all_reduce(rank, op=dist.ReduceOp.MIN, group=self._group.process_group)
        return largest, int(rank.item())


log = logging.getLogger("holdfast")

Check = Callable[[float], object]


class StepLook(msgspec.Struct, kw_only=True):
    """What one look at a step's result showed on this rank."""

    loss: float | None = None
    """None if the result is not a single number."""
    reasons: list[str] = []
    """Why the result is rejected, by this rank's own loss and gradients; empty if it is not."""
    finite: bool = True
    """False if a NaN or an infinity is among the reasons."""


class Checks:
    """Looks at results, as the settings say."""

    def __init__(self, chosen: ValidationSettings, tracked: Tracked) -> None:
        self._rules = CheckRules(
            nan=chosen.check_for_nan_in_loss,
            spike=chosen.spiky_loss_factor if chosen.check_for_spiky_loss else 0.0,
            outlier=chosen.outlier_loss_factor if chosen.check_for_outlier_loss else 0.0,
        )
        self._check_gradients = chosen.check_for_nan_in_grad
        self._tracked = tracked
        self._gradients: Gradients | None = None
        self._scalers: list[torch.amp.GradScaler] | None = None
        self._seen = AcceptedLosses()
        self._own: dict[str, Check] = {}
        self._failed: set[str] = set()

    def add(self, name: str, check: Check) -> None:
        """Add a check of the user's own: it is given the loss, and rejects the step by True or a text."""
        if name in self._own:
            raise UsageError(f"add_check({name!r}): there is a check of that name already")
        self._own[name] = check

    @property
    def judges_losses(self) -> bool:
        """Whether there is anything to look for in a loss by itself."""
        return self._rules.any or bool(self._own)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to look for."""
        return self._rules.any or self._check_gradients or bool(self._own)

    def look(self, loss: Any) -> StepLook:
        """Look at the loss that was returned, and at the gradients as they are now."""
        held = single_number(loss)
        soundings = self.gradients().soundings() if self.looks_at_gradients() else []
        return self.judge(*read_together(held, soundings), exact=True)

    def judge(self, loss: float | None, sounding: float | None, *, exact: bool) -> StepLook:
        """Judge values that were read. `exact`: the gradients are still there to be asked for details."""
        reasons: list[str] = []
        finite = True
        if loss is not None:
            reasons += judge(loss, self._rules, self._seen)
            finite = not (reasons and not_finite(loss))
        if sounding is not None and not math.isfinite(sounding):
            # A sum over huge gradients overflows although each of them is finite.
            bad = self.gradients().bad() if exact else ["the gradients hold a NaN or an infinity"]
            finite = finite and not bad
            reasons += bad
        if loss is not None and self._own:
            reasons += self._asked(loss)
        return StepLook(loss=loss, reasons=reasons, finite=finite)

    def accepted(self, look: StepLook) -> None:
        """The step was accepted: later losses are compared with its loss, too."""
        if self._rules.compares and look.loss is not None:
            self._seen.add(look.loss)

    def looks_at_gradients(self) -> bool:
        """With a gradient scaler that is on, infinities in the scaled gradients are left to it."""
        if self._scalers is None:
            self._scalers = self._tracked.scalers()
        return self._check_gradients and not (
            self._scalers and any(scaler.is_enabled() for scaler in self._scalers)
        )

    def gradients(self) -> Gradients:
        if self._gradients is None:
            self._gradients = Gradients(self._tracked.models(), self._tracked.optimizers())
        return self._gradients

    def begin_from(self, losses: Iterable[float | None]) -> None:
        """Losses before a checkpoint, from its manifest; used if it holds none of the checks' own."""
        if self._rules.compares and not self._seen.count:
            self._seen.add_all(losses)

    def state_dict(self) -> dict[str, Any]:
        """Empty where nothing has to be remembered."""
        return self._seen.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen.load_state_dict(state)

    def _asked(self, loss: float) -> list[str]:
        reasons = []
        for name, check in self._own.items():
            try:
                answer = check(loss)
                rejects = bool(answer)
            except Exception as error:  # noqa: BLE001 - whatever a user's check does, the run goes on
                if name not in self._failed:
                    self._failed.add(name)
                    log.warning(
                        "holdfast: the check %r failed on a loss of %g and is ignored where it does: %s: %s",
                        name, loss, type(error).__name__, error,
                    )  # fmt: skip
                continue
            if rejects:
                reasons.append(
                    f"{name}: {answer}" if isinstance(answer, str) else f"{name} (loss {loss:.6g})"
                )
        return reasons


def single_number(loss: Any) -> float | torch.Tensor | None:
    """A result as a loss, if it is one number; still on its device."""
    if isinstance(loss, torch.Tensor):
        if type(loss) is not torch.Tensor and hasattr(loss, "full_tensor"):
            # Reading it is a collective, which a check must not start.
            raise UsageError(
                "the loss is a DTensor; return its .full_tensor(), or its local part, on every rank"
            )
        if loss.numel() != 1 or loss.is_complex():
            return None
        return float(loss.item()) if loss.is_cpu else loss.detach()
    if isinstance(loss, bool):
        return None
    return float(loss) if isinstance(loss, Real) else None


def read_together(
    loss: float | torch.Tensor | None, parts: list[torch.Tensor | float]
) -> tuple[float | None, float | None]:
    """A loss, and one number for several, read in one go: the norm of norms, finite only if all are."""
    known = [part for part in parts if not isinstance(part, torch.Tensor)]
    if len(known) == len(parts) and not isinstance(loss, torch.Tensor):
        return loss, math.hypot(*known) if known else None
    waiting = [value for value in (loss, *parts) if isinstance(value, torch.Tensor)]
    read = iter(_gathered(waiting).tolist())
    first = next(read) if isinstance(loss, torch.Tensor) else loss
    numbers = [next(read) if isinstance(part, torch.Tensor) else part for part in parts]
    return first, math.hypot(*numbers) if parts else None


def _gathered(values: list[torch.Tensor]) -> torch.Tensor:
    device = values[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([value.reshape(()).to(device, wide, non_blocking=True) for value in values])


# Checks whose results are read some steps later, so that no step waits for the device.
#
# Guarantee: `note` and `bad` never make the host wait for a device, unless the device is `DEPTH` steps
# behind. Every noted step is judged exactly once, in order, by the same rules as an immediate check; `settle`
# judges all that are left. By then the optimizer has used a bad step: it can be rolled back, but not re-run
# or dropped.
#
# For each step the loss and a sounding of the gradients are computed on the device, put into a small ring
# there, copied to page-locked memory on the same stream, and marked by an event. Ring, memory and events are
# made once. If nothing is on a CUDA device, a step is judged at once.


DEPTH = 64
"""How many steps the host may be ahead of the device before it waits."""
HOST = torch.device("cpu")
LOSS, SOUNDING = 0, 1
COLUMNS = 2


class Ring:
    """Two numbers a step, on their way from a device to the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._there = torch.zeros(DEPTH, COLUMNS, dtype=torch.float64, device=device)
        # Memory of our own, because torch ends the process when it frees its page-locked memory after the
        # device has failed, and a script whose kernel asserts should end with its own error.
        memory = mmap.mmap(-1, self._there.nbytes)
        self._here = torch.frombuffer(memory, dtype=torch.float64).view(DEPTH, COLUMNS)
        self._rows = [(self._there[at], self._here[at]) for at in range(DEPTH)]
        self._cells = [(self._there[at, LOSS], self._there[at, SOUNDING]) for at in range(DEPTH)]
        self._events: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(DEPTH)]  # type: ignore[no-untyped-call]
        weakref.finalize(self, _unlock, pin(self._here), self._events)

    def put(self, at: int, loss: torch.Tensor | float, sounding: torch.Tensor | float) -> None:
        with torch.cuda.device(self.device):
            for cell, value in zip(self._cells[at], (loss, sounding), strict=True):
                if isinstance(value, torch.Tensor):
                    cell.copy_(value.reshape(()), non_blocking=True)
                else:
                    cell.fill_(value)
            there, here = self._rows[at]
            here.copy_(there, non_blocking=True)
            self._events[at].record(torch.cuda.current_stream(self.device))

    def ready(self, at: int) -> bool:
        return bool(self._events[at].query())  # type: ignore[no-untyped-call]

    def wait(self, at: int) -> None:
        self._events[at].synchronize()

    def read(self, at: int) -> tuple[float, float]:
        loss, sounding = self._here[at].tolist()
        return loss, sounding


def _unlock(pinned: Pinned, events: list[torch.cuda.Event]) -> None:
    """Unlock the memory once nothing is on its way there; on a device that has failed, nothing is."""
    with contextlib.suppress(RuntimeError):
        for event in events:
            event.synchronize()
    pinned.release()


class Deferred:
    """One per rank. Not for several threads."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._ring: Ring | None = None
        self._pending: deque[tuple[int, int, bool, bool]] = deque()
        """Step, row, whether there is a loss, whether there are gradients."""
        self._next = 0
        self._found: list[tuple[int, StepLook]] = []
        self.last = StepLook()
        """What the last step whose result is known showed."""

    @torch.no_grad()
    def note(self, step: int, loss: Any, *, gradients: bool = True) -> None:
        """Note the step's loss and gradients as they are now, to look at them later."""
        held = single_number(loss)
        wanted = gradients and self._checks.looks_at_gradients()
        soundings = self._checks.gradients().soundings() if wanted else []
        device = next((v.device for v in (held, *soundings) if isinstance(v, torch.Tensor)), HOST)
        if self._ring is None or self._ring.device != device:
            self._settle_all()  # in order, always
            self._ring = self.ring_for(device)
        if self._ring is None:
            self._keep(step, self._checks.judge(*read_together(held, soundings), exact=True))
            return
        if len(self._pending) == DEPTH:
            self._read_oldest()
        self._ring.put(self._next, math.nan if held is None else held, _joined(soundings, device))
        self._pending.append((step, self._next, held is not None, bool(soundings)))
        self._next = (self._next + 1) % DEPTH

    def ring_for(self, device: torch.device) -> Ring | None:
        """What defers reading from a device; None if there is nothing to wait for."""
        return Ring(device) if device.type == "cuda" else None

    def bad(self) -> list[tuple[int, StepLook]]:
        """The bad steps that are known by now but were not yet returned, in order. Waits for nothing."""
        while self._pending and self._ring is not None and self._ring.ready(self._pending[0][1]):
            self._read_oldest()
        found, self._found = self._found, []
        return found

    def settle(self) -> list[tuple[int, StepLook]]:
        """The same, once all that was noted is known. Waits for the device: before a save, at the end."""
        self._settle_all()
        return self.bad()

    @property
    def pending(self) -> int:
        """How many steps were noted but not judged yet."""
        return len(self._pending)

    def _settle_all(self) -> None:
        while self._pending:
            self._read_oldest()

    def _read_oldest(self) -> None:
        assert self._ring is not None
        step, at, has_loss, has_sounding = self._pending.popleft()
        self._ring.wait(at)
        loss, sounding = self._ring.read(at)
        self._keep(
            step,
            self._checks.judge(loss if has_loss else None, sounding if has_sounding else None, exact=False),
        )

    def _keep(self, step: int, look: StepLook) -> None:
        self.last = look
        if look.reasons:
            self._found.append((step, look))
        if look.finite:  # what is merely odd is reported but accepted: a level that lasts is no oddity
            self._checks.accepted(look)


def _joined(soundings: list[torch.Tensor | float], device: torch.device) -> torch.Tensor | float:
    """One sounding made of several devices' soundings, on one of the devices."""
    if len(soundings) < 2:
        return soundings[0] if soundings else 0.0
    parts = [
        part.to(device, torch.float64, non_blocking=True)
        if isinstance(part, torch.Tensor)
        else torch.full((), part, dtype=torch.float64, device=device)
        for part in soundings
    ]
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return whole


# What becomes of the gradient scalers' scales, without making a step wait for the device.
#
# Guarantee: every scale is looked at once a step, in order. `note` never waits for a device, unless that is
# many steps behind; `found(wait=True)` waits until all scales are known.


class Scales:
    """The scales of one rank's scalers."""

    def __init__(self, scalers: Iterable[torch.amp.GradScaler]) -> None:
        self._scalers = [_Watched(scaler) for scaler in scalers if scaler.is_enabled()]

    def __bool__(self) -> bool:
        return bool(self._scalers)

    def note(self, step: int) -> None:
        """A step is complete."""
        for scaler in self._scalers:
            scaler.note(step)

    def found(self, *, wait: bool = False) -> list[int]:
        """The bad steps that are known by now but were not yet returned, in order."""
        return sorted({step for scaler in self._scalers for step in scaler.found(wait=wait)})

    @property
    def pending(self) -> bool:
        """Whether some scales are not known yet."""
        return any(scaler.pending for scaler in self._scalers)

    def why(self) -> list[str]:
        """What is wrong with the scales, as far as they are known."""
        return [scaler.scale.why for scaler in self._scalers if scaler.scale.why]


class _Watched:
    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler: Any = scaler
        self.scale = Scale(scaler.get_scale())
        self._ring: Ring | None = None
        self._pending: deque[tuple[int, int]] = deque()
        self._next = 0
        self._bad: list[int] = []

    def note(self, step: int) -> None:
        pair = scale_of(self._scaler)
        if pair is None:
            return
        scale, good = pair
        if not scale.is_cuda:
            self._observe(step, *read_pair(scale, good))
            return
        if self._ring is None or self._ring.device != scale.device:
            self.found(wait=True)
            self._ring = Ring(scale.device)
        if len(self._pending) == DEPTH:
            self._read_oldest()
        self._ring.put(self._next, scale, good)
        self._pending.append((step, self._next))
        self._next = (self._next + 1) % DEPTH

    @property
    def pending(self) -> int:
        return len(self._pending)

    def found(self, *, wait: bool) -> list[int]:
        while self._pending and self._ring is not None and (wait or self._ring.ready(self._pending[0][1])):
            self._read_oldest()
        found, self._bad = self._bad, []
        return found

    def _read_oldest(self) -> None:
        assert self._ring is not None
        step, at = self._pending.popleft()
        self._ring.wait(at)
        scale, good = self._ring.read(at)
        self._observe(step, scale, int(good))

    def _observe(self, step: int, scale: float, good: int) -> None:
        if self.scale.observe(scale, good):
            self._bad.append(step)


def scale_of(scaler: torch.amp.GradScaler) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scale and the count of good steps, on their device; None before the scaler is first used."""
    kept: Any = scaler
    scale, good = getattr(kept, "_scale", None), getattr(kept, "_growth_tracker", None)
    return (scale, good) if isinstance(scale, torch.Tensor) and isinstance(good, torch.Tensor) else None


def read_pair(scale: torch.Tensor, good: torch.Tensor) -> tuple[float, int]:
    """Both, on the host; waits for their device once."""
    if scale.is_cpu and good.is_cpu:
        return scale.item(), int(good.item())
    first, second = torch.stack([scale.double().reshape(()), good.double().reshape(())]).tolist()
    return first, int(second)


# Rehearsing bad results: a false one is made up where, when and as often as the settings say.
#
# * `correct_result`: the work itself gives it, so every rank that is named gets it again on any device.
# * `transient_error`: it appears once, but not when the step is run again, nor when a later attempt replays
#   it.
# * `persistent_error`: a device gives it, whichever rank computes on it. The run directory remembers which
#   device that is, because the next attempt puts the same ranks on other devices.
#
# A false result is a loss that is NaN. Gradients are left as they are.


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
        """The result, or a false one. `again`: the same call is made once more."""
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
        records = [contents(entry, _Injected) for entry in entries(folder)]
        bad = [record for record in records if record is not None]
        if any((record.node, record.device) == (self._place.node, self._place.device) for record in bad):
            return True
        if named and all((record.attempt, record.step) == (self._attempt, step) for record in bad):
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
