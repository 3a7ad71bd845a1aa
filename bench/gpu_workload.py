"""What is trained where a GPU's step of 50 ms is measured: a dozen wide layers, in blocks of steps."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, LAYERS, ROWS = 4096, 12, 8192
STEP = 0.050
BLOCK = 10
"""Steps that are timed together."""


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A model, its optimizer and a batch."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return model, optimizer, torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
