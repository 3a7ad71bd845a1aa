"""What the launcher tells people on stderr: short, and always with what to do next."""

from __future__ import annotations

import sys

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.launch import incident_line
from holdfast.launch.incident import Incident
from holdfast.policy.recovery import Action, describe_end


def say(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)


def one_line(incident: Incident, *, step: int | None = None, max_restarts: int | None = None) -> str:
    """An incident and its decision in one line; `step` is the last one known to be done."""
    return incident_line.one_line(
        attempt=incident.attempt,
        cause=incident.cause,
        root=incident.root,
        decision=incident_line.Decided.of(incident.decision),
        step=step,
        max_restarts=max_restarts,
    )


def describe(incident: Incident, run_dir: str) -> str:
    """An incident and its decision, a line each."""
    lines = [f"attempt {incident.attempt} failed ({incident.cause})" if incident.cause else "attempt failed"]
    root = incident.root
    if root is not None:
        lines.append(
            f"root cause: rank {root.rank} on {root.node}, pid {root.pid}: {describe_end(root.exit_code)}"
        )
        if root.message:
            lines.append(f"message:    {root.message}")
        if root.error_file:
            lines.append(f"error file: {root.error_file}")
    decision = incident.decision
    if decision.action == Action.RESTART:
        left = f"{decision.restarts_left} more without progress allowed"
        lines.append(f"decision:   restart ({left}): {decision.reason}")
    else:
        lines.append(f"decision:   stop with code {decision.exit_code}: {decision.reason}")
        lines.append(f"next:       {next_step(decision.exit_code)}")
        lines.append(f"run:        {run_dir}")
    return "\n  ".join(lines)


def next_step(code: int) -> str:
    return MEANINGS[ExitCode(code)][1] if code in set(ExitCode) else MEANINGS[ExitCode.FAILED][1]
