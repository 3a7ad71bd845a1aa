"""The report's style sheet. Light and dark, from 360 px wide upwards, nothing loaded from anywhere."""

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
