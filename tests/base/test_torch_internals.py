"""Every private part of torch that is touched is named in one module, is there, and is missed loudly."""

from __future__ import annotations

import ast
import functools
import importlib
import logging
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.base import torch_internals
from holdfast.base.torch_internals import SETTLED, SHOWN, Part, missing, unproven
from holdfast.checkpoint.format.metadata import as_torch, parse
from kit.harness import REPO
from kit.tiny import train

SOURCE = REPO / "src" / "holdfast"
PLACES = {"base/torch_internals.py", "restart/groups.py"}
"""Where they are used: there, and where torch's groups are taken apart to restart in place."""
OTHERS = {
    # Python's own
    "_exit", "_getframe", "_replace", "_fields", "_current_frames", "_run_module_as_main", "_set_native_id",
    "_initializing", "_actions", "_action_groups", "_remove_action", "_option_string_actions",
    # Megatron's and webdataset's
    "_instance", "_configured", "_shuffle",
    # read where they may be absent, for the report of a hang
    "_dump_nccl_trace_json", "_dump_fr_trace_json", "_world", "_get_sequence_number_for_group",
}  # fmt: skip


def private(name: str) -> bool:
    return len(name) > 2 and name.startswith("_") and not name.startswith("__") and name.isidentifier()


def own_names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.ImportFrom(module=str(module)) if module.startswith("holdfast"):
                found |= {alias.asname or alias.name for alias in node.names}
    return found


def foreign_names(tree: ast.AST, ours: frozenset[str]) -> set[str]:
    """Private names that a module takes from objects or modules that are not ours."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if private(name):
                found.add(name)
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(name), *_]
            ):
                if isinstance(name, str) and private(name):
                    found.add(name)
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                found |= {part for part in module.split(".") if private(part)}
                found |= {alias.name for alias in names if private(alias.name)}
    return found - ours


def trees() -> Iterator[tuple[str, ast.AST]]:
    """One at a time: together they are a million objects, which every later fork would carry."""
    for path in SOURCE.rglob("*.py"):
        yield str(path.relative_to(SOURCE)), ast.parse(path.read_text())


@functools.cache
def ours() -> frozenset[str]:
    return frozenset().union(*(own_names(tree) for _, tree in trees()))


def strays(tree: ast.AST) -> set[str]:
    return foreign_names(tree, ours()) - SETTLED - OTHERS


def test_private_parts_of_torch_are_touched_in_one_place() -> None:
    assert {name: found for name, tree in trees() if name not in PLACES and (found := strays(tree))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "tensor._local_tensor",
        "from torch.utils._pytree import tree_leaves",
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "getattr(record, '_unsharded_param', None)",
        "dist.distributed_c10d._get_default_store()",
    ],
)
def test_a_stray_is_found(line: str) -> None:
    assert strays(ast.parse(line))


def test_this_torch_has_everything() -> None:
    for part in torch_internals.PARTS:
        importlib.import_module(part.owner.partition(":")[0])
    for name in torch_internals._IMPORTED:
        assert getattr(torch_internals, name) is not None
    assert missing() == []
    assert unproven(str(torch.__version__)) == ""


def test_a_release_that_nobody_has_tried_is_doubted_and_a_tried_one_is_not() -> None:
    for version in (*SHOWN, "2.12.1", "2.13.0+cpu", "2.15.0a0+gitabc"):
        assert unproven(version) == ""
    assert "newer than every release" in unproven("2.16.0")
    assert "newer than every release" in unproven("3.0.1+cu130")
    assert "older than every release" in unproven("2.10.2")


def test_a_part_that_is_gone_is_told_at_start_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = types.ModuleType("torch_of_tomorrow")
    monkeypatch.setitem(sys.modules, "torch_of_tomorrow", there)
    gone = Part("torch_of_tomorrow", ("_gone",), "it does without")
    unused = Part("a_module.that_nobody_imported", ("_gone",), "it does without")
    monkeypatch.setattr(torch_internals, "PARTS", (gone, unused))
    monkeypatch.setattr(torch_internals, "SHOWN", ("1.0",))
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert train(tmp_path / "run", until=2).started_at == 0
    told = [record.message for record in caplog.records if "torch" in record.message]
    assert any("has no torch_of_tomorrow._gone" in line and "it does without" in line for line in told)
    assert any("newer than every release" in line for line in told)
    assert not any("nobody_imported" in line for line in told)


@pytest.mark.parametrize("fields", [5, 6])
def test_metadata_of_a_later_torch_is_read_by_an_earlier_one(
    fields: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.14 on the strides are a sixth field. A run that tried it must be able to go back."""
    chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([3]))
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([3]), [chunk])
    state = (*entry.properties.__getstate__()[:5], (1,))[:fields]
    with monkeypatch.context() as later:
        later.setattr(TensorProperties, "__getstate__", lambda _: state)
        data = pickle.dumps(Metadata(state_dict_metadata={"weight": entry}, storage_data={}))
    read = as_torch(parse(data)).state_dict_metadata["weight"]
    assert isinstance(read, TensorStorageMetadata)
    assert type(read.properties) is TensorProperties
    assert (read.properties.dtype, read.size, list(read.chunks)) == (torch.bfloat16, entry.size, entry.chunks)


def test_what_holdfast_cannot_do_without_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals._IMPORTED, "create_write_items", "torch.utils._pytree:_not_there")
    monkeypatch.delitem(torch_internals.__dict__, "create_write_items", raising=False)
    with pytest.raises(ImportError, match=r"has no _not_there in torch\.utils\._pytree.*2\.11, 2\.13, 2\.15"):
        torch_internals.create_write_items  # noqa: B018
