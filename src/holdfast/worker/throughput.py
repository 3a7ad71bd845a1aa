"""Low throughput after a resume: rank 0 finds it at the end of probation, then every rank tries its device.

It accuses a node, if one is slower than the others, and never the checkpoint. The probes cost half a second,
once, and only when steps take twice as long as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from holdfast.control.group import Group
from holdfast.health.compute import ComputeProbe, probe_compute
from holdfast.journal.events import ThroughputLow
from holdfast.journal.writer import JournalWriter
from holdfast.policy.probation import slowdown, slower_node

LETTER = 1024
"""Bytes in which a rank's answer is exchanged."""
LONGEST_NAME = 200


class Answer(msgspec.Struct, frozen=True):
    node: str
    probe: ComputeProbe


class Throughput:
    """Step times since a resume, and what to do if they are much longer than `before`."""

    def __init__(
        self, group: Group, journal: JournalWriter, *, node: str, device: torch.device | None
    ) -> None:
        self.before: Sequence[float] = ()
        self._group = group
        self._journal = journal
        self._node = node
        self._device = device
        self._seconds: list[float] = []

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def judge(self) -> None:
        """Called once, on all ranks at the same step."""
        low = slowdown(self.before, self._seconds) if self._group.is_coordinator else None
        if not self._told_by_rank_0(low is not None):
            return
        answers = self._exchanged(Answer(self._node[:LONGEST_NAME], probe_compute(self._device)))
        if low is None:
            return
        self._journal.write(
            ThroughputLow(
                seconds=round(low[0], 6),
                before=round(low[1], 6),
                probes=[
                    f"rank {rank} on {answer.node or 'this node'}, {answer.probe.describe()}"
                    for rank, answer in enumerate(answers)
                ],
                accused=slower_node(_speeds(answers)),
            )
        )

    def _told_by_rank_0(self, low: bool) -> bool:
        if self._group.process_group is None:
            return low
        word = torch.tensor([int(low)])
        dist.broadcast(word, src=0, group=self._group.process_group)
        return bool(word.item())

    def _exchanged(self, mine: Answer) -> list[Answer]:
        if self._group.process_group is None:
            return [mine]
        written = msgspec.json.encode(mine)[:LETTER].ljust(LETTER)
        letter = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        letters = [torch.empty_like(letter) for _ in range(self._group.world_size)]
        dist.all_gather(letters, letter, group=self._group.process_group)
        return [_read(bytes(got.tolist())) for got in letters]


def _read(letter: bytes) -> Answer:
    try:
        return msgspec.json.decode(letter, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Answer("", ComputeProbe(device="?", problem="its answer could not be read"))


def _speeds(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Per node, each rank's speed relative to the fastest rank's; 0 for one that failed or was wrong."""
    flops = max((answer.probe.gflops for answer in answers), default=0.0) or 1.0
    copies = max((answer.probe.copy_gbps for answer in answers), default=0.0) or 1.0
    speeds: dict[str, list[float]] = {}
    for answer in answers:
        probe = answer.probe
        speed = min(probe.gflops / flops, probe.copy_gbps / copies) if probe.right else 0.0
        speeds.setdefault(answer.node, []).append(speed)
    return speeds
