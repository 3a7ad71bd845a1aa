"""How a run is now, from its records and the ends of its journals. Reads only.

Guarantee: it always answers for a directory that holds a run. What is missing, torn, damaged or of another
release is left out and named under `problems`. The cost does not grow with the length of the journal: only
the last bytes of the newest attempts' files are read.

What is decisive (who lives, which attempt, how it ended, what was decided) comes from the durable records;
the journal adds what changes every second.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from holdfast.account.wording import one_line as account_line
from holdfast.checkpoint import local_manifest
from holdfast.checkpoint.identity import MANIFEST, CheckpointName
from holdfast.checkpoint.suspicion import still_open
from holdfast.control.attempts import (
    ACCOUNT,
    AttemptRecord,
    EndRecord,
    FailureRecord,
    HeadRecord,
    attempt_numbers,
    end_of,
    failures_of,
)
from holdfast.control.directory import ControlDirectory, list_names, read_record
from holdfast.control.exclusions import Exclusion
from holdfast.control.history import INCIDENT, past_attempts
from holdfast.control.holding import COMMANDS, LeaseState, lease_state, newest_claim
from holdfast.control.lease import Claim
from holdfast.control.operator import Controls, Pin, Request, in_force
from holdfast.control.standing import StandingBook
from holdfast.errors import ControlError
from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.journal.account_events import Account
from holdfast.journal.render import printable
from holdfast.journal.tails import batches, last_loss, last_step, nodes_started, rate
from holdfast.launch.incident_line import Decided, one_line, shown_decision
from holdfast.observe.stops import StopState, outcome, progress, stop_of
from holdfast.policy.budgets import restarts_left, restarts_without_progress
from holdfast.policy.classify import root_cause
from holdfast.policy.runbook import LIVE

FROM_SIGNALS = 128
"""Exit codes above it are those of releases that ended with a signal's number."""

ALIVE = ("new", *LIVE, "finished")
"""States for which `holdfast status` exits with 0."""

T = TypeVar("T")


class LastSave(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    step: int
    at: float


class LastIncident(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int
    text: str
    at: float | None = None
    account: Account | None = None
    """The answers to who, what, why, what was done and what to do, where the launcher gave them."""


class BudgetState(msgspec.Struct, frozen=True, kw_only=True):
    used: int
    """Restarts since the last progress, or since an operator reset the budget."""
    max_restarts: int | None = None
    """None if it is not recorded: there was no launcher, or it was of an older release."""
    left: int | None = None


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that a lower rung's replay is to condemn or to acquit."""

    checkpoint: str
    until: int
    """The step at which it failed."""
    evidence: list[str]


class Status(msgspec.Struct, kw_only=True):
    """All that `holdfast status --json` prints; fields are only ever added."""

    at: float
    run: str
    run_dir: str
    state: str = "new"
    """new, starting, running, stopping, restarting, paused, finished, failed, stopped or lost."""
    detail: str = ""
    """Of the state, in words."""
    exit_code: int | None = None
    """What the run ended with, where it is known to have ended."""
    attempt: int = 0
    started: float | None = None
    world_size: int | None = None
    nodes: dict[str, list[int]] = {}
    """Node → its ranks, where a launcher started them."""
    lease: LeaseState | None = None
    step: int | None = None
    step_at: float | None = None
    steps_per_second: float | None = None
    loss: float | str | None = None
    save: LastSave | None = None
    local_save: LastSave | None = None
    """In the local tier, which the nodes themselves hold."""
    incident: LastIncident | None = None
    budget: BudgetState | None = None
    paused: Request | None = None
    budget_reset: Request | None = None
    pin: Pin | None = None
    exclusions: list[Exclusion] = []
    suspects: list[Suspect] = []
    stop: StopState | None = None
    """Of the newest attempt, where somebody asked for one."""
    problems: list[str] = []

    @property
    def ok(self) -> bool:
        return self.state in ALIVE


class _Newest(msgspec.Struct, kw_only=True):
    """The newest attempt, as far as it can be read."""

    number: int = 0
    record: AttemptRecord | None = None
    end: EndRecord | None = None
    head: HeadRecord | None = None
    decided: Decided | None = None


def look(control: ControlDirectory) -> Status:
    """How the run is now."""
    status = Status(at=time.time(), run=control.run_id, run_dir=str(control.path))

    def tried(read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except (ControlError, OSError) as error:
            status.problems = [*status.problems, printable(str(error))]
            return default

    numbers: list[int] = tried(lambda: attempt_numbers(control), [])
    newest = _Newest(number=max(numbers, default=0))
    if numbers:
        folder = control.attempt(newest.number)
        newest.record = tried(lambda: read_record(folder / "attempt.json", AttemptRecord), None)
        newest.end = tried(lambda: end_of(control, newest.number), None)
        newest.head = tried(lambda: read_record(folder / "head.json", HeadRecord), None)
        newest.decided = tried(lambda: shown_decision(control, newest.number), None)
    held = tried(lambda: newest_claim(control), None)
    nothing = Controls(paused=None, budget_reset=None, pin=None, exclusions=[])
    controls = tried(lambda: in_force(control), nothing)
    status.paused, status.budget_reset = controls.paused, controls.budget_reset
    status.pin, status.exclusions = controls.pin, controls.exclusions
    status.attempt = newest.number
    if newest.record is not None:
        status.started, status.world_size = newest.record.started, newest.record.world_size
    if held is not None:
        status.lease = tried(lambda: lease_state(control, held, status.at), None)
    status.state, status.detail, status.exit_code = _state(newest, held, status.lease, controls)
    files: list[str] = tried(lambda: list_names(control.journal), [])
    _take_stop(status, control, files)
    _take_steps(status, control, files, newest.head)
    status.nodes = nodes_started(control.journal, files, newest.number)
    status.save = tried(lambda: _last_save(control, numbers), None)
    status.local_save = tried(lambda: _last_local_save(control), None)
    budget_of = newest.record.max_restarts if newest.record is not None else None
    status.incident = tried(lambda: _last_incident(control, numbers, status.state, files, budget_of), None)
    status.budget = tried(lambda: _budget(control, newest, controls, budget_of), None)
    status.suspects = tried(lambda: _suspects(control, newest.number), [])
    return status


# --- the state ---------------------------------------------------------------------------------------------


def _state(
    newest: _Newest, held: Claim | None, lease: LeaseState | None, controls: Controls
) -> tuple[str, str, int | None]:
    """Pure: the state, in words, and the code that the run ended with if it did."""
    live = held is not None and lease is not None and lease.alive and not held.owner.startswith(COMMANDS)
    another = held is not None and newest.record is not None and held.owner != newest.record.launch
    if live and (newest.number == 0 or another):
        return "starting", "a launch has claimed the run and not begun an attempt yet", None
    if newest.number == 0:
        return "new", "no attempt has begun yet", None
    end, decided = newest.end, newest.decided
    if end is None and live:
        resumed = newest.head is not None
        return ("running", "", None) if resumed else ("starting", "it has not resumed yet", None)
    if end is None or end.outcome == "lost":
        why = f": {lease.detail}" if lease is not None and not lease.alive else ""
        return "lost", f"its launcher ended without a word{why}; launch it again to resume", None
    if end.outcome == "finished":
        return "finished", "", 0
    if end.outcome == "failed":
        return _failed(end, decided, controls, live=live)
    if live and end.exit_code == 0:
        return "restarting", "the nodes of the group change", None
    return "stopped", _stopped_by(end.exit_code), end.exit_code


def _failed(
    end: EndRecord, decided: Decided | None, controls: Controls, *, live: bool
) -> tuple[str, str, int | None]:
    if decided is not None and decided.action == "stop":
        return (
            "failed",
            f"{printable(decided.reason) or _meaning(decided.exit_code)} (exit code {decided.exit_code})",
            decided.exit_code,
        )
    if not live:
        return (
            "failed",
            f"{_meaning(end.exit_code)} (exit code {end.exit_code}); launch it again to resume",
            end.exit_code,
        )
    if controls.paused is not None:
        return "paused", f"recovery was paused by {printable(controls.paused.describe())}", None
    return "restarting", "", None


def _meaning(code: int) -> str:
    return MEANINGS[ExitCode(code)][0].rstrip(".") if code in set(ExitCode) else "it failed"


def _stopped_by(code: int) -> str:
    try:
        return f"by {signal.Signals(code - 128).name}; launch it again to resume"
    except ValueError:
        return "launch it again to resume"


# --- what the journal adds ---------------------------------------------------------------------------------


def _take_stop(status: Status, control: ControlDirectory, files: list[str]) -> None:
    """What asked the newest attempt to stop, and how far that is."""
    status.stop = stop = stop_of(control.journal, files, status.attempt)
    if stop is not None and status.state in ("running", "starting"):
        status.state, status.detail = "stopping", progress(stop, status.at)
    if status.state == "stopped" and status.exit_code is not None and status.exit_code < FROM_SIGNALS:
        status.detail = outcome(status.exit_code, stop)


def _take_steps(status: Status, control: ControlDirectory, files: list[str], head: HeadRecord | None) -> None:
    """The step, the rate and the loss of the newest attempt; the step it came from while it has none."""
    found = batches(control.journal, files, status.attempt)
    if not found:
        status.step = head.step if head is not None else None
        return
    status.step, status.step_at, status.loss = found[-1].last, found[-1].at, last_loss(found)
    if status.state == "running":
        status.steps_per_second = rate(found)


# --- what the records add ----------------------------------------------------------------------------------


def _last_save(control: ControlDirectory, numbers: list[int]) -> LastSave | None:
    """The newest commit of the newest attempt that made any, by its names alone: there may be very many."""
    for number in reversed(numbers):
        folder = control.attempt(number) / "commits"
        done = sorted(name for name in list_names(folder) if name.endswith(".done"))
        for name in reversed(done):
            step, dash, id = name.removesuffix(".done").partition("-")
            if dash and step.isdecimal():
                checkpoint = str(CheckpointName(int(step), id))
                return LastSave(checkpoint=checkpoint, step=int(step), at=(folder / name).stat().st_mtime)
    return None


def _last_local_save(control: ControlDirectory) -> LastSave | None:
    """The newest checkpoint that the nodes themselves hold, as recorded."""
    for name in local_manifest.names(control):
        with contextlib.suppress(FileNotFoundError):  # a live run forgets what no node holds any more
            at = (local_manifest.folder(control, name) / MANIFEST).stat().st_mtime
            return LastSave(checkpoint=str(name), step=name.step, at=at)
    return None


def _known(control: ControlDirectory, number: int) -> dict[str, Any]:
    return read_record(control.attempt(number) / INCIDENT, dict) or {}


def _root(failures: list[FailureRecord], known: Mapping[str, Any]) -> FailureRecord | None:
    """The worker's end that an incident came from; as far as records of an older release tell."""
    if known.get("root_rank") is not None:
        return next((failure for failure in failures if failure.rank == known["root_rank"]), None)
    failed = [failure for failure in failures if not failure.left]
    return root_cause(failed) if failed else None


def _last_incident(
    control: ControlDirectory, numbers: list[int], state: str, files: list[str], max_restarts: int | None
) -> LastIncident | None:
    for number in reversed(numbers):
        end = end_of(control, number)
        if end is None and (number != numbers[-1] or state == "lost"):
            text = one_line(
                attempt=number,
                cause="",
                root=None,
                decision=None,
                step=last_step(control.journal, files, number),
                detail="lost with its launcher",
            )
            return LastIncident(attempt=number, text=text)
        if end is not None and end.outcome == "failed":
            told = read_record(control.attempt(number) / ACCOUNT, Account)
            if told is not None:
                head = read_record(control.attempt(number + 1) / "head.json", HeadRecord)
                text = account_line(told, head.step if head is not None else None)
                return LastIncident(attempt=number, text=text, at=end.at, account=told)
            known = _known(control, number)
            text = one_line(
                attempt=number,
                cause=end.cause,
                root=_root(failures_of(control, number), known),
                decision=shown_decision(control, number),
                step=last_step(control.journal, files, number),
                max_restarts=max_restarts,
                detail=str(known.get("message", "")),
            )
            return LastIncident(attempt=number, text=text, at=end.at)
    return None


def _budget(
    control: ControlDirectory, newest: _Newest, controls: Controls, max_restarts: int | None
) -> BudgetState | None:
    if newest.number == 0:
        return None
    history = past_attempts(control, before=newest.number + 1)
    forgiven = controls.budget_reset.attempt if controls.budget_reset is not None else 0
    return BudgetState(
        used=restarts_without_progress(history, forgiven),
        max_restarts=max_restarts,
        left=restarts_left(history, max_restarts, forgiven) if max_restarts is not None else None,
    )


def _suspects(control: ControlDirectory, newest: int) -> list[Suspect]:
    _, trial = still_open(control, past_attempts(control, before=newest + 1))
    book = StandingBook(control)
    if trial is None:
        return []
    ids = {name: name.rpartition("-")[2] for name in trial.suspects}
    return [
        Suspect(checkpoint=name, until=trial.until, evidence=book.evidence_of(id)) for name, id in ids.items()
    ]
