"""What the launcher tells people on stderr: short, and always with what to do next."""

from __future__ import annotations

import contextlib
import os
import sys

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.launch import incident_line
from holdfast.launch.incident import Incident
from holdfast.policy.recovery import Action, describe_end


def say(text: str) -> None:
    """Nobody may be there to read it (`2>&1 | head -1`), or the log's disk be full: no fault of the job."""
    try:
        print(f"holdfast: {text}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        silence(2)
    except (OSError, ValueError):
        pass  # it may be written again later


def silence(descriptor: int) -> None:
    """Nobody reads this any more: from here on nothing fails for it, nor in what is started later."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)


def one_line(incident: Incident, *, step: int | None = None, max_restarts: int | None = None) -> str:
    """An incident and its decision in one line; `step` is the last one known to be done."""
    return incident_line.one_line(
        attempt=incident.attempt,
        cause=incident.cause,
        root=incident.root,
        decision=incident_line.Decided.of(incident.decision),
        step=step,
        max_restarts=max_restarts,
        detail=incident.detail,
    )


def describe(incident: Incident, run_dir: str) -> str:
    """What an incident's one line leaves out, a line each."""
    lines = []
    root, decision = incident.root, incident.decision
    if root is not None:
        end = f"rank {root.rank} on {root.node}, pid {root.pid}: {describe_end(root.exit_code)}"
        lines.append(f"root cause: {incident.detail if root.left else end}")
        if root.message:
            lines.append(f"message:    {root.message}")
        if root.error_file:
            lines.append(f"error file: {root.error_file}")
        if root.stderr_file:
            lines.append(f"last lines: {root.stderr_file}")
    elif incident.detail:
        lines.append(f"root cause: {incident.detail}")
    if decision.action in (Action.STOP, Action.REQUEUE):
        lines.append(f"decision:   {decision.action} with code {decision.exit_code}: {decision.reason}")
        lines.append(f"next:       {next_step(decision.exit_code)}")
        if incident.diagnostic:
            lines.append(f"saved:      {incident.diagnostic}, the state that the rejected step began from")
        lines.append(f"run:        {run_dir}")
    else:
        left = f"{decision.restarts_left} more without progress allowed"
        lines.append(f"decision:   {decision.action} ({left}): {decision.reason}")
    return "".join(f"\n  {line}" for line in lines)


def next_step(code: int) -> str:
    return MEANINGS[ExitCode(code)][1] if code in set(ExitCode) else MEANINGS[ExitCode.FAILED][1]
