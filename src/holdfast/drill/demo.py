"""The demo: break a real training run on purpose, watch it recover, prove that nothing was lost.

It trains the example on CPU ranks under `holdfast run`, flips a bit in the newest checkpoint, kills a rank in
the middle of a step, and lets the run recover. Then it trains an uninterrupted reference and compares the two
bit by bit.

Guarantee: the result says "equal" only if both faults really happened, were handled as claimed, and every
loss, sample and parameter was found in both runs and matched. Whatever happens, no process is left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from holdfast import __version__
from holdfast.account import Incident, Story, back_line, headline, incidents_of
from holdfast.base import duration, number, plural, printable
from holdfast.drill import compare
from holdfast.drill.compare import Comparison
from holdfast.drill.faults import (
    FaultError,
    FlippedByte,
    Killed,
    Training,
    TrainingFailedError,
    flip_in_checkpoint,
    kill_rank,
    stopped_rank,
    training,
)
from holdfast.errors import UsageError
from holdfast.journal import JournalLine
from holdfast.journal.events import (
    Account,
    AttemptStarted,
    DecisionMade,
    Resumed,
    RunFinished,
    RungRejected,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    StepsDone,
    Warned,
    WorkerFailed,
    decode_loss,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


# What the demo shows while it runs: a live bar on a terminal, plain lines elsewhere.


SHOWN = (AttemptStarted, Resumed, RunFinished, SaveCommitted, SaveFailed, Warned)
"""Events shown as lines. An incident is shown as `holdfast run` shows it, by its account and what follows."""
STYLES = {"fault": "bold red", "warning": "yellow", "decision": "bold cyan", "saved": "blue", "good": "green"}
PLAIN_EVERY = 5.0
"""Seconds between two lines about the step, if there is no bar."""


class DemoView:
    """Writes to one console; the same calls for a terminal and for a file."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()
        self._bar: tuple[Progress, TaskID] | None = None
        self._attempt, self._loss, self._saved, self._said = 1, "–", "none yet", 0.0
        self._story, self._lines = Story(), list[JournalLine]()

    def say(self, text: str, style: str = "") -> None:
        """A line with the time since the demo began."""
        from rich.text import Text

        line = Text(f"{time.monotonic() - self._began:6.1f} s  ", style="dim")
        line.append(text, style=style or None)
        self.console.print(line, soft_wrap=not self.console.is_terminal, highlight=False)

    def heading(self, text: str) -> None:
        from rich.text import Text

        self.console.print()
        self.console.print(Text(text, style="bold"))

    @contextlib.contextmanager
    def following(self, what: str, steps: int) -> Iterator[None]:
        """Show the progress of one run while the block lasts."""
        self._attempt, self._loss, self._saved, self._said = 1, "–", "none yet", time.monotonic()
        if not self.console.is_terminal:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn(
                "loss {task.fields[loss]}  attempt {task.fields[attempt]}  last save {task.fields[saved]}"
            ),
            TimeElapsedColumn(),
        )
        progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=5)
        task = progress.add_task(what, total=steps, loss="–", attempt=1, saved="none yet")
        self._bar = (progress, task)
        try:
            with progress:
                yield
        finally:
            self._bar = None

    def see(self, line: JournalLine, *, quiet: bool = False) -> None:
        """A journal line: moves the bar, and is shown if it is of interest (`quiet`: never)."""
        body = line.body
        if not quiet:
            self._lines.append(line)
        if isinstance(body, StepsDone):
            if line.who == "rank-0":
                self._progress(line, body)
                self._tell_return(line)
            return
        if isinstance(body, AttemptStarted):
            self._attempt = line.attempt
        elif isinstance(body, SaveCommitted):
            self._saved = f"step {body.step}"
        elif isinstance(body, Resumed):
            self._saved = f"step {body.step}" if body.checkpoint else "none yet"
            if self._bar is not None:
                self._bar[0].update(self._bar[1], completed=body.step)
        told = None if quiet else self._story.line(line)
        if isinstance(body, Account) and not quiet:
            self._story.fell(body)
            self.say(headline(body), STYLES["fault"])
            self.say(f"  why:  {printable(body.why[0])}" if body.why else "", "dim")
            self.say(f"  done: {printable(body.done)}", "dim")
        elif told:
            self.say(told, STYLES["warning" if isinstance(body, RungRejected) else "decision"])
        elif isinstance(body, SHOWN) and not quiet:
            shown = body.render()
            self.say(shown.text, STYLES.get(shown.style, ""))
            for detail in shown.details:
                self.say(f"  {detail}", "dim")

    def _tell_return(self, line: JournalLine) -> None:
        over = self._story.is_back(line)
        mine = [one for one in incidents_of(self._lines) if over is not None and one.attempt == over.attempt]
        for incident in mine[-1:]:
            self.say(back_line(incident, self._story.target), STYLES["good"])

    def _progress(self, line: JournalLine, body: StepsDone) -> None:
        step = body.first + len(body.seconds) - 1
        self._loss = number(decode_loss(body.loss[-1])) if body.loss else "–"
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=step, loss=self._loss, attempt=line.attempt, saved=self._saved)
        elif not self.console.is_terminal and time.monotonic() - self._said >= PLAIN_EVERY:
            self._said = time.monotonic()
            self.say(f"step {step}, loss {self._loss}, attempt {line.attempt}, last save {self._saved}")


# What the demo claims, each checked from evidence: the journals, the exit codes, the bytes on disk.
#
# Nothing here knows what ought to have happened except from the two faults that were done. If a fault missed,
# or the run survived it in another way than claimed, the check fails and says what was found.


class CheckedClaim(msgspec.Struct, frozen=True, kw_only=True):
    claim: str
    holds: bool
    found: str
    """The evidence, for or against."""


def commits(lines: list[JournalLine], attempt: int | None = None) -> list[SaveCommitted]:
    """Checkpoints in the order of their commits."""
    return [
        line.body
        for line in lines
        if isinstance(line.body, SaveCommitted) and (attempt is None or line.attempt == attempt)
    ]


def last_step(lines: list[JournalLine], rank: int) -> JournalLine | None:
    """The last line with which a rank said that it ended a step."""
    own = (line for line in reversed(lines) if isinstance(line.body, StepsDone))
    return next((line for line in own if line.who == f"rank-{rank}"), None)


def steps_done(lines: list[JournalLine], rank: int) -> int:
    line = last_step(lines, rank)
    if line is None or not isinstance(line.body, StepsDone):
        return 0
    return line.body.first + len(line.body.seconds) - 1


def amid_step(lines: list[JournalLine], rank: int, *, interval: int, last: int) -> bool:
    """Whether a rank that is stopped now is in the middle of a step, and the others cannot begin a save.

    The others may finish the step it is in, if it has sent its part; so a save must not follow that step.
    """
    done = steps_done(lines, rank)
    begun = {line.body.checkpoint for line in lines if isinstance(line.body, SaveStarted)}
    saving = begun - {save.checkpoint for save in commits(lines)}
    return done % interval != 0 and (done + 1) % interval != 0 and done + 1 < last and not saving


def check_kill(lines: list[JournalLine], killed: Killed) -> CheckedClaim:
    """The rank died of our signal, in the middle of a step and outside any save."""
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
        return CheckedClaim(claim=claim, holds=False, found=f"pid {killed.pid} {seen}")
    who, own = f"rank-{killed.rank}", [line for line in lines if line.attempt == killed.attempt]
    steps = [line for line in own if isinstance(line.body, StepsDone) and line.who == who]
    begun = {line.body.checkpoint for line in own if isinstance(line.body, SaveStarted)}
    cut = begun - {save.checkpoint for save in commits(own)}
    if not steps or cut:
        found = f"in the middle of saving {', '.join(sorted(cut))}" if cut else "before its first step"
        return CheckedClaim(claim=claim, holds=False, found=found)
    assert isinstance(steps[-1].body, StepsDone)
    last = steps[-1].body.first + len(steps[-1].body.seconds) - 1
    usual = sorted(second for line in steps for second in _seconds(line))
    late = killed.at - steps[-1].at
    found = (
        f"pid {killed.pid}, {duration(max(0.0, late))} into step {last + 1}; "
        f"a step took {duration(usual[len(usual) // 2])}"
    )
    return CheckedClaim(claim=claim, holds=late > 0, found=found)


def _seconds(line: JournalLine) -> list[float]:
    return line.body.seconds if isinstance(line.body, StepsDone) else []


def check_refusal(lines: list[JournalLine], killed: Killed, flipped: FlippedByte) -> CheckedClaim:
    """The altered checkpoint was the newest, and was refused because its bytes do not match their digest."""
    claim = "the altered checkpoint was the newest, and was refused by its digest"
    before = commits(lines, killed.attempt)
    if not before or before[-1].checkpoint != flipped.checkpoint:
        newest = before[-1].checkpoint if before else "nothing"
        return CheckedClaim(
            claim=claim, holds=False, found=f"the newest was {newest}, not {flipped.checkpoint}"
        )
    reasons = [
        reason
        for line in lines
        if isinstance(line.body, RungRejected)
        and line.attempt > killed.attempt
        and line.body.checkpoint == flipped.checkpoint
        for reason in line.body.reasons
    ]
    if not reasons:
        return CheckedClaim(claim=claim, holds=False, found=f"{flipped.checkpoint} was never refused")
    shard = Path(flipped.path).name
    named = [reason for reason in reasons if "digest" in reason and shard in reason]
    return CheckedClaim(claim=claim, holds=bool(named), found=(named or reasons)[0])


def check_resume(lines: list[JournalLine], killed: Killed, flipped: FlippedByte) -> CheckedClaim:
    """The next attempt went on from the checkpoint below."""
    claim = "the run went on from the checkpoint before it"
    below = [save for save in commits(lines, killed.attempt) if save.checkpoint != flipped.checkpoint]
    resumed = [
        line.body for line in lines if isinstance(line.body, Resumed) and line.attempt == killed.attempt + 1
    ]
    if not resumed or not below:
        return CheckedClaim(claim=claim, holds=False, found="no later attempt resumed")
    found = f"attempt {killed.attempt + 1} resumed from {resumed[0].checkpoint or 'nothing'}"
    return CheckedClaim(claim=claim, holds=resumed[0].checkpoint == below[-1].checkpoint, found=found)


def check_finish(lines: list[JournalLine], killed: Killed, *, steps: int, exit_code: int) -> CheckedClaim:
    """One decision, one restart, the last step reached, exit code 0."""
    claim = "the run recovered by itself and finished"
    attempts = {line.attempt for line in lines if isinstance(line.body, AttemptStarted)}
    decided = [
        line.body for line in lines if isinstance(line.body, DecisionMade) and line.body.about == "recovery"
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
    return CheckedClaim(claim=claim, holds=holds, found=found)


def check_reference(lines: list[JournalLine], *, steps: int, exit_code: int) -> CheckedClaim:
    """The reference was not disturbed; otherwise it would be no reference."""
    attempts = {line.attempt for line in lines if isinstance(line.body, AttemptStarted)}
    failures = sum(isinstance(line.body, WorkerFailed) for line in lines)
    ends = [line.body.step for line in lines if isinstance(line.body, RunFinished)]
    lives = f"{plural(len(attempts), 'attempt')}, {plural(failures, 'failed worker')}"
    return CheckedClaim(
        claim="the reference was not interrupted",
        holds=exit_code == 0 and len(attempts) == 1 and failures == 0 and ends == [steps],
        found=f"{lives}, exit code {exit_code}",
    )


def check_copies(root: Path, flipped: FlippedByte) -> CheckedClaim:
    """Of all checkpoints on disk, exactly the altered one fails verification."""
    from holdfast.checkpoint.format import CheckpointRoot, Reason, verify

    found = CheckpointRoot(root).names()
    bad = {
        str(name): inspection.problems for name in found if not (inspection := verify(root / str(name))).sound
    }
    altered = [
        problem.path for problem in bad.get(flipped.checkpoint, []) if problem.reason == Reason.ALTERED
    ]
    sound = plural(len(found) - len(bad), "checkpoint") + " sound"
    return CheckedClaim(
        claim="every other checkpoint is sound",
        holds=set(bad) == {flipped.checkpoint} and altered == [Path(flipped.path).name],
        found=f"{sound}; not sound: {', '.join(sorted(bad)) or 'none'}",
    )


MARKER = ".holdfast-demo"
OWN_NAMES = ("run", "reference", "run.log", "reference.log", "report.html", MARKER)
"""Everything the demo ever puts into its directory."""
VICTIM = 1
SEED = 2
START_TIMEOUT = 240.0
STEP_TIMEOUT = 1.0
"""A run may take START_TIMEOUT plus this for each step; about ten times what it needs."""
QUIET_TIMEOUT = 90.0
"""Seconds without a journal line after which we give up on a run."""


class DemoResult(msgspec.Struct, kw_only=True):
    """What `--json` prints."""

    equal: bool = False
    """Whether losses, sample order and state are bitwise those of the reference."""
    passed: bool = False
    """Whether `equal` holds and both faults happened and were handled as claimed."""
    error: str = ""
    ranks: int
    steps: int
    interval: int
    flipped: FlippedByte | None = None
    killed: Killed | None = None
    checks: list[CheckedClaim] = []
    comparisons: list[Comparison] = []
    incidents: list[dict[str, object]] = []
    seconds: dict[str, float] = {}
    directory: str = ""
    report: str = ""


def example_script() -> Path:
    """The example: beside this file in an installed package, else in the source tree."""
    here = Path(__file__).resolve()
    for candidate in (here.parent / "train_gpt.py", here.parents[3] / "examples" / "train_gpt.py"):
        if candidate.is_file():
            return candidate
    raise UsageError(
        f"the example train_gpt.py is neither in {here.parent} nor in the source tree; "
        f"holdfast {__version__} is not installed completely"
    )


@contextlib.contextmanager
def demo_directory(directory: Path) -> Iterator[Path]:
    """An empty directory of the demo's own, held for as long as the block lasts.

    An earlier demo's leftovers are replaced, and nothing else: a directory that holds anything but what a
    demo writes is refused.
    """
    directory = directory.absolute()
    try:
        lock = _claim(directory)
    except OSError as error:
        raise UsageError(f"cannot use {directory} for the demo: {error.strerror or error}") from error
    with lock:
        yield directory


def _claim(directory: Path) -> IO[str]:
    """Clear the directory of an earlier demo. Returns its marker, locked until it is closed."""
    directory.mkdir(parents=True, exist_ok=True)
    held = sorted(entry.name for entry in directory.iterdir())
    strange = [name for name in held if name not in OWN_NAMES]
    if held and (strange or MARKER not in held):
        what = f"holds {strange[0]!r}" if strange else "is not empty"
        raise UsageError(f"{directory} {what} and is not an earlier demo's; choose another --dir")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.fdopen(os.open(directory / MARKER, flags, 0o644), "a")  # a link or a pipe is not our marker
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UsageError(f"another demo is running in {directory}; choose another --dir") from error
    for name in held:
        if name != MARKER:
            _remove(directory / name)
    return lock


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def run_demo(directory: Path, view: DemoView, *, ranks: int, steps: int) -> DemoResult:
    """The whole demo. Raises TrainingFailedError if it cannot be brought to its end."""
    began = time.monotonic()
    interval = steps // 4
    result = DemoResult(ranks=ranks, steps=steps, interval=interval, directory=str(directory))

    view.heading("1  Train under holdfast run, and break it")
    broken = _train(directory, "run", view, result, disturb=True)
    result.seconds["run"] = time.monotonic() - began
    assert result.killed is not None
    assert result.flipped is not None

    view.heading("2  Train again from the start, undisturbed")
    began_reference = time.monotonic()
    reference = _train(directory, "reference", view, result, disturb=False)
    result.seconds["reference"] = time.monotonic() - began_reference

    view.heading("3  Compare")
    began_compare = time.monotonic()
    result.checks = [
        check_kill(broken.lines, result.killed),
        check_refusal(broken.lines, result.killed, result.flipped),
        check_resume(broken.lines, result.killed, result.flipped),
        check_finish(broken.lines, result.killed, steps=steps, exit_code=broken.process.returncode),
        check_copies(broken.run_dir / "checkpoints", result.flipped),
        check_reference(reference.lines, steps=steps, exit_code=reference.process.returncode),
    ]
    result.comparisons = _compare(broken, reference, steps=steps, ranks=ranks)
    result.equal = all(one.equal for one in result.comparisons)
    result.passed = result.equal and all(check.holds for check in result.checks)
    found = incidents_of(broken.lines)
    result.incidents = [_incident(one) for one in found]
    result.seconds["compare"] = time.monotonic() - began_compare
    result.seconds["total"] = time.monotonic() - began
    _write_report(broken.lines, reference.lines, directory / "report.html", result)
    return result


def _train(directory: Path, name: str, view: DemoView, result: DemoResult, *, disturb: bool) -> Training:
    """Train once to the end; with `disturb`, do both faults on the way."""
    settings = [f"checkpoint.interval={result.interval}", "journal.step_flush=0"]
    # Of the example's two modes, DDP needs fewer messages per step: twice as fast between CPU processes.
    arguments = [f"--steps={result.steps}", "--device=cpu", "--parallel=ddp"]
    with training(
        example_script(),
        directory / name,
        directory / f"{name}.log",
        ranks=result.ranks,
        settings=settings,
        arguments=arguments,
    ) as run:

        def see(line: JournalLine) -> None:
            view.see(line, quiet=not disturb)

        with view.following("training" if disturb else "reference", result.steps):
            if disturb:
                try:
                    _break(run, view, result)
                except FaultError as error:
                    raise TrainingFailedError(f"{error}{run.tail()}") from error
            limit = START_TIMEOUT + STEP_TIMEOUT * result.steps
            run.follow(run.ended, see, timeout=limit, quiet=QUIET_TIMEOUT, what="the run's end")
        if run.process.returncode != 0:
            raise TrainingFailedError(f"{name} ended with code {run.process.returncode}{run.tail()}")
        if not disturb:
            view.say(f"finished at step {result.steps}")
        return run


def _break(run: Training, view: DemoView, result: DemoResult) -> None:
    """Wait for the second checkpoint; stop a rank in the middle of a later step; alter the newest; kill it.

    The rank is stopped before anything is looked at: even if this process gets no CPU for a while, it breaks
    the run where it says. The other ranks wait for that rank, so nothing is committed between look and kill.
    """
    begun = time.monotonic()
    limit = START_TIMEOUT + STEP_TIMEOUT * result.steps
    follow = {"timeout": limit, "quiet": QUIET_TIMEOUT}
    run.follow(lambda: len(commits(run.lines)) >= 2, view.see, what="two checkpoints", **follow)
    aim = commits(run.lines)[-1].step + max(2, result.interval // 3)
    while True:
        reached = partial(_reached, run, VICTIM, aim)
        run.follow(reached, view.see, what=f"step {aim}", **follow)
        time.sleep(_to_mid_step(run, VICTIM))
        with stopped_rank(run.lines, VICTIM):
            for line in run.poll():
                view.see(line)
            if amid_step(run.lines, VICTIM, interval=result.interval, last=result.steps):
                result.flipped = _flip_newest(run, view)
                result.killed = killed = kill_rank(run.lines, VICTIM)
                break
        if time.monotonic() - begun > limit:
            raise FaultError(f"rank {VICTIM} was not found in the middle of a step within {limit:g} s")
        aim = steps_done(run.lines, VICTIM) + 1
    view.say(f"FAULT  {killed.signal} sent to rank {killed.rank}, pid {killed.pid}", "bold magenta")


def _flip_newest(run: Training, view: DemoView) -> FlippedByte:
    newest = commits(run.lines)[-1]
    flipped = flip_in_checkpoint(run.run_dir / "checkpoints" / newest.checkpoint, seed=SEED)
    where = f"{newest.checkpoint}/{Path(flipped.path).name}"
    values = f"{number(flipped.value_before)} → {number(flipped.value_after)}"
    view.say(f"FAULT  bit {flipped.bit} of byte {flipped.offset:,} of {where} flipped", "bold magenta")
    view.say(f"  {flipped.tensor}: one number, {values}", "dim")
    return flipped


def _reached(run: Training, rank: int, step: int) -> bool:
    return steps_done(run.lines, rank) >= step


def _to_mid_step(run: Training, rank: int) -> float:
    """Seconds until the rank is about half way through its next step, which follows its last one at once."""
    line = last_step(run.lines, rank)
    if line is None or not isinstance(line.body, StepsDone):
        return 0.0
    return min(1.0, max(0.0, line.at + line.body.seconds[-1] / 2 - time.time()))


def _compare(one: Training, other: Training, *, steps: int, ranks: int) -> list[Comparison]:
    mine, theirs = compare.timeline(one.lines), compare.timeline(other.lines)
    found = [
        compare.compare_losses(mine, theirs, steps=steps, ranks=ranks),
        compare.compare_samples(mine, theirs, steps=steps, ranks=ranks),
    ]
    final = [commits(run.lines)[-1:] for run in (one, other)]
    if not all(last and last[0].step == steps for last in final):
        why = f"a run has no checkpoint of step {steps}"
        return [*found, Comparison(what="parameters", count=0, unit="tensors", difference=why)]
    paths = [
        run.run_dir / "checkpoints" / last[0].checkpoint
        for run, last in zip((one, other), final, strict=True)
    ]
    return found + compare.compare_checkpoints(*paths)


def _incident(one: Incident) -> dict[str, object]:
    return {
        "what": one.what,
        "evidence": one.evidence,
        "decision": one.decision,
        "attempt": one.attempt,
        "failed_at_step": one.failed_at_step,
        "steps_lost": one.steps_lost,
        "seconds_down": one.seconds_down,
        "phases": {phase.name: phase.seconds for phase in one.phases},
        "seconds_lost": one.seconds_lost,
    }


def _write_report(
    broken: list[JournalLine], reference: list[JournalLine], path: Path, result: DemoResult
) -> None:
    from holdfast.observe import write_report

    verdict = "bitwise equal to the uninterrupted reference" if result.equal else "NOT equal to the reference"
    facts = [("Verdict", verdict if result.passed or not result.equal else f"{verdict}, but a claim failed")]
    facts += [("Compared", str(one)) for one in result.comparisons]
    facts += [("Holds" if one.holds else "FAILS", f"{one.claim}: {one.found}") for one in result.checks]
    facts += [("Took", duration(result.seconds["total"]))]
    curve = compare.loss_curve(reference)
    write_report(broken, path, title="Holdfast demo", reference=curve, facts=facts)
    result.report = str(path)
