"""The values of another project's checkpoint: tensors read into given ones, and the rest as plain values.

Guarantee: only the bytes that are wanted are read, from where `contents` says that they lie, and nothing is
unpickled: a tensor is made of its bytes, an array or a set of what describes it. An object of any other class
is refused by its name, for whoever wants it.

Reading goes by DCP's own plans, so a rank reads its boxes of a tensor whatever its layout there and here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.base import escaped
from holdfast.checkpoint.foreign.archive import WIDTHS, ArchiveError, StoredTensor, open_file, read_archive
from holdfast.checkpoint.foreign.contents import ForeignTensor, StoredBox, entry_of
from holdfast.checkpoint.format import Name, Offsets, Record
from holdfast.errors import CheckpointError, IncompleteStateError


class BoxReader(StorageReader):
    """DCP's way to the tensors of a foreign checkpoint, under the names that it is given."""

    def __init__(
        self,
        entries: Mapping[str, ForeignTensor],
        paths: Mapping[str, tuple[str, ...]] | None = None,
        *,
        for_training: bool = False,
    ) -> None:
        """`paths`: what a name was made of, where its parts have dots themselves.

        `for_training`: values that no training goes on from (NaN, infinity) are refused.
        """
        self._entries = entries
        self._for_training = for_training
        self._metadata = Metadata(
            state_dict_metadata={name: _described(entry) for name, entry in entries.items()},
            planner_data=dict(paths or {}),
        )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        return self._metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        del checkpoint_id

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        del metadata, is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        del checkpoint_id
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise CheckpointError(f"{item.storage_index.fqn}: an object where a tensor is wanted")
            entry = self._entries[item.storage_index.fqn]
            at = item.storage_index.offset
            box = next((one for one in entry.boxes if at is None or one.offsets == tuple(at)), None)
            if box is None:
                raise CheckpointError(f"incomplete: {item.storage_index.fqn}: a part of it is stored nowhere")
            values = read_box(box, entry.dtype, tuple(item.storage_offsets), tuple(item.lengths))
            if self._for_training and _is_odd(values):
                raise CheckpointError(f"not-finite: {escaped(item.storage_index.fqn)} holds NaN or infinity")
            target = planner.resolve_tensor(item).detach()
            target.copy_(values)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _is_odd(values: torch.Tensor) -> bool:
    """Whether there is a NaN, or an infinity above zero; one below is how masks are written."""
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point():
        return False
    if values.element_size() == 1:
        values = values.float()
    return bool((values.isnan() | (values == torch.inf)).any())


def read_into(tensors: dict[str, Any], reader: BoxReader) -> None:
    """Fill these tensors, by this rank alone."""
    if not tensors:
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp_load(tensors, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise cause from error


def _described(entry: ForeignTensor) -> TensorStorageMetadata:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this torch has no {escaped(entry.dtype)}")
    chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in entry.boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry.shape), chunks)


def read_box(box: StoredBox, dtype: str, offsets: Offsets, lengths: Offsets) -> torch.Tensor:
    """What lies in a part of a box, as a tensor of its own on the host."""
    start, stride = box.start, box.stride
    try:
        if stride is None:
            stored = read_archive(box.file, start=start, length=box.length).tree
            if not isinstance(stored, StoredTensor) or stored.dtype != dtype:
                raise ArchiveError(f"an item holds something else than a tensor of {dtype}")
            start, stride = stored.start, stored.stride
            sizes = stored.shape[1:] if box.row is not None else stored.shape
            if sizes != box.sizes:
                raise ArchiveError(f"an item of shape {list(sizes)} stands where {list(box.sizes)} should")
        if box.row is not None:
            start, stride = start + box.row * stride[0] * WIDTHS[dtype], stride[1:]
        return _read(box.file, dtype, start, stride, offsets, lengths)
    except (ArchiveError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"unreadable: {box.file.name}: {why}") from error


def _read(
    file: Path, dtype: str, start: int, stride: tuple[int, ...], offsets: Offsets, lengths: Offsets
) -> torch.Tensor:
    kind, width = getattr(torch, dtype), WIDTHS[dtype]
    if 0 in lengths:
        return torch.empty(lengths, dtype=kind)
    first = start + sum(at * step for at, step in zip(offsets, stride, strict=True)) * width
    span = (sum((size - 1) * step for size, step in zip(lengths, stride, strict=True)) + 1) * width
    data = bytearray(span)
    view, done = memoryview(data), 0
    with open_file(file) as opened:
        while done < span:
            count = os.preadv(opened.number, [view[done:]], first + done)
            if not count:
                raise ArchiveError(f"it ends at byte {first + done}, values are placed up to {first + span}")
            done += count
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).as_strided(lengths, stride)


def values_of(tree: Any, what: str) -> Any:
    """A tree as plain values and tensors; an object of a class that is not known here is refused."""
    if isinstance(tree, ForeignTensor):
        whole = torch.empty(tree.shape, dtype=getattr(torch, tree.dtype))
        read_into({what: whole}, BoxReader({what: tree}))
        return whole
    if isinstance(tree, StoredTensor):
        return values_of(entry_of(tree), what)
    if isinstance(tree, dict):
        return {key: values_of(value, f"{what}.{key}") for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(values_of(value, what) for value in tree)
    if isinstance(tree, Record):
        return _of_record(tree, what)
    if isinstance(tree, Name):
        dtype = getattr(torch, tree.name.removeprefix("torch."), None)
        if tree.name.startswith("torch.") and isinstance(dtype, torch.dtype):
            return dtype
        raise _refused(tree.name, what)
    return tree


def _of_record(record: Record, what: str) -> Any:
    word = record.cls.rpartition(".")[2]
    if record.cls.startswith("numpy.") and word in ("_reconstruct", "_frombuffer", "scalar"):
        return _array(record, what)
    if word in ("set", "frozenset") and record.cls.startswith(("builtins.", "__builtin__.")):
        members = record.arguments[0] if record.arguments else record.items
        made = {values_of(one, what) for one in members}
        return frozenset(made) if word == "frozenset" else made
    if record.cls == "collections.Counter" and record.arguments:
        return values_of(record.arguments[0], what)
    raise _refused(record.cls, what)


def _array(record: Record, what: str) -> Any:
    """An array or a number of numpy, of its bytes."""
    import numpy as np

    shape: Any = None
    order_of: Any = "C"
    if record.cls.endswith(".scalar"):
        described, data = (*record.arguments, None, None)[:2]
    elif record.cls.endswith("._frombuffer"):  # protocol 5
        data, described, shape, order_of = (*record.arguments, None, None, None, None)[:4]
    else:
        state = record.state if isinstance(record.state, tuple) and len(record.state) == 5 else (None,) * 5
        _, shape, described, is_fortran, data = state
        order_of = "F" if is_fortran else "C"
    code = described.arguments[0] if isinstance(described, Record) and described.arguments else None
    if not isinstance(code, str) or not isinstance(data, bytes):
        raise _refused(record.cls, what)
    order = described.state[1] if isinstance(described.state, tuple) and len(described.state) > 1 else "|"
    kind = np.dtype(code)
    if kind.hasobject or order == ">":
        raise _refused(record.cls, what)
    found = np.frombuffer(data, kind).copy()
    if shape is None:
        return found[0]
    return found.reshape(shape, order="F" if order_of == "F" else "C")


def _refused(cls: str, what: str) -> IncompleteStateError:
    return IncompleteStateError(
        f"{what} holds an object of {escaped(cls)}, which is not made of plain data, so it is not read: to "
        f"make "
        "it would run what is stored. Save its state as numbers, texts and tensors with the library that it "
        "is "
        "of; or let the part begin anew: checkpoint.fresh_parts"
    )


def generators_of(tree: Any) -> dict[str, Any] | None:
    """Random generators as ours are kept, by the names that the layouts have; None if there are none."""
    found = values_of(tree, "rng")
    while isinstance(found, list) and len(found) == 1:  # Megatron: a list in a list, for those that share it
        found = found[0]
    if isinstance(found, torch.Tensor):
        found = {"cpu": found}
    if not isinstance(found, dict):
        return None
    words = {
        "python": ("python", "random_rng_state"),
        "numpy": ("numpy", "np_rng_state"),
        "torch": ("cpu", "torch_cpu", "torch_rng_state", "torch"),
        "cuda": ("cuda", "torch_cuda", "cuda_rng_state"),
    }
    state = {
        ours: found[name] for ours, names in words.items() for name in names if found.get(name) is not None
    }
    if "python" not in state or "torch" not in state:
        return None
    if isinstance(state.get("cuda"), torch.Tensor):
        state["cuda"] = [state["cuda"]]
    return state
