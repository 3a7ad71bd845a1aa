"""Operators' requests: durable, journalled, beside a live run too, and obeyed by a resume."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint.choose.ladder import AVOIDED
from holdfast.checkpoint.choose.resolver import resolve_resume
from holdfast.checkpoint.format.manifest import parse_name
from holdfast.config import Settings
from holdfast.errors import NoValidRungError
from holdfast.journal.events import DecisionMade, OperatorActed
from holdfast.journal.reader import read_journal
from holdfast.launch.nodes.attempt import RoundPlace, _begin_next
from holdfast.policy import Action, PastAttempt
from holdfast.policy import Decision as Decided
from holdfast.policy.results import Orders
from holdfast.record import operator
from holdfast.record.attempts import (
    EndRecord,
    attempt_numbers,
    begin_attempt,
    end_attempt,
    latest_head,
)
from holdfast.record.decisions import RECOVERY, decision_path
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.history import keep_incident
from holdfast.record.launches import VARIABLE, LaunchInfo
from holdfast.record.lease import Fence, LeaseKeeper, claim
from holdfast.record.operator import OperatorRequest, budget_reset, in_force, paused, pinned
from holdfast.record.standing import Standing, StandingBook
from holdfast.train import membership
from kit.commands import ckpt_json
from kit.damage import flip_shard
from kit.harness import wait_until
from kit.runs import events_in, rejections
from kit.tiny import Outcome, checkpoints, forked, train


def acts(control: ControlDirectory) -> list[OperatorActed]:
    return events_in(control.path, OperatorActed)


def resume_evidence(run_dir: Path) -> list[str]:
    """Of the last attempt."""
    lines = read_journal(run_dir / "journal")
    return next(
        line.body.evidence
        for line in reversed(lines)
        if isinstance(line.body, DecisionMade) and line.body.about == "resume"
    )


# --- requests ----------------------------------------------------------------------------------------------


def test_nothing_is_in_force_in_a_new_run(control: ControlDirectory) -> None:
    found = in_force(control)
    assert (found.paused, found.budget_reset, found.pin, found.exclusions) == (None, None, None, [])
    assert not (control.path / "operator").exists(), "reading makes nothing"


def test_each_request_is_durable_and_journalled_with_who_and_why(control: ControlDirectory) -> None:
    operator.pause(control, "maintenance", "alice")
    assert paused(control) is not None
    operator.unpause(control, "done", "bob")
    assert paused(control) is None
    operator.pause(control, "again", "alice")
    holding = paused(ControlDirectory.open(control.path))
    assert holding is not None
    assert holding.describe() == "alice: again"
    operator.ask_to_exclude(control, "node-b", "1", "hot", "alice")
    operator.ask_to_readmit(control, "node-b", "1", "cooled", "bob")
    told = [(act.action, act.subject, act.reason, act.by) for act in acts(control)]
    assert told == [
        ("pause", "", "maintenance", "alice"),
        ("unpause", "", "done", "bob"),
        ("pause", "", "again", "alice"),
        ("exclude", "node-b, device 1", "hot", "alice"),
        ("readmit", "node-b, device 1", "cooled", "bob"),
    ]


@pytest.mark.parametrize("name", ["000009-paused.json", "000002-unheard-of.json", "nonsense.json"])
def test_in_doubt_recovery_is_paused(control: ControlDirectory, name: str) -> None:
    operator.pause(control, "why", "alice")
    operator.unpause(control, "why", "alice")
    assert paused(control) is None
    (control.path / "operator" / "recovery" / name).write_bytes(b"{")
    assert paused(control) == OperatorRequest()


def test_a_reset_names_the_last_attempt_that_no_longer_counts(run_dir: Path) -> None:
    control = ControlDirectory.open(run_dir)
    assert budget_reset(control) is None
    assert operator.reset_budget(control, "the switch was replaced", "alice") == 1
    assert budget_reset(control) == 1
    train(run_dir, until=10)
    assert budget_reset(control) == 1
    assert operator.reset_budget(control, "and again", "alice") == 2
    assert budget_reset(control) == 2


def test_a_reset_that_cannot_be_read_resets_nothing(control: ControlDirectory) -> None:
    operator.reset_budget(control, "why", "alice")
    (control.path / "operator" / "budget" / "000002-reset.json").write_bytes(b"{")
    assert budget_reset(control) == 0
    (control.path / "operator" / "budget" / "000001-reset.json").write_bytes(b"{")
    assert budget_reset(control) is None


def test_requests_need_no_lease_and_do_not_disturb_who_holds_it(run_dir: Path) -> None:
    control = ControlDirectory.open(run_dir)
    lost: list[str] = []
    held = claim(control, "launch", 5.0)
    keeper = LeaseKeeper(control, held, lost.append)
    operator.pause(control, "why", "alice")
    operator.pin(control, checkpoints(run_dir)[0].name, "why", "alice")
    Fence(control, held.epoch).check("go on")
    keeper.release()
    assert lost == []


# --- a pin -------------------------------------------------------------------------------------------------


def test_a_pin_is_followed_once_by_default_and_the_run_is_as_if_it_had_stopped_there(
    run_dir: Path, tmp_path: Path
) -> None:
    control = ControlDirectory.open(run_dir)
    three = checkpoints(run_dir)[-1].name
    operator.pin(control, three, "the loss went up", "alice")
    assert ckpt_json("locate", run_dir)["chosen"] == three
    reference = train(tmp_path / "reference", until=12)
    back = train(run_dir, until=12)
    assert back.started_at == 3
    assert back.parameters == reference.parameters
    assert "pinned by alice: the loss went up; the pinned checkpoint" in resume_evidence(run_dir)[0]
    assert pinned(control) is None, "once"
    assert train(run_dir, until=13).started_at == 12
    assert not any(act.action == "used" for act in acts(control))


def test_a_pin_that_is_kept_holds_until_it_is_taken_back(run_dir: Path) -> None:
    control = ControlDirectory.open(run_dir)
    six = checkpoints(run_dir)[1].name
    operator.pin(control, six, "why", "alice", once=False)
    assert [train(run_dir, until=8).started_at for _ in range(2)] == [6, 6]
    operator.unpin(control, "enough", "alice")
    assert pinned(control) is None
    assert train(run_dir, until=9).started_at == 8


def test_a_pin_goes_before_resume_from(run_dir: Path) -> None:
    operator.pin(ControlDirectory.open(run_dir), checkpoints(run_dir)[1].name, "why", "alice")
    outcome = train(run_dir, until=10, checkpoint_resume_from="fresh", checkpoint_save_at_end=False)
    assert outcome.started_at == 6


def test_a_pin_made_while_another_is_used_is_not_lost_with_it(run_dir: Path) -> None:
    control = ControlDirectory.open(run_dir)
    _, six, three = checkpoints(run_dir)
    operator.pin(control, six.name, "first", "alice")
    first = pinned(control)
    assert first is not None
    operator.pin(control, three.name, "second thoughts", "alice")
    held = claim(control, "launch", 5.0)
    operator.use_up(control, Fence(control, held.epoch), first, attempt=2)
    left = pinned(control)
    assert left is not None
    assert left.checkpoint == three.name


def test_an_abandoned_checkpoint_may_be_pinned_and_becomes_part_of_the_line_again(run_dir: Path) -> None:
    nine, six, _ = checkpoints(run_dir)
    control = ControlDirectory.open(run_dir)
    operator.pin(control, six.name, "back", "alice")
    assert train(run_dir, until=8).started_at == 6
    book = StandingBook(control)
    assert book.of(nine.name[14:]) is Standing.ABANDONED
    operator.pin(control, nine.name, "forth", "alice")
    assert train(run_dir, until=10).started_at == 9
    assert book.of(nine.name[14:]) is Standing.VERIFIED
    head = latest_head(control)
    assert head is not None
    assert head.checkpoint == nine.name[14:]
    assert train(run_dir, until=11).started_at == 10, "an ordinary resume goes on from there"


def condemn(run_dir: Path, newest: Path) -> None:
    control = ControlDirectory.open(run_dir)
    held = claim(control, "operator", 5.0)
    keeper = LeaseKeeper(control, held, lambda why: None)
    StandingBook(control).append(Fence(control, held.epoch), newest.name[14:], Standing.CONDEMNED, ["NaN"])
    keeper.release()


def remove(run_dir: Path, newest: Path) -> None:
    shutil.rmtree(newest)


def alter(run_dir: Path, newest: Path) -> None:
    flip_shard(newest)


@pytest.mark.parametrize(
    ("spoil", "why"), [(condemn, "condemned: pin it with --force"), (remove, "missing"), (alter, "altered")]
)
def test_a_pin_that_cannot_be_used_is_refused_and_nothing_else_taken(
    run_dir: Path, spoil: object, why: str
) -> None:
    control = ControlDirectory.open(run_dir)
    newest = checkpoints(run_dir)[0]
    spoil(run_dir, newest)  # type: ignore[operator]
    operator.pin(control, newest.name, "because", "alice")
    with pytest.raises(NoValidRungError) as caught:
        train(run_dir, until=10)
    message = str(caught.value)
    assert why in message
    assert "alice: because" in message
    assert f"holdfast control unpin {run_dir}" in message
    assert pinned(control) is not None, "it was not used"
    head = latest_head(control)
    assert head is not None
    assert head.attempt == 1, "no later attempt trained"
    operator.unpin(control, "never mind", "alice")
    assert train(run_dir, until=10).started_at == (9 if spoil is None else 6)


def test_a_condemned_one_is_used_when_it_is_forced(run_dir: Path) -> None:
    newest = checkpoints(run_dir)[0]
    condemn(run_dir, newest)
    control = ControlDirectory.open(run_dir)
    operator.pin(control, newest.name, "the data was at fault", "alice", force=True)
    assert ckpt_json("locate", run_dir)["chosen"] == newest.name
    assert train(run_dir, until=10, checkpoint_save_at_end=False).started_at == 9
    assert train(run_dir, until=10, checkpoint_save_at_end=False).started_at == 6, "once only"


def test_a_damaged_pin_record_still_pins_and_forces_nothing(run_dir: Path) -> None:
    control = ControlDirectory.open(run_dir)
    newest = checkpoints(run_dir)[0]
    operator.pin(control, newest.name, "why", "alice", force=True, once=False)
    next((control.path / "operator" / "pin").glob("*.json")).write_bytes(b"")
    found = pinned(control)
    assert found is not None
    assert (found.checkpoint, found.force, found.once) == (newest.name, False, True)


def test_retention_keeps_what_is_pinned(run_dir: Path) -> None:
    from holdfast.checkpoint.format.manifest import CheckpointRoot
    from holdfast.checkpoint.retention import Retention
    from holdfast.policy.upkeep import RetentionRules as Rules

    three = checkpoints(run_dir)[-1]
    control = ControlDirectory.open(run_dir)
    rules = Rules(keep_last=2)

    def plan() -> dict[int, tuple[bool, str]]:
        items = Retention(control, CheckpointRoot(run_dir / "checkpoints"), rules).plan()
        return {item.name.step: (item.keep, item.reason) for item in items}

    assert plan()[3][0] is False
    operator.pin(control, three.name, "why", "alice")
    assert plan()[3] == (True, "an operator pinned it")


# --- what a recovery decision avoids -----------------------------------------------------------------------


def train_avoiding(run_dir: Path, avoid: list[str], until: int = 10) -> Outcome:
    """As a restart under the launcher whose decision said so. It saves nothing."""
    control = ControlDirectory.open(run_dir)
    held = claim(control, "launch", 5.0)
    keeper = LeaseKeeper(control, held, lambda why: None)
    info = LaunchInfo(
        run_dir=str(control.path), run_id=control.run_id, launch="launch", attempt=2, epoch=held.epoch,
        node="a", orders=Orders(avoid=avoid),
    )  # fmt: skip
    os.environ[VARIABLE] = info.to_environment()[VARIABLE]
    try:
        return train(run_dir, until=until, checkpoint_save_at_end=False)
    finally:
        del os.environ[VARIABLE]
        keeper.release()


def test_a_rung_that_recovery_avoids_is_passed_over_with_that_reason(run_dir: Path) -> None:
    nine = checkpoints(run_dir)[0].name
    assert train_avoiding(run_dir, [nine], until=8).started_at == 6
    assert rejections(run_dir) == {nine: ["avoided: the recovery decision was to resume below it"]}


def test_a_pin_goes_before_what_recovery_avoids(run_dir: Path) -> None:
    nine = checkpoints(run_dir)[0].name
    operator.pin(ControlDirectory.open(run_dir), nine, "I know", "alice")
    assert train_avoiding(run_dir, [nine]).started_at == 9


def test_avoiding_everything_is_refused_and_never_a_fresh_start(run_dir: Path) -> None:
    every = [path.name for path in checkpoints(run_dir)]
    with pytest.raises(NoValidRungError, match="avoided: the recovery decision"):
        train_avoiding(run_dir, every)
    head = latest_head(ControlDirectory.open(run_dir))
    assert head is not None
    assert head.attempt == 1


def test_names_that_are_no_rungs_are_avoided_without_any_harm(run_dir: Path) -> None:
    assert train_avoiding(run_dir, ["step_00000099-00000000", ""]).started_at == 9


def test_an_attempt_without_the_field_avoids_nothing() -> None:
    old = '{"run_dir":"/r","run_id":"a","launch":"b","attempt":1,"epoch":1,"node":"n"}'
    info = LaunchInfo.from_environment({VARIABLE: old})
    assert info is not None
    assert info.orders == Orders()


def test_a_resume_killed_before_it_used_the_pin_up_leaves_it_in_force(run_dir: Path) -> None:
    """At least once: the pin is used up only after the choice is durable."""
    control = ControlDirectory.open(run_dir)
    six = checkpoints(run_dir)[1].name
    operator.pin(control, six, "why", "alice")

    def work() -> None:
        from holdfast.checkpoint.choose import resume

        resume.use_up = lambda *args: os.kill(os.getpid(), 9)  # type: ignore[assignment]
        train(run_dir, until=10)

    assert forked(work) == -9
    found = pinned(control)
    assert found is not None
    assert found.checkpoint == six
    name = parse_name(six)
    assert name is not None
    head = latest_head(control)
    assert head is not None
    assert head.checkpoint == name.id
    outcome = wait_until(lambda: train(run_dir, until=8), 60, "the run resumes")
    assert outcome.started_at == 6
    assert pinned(control) is None


def decided(run_dir: Path, *avoid: str) -> None:
    """An attempt that ended with the decision to resume below these."""
    control, fence = attempted(run_dir)
    decision = Decided(
        action=Action.LOWER_RUNG, exit_code=0, reason="", evidence=[], restarts_left=2, avoid=[*avoid]
    )
    number = max(attempt_numbers(control))
    create_record(decision_path(control, number, RECOVERY), decision)
    failed = PastAttempt(number=number, launch="launch", outcome="failed", highest_step=9)
    keep_incident(control, failed, decision)
    end = EndRecord(outcome="failed", exit_code=16, cause="", highest_step=9, at=0.0)
    end_attempt(control, fence, number, end)


def attempted(run_dir: Path) -> tuple[ControlDirectory, Fence]:
    """One more attempt, which has no end yet."""
    control = ControlDirectory.open(run_dir)
    held = claim(control, "launch", 5.0)
    fence = Fence(control, held.epoch)
    begin_attempt(control, fence, "launch", 1)
    LeaseKeeper(control, held, lambda why: None).release()
    return control, fence


def begun_by(run_dir: Path, who: str) -> list[str]:
    """What the next attempt is told to avoid, or is expected to."""
    control = ControlDirectory.open(run_dir)
    if who == "holdfast recover":
        return [one.name for one in resolve_resume(run_dir).candidates if AVOIDED in one.reasons]
    held = claim(control, "later", 5.0)
    try:
        if who == "holdfast run":
            place = RoundPlace(node="a", group_rank=0, nodes=1, world_size=1)
            return _begin_next(control, place, held, [], 3, "").orders.avoid
        here = membership.Here(node="a")
        return membership.begin(control, Fence(control, held.epoch), Settings(), here, "later").orders.avoid
    finally:
        LeaseKeeper(control, held, lambda why: None).release()


@pytest.mark.parametrize("who", ["holdfast run", "a plain start", "holdfast recover"])
def test_what_a_decision_avoids_stays_so_whoever_starts_the_run(run_dir: Path, who: str) -> None:
    """It is kept up until there is progress: a reset of the budget is none, nor is an attempt that nobody
    decided about, and that died before it had resumed."""
    nine = checkpoints(run_dir)[0].name
    decided(run_dir, nine)
    operator.reset_budget(ControlDirectory.open(run_dir), "cause found", "alice")
    attempted(run_dir)
    assert begun_by(run_dir, who) == [nine]
