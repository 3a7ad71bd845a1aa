"""The five answers about a stop on request. Pure."""

from __future__ import annotations

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.journal.account_events import STOP, Account
from holdfast.journal.text import printable
from holdfast.policy.stopping import Source, StopRequest

_WHY = {
    Source.SIGNAL: "a signal asks a run to save and to end: schedulers send one, and so does Ctrl-C",
    Source.STOP_FILE: "the file is there, which asks the run to save and to end",
    Source.OPERATOR: "somebody asked for it with `holdfast control stop`",
    Source.TIME_LIMIT: "the scheduler ends the job at its time limit; the run saves before that",
    Source.STRAGGLER: "a rank slowed the others by more than straggler.stop_if_detected lets it",
}
_ASKED = {
    Source.STOP_FILE: ("the stop file", "asked the run to stop"),
    Source.TIME_LIMIT: ("the job's time limit", "is near, so the run was asked to stop"),
    Source.STRAGGLER: ("a slow rank", "made the run stop"),
}
"""Who asked, and what it did, where the request's own words are rather the reason."""
_UNSAVED = (ExitCode.STOPPED_UNSAVED,)


def of_stop(
    attempt: int, request: StopRequest, code: int, *, detail: str, step: int | None, saved: int | None
) -> Account:
    """What is told of a run that was asked to stop, and did.

    `detail`: how it ended, where that is more than the request; `step`: the last complete one; `saved`: the
    highest step that is in a checkpoint.
    """
    more = detail.removeprefix(request.detail).removeprefix("; ")
    done = f"stopped after step {step}" if step else "stopped before its first step"
    if code in _UNSAVED:
        done += " without saving"
    elif saved:
        done += ", saved" if saved == step else f"; saved up to step {saved}"
    who, what = _ASKED.get(request.source, (printable(request.detail), "asked the run to stop"))
    said = [printable(request.detail)] if request.source in _ASKED else []
    return Account(
        attempt=attempt,
        cause="",
        kind=STOP,
        who=who,
        what=what,
        why=[*said, _WHY[request.source], *([printable(more)] if more else [])],
        done=done,
        next=MEANINGS[ExitCode(code)][1] if code in set(ExitCode) else MEANINGS[ExitCode.FAILED][1],
        step=step,
        saved=saved,
        exit_code=code,
    )
