"""Says how it was started; then, in each attempt, does the next of the acts: `ok` or `kill`."""

import json
import os
import signal
import sys

attempt = json.loads(os.environ["HOLDFAST_LAUNCH"])["attempt"]
how = "forked" if "holdfast.launch.workers.forked_worker" in sys.modules else "cold"
assert not {"torch", "chosen"} & {*sys.modules}, "imported by this script, or not at all"
try:
    from chosen import MADE_IN
except ImportError:
    MADE_IN = os.getpid()
print(f"attempt {attempt} rank {os.environ['RANK']} {how} preloaded={os.getpid() != MADE_IN}")
print(f"attempt {attempt} on stderr", file=sys.stderr)
acts = sys.argv[1].split(",")
if acts[min(attempt, len(acts)) - 1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
