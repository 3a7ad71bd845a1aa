"""How fast fingerprints are on a GPU: `PYTHONPATH=src python3 bench/gpu_fingerprint.py`, well under a minute.

One JSON line a measurement. Each kernel shape over 216 tensors of 64 MiB, beside a plain torch sum over the
same bytes; the same a byte off, where nothing is aligned; 20,000 small ones; what `begin` costs the caller.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from holdfast.checkpoint.format import fingerprint, fingerprint_triton
from holdfast.checkpoint.format.fingerprint import BLOCK_BYTES
from holdfast.checkpoint.format.fingerprint_triton import Shape

PEAK = 4.8e12
"""Bytes a second, an H200's by its data sheet."""
SHAPES = [
    Shape(warps=8, span=16, ahead=True),
    Shape(warps=16, span=16, ahead=True),
    Shape(warps=8, span=16, ahead=False),
    Shape(warps=4, span=16, ahead=False),
    Shape(warps=8, span=64, ahead=True),
    Shape(warps=16, span=64, ahead=True),
]
MIB = 2**20


def device_seconds(work: Callable[[], object], times: int = 7) -> float:
    """The median, by the device's own clock, after one turn that nobody counts."""
    work()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)
    ]
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def say(what: str, size: int, seconds: float, summed: float = 0.0, **more: object) -> None:
    line: dict[str, object] = {
        "what": what,
        "GB": round(size / 1e9, 3),
        "ms": round(seconds * 1e3, 3),
        "GB/s": round(size / seconds / 1e9, 1),
        "% of 4.8 TB/s": round(100 * size / seconds / PEAK, 1),
    }
    if summed:
        line["% of torch.sum"] = round(100 * summed / seconds, 1)
    print(json.dumps(line | more), flush=True)


def kernel_seconds(tensors: list[torch.Tensor], shape: Shape) -> tuple[float, int]:
    """The launch alone, and how many programs it has."""
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    sizes = np.array([tensor.nbytes for tensor in tensors], np.int64)
    rows = fingerprint.launch_rows(addresses, sizes, shape.span)
    table = torch.from_numpy(rows.table).cuda()
    values = torch.empty(int((-(-sizes // BLOCK_BYTES)).sum()), dtype=torch.int64, device="cuda")
    halves = fingerprint._device(tensors[0].device).halves
    seconds = device_seconds(lambda: fingerprint_triton.launch(table, rows.fast, halves, values, shape=shape))
    part = fingerprint._Part(list(range(len(tensors))), tensors, values, None)
    first = fingerprint.Pending([""] * len(tensors), [part]).result()[0]
    assert first == fingerprint.of_bytes(tensors[0].cpu().view(torch.uint8).numpy().data, "m")
    return seconds, len(rows.table)


def caller(what: str, tensors: list[torch.Tensor]) -> None:
    """What `begin` keeps the caller, with its table kept; what `result` takes after the device is done."""
    tables = fingerprint.Tables()
    began = time.perf_counter()
    fingerprint.begin(tensors, tables=tables).result()
    first = time.perf_counter() - began
    begins, results, both = [], [], []
    for _ in range(5):
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        pending = fingerprint.begin(tensors, tables=tables)
        t1 = time.perf_counter()
        torch.cuda.synchronize()
        t2 = time.perf_counter()
        pending.result()
        t3 = time.perf_counter()
        begins.append(t1 - t0)
        results.append(t3 - t2)
        both.append(t3 - t0)
    ms = {
        "first call ms": round(first * 1e3, 2),
        "begin ms": round(statistics.median(begins) * 1e3, 3),
        "result ms": round(statistics.median(results) * 1e3, 3),
    }
    say(what, sum(tensor.nbytes for tensor in tensors), statistics.median(both), **ms)


def main() -> int:
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    import triton

    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
            }
        )
    )
    began = time.perf_counter()
    fingerprint.prepare(torch.device("cuda"))
    print(json.dumps({"what": "prepare", "s": round(time.perf_counter() - began, 2)}), flush=True)

    count = 216
    while count > 8 and count * 64 * MIB > 0.7 * torch.cuda.mem_get_info()[0]:
        count //= 2
    large = [torch.empty(16 * MIB, device="cuda").uniform_(-1, 1) for _ in range(count)]
    size = count * 64 * MIB
    summed = device_seconds(lambda: [tensor.sum() for tensor in large])
    say(f"torch.sum, {count} x 64 MiB", size, summed)
    for shape in SHAPES:
        try:
            seconds, programs = kernel_seconds(large, shape)
        except RuntimeError as error:
            print(
                json.dumps({"what": "kernel", "shape": shape._asdict(), "error": str(error)[:300]}),
                flush=True,
            )
            continue
        say("kernel", size, seconds, summed, shape=shape._asdict(), programs=programs)
    caller(f"begin to result, {count} x 64 MiB", large)
    off = [tensor.view(torch.uint8)[1:] for tensor in large[:16]]
    say("kernel, a byte off", 16 * 64 * MIB, kernel_seconds(off, fingerprint_triton.DEFAULT)[0])
    weights = fingerprint._device(large[0].device).weights
    stand_in = device_seconds(lambda: fingerprint.block_values(large[:16], weights), times=3)
    say("torch's own operations", 16 * 64 * MIB, stand_in)

    store = torch.empty(20_000 * 2048, device="cuda").uniform_(-1, 1)
    small = [piece[: 1 + 97 * number % 2048] for number, piece in enumerate(store.view(20_000, 2048))]
    for shape in (SHAPES[0], SHAPES[1], SHAPES[3]):
        seconds, programs = kernel_seconds(small, shape)
        say(
            "kernel, 20,000 tensors of up to 8 KiB",
            sum(tensor.nbytes for tensor in small),
            seconds,
            shape=shape._asdict(),
            programs=programs,
        )
    caller("begin to result, 20,000 tensors of up to 8 KiB", small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
