"""The report as a browser lays it out: the first screen fits, and nothing is clipped at any length."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from holdfast.account.incidents import incidents_of
from holdfast.account.remarks import answers_of, remarks_of
from holdfast.account.words import closing_line
from holdfast.journal.events import (
    Account,
    RungRejected,
    StepRejected,
    StopAsked,
    StopSaved,
    StragglerFound,
    StragglersReported,
)
from holdfast.observe.chart import Chart, FaultMark, draw, losses_by_attempt
from holdfast.observe.report import report_html
from kit.journals import ALTERED, Journal, name_of

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MEASURE = """
<script>
const out = {clipped: [], wide: document.documentElement.scrollWidth, seen: innerWidth};
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  if (!frame.width) continue;
  for (const one of svg.querySelectorAll("text, rect, circle, line, path")) {
    const box = one.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
        box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      out.clipped.push(one.outerHTML.slice(0, 120));
  }
}
const bottom = (name) => document.querySelector(name)?.getBoundingClientRect().bottom ?? 0;
out.bottom = Math.max(bottom(".cards"), bottom(".figures"), bottom(".also"));
document.body.setAttribute("data-measured", JSON.stringify(out));
</script></body>"""


def killed(attempt: int, step: int, **more: Any) -> Account:
    texts: dict[str, Any] = {
        "done": f"restarting from step {step - 4}: 4 steps to redo (restart 1 of 3)",
        "next": "nothing to do",
        **more,
    }
    why = [
        "SIGKILL always comes from outside: Holdfast did not send it, and the kernel counts no out-of-memory "
        "kill here. The scheduler, an administrator or a container limit may have",
        "this points to the machine or the network, not to the training script",
        "rank 0 then lost its peer",
        f"progress: the highest committed step rose from 0 to {step - 4}",
    ]
    return Account(
        attempt=attempt, cause="infrastructure", who="rank 1 on here", why=why, step=step,
        what=f"was killed by SIGKILL in step {step + 1}", saved=step - 4, **texts,
    )  # fmt: skip


def survived(count: int) -> Journal:
    """A run with so many failures, the last of them in its last step, that finished."""
    run, step = Journal().start(), 0
    for number in range(1, count + 1):
        run.steps(step + 1, step + 10)
        step += 10
        name = run.save(step)
        run.steps(step + 1, step + 4).pass_time(0.2).fail(1)
        run.write(killed(number, step + 4), "agent-a")
        run.recover(root=1).pass_time(0.2).start(resume=(name, step))
    run.steps(step + 1, step + 4)
    return run.finish(step + 4)


def gave_up() -> Journal:
    run = Journal().start().steps(1, 20)
    name = run.save(20)
    for number in (1, 2):
        run.steps(21, 24).pass_time(0.2).fail(1)
        ends = number == 2
        more = {"done": "stopped: no restart is left", "next": "find out what kills it", "exit_code": 22}
        run.write(killed(number, 24, **(more if ends else {})), "agent-a")
        run.recover(root=1)
        if not ends:
            run.start(resume=(name, 20))
    return run


def measured(page: str, place: Path, width: int, height: int = 800) -> dict[str, Any]:
    if BROWSER is None:
        pytest.skip("the report's layout in a browser: there is no chromium here")
    opened = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    file = place / "page.html"
    file.write_text(opened.replace("</body>", MEASURE))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={place / 'profile'}", f"--window-size={width},{height}", "--dump-dom",
        file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-measured="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    out: dict[str, Any] = json.loads(unescape(found[1]))
    return out


@pytest.mark.parametrize("count", [1, 10, 1000])
@pytest.mark.parametrize("width", [1280, 500])
def test_nothing_is_clipped_with_so_many_incidents(count: int, width: int, tmp_path: Path) -> None:
    found = measured(report_html(survived(count).lines, title="A run"), tmp_path, width)
    assert found["clipped"] == []
    assert found["wide"] <= found["seen"], "it cannot be scrolled sideways"


@pytest.mark.parametrize("run", [survived(1), survived(10), gave_up()], ids=["one", "ten", "gave up"])
def test_the_first_screen_fits_a_window_of_1280_by_800(run: Journal, tmp_path: Path) -> None:
    assert measured(report_html(run.lines, title="A run"), tmp_path, 1280)["bottom"] <= 800


@pytest.mark.parametrize("count", [1, 10, 1000])
@pytest.mark.parametrize("width", [1040, 340])
def test_badges_stay_inside_and_apart_by_their_own_numbers(count: int, width: int) -> None:
    """The same without a browser, at the edges: every fault in the first or in the last step."""
    series = losses_by_attempt(Journal().start().steps(1, 40).lines)
    for steps in ([40] * count, [1] * count, [1 + number % 40 for number in range(count)]):
        faults = [FaultMark(number + 1, step, "x") for number, step in enumerate(steps)]
        picture = draw(Chart(series=series, faults=faults), width=width, height=400, name="x")
        pills = re.findall(r'class="pill" x="([-\d.]+)" y="([-\d.]+)" width="([\d.]+)"', picture)
        assert pills
        edges = sorted((float(x), float(x) + float(wide)) for x, _, wide in pills)
        assert edges[0][0] >= 0
        assert edges[-1][1] <= width
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(edges))
        assert min(float(y) for _, y, _ in pills) >= 0


def test_a_thousand_incidents_make_a_small_page_quickly() -> None:
    lines = survived(1000).lines
    began = time.monotonic()
    page = report_html(lines, title="A run")
    assert time.monotonic() - began < 20
    assert len(page) < 2_500_000
    assert "949 earlier incidents" in page or "950 earlier incidents" in page
    ids = set(re.findall(r' id="([^"]+)"', page))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= ids


def test_a_run_that_finished_says_what_the_terminal_said_last() -> None:
    run = survived(1)
    found = incidents_of(run.lines)
    last = closing_line(found, remarks_of(run.lines, found), 14, "r").partition("; report: ")[0]
    said = re.sub(r"<[^>]+>", "", report_html(run.lines, title="t"))
    assert last.startswith("finished: 14 steps, 1 restart, 4 steps done again, ")
    assert last in said


def test_a_run_that_gave_up_says_why_and_what_to_do_first() -> None:
    said = re.sub(r"<[^>]+>", "", report_html(gave_up().lines, title="t").partition("<main>")[2])
    assert said.index("failed: no restart is left") < said.index("Next: find out what kills it")
    assert said.index("Next: find out what kills it") < said.index("How it ended")
    assert "saved up to step 20, steps 21–24 are lost" in said.partition("How it ended")[0]


# --- incidents of other kinds -------------------------------------------------------------------------------


def met_everything() -> Journal:
    run = Journal().start().steps(1, 24)
    run.write(StepRejected(step=25, reasons=["the loss is NaN"], ranks=[1], then="dropped"))
    run.steps(25, 30)
    slow = [0.1, 0.1, 0.147]
    run.write(
        StragglersReported(step=30, steps=20, seconds=3.0, step_seconds=0.147, ranks=[0, 1, 2],
                           nodes=["a"] * 3, sections={"compute": slow})
    )  # fmt: skip
    run.write(StragglerFound(step=30, kind="compute", section="compute", why="47 % slower", rank=2, node="a",
                             seconds=0.047))  # fmt: skip
    run.write(
        StragglersReported(step=40, steps=10, seconds=3.0, step_seconds=0.147, ranks=[0, 1, 2],
                           nodes=["a"] * 3, sections={"compute": slow})
    )  # fmt: skip
    run.write(StopAsked(source="stop_file", detail="the stop file run/stop"), "agent-a")
    run.pass_time(2.0).write(StopSaved(step=30, checkpoint=name_of(30)))
    run.end("stopped", 31).pass_time(8.0)
    run.start(resume=None)
    run.write(RungRejected(checkpoint=name_of(30), step=30, reasons=[ALTERED]))
    return run


def test_drops_stops_slow_ranks_and_refusals_count_as_incidents_of_their_kind() -> None:
    run = met_everything()
    page = re.sub(r"<[^>]+>", " ", report_html(run.lines, title="t"))
    figures = " ".join(page.partition("Attempts")[2].partition("Productive time")[0].split())
    assert "Incidents 4 1 dropped step, 1 slow rank, 1 stop, 1 refused checkpoint" in figures
    assert (
        "Time lost to them 11.5 s" in figures
    )  # 2 s to stop, 8 s down, 30 steps of 47 ms, one step of 100 ms


@pytest.mark.parametrize(
    ("kind", "who", "cost"),
    [
        ("dropped", "rank 1", "the work of 1 step, about 100 ms"),
        ("slow", "rank 2 on a", "the others waited 1.4 s for it in all"),
        ("stop", "the stop file run/stop", "2.0 s to save and stop, 8.0 s until it was started again"),
    ],
)
def test_each_of_them_has_the_five_answers_and_its_cost(kind: str, who: str, cost: str) -> None:
    run = met_everything()
    told = dict(answers_of(next(one for one in remarks_of(run.lines) if one.kind == kind)))
    assert set(told) == {"who", "what", "why", "done", "cost", "next"}
    assert (told["who"], told["cost"]) == (who, cost)


def test_a_refused_checkpoint_says_which_was_used_instead() -> None:
    run = Journal().start(resume=(name_of(10), 10), rejected=[name_of(20)])
    told = dict(answers_of(next(one for one in remarks_of(run.lines) if one.kind == "refused")))
    assert told["who"] == "the checkpoint at step 20"
    assert (told["done"], told["cost"]) == ("resumed from step 10", "10 steps done again")


def test_a_run_that_was_stopped_shows_how_and_what_to_do() -> None:
    lines = [line for line in met_everything().lines if line.attempt == 1]
    said = " ".join(re.sub(r"<[^>]+>", "", report_html(lines, title="t").partition("<main>")[2]).split())
    assert "stopped: after step 30, saved (the stop file run/stop asked the run to stop)" in said
    assert said.index("run the same command to go on") < said.index("Loss")
