"""How a run is doing, from its records and the ends of its journals, in values and in words. Reads only.

Guarantee: it always answers for a directory that holds a run. What is missing, torn, damaged or from another
release is left out and named under `problems`. The cost does not grow with the length of the journal: only
the last bytes of the newest attempts' files are read.

The decisive facts (who is alive, which attempt, how it ended, what was decided) come from the durable
records; the journal adds what changes every second.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from holdfast.account import Incident, Phase, incident_line, incidents_of, phases_text, remarks_of
from holdfast.base import duration, number, plural, printable
from holdfast.checkpoint.choose import still_open
from holdfast.checkpoint.copies import tier
from holdfast.checkpoint.format import MANIFEST, CheckpointName
from holdfast.errors import MEANINGS, ControlError, ExitCode
from holdfast.journal import (
    REPORTER,
    JournalLine,
    batches,
    heads,
    last_loss,
    last_step,
    nodes_started,
    rate,
    read_journal,
    tails,
)
from holdfast.journal.events import (
    Account,
    StopAgreed,
    StopAsked,
    StopForced,
    StopHastened,
    StopSaved,
    decode_loss,
)
from holdfast.launch import ShownDecision, line_of_record, shown_decision
from holdfast.policy import LIVE, restarts_left, restarts_without_progress, root_cause
from holdfast.record import (
    ACCOUNT,
    COMMANDS,
    INCIDENT,
    AttemptRecord,
    Claim,
    ControlDirectory,
    Controls,
    EndRecord,
    ExclusionRecord,
    FailureRecord,
    HeadRecord,
    LeaseState,
    OperatorRequest,
    Pin,
    StandingBook,
    attempt_numbers,
    end_of,
    failures_of,
    in_force,
    lease_state,
    list_names,
    newest_claim,
    past_attempts,
    read_record,
)

if TYPE_CHECKING:
    from rich.table import Table


# An attempt's stop on request, from the ends of its journals: who asked, how far it has come, how it ended.


class StopState(msgspec.Struct, frozen=True, kw_only=True):
    asked_by: str
    source: str
    at: float
    ends_at: float | None = None
    """The hard deadline, in seconds since 1970; None if there is none."""
    step: int | None = None
    """The step after which all ranks stop, once that is agreed on."""
    checkpoint: str | None = None
    """The checkpoint with the state of that step: None until it is safe; "" if there was nothing to save."""
    already: bool = False
    forced: str = ""
    """Why the attempt ended without saving; empty if it did not."""


def stop_of(journal: Path, files: list[str], attempt: int) -> StopState | None:
    """How far the stop of an attempt has come, by its first request; None if nobody asked for one."""
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


def stop_progress(stop: StopState, now: float) -> str:
    """For a stop that is under way: `asked by SIGTERM to rank 1 on n, 42 s left`."""
    parts = [f"asked by {stop.asked_by}"]
    if stop.ends_at is not None:
        parts.append(f"{duration(max(0.0, stop.ends_at - now))} left")
    if stop.checkpoint is not None:
        parts.append("saved, the ranks end")
    elif stop.step is not None:
        parts.append(f"all ranks stop after step {stop.step}")
    return ", ".join(parts)


def stop_outcome(code: int, stop: StopState | None) -> str:
    """The same for a stop that is over."""
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


# Tables for terminals, made from what other modules work out.


def incident_table(incidents: list[Incident]) -> Table:
    """What happened, on what evidence, what was decided, and what it cost."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False, show_lines=False)
    table.add_column("#", justify="right")
    table.add_column("What happened", ratio=3, overflow="fold")
    table.add_column("Evidence", ratio=4, overflow="fold")
    table.add_column("Decision", ratio=3, overflow="fold")
    table.add_column("Time lost", justify="right", no_wrap=True)
    for incident in incidents:
        table.add_row(
            str(incident.number),
            Text(f"{incident.what}\nattempt {incident.attempt}, last known step {incident.failed_at_step}"),
            Text("\n".join(f"• {item}" for item in incident.evidence)),
            Text(incident.decision),
            Text(cost(incident)),
        )
    return table


def cost(incident: Incident) -> str:
    """What an incident cost, in two or three short lines."""
    lost = duration(incident.seconds_lost)
    if incident.overtaken_by is not None:
        first = f"{lost}, then incident {incident.overtaken_by}"
    else:
        first = f"{lost} so far" if incident.open else lost
    down = f"{duration(incident.seconds_down)} until it trained again"
    return f"{first}\n{down}\n{plural(incident.steps_lost, 'step')} done again"


FROM_SIGNALS = 128
"""Exit codes above this come from releases that ended with a signal's number."""

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
    """The answers to who, what, why, what was done and what to do, if the launcher gave them."""
    seconds_down: float | None = None
    """From the fault to the first step after it; None while there is none, or if that is not known."""
    phases: dict[str, float] = {}
    """What that time was spent on; adds up to it."""


class BudgetState(msgspec.Struct, frozen=True, kw_only=True):
    used: int
    """Restarts since the last progress, or since an operator reset the budget."""
    max_restarts: int | None = None
    """None if it is not recorded: there was no launcher, or one of an older release."""
    left: int | None = None


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that the replay from a lower rung will condemn or acquit."""

    checkpoint: str
    until: int
    """The step at which the attempt failed."""
    evidence: list[str]


class Status(msgspec.Struct, kw_only=True):
    """All that `holdfast status --json` prints; fields are only ever added."""

    at: float
    run: str
    run_dir: str
    state: str = "new"
    """new, starting, running, stopping, restarting, paused, finished, failed, stopped or lost."""
    detail: str = ""
    """Details of the state, in words."""
    exit_code: int | None = None
    """The code that the run ended with, if it is known to have ended."""
    attempt: int = 0
    started: float | None = None
    world_size: int | None = None
    nodes: dict[str, list[int]] = {}
    """Node → its ranks, if a launcher started them."""
    lease: LeaseState | None = None
    step: int | None = None
    step_at: float | None = None
    steps_per_second: float | None = None
    loss: float | str | None = None
    save: LastSave | None = None
    local_save: LastSave | None = None
    """The last save in the local tier, which the nodes themselves hold."""
    incident: LastIncident | None = None
    budget: BudgetState | None = None
    paused: OperatorRequest | None = None
    budget_reset: OperatorRequest | None = None
    pin: Pin | None = None
    exclusions: list[ExclusionRecord] = []
    suspects: list[Suspect] = []
    stop: StopState | None = None
    """The newest attempt's stop, if somebody asked for one."""
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
    decided: ShownDecision | None = None


def status_of(control: ControlDirectory) -> Status:
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
    if status.state == "new":
        status.detail = tried(lambda: _why_not_begun(control), "") or status.detail
    files: list[str] = tried(lambda: list_names(control.journal), [])
    _take_stop(status, control, files)
    _take_steps(status, control, files, newest.head)
    status.nodes = nodes_started(control.journal, files, newest.number)
    status.save = tried(lambda: _last_save(control, numbers), None)
    status.local_save = tried(lambda: _last_local_save(control), None)
    budget_of = newest.record.max_restarts if newest.record is not None else None
    status.incident = tried(lambda: _last_incident(control, numbers, status.state, files, budget_of), None)
    if status.incident is not None:
        known = status.incident
        status.incident = tried(lambda: _with_way_back(known, control, files, newest.number), known)
    status.budget = tried(lambda: _budget(control, newest, controls, budget_of), None)
    status.suspects = tried(lambda: _suspects(control, newest.number), [])
    return status


# --- the state ---------------------------------------------------------------------------------------------


def _why_not_begun(control: ControlDirectory) -> str:
    """For a run without an attempt: the node that was last kept out, and why."""
    out = [one for one in remarks_of(read_journal(control.journal)) if one.kind == "unfit"]
    return f"no attempt has begun: {out[-1].what}" if out else ""


def _state(
    newest: _Newest, held: Claim | None, lease: LeaseState | None, controls: Controls
) -> tuple[str, str, int | None]:
    """Pure: the state, details in words, and the code that the run ended with if it did."""
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
    end: EndRecord, decided: ShownDecision | None, controls: Controls, *, live: bool
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
    """What asked the newest attempt to stop, and how far the stop has come."""
    status.stop = stop = stop_of(control.journal, files, status.attempt)
    if stop is not None and status.state in ("running", "starting"):
        status.state, status.detail = "stopping", stop_progress(stop, status.at)
    if status.state == "stopped" and status.exit_code is not None and status.exit_code < FROM_SIGNALS:
        status.detail = stop_outcome(status.exit_code, stop)


def _take_steps(status: Status, control: ControlDirectory, files: list[str], head: HeadRecord | None) -> None:
    """The step, rate and loss of the newest attempt; as long as it has none, the step it came from."""
    newest = batches(control.journal, files, status.attempt)
    if not newest:
        status.step = head.step if head is not None else None
        return
    status.step, status.step_at, status.loss = newest[-1].last, newest[-1].at, last_loss(newest)
    if status.state == "running":
        status.steps_per_second = rate(newest)


# --- what the records add ----------------------------------------------------------------------------------


def _last_save(control: ControlDirectory, numbers: list[int]) -> LastSave | None:
    """The newest commit of the newest attempt that made any, by the names alone: there may be very many."""
    for nth in reversed(numbers):
        folder = control.attempt(nth) / "commits"
        done = sorted(name for name in list_names(folder) if name.endswith(".done"))
        for name in reversed(done):
            step, dash, id = name.removesuffix(".done").partition("-")
            if dash and step.isdecimal():
                checkpoint = str(CheckpointName(int(step), id))
                return LastSave(checkpoint=checkpoint, step=int(step), at=(folder / name).stat().st_mtime)
    return None


def _last_local_save(control: ControlDirectory) -> LastSave | None:
    """The newest checkpoint that the nodes themselves hold, as recorded."""
    for name in tier.names(control):
        with contextlib.suppress(FileNotFoundError):  # a live run forgets what no node still holds
            at = (tier.folder(control, name) / MANIFEST).stat().st_mtime
            return LastSave(checkpoint=str(name), step=name.step, at=at)
    return None


def _known(control: ControlDirectory, number: int) -> dict[str, Any]:
    return read_record(control.attempt(number) / INCIDENT, dict) or {}


def _root(failures: list[FailureRecord], known: Mapping[str, Any]) -> FailureRecord | None:
    """The worker's end that caused an incident, as far as records of an older release tell."""
    if known.get("root_rank") is not None:
        return next((failure for failure in failures if failure.rank == known["root_rank"]), None)
    failed = [failure for failure in failures if not failure.left]
    return root_cause(failed) if failed else None


def _last_incident(
    control: ControlDirectory, numbers: list[int], state: str, files: list[str], max_restarts: int | None
) -> LastIncident | None:
    for nth in reversed(numbers):
        end = end_of(control, nth)
        if end is None and (nth != numbers[-1] or state == "lost"):
            text = line_of_record(
                attempt=nth,
                cause="",
                root=None,
                decision=None,
                step=last_step(control.journal, files, nth),
                detail="lost with its launcher",
            )
            return LastIncident(attempt=nth, text=text)
        if end is not None and end.outcome == "failed":
            account = read_record(control.attempt(nth) / ACCOUNT, Account)
            if account is not None:
                head = read_record(control.attempt(nth + 1) / "head.json", HeadRecord)
                text = incident_line(account, head.step if head is not None else None)
                return LastIncident(attempt=nth, text=text, at=end.at, account=account)
            known = _known(control, nth)
            text = line_of_record(
                attempt=nth,
                cause=end.cause,
                root=_root(failures_of(control, nth), known),
                decision=shown_decision(control, nth),
                step=last_step(control.journal, files, nth),
                max_restarts=max_restarts,
                detail=str(known.get("message", "")),
            )
            return LastIncident(attempt=nth, text=text, at=end.at)
    return None


MOST_FOLLOWING = 3
"""Attempts after an incident among which the first step after it is looked for."""


def _with_way_back(
    incident: LastIncident, control: ControlDirectory, files: list[str], newest: int
) -> LastIncident:
    """On what the time was spent until the run trained again: from the end of the attempt that failed, and
    from the beginnings of those after it, as rank 0 and the leading agent wrote them."""
    failed, lines = incident.attempt, list[JournalLine]()
    for nth in range(failed, min(newest, failed + MOST_FOLLOWING) + 1):
        record = read_record(control.attempt(nth) / "attempt.json", AttemptRecord)
        leader = f"agent-{record.nodes[0]}" if record is not None and record.nodes else "agent"
        for who in (leader, REPORTER):
            lines += (tails if nth == failed else heads)(control.journal, files, nth, who)
    found = [one for one in incidents_of(sorted(lines, key=lambda line: line.at)) if one.attempt == failed]
    if not found or not found[0].traced:
        return incident
    phases = {phase.name: phase.seconds for phase in found[0].phases}
    return msgspec.structs.replace(incident, seconds_down=found[0].seconds_down, phases=phases)


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
    trial = still_open(control, past_attempts(control, before=newest + 1)).trial
    book = StandingBook(control)
    if trial is None:
        return []
    ids = {name: name.rpartition("-")[2] for name in trial.suspects}
    return [
        Suspect(checkpoint=name, until=trial.until, evidence=book.evidence_of(id)) for name, id in ids.items()
    ]


# A run's status in words, for a terminal and for a log. Pure.


STYLES = {
    "running": "green",
    "finished": "green",
    "failed": "bold red",
    "lost": "bold red",
    "stopped": "yellow",
    "paused": "yellow",
    "stopping": "yellow",
    "restarting": "yellow",
}
MAX_NODES = 8
"""Most nodes that are named; there may be very many."""


class StatusRow(NamedTuple):
    label: str
    text: str
    style: str = ""


def status_rows(status: Status) -> list[StatusRow]:
    """What a person wants to know, one thing per line."""
    rows = [StatusRow("run", f"{status.run} in {printable(status.run_dir)}"), _state_words(status)]
    if status.nodes or status.world_size is not None:
        rows.append(StatusRow("ranks", _ranks(status)))
    if status.lease is not None:
        lease = status.lease
        rows.append(StatusRow("launcher", f"{lease.holder}: {lease.detail}"))
    if status.step is not None:
        rows.append(StatusRow("step", _step(status)))
    for what, save in (("last save", status.save), ("local save", status.local_save)):
        if save is not None:
            text = f"step {save.step}, {_ago(status, save.at)} ({printable(save.checkpoint)})"
            rows.append(StatusRow(what, text))
    if status.incident is not None:
        when = f" ({_ago(status, status.incident.at)})" if status.incident.at is not None else ""
        text = f"{status.incident.text}{_back(status.incident)}{when}"
        rows.append(StatusRow("incident", text, "red" if not status.ok else ""))
    if status.budget is not None:
        rows.append(StatusRow("restarts", _budget_words(status.budget)))
    rows += _controls(status)
    rows += [StatusRow("problem", printable(problem), "yellow") for problem in status.problems]
    return rows


def _back(incident: LastIncident) -> str:
    """What it took until the run trained again, with the phases that took the longest."""
    if incident.seconds_down is None:
        return ""
    phases = [Phase(name, seconds) for name, seconds in incident.phases.items()]
    return f"; trained again after {duration(incident.seconds_down)}: {phases_text(phases)}"


def status_line(status: Status) -> str:
    """The same in one line, for a log."""
    parts = [status.state, f"attempt {status.attempt}"]
    if status.step is not None:
        parts.append(f"step {_step(status)}")
    if status.save is not None:
        parts.append(f"saved step {status.save.step}")
    clock = time.strftime("%H:%M:%S", time.localtime(status.at))
    return f"{clock}  {'  '.join(parts)}"


def _state_words(status: Status) -> StatusRow:
    text = status.state
    if status.attempt:
        text += f", attempt {status.attempt}"
    if status.started is not None and status.state in ("running", "starting", "stopping"):
        text += f" for {duration(max(0.0, status.at - status.started))}"
    if status.detail:
        text += f": {printable(status.detail)}"
    return StatusRow("state", text, STYLES.get(status.state, ""))


def _ranks(status: Status) -> str:
    world = plural(status.world_size, "rank") if status.world_size is not None else ""
    if not status.nodes:
        return world
    named = [f"{node}: {_spans(ranks)}" for node, ranks in list(status.nodes.items())[:MAX_NODES]]
    more = f", and {len(status.nodes) - MAX_NODES} more" if len(status.nodes) > MAX_NODES else ""
    return f"{world} on {plural(len(status.nodes), 'node')} ({'; '.join(named)}{more})".strip()


def _spans(ranks: list[int]) -> str:
    """0, 1, 2, 5 as "0–2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("–".join(map(str, span)) for span in spans)


def _step(status: Status) -> str:
    text = f"{status.step}"
    if status.steps_per_second is not None:
        text += f", {status.steps_per_second:.3g} steps/s"
    if status.loss is not None:
        text += f", loss {number(decode_loss(status.loss))}"
    return f"{text} ({_ago(status, status.step_at)})" if status.step_at is not None else text


def _budget_words(budget: BudgetState) -> str:
    used = f"{budget.used} since the last progress"
    return used if budget.max_restarts is None else f"{used}, {budget.left} of {budget.max_restarts} left"


def _controls(status: Status) -> list[StatusRow]:
    rows = []
    if status.paused is not None:
        rows.append(StatusRow("paused", f"recovery, {_asked(status, status.paused)}", "yellow"))
    if status.pin is not None:
        how = "the next resume" if status.pin.once else "every resume"
        forced = ", forced" if status.pin.force else ""
        what = f"{printable(status.pin.checkpoint)} for {how}{forced}"
        rows.append(StatusRow("pinned", f"{what}, {_asked(status, status.pin.request)}", "yellow"))
    if status.budget_reset is not None:
        upto = f"restarts up to attempt {status.budget_reset.attempt} no longer count"
        rows.append(StatusRow("reset", f"{upto}, {_asked(status, status.budget_reset)}"))
    for exclusion in status.exclusions:
        by = f" ({printable(exclusion.by)}, {_ago(status, exclusion.at)})" if exclusion.at else ""
        rows.append(
            StatusRow(
                "excluded", f"{printable(exclusion.describe())}: {printable(exclusion.reason)}{by}", "yellow"
            )
        )
    for suspect in status.suspects:
        why = f": {printable(suspect.evidence[-1])}" if suspect.evidence else ""
        rows.append(StatusRow("suspect", f"{printable(suspect.checkpoint)}{why}", "yellow"))
    return rows


def _asked(status: Status, request: OperatorRequest) -> str:
    """`alice, 2 h 10 min ago: why`."""
    when = f", {_ago(status, request.at)}" if request.at else ""
    why = f": {printable(request.reason)}" if request.reason else ""
    return f"{printable(request.by) or 'an operator'}{when}{why}"


def _ago(status: Status, at: float | None) -> str:
    return f"{duration(max(0.0, status.at - at))} ago" if at is not None else "at an unknown time"
