"""What a run is made of: versions of code, settings and libraries, and what changed since a checkpoint."""

from __future__ import annotations

import logging
import platform
import sys
from pathlib import Path

import torch

from holdfast import config, torch_internals
from holdfast._version import __version__
from holdfast.checkpoint.manifest import Versions, digest_bytes
from holdfast.journal.events import Warned
from holdfast.worker.membership import Membership

log = logging.getLogger("holdfast")


def current_versions(settings: config.Settings) -> Versions:
    return Versions(
        holdfast=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        code=_code_digest(),
        config=config.digest(settings),
    )


def tell_doubts(member: Membership) -> None:
    """Say what this torch lacks that Holdfast needs, or that nobody has tried Holdfast on it."""
    version = str(torch.__version__)
    for told in filter(None, [torch_internals.unproven(version), *torch_internals.missing()]):
        log.warning("holdfast: %s", told)
        member.journal.write(Warned(message=told))


def changes_since(then: Versions, now: Versions) -> list[str]:
    """Pure: in words, one entry a change. What either side does not know is not a change."""
    found = [
        f"{what} {before} → {after}"
        for what, before, after in (
            ("torch", then.torch, now.torch),
            ("Python", then.python, now.python),
            ("holdfast", then.holdfast, now.holdfast),
        )
        if before and after and before != after
    ]
    if then.code and now.code and then.code != now.code:
        found.append("the main script is another")
    if then.config and now.config and then.config != now.config:
        found.append("the settings are others")
    return found


def _code_digest() -> str:
    """Digest of the main script; empty where there is none."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return digest_bytes(Path(main).read_bytes()) if main else ""
    except OSError:
        return ""
