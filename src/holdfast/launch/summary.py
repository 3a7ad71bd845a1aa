"""What the launcher tells people on stderr: short, and always with what to do next."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from holdfast.exit_codes import MEANINGS, ExitCode


def say(text: str) -> None:
    """Nobody may be there to read it (`2>&1 | head -1`), or the log's disk be full: no fault of the job."""
    try:
        print(f"{time.strftime('%H:%M:%S')} holdfast: {text}", file=sys.stderr, flush=True)
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


def next_step(code: int) -> str:
    return MEANINGS[ExitCode(code)][1] if code in set(ExitCode) else MEANINGS[ExitCode.FAILED][1]
