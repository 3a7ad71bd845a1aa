"""Another project's checkpoint becomes one of ours, in a run of its own: `holdfast ckpt import`.

Guarantee: what is committed is what was stored, part for part, or nothing is: a part that cannot be carried
over without the script that it is of (an optimizer that numbers its parameters) is refused by its name,
unless it was not asked for. The source is only read. The new checkpoint goes the way of every save, so it has
digests.

It is done by a run of one rank whose tracked objects are stand-ins: modules that have the stored tensors and
do nothing, an optimizer that never steps.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from holdfast.checkpoint.foreign import Contents, ForeignPart, Recognised


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """The committed checkpoint."""
    step: int
    source: str
    layout: str
    parts: list[str]
    notes: list[str] = []
    passed_over: list[str] = []
    """Newer ones that are not sound, and why."""


def convert(source: Path, run_dir: Path, *, parts: list[str], names: str = "") -> Imported:
    """Commit what `source` holds as the first checkpoint of a new run."""
    from holdfast import Run
    from holdfast.checkpoint.foreign import ForeignError, read_contents
    from holdfast.errors import CheckpointError, UsageError

    if run_dir.exists() and any(run_dir.iterdir()):
        raise UsageError(f"{run_dir} is not empty; give a directory for a run of its own")
    recognised, passed_over = _newest_sound(source)
    try:
        contents = read_contents(recognised)
    except ForeignError as error:
        raise CheckpointError(f"{recognised.path} is not sound, nothing was imported: {error}") from error
    chosen, notes = _chosen(contents, parts)
    tracked = _stand_ins(contents, chosen, names)
    left = [name for name in contents.parts if name not in chosen]
    run = Run(
        run_dir=run_dir,
        checkpoint_resume_from=str(recognised.path.absolute()),
        checkpoint_names=names,
        checkpoint_fresh_parts=",".join(name for name in left if contents.parts[name].kind != "dataloader"),
    )
    try:
        try:
            run.track(**tracked)
            run.start()
            name = run.save(reason="imported")
        finally:
            run.close()
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)  # there was nothing in it before
        raise
    path = run.settings.checkpoint_root() / str(name)
    return Imported(
        path=str(path), step=name.step, source=str(recognised.path), layout=str(recognised.layout),
        parts=list(chosen), notes=[*notes, *contents.notes], passed_over=passed_over,
    )  # fmt: skip


def _newest_sound(source: Path) -> tuple[Recognised, list[str]]:
    """The newest that is sound, and why those above it are not."""
    from holdfast.checkpoint.foreign import checkpoints_in, examine, recognise
    from holdfast.errors import CheckpointError, UsageError

    one = recognise(source)
    found = [one] if one is not None else checkpoints_in(source) if source.is_dir() else []
    if not found:
        raise UsageError(
            f"{source} is no checkpoint of another project that is known here, and holds none; "
            "docs/guides/other-layouts.md lists the layouts"
        )
    told: list[str] = []
    for candidate in found:
        inspection, _ = examine(candidate)
        if inspection.sound:
            return candidate, told
        told.append(f"{candidate.path}: {inspection.problems[0]}")
    shown = "\n  ".join(told)
    raise CheckpointError(f"nothing was imported: no checkpoint in {source} is sound:\n  {shown}")


def _chosen(contents: Contents, asked: list[str]) -> tuple[dict[str, ForeignPart], list[str]]:
    from holdfast.errors import IncompleteStateError, UsageError

    notes: list[str] = []
    carried = {name: part for name, part in contents.parts.items() if part.kind not in ("rng", "dataloader")}
    if unknown := sorted(set(asked) - carried.keys()):
        raise UsageError(f"there is no part {unknown[0]!r}; it holds {', '.join(carried)}")
    for name, part in contents.parts.items():
        if part.kind in ("rng", "dataloader"):
            notes.append(f"{name} is not carried over: it is of the ranks and the loader that saved it")
    chosen = {name: part for name, part in carried.items() if not asked or name in asked}
    if own := [name for name, part in chosen.items() if part.of_ranks > 1]:
        ranks = chosen[own[0]].of_ranks
        raise IncompleteStateError(
            f"{contents.recognised.path} ({contents.recognised.layout}): each of {ranks} ranks keeps "
            f"{own[0]} for itself, and an import has one rank. Begin a run of {ranks} ranks with "
            "checkpoint.resume_from: its first save is verified"
        )
    if odd := [name for name in [*chosen, *carried] if not name.isidentifier()]:
        raise UsageError(f"the part {odd[0]!r} has a name that nothing can be tracked by")
    if not any(part.kind == "model" for part in chosen.values()):
        raise UsageError("without weights there is nothing to begin from: take a model with --part")
    return chosen, notes


def _stand_ins(contents: Contents, chosen: Mapping[str, ForeignPart], names: str) -> dict[str, Any]:
    """Something to track for each part, that has what is stored and does nothing."""
    models = {name: _module(name, part, names) for name, part in chosen.items() if part.kind == "model"}
    parameters = {name: one for model in models.values() for name, one in model.named_parameters()}
    found: dict[str, object] = dict(models)
    for name, part in chosen.items():
        if part.kind == "optimizer":
            found[name] = _optimizer(name, part, contents, names, parameters)
        elif part.kind != "model":
            found[name] = KeptState()
    return found


class KeptState:
    """Keeps a state as it was given."""

    def __init__(self) -> None:
        self._state: Any = {}

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any, /) -> None:
        self._state = state


def _renamed(stored: Iterable[str], names: str) -> dict[str, str]:
    from holdfast.checkpoint.foreign import name_function, tracked_names

    function, stored = name_function(names), list(stored)
    return tracked_names(stored, stored, function=function) if function else {one: one for one in stored}


def _module(name: str, part: ForeignPart, names: str) -> nn.Module:
    """Modules in modules, as the names say, with the tensors in them."""
    import torch
    from torch import nn

    from holdfast.errors import UsageError

    root = nn.Module()
    for stored, tracked in _renamed(part.tensors, names).items():
        *folders, leaf = tracked.split(".")
        here = root
        for folder in folders:
            if folder not in here._modules:
                here.add_module(folder, nn.Module())
            here = here.get_submodule(folder)
        entry = part.tensors[stored]
        tensor = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
        try:
            if tensor.is_floating_point() or tensor.is_complex():
                here.register_parameter(leaf, nn.Parameter(tensor))
            else:
                here.register_buffer(leaf, tensor)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{name}: {tracked!r} cannot be the name of a tensor: {error}") from error
    return root


def _optimizer(
    name: str, part: ForeignPart, contents: Contents, names: str, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer over the stand-ins' parameters, in the groups that were saved; it never steps."""
    from torch.optim import Optimizer

    from holdfast.errors import IncompleteStateError

    groups = _groups(part)
    if groups is None:
        others = [one for one, other in contents.parts.items() if other.kind not in ("optimizer", "rng")]
        raise IncompleteStateError(
            f"{contents.recognised.path} ({contents.recognised.layout}): {name} does not name its "
            f"parameters, "
            "or has no hyper-parameters with them, so only the script that it is of can tell whose state is "
            "whose. Begin that run with checkpoint.resume_from: its first save is verified. Or take the "
            "other "
            f"parts alone: {' '.join(f'--part {one}' for one in others)}"
        )
    renamed = _renamed(dict.fromkeys(one for members, _ in groups for one in members), names)
    listed: list[dict[str, Any]] = [
        {"params": [parameters[renamed[one]] for one in members if renamed.get(one) in parameters], **values}
        for members, values in groups
    ]
    return Optimizer([group for group in listed if group["params"]], {})


def _groups(part: ForeignPart) -> list[tuple[list[str], dict[str, Any]]] | None:
    """The parameter groups, if they name their parameters: (names, hyper-parameters)."""
    from holdfast.checkpoint.foreign import values_of

    saved = part.tree["param_groups"]
    if part.beside or any(type(one) is int for one in part.tree["state"]):
        return None
    if isinstance(saved, dict):  # torchtitan: for each parameter by its name
        found: list[tuple[list[str], dict[str, Any]]] = []
        for one, stored in saved.items():
            values = values_of(stored, "param_groups")
            same = next((members for members, others in found if others == values), None)
            if same is None:
                found.append(([one], values))
            else:
                same.append(one)
        return found
    if not isinstance(saved, list):
        return None
    listed = [group for group in saved if isinstance(group, dict)]
    if not all(type(one) is str for group in listed for one in group.get("params", [None])):
        return None
    return [
        (
            list(group["params"]),
            values_of({k: v for k, v in group.items() if k not in ("params", "param_names")}, "param_groups"),
        )
        for group in listed
    ]
