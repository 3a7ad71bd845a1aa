"""The report's first screen: how the run stands or ended, and its worst incident, each by the five answers.

Everything that it says comes from the accounts and the remarks; here it only becomes markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.account.history import Attempt
from holdfast.account.incidents import Incident, investigations
from holdfast.account.ledger import Ledger
from holdfast.account.remarks import Remark, answers_of, counted
from holdfast.account.story import finished
from holdfast.account.wording import cost_of, five
from holdfast.journal.events import Line
from holdfast.journal.render import duration, plural
from holdfast.observe.markup import clock, text

WHYS = 3
"""Reasons that stand open; more are folded away."""
MOST_ALSO = 4
"""Other things that are named one by one."""
_ASKED = {"who": "Who", "what": "What", "why": "Why", "done": "Done", "cost": "Cost", "next": "Next"}


def first_screen(
    lines: Sequence[Line],
    life: Sequence[Attempt],
    found: list[Incident],
    others: list[Remark],
    ledger: Ledger,
) -> str:
    """Markup, from the sentence under the title down to the figures."""
    ended = next((one for one in found[-1:] if one.account is not None and one.account.ends), None)
    state = state_of(life, bool(lines))
    stopped = next((one for one in reversed(others) if one.kind == "stop"), None)
    if state != "Stopped" or (stopped is not None and life and stopped.attempt != life[-1].number):
        stopped = None
    cards: list[tuple[str, str, list[tuple[str, str]]]] = []
    if ended is not None:
        cards.append(("How it ended", _badge(ended), _of(ended)))
    elif stopped is not None:
        cards.append(("How it ended", "", answers_of(stopped)))
    cases = investigations([one for one in found if one is not ended])
    case = max(cases, key=lambda case: sum(one.seconds_lost for one in case), default=[])
    worst = case[-1] if case else None
    rest = [one for one in others if one is not stopped or ended is not None]
    if worst is not None:
        heading = "What happened"
        if len(case) > 1 and len(case) == len(found):
            heading = f"What happened, in {len(case)} incidents"
        elif len(found) > 1:
            heading = f"The costliest of {len(found)} incidents"
        cards.append((heading, "".join(map(_badge, case)), _whole(case)))
    elif rest and not cards:
        most = max(rest, key=lambda one: (one.seconds, one.count))
        rest = [one for one in rest if one is not most]
        cards.append(("What happened", "", answers_of(most)))
    return "".join(
        [
            _lead(lines, life, found, others, ended, stopped, state),
            "</header>\n",
            f'<div class="cards">{"".join(_card(*card) for card in cards)}</div>\n' if cards else "",
            _also(rest),
            _figures(life, found, others, ledger),
        ]
    )


def state_of(life: Sequence[Attempt], any_line: bool) -> str:
    """One word for how the run stands."""
    newest = life[-1] if life else None
    if newest is None:
        return "Not started" if any_line else "Nothing"
    if newest.finished_at is not None:
        return "Finished"
    if newest.ended is not None:
        return {"failed": "Failed", "stopped": "Stopped", "lost": "Lost"}.get(newest.ended.outcome, "Ended")
    if newest.account is not None and newest.account.ends:
        return "Failed"  # told by a node that nobody decided for
    return "Running"


def _lead(
    lines: Sequence[Line],
    life: Sequence[Attempt],
    found: list[Incident],
    others: list[Remark],
    ended: Incident | None,
    stopped: Remark | None,
    state: str,
) -> str:
    """How it stands in one sentence, and what is to be done if something is."""
    if not lines:
        return '<p class="lead">The journal is empty.</p>'
    began, last = min(line.at for line in lines), max(line.at for line in lines)
    steps = max((attempt.reached or 0 for attempt in life), default=0)
    style, said, left = "", "", ""
    if state == "Finished":
        style, said = " good", finished(found, others, steps).partition(": ")[2]
    elif state == "Running":
        caught = found[-1] if found and found[-1].open else None
        where = f"step {steps}" if steps else "no step is done yet"
        said = f"{where}, last sign of life {clock(last)}"
        said += f"; not back yet from incident {caught.number}" if caught is not None else ""
        left = "nothing to do; if the last sign is long ago, ask `holdfast status`"
    elif ended is not None and ended.account is not None:
        done = ended.account.done.removeprefix("stopped: ")
        cost = cost_of(ended).removeprefix("the run ended").removeprefix("; ")
        style, said, left = " bad", f"{done}; {cost}" if cost else done, ended.account.next
    elif stopped is not None:
        said, left = f"{stopped.done.removeprefix('stopped ')} ({stopped.who} {stopped.did})", stopped.next
    elif state in ("Failed", "Lost", "Ended"):
        style, said = " bad", f"it came to step {steps}"
        left = "run the same command to go on from the newest sound checkpoint"
    elif state == "Stopped":
        said, left = f"it came to step {steps}", "run the same command to go on"
    colon = f"<b class='state{style}'>{state.lower()}</b>" + (f": {text(said)}" if said else "")
    now = f'<p class="verdict"><b>Next</b>: {text(left)}</p>' if left else ""
    span = f'<p class="lead small">{clock(began)}, {duration(last - began)}</p>'
    return f'<p class="verdict">{colon}</p>{now}{span}'


def _badge(one: Incident) -> str:
    return f' <a class="badge" href="#incident-{one.number}">{one.number}</a>'


def _of(one: Incident) -> list[tuple[str, str]]:
    return [(question, answer) for question, answer in five(one)]


def _whole(case: Sequence[Incident]) -> list[tuple[str, str]]:
    """Of incidents of which the last one names the cause: its answers, and the cost of all."""
    told = _of(case[-1])
    if len(case) == 1:
        return told
    lost, redone = sum(one.seconds_lost for one in case), sum(one.steps_lost for one in case)
    whole = f"in all {len(case)} incidents: {duration(lost)}, {plural(redone, 'step')} done again"
    at = next(index for index, (question, _) in enumerate(told) if question == "cost")
    return [*told[: at + 1], ("", whole), *told[at + 1 :]]


def _card(heading: str, badge: str, told: Sequence[tuple[str, str]]) -> str:
    return f'<section class="answers card"><h2>{heading}{badge}</h2>{answer_list(told)}</section>'


def answer_list(told: Sequence[tuple[str, str]]) -> str:
    """Each question once, as a person would ask it; the later ones of many answers are folded away."""
    grouped: list[tuple[str, list[str]]] = []
    for question, answer in told:
        if question or not grouped:
            grouped.append((_ASKED.get(question, question), []))
        grouped[-1][1].append(answer)
    rows = []
    for question, answers in grouped:
        open_, folded = answers[:WHYS], answers[WHYS:]
        if len(folded) == 1:  # a line to open it would take as much room
            open_, folded = answers, []
        said = "".join(f"<p>{text(one)}</p>" for one in open_)
        if folded:
            more = "".join(f"<p>{text(one)}</p>" for one in folded)
            said += f"<details><summary>{len(folded)} more</summary>{more}</details>"
        style = ' class="now"' if question == "Next" else ""
        rows.append(f"<dt{style}>{question}</dt><dd{style}>{said}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


def _also(rest: Sequence[Remark]) -> str:
    """What else it met, a line each."""
    if not rest:
        return ""
    costly = sorted(rest, key=lambda one: (one.seconds, one.count), reverse=True)
    rows = "".join(
        f"<li>{text(one.what, 400)}{_times(one)}"
        f"{f' <b>{text(one.cost)}</b>.' if one.cost else ''} <span class='soft'>{text(one.next)}</span></li>"
        for one in costly[:MOST_ALSO]
    )
    left = len(rest) - MOST_ALSO
    more = f'<li><a href="#incidents">{left} more</a></li>' if left > 0 else ""
    return f'<section class="also card"><h2>Also</h2><ul>{rows}{more}</ul></section>'


def _times(one: Remark) -> str:
    return f" ({one.count} times)." if one.count > 1 and one.kind not in ("dropped", "stop", "copy") else "."


def _figures(life: Sequence[Attempt], found: list[Incident], others: list[Remark], ledger: Ledger) -> str:
    reached = max((attempt.reached or 0 for attempt in life), default=0)
    kinds = ([(len(found), "failure")] if found else []) + counted(others)
    lost = sum(one.seconds_lost for one in found) + sum(one.seconds for one in others)
    named = ", ".join(plural(count, kind) for count, kind in kinds) if others else ""
    figures = [
        ("Steps", str(reached), ""),
        ("Attempts", str(len(life)), ""),
        ("Incidents", str(sum(count for count, _ in kinds)), named),
        ("Time lost to them", duration(lost), ""),
        ("Productive time", f"{ledger.goodput:.0%}", ""),
    ]
    return '<dl class="figures">' + "".join(
        f"<div><dt>{name}</dt><dd>{value}{f'<small>{small}</small>' if small else ''}</dd></div>"
        for name, value, small in figures
    ) + "</dl>"  # fmt: skip
