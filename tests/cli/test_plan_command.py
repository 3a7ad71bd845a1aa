"""`holdfast plan`: what a journal says about costs, and what the command makes of it."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.account.incidents import observed_costs, spread
from holdfast.cli.app import app
from holdfast.config.sources import load
from holdfast.errors import UsageError
from holdfast.journal.events import CadenceChosen, SaveCommitted
from holdfast.policy.upkeep import DEFAULT_MTBF, DEFAULT_RESTART, Costs, choose_interval, overhead
from kit.harness import finish, holdfast
from kit.journals import Journal, killed_and_corrupted

GIVEN = ("--step-seconds", "0.4", "--save-seconds", "12", "--blocked-seconds", "0.3")


def said(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*arguments, "--json"))
    return found


def refusal(*arguments: str | Path) -> str:
    """The message of a refusal, which `holdfast` ends with code 2 for (see the last test but one)."""
    with pytest.raises(UsageError) as caught:
        said(*arguments)
    assert int(caught.value.exit_code) == 2
    return str(caught.value)


# --- what a journal says


def test_a_journal_gives_the_cost_of_steps_saves_and_failures() -> None:
    run = killed_and_corrupted()
    seen = observed_costs(run.lines)
    assert seen.step is not None
    assert seen.step.median == seen.step.p90 == 0.1
    assert seen.step.count == 27 + 34 + 20
    assert seen.blocked == seen.commit
    assert seen.commit is not None
    assert (seen.commit.median, seen.commit.count) == (0.3, 5)
    assert seen.failures == 2
    whole = run.lines[-1].at - run.lines[0].at
    assert 0.8 * whole < seen.running < whole
    assert seen.down is not None
    assert seen.down.count == 2
    assert 1.0 < seen.down.median < 2.5


def test_an_attempt_that_never_trained_is_neither_running_time_nor_a_failure_of_training() -> None:
    run = Journal()
    run.start(resume=None).pass_time(500).fail(message="ImportError: no module").recover()
    run.start().steps(1, 20)
    run.save(20)
    run.steps(21, 30)
    seen = observed_costs(run.lines)
    assert seen.failures == 0
    assert seen.running < 10


def test_the_present_interval_is_what_was_chosen_or_the_commonest_distance_between_saves() -> None:
    run = Journal()
    run.start()
    for step in (10, 20, 30):
        run.steps(step - 9, step)
        run.save(step)
    run.steps(31, 34)
    run.save(34)  # the last one, at the end
    assert observed_costs(run.lines).interval == 10
    run.write(CadenceChosen(interval=77, seconds=7.7, overhead=0.01, mtbf=3600.0, evidence=["x"]))
    assert observed_costs(run.lines).interval == 77


def test_an_empty_journal_says_nothing() -> None:
    seen = observed_costs([])
    assert (seen.step, seen.blocked, seen.commit, seen.down, seen.interval) == (None,) * 5
    assert (seen.running, seen.failures) == (0.0, 0)


def test_a_spread_is_the_median_and_what_nine_in_ten_stay_within() -> None:
    found = spread([float(n) for n in range(1, 11)])
    assert found is not None
    assert (found.median, found.p90, found.count) == (5.5, 9.0, 10)
    assert spread([4.0]) == spread([4.0])
    assert spread([]) is None


# --- what the command says


def test_numbers_alone_give_a_plan() -> None:
    found = document(*GIVEN, "--mtbf", "6", "--restart-seconds", "60", "--interval", "5000")
    costs = Costs(step=0.4, blocked=0.3, commit=12.0, mtbf=6 * 3600.0, restart=60.0)
    chosen = choose_interval(costs)
    assert found["interval"] == {"steps": chosen.interval_steps, "seconds": chosen.interval_seconds}
    assert found["overhead"] == chosen.expected_overhead
    assert found["lost_seconds_per_day"] == pytest.approx(86400 * chosen.expected_overhead)
    assert found["optima"] == {
        "young": chosen.young,
        "daly": chosen.daly,
        "least_overhead": chosen.optimal,
    }
    assert {name: entry["source"] for name, entry in found["costs"].items()} == dict.fromkeys(
        ("step", "blocked", "commit", "restart", "mtbf"), "given"
    )
    table = {row["interval"]: row for row in found["table"]}
    assert list(table) == ["half", "chosen", "double", "four times", "present"]
    assert table["present"]["steps"] == 5000
    assert table["double"]["overhead"] == overhead(2 * chosen.interval_seconds, costs)
    assert min(table.values(), key=lambda row: row["overhead"])["interval"] == "chosen"
    assert found["warnings"] == []


def test_both_cadences_are_planned_where_the_cost_of_local_saves_is_known() -> None:
    assert document(*GIVEN, "--mtbf", "6")["local"] is None
    local = ("--local-save-seconds", "0.9", "--local-blocked-seconds", "0.014")
    found = document(*GIVEN, "--mtbf", "6", *local)["local"]
    assert found["interval"]["steps"] == 4, "0.014 s of 0.4 s are 3.5 %: every fourth step"
    assert found["share"] < 0.01
    assert (
        document(*GIVEN, "--mtbf", "6", *local, "--local-share", "0.05")["local"]["interval"]["steps"] == 3
    ), "and no sooner than it is committed"
    text = said(*GIVEN, "--mtbf", "6", *local)
    assert "Save locally every 4 steps (1.6 s): 0.87% of the time, of at most 1.00%" in text
    assert 'non_persistent_save_interval = "auto"' in text
    assert "--local-blocked-seconds needed too" in refusal(*GIVEN, "--mtbf", "6", *local[:2])
    assert "--local-share 0.9" in refusal(*GIVEN, "--mtbf", "6", *local, "--local-share", "0.9")


def test_a_journal_tells_local_saves_from_those_to_the_root() -> None:
    run = Journal()
    run.start().steps(1, 20)
    for step in (5, 10, 15, 20):
        told = {"bytes": 1, "files": 1, "blocked_seconds": 0.01, "parent": None}
        if step == 20:
            run.write(
                SaveCommitted(checkpoint=f"step_{step:08d}-a", step=step, seconds=0.2, tier="local", **told)
            )
            run.write(
                SaveCommitted(checkpoint=f"step_{step:08d}-a", step=step, seconds=3.0, tier="global", **told)
            )
        else:
            run.write(
                SaveCommitted(checkpoint=f"step_{step:08d}-a", step=step, seconds=0.1, tier="local", **told)
            )
    run.write(CadenceChosen(interval=5, seconds=0.5, overhead=0.01, mtbf=0.0, evidence=["x"], tier="local"))
    seen = observed_costs(run.lines)
    assert seen.local_commit is not None
    assert (seen.local_commit.median, seen.local_commit.count, seen.local_interval) == (0.1, 3, 5)
    assert seen.interval != 5, "that of the root is another"


def test_what_to_set_is_toml_that_the_settings_accept(tmp_path: Path) -> None:
    found = document(*GIVEN, "--mtbf", "6")
    for name, text in found["set"].items():
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        loaded = load(file, environ={}).settings.checkpoint
        assert loaded.interval == (found["interval"]["steps"] if name == "fixed" else "auto")
        assert loaded.mtbf_hours == (0 if name == "fixed" else 6)
    assert tomllib.loads(document(*GIVEN)["set"]["auto"]) == {"checkpoint": {"interval": "auto"}}


def test_nodes_share_the_rate_of_failures() -> None:
    found = document(*GIVEN, "--nodes", "100", "--node-mtbf", "5000")
    assert found["costs"]["mtbf"] == {
        "seconds": 50 * 3600.0,
        "source": "given: 100 nodes, each with an MTBF of 5000 h",
    }


def test_what_is_assumed_is_said() -> None:
    costs = document("--step-seconds", "1", "--save-seconds", "5")["costs"]
    assert costs["mtbf"]["seconds"] == DEFAULT_MTBF
    assert costs["mtbf"]["source"].startswith("assumed")
    assert costs["restart"]["seconds"] == DEFAULT_RESTART
    assert costs["restart"]["source"].startswith("assumed")
    assert costs["blocked"]["seconds"] == 5.0
    assert "--blocked-seconds" in costs["blocked"]["source"]


def test_a_run_gives_its_numbers_and_flags_override_them(tmp_path: Path) -> None:
    run_dir = killed_and_corrupted().store(tmp_path / "run")
    found = document(run_dir)
    assert found["costs"]["step"] == {
        "seconds": 0.1,
        "source": "observed: median of 81 steps, 9 in 10 within 100 ms",
    }
    assert "2 failures in" in found["costs"]["mtbf"]["source"]
    assert found["costs"]["restart"]["source"].startswith("observed")
    assert found["table"][-1]["interval"] == "present"
    given = document(run_dir, "--step-seconds", "2", "--mtbf", "1", "--interval", "7")
    assert given["costs"]["step"] == {"seconds": 2.0, "source": "given"}
    assert given["costs"]["commit"]["source"].startswith("observed")
    assert given["costs"]["mtbf"] == {"seconds": 3600.0, "source": "given"}
    assert given["table"][-1]["steps"] == 7


def test_a_given_save_time_below_what_was_observed_also_bounds_the_blocked_time(tmp_path: Path) -> None:
    run_dir = killed_and_corrupted().store(tmp_path / "run")
    costs = document(run_dir, "--save-seconds", "0.05")["costs"]
    assert (costs["commit"]["seconds"], costs["blocked"]["seconds"]) == (0.05, 0.05)
    costs = document(run_dir, "--blocked-seconds", "4")["costs"]
    assert (costs["commit"]["seconds"], costs["blocked"]["seconds"]) == (4.0, 4.0)


def test_warnings_are_of_the_chosen_and_of_the_present_interval() -> None:
    found = document(*GIVEN, "--mtbf", "1", "--interval", "9000")
    assert len(found["warnings"]) == 1
    assert found["warnings"][0].startswith(
        "at present, the interval of 9000 steps (1 h 00 min) is not shorter"
    )
    slow = document("--step-seconds", "1", "--save-seconds", "60", "--mtbf", "0.2")
    assert any(
        text.startswith("at the chosen interval, saving holds training up") for text in slow["warnings"]
    )


def test_people_get_the_numbers_the_three_optima_the_table_and_what_to_set() -> None:
    text = said(*GIVEN, "--interval", "9000")
    for part in (
        "a save is committed after              12.0 s   given",
        "Young 1974                       3 min 48 s",
        "Daly 2006                        3 min 47 s",
        "least expected overhead          3 min 47 s",
        "Save every 569 steps (3 min 48 s). Expected overhead: 0.42%, or 5 min 59 s a day.",
        "four times             2276",
        "present                9000",
        "  [checkpoint]\n  interval = 569\n",
        '  interval = "auto"\n',
    ):
        assert part in text, (part, text)


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "--step-seconds and --save-seconds needed: there is no RUN_DIR"),
        (("--step-seconds", "1", "--blocked-seconds", "1"), "--save-seconds needed"),
        ((*GIVEN, "--nodes", "5"), "belong together"),
        ((*GIVEN, "--node-mtbf", "5"), "belong together"),
        ((*GIVEN, "--node-mtbf", "5", "--nodes", "2", "--mtbf", "9"), "give one of them"),
        ((*GIVEN, "--mtbf", "0"), "--mtbf 0: give a number above 0"),
        ((*GIVEN, "--mtbf", "nan"), "--mtbf nan: give a number above 0"),
        ((*GIVEN, "--mtbf", "inf", "--restart-seconds", "-1"), "--mtbf inf, --restart-seconds -1"),
        (("--step-seconds", "1", "--save-seconds", "1", "--blocked-seconds", "2"), "is more than --save"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_flag_to_give(
    arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refusal(*arguments)


def test_a_run_that_has_not_saved_yet_needs_the_save_time(tmp_path: Path) -> None:
    run_dir = Journal().start().steps(1, 10).store(tmp_path / "run")
    assert "--save-seconds needed: the journal has not measured it yet" in refusal(run_dir)
    assert document(run_dir, "--save-seconds", "3")["costs"]["step"]["source"].startswith("observed")
    assert "is not a run directory" in refusal(tmp_path)


def test_a_refusal_is_one_line_and_code_2(tmp_path: Path) -> None:
    result = finish(holdfast("plan", "--save-seconds", "5"), cwd=tmp_path)
    assert result.code == 2
    assert result.out == ""
    assert result.err == "holdfast: error: --step-seconds needed: there is no RUN_DIR to observe\n"


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    run_dir = killed_and_corrupted().store(tmp_path / "run")
    code = (
        "import sys; from holdfast.cli.app import app; "
        f"app(['plan', {str(run_dir)!r}], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    result = finish([sys.executable, "-c", code], cwd=tmp_path)
    assert result.code == 0, result.text
    assert "Save every" in result.out
