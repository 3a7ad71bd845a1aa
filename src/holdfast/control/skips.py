"""Data that the run leaves out, because a step fails on it everywhere: windows of batches, with the reason.

Guarantee: what is left out once is left out by every later attempt, so that each sees the same samples. The
file's name alone says which batches, so a record with damaged contents still counts; a name that does not say
so is an error, since nobody could tell any more which samples the run was trained on.

```
skips/000001-epoch_0_batches_122_122.json
```
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec

from holdfast.control.appended import append, contents, entries
from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import Fence
from holdfast.errors import ControlError, UsageError
from holdfast.policy.rejection import Window

_WORD = re.compile(r"epoch_([0-9]{1,18})_batches_([0-9]{1,18})_([0-9]{1,18})")


class Skip(msgspec.Struct, frozen=True, kw_only=True):
    window: Window
    reason: str = ""
    lease: int = 0
    """The lease's epoch under which it was decided."""
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
            append(_folder(control), word, record)


def skips(control: ControlDirectory) -> list[Window]:
    """What is left out, each window once, in the order in which it was recorded."""
    return [skip.window for skip in read_skips(control)]


def read_skips(control: ControlDirectory) -> list[Skip]:
    found: dict[Window, Skip] = {}
    for entry in entries(_folder(control)):
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


def _folder(control: ControlDirectory) -> Path:
    return control.path / "skips"
