"""Send a copy to a peer: <host> <port> <run dir> <place> <checkpoint> <rank> <files as JSON> <seconds>."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from holdfast.checkpoint.copies.peers import send_replica
from holdfast.checkpoint.copies.tier import LocalTier
from holdfast.checkpoint.format.manifest import FileEntry
from holdfast.record.directory import ControlDirectory

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
