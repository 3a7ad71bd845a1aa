"""What the policies find out about rejected steps is what real launchers then do, write down and say."""

from __future__ import annotations

import pytest

from holdfast.errors import ExitCode
from holdfast.journal import events
from holdfast.policy.results import Trial, Window
from holdfast.record.operator import skips
from holdfast.record.standing import Standing, StandingBook
from kit.acting import Place
from kit.commands import command
from kit.harness import REPO, Result, holdfast

TRAIN = str(REPO / "tests" / "scripts" / "faults" / "pretend_training.py")


def train(place: Place, acts: str, *flags: str, devices: str = "0,1") -> Result:
    plain = ("--no-preload", "--max-restarts", "100", "--set", "launch.node_name=n", *flags)
    argv = holdfast("run", "--run-dir", "run", *plain, TRAIN, acts)
    return place.finish(argv, timeout=120, CUDA_VISIBLE_DEVICES=devices)


def firsts(place: Place) -> list[int]:
    """The first step of each attempt."""
    return [int(line.split()[1]) for line in (place.cwd / "log").read_text().splitlines()]


def chosen(place: Place) -> list[str]:
    return [one.chosen for one in place.decisions()]


def standings(place: Place) -> list[tuple[str, str]]:
    """The changes in the journal: the checkpoint's step, and its new standing."""
    return [
        (one.checkpoint.partition("-")[0].lstrip("step_0"), one.standing)
        for one in place.journalled(events.StandingChanged)
    ]


# -- devices ------------------------------------------------------------------------------------------------


def test_a_fault_that_follows_the_device_excludes_it_and_one_that_cannot_be_spared_stops(
    place: Place,
) -> None:
    """Scenario 23; then the ranks themselves accuse a device, and none is left for it."""
    acts = "reject:7:device=1;reject:7:device=1;accuse:9:0"
    result = place.finish(place.launch("--nproc-per-node", "3", acts=acts), CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert result.code == ExitCode.VALIDATION_FAILED, result.text
    assert {(one.attempt, one.devices) for one in place.seen()} == {
        (1, "0,1,2,3"),
        (2, "1,2,3,0"),
        (3, "2,3,0"),
    }
    assert chosen(place) == ["rotate", "exclude", "stop"]
    verdicts = [(one.verdict, one.step, one.node, one.device) for one in place.journalled(events.Verdict)]
    assert verdicts == [("device", 7, "n", "1")], "of the other one the ranks themselves tell"
    (told,) = place.status()["exclusions"]
    assert (told["node"], told["device"]) == ("n", "1")
    followed = (
        "because of device 1 of n: the fault follows it: rank 1 failed on it in attempt 1, and not elsewhere"
    )
    assert followed in told["reason"]
    assert "The run cannot do without it" in result.err
    assert "restarting without device 1 of n " in result.err, result.text
    assert "why:  the fault follows the device to whichever rank uses it" in result.err
    first, second, third = place.told()
    assert first.orders.rerun is None
    assert second.orders.rerun is not None
    assert (second.orders.rerun.step, [one.rank for one in second.orders.rerun.bad]) == (7, [1])
    assert second.orders.rerun.can_exclude
    assert third.orders.rerun is None


# -- checkpoints and data -----------------------------------------------------------------------------------


@pytest.mark.drill
def test_a_fault_that_stays_with_the_work_ends_in_an_acquittal_and_the_data_are_left_out_if_allowed(
    place: Place,
) -> None:
    """Scenarios 3 and 4: rotate, suspect, lower rung; the trial fails at the same step.

    Then nan_policy applies to the step. These ranks know no policy: they reject it again, which ends it.
    """
    result = train(place, "kill@8;reject@8;reject@8;reject@8;reject@8")
    assert result.code == ExitCode.VALIDATION_FAILED, result.text
    assert firsts(place) == [1, 7, 7, 4, 7], "what was acquitted is taken again"
    assert chosen(place) == ["restart", "rotate", "lower_rung", "restart", "stop"]
    assert standings(place) == [("6", "suspect"), ("6", "acquitted")]
    assert [one.verdict for one in place.journalled(events.Verdict)] == ["reproducible"] * 3
    told = place.told()
    (suspect,) = place.decisions()[2].details["suspect"]
    trial = Trial(suspects=[suspect], until=8)
    assert [one.orders.trial for one in told] == [None, None, None, trial, None]
    assert [one.orders.rerun is not None for one in told] == [False, False, True, False, False]
    listed = command("ckpt", "ls", place.cwd / "run").out
    assert f"{suspect}: acquitted: " in listed
    assert "fails at step 8 too" in listed
    assert "the cause is the data, the device or the job" in result.err
    assert skips(place.run()) == []
    allowed = ("--set", "validation.skip_bad_data=true")
    again = train(place, "ok;ok;ok;ok;ok;reject@8;ok", *allowed)
    assert again.code == 0, again.text
    assert chosen(place)[5:] == ["restart"], "what earlier launches found out still holds"
    assert skips(place.run()) == [Window(0, 7, 7)]
    assert standings(place)[2:] == []


@pytest.mark.drill
def test_a_new_launch_goes_on_with_the_trial_and_a_suspect_is_shown(place: Place) -> None:
    """Two breaches of probation. The launch then ends for want of restarts; the next one knows."""
    result = train(place, "kill@8;breach@7;breach@7;kill@5", "--max-restarts", "3")
    assert result.code == ExitCode.BUDGET_SPENT, result.text
    assert chosen(place) == ["restart", "rotate", "lower_rung", "stop"]
    (suspect,) = place.decisions()[2].details["suspect"]
    listed = command("ckpt", "ls", place.cwd / "run").out
    assert f"{suspect}: suspect: " in listed
    where = command("ckpt", "locate", place.cwd / "run")
    assert f"{suspect}" in where.out
    assert "suspect: " in where.out
    (shown,) = place.status()["suspects"]
    assert shown["checkpoint"] == suspect
    assert "does not go on from where it was" in " ".join(shown["evidence"])
    lines = command("status", place.cwd / "run").out.splitlines()
    (line,) = [line for line in lines if line.startswith("suspect")]
    assert suspect in line
    assert "may be the cause" in line
    again = train(place, "ok")
    assert again.code == 0, again.text
    assert firsts(place) == [1, 7, 7, 4, 4]
    assert place.told()[-1].orders.trial == Trial(suspects=[suspect], until=7)
    assert StandingBook(place.run()).of(suspect[14:]) is Standing.SUSPECT, "ranks condemn, not launchers"
