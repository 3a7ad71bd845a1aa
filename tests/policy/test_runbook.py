"""The runbook's judgements: total, careful, and each with the code that says why."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ExitCode
from holdfast.policy.placement import Cluster, Exclusion
from holdfast.policy.runbook import (
    STANDING,
    Facts,
    Finding,
    NodeOffer,
    Side,
    Stage,
    StageMark,
    StopFacts,
    StorageFacts,
    Suspected,
    capacity,
    classify,
    exit_code,
    nodes_to_drain,
    side_of,
    storage,
    trigger,
    why_not_started,
    world,
)
from holdfast.policy.signs import Cause
from holdfast.recover.resume_check import BeforeResume, Correctness, SinceResume, is_correct, judge

STATES = (
    "new", "starting", "running", "stopping", "restarting", "paused", "finished", "failed", "stopped", "lost",
)  # fmt: skip

facts = st.builds(
    Facts,
    state=st.sampled_from(STATES),
    attempt=st.integers(0, 5),
    exit_code=st.none() | st.integers(-15, 160),
    cause=st.sampled_from(["", "another release's", *Cause]),
    step=st.none() | st.integers(0, 100),
    saved_step=st.none() | st.integers(0, 100),
    action=st.sampled_from(["", "stop", "restart", "another release's"]),
    decided_code=st.integers(0, 40),
    stop=st.none()
    | st.builds(
        StopFacts,
        source=st.sampled_from(["signal", "operator"]),
        detail=st.sampled_from(["SIGTERM", "SIGINT"]),
    ),
    forgiven=st.booleans(),
)


@given(facts)
def test_every_state_gets_an_answer_and_only_a_live_run_or_a_decided_stop_stands_in_the_way(
    told: Facts,
) -> None:
    first, second = trigger(told), classify(told)
    assert first.text
    assert second.text
    dead = ("new", "finished", "failed", "stopped", "lost")
    assert (first.code == ExitCode.RUN_IS_LIVE) == (told.state not in dead)
    stands = told.state == "failed" and told.action == "stop" and told.decided_code in STANDING
    assert second.code == (told.decided_code if stands and not told.forgiven else 0)
    assert (second.mark is StageMark.PROBLEM) == bool(second.code)
    assert not second.code or second.next
    assert side_of(told) in set(Side)


@pytest.mark.parametrize("code", sorted(STANDING))
def test_a_decided_stop_stands_until_it_is_forgiven(code: int) -> None:
    told = Facts(state="failed", action="stop", decided_code=code, reason="why")
    found = classify(told)
    assert (found.code, found.mark) == (code, StageMark.PROBLEM)
    assert "reset-budget" in found.next
    forgiven = classify(msgspec.structs.replace(told, forgiven=True))
    assert (forgiven.code, forgiven.mark) == (0, StageMark.NOTE)


@pytest.mark.parametrize(
    ("verdict", "side"),
    [("reproducible", Side.DATA), ("device", Side.INFRASTRUCTURE), ("", Side.UNKNOWN)],
)
def test_a_verdict_says_more_than_what_it_looked_like_at_first(verdict: str, side: Side) -> None:
    """A rejected step is classified as unknown; what came of running it again elsewhere is not."""
    told = Facts(state="failed", cause="unknown", action="stop", decided_code=17, verdict=verdict)
    assert side_of(told) is side
    assert classify(told).text.startswith(f"{side}: ")


def test_this_machine_takes_the_place_of_a_node_that_is_out() -> None:
    out = [Exclusion("a", None, "fan broken")]
    alone = Cluster(nodes=["a"], max_nodes=1, excluded=out)
    assert capacity(alone, [], None).code == ExitCode.NO_CAPACITY
    found = capacity(msgspec.structs.replace(alone, spares=["b"]), [], None)
    assert (found.code, found.text) == (0, "enough: 1 of 1 node (b)")
    also_out = msgspec.structs.replace(alone, spares=["b"], excluded=[*out, Exclusion("b", None, "too")])
    assert capacity(also_out, [], None).code == ExitCode.NO_CAPACITY


def test_reports_of_a_hang_are_evidence() -> None:
    found = trigger(Facts(state="failed", attempt=2, hang="attempts/000002/hang", cause="hang"))
    assert "reports of the hang: attempts/000002/hang" in found.evidence


def test_somebody_who_holds_the_run_outranks_everything_else() -> None:
    found = [
        Finding(stage=Stage.STORAGE, mark=StageMark.PROBLEM, text="", code=23),
        Finding(stage=Stage.RUNG, mark=StageMark.PROBLEM, text="", code=20),
    ]
    assert exit_code(found) == 20
    assert exit_code(found[:1]) == 23
    assert exit_code([]) == 0


def test_only_a_decided_stop_can_be_overruled() -> None:
    stands = Finding(
        stage=Stage.CLASSIFY, mark=StageMark.PROBLEM, text="job", evidence=["it stopped."], code=22
    )
    full = Finding(stage=Stage.STORAGE, mark=StageMark.PROBLEM, text="full", code=23)
    fine = Finding(stage=Stage.RUNG, mark=StageMark.OK, text="step 3")
    assert why_not_started([fine], "", known=True, submit="") is None
    asked = why_not_started([stands, fine], "", known=True, submit="")
    assert asked is not None
    assert (asked.question, asked.code) == ("it stopped. Start it all the same?", 0)
    for findings, known, submit, code in (
        ([stands, full], True, "", 0),
        ([stands], False, "", ExitCode.USAGE),
        ([fine], True, "sbatch it", ExitCode.USAGE),
    ):
        refused = why_not_started(findings, "cannot be resumed yet", known=known, submit=submit)
        assert refused is not None
        assert (refused.question, refused.code) == ("", code)


nodes = st.lists(st.sampled_from(["a", "b", "c"]), max_size=3, unique=True)
suspicions = st.lists(
    st.builds(
        Suspected,
        node=st.sampled_from(["a", "b", "c"]),
        device=st.sampled_from([None, "0"]),
        why=st.just("why"),
        sure=st.booleans(),
    ),
    max_size=5,
)


@given(suspicions, nodes, nodes)
def test_only_what_is_accused_or_went_wrong_twice_is_drained(
    told: list[Suspected], there: list[str], out: list[str]
) -> None:
    cluster = Cluster(nodes=there, excluded=[Exclusion(node) for node in out])
    drains, finding = nodes_to_drain(told, cluster)
    for drain in drains:
        against = [one for one in told if (one.node, one.device) == (drain.node, drain.device)]
        assert any(one.sure for one in against) or len(against) >= 2
        assert drain.node not in out, "it is out already"
    assert finding.code == 0, "draining never stands in the way by itself"
    sure = {(one.node, one.device) for one in told if one.sure and one.node not in out}
    assert sure <= {(drain.node, drain.device) for drain in drains}


def test_a_place_that_failed_twice_is_not_drained_if_the_rest_would_not_suffice() -> None:
    twice = [Suspected(node="a", why="killed there")] * 2
    alone, finding = nodes_to_drain(twice, Cluster(nodes=["a"]))
    assert alone == []
    assert "the rest would not suffice" in finding.evidence[0]
    assert [one.node for one in nodes_to_drain(twice, Cluster(nodes=["a", "b"]))[0]] == ["a"]


@pytest.mark.parametrize(
    ("low", "high", "there", "word", "code"),
    [(2, 2, 2, "enough", 0), (2, 2, 1, "wait", 28), (1, 2, 1, "shrink", 0), (2, 4, 1, "wait", 28)],
)
def test_capacity_is_enough_or_shrinks_or_waits(
    low: int, high: int, there: int, word: str, code: int
) -> None:
    cluster = Cluster(nodes=list("abcd")[:there], min_nodes=low, max_nodes=high, may_shrink=low < high)
    finding = capacity(cluster, [], None)
    assert (finding.text.partition(":")[0], finding.code) == (word, code)
    asked = capacity(cluster, [], NodeOffer(by="Slurm", nodes=there, queues=True))
    assert (asked.text.partition(":")[0], asked.code) == (word, 0), "a queue waits by itself"
    inside = capacity(cluster, [], NodeOffer(by="Slurm job 7", nodes=there, queues=False))
    assert (inside.text.partition(":")[0], inside.code) == (word, code), "a job gets no more nodes"


def test_a_run_that_is_tied_to_its_ranks_is_not_told_to_go_on_with_fewer() -> None:
    tied = Cluster(
        nodes=["a"], min_nodes=1, max_nodes=2, may_shrink=True, tied="model.w differs between ranks"
    )
    finding = capacity(tied, [], None)
    assert (finding.text.partition(":")[0], finding.code) == ("wait", 28)
    assert "fewer cannot go on: model.w differs between ranks" in finding.text
    assert capacity(tied, [], NodeOffer(by="Slurm", nodes=1, queues=False)).text.startswith("wait:")
    refused = world(2, 1, shared=True, tied=tied.tied)
    assert (refused.code, refused.text) == (25, "2 ranks saved it, 1 rank would start: refused")
    assert world(2, 2, shared=True, tied=tied.tied).code == 0


def test_too_little_room_for_the_next_save_is_a_full_disk() -> None:
    place = StorageFacts(place="/ckpt", what="the checkpoints", free=100, needed=200)
    assert storage([place], []).code == 23
    enough = StorageFacts(place="/ckpt", what="the checkpoints", free=200, needed=200)
    assert storage([enough], []).code == 0
    control = StorageFacts(place="/run", what="the run's memory", problem="read-only", code=24)
    assert storage([enough, control], ["step_1", "step_2"]).code == 24


@given(st.none() | st.integers(1, 9), st.none() | st.integers(1, 9), st.sampled_from([True, False, None]))
def test_another_world_is_refused_only_if_the_position_is_known_to_be_per_rank(
    saved: int | None, wanted: int | None, shared: bool | None
) -> None:
    finding = world(saved, wanted, shared=shared)
    differs = saved is not None and wanted is not None and saved != wanted
    assert (finding.code == 25) == (differs and shared is False)


# --- whether a resume was correct --------------------------------------------------------------------------

WINDOW = [2.0 + 0.01 * (at % 3) for at in range(20)]
BEFORE = BeforeResume(
    checkpoint="step_00000018-00000000",
    step=18,
    window=WINDOW,
    step_seconds=[0.1] * 20,
    losses={19: 2.0, 20: 2.01},
    digests={19: "x", 20: "y"},
    samples_per_step=[4.0, 4.0],
    tokens_per_step=[24.0],
    interval=3,
)


def since(**changed: object) -> SinceResume:
    fields: dict[str, object] = {
        "resumed": True,
        "checkpoint": BEFORE.checkpoint,
        "step": 18,
        "first": 19,
        "losses": [2.0, 2.01, 2.0, 2.0, 2.01],
        "seconds": [0.1] * 5,
        "digests": {19: "x", 20: "y", 21: "z"},
        "samples_per_step": 4.0,
        "tokens_per_step": 24.0,
        "saves": [21],
        "probation": "passed",
    }
    return SinceResume(**(fields | changed))  # type: ignore[arg-type]


def verdicts(found: SinceResume, before: BeforeResume = BEFORE) -> dict[str, Correctness]:
    return {point.point: point.verdict for point in judge(before, found)}


def test_a_resume_that_goes_on_as_before_is_correct_on_every_point() -> None:
    assert set(verdicts(since()).values()) == {Correctness.CORRECT}
    assert is_correct(judge(BEFORE, since())) is True


@pytest.mark.parametrize(
    ("point", "changed"),
    [
        ("rung", {"checkpoint": "step_00000015-00000000"}),
        ("rung", {"first": 20}),
        ("loss", {"losses": [4.0, 4.0, 4.0]}),
        ("samples", {"digests": {19: "x", 20: "other"}}),
        ("samples", {"digests": {}, "samples_per_step": 8.0}),
        ("tokens", {"tokens_per_step": 12.0}),
        ("cadence", {"saves": [], "losses": [2.0] * 9}),
        ("probation", {"probation": "breached"}),
    ],
)
def test_what_is_not_as_before_is_wrong_and_makes_the_resume_wrong(
    point: str, changed: dict[str, object]
) -> None:
    assert verdicts(since(**changed))[point] is Correctness.NOT_CORRECT
    assert is_correct(judge(BEFORE, since(**changed))) is False


def test_a_shift_of_the_loss_is_seen_also_where_no_step_was_done_again() -> None:
    fresh = BeforeResume(checkpoint=BEFORE.checkpoint, step=18, window=WINDOW)
    assert (
        verdicts(since(losses=[2.0, 5.0, 5.0, 5.0, 2.0, 2.0, 2.0]), fresh)["loss"] is Correctness.NOT_CORRECT
    )
    assert verdicts(since(losses=[2.0, 5.0, 2.0, 2.0, 2.0]), fresh)["loss"] is Correctness.CORRECT, (
        "one spike"
    )


def test_another_loss_of_a_step_that_was_done_before_is_wrong_without_any_window() -> None:
    short = BeforeResume(checkpoint=BEFORE.checkpoint, step=18, losses={19: 2.0, 20: 2.0})
    assert verdicts(since(losses=[3.0, 3.0]), short)["loss"] is Correctness.NOT_CORRECT
    assert verdicts(since(losses=[2.0, 2.001]), short)["loss"] is Correctness.CORRECT, (
        "other devices, other kernels"
    )


def test_slow_steps_accuse_no_checkpoint() -> None:
    slow = since(seconds=[0.5] * 5)
    assert verdicts(slow)["throughput"] is Correctness.NOT_CORRECT
    assert is_correct(judge(BEFORE, slow)) is True


def test_throughput_is_judged_by_a_stated_band() -> None:
    nearly_twice, a_little = since(seconds=[0.18] * 5), since(seconds=[0.105] * 5)
    assert verdicts(nearly_twice)["throughput"] is Correctness.NOT_CORRECT
    assert verdicts(a_little)["throughput"] is Correctness.CORRECT
    wide = {point.point: point for point in judge(BEFORE, nearly_twice, band=1.0)}["throughput"]
    assert (wide.verdict, wide.expected) == (Correctness.CORRECT, "0.1 s a step, at most 100% more")
    assert wide.found == "0.18 s a step, 80% more"


def test_saves_that_come_less_often_than_failures_are_no_correct_cadence() -> None:
    """Three steps of 0.1 s: longer than the 180 ms between failures, shorter than an hour."""
    often = msgspec.structs.replace(BEFORE, mtbf=0.18, mtbf_source="observed: 9 failures in 1.6 s of running")
    seldom = msgspec.structs.replace(BEFORE, mtbf=3600.0, mtbf_source="given")
    found = {point.point: point for point in judge(often, since())}["cadence"]
    assert found.verdict is Correctness.NOT_CORRECT
    assert "the MTBF of 180 ms (observed: 9 failures" in found.expected
    assert "one every 300 ms" in found.found
    assert verdicts(since(), seldom)["cadence"] is Correctness.CORRECT


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [(24.0, Correctness.CORRECT), (48.0, Correctness.CORRECT), (36.0, Correctness.NOT_KNOWN)],
)
def test_at_another_number_of_ranks_the_job_s_counts_are_compared(
    tokens: float, verdict: Correctness
) -> None:
    """As many in all, or as many for each rank; what else it is nobody can tell."""
    grown = msgspec.structs.replace(BEFORE, world=2, starts=4)
    assert verdicts(since(tokens_per_step=tokens), grown)["tokens"] is verdict
    same = msgspec.structs.replace(BEFORE, world=2, starts=2)
    assert verdicts(since(tokens_per_step=48.0), same)["tokens"] is Correctness.NOT_CORRECT


def test_data_that_was_left_out_on_purpose_makes_other_samples_right() -> None:
    assert verdicts(since(digests={19: "other"}, skipped=True))["samples"] is Correctness.NOT_KNOWN


@given(
    st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=12),
    st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=12),
    st.integers(0, 40),
    st.booleans(),
)
def test_the_check_answers_whatever_was_recorded(
    window: list[float | None], losses: list[float | None], first: int, same: bool
) -> None:
    before = BeforeResume(
        checkpoint="step_00000018-00000000", step=18, window=window, world=2, starts=2 if same else 4
    )
    finite = [value if value is not None and math.isfinite(value) else None for value in losses]
    found = SinceResume(resumed=True, checkpoint=before.checkpoint, step=18, first=first, losses=finite)
    assert len(judge(before, found)) == 7
    assert len(judge(before, SinceResume())) == 1
    assert is_correct(judge(before, SinceResume())) is None


def test_without_values_nothing_is_claimed() -> None:
    bare = BeforeResume(checkpoint=BEFORE.checkpoint, step=18)
    found = since(digests={}, samples_per_step=None, tokens_per_step=None, saves=[], seconds=[], probation="")
    known = {
        point for point, verdict in verdicts(found, bare).items() if verdict is not Correctness.NOT_KNOWN
    }
    assert known == {"rung"}
    assert is_correct(judge(bare, found)) is None, "the right rung alone does not make a resume correct"
