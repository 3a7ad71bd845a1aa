"""Removing what dead runs left in a local directory: `holdfast clean`.

Guarantee: no place that a process uses is touched, nor anything that is no place, is a link, or belongs to
another user. A place is renamed to a hidden name before the first file of it goes, under the lock that
excludes its users, and judged again under that lock. So whatever happens meanwhile, what looks like a place
is a whole one, and a process that comes for it at that moment finds it whole or makes a new one
(`LocalTier.in_use`).

What a removal that was cut short has left is hidden, and the next one finishes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.base import duration
from holdfast.base import remove as remove_tree
from holdfast.checkpoint.copies.tier import IN_USE, LocalTier, places_under
from holdfast.checkpoint.format import CheckpointName, parse_name
from holdfast.errors import ControlError
from holdfast.process import is_gone
from holdfast.record import ControlDirectory, current_epoch, read_beat, read_claim, read_timeline

_HIDDEN = re.compile(r"\.([0-9a-f]{12})\.[0-9a-f]{8}\.gone")
CLOCKS = 60.0
"""Seconds by which the clocks of two nodes may differ: a lease that is silent for less counts as held."""

DELETE_TRIES = 100

RunState = Literal["live", "over", "not known"]


class Rules(msgspec.Struct, frozen=True):
    """What may go."""

    older_than: float
    """Seconds without a change."""
    runs: Sequence[str] = ()
    """Only these runs' places, whatever their age and whether or not a resume would want them."""
    keep_resumable: bool = True
    force: bool = False
    """Also those of a run that may be live elsewhere, as long as nobody uses them here."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A place as it was looked at."""

    path: str
    run: str
    run_dir: str
    node: str
    newest: CheckpointName | None
    """As its records are named; no byte is read for it."""
    bytes: int
    age: float
    """Seconds since something in it changed."""
    in_use: bool
    owner: int
    run_state: RunState
    ahead: bool
    """The run's newest checkpoint here is newer than its newest one in the checkpoint root."""
    left_over: bool = False
    """What an earlier removal did not finish."""


class CleaningRuling(msgspec.Struct, frozen=True):
    keep: bool
    reason: str


class Cleaning(msgspec.Struct, frozen=True):
    """What became of one place."""

    found: Found
    verdict: CleaningRuling
    error: str = ""
    """Why it could not be removed, or not wholly."""


def judge(found: Found, rules: Rules, user: int) -> CleaningRuling:
    """Pure: whether a place stays, and why."""
    named = found.run in rules.runs
    if found.owner != user:
        return CleaningRuling(True, f"belongs to user {found.owner}")
    if rules.runs and not named:
        return CleaningRuling(True, "another run was asked for")
    if found.left_over:
        return CleaningRuling(False, "left by a removal that was cut short")
    if found.in_use:
        return CleaningRuling(True, "in use: a process on this node holds it")
    if found.run_state == "live" and not rules.force:
        return CleaningRuling(
            True, "its run is live, perhaps on other nodes; --force removes it all the same"
        )
    if named:
        return CleaningRuling(False, "asked for by name")
    if found.age < rules.older_than:
        return CleaningRuling(True, f"changed {duration(max(found.age, 0.0))} ago")
    if found.ahead and rules.keep_resumable and not rules.force:
        return CleaningRuling(True, "holds a checkpoint that is newer than any in the checkpoint root")
    return CleaningRuling(False, f"not changed for {duration(found.age)}")


def look(directory: Path) -> list[Found]:
    """Every place under a local directory, and what removals left there. Changes nothing."""
    found = [_look(tier, in_use=_is_used(tier.path)) for tier in _places(directory)]
    for path in sorted(directory.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match is not None and stat.S_ISDIR(path.lstat().st_mode):
            found.append(_look_at_left_over(path, match[1]))
    return found


def remove(found: Found, rules: Rules) -> Cleaning:
    """Look at a place once more, alone with it, and remove it if it still may go."""
    path = Path(found.path)
    user = os.geteuid()
    if found.left_over:
        verdict = judge(found, rules, user)
        return Cleaning(found, verdict, "" if verdict.keep else _delete(path))
    try:
        with _alone(path) as alone:
            if not alone:
                return Cleaning(found, CleaningRuling(True, "in use: a process on this node holds it"))
            again = _look(LocalTier.at(path), in_use=False)
            verdict = judge(again, rules, user)
            if verdict.keep:
                return Cleaning(again, verdict)
            hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.gone")
            os.rename(path, hidden)
            return Cleaning(again, verdict, _delete(hidden))
    except FileNotFoundError:
        return Cleaning(found, CleaningRuling(True, "gone already: somebody else removed it"))
    except (OSError, msgspec.DecodeError) as error:
        return Cleaning(found, judge(found, rules, user), f"{path}: {error}")


def _places(directory: Path) -> list[LocalTier]:
    return [tier for tier in places_under(directory) if not tier.path.is_symlink()]


def _delete(hidden: Path) -> str:
    """Delete what has been taken away; why it could not be. Never follows a link."""
    for _ in range(DELETE_TRIES):
        try:
            remove_tree(hidden.parent, hidden.name)
        except OSError as error:
            if error.errno == errno.EBUSY and error.filename == str(hidden):  # somebody else deletes it too
                continue
            why = error.strerror or error
            return f"{error.filename or hidden}: {why}; the next `holdfast clean` tries again"
        else:
            return ""
    return f"{hidden}: somebody else is deleting it"


# --- alone with a place -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether nobody uses a place; nobody begins to while this is held. In doubt somebody does."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path / IN_USE, flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.fstat(descriptor), os.lstat(path / IN_USE))
        except FileNotFoundError:
            raise
        except OSError:  # it is used, or cannot be locked and so nobody can know
            free = False
        yield free
    finally:
        os.close(descriptor)


def _is_used(path: Path) -> bool:
    """Whether somebody holds a place; makes nothing."""
    try:
        descriptor = os.open(path / IN_USE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


# --- looking ------------------------------------------------------------------------------------------------


def _look(tier: LocalTier, *, in_use: bool) -> Found:
    record = tier.record
    names = {name for path in _listed(tier.copies) if (name := parse_name(path.name.partition(".")[0]))}
    state, ahead = _ask_run(Path(record.run_dir), record.run, names)
    taken, changed = _measure(tier.path)
    return Found(
        path=str(tier.path),
        run=record.run,
        run_dir=record.run_dir,
        node=record.node,
        newest=max(names, default=None),
        bytes=taken,
        age=time.time() - changed,
        in_use=in_use,
        owner=tier.path.lstat().st_uid,
        run_state=state,
        ahead=ahead,
    )


def _look_at_left_over(path: Path, run: str) -> Found:
    taken, changed = _measure(path)
    return Found(
        path=str(path),
        run=run,
        run_dir="",
        node="",
        newest=None,
        bytes=taken,
        age=time.time() - changed,
        in_use=False,
        owner=path.lstat().st_uid,
        run_state="not known",
        ahead=False,
        left_over=True,
    )


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _measure(path: Path) -> tuple[int, float]:
    """Bytes that it really takes, and when something in it changed last. A lock is no change."""
    taken, changed = 0, 0.0
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                info = os.lstat(f"{folder}/{name}")
                taken += info.st_blocks * 512
                if name != IN_USE:
                    changed = max(changed, info.st_mtime)
    return taken, changed


def _ask_run(run_dir: Path, run: str, here: set[CheckpointName]) -> tuple[RunState, bool]:
    """Whether the run may be live, and whether what is here is newer than what the checkpoint root has."""
    try:
        control = ControlDirectory.open(run_dir)
        if control.run_id != run:  # the directory was made anew for another run
            return "over", False
        on_line = {CheckpointName(record.step, record.id) for record in read_timeline(control).on_line}
        state: RunState = "live" if _is_held(control) else "over"
    except (ControlError, OSError):
        return "not known", False
    in_root = {name for name in on_line if (control.path / "checkpoints" / str(name)).is_dir()}
    return state, max(here & on_line, default=_NONE) > max(in_root, default=_NONE)


_NONE = CheckpointName(-1, "")


def _is_held(control: ControlDirectory) -> bool:
    """Whether the run's lease may still be held. By wall clocks: good enough to leave something alone."""
    epoch = current_epoch(control)
    claim = read_claim(control, epoch) if epoch else None
    if claim is None or is_gone(claim.holder):
        return False
    beat = read_beat(control, epoch)
    if beat is not None and beat.released:
        return False
    return time.time() - (beat.at if beat is not None else claim.at) < claim.ttl + CLOCKS
