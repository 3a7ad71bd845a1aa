"""What is wrong is found out: every injected truth ends as the policy says, with the right verdict.

A diagonal of the table in docs/guides/validation.md runs with the tests, all of it as a drill, which also
compares the table with what it saw. Scenarios 2, 3, 4, 20 and 22.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.journal import events
from kit.harness import REPO, finish, holdfast
from kit.runs import events_in
from kit.worlds import outcomes
from kit.worlds.outcomes import ALL, BAD, DIAGONAL, EXPECTED, Case, Outcome, losses, play

DOC = REPO / "docs" / "guides" / "validation.md"


def read(cwd: Path) -> list[object]:
    return events_in(cwd / "run")


def check(case: Case, seen: Outcome) -> None:
    verdict, code = EXPECTED[case.truth]
    assert seen.code == code, seen.result.text
    assert seen.verdicts[-1:] == [verdict], (seen.verdicts, seen.result.text)
    assert seen.attempts <= 1 + 3, "the default number of restarts is enough for any one truth"
    if case.truth != "device":
        assert seen.excluded == [], "no device is blamed for what it did not do"
    if case.truth != "checkpoint":
        assert seen.condemned == [], "no checkpoint is blamed for what it did not do"


def in_the_docs(case: Case) -> str:
    (row,) = [line for line in DOC.read_text().splitlines() if line.startswith(f"| {case.name} |")]
    return row


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.drill] if case.wrap == "fsdp" else [])
        for case in DIAGONAL
    ],
)
def test_a_diagonal_of_the_table_of_outcomes(tmp_path: Path, case: Case) -> None:
    seen = play(case, tmp_path)
    check(case, seen)
    assert seen.row(case) == in_the_docs(case)


@pytest.mark.drill
@pytest.mark.parametrize("case", [case for case in ALL if case not in DIAGONAL], ids=lambda case: case.name)
def test_the_rest_of_the_table_of_outcomes(tmp_path: Path, case: Case) -> None:
    seen = play(case, tmp_path)
    print(seen.row(case))
    check(case, seen)
    assert seen.row(case) == in_the_docs(case)


AS_THEY_COME = {"validation.rerun_mode": "disabled"}


@pytest.mark.parametrize(
    ("case", "attempts"),
    [
        pytest.param(
            Case("data", "none", devices="", settings=AS_THEY_COME, kill=14, every=12), 3,
            marks=pytest.mark.drill, id="one checkpoint",
        ),
        pytest.param(
            Case("data", "none", devices="", settings=AS_THEY_COME, kill=14), 4,
            marks=pytest.mark.drill, id="one device",
        ),
        pytest.param(
            Case("data", "ddp", settings=AS_THEY_COME, kill=14, every=12), 3,
            marks=pytest.mark.drill, id="one checkpoint, other devices",
        ),
        pytest.param(
            Case("data", "ddp", settings=AS_THEY_COME, kill=14), 4, marks=pytest.mark.drill, id="DDP"
        ),
    ],
)  # fmt: skip
def test_a_nan_batch_that_the_policy_tolerates_is_dropped_after_a_crash_too(
    tmp_path: Path, case: Case, attempts: int
) -> None:
    """Point 4: with the settings as they come, the crash costs a restart and what is found out the others."""
    seen = play(case, tmp_path)
    assert seen.code == 0, seen.result.text
    assert (seen.dropped, seen.condemned, seen.excluded) == ([BAD], [], []), seen.result.text
    assert seen.acquitted == ([12] if case.every == 6 else [])
    assert seen.attempts == attempts


@pytest.mark.drill
def test_a_bad_device_that_is_the_only_one_ends_in_few_cycles(tmp_path: Path) -> None:
    """Scenario 3: max_restarts of 100 does not mean 100 identical cycles."""
    seen = play(Case("device", "none", devices="0"), tmp_path, "--max-restarts", "100")
    assert seen.code == 0, seen.result.text
    assert seen.attempts <= 4, seen.result.text
    assert (seen.condemned, seen.excluded) == ([], []), "with nothing to compare with, nobody is to blame"
    assert seen.dropped == [BAD], "and the step is left to nan_policy"


@pytest.mark.drill
def test_data_that_fails_everywhere_is_left_out_where_that_is_allowed(tmp_path: Path) -> None:
    seen = play(Case("data", "ddp", skip_bad_data=True), tmp_path)
    assert seen.code == 0, seen.result.text
    assert (seen.condemned, seen.excluded) == ([], [])
    steps = losses(tmp_path)
    bad = {str(i) for i in range((BAD - 1) * 8, BAD * 8)}
    used = {i.strip() for one in steps.values() for i in one[one.index("[") + 1 : -1].split(",")}
    assert not bad & used, "the samples of the bad step are used by nobody"
    assert max(step for _, step in steps) == 24


@pytest.mark.drill
def test_an_honest_spike_costs_the_re_runs_and_nothing_else(tmp_path: Path) -> None:
    """A false alarm: the same large value everywhere, so it is accepted."""
    watch = {"validation.check_for_spiky_loss": "true"}
    seen = play(Case("spike", "ddp", settings=watch), tmp_path)
    assert seen.code == 0, seen.result.text
    assert set(seen.verdicts) == {"reproducible"}
    assert (seen.condemned, seen.acquitted, seen.excluded) == ([], [], [])
    assert seen.attempts <= 3, seen.result.text


@pytest.mark.drill
def test_a_nan_on_one_rank_drops_the_step_on_all_and_a_long_row_goes_back_past_the_newest(
    tmp_path: Path,
) -> None:
    """Scenario 20: the newest checkpoint holds what makes every later step a NaN on one rank."""
    policy = {
        "validation.rerun_mode": "disabled",
        "validation.nan_policy": "rollback",
        "validation.max_consecutive": "4",
    }
    seen = play(Case("burnt", "ddp", settings=policy), tmp_path)
    assert seen.code == 0, seen.result.text
    assert seen.attempts == 2
    resumed = [body for body in read(tmp_path) if isinstance(body, events.Resumed)]
    assert [one.step for one in resumed] == [0, 6], "back past the checkpoint of step 12"
    dropped = [body for body in read(tmp_path) if isinstance(body, events.StepRejected)]
    assert {one.step for one in dropped} == {13, 14, 15, 16}
    digests = [(tmp_path / "out" / f"params{rank}").read_text() for rank in (0, 1)]
    assert all(digests)


@pytest.mark.drill
@pytest.mark.parametrize("bad", ["state", "data", "memory"])
def test_an_optimizer_zeroed_in_a_checkpoint_is_settled_by_the_rung_below(tmp_path: Path, bad: str) -> None:
    """Scenario 22, with the settings as they come: nothing is NaN, only the loss watch can see it.

    Point 15: memory that was damaged once, after the load, is no fault of the checkpoint: it passes the
    second time, and nothing is ever suspect.
    """
    argv = holdfast("run", "--run-dir", "run", str(REPO / "tests" / "scripts" / "train" / "train_zeroed.py"))
    result = finish(argv, cwd=tmp_path, env={"ZEROED_BAD": bad, "CUDA_VISIBLE_DEVICES": "0,1"}, timeout=120)
    seen = outcomes.outcome(tmp_path / "run", result)
    assert seen.code == 0, result.text
    ends = {"state": ([80], []), "data": ([], [80]), "memory": ([], [])}
    assert (seen.condemned, seen.acquitted) == ends[bad]
    assert seen.excluded == []
    if bad != "memory":
        assert seen.attempts == 4, "the crash, a breach, the same again, and the rung below"
        return
    assert seen.attempts == 3
    assert seen.verdicts == ["transient"]
    changed = {one.standing for one in read(tmp_path) if isinstance(one, events.StandingChanged)}
    assert changed == {"proven"}


@pytest.mark.drill
def test_what_was_rejected_once_or_moved_leaves_no_trace_in_the_results(tmp_path: Path) -> None:
    """Exactness: with a passing fault, and with a bad device, the run ends bitwise as it would have."""
    for name in ("plain", "transient", "device"):
        (tmp_path / name).mkdir()
    plain = outcomes.Case("none", "ddp")
    ended = play(plain, tmp_path / "plain")
    assert (ended.code, ended.attempts, ended.verdicts) == (0, 1, []), ended.result.text
    for truth in ("transient", "device"):
        seen = play(Case(truth, "ddp"), tmp_path / truth)
        assert seen.code == 0, seen.result.text
        assert losses(tmp_path / truth) == losses(tmp_path / "plain")
        for rank in (0, 1):
            params = [(tmp_path / name / "out" / f"params{rank}").read_text() for name in (truth, "plain")]
            assert params[0] == params[1]
