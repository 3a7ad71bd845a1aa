"""The devices of a node, by the names that its environment gives them; on a CPU such names are stand-ins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.policy.rejection import Place
from holdfast.policy.rotation import device_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEV = Path("/dev")


def visible_devices(environ: Mapping[str, str] = os.environ, dev: Path = _DEV) -> list[str]:
    """The devices of this node as its workers see them, in that order; none on a CPU."""
    given = environ.get(VISIBLE)
    if given is not None:
        return [device.strip() for device in given.split(",") if device.strip()]
    found = [path.name.removeprefix("nvidia") for path in dev.glob("nvidia[0-9]*")]
    return sorted((name for name in found if name.isdigit()), key=int)


def own_place(node: str, environ: Mapping[str, str] = os.environ) -> Place:
    """Where this worker runs, as the launcher names it."""
    return Place(node, device_of(visible_devices(environ), int(environ.get("LOCAL_RANK", "0"))))
