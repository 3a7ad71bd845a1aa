"""Resume goes down the ladder by evidence: what is refused and why, and what must never be chosen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import holdfast
from holdfast.checkpoint.choose.resolver import resolve_resume
from holdfast.errors import IncompleteStateError, NoValidRungError, UsageError
from holdfast.journal.events import DecisionMade, Warned
from holdfast.journal.reader import read_journal
from holdfast.record.attempts import attempt_numbers
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, claim
from holdfast.record.lineage import read_timeline
from holdfast.record.standing import Standing, StandingBook
from kit.checkpoints import save_stock
from kit.damage import (
    DAMAGE,
    flip_shard,
)
from kit.runs import events_in, rejections
from kit.tiny import Outcome, build, checkpoints, train, tree


def trained(tmp_path: Path, until: int = 6) -> Path:
    """A run directory with checkpoints of steps 3 and 6 (or up to `until`)."""
    train(tmp_path / "run", until=until)
    return tmp_path / "run"


def check_same(outcome: Outcome, reference: Outcome, until: int) -> None:
    assert outcome.losses == {s: reference.losses[s] for s in range(outcome.started_at + 1, until + 1)}
    assert outcome.samples == {s: reference.samples[s] for s in range(outcome.started_at + 1, until + 1)}
    if until == 12:
        assert outcome.parameters == reference.parameters


def test_a_first_start_is_a_valid_rung(tmp_path: Path) -> None:
    """Case transformers#40790."""
    assert train(tmp_path / "run", until=2).started_at == 0


def test_two_and_three_resumes_in_one_run_end_bitwise_equal(
    tmp_path: Path, longer_reference: Outcome
) -> None:
    """Scenario 21, same world size; epochs end at every fifth batch, so epoch boundaries are crossed."""
    run_dir = tmp_path / "run"
    for until in (4, 5, 8, 12):
        outcome = train(run_dir, until=until)
        check_same(outcome, longer_reference, until)
    assert outcome.started_at == 8


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_resume_at_any_step_repeats_and_skips_no_sample(
    tmp_path: Path, longer_reference: Outcome, stop: int
) -> None:
    """Cases accelerate#2823, #2016, meta-pytorch/data#1437: also just before and after an epoch's end."""
    train(tmp_path / "run", until=stop)
    outcome = train(tmp_path / "run", until=12)
    assert outcome.started_at == stop
    check_same(outcome, longer_reference, 12)


@pytest.mark.parametrize(("damage", "reason"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_used(
    tmp_path: Path, longer_reference: Outcome, damage: Callable[[Path, Path], None], reason: str
) -> None:
    """Scenario 9; cases transformers#35782, diffusion-pipe#159, pytorch#126952, Automodel#3261."""
    run_dir = trained(tmp_path)
    newest, older = checkpoints(run_dir)
    damage(newest, older)
    before = tree(newest)
    outcome = train(run_dir, until=12)
    assert outcome.started_at == 3
    check_same(outcome, longer_reference, 12)
    reasons = rejections(run_dir)[newest.name]
    assert reasons[0].startswith(reason), reasons
    assert tree(newest) == before, "a damaged checkpoint is evidence and must not be touched"


def test_when_nothing_can_be_used_the_run_refuses_instead_of_starting_over(tmp_path: Path) -> None:
    run_dir = trained(tmp_path)
    for path in checkpoints(run_dir):
        flip_shard(path)
    with pytest.raises(NoValidRungError) as refused:
        train(run_dir, until=12)
    for path in checkpoints(run_dir):
        assert path.name in str(refused.value)
    assert "altered" in str(refused.value)
    last = events_in(run_dir, DecisionMade)[-1]
    assert last.chosen == "refused"
    assert train(run_dir, until=2, checkpoint_resume_from="fresh").started_at == 0
    assert len(checkpoints(run_dir)) == 3, "starting over leaves the old ones where they are"


def test_deleted_checkpoints_do_not_look_like_a_first_start(tmp_path: Path) -> None:
    run_dir = trained(tmp_path)
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(NoValidRungError, match="its directory is gone"):
        train(run_dir, until=12)


@pytest.mark.parametrize(
    "latest", [b"", b"\xff\x00garbage\n" * 50, b"step_00000099-deadbeef\n", None, "partial"]
)
def test_a_broken_latest_hint_changes_nothing(
    tmp_path: Path, longer_reference: Outcome, latest: bytes | str | None
) -> None:
    """Scenario 7: empty, garbage, dangling, missing, or naming a partial directory."""
    run_dir = trained(tmp_path)
    hint = run_dir / "checkpoints" / "latest"
    if latest is None:
        hint.unlink()
    elif isinstance(latest, str):
        partial = run_dir / "checkpoints" / "step_00000009-0badc0de"
        partial.mkdir()
        (partial / "__0_0.distcp").write_bytes(b"half")
        hint.write_text(f"{partial.name}\n")
    else:
        hint.write_bytes(latest)
    outcome = train(run_dir, until=12)
    assert outcome.started_at == 6
    check_same(outcome, longer_reference, 12)


def test_a_dangling_latest_link_changes_nothing(tmp_path: Path) -> None:
    run_dir = trained(tmp_path)
    hint = run_dir / "checkpoints" / "latest"
    hint.unlink()
    hint.symlink_to("nowhere")
    assert train(run_dir, until=7).started_at == 6


def test_a_rollback_reaches_the_same_step_again_without_mixing(
    tmp_path: Path, longer_reference: Outcome
) -> None:
    """Scenario 27: two checkpoints of one step; later resumes follow the lineage, never the abandoned one."""
    run_dir = trained(tmp_path)
    abandoned, older = checkpoints(run_dir)
    shard = abandoned / "__0_0.distcp"
    good = shard.read_bytes()
    flip_shard(abandoned)
    outcome = train(run_dir, until=8, checkpoint_save_at_end=False)
    assert outcome.started_at == 3
    assert len([path for path in checkpoints(run_dir) if path.name.startswith("step_00000006")]) == 2
    shard.write_bytes(good)  # its bytes are right again, yet it is of a timeline that was left
    new_six = next(p for p in checkpoints(run_dir) if p.name.startswith("step_00000006") and p != abandoned)
    flip_shard(new_six)
    outcome = train(run_dir, until=12)
    assert outcome.started_at == 3, "the abandoned checkpoint of step 6 must not be picked"
    check_same(outcome, longer_reference, 12)
    last = events_in(run_dir, DecisionMade)[-1]
    why = {option.option: option.why for option in last.rejected}
    book = StandingBook(ControlDirectory.open(run_dir))
    assert book.of(abandoned.name[14:]) == book.of(new_six.name[14:]) == Standing.ABANDONED
    assert book.of(older.name[14:]) == Standing.VERIFIED
    assert why[abandoned.name][0].startswith("abandoned")
    assert why[new_six.name][0].startswith("altered")


@pytest.mark.drill
def test_a_condemned_checkpoint_is_used_only_when_forced_by_name(tmp_path: Path) -> None:
    run_dir = trained(tmp_path)
    newest = checkpoints(run_dir)[0]
    control = ControlDirectory.open(run_dir)
    fence = Fence(control, claim(control, "operator", 5.0).epoch)
    StandingBook(control).append(
        fence, newest.name[14:], Standing.CONDEMNED, ["NaN three steps after loading it"]
    )
    with pytest.raises(NoValidRungError, match="condemned"):
        train(run_dir, until=7, checkpoint_resume_from="6", control_lease_ttl=2.0)
    assert train(run_dir, until=7, checkpoint_resume_from="6", checkpoint_force=True).started_at == 6


def test_a_condemned_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run_dir = trained(tmp_path)
    control = ControlDirectory.open(run_dir)
    fence = Fence(control, claim(control, "operator", 2.0).epoch)
    StandingBook(control).append(fence, checkpoints(run_dir)[0].name[14:], Standing.CONDEMNED, ["said so"])
    assert train(run_dir, until=4, control_lease_ttl=2.0).started_at == 3


def test_resume_from_a_step_or_a_path(tmp_path: Path, longer_reference: Outcome) -> None:
    run_dir = trained(tmp_path, until=9)
    outcome = train(run_dir, until=12, checkpoint_resume_from="3")
    assert outcome.started_at == 3
    check_same(outcome, longer_reference, 12)
    six = next(path for path in checkpoints(run_dir) if path.name.startswith("step_00000006"))
    other = train(tmp_path / "other", until=9, checkpoint_resume_from=str(six))
    assert other.started_at == 6
    check_same(other, longer_reference, 9)
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    with pytest.raises(UsageError, match="no such directory"):
        train(run_dir, until=12, checkpoint_resume_from=str(tmp_path / "nowhere"))
    with pytest.raises(NoValidRungError, match="names step 5"):
        train(run_dir, until=12, checkpoint_resume_from="5")


def told(run_dir: Path) -> list[str]:
    return [
        line.body.message
        for line in read_journal(run_dir / "journal")
        if isinstance(line.body, Warned) and "resume_from" in line.body.message
    ]


def test_resume_from_is_where_a_run_begins_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the setting left in the TOML every launch began there again, and abandoned what was between."""
    run_dir = trained(tmp_path, until=9)
    assert train(run_dir, until=6, checkpoint_resume_from="3").started_at == 3
    assert not told(run_dir)
    for until, at in ((7, 6), (8, 7), (10, 8)):
        assert train(run_dir, until=until, checkpoint_resume_from="3").started_at == at
    assert len(told(run_dir)) == 3
    assert "checkpoint.resume_from = '3' was applied by attempt 2" in told(run_dir)[0]
    assert "going on from step_00000006" in told(run_dir)[0]
    assert "start once with checkpoint.force = true" in caplog.text
    abandoned = [line for line in read_timeline(ControlDirectory.open(run_dir)).abandoned if line.step < 9]
    assert [line.step for line in abandoned] == [6], "only what the first application went back past"

    assert train(run_dir, until=11, checkpoint_resume_from="6").started_at == 6, "another value counts"
    assert train(run_dir, until=12, checkpoint_resume_from="6").started_at == 11
    assert train(run_dir, until=13).started_at == 12
    assert train(run_dir, until=7, checkpoint_resume_from="6").started_at == 6, "it was taken away meanwhile"
    forced = {"checkpoint_resume_from": "6", "checkpoint_force": True}
    assert train(run_dir, until=8, **forced).started_at == 6
    assert "is applied again, because checkpoint.force is set" in told(run_dir)[-1]


def test_fresh_is_where_a_run_begins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = trained(tmp_path)
    starts = [train(run_dir, until=n, checkpoint_resume_from="fresh").started_at for n in (4, 5, 6)]
    assert starts == [0, 4, 5]
    forced = {"checkpoint_resume_from": "fresh", "checkpoint_force": True}
    assert train(run_dir, until=4, **forced).started_at == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train(run_dir, until=5, **forced).started_at == 4, "a scheduler that queues it again is nobody"


def test_a_start_that_was_told_where_to_begin_and_failed_is_told_again(tmp_path: Path) -> None:
    run_dir = trained(tmp_path)
    with pytest.raises(NoValidRungError, match="names step 5"):
        train(run_dir, until=9, checkpoint_resume_from="5")
    with pytest.raises(NoValidRungError, match="names step 5"):
        train(run_dir, until=9, checkpoint_resume_from="5")
    assert train(run_dir, until=4, checkpoint_resume_from="3").started_at == 3
    origin = next((run_dir / "origin").glob("*.json"))
    origin.write_bytes(b"torn")
    assert train(run_dir, until=5, checkpoint_resume_from="3").started_at == 4, "its name still counts"
    found = resolve_resume(run_dir, resume_from="3")
    assert (found.step, found.chosen[:13]) == (5, "step_00000005")
    assert "was applied by attempt" in found.why[-1]
    assert resolve_resume(run_dir, resume_from="3", force=True).step == 3


def test_a_run_begun_from_another_runs_checkpoint_goes_back_to_it(
    tmp_path: Path, longer_reference: Outcome
) -> None:
    run_dir = trained(tmp_path)
    six = checkpoints(run_dir)[0]
    other = tmp_path / "other"
    train(other, until=7, checkpoint_resume_from=str(six), checkpoint_save_at_end=False)
    outcome = train(other, until=12)
    assert outcome.started_at == 6, "nothing was saved yet: the origin is the only rung"
    check_same(outcome, longer_reference, 12)


def test_parts_that_a_named_checkpoint_lacks_are_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    model, *_ = build()
    stock = save_stock(tmp_path / "step-6", {"model": model.state_dict()})
    begin = {"checkpoint_resume_from": str(stock), "checkpoint_interval": 100}
    with pytest.raises(IncompleteStateError, match=r"checkpoint\.fresh_parts = 'optimizer,schedule,data'"):
        train(tmp_path / "run", until=9, **begin)
    with pytest.raises(
        IncompleteStateError, match=r"does not hold schedule, data: .*'optimizer,schedule,data'"
    ):
        train(tmp_path / "run", until=9, checkpoint_fresh_parts="optimizer", **begin)
    with pytest.raises(IncompleteStateError, match="names optimiser; this script tracks model, optimizer"):
        train(tmp_path / "run", until=9, checkpoint_fresh_parts="optimiser", **begin)
    assert not (tmp_path / "run" / "origin").exists(), "nothing was begun"
    assert not checkpoints(tmp_path / "run")

    fresh = {**begin, "checkpoint_fresh_parts": "optimizer,schedule,data"}
    begun = train(tmp_path / "run", until=8, checkpoint_save_at_end=False, **fresh)
    assert begun.started_at == 6
    new = train(tmp_path / "new", until=2)
    assert list(begun.losses.values()) == list(new.losses.values()), (
        "the weights were as new: all is the same"
    )
    again = train(tmp_path / "run", until=8, **fresh)
    assert (again.started_at, again.losses) == (6, begun.losses), (
        "nothing was saved: it begins there once more"
    )
    assert train(tmp_path / "run", until=9, **fresh).started_at == 8


@pytest.mark.parametrize("tracked", ["under another name", "not at all"])
def test_a_plain_directory_whose_optimizer_has_another_name_is_refused_and_not_half_loaded(
    tmp_path: Path, tracked: str
) -> None:
    model, optimizer, *_ = build()
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer), "epoch": 3}
    stock = save_stock(tmp_path / "step-6", state)

    def begin(name: str, **settings: object) -> holdfast.Run:
        model, optimizer, *_ = build()
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_resume_from=str(stock), **settings)
        run.track(model=model, **({name: optimizer} if name else {}))
        run.start()
        run.close()
        return run

    name = "optimizer" if tracked == "under another name" else ""
    with pytest.raises(
        IncompleteStateError, match=r"holds optim, .*not tracked.*run\.track\(optim=…\)"
    ) as raised:
        begin(name)
    word = "optimizer,optim" if name else "optim"
    assert f"checkpoint.fresh_parts = {word!r}" in str(raised.value)
    assert begin("optim").step == 6
    assert begin(name, checkpoint_fresh_parts=word, checkpoint_force=True).step == 6
    told = [line.body.message for line in read_journal(tmp_path / "run" / "journal")
            if isinstance(line.body, Warned)]  # fmt: skip
    assert "epoch: in the directory, and not tracked" in told


def test_fresh_parts_are_for_what_resume_from_names_and_for_nothing_saved_since(tmp_path: Path) -> None:
    run_dir = trained(tmp_path, until=6)
    fresh = {"checkpoint_fresh_parts": "optimizer,schedule,data"}
    six = next(path for path in checkpoints(run_dir) if path.name.startswith("step_00000006"))
    anew, exact = tmp_path / "anew", train(tmp_path / "whole", until=9)
    begun = train(anew, until=7, checkpoint_resume_from=str(six), **fresh)
    assert (begun.started_at, begun.samples[7] == exact.samples[7]) == (6, False)
    assert train(anew, until=8, checkpoint_resume_from=str(six), **fresh).samples[8] != exact.samples[8]
    other = train(tmp_path / "other", until=9, checkpoint_resume_from=str(six))
    assert other.parameters == exact.parameters, "without the word everything goes on"

    assert train(run_dir, until=9, **fresh).parameters == exact.parameters, (
        "an ordinary resume: nothing is new"
    )
    back = {"checkpoint_resume_from": "6", "checkpoint_force": True}
    assert train(run_dir, until=9, **back, **fresh).parameters != exact.parameters
    assert train(run_dir, until=9, **back).parameters == exact.parameters


def test_a_checkpoint_without_a_data_position_does_not_begin_the_data_again_unasked(tmp_path: Path) -> None:
    def go(run_dir: Path, *, loader: bool, **settings: object) -> list[int]:
        run = holdfast.Run(run_dir=run_dir, **settings)
        run.track(model=build()[0])
        feed = run.feed([1, 2, 3]) if loader else None
        run.start()
        run.begin_step()
        drawn = [feed.next()] if feed is not None else []
        run.end_step()
        run.finish()
        return drawn

    go(tmp_path / "run", loader=False)
    with pytest.raises(IncompleteStateError, match=r"no data position.*checkpoint\.fresh_parts = 'data'"):
        go(tmp_path / "run", loader=True)
    (one,) = checkpoints(tmp_path / "run")
    begin = {"checkpoint_resume_from": str(one), "checkpoint_fresh_parts": "data"}
    assert go(tmp_path / "run", loader=True, **begin) == [1]
    with pytest.raises(IncompleteStateError, match="this script has no data feed"):
        go(tmp_path / "run", loader=False)


def test_checkpoints_of_another_run_under_the_root_are_not_overlooked(tmp_path: Path) -> None:
    run_dir = trained(tmp_path)
    whose = f"no record of having saved it; run {ControlDirectory.open(run_dir).run_id} in {run_dir} has"
    with pytest.raises(NoValidRungError, match=whose):
        train(tmp_path / "other", until=3, checkpoint_root=str(run_dir / "checkpoints"))


def test_every_attempt_is_numbered_once_and_has_one_head(tmp_path: Path) -> None:
    run_dir = trained(tmp_path)
    train(run_dir, until=7)
    control = ControlDirectory.open(run_dir)
    assert attempt_numbers(control) == [1, 2]
    for number in (1, 2):
        assert (control.attempt(number) / "head.json").exists()
        assert (control.attempt(number) / "decisions" / "resume.json").exists()
        assert (control.attempt(number) / "end.json").exists()
