"""Send a copy to a peer: <host> <port> <run dir> <place> <checkpoint> <rank> <files as JSON> <seconds>."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from holdfast.checkpoint.local_tier import LocalTier
from holdfast.checkpoint.manifest import FileEntry
from holdfast.checkpoint.peer_send import send_replica
from holdfast.control.directory import ControlDirectory

host, port, run_dir, place, checkpoint, rank, files, seconds = sys.argv[1:]
tier = LocalTier.at(Path(place))
record = tier.find(checkpoint, int(rank))
assert record is not None
print(
    send_replica(
        (host, int(port)),
        ControlDirectory.open(Path(run_dir)),
        tier,
        record,
        msgspec.json.decode(files, type=list[FileEntry]),
        deadline=time.monotonic() + float(seconds),
    )
)
