"""What a resume would make of each checkpoint of a stopped run, as findings of the recovery runbook. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.journal.text import plural, size
from holdfast.policy.runbook import Finding, Mark, Stage

FRESH, REFUSED = "fresh start", "refused"
USED, BAD, LOWER, NO_RUNG = "would be used", "refused", "lower than the one used", "not a rung"
LOCAL = "would be used if its nodes still hold it"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, and what a resume would make of it."""

    name: str
    step: int | None
    verdict: str
    """`would be used`, `would be used if its nodes still hold it`, `refused`, `lower than the one used` or
    `not a rung`."""
    reasons: list[str] = []
    path: str | None = None
    """Where its bytes are: a directory, or a URL of the object store. None if only nodes may hold them."""
    tier: str = "global"
    """global, remote or local."""
    local: str | None = None
    """Where the local tier's copies should be, as recorded."""
    world: int | None = None
    """How many ranks saved it, where its manifest was read."""
    standing: str = ""
    bytes: int = 0


class Resolved(Protocol):
    """The part of `checkpoint.resolution.Resolution` that is judged here."""

    @property
    def run(self) -> str: ...
    @property
    def root(self) -> str: ...
    @property
    def chosen(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    @property
    def tier(self) -> str: ...
    @property
    def without_local(self) -> str: ...
    @property
    def why(self) -> list[str]: ...
    @property
    def candidates(self) -> list[Candidate]: ...
    @property
    def digests_read(self) -> bool: ...
    @property
    def asked(self) -> str: ...
    @property
    def unseen(self) -> list[str]: ...
    @property
    def exit_code(self) -> int: ...


def rung_findings(found: Resolved | None) -> list[Finding]:
    """Where candidates are, what verifying them showed, and which one is used; None if they lie on a hang."""
    if found is None:
        text = "not looked at: what they lie on hangs"
        return [Finding(stage=Stage.LOCATE, mark=Mark.UNKNOWN, text=text)]
    rungs = [row for row in found.candidates if row.verdict != NO_RUNG]
    bad = [row for row in rungs if row.verdict == BAD]
    return [
        _located(found, rungs),
        _verified(rungs, bad, digests_read=found.digests_read, run=found.run),
        _chosen(found, bad),
    ]


def _located(found: Resolved, rungs: Sequence[Candidate]) -> Finding:
    elsewhere = [f"{row.name}: {row.local}, as recorded" for row in rungs if row.local]
    unseen = [f"could not be looked at: {text}" for text in found.unseen]
    kept_out = [
        f"no rung: {row.name}: {'; '.join(row.reasons)}" for row in found.candidates if row.verdict == NO_RUNG
    ]
    return Finding(
        stage=Stage.LOCATE,
        mark=Mark.NOTE if unseen else Mark.OK,
        text=f"{plural(len(rungs), 'rung')} under {found.root}",
        evidence=[*elsewhere, *unseen, *kept_out],
    )


def _verified(
    rungs: Sequence[Candidate], bad: Sequence[Candidate], *, digests_read: bool, run: str
) -> Finding:
    how = "every byte that was read matches" if digests_read else "names and sizes fit; digests were not read"
    used = next((row for row in rungs if row.verdict == USED), None)
    if used is not None and used.reasons and not run:  # what was looked at where there are no digests
        how = used.reasons[0]
    return Finding(
        stage=Stage.VERIFY,
        mark=Mark.NOTE if bad else Mark.OK,
        text=f"{plural(len(bad), 'rung')} failed" if bad else how if rungs else "nothing to verify",
        evidence=[f"{row.name}: {'; '.join(row.reasons)}" for row in bad],
    )


def _chosen(found: Resolved, bad: Sequence[Candidate]) -> Finding:
    if found.exit_code == ExitCode.RUN_IS_LIVE:  # somebody has claimed it since the first look
        return _none("somebody holds the run now", found.why, ExitCode.RUN_IS_LIVE)
    if found.chosen == REFUSED:
        return _none("no checkpoint may be used", found.why, ExitCode.NO_VALID_RUNG)
    if found.chosen == FRESH and found.asked == "fresh":
        return _none(
            "the last launch was told to start fresh, and would do so again",
            ["checkpoint.resume_from = 'fresh'"],
            ExitCode.USAGE,
            "take that setting away to go on from where it was, or give the command after `--`",
        )
    if found.chosen == FRESH:
        text = "a fresh start: no checkpoint was ever kept"
        return Finding(stage=Stage.RUNG, mark=Mark.OK, text=text, evidence=found.why)
    used = next(row for row in found.candidates if row.name == found.chosen)
    told = f", {size(used.bytes)}" if used.bytes else ""
    below = [f"if its nodes hold it no longer: {found.without_local}"] if used.verdict == LOCAL else []
    why = [line for line in found.why if not line.startswith("not ")]  # those have been told as verified
    why += [f"passed over: {', '.join(row.name for row in bad)}"] if bad else []
    return Finding(
        stage=Stage.RUNG,
        mark=Mark.NOTE if bad or below else Mark.OK,
        text=f"step {found.step} from {found.chosen} ({found.tier}{told})",
        evidence=[*why, *below],
    )


def _none(why: str, evidence: list[str], code: ExitCode, remedy: str = "") -> Finding:
    return Finding(
        stage=Stage.RUNG,
        mark=Mark.PROBLEM,
        text=f"none: {why}",
        evidence=evidence,
        code=int(code),
        next=remedy or MEANINGS[code][1],
    )
