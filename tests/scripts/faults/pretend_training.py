"""A worker without torch that leaves the records of a run of twelve steps which saves every third one.

It resumes from the newest rung that the control directory allows, as a real one would. Its checkpoints have
names and nothing in them. The first argument holds one act for each attempt, separated by `;`; the last one
is done again.

kill@S    SIGKILL itself in step S
reject@S  reject step S, as bad on rank 0, and ask for a re-run
breach@S  say after step S that what was loaded does not go on from where it was
ok        nothing

Each attempt appends what the launcher told it to `told`, and `attempt first-step` to `log`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from holdfast.checkpoint.choose.ladder import take_inventory
from holdfast.checkpoint.format.manifest import MANIFEST, CheckpointName, CheckpointRoot, derive_id
from holdfast.policy.placement import device_of
from holdfast.policy.results import Kind, RankResult, Rejection, Window
from holdfast.record.attempts import HeadRecord, record_rejection, write_head
from holdfast.record.directory import ControlDirectory
from holdfast.record.launches import LaunchInfo
from holdfast.record.lease import Fence
from holdfast.record.lineage import CommitRecord, record_commit, record_done

LAST = 12
EVERY = 3


class Pretended:
    """One attempt of one rank."""

    def __init__(self, told: LaunchInfo) -> None:
        self.told = told
        self.control = ControlDirectory.open(Path(told.run_dir))
        self.fence = Fence(self.control, told.epoch)
        self.root = CheckpointRoot(Path(told.run_dir) / "checkpoints")
        rungs = take_inventory(self.control, self.root, "auto", force=False).rungs
        self.step, self.parent = (rungs[0].step, rungs[0].id) if rungs else (0, None)
        head = HeadRecord(attempt=told.attempt, checkpoint=self.parent, step=self.step)
        write_head(self.control, self.fence, head)

    def save(self) -> None:
        name = CheckpointName(self.step, derive_id(self.told.run_id, self.told.attempt, self.step, 1))
        record = CommitRecord(
            id=name.id, step=self.step, parent=self.parent, attempt=self.told.attempt, manifest="0" * 32
        )
        with self.fence.guard("save"):
            record_commit(self.control, self.fence, record)
            self.root.committed(name).mkdir(parents=True)
        (self.root.committed(name) / MANIFEST).write_bytes(b"{}")
        record_done(self.control, record)
        self.parent = name.id

    def reject(self, kind: Kind, step: int) -> None:
        device = device_of(os.environ["CUDA_VISIBLE_DEVICES"].split(","), int(os.environ["LOCAL_RANK"]))
        bad = RankResult(rank=0, node=self.told.node, device=device, reasons=["the loss is nan"])
        rejection = Rejection(
            kind=kind,
            step=step,
            reasons=["the loss is nan"],
            ranks=[bad] if kind is Kind.STEP else [],
            in_probation=True,
            window=Window(0, step - 1, step - 1),
        )
        record_rejection(self.control, self.told.attempt, rejection)
        sys.exit(16)


def main(acts: str) -> None:
    told = LaunchInfo.from_environment(os.environ)
    assert told is not None
    act, _, at = acts.split(";")[min(told.attempt, acts.count(";") + 1) - 1].partition("@")
    run = Pretended(told)
    with Path("told").open("a") as file:
        file.write(os.environ["HOLDFAST_LAUNCH"] + "\n")
    with Path("log").open("a") as file:
        file.write(f"{told.attempt} {run.step + 1}\n")
    while run.step < LAST:
        now = run.step + 1
        if act == "reject" and now == int(at):
            run.reject(Kind.STEP, now)
        if act == "kill" and now == int(at):
            os.kill(os.getpid(), signal.SIGKILL)
        run.step = now
        if act == "breach" and now == int(at):
            run.reject(Kind.PROBATION, now)
        if now % EVERY == 0:
            run.save()


if __name__ == "__main__":
    main(sys.argv[1])
