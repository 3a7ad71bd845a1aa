"""What the benchmarks save and load: large float32 tensors, and a few small ones as every model has them."""

from __future__ import annotations

import torch
from torch import nn

PIECE_MIB = 16


class Weights(nn.Module):
    """`size_mib` MiB in tensors of 16 MiB, plus eight of 1 KiB. `filled` gives every page its own bytes."""

    def __init__(self, size_mib: int, *, filled: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for number in range(max(1, size_mib // PIECE_MIB)):
            # Written once in either case: a page that was never touched is slower to load into.
            tensor = torch.zeros(PIECE_MIB * 2**18)
            if filled:
                tensor.uniform_(-1, 1, generator=generator)
            self.register_parameter(f"large_{number:03d}", nn.Parameter(tensor, requires_grad=False))
        for number in range(8):
            small = torch.full((256,), float(number) if filled else 0.0)
            self.register_buffer(f"small_{number}", small)
