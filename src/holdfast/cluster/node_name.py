"""What this node is called by everything that has to name it: the journal, exclusions, drains, the doctor."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def node_name(configured: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """The setting `launch.node_name`; else Slurm's name, by which it can be drained; else its host's."""
    return configured or environ.get("SLURMD_NODENAME", "") or socket.gethostname()
