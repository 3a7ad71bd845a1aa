"""What the demo claims, each checked from evidence: the journals, the exit codes, the bytes on disk.

Nothing here knows what ought to have happened except through the two faults that were done. If a fault
missed, or the run survived it in some other way than claimed, the check fails and says what was found.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.drill.faults import FlippedByte, Killed
from holdfast.journal.events import (
    AttemptStarted,
    Decision,
    Line,
    Resumed,
    RunFinished,
    RungRejected,
    SaveCommitted,
    SaveStarted,
    StepsDone,
    WorkerFailed,
)
from holdfast.journal.render import duration, plural


class Check(msgspec.Struct, frozen=True, kw_only=True):
    claim: str
    holds: bool
    found: str
    """The evidence, for or against."""


def commits(lines: list[Line], attempt: int | None = None) -> list[SaveCommitted]:
    """Checkpoints in the order of their commits."""
    return [
        line.body
        for line in lines
        if isinstance(line.body, SaveCommitted) and (attempt is None or line.attempt == attempt)
    ]


def last_step(lines: list[Line], rank: int) -> Line | None:
    """The line with which a rank last said that it ended a step."""
    own = (line for line in reversed(lines) if isinstance(line.body, StepsDone))
    return next((line for line in own if line.who == f"rank-{rank}"), None)


def steps_done(lines: list[Line], rank: int) -> int:
    line = last_step(lines, rank)
    if line is None or not isinstance(line.body, StepsDone):
        return 0
    return line.body.first + len(line.body.seconds) - 1


def amid_step(lines: list[Line], rank: int, *, interval: int, last: int) -> bool:
    """Whether a rank that is stopped now is in the middle of a step, and the others cannot begin a save.

    They may end the step that it is in, if it has sent its part already; so that must be no step of a save.
    """
    done = steps_done(lines, rank)
    begun = {line.body.checkpoint for line in lines if isinstance(line.body, SaveStarted)}
    saving = begun - {save.checkpoint for save in commits(lines)}
    return done % interval != 0 and (done + 1) % interval != 0 and done + 1 < last and not saving


def check_kill(lines: list[Line], killed: Killed) -> Check:
    """The rank died of our signal, between two steps' ends and outside of any save."""
    claim = f"rank {killed.rank} was killed by {killed.signal} in the middle of a step"
    failures = [
        line.body
        for line in lines
        if isinstance(line.body, WorkerFailed)
        and line.attempt == killed.attempt
        and line.body.pid == killed.pid
    ]
    if not failures or failures[0].signal != killed.signal:
        seen = f"ended with code {failures[0].exit_code}" if failures else "was not reported as failed"
        return Check(claim=claim, holds=False, found=f"pid {killed.pid} {seen}")
    who, own = f"rank-{killed.rank}", [line for line in lines if line.attempt == killed.attempt]
    steps = [line for line in own if isinstance(line.body, StepsDone) and line.who == who]
    begun = {line.body.checkpoint for line in own if isinstance(line.body, SaveStarted)}
    cut = begun - {save.checkpoint for save in commits(own)}
    if not steps or cut:
        found = f"in the middle of saving {', '.join(sorted(cut))}" if cut else "before its first step"
        return Check(claim=claim, holds=False, found=found)
    assert isinstance(steps[-1].body, StepsDone)
    last = steps[-1].body.first + len(steps[-1].body.seconds) - 1
    usual = sorted(second for line in steps for second in _seconds(line))
    late = killed.at - steps[-1].at
    found = (
        f"pid {killed.pid}, {duration(max(0.0, late))} into step {last + 1}; "
        f"a step took {duration(usual[len(usual) // 2])}"
    )
    return Check(claim=claim, holds=late > 0, found=found)


def _seconds(line: Line) -> list[float]:
    return line.body.seconds if isinstance(line.body, StepsDone) else []


def check_refusal(lines: list[Line], killed: Killed, flipped: FlippedByte) -> Check:
    """The altered checkpoint was the newest, and was refused because its bytes do not match their digest."""
    claim = "the altered checkpoint was the newest, and was refused by its digest"
    before = commits(lines, killed.attempt)
    if not before or before[-1].checkpoint != flipped.checkpoint:
        newest = before[-1].checkpoint if before else "nothing"
        return Check(claim=claim, holds=False, found=f"the newest was {newest}, not {flipped.checkpoint}")
    reasons = [
        reason
        for line in lines
        if isinstance(line.body, RungRejected)
        and line.attempt > killed.attempt
        and line.body.checkpoint == flipped.checkpoint
        for reason in line.body.reasons
    ]
    if not reasons:
        return Check(claim=claim, holds=False, found=f"{flipped.checkpoint} was never refused")
    shard = Path(flipped.path).name
    named = [reason for reason in reasons if "digest" in reason and shard in reason]
    return Check(claim=claim, holds=bool(named), found=(named or reasons)[0])


def check_resume(lines: list[Line], killed: Killed, flipped: FlippedByte) -> Check:
    """The next attempt went on from the checkpoint below."""
    claim = "the run went on from the checkpoint before it"
    below = [save for save in commits(lines, killed.attempt) if save.checkpoint != flipped.checkpoint]
    resumed = [
        line.body for line in lines if isinstance(line.body, Resumed) and line.attempt == killed.attempt + 1
    ]
    if not resumed or not below:
        return Check(claim=claim, holds=False, found="no later attempt resumed")
    found = f"attempt {killed.attempt + 1} resumed from {resumed[0].checkpoint or 'nothing'}"
    return Check(claim=claim, holds=resumed[0].checkpoint == below[-1].checkpoint, found=found)


def check_finish(lines: list[Line], killed: Killed, *, steps: int, exit_code: int) -> Check:
    """One decision, one restart, the last step reached, exit code 0."""
    claim = "the run recovered by itself and finished"
    attempts = {line.attempt for line in lines if isinstance(line.body, AttemptStarted)}
    decided = [
        line.body for line in lines if isinstance(line.body, Decision) and line.body.about == "recovery"
    ]
    ends = [line.body.step for line in lines if isinstance(line.body, RunFinished)]
    found = (
        f"{plural(len(attempts), 'attempt')}, {plural(len(decided), 'recovery decision')}, "
        f"finished at step {ends[-1] if ends else 'never'}, exit code {exit_code}"
    )
    holds = (
        exit_code == 0
        and ends == [steps]
        and attempts == {killed.attempt, killed.attempt + 1}
        and len(decided) == 1
    )
    return Check(claim=claim, holds=holds, found=found)


def check_reference(lines: list[Line], *, steps: int, exit_code: int) -> Check:
    """The reference was not disturbed; else it would be no reference."""
    attempts = {line.attempt for line in lines if isinstance(line.body, AttemptStarted)}
    failures = sum(isinstance(line.body, WorkerFailed) for line in lines)
    ends = [line.body.step for line in lines if isinstance(line.body, RunFinished)]
    lives = f"{plural(len(attempts), 'attempt')}, {plural(failures, 'failed worker')}"
    return Check(
        claim="the reference was not interrupted",
        holds=exit_code == 0 and len(attempts) == 1 and failures == 0 and ends == [steps],
        found=f"{lives}, exit code {exit_code}",
    )


def check_copies(root: Path, flipped: FlippedByte) -> Check:
    """Of all checkpoints on disk, exactly the altered one fails verification."""
    from holdfast.checkpoint.identity import CheckpointRoot
    from holdfast.checkpoint.verify import Reason, verify

    found = CheckpointRoot(root).names()
    bad = {
        str(name): inspection.problems for name in found if not (inspection := verify(root / str(name))).sound
    }
    altered = [
        problem.path for problem in bad.get(flipped.checkpoint, []) if problem.reason == Reason.ALTERED
    ]
    sound = plural(len(found) - len(bad), "checkpoint") + " sound"
    return Check(
        claim="every other checkpoint is sound",
        holds=set(bad) == {flipped.checkpoint} and altered == [Path(flipped.path).name],
        found=f"{sound}; not sound: {', '.join(sorted(bad)) or 'none'}",
    )
