"""Places of the local tier with real images, as saving leaves them: no torch, no processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.tier import CopyFile, CopyRecord, LocalTier, RankPlace, Where
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    CheckpointName,
    Chunk,
    FileEntry,
    Manifest,
    Versions,
    World,
)
from holdfast.record.attempts import HeadRecord
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.lineage import CommitRecord

RUN = "0123456789ab"
NAME = CheckpointName(120, "3fa9c1d2")
METADATA_BYTES = b"what DCP would write"
CHUNKS = ((0, 700), (700, 1300), (2000, 1000))
"""The items of each shard."""
SHARD = 3000
SHARDS = 2


def place(directory: Path, run: str = RUN, *, node: str = "node-1", run_dir: Path | None = None) -> LocalTier:
    return LocalTier.open(directory, run, node=node, run_dir=run_dir or directory / "no such run")


def shard_bytes(rank: int, shard: int, name: CheckpointName = NAME) -> bytes:
    return random.Random(f"{name} {rank} {shard}").randbytes(SHARD)


def listed(path: str, data: bytes) -> FileEntry:
    chunks = [Chunk(o, n, manifests.digest_bytes(data[o : o + n])) for o, n in CHUNKS if o + n <= len(data)]
    return FileEntry(path=path, size=len(data), digest=manifests.digest_bytes(data), chunks=chunks)


def manifest_of(
    world: int = 2, name: CheckpointName = NAME, run: str = RUN, created: float = 1_700_000_000.0
) -> Manifest:
    files = [listed(METADATA, METADATA_BYTES)]
    for rank in range(world):
        files += [listed(f"__{rank}_{n}.distcp", shard_bytes(rank, n, name)) for n in range(SHARDS)]
    return Manifest(
        format=manifests.FORMAT,
        id=name.id,
        step=name.step,
        parent=None,
        run=run,
        attempt=1,
        epoch=1,
        created=created,
        world=World(size=world),
        parts={},
        files=files,
        versions=Versions(holdfast="0", torch="0", python="3"),
    )


def keep_copy(
    tier: LocalTier,
    rank: int,
    manifest: Manifest,
    *,
    kind: Literal["own", "replica"] = "own",
    slot: str = "0",
) -> CopyRecord:
    """The image and the committed record of one rank's shards."""
    name = CheckpointName(manifest.step, manifest.id)
    image = f"{rank:05d}.{slot}"
    data = [shard_bytes(rank, n, name) for n in range(SHARDS)]
    # Slots have room to spare: what follows the last shard is nobody's.
    (tier.images / image).write_bytes(b"".join(data) + bytes(96))
    files = [
        CopyFile(f"__{rank}_{n}.distcp", n * SHARD, SHARD, manifests.digest_bytes(data[n]))
        for n in range(SHARDS)
    ]
    record = CopyRecord(
        checkpoint=str(name),
        manifest=manifests.encode(manifest)[1],
        rank=rank,
        image=image,
        files=files,
        kind=kind,
        at=1_700_000_001.0,
    )
    tier.commit(record)
    return record


class LocalRun(NamedTuple):
    """A run with a control directory, whose checkpoints two nodes hold: ranks 0 and 1, replicas crosswise."""

    control: ControlDirectory
    nodes: list[LocalTier]

    def commit(self, manifest: Manifest, *, attempt: int = 1) -> CheckpointName:
        """A checkpoint in the local tier, as a save leaves it: sealed, recorded, with all its copies."""
        name = CheckpointName(manifest.step, manifest.id)
        first, second = (tier.place for tier in self.nodes)
        where = Where(
            ranks=[RankPlace(first, "node-1", [second]), RankPlace(second, "node-2", [first])],
            nodes={first: "node-1", second: "node-2"},
        )
        local_manifest.open_folder(self.control, name)
        digest = local_manifest.seal(self.control, name, manifest, METADATA_BYTES, where)
        commit = CommitRecord(id=name.id, step=name.step, parent=None, attempt=attempt, manifest=digest)
        path = self.control.attempt(attempt) / "commits" / f"{name.step:012d}-{name.id}.json"
        create_record(path, commit)
        for rank, (own, peer) in enumerate((self.nodes, self.nodes[::-1])):
            keep_copy(own, rank, manifest, slot=name.id)
            keep_copy(peer, rank, manifest, kind="replica", slot=name.id)
            local_manifest.confirm_replica(self.control, name, rank, peer.place)
        return name


def local_run(folder: Path) -> LocalRun:
    control, _ = ControlDirectory.open_or_create(folder / "run")
    create_record(control.attempt(1) / "head.json", HeadRecord(attempt=1, checkpoint=None, step=0))
    nodes = [
        place(folder / node, control.run_id, node=node, run_dir=control.path) for node in ("node-1", "node-2")
    ]
    return LocalRun(control, nodes)


def put_in_root(run: LocalRun, manifest: Manifest) -> Path:
    directory = run.control.path / "checkpoints" / f"step_{manifest.step:08d}-{manifest.id}"
    directory.mkdir(parents=True)
    name = CheckpointName(manifest.step, manifest.id)
    (directory / METADATA).write_bytes(METADATA_BYTES)
    for rank in range(manifest.world.size):
        for n in range(SHARDS):
            (directory / f"__{rank}_{n}.distcp").write_bytes(shard_bytes(rank, n, name))
    (directory / MANIFEST).write_bytes(manifests.encode(manifest)[0])
    return directory


def two_tiers(folder: Path, both: CheckpointName, only_local: CheckpointName) -> LocalRun:
    """The first checkpoint is in the root and on two nodes, the second on two nodes only."""
    made = local_run(folder)
    for name in (both, only_local):
        made.commit(manifest_of(name=name, run=made.control.run_id))
    put_in_root(made, manifest_of(name=both, run=made.control.run_id))
    return made
