"""Retention: what may go and what must stay, by policy; and how it goes, whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.checkpoint import read_back
from holdfast.checkpoint import retention as effects
from holdfast.checkpoint.choose.ladder import take_inventory
from holdfast.checkpoint.choose.resolver import resolve_resume
from holdfast.checkpoint.format import structure
from holdfast.checkpoint.format.manifest import MANIFEST, CheckpointRoot, parse_name
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.read_back import ReadBack, last_read_back, reading, unread
from holdfast.checkpoint.retention import JudgedCheckpoint, Retention, empty
from holdfast.errors import LeaseLostError, NoValidRungError, UsageError
from holdfast.journal.events import CheckpointsDeleted, CopyQuarantined, CopyReadBack, Warned
from holdfast.journal.writer import JournalWriter
from holdfast.policy.upkeep import Condition, RetentionRules, RetentionRuling, Stored, retain
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, LeaseKeeper, claim
from holdfast.record.standing import Standing, StandingBook
from kit.commands import ckpt, ckpt_json, command
from kit.damage import flip_shard
from kit.harness import await_child, is_alive, wait_until
from kit.runs import events_in
from kit.tiny import (
    checkpoints,
    counting_file_operations,
    die,
    end_with,
    forked,
    let_saves_end,
    steps_of,
    train,
)

HOUR = 3600.0

# --- the policy ---------------------------------------------------------------------------------------------


def candidate(step: int, standing: str = "committed", **changes: Any) -> Stored:
    fields = {"condition": Condition.SOUND, "on_line": True, "created": step * 60.0} | changes
    return Stored(id=f"{step:04d}", step=step, standing=standing, **fields)


def kept(verdicts: list[RetentionRuling]) -> list[int]:
    return [int(verdict.id[:4]) for verdict in verdicts if verdict.keep]


def why(verdicts: list[RetentionRuling], step: int) -> str:
    return next(verdict.reason for verdict in verdicts if verdict.id == f"{step:04d}")


STANDINGS = ["committed"] * 6 + ["verified", "proven", *map(str, Standing), "of a newer release"]
CONDITIONS = [Condition.SOUND] * 8 + list(Condition)
CANDIDATES = st.builds(
    candidate,
    st.integers(1, 400),
    st.sampled_from(STANDINGS),
    condition=st.sampled_from(CONDITIONS),
    on_line=st.sampled_from([True, True, True, False]),
    created=st.floats(0, 1e6),
    pinned=st.sampled_from([""] * 5 + ["the head"]),
    read_back=st.booleans(),
)


def histories() -> st.SearchStrategy[list[Stored]]:
    """Mostly usable, so that there is something to delete; each with anything wrong that can be."""
    return st.lists(CANDIDATES, max_size=14, unique_by=lambda c: c.step)


RULES = st.builds(
    RetentionRules,
    keep_last=st.sampled_from([2, 1, 2, 3, 5, 0]),
    keep_every_steps=st.sampled_from([0, 0, 0, 7, 60]),
    keep_every_hours=st.sampled_from([0.0, 0.0, 0.0, 0.5, 24.0]),
    broken=st.booleans(),
    await_read_back=st.booleans(),
)


@settings(max_examples=250)
@given(histories(), RULES)
def test_nothing_that_was_read_back_goes_while_everything_newer_was_not(
    history: list[Stored], rules: RetentionRules
) -> None:
    """Issue point 18: `keep_last = 2` deleted the last good one in favour of two bad ones."""
    verdicts = {verdict.id: verdict for verdict in retain(history, rules)}
    for gone in (one for one in history if not verdicts[one.id].keep):
        if gone.read_back and gone.condition is Condition.SOUND and gone.standing != "condemned":
            assert any(
                one.step > gone.step and one.is_verified and one.counts and verdicts[one.id].keep
                for one in history
            )


@settings(max_examples=250)
@given(histories(), RULES)
def test_what_waits_for_a_read_back_waits_within_bounds(history: list[Stored], rules: RetentionRules) -> None:
    waiting = [one for one in retain(history, rules) if one.reason == "no newer one was read back yet"]
    assert len(waiting) <= max(2, rules.keep_last)
    assert not waiting or rules.await_read_back
    hasty = retain(history, msgspec.structs.replace(rules, await_read_back=False))
    assert {one.id for one in waiting} <= {one.id for one in hasty if not one.keep}, "it would go otherwise"


def test_one_bit_flipped_in_every_newer_one_does_not_cost_the_last_good_one() -> None:
    damaged = {"condition": Condition.BROKEN, "problem": "read back: altered"}
    rules = RetentionRules(keep_last=2, await_read_back=True)
    story = [candidate(1, read_back=True), *(candidate(step, **damaged) for step in range(2, 9))]
    assert kept(retain(story, rules)) == [8, 7, 6, 5, 4, 3, 2, 1], "what is damaged is evidence"
    assert why(retain(story, rules), 1) == "the newest on the line"
    unread = [candidate(1, read_back=True), *(candidate(step) for step in range(2, 9))]
    assert kept(retain(unread, rules)) == [8, 7, 6, 5, 1]
    assert why(retain(unread, rules), 1) == "the newest one that was read back"
    steady = [candidate(step, read_back=step < 5) for step in range(1, 6)]
    assert kept(retain(steady, rules)) == [5, 4], "no more than without, where reading keeps up"


@settings(max_examples=250)
@given(histories(), RULES)
def test_whatever_the_rules_what_may_be_needed_survives(history: list[Stored], rules: RetentionRules) -> None:
    """Cases transformers#27138 (the latest is deleted), Megatron-Bridge#4820, torchtitan#4197."""
    verdicts = {verdict.id: verdict for verdict in retain(history, rules)}
    assert set(verdicts) == {c.id for c in history}, "a verdict for each"
    assert all(verdict.reason for verdict in verdicts.values())
    left = [c for c in history if verdicts[c.id].keep]
    usable = sorted((c for c in history if c.counts), key=lambda c: c.step, reverse=True)
    for group in (
        usable,
        [c for c in usable if c.standing == "proven"],
        [c for c in usable if c.standing in ("verified", "proven", "acquitted")],
    ):
        assert not group or group[0] in left
    assert all(c in left for c in usable[: max(2, rules.keep_last)])
    for c in history:
        if c.standing == "suspect" or c.condition in (Condition.FOREIGN, Condition.UNREADABLE):
            assert c in left, c
        if c.condition is Condition.BROKEN and not (rules.broken and usable):
            assert c in left, c
        if c.pinned and c.condition is Condition.SOUND:
            assert c in left, c
    line = [c for c in history if c.on_line]
    if line and not rules.broken:
        assert max(line, key=lambda c: c.step) in left, "the newest on the line, whatever it is"
    if rules.keep_last == 0:
        assert all(c in left or c.condition is Condition.BROKEN for c in history)


@settings(max_examples=200)
@given(histories(), RULES, st.randoms())
def test_deciding_twice_deletes_nothing_more_and_the_order_does_not_matter(
    history: list[Stored], rules: RetentionRules, random: Any
) -> None:
    verdicts = retain(history, rules)
    left = [c for c in history if c.id in {v.id for v in verdicts if v.keep}]
    assert all(verdict.keep for verdict in retain(left, rules))
    shuffled = list(history)
    random.shuffle(shuffled)
    assert retain(shuffled, rules) == verdicts


@settings(max_examples=200)
@given(histories(), RULES, st.data())
def test_a_checkpoint_that_does_not_count_never_pushes_out_one_that_does(
    history: list[Stored], rules: RetentionRules, data: st.DataObject
) -> None:
    """Case Megatron-Bridge#4820: an incomplete newer directory evicts the durable one."""
    step = data.draw(st.integers(401, 500))
    extra = data.draw(
        st.sampled_from(
            [
                candidate(step, condition=Condition.BROKEN),
                candidate(step, "condemned"),
                candidate(step, "suspect"),
                candidate(step, on_line=False),
            ]
        )
    )
    assert [v for v in retain([*history, extra], rules) if v.id != extra.id] == retain(history, rules)


def test_the_last_n_are_kept_and_older_ones_go() -> None:
    verdicts = retain([candidate(step) for step in range(10, 70, 10)], RetentionRules(keep_last=3))
    assert kept(verdicts) == [60, 50, 40]
    assert why(verdicts, 60) == "the newest on the line"
    assert why(verdicts, 30) == "older than the last 3"


def test_at_least_two_are_kept_even_if_one_is_asked_for() -> None:
    assert kept(retain([candidate(step) for step in (1, 2, 3)], RetentionRules(keep_last=1))) == [3, 2]


def test_every_k_steps_keeps_the_first_at_or_after_each_multiple() -> None:
    history = [
        candidate(step) for step in range(40, 480, 40)
    ]  # 40 … 440; multiples of 100 are mostly not hit
    verdicts = retain(history, RetentionRules(keep_last=2, keep_every_steps=100))
    assert kept(verdicts) == [440, 400, 320, 200, 120]
    assert why(verdicts, 120) == "the first at or after step 100 (every 100 steps)"


def test_a_later_save_never_takes_the_place_of_the_one_kept_for_its_steps() -> None:
    """As the run goes on, pass after pass, the same ones are kept as if everything had been there at once."""
    rules = RetentionRules(keep_last=2, keep_every_steps=100, keep_every_hours=3)
    left: list[Stored] = []
    for step in range(30, 1500, 30):
        left.append(candidate(step))
        verdicts = retain(left, rules)
        left = [c for c in left if c.step in kept(verdicts)]
    at_once = retain([candidate(step) for step in range(30, 1500, 30)], rules)
    assert [c.step for c in reversed(left)] == kept(at_once)


def test_every_t_hours_keeps_the_first_of_each() -> None:
    history = [candidate(step, created=step * HOUR / 2) for step in range(1, 13)]
    assert kept(retain(history, RetentionRules(keep_last=2, keep_every_hours=2))) == [12, 11, 8, 4, 1]


def test_the_newest_proven_and_verified_stay_however_old() -> None:
    history = [candidate(1, "proven"), candidate(2, "verified"), *(candidate(s) for s in range(3, 9))]
    verdicts = retain(history, RetentionRules(keep_last=2))
    assert kept(verdicts) == [8, 7, 2, 1]
    assert (why(verdicts, 1), why(verdicts, 2)) == ("the newest proven one", "the newest verified one")


@pytest.mark.parametrize("off", [{"standing": "condemned"}, {"standing": "abandoned", "on_line": False}])
def test_condemned_and_abandoned_ones_go_once_the_line_is_well_past_them(off: dict[str, Any]) -> None:
    bad = candidate(30, **off)
    assert 30 in kept(retain([candidate(20), bad, candidate(40)], RetentionRules(keep_last=2)))
    assert 30 not in kept(retain([bad, candidate(40), candidate(50)], RetentionRules(keep_last=2)))


def test_damaged_ones_are_evidence_until_a_person_says_otherwise() -> None:
    broken = candidate(5, condition=Condition.BROKEN, problem="truncated: x")
    history = [broken, *(candidate(step) for step in (6, 7, 8))]
    assert why(retain(history, RetentionRules(keep_last=2)), 5) == "damaged, kept as evidence: truncated: x"
    verdicts = retain(history, RetentionRules(broken=True))
    assert kept(verdicts) == [8, 7, 6]
    assert kept(retain([broken], RetentionRules(broken=True))) == [5], "nothing else is left of the run"


# --- a run --------------------------------------------------------------------------------------------------


def calm(step: int, run: holdfast.Run) -> None:
    """Let the deletions of the last save end: a pass is left out while they go on."""
    names = lambda: [thread.name for thread in threading.enumerate()]  # noqa: E731
    wait_until(lambda: "holdfast-retention" not in names(), 20, "the deletion ends")


def test_a_run_deletes_after_each_commit_and_resumes_exactly(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    reference = train(tmp_path / "reference", until=9)
    keep = {
        "checkpoint_interval": 1,
        "checkpoint_keep_last": 2,
        "checkpoint_read_back": False,
        "checkpoint_keep_every_steps": 3,
    }
    seen: dict[int, list[int]] = {}

    def look(step: int, run: holdfast.Run) -> None:
        calm(step, run)
        seen[step] = steps_of(run_dir)

    train(run_dir, until=7, at_step=look, **keep)
    assert seen[4] == [3, 2]
    assert steps_of(run_dir) == [7, 6, 3]
    deleted = events_in(run_dir, CheckpointsDeleted)
    assert [parse_name(event.names[0]).step for event in deleted] == [1, 2, 4, 5]  # type: ignore[union-attr]
    assert all(event.bytes > 10_000 and event.reasons == ["older than the last 2"] for event in deleted)
    assert list((run_dir / "checkpoints" / ".trash").iterdir()) == []
    outcome = train(run_dir, until=9)
    assert outcome.started_at == 7
    assert outcome.parameters == reference.parameters
    ladder = take_inventory(ControlDirectory.open(run_dir), CheckpointRoot(run_dir / "checkpoints"), "auto",
                            force=False)  # fmt: skip
    assert [option.why for option in ladder.rejected] == [["deleted: by retention, as its record says"]]
    assert ladder.rejected[0].option.startswith("4 from step_00000001-")


def test_without_keep_last_nothing_is_deleted(tmp_path: Path) -> None:
    train(tmp_path / "run", until=6, checkpoint_interval=1)
    assert steps_of(tmp_path / "run") == [6, 5, 4, 3, 2, 1]


def test_a_run_whose_other_checkpoints_were_deleted_refuses_rather_than_start_fresh(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(
        run_dir,
        until=4,
        at_step=calm,
        checkpoint_interval=1,
        checkpoint_keep_last=2,
        checkpoint_read_back=False,
    )
    for directory in checkpoints(run_dir):
        shutil.rmtree(directory)
    for marker in run_dir.glob("attempts/*/commits/*.done"):
        marker.unlink()  # which is not durable: without it, the deletion's own record must do
    with pytest.raises(NoValidRungError, match=r"2 from step_00000001-\w+ to step_00000002-\w+: deleted"):
        train(run_dir, until=5)
    with pytest.raises(NoValidRungError, match=r"step_00000002-\w+: deleted: by retention"):
        train(run_dir, until=5, checkpoint_resume_from="2")


def test_a_damaged_newer_checkpoint_does_not_evict_the_sound_older_one(tmp_path: Path) -> None:
    """Case Megatron-Bridge#4820; here every newer one is damaged as soon as it is committed."""
    run_dir = tmp_path / "run"

    def damage(step: int, run: holdfast.Run) -> None:
        if step > 3:
            next(checkpoints(run_dir)[0].glob("*.distcp")).unlink()

    train(
        run_dir,
        until=7,
        at_step=damage,
        checkpoint_interval=1,
        checkpoint_keep_last=2,
        checkpoint_read_back=False,
    )
    assert steps_of(run_dir) == [7, 6, 5, 4, 3, 2]
    sound = [path.name[:13] for path in checkpoints(run_dir) if verify(path).sound]
    assert sound == ["step_00000007", "step_00000002"]


def test_a_retention_that_fails_is_a_warning_and_the_save_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    rename = os.rename

    def refuse(source: Any, target: Any, *, dst_dir_fd: int | None = None, **others: Any) -> None:
        if dst_dir_fd is not None and Path(f"/proc/self/fd/{dst_dir_fd}").readlink().name == ".trash":
            raise PermissionError(13, "Permission denied", str(source))
        rename(source, target, dst_dir_fd=dst_dir_fd, **others)

    monkeypatch.setattr(os, "rename", refuse)
    train(run_dir, until=4, checkpoint_interval=1, checkpoint_keep_last=2, checkpoint_read_back=False)
    assert steps_of(run_dir) == [4, 3, 2, 1]
    warned = [event.message for event in events_in(run_dir, Warned) if "retention" in event.message]
    assert len(warned) == 2
    assert all("Permission denied" in message for message in warned)
    assert events_in(run_dir, CheckpointsDeleted) == []
    monkeypatch.undo()
    train(run_dir, until=5, checkpoint_interval=1, checkpoint_keep_last=2, checkpoint_read_back=False)
    assert steps_of(run_dir) == [5, 4, 3], "the head and its parent stay"


def test_training_does_not_wait_for_a_slow_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    go_on = threading.Event()
    monkeypatch.setattr(effects, "empty", lambda trashed: go_on.wait(20) and empty(trashed))
    monkeypatch.setattr(effects, "CLOSE_WAIT", 0.1)
    train(run_dir, until=6, checkpoint_interval=1, checkpoint_keep_last=2, checkpoint_read_back=False)
    trash = run_dir / "checkpoints" / ".trash"
    assert [path.name[:13] for path in trash.iterdir()] == ["step_00000001"]
    assert steps_of(run_dir) == [6, 5, 4, 3, 2], "one deletion at a time; the rest is decided again"
    go_on.set()
    wait_until(lambda: not list(trash.iterdir()), 10, "the deletion ends")


# --- the effects --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the checkpoints 1 to 5."""
    run_dir = tmp_path_factory.mktemp("prepared") / "run"
    train(run_dir, until=5, checkpoint_interval=1)
    return run_dir


def open_retention(run_dir: Path, **rules: Any) -> tuple[ControlDirectory, Retention]:
    control = ControlDirectory.open(run_dir)
    root = CheckpointRoot(run_dir / "checkpoints")
    return control, Retention(control, root, RetentionRules(**({"keep_last": 2} | rules)))


@contextmanager
def holding(control: ControlDirectory) -> Iterator[Fence]:
    held = claim(control, "test", 5.0)
    keeper = LeaseKeeper(control, held, lambda why: None)
    try:
        yield Fence(control, held.epoch)
    finally:
        keeper.release()


def reasons(plan: list[JudgedCheckpoint]) -> dict[int, str]:
    return {item.name.step: item.reason for item in plan}


def gone(plan: list[JudgedCheckpoint]) -> list[int]:
    return [item.name.step for item in plan if not item.keep]


def delete(run_dir: Path, **rules: Any) -> None:
    control, retention = open_retention(run_dir, **rules)
    with holding(control) as fence:
        outcome = retention.take_away(retention.plan(), fence)
        empty(outcome.trashed)


def test_killed_at_every_file_operation_a_checkpoint_is_whole_or_gone(run_dir: Path, tmp_path: Path) -> None:
    """Every cut leaves each checkpoint whole, or only trash of it; the next start clears that up."""
    seen: list[str] = []
    count = Path(shutil.copytree(run_dir, tmp_path / "count"))
    with counting_file_operations(lambda number, name, args: seen.append(name)):
        delete(count, keep_last=4)
    assert {"link", "rename", "fsync", "unlink", "rmdir"} <= set(seen)
    outcomes = {(len(checkpoints(count)) == 5, bool(list((count / "checkpoints/.trash").iterdir())))}
    for point in range(len(seen)):
        copy = Path(shutil.copytree(run_dir, tmp_path / f"run-{point}"))

        def killed(copy: Path = copy, point: int = point) -> None:
            with counting_file_operations(lambda number, name, args: die() if number == point else None):
                delete(copy, keep_last=4)

        assert forked(killed) == -9
        found = checkpoints(copy)
        there = len(found) == 5
        assert [path.name[:13] for path in found[:4]] == [f"step_{n:08d}" for n in (5, 4, 3, 2)]
        assert there or len(found) == 4
        assert all(verify(path).sound for path in found), "a half-deleted checkpoint has its name"
        trash = copy / "checkpoints" / ".trash"
        outcomes.add((there, trash.is_dir() and bool(list(trash.iterdir()))))
        control, root = ControlDirectory.open(copy), CheckpointRoot(copy / "checkpoints")
        ladder = take_inventory(control, root, "auto", force=False)
        assert [rung.step for rung in ladder.rungs] == [int(path.name[5:13]) for path in found]
        assert not any("missing" in why for option in ladder.rejected for why in option.why)
    assert outcomes == {(True, False), (False, True), (False, False)}, "cuts before, during and after it"
    assert train(tmp_path / "run-0", until=6).started_at == 5
    left = next(p for p in range(len(seen)) if list((tmp_path / f"run-{p}/checkpoints").glob(".trash/*")))
    assert train(tmp_path / f"run-{left}", until=6).started_at == 5
    assert list((tmp_path / f"run-{left}" / "checkpoints" / ".trash").iterdir()) == []


def test_an_attempt_that_lost_its_lease_deletes_nothing(run_dir: Path) -> None:
    """One owner, and it is fenced (case transformers#20988: two ranks delete the same directory)."""
    control, retention = open_retention(run_dir)
    fence = Fence(control, claim(control, "old", 5.0).epoch)
    plan = retention.plan()
    assert gone(plan) == [3, 2, 1]
    claim(control, "old", 5.0)  # the next attempt
    outcome = retention.take_away(plan, fence)
    assert isinstance(outcome.error, LeaseLostError)
    assert gone(outcome.items) == []
    assert outcome.trashed == []
    assert steps_of(run_dir) == [5, 4, 3, 2, 1]


def test_what_somebody_reads_is_left_for_later(run_dir: Path) -> None:
    control, retention = open_retention(run_dir)
    with holding(control) as fence:
        with reading(checkpoints(run_dir)[3]):
            outcome = retention.take_away(retention.plan(), fence)
            assert outcome.error is None
            assert reasons(outcome.items)[2] == "somebody is reading it"
            assert steps_of(run_dir) == [5, 4, 2]
        assert gone(retention.take_away(retention.plan(), fence).items) == [2]
    assert steps_of(run_dir) == [5, 4]


# --- who lists first and reads later, beside a live run -----------------------------------------------------


@contextmanager
def once_before(module: Any, name: str, act: Callable[[], None], *, at: str = "") -> Iterator[list[int]]:
    """Do this before the first call of `module.name` (with a path that ends so); the others go through."""
    original, done = getattr(module, name), list[int]()

    def called(*args: Any, **kwargs: Any) -> Any:
        if not done and (not at or str(args[0]).endswith(at)):
            done.append(1)
            act()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, called)
        yield done


@pytest.mark.parametrize(
    ("args", "hook"),
    [
        (["verify", "RUN"], (read_back, "OpenFile")),
        (["verify", "RUN/checkpoints"], (read_back, "OpenFile")),
        (["verify", "--tier", "global", "RUN"], (read_back, "OpenFile")),
        (["ls", "RUN"], (structure, "_look")),
        (["gc", "RUN", "--dry-run", "--keep-last", "4"], (structure, "_look")),
    ],
)
def test_what_retention_takes_away_between_the_list_and_the_look_is_no_fault(
    run_dir: Path, args: list[str], hook: tuple[Any, str]
) -> None:
    with once_before(*hook, lambda: delete(run_dir)) as done:
        told = ckpt(*(word.replace("RUN", str(run_dir)) for word in args))
    assert done
    assert steps_of(run_dir) == [5, 4]
    assert told.code == 0, told.text
    assert not re.search("missing|not sound|no such|broken|damaged", told.text), told.text
    if args[0] == "verify":
        assert told.out.count("taken away meanwhile: deleted by retention, 20") == 3
        assert "2 checkpoints, nothing wrong found" in told.out


def test_verify_tells_programs_what_is_gone_and_what_was_lost_is_a_fault(run_dir: Path) -> None:
    with once_before(read_back, "OpenFile", lambda: delete(run_dir)):
        told = ckpt_json("verify", run_dir)
    assert told["sound"]
    assert [bool(row["gone"]) for row in told["checkpoints"]] == [False, False, True, True, True]
    last = checkpoints(run_dir)[-1]
    with once_before(read_back, "OpenFile", lambda: shutil.rmtree(last)):
        lost = ckpt("verify", run_dir)
    assert lost.code == 1, lost.text
    assert f"{last.name}: not sound" in lost.out
    assert "missing" in lost.out


@pytest.mark.parametrize("locked", [True, False])
def test_what_is_being_read_stays_and_without_locks_its_end_is_no_fault(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    def without(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    third = checkpoints(run_dir)[2]
    if not locked:
        monkeypatch.setattr(
            read_back, "fcntl", SimpleNamespace(LOCK_SH=1, LOCK_EX=2, LOCK_NB=4, flock=without)
        )
    with once_before(structure, "open_beneath", lambda: delete(run_dir), at=third.name) as done:
        told = ckpt("verify", run_dir)
    assert done
    assert told.code == 0, told.text
    assert steps_of(run_dir) == ([5, 4, 3] if locked else [5, 4])
    assert (f"{third.name}: sound" in told.out) is locked


def test_a_reader_waits_for_a_deletion_that_is_under_way(run_dir: Path) -> None:
    """It held the lock already, and then gave up: the reader has it afterwards."""
    fifth = checkpoints(run_dir)[-1]
    held, read = threading.Event(), list[bool]()

    def look() -> None:
        with reading(fifth) as there, unread(fifth) as free:
            read.extend((there, free))

    with unread(fifth) as free:
        assert free
        looking = threading.Thread(target=look)
        looking.start()
        assert not held.wait(0.1)
        assert read == []
    looking.join(10)
    assert read == [True, False], "it is there, and kept from deletion"


def test_a_checkpoint_that_was_named_and_deleted_is_said_to_be(run_dir: Path, tmp_path: Path) -> None:
    first, newest = checkpoints(run_dir)[-1], checkpoints(run_dir)[0]
    delete(run_dir)
    said = re.compile(r"deleted:? by retention, 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \(.+\)")
    for args in (
        ["verify", first],
        ["verify", "--tier", "global", run_dir, "1"],
        ["diff", newest, first],
        ["diff", first, newest],
        ["export", first, tmp_path / "out"],
        ["locate", run_dir, "--resume-from", "1"],
    ):
        told = ckpt(*args)
        assert told.code == (18 if args[0] == "locate" else 2), told.text
        assert said.search(told.text), told.text
    assert not (tmp_path / "out").exists()
    pin = command("control", "pin", run_dir, "1", "--reason", "back", "--yes")
    assert pin.code == 2
    assert said.search(pin.text)
    for resume_from in ("1", str(first)):
        with pytest.raises((NoValidRungError, UsageError), match=said):
            train(run_dir, until=6, checkpoint_resume_from=resume_from)
    assert (
        "no such directory" in ckpt("verify", run_dir / "checkpoints" / "step_00000009-0123456789abcdef").text
    )


def test_one_that_is_deleted_while_it_is_exported_or_compared_is_said_to_be(
    run_dir: Path, tmp_path: Path
) -> None:
    first, newest = checkpoints(run_dir)[-1], checkpoints(run_dir)[0]
    for args in (["export", first, tmp_path / "out"], ["diff", newest, first], ["verify", first]):
        copy = Path(shutil.copytree(run_dir, tmp_path / f"run-{args[0]}"))
        words = [
            Path(str(one).replace(str(run_dir), str(copy))) if one in (first, newest) else one for one in args
        ]
        with once_before(read_back, "OpenFile", lambda copy=copy: delete(copy), at=first.name) as done:
            told = ckpt(*words)
        assert done
        assert told.code == 2, told.text
        assert "deleted by retention, 20" in told.text
        assert "not sound" not in told.text
    assert not (tmp_path / "out").exists()


def test_the_resolver_looks_again_when_the_run_went_on_past_its_ladder(run_dir: Path) -> None:
    def go_on() -> None:
        for until in (8, 11):  # the second attempt lets go of what the first came from
            settings = {"checkpoint_keep_last": 2, "checkpoint_read_back": False}
            train(run_dir, until=until, checkpoint_interval=1, **settings)

    with once_before(read_back, "OpenFile", go_on) as done:
        found = resolve_resume(run_dir)
    assert done
    assert 5 not in steps_of(run_dir)
    assert found.step == 11, found.why
    assert found.storage_alarm == []
    assert "missing" not in str(found.candidates)


def test_a_live_run_with_retention_is_verified_without_a_fault(run_dir: Path) -> None:
    """Each look meets deletions; without the rule above about every second one ended with 1."""
    stop = run_dir / "enough"

    def work() -> None:
        def at_step(step: int, run: holdfast.Run) -> None:
            if stop.exists():
                raise SystemExit(0)

        train(run_dir, until=10_000, at_step=at_step, checkpoint_interval=1, checkpoint_keep_last=2)

    pid = os.fork()
    if pid == 0:
        end_with(work)
    try:
        wait_until(lambda: 1 not in steps_of(run_dir), 30, "retention is at work")
        looks = [ckpt("verify", run_dir) for _ in range(12)] + [ckpt("ls", run_dir) for _ in range(12)]
    finally:
        stop.touch()
        assert await_child(pid, 30.0) == 0
    assert [look.text for look in looks if look.code] == []


def test_standing_decides_what_stays(run_dir: Path) -> None:
    control, retention = open_retention(run_dir)
    ids = {name.step: name.id for name in CheckpointRoot(run_dir / "checkpoints").names()}
    with holding(control) as fence:
        book = StandingBook(control)
        book.append(fence, ids[1], Standing.PROVEN, ["test"])
        book.append(fence, ids[2], Standing.SUSPECT, ["test"])
        book.append(fence, ids[3], Standing.CONDEMNED, ["test"])
    plan = retention.plan()
    assert gone(plan) == [3]
    assert reasons(plan)[1] == "the newest proven one"
    assert reasons(plan)[2] == "suspect: under investigation"
    assert reasons(plan)[3] == "condemned, and 2 newer sound ones are on the line"


def test_what_the_run_did_not_save_is_never_touched(run_dir: Path) -> None:
    """Another run's checkpoint, one with another manifest, and a directory that is only a name."""
    root = run_dir / "checkpoints"
    newest, *_, oldest = checkpoints(run_dir)
    shutil.copytree(oldest, root / "step_00000009-aaaaaaaa")
    (root / "step_00000008-bbbbbbbb").mkdir()
    shutil.rmtree(oldest)
    shutil.copytree(newest, oldest)
    plan = open_retention(run_dir, broken=True)[1].plan()
    assert gone(plan) == [3, 2]
    for step in (9, 8):
        assert reasons(plan)[step] == "not this run's: there is no record of having saved it"
    assert reasons(plan)[1] == "not this run's: its manifest is not the one that was committed"


def test_a_manifest_of_a_newer_release_is_not_damage(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.checkpoint.format import manifest as manifests

    oldest = checkpoints(run_dir)[-1]
    monkeypatch.setattr(manifests, "FORMAT", 0)  # as an older release sees what this one wrote
    plan = open_retention(run_dir, broken=True)[1].plan()
    assert gone(plan) == []
    assert reasons(plan)[1].startswith("cannot be judged: unreadable-manifest")
    monkeypatch.undo()
    data = (oldest / MANIFEST).read_bytes()
    (oldest / MANIFEST).write_bytes(data[:-40])
    plan = open_retention(run_dir, keep_last=0, broken=True)[1].plan()
    assert gone(plan) == [1], "cut short, it is damage"


def test_a_pass_looks_again_at_the_newest_and_at_what_it_would_delete(run_dir: Path) -> None:
    """What is remembered of an earlier pass never costs a sound checkpoint, nor evidence."""
    _, retention = open_retention(run_dir, keep_every_steps=1)
    assert gone(retention.plan()) == []
    files = [next(path.glob("*.distcp")) for path in checkpoints(run_dir)]
    files[0].unlink()  # of the newest: so 5 no longer counts
    files[4].unlink()  # and 1 is damaged too
    retention._rules = RetentionRules(keep_last=2)
    plan = retention.plan()
    assert gone(plan) == [2]
    assert reasons(plan)[5].startswith("damaged, kept as evidence: missing")
    assert reasons(plan)[1].startswith("damaged, kept as evidence: missing")


def test_abandoned_checkpoints_go_once_the_new_line_is_past_them(run_dir: Path) -> None:
    """Scenario 27: after a rollback the former line is deleted, but not before the new one is long enough."""
    keep = {"checkpoint_interval": 1, "checkpoint_keep_last": 2, "checkpoint_read_back": False}
    train(run_dir, until=4, checkpoint_resume_from="3", **keep)
    assert sorted(steps_of(run_dir)) == [2, 3, 4, 4, 5], "4 and 5 of the former line are newer than all but 4"
    train(run_dir, until=8, at_step=calm, **keep)
    assert sorted(steps_of(run_dir)) == [3, 4, 7, 8], "the head and its parent, and the last two"
    told = reasons(open_retention(run_dir)[1].plan())
    assert told[4] == "attempt 3 came from it"
    assert told[3] == "the parent of the one that attempt 3 came from"


# --- reading back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.drill)])
def test_with_one_bit_flipped_after_each_commit_the_last_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Issue point 18, from flip to resume: two bad ones had cost the last good one."""
    monkeypatch.setattr(read_back, "SETTLE", 0.0)
    run_dir = tmp_path / "run"
    root = CheckpointRoot(run_dir / "checkpoints")

    def flipped_and_read(step: int, run: holdfast.Run) -> None:
        """Before steps 4, 7, 10 …: what was saved last is settled, as if much time had passed."""
        if step % 3 != 1 or step == 1:
            return
        let_saves_end(run)
        name = root.names()[0]
        if step > 4:
            flip_shard(root.committed(name))
        run._session.saving.at_boundary()
        wait_until(lambda: last_read_back(root, name) is not None, 20, f"{name} is read back")

    settings: dict[str, Any] = {"checkpoint_keep_last": 2, "checkpoint_async_save": asynchronous}
    outcome = train(run_dir, until=19, at_step=flipped_and_read, checkpoint_save_at_end=False, **settings)
    assert set(outcome.losses) == set(range(1, 20)), "training went on"
    found = {name.step: last_read_back(root, name) for name in root.names()}
    assert sorted(found) == [3, 6, 9, 12, 15, 18], "bad ones are evidence, and push nothing out"
    assert {step: record.sound for step, record in found.items() if record is not None} == {
        3: True, 6: False, 9: False, 12: False, 15: False, 18: False,
    }  # fmt: skip
    bad = [body.checkpoint for body in events_in(run_dir) if isinstance(body, CopyQuarantined)]
    assert bad == [str(name) for name in reversed(root.names()[:-1])]
    assert [body.step for body in events_in(run_dir) if isinstance(body, CopyReadBack)] == [3]
    rows = {row["step"]: row for row in ckpt_json("ls", run_dir)["checkpoints"]}
    assert (rows[3]["read_back"]["sound"], rows[6]["read_back"]["sound"]) == (True, False)
    assert "altered" in ckpt("ls", run_dir).out
    assert train(run_dir, until=4, checkpoint_save_at_end=False).started_at == 3


class Trainer:
    """The trainer's end alone, with a run that was trained before."""

    def __init__(self, run_dir: Path, **more: Any) -> None:
        self.control = ControlDirectory.open(run_dir)
        self.root = CheckpointRoot(run_dir / "checkpoints")
        held = claim(self.control, "launch", 5.0)
        self.fence = Fence(self.control, held.epoch)
        self.journal = JournalWriter(self.control.journal, "rank-0", 9)
        chosen = {"rate": 0.0, "settle": 0.0} | more
        self.reader = ReadBack(
            control=self.control, root=self.root, epoch=held.epoch, attempt=9, journal=self.journal, **chosen
        )

    def read(self) -> dict[int, bool]:
        return {
            name.step: found.sound
            for name in self.root.names()
            if (found := last_read_back(self.root, name)) is not None
        }


def test_reading_back_is_modest_paced_and_over_with_its_trainer(run_dir: Path) -> None:
    """Lowest priority, no faster than told, newest first; killed it is replaced, and it outlives nobody."""
    trainer = Trainer(run_dir, rate=20_000.0)
    try:
        trainer.reader.poll()
        assert trainer.reader.pid is None, "nothing was committed: nothing runs"
        trainer.reader.committed()
        trainer.reader.poll()
        first = trainer.reader.pid
        assert first is not None
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, first) == 19, 10, "it has stepped back")
        assert not trainer.read(), "a few tens of kilobytes take more than a second at this rate"
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_alive(first), 10, "it is dead")
        trainer.reader._order = msgspec.structs.replace(trainer.reader._order, rate=0.0)
        trainer.reader.committed()
        trainer.reader.poll()
        wait_until(lambda: trainer.read() == dict.fromkeys(range(1, 6), True), 20, "another reads all")
        second = trainer.reader.pid
        assert second not in (None, first)
    finally:
        trainer.reader.close()
    assert second is not None
    assert not is_alive(second)
    times = [found.at for name in trainer.root.names() if (found := last_read_back(trainer.root, name))]
    assert times == sorted(times), "the newest first"
    copied = CheckpointRoot(run_dir.parent / "copied")
    shutil.copytree(trainer.root.path, copied.path)
    assert last_read_back(copied, trainer.root.names()[0]) is None, "what was read is the other copy"


def test_a_trainer_that_is_killed_takes_its_reader_with_it(run_dir: Path) -> None:
    told, tell = os.pipe()

    def work() -> None:
        trainer = Trainer(run_dir, rate=1000.0)
        trainer.reader.committed()
        trainer.reader.poll()
        pid = trainer.reader.pid
        assert pid is not None
        os.write(tell, str(pid).encode())
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19, 10, "it is at work")
        die()

    assert forked(work) == -signal.SIGKILL
    pid = int(os.read(told, 32))
    wait_until(lambda: not is_alive(pid), 10, "it is gone too")


def test_a_reader_that_keeps_dying_is_given_up_and_told_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(run_dir)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(6):
        trainer.reader.committed()
        trainer.reader.poll()
        process = trainer.reader._child
        if process is not None:
            process.wait(10)
    assert trainer.reader.pid is None
    told = [body.message for body in events_in(run_dir) if isinstance(body, Warned)]
    assert [text for text in told if "reads checkpoints back ended" in text] != []
    assert len([text for text in told if "reads checkpoints back ended" in text]) == 1
