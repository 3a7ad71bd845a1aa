"""The report of a run: one HTML file that needs nothing else, made from the journal alone.

Guarantee: whatever stands in the journal is shown as text. Every value is escaped, and the page forbids
itself scripts and every outside resource, so a hostile exception message cannot do anything to its reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast._version import __version__
from holdfast.account.history import Attempt, attempts
from holdfast.account.incidents import Incident, incidents
from holdfast.account.ledger import Ledger, accounting
from holdfast.account.remarks import Remark, remarks
from holdfast.account.wording import five
from holdfast.checkpoint.identity import parse_name
from holdfast.files import check_output, replace_atomic
from holdfast.journal.events import Decision, Line, RunCreated, StandingChanged
from holdfast.journal.render import condense, duration, plural, printable, render, size
from holdfast.observe.chart import Chart, Fault, draw
from holdfast.observe.losses import losses
from holdfast.observe.markup import clock, table, text, when
from holdfast.observe.report_results import BAD, judged, standing, standings
from holdfast.observe.report_style import STYLE
from holdfast.observe.straggler_part import straggler_part
from holdfast.observe.tables import cost

MAX_TIMELINE = 5000

PARTS = {
    "productive": "steps done for the first time",
    "recomputed": "steps done again after a fault",
    "saving": "training stood still for a save",
    "starting": "from an attempt's start to its first step",
    "down": "no attempt was running",
    "other": "no completed step covers it",
}

MARK = "Holdfast report</title>"
"""By which an earlier report is known."""


def write_report(
    lines: list[Line],
    destination: Path,
    *,
    title: str,
    reference: Sequence[tuple[int, float]] | None = None,
    facts: Sequence[tuple[str, str]] = (),
    overwrite: bool = False,
) -> None:
    """Write the report of a run. `reference` is a curve of (step, loss) to compare with; `facts` are extra
    rows for the summary. The file is replaced in one step; raises OSError if it cannot be written, UsageError
    if something is there that is no earlier report; `overwrite`: any regular file may be replaced."""
    check_output(Path(destination), mark=MARK, overwrite=overwrite)
    page = report_html(lines, title=title, reference=reference, facts=facts)
    replace_atomic(Path(destination).absolute(), page.encode("utf-8", "backslashreplace"))


def report_html(
    lines: list[Line],
    *,
    title: str,
    reference: Sequence[tuple[int, float]] | None = None,
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text."""
    life = attempts(lines)
    found = incidents(lines)
    ledger = accounting(lines)
    began = min((line.at for line in lines), default=0.0)
    head = text(title)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">",
            f"<title>{head} – {MARK}\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            f'<header><p class="eyebrow">Holdfast run report</p>\n<h1>{head}</h1>',
            f'<p class="lead">{_state(life, lines)}</p></header>',
            _answers(found),
            _remarks(remarks(lines, found)),
            _figures(life, found, ledger),
            _facts(lines, life, facts),
            _chart(lines, life, found, reference or []),
            _ledger(ledger),
            straggler_part(lines),
            _incidents(found, began),
            judged(lines, began),
            _checkpoints(life, standings(lines), began),
            _decisions(lines, began),
            _timeline(lines, began),
            f"<footer>Made by Holdfast {__version__} from the run's journal. Times are from its first line"
            f"{', ' + clock(began) if lines else ''}.</footer>",
            "</main>\n</body>\n</html>\n",
        ]
    )


def _state(life: list[Attempt], lines: list[Line]) -> str:
    if not lines:
        return "The journal is empty."
    began, last = min(line.at for line in lines), max(line.at for line in lines)
    newest = life[-1] if life else None
    if newest is None:
        word, style = "Not started", ""
    elif newest.finished_at is not None:
        word, style = "Finished", " good"
    elif newest.ended is not None:
        word = {"failed": "Failed", "stopped": "Stopped", "lost": "Lost"}.get(newest.ended.outcome, "Ended")
        style = "" if word == "Stopped" else " bad"
    elif newest.account is not None and newest.account.ends:  # told by a node that nobody decided for
        word, style = "Failed", " bad"
    else:
        word, style = "Running, or lost without a word", ""
    return f'<span class="state{style}">{word}</span> · {clock(began)} · {duration(last - began)}'


def _answers(found: list[Incident]) -> str:
    """The five answers for how it ended or, if it goes on, for the incident that cost most."""
    if not found:
        return ""
    ended = [one for one in found[-1:] if one.account is not None and one.account.ends]
    worst = max(found, key=lambda one: one.seconds_lost)
    told = [("How it ended", one) for one in ended]
    if worst not in ended:
        many = f"The costliest of {len(found)} incidents" if len(found) > 1 else "What happened"
        told.append((many, worst))
    return "".join(
        f'<section class="answers card"><h2>{heading} '
        f'<a class="badge" href="#incident-{one.number}">{one.number}</a></h2><dl>'
        + "".join(f"<dt>{question}</dt><dd>{text(answer)}</dd>" for question, answer in _asked(one))
        + "</dl></section>"
        for heading, one in told
    )


def _remarks(others: list[Remark]) -> str:
    """What the run met without failing."""
    if not others:
        return ""
    rows = "".join(
        f"<dt>{'' if one.count == 1 else f'{one.count} ×'}</dt>"
        f"<dd>{text(one.what)} <span class='soft'>{text(one.next)}</span></dd>"
        for one in others
    )
    return f'<section class="answers card"><h2>Also</h2><dl>{rows}</dl></section>'


def _asked(incident: Incident) -> list[tuple[str, str]]:
    """Each question once, as a person would ask it."""
    asked = {"who": "Who", "what": "What", "why": "Why", "done": "Done", "cost": "Cost", "next": "Next"}
    return [(asked.get(question, ""), answer) for question, answer in five(incident)]


def _figures(life: list[Attempt], found: list[Incident], ledger: Ledger) -> str:
    reached = max((attempt.reached or 0 for attempt in life), default=0)
    figures = [
        ("Steps", str(reached)),
        ("Attempts", str(len(life))),
        ("Incidents", str(len(found))),
        ("Time lost to them", duration(sum(incident.seconds_lost for incident in found))),
        ("Productive time", f"{ledger.goodput:.0%}"),
    ]
    return '<dl class="figures">' + "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures
    ) + "</dl>"  # fmt: skip


def _facts(lines: list[Line], life: list[Attempt], facts: Sequence[tuple[str, str]]) -> str:
    rows = list(facts)
    for line in lines:
        if isinstance(line.body, RunCreated):
            rows = [("Run id", line.body.run), ("Checkpoints in", line.body.checkpoint_root), *rows]
            break
    started = [attempt.started for attempt in life if attempt.started is not None]
    if started:
        rows.append(("Ranks", str(started[-1].world_size)))
        if started[-1].torch:
            rows.append(("torch", started[-1].torch))
    if not rows:
        return ""
    listed = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows)
    return f'<dl class="facts card">{listed}</dl>'


def _chart(
    lines: list[Line], life: list[Attempt], found: list[Incident], reference: Sequence[tuple[int, float]]
) -> str:
    series = losses(lines)
    if not series:
        return "<h2>Loss</h2>\n<p class='soft'>No loss was recorded.</p>"
    rejected = [
        (name.step, str(name), "; ".join(why))
        for given, why in _refused(life).items()
        if (name := parse_name(given)) is not None
    ]
    chart = Chart(
        series=series,
        faults=[Fault(one.number, one.failed_at_step, one.what) for one in found],
        commits=[
            (attempt.number, save.step, save.checkpoint)
            for attempt in life
            for save in {save.checkpoint: save for _, save in attempt.saves}.values()  # one of two tiers
        ],
        rejected=[(step, name, printable(why)) for step, name, why in rejected],
        reference=list(reference),
    )
    said = ["Each attempt is a line that begins at its mark, and a lane below.", "● committed checkpoint."]
    if any(one.kept is not None for one in series):
        said.append("Dashed: steps that were lost and done again.")
    if rejected:
        said.append("✕ checkpoint rejected later.")
    if found:
        said.append("Numbers mark incidents.")
    if reference:
        said.append("The wide pale band is the reference.")
    return (
        '<h2>Loss</h2>\n<figure class="card">'
        + draw(chart, width=1040, height=440, name="wide")
        + draw(chart, width=340, height=360, name="narrow")
        + f'<figcaption class="soft small">{" ".join(said)}</figcaption></figure>'
    )


def _ledger(ledger: Ledger) -> str:
    whole = ledger.whole
    if not whole:
        return ""
    parts = [(name, seconds) for name, seconds in ledger.parts() if seconds > 0]
    bar = "".join(f'<span class="{name}" style="flex:{seconds:.6f}"></span>' for name, seconds in parts)
    rows = "".join(
        f'<li><i class="{name}"></i><span><b>{name}</b> <span class="soft">{PARTS[name]}</span></span>'
        f"<span>{duration(seconds)} · {seconds / whole:.1%}</span></li>"
        for name, seconds in parts
    )
    return (
        f'<h2>Where the time went</h2>\n<div class="card"><div class="bar" aria-hidden="true">{bar}</div>'
        f'<ul class="parts">{rows}</ul></div>'
    )


def _incidents(found: list[Incident], began: float) -> str:
    if not found:
        return "<h2>Incidents</h2>\n<p class='soft'>None.</p>"
    rows = []
    for one in found:
        evidence = "".join(f"<li>{text(item)}</li>" for item in one.evidence)
        lost = "<br>".join(text(part) for part in cost(one).split("\n"))
        rows.append(
            f'<tr id="incident-{one.number}"><th scope="row"><span class="badge">{one.number}</span></th>'
            f'<td data-label="What happened"><p><b>{text(one.what)}</b></p>'
            f'<p class="soft">attempt {one.attempt}, '
            f"last known step {one.failed_at_step}, {when(one.at, began)}</p></td>"
            f'<td data-label="Evidence"><ul>{evidence}</ul></td>'
            f'<td data-label="Decision">{text(one.decision)}</td>'
            f'<td data-label="Time lost" class="num">{lost}</td></tr>'
        )
    heads = [("#", ""), ("What happened", ""), ("Evidence", ""), ("Decision", ""), ("Time lost", "num")]
    caption = "Each fault, from its detection until the run was back where it had been."
    return "<h2>Incidents</h2>\n" + table(caption, heads, rows)


def _refused(life: list[Attempt]) -> dict[str, list[str]]:
    """Checkpoints that were rejected, each with the reasons given first: later ones only repeat or follow."""
    refused: dict[str, list[str]] = {}
    for attempt in life:
        for name, why in attempt.rejected.items():
            refused.setdefault(name, why)
    return refused


def _checkpoints(life: list[Attempt], known: dict[str, StandingChanged], began: float) -> str:
    refused = _refused(life)
    used = {attempt.resumed.checkpoint: attempt.number for attempt in life if attempt.resumed is not None}
    rows = []
    for attempt in life:
        for at, save in attempt.saves:
            if save.checkpoint in known and known[save.checkpoint].standing in BAD:
                note = standing(known[save.checkpoint])
            elif save.checkpoint in refused:
                why = "; ".join(refused[save.checkpoint])
                note = f'<span class="tag bad">✕ rejected</span> {text(why)}'
            elif save.checkpoint in used:
                note = f'<span class="tag good">✓ resumed from</span> by attempt {used[save.checkpoint]}'
            elif save.checkpoint in known:
                note = standing(known[save.checkpoint])
            else:
                note = "committed" if save.tier == "global" else "committed to the local tier"
            rows.append(
                f'<tr><th scope="row"><code>{text(save.checkpoint)}</code></th>'
                f'<td data-label="Attempt">{attempt.number}</td>'
                f'<td data-label="Committed">{when(at, began)}</td>'
                f'<td data-label="Size">{size(save.bytes)} in {plural(save.files, "file")}</td>'
                f'<td data-label="Took">{duration(save.seconds)} '
                f'<span class="soft">({duration(save.blocked_seconds)} blocking)</span></td>'
                f'<td data-label="What is known">{note}</td></tr>'
            )
    if not rows:
        return "<h2>Checkpoints</h2>\n<p class='soft'>None was committed.</p>"
    names = ("Checkpoint", "Attempt", "Committed", "Size", "Took", "What is known")
    return "<h2>Checkpoints</h2>\n" + table("In the order of their commits.", [(n, "") for n in names], rows)


def _decisions(lines: list[Line], began: float) -> str:
    items = []
    for line in lines:
        if not isinstance(line.body, Decision):
            continue
        shown = render(line.body)
        details = "".join(f"<li>{text(detail)}</li>" for detail in shown.details)
        items.append(
            f'<li><p><b>{text(line.body.about)}: {text(line.body.chosen)}</b></p><p class="soft small">'
            f"attempt {line.attempt}, {text(line.who)}, {when(line.at, began)}</p>"
            f"{f'<ul>{details}</ul>' if details else ''}</li>"
        )
    if not items:
        return "<h2>Decisions</h2>\n<p class='soft'>None was recorded.</p>"
    return f'<h2>Decisions and their evidence</h2>\n<ul class="decisions card">{"".join(items)}</ul>'


def _timeline(lines: list[Line], began: float) -> str:
    shown = condense(lines)
    rows = []
    for line in shown[-MAX_TIMELINE:]:
        event = render(line.body)
        details = "".join(f'<br><span class="soft">{text(detail)}</span>' for detail in event.details)
        rows.append(
            f"<tr><td>{when(line.at, began)}</td><td>{line.attempt}</td><td>{text(line.who)}</td>"
            f'<td><span class="{event.style}-text">{text(event.text)}</span>{details}</td></tr>'
        )
    left_out = len(shown) - len(rows)
    caption = (
        "Every event." if not left_out else f"The last {len(rows)} events; {left_out} earlier ones left out."
    )
    heads = [("Time", ""), ("Attempt", ""), ("Who", ""), ("Event", "")]
    return (
        f'<h2>Timeline</h2>\n<details class="card"><summary>{plural(len(shown), "event")}</summary>'
        + table(caption, heads, rows, "timeline").replace('class="card scroll"', 'class="scroll"', 1)
        + "</details>"
    )
