"""What a snapshot costs training on one GPU: block, clone and overlap, against a page-locked copy.

72 × Linear(4096, 4096) with AdamW: 14.5 GB of parameters and optimizer state in 432 tensors. One JSON line
for each measure, all in one run, so that ratios hold whatever the machine: `python bench/gpu_snapshot.py`.

blocked_ms   block: host time of the call. clone: time on the training stream from before the call to after
             it. overlap: what a step with a snapshot takes longer than the median step beside it. Both while
             the host runs ahead of the device; `drained_ms` is the same where nothing is queued before the
             call, as in a loop that reads its loss at every step: launching then counts too.
in_flight    step time while the copy to the host is under way, over step time without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from holdfast.checkpoint.format import fingerprint
from holdfast.checkpoint.save.device import (
    LARGE,
    CudaLane,
    DeviceStager,
    InFlight,
    Owned,
    TensorPiece,
    copy_within,
    pin,
)
from holdfast.policy.upkeep import Way, choose_snapshot, owned_enough

CUDA = torch.device("cuda", 0)
WIDTH = 4096
BATCH = 4096
REPEAT = 3
LONG_STEP = 1.7
"""How many times as long as the copy the step is that an overlapped copy hides behind."""
PAGE = 4096
TIMEOUT = 60.0


def tell(measure: str, **values: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
    print(json.dumps({"measure": measure} | rounded), flush=True)


def event() -> torch.cuda.Event:
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


class Workload:
    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=CUDA) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(BATCH, WIDTH, device=CUDA)
        self.step(1)
        self.owned = Owned([self.optimizer])
        self.pieces: list[TensorPiece] = []
        offset = 0
        tensors = [tensor.detach() for tensor in self.model.parameters()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if value.device == CUDA]
        for tensor in tensors:
            self.pieces.append(TensorPiece(tensor, offset, tensor.nbytes))
            offset += -(-tensor.nbytes // PAGE) * PAGE
        self.room = offset
        self.nbytes = sum(piece.nbytes for piece in self.pieces)

    def step(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int, micro_batches: int, boundary: Callable[[], None]) -> list[float]:
        """Seconds on the training stream of each of `count` steps, `boundary` being called after each."""
        marks = [event()]
        for _ in range(count):
            self.step(micro_batches)
            boundary()
            marks.append(event())
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def shared_memory(nbytes: int) -> torch.Tensor:
    descriptor = os.memfd_create("snapshot")
    os.ftruncate(descriptor, nbytes)
    memory = mmap.mmap(descriptor, nbytes)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def seconds(work: Callable[[], None]) -> float:
    """The median time on the device of some work, launching included."""
    found = []
    for _ in range(REPEAT):
        torch.cuda.synchronize()
        start = event()
        work()
        end = event()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def checked(flight: InFlight, work: Workload, buffer: torch.Tensor) -> bool:
    """Whether a few of the staged pieces are what their fingerprints say; ends the snapshot."""
    if not flight.wait(TIMEOUT) or flight.torn() or flight.notes:
        return False
    prints = flight.fingerprints()
    flight.release()
    some = range(0, len(work.pieces), max(1, len(work.pieces) // 8))
    return all(
        fingerprint.matches(
            buffer[work.pieces[at].offset :][: work.pieces[at].nbytes].numpy().data, prints[at]
        )
        for at in some
    )


def measure_copies(work: Workload, flat: list[torch.Tensor]) -> None:
    apart = [torch.empty_like(tensor) for tensor in flat]
    for name, large in (("a call each", 0), ("as it is", LARGE), ("shared kernels", 1 << 40)):
        took = seconds(lambda large=large: copy_within(apart, flat, large=large))
        tell("copy within the device", how=name, ms=took * 1e3, moved_gb_per_s=2 * work.nbytes / took / 1e9)


def measure_block(stager: DeviceStager, work: Workload, buffer: torch.Tensor, copy: float) -> None:
    found, right = [], True
    for _ in range(REPEAT):
        torch.cuda.synchronize()
        start = time.perf_counter()
        flight = stager.begin(work.pieces, buffer, "block")
        found.append(time.perf_counter() - start)
        right &= checked(flight, work, buffer)
    blocked = statistics.median(found)
    tell("block", blocked_ms=blocked * 1e3, of_copy=blocked / copy, target=1.05, right=right)


def measure_clone(stager: DeviceStager, work: Workload, buffer: torch.Tensor, copy: float) -> None:
    base = statistics.median(work.steps(6, 1, lambda: None))
    found: dict[bool, list[float]] = {False: [], True: []}
    host, ratios, right = [], [], True
    for drained in [True, *([False, True] * REPEAT)]:
        torch.cuda.synchronize()
        if not drained:
            work.step(1)
        begun, start = time.perf_counter(), event()
        flight = stager.begin(work.pieces, buffer, "clone", work.owned)
        host.append(time.perf_counter() - begun)
        end = event()
        count = max(1, int(copy / base))  # steps that lie within the copy
        during = work.steps(count, 1, flight.boundary)
        found[drained].append(start.elapsed_time(end) / 1e3)
        ratios.append(statistics.median(during) / base)
        right &= checked(flight, work, buffer)
    first = found[True].pop(0)  # the first one allocates
    blocked, drained_by = (statistics.median(found[drained]) for drained in (False, True))
    tell(
        "clone",
        blocked_ms=blocked * 1e3,
        of_copy=blocked / copy,
        target=0.05,
        drained_ms=drained_by * 1e3,
        host_ms=statistics.median(host[1:]) * 1e3,
        first_ms=first * 1e3,
        step_ms=base * 1e3,
        in_flight=statistics.median(ratios[1:]),
        in_flight_target=1.02,
        right=right,
    )


def measure_overlap(stager: DeviceStager, work: Workload, buffer: torch.Tensor, copy: float) -> None:
    one = statistics.median(work.steps(3, 1, lambda: None))
    two = statistics.median(work.steps(3, 2, lambda: None))
    micro = max(1, -(-int(1e6 * (LONG_STEP * copy - one)) // max(1, int(1e6 * (two - one)))) + 1)
    found: dict[bool, list[float]] = {False: [], True: []}
    base, right = [], True
    for drained in [False, True] * REPEAT:
        base += work.steps(2, micro, lambda: None)
        if not drained:
            work.step(micro)
        start = event()
        flight = stager.begin(work.pieces, buffer, "overlap", work.owned)
        work.step(micro)
        flight.boundary()
        end = event()
        torch.cuda.synchronize()
        found[drained].append(start.elapsed_time(end) / 1e3)
        right &= flight.way == "overlap" and checked(flight, work, buffer)
    step = statistics.median(base)
    blocked, drained_by = (statistics.median(found[drained]) - step for drained in (False, True))
    tell(
        "overlap",
        blocked_ms=blocked * 1e3,
        of_step=blocked / step,
        target=0.01,
        drained_ms=drained_by * 1e3,
        of_copy=blocked / copy,
        step_ms=step * 1e3,
        micro_batches=micro,
        spread=(max(base) - min(base)) / step,
        right=right,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=72)
    begun = time.perf_counter()
    work = Workload(parser.parse_args().layers)
    mapped = time.perf_counter()
    pinned = pin(shared_memory(work.room), threads=16)
    locked = time.perf_counter()
    stager = DeviceStager()
    stager.prepare(CUDA)
    tell(
        "setup",
        device=torch.cuda.get_device_name(CUDA),
        torch=torch.__version__,
        bytes=work.nbytes,
        tensors=len(work.pieces),
        workload_s=mapped - begun,
        page_lock_s=locked - mapped,
        prepare_s=time.perf_counter() - locked,
        locked=pinned.locked,
        note=pinned.note,
    )
    buffer = pinned.buffer
    lane = CudaLane(CUDA)
    flat = [piece.tensor.view(-1).view(torch.uint8) for piece in work.pieces]
    host = [buffer.narrow(0, piece.offset, piece.nbytes) for piece in work.pieces]
    copy = seconds(lambda: lane.to_host(host, flat))
    tell("page-locked copy", copy_ms=copy * 1e3, gb_per_s=work.nbytes / copy / 1e9)
    tables = fingerprint.Tables()
    prints = seconds(lambda: fingerprint.begin(flat, tables=tables))
    tell("fingerprints", ms=prints * 1e3, gb_per_s=work.nbytes / prints / 1e9)
    measure_copies(work, flat)
    measure_block(stager, work, buffer, copy)
    measure_clone(stager, work, buffer, copy)
    measure_overlap(stager, work, buffer, copy)
    memory = stager.memory(CUDA)
    way: Way = choose_snapshot(
        "auto",
        free_bytes=memory.free,
        needed_bytes=work.nbytes,
        device_bytes=memory.total,
        copy_seconds=copy,
        has_owned=owned_enough(work.owned.nbytes(work.pieces), work.nbytes),
    ).way
    tell("policy", chosen=way, free_gib=memory.free / 1024**3, total_s=time.perf_counter() - begun)
    torch.cuda.synchronize()
    pinned.release()


if __name__ == "__main__":
    main()
