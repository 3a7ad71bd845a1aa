"""How a process of our own is started: without importing anything from the directory it happens to be in.

Guarantee: what lies in the current directory (an `xxhash.py` in somebody's project, or one that was planted
there) is never imported by a child of ours. `python -m` alone puts that directory first on the path, and `-P`
keeps it away. PYTHONPATH is kept: it is how an installation may be found, and its owner chose it. A
training script keeps the path that `python SCRIPT` gives it.
"""

from __future__ import annotations

import sys


def own_child(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules."""
    return [sys.executable, "-P", "-m", module, *arguments]
