"""DCP's storage writer, with digests taken as the bytes are written.

The files are plain DCP: `__<rank>_0.distcp` holds one torch.save archive an item, `.metadata` is DCP's own,
and stock `dcp.load` reads both. What differs from `FileSystemWriter`:

* every byte is digested in the same pass, and each rank leaves a part record of what it wrote;
* one file and one thread a rank: DCP's secondary threads lose write errors, and the save then "succeeds"
  with tensors missing;
* the archives' CRC-32 is left out: it costs more than the write, is never checked on read, and the digests
  replace it;
* tensors are stored contiguous, so a reader can use the verified bytes in place (see reader.py);
* `finish` commits (see commit.py) instead of renaming `.metadata` inside the directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.checkpoint.digesting import DigestingFile
from holdfast.checkpoint.manifest import FileEntry

Commit = Callable[[Metadata, list[list[WriteResult]]], None]
Leave = Callable[[list[FileEntry]], None]


class StagingWriter(FileSystemWriter):
    """Writes one rank's share of a checkpoint into its staged directory."""

    def __init__(
        self, staged: Path, *, open_staged: Callable[[], object], leave_part: Leave, commit: Commit
    ) -> None:
        super().__init__(staged, single_file_per_rank=True, thread_count=1, overwrite=False)
        self._staged = staged
        self._is_coordinator = False
        self._open = open_staged
        self._leave_part = leave_part
        self._commit = commit

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Inside DCP's exchange, so that a coordinator that cannot stage tells everybody.
        if self._is_coordinator:
            self._open()
        return plan

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        entries: list[FileEntry] = []
        if plan.items:
            with DigestingFile(self._staged / name) as file, _without_crc():
                for item in plan.items:
                    data = planner.resolve_data(item)
                    file.begin_chunk()
                    if item.type == WriteItemType.BYTE_IO:
                        assert not isinstance(data, torch.Tensor)
                        file.write(data.getbuffer())
                    else:
                        assert isinstance(data, torch.Tensor)
                        torch.save(_compact(data), cast("IO[bytes]", file))
                    chunk = file.end_chunk()
                    info = _StorageInfo(name, chunk.offset, chunk.length)
                    results.append(WriteResult(item.index, chunk.length, info))
                entries.append(file.finish())
        self._leave_part(entries)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._commit(metadata, results)

    def storage_meta(self) -> StorageMeta:
        # The staged path is gone after the commit, and a checkpoint may be moved: name it, do not place it.
        return StorageMeta(checkpoint_id=self._staged.name, save_id=self.save_id)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, contiguous, and with no more storage than its own elements, which say all by themselves.

    A lazy conjugate or negative keeps its sign in a flag beside the bytes, unseen by a reader of the bytes.
    """
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if host.untyped_storage().size() != host.nbytes:
        host = host.clone(memory_format=torch.contiguous_format)
    return host


@contextlib.contextmanager
def _without_crc() -> Iterator[None]:
    before: Any = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
