"""Verdicts on rejected steps: for each truth hidden in a world the real policies find it out, within bounds.

That they are acted on by real launchers is in test_verdicts_acted_on.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ExitCode
from holdfast.policy.budgets import MAX_REQUEUES, PastAttempt, most_restarts
from holdfast.policy.diagnosis import Diagnosis, of_rejection
from holdfast.policy.placement import Cluster, Exclusion
from holdfast.policy.recovery import Decision, Situation, recover
from holdfast.policy.results import Findings, How, Kind, Orders, Place, RankResult, Rejection, Trial, Window
from holdfast.policy.signs import Action, Cause
from holdfast.policy.verdicts import open_rejections, open_rerun, open_trial
from kit.worlds.recovery_worlds import (
    GIVEN,
    Driver,
    Fault,
    Rejecting,
    calm,
    drivers,
    launch_again_and_again,
    often,
    rejections,
)
from kit.worlds.verdict_worlds import Now, Truth, World

ROOMS = {
    "two devices": {"devices": 2, "workers": 2},
    "a spare device": {"devices": 3, "workers": 2},
    "one rank and a spare device": {"devices": 2, "workers": 1},
    "a spare node": {"devices": 2, "workers": 2, "spares": ["s"]},
    "two nodes of one device and a spare": {"nodes": ["a", "b"], "spares": ["s"], "devices": 1, "workers": 1},
    "four devices": {"devices": 4, "workers": 4},
    "one device": {"devices": 1, "workers": 1},
    "two ranks on one device": {"devices": 1, "workers": 2},
    "no devices": {"devices": 0, "workers": 2},
}
rooms = pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
several = pytest.mark.parametrize("ranks", [[0], [0, 1, 2, 3]], ids=["one rank", "all ranks"])
S = 23
"""The step at which it goes wrong: three after the newest checkpoint."""


def play(truth: Truth, room: dict[str, object], **more: object) -> World:
    world = World(truth, **{**room, **more})  # type: ignore[arg-type]
    world.play()
    assert not world.standing("suspect"), "whoever ends leaves nobody suspect"
    assert sum(bool(one.suspect) for one in world.decisions) <= 2
    return world


def found(world: World) -> set[str]:
    return {verdict for verdict, _ in world.verdicts}


# -- one truth at a time, with the default of three restarts ------------------------------------------------


@rooms
@several
def test_state_damaged_in_memory_costs_one_restart_and_nothing_else(
    room: dict[str, object], ranks: list[int]
) -> None:
    """Scenario 20."""
    world = play(lambda now: now.attempt == 2 and now.step == S and now.rank in ranks, room, tampered=True)
    assert world.code == 0
    assert found(world) == {"transient"}
    assert len(world.decisions) == 1
    assert not world.excluded
    assert world.standing("condemned") == []


@rooms
@pytest.mark.parametrize("always", [False, True], ids=["at one step", "at every step from then on"])
def test_a_bad_device_is_excluded_where_the_run_can_do_without_it(
    room: dict[str, object], *, always: bool
) -> None:
    """Scenario 23."""
    bad = Place("a", "0")

    def truth(now: Now) -> bool:
        return now.place == bad and (now.step == S or (always and now.attempt > 2))

    world = play(truth, room)
    if not world.devices:
        assert world.code == 0, "nothing has that name"
        return
    assert world.standing("condemned") == [], "a device's fault never costs a checkpoint"
    if world.devices == 1 and world.nodes == ["a"]:
        # Nobody is to blame: the one step is left to nan_policy, and with many it is nan_policy's end.
        assert (world.code, found(world)) == (ExitCode.VALIDATION_FAILED if always else 0, {"reproducible"})
        assert "no second device was left" in " ".join(
            line for one in world.decisions for line in one.evidence
        )
        return
    assert found(world) == {"device"}
    spare = world.spares or world.devices > world.workers
    assert world.code == (0 if spare else ExitCode.VALIDATION_FAILED)
    out = {(one.node, one.device) for one in world.excluded}
    whole = world.devices == world.workers
    assert out == ({("a", None if whole else "0")} if spare else set())


def test_two_bad_devices_are_both_found_out() -> None:
    bad = {Place("a", "0"), Place("a", "1")}
    world = play(lambda now: now.place in bad and now.step == S, ROOMS["four devices"] | {"spares": ["s"]})
    assert (world.code, found(world)) == (0, {"device"})
    assert [one.node for one in world.excluded] == ["a"]
    assert "because of device 0 of a and device 1 of a: the fault follows it" in world.excluded[0].reason


@rooms
@several
@pytest.mark.parametrize("skip", [True, False], ids=["skipping", "not skipping"])
@pytest.mark.parametrize("known", [True, False], ids=["", "ranks unknown"])
def test_bad_data_are_left_out_if_allowed_and_no_checkpoint_pays(
    room: dict[str, object], ranks: list[int], *, skip: bool, known: bool
) -> None:
    """Scenario 3."""
    world = play(
        lambda now: now.batch == S and now.rank in ranks, room, skip_bad_data=skip, known_ranks=known
    )
    assert found(world) == {"reproducible"}
    assert world.standing("condemned") == []
    assert world.standing("acquitted") == [20]
    assert world.excluded == []
    assert world.code == 0
    assert [(one.first, one.last) for one in world.skips] == ([(S, S)] if skip else [])
    assert world.dropped == (set() if skip else {S}), "else that step alone is left to nan_policy"
    assert len(world.decisions) <= 3


@rooms
@several
def test_a_bad_checkpoint_is_condemned_and_the_run_goes_on_below_it(
    room: dict[str, object], ranks: list[int]
) -> None:
    """Scenario 2, Megatron-LM#5281."""
    world = play(
        lambda now: now.poisoned and now.step >= S and now.rank in ranks, room, poison=frozenset({20})
    )
    assert (world.code, found(world)) == (0, {"reproducible"})
    assert world.standing("condemned") == [20]
    assert world.standing("acquitted") == []
    assert world.excluded == []


@rooms
@several
def test_what_a_bad_checkpoint_was_saved_from_in_its_probation_is_passed_over_and_not_blamed(
    room: dict[str, object], ranks: list[int]
) -> None:
    """The newest was saved from bad state before that had shown: the rung below both is the one to use. Only
    what failed itself, twice, is condemned."""

    def truth(now: Now) -> bool:
        return now.poisoned and now.step >= 33 and now.rank in ranks

    world = World(truth, **room, steps=(10, 20), poison=frozenset({20}))  # type: ignore[arg-type]
    world._save(30, world.line[-1].name, poisoned=True)
    world.history = [msgspec.structs.replace(world.history[0], highest_step=30)]
    world.play()
    assert world.code == 0
    assert world.standing("condemned") == [30]
    assert any(one.avoid == [world.line_at(20)] for one in world.decisions)
    assert len(world.decisions) <= 3


@rooms
@several
@pytest.mark.parametrize("skip", [True, False], ids=["skipping", "not skipping"])
def test_an_honest_divergence_stops_with_17_and_condemns_nothing(
    room: dict[str, object], ranks: list[int], *, skip: bool
) -> None:
    """Scenario 4."""
    world = play(lambda now: now.step >= S and now.rank in ranks, room, skip_bad_data=skip)
    assert world.code == ExitCode.VALIDATION_FAILED
    assert found(world) == {"reproducible"}
    assert world.standing("condemned") == []
    assert 20 in world.standing("acquitted")


@rooms
@several
def test_a_spike_that_is_honest_is_accepted_and_speaks_against_nothing(
    room: dict[str, object], ranks: list[int]
) -> None:
    """Scenario 22: a false alarm costs the re-runs and no checkpoint, device or data."""
    world = play(lambda now: now.batch == S and now.rank in ranks, room, finite=True, skip_bad_data=True)
    assert world.code == 0
    assert not any(one.suspect or one.exclude or one.skip for one in world.decisions)
    assert world.decisions[-1].rerun is not None
    assert world.decisions[-1].rerun.accept
    assert len(world.decisions) <= 2


@rooms
@pytest.mark.parametrize("reruns", [True, False], ids=["re-run", "as it comes"])
def test_without_a_rung_below_nothing_becomes_suspect_and_the_step_is_left_to_the_policy(
    room: dict[str, object], *, reruns: bool
) -> None:
    world = play(lambda now: now.batch == S, room, steps=(20,), reruns=reruns)
    assert (world.code, world.dropped) == (0, {S})
    assert world.standing("proven") == [20], "it goes on from there, and goes well"
    assert len(world.decisions) <= 2


def test_a_lower_rung_that_fails_in_its_own_probation_is_passed_over_and_not_blamed() -> None:
    """What was saved from bad state is bad: two rungs down, within three restarts."""
    world = play(
        lambda now: now.poisoned and now.step % 10 == 3,
        ROOMS["two devices"],
        steps=(10, 20, 30),
        poison=frozenset({20}),
    )
    assert (world.code, world.standing("condemned")) == (0, [30]), "20 failed once"
    assert [str(one.action) for one in world.decisions] == ["rotate", "lower_rung", "lower_rung"]


@pytest.mark.parametrize("restarts", [3, 100])
def test_after_two_rungs_all_are_acquitted_and_the_policy_applies(restarts: int) -> None:
    world = play(
        lambda now: now.step % 10 == 3,
        ROOMS["two devices"],
        steps=(10, 20, 30, 40),
        max_restarts=restarts,
        reruns=False,
    )
    assert (world.code, world.standing("condemned")) == (0, [])
    assert 40 in world.standing("acquitted")
    assert world.dropped >= {23, 33, 43, 53}
    assert len(world.decisions) <= 4


ALONE: dict[str, object] = {"devices": 1, "workers": 1, "spares": ["s"]}


def test_where_no_rank_can_move_a_spare_node_takes_over_from_one_that_was_rejected_twice() -> None:
    bad = Place("a", "0")
    world = play(lambda now: now.place == bad and now.step == S, ALONE)
    assert (world.code, [(one.node, one.device) for one in world.excluded]) == (0, [("a", None)])
    assert world.standing("condemned") == []
    assert found(world) == {"device"}, "as the ranks found when it passed elsewhere"


def test_a_node_that_was_replaced_for_a_fault_that_stays_with_the_work_is_readmitted() -> None:
    world = play(lambda now: now.batch == S, ALONE, max_restarts=4, skip_bad_data=True)
    actions = [str(one.action) for one in world.decisions]
    assert actions == ["restart", "exclude", "lower_rung", "restart"]
    assert (world.code, found(world), world.excluded) == (0, {"reproducible"}, [])
    assert world.decisions[2].readmit == ["a"]
    assert world.standing("condemned") == []


def test_no_spare_node_is_taken_for_a_spike() -> None:
    world = play(lambda now: now.batch == S, ALONE, finite=True)
    assert (world.code, [one.exclude for one in world.decisions if one.exclude]) == (0, [])


# -- any truth, anywhere: the right verdict, within the budget, and nothing good is condemned ---------------

TRUTHS: dict[str, tuple[Callable[[int], Truth], dict[str, object]]] = {
    "bad data": (lambda first: lambda now: now.batch == S, {}),
    "a bad checkpoint": (
        lambda first: lambda now: now.poisoned and now.step >= S,
        {"poison": frozenset({20})},
    ),
    "memory damaged once": (
        lambda first: lambda now: now.attempt == first and now.step >= S,
        {"tampered": True},
    ),
    "an honest spike": (lambda first: lambda now: now.batch == S, {"finite": True, "reruns": True}),
    "an honest jump": (lambda first: lambda now: now.step >= S, {"breaches": True}),
    "a checkpoint with another level": (
        lambda first: lambda now: now.poisoned and now.step >= S,
        {"breaches": True, "poison": frozenset({20})},
    ),
    "a level damaged once": (
        lambda first: lambda now: now.attempt == first and now.step >= S,
        {"breaches": True},
    ),
}


@settings(deadline=None, max_examples=400)
@given(
    what=st.sampled_from(list(TRUTHS)),
    room=st.sampled_from(list(ROOMS.values())),
    steps=st.sampled_from([(20,), (10, 20), (5, 10, 20)]),
    crashes=st.integers(0, 1),
    reruns=st.booleans(),
    known=st.booleans(),
    policy=st.sampled_from(["warn", "skip", "rollback"]),
    skip=st.booleans(),
)
def test_any_one_truth_is_found_out_within_the_default_budget_and_condemns_nothing_good(
    what: str,
    room: dict[str, object],
    steps: tuple[int, ...],
    crashes: int,
    policy: str,
    *,
    reruns: bool,
    known: bool,
    skip: bool,
) -> None:
    """Points 4, 15 and 16: also if a restart was spent on a crash before it."""
    make, given_by = TRUTHS[what]
    more = {"reruns": reruns, "known_ranks": known, "nan_policy": policy, "skip_bad_data": skip, **given_by}
    world = World(make(2 + crashes), **{**room, **more}, steps=steps, crashes=crashes)  # type: ignore[arg-type]
    world.play()
    lower, bad = len(steps) > 1, what.startswith(("a bad", "a checkpoint"))
    assert sum(one.action.goes_on for one in world.decisions) <= 3 - crashes
    assert world.standing("condemned") == ([20] if bad and lower else []), world.decisions
    assert not world.excluded
    if what == "a bad checkpoint" and not lower:
        assert world.code == ExitCode.VALIDATION_FAILED, "every step fails: too many in a row"
        return
    assert world.code == 0, world.decisions
    assert not world.standing("suspect")
    if what == "bad data":
        assert world.dropped == (set() if world.skips else {S})
        assert world.standing("acquitted") == ([20] if lower else [])
    else:
        assert not world.dropped
        assert not world.skips
    if "once" in what or what == "an honest spike":
        assert not any(one.suspect for one in world.decisions)
    if what == "an honest jump":
        assert world.standing("acquitted") == ([20] if lower else [])


@pytest.mark.parametrize("restarts", [0, 1, 2])
@pytest.mark.parametrize(
    "what", ["bad data", "an honest spike", "an honest jump", "a checkpoint with another level"]
)
@pytest.mark.parametrize("reruns", [True, False], ids=["re-run", "as it comes"])
def test_with_too_few_restarts_every_launch_gets_further_and_one_of_them_goes_on(
    what: str, restarts: int, *, reruns: bool
) -> None:
    """Points 4 and 16: no launch forgets what the one before it has found out, and none ends the same way."""
    make, given_by = TRUTHS[what]
    more = {"reruns": reruns, **given_by}
    world = World(make(2), **ROOMS["two devices"], **more, max_restarts=restarts)  # type: ignore[arg-type]
    codes = []
    for number in range(5):
        world.launch = f"launch {number}"
        world.play()
        codes.append(world.code)
        if world.code == 0:
            break
    assert codes[-1] == 0, codes
    assert len(codes) <= 4 - restarts
    assert world.standing("condemned") == ([20] if what.startswith("a checkpoint") else [])
    if what == "bad data" and not reruns:
        assert codes == [0] if restarts == 0 else codes[-1] == 0, (
            "with no restart at all the policy applies at once"
        )


@pytest.mark.parametrize("what", ["bad data", "an honest spike", "an honest jump"])
def test_what_was_settled_holds_on_every_rung_and_in_every_launch(what: str) -> None:
    """Point 16: it was forgotten on a lower rung, and cost the last restart."""
    make, given_by = TRUTHS[what]
    world = World(make(2), **{**ROOMS["two devices"], **given_by})  # type: ignore[arg-type]
    world.play()
    assert world.code == 0
    made = len(world.decisions)
    for step in (20, 10):
        world.line = [one for one in world.line if one.step <= step]
        world.launch, world.max_restarts = f"from {step}", 0
        world.play()
        assert (world.code, len(world.decisions)) == (0, made), "at once, whatever it comes from"


# -- rule by rule -------------------------------------------------------------------------------------------


def rejected(
    number: int, *bad: int, placement: str = "a[0,1]", step: int = S, rung: int = 20, **more: object
) -> PastAttempt:
    ranks = [RankResult(rank=rank, reasons=["nan"]) for rank in bad]
    fields = {name: more.pop(name) for name in list(more) if name in PastAttempt.__struct_fields__}
    told = {"kind": Kind.STEP, "in_probation": True, "window": Window(0, step, step), **more}
    return PastAttempt(
        number=number,
        launch="l",
        outcome="failed",
        cause="unknown",
        exit_code=16,
        highest_step=40,
        nodes=["a"],
        world_size=2,
        placement=placement,
        rung=NAMES[rung],
        rejection=Rejection(step=step, reasons=["nan"], ranks=ranks, **told),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


NAMES = {step: f"step_{step:08d}-{step:08x}" for step in (5, 10, 15, 20, 30, 40)}
TWO = Cluster(nodes=["a"], devices={"a": ["0", "1"]}, workers_per_node=2)


def decide(*attempts: PastAttempt, **more: object) -> Decision:
    situation = Situation(
        attempt=attempts[-1],
        **{  # type: ignore[arg-type]
            "max_restarts": 10,
            "cluster": TWO,
            "rungs": [NAMES[20], NAMES[10], NAMES[5]],
            "together": [attempts[-1].rung],
            "orders": Orders(trial=open_trial(attempts[:-1])),
            **more,
        },
    )
    return recover(list(attempts[:-1]), situation)


def test_on_a_node_without_devices_two_bad_ranks_in_turn_accuse_nobody() -> None:
    cluster = Cluster(nodes=["a"], workers_per_node=2)
    decision = decide(rejected(1, 0, placement="a"), rejected(2, 1, placement="a"), cluster=cluster)
    assert (decision.verdict, decision.exclude) == ("reproducible", [])


def test_data_that_are_left_out_and_fail_again_end_the_run() -> None:
    first = rejected(1, 0, 1, in_probation=False, placement="a[1,0]")
    second = rejected(2, 0, 1, in_probation=False)
    decision = decide(first, second, skip_bad_data=True)
    assert (decision.action, decision.skip) == (Action.RESTART, Window(0, S, S))
    again = [msgspec.structs.replace(second, decided=decision.findings()), rejected(3, 0, in_probation=False)]
    assert decide(first, *again).action is Action.ROTATE, "another incident: the data are others"
    stopped = decide(
        first, *again, rejected(4, 0, placement="a[1,0]", in_probation=False), skip_bad_data=True
    )
    assert (stopped.action, stopped.exit_code) == (Action.STOP, ExitCode.VALIDATION_FAILED)


def test_a_breach_is_tried_again_on_other_devices_before_anything_is_suspect() -> None:
    breach = rejected(1, kind=Kind.PROBATION, step=24, rotation=0)
    first = decide(breach)
    assert (first.action, first.rotate_by, first.suspect, first.trial) == (Action.ROTATE, 1, [], None)
    assert first.rerun is not None
    assert (first.rerun.step, first.rerun.breach, first.rerun.settles) == (24, True, False)
    one = Cluster(nodes=["a"], devices={"a": ["0"]}, workers_per_node=1)
    assert decide(breach, cluster=one).action is Action.RESTART, "here again, where no rank can move"
    kept = msgspec.structs.replace(breach, action="rotate", decided=first.findings())
    second = decide(kept, rejected(2, kind=Kind.PROBATION, step=25))
    assert (second.action, second.suspect) == (Action.LOWER_RUNG, [NAMES[20]])
    assert second.trial == Trial(suspects=[NAMES[20]], until=25)


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.PROBATION])
def test_the_same_checkpoint_means_not_what_was_saved_from_it_if_it_is_still_there(kind: Kind) -> None:
    failed = rejected(1, 0, kind=kind, step=33)
    rungs = [NAMES[30], NAMES[20], NAMES[10]]
    kin = [NAMES[10], NAMES[20], NAMES[30]]
    again = decide(failed, rungs=rungs, together=kin)
    assert (again.action, again.avoid, again.suspect) == (Action.ROTATE, [NAMES[30]], [])
    gone = decide(failed, rungs=[NAMES[30]], together=kin)
    assert (gone.action, gone.avoid) == (Action.ROTATE, []), "or there would be nothing to go on from"


@pytest.mark.parametrize(
    ("between", "again"),
    [
        ({"rung": "", "last_step": 40}, False),
        ({"rung": "same", "last_step": 26}, False),
        ({"rung": "same", "last_step": 40}, True),
    ],
    ids=["another start", "not far enough", "it got past it"],
)
def test_what_passed_the_second_time_is_not_held_against_a_checkpoint(
    between: dict[str, object], *, again: bool
) -> None:
    first = rejected(1, kind=Kind.PROBATION, step=24)
    told = {**between, "rung": NAMES[20] if between["rung"] else ""}
    killed = PastAttempt(number=2, launch="l", outcome="failed", **told)  # type: ignore[arg-type]
    decision = decide(first, killed, rejected(3, kind=Kind.PROBATION, step=24))
    assert bool(decision.suspect) is not again


def test_a_breach_and_a_nan_of_one_checkpoint_are_two_failures_of_it() -> None:
    """A level that rises may end in a NaN: a discontinuity has no one step."""
    decision = decide(rejected(1, kind=Kind.PROBATION, step=24), rejected(2, 0, step=23))
    assert decision.action is Action.ROTATE, "of the step nothing is known yet"
    decision = decide(rejected(1, 0, step=23), rejected(2, kind=Kind.PROBATION, step=22))
    assert (decision.action, decision.suspect) == (Action.LOWER_RUNG, [NAMES[20]])


def test_a_breach_without_a_lower_rung_is_settled_by_the_second_try_and_counters_never_are() -> None:
    breach = rejected(1, kind=Kind.PROBATION, step=24)
    alone = decide(breach, rungs=[NAMES[20]])
    assert alone.rerun is not None
    assert (alone.action, alone.rerun.settles) == (Action.ROTATE, True)
    again = decide(breach, rejected(2, kind=Kind.PROBATION, step=24), rungs=[NAMES[20]])
    assert (again.action, again.suspect) == (Action.RESTART, [])
    assert [(one.how, one.step, one.shown) for one in again.settled] == [(How.SHIFT, 24, True)]
    wrong = [rejected(number, kind=Kind.PROBATION, step=20, counters=True) for number in (1, 2)]
    first = decide(wrong[0], rungs=[NAMES[20]])
    assert first.rerun is not None
    assert not first.rerun.settles
    stopped = decide(*wrong, rungs=[NAMES[20]])
    assert (stopped.action, stopped.exit_code) == (Action.STOP, ExitCode.VALIDATION_FAILED)


@pytest.mark.parametrize("step", [22, 24])
def test_a_breach_in_the_trial_where_the_suspect_was_watched_acquits(step: int) -> None:
    """A discontinuity has no one step; the trial looks more closely and may find it sooner."""
    first = rejected(
        1,
        kind=Kind.PROBATION,
        step=24,
        decided=Findings(suspect=[NAMES[20]], trial=Trial(suspects=[NAMES[20]], until=24)),
    )
    second = rejected(2, kind=Kind.PROBATION, step=step, rung=10, in_probation=False)
    decision = decide(first, second, rungs=[NAMES[10], NAMES[5]])
    assert (decision.action, decision.acquit) == (Action.RESTART, [NAMES[20]])
    assert [one.how for one in decision.settled] == [How.SHIFT]
    early = rejected(2, kind=Kind.PROBATION, step=13, rung=10)
    lower = decide(first, early, rungs=[NAMES[10], NAMES[5]])
    assert (lower.action, lower.suspect, lower.avoid) == (Action.LOWER_RUNG, [], [NAMES[10]])
    assert lower.trial == Trial(suspects=[NAMES[20]], until=24)


def test_the_trial_goes_on_after_another_failure_and_in_a_new_launch() -> None:
    first = rejected(0, kind=Kind.PROBATION, step=24)
    second = rejected(1, kind=Kind.PROBATION, step=24)
    decided = decide(first, second)
    kept = msgspec.structs.replace(second, action="lower_rung", decided=decided.findings())
    killed = PastAttempt(number=2, launch="l", outcome="failed", cause="infrastructure", exit_code=-9)
    decision = decide(kept, killed)
    assert (decision.action, decision.trial) == (Action.RESTART, decided.trial)
    lost = PastAttempt(number=3, launch="other", outcome="lost")
    assert open_trial([kept, killed, lost]) == decided.trial
    acquitted = msgspec.structs.replace(killed, number=4, decided=Findings(acquit=[NAMES[20]]))
    assert open_trial([kept, killed, lost, acquitted]) is None


def test_the_step_to_repeat_is_told_again_until_an_attempt_has_got_past_it() -> None:
    first = rejected(1, 0)
    decided = decide(first)
    assert decided.rerun is not None
    assert (decided.action, decided.rerun.step, decided.rerun.can_exclude) == (Action.ROTATE, S, False)
    kept = msgspec.structs.replace(first, action="rotate", decided=decided.findings())
    killed = PastAttempt(number=2, launch="l", outcome="failed", cause="infrastructure", last_step=S - 1)
    assert decide(kept, killed, orders=Orders(rerun=open_rerun([kept, killed]))).rerun == decided.rerun
    assert open_rerun([kept, msgspec.structs.replace(killed, last_step=S)]) is None


def test_a_step_that_a_later_attempt_got_past_is_no_evidence_any_more() -> None:
    """Known from the monitor, or from the step that was rejected next."""
    first, other = rejected(1, 0), rejected(2, 0, step=S + 4, placement="a[1,0]")
    assert open_rejections([first, other]) == [other]
    again = rejected(3, 0)
    assert open_rejections([first, other, again]) == [other, again], "it came back to where it had passed"
    passed = PastAttempt(number=2, launch="l", outcome="failed", last_step=S)
    assert open_rejections([first, passed]) == []
    assert open_rejections([first], forgiven=1) == []


def test_an_operators_forced_use_of_a_suspect_acquits_it_of_nothing() -> None:
    trial = Trial(suspects=[NAMES[20]], until=S)
    attempts = [rejected(1, 0, placement="a[1,0]"), rejected(2, 0)]
    decision = decide(*attempts, orders=Orders(trial=trial), rungs=[NAMES[10]])
    assert (decision.action, decision.acquit) == (Action.RESTART, [])
    assert [(one.how, one.step) for one in decision.settled] == [(How.TOLERATED, S)]
    raising = decide(*attempts, orders=Orders(trial=trial), rungs=[NAMES[10]], nan_policy="raise")
    assert (raising.exit_code, raising.acquit) == (ExitCode.VALIDATION_FAILED, [])


def test_rolling_back_goes_past_the_newest_then_past_what_was_loaded_then_stops() -> None:
    rungs = [NAMES[step] for step in (40, 30, 20, 10)]
    first = rejected(1, kind=Kind.ROLLBACK, step=50, rung=20)
    decision = decide(first, rungs=rungs)
    assert (decision.action, decision.avoid, decision.suspect) == (Action.LOWER_RUNG, [NAMES[40]], [])
    kept = msgspec.structs.replace(first, action="lower_rung", decided=decision.findings())
    second = rejected(2, kind=Kind.ROLLBACK, step=50, rung=30)
    lower = decide(kept, second, rungs=rungs)
    assert (lower.action, lower.avoid) == (Action.LOWER_RUNG, [NAMES[30], NAMES[40]])
    again = msgspec.structs.replace(second, action="lower_rung", decided=lower.findings())
    third = rejected(3, kind=Kind.ROLLBACK, step=50, rung=20)
    assert decide(kept, again, third, rungs=rungs).exit_code == ExitCode.VALIDATION_FAILED
    assert decide(first, rungs=[NAMES[20]]).exit_code == ExitCode.VALIDATION_FAILED


def test_a_device_that_the_ranks_accuse_is_excluded_or_the_run_stops() -> None:
    accuse = rejected(1, kind=Kind.DEVICE, accused=Place("a", "1"))
    spare = msgspec.structs.replace(TWO, devices={"a": ["0", "1", "2"]})
    decision = decide(accuse, cluster=spare)
    assert (decision.action, decision.verdict) == (Action.EXCLUDE, "device")
    assert [(one.node, one.device) for one in decision.exclude] == [("a", "1")]
    assert decide(accuse).exit_code == ExitCode.VALIDATION_FAILED
    known = msgspec.structs.replace(spare, excluded=[Exclusion("a", "1")])
    assert decide(accuse, cluster=known).action is Action.RESTART


def test_a_slow_device_is_excluded_only_where_a_spare_takes_its_place_and_never_stops_the_run() -> None:
    """F2: what is slow is right all the same."""
    slow = rejected(1, kind=Kind.DEVICE, accused=Place("a", "1"), optional=True)
    spare = msgspec.structs.replace(TWO, devices={"a": ["0", "1", "2"]})
    decision = decide(slow, cluster=spare)
    assert decision.action is Action.EXCLUDE
    assert [(one.node, one.device) for one in decision.exclude] == [("a", "1")]
    kept = decide(slow)
    assert (kept.action, kept.exclude, kept.exit_code) == (Action.RESTART, [], 0)
    assert "Nothing could take its place" in kept.reason
    smaller = Cluster(nodes=["a", "b"], workers_per_node=1, min_nodes=1, max_nodes=2, may_shrink=True)
    whole = rejected(1, kind=Kind.DEVICE, accused=Place("a"), optional=True, node_count=2)
    assert decide(whole, cluster=smaller).action is Action.RESTART, "a slow node is better than none"


def test_with_no_restart_left_a_verdict_ends_as_failed_validation_and_stays_known() -> None:
    accuse = rejected(1, kind=Kind.DEVICE, accused=Place("a", "1"))
    spare = msgspec.structs.replace(TWO, devices={"a": ["0", "1", "2"]})
    decision = decide(accuse, cluster=spare, max_restarts=0)
    assert (decision.action, decision.exit_code) == (Action.STOP, ExitCode.VALIDATION_FAILED)
    assert [(one.node, one.device) for one in decision.exclude] == [("a", "1")]
    assert decide(rejected(1, 0), max_restarts=0).exit_code == ExitCode.BUDGET_SPENT, "no verdict yet"


def test_a_rejection_while_nodes_are_missing_is_judged_and_waits() -> None:
    short = Cluster(nodes=["a"], devices={"a": ["0"]}, workers_per_node=1, min_nodes=2, max_nodes=2)
    breaches = [rejected(number, kind=Kind.PROBATION, step=24, node_count=2) for number in (1, 2)]
    decision = decide(*breaches, cluster=short)
    assert (decision.action, decision.suspect) == (Action.WAIT, [NAMES[20]])
    assert decision.wait_seconds > 0


def test_an_older_record_without_these_fields_is_read() -> None:
    old = b'{"number": 1, "launch": "l", "outcome": "failed", "cause": "hang"}'
    past = msgspec.json.decode(old, type=PastAttempt)
    assert (past.rejection, past.decided.suspect, past.decided.trial) == (None, [], None)
    plain = b'{"action": "restart", "exit_code": 0, "reason": "r", "evidence": [], "restarts_left": 1}'
    assert msgspec.json.decode(plain, type=Decision).trial is None


@pytest.mark.parametrize("code", [0, 16])
def test_a_recorded_rejection_is_the_cause_whatever_else_was_lost_with_it(code: int) -> None:
    rejection = Rejection(kind=Kind.PROBATION, step=3, reasons=["a jump"])
    lost = Diagnosis(cause=Cause.INFRASTRUCTURE, exit_code=code, culprit_node="b", rung="r", steps=3)
    found = of_rejection(lost, rejection)
    assert (found.cause, found.exit_code, found.culprit_node, found.rung) == ("checkpoint", 16, "", "r")
    assert "a jump" in found.message
    crash = Diagnosis(cause=Cause.JOB, exit_code=17)
    assert of_rejection(crash, rejection) is crash, "its own code counts more"
    assert of_rejection(lost, None) is lost


# -- any sequence -------------------------------------------------------------------------------------------


def with_policy(one: Driver, policy: str) -> Rejecting:
    driver = Rejecting(**{name: one.__dict__[name] for name in GIVEN})
    driver.nan_policy = policy
    return driver


rejecting = st.builds(with_policy, drivers, st.sampled_from(["warn", "skip", "raise", "rollback"]))


@settings(deadline=None)
@given(rejecting, st.lists(rejections, min_size=1, max_size=6), st.lists(often, min_size=1, max_size=40))
def test_any_sequence_of_rejections_and_faults_keeps_every_promise(
    driver: Rejecting, drawn: list[Rejection], sequence: list[Fault]
) -> None:
    driver.drawn = drawn
    driver.play(sequence)


@settings(deadline=None)
@given(rejecting, st.lists(rejections, min_size=1, max_size=6), st.lists(often, min_size=1, max_size=5))
def test_without_progress_any_pattern_of_rejections_and_faults_ends_within_the_bound(
    driver: Rejecting, drawn: list[Rejection], pattern: list[Fault]
) -> None:
    driver.drawn = drawn
    decision = driver.play(calm(fault) for again in repeat(pattern) for fault in again)
    assert decision is not None
    assert decision.action is Action.STOP
    assert len(driver.history) <= 1 + MAX_REQUEUES + driver.most_restarts


@settings(deadline=None)
@given(
    rejecting,
    st.lists(rejections, min_size=1, max_size=6),
    st.lists(often, min_size=1, max_size=5),
    st.sampled_from(["same", "reset", "edited"]),
)
def test_launches_in_which_results_are_rejected_end_too(
    driver: Rejecting, drawn: list[Rejection], pattern: list[Fault], how: str
) -> None:
    driver.drawn = drawn
    launch_again_and_again(driver, pattern, how)


@settings(deadline=None, max_examples=300)
@given(
    room=st.sampled_from(list(ROOMS.values())),
    bad=st.sets(st.tuples(st.integers(2, 6), st.integers(0, 3), st.integers(11, 45)), max_size=40),
    finite=st.booleans(),
    skip=st.booleans(),
    restarts=st.sampled_from([0, 1, 3, 100]),
    steps=st.sampled_from([(20,), (10, 20), (10, 20, 30, 40)]),
)
def test_chance_condemns_only_what_a_lower_rung_did_better_than_and_always_ends(
    room: dict[str, object],
    bad: set[tuple[int, int, int]],
    *,
    finite: bool,
    skip: bool,
    restarts: int,
    steps: tuple[int, ...],
) -> None:
    """No truth at all: any rank, in any attempt, at any step."""
    world = World(
        lambda now: (now.attempt, now.rank, now.step) in bad,
        **room,  # type: ignore[arg-type]
        finite=finite,
        skip_bad_data=skip,
        max_restarts=restarts,
        steps=steps,
    )
    world.play()
    assert len(world.decisions) <= 1 + most_restarts(restarts)
    if finite:
        assert not world.standing("condemned")
        assert not world.standing("suspect")
    assert min(steps) not in {*world.standing("condemned"), *world.standing("suspect")}
