"""Probation in a rank: what becomes proven, what is a breach, and what a trial condemns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import pytest
from torch.distributed import HashStore

from holdfast.checkpoint.format.manifest import CheckpointName, Manifest, Versions, Windows, World, parse_name
from holdfast.errors import LeaseLostError
from holdfast.journal import Event
from holdfast.journal.events import ProbationEnded, StandingChanged, Verdict, Warned
from holdfast.journal.writer import JournalWriter
from holdfast.policy.results import How, Orders, Rerun, Settled, Trial
from holdfast.record.attempts import HeadRecord, begin_attempt, settled_steps, write_head
from holdfast.record.directory import ControlDirectory
from holdfast.record.group import Group
from holdfast.record.launches import LaunchInfo
from holdfast.record.lease import Fence, claim
from holdfast.record.lineage import CommitRecord, condemned_with, descendants, record_commit
from holdfast.record.standing import Standing, StandingBook
from holdfast.train.membership import Membership
from holdfast.train.probation import TRIES, Probation
from kit.runs import events_in

E = TypeVar("E", bound=Event)
STEPS = 6
STEADY: list[float | None] = [2.0 + 0.01 * (-1) ** i for i in range(64)]
RUNG, BELOW = CheckpointName(120, "3fa9c1d2"), CheckpointName(100, "100aaaaa")


def manifest_of(name: CheckpointName, *, samples: int = 480, world: int = 1) -> Manifest:
    return Manifest(
        format=1, id=name.id, step=name.step, parent=None, run="r", attempt=1, epoch=1, created=0.0,
        world=World(size=world), parts={}, files=[], samples=samples,
        versions=Versions(holdfast="0", torch="0", python="0"), windows=Windows(loss=STEADY),
    )  # fmt: skip


class Attempt:
    """An attempt of a run that has saved at 100 and, from there, at 120 and 125."""

    def __init__(
        self,
        control: ControlDirectory,
        *,
        launched: bool = True,
        trial: Trial | None = None,
        rerun: Rerun | None = None,
    ) -> None:
        self.control = control
        self.fence = Fence(control, claim(control, "launch", 5.0).epoch)
        self.number = begin_attempt(control, self.fence, "launch", 1).number
        self.journal = JournalWriter(control.journal, "rank-0", self.number)
        self.member = Membership(control, self.fence, self.number, "launch", self.journal)
        self.loss: float | None = 2.0
        self.group = Group(0, 1, HashStore(), None)
        self.launched = None
        if launched:
            self.launched = LaunchInfo(
                run_dir=str(control.path), run_id=control.run_id, launch="launch", attempt=self.number,
                epoch=self.fence.epoch, node="node-a", orders=Orders(rerun=rerun, trial=trial),
            )  # fmt: skip
        self.probation = self.of_rank(0)

    def of_rank(self, rank: int) -> Probation:
        group = Group(rank, 1, self.group.store, None)
        return Probation(STEPS, group, self.member, lambda: (self.loss, None), self.launched, node="node-a")

    def begin(self, rung: CheckpointName | None = RUNG, **counters: int) -> list[str]:
        manifest = manifest_of(rung) if rung is not None else None
        counted = {"step": rung.step if rung else 0, "samples": 480, "tokens": 0, **counters}
        return self.probation.begin(rung, manifest, counted)

    def train(self, first: int, losses: Sequence[float | None]) -> list[str]:
        """Steps with these recorded losses; the reasons of the first breach that is told."""
        for step, loss in enumerate(losses, start=first):
            if reasons := self.probation.observe():
                return reasons
            self.loss = loss
            self.probation.completed(step, 0.01)
        return self.probation.observe()

    def events(self, kind: type[E]) -> list[E]:
        return events_in(self.control.path, kind)


@pytest.fixture
def control(control: ControlDirectory, fence: Fence) -> ControlDirectory:
    attempt = begin_attempt(control, fence, "launch", 1).number
    write_head(control, fence, HeadRecord(attempt=attempt, checkpoint=None, step=0))
    with fence.guard("commit"):
        for step, id, parent in [
            (100, "100aaaaa", None), (120, "3fa9c1d2", "100aaaaa"), (125, "125aaaaa", "3fa9c1d2"),
        ]:  # fmt: skip
            record = CommitRecord(id=id, step=step, parent=parent, attempt=attempt, manifest="0" * 32)
            record_commit(control, fence, record)
    return control


# --- passing -----------------------------------------------------------------------------------------------


def test_a_checkpoint_is_proven_after_the_steps_of_its_probation_and_not_before(
    control: ControlDirectory, book: StandingBook
) -> None:
    """Requirement D4."""
    attempt = Attempt(control)
    assert attempt.begin() == []
    assert attempt.probation.active
    assert attempt.train(121, [2.0] * (STEPS - 1)) == []
    assert book.of(RUNG.id) is Standing.COMMITTED
    assert not attempt.events(ProbationEnded)
    attempt.train(121 + STEPS - 1, [2.0])
    assert book.of(RUNG.id) is Standing.PROVEN
    assert not attempt.probation.active
    (ended,) = attempt.events(ProbationEnded)
    assert (ended.checkpoint, ended.outcome, ended.first, ended.last) == (str(RUNG), "passed", 121, 126)
    (changed,) = attempt.events(StandingChanged)
    assert (changed.checkpoint, changed.standing) == (str(RUNG), "proven")
    attempt.train(127, [9.0] * 20)
    assert book.of(RUNG.id) is Standing.PROVEN, "what comes after probation says nothing of the checkpoint"
    assert len(attempt.events(StandingChanged)) == 1
    assert book.of("125aaaaa") is Standing.COMMITTED, "nobody loaded it"


@pytest.mark.parametrize("standing", [Standing.SUSPECT, Standing.CONDEMNED])
def test_passing_does_not_clear_what_is_suspect_or_condemned(
    control: ControlDirectory, book: StandingBook, standing: Standing
) -> None:
    """Somebody loaded it by force; that it runs is no acquittal."""
    attempt = Attempt(control)
    book.append(attempt.fence, RUNG.id, standing, [])
    attempt.begin()
    attempt.train(121, [2.0] * STEPS)
    assert book.of(RUNG.id) is standing


def test_an_acquitted_checkpoint_becomes_proven_and_a_proven_one_gets_no_second_record(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = Attempt(control)
    book.append(attempt.fence, RUNG.id, Standing.ACQUITTED, [])
    for _ in range(2):
        attempt.probation = attempt.of_rank(0)
        attempt.begin()
        attempt.train(121, [2.0] * STEPS)
        assert book.of(RUNG.id) is Standing.PROVEN
    assert len(list((control.standing / RUNG.id).iterdir())) == 2


def test_dropped_steps_do_not_count_and_are_gaps(control: ControlDirectory, book: StandingBook) -> None:
    attempt = Attempt(control)
    attempt.begin()
    for step in (121, 123, 126, 127, 129):
        attempt.train(step, [2.0])
    assert book.of(RUNG.id) is Standing.COMMITTED
    attempt.train(140, [2.0])
    assert book.of(RUNG.id) is Standing.PROVEN
    assert attempt.events(ProbationEnded)[0].last == 140


def test_a_run_that_ends_in_probation_leaves_it_unsettled(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = Attempt(control)
    attempt.begin()
    attempt.train(121, [2.0] * 3)
    attempt.probation.close()
    assert [ended.outcome for ended in attempt.events(ProbationEnded)] == ["unsettled"]
    assert book.of(RUNG.id) is Standing.COMMITTED


def test_without_a_manifest_or_with_probation_off_nothing_is_watched(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = Attempt(control)
    assert attempt.probation.begin(RUNG, None, {"step": 7}) == []
    assert not attempt.probation.active
    off = Probation(0, attempt.group, attempt.member, lambda: (9.0, None), attempt.launched)
    assert off.begin(RUNG, manifest_of(RUNG), {"step": 7}) == []
    assert not off.active
    for step in range(121, 140):
        off.completed(step, 0.01)
    assert book.of(RUNG.id) is Standing.COMMITTED
    assert not attempt.events(ProbationEnded)


def test_all_ranks_agree_on_whether_probation_is_active(control: ControlDirectory) -> None:
    """What a rank does about a bad step depends on it, so it may not differ between ranks."""
    attempt = Attempt(control, trial=Trial(suspects=[str(RUNG)], until=123))
    other = attempt.of_rank(1)
    attempt.begin(BELOW)
    other.begin(BELOW, manifest_of(BELOW), {"step": 100})
    for step in range(101, 130):
        assert attempt.probation.observe() == other.observe() == []
        assert attempt.probation.active == other.active == (step <= 123)
        assert attempt.probation.in_probation == other.in_probation == (step <= 106)
        attempt.probation.completed(step, 0.01)
        other.completed(step, 0.01)
    assert len(attempt.events(ProbationEnded)) == 1, "rank 0 alone records"


# --- a breach ----------------------------------------------------------------------------------------------


def test_a_discontinuity_is_told_at_the_next_step_and_no_standing_is_touched(
    control: ControlDirectory, book: StandingBook
) -> None:
    """Cases NeMo-RL#3544, dlrover#1097. The launcher decides what that makes of the checkpoint."""
    attempt = Attempt(control)
    attempt.begin()
    assert attempt.train(121, [2.0, 8.0, 8.0]) == []
    (reason,) = attempt.train(124, [8.0])
    assert "the loss is above" in reason
    assert "8 at step 124" in reason
    assert [ended.outcome for ended in attempt.events(ProbationEnded)] == ["breached"]
    for step in range(125, 140):
        attempt.probation.completed(step, 0.01)
    assert book.of(RUNG.id) is Standing.COMMITTED
    assert len(attempt.events(ProbationEnded)) == 1


def test_a_breach_in_the_last_step_of_probation_is_not_lost(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = Attempt(control)
    attempt.begin()
    assert attempt.train(121, [2.0] * (STEPS - 3) + [8.0] * 2) == []
    attempt.loss = 8.0
    attempt.probation.completed(120 + STEPS, 0.01)
    assert attempt.probation.active
    assert attempt.probation.observe()
    assert book.of(RUNG.id) is Standing.COMMITTED


def test_an_honest_spike_does_not_keep_a_checkpoint_from_being_proven(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = Attempt(control)
    attempt.begin()
    assert attempt.train(121, [2.0, 1e6, 2.0, 2.0, 1e6, 2.0]) == []
    assert book.of(RUNG.id) is Standing.PROVEN


def test_without_the_launcher_a_breach_is_only_warned_of(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = Attempt(control, launched=False)
    attempt.begin()
    assert attempt.train(121, [8.0] * 20) == []
    (warned,) = attempt.events(Warned)
    assert "does not go on from where it was" in warned.message
    assert f"holdfast ckpt condemn RUN_DIR {RUNG}" in warned.message
    assert [ended.outcome for ended in attempt.events(ProbationEnded)] == ["breached"]
    assert book.of(RUNG.id) is Standing.COMMITTED, "it is not proven either"


def test_counters_that_do_not_match_the_manifest_breach_at_once(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = Attempt(control)
    assert attempt.begin(samples=481) == ["the state that was loaded says samples 481, its manifest 480"]
    assert attempt.probation.observe(), "whoever did not look at the start is told at the first step"
    assert book.of(RUNG.id) is Standing.COMMITTED


def test_samples_shared_out_to_another_world_are_not_compared_but_the_step_is(
    control: ControlDirectory,
) -> None:
    attempt = Attempt(control)
    other_world = manifest_of(RUNG, world=4)
    assert attempt.probation.begin(RUNG, other_world, {"step": 120, "samples": 1920, "tokens": 1}) == []
    again = attempt.of_rank(0)
    assert again.begin(RUNG, other_world, {"step": 119, "samples": 1920, "tokens": 1})


def test_counts_of_the_whole_job_are_compared_at_any_number_of_ranks(control: ControlDirectory) -> None:
    attempt = Attempt(control)
    other_world = msgspec.structs.replace(manifest_of(RUNG, world=4), counts="job")
    assert attempt.probation.begin(RUNG, other_world, {"step": 120, "samples": 480, "tokens": 0}) == []
    again = attempt.of_rank(0)
    wrong = again.begin(RUNG, other_world, {"step": 120, "samples": 120, "tokens": 0})
    assert wrong == ["the state that was loaded says samples 120, its manifest 480"]


# --- a trial -----------------------------------------------------------------------------------------------

TRIAL = Trial(suspects=[str(RUNG)], until=123)


def on_trial(control: ControlDirectory, book: StandingBook, trial: Trial = TRIAL) -> Attempt:
    attempt = Attempt(control, trial=trial)
    for suspect in trial.suspects:
        name = parse_name(suspect)
        assert name is not None
        book.append(attempt.fence, name.id, Standing.SUSPECT, ["it failed"])
    return attempt


def test_a_trial_that_completes_the_step_condemns_the_suspect_and_all_that_was_saved_from_it(
    control: ControlDirectory, book: StandingBook
) -> None:
    """Scenario 2, first half, as far as a rank goes; case Megatron-LM#5281."""
    attempt = on_trial(control, book)
    attempt.begin(BELOW)
    assert attempt.train(101, [2.0] * 22) == []
    assert book.of(RUNG.id) is Standing.SUSPECT, "step 122 is not step 123"
    assert book.of(BELOW.id) is Standing.PROVEN, "its own probation goes on beside the trial"
    attempt.train(123, [2.0])
    assert book.of(RUNG.id) is Standing.CONDEMNED
    assert book.of("125aaaaa") is Standing.CONDEMNED
    assert book.of(BELOW.id) is Standing.PROVEN
    condemned = [event for event in attempt.events(StandingChanged) if event.standing == "condemned"]
    assert [event.checkpoint for event in condemned] == ["step_00000125-125aaaaa", str(RUNG)]
    assert condemned[0].evidence[1] == condemned_with(str(RUNG)), "acquitting it by hand clears this one too"
    assert "completed step 123" in condemned[1].evidence[0]


def test_a_trial_with_the_same_discontinuity_in_the_same_steps_condemns_nobody(
    control: ControlDirectory, book: StandingBook
) -> None:
    """Scenario 2, second half: an honest jump of the loss follows the samples, not the checkpoint. The trial
    acquits it, and goes on."""
    attempt = on_trial(control, book, Trial(suspects=[str(RUNG)], until=124))
    attempt.begin(BELOW)
    assert attempt.train(101, [*[2.0] * 20, 2.0, 8.0, 8.0, 8.0]) == []
    assert book.of(RUNG.id) is Standing.ACQUITTED
    assert book.of(BELOW.id) is Standing.PROVEN
    assert attempt.train(125, [8.0] * 10) == []
    assert not [event for event in attempt.events(StandingChanged) if event.standing == "condemned"]
    (warned,) = attempt.events(Warned)
    assert f"as after {RUNG}, on trial; {BELOW} shows it too, so {RUNG} is not the cause" in warned.message
    (settled,) = settled_steps(control)
    assert (settled.how, settled.step, settled.shown) == (How.SHIFT, 124, True)


def test_a_suspect_that_was_loaded_by_force_does_not_acquit_itself(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = on_trial(control, book, Trial(suspects=[str(RUNG)], until=124))
    attempt.begin()
    assert attempt.train(121, [2.0, 8.0, 8.0, 8.0]), "the launcher decides"
    assert book.of(RUNG.id) is Standing.SUSPECT
    assert settled_steps(control) == []


@pytest.mark.parametrize("launched", [True, False])
def test_a_shift_that_was_settled_is_no_breach_in_any_later_attempt(
    control: ControlDirectory, book: StandingBook, *, launched: bool
) -> None:
    """Point 16: from the same checkpoint, or another whose window still ends before it."""
    attempt = Attempt(control, launched=launched)
    settled = [Settled(step=124, how=How.SHIFT, shown=True, why="the rung below shows it too")]
    counted = {"step": 120, "samples": 480, "tokens": 0}
    assert attempt.probation.begin(RUNG, manifest_of(RUNG), counted, settled) == []
    assert attempt.train(121, [2.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]) == []
    assert [ended.outcome for ended in attempt.events(ProbationEnded)] == ["unsettled"]
    assert book.of(RUNG.id) is Standing.COMMITTED, "it is not proven by steps that were not compared"
    assert len(attempt.events(Warned)) == 1
    elsewhere = [Settled(step=300, how=How.SHIFT, shown=True)]
    other = Attempt(control)
    other.probation.begin(RUNG, manifest_of(RUNG), counted, elsewhere)
    assert other.train(121, [2.0, 8.0, 8.0, 8.0]), "another one is a breach"


@pytest.mark.parametrize("settles", [True, False])
def test_a_breach_that_comes_again_with_nothing_to_compare_is_taken_as_it_is(
    control: ControlDirectory, book: StandingBook, *, settles: bool
) -> None:
    attempt = Attempt(control, rerun=Rerun(step=124, bad=[], breach=True, settles=settles))
    attempt.begin()
    reasons = attempt.train(121, [2.0, 8.0, 8.0, 8.0])
    assert bool(reasons) is not settles, "with a lower rung the launcher decides"
    assert [one.how for one in settled_steps(control)] == ([How.SHIFT] if settles else [])
    attempt = Attempt(control, rerun=Rerun(step=120, bad=[], breach=True, settles=True))
    assert attempt.begin(samples=481), "counters have no honest cause"


def test_a_breach_that_does_not_come_again_was_transient(
    control: ControlDirectory, book: StandingBook
) -> None:
    """Point 15."""
    attempt = Attempt(control, rerun=Rerun(step=124, bad=[], breach=True))
    attempt.begin()
    assert attempt.train(121, [2.0] * STEPS) == []
    assert book.of(RUNG.id) is Standing.PROVEN
    assert [(one.verdict, one.step) for one in attempt.events(Verdict)] == [("transient", 124)]


def test_a_suspect_is_not_condemned_by_a_trial_that_is_almost_as_bad(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = on_trial(control, book, Trial(suspects=[str(RUNG)], until=124))
    attempt.begin(BELOW)
    assert attempt.train(101, [*[2.0] * 20, 2.0, 2.2, 2.2, 2.2]) == [], "it is no breach either"
    assert book.of(RUNG.id) is Standing.SUSPECT
    assert any("their trial is in doubt" in warned.message for warned in attempt.events(Warned))


def test_what_was_acquitted_meanwhile_is_not_condemned(control: ControlDirectory, book: StandingBook) -> None:
    attempt = on_trial(control, book)
    book.append(attempt.fence, RUNG.id, Standing.ACQUITTED, ["operator: it was the disk"])
    attempt.begin(BELOW)
    attempt.train(101, [2.0] * 30)
    assert book.of(RUNG.id) is Standing.ACQUITTED
    assert book.of("125aaaaa") is Standing.COMMITTED


@pytest.mark.parametrize(
    ("rung", "until", "why"),
    [
        (CheckpointName(130, "130aaaaa"), 123, "begins after step 123"),
        (CheckpointName(123, "123aaaaa"), 123, "begins after step 123"),
        (CheckpointName(125, "125aaaaa"), 130, "of their kin"),
        (RUNG, 123, "of their kin"),
    ],
)
def test_a_trial_that_shows_nothing_condemns_nobody(
    control: ControlDirectory, book: StandingBook, rung: CheckpointName, until: int, why: str
) -> None:
    attempt = on_trial(control, book, Trial(suspects=[str(RUNG)], until=until))
    attempt.begin(rung)
    attempt.train(rung.step + 1, [2.0] * 30)
    assert book.of(RUNG.id) is Standing.SUSPECT
    assert any(why in warned.message for warned in attempt.events(Warned))


def test_a_trial_in_which_the_step_was_dropped_condemns_nobody(
    control: ControlDirectory, book: StandingBook
) -> None:
    attempt = on_trial(control, book)
    attempt.begin(BELOW)
    attempt.train(101, [2.0] * 22)
    attempt.train(124, [2.0] * 5)
    assert book.of(RUNG.id) is Standing.SUSPECT
    assert any("step 123 was dropped in their trial" in warned.message for warned in attempt.events(Warned))


# --- when the records cannot be written --------------------------------------------------------------------


def test_a_standing_that_cannot_be_recorded_is_tried_again_and_does_not_end_the_run(
    control: ControlDirectory, book: StandingBook
) -> None:
    """Principle 7."""
    attempt = Attempt(control)
    attempt.begin()
    control.standing.mkdir(exist_ok=True)
    (control.standing / RUNG.id).write_text("in the way")
    attempt.train(121, [2.0] * STEPS)
    (control.standing / RUNG.id).unlink()
    attempt.train(127, [2.0])
    assert book.of(RUNG.id) is Standing.PROVEN
    assert not attempt.events(Warned)


def test_a_standing_that_stays_unrecorded_is_told_once_and_given_up(control: ControlDirectory) -> None:
    attempt = Attempt(control)
    attempt.begin()
    control.standing.mkdir(exist_ok=True)
    (control.standing / RUNG.id).write_text("in the way")
    attempt.train(121, [2.0] * (STEPS + TRIES + 5))
    (warned,) = attempt.events(Warned)
    assert "a standing could not be recorded, and stays what it was" in warned.message
    assert not attempt.events(StandingChanged)


def test_a_lost_lease_ends_the_run_and_nothing_is_recorded(
    control: ControlDirectory, book: StandingBook
) -> None:
    """Scenario 28."""
    attempt = on_trial(control, book)
    attempt.begin(BELOW)
    attempt.train(101, [2.0] * (STEPS - 1))
    claim(control, "launch", 5.0)
    with pytest.raises(LeaseLostError):
        attempt.train(100 + STEPS, [2.0])
    assert book.of(BELOW.id) is Standing.COMMITTED
    assert book.of(RUNG.id) is Standing.SUSPECT


# --- who was saved from whom -------------------------------------------------------------------------------


def test_descendants_are_found_on_every_way_the_run_took() -> None:
    def commit(id: str, parent: str | None, step: int, attempt: int) -> CommitRecord:
        return CommitRecord(id=id, step=step, parent=parent, attempt=attempt, manifest="")

    records = [
        commit("d", "c", 40, 3), commit("a", None, 10, 1), commit("c", "b", 30, 2), commit("b", "a", 20, 1),
        commit("e", "b", 25, 3), commit("f", "a", 20, 4), commit("g", "missing", 30, 4),
    ]  # fmt: skip
    assert [record.id for record in descendants({"b"}, records)] == ["c", "e", "d"]
    assert [record.id for record in descendants({"b", "c"}, records)] == ["e", "d"]
    assert descendants({"d"}, records) == []
    circle = [commit("x", "y", 1, 1), commit("y", "x", 2, 1)]
    assert [record.id for record in descendants({"x"}, circle)] == ["y"]
