"""Two ranks resume one checkpoint from their own copies, from each other's, and from the checkpoint root.

`resume.py RANK WORLD PORT DIRECTORY MIB save|load LOCAL`: one rank in a fresh process. `save` leaves a
checkpoint of MIB a rank in all tiers, with a replica on the other rank's node; `load` resumes it and compares
the values. The seconds are those of the journal, and its evidence must say what was meant to be measured.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from async_rank import Sharded

import holdfast
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.tier import LocalTier, PlaceCopies, read_recorded
from holdfast.journal.events import DecisionMade, Resumed
from holdfast.journal.reader import read_journal
from holdfast.record.directory import ControlDirectory

LIMIT = 300.0
WAYS = ("own", "peer", "global")


def rank_main(
    rank: int, world: int, port: int, directory: Path, size_mib: int, task: str, local: Path
) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    model = Sharded(size_mib, rank, world)
    run = holdfast.Run(
        run_dir=str(directory / "run"),
        launch_node_name=f"node-{rank}",
        checkpoint_interval=1,
        checkpoint_save_at_end=False,
        checkpoint_async_save=True,
        checkpoint_non_persistent_ckpt_type="local",
        checkpoint_non_persistent_local_ckpt_dir=str(local / f"node-{rank}"),
        checkpoint_non_persistent_save_interval=1,
    )
    run.track(model=model)
    if task == "load":
        wanted = [parameter.to_local().sum() for parameter in model.parameters()]  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().zero_()  # type: ignore[attr-defined]
    run.start()
    if task == "load":
        found = [parameter.to_local().sum() for parameter in model.parameters()]  # type: ignore[attr-defined]
        if found != wanted:
            raise RuntimeError("the load gave other values than were saved")
    else:
        run.begin_step()
        run.end_step()
        run.wait_for_saves()
        await_replicas(ControlDirectory.open(directory / "run"), world)
    run.close()
    dist.destroy_process_group()


def await_replicas(control: ControlDirectory, count: int) -> None:
    """Until every rank's replica is confirmed: a peer server ends with its rank."""
    deadline = time.monotonic() + LIMIT
    while sum(len(place.confirmed) for place in _places(control)) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{count} replicas were not confirmed within {LIMIT:g} s")
        time.sleep(0.01)


def _places(control: ControlDirectory) -> list[PlaceCopies]:
    return [place for name in local_manifest.names(control) for place in read_recorded(control, name).places]


def group(task: str, directory: Path, size_mib: int, local: Path) -> None:
    """Both ranks, in fresh processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        told = [rank, 2, port, directory, size_mib // 2, task, local]
        # LOCAL_RANK 0 on both: each is the only rank of its node.
        ranks.append(subprocess.Popen([sys.executable, __file__, *map(str, told)]))
    try:
        codes = [rank.wait(LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise RuntimeError(f"{__file__} {task} ended with {codes}")


@contextlib.contextmanager
def ways(work: Path, size_mib: int) -> Iterator[dict[str, Callable[[], float]]]:
    """Seconds of a resume, by where the shards come from."""
    directory = work / "resume"
    directory.mkdir()
    memory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir="/dev/shm"))
    try:
        group("save", directory, size_mib, memory / "own")
        control = ControlDirectory.open(directory / "run")
        # From a peer: each node has only what it holds for the other. From the root: it has nothing.
        arrange(memory / "own", memory / "peer", control.run_id)

        def resumed(way: str) -> float:
            if way == "peer":
                lose_own(memory / way, control.run_id)  # the resume before may have made them again
            group("load", directory, size_mib, memory / way)
            lines = [line.body for line in read_journal(control.journal)]
            told = [body for body in lines if isinstance(body, DecisionMade) and body.about == "resume"][-1]
            _require(way, told.evidence)
            return next(body.seconds for body in reversed(lines) if isinstance(body, Resumed))

        yield {way: functools.partial(resumed, way) for way in WAYS}
    finally:
        shutil.rmtree(memory)
        shutil.rmtree(directory)


def arrange(whole: Path, peers: Path, run: str) -> None:
    """Once more the nodes' places, with the replicas only; their images are the same memory."""
    for node in sorted(path.name for path in whole.iterdir()):
        there = LocalTier.at(whole / node / run)
        shutil.copytree(there.path, peers / node / run, copy_function=os.link)
        tier = LocalTier.at(peers / node / run)
        kinds = sorted(record.kind for record in tier.records())
        if kinds != ["own", "replica"]:
            raise RuntimeError(f"{node} does not hold a copy and a replica, but {kinds}")
    lose_own(peers, run)


def lose_own(where: Path, run: str) -> None:
    """Leave the nodes with what they hold for others."""
    for node in where.iterdir():
        tier = LocalTier.at(node / run)
        for record in tier.records():
            if record.kind == "own":
                tier.drop(record)


def _require(way: str, evidence: list[str]) -> None:
    """What was measured must be what was meant."""
    words = {"own": "on the node that saved them", "peer": "on peers only", "global": ""}[way]
    right = any(words in text for text in evidence) if words else len(evidence) == 1
    if not right or (way == "own" and any("on peers only" in text for text in evidence)):
        raise RuntimeError(f"this was no resume from {way}: {evidence}")


if __name__ == "__main__":
    number, world, port, directory, size, task, local = sys.argv[1:]
    rank_main(int(number), int(world), int(port), Path(directory), int(size), task, Path(local))
