"""A rank under a monitor, for measures.monitor: prints microseconds a step, with beats and without, as JSON.

The steps come in bursts that a socket holds, so that every message is really sent and none is dropped.
"""

from __future__ import annotations

import json
import sys
import time

from holdfast.train.beats import Beats

BURST = 60
PAUSE = 0.25
"""Seconds in which the agent reads what a burst has sent."""
BURSTS = 8


def bursts(beats: Beats | None) -> float:
    spent = 0.0
    for _ in range(BURSTS):
        time.sleep(PAUSE)
        for warm in (True, False):  # the first few steps after a sleep pay for the sleep
            started = time.perf_counter()
            for step in range(BURST // 4 if warm else BURST):
                if beats is not None:
                    beats.enter("step")
                    beats.step_done(step)
            spent += 0.0 if warm else time.perf_counter() - started
    return spent / BURSTS / BURST * 1e6


def main(path: str, repeat: int) -> None:
    beats = Beats.connect(path, None, learn=True)
    samples = [(bursts(beats), bursts(None)) for _ in range(repeat)]
    if not beats.watched or beats.dropped:
        sys.exit(f"watched: {beats.watched}, dropped: {beats.dropped}; the measurement is void")
    beats.close()
    print(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
