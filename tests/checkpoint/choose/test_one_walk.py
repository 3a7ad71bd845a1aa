"""Who only looks, who resumes and who decides about a failure go down the same ladder to the same rung."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from holdfast.checkpoint.choose import resume
from holdfast.checkpoint.choose.ladder import (
    ALARM,
    BAD,
    FRESH,
    LOCAL,
    NO_RUNG,
    REFUSED,
    USED,
    Rung,
    RungLook,
    RungOutlook,
    situation_of,
    walk_down,
)
from holdfast.checkpoint.choose.resolver import Resolution, resolve_resume
from holdfast.checkpoint.choose.resume import Resumer
from holdfast.checkpoint.copies import tier
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import MANIFEST, CheckpointName, CheckpointRoot, derive_id
from holdfast.checkpoint.state.tracked import Tracked
from holdfast.config.settings import RunSettings, Settings
from holdfast.errors import NoValidRungError
from holdfast.health.node import TryOutcome
from holdfast.journal.events import DecisionMade, StorageAlarm
from holdfast.journal.reader import read_journal
from holdfast.journal.writer import JournalWriter
from holdfast.policy.budgets import PastAttempt
from holdfast.record.attempts import HeadRecord, begin_attempt, write_head
from holdfast.record.decisions import RECOVERY, decision_path
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.group import Group
from holdfast.record.lease import Fence, claim
from holdfast.record.lineage import CommitRecord, DeletedRecord, record_commit, record_deleted, record_done
from holdfast.record.operator import pin
from holdfast.record.standing import Standing, StandingBook
from kit.tiny import build, checkpoints

FATES = ("sound", "flipped", "cut", "altered", "gone", "deleted", "never", "local")
"""What became of a checkpoint's directory: whole, with a wrong byte, without a shard, with another
manifest, lost, deleted by retention, never renamed, or only ever in the local tier."""


@dataclass(frozen=True)
class Save:
    fate: str = "sound"
    standing: Standing | None = None
    avoided: bool = False


@dataclass(frozen=True)
class Story:
    """What a run has left, and what its next start is told."""

    attempts: list[tuple[int | None, list[Save]]]
    """Each with the number of the checkpoint that it came from, of all that were saved before."""
    resume_from: str = "auto"
    """auto, fresh or a step."""
    force: bool = False
    pinned: int | None = None


saves = st.builds(
    Save,
    fate=st.sampled_from(("sound", *FATES)),
    standing=st.sampled_from((None, None, Standing.SUSPECT, Standing.CONDEMNED, Standing.ACQUITTED)),
    avoided=st.sampled_from((False, False, True)),
)
stories = st.builds(
    Story,
    attempts=st.lists(
        st.tuples(st.none() | st.integers(0, 5), st.lists(saves, max_size=3)), min_size=1, max_size=3
    ),
    resume_from=st.sampled_from(("auto", "auto", "auto", "fresh", "10", "20")),
    force=st.booleans(),
    pinned=st.none() | st.none() | st.integers(0, 5),
)


class Past:
    """The records and directories of a story."""

    def __init__(self, folder: Path, template: Path, story: Story) -> None:
        self.control, _ = ControlDirectory.open_or_create(folder / "run")
        self.fence = Fence(self.control, claim(self.control, "launch", 60.0).epoch)
        self.root = CheckpointRoot(folder / "run" / "checkpoints")
        self.root.path.mkdir()
        self._template = template
        self.saved: list[CommitRecord] = []
        self.avoid: list[str] = []
        for source, kept in story.attempts:
            self._attempt(self.saved[source % len(self.saved)] if source is not None and self.saved else None)
            for save in kept:
                self._save(save)
        decided = {
            "action": "restart",
            "exit_code": 0,
            "reason": "because",
            "evidence": [],
            "restarts_left": 1,
        }
        create_record(decision_path(self.control, self.attempt, RECOVERY), {**decided, "avoid": self.avoid})
        if story.pinned is not None and self.saved:
            pinned = self.saved[story.pinned % len(self.saved)]
            pin(self.control, str(_name(pinned)), "because", "alice", force=story.force)

    def _attempt(self, source: CommitRecord | None) -> None:
        self.attempt = begin_attempt(self.control, self.fence, "launch", 1).number
        self._parent, self._step = (source.id, source.step) if source is not None else (None, 0)
        head = HeadRecord(attempt=self.attempt, checkpoint=self._parent, step=self._step)
        write_head(self.control, self.fence, head)

    def _save(self, save: Save) -> None:
        self._step += 10
        id = derive_id(self.control.run_id, self.attempt, self._step, 1)
        manifest, _ = manifests.read(self._template)
        data, digest = manifests.encode(
            msgspec.structs.replace(
                manifest, id=id, step=self._step, run=self.control.run_id, attempt=self.attempt
            )
        )
        record = CommitRecord(
            id=id, step=self._step, parent=self._parent, attempt=self.attempt, manifest=digest
        )
        name = _name(record)
        with self.fence.guard("save"):
            record_commit(self.control, self.fence, record)
        self._lay_down(self.root.committed(name), data, save.fate)
        if save.fate == "local":
            (tier.open_folder(self.control, name) / MANIFEST).write_bytes(data)
        elif save.fate != "never":
            record_done(self.control, record)
        if save.fate == "deleted":
            gone = DeletedRecord(id=id, step=self._step, reason="too many", epoch=1, at=1.0)
            record_deleted(self.control, record, gone)
        if save.standing is not None:
            StandingBook(self.control).append(self.fence, str(name), save.standing, ["because"])
        if save.avoided:
            self.avoid.append(str(name))
        self.saved.append(record)
        self._parent = id

    def _lay_down(self, directory: Path, manifest: bytes, fate: str) -> None:
        if fate in ("gone", "deleted", "never", "local"):
            return
        directory.mkdir()
        for file in self._template.iterdir():
            if file.name == MANIFEST or (fate == "cut" and file.suffix == ".distcp"):
                continue
            if fate == "flipped" and file.suffix == ".distcp":
                shard = bytearray(file.read_bytes())
                shard[len(shard) // 2] ^= 1
                (directory / file.name).write_bytes(shard)
            else:
                os.link(file, directory / file.name)
        (directory / MANIFEST).write_bytes(manifest)
        if fate == "altered":
            found, _ = manifests.read(directory)
            other = msgspec.structs.replace(found, samples=found.samples + 1)
            (directory / MANIFEST).write_bytes(manifests.encode(other)[0])

    def resume(self, story: Story) -> tuple[DecisionMade, list[StorageAlarm]]:
        """What the next attempt decides, without the local tier; and whether it doubted the storage."""
        model, optimizer, schedule, _ = build()
        tracked = Tracked()
        for name, thing in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
            tracked.add(name, thing)
        attempt = begin_attempt(self.control, self.fence, "launch", 1).number
        with contextlib.closing(JournalWriter(self.control.journal, "rank0", attempt)) as journal:
            resumer = Resumer(
                control=self.control,
                fence=self.fence,
                group=Group(0, 1, HashStore(), None),
                root=self.root,
                attempt=attempt,
                tracked=tracked,
                journal=journal,
                load_timeout=30.0,
                decision_timeout=30.0,
                avoid=self.avoid,
                needs_data=True,
            )
            with contextlib.suppress(NoValidRungError):
                resumer.resume(story.resume_from, force=_force(story))
        told = [line.body for line in read_journal(self.control.journal) if line.attempt == attempt]
        (decision,) = (body for body in told if isinstance(body, DecisionMade))
        return decision, [body for body in told if isinstance(body, StorageAlarm)]

    def launcher(self) -> list[str]:
        """What a decision about the last attempt takes for rungs."""
        situation = situation_of(
            self.control,
            PastAttempt(number=self.attempt, launch="launch", outcome="failed"),
            [],
            Settings(run=RunSettings(dir=str(self.control.path))),
            max_restarts=3,
            facts=[],
            cluster=None,
        )
        return list(situation.rungs)


def _name(record: CommitRecord) -> CheckpointName:
    return CheckpointName(record.step, record.id)


def _force(story: Story) -> bool:
    return story.force and story.resume_from != "auto"


def check_same_words(found: Resolution, decision: DecisionMade) -> None:
    """What is no rung is none for the same reason; only what nodes may hold is not known to both alike."""
    here = {option.option: option.why[0] for option in decision.rejected}
    for row in found.candidates:
        if row.verdict == NO_RUNG and row.local is None:
            assert here[row.name] == row.reasons[0]
        elif row.verdict == BAD:
            assert row.name in here


TWO_BAD = Story([(None, [Save(), Save("flipped"), Save("cut")])])
JUDGED = Story([(None, [Save(), Save(), Save(standing=Standing.CONDEMNED)])])
LOWERED = Story([(None, [Save(), Save(), Save(avoided=True)])])
WENT_BACK = Story([(None, [Save(), Save()]), (0, [Save("altered")])])
PINNED_OFF_THE_LINE = Story([(None, [Save(), Save()]), (0, [Save()])], pinned=1)
ONLY_LOCAL = Story([(None, [Save("local"), Save("local")])])
NOTHING_HOLDS = Story([(None, [Save("gone"), Save("deleted"), Save("altered")])])


@given(stories)
@example(TWO_BAD)
@example(JUDGED)
@example(LOWERED)
@example(WENT_BACK)
@example(PINNED_OFF_THE_LINE)
@example(ONLY_LOCAL)
@example(NOTHING_HOLDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_look_a_resume_and_a_decision_name_the_same_rung(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Story
) -> None:
    monkeypatch.setattr(resume, "try_storage", lambda directory, size: TryOutcome())
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    try:
        past = Past(folder, checkpoints(prepared)[0], story)
        found = resolve_resume(past.control.path, resume_from=story.resume_from, force=_force(story))
        launcher = past.launcher()
        decision, alarms = past.resume(story)
        local = any(row.verdict == LOCAL for row in found.candidates)
        assert decision.chosen == found.without_local, found.candidates
        assert local or found.chosen == found.without_local
        if local:
            return
        check_same_words(found, decision)
        assert bool(found.storage_alarm) == bool(alarms)
        if story.resume_from == "auto" and found.pinned is None:
            rungs = [row.name for row in found.candidates if row.verdict != NO_RUNG]
            assert rungs == [name for name in launcher if name not in past.avoid]
            assert found.chosen in (*rungs, FRESH, REFUSED)
    finally:
        shutil.rmtree(folder)


# --- the walk alone -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from((USED, LOCAL, BAD, NO_RUNG)), st.booleans())))
def test_the_walk_ends_at_the_first_that_holds_and_doubts_storage_only_for_bytes(
    verdicts: list[tuple[str, bool]],
) -> None:
    rungs = [Rung(name=str(at), step=100 - at, id=str(at), manifest="0" * 32) for at in range(len(verdicts))]
    looked: list[str] = []
    told: list[str] = []

    def look(rung: Rung) -> RungLook[str]:
        looked.append(rung.name)
        verdict, of_bytes = verdicts[int(rung.name)]
        return RungLook(RungOutlook(name=rung.name, step=rung.step, verdict=verdict), rung.name, of_bytes)

    walk = walk_down(rungs, look, lambda row, bad: told.append(row.name))
    end = next((at for at, (verdict, _) in enumerate(verdicts) if verdict == USED), len(rungs))
    assert looked == [row.name for row in walk.rows] == [rung.name for rung in rungs[: end + 1]]
    assert [rung.name for rung in walk.lower] == [rung.name for rung in rungs[end + 1 :]]
    assert walk.held == (str(end) if end < len(rungs) else None)
    assert told == [row.name for row in walk.rows if row.verdict == BAD]
    bytes_alone = [verdict == BAD for verdict, of_bytes in verdicts[:end] if of_bytes]
    in_a_row = any(all(bytes_alone[at : at + ALARM]) for at in range(len(bytes_alone) - ALARM + 1))
    assert bool(walk.alarm) == in_a_row
