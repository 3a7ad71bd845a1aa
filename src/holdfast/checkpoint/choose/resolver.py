"""Which checkpoint a start would resume from, by evidence, before anything is started. No torch, no lease.

Guarantee: nothing is changed, and nothing is chosen that the resume itself would refuse: the same ladder in
the same order (lineage, standing, pins, what recovery decided to avoid), the same checks of the same bytes. A
run that somebody holds is refused, whatever its checkpoints are worth. What cannot be seen from here (the
memory of other nodes) is named as recorded and never counted as verified. Among checkpoints that no run keeps
a record of (`plain`), the newest one that holds is chosen, or none, with the reasons for each; such a
directory is never called a fresh start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from holdfast.base import escaped
from holdfast.checkpoint import reading, removed
from holdfast.checkpoint.choose.ladder import (
    BAD,
    FRESH,
    LOCAL,
    LOWER,
    NO_RUNG,
    REFUSED,
    REFUSED_STANDINGS,
    USED,
    Ladder,
    Rung,
    RungLook,
    RungOutlook,
    first_of,
    look_at,
    take_inventory,
    walk_down,
)
from holdfast.checkpoint.choose.plain import directories, inspect, is_checkpoint, is_plain_root, step_of
from holdfast.checkpoint.copies import read_recorded
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.format import (
    CheckpointName,
    CheckpointRoot,
    Inspection,
    Manifest,
    Progress,
    is_url,
    parse_name,
    verify,
)
from holdfast.checkpoint.remote import Remote, open_remote
from holdfast.errors import (
    ControlError,
    ExitCode,
    HoldfastError,
    NoValidRungError,
    RunIsLiveError,
    UsageError,
)
from holdfast.health import why_not_first
from holdfast.journal.events import RejectedOption
from holdfast.process import job_of
from holdfast.record import (
    ControlDirectory,
    LeaseState,
    RootBook,
    StandingBook,
    applies_again,
    avoided,
    launch_to_repeat,
    newest_launches,
    origin_now,
    pinned,
    who_holds,
)

LOOKS = 3
"""How often the ladder is looked at if a live run's retention deletes all of it meanwhile."""
REMOTE_SECONDS = 30.0
"""For finding out what an object store holds; without an answer it counts as not seen."""


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; fields are only ever added."""

    run: str
    """The run's id; empty if there is none yet."""
    run_dir: str
    root: str
    chosen: str
    """A checkpoint's name, `fresh start` or `refused`."""
    step: int | None = None
    path: str | None = None
    tier: str = ""
    without_local: str = ""
    """What would be chosen if the nodes hold nothing any more."""
    why: list[str] = []
    candidates: list[RungOutlook] = []
    """In the order of the ladder; then what is not a rung."""
    digests_read: bool = True
    asked: str = "auto"
    """The `resume_from` that was asked for."""
    pinned: str | None = None
    live: LeaseState | None = None
    """Who holds the run, if somebody does."""
    storage_alarm: list[str] = []
    """Checkpoints in a row whose bytes were wrong, if there were enough to suspect the storage."""
    unseen: list[str] = []
    """Places that could not be looked at, and why."""
    samples: int | None = None
    tokens: int | None = None
    world: int | None = None
    exit_code: int = 0
    """What a start would end with: 0, 18 (no valid rung), 20 (somebody holds the run) or 24 (the directory
    of a run that existed before is gone)."""

    @property
    def usable(self) -> bool:
        return self.exit_code == 0

    def require(self) -> Resolution:
        """Return itself, or raise the error that the start would end with."""
        if self.exit_code == ExitCode.RUN_IS_LIVE:
            raise RunIsLiveError("; ".join(self.why))
        if self.exit_code == ExitCode.CONTROL_UNUSABLE:
            raise ControlError("; ".join(self.why))
        if self.exit_code:
            raise NoValidRungError("; ".join(self.why))
        return self


def resolve_resume(
    run_dir: Path | str,
    *,
    root: Path | str | None = None,
    remote: str | None = None,
    resume_from: str = "auto",
    force: bool = False,
    quick: bool = False,
    progress: Progress | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Resolution:
    """Say which run and which checkpoint a start with these settings would resume from, and why.

    `run_dir`: a run's directory; or one that holds several, from which the one that this Slurm job was
    started for is taken; or a directory of checkpoints that no run keeps a record of (see `plain`). `root`
    and `remote` default to what the last launch used, else `RUN_DIR/checkpoints` and none. Every byte is read
    unless `quick`. If `run_dir` is none of these, a start would create the run there, unless something says
    that the run existed before: then it is refused, unless `resume_from` is "fresh".
    """
    found = _which_run(Path(run_dir), environ)
    if found is None:
        where = Path(run_dir).absolute()
        if resume_from != "fresh" and is_plain_root(where):
            return resolve_plain(where, quick=quick, progress=progress)
        if resume_from != "fresh" and root is not None and is_plain_root(Path(root)):
            return resolve_plain(Path(root), quick=quick, progress=progress)
        lost = why_not_first(where, requeued=int(environ.get("SLURM_RESTART_COUNT", "0") or 0))
        if resume_from != "fresh" and lost:
            reason = f"there is no run in {where}, and this is no first start: {lost}"
            return Resolution(
                run="", run_dir=str(where), root=str(root or where / "checkpoints"), chosen=REFUSED,
                why=[reason], without_local=REFUSED, digests_read=False,
                exit_code=int(ExitCode.CONTROL_UNUSABLE),
            )  # fmt: skip
        why = [f"there is no run in {where}: a start would create it"]
        return Resolution(
            run="", run_dir=str(where), root=str(root or where / "checkpoints"), chosen=FRESH, why=why,
            without_local=FRESH, digests_read=False,
        )  # fmt: skip
    applied = origin_now(found, resume_from) if resume_from != "auto" else None
    if applied is not None and not applies_again(force=force, environ=environ):
        resolution = _Resolver(found, root, remote, quick, progress).resolve("auto", force=False)
        applied_by = f"was applied by attempt {applied.attempt}, and is not applied again"
        note = f"resume_from = {resume_from!r} {applied_by}"
        return msgspec.structs.replace(resolution, why=[*resolution.why, note])
    return _Resolver(found, root, remote, quick, progress).resolve(resume_from, force=force)


def checkpoint_root(control: ControlDirectory) -> Path:
    """Where the run's checkpoints lie: as its last launch said, else inside its directory."""
    started = launch_to_repeat(control)
    return Path(started.root) if started is not None and started.root else control.path / "checkpoints"


def run_of_root(path: Path) -> ControlDirectory | None:
    """The run in the directory above, if this is its own checkpoint root; else None.

    The run knows which of its checkpoints are condemned, which the root itself does not show.
    """
    above = path.absolute().parent
    if not (above / "run.json").is_file():
        return None
    control = ControlDirectory.open(above)
    return control if checkpoint_root(control).resolve() == path.resolve() else None


def _which_run(path: Path, environ: Mapping[str, str]) -> ControlDirectory | None:
    if (path / "run.json").is_file() or not path.is_dir():
        return ControlDirectory.open(path) if path.is_dir() else None
    below = sorted(entry.parent for entry in path.glob("*/run.json") if entry.is_file())
    if not below:
        return run_of_root(path)
    runs = [ControlDirectory.open(directory) for directory in below]
    job = job_of(environ)
    mine = [run for run in runs if job and any(launch.job == job for launch in newest_launches(run))]
    if len(mine) == 1:
        return mine[0]
    if len(runs) == 1 and not mine:
        return runs[0]
    what = f"job {job} started {len(mine)} of them" if job else "no Slurm job says which"
    raise UsageError(
        f"{path} holds {len(runs)} runs ({', '.join(found.name for found in below[:5])}), and {what}. "
        "Give the directory of one"
    )


class _Resolver:
    def __init__(
        self,
        control: ControlDirectory,
        root: Path | str | None,
        remote: str | None,
        quick: bool,
        progress: Progress | None,
    ) -> None:
        started = launch_to_repeat(control)
        self._control = control
        self._root = CheckpointRoot(Path(root).absolute() if root is not None else checkpoint_root(control))
        self._url = remote if remote is not None else started.remote if started is not None else ""
        self._quick = quick
        self._progress = progress
        self._book = StandingBook(control, self._root.path)
        self._unseen: list[str] = []
        self._remote: Remote | None = None
        self._in_remote: set[CheckpointName] = set()
        self._removed: set[str] = set()
        """Rungs that retention deleted after the inventory was taken; none of them counts as bad."""

    def resolve(self, resume_from: str, *, force: bool) -> Resolution:
        if force and resume_from == "auto":
            raise UsageError("force accepts one bad checkpoint by name: give resume_from a step or a path")
        if is_url(resume_from):
            raise UsageError(
                f"resume_from = {resume_from!r}: a remote copy is looked at with `holdfast ckpt verify`"
            )
        holding, pin = who_holds(self._control), pinned(self._control)
        live = holding.lease if holding is not None and holding.is_launch else None
        self._look_at_remote()
        local = local_manifest.names(self._control)
        try:
            for _ in range(LOOKS):
                ladder, fresh = self._ladder(resume_from, force=force)
                recorded = {str(name): where_recorded(self._control, name) for name in local}
                rows, alarm, manifest = self._walk(self._with_evidence(ladder), recorded)
                if not self._removed or first_of(rows, LOCAL, USED) is not None:
                    break
        except OSError as error:
            raise UsageError(f"the checkpoint root {self._root.path} cannot be read: {error}") from error
        used, first = first_of(rows, USED), first_of(rows, LOCAL, USED)
        lost = used.name if used is not None else FRESH if fresh else REFUSED
        chosen = first.name if first is not None else lost
        code = 0 if chosen != REFUSED else int(ExitCode.NO_VALID_RUNG)
        why = self._why(chosen, first, rows, resume_from)
        if pin is not None:
            why.append(f"pinned by {escaped(pin.request.describe(), 2000)}: no other one is looked at")
        if live is not None:
            code = int(ExitCode.RUN_IS_LIVE)
            why = [
                f"the run is held by {live.holder} (epoch {live.epoch}, {live.detail}): "
                "nobody else may start it"
            ]
        manifest = manifest if first is used else None
        return Resolution(
            run=self._control.run_id,
            run_dir=str(self._control.path),
            root=str(self._root.path),
            chosen=chosen,
            step=first.step if first is not None else None,
            path=first.path if first is not None else None,
            tier=first.tier if first is not None else "",
            without_local=lost,
            why=why,
            candidates=rows,
            digests_read=not self._quick,
            asked=resume_from,
            pinned=pin.checkpoint if pin is not None else None,
            live=live,
            storage_alarm=alarm,
            unseen=self._unseen,
            samples=manifest.samples if manifest is not None else None,
            tokens=manifest.tokens if manifest is not None else None,
            world=first.world if first is not None else None,
            exit_code=code,
        )

    def _look_at_remote(self) -> None:
        if not self._url:
            return
        try:
            self._remote = open_remote(self._url, retry_seconds=REMOTE_SECONDS)
            self._in_remote = set(self._remote.names(time.monotonic() + REMOTE_SECONDS))
        except (HoldfastError, OSError) as error:
            self._unseen.append(f"{self._url}: {escaped(str(error), 500)}")

    def _ladder(self, resume_from: str, *, force: bool) -> tuple[Ladder, bool]:
        """The ladder of a resume, and whether it may start fresh if the nodes hold nothing any more."""
        pin = pinned(self._control)
        avoid = avoided(self._control) if resume_from == "auto" and pin is None else []
        take = partial(
            take_inventory, self._control, self._root, resume_from, force=force, avoid=avoid, pin=pin
        )
        ladder = take(copies={*local_manifest.names(self._control), *self._in_remote})
        # What only nodes had does not prevent a fresh start once they have lost it.
        fresh = ladder.may_start_fresh or (pin is None and take(copies=self._in_remote).may_start_fresh)
        return ladder, fresh

    def _with_evidence(self, ladder: Ladder) -> Ladder:
        """The ladder with the evidence against those that are suspect or condemned."""
        rejected = []
        for option in ladder.rejected:
            name, why = parse_name(option.option), []
            if name is not None and self._book.of(str(name)) in REFUSED_STANDINGS:
                why = [f"{self._book.of(str(name))}: {line}" for line in self._book.evidence_of(str(name))]
            rejected.append(RejectedOption(option.option, [*option.why, *why]))
        return msgspec.structs.replace(ladder, rejected=rejected)

    def _walk(
        self, ladder: Ladder, recorded: Mapping[str, str]
    ) -> tuple[list[RungOutlook], list[str], Manifest | None]:
        """Down the ladder as a resume goes, until a rung holds; then what is not a rung at all.

        Also the bad ones in a row that storage may be to blame for, and the manifest of the one that holds.
        """
        walk = walk_down(ladder.rungs, partial(self._judge, recorded=recorded))
        rows = [*walk.rows, *map(self._lower, walk.lower), *map(self._no_rung, ladder.rejected)]
        return [self._finished(row, recorded) for row in rows], walk.alarm, walk.held

    def _no_rung(self, option: RejectedOption) -> RungOutlook:
        name, path = parse_name(option.option), self._root.path / option.option
        there = name is not None and path.is_dir()
        return RungOutlook(
            name=option.option,
            step=name.step if name is not None else None,
            verdict=NO_RUNG,
            reasons=option.why,
            path=str(path) if there else None,
        )

    def _lower(self, rung: Rung) -> RungOutlook:
        path = str(rung.under(self._root.path))
        return RungOutlook(name=rung.name, step=rung.step, verdict=LOWER, path=path)

    def _judge(self, rung: Rung, recorded: Mapping[str, str]) -> RungLook[Manifest]:
        path, manifest, reasons = self._look(rung)
        in_local = not rung.path and rung.name in recorded
        where: str | None = str(path)
        tier = "global"
        if reasons and (remote := self._look_in_remote(rung)) is not None:
            found, problems = remote
            if not problems:
                manifest, tier, where = found, "remote", f"{self._url.rstrip('/')}/{rung.name}"
                note, reasons = (
                    [f"its directory cannot be used ({reasons[0]}); the copy in the remote can"],
                    [],
                )
                return self._used(rung, manifest, where, tier, note)
            reasons = [*reasons, *(f"in {self._url}: {problem}" for problem in problems)]
        if not reasons:
            return self._used(rung, manifest, where, tier, [])
        if not in_local and (why := removed(path, self._control) or removed(path)):
            self._removed.add(rung.name)
            row = RungOutlook(name=rung.name, step=rung.step, verdict=NO_RUNG, reasons=[why])
            return RungLook(row, of_bytes=False)
        verdict = LOCAL if in_local else BAD
        if in_local and not path.is_dir():
            where, reasons = None, []
        ranks = manifest.world.size if manifest is not None else None
        tier = "local" if verdict == LOCAL else tier
        row = RungOutlook(
            name=rung.name,
            step=rung.step,
            verdict=verdict,
            reasons=reasons,
            path=where,
            tier=tier,
            world=ranks,
        )
        return RungLook(row)

    def _used(
        self, rung: Rung, manifest: Manifest | None, where: str | None, tier: str, notes: list[str]
    ) -> RungLook[Manifest]:
        row = RungOutlook(
            name=rung.name,
            step=rung.step,
            verdict=USED,
            reasons=notes,
            path=where,
            tier=tier,
            world=manifest.world.size if manifest is not None else None,
            bytes=sum(entry.size for entry in manifest.files) if manifest is not None else 0,
        )
        return RungLook(row, manifest)

    def _finished(self, row: RungOutlook, recorded: Mapping[str, str]) -> RungOutlook:
        """Complete a row with what all rows have, and make it safe to print."""
        name = parse_name(row.name)
        return msgspec.structs.replace(
            row,
            name=escaped(row.name),
            path=escaped(row.path, 4096) if row.path is not None else None,
            reasons=[escaped(reason, 2000) for reason in row.reasons],
            standing=str(self._book.of(str(name))) if name is not None else "",
            local=recorded.get(row.name),
        )

    def _look(self, rung: Rung) -> tuple[Path, Manifest | None, list[str]]:
        """Where a rung lies, its manifest, and what a resume would find wrong; cheaply, if `quick`."""
        with reading(rung.under(self._root.path)):
            return self._look_in_peace(rung)

    def _look_in_peace(self, rung: Rung) -> tuple[Path, Manifest | None, list[str]]:
        path, inspection = look_at(rung, self._root, self._control.run_id)
        manifest = inspection.manifest
        if inspection.sound and rung.manifest and inspection.manifest_digest != rung.manifest:
            found = inspection.manifest_digest
            was = f"{rung.manifest} was committed under this name"
            why = f"altered: holdfast.json: its digest is {found}; {was}"
            return path, manifest, [why]
        if inspection.sound and rung.manifest and not self._quick:
            inspection = verify(path, progress=self._progress)
        return path, manifest, [str(problem) for problem in inspection.problems]

    def _look_in_remote(self, rung: Rung) -> tuple[Manifest | None, list[str]] | None:
        """What the object store's copy of a rung is worth; None if it has none."""
        name = CheckpointName(rung.step, rung.id)
        if self._remote is None or rung.path or name not in self._in_remote:
            return None
        try:
            manifest, digest, _ = self._remote.manifest(name)
            if digest != rung.manifest:
                return manifest, [f"altered: holdfast.json: its digest is {digest}"]
            if self._quick:
                return manifest, []
            found, problems = self._remote.verify(name, self._progress)
            return found, [str(problem) for problem in problems]
        except (HoldfastError, OSError) as error:
            return None, [escaped(str(error), 500)]

    def _why(
        self, chosen: str, first: RungOutlook | None, rows: list[RungOutlook], resume_from: str
    ) -> list[str]:
        asked = "" if resume_from == "auto" else f" (resume_from = {resume_from!r})"
        if chosen == FRESH:
            return [
                f"the run has no checkpoint on its lineage{asked}" if resume_from != "fresh" else "asked for"
            ]
        if first is None:
            return [
                f"no checkpoint may be used{asked}",
                *(f"{row.name}: {'; '.join(row.reasons)}" for row in rows),
            ]
        if first.verdict == LOCAL:
            return [
                f"newest checkpoint{asked}, held by nodes only ({first.local}, as recorded): "
                "they verify it when they are asked"
            ]
        read = "only names and sizes were looked at" if self._quick else "every digest matched"
        why = [f"newest usable checkpoint{asked}; {read}", *first.reasons]
        higher = rows[: rows.index(first)]
        return why + [f"not {row.name}: {'; '.join(row.reasons)}" for row in higher]


def where_recorded(control: ControlDirectory, name: CheckpointName) -> str:
    """Where the local tier's copies of a checkpoint are: `local on 4 nodes · replicas 4/4`."""
    found = read_recorded(control, name)
    words = [
        f"local on {found.nodes} node{'s' * (found.nodes != 1)}"
        if found.nodes
        else "local, not recorded where"
    ]
    if found.planned:
        words.append(f"replicas {found.confirmed}/{found.planned}")
    return " · ".join(words)


# --- where no run keeps a record ----------------------------------------------------------------------------


def resolve_plain(directory: Path, *, quick: bool = False, progress: Progress | None = None) -> Resolution:
    """Which of the checkpoints in a directory without a run holds, from the highest step down."""
    alone = is_checkpoint(directory)
    root = directory.absolute().parent if alone else directory.absolute()
    rungs = [
        Rung(name=path.name, step=step_of(path) or 0, id="", manifest="", path=str(path))
        for path in ([directory.absolute()] if alone else directories(root))
    ]
    walk = walk_down(rungs, partial(_judge_plain, quick=quick, progress=progress))
    rows = [*walk.rows, *(_plain_row(Path(rung.path), LOWER, []) for rung in walk.lower)]
    used = first_of(rows, USED)
    return Resolution(
        run="",
        run_dir=str(root),
        root=str(root),
        chosen=used.name if used is not None else REFUSED,
        step=used.step if used is not None else None,
        path=used.path if used is not None else None,
        tier="global" if used is not None else "",
        without_local=used.name if used is not None else REFUSED,
        why=[*_why_plain(root, used, rows), *_run_beside(root)],
        candidates=rows,
        digests_read=walk.held is not None and walk.held.bytes_checked > 0,
        storage_alarm=walk.alarm,
        world=used.world if used is not None else None,
        exit_code=0 if used is not None else int(ExitCode.NO_VALID_RUNG),
    )


def _judge_plain(rung: Rung, *, quick: bool, progress: Progress | None) -> RungLook[Inspection]:
    path = Path(rung.path)
    if judged := _recorded_beside(path):
        return RungLook(_plain_row(path, BAD, judged), of_bytes=False)
    inspection, notes = inspect(path, quick=quick, progress=progress)
    if inspection.problems:
        return RungLook(_plain_row(path, BAD, [str(problem) for problem in inspection.problems]))
    return RungLook(_plain_row(path, USED, notes, inspection), inspection)


def _recorded_beside(path: Path) -> list[str]:
    """Why a checkpoint must not be used, as some run recorded beside it; empty if nothing is recorded."""
    name = parse_name(path.name)
    if name is None:
        return []
    book = RootBook(path.parent)
    standing = book.of(str(name))
    if standing not in REFUSED_STANDINGS:
        return []
    return [str(standing), *(f"{standing}: {line}" for line in book.evidence_of(str(name)))]


def _plain_row(
    path: Path, verdict: str, reasons: list[str], inspection: Inspection | None = None
) -> RungOutlook:
    manifest = inspection.manifest if inspection is not None else None
    return RungOutlook(
        name=escaped(path.name),
        step=manifest.step
        if manifest is not None
        else step_of(path) or 0
        if is_checkpoint(path)
        else step_of(path),
        verdict=verdict,
        reasons=[escaped(reason, 2000) for reason in reasons],
        path=escaped(str(path), 4096),
        world=manifest.world.size if manifest is not None else None,
        bytes=inspection.size if inspection is not None else 0,
    )


def _why_plain(root: Path, used: RungOutlook | None, rows: list[RungOutlook]) -> list[str]:
    unknown = f"no run keeps a record of {root}: lineage and standing are not known"
    if used is None:
        nothing = [] if rows else ["there is no checkpoint in it, although a run has begun there"]
        return [
            "no checkpoint may be used",
            unknown,
            *nothing,
            *(f"{r.name}: {'; '.join(r.reasons)}" for r in rows),
        ]
    higher = rows[: rows.index(used)]
    return [
        f"the highest step that holds; {unknown}",
        *used.reasons,
        *(f"not {row.name}: {'; '.join(row.reasons)}" for row in higher),
    ]


def _run_beside(root: Path) -> list[str]:
    if not (root.parent / "run.json").is_file():
        return []
    return [f"the run in {root.parent} may know more about them: give that directory"]
