"""Which stored tensor is which tracked one: the rule, and the user's own function (`checkpoint.names`).

The rule, in this order: what wrappers add to a name (`_orig_mod.` and the like) is left out; a name is taken
as it is; or all names have one and the same prefix more, or less, than the tracked ones (`model.`, `net.`,
`module.`). Megatron keeps what its layers have alike stacked under one name (`layers.mlp.weight`); it is
taken apart where the tracked model counts its layers (`layers.0.mlp.weight`).

Guarantee: nothing is guessed. Where two prefixes would do, or a function gives one name twice, it is refused;
what has no place in the model is named, unless the function says None for it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from holdfast.base import escaped
from holdfast.checkpoint.foreign.contents import ForeignTensor, StoredBox
from holdfast.errors import ConfigError, IncompleteStateError

NameFunction = Callable[[str], str | None]
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_STACKED = re.compile(r"(?P<before>(?:.*\.)?layers)\.(?P<after>(?!\d+\.).+)")
SETTING = "checkpoint.names"


def name_function(setting: str) -> NameFunction | None:
    """The function that `checkpoint.names` names, as package.module:function; None if it names none."""
    if not setting:
        return None
    module, _, function = setting.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{SETTING} = {setting!r} is not to be found: {error}. Name a function that can be imported "
            f"where "
            "the script runs, as package.module:function"
        ) from error
    if not callable(found):
        raise ConfigError(f"{SETTING} = {setting!r} is a {type(found).__name__}, and no function")
    wanted: NameFunction = found
    return wanted


def tracked_names(
    stored: Iterable[str],
    wanted: Collection[str],
    *,
    function: NameFunction | None = None,
    dispensable: Collection[str] = (),
) -> dict[str, str]:
    """For each stored name the tracked one that it stands for; one that the function leaves out is not in it.

    `wanted` are the names that the model has, of which it can do without the `dispensable` ones: they share
    their memory with others.
    """
    if function is not None:
        return _by_function(stored, function)
    bare = {name: _WRAPPERS.sub("", name) for name in stored}
    needed = [name for name in wanted if name not in dispensable] or list(wanted)
    there = set(bare.values())
    if all(name in there for name in needed):
        return bare
    found = [prefix for prefix in _prefixes(there, needed) if _fits(prefix, there, needed)]
    if len(found) > 1:
        raise IncompleteStateError(
            f"the stored names fit the model's in {len(found)} ways: {', '.join(map(_shown, found[:3]))}. "
            f"Say "
            f"which with a function of your own: {SETTING} = 'package.module:function'"
        )
    if not found:
        return bare
    (less, more) = found[0]
    return {
        name: more + one.removeprefix(less) if one.startswith(less) else one for name, one in bare.items()
    }


Prefix = tuple[str, str]
"""What stored names have more than the tracked ones, and what less; one of the two is empty."""


def _prefixes(there: Collection[str], needed: Collection[str]) -> list[Prefix]:
    """Those that would do for the longest name, which fits by chance least."""
    probe = max(needed, key=lambda name: (name.count("."), len(name), name), default="")
    found = {(name.removesuffix(probe), "") for name in there if name.endswith(f".{probe}")}
    parts = probe.split(".")
    for at in range(1, len(parts)):
        if ".".join(parts[at:]) in there:
            found.add(("", ".".join(parts[:at]) + "."))
    return sorted(found)


def _fits(prefix: Prefix, there: Collection[str], needed: Collection[str]) -> bool:
    less, more = prefix
    if more:
        return all(name.startswith(more) and name.removeprefix(more) in there for name in needed)
    return all(less + name in there for name in needed)


def _shown(prefix: Prefix) -> str:
    less, more = prefix
    return f"without {escaped(less)!r}" if less else f"with {escaped(more)!r}"


def _by_function(stored: Iterable[str], function: NameFunction) -> dict[str, str]:
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in stored:
        answer = function(name)
        if answer is None:
            continue
        if not isinstance(answer, str):
            raise ConfigError(
                f"{SETTING}: the function answered {answer!r:.100} for {escaped(name)!r}; it must answer a "
                "name, or None for what is to be left out"
            )
        if answer in taken:
            raise ConfigError(
                f"{SETTING}: the function gives {escaped(answer)!r} to {escaped(taken[answer])!r} and to "
                f"{escaped(name)!r}; a name stands for one tensor"
            )
        taken[answer] = name
        found[name] = answer
    return found


def unstacked(entries: Mapping[str, ForeignTensor], wanted: Collection[str]) -> dict[str, ForeignTensor]:
    """Layers that are stacked under one name, each under its own, if the tracked model counts its layers."""
    if not any(re.search(r"(?:^|\.)layers\.\d+\.", name) for name in wanted):
        return dict(entries)
    found: dict[str, ForeignTensor] = {}
    for name, entry in entries.items():
        match = _STACKED.fullmatch(name)
        if match is None or not entry.shape:
            found[name] = entry
            continue
        for layer in range(entry.shape[0]):
            found[f"{match['before']}.{layer}.{match['after']}"] = _layer(entry, layer)
    return found


def _layer(entry: ForeignTensor, layer: int) -> ForeignTensor:
    boxes = [
        StoredBox(
            box.offsets[1:], box.sizes[1:], box.file, box.start, box.stride, box.length,
            layer - box.offsets[0],
        )
        for box in entry.boxes
        if box.offsets[0] <= layer < box.offsets[0] + box.sizes[0]
    ]  # fmt: skip
    return ForeignTensor(entry.shape[1:], entry.dtype, tuple(boxes))
