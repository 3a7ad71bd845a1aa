"""safetensors, read without the library: the same tensors as the library's, and nothing odd is believed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from holdfast.checkpoint.foreign.archive import TensorFileError, merged, read_index, read_tensor_file
from holdfast.checkpoint.foreign.source import values_of
from kit.worlds import foreign

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1, 2], dtype=torch.int64),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "small": torch.ones(4).to(torch.float8_e5m2),
    "flag": torch.tensor(True),
    "none": torch.empty(0, 2),
}


def test_the_tensors_are_those_that_the_library_reads(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors", metadata={"format": "pt"})
    found, library = read_tensor_file(tmp_path / "one.safetensors"), load_file(tmp_path / "one.safetensors")
    assert found.keys() == library.keys()
    for name, stored in found.items():
        tensor = values_of(stored, name)
        assert (tensor.dtype, tensor.shape) == (library[name].dtype, library[name].shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), library[name].reshape(-1).view(torch.uint8))


def rewritten(path: Path, change: Any) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda header: header["b"].update(dtype="Q7"), "Q7, which is not known here"),
        (lambda header: header["b"].update(shape=[3]), "has 16 bytes"),
        (lambda header: header["b"].update(shape=[-2]), "no shape"),
        (lambda header: header["b"].update(data_offsets=[8, 24]), "overlaps|belong to none"),
        (lambda header: header["b"].update(data_offsets=[10**6, 10**6 + 16]), "cut off"),
        (lambda header: header.update(b=7), "not described"),
        (lambda header: header.pop("b"), "belong to none|the file has"),
    ],
)
def test_a_header_that_does_not_fit_the_bytes_is_refused(change: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file(TENSORS, path)
    rewritten(path, change)
    with pytest.raises(TensorFileError, match=why):
        read_tensor_file(path)


@pytest.mark.parametrize("length", [0, 4, 20, 200])
def test_a_file_that_was_cut_off_is_refused(length: int, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors")
    os.truncate(tmp_path / "one.safetensors", length)
    with pytest.raises(TensorFileError):
        read_tensor_file(tmp_path / "one.safetensors")


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors")
    with (tmp_path / "one.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(TensorFileError, match=r"its tensors end at byte .*, the file has"):
        read_tensor_file(tmp_path / "one.safetensors")


def test_a_header_of_any_length_is_not_read_into_memory(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(TensorFileError, match="its header alone"):
        read_tensor_file(tmp_path / "one.safetensors")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=300))
def test_any_bytes_are_refused_in_words(tail: bytes, tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(len(tail).to_bytes(8, "little") + tail)
    if tail.strip() in (b"{}", b'{"__metadata__":{}}'):
        return
    with pytest.raises(TensorFileError):
        read_tensor_file(tmp_path / "one.safetensors")


def test_an_index_that_leads_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"w": "../elsewhere.safetensors"}}))
    with pytest.raises(TensorFileError, match="outside the directory"):
        read_index(tmp_path / "index.json")


def test_what_an_index_promises_and_a_file_lacks_is_named(tmp_path: Path) -> None:
    path = foreign.hf_model(tmp_path)
    index = read_index(path / "model.safetensors.index.json")
    (path / "model-00002-of-00004.safetensors").unlink()
    save_file({"other": torch.ones(1)}, path / "model-00003-of-00004.safetensors")
    found, problems = merged(path, index)
    assert sorted(found) == ["0.weight", "2.bias"]
    assert [name for name, _ in problems] == [f"model-0000{n}-of-00004.safetensors" for n in (2, 3)]
    assert "places 2.weight in it, and it is not there" in problems[1][1]
