"""Trains a small model in a function that starts again in the same processes after a fault.

    export HOLDFAST_INPROCESS_ENABLED=true
    torchrun --nproc-per-node 2 examples/restart_in_place.py --fail-at 25
    holdfast run --nproc-per-node 2 examples/restart_in_place.py --fail-at 25

The last rank raises once after step 25. All ranks leave the function and call it again: nothing is started,
nothing imported, and training goes on from the newest checkpoint, bit for bit as if nothing had been.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

calls = 0  # lives as long as the process: what is outside of the function is not undone by a restart


@holdfast.restartable()
def train(steps: int, fail_at: int) -> float:
    """torch.distributed is initialised when this begins. Everything that holds a group is made in here."""
    global calls
    calls += 1
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    print(f"rank {rank} of {world}: call {calls} in process {os.getpid()}", flush=True)

    run = holdfast.Run(checkpoint_interval=10)  # first: from here to the first step all may take its time
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(8, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs = torch.randn(512, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, world, rank, seed=1))

    run.track(model=model, optimizer=optimizer)

    def forward_backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        return loss.detach()

    loss = torch.zeros(())
    for step, batch in run.steps(loader, until=steps):
        loss = run.compute(forward_backward, *batch)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)
        if step == fail_at and rank == world - 1 and calls == 1:
            raise ValueError(f"rehearsed after step {step}")
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Restart a training function in place.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--fail-at", type=int, default=0, help="a step after which the last rank raises, once"
    )
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(1)
    last = train(args.steps, args.fail_at)
    if last is not None:  # None in a process that stayed a reserve to the end
        print(f"loss {last:.6f} after {args.steps} steps and {calls} calls", flush=True)
