"""Letting go of what a call of the function has left behind, so that the next one finds the memory free."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback

from holdfast.settings_inprocess import InProcessSettings


def forget(error: BaseException | None, chosen: InProcessSettings) -> None:
    """Drop what the frames of an error hold, and all that refers to itself; give the device's memory back.

    The error itself stays, and so do those that led to it: each with where it was raised as a note, in words.
    For the traceback goes as a whole: a frame whose variables are cleared still has its function, and a
    function inside of another (as torch's modules call their hooks from one) still has the variables of that.
    """
    for one in _chain(error):
        lines = one.__traceback__
        if lines is not None:
            one.__traceback__ = None
            one.add_note("".join(["It was raised here:\n", *traceback.format_tb(lines)]).rstrip())
            traceback.clear_frames(lines)
            del lines
    gc.collect()
    torch = sys.modules.get("torch")
    if chosen.empty_cuda_cache and torch is not None and torch.cuda.is_initialized():
        # A device that is broken says so in the health check, which comes next.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_clearCublasWorkspaces()  # what the next call needs it allocates anew
            torch.cuda.empty_cache()


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and all that it was raised from or in the course of, each once."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return found
