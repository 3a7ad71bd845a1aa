"""What people asked of a run: pins, resets, pauses, exclusions, skipped data, requeues.

Guarantee: a request is durable before it is journalled, holds across attempts and launches, and may be made
at any time, even beside a live run: no lease is needed, because a request changes nothing by itself. Only a
request to stop is for a single launch. Whoever acts on a request (the leading agent, a resume) reads it when
acting. The newest record of each kind counts; where two have the same number, or one cannot be read, the
careful reading counts: paused, no reset.

```
operator/recovery/000001-paused.json, 000002-unpaused.json
operator/budget/000001-reset.json
operator/stop/000001-asked-3fa9c1d20b11.json              the launch that is to stop
operator/pin/000001-pinned-step_00000120-3fa9c1d2.json, 000002-used-1.json, 000003-unpinned.json
exclusions/                                              see below
```
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from holdfast.errors import ControlError, UsageError
from holdfast.journal import JournalWriter
from holdfast.journal.events import OperatorActed
from holdfast.policy import Exclusion, Window
from holdfast.record.attempts import attempt_numbers
from holdfast.record.directory import ControlDirectory, RecordEntry, append, contents, entries, list_names
from holdfast.record.lease import Fence, current_epoch, read_beat, read_claim

# Nodes and devices that are kept out of the run, with the reason.
#
# Guarantee: an exclusion stays, across attempts and launches, until somebody readmits the very thing that was
# excluded. The newest record of each (node, device) counts; in doubt it counts as an exclusion: if a record
# cannot be read, a word is not known, or two records have the same number.
#
# ```
# exclusions/<node>/000001-excluded.json                   the whole node
# exclusions/<node>/devices/<device>/000001-excluded.json  one of its devices
# ```
# Anybody may write here, at any time: an operator beside a live run, or the leading agent after a decision.


EXCLUDED = "excluded"
READMITTED = "readmitted"
DEVICES = "devices"
LONGEST_NAME = 200
"""Most characters of a node's or device's name as a file name; file systems take 255."""


class ExclusionRecord(Exclusion, frozen=True, kw_only=True):
    """Something that is kept out, with who said so and when. A readmission is recorded in the same form."""

    by: str = ""
    """Who excluded it: an operator, or `recovery`."""
    attempt: int = 0
    """The newest attempt at that time."""
    at: float = 0.0
    """0 if the record could not be read."""


def exclude(
    control: ControlDirectory, node: str, device: str | None, reason: str, by: str, attempt: int
) -> ExclusionRecord:
    """Keep a node, or one device of it, out of every later attempt."""
    return _append(control, EXCLUDED, node, device, reason, by, attempt)


def readmit(
    control: ControlDirectory, node: str, device: str | None, reason: str, by: str, attempt: int = 0
) -> ExclusionRecord:
    """Let it take part again. A device that was excluded on its own stays out when its node is readmitted."""
    return _append(control, READMITTED, node, device, reason, by, attempt)


def excluded(control: ControlDirectory) -> list[ExclusionRecord]:
    """What is kept out now, in the order of the names; a node before its devices."""
    found: list[ExclusionRecord] = []
    root = _root(control)
    for name in sorted(list_names(root)):
        if name.startswith("."):
            continue
        node = unquote(name)
        found.extend(_standing(root / name, node, None))
        devices = root / name / DEVICES
        for device in sorted(list_names(devices)):
            if not device.startswith("."):
                found.extend(_standing(devices / device, node, unquote(device)))
    return found


def _standing(folder: Path, node: str, device: str | None) -> list[ExclusionRecord]:
    """The exclusion in force in a folder, as a list of none or one."""
    records = entries(folder)
    if not records:
        return []
    if records[0].number:  # otherwise one has no place in the order, so it may be the newest
        records = [entry for entry in records if entry.number == records[-1].number]
        if all(entry.word == READMITTED for entry in records):
            return []
    entry = next(entry for entry in records if entry.number == 0 or entry.word != READMITTED)
    record = contents(entry, ExclusionRecord)
    if record is None or (record.node, record.device) != (node, device):
        why = f"its record {entry.path.name} cannot be read, so it counts as an exclusion"
        return [ExclusionRecord(node=node, device=device, reason=why)]
    return [record]


def _append(
    control: ControlDirectory, word: str, node: str, device: str | None, reason: str, by: str, attempt: int
) -> ExclusionRecord:
    record = ExclusionRecord(node=node, device=device, reason=reason, by=by, attempt=attempt, at=time.time())
    folder = _root(control) / _as_name(node, "node")
    if device is not None:
        folder = folder / DEVICES / _as_name(device, "device")
    append(folder, word, record)
    return record


def _root(control: ControlDirectory) -> Path:
    return control.path / "exclusions"


def _as_name(text: str, what: str) -> str:
    """Any text as a file name, from which the text can be recovered."""
    try:
        name = quote(text, safe=" ")
    except UnicodeEncodeError:
        raise UsageError(f"{text!r:.120} is not a {what}'s name: it is not text") from None
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if not text.strip() or len(name) > LONGEST_NAME:
        raise UsageError(
            f"{text!r:.120} is not a {what}'s name: it must not be empty, nor longer than {LONGEST_NAME} "
            "characters. Give the name that `holdfast status` shows"
        )
    return name


# Data that the run leaves out because a step fails on them everywhere: windows of batches, with the reason.
#
# Guarantee: what is left out once is left out by every later attempt, so that each sees the same samples. The
# file's name alone says which batches, so a record with damaged contents still counts; a name that does not
# is an error, since nobody could tell any more which samples the run was trained on.
#
# ```
# skips/000001-epoch_0_batches_122_122.json
# ```


_WORD = re.compile(r"epoch_([0-9]{1,18})_batches_([0-9]{1,18})_([0-9]{1,18})")


class Skip(msgspec.Struct, frozen=True, kw_only=True):
    window: Window
    reason: str = ""
    lease: int = 0
    """The epoch of the lease under which it was decided."""
    at: float = 0.0
    """0 if the record could not be read."""


def record_skip(control: ControlDirectory, fence: Fence, window: Window, reason: str) -> None:
    """Leave these batches out from the next attempt on. The same window is not added again."""
    if not 0 <= window.first <= window.last or window.epoch < 0:
        raise UsageError(f"{window} is not a window of batches: it needs 0 ≤ first ≤ last, and an epoch ≥ 0")
    word = f"epoch_{window.epoch}_batches_{window.first}_{window.last}"
    readable = reason.encode(errors="replace").decode()[:2000]
    with fence.guard(f"leave out batches {window.first} to {window.last} of epoch {window.epoch}"):
        if window not in skips(control):
            record = Skip(window=window, reason=readable, lease=fence.epoch, at=time.time())
            append(_skips_folder(control), word, record)


def skips(control: ControlDirectory) -> list[Window]:
    """What is left out, each window once, in the order in which it was recorded."""
    return [skip.window for skip in read_skips(control)]


def read_skips(control: ControlDirectory) -> list[Skip]:
    found: dict[Window, Skip] = {}
    for entry in entries(_skips_folder(control)):
        match = _WORD.fullmatch(entry.word)
        if match is None or entry.number == 0:
            raise ControlError(
                f"{entry.path} does not say which batches are left out. The run's memory is damaged; "
                "restore the file from a backup, or remove it to train on those batches again"
            )
        window = Window(int(match[1]), int(match[2]), int(match[3]))
        record = contents(entry, Skip)
        if record is None or record.window != window:
            record = Skip(window=window, reason=f"its record {entry.path.name} cannot be read")
        found.setdefault(window, record)
    return list(found.values())


def _skips_folder(control: ControlDirectory) -> Path:
    return control.path / "skips"


PAUSED, UNPAUSED = "paused", "unpaused"
RESET = "reset"
ASKED = "asked"
PINNED, UNPINNED, USED = "pinned", "unpinned", "used"
WHO = "operator"


class OperatorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One thing an operator asked for."""

    reason: str = ""
    by: str = ""
    attempt: int = 0
    """The newest attempt at that time."""
    at: float = 0.0
    """0 if the record could not be read."""
    force: bool = False
    """For a pin: to be used even if it is suspect or condemned."""
    once: bool = True
    """For a pin: for the next resume only."""

    def describe(self) -> str:
        who = self.by or "an operator"
        return f"{who}: {self.reason}" if self.reason else who


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that the next resume must use."""

    checkpoint: str
    """Its name: `step_00000120-3fa9c1d2`."""
    number: int
    """The number of the record, by which a pin that holds once is known to have been used."""
    request: OperatorRequest

    @property
    def force(self) -> bool:
        return self.request.force

    @property
    def once(self) -> bool:
        return self.request.once


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """All that is in force."""

    paused: OperatorRequest | None
    budget_reset: OperatorRequest | None
    pin: Pin | None
    exclusions: list[ExclusionRecord]
    stop: OperatorRequest | None = None
    """The request to stop the launch that holds the run."""


# --- reading -----------------------------------------------------------------------------------------------


def paused(control: ControlDirectory) -> OperatorRequest | None:
    """Why recovery is paused; None if it is not. While it is, a failed attempt is not restarted."""
    newest = _newest(_folder(control, "recovery"))
    holding = [entry for entry in newest if entry.word != UNPAUSED]
    return (contents(holding[0], OperatorRequest) or OperatorRequest()) if holding else None


def last_reset(control: ControlDirectory) -> OperatorRequest | None:
    """The newest reset of the budget that can be read."""
    found = [
        contents(entry, OperatorRequest)
        for entry in entries(_folder(control, "budget"))
        if entry.word == RESET
    ]
    return next((request for request in reversed(found) if request is not None), None)


def budget_reset(control: ControlDirectory) -> int | None:
    """The number of the last attempt that no longer counts against the budgets; None if all count."""
    request = last_reset(control)
    return request.attempt if request is not None else None


def pinned(control: ControlDirectory) -> Pin | None:
    """The checkpoint that the next resume must use; None if nothing is pinned, or it was used already."""
    records = entries(_folder(control, "pin"))
    used = {entry.word for entry in records}
    records = [entry for entry in records if not entry.word.startswith(f"{USED}-")]
    for entry in reversed(records):
        word, _, checkpoint = entry.word.partition("-")
        if word != PINNED:
            return None
        # The name is enough: a damaged record loses its reason, and a `force` that nobody can read is none.
        request = contents(entry, OperatorRequest) or OperatorRequest()
        if request.once and f"{USED}-{entry.number}" in used:
            return None
        return Pin(checkpoint=checkpoint, number=entry.number, request=request)
    return None


def pin_attempts(control: ControlDirectory) -> set[int]:
    """The attempts that resumed from a checkpoint pinned for them."""
    records = entries(_folder(control, "pin"))
    used = [contents(entry, OperatorRequest) for entry in records if entry.word.startswith(f"{USED}-")]
    return {request.attempt for request in used if request is not None}


def stop_asked(control: ControlDirectory, launches: Collection[str]) -> OperatorRequest | None:
    """Why one of these launches is to stop; None if nobody asked. Requests to other launches do not count."""
    wanted = {f"{ASKED}-{launch}" for launch in launches}
    for entry in entries(_folder(control, "stop")):
        if entry.word in wanted:
            return contents(entry, OperatorRequest) or OperatorRequest()
    return None


def in_force(control: ControlDirectory) -> Controls:
    return Controls(
        paused=paused(control),
        budget_reset=last_reset(control),
        pin=pinned(control),
        exclusions=excluded(control),
        stop=_stop_of_holder(control),
    )


def _stop_of_holder(control: ControlDirectory) -> OperatorRequest | None:
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
    """Count restarts from 0 again. Returns the number of the last attempt that no longer counts."""
    request = _request(control, reason, by)
    _ask(control, "budget", RESET, "reset_budget", request, f"up to attempt {request.attempt}")
    return request.attempt


def stop(control: ControlDirectory, launch: str, reason: str, by: str) -> None:
    """This launch saves and ends; the next one is not affected."""
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
    """The next resume (or every resume, with `once=False`) uses this checkpoint, or refuses to start."""
    request = msgspec.structs.replace(_request(control, reason, by), once=once, force=force)
    _ask(control, "pin", f"{PINNED}-{checkpoint}", "pin", request, checkpoint)


def unpin(control: ControlDirectory, reason: str, by: str) -> None:
    _ask(control, "pin", UNPINNED, "unpin", _request(control, reason, by))


def use_up(control: ControlDirectory, fence: Fence, used: Pin, attempt: int) -> None:
    """An attempt has resumed from what was pinned: a pin that holds once is used up.

    The record names the pin, so that another pin made meanwhile is not lost with it.
    """
    if used.once:
        with fence.guard("use up the pin"):
            request = OperatorRequest(
                reason=f"attempt {attempt} resumed from it", attempt=attempt, at=time.time()
            )
            append(_folder(control, "pin"), f"{USED}-{used.number}", request)


def ask_to_exclude(
    control: ControlDirectory, node: str, device: str | None, reason: str, by: str
) -> ExclusionRecord:
    """An operator keeps a node or device out of every later attempt."""
    record = exclude(control, node, device, reason, by, _newest_attempt(control))
    _journal(control, "exclude", record.attempt, reason, by, record.describe())
    return record


def ask_to_readmit(
    control: ControlDirectory, node: str, device: str | None, reason: str, by: str
) -> ExclusionRecord:
    record = readmit(control, node, device, reason, by, _newest_attempt(control))
    _journal(control, "readmit", record.attempt, reason, by, record.describe())
    return record


def _ask(
    control: ControlDirectory, topic: str, word: str, action: str, request: OperatorRequest, subject: str = ""
) -> None:
    append(_folder(control, topic), word, request)
    _journal(control, action, request.attempt, request.reason, request.by, subject)


def _journal(
    control: ControlDirectory, action: str, attempt: int, reason: str, by: str, subject: str
) -> None:
    journal = JournalWriter(control.journal, WHO, attempt)
    journal.write(OperatorActed(action=action, subject=subject, reason=reason, by=by))
    journal.close()


def _request(control: ControlDirectory, reason: str, by: str) -> OperatorRequest:
    return OperatorRequest(reason=reason, by=by, attempt=_newest_attempt(control), at=time.time())


def _newest_attempt(control: ControlDirectory) -> int:
    return max(attempt_numbers(control), default=0)


def _newest(folder: Path) -> list[RecordEntry]:
    """The records that may be the newest: those with the highest number, or whose number nobody can read."""
    records = entries(folder)
    highest = records[-1].number if records else 0
    return [entry for entry in records if entry.number in (0, highest)]


def _folder(control: ControlDirectory, topic: str) -> Path:
    return control.path / "operator" / topic


# How often the scheduler was asked to queue the job again: one record each, `requeues/000001-asked.json`.
#
# A record is written before the scheduler is asked, because that may end this process: so the count can only
# be too high. A request that came to nothing is withdrawn by `000002-withdrawn-1.json`.


REQUEUES_ASKED, WITHDRAWN = "asked", "withdrawn"


class Requeue(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int
    step: int
    """The highest step that had been committed by then."""
    job: str = ""
    at: float = 0.0


def record_requeue(control: ControlDirectory, attempt: int, step: int, job: str) -> int:
    """Record a request, and return the record's number."""
    return append(
        _requeues_folder(control),
        REQUEUES_ASKED,
        Requeue(attempt=attempt, step=step, job=job, at=time.time()),
    )


def withdraw_requeue(control: ControlDirectory, number: int, attempt: int, step: int) -> None:
    """The scheduler was not asked after all, or said no."""
    append(
        _requeues_folder(control),
        f"{WITHDRAWN}-{number}",
        Requeue(attempt=attempt, step=step, at=time.time()),
    )


def requeues_without_progress(control: ControlDirectory, step: int) -> int:
    """How often the scheduler was asked since the highest committed step reached `step`.

    A record that cannot be read counts. Those before an operator's reset of the budget do not.
    """
    forgiven = budget_reset(control) or 0
    records = entries(_requeues_folder(control))
    withdrawn = {entry.word for entry in records}
    asked = [
        entry
        for entry in records
        if not entry.word.startswith(f"{WITHDRAWN}-") and f"{WITHDRAWN}-{entry.number}" not in withdrawn
    ]
    found = [contents(entry, Requeue) for entry in asked]
    return sum(one is None or (one.step >= step and one.attempt > forgiven) for one in found)


def _requeues_folder(control: ControlDirectory) -> Path:
    return control.path / "requeues"
