"""Stands in for `holdfast` in a batch script: `run` is an agent without workers, the rest is the real one.

An agent says which signals it gets. The first one is a stop: the leader journals it and asks for a requeue as
the real one does. In its second life it ends with 0 at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from holdfast.cluster.slurm import current_job
from holdfast.cluster.time_limit import requeue_after_stop
from holdfast.journal.events import RequeueAsked, StopAsked
from holdfast.journal.writer import JournalWriter
from holdfast.policy.requests import Source, StopRequest
from holdfast.record.directory import ControlDirectory

LONGEST = 90.0


def main() -> int:
    if sys.argv[1] != "run":
        from holdfast.cli.app import main as real

        real()
        return 0
    got: list[str] = []

    def note(number: int, _frame: FrameType | None) -> None:
        got.append(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, note)
    job = current_job()
    assert job is not None
    where = os.environ["SLURMD_NODENAME"]
    named = os.environ["HOLDFAST_LAUNCH_NODE_NAME"]
    say(f"agent on {where} as {named} in life {job.restarts} of {job.label} with {' '.join(sys.argv[2:])}")
    if job.restarts:
        return 0
    deadline = time.monotonic() + LONGEST
    while not got and time.monotonic() < deadline:
        time.sleep(0.02)
    say(f"{where} got {got[0] if got else 'nothing'}")
    if not got:
        return 1
    # Saving takes a while; whoever kills agents before they are done is found out.
    time.sleep(0.5)
    if os.environ["SLURM_PROCID"] == "0":
        run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
        control, _ = ControlDirectory.open_or_create(run_dir)
        journal = JournalWriter(control.journal, "agent", 1)
        journal.write(StopAsked(source="signal", detail=got[0], node=where))
        request = StopRequest(source=Source.SIGNAL, detail=got[0], signal=got[0])
        if "LOST_LEADER" not in os.environ:
            exclude = os.environ.get("EXCLUDE", "").split()
            asked = requeue_after_stop(job, "auto", request, exclude=exclude, stalled=0)
            journal.write(
                RequeueAsked(job=job.label, asked=asked.asked, reason=asked.reason, exclude=asked.exclude)
            )
            say(f"asked: {asked.asked}: {asked.reason}")
    say(f"{where} ends")
    return 31


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
