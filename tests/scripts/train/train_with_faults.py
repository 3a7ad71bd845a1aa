"""The example, with a way to break it from within: a file `fault-<rank>` that says what the next step does.

raise    an exception
exit:N   ends with that code

A step takes at least as long as SOAK_PACE says.
"""

import os
import runpy
import sys
import time
from pathlib import Path

import holdfast

PLACE = Path(os.environ["SOAK_FAULTS"])
begin_step = holdfast.Run.begin_step


def begin_and_break(run: holdfast.Run) -> None:
    begin_step(run)
    time.sleep(float(os.environ["SOAK_PACE"]))
    order = PLACE / f"fault-{os.environ['RANK']}"
    if order.exists():
        what = order.read_text()
        order.unlink()
        if what == "raise":
            raise ValueError(f"asked to fail at step {run.step + 1}")
        os._exit(int(what.partition(":")[2]))


holdfast.Run.begin_step = begin_and_break
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
