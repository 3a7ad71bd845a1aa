"""The table of outcomes: every injected truth, on one rank or several, however the model is wrapped.

Each case is a real run under `holdfast run` on devices that are only names; what it came to is read from the
run's records, not from what it printed. The table in docs/guides/validation.md is made from here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import ExitCode
from holdfast.journal import events
from holdfast.record.directory import ControlDirectory
from holdfast.record.operator import excluded
from holdfast.record.standing import Standing, StandingBook
from kit.harness import REPO, Result, finish, holdfast
from kit.runs import events_in

SCRIPT = str(REPO / "tests" / "scripts" / "train" / "train_truth.py")
BAD = 15
"""The step in which it shows."""
TRUTHS = ("transient", "device", "data", "checkpoint", "divergence")
WRAPS = ("none", "ddp", "fsdp")
INJECTED = {"transient": "transient_error", "device": "persistent_error"}


@dataclass(frozen=True)
class Case:
    truth: str
    wrap: str
    several: bool = False
    """Whether more than one rank is concerned."""
    devices: str = "0,1,2,3"
    skip_bad_data: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    """More of them."""
    kill: int = 0
    """The step before which the first attempt is killed; 0 for none."""
    every: int = 6
    """Steps between saves."""

    @property
    def ranks(self) -> int:
        return 1 if self.wrap == "none" else 2

    @property
    def concerned(self) -> str:
        if self.several:
            return "0,1"
        return "0" if self.wrap == "none" else "1"

    @property
    def name(self) -> str:
        how = {"none": "one process", "ddp": "DDP", "fsdp": "FSDP2"}[self.wrap]
        return f"{self.truth}, {'several ranks' if self.several else 'one rank'}, {how}"


ALL = [Case(truth, wrap, several) for truth in TRUTHS for wrap in WRAPS for several in (False, True)
       if wrap != "none" or not several]  # fmt: skip
DIAGONAL = [
    Case("transient", "none"),
    Case("device", "ddp"),
    Case("data", "fsdp", several=True),
    Case("checkpoint", "ddp"),
    Case("divergence", "fsdp"),
]
EXPECTED = {
    "transient": ("transient", ExitCode.OK),
    "device": ("device", ExitCode.OK),
    "data": ("reproducible", ExitCode.OK),
    "checkpoint": ("reproducible", ExitCode.OK),
    "divergence": ("reproducible", ExitCode.VALIDATION_FAILED),
}


@dataclass(frozen=True)
class Outcome:
    """What a case came to, by the run's own records."""

    code: int
    verdicts: list[str]
    excluded: list[str]
    condemned: list[int]
    acquitted: list[int]
    """Steps of the checkpoints that are so at the end."""
    attempts: int
    diagnostics: int
    dropped: list[int]
    """Steps that the policy dropped."""
    result: Result

    def row(self, case: Case) -> str:
        """A line of the table in docs/guides/validation.md."""
        end = "finishes" if self.code == 0 else f"stops with {self.code}"
        told = [f"device {', '.join(self.excluded)} excluded"] if self.excluded else []
        told += [f"checkpoint of step {step} condemned" for step in self.condemned]
        told += [f"checkpoint of step {step} acquitted" for step in self.acquitted]
        told += [f"step {step} dropped" for step in self.dropped if self.code == 0]
        what = "; ".join([*told, end])
        return f"| {case.name} | {self.verdicts[-1] if self.verdicts else '–'} | {what} | {self.attempts} |"


def play(case: Case, cwd: Path, *flags: str, timeout: float = 120.0) -> Outcome:
    """Run one case to its end."""
    settings = {
        "validation.rerun_mode": "validate_results",
        "validation.skip_bad_data": str(case.skip_bad_data).lower(),
        **case.settings,
    }
    if case.truth in INJECTED:
        settings["validation.error_injection_type"] = INJECTED[case.truth]
        settings["validation.error_injection_step"] = str(BAD)
        settings["validation.error_injection_ranks"] = case.concerned
    argv = holdfast("run", "--nproc-per-node", str(case.ranks), "--run-dir", "run", *flags)
    argv += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    env = {
        "TRUTH_KIND": "none" if case.truth in INJECTED else case.truth,
        "TRUTH_RANKS": case.concerned,
        "TRUTH_WRAP": case.wrap,
        "TRUTH_OUT": "out",
        "TRUTH_KILL": str(case.kill),
        "TRUTH_EVERY": str(case.every),
        "CUDA_VISIBLE_DEVICES": case.devices,
    }
    result = finish([*argv, SCRIPT], cwd=cwd, env=env, timeout=timeout)
    return outcome(cwd / "run", result)


def outcome(run: Path, result: Result) -> Outcome:
    control = ControlDirectory.open(run)
    lines = events_in(run)
    book = StandingBook(control)
    saved = {body.checkpoint for body in lines if isinstance(body, events.SaveCommitted)}
    standings = {name: book.of(name.rpartition("-")[2]) for name in sorted(saved)}

    def steps(wanted: Standing) -> list[int]:
        return sorted(int(name[5:13]) for name, standing in standings.items() if standing is wanted)

    return Outcome(
        code=result.code,
        verdicts=[body.verdict for body in lines if isinstance(body, events.Verdict)],
        excluded=[one.device or one.node for one in excluded(control)],
        condemned=steps(Standing.CONDEMNED),
        acquitted=steps(Standing.ACQUITTED),
        attempts=sum(isinstance(body, events.AttemptStarted) for body in lines),
        dropped=[
            body.step for body in lines if isinstance(body, events.StepRejected) and body.then == "dropped"
        ],
        diagnostics=len(list((run / "checkpoints").glob("diagnostic/step_*"))),
        result=result,
    )


def losses(cwd: Path) -> dict[tuple[int, int], str]:
    """(rank, step) → its last loss and samples, as hex and ids: for comparing runs to the bit."""
    found: dict[tuple[int, int], str] = {}
    for path in sorted((cwd / "out").glob("rank*.log"), key=lambda path: path.stat().st_mtime):
        rank = int(path.name[4 : path.name.index(".")])
        for line in path.read_text().splitlines():
            step, rest = line.split(" ", 1)
            found[rank, int(step)] = rest
    return found


def main() -> None:
    """Print the table for docs/guides/validation.md: `PYTHONPATH=tests python -m kit.worlds.outcomes`."""
    print("| what is wrong | verdict | what becomes of it | attempts |\n|---|---|---|---|")
    for case in ALL:
        with tempfile.TemporaryDirectory() as place:
            print(play(case, Path(place)).row(case), flush=True)


if __name__ == "__main__":
    main()
