"""What a run has left: its journal, how its attempts ended, and what its ranks logged.

A place is the directory in which a run was launched; its run directory is `place`/run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.journal.event import Event
from holdfast.journal.events import AttemptStarted, RungRejected, Warned
from holdfast.journal.reader import read_journal
from holdfast.record.attempts import EndRecord, ends_of
from holdfast.record.directory import ControlDirectory


def events_in(run_dir: Path, *kinds: type[Event]) -> list[Any]:
    """The journal's events of these kinds, or of every kind, oldest first."""
    events = (line.body for line in read_journal(run_dir / "journal"))
    return [event for event in events if not kinds or isinstance(event, kinds)]


def journalled(place: Path, *kinds: type[Event]) -> list[Any]:
    """What the run that was launched in a place has written of these kinds."""
    return events_in(place / "run", *kinds)


def warnings_of(run_dir: Path) -> list[str]:
    return [event.message for event in events_in(run_dir, Warned)]


def rejections(run_dir: Path) -> dict[str, list[str]]:
    """Checkpoint → reasons, as the last attempt journalled them."""
    lines = read_journal(run_dir / "journal")
    last = max(line.attempt for line in lines)
    return {
        line.body.checkpoint: line.body.reasons
        for line in lines
        if line.attempt == last and isinstance(line.body, RungRejected)
    }


def record(directory: Path) -> dict[str, object]:
    """Final parameters of every rank, and the last thing each rank did at each step."""
    found: dict[str, object] = {p.name: p.read_text() for p in (directory / "out").glob("params*")}
    for path in sorted((directory / "out").glob("rank*.log"), key=lambda p: p.stat().st_mtime):
        for line in path.read_text().splitlines():
            step, rest = line.split(" ", 1)
            key = f"{path.name.split('.')[0]} step {step}"
            assert found.get(key, rest) == rest, f"{key} was done twice, differently"
            found[key] = rest
    return found


def control_of(place: Path) -> ControlDirectory:
    return ControlDirectory.open(place / "run")


def end_records(place: Path) -> list[EndRecord | None]:
    """How each attempt ended; None for one that has not."""
    return [end for _, end in ends_of(control_of(place))]


def ends(place: Path) -> list[tuple[str, int] | None]:
    """The outcome and exit code of each attempt."""
    return [(end.outcome, end.exit_code) if end is not None else None for end in end_records(place)]


def outcomes(place: Path) -> list[str]:
    return [end.outcome if end is not None else "none" for end in end_records(place)]


def leads(place: Path) -> str:
    """The node whose agent began the newest attempt."""
    lines = read_journal(place / "run" / "journal")
    return [line.who for line in lines if isinstance(line.body, AttemptStarted)][-1].removeprefix("agent-")
