"""What recovery decides is what the next attempt is: real launchers, on devices that are only names."""

from __future__ import annotations

import os
import signal

import pytest

from holdfast.checkpoint.choose.ladder import AVOIDED
from holdfast.errors import ExitCode
from holdfast.journal import events
from holdfast.policy.budgets import MOST_IDENTICAL, RERUNS
from holdfast.record.attempts import HeadRecord, latest_head
from holdfast.record.history import rung_of
from kit.acting import ACTS, Place, stays
from kit.harness import REPO, holdfast, job, wait_until
from kit.nodes.nodes import cluster, finish_all

RUNG = str(REPO / "tests" / "scripts" / "train" / "train_rung.py")
ECC = "error:RuntimeError: CUDA error: uncorrectable ECC error encountered"


# -- exit code 16 -------------------------------------------------------------------------------------------


def test_a_wanted_rerun_gets_other_devices_and_ends_as_failed_validation(place: Place) -> None:
    """Scenario 13: code 16 is acted on, within its bound."""
    result = place.finish(
        place.launch("--nproc-per-node", "2", "--max-restarts", "100", acts="exit:16"),
        CUDA_VISIBLE_DEVICES="0,1",
    )
    assert result.code == ExitCode.VALIDATION_FAILED, result.text
    assert {(one.attempt, one.devices) for one in place.seen()} == {(1, "0,1"), (2, "1,0"), (3, "1,0")}
    assert len(place.attempts()) == 1 + RERUNS
    records = [record for record, _ in place.attempts()]
    assert [(one.placement, one.rotation) for one in records] == [("n[0,1]", 0), ("n[1,0]", 1), ("n[1,0]", 1)]
    assert [one.chosen for one in place.decisions()] == ["rotate", "restart", "stop"]


@pytest.mark.drill
def test_a_wanted_rerun_without_another_device_runs_here_again_and_ends_too(place: Place) -> None:
    """Two workers that share the only device are no reason to wait for more devices."""
    result = place.finish(
        place.launch("--nproc-per-node", "2", "--max-restarts", "100", acts="exit:16"),
        CUDA_VISIBLE_DEVICES="0",
    )
    assert result.code == ExitCode.VALIDATION_FAILED, result.text
    assert {(one.attempt, one.devices) for one in place.seen()} == {(1, "0"), (2, "0"), (3, "0")}
    assert [one.chosen for one in place.decisions()] == ["restart", "restart", "stop"]


@pytest.mark.drill
def test_with_one_device_a_node_a_rerun_changes_the_ranks_nodes(place: Place) -> None:
    with cluster(place.cwd, "2") as group:
        for name in "ab":
            flags = ("--no-preload",)
            wrap = place.wrap(CUDA_VISIBLE_DEVICES="0")
            group.start(name, *flags, acts="0@exit:16;ok", script=ACTS, wrap=wrap)
        finish_all(group, "a b")
    where = [{one.rank: one.node for one in place.seen(attempt)} for attempt in (1, 2)]
    assert sorted(where[0].values()) == ["a", "b"]
    assert where[1] == {0: where[0][1], 1: where[0][0]}, "each rank is on the other node"
    records = [record for record, _ in place.attempts()]
    assert [one.rotation for one in records] == [0, 1]
    assert records[1].placement == " ".join(f"{where[1][rank]}[0]" for rank in (0, 1))
    assert records[0].nodes == records[1].nodes, "the plain order stays what it was"


# -- devices and nodes at fault -----------------------------------------------------------------------------


@pytest.mark.drill
def test_a_device_that_names_itself_stays_out_until_it_is_readmitted(place: Place) -> None:
    acts = f"1@{ECC};exit:17;go?ok;ok"
    command = place.launch("--nproc-per-node", "2", acts=acts)
    three = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    first = place.finish(command, **three)
    assert first.code == ExitCode.VALIDATION_FAILED, first.text
    assert {one.devices for one in place.seen(1)} == {"0,1,2"}
    assert {one.devices for one in place.seen(2)} == {"0,2"}
    decision = place.decisions()[0]
    assert (decision.chosen, decision.details["cause"]) == ("exclude", "device")
    assert [(one["node"], one["device"]) for one in decision.details["excluded"]] == [("n", "1")]
    with job(command, cwd=place.cwd, env=place.environment(**three)) as running:
        begun = place.await_workers(running, 3, 2)
        assert {one.devices for one in begun} == {"0,2"}, "the next launch knows it too"
        (told,) = place.status()["exclusions"]
        assert (told["node"], told["device"], told["by"]) == ("n", "1", "recovery")
        assert "uncorrectable ECC" in told["reason"]
        place.control("readmit", "n", "--device", "1", "--reason", "swapped")
        place.control("exclude", "n", "--device", "0", "--reason", "its fan is loud", "--by", "alice")
        os.kill(begun[0].pid, signal.SIGKILL)
        assert running.wait(60).code == 0, running.output().text
    assert {one.devices for one in place.seen(4)} == {"1,2"}
    (told,) = place.status()["exclusions"]
    assert (told["node"], told["device"], told["by"]) == ("n", "0", "alice")


@pytest.mark.drill
def test_a_node_with_too_few_devices_left_parks_and_a_spare_takes_its_place(place: Place) -> None:
    with cluster(place.cwd, "1") as group:
        flags = ("--no-preload", "--nproc-per-node", "2")
        wrap = place.wrap(CUDA_VISIBLE_DEVICES="0,1")
        group.start("a", *flags, acts=f"1@spare?{ECC};go?ok", script=ACTS, wrap=wrap)
        group.wait_for_workers(1, 2)
        group.start("b", *flags, acts="go?ok", script=ACTS, wrap=wrap)
        group.said("b", "this one is a spare")
        place.go("spare")
        group.wait_for_workers(2, 2)
        assert {one.node for one in place.seen(2)} == {"b"}
        group.said("a", "waiting: this node is excluded: attempt 1: RuntimeError: CUDA error: uncorrectable")
        place.go()
        finish_all(group, "a b")
        assert "the run has ended" in group.agents["a"].output().err
    (decision,) = place.decisions()
    assert [(one["node"], one["device"]) for one in decision.details["excluded"]] == [("a", None)]
    assert place.outcomes() == ["failed", "finished"]


@pytest.mark.drill
@pytest.mark.parametrize("rank", [1, pytest.param(0, id="the leader")])
def test_a_node_at_fault_twice_makes_place_for_a_spare_and_may_come_back_as_one(
    place: Place, rank: int
) -> None:
    with cluster(place.cwd, "2") as group:
        for name in "abc":
            group.start(name, "--no-preload", acts="go?ok", script=ACTS, wrap=place.wrap())
        group.wait_for_workers(1, 2)
        bad = place.seen(1)[rank].node
        spare = next(iter(set("abc") - {one.node for one in place.seen(1)}))
        group.said(spare, "this one is a spare")
        for attempt in (1, 2):
            group.wait_for_workers(attempt, 2)
            assert spare not in {one.node for one in place.seen(attempt)}
            (pid,) = [one.pid for one in place.seen(attempt) if one.node == bad]
            os.kill(pid, signal.SIGKILL)
        group.wait_for_workers(3, 2)
        assert {one.node for one in place.seen(3)} == set("abc") - {bad}
        group.said(bad, "waiting: this node is excluded: attempt 2: death by SIGKILL (infrastructure)")
        place.control("readmit", bad, "--reason", "found who killed it")
        group.said(bad, "waiting: the group is running with 2 nodes; this one is a spare")
        place.go()
        finish_all(group, "a b c")
    assert [one.chosen for one in place.decisions()] == ["restart", "exclude"]
    assert place.outcomes() == ["failed", "failed", "finished"]
    assert place.seen(4) == []


@pytest.mark.drill
def test_a_node_too_few_is_waited_for_and_goes_on_when_it_is_back(place: Place) -> None:
    with cluster(place.cwd, "2") as group:
        for name in "ab":
            group.start(name, "--no-preload", acts="go?ok", script=ACTS, wrap=place.wrap())
        group.wait_for_workers(1, 2)
        lost, other = place.seen(1)[1].node, place.seen(1)[0].node
        group.agents[lost].signal(signal.SIGKILL)
        group.said(other, "waiting up to")
        stays(lambda: place.seen(2) == [], "started with a node too few")
        group.start(lost, "--no-preload", acts="go?ok", script=ACTS, wrap=place.wrap())
        group.wait_for_workers(2, 2)
        place.go()
        finish_all(group, "a b")
    (decision,) = place.decisions()
    assert (decision.chosen, decision.details["cause"]) == ("wait", "infrastructure")
    assert "1 usable nodes are available, 1 more are needed" in " ".join(decision.evidence)
    assert place.outcomes() == ["failed", "finished"]


@pytest.mark.drill
def test_a_node_too_few_for_too_long_ends_the_run_with_a_code_that_says_so(place: Place) -> None:
    patience = ("--no-preload", "--rdzv-conf", "is_host=0,join_timeout=20")
    with cluster(place.cwd, "2") as group:
        for name in "ab":
            group.start(name, *patience, acts="go?ok", script=ACTS, wrap=place.wrap())
        group.wait_for_workers(1, 2)
        lost, other = place.seen(1)[1].node, place.seen(1)[0].node
        group.agents[lost].signal(signal.SIGKILL)
        finish_all(group, other, ExitCode.NO_CAPACITY)
        assert f"here: {other}" in group.agents[other].output().err
    assert place.seen(2) == []


# -- bounds -------------------------------------------------------------------------------------------------


def test_a_hundred_restarts_do_not_mean_a_hundred_cycles(place: Place) -> None:
    """Case Megatron-LM#5281; the number is the policy's: of what is killed from outside, 1 + 3 attempts."""
    result = place.finish(place.launch("--max-restarts", "100", acts="kill"))
    assert result.code == ExitCode.NOTHING_LEFT, result.text
    assert [one.attempt for one in place.seen()] == [1, 2, 3, 4]
    assert MOST_IDENTICAL == 4
    assert "next: " in result.err
    wait_until(lambda: place.outcomes() == ["failed"] * 4, 5, "every attempt has its end")


# -- a lower rung -------------------------------------------------------------------------------------------


@pytest.mark.drill
def test_an_error_that_repeats_after_a_resume_is_met_one_rung_lower(place: Place) -> None:
    """The newest checkpoint may be the cause: the next attempt leaves it out, and says so."""
    flags = ("--max-restarts", "100", "--set", "launch.node_name=n")
    result = place.finish(holdfast("run", "--run-dir", "run", *flags, RUNG, "bad", "log"), timeout=120)
    assert result.code == 0, result.text
    lines = [line.split()[:2] for line in (place.cwd / "log").read_text().splitlines()]
    assert lines == [["1", "1"], ["2", "7"], ["3", "4"]], "attempt and first step"
    decisions = place.decisions()
    assert [(one.chosen, one.details["cause"]) for one in decisions] == [
        ("restart", "job"),
        ("lower_rung", "job"),
    ]
    (avoided,) = decisions[1].details["avoid"]
    assert avoided.startswith("step_00000006-")
    (rejected,) = place.journalled(events.RungRejected)
    assert (rejected.checkpoint, rejected.step, rejected.reasons) == (avoided, 6, [AVOIDED])
    head = latest_head(place.run())
    assert head is not None
    assert (head.attempt, head.step) == (3, 3)
    assert "restarting from the older checkpoint at step 3" in result.err


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (None, ""),
        (HeadRecord(attempt=1, checkpoint=None, step=0), ""),
        (HeadRecord(attempt=2, checkpoint="3fa9c1d2", step=120), "step_00000120-3fa9c1d2"),
        (HeadRecord(attempt=2, checkpoint=None, step=7, source="/else/where/ckpt-7"), "ckpt-7"),
    ],
)
def test_what_an_attempt_came_from_has_its_name_on_the_ladder(head: HeadRecord | None, name: str) -> None:
    """By another name nothing below it is found, and what is to be avoided is not."""
    assert rung_of(head) == name
