"""Trains a small network on one GPU with mixed precision and dropout, and leaves an exact record."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

OUT = Path(os.environ["CUDA_OUT"])
DIE_AT = int(os.environ.get("CUDA_DIE_AT", "0"))
DIE_BY = os.environ.get("CUDA_DIE_BY", "SIGKILL")
UNTIL = int(os.environ.get("CUDA_UNTIL", "40"))


def main() -> None:
    OUT.mkdir(exist_ok=True)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UNTIL)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=5)  # skips its first steps
    data = TensorDataset(torch.arange(512), torch.randn(512, 64))
    run = holdfast.Run(run_dir=os.environ.get("CUDA_RUN", "run"), checkpoint_interval=8)
    run.track(model=model, optimizer=optimizer, schedule=schedule, scaler=scaler)

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(x + 0.1 * torch.randn_like(x)) - x).square().mean()
        scaler.scale(loss).backward()
        return loss.detach()

    log = (OUT / f"{os.getpid()}.log").open("w", buffering=1)
    for step, (ids, x) in run.steps(DataLoader(data, batch_size=32, shuffle=True), until=UNTIL):
        if step == DIE_AT and not (OUT / "died").exists():
            (OUT / "died").touch()
            os.kill(os.getpid(), signal.Signals[DIE_BY])
        x = x.cuda()
        loss = run.compute(forward_backward, x)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        run.record(loss=loss, samples=ids, tokens=x.numel())
        log.write(f"{step} {loss.item().hex()} {scaler.get_scale()} {ids.tolist()}\n")
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    (OUT / "params").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
