"""The report of a run: one HTML file that needs nothing else, made from the journal alone.

Guarantee: whatever stands in the journal is shown as text. Every value is escaped, and the page forbids
itself scripts and every outside resource, so a hostile exception message cannot do anything to its reader.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from holdfast import __version__
from holdfast.account import (
    KINDS,
    PHASES,
    Incident,
    JournalledAttempt,
    Ledger,
    Phase,
    Remark,
    answers_of,
    attempts_of,
    cost_of,
    counts_by_kind,
    finished_line,
    five_answers,
    incidents_of,
    investigations,
    ledger_of,
    phases_text,
    remarks_of,
)
from holdfast.base import check_output, duration, plural, printable, replace_atomic, size
from holdfast.checkpoint.format import parse_name
from holdfast.journal import JournalLine, condense
from holdfast.journal.events import (
    DataSkipped,
    DecisionMade,
    DeterminismMeasured,
    ProbationEnded,
    RunCreated,
    StandingChanged,
    StepRejected,
    StragglerFound,
    StragglersReported,
    ThroughputLow,
    Verdict,
)
from holdfast.observe.chart import Chart, FaultMark, draw, draw_heat_map, losses_by_attempt
from holdfast.observe.status import cost

# --- the style sheet ----------------------------------------------------------------------------------------

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #f7f7f5; --card: #ffffff; --ink: #1b1e23; --soft: #59616c; --rule: #e2e4e8; --link: #1f56a8;
  --good: #1a7a55; --fault: #b3261e; --warn: #8a5a00; --ref: #c9ced6;
  --s0: #1f5fbf; --s1: #b3540a; --s2: #15795a; --s3: #8438a6; --s4: #a8263a; --s5: #4d5866;
  --productive: #2f9e74; --recomputed: #e0a23a; --saving: #4f86d9; --starting: #9aa7b8; --down: #d1584f;
  --other: #cfd4db;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --bg: #14161a; --card: #1c1f25; --ink: #e7e9ec; --soft: #a2a9b4; --rule: #30353d; --link: #8ab8ff;
    --good: #63cfa3; --fault: #ff8f86; --warn: #e9b765; --ref: #4a525e;
    --s0: #7fb2ff; --s1: #f2a65f; --s2: #5fd0a5; --s3: #d29df2; --s4: #ff95a1; --s5: #b5bdc8;
    --productive: #3fae83; --recomputed: #c78d2e; --saving: #5b8fdd; --starting: #74808f; --down: #c9564e;
    --other: #48505b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink); line-height: 1.5; font-size: 16px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1180px; margin: 0 auto; padding: 24px 24px 72px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 4px 0 8px; letter-spacing: -0.01em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.125rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 6px; }
p { margin: 0 0 12px; }
a { color: var(--link); }
code { font: 0.875em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.eyebrow { color: var(--soft); font-size: 0.8125rem; letter-spacing: 0.06em; text-transform: uppercase;
  margin: 0; }
.lead { color: var(--soft); margin: 0; }
.state { font-weight: 600; color: var(--ink); display: inline-block; }
.state::first-letter { text-transform: uppercase; }
.state.good { color: var(--good); } .state.bad { color: var(--fault); }
.soft { color: var(--soft); }
.small { font-size: 0.875rem; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 20px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px;
  margin: 12px 0; }
.figures div { background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 8px 14px; }
.figures dt { color: var(--soft); font-size: 0.8125rem; }
.figures dd { margin: 2px 0 0; font-size: 1.25rem; font-weight: 600; line-height: 1.25; }
.figures small { display: block; font-size: 0.75rem; font-weight: 400; color: var(--soft); }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0;
  font-size: 0.875rem; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.verdict { font-size: 1.0625rem; margin: 0 0 2px; overflow-wrap: anywhere; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 14px 0 0; }
.cards .card { flex: 1 1 420px; min-width: 0; padding: 14px 18px; font-size: 0.9375rem; }
.answers h2 { margin: 0 0 8px; font-size: 1rem; }
.answers dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 3px 16px; margin: 0;
  line-height: 1.4; }
.answers dt { color: var(--soft); } .answers dd { margin: 0; overflow-wrap: anywhere; }
.answers dd p { margin: 0; }
.answers dd p + p, .answers dd details { color: var(--soft); font-size: 0.875rem; }
.answers .now { color: var(--ink); font-weight: 600; }
.answers details[open] summary { margin: 0; } .answers summary { font-weight: 400; }
.also { margin: 12px 0 0; padding: 12px 18px; font-size: 0.9375rem; line-height: 1.4; }
.also h2 { margin: 0 0 4px; font-size: 1rem; } .also ul { margin: 0; padding-left: 18px; }
.also li { overflow-wrap: anywhere; }
.others { margin-top: 12px; } .others .answers + .answers { margin-top: 16px; padding-top: 16px;
  border-top: 1px solid var(--rule); }
.brief-ones { margin-top: 12px; }
.bar { display: flex; height: 22px; border-radius: 6px; overflow: hidden; gap: 1px; background: var(--rule); }
.bar span { min-width: 2px; }
.parts { list-style: none; margin: 14px 0 0; padding: 0; display: grid; gap: 6px 24px; font-size: 0.875rem;
  grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); }
.parts li { display: grid; grid-template-columns: 14px 1fr max-content; gap: 0 10px; align-items: baseline; }
.parts i { width: 12px; height: 12px; border-radius: 3px; align-self: center; }
.parts b { font-weight: 600; }
.productive { background: var(--productive); } .saving { background: var(--saving); }
.starting { background: var(--starting); } .other { background: var(--other); }
.recomputed { background: repeating-linear-gradient(135deg, var(--recomputed) 0 5px, var(--card) 5px 7px); }
.down { background: repeating-linear-gradient(45deg, var(--down) 0 5px, var(--card) 5px 7px); }
figure { margin: 0; } figcaption { margin-top: 14px; }
.chart { display: block; width: 100%; height: auto; }
.chart.narrow { display: none; }
.chart text { font-size: 12px; fill: var(--soft); font-family: inherit; }
.chart .grid { stroke: var(--rule); } .chart .base, .chart .tick { stroke: var(--soft); }
.chart path { fill: none; }
.chart .line { stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.chart .lost { stroke-width: 1.5; stroke-dasharray: 3 4; }
.chart .lane .line { stroke-width: 4; } .chart .lane .lost { stroke-width: 1.5; }
.chart .dot { fill: var(--c); }
.chart .reference { stroke: var(--ref); stroke-width: 7; stroke-linejoin: round; stroke-linecap: round; }
.chart .mark { fill: var(--card); stroke: var(--c); stroke-width: 2; }
.chart .label, .chart .broken { fill: var(--c); font-weight: 600; paint-order: stroke; stroke: var(--card);
  stroke-width: 4px; stroke-linejoin: round; }
.chart .fault .many { fill: var(--fault); fill-opacity: 0.12; stroke: none; }
.chart .fault path { stroke: var(--fault); stroke-dasharray: 2 3; }
.chart .fault .pill { fill: var(--card); stroke: var(--fault); stroke-width: 1.5; }
.chart .fault text { fill: var(--fault); font-weight: 700; }
.chart .commit { fill: var(--ink); stroke: var(--card); stroke-width: 1.5; }
.named { margin-top: 12px; }
.chart .h0 { fill: var(--rule); fill-opacity: 0.45; }
.chart .h1 { fill: var(--down); fill-opacity: 0.15; } .chart .h2 { fill: var(--down); fill-opacity: 0.3; }
.chart .h3 { fill: var(--down); fill-opacity: 0.5; } .chart .h4 { fill: var(--down); fill-opacity: 0.75; }
.chart .h5 { fill: var(--down); }
.chart .cell { fill: var(--ink); } .chart .c3, .chart .c4, .chart .c5 { font-weight: 700; }
.chart .mid { text-anchor: middle; } .chart .end { text-anchor: end; }
.chart .cross { stroke: var(--fault); stroke-width: 2.5; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); }
.s3 { --c: var(--s3); } .s4 { --c: var(--s4); } .s5 { --c: var(--s5); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; }
caption { text-align: left; color: var(--soft); padding: 0 0 10px; }
th, td { text-align: left; vertical-align: top; padding: 10px 14px 10px 0; border-top: 1px solid var(--rule);
  overflow-wrap: anywhere; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; padding-top: 0; white-space: nowrap; }
th[scope=row] { font-weight: 600; white-space: nowrap; }
td:last-child, th:last-child { padding-right: 0; }
td ul { margin: 0; padding-left: 16px; } td p { margin: 0; }
.num { text-align: right; white-space: nowrap; }
.tag { font-weight: 600; } .tag.bad { color: var(--fault); } .tag.good { color: var(--good); }
.badge { display: inline-block; min-width: 24px; padding: 0 6px; border: 1.5px solid var(--fault);
  color: var(--fault);  border-radius: 12px; text-align: center; font-weight: 700; }
tr:target { outline: 2px solid var(--link); outline-offset: 4px; }
.decisions { list-style: none; margin: 0; padding: 0; }
.decisions li + li { border-top: 1px solid var(--rule); margin-top: 14px; padding-top: 14px; }
.decisions p { margin: 0; overflow-wrap: anywhere; }
.decisions ul { margin: 6px 0 0; padding-left: 18px; font-size: 0.875rem; }
.decisions ul li + li { border: 0; margin: 0; padding: 0; }
details summary { cursor: pointer; font-weight: 600; }
details[open] summary { margin-bottom: 16px; }
.timeline td { padding-top: 5px; padding-bottom: 5px; border-top-color: transparent; }
.timeline td:not(:last-child) { white-space: nowrap; color: var(--soft); }
.fault-text { color: var(--fault); font-weight: 600; } .warning-text { color: var(--warn); }
.decision-text { font-weight: 600; } .good-text { color: var(--good); } .progress-text { color: var(--soft); }
footer { margin-top: 48px; color: var(--soft); font-size: 0.8125rem; }
@media (max-width: 640px) {
  main { padding: 24px 14px 48px; }
  .card { padding: 14px; }
  .chart.narrow { display: block; } .chart.wide { display: none; }
  .figures { grid-template-columns: 1fr 1fr; }
  .parts { grid-template-columns: 1fr; }
  .facts { grid-template-columns: 1fr; gap: 0; } .facts dd { margin-bottom: 8px; }
  .stack thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  .stack tr, .stack td, .stack th[scope=row] { display: block; padding: 2px 0; border: 0; text-align: left;
    white-space: normal; }
  .stack tbody tr { border-top: 1px solid var(--rule); padding: 12px 0; }
  .stack tbody tr:first-child { border-top: 0; padding-top: 0; }
  .stack td::before { content: attr(data-label); display: block; color: var(--soft); font-size: 0.8125rem; }
  .timeline td { white-space: normal; }
}
@media print {
  :root { color-scheme: light; }
  body { background: #fff; font-size: 12px; }
  main { max-width: none; padding: 0; }
  .chart.narrow { display: none; } .chart.wide { display: block; }
  figure, .answers, .figures div, tr, .decisions > li { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; }
}
"""


# How values become markup in the report. Everything that comes from outside goes through `text`.


def text(value: str, limit: int = 2000) -> str:
    """Any value as harmless markup."""
    return escape(printable(value, limit))


def clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def when(at: float, began: float) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return f'<time datetime="{stamp}" title="{clock(at)}">+{duration(at - began)}</time>'


def table(caption: str, heads: Sequence[tuple[str, str]], rows: Iterable[str], classes: str = "stack") -> str:
    columns = "".join(f'<th scope="col"{style and f" class={style!r}"}>{name}</th>' for name, style in heads)
    return (
        f'<div class="card scroll"><table class="{classes}"><caption>{caption}</caption>'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table></div>"
    )


# The report's part on incidents: every failure, the newest and the costliest in full, and what was no
# failure.


IN_FULL = 50
"""Most incidents shown with all their evidence; any others are one line each, folded away."""
MOST_OTHERS = 100


def incident_part(incidents: list[Incident], remarks: Sequence[Remark], began: float) -> str:
    """Markup."""
    heading = '<h2 id="incidents">Incidents</h2>\n'
    if not incidents and not remarks:
        return f"{heading}<p class='soft'>None.</p>"
    return heading + _failures(incidents, began) + _remarks(remarks, began)


def _failures(incidents: list[Incident], began: float) -> str:
    if not incidents:
        return ""
    full = {incident.number for incident in incidents[-IN_FULL:]}
    costliest = max(incidents, key=lambda incident: incident.seconds_lost)
    full.add(costliest.number)  # the first screen links to it
    heads = [("#", ""), ("What happened", ""), ("Evidence", ""), ("Decision", ""), ("Time lost", "num")]
    caption = "Each fault, from its detection until the run was back where it had been."
    made = table(caption, heads, [_row(incident, began) for incident in incidents if incident.number in full])
    brief = [incident for incident in incidents if incident.number not in full]
    if not brief:
        return made
    rows = [
        f"{_row_head(incident)}<td>{text(incident.what, 160)}</td>"
        f"<td class='num'>{duration(incident.seconds_lost)}</td></tr>"
        for incident in brief
    ]
    short = table("A line each.", [("#", ""), ("What happened", ""), ("Time lost", "num")], rows, "brief")
    return (
        f'{made}\n<details class="card brief-ones">'
        f"<summary>{plural(len(brief), 'earlier incident')}</summary>"
        + short.replace('class="card scroll"', 'class="scroll"', 1)
        + "</details>"
    )


def _row_head(incident: Incident) -> str:
    number = incident.number
    return f'<tr id="incident-{number}"><th scope="row"><span class="badge">{number}</span></th>'


def _row(incident: Incident, began: float) -> str:
    evidence = "".join(f"<li>{text(item)}</li>" for item in incident.evidence)
    lost = "<br>".join(text(part) for part in cost(incident).split("\n")) + _phase_list(incident.phases)
    return (
        f'{_row_head(incident)}<td data-label="What happened"><p><b>{text(incident.what)}</b></p>'
        f'<p class="soft">attempt {incident.attempt}, '
        f"last known step {incident.failed_at_step}, {when(incident.at, began)}</p></td>"
        f'<td data-label="Evidence"><ul>{evidence}</ul></td>'
        f'<td data-label="Decision">{text(incident.decision)}</td>'
        f'<td data-label="Time lost" class="num">{lost}</td></tr>'
    )


def _phase_list(phases: Sequence[Phase]) -> str:
    """Every phase of the way back, folded away, with what it is and its parts."""
    if not phases:
        return ""
    rows = "".join(
        f'<li title="{text(PHASES[phase.name])}">'
        f"{text(phase.name)} {duration(phase.seconds)}{_parts(phase)}</li>"
        for phase in phases
    )
    return f"<details><summary>by phase</summary><ul>{rows}</ul></details>"


def _parts(phase: Phase) -> str:
    named = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phase.parts)
    return f' <span class="soft">({text(named)})</span>' if named else ""


def _remarks(remarks: Sequence[Remark], began: float) -> str:
    """Each with the same questions as a failure."""
    if not remarks:
        return ""
    items = "".join(
        f'<section class="answers"><h3>{KINDS.get(remark.kind, remark.kind).capitalize()} '
        f'<span class="soft small">'
        f"attempt {remark.attempt}, {when(remark.at, began)}"
        f"{f', {remark.count} times' if remark.count > 1 else ''}</span></h3>"
        f"{answer_list(answers_of(remark))}</section>"
        for remark in remarks[-MOST_OTHERS:]
    )
    left = len(remarks) - MOST_OTHERS
    more = f"<p class='soft'>{left} earlier ones are left out.</p>" if left > 0 else ""
    return (
        f'\n<div class="card others"><p class="soft">What the run met without failing.</p>{more}{items}</div>'
    )


# The report's part about results: what was rejected, what it turned out to be, what became of checkpoints.
#
# A run in which nothing was ever rejected, put on probation or measured has no such part.


BAD = ("suspect", "condemned", "abandoned")
"""Standings that matter more than the fact that a checkpoint was once resumed from."""
_SHOWN = (StepRejected, Verdict, ProbationEnded, StandingChanged, ThroughputLow, DataSkipped)
MOST_ROWS = 500


def standings(lines: list[JournalLine]) -> dict[str, StandingChanged]:
    """The newest known standing of each checkpoint, by name."""
    return {line.body.checkpoint: line.body for line in lines if isinstance(line.body, StandingChanged)}


def standing(change: StandingChanged) -> str:
    """A checkpoint's standing, for its row."""
    bad = change.standing in BAD
    mark, style = ("✕", "bad") if bad else ("✓", "good")
    why = "; ".join(change.evidence)
    return f'<span class="tag {style}">{mark} {text(change.standing)}</span> {text(why)}'.rstrip()


def judged(lines: list[JournalLine], began: float) -> str:
    """Rejected steps, verdicts, probations and what followed; how far results repeat, where measured."""
    return _events(lines, began) + _determinism(lines)


def _events(lines: list[JournalLine], began: float) -> str:
    found = [line for line in lines if isinstance(line.body, _SHOWN)]
    if not found:
        return ""
    rows = []
    for line in found[-MOST_ROWS:]:
        shown = line.body.render()
        details = "".join(f"<li>{text(detail)}</li>" for detail in shown.details)
        rows.append(
            f'<tr><td data-label="When">{when(line.at, began)}</td>'
            f'<td data-label="Attempt">{line.attempt}</td>'
            f'<td data-label="What"><span class="{shown.style}-text">{text(shown.text)}</span></td>'
            f'<td data-label="Evidence">{f"<ul>{details}</ul>" if details else ""}</td></tr>'
        )
    left = len(found) - len(rows)
    caption = "Results that were not accepted, and checkpoints that were watched after a resume."
    caption += f" {left} earlier ones are left out." if left else ""
    heads = [("When", ""), ("Attempt", ""), ("What", ""), ("Evidence", "")]
    return "<h2>Results and verdicts</h2>\n" + table(caption, heads, rows)


def _determinism(lines: list[JournalLine]) -> str:
    measured = [line.body for line in lines if isinstance(line.body, DeterminismMeasured)]
    if not measured:
        return ""
    last = measured[-1]
    values = [
        ("steps", str(last.steps)),
        ("p50", f"{last.p50:.3g}"),
        ("p90", f"{last.p90:.3g}"),
        ("p99", f"{last.p99:.3g}"),
        ("p99.9", f"{last.p999:.3g}"),
        ("largest", f"{last.largest:.3g}"),
    ]
    if last.ranks > 1:
        values += [("ranks", str(last.ranks)), ("largest on rank", str(last.worst_rank))]
    listed = "".join(f"<div><dt>{name}</dt><dd>{printable(value)}</dd></div>" for name, value in values)
    return (
        "<h2>How far results repeat</h2>\n<p class='soft'>Relative difference between two runs of the same "
        f'step, over the last attempt that measured it.</p><dl class="figures">{listed}</dl>'
    )


# The report's part on stragglers: a heat map of the newest comparison, and who was named.


MOST_NAMED = 20


def straggler_part(lines: Sequence[JournalLine]) -> str:
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
        + draw_heat_map(newest, width=1040, name="wide")
        + draw_heat_map(newest, width=340, name="narrow")
        + f'<figcaption class="soft small">{told}</figcaption></figure>\n{named}'
    )


# The report's first screen: how the run is or ended, and its worst incident, each by the five answers.
#
# Everything it says comes from the accounts and the remarks; here it only becomes markup.


WHYS = 3
"""Most reasons that are shown unfolded; more are folded away."""
MOST_ALSO = 4
"""Most other things that are named one by one."""
_ASKED = {"who": "Who", "what": "What", "why": "Why", "done": "Done", "cost": "Cost", "next": "Next"}


def first_screen(
    lines: Sequence[JournalLine],
    life: Sequence[JournalledAttempt],
    incidents: list[Incident],
    remarks: list[Remark],
    ledger: Ledger,
) -> str:
    """Markup, from the sentence under the title down to the figures."""
    ended = next((one for one in incidents[-1:] if one.account is not None and one.account.ends), None)
    state = state_of(life, bool(lines))
    stopped = next((one for one in reversed(remarks) if one.kind == "stop"), None)
    if state != "Stopped" or (stopped is not None and life and stopped.attempt != life[-1].number):
        stopped = None
    cards: list[tuple[str, str, list[tuple[str, str]]]] = []
    if ended is not None:
        cards.append(("How it ended", _badge(ended), _answers(ended)))
    elif stopped is not None:
        cards.append(("How it ended", "", answers_of(stopped)))
    cases = investigations([one for one in incidents if one is not ended])
    case = max(cases, key=lambda case: sum(one.seconds_lost for one in case), default=[])
    worst = case[-1] if case else None
    rest = [one for one in remarks if one is not stopped or ended is not None]
    if worst is not None:
        heading = "What happened"
        if len(case) > 1 and len(case) == len(incidents):
            heading = f"What happened, in {len(case)} incidents"
        elif len(incidents) > 1:
            heading = f"The costliest of {len(incidents)} incidents"
        cards.append((heading, "".join(map(_badge, case)), _whole(case)))
    elif rest and not cards:
        most = max(rest, key=lambda one: (one.seconds, one.count))
        rest = [one for one in rest if one is not most]
        cards.append(("What happened", "", answers_of(most)))
    return "".join(
        [
            _lead(lines, life, incidents, remarks, ended, stopped, state),
            "</header>\n",
            f'<div class="cards">{"".join(_card(*card) for card in cards)}</div>\n' if cards else "",
            _also(rest),
            _figures(life, incidents, remarks, ledger),
        ]
    )


def state_of(life: Sequence[JournalledAttempt], any_line: bool) -> str:
    """One word for the state of the run."""
    newest = life[-1] if life else None
    if newest is None:
        return "Not started" if any_line else "Nothing"
    if newest.finished_at is not None:
        return "Finished"
    if newest.ended is not None:
        return {"failed": "Failed", "stopped": "Stopped", "lost": "Lost"}.get(newest.ended.outcome, "Ended")
    if newest.account is not None and newest.account.ends:
        return "Failed"  # reported by a node for which nobody decided
    return "Running"


def _lead(
    lines: Sequence[JournalLine],
    life: Sequence[JournalledAttempt],
    incidents: list[Incident],
    remarks: list[Remark],
    ended: Incident | None,
    stopped: Remark | None,
    state: str,
) -> str:
    """The state of the run in one sentence, and what to do if there is something to do."""
    if not lines:
        return '<p class="lead">The journal is empty.</p>'
    began, last = min(line.at for line in lines), max(line.at for line in lines)
    steps = max((attempt.reached or 0 for attempt in life), default=0)
    style, summary, left = "", "", ""
    if state == "Finished":
        style, summary = " good", finished_line(incidents, remarks, steps).partition(": ")[2]
    elif state == "Running":
        caught = incidents[-1] if incidents and incidents[-1].open else None
        where = f"step {steps}" if steps else "no step is done yet"
        summary = f"{where}, last sign of life {clock(last)}"
        summary += f"; not back yet from incident {caught.number}" if caught is not None else ""
        left = "nothing to do; if the last sign is long ago, ask `holdfast status`"
    elif ended is not None and ended.account is not None:
        done = ended.account.done.removeprefix("stopped: ")
        cost = cost_of(ended).removeprefix("the run ended").removeprefix("; ")
        style, summary, left = " bad", f"{done}; {cost}" if cost else done, ended.account.next
    elif stopped is not None:
        summary, left = f"{stopped.done.removeprefix('stopped ')} ({stopped.who} {stopped.did})", stopped.next
    elif state in ("Failed", "Lost", "Ended"):
        style, summary = " bad", f"it came to step {steps}"
        left = "run the same command to go on from the newest sound checkpoint"
    elif state == "Not started" and remarks:
        style, summary, left = " bad", f"{remarks[-1].who} {remarks[-1].did}", remarks[-1].next
    elif state == "Stopped":
        summary, left = f"it came to step {steps}", "run the same command to go on"
    colon = f"<b class='state{style}'>{state.lower()}</b>" + (f": {text(summary)}" if summary else "")
    now = f'<p class="verdict"><b>Next</b>: {text(left)}</p>' if left else ""
    span = f'<p class="lead small">{clock(began)}, {duration(last - began)}</p>'
    return f'<p class="verdict">{colon}</p>{now}{span}'


def _badge(incident: Incident) -> str:
    return f' <a class="badge" href="#incident-{incident.number}">{incident.number}</a>'


def _answers(incident: Incident) -> list[tuple[str, str]]:
    return [(question, answer) for question, answer in five_answers(incident)]


def _whole(case: Sequence[Incident]) -> list[tuple[str, str]]:
    """For several incidents of which the last names the cause: its answers, and the cost of all."""
    told = _answers(case[-1])
    if len(case) == 1:
        return told
    lost, redone = sum(one.seconds_lost for one in case), sum(one.steps_lost for one in case)
    whole = f"in all {len(case)} incidents: {duration(lost)}, {plural(redone, 'step')} done again"
    at = next(index for index, (question, _) in enumerate(told) if question == "cost")
    return [*told[: at + 1], ("", whole), *told[at + 1 :]]


def _card(heading: str, badge: str, answers: Sequence[tuple[str, str]]) -> str:
    return f'<section class="answers card"><h2>{heading}{badge}</h2>{answer_list(answers)}</section>'


def answer_list(told: Sequence[tuple[str, str]]) -> str:
    """Each question once, as a person would ask it; of many answers, the later ones are folded away."""
    grouped: list[tuple[str, list[str]]] = []
    for question, answer in told:
        if question or not grouped:
            grouped.append((_ASKED.get(question, question), []))
        grouped[-1][1].append(answer)
    rows = []
    for question, answers in grouped:
        open_, folded = answers[:WHYS], answers[WHYS:]
        if len(folded) == 1:  # a line to unfold it would take as much room
            open_, folded = answers, []
        said = "".join(f"<p>{text(one)}</p>" for one in open_)
        if folded:
            more = "".join(f"<p>{text(one)}</p>" for one in folded)
            said += f"<details><summary>{len(folded)} more</summary>{more}</details>"
        style = ' class="now"' if question == "Next" else ""
        rows.append(f"<dt{style}>{question}</dt><dd{style}>{said}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


def _also(rest: Sequence[Remark]) -> str:
    """What else the run met, one line each."""
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


def _times(remark: Remark) -> str:
    told = remark.count > 1 and remark.kind not in ("dropped", "stop", "copy")
    return f" ({remark.count} times)." if told else "."


def _figures(
    life: Sequence[JournalledAttempt], incidents: list[Incident], remarks: list[Remark], ledger: Ledger
) -> str:
    reached = max((attempt.reached or 0 for attempt in life), default=0)
    kinds = ([(len(incidents), "failure")] if incidents else []) + counts_by_kind(remarks)
    lost = sum(one.seconds_lost for one in incidents) + sum(one.seconds for one in remarks)
    named = ", ".join(plural(count, kind) for count, kind in kinds) if remarks else ""
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


MAX_TIMELINE = 5000
MANY_TIMELINE = 1000
"""Most events shown for a run with very many incidents, whose other parts are long already."""
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
"""By which an earlier report is recognised."""


def write_report(
    lines: list[JournalLine],
    destination: Path,
    *,
    title: str,
    reference: Sequence[tuple[int, float]] | None = None,
    facts: Sequence[tuple[str, str]] = (),
    overwrite: bool = False,
) -> None:
    """Write the report of a run. `reference` is a curve of (step, loss) to compare with; `facts` are extra
    rows for the summary. The file is replaced in one step; raises OSError if it cannot be written, UsageError
    if something else than an earlier report is there; `overwrite`: any regular file may be replaced."""
    check_output(Path(destination), mark=MARK, overwrite=overwrite)
    page = report_html(lines, title=title, reference=reference, facts=facts)
    replace_atomic(Path(destination).absolute(), page.encode("utf-8", "backslashreplace"))


def report_html(
    lines: list[JournalLine],
    *,
    title: str,
    reference: Sequence[tuple[int, float]] | None = None,
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text."""
    life = attempts_of(lines)
    incidents = incidents_of(lines)
    remarks = remarks_of(lines, incidents)
    ledger = ledger_of(lines, [incident.phases for incident in incidents if incident.traced])
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
            first_screen(lines, life, incidents, remarks, ledger),
            _chart(lines, life, incidents, reference or []),
            _ledger(ledger),
            _facts(lines, life, facts),
            incident_part(incidents, remarks, began),
            straggler_part(lines),
            judged(lines, began),
            _checkpoints(life, standings(lines), began),
            _decisions(lines, began),
            _timeline(lines, began, MAX_TIMELINE if len(incidents) <= MAX_DECISIONS else MANY_TIMELINE),
            f"<footer>Made by Holdfast {__version__} from the run's journal. Times are from its first line"
            f"{', ' + clock(began) if lines else ''}.</footer>",
            "</main>\n</body>\n</html>\n",
        ]
    )


def _facts(lines: list[JournalLine], life: list[JournalledAttempt], facts: Sequence[tuple[str, str]]) -> str:
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
    lines: list[JournalLine],
    life: list[JournalledAttempt],
    incidents: list[Incident],
    reference: Sequence[tuple[int, float]],
) -> str:
    series = losses_by_attempt(lines)
    if not series:
        return "<h2>Loss</h2>\n<p class='soft'>No loss was recorded.</p>"
    rejected = [
        (name.step, str(name), "; ".join(why))
        for given, why in _refused(life).items()
        if (name := parse_name(given)) is not None
    ]
    chart = Chart(
        series=series,
        faults=[FaultMark(one.number, one.failed_at_step, one.what) for one in incidents],
        commits=[
            (attempt.number, save.step, save.checkpoint)
            for attempt in life
            for save in {save.checkpoint: save for _, save in attempt.saves}.values()  # one of two tiers
        ],
        rejected=[(step, name, printable(why)) for step, name, why in rejected],
        reference=list(reference),
    )
    caption = ["Each attempt is a line that begins at its mark, and a lane below.", "● committed checkpoint."]
    if any(one.kept is not None for one in series):
        caption.append("Dashed: steps that were lost and done again.")
    if rejected:
        caption.append("✕ checkpoint rejected later.")
    if incidents:
        caption.append("Numbers mark incidents.")
    if reference:
        caption.append("The wide pale band is the reference.")
    return (
        '<h2>Loss</h2>\n<figure class="card">'
        + draw(chart, width=1040, height=440, name="wide")
        + draw(chart, width=340, height=360, name="narrow")
        + f'<figcaption class="soft small">{" ".join(caption)}</figcaption></figure>'
    )


def _ledger(ledger: Ledger) -> str:
    """Where the time went, and on what the time between the faults and the next steps was spent."""
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
        f'<ul class="parts">{rows}</ul>{_back(ledger.back)}</div>'
    )


def _back(phases: Sequence[Phase]) -> str:
    if not phases:
        return ""
    whole = duration(sum(phase.seconds for phase in phases))
    return f'<p class="soft small">From the faults to the next steps: {whole}, {phases_text(phases, 5)}.</p>'


def _refused(life: list[JournalledAttempt]) -> dict[str, list[str]]:
    """Checkpoints that were rejected, each with the reasons given first: later ones only repeat or follow."""
    refused: dict[str, list[str]] = {}
    for attempt in life:
        for name, why in attempt.rejected.items():
            refused.setdefault(name, why)
    return refused


def _checkpoints(life: list[JournalledAttempt], standings: dict[str, StandingChanged], began: float) -> str:
    refused = _refused(life)
    used = {attempt.resumed.checkpoint: attempt.number for attempt in life if attempt.resumed is not None}
    rows = []
    for attempt in life:
        for at, save in attempt.saves:
            if save.checkpoint in standings and standings[save.checkpoint].standing in BAD:
                note = standing(standings[save.checkpoint])
            elif save.checkpoint in refused:
                why = "; ".join(refused[save.checkpoint])
                note = f'<span class="tag bad">✕ rejected</span> {text(why)}'
            elif save.checkpoint in used:
                note = f'<span class="tag good">✓ resumed from</span> by attempt {used[save.checkpoint]}'
            elif save.checkpoint in standings:
                note = standing(standings[save.checkpoint])
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


def _decisions(lines: list[JournalLine], began: float) -> str:
    items = []
    for line in lines:
        if not isinstance(line.body, DecisionMade):
            continue
        shown = line.body.render()
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


def _timeline(lines: list[JournalLine], began: float, most: int) -> str:
    shown = condense(lines)
    rows = []
    for line in shown[-most:]:
        event = line.body.render()
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
