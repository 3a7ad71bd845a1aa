"""What an operator asked of a run, kept until it is asked otherwise.

Guarantee: a request is durable before it is journalled, holds across attempts and launches, and may be made
at any time, beside a live run too: no lease is needed, because a request changes nothing by itself. Only a
request to stop is for one launch alone. Whoever acts on it (the leading agent, a resume) reads it when it
acts. The newest record of each kind counts; where two have the same number, or one cannot be read, the
careful reading does: paused, no reset.

```
operator/recovery/000001-paused.json, 000002-unpaused.json
operator/budget/000001-reset.json
operator/stop/000001-asked-3fa9c1d20b11.json              the launch that is to stop
operator/pin/000001-pinned-step_00000120-3fa9c1d2.json, 000002-used-1.json, 000003-unpinned.json
exclusions/                                              see exclusions.py
```
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from holdfast.control import exclusions
from holdfast.control.appended import Entry, append, contents, entries
from holdfast.control.attempts import attempt_numbers
from holdfast.control.directory import ControlDirectory
from holdfast.control.exclusions import Exclusion
from holdfast.control.lease import Fence, current_epoch, read_beat, read_claim
from holdfast.journal.events import OperatorActed
from holdfast.journal.writer import JournalWriter

PAUSED, UNPAUSED = "paused", "unpaused"
RESET = "reset"
ASKED = "asked"
PINNED, UNPINNED, USED = "pinned", "unpinned", "used"
WHO = "operator"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One thing an operator asked for."""

    reason: str = ""
    by: str = ""
    attempt: int = 0
    """The newest attempt by then."""
    at: float = 0.0
    """0 if the record could not be read."""
    force: bool = False
    """Of a pin: to be used even if it is suspect or condemned."""
    once: bool = True
    """Of a pin: for the next resume only."""

    def describe(self) -> str:
        who = self.by or "an operator"
        return f"{who}: {self.reason}" if self.reason else who


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that the next resume must use."""

    checkpoint: str
    """Its name: `step_00000120-3fa9c1d2`."""
    number: int
    """Of the record; by it a pin that holds once is known to have been used."""
    request: Request

    @property
    def force(self) -> bool:
        return self.request.force

    @property
    def once(self) -> bool:
        return self.request.once


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """All that is in force."""

    paused: Request | None
    budget_reset: Request | None
    pin: Pin | None
    exclusions: list[Exclusion]
    stop: Request | None = None
    """Of the launch that holds the run."""


# --- reading -----------------------------------------------------------------------------------------------


def paused(control: ControlDirectory) -> Request | None:
    """Why recovery is paused; None if it is not. While it is, a failed attempt is not restarted."""
    newest = _newest(_folder(control, "recovery"))
    holding = [entry for entry in newest if entry.word != UNPAUSED]
    return (contents(holding[0], Request) or Request()) if holding else None


def last_reset(control: ControlDirectory) -> Request | None:
    """The newest reset of the budget that can be read."""
    found = [contents(entry, Request) for entry in entries(_folder(control, "budget")) if entry.word == RESET]
    return next((request for request in reversed(found) if request is not None), None)


def budget_reset(control: ControlDirectory) -> int | None:
    """The number of the last attempt that no longer counts against the budgets; None if all count."""
    request = last_reset(control)
    return request.attempt if request is not None else None


def pinned(control: ControlDirectory) -> Pin | None:
    """The checkpoint that the next resume must use; None if nothing is pinned, or it was used already."""
    there = entries(_folder(control, "pin"))
    used = {entry.word for entry in there}
    there = [entry for entry in there if not entry.word.startswith(f"{USED}-")]
    for entry in reversed(there):
        word, _, checkpoint = entry.word.partition("-")
        if word != PINNED:
            return None
        # The name is enough: a damaged record costs its reason, and a force that nobody can read is none.
        request = contents(entry, Request) or Request()
        if request.once and f"{USED}-{entry.number}" in used:
            return None
        return Pin(checkpoint=checkpoint, number=entry.number, request=request)
    return None


def pin_attempts(control: ControlDirectory) -> set[int]:
    """The attempts that resumed from a checkpoint that was pinned for them."""
    there = entries(_folder(control, "pin"))
    used = [contents(entry, Request) for entry in there if entry.word.startswith(f"{USED}-")]
    return {request.attempt for request in used if request is not None}


def stop_asked(control: ControlDirectory, launches: Collection[str]) -> Request | None:
    """Why one of these launches is to stop; None if nobody asked. An earlier launch's is no other's."""
    wanted = {f"{ASKED}-{launch}" for launch in launches}
    for entry in entries(_folder(control, "stop")):
        if entry.word in wanted:
            return contents(entry, Request) or Request()
    return None


def in_force(control: ControlDirectory) -> Controls:
    return Controls(
        paused=paused(control),
        budget_reset=last_reset(control),
        pin=pinned(control),
        exclusions=exclusions.excluded(control),
        stop=_stop_of_holder(control),
    )


def _stop_of_holder(control: ControlDirectory) -> Request | None:
    epoch = current_epoch(control)
    held = read_claim(control, epoch) if epoch else None
    beat = read_beat(control, epoch) if epoch else None
    if held is None or (beat is not None and beat.released):
        return None
    return stop_asked(control, [held.owner])


# --- asking ------------------------------------------------------------------------------------------------


def pause(control: ControlDirectory, reason: str, by: str) -> None:
    """From now on a failed attempt is not restarted, until `unpause`."""
    _ask(control, "recovery", PAUSED, "pause", _request(control, reason, by))


def unpause(control: ControlDirectory, reason: str, by: str) -> None:
    _ask(control, "recovery", UNPAUSED, "unpause", _request(control, reason, by))


def reset_budget(control: ControlDirectory, reason: str, by: str) -> int:
    """Count restarts from 0 again; the number of the last attempt that no longer counts."""
    request = _request(control, reason, by)
    _ask(control, "budget", RESET, "reset_budget", request, f"up to attempt {request.attempt}")
    return request.attempt


def stop(control: ControlDirectory, launch: str, reason: str, by: str) -> None:
    """This launch saves and ends; the next one is not concerned."""
    _ask(control, "stop", f"{ASKED}-{launch}", "stop", _request(control, reason, by), f"launch {launch}")


def pin(
    control: ControlDirectory,
    checkpoint: str,
    reason: str,
    by: str,
    *,
    once: bool = True,
    force: bool = False,
) -> None:
    """The next resume (or with `once=False` every one) uses this checkpoint, or refuses to start."""
    request = msgspec.structs.replace(_request(control, reason, by), once=once, force=force)
    _ask(control, "pin", f"{PINNED}-{checkpoint}", "pin", request, checkpoint)


def unpin(control: ControlDirectory, reason: str, by: str) -> None:
    _ask(control, "pin", UNPINNED, "unpin", _request(control, reason, by))


def use_up(control: ControlDirectory, fence: Fence, used: Pin, attempt: int) -> None:
    """An attempt has resumed from what was pinned: one that holds once is done with.

    It names the pin, so that one which was made meanwhile is not lost with it.
    """
    if used.once:
        with fence.guard("use up the pin"):
            request = Request(reason=f"attempt {attempt} resumed from it", attempt=attempt, at=time.time())
            append(_folder(control, "pin"), f"{USED}-{used.number}", request)


def exclude(control: ControlDirectory, node: str, device: str | None, reason: str, by: str) -> Exclusion:
    """An operator keeps a node or device out of every later attempt."""
    record = exclusions.exclude(control, node, device, reason, by, _newest_attempt(control))
    _journal(control, "exclude", record.attempt, reason, by, record.describe())
    return record


def readmit(control: ControlDirectory, node: str, device: str | None, reason: str, by: str) -> Exclusion:
    record = exclusions.readmit(control, node, device, reason, by, _newest_attempt(control))
    _journal(control, "readmit", record.attempt, reason, by, record.describe())
    return record


def _ask(
    control: ControlDirectory, topic: str, word: str, action: str, request: Request, subject: str = ""
) -> None:
    append(_folder(control, topic), word, request)
    _journal(control, action, request.attempt, request.reason, request.by, subject)


def _journal(
    control: ControlDirectory, action: str, attempt: int, reason: str, by: str, subject: str
) -> None:
    journal = JournalWriter(control.journal, WHO, attempt)
    journal.write(OperatorActed(action=action, subject=subject, reason=reason, by=by))
    journal.close()


def _request(control: ControlDirectory, reason: str, by: str) -> Request:
    return Request(reason=reason, by=by, attempt=_newest_attempt(control), at=time.time())


def _newest_attempt(control: ControlDirectory) -> int:
    return max(attempt_numbers(control), default=0)


def _newest(folder: Path) -> list[Entry]:
    """The records that may be the newest: those of the highest number, or whose number nobody can read."""
    there = entries(folder)
    highest = there[-1].number if there else 0
    return [entry for entry in there if entry.number in (0, highest)]


def _folder(control: ControlDirectory, topic: str) -> Path:
    return control.path / "operator" / topic
