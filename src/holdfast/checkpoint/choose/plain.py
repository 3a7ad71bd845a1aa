"""A directory of checkpoints that no run of ours keeps a record of: another project's, or what is left of a
run.

Without a record there is no lineage, and no standing except what was written down beside a checkpoint;
without a manifest there are no digests. What can be checked is checked all the same: names, sizes and chunks
against `.metadata`; the check sums that torch.save puts into every item; that each tensor has as many bytes
as it should, and that its values are numbers. Layouts other than plain DCP are judged in `foreign`.

Guarantee: reads only, follows no link, unpickles nothing, needs no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.checkpoint.foreign import (
    ForeignLayout,
    check_values,
    checkpoints_in,
    examine,
    recognise,
    step_told,
)
from holdfast.checkpoint.format import (
    MANIFEST,
    MARKER,
    Inspection,
    Progress,
    check_structure,
    checkpoints_under,
    parse_name,
    verify,
)
from holdfast.errors import UsageError

_STEP = re.compile(r"(?:[a-z_]*?(?:step|iter|iteration|checkpoint|ckpt|epoch))[-_]?(\d{1,12})(?:\D.*)?", re.I)


def is_plain_root(directory: Path) -> bool:
    """Whether this holds checkpoints but no run: a directory of `step_*`, or itself one checkpoint."""
    if directory.is_file():
        return is_checkpoint(directory)
    if not directory.is_dir() or (directory / "run.json").exists():
        return False
    if is_checkpoint(directory) or (directory / MARKER).exists():
        return True
    return any(not _is_loose(path) for path in directories(directory))


def _is_loose(path: Path) -> bool:
    """Weights that lie about, in a directory where a run may be meant to begin: no checkpoint of a series."""
    found = recognise(path)
    loose = (ForeignLayout.TORCH_FILE, ForeignLayout.HF_MODEL)
    return found is not None and found.layout in loose and found.step is None


def is_checkpoint(directory: Path) -> bool:
    """Whether a path is itself one checkpoint: a directory, or a file as some projects have it."""
    return (directory / MANIFEST).exists() or recognise(directory) is not None


def directories(root: Path) -> list[Path]:
    """What is meant to be a checkpoint, the highest step first; a link does not count."""
    try:
        others = checkpoints_in(root)
        named = [
            entry
            for entry in root.iterdir()
            if _STEP.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
        ]
        found = {*named, *checkpoints_under(root), *(one.path for one in others)}
    except OSError as error:
        raise UsageError(
            f"the checkpoint root {root} cannot be read: {error.strerror or error}. "
            "Check its file system and your permissions, then try again"
        ) from error
    return sorted(found, key=lambda path: (step_of(path) or 0, path.name), reverse=True)


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name claims, or that it tells itself; None if neither does."""
    ours = parse_name(path.name)
    if ours is not None:
        return ours.step
    foreign = recognise(path)
    if foreign is not None and foreign.layout is not ForeignLayout.DCP:
        return step_told(foreign)
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


# --- one checkpoint ----------------------------------------------------------------------------------------


def inspect(
    path: Path, *, quick: bool = False, progress: Progress | None = None
) -> tuple[Inspection, list[str]]:
    """What is wrong with a checkpoint, and what was checked: all that can be, or only names and sizes."""
    foreign = recognise(path)
    if foreign is not None and foreign.layout is not ForeignLayout.DCP:
        return examine(foreign, quick=quick, progress=progress)
    inspection = check_structure(path)
    if inspection.problems:
        return inspection, []
    if inspection.manifest is not None:
        if quick:
            return inspection, ["names and sizes fit; digests were not read"]
        return verify(path, progress=progress), ["every digest matched"]
    if quick:
        return inspection, ["complete by its metadata; no value was looked at, and it has no digests"]
    values = check_values(inspection, progress)
    notes = [f"complete by its metadata; the check sums of {values.items} items match; it has no digests"]
    if values.unread:
        notes.append(f"{values.unread} items have no check sum that is known here, and were not read")
    return inspection, [*notes, *values.notes]
