"""What `holdfast recover` has to say, in words: for a terminal, and for an incident ticket."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from holdfast.base import moment, printable
from holdfast.checkpoint.choose import Resolution
from holdfast.policy import Finding, NodeDrain, StageMark
from holdfast.recover.resume_check import Correctness, Point

STYLES = {
    StageMark.OK: "green",
    StageMark.NOTE: "yellow",
    StageMark.PROBLEM: "bold red",
    StageMark.UNKNOWN: "yellow",
}
AGREED = {Correctness.CORRECT: "green", Correctness.NOT_CORRECT: "bold red", Correctness.NOT_KNOWN: "yellow"}


class TicketRow(NamedTuple):
    """One line: a word in a style, then plain text."""

    word: str
    style: str
    text: str


def rows(report: RecoverReport) -> Iterator[TicketRow]:
    """The stages, as a terminal shows them."""
    yield TicketRow(
        "", "", f"run {report.run} in {report.run_dir}" if report.run else f"no run; {report.run_dir}"
    )
    for finding in report.findings:
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[TicketRow]:
    yield TicketRow(finding.mark, STYLES[finding.mark], f"{finding.stage:<10}{printable(finding.text, 2000)}")
    for line in finding.evidence:
        yield TicketRow("", "", f"{'':10}- {printable(line, 2000)}")
    if finding.next:
        yield TicketRow("", "", f"{'':10}next: {finding.next}")


def check_rows(points: list[Point]) -> Iterator[TicketRow]:
    for point in points:
        yield TicketRow(point.verdict, AGREED[point.verdict], f"{point.point:<12}{point.found}")
        if point.verdict is not Correctness.CORRECT:
            yield TicketRow("", "", f"{'':12}expected: {point.expected}")


def plain_text(row: TicketRow) -> str:
    return f"{row.word:<12}{row.text}".rstrip() if row.word or row.text.startswith(" ") else row.text


def verdict(report: RecoverReport) -> str:
    """Whether the resume was correct, in a line."""
    wrong = [point.point for point in report.check if point.verdict is Correctness.NOT_CORRECT]
    if report.correct is False:
        return f"the resume was NOT correct: {', '.join(wrong)}"
    open_points = [point.point for point in report.check if point.verdict is Correctness.NOT_KNOWN]
    doubt = f" (not known: {', '.join(open_points)})" if open_points else ""
    if report.correct is None:
        return f"nothing shows that the resume was wrong, nor that it was correct{doubt}"
    slow = ", but it is slower than before" if wrong else ""
    return f"the resume was correct{slow}{doubt}"


# --- the record --------------------------------------------------------------------------------------------


MARK = "# Recovery "
"""By which an earlier record is recognised."""


def markdown(report: RecoverReport) -> str:
    """A record fit for an incident ticket: summary, evidence, actions, resume check, timeline."""
    parts = [
        f"{MARK}of run {report.run}" if report.run else f"{MARK}from {_cell(report.run_dir)}",
        "",
        *_summary(report),
        "",
        "## Findings",
        "",
        "| stage | | found |",
        "|---|---|---|",
        *(f"| {one.stage} | {one.mark} | {_cell(one.text)} |" for one in report.findings),
        "",
        "## Evidence",
        "",
        *_evidence(report),
        "",
        "## Actions",
        "",
        *_actions(report),
        "",
        *_check(report),
        "## Timeline",
        "",
        *_timeline(report),
    ]
    return "\n".join(parts) + "\n"


def _summary(report: RecoverReport) -> list[str]:
    lines = [
        f"* run directory: `{report.run_dir}`",
        f"* written: {moment(report.at)}",
        f"* what stopped it: {_cell(report.findings[0].text)}",
        f"* cause: {report.cause}",
        f"* answer: {_cell(report.answer)} (exit code {report.exit_code})",
    ]
    if report.check:
        lines.append(f"* resume check: {verdict(report)}")
    return lines


def _evidence(report: RecoverReport) -> list[str]:
    lines: list[str] = []
    for finding in report.findings:
        told = [*finding.evidence, *([f"next: {finding.next}"] if finding.next else [])]
        if told:
            lines += [f"* **{finding.stage}**", *(f"  * {_cell(line)}" for line in told)]
    return lines or ["none beyond the findings"]


def _actions(report: RecoverReport) -> list[str]:
    lines = []
    for action in report.actions:
        result = f" ({_cell(action.result)})" if action.result else ""
        lines.append(f"* {'done' if action.done else 'not done'}: {_cell(action.what)}{result}")
    if report.command is not None:
        what = "run" if report.started else "to run"
        ended = f", ended with code {report.ended_with}" if report.ended_with is not None else ""
        command = shlex.join(report.command.argv)
        lines.append(f"* {what}{ended}, in `{report.command.directory}`:")
        lines += ["", textwrap.indent(f"```console\n$ {command}\n```", "  ")]
    return lines or ["none: nothing was changed"]


def _check(report: RecoverReport) -> list[str]:
    if not report.check:
        return []
    table = [
        f"| {point.point} | {point.verdict} | {_cell(point.expected)} | {_cell(point.found)} |"
        for point in report.check
    ]
    head = [
        "## Resume check",
        "",
        f"{verdict(report)}.",
        "",
        "| point | | expected | found |",
        "|---|---|---|---|",
    ]
    return [*head, *table, ""]


def _timeline(report: RecoverReport) -> list[str]:
    lines = ["| time | attempt | who | what |", "|---|---|---|---|"]
    for one in report.timeline:
        lines.append(f"| {moment(one.at)} | {one.attempt} | {_cell(one.who)} | {_cell(one.text)} |")
    return lines


def _cell(text: str) -> str:
    """Text that can neither end a table's cell nor act as mark-up."""
    shown = printable(text, 2000).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return shown.replace("`", "'").replace("*", "\\*").replace("_", "\\_")


# What `holdfast recover` has to say: every stage, what was done, and whether the resume was correct.


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """How the run would be started again."""

    argv: list[str]
    directory: str
    source: str
    """How it is known: `launch` (what the last launch left) or `given` (on the command line)."""
    world: int | None = None
    """How many ranks it would start; None if not known."""
    nodes: int = 1
    """The number of nodes it has to be run on."""
    run_dir: str = ""
    """The run that it starts, if that is known."""
    missing: list[str] = []
    """Variables that were set for the last launch but are not set here."""

    def shown(self) -> str:
        return f"cd {shlex.quote(self.directory)} && {shlex.join(self.argv)}"


class ActionTaken(msgspec.Struct, frozen=True, kw_only=True):
    """Something that recover did, or would have done."""

    what: str
    done: bool
    result: str = ""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    attempt: int
    who: str
    text: str


class RecoverReport(msgspec.Struct, kw_only=True):
    """All that `holdfast recover --json` prints; fields are only ever added."""

    at: float
    run: str
    run_dir: str
    state: str
    """As `holdfast status` said before anything was done."""
    cause: str
    """infrastructure, job, data, checkpoint, preemption, operator, unknown or nobody."""
    findings: list[Finding]
    exit_code: int
    answer: str
    """In one line."""
    drains: list[NodeDrain] = []
    resolution: Resolution | None = None
    command: Command | None = None
    submit: str = ""
    """How to start it through its scheduler; empty if the command can be run here."""
    actions: list[ActionTaken] = []
    started: bool = False
    ended_with: int | None = None
    """The code that the command ended with, if it was run and has ended."""
    check: list[Point] = []
    """Whether the resume was correct; empty unless one was watched."""
    correct: bool | None = None
    timeline: list[Moment] = []
