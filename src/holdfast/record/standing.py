"""What is known about each checkpoint, kept apart from its copies.

One file per record, `standing/<checkpoint id>/<number>-<standing>.json`, created whole and never changed. The
name alone says the standing, so a condemnation whose contents cannot be read is still one; a name with an
unknown standing counts as a condemnation too.

A judgement (suspect, condemned, acquitted) concerns more than one run: another one may resume from the same
directory. So each such record is also written beside the checkpoints, as
`<checkpoint root>/.standing/<checkpoint's name>/<number>-<standing>.json`, from where it travels with them to
object stores, and whoever resolves a checkpoint in a root reads both. Guarantee: whichever of the two has the
newer word counts; if neither has seen the other's, the more careful one does. Records beside a root that
cannot be listed or read count as a condemnation. What cannot be written there now is written at the next
start.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.base import remove, replace_atomic
from holdfast.errors import ControlError
from holdfast.record.attempts import latest_head
from holdfast.record.directory import ControlDirectory, create_record, list_names, read_record
from holdfast.record.lease import Fence

log = logging.getLogger("holdfast.control")

BESIDE = ".standing"
"""The folder in a checkpoint root with the records that go where its checkpoints go."""
ROOT = "root.json"


class Standing(StrEnum):
    COMMITTED = "committed"
    VERIFIED = "verified"
    PROVEN = "proven"
    SUSPECT = "suspect"
    CONDEMNED = "condemned"
    ACQUITTED = "acquitted"
    ABANDONED = "abandoned"


JUDGED = frozenset({Standing.SUSPECT, Standing.CONDEMNED, Standing.ACQUITTED})
"""What is said about the checkpoint itself and counts for every run; the others concern a run's timeline."""


class StandingRecord(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    standing: Standing
    evidence: list[str]
    epoch: int
    at: float
    origin: str = ""
    """In a root: which run's record this is a copy of, `<run>:<number>-<standing>`."""
    seen: list[str] = []
    """In a run: the origins of the records beside the checkpoint when this was said, which it overrules."""


class RootRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run's checkpoints are, as its newest attempt was told."""

    root: str
    """Relative to the run's directory if it is inside that, so that the two may be moved together."""
    remote: str = ""


class Word(NamedTuple):
    """One record, as far as it can be read."""

    number: int
    standing: Standing
    origin: str
    """Whose word it is; if that cannot be read, something unlike the origin of any run's record."""
    path: Path | None = None
    seen: frozenset[str] = frozenset()


_SEVERITY = (
    Standing.CONDEMNED, Standing.SUSPECT, Standing.ABANDONED, Standing.COMMITTED,
    Standing.VERIFIED, Standing.ACQUITTED, Standing.PROVEN,
)  # fmt: skip
"""Most careful first: the order by which one counts if two nodes gave two records the same number."""

_RECORD_NAME = re.compile(r"([0-9]{6,18})-(.*)\.json")
_CHECKPOINT = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,99}")
_NAME = re.compile(r"step_[0-9]{8,12}-([0-9a-f]{8,32})")


# --- deciding, from records alone ---------------------------------------------------------------------------


def newest(words: Sequence[Word]) -> Word | None:
    """Pure: the word that counts. One whose place in the order cannot be read may be the newest."""
    if not words:
        return None
    unordered = next((word for word in words if word.number == 0), None)
    if unordered is not None:
        return unordered._replace(standing=Standing.CONDEMNED)
    last = max(word.number for word in words)
    found = [word for word in words if word.number == last]
    return min(found, key=lambda word: _SEVERITY.index(word.standing))


def merged(own: Sequence[Word], beside: Sequence[Word]) -> Word | None:
    """Pure: the word that counts among a run's own records and those beside the checkpoint.

    Both name their origin, so each place shows whether it has seen the other's newest judgement.
    """
    mine, theirs = newest(own), newest(beside)
    if mine is None or theirs is None:
        return mine or theirs
    judged = newest([word for word in own if word.standing in JUDGED])
    if theirs.number and theirs.origin in {word.origin for word in own}:
        return mine  # the word there came from here, and nothing has been said there since
    if theirs.number and judged is not None and theirs.origin in judged.seen:
        return mine  # it was known when this run had its say
    if judged is not None and judged.origin in {word.origin for word in beside}:
        return theirs  # somebody has judged it since, knowing what was said here
    return min(mine, theirs, key=lambda word: _SEVERITY.index(word.standing))


# --- the records --------------------------------------------------------------------------------------------


class RootBook:
    """The records beside the checkpoints of one root, by the checkpoint's name (its step and id)."""

    def __init__(self, root: Path) -> None:
        self.path = root / BESIDE

    def of(self, name: str) -> Standing:
        """COMMITTED if nothing was recorded."""
        word = newest(self.words(name))
        return word.standing if word is not None else Standing.COMMITTED

    def evidence_of(self, name: str) -> list[str]:
        return _evidence(newest(self.words(name)))

    def words(self, name: str) -> list[Word]:
        """What is recorded; if that cannot be listed, one condemnation without a place in the order."""
        try:
            return [_with_contents(word) for word in _words(self.folder(name), run="?")]
        except ControlError:
            return [Word(0, Standing.CONDEMNED, "")]

    def folder(self, name: str) -> Path:
        return self.path / _checked(name)

    def add(self, name: str, record: StandingRecord) -> None:
        """Append a record; ControlError if it cannot be written."""
        number = max((word.number for word in _words(self.folder(name), run="?")), default=0) + 1
        while not create_record(self.folder(name) / f"{number:06d}-{record.standing}.json", record):
            number += 1

    def files(self, name: str) -> list[str]:
        """The names of its record files, for whoever copies them."""
        return sorted(entry for entry in list_names(self.folder(name)) if entry.endswith(".json"))

    def names(self) -> list[str]:
        """The checkpoints that have anything here."""
        return [entry for entry in list_names(self.path) if _NAME.fullmatch(entry)]

    def forget(self, name: str) -> None:
        """The checkpoint is gone for good."""
        with contextlib.suppress(OSError):
            remove(self.path.parent, self.path.name, _checked(name))


class StandingBook:
    """Reads and appends the standing records of a run.

    A checkpoint is given by its id, or by its name: then the records beside it in its root count too. `root`:
    a root other than the run's own, for a checkpoint that is resolved there.
    """

    def __init__(self, control: ControlDirectory, root: Path | None = None) -> None:
        self._control = control
        self._directory = control.standing
        self._root = root

    def append(self, fence: Fence, checkpoint: str, standing: Standing, evidence: list[str]) -> None:
        """Record it for this run and, if possible, beside the checkpoint for every other run."""
        standing = Standing(standing)
        id = _id_of(checkpoint)
        roots = self._roots_of(checkpoint) if standing in JUDGED else []
        beside = [word for root in roots for word in RootBook(root).words(checkpoint)]
        record = StandingRecord(
            checkpoint=id,
            standing=standing,
            evidence=evidence,
            epoch=fence.epoch,
            at=time.time(),
            seen=sorted({word.origin for word in beside if word.number}),
        )
        folder = self._folder(id)
        with fence.guard(f"record checkpoint {checkpoint} as {standing}"):
            number = max((word.number for word in self._own(id)), default=0) + 1
            while not create_record(folder / f"{number:06d}-{standing}.json", record):
                number += 1
        if standing in JUDGED and (problem := self.publish(fence, checkpoint)):
            log.warning("holdfast: %s", problem)

    def publish(self, fence: Fence, checkpoint: str) -> str:
        """Make sure that its newest judgement is recorded beside it too. Returns why if that failed."""
        name = _NAME.fullmatch(checkpoint)
        judged = newest([word for word in self._own(_id_of(checkpoint)) if word.standing in JUDGED])
        if name is None or judged is None or judged.path is None:
            return ""
        problem = ""
        for root in self._roots_of(checkpoint):
            book = RootBook(root)
            if judged.origin in {word.origin for word in book.words(checkpoint)}:
                continue
            fence.check(f"record checkpoint {checkpoint} as {judged.standing} beside it")
            try:
                record = StandingRecord(
                    checkpoint=name[1],
                    standing=judged.standing,
                    evidence=_evidence(judged),
                    epoch=fence.epoch,
                    at=time.time(),
                    origin=judged.origin,
                )
                book.add(checkpoint, record)
            except ControlError as error:
                problem = (
                    f"{checkpoint} is {judged.standing}, but only this run knows it: it could not be "
                    f"recorded in {book.path} for other runs; the next start tries again ({error})"
                )
        return problem

    def publish_all(self, fence: Fence, checkpoints: Iterable[str]) -> list[str]:
        """At a start: make up for what earlier attempts, or older releases, did not record beside these."""
        known = set(list_names(self._directory))
        found = (self.publish(fence, one) for one in checkpoints if _id_of(one) in known)
        return [problem for problem in found if problem]

    def of(self, checkpoint: str) -> Standing:
        """The newest standing; COMMITTED if nothing was recorded."""
        word = self._word(checkpoint)
        return word.standing if word is not None else Standing.COMMITTED

    def evidence_of(self, checkpoint: str) -> list[str]:
        """What the newest standing rests on; it says so if that cannot be read."""
        return _evidence(self._word(checkpoint))

    def _word(self, checkpoint: str) -> Word | None:
        own = self._own(_id_of(checkpoint))
        found: list[Word] = []
        for root in self._roots_of(checkpoint):
            beside = RootBook(root).words(checkpoint)
            known = [_with_contents(word) for word in own] if beside else own
            if (word := merged(known, beside)) is not None:
                found.append(word)
        return min(found, key=lambda word: _SEVERITY.index(word.standing)) if found else newest(own)

    def _own(self, id: str) -> list[Word]:
        return _words(self._folder(id), run=self._control.run_id)

    def _roots_of(self, name: str) -> list[Path]:
        """Where a checkpoint of this name may be: in the run's root, or where the run was told to find it."""
        if not _NAME.fullmatch(name):
            return []
        if self._root is not None:
            return [self._root]
        roots = [known_root(self._control)]
        with contextlib.suppress(ControlError):
            head = latest_head(self._control)
            if head is not None and head.source and Path(head.source).name == name:
                roots.append(Path(head.source).parent)
        return [root for root in roots if _is_there(root / name) or _is_there(root / BESIDE / name)]

    def _folder(self, id: str) -> Path:
        return self._directory / _checked(id)


def _is_there(folder: Path) -> bool:
    """Whether it is there. True if that cannot be known: records that cannot be read count as the worst."""
    try:
        return folder.is_dir()
    except OSError:
        return True


def note_root(control: ControlDirectory, root: Path, remote: str = "") -> None:
    """At a start: remember where the checkpoints are, for whoever judges one without the run's settings."""
    root = root.absolute()
    if root.is_relative_to(control.path):
        root = root.relative_to(control.path)
    record = RootRecord(root=str(root), remote=remote)
    with contextlib.suppress(ControlError):
        if read_record(control.path / ROOT, RootRecord) == record:
            return
    replace_atomic(control.path / ROOT, msgspec.json.encode(record))


def known_root(control: ControlDirectory) -> Path:
    return control.path / _root_record(control).root


def known_remote(control: ControlDirectory) -> str:
    return _root_record(control).remote


def _root_record(control: ControlDirectory) -> RootRecord:
    found: RootRecord | None = None
    with contextlib.suppress(ControlError):
        found = read_record(control.path / ROOT, RootRecord)
    return found or RootRecord(root="checkpoints")


def _id_of(checkpoint: str) -> str:
    match = _NAME.fullmatch(checkpoint)
    return match[1] if match else checkpoint


def _checked(text: str) -> str:
    if not _CHECKPOINT.fullmatch(text):
        raise ControlError(f"{text!r:.120} is not a checkpoint id; nothing was read or written")
    return text


def _words(folder: Path, *, run: str) -> list[Word]:
    return words_in(list_names(folder), folder, run=run)


def words_in(names: Iterable[str], folder: Path, *, run: str = "?") -> list[Word]:
    """Pure: the words by file name; an unknown one is CONDEMNED, an unreadable number is 0."""
    words = []
    for name in names:
        match = _RECORD_NAME.fullmatch(name)
        if match:
            known = match[2] in set(Standing)
            standing = Standing(match[2]) if known else Standing.CONDEMNED
            words.append(Word(int(match[1]), standing, f"{run}:{name.removesuffix('.json')}", folder / name))
        elif name.endswith(".json"):
            words.append(Word(0, Standing.CONDEMNED, "", folder / name))
    return words


def _with_contents(word: Word) -> Word:
    """The word with what only the record's contents say, as far as they can be read."""
    try:
        record = read_record(word.path, StandingRecord) if word.path is not None else None
    except ControlError:
        record = None
    if record is None:
        return word
    return word._replace(origin=record.origin or word.origin, seen=frozenset(record.seen))


def _evidence(word: Word | None) -> list[str]:
    if word is None:
        return []
    try:
        record = read_record(word.path, StandingRecord) if word.path is not None else None
    except ControlError:
        record = None
    return record.evidence if record is not None else ["its record cannot be read"]
