"""What `holdfast recover` has to say: every stage, what was done, and whether the resume was correct."""

from __future__ import annotations

import shlex

import msgspec

from holdfast.checkpoint.resolution import Resolution
from holdfast.policy.readiness import Drain
from holdfast.policy.resume_check import Point
from holdfast.policy.runbook import Finding


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """How the run would be started again."""

    argv: list[str]
    directory: str
    source: str
    """Where it is known from: `launch` (what the last launch left), `given` (on the command line)."""
    world: int | None = None
    """How many ranks it would start; None if not known."""
    nodes: int = 1
    """On so many nodes it has to be run."""
    run_dir: str = ""
    """The run that it starts, where that is known."""
    missing: list[str] = []
    """Variables that were set for the last launch and are not here."""

    def shown(self) -> str:
        return f"cd {shlex.quote(self.directory)} && {shlex.join(self.argv)}"


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something that recover did, or would have done."""

    what: str
    done: bool
    result: str = ""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    attempt: int
    who: str
    text: str


class Report(msgspec.Struct, kw_only=True):
    """All that `holdfast recover --json` prints; fields are only ever added."""

    at: float
    run: str
    run_dir: str
    state: str
    """As `holdfast status` has it, before anything was done."""
    cause: str
    """infrastructure, job, data, checkpoint, preemption, operator, unknown or nobody."""
    findings: list[Finding]
    exit_code: int
    answer: str
    """In one line."""
    drains: list[Drain] = []
    resolution: Resolution | None = None
    command: Command | None = None
    submit: str = ""
    """How to start it through its scheduler; empty if the command can be run here."""
    actions: list[Action] = []
    started: bool = False
    ended_with: int | None = None
    """What the command ended with, where it was run and has ended."""
    check: list[Point] = []
    """Whether the resume was correct; empty unless one was watched."""
    correct: bool | None = None
    timeline: list[Moment] = []
