"""Which checkpoints fall under suspicion together, what becomes of that in the records, and what survives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

from holdfast.account.words import incident_text
from holdfast.checkpoint import retention
from holdfast.checkpoint.choose.ladder import (
    doubtful_with,
    highest_committed_step,
    still_open,
    take_inventory,
    write_down,
    write_findings,
)
from holdfast.checkpoint.format.manifest import MANIFEST, CheckpointName, CheckpointRoot, derive_id
from holdfast.config.settings import LaunchSettings, RunSettings, Settings
from holdfast.journal import events
from holdfast.journal.reader import read_journal
from holdfast.journal.writer import JournalWriter
from holdfast.launch.incident.decision import Circumstances, decide_lost
from holdfast.launch.nodes.attempt import RoundPlace, lead
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.evidence import Loss, LostNode
from holdfast.policy.recovery import Decision
from holdfast.policy.results import (
    Findings,
    How,
    Kind,
    Orders,
    RankResult,
    Rejection,
    Settled,
    Trial,
    Window,
    settled_as,
)
from holdfast.policy.signs import Action
from holdfast.policy.upkeep import Condition, RetentionRules
from holdfast.record import attempts
from holdfast.record.attempts import (
    SETTLED,
    HeadRecord,
    begin_attempt,
    record_rejection,
    record_settled,
    settled_steps,
    write_head,
)
from holdfast.record.decisions import RECOVERY, decision_path
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.history import keep_incident, past_attempts
from holdfast.record.launches import progress_file
from holdfast.record.lease import Claim, Fence, claim
from holdfast.record.lineage import CommitRecord, record_commit, record_done
from holdfast.record.operator import exclude, excluded, skips
from holdfast.record.standing import Standing, StandingBook

SOUND = retention._Examined(condition=Condition.SOUND, problem="", created=0.0, bytes=1)
P = 10
"""Steps of probation."""


class Story:
    """A run's records, written by hand as ranks and launchers would."""

    def __init__(self, path: Path) -> None:
        self.control, _ = ControlDirectory.open_or_create(path / "run")
        self.held: Claim = claim(self.control, "launch", 5.0)
        self.fence = Fence(self.control, self.held.epoch)
        self.book = StandingBook(self.control)
        self.root = CheckpointRoot(path / "run" / "checkpoints")
        self.settings = Settings(run=RunSettings(dir=str(path / "run")))
        self.number = 0
        self.restarts_left: int | None = None
        self.parent: str | None = None

    def attempt(self, source: str = "", *saves: int) -> list[str]:
        """An attempt that came from a checkpoint and saved some; their names."""
        begun = begin_attempt(self.control, self.fence, "launch", 1, nodes=["a"], placement="a[0]")
        self.number, self.parent = begun.number, source.rpartition("-")[2] or None
        step = int(source[5:13]) if source else 0
        head = HeadRecord(attempt=self.number, checkpoint=self.parent, step=step)
        write_head(self.control, self.fence, head)
        return [self.save(step) for step in saves]

    def save(self, step: int) -> str:
        name = CheckpointName(step, derive_id("run", self.number, step, 1))
        record = CommitRecord(
            id=name.id, step=step, parent=self.parent, attempt=self.number, manifest="0" * 32
        )
        with self.fence.guard("save"):
            record_commit(self.control, self.fence, record)
        self.root.committed(name).mkdir(parents=True)
        (self.root.committed(name) / MANIFEST).write_bytes(b"{}")
        record_done(self.control, record)
        self.parent = name.id
        return str(name)

    def judge(self, standing: Standing, *names: str) -> None:
        for name in names:
            self.book.append(self.fence, name[14:], standing, ["because"])

    def doubtful(self, rung: str) -> list[str]:
        return doubtful_with(self.control, rung, P)

    def rungs(self) -> list[str]:
        return [one.name for one in take_inventory(self.control, self.root, "auto", force=False).rungs]

    @contextlib.contextmanager
    def journal(self) -> Iterator[JournalWriter]:
        with contextlib.closing(JournalWriter(self.control.journal, "agent-a", self.number)) as journal:
            yield journal

    def journalled(self) -> list[tuple[str, str]]:
        lines = read_journal(self.control.journal)
        return [(b.checkpoint, b.standing) for b in (line.body for line in lines)
                if isinstance(b, events.StandingChanged)]  # fmt: skip

    def breach(self, step: int) -> None:
        """Its ranks told that what was loaded does not go on."""
        found = Rejection(kind=Kind.PROBATION, step=step, reasons=["a jump"], in_probation=True)
        assert record_rejection(self.control, self.number, found)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def decision(**more: object) -> Decision:
    plain = {"action": Action.LOWER_RUNG, "exit_code": 0, "reason": "why", "evidence": [], "restarts_left": 1}
    return Decision(**{**plain, "grounds": ["seen"], **more})  # type: ignore[arg-type]


# -- who falls with whom ------------------------------------------------------------------------------------


def test_what_was_saved_inside_the_probation_of_an_unproven_head_falls_with_it(story: Story) -> None:
    (ten, twenty) = story.attempt("", 10, 20)
    (later,) = story.attempt(twenty, 25)
    story.attempt(later)
    assert story.doubtful(later) == [twenty, later]
    assert story.doubtful(ten) == [ten, twenty, later], "a resume would take those first"


def test_a_head_that_was_proven_or_acquitted_or_long_ago_does_not_fall_with_what_was_saved_from_it(
    story: Story,
) -> None:
    (_, twenty) = story.attempt("", 10, 20)
    (later, much_later) = story.attempt(twenty, 25, 35)
    assert story.doubtful(much_later) == [much_later], "saved after the head's probation"
    for standing in (Standing.PROVEN, Standing.ACQUITTED):
        story.judge(standing, twenty)
        assert story.doubtful(later) == [later, much_later]
    story.judge(Standing.CONDEMNED, much_later)
    assert story.doubtful(later) == [later], "that one is judged already"


def test_what_is_not_of_this_run_stands_alone(story: Story) -> None:
    story.attempt("", 10)
    assert story.doubtful("ckpt-7") == ["ckpt-7"]
    assert story.doubtful("") == []


# -- what is written down -----------------------------------------------------------------------------------


def test_findings_are_recorded_once_and_never_against_a_later_word(story: Story) -> None:
    ten, twenty = story.attempt("", 10, 20)
    found = decision(suspect=[twenty], skip=Window(0, 3, 3))
    with story.journal() as journal:
        for _ in range(2):
            write_findings(story.control, story.fence, journal, story.number, found)
        assert story.book.of(twenty[14:]) is Standing.SUSPECT
        assert story.book.evidence_of(twenty[14:]) == ["seen", "why"]
        assert story.rungs() == [ten], "a suspect is no rung"
        assert skips(story.control) == [Window(0, 3, 3)]
        story.judge(Standing.CONDEMNED, twenty)
        write_findings(story.control, story.fence, journal, story.number, decision(acquit=[ten, twenty]))
        assert story.book.of(twenty[14:]) is Standing.CONDEMNED, "only what is suspect is acquitted"
        assert story.book.of(ten[14:]) is Standing.COMMITTED
        story.judge(Standing.SUSPECT, twenty)
        write_findings(story.control, story.fence, journal, story.number, decision(acquit=[twenty]))
        write_findings(story.control, story.fence, journal, story.number, decision(suspect=["ckpt-7"]))
    assert story.rungs() == [twenty, ten], "acquitted: usable again"
    assert story.journalled() == [(twenty, "suspect"), (twenty, "acquitted")]


def test_a_damaged_record_is_said_and_still_counts(story: Story) -> None:
    (ten,) = story.attempt("", 10)
    story.judge(Standing.SUSPECT, ten)
    (path,) = (story.control.standing / ten[14:]).iterdir()
    path.write_bytes(b"{")
    assert story.book.of(ten[14:]) is Standing.SUSPECT
    assert story.book.evidence_of(ten[14:]) == ["its record cannot be read"]
    assert story.book.evidence_of("00000000") == []


def test_a_suspect_or_condemned_step_is_no_progress(story: Story) -> None:
    ten, twenty = story.attempt("", 10, 20)
    assert highest_committed_step(story.root.path, story.control) == 20
    story.judge(Standing.SUSPECT, twenty)
    assert highest_committed_step(story.root.path, story.control) == 10
    story.judge(Standing.ACQUITTED, twenty)
    assert highest_committed_step(story.root.path, story.control) == 20
    story.judge(Standing.CONDEMNED, ten, twenty)
    assert highest_committed_step(story.root.path, story.control) == 0


# -- what the next attempt is told --------------------------------------------------------------------------


def test_only_what_is_suspect_still_is_on_trial(story: Story) -> None:
    ten, twenty = story.attempt("", 10, 20)
    past = PastAttempt(
        number=1,
        launch="l",
        outcome="failed",
        decided=Findings(suspect=[ten, twenty], trial=Trial(suspects=[], until=23)),
    )
    assert still_open(story.control, [past]) == Orders()
    story.judge(Standing.SUSPECT, ten, twenty)
    assert still_open(story.control, [past]).trial == Trial(suspects=[ten, twenty], until=23)
    story.judge(Standing.CONDEMNED, twenty)
    assert still_open(story.control, [past]).trial == Trial(suspects=[ten], until=23)


def start(story: Story) -> Orders:
    """What the leader of the next attempt announces."""
    place = RoundPlace(node="a", group_rank=0, nodes=1, world_size=1)
    attempt = lead(
        story.control, place, story.held, "127.0.0.1", HashStore(), "2",
        node_timeout=5.0, members=[], max_restarts=3,
    )  # fmt: skip
    try:
        story.restarts_left = attempt.told.restarts_left
        return attempt.told.orders
    finally:
        attempt.close()


def test_an_attempt_is_told_how_many_restarts_are_left_after_it(story: Story) -> None:
    """Point 4: with none left, nobody could find out whether what was loaded is at fault."""
    story.attempt("", 10)
    told = []
    for _ in range(5):
        killed = PastAttempt(number=story.number, launch="launch", outcome="failed", highest_step=10)
        keep_incident(story.control, killed, decision(action=Action.RESTART))
        start(story)
        told.append(story.restarts_left)
        story.number += 1
    assert told == [2, 1, 0, 0, 0]


def test_a_decision_whose_maker_died_before_writing_it_down_is_written_down_before_workers_start(
    story: Story,
) -> None:
    """The whole launch is gone: nobody will decide about that attempt again."""
    _, twenty = story.attempt("", 10, 20)
    story.attempt(twenty)
    found = decision(suspect=[twenty], trial=Trial(suspects=[twenty], until=23))
    create_record(decision_path(story.control, story.number, RECOVERY), found)
    assert start(story).trial == found.trial
    assert story.book.of(twenty[14:]) is Standing.SUSPECT
    assert story.journalled() == [(twenty, "suspect")]


def test_what_an_operator_said_after_a_decision_is_not_overruled_by_it(story: Story) -> None:
    _, twenty = story.attempt("", 10, 20)
    story.attempt(twenty)
    found = decision(suspect=[twenty], trial=Trial(suspects=[twenty], until=23))
    create_record(decision_path(story.control, story.number, RECOVERY), found)
    failed = PastAttempt(number=story.number, launch="launch", outcome="failed")
    keep_incident(story.control, failed, found)
    story.judge(Standing.ACQUITTED, twenty)
    assert start(story) == Orders()
    assert story.book.of(twenty[14:]) is Standing.ACQUITTED


def test_the_new_leader_judges_what_the_dead_one_could_not(story: Story) -> None:
    """Suspicion is written by whoever decides, and the trial is told to the next attempt."""
    ten, twenty = story.attempt("", 10, 20)
    (later,) = story.attempt(twenty, 25)
    story.breach(27)
    lost = LostNode(node="b", how=Loss.CLOSED, at=time.time(), detail="the leader died")
    known = Circumstances(lost=[lost], last_step=27)
    first = decide_lost(story.control, story.held, [], story.settings, known)
    assert first is not None
    assert (first.decision.action, first.decision.suspect) == (Action.RESTART, [])
    assert first.decision.avoid == [later], "the same checkpoint again, not what was saved from it"
    assert story.rungs() == [later, twenty, ten], "nothing is blamed yet"
    story.attempt(twenty)
    story.breach(28)
    settled = decide_lost(story.control, story.held, [], story.settings, known)
    assert settled is not None
    assert settled.decision.action is Action.LOWER_RUNG
    assert settled.decision.suspect == [twenty]
    assert story.rungs() == [ten]
    (*_, past) = past_attempts(story.control, before=99)
    assert (past.decided.suspect, past.cause, past.exit_code) == ([twenty], "checkpoint", 16)
    assert past.rejection is not None
    trial = Trial(suspects=[twenty], until=28)
    assert start(story) == Orders(avoid=[later], trial=trial)
    assert start(story).trial == trial, "whatever becomes of that attempt"


def test_a_diagnostic_save_is_named_only_if_there_is_one(story: Story) -> None:
    """Point 4: the advice pointed to one that was never made."""
    saved = str(CheckpointName(12, "0123abcd"))
    for told, there in ((saved, True), (saved, False), ("none: the step was not run again", False)):
        story.attempt("", 10)
        found = Rejection(kind=Kind.STEP, step=13, reasons=["nan"], diagnostic=told)
        record_rejection(story.control, story.number, found)
        path = story.root.diagnostic().path / saved
        if there:
            path.mkdir(parents=True)
        known = Circumstances(lost=[LostNode(node="b", how=Loss.CLOSED, at=time.time(), detail="it died")])
        story.settings = Settings(run=story.settings.run, launch=LaunchSettings(max_restarts=0))
        settled = decide_lost(story.control, story.held, [], story.settings, known)
        assert settled is not None
        assert settled.decision.action is Action.STOP
        assert settled.account is not None
        assert settled.account.files == ([str(path)] if there else [])
        assert (f"file: {path}" in incident_text(settled.account, "run")) is there
        if there:
            path.rmdir()


def test_an_attempt_lost_with_its_launch_still_tells_what_it_rejected(story: Story) -> None:
    story.attempt("", 10)
    bad = RankResult(rank=0, node="a", device="0", reasons=["nan"])
    record_rejection(
        story.control, story.number, Rejection(kind=Kind.STEP, step=13, reasons=["nan"], ranks=[bad])
    )
    (past,) = past_attempts(story.control, before=99)
    assert past.outcome == "lost"
    assert past.rejection is not None
    assert (past.rejection.step, past.placement) == (13, "a[0]")


# -- verdicts on steps --------------------------------------------------------------------------------------


def test_what_was_settled_about_steps_is_read_from_all_attempts_and_does_not_grow(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Point 16: durable, and known to every later attempt and launch."""
    monkeypatch.setattr(attempts, "MOST_SETTLED", 8)
    story.attempt("", 10)
    one = Settled(step=13, how=How.TOLERATED, window=Window(0, 12, 12), world_size=2, why="it was dropped")
    other = Settled(step=14, how=How.ACCEPTED, shown=True)
    with story.journal() as journal:
        for _ in range(2):
            found = decision(action=Action.STOP, settled=[one])
            write_findings(story.control, story.fence, journal, story.number, found)
    story.attempt("", 20)
    record_settled(story.control, story.number, other)
    assert settled_steps(story.control) == [one, other]
    for step in range(16):
        record_settled(story.control, story.number, Settled(step=step, how=How.TOLERATED))
    kept = [found.step for found in settled_steps(story.control)]
    assert kept == [13, *range(8, 16)]
    (story.control.attempt(story.number) / SETTLED).write_text("{")
    assert settled_steps(story.control) == [one], "what cannot be read is judged once more, and nothing worse"


@pytest.mark.parametrize(
    ("how", "step", "window", "world", "covered"),
    [
        (How.TOLERATED, 13, Window(0, 12, 12), 2, True),
        (How.TOLERATED, 13, None, 2, True),
        (How.TOLERATED, 13, Window(1, 12, 12), 2, False),
        (How.TOLERATED, 14, Window(0, 12, 12), 2, False),
        (How.TOLERATED, 13, Window(0, 12, 12), 4, False),
        (How.ACCEPTED, 13, Window(0, 12, 12), 2, False),
    ],
)
def test_a_verdict_is_on_one_step_and_its_data(
    how: How, step: int, window: Window | None, world: int, *, covered: bool
) -> None:
    known = [Settled(step=13, how=How.TOLERATED, window=Window(0, 12, 12), world_size=2)]
    assert (settled_as(known, how, step, window, world) is not None) is covered


# -- retention ----------------------------------------------------------------------------------------------


def test_while_a_trial_is_open_the_suspect_and_the_rungs_below_it_stay(story: Story) -> None:
    """The trial's rung, and the one below that for a second rung down, whatever the trial saves itself."""
    one, two, three, four = story.attempt("", 10, 20, 30, 40)
    story.attempt(four)
    story.judge(Standing.SUSPECT, four)

    def kept() -> set[str]:
        found = retention.Retention(story.control, story.root, RetentionRules(keep_last=1))
        found._look = lambda name: SOUND  # type: ignore[method-assign]
        return {str(item.name) for item in found.plan(story.number) if item.keep}

    assert {three, four} <= kept(), "before the trial begins"
    assert one not in kept()
    mine = story.attempt(three, 31, 32, 33)
    assert {two, three, four, *mine[1:]} <= kept(), "the trial's rung and its parent"


def test_a_node_that_turned_out_innocent_is_readmitted_with_the_decision(story: Story) -> None:
    story.attempt("", 10)
    exclude(story.control, "b", None, "step 7 was rejected there", "recovery", 1)
    failed = PastAttempt(number=story.number, launch="launch", outcome="failed")
    with story.journal() as journal:
        found = decision(action=Action.RESTART, readmit=["b"])
        write_down(story.control, story.fence, journal, failed, None, found)
    assert excluded(story.control) == []


def test_what_an_attempt_had_committed_is_progress_whoever_saw_its_end(story: Story) -> None:
    """A pod that is killed without notice leaves no end, however far it got."""
    story.attempt("", 10, 20)
    (three,) = story.attempt("", 30)
    story.attempt("")
    assert [(one.outcome, one.highest_step) for one in past_attempts(story.control)] == [
        ("lost", 20), ("lost", 30), ("lost", 0),
    ]  # fmt: skip
    story.judge(Standing.SUSPECT, three)
    assert [one.highest_step for one in past_attempts(story.control)] == [20, 0, 0]


def test_what_a_script_without_run_had_told_is_progress_whoever_saw_its_end(story: Story) -> None:
    """The same pod, with a script that saves by itself: twenty kills must not lock it out."""
    path = progress_file(story.control.path, 0)
    path.parent.mkdir()
    for step in (100, 200, 200):
        story.attempt("")
        path.write_text(f"{step}\n")
    assert [one.highest_step for one in past_attempts(story.control)] == [100, 200, 200]
    assert [one.highest_step for one in past_attempts(story.control, before=3)] == [100, 200]
    story.attempt("", 7)
    assert [one.highest_step for one in past_attempts(story.control)] == [0, 0, 0, 7], (
        "checkpoints count alone"
    )
