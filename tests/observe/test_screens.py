"""Golden screens of faults that one machine can have: see golden.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.golden import compare
from kit.harness import REPO, finish, holdfast

SCRIPT = REPO / "tests" / "scripts" / "faults" / "meet_a_fault.py"
SCRIPT_NAMED = [("(\\.\\./)*" + str(SCRIPT).lstrip("/"), "train.py"), ("/train.py", "train.py")]
STEPS_DIFFER = [(r"saved up to step \d+", "saved up to step N"), (r"Steps: \d+", "Steps: N")]
"""A stop is agreed on after whichever step the ranks are in."""
EITHER_COSTLIEST = [(r"(?s)(The costliest of 3 incidents).*?(?=\nSteps: )", r"\1 …")]
"""Two incidents that cost about the same: which of them cost more depends on the machine."""
DIFFER = {"operator's stop": STEPS_DIFFER, "exception again and again": EITHER_COSTLIEST}
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


IN_THE_SUITE = ("corrupt newest", "import error", "NaN batch")
"""The others are drills: each is a launch of ten seconds and more."""


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[] if one in IN_THE_SUITE else pytest.mark.drill) for one in CASES]
)
def test_what_is_seen_of(fault: str, tmp_path: Path) -> None:
    code, settings = CASES[fault]
    result = finish(holdfast("run", *ALWAYS, *settings, str(SCRIPT), fault), cwd=tmp_path, timeout=120)
    assert result.code == code, result.text
    compare(fault, result.err, tmp_path, [*SCRIPT_NAMED, *DIFFER.get(fault, [])])
