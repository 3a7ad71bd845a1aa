"""What measuring a section for the straggler detector costs on the host: one `with`, as a loop has it.

Thousands of sections in steps of ten; microseconds of one, by the time that the thread had a core, in the
fastest of several rounds: whoever else uses the machine only adds.
"""

from __future__ import annotations

import contextlib
import time

from holdfast.control.group import join_group
from holdfast.settings_straggler import StragglerSettings
from holdfast.worker.stragglers import Actions, Stragglers

STEPS, SECTIONS, ROUNDS = 300, 10, 5


def untold(event: object) -> None:
    """Nobody keeps a journal here."""
    del event


def sections(repeat: int) -> tuple[list[float], list[float]]:
    """Microseconds of a section, and of a `with` around nothing."""
    return [_fastest(_measured) for _ in range(repeat)], [_fastest(_bare) for _ in range(repeat)]


def _fastest(once: object) -> float:
    assert callable(once)
    return min(float(once()) for _ in range(ROUNDS))


def _measured() -> float:
    chosen = StragglerSettings(enabled=True)
    found = Stragglers(chosen, join_group(5.0), actions=Actions(tell=untold))
    try:
        spent = 0.0
        for step in range(STEPS):
            found.begin_step()
            began = time.thread_time()
            for _ in range(SECTIONS):
                with found.section("augment"):
                    pass
            spent += time.thread_time() - began
            found.end_step()
            found.meet(step)
        return spent / STEPS / SECTIONS * 1e6
    finally:
        found.close()


def _bare() -> float:
    nothing = contextlib.nullcontext()
    began = time.thread_time()
    for _ in range(STEPS * SECTIONS):
        with nothing:
            pass
    return (time.thread_time() - began) / STEPS / SECTIONS * 1e6
