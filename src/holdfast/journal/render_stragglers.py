"""One line of plain text for each event of the straggler detector; see render.py."""

from __future__ import annotations

from holdfast.journal.straggler_events import StragglerFound, StragglersReported
from holdfast.journal.text import Rendered, duration, plural, printable

StragglerEvent = StragglersReported | StragglerFound


def render_stragglers(body: StragglerEvent) -> Rendered:
    match body:
        case StragglersReported():
            return _report(body)
        case StragglerFound():
            then = {"stop": "; the run saves and stops", "exclude": "; the run goes on without it"}
            text = f"straggler: {printable(body.why)}{then.get(body.then, '')}"
            return Rendered(text, "fault" if body.then in then else "warning")


def _report(body: StragglersReported) -> Rendered:
    what = "node" if body.by_node else "rank"
    text = f"{plural(len(body.ranks), what)} compared over {plural(body.steps, 'step')}"
    text += f" of {duration(body.step_seconds)}"
    scored = [
        (score, rank) for score, rank in zip(body.relative, body.ranks, strict=False) if score is not None
    ]
    if scored:
        score, rank = min(scored)
        text += f"; the slowest is rank {rank} with a score of {score:.2f}"
    if body.group_slower:
        text += "; most ranks are slower than they were, so nobody can be named"
    return Rendered(text, "warning" if body.group_slower else "progress")
