"""A run's status in words, for a terminal and for a log. Pure."""

from __future__ import annotations

import time
from typing import NamedTuple

from holdfast.control.operator import Request
from holdfast.journal.events import decode_loss
from holdfast.journal.render import duration, number, plural, printable
from holdfast.observe.status import BudgetState, Status

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
"""Nodes that are named; there may be very many."""


class Row(NamedTuple):
    label: str
    text: str
    style: str = ""


def rows(status: Status) -> list[Row]:
    """What a person wants to know, one thing a line."""
    found = [Row("run", f"{status.run} in {printable(status.run_dir)}"), _state(status)]
    if status.nodes or status.world_size is not None:
        found.append(Row("ranks", _ranks(status)))
    if status.lease is not None:
        lease = status.lease
        found.append(Row("launcher", f"{lease.holder}: {lease.detail}"))
    if status.step is not None:
        found.append(Row("step", _step(status)))
    for what, save in (("last save", status.save), ("local save", status.local_save)):
        if save is not None:
            text = f"step {save.step}, {_ago(status, save.at)} ({printable(save.checkpoint)})"
            found.append(Row(what, text))
    if status.incident is not None:
        when = f" ({_ago(status, status.incident.at)})" if status.incident.at is not None else ""
        found.append(Row("incident", f"{status.incident.text}{when}", "red" if not status.ok else ""))
    if status.budget is not None:
        found.append(Row("restarts", _budget(status.budget)))
    found += _controls(status)
    found += [Row("problem", printable(problem), "yellow") for problem in status.problems]
    return found


def short(status: Status) -> str:
    """The same in one line, for a log."""
    parts = [status.state, f"attempt {status.attempt}"]
    if status.step is not None:
        parts.append(f"step {_step(status)}")
    if status.save is not None:
        parts.append(f"saved step {status.save.step}")
    clock = time.strftime("%H:%M:%S", time.localtime(status.at))
    return f"{clock}  {'  '.join(parts)}"


def _state(status: Status) -> Row:
    text = status.state
    if status.attempt:
        text += f", attempt {status.attempt}"
    if status.started is not None and status.state in ("running", "starting", "stopping"):
        text += f" for {duration(max(0.0, status.at - status.started))}"
    if status.detail:
        text += f": {printable(status.detail)}"
    return Row("state", text, STYLES.get(status.state, ""))


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


def _budget(budget: BudgetState) -> str:
    used = f"{budget.used} since the last progress"
    return used if budget.max_restarts is None else f"{used}, {budget.left} of {budget.max_restarts} left"


def _controls(status: Status) -> list[Row]:
    found = []
    if status.paused is not None:
        found.append(Row("paused", f"recovery, {_asked(status, status.paused)}", "yellow"))
    if status.pin is not None:
        how = "the next resume" if status.pin.once else "every resume"
        forced = ", forced" if status.pin.force else ""
        what = f"{printable(status.pin.checkpoint)} for {how}{forced}"
        found.append(Row("pinned", f"{what}, {_asked(status, status.pin.request)}", "yellow"))
    if status.budget_reset is not None:
        upto = f"restarts up to attempt {status.budget_reset.attempt} no longer count"
        found.append(Row("reset", f"{upto}, {_asked(status, status.budget_reset)}"))
    for one in status.exclusions:
        by = f" ({printable(one.by)}, {_ago(status, one.at)})" if one.at else ""
        found.append(Row("excluded", f"{printable(one.describe())}: {printable(one.reason)}{by}", "yellow"))
    for suspect in status.suspects:
        why = f": {printable(suspect.evidence[-1])}" if suspect.evidence else ""
        found.append(Row("suspect", f"{printable(suspect.checkpoint)}{why}", "yellow"))
    return found


def _asked(status: Status, request: Request) -> str:
    """`alice, 2 h 10 min ago: why`."""
    when = f", {_ago(status, request.at)}" if request.at else ""
    why = f": {printable(request.reason)}" if request.reason else ""
    return f"{printable(request.by) or 'an operator'}{when}{why}"


def _ago(status: Status, at: float | None) -> str:
    return f"{duration(max(0.0, status.at - at))} ago" if at is not None else "at an unknown time"
