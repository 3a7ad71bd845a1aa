"""The report's part on stragglers: a heat map of the newest comparison, and who was named."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from holdfast.journal.events import Line
from holdfast.journal.straggler_events import StragglerFound, StragglersReported
from holdfast.journal.text import plural, printable
from holdfast.observe.heat_map import draw

MOST_NAMED = 20


def straggler_part(lines: Sequence[Line]) -> str:
    """Markup; empty for a run in which nobody looked for stragglers."""
    reports = [line.body for line in lines if isinstance(line.body, StragglersReported)]
    if not reports:
        return ""
    newest = next((one for one in reversed(reports) if one.sections and one.ranks), None)
    found = [(line, line.body) for line in lines if isinstance(line.body, StragglerFound)]
    shown = "".join(
        f'<li><p>{escape(printable(body.why))}</p><p class="soft small">attempt {line.attempt}, '
        f"step {body.step}</p></li>"
        for line, body in found[-MOST_NAMED:]
    )
    named = (
        f'<div class="card named"><ul class="decisions">{shown}</ul></div>'
        if found
        else "<p class='soft'>Nobody was named.</p>"
    )
    if len(found) > MOST_NAMED:
        named += f"<p class='soft small'>{len(found) - MOST_NAMED} earlier ones are left out.</p>"
    if newest is None:
        return f"<h2>Stragglers</h2>\n{named}"
    told = (
        f"The last of {plural(len(reports), 'report')}: milliseconds of an average step until a rank arrives "
        "where the others wait for it. Dark: more than the median of its column, as a part of a step. "
        "Waiting for others is never dark."
    )
    if newest.group_slower:
        told += " Most ranks were slower than before, at once, so nobody could be named."
    return (
        '<h2>Stragglers</h2>\n<figure class="card">'
        + draw(newest, width=1040, name="wide")
        + draw(newest, width=340, name="narrow")
        + f'<figcaption class="soft small">{told}</figcaption></figure>\n{named}'
    )
