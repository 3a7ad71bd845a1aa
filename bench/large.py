"""Saves of very many entries by very many ranks: what planning, records and reading them cost.

Seconds are the processor's: nothing here waits for anything. No rank runs: what each would send is generated.
Each measurement is made in a process of its own, whose highest memory use is a part of the answer.
"""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from holdfast.checkpoint.commit import check_declared_is_written, leave_part, read_parts
from holdfast.checkpoint.format import (
    CheckpointName,
    Chunk,
    FileEntry,
    Frames,
    Manifest,
    Versions,
    World,
)
from holdfast.checkpoint.format import (
    manifest as manifests,
)
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.save import plan as planning

TENSORS, RANKS = 723 * 3, 1024
"""Of the parse: every rank holds a part of every tensor."""
ALONE = 32
"""The interpreter alone is measured on so small a part of the tensors: it takes minutes."""
ENTRIES, SHARDS = 100_000, 4
"""Of the plan: entries in all, and ranks that hold a part of each."""
PARTS = 8
DEADLINE = 1800
NAME = CheckpointName(1, "0" * 16)
DIGEST = "0" * 32


def _peak() -> float:
    """MiB of this program; what `getrusage` tells begins with those of the process that started it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) / 1024


# --- reading `.metadata` ------------------------------------------------------------------------------------


def write_metadata(path: Path, tensors: int, ranks: int) -> None:
    """As a save of so many row-wise sharded tensors plans it."""
    described: dict[str, Any] = {}
    by_rank: list[list[MetadataIndex]] = [[] for _ in range(ranks)]
    for number in range(tensors):
        name = f"model.layers.{number // 9}.block.{number % 9}.weight"
        chunks = []
        for rank in range(ranks):
            offsets = torch.Size([4 * rank, 0])
            chunks.append(ChunkStorageMetadata(offsets, torch.Size([4, 4096])))
            by_rank[rank].append(MetadataIndex(name, offsets, rank))
        size = torch.Size([4 * ranks, 4096])
        described[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), size, chunks)
    storage: dict[MetadataIndex, Any] = {}
    for rank, indices in enumerate(by_rank):
        file = f"__{rank}_0.distcp"
        for at, index in enumerate(indices):
            storage[index] = filesystem._StorageInfo(file, at * 34_000, 34_000)
    meta = Metadata(described, {name: (name,) for name in described}, storage)
    with path.open("wb") as stream:
        pickle.dump(meta, stream)


def read_metadata(path: Path, *, alone: bool) -> dict[str, float]:
    """Seconds and memory of one look at a `.metadata`, as a check of a directory takes it."""
    import numpy  # noqa: F401 - its import is no part of the reading

    if alone:
        metadatas.REGULAR_FROM = 1 << 62
    before, data = _peak(), path.read_bytes()
    started = time.process_time()
    meta = metadatas.parse(data)
    count = len(meta.storage)
    sizes = {f"__{rank}_0.distcp": count // RANKS * 34_000 for rank in range(RANKS)}
    problems = metadatas.completeness(meta, sizes)
    seconds = time.process_time() - started
    assert not problems, problems[:3]
    return {"us": seconds / count * 1e6, "bytes": (_peak() - before) * 2**20 / count, "chunks": count}


# --- planning a save ----------------------------------------------------------------------------------------


def local_plans(entries: int, ranks: int, shards: int) -> Iterator[bytes]:
    """What each rank sends to rank 0: its parts of the entries, spread evenly."""
    mine: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for number in range(entries):
        for shard in range(shards):
            mine[(number * shards + shard) % ranks].append((number, shard))
    for parts in mine:
        items = []
        for number, shard in parts:
            offsets, size = (
                torch.Size([4 * shard, 0]),
                torch.Size([4 * shards, 64]),
            )  # each its own, as torch's
            chunk, properties = (
                ChunkStorageMetadata(offsets, torch.Size([4, 64])),
                TensorProperties(torch.bfloat16),
            )
            data = TensorWriteData(chunk, properties, size)
            index = MetadataIndex(f"model.layers.{number // 9}.block.{number % 9}.weight", offsets, shard)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        paths = {item.index.fqn: ("model", item.index.fqn) for item in items}
        held = planning.Holdings({}, dict.fromkeys(paths, "the mesh and the whole"))
        yield pickle.dumps(SavePlan(items, storage_data=held, planner_data=paths))


def save(entries: int, ranks: int, shards: int) -> dict[str, float]:
    """All that rank 0 does for a save but for waiting, and what is sent to, written or read by any other."""
    received = list(local_plans(entries, ranks, shards))
    found: dict[str, float] = {"items": float(entries * shards), "plan_sent": float(max(map(len, received)))}
    before = _peak()
    started = time.process_time()
    planner = planning.SnapshotPlanner({"model": {"x": torch.zeros(1)}}, 0, is_coordinator=True)
    frames = Frames()
    plans = [pickle.loads(plan) for plan in received]
    assert not planning.contested_names([plan.storage_data for plan in plans])
    made, declared = planning._plan_for_all(planner, plans, frames)
    del plans
    replies = [pickle.dumps(reply) for reply in made]
    found["plan"] = time.process_time() - started
    found["plan_received"] = float(max(map(len, replies)))
    found["metadata_bytes"] = float(len(declared.metadata))
    layouts = [planning.lay_out(plan.items, rank, frames)[0] for rank, (plan, _) in enumerate(made)]
    del made, planner, received, replies

    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder)
        (staged / "parts").mkdir()
        for rank, layout in enumerate(layouts):
            files = []
            for shard in layout.shards:
                chunks = [
                    Chunk(item.offset - shard.start, item.length, DIGEST, f"x:{DIGEST}")
                    for item in layout.items_of(shard)
                ]
                files.append(FileEntry(path=shard.path, size=shard.size, digest=DIGEST, chunks=chunks))
            leave_part(staged, NAME, rank, files)
        sizes = [path.stat().st_size for path in (staged / "parts").iterdir()]
        found["part_bytes"] = float(max(sizes))
        started = time.process_time()
        parts = read_parts(staged, NAME, ranks)
        check_declared_is_written(None, declared, parts)
        found["parts"] = time.process_time() - started
    started = time.process_time()
    listed = [file for part in parts for file in part]
    listed.append(FileEntry(path=".metadata", size=len(declared.metadata), digest=DIGEST))
    data, _ = manifests.encode(
        Manifest(
            format=1, id=NAME.id, step=1, parent=None, run="bench", attempt=1, epoch=1, created=0.0,
            world=World(size=ranks), parts={}, files=listed,
            versions=Versions(holdfast="", torch="", python=""),
        )
    )  # fmt: skip
    found["manifest"] = time.process_time() - started
    found["manifest_bytes"] = float(len(data))
    found["total"] = found["plan"] + found["parts"] + found["manifest"]
    found["peak"] = _peak() - before
    return found


# --- the measurements ---------------------------------------------------------------------------------------


def _child(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


@functools.cache
def _reads(work: Path, repeat: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    whole, part = work / "whole.metadata", work / "part.metadata"
    _child("write", whole, TENSORS, RANKS)
    _child("write", part, TENSORS // ALONE, RANKS)
    pairs = [(_child("read", whole, 0), _child("read", part, 1)) for _ in range(repeat)]
    whole.unlink()
    part.unlink()
    return [ours for ours, _ in pairs], [alone for _, alone in pairs]


@functools.cache
def _saves(repeat: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    ours = [_child("save", ENTRIES, RANKS, SHARDS) for _ in range(repeat)]
    fewer = [_child("save", ENTRIES // PARTS, RANKS // PARTS, SHARDS) for _ in range(repeat)]
    return ours, fewer


def _column(of: list[dict[str, float]], name: str, times: float = 1) -> list[float]:
    return [one[name] * times for one in of]


def parsed(work: Path, size_mib: int, repeat: int) -> tuple[list[float], list[float]]:
    """Microseconds a chunk to read and check 2.2 million of them; of the interpreter alone."""
    del size_mib
    ours, alone = _reads(work, repeat)
    return _column(ours, "us"), _column(alone, "us")


def parsed_memory(work: Path, size_mib: int, repeat: int) -> tuple[list[float], list[float]]:
    """Bytes a chunk, the file's own included."""
    del size_mib
    ours, alone = _reads(work, repeat)
    return _column(ours, "bytes"), _column(alone, "bytes")


def planned(work: Path, size_mib: int, repeat: int) -> tuple[list[float], list[float]]:
    """Seconds of rank 0 for a save of 100,000 entries by 1,024 ranks; an eighth of both, eight times."""
    del work, size_mib
    ours, fewer = _saves(min(repeat, 3))
    return _column(ours, "total"), _column(fewer, "total", PARTS)


def planned_memory(work: Path, size_mib: int, repeat: int) -> tuple[list[float], list[float]]:
    """Megabytes that this takes on rank 0."""
    del work, size_mib
    ours, fewer = _saves(min(repeat, 3))
    return _column(ours, "peak"), _column(fewer, "peak", PARTS)


def _main(kind: str, *arguments: str) -> None:
    kinds: dict[str, Callable[..., Any]] = {
        "write": lambda path, tensors, ranks: write_metadata(Path(path), int(tensors), int(ranks)) or {},
        "read": lambda path, alone: read_metadata(Path(path), alone=alone == "1"),
        "save": lambda *numbers: save(*map(int, numbers)),
    }
    print(json.dumps(kinds[kind](*arguments)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
