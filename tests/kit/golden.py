"""Golden screens: what a person sees of a real fault, on the terminal, from `holdfast why` and in the report.

Each file in screens/ is reviewed text. It begins with the five answers, each a text that has to be found both
on the terminal and on the report's first screen (a question with two answers, one for each of them, has them
either side of ` || `). Names, times and ids that differ from run to run are replaced. `WRITE_SCREENS=1`
writes the files anew, to be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import unified_diff
from html.parser import HTMLParser
from pathlib import Path

from kit.harness import REPO, finish, holdfast

SCREENS = REPO / "tests" / "screens"
QUESTIONS = ("who", "what", "why", "done", "next")
REPLACED = [
    (r"\d\d:\d\d:\d\d holdfast(?=:|\[)", "HH:MM:SS holdfast"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE"),
    (r"step_(\d{8})-[0-9a-f]{8,}", r"step_\1-ID"),
    (r"\b[0-9a-f]{32}\b", "DIGEST"),
    (r"\bpid \d+|\bprocess \d+", "pid N"),
    (r"\b\d+(\.\d+)? (ms|s)\b", "T"),
    (r"\bfrom \S[^()\n]* \(pid N, [^)]+\)", "from SENDER (pid N, USER)"),
    (r"\d\d:\d\d:\d\d UTC", "TIME"),
    (r"\b\d+(\.\d+)? (KiB|MiB|GiB)\b", "SIZE"),
    (r"bytes \d+ to \d+", "bytes N to M"),
    (r"errors/rank_00000\d\.", "errors/rank_N."),
    (r"#\d+ of", "#N of"),
    (r"stopped(:?) after step \d+", r"stopped\1 after step N"),
    (r"step_\d{8}-ID holds", "CHECKPOINT holds"),
    (r"Productive time: \d+%", "Productive time: P%"),
    (r"T( T)+", "T"),
    (r"\(([a-z]+( step)? T(, )?){1,3}\)", "(BY PHASE)"),  # which take the longest depends on the machine
    (
        r"T: T until it trained again( \(BY PHASE\))?, then (.*) in T\b",
        r"T until it trained again\1, \2",
    ),  # told where it counts
]


def shown(text: str, place: Path, replaced: Sequence[tuple[str, str]] = ()) -> str:
    """What is the same in every run. `replaced`: patterns of this fault alone, used first."""
    text = text.replace(str(place.resolve()), ".")
    for pattern, instead in [*replaced, *REPLACED]:
        text = re.sub(pattern, instead, text)
    return text


def lines_of_ours(text: str) -> str:
    """The launcher's lines without those about saves, then those of the ranks: what is printed by different
    processes comes in any order. Whether a rank that lost another still says so depends on the machine."""
    launcher, ranks, ours = [], set(), False
    for line in text.splitlines():
        begins = re.match(r"[\d:]{8} holdfast(\[rank \d+\])?: ", line)
        left_out = begins and re.match(
            r"(save |saving holds|warning: |note: |waiting for |ended because it lost)", line[begins.end() :]
        )
        if begins and begins[1] and not left_out:
            ranks.add(f"HH:MM:SS holdfast[rank N]: {line[begins.end() :].rstrip()}")
        ours = bool(begins and not begins[1] and not left_out) or (ours and line.startswith("  "))
        if ours:
            launcher.append(line.rstrip())
    return "\n".join([*launcher, *sorted(ranks)])


class _Text(HTMLParser):
    """The words of the page's first screen, a line for each block; an answer stands beside its question."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        beside = tag == "p" and self.lines[-1].endswith(": ")  # the first answer, next to its question
        if tag in ("p", "h1", "h2", "h3", "dt", "li", "section", "div", "tr", "summary") and not beside:
            self.lines.append("")
        if tag == "dd":
            self.lines[-1] += ": "

    def handle_data(self, data: str) -> None:
        self.lines[-1] += re.sub(r"\s+", " ", data)


def first_screen(page: str) -> str:
    """Of a report: what stands above its pictures."""
    _, _, body = page.partition("<main>")
    reader = _Text()
    reader.feed(re.split(r'<dl class="facts|<h2>Loss', body)[0])
    return "\n".join(line.strip() for line in reader.lines if line.strip(" :"))


def compare(name: str, err: str, place: Path, replaced: Sequence[tuple[str, str]] = ()) -> None:
    """That the lines of a launch, `holdfast why` and the report are those of screens/`name` and hold the five
    answers. The launch ran in `place`, with its run directory `run`."""
    why = finish(holdfast("why", "run"), cwd=place)
    assert why.code == 0, why.text
    made = finish(holdfast("journal", "run", "--report", "report.html"), cwd=place)
    assert made.code == 0, made.text
    page = (place / "report.html").read_text()
    parts = [lines_of_ours(err), f"$ holdfast why run\n{why.out}", f"# the report\n{first_screen(page)}\n"]
    seen = [shown(part, place, replaced) for part in parts]
    golden = SCREENS / f"{name.replace(' ', '_').replace(chr(39), '')}.txt"
    head, _, text = golden.read_text().partition("\n\n") if golden.exists() else ("", "", "")
    if os.environ.get("WRITE_SCREENS"):
        golden.write_text("\n\n".join([head, *seen]))
        return
    asked = dict(line.split(": ", 1) for line in head.splitlines())
    assert set(asked) == set(QUESTIONS), f"{golden} has to begin with the five answers"
    for question, answer in asked.items():
        on_terminal, _, in_report = answer.partition(" || ")
        for where, screen, wanted in (
            ("terminal", seen[0], on_terminal),
            ("report's first screen", seen[2], in_report or on_terminal),
        ):
            assert wanted in screen, f"{question}: {wanted!r} is not to be found on the {where}:\n{screen}"
    differ = unified_diff(text.splitlines(), "\n\n".join(seen).splitlines(), str(golden), "seen", lineterm="")
    assert "\n\n".join(seen) == text, "\n".join(differ)
