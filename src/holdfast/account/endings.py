"""Accounts of ends that nobody decided about: the store, the lease or the whole launch was lost. Pure."""

from __future__ import annotations

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.journal.account_events import Account
from holdfast.journal.cluster_events import StopAsked
from holdfast.journal.text import duration, printable
from holdfast.policy.signs import Cause


def store_lost(attempt: int, node: str, error: str, step: int | None, saved: int | None) -> Account:
    """As a node tells it that has nobody left to decide with."""
    tried = error.partition("(")[2].partition(")")[0] or error
    return Account(
        attempt=attempt,
        cause=Cause.INFRASTRUCTURE,
        who="the host of the store that the nodes meet in",
        what=f"was lost{_in(step)}, as node {printable(node)} sees it",
        why=[
            f"every address that the nodes could meet at was tried: {printable(tried)}",
            "its machine or its launcher is gone, or the network to it",
        ],
        done="ended all workers here: without the store the nodes cannot agree on anything",
        next="start the same command again on all nodes; with a second --rdzv-endpoint this is survived",
        step=step,
        saved=saved,
        exit_code=int(ExitCode.STORE_LOST),
        alone=True,
    )


def lease_taken(
    attempt: int, evidence: str, by: str, found: str, step: int | None, saved: int | None
) -> Account:
    """`by`: the process that claimed the run; `found`: what it took this launch for dead by."""
    why = [f"it took this launch for gone: {printable(found)}"] if found else []
    return Account(
        attempt=attempt,
        cause=Cause.INFRASTRUCTURE,
        who=f"another launch{f' ({printable(by)})' if by else ''}",
        what=f"took this run over{_in(step)}",
        why=[
            *why,
            printable(evidence),
            "one run must not be trained by two launches: each would undo the other",
        ],
        done="ended all workers here; the run is left to the other launch",
        next="nothing to do here; if the other launch is one too many, stop it and run this command again",
        step=step,
        saved=saved,
        exit_code=int(ExitCode.LEASE_LOST),
        alone=True,
    )


def launch_lost(
    attempt: int, holder: str, found: str, asked: StopAsked | None, step: int | None, saved: int | None
) -> Account:
    """What a new launch says of the one before, which left no end. `found`: why the run was free to take;
    `asked`: that it had been asked to stop, without having saved by then."""
    on = f" ({printable(holder)})" if holder else ""
    after = f" some time after step {step}" if step else ""  # its very last steps were not journalled yet
    if asked is None:
        what = f"ended without a word{after}"
        why = "its launcher and its ranks were killed at once, or the machine went down"
        to_do = "look into the logs of the machine and of the scheduler if nobody ended it on purpose"
    else:
        what = f"was killed{after} before it could save"
        given = f", and counted on {duration(asked.seconds)}" if asked.seconds is not None else ""
        why = (
            f"it had been asked to stop ({printable(asked.detail)}){given}; it was killed before it had saved"
        )
        to_do = (
            "give it more time between SIGTERM and SIGKILL (Slurm: GraceTime, KillWait; Kubernetes: "
            "terminationGracePeriodSeconds), or save more often; the run itself needs nothing"
        )
    return Account(
        attempt=attempt,
        cause=Cause.PREEMPTION if asked is not None else Cause.INFRASTRUCTURE,
        who=f"the launch before this one{on}",
        what=what,
        why=[why, printable(found)],
        done=f"this launch goes on from step {saved}"
        if saved
        else "this launch begins anew: nothing was saved",
        next=to_do,
        step=step,
        saved=saved,
    )


def untold(attempt: int, code: int, step: int | None, saved: int | None) -> Account | None:
    """Of an attempt that ended for good and of which no more than its code could be written down, as on a
    disk that is full; None for a code that says nothing."""
    if code not in set(ExitCode) or code in (ExitCode.OK, ExitCode.FAILED, ExitCode.USAGE):
        return None
    meaning, then = MEANINGS[ExitCode(code)]
    said = f"{meaning[0].lower()}{meaning[1:].rstrip('.')}"
    return Account(
        attempt=attempt,
        cause=Cause.UNKNOWN,
        who="the run",
        what=f"ended{_in(step)}: {said}",
        why=["no more than its exit code could be written down; the launcher's output says more"],
        done=f"stopped: {said}",
        next=then,
        step=step,
        saved=saved,
        exit_code=code,
    )


def _in(step: int | None) -> str:
    return f" in step {step + 1}" if step is not None else ""
