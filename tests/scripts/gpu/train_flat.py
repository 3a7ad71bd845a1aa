"""FSDP1 on one GPU, which the ranks of a gloo group share: bfloat16 in the forward, trained in float32.

What is written: for each step the loss, and at the end the whole model, gathered by torch.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision

import holdfast


def main(run_dir: str, until: int, offload: bool, out: str) -> None:
    dist.init_process_group("gloo")
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 17)),
        use_orig_params=True,
        device_id=0,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        cpu_offload=CPUOffload(offload_params=offload),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, checkpoint_async_save=True)
    run.track(model=model, optimizer=optimizer)
    begun, losses = run.start(), {}
    while run.step < until:
        run.begin_step()
        optimizer.zero_grad()
        torch.manual_seed(run.step)
        loss = model(torch.randn(8, 33, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        losses[run.step] = loss.item().hex()
        run.end_step()
    run.finish()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        values = {name: tensor.flatten().tolist() for name, tensor in whole.items()}
        Path(out).write_text(json.dumps({"begun": begun, "losses": losses, "model": values}))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "offload", sys.argv[4])
