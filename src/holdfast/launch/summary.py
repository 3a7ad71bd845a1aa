"""What the launcher tells people on stderr: short, and always with what to do next."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.journal.account_events import Account
from holdfast.lines import Kind, Source
from holdfast.speaking import LiveLine, speak


def say(text: str, *, attempt: int | None = None, account: Account | None = None) -> None:
    """Nobody may be there to read it (`2>&1 | head -1`), or the log's disk be full: no fault of the job.

    `account`: of the incident that this line tells.
    """
    kind, level, more = None, "", dict[str, Any]()
    if account is not None:
        kind, level = Kind.INCIDENT, "error" if account.ends else "warning"
        more = {"account": {name: getattr(account, name) for name in account.__struct_fields__}}
    try:
        speak(text, source=Source.LAUNCHER, kind=kind, level=level, attempt=attempt, more=more)
    except BrokenPipeError:
        silence(2)
    except (OSError, ValueError):
        pass  # it may be written again later


def live_line(attempt: int | None = None) -> LiveLine:
    """For a wait of the launcher's."""
    return LiveLine(Source.LAUNCHER, attempt=attempt)


def silence(descriptor: int) -> None:
    """Nobody reads this any more: from here on nothing fails for it, nor in what is started later."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)


def next_step(code: int) -> str:
    return MEANINGS[ExitCode(code)][1] if code in set(ExitCode) else MEANINGS[ExitCode.FAILED][1]
