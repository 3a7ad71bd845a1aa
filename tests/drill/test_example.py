"""The examples: short, with little of Holdfast in them, and working in all the ways they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.drill.compare import timeline
from holdfast.journal.events import AttemptStarted, Resumed
from holdfast.journal.reader import read_journal
from kit.harness import REPO, finish, holdfast, python

EXAMPLE = REPO / "examples" / "train_gpt.py"
IN_PLACE = REPO / "examples" / "restart_in_place.py"
SMALL = ["--layers", "1", "--dim", "32", "--device", "cpu"]


def test_the_example_is_short_and_holdfast_is_a_small_part_of_it() -> None:
    lines = EXAMPLE.read_text().splitlines()
    _, _, code = EXAMPLE.read_text().split('"""', 2)
    ours = [line for line in code.splitlines() if re.search(r"\bholdfast\b|\brun\b", line)]
    assert len(lines) < 150
    assert 0 < len(ours) < 10, ours


def test_under_plain_python_it_trains_and_a_second_start_goes_on(tmp_path: Path) -> None:
    for steps in ("4", "6"):
        ended = finish(python(EXAMPLE, *SMALL, "--steps", steps), cwd=tmp_path)
        assert ended.code == 0, ended.text
    lines = read_journal(tmp_path / "holdfast-run" / "journal")
    done = timeline(lines)
    assert list(done) == [(step, 0) for step in range(1, 7)]
    assert all(one.loss is not None and one.samples for one in done.values())
    assert done[6, 0].loss < done[1, 0].loss  # type: ignore[operator]
    assert [line.body.step for line in lines if isinstance(line.body, Resumed)] == [0, 4]


@pytest.mark.drill
def test_under_holdfast_run_it_trains_with_fsdp(tmp_path: Path) -> None:
    command = holdfast("run", "--nproc-per-node=2", "--run-dir=r", str(EXAMPLE), *SMALL, "--steps=3")
    ended = finish([*command, "--parallel=fsdp"], cwd=tmp_path)
    assert ended.code == 0, ended.text
    lines = read_journal(tmp_path / "r" / "journal")
    assert len(timeline(lines)) == 6
    assert [line.body.world_size for line in lines if isinstance(line.body, AttemptStarted)] == [2]


@pytest.mark.drill
def test_a_function_that_starts_again_in_place_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    said: dict[str, list[str]] = {}
    for fail_at in ("0", "12"):
        place = tmp_path / fail_at
        place.mkdir()
        command = python(IN_PLACE, "--steps=20", f"--fail-at={fail_at}")
        ended = finish(command, cwd=place, env={"HOLDFAST_INPROCESS_ENABLED": "true"})
        assert ended.code == 0, ended.text
        said[fail_at] = ended.out.splitlines()
    undisturbed, restarted = said["0"], said["12"]
    processes = [line.rpartition(" ")[2] for line in restarted if line.startswith("rank 0 of 1: call")]
    assert len(processes) == 2
    assert len(set(processes)) == 1, "the same process"
    assert undisturbed[-1].endswith("1 calls")
    assert restarted[-1] == undisturbed[-1].replace("1 calls", "2 calls"), "the same loss"
