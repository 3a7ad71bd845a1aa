"""Trains a small GPT on generated text, and survives what happens to it.

    python examples/train_gpt.py                               one process
    torchrun --nproc-per-node 2 examples/train_gpt.py          several
    holdfast run --nproc-per-node 2 examples/train_gpt.py      several, restarted after failures

Stop it in any way and start it again: it goes on, and ends bit for bit as if it had never stopped.
"""

import argparse
import math
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

CONTEXT = 64

GRAMMAR = [  # a sentence takes one word of each line
    "the|a|no|every",
    "small|patient|grey|northern|quiet",
    "fox|harbour|lamp|river|pilot|engine|anchor|garden|storm",
    "sees|follows|finds|carries|forgets|teaches|waits for",
    "the old|a new|the last|another",
    "island|wind|captain|forest|signal|clock",
    "at dawn.|by night.|in winter.|again.|, they say.",
]


class Sentences(Dataset):
    """Windows of a text that a seeded grammar writes; each item says which window it is."""

    def __init__(self, windows: int, seed: int = 1) -> None:
        rng, text = random.Random(seed), ""
        while len(text) <= windows * CONTEXT:
            text += " ".join(rng.choice(words.split("|")) for words in GRAMMAR).replace(" ,", ",") + "\n"
        self.windows, self.tokens = windows, torch.tensor(list(text.encode("ascii")))

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        wide, narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, dim: int, layers: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 32, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                ends_a_branch = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if ends_a_branch else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on generated text.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="windows of text per process and step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--parallel", choices=["fsdp", "ddp"], default="fsdp")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not repeatable without it
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # results on a CPU depend on the number of threads
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(1)  # the same weights on every rank
    model = GPT(vocabulary=128, dim=args.dim, layers=args.layers).to(device)
    if dist.is_initialized() and args.parallel == "fsdp":
        for part in [*model.blocks, model]:
            fully_shard(part)
    elif dist.is_initialized():
        # Without this, DDP regroups gradients after its first step, and so rounds otherwise after a resume.
        model = DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(1000 + rank)  # other dropout on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
    )
    data = Sentences(windows=768)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=1, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)

    run = holdfast.Run()
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    def forward_backward(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    for step, (windows, tokens) in run.steps(loader, until=args.steps):
        loss = run.compute(forward_backward, tokens.to(device))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.record(loss=loss, samples=windows, tokens=tokens.numel())
        if rank == 0 and step % 20 == 0:
            print(f"step {step:>5}  loss {loss.item():.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
