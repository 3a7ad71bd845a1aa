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
from holdfast.account.remarks import remarks
from holdfast.checkpoint.identity import parse_name
from holdfast.files import check_output, replace_atomic
from holdfast.journal.events import Decision, Line, RunCreated, StandingChanged
from holdfast.journal.render import condense, duration, plural, printable, render, size
from holdfast.observe.chart import Chart, Fault, draw
from holdfast.observe.first_screen import first_screen
from holdfast.observe.incident_part import incident_part
from holdfast.observe.losses import losses
from holdfast.observe.markup import clock, table, text, when
from holdfast.observe.report_results import BAD, judged, standing, standings
from holdfast.observe.report_style import STYLE
from holdfast.observe.straggler_part import straggler_part

MAX_TIMELINE = 5000
MANY_TIMELINE = 1000
"""Events that are shown of a run with very many incidents, whose other parts are long already."""
MAX_DECISIONS = 200
MAX_CHECKPOINTS = 500

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
    others = remarks(lines, found)
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
            first_screen(lines, life, found, others, ledger),
            _chart(lines, life, found, reference or []),
            _ledger(ledger),
            _facts(lines, life, facts),
            incident_part(found, others, began),
            straggler_part(lines),
            judged(lines, began),
            _checkpoints(life, standings(lines), began),
            _decisions(lines, began),
            _timeline(lines, began, MAX_TIMELINE if len(found) <= MAX_DECISIONS else MANY_TIMELINE),
            f"<footer>Made by Holdfast {__version__} from the run's journal. Times are from its first line"
            f"{', ' + clock(began) if lines else ''}.</footer>",
            "</main>\n</body>\n</html>\n",
        ]
    )


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
    return f'<h2>About this run</h2>\n<dl class="facts card">{listed}</dl>'


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
    left = len(rows) - MAX_CHECKPOINTS
    caption = "In the order of their commits." + (f" {left} earlier ones are left out." if left > 0 else "")
    return "<h2>Checkpoints</h2>\n" + table(caption, [(n, "") for n in names], rows[-MAX_CHECKPOINTS:])


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
    left = len(items) - MAX_DECISIONS
    told = f"<p class='soft'>{left} earlier ones are left out.</p>\n" if left > 0 else ""
    newest = "".join(items[-MAX_DECISIONS:])
    return f'<h2>Decisions and their evidence</h2>\n{told}<ul class="decisions card">{newest}</ul>'


def _timeline(lines: list[Line], began: float, most: int) -> str:
    shown = condense(lines)
    rows = []
    for line in shown[-most:]:
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
