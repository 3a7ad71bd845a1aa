"""Leaving NCCL groups after a fault: aborted with work queued, made again, and their memory given back."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast.config.sections import InProcessSettings
from holdfast.restart.groups import NCCL_SETTINGS, StoreLine, forget, watch_groups

pytestmark = pytest.mark.gpu
ROUNDS = 20
QUEUED = 200_000_000
"""Cycles of a kernel that the collective has to wait for: about a tenth of a second."""
SPARE = 8 << 20


def raise_with(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    raise ValueError("a fault amid a step")


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_is_made_aborted_and_left_again_and_again(backend: str) -> None:
    torch.cuda.init()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    chosen = InProcessSettings(empty_cuda_cache=True)
    counts, reserved = [], []
    with watch_groups() as watch:
        assert all(os.environ[name] == value for name, value in NCCL_SETTINGS.items())
        for number in range(ROUNDS):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"round{number}", watch.over(StoreLine(store))),
                rank=0,
                world_size=1,
                timeout=timedelta(seconds=60),
            )
            dist.new_group([0])
            if "gloo" in backend:
                dist.all_reduce(torch.ones(1))
            error: BaseException | None = None
            try:
                torch.cuda._sleep(QUEUED)
                raise_with(torch.ones(64 << 20, dtype=torch.uint8, device="cuda"))
            except ValueError as raised:
                error = raised
            began = time.monotonic()
            watch.abort()
            assert time.monotonic() - began < 1.0, "the abort does not wait for kernels"
            forget(error, chosen)
            watch.leave()
            assert not dist.is_initialized()
            torch.cuda.synchronize()
            forget(None, chosen)
            counts.append(threads())
            reserved.append(torch.cuda.memory_reserved())
    assert not any(name in os.environ for name in NCCL_SETTINGS)
    assert counts[-1] <= max(counts[:5]), counts
    assert reserved[-1] <= SPARE, reserved
    value = torch.ones(4, device="cuda")
    assert value.sum().item() == 4
