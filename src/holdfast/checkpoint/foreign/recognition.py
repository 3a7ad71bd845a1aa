"""Which layout a path has, and which checkpoints of other projects lie in a directory, newest first.

Guarantee: names and the beginnings of files decide; nothing is unpickled, no torch is needed, nothing is
changed, and no pointer is believed: `latest` and `latest_checkpointed_iteration.txt` are hints that are told.
What is recognised may still be incomplete or damaged; `soundness` says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.base import escaped, read_regular
from holdfast.checkpoint.foreign.archive import LEGACY, ZIP
from holdfast.checkpoint.format import MANIFEST, METADATA, STAGING, TRASH, parse_name

TRACKER = "latest_checkpointed_iteration.txt"
WEIGHTS = (
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin",
    "adapter_model.safetensors",
)  # fmt: skip
"""Where a Hugging Face directory keeps its weights; the first that is there counts."""
_FILES = (".ckpt", ".pt", ".pth", ".bin")
_NUMBER = re.compile(
    r"(?:^|[^0-9a-z])(?:step|iter|iteration|checkpoint|ckpt|global_step)[-_=]?0*(\d{1,12})", re.I
)
_LOCAL = re.compile(r"iter_(\d{7})_(\d+)_local\.pt")
_ITERATION = re.compile(r"iter_\d{7}")


class ForeignLayout(StrEnum):
    DCP = "plain DCP"
    TORCHTITAN = "torchtitan"
    KEMPNER_FORGE = "KempnerForge"
    MEGATRON = "Megatron"
    MEGATRON_LOCAL = "Megatron local"
    HF_TRAINER = "Hugging Face Trainer"
    HF_MODEL = "Hugging Face model"
    LIGHTNING = "Lightning"
    TORCH_FILE = "torch file"


class Recognised(NamedTuple):
    """Something that is meant to be a checkpoint of another project's."""

    path: Path
    """A directory or a file; of what each rank keeps in a file of its own, the lowest rank's."""
    layout: ForeignLayout
    step: int | None
    """As its name says it; None if that says nothing."""

    @property
    def name(self) -> str:
        return self.path.name


def recognise(path: Path) -> Recognised | None:
    """What a path is, if it is one checkpoint of another project's; None for ours and for anything else."""
    try:
        path = path.resolve() if path.is_symlink() else path
        if path.is_dir():
            layout = _directory(path)
        elif path.is_file():
            layout = _file(path)
        elif rank_files(path):  # rank 0's file, which is on another node
            layout = ForeignLayout.MEGATRON_LOCAL
        else:
            return None
    except OSError:
        return None
    return Recognised(path, layout, step_named(path)) if layout is not None else None


def checkpoints_in(directory: Path) -> list[Recognised]:
    """What lies directly in a directory, newest first. Links are left out, and so are hidden names."""
    found: list[Recognised] = []
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(".") or entry.name in (STAGING, TRASH) or entry.is_symlink():
            continue
        if entry.is_dir() and entry.name.isdecimal():
            found += _locals(entry)
        elif not _LOCAL.fullmatch(entry.name) and (one := recognise(entry)) is not None:
            found.append(one)
    found += _locals(directory)
    unique: dict[object, Recognised] = {}
    for one in found:
        # Of what each rank keeps in a file of its own, the lowest rank's stands for all.
        key = (one.step,) if one.layout is ForeignLayout.MEGATRON_LOCAL else one.path
        unique.setdefault(key, one)
    return sorted(unique.values(), key=lambda one: (_order(one), one.name), reverse=True)


def _order(one: Recognised) -> int:
    """A file is read for its step, whatever its name says (`last.ckpt`)."""
    from holdfast.checkpoint.foreign.contents import step_told  # it builds on this

    step = step_told(one)
    return step if step is not None else -1


def _locals(directory: Path) -> list[Recognised]:
    """Megatron's local checkpoints in a directory; each rank may have one of its own."""
    found = [
        (int(match[2]), Recognised(entry, ForeignLayout.MEGATRON_LOCAL, int(match[1])))
        for entry in directory.iterdir()
        if (match := _LOCAL.fullmatch(entry.name)) and entry.is_file() and not entry.is_symlink()
    ]
    lowest: dict[int | None, Recognised] = {}
    for _, one in sorted(found, key=lambda item: item[0]):
        lowest.setdefault(one.step, one)
    return list(lowest.values())


def rank_files(path: Path) -> dict[int, Path]:
    """Of a Megatron local checkpoint: every rank's file that is here, by rank."""
    match = _LOCAL.fullmatch(path.name)
    if match is None:
        return {}
    prefix = f"iter_{match[1]}_"
    folders = [path.parent]
    if path.parent.name.isdecimal():
        with contextlib.suppress(OSError):
            folders = [one for one in path.parent.parent.iterdir() if one.name.isdecimal() and one.is_dir()]
    found: dict[int, Path] = {}
    for folder in folders:
        for entry in folder.glob(f"{prefix}*_local.pt"):
            if here := _LOCAL.fullmatch(entry.name):
                found.setdefault(int(here[2]), entry)
    return dict(sorted(found.items()))


def _directory(path: Path) -> ForeignLayout | None:
    names = set(os.listdir(path))
    if MANIFEST in names or parse_name(path.name) is not None:
        return None
    is_dcp = METADATA in names or any(name.endswith(".distcp") for name in names)
    about = read_json(path / "metadata.json") if "metadata.json" in names else {}
    if "sharded_backend" in about or "common.pt" in names or (is_dcp and _ITERATION.fullmatch(path.name)):
        return ForeignLayout.MEGATRON
    if "train_state.pt" in names or (is_dcp and "tokens_seen" in about) or "pp0" in names:
        return ForeignLayout.KEMPNER_FORGE
    if is_dcp:
        return (
            ForeignLayout.TORCHTITAN
            if re.fullmatch(r"step-\d+", path.name) and _is_titan(path)
            else ForeignLayout.DCP
        )
    if "trainer_state.json" in names or (
        re.fullmatch(r"checkpoint-\d+", path.name) and names & {*WEIGHTS, "optimizer.pt"}
    ):
        return ForeignLayout.HF_TRAINER
    if names & set(WEIGHTS):
        return ForeignLayout.HF_MODEL
    return None


def _is_titan(path: Path) -> bool:
    """torchtitan keeps its model's tensors at the top, without a part's name before them."""
    from holdfast.checkpoint.format import MetadataError
    from holdfast.checkpoint.format import metadata as metadatas

    try:
        meta = metadatas.read(path)
    except MetadataError:
        return True
    weights_alone = not meta.objects and any(name.startswith("layers.") for name in meta.tensors)
    return weights_alone or "train_state.step" in meta.objects


def _file(path: Path) -> ForeignLayout | None:
    if _LOCAL.fullmatch(path.name):
        return ForeignLayout.MEGATRON_LOCAL
    if path.suffix == ".ckpt":
        return ForeignLayout.LIGHTNING
    if path.suffix == ".safetensors":
        return ForeignLayout.HF_MODEL
    with path.open("rb") as stream:
        beginning = stream.read(len(LEGACY))
    is_archive = beginning.startswith(ZIP) or beginning == LEGACY
    return ForeignLayout.TORCH_FILE if is_archive or (path.suffix in _FILES and not beginning) else None


def step_named(path: Path) -> int | None:
    """The step that a name claims: `step-40`, `iter_0000040`, `checkpoint-40`, `epoch=1-step=40.ckpt`."""
    found = _NUMBER.findall(path.name)
    return int(found[-1]) if found else None


def hints(directory: Path, found: Iterable[Recognised]) -> list[str]:
    """What pointers in a directory say, where they name another than the newest that is here."""
    newest = next(iter(found), None)
    told: list[str] = []
    with contextlib.suppress(OSError):
        word = read_regular(directory / TRACKER, 4096).decode("utf-8", "replace").strip()
        named = "release" if word == "release" else f"iter_{int(word):07d}" if word.isdecimal() else None
        if named is None:
            told.append(f"{TRACKER} holds neither a number nor `release`: {escaped(word)!r}")
        elif newest is None or newest.name != named:
            told.append(f"{TRACKER} names {named}")
    with contextlib.suppress(OSError):
        link = directory / "latest"
        if link.is_symlink() and (newest is None or link.readlink().name != newest.name):
            told.append(f"the link `latest` names {escaped(link.readlink().name)}")
    return told


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object beside a checkpoint; empty if it is none."""
    try:
        found = json.loads(read_regular(path, 64 * 1024 * 1024))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
