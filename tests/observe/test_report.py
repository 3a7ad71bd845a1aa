"""The HTML report: complete, self-contained, accessible, and harmless whatever the journal holds."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.journal import Unknown
from holdfast.journal.events import (
    DecisionMade,
    DeterminismMeasured,
    ProbationEnded,
    RejectedOption,
    StandingChanged,
    StepRejected,
    StragglerFound,
    StragglersReported,
    Verdict,
    Warned,
)
from holdfast.observe.chart import AttemptLosses, Chart, LossPoint, draw, losses_by_attempt, nice_ticks, thin
from holdfast.observe.chart import draw_heat_map as draw_heat
from holdfast.observe.report import report_html, write_report
from kit.journals import ALTERED, Journal, killed_and_corrupted, loss_of, name_of

VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """A page's elements; fails on a tag that is not closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page() -> str:
    return report_html(
        killed_and_corrupted().lines,
        title="A run",
        reference=[(step, loss_of(step)) for step in range(1, 61)],
        facts=[("Compared with", "an uninterrupted run: bitwise equal")],
    )


def test_the_report_tells_the_whole_story(page: str) -> None:
    text = Page(page).text
    for wanted in (
        "A run – Holdfast report",
        "finished : 60 steps, 2 restarts, 21 steps done again", "Steps 60",
        "Attempts 3", "Incidents 2", "bitwise equal",
        "rank 1 killed by SIGKILL", "resume from step 10", ALTERED, "17 steps done again", "productive",
        "recomputed", "✓ resumed from", "✕ rejected", "not stop: the budget is not spent",
        "run finished at step 60",
        name_of(20),
    ):  # fmt: skip
        assert wanted in text, wanted


def test_rejected_results_their_verdicts_and_what_became_of_a_checkpoint_are_shown() -> None:
    run = killed_and_corrupted()
    assert "Results and verdicts" not in report_html(run.lines, title="A run")
    bad = name_of(10)
    run.write(StepRejected(step=12, reasons=["the loss is NaN"], ranks=[1], then="rerun"))
    run.write(Verdict(verdict="reproducible", step=12, evidence=["rejected on every device"]))
    run.write(ProbationEnded(checkpoint=bad, outcome="breached", first=11, last=12, evidence=["<b>NaN</b>"]))
    run.write(StandingChanged(checkpoint=bad, standing="suspect", evidence=["step 12 was rejected"]))
    run.write(StandingChanged(checkpoint=bad, standing="condemned", evidence=["a lower rung passed step 12"]))
    run.write(DeterminismMeasured(steps=40, p50=0.0, p90=1e-8, p99=2e-7, p999=3e-7, largest=4e-7))
    text = Page(report_html(run.lines, title="A run")).text
    for wanted in (
        "step 12 rejected on 1 rank (1): rerun", "the loss is NaN", "verdict on step 12: reproducible",
        f"probation of {bad}, steps 11–12: breached", "<b>NaN</b>", "✕ condemned",
        "a lower rung passed step 12", "p99.9 3e-07",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert "✕ suspect" not in text


def test_the_report_needs_nothing_from_outside_and_no_scripts(page: str) -> None:
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object", "form"} & {tag for tag, _ in parsed.elements}
    for _, attributes in parsed.elements:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?://|url\(|@import", page)
    policy = next(m for m in parsed.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in str(policy["content"])


def test_the_report_is_accessible_and_fits_screens(page: str) -> None:
    parsed = Page(page)
    assert parsed.all("html")[0]["lang"] == "en"
    assert len(parsed.all("h1")) == 1
    assert parsed.all("main")
    assert "width=device-width" in str(parsed.all("meta")[1]["content"])
    assert "prefers-color-scheme: dark" in page
    assert "max-width: 640px" in page
    tables = len(parsed.all("table"))
    assert tables == len(parsed.all("caption")) == 3
    assert all(head.get("scope") in ("row", "col") for head in parsed.all("th"))
    ids = [str(attributes["id"]) for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for picture in parsed.all("svg"):
        assert picture["role"] == "img"
        assert set(str(picture["aria-labelledby"]).split()) <= set(ids)
    for link in parsed.all("a"):
        assert str(link["href"])[1:] in ids
    assert "Attempt 1: steps 1 to 27" in parsed.text
    assert "rolled back after step 10" in parsed.text


def test_the_chart_shows_attempts_lost_parts_faults_commits_and_rejected_rungs(page: str) -> None:
    wide = page[page.index('<svg class="chart wide"') : page.index('<svg class="chart narrow"')]
    assert len(re.findall(r'<path class="line"', wide)) == 3
    assert len(re.findall(r'<path class="line lost"', wide)) == 2
    assert len(re.findall(r'class="fault"', wide)) == 2
    assert len(re.findall(r'class="commit"', wide)) == 4
    assert len(re.findall(r'class="cross"', wide)) == 1
    assert len(re.findall(r'class="reference"', wide)) == 1
    colours = re.findall(r'<g class="lane (s\d)"', wide)
    assert len(set(colours)) == 3
    for attempt in (1, 2, 3):
        assert wide.count(f">attempt {attempt}</text>") == 2, "named at its line and at its lane"


HOSTILE = "</td></style></title></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"' onload='x'"


def test_a_hostile_message_stays_text_wherever_it_appears() -> None:
    run = Journal().start().steps(1, 10)
    bad = run.save(10)
    run.lines[0].body = Unknown(event=HOSTILE, fields={HOSTILE: HOSTILE})
    run.write(Warned(message=HOSTILE), who=HOSTILE)
    run.fail(0, signal=HOSTILE, exit_code=-9, message=HOSTILE)
    run.write(
        DecisionMade(
            about=HOSTILE, chosen=HOSTILE, evidence=[HOSTILE], rejected=[RejectedOption(HOSTILE, [HOSTILE])]
        )
    )
    run.recover(HOSTILE, why=HOSTILE).start(resume=(HOSTILE, 5), rejected=[bad]).steps(6, 12)
    for line in run.lines:
        if isinstance(line.body, DecisionMade) and line.body.about == "resume":
            line.body.rejected = [RejectedOption(bad, [HOSTILE]), RejectedOption(HOSTILE, [HOSTILE])]
    page = report_html(run.lines, title=HOSTILE, facts=[(HOSTILE, HOSTILE)])
    parsed = Page(page)
    names = {tag for tag, _ in parsed.elements}
    assert not {"script", "img"} & names
    assert not [a for _, attributes in parsed.elements for a in attributes if a.startswith("on")]
    assert page.count("<style>") == page.count("</style>") == 1
    assert parsed.text.count("<script>alert(1)</script>") > 10, "it is shown, as text"


def test_control_characters_and_broken_text_do_not_reach_the_page(tmp_path: Path) -> None:
    run = Journal().start().fail(0, signal="", exit_code=1, message="\x1b[31m\x00\ud800 end").recover()
    write_report(run.lines, tmp_path / "report.html", title="t\ud800")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert "\\x1b[31m\\x00\\ud800 end" in text


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (Journal(), "The journal is empty."),
        (Journal().start(resume=None), "running : no step is done yet, last sign of life 20"),
        (Journal().start().steps(1, 1), "running : step 1, last sign of life 20"),
        (Journal().start().steps(1, 5).end("stopped"), "stopped : it came to step 5"),
        (Journal().start().fail().recover("stop"), "failed : it came to step 0"),
        (
            Journal().start().steps(1, 5, losses=dict.fromkeys(range(1, 6), math.nan)).finish(5),
            "finished : 5 steps",
        ),
        (Journal().start().steps(1, 5, losses=dict.fromkeys(range(1, 6))).finish(5), "No loss was recorded"),
    ],
)
def test_every_state_of_a_run_has_a_report(run: Journal, word: str) -> None:
    assert word in Page(report_html(run.lines, title="t")).text


def test_a_loss_that_is_not_finite_is_marked_and_breaks_the_line() -> None:
    run = Journal().start().steps(1, 20, losses={8: math.nan, 14: math.inf})
    picture = draw(Chart(series=losses_by_attempt(run.lines)), width=800, height=400, name="x")
    assert picture.count('class="broken"') == 2
    assert len(re.findall(r'<path class="line"', picture)) == 3
    assert "nan" not in re.sub(r"<title.*?</title>|<desc.*?</desc>", "", picture).replace("NaN", "")


def test_a_replaced_report_is_never_seen_half(tmp_path: Path) -> None:
    destination = tmp_path / "report.html"
    destination.write_text("old")
    with pytest.raises(UsageError, match=r"refused to replace .*report\.html: it is there already"):
        write_report(killed_and_corrupted().lines, destination, title="t")
    assert destination.read_text() == "old"
    write_report(killed_and_corrupted().lines, destination, title="t", overwrite=True)
    write_report(killed_and_corrupted().lines, destination, title="u")  # an earlier report is ours
    assert "u – Holdfast report" in destination.read_text()
    write_report(killed_and_corrupted().lines, destination, title="t")
    assert destination.read_text().endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_long_run_makes_a_page_of_reasonable_size_and_keeps_its_spike() -> None:
    run = Journal().start().steps(1, 40_000, batch=100, losses={24_321: 500.0})
    page = report_html(run.lines, title="t")
    assert len(page) < 400_000
    points = [(step, 500.0 if step == 54_321 else 1.0) for step in range(100_000)]
    thinned = thin(points, 500)
    assert (54_321, 500.0) in thinned
    assert len(thinned) <= 1002
    assert thinned == sorted(thinned)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats()), min_size=1, max_size=30))
def test_any_losses_can_be_drawn(points: list[tuple[int, float]]) -> None:
    series = [
        AttemptLosses(1, [LossPoint(step, loss, 0.0) for step, loss in sorted(points)], kept=points[0][0])
    ]
    picture = draw(Chart(series=series), width=340, height=360, name="x")
    for value in re.findall(r' (?:d|x|y|x1|y1|cx|cy)="([^"]*)"', picture):
        assert "nan" not in value
        assert "inf" not in value


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_ticks_span_the_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high)
    assert ticks == sorted(ticks)
    assert len(ticks) <= 12
    margin = (high / 2 - low / 2) * 1e-6 + 1e-9
    assert ticks[0] <= low + margin
    assert ticks[-1] >= high - margin
    assert ticks[-1] > ticks[0]


# --- stragglers


def compared(world: int, per_node: int, *, slow: int = 3) -> StragglersReported:
    usual = {"input": 0.004, "compute": 0.04, "</svg>": 0.01, "other": 0.006}
    sections = {name: [seconds] * world for name, seconds in usual.items()}
    sections["compute"][slow] += 0.03
    return StragglersReported(
        step=500,
        steps=100,
        seconds=300.0,
        step_seconds=0.1,
        ranks=list(range(world)),
        nodes=[f"n{rank // per_node}" for rank in range(world)],
        sections=sections,
        waiting=[0.0 if rank == slow else 0.03 for rank in range(world)],
        relative=[1.0] * world,
        individual=[None] * world,
    )


def test_the_heat_map_shows_every_rank_and_section_and_darkens_the_late_one() -> None:
    """Issue: a heat map per rank and section in the report."""
    journal = Journal().start()
    journal.write(compared(8, 4))
    journal.write(
        StragglerFound(step=500, kind="compute", section="compute", why="rank 3 <b>is</b> slow", rank=3)
    )
    page = Page(report_html(journal.lines, title="x"))
    svgs = [one for one in page.all("svg") if "heat" in (one["aria-labelledby"] or "")]
    assert len(svgs) == 2
    cells = [one["class"] for one in page.all("rect") if (one["class"] or "").startswith("h")]
    assert len(cells) == 2 * 8 * 5
    assert [shade for shade in cells if shade != "h0"] == ["h3", "h3"]  # once for wide, once for narrow
    for words in ("rank 3 on n0, compute: 70 ms", "rank 7 on n1, waiting: 30 ms", "rank 3 <b>is</b> slow"):
        assert words in page.text
    assert "Most is lost by rank 3 on n0 in compute: 30 ms a step." in page.text


def test_many_ranks_are_shown_by_node() -> None:
    text = draw_heat(compared(512, 8), width=1040, name="wide")
    page = Page(text)
    assert len(page.all("rect")) == 64 * 5
    assert "node n0, the worst of 8 rows, compute: 70 ms" in page.text
    assert "node n0, the worst of 8 rows, waiting: 0 ms" in page.text  # who is late waits least


def test_a_run_that_looked_for_no_stragglers_has_no_such_part(page: str) -> None:
    assert "Stragglers" not in Page(page).text
