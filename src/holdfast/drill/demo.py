"""The demo: break a real training run on purpose, watch it recover, prove that nothing was lost.

It trains the example on CPU ranks under `holdfast run`, flips a bit in the newest checkpoint, kills a rank in
mid-step, and lets the run recover. Then it trains an uninterrupted reference and compares the two bit by bit.

Guarantee: the result says "equal" only if both faults really happened, were handled as claimed, and every
loss, sample and parameter was found in both runs and matched. Whatever else happens, no process is left.
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
from typing import IO

import msgspec

from holdfast._version import __version__
from holdfast.account.incidents import Incident, incidents
from holdfast.drill import compare, demo_checks
from holdfast.drill.compare import Comparison
from holdfast.drill.demo_checks import Check
from holdfast.drill.demo_view import DemoView
from holdfast.drill.faults import FaultError, FlippedByte, Killed, flip_in_checkpoint, kill_rank, stopped_rank
from holdfast.drill.training import Training, TrainingFailedError, training
from holdfast.errors import UsageError
from holdfast.journal.events import Line, StepsDone
from holdfast.journal.render import duration, number

MARKER = ".holdfast-demo"
OWN_NAMES = ("run", "reference", "run.log", "reference.log", "report.html", MARKER)
"""Everything the demo ever puts into its directory."""
VICTIM = 1
SEED = 2
START_TIMEOUT = 240.0
STEP_TIMEOUT = 1.0
"""A run may take START_TIMEOUT and this for each step; about ten times what it needs."""
QUIET_TIMEOUT = 90.0
"""Seconds without a journal line after which a run is given up."""


class DemoResult(msgspec.Struct, kw_only=True):
    """What `--json` prints."""

    equal: bool = False
    """Losses, sample order and state are bitwise those of the reference."""
    passed: bool = False
    """`equal`, and both faults happened and were handled as claimed."""
    error: str = ""
    ranks: int
    steps: int
    interval: int
    flipped: FlippedByte | None = None
    killed: Killed | None = None
    checks: list[Check] = []
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
    """Clear the directory of an earlier demo; its marker, locked until it is closed."""
    directory.mkdir(parents=True, exist_ok=True)
    held = sorted(entry.name for entry in directory.iterdir())
    strange = [name for name in held if name not in OWN_NAMES]
    if held and (strange or MARKER not in held):
        what = f"holds {strange[0]!r}" if strange else "is not empty"
        raise UsageError(f"{directory} {what} and is not an earlier demo's; choose another --dir")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.fdopen(os.open(directory / MARKER, flags, 0o644), "a")  # a link or a pipe is no marker of ours
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
        demo_checks.check_kill(broken.lines, result.killed),
        demo_checks.check_refusal(broken.lines, result.killed, result.flipped),
        demo_checks.check_resume(broken.lines, result.killed, result.flipped),
        demo_checks.check_finish(
            broken.lines, result.killed, steps=steps, exit_code=broken.process.returncode
        ),
        demo_checks.check_copies(broken.run_dir / "checkpoints", result.flipped),
        demo_checks.check_reference(reference.lines, steps=steps, exit_code=reference.process.returncode),
    ]
    result.comparisons = _compare(broken, reference, steps=steps, ranks=ranks)
    result.equal = all(one.equal for one in result.comparisons)
    result.passed = result.equal and all(check.holds for check in result.checks)
    found = incidents(broken.lines)
    result.incidents = [_incident(one) for one in found]
    result.seconds["compare"] = time.monotonic() - began_compare
    result.seconds["total"] = time.monotonic() - began
    _write_report(broken.lines, reference.lines, directory / "report.html", result)
    return result


def _train(directory: Path, name: str, view: DemoView, result: DemoResult, *, disturb: bool) -> Training:
    """Train once to the end; with `disturb`, do both faults on the way."""
    settings = [f"checkpoint.interval={result.interval}", "journal.step_flush=0"]
    # Of the example's two ways, DDP needs fewer messages a step: twice as fast between processes on a CPU.
    arguments = [f"--steps={result.steps}", "--device=cpu", "--parallel=ddp"]
    with training(
        example_script(),
        directory / name,
        directory / f"{name}.log",
        ranks=result.ranks,
        settings=settings,
        arguments=arguments,
    ) as run:

        def see(line: Line) -> None:
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

    The rank is stopped before anything is looked at: whoever gets no processor for a while still breaks the
    run where it says. The other ranks wait for it, so nothing is committed between the look and the kill.
    """
    begun = time.monotonic()
    limit = START_TIMEOUT + STEP_TIMEOUT * result.steps
    follow = {"timeout": limit, "quiet": QUIET_TIMEOUT}
    run.follow(lambda: len(demo_checks.commits(run.lines)) >= 2, view.see, what="two checkpoints", **follow)
    aim = demo_checks.commits(run.lines)[-1].step + max(2, result.interval // 3)
    while True:
        reached = partial(_reached, run, VICTIM, aim)
        run.follow(reached, view.see, what=f"step {aim}", **follow)
        time.sleep(_to_mid_step(run, VICTIM))
        with stopped_rank(run.lines, VICTIM):
            for line in run.poll():
                view.see(line)
            if demo_checks.amid_step(run.lines, VICTIM, interval=result.interval, last=result.steps):
                result.flipped = _flip_newest(run, view)
                result.killed = killed = kill_rank(run.lines, VICTIM)
                break
        if time.monotonic() - begun > limit:
            raise FaultError(f"rank {VICTIM} was not found in the middle of a step within {limit:g} s")
        aim = demo_checks.steps_done(run.lines, VICTIM) + 1
    view.say(f"FAULT  {killed.signal} sent to rank {killed.rank}, pid {killed.pid}", "bold magenta")


def _flip_newest(run: Training, view: DemoView) -> FlippedByte:
    newest = demo_checks.commits(run.lines)[-1]
    flipped = flip_in_checkpoint(run.run_dir / "checkpoints" / newest.checkpoint, seed=SEED)
    where = f"{newest.checkpoint}/{Path(flipped.path).name}"
    values = f"{number(flipped.value_before)} → {number(flipped.value_after)}"
    view.say(f"FAULT  bit {flipped.bit} of byte {flipped.offset:,} of {where} flipped", "bold magenta")
    view.say(f"  {flipped.tensor}: one number, {values}", "dim")
    return flipped


def _reached(run: Training, rank: int, step: int) -> bool:
    return demo_checks.steps_done(run.lines, rank) >= step


def _to_mid_step(run: Training, rank: int) -> float:
    """Seconds until the rank is about half way through its next step, which follows its last one at once."""
    line = demo_checks.last_step(run.lines, rank)
    if line is None or not isinstance(line.body, StepsDone):
        return 0.0
    return min(1.0, max(0.0, line.at + line.body.seconds[-1] / 2 - time.time()))


def _compare(one: Training, other: Training, *, steps: int, ranks: int) -> list[Comparison]:
    mine, theirs = compare.timeline(one.lines), compare.timeline(other.lines)
    found = [
        compare.compare_losses(mine, theirs, steps=steps, ranks=ranks),
        compare.compare_samples(mine, theirs, steps=steps, ranks=ranks),
    ]
    final = [demo_checks.commits(run.lines)[-1:] for run in (one, other)]
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
        "seconds_lost": one.seconds_lost,
    }


def _write_report(broken: list[Line], reference: list[Line], path: Path, result: DemoResult) -> None:
    from holdfast.observe.report import write_report

    verdict = "bitwise equal to the uninterrupted reference" if result.equal else "NOT equal to the reference"
    facts = [("Verdict", verdict if result.passed or not result.equal else f"{verdict}, but a claim failed")]
    facts += [("Compared", str(one)) for one in result.comparisons]
    facts += [("Holds" if one.holds else "FAILS", f"{one.claim}: {one.found}") for one in result.checks]
    facts += [("Took", duration(result.seconds["total"]))]
    curve = compare.loss_curve(reference)
    write_report(broken, path, title="Holdfast demo", reference=curve, facts=facts)
    result.report = str(path)
