"""Golden screens: what a person sees of real faults, on the terminal and from `holdfast why`.

Each file in screens/ is reviewed text. It begins with the five answers, each a text that has to be found in
what follows: the lines of a real launch with that fault on the terminal, then `holdfast why`. Names, times
and ids that differ from run to run are replaced. `WRITE_SCREENS=1` writes them anew, to be read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from harness import REPO, finish, holdfast

SCREENS = REPO / "tests" / "screens"
SCRIPT = REPO / "tests" / "scripts" / "meet_a_fault.py"
QUESTIONS = ("who", "what", "why", "done", "next")
ALWAYS = ["--nproc-per-node", "2", "--run-dir", "run", "--set", "launch.node_name=here"]
QUICK_HANG = ["--set", "monitor.rank_section_timeouts=step:4"]
CASES: dict[str, tuple[int, list[str]]] = {
    "killed rank": (0, []),
    "corrupt newest": (0, []),
    "two corrupt": (0, []),
    "all corrupt": (18, []),
    "exception on one rank": (0, []),
    "exception again and again": (1, []),
    "budget spent": (22, ["--max-restarts", "1"]),
    "import error": (1, []),
    "NaN batch": (0, []),
    "stopped process": (0, QUICK_HANG),
    "deadlock": (0, QUICK_HANG),
    "operator's stop": (31, []),
}
"""The fault → the code of the launch, and settings."""
REPLACED = [
    (r"\d\d:\d\d:\d\d holdfast:", "HH:MM:SS holdfast:"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE"),
    (r"step_(\d{8})-[0-9a-f]{8,}", r"step_\1-ID"),
    (r"\b[0-9a-f]{32}\b", "DIGEST"),
    (r"\bpid \d+|\bprocess \d+", "pid N"),
    (r"\b\d+(\.\d+)? (ms|s)\b", "T"),
    (r"\d\d:\d\d:\d\d UTC", "TIME"),
    (r"\b\d+(\.\d+)? (KiB|MiB|GiB)\b", "SIZE"),
    (r"bytes \d+ to \d+", "bytes N to M"),
    (r"errors/rank_00000\d\.", "errors/rank_N."),
    (r"#\d+ of", "#N of"),
    (r"stopped after step \d+", "stopped after step N"),
    (r"step_\d{8}-ID holds", "CHECKPOINT holds"),
]


def shown(text: str, place: Path) -> str:
    """What is the same in every run."""
    text = text.replace(str(place.resolve()), ".").replace(str(SCRIPT), "train.py")
    text = text.replace("../" * 12 + str(SCRIPT).lstrip("/"), "train.py")
    for pattern, instead in REPLACED:
        text = re.sub(pattern, instead, text)
    return text


def lines_of_ours(text: str) -> str:
    """The launcher's lines without those about saves, then those of the ranks: what is printed by different
    processes comes in any order. Whether a rank that lost another still says so depends on the machine."""
    launcher, ranks, ours = [], set(), False
    for line in text.splitlines():
        begins = re.match(r"([\d:]{8} )?holdfast: ", line)
        left_out = re.search(r"holdfast: (save |saving holds|warning: |note: |rank \d+ ended because)", line)
        if begins and not begins[1] and not left_out:
            ranks.add(line.rstrip())
        ours = bool(begins and begins[1] and not left_out) or (ours and line.startswith("  "))
        if ours:
            launcher.append(line.rstrip())
    return "\n".join([*launcher, *sorted(ranks)])


@pytest.mark.parametrize("fault", CASES)
def test_what_is_seen_of(fault: str, tmp_path: Path) -> None:
    code, settings = CASES[fault]
    command = holdfast("run", *ALWAYS, *settings, str(SCRIPT), fault)
    result = finish(command, cwd=tmp_path, timeout=120)
    why = finish(holdfast("why", "run"), cwd=tmp_path)
    assert result.code == code, result.text
    assert why.code == 0, why.text
    seen = shown(f"{lines_of_ours(result.err)}\n\n$ holdfast why run\n{why.out}", tmp_path)
    golden = SCREENS / f"{fault.replace(' ', '_').replace(chr(39), '')}.txt"
    head, _, text = golden.read_text().partition("\n\n") if golden.exists() else ("", "", "")
    if os.environ.get("WRITE_SCREENS"):
        golden.write_text(f"{head}\n\n{seen}")
        return
    asked = dict(line.split(": ", 1) for line in head.splitlines())
    assert set(asked) == set(QUESTIONS), f"{golden} has to begin with the five answers"
    terminal, _, _ = seen.partition("$ holdfast why run")
    for question, answer in asked.items():
        assert answer in terminal, f"{question}: {answer!r} is not to be found on the terminal:\n{terminal}"
    assert seen == text
