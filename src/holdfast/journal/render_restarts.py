"""One line of plain text for each event of in-process restart; see render.py."""

from __future__ import annotations

from holdfast.journal.restart_events import (
    FunctionRestarted,
    RestartFaulted,
    RestartHandedOver,
    RestartPlanned,
)
from holdfast.journal.text import Rendered, duration, plural, printable

RestartEvent = RestartFaulted | RestartPlanned | RestartHandedOver | FunctionRestarted

_BEFELL = {
    "exception": "raised",
    "lost": "ended",
    "soft_timeout": "stood still",
    "hard_timeout": "was ended by its keeper",
    "silent": "was lost with its node",
    "late": "did not come to the barrier",
    "unfit": "is not fit to go on",
    "asked": "asked for a restart",
}


def restart_fault(event: RestartFaulted) -> str:
    """What befell whom: "rank 1 on a raised: ValueError: bad sample"."""
    reserve = f"reserve {event.member}" if event.member >= 0 else "a process"
    who = reserve if event.rank is None else f"rank {event.rank}"
    where = f" on {event.node}" if event.node else ""
    text = f"{who}{where} {_BEFELL.get(event.kind, event.kind)}"
    return printable(f"{text}: {event.detail}" if event.detail else text)


def render_restarts(body: RestartEvent) -> Rendered:
    match body:
        case RestartFaulted():
            details = [f"after step {body.step}"] if body.step else []
            return Rendered(restart_fault(body), "fault", details)
        case RestartPlanned():
            return _planned(body)
        case RestartHandedOver():
            text = f"not restarted in place after iteration {body.iteration}: {printable(body.reason)}"
            return Rendered(text, "fault", [f"the processes end with code {body.exit_code}"])
        case FunctionRestarted():
            text = f"iteration {body.iteration} begins as rank {body.rank}"
            return Rendered(f"{text}, {duration(body.seconds)} after the last one ended", "good")


def _planned(body: RestartPlanned) -> Rendered:
    text = f"restart in place: iteration {body.iteration} with {plural(body.world_size, 'rank')}"
    text += f" and {plural(len(body.reserves), 'reserve')}" if body.reserves else ""
    text += f", planned {duration(body.seconds)} after the fault" if body.seconds else ""
    details = [f"because {printable(body.reason)}"] if body.reason else []
    if body.promoted:
        details.append(f"promoted: {', '.join(_placed(body, member) for member in body.promoted)}")
    return Rendered(text, "decision", details)


def _placed(body: RestartPlanned, member: int) -> str:
    return f"process {member} as rank {body.order.index(member) if member in body.order else member}"
