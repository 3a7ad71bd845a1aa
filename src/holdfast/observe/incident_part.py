"""The report's part on incidents: every failure, the newest and the costliest in full, and what was none."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.account.incidents import Incident
from holdfast.account.remarks import KINDS, Remark, answers_of
from holdfast.journal.render import duration, plural
from holdfast.observe.first_screen import answer_list
from holdfast.observe.markup import table, text, when
from holdfast.observe.tables import cost

IN_FULL = 50
"""Incidents with all their evidence; of more, the others are a line each, folded away."""
MOST_OTHERS = 100


def incident_part(found: list[Incident], others: Sequence[Remark], began: float) -> str:
    """Markup."""
    heading = '<h2 id="incidents">Incidents</h2>\n'
    if not found and not others:
        return f"{heading}<p class='soft'>None.</p>"
    return heading + _failures(found, began) + _others(others, began)


def _failures(found: list[Incident], began: float) -> str:
    if not found:
        return ""
    full = {one.number for one in found[-IN_FULL:]}
    full |= {max(found, key=lambda one: one.seconds_lost).number}  # the first screen leads there
    heads = [("#", ""), ("What happened", ""), ("Evidence", ""), ("Decision", ""), ("Time lost", "num")]
    caption = "Each fault, from its detection until the run was back where it had been."
    made = table(caption, heads, [_row(one, began) for one in found if one.number in full])
    brief = [one for one in found if one.number not in full]
    if not brief:
        return made
    rows = [
        f'<tr id="incident-{one.number}"><th scope="row"><span class="badge">{one.number}</span></th>'
        f"<td>{text(one.what, 160)}</td><td class='num'>{duration(one.seconds_lost)}</td></tr>"
        for one in brief
    ]
    short = table("A line each.", [("#", ""), ("What happened", ""), ("Time lost", "num")], rows, "brief")
    return (
        f'{made}\n<details class="card brief-ones">'
        f"<summary>{plural(len(brief), 'earlier incident')}</summary>"
        + short.replace('class="card scroll"', 'class="scroll"', 1)
        + "</details>"
    )


def _row(one: Incident, began: float) -> str:
    evidence = "".join(f"<li>{text(item)}</li>" for item in one.evidence)
    lost = "<br>".join(text(part) for part in cost(one).split("\n"))
    return (
        f'<tr id="incident-{one.number}"><th scope="row"><span class="badge">{one.number}</span></th>'
        f'<td data-label="What happened"><p><b>{text(one.what)}</b></p>'
        f'<p class="soft">attempt {one.attempt}, '
        f"last known step {one.failed_at_step}, {when(one.at, began)}</p></td>"
        f'<td data-label="Evidence"><ul>{evidence}</ul></td>'
        f'<td data-label="Decision">{text(one.decision)}</td>'
        f'<td data-label="Time lost" class="num">{lost}</td></tr>'
    )


def _others(others: Sequence[Remark], began: float) -> str:
    """Each with the same questions as a failure."""
    if not others:
        return ""
    items = "".join(
        f'<section class="answers"><h3>{KINDS.get(one.kind, one.kind).capitalize()} <span class="soft small">'
        f"attempt {one.attempt}, {when(one.at, began)}"
        f"{f', {one.count} times' if one.count > 1 else ''}</span></h3>"
        f"{answer_list(answers_of(one))}</section>"
        for one in others[-MOST_OTHERS:]
    )
    left = len(others) - MOST_OTHERS
    more = f"<p class='soft'>{left} earlier ones are left out.</p>" if left > 0 else ""
    return (
        f'\n<div class="card others"><p class="soft">What the run met without failing.</p>{more}{items}</div>'
    )
