"""Fronts: what a room offers to others, imported when it is first used.

A front is a package's `__init__`. It lists what outsiders may import under `if TYPE_CHECKING:`, once and
typed, and costs next to nothing to import: needing one name of a room does not cost the others, nor torch.

The imports that do cost something are torch's and, with it, that of `holdfast.run`. When they took place is
noted here, for the account of a restart: by a finder that finds nothing, and so changes nothing about them.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import pkgutil
import sys
import threading
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


OURS = "holdfast.run"
"""What a script imports of Holdfast. It brings most of our modules, and many of torch's."""


SLOW = 0.1
"""Seconds from which on an import is worth noting."""


class ImportWatch(MetaPathFinder):
    """Notes when torch and Holdfast are imported, and what else takes long, from what they import themselves:
    the last of that is a few milliseconds before the end."""

    def __init__(self) -> None:
        self.torch_at = time.time() if "torch" in sys.modules else 0.0
        """When torch had been imported, in seconds since 1970; 0 while it has not. If it was there first:
        from then on."""
        self.ours_from = self.ours_at = 0.0
        """When the import of Holdfast's modules began, and when they had been imported."""
        self._outermost = ""
        """The module whose import is not part of another one's, the last that there was."""
        self._began = self._seen = 0.0
        self._slow: dict[str, tuple[float, float]] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Python's finder interface: another finder has to find it."""
        del path, target
        now = time.time()
        if name == OURS:
            self.ours_from = self.ours_at = now
        elif name.startswith("torch.") and _is_being_imported("torch"):
            self.torch_at = now
        if _is_being_imported(OURS):
            self.ours_at = now
        if threading.current_thread() is not threading.main_thread():
            return
        if not _is_being_imported(self._outermost):
            self._keep()
            self._outermost, self._began = name, now
        self._seen = now

    def _keep(self) -> None:
        if self._outermost and self._seen - self._began >= SLOW:
            self._slow[self._outermost] = (self._began, self._seen - self._began)

    def take_slow(self, since: float) -> dict[str, float]:
        """What else has taken long since then and was not taken yet: the module and its seconds."""
        self._keep()
        self._outermost, found, self._slow = "", self._slow, {}
        return {
            name: seconds
            for name, (began, seconds) in found.items()
            if began >= since and name not in ("torch", OURS)
        }


def _is_being_imported(name: str) -> bool:
    with contextlib.suppress(Exception):  # what stands for a module may do anything when it is asked
        return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))
    return False


def watch_imports() -> None:
    """From here on, it is noted when torch and Holdfast are imported in this process."""
    sys.meta_path.insert(0, ImportWatch())


def seen_imports() -> ImportWatch | None:
    """What was noted; None if nothing was."""
    return next((finder for finder in sys.meta_path if isinstance(finder, ImportWatch)), None)


def _by_looking(package: str) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for module in pkgutil.iter_modules(sys.modules[package].__path__, f"{package}."):
        if not module.ispkg:
            found |= {name: (module.name, name) for name in vars(importlib.import_module(module.name))}
    return found
