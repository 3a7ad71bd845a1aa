"""An attempt's stop on request, from the ends of its journals: who asked, how far it is, what came of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.journal.cluster_events import StopAgreed, StopAsked, StopForced, StopHastened, StopSaved
from holdfast.journal.render import REPORTER
from holdfast.journal.tails import tails
from holdfast.journal.text import duration, printable


class StopState(msgspec.Struct, frozen=True, kw_only=True):
    asked_by: str
    source: str
    at: float
    ends_at: float | None = None
    """The hard deadline, in seconds since 1970; None if there is none."""
    step: int | None = None
    """After which all ranks stop, once that is agreed on."""
    checkpoint: str | None = None
    """What holds the state of that step: None until it is safe, empty if there was nothing to save."""
    already: bool = False
    forced: str = ""
    """Why it ended without saving; empty if it did not."""


def stop_of(journal: Path, files: list[str], attempt: int) -> StopState | None:
    """How the stop of an attempt stands, by whoever asked for it first; None if nobody did."""
    lines = sorted(
        (line for who in ("agent", REPORTER) for line in tails(journal, files, attempt, who)),
        key=lambda line: line.at,
    )
    found: StopState | None = None
    for line in lines:
        body = line.body
        if isinstance(body, StopAsked) and found is None:
            ends = None if body.seconds is None else line.at + body.seconds
            asked = printable(body.detail)
            found = StopState(asked_by=asked, source=body.source, at=line.at, ends_at=ends)
    if found is None:
        return None
    for line in lines:
        body = line.body
        if isinstance(body, StopHastened):
            found = msgspec.structs.replace(found, ends_at=line.at + body.seconds)
        elif isinstance(body, StopAgreed):
            found = msgspec.structs.replace(found, step=body.step)
        elif isinstance(body, StopSaved):
            kept = printable(body.checkpoint)
            found = msgspec.structs.replace(found, step=body.step, checkpoint=kept, already=body.already)
        elif isinstance(body, StopForced):
            found = msgspec.structs.replace(found, forced=found.forced or printable(body.why))
    return found


def progress(stop: StopState, now: float) -> str:
    """Of a stop that is under way: `asked by SIGTERM to rank 1 on n, 42 s left`."""
    parts = [f"asked by {stop.asked_by}"]
    if stop.ends_at is not None:
        parts.append(f"{duration(max(0.0, stop.ends_at - now))} left")
    if stop.checkpoint is not None:
        parts.append("saved, the ranks end")
    elif stop.step is not None:
        parts.append(f"all ranks stop after step {stop.step}")
    return ", ".join(parts)


def outcome(code: int, stop: StopState | None) -> str:
    """Of one that is over."""
    known = code in (ExitCode.STOPPED, ExitCode.STOPPED_UNSAVED)
    if not known or stop is None:
        told = f"{MEANINGS[ExitCode(code)][0].rstrip('.')} (exit code {code}); " if known else ""
        return f"{told}launch it again to resume"
    if code == ExitCode.STOPPED and stop.checkpoint:
        what = f"step {stop.step} is saved ({stop.checkpoint})"
    elif code == ExitCode.STOPPED:
        what = "there was nothing to save"
    else:
        what = f"ended without saving{f' ({stop.forced})' if stop.forced else ''}"
    return f"{what}; asked by {stop.asked_by}; launch it again to resume (exit code {code})"
