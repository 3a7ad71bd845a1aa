"""Fronts: what a room offers to others, imported when it is first used.

A front is a package's `__init__`. It lists what outsiders may import under `if TYPE_CHECKING:`, once and
typed, and costs next to nothing to import: needing one name of a room does not cost the others, nor torch.

The import that does cost something is torch's. When it was over is noted here, for the account of a restart:
by a finder that finds nothing, and so changes nothing about any import.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
import time
from collections.abc import Callable
from importlib.abc import InspectLoader, MetaPathFinder


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


class TorchWatch(MetaPathFinder):
    """Notes when torch was last seen to import a part of itself, which ends a few milliseconds before its own
    import does."""

    def __init__(self) -> None:
        self.at = time.time() if "torch" in sys.modules else 0.0
        """In seconds since 1970; 0 while torch has not been imported. If it was there first: from then on."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Python's finder interface: another finder has to find it."""
        del path, target
        if name.startswith("torch."):
            spec = getattr(sys.modules.get("torch"), "__spec__", None)
            if getattr(spec, "_initializing", False):
                self.at = time.time()


def watch_torch() -> None:
    """From here on, it is noted when torch is imported in this process."""
    sys.meta_path.insert(0, TorchWatch())


def torch_imported_at() -> float:
    """When torch had been imported, in seconds since 1970, as far as was seen; 0 if that is not known."""
    return max((finder.at for finder in sys.meta_path if isinstance(finder, TorchWatch)), default=0.0)


def _by_looking(package: str) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for module in pkgutil.iter_modules(sys.modules[package].__path__, f"{package}."):
        if not module.ispkg:
            found |= {name: (module.name, name) for name in vars(importlib.import_module(module.name))}
    return found
