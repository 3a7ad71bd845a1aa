"""Load one checkpoint in this fresh process and print, as JSON, how long the load call took.

    python bench/load_once.py holdfast|dcp DIRECTORY SIZE_MIB

Imports, the model and its memory are there before the clock starts, for both alike. It says `ready` then, and
waits for a line, so that several can begin together.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp
from workload import Weights

from holdfast.checkpoint.choose.load import load
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.state.tracked import Tracked


def main(how: str, directory: Path, size_mib: int) -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    model = Weights(size_mib, filled=False)
    print("ready", flush=True)
    sys.stdin.readline()
    if how == "holdfast":
        tracked = Tracked()
        tracked.add("model", model)
        _, digest = manifests.read(directory)  # a resume knows it from the commit record
        started = time.perf_counter()
        load(directory, digest, tracked, 0, 1).apply()
    else:
        state = {"model": model.state_dict()}
        started = time.perf_counter()
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    seconds = time.perf_counter() - started
    checksum = sum(float(tensor.double().sum()) for tensor in model.state_dict().values())
    print(json.dumps({"seconds": seconds, "checksum": checksum}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
