"""Fronts: what a room offers to others, imported when it is first used.

A front is a package's `__init__`. It lists what outsiders may import under `if TYPE_CHECKING:`, once and
typed, and costs next to nothing to import: needing one name of a room does not cost the others, nor torch.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from importlib.abc import InspectLoader


def offers(package: str) -> Callable[[str], object]:
    """The `__getattr__` of the front of `package`."""
    homes: dict[str, tuple[str, str]] = {}

    def offer(name: str) -> object:
        if not homes:
            homes.update(listed(package))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, there = homes[name]
        home = importlib.import_module(module)
        return getattr(home, there) if there else home

    return offer


def listed(package: str) -> dict[str, tuple[str, str]]:
    """What the front of `package` lists: each name's module, and its name there, empty for a whole module."""
    spec = importlib.util.find_spec(package)
    loader = spec.loader if spec else None
    source = loader.get_source(package) if isinstance(loader, InspectLoader) else None
    if source is None:  # installed without sources: every module is asked
        return _by_looking(package)
    return {
        alias.asname or alias.name: _home(package, node.module, alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _home(package: str, module: str, name: str) -> tuple[str, str]:
    return (f"{package}.{name}", "") if module == package else (module, name)


def _by_looking(package: str) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for module in pkgutil.iter_modules(sys.modules[package].__path__, f"{package}."):
        if not module.ispkg:
            found |= {name: (module.name, name) for name in vars(importlib.import_module(module.name))}
    return found
