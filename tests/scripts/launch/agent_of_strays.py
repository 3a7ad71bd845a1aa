"""An agent as small as can be: a reaper with workers, and a keeper if asked for one.

agent_of_strays.py PLACE keeper|alone OUTLIVE WORKER...

Starts each WORKER (a shell command) as the leader of a session, as torch does, behind the orphan guard. Then
takes orders from PLACE/order: `stop GRACE` stops them and says in PLACE/done what was left; `tend` says in
PLACE/tended what still outlives them; `end` ends.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast.launch.workers.orphans import OrphanKeeper, Orphans, Workers
from holdfast.process import proc
from holdfast.process.guard import guarded


def say(path: Path, what: object) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(what))
    path.with_suffix(".tmp").rename(path)


def zombies(but: set[int]) -> list[int]:
    everyone = proc.everyone().values()
    return [p.pid for p in everyone if p.parent == os.getpid() and p.ended and p.pid not in but]


def main(place: Path, how: str, outlive: float, commands: list[str]) -> None:
    orphans = Orphans(outlive)
    assert orphans.become_reaper()
    if how == "keeper":
        orphans.own(OrphanKeeper(outlive).start())
    started = [
        subprocess.Popen(guarded(["sh", "-c", command]), start_new_session=True, cwd=place)
        for command in commands
    ]
    # Of the agent itself: in its session, and in one of its own.
    helpers = [subprocess.Popen(["sleep", "300"], start_new_session=apart) for apart in (False, True)]
    orphans.own(helpers[1].pid)
    workers = Workers({rank: worker.pid for rank, worker in enumerate(started)}, orphans)
    say(place / "ready", workers.pids)
    while True:
        time.sleep(0.01)
        try:
            order, _, grace = (place / "order").read_text().partition(" ")
        except FileNotFoundError:
            continue
        (place / "order").unlink()
        if order == "stop":
            dead = workers.stop(float(grace))
            report = {
                "dead": dead,
                "left": [str(left) for left in workers.left],
                "helpers": [helper.poll() for helper in helpers],
                "zombies": zombies(set(workers.pids.values())),
                "outliving": [str(one) for one in orphans.tend()],
                "codes": workers.ended(),  # last: workers must not have been reaped by any of this
            }
            say(place / "done", report)
        elif order == "tend":
            say(place / "tended", [[str(one) for one in orphans.tend()], zombies(set(workers.pids.values()))])
        elif order == "end":
            workers.forget()
            for helper in helpers:
                helper.kill()
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:])
