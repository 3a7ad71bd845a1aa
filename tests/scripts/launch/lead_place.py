"""Lead a place: <run dir> <place> <linger> <towards>. Prints its address and its server's pid, and waits."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from holdfast.checkpoint.copies.peer_process import PeerHost, own_address
from holdfast.checkpoint.copies.tier import LocalTier
from holdfast.journal.writer import JournalWriter
from holdfast.record.directory import ControlDirectory

run_dir, place, linger, towards = sys.argv[1:]
control = ControlDirectory.open(Path(run_dir))
host = PeerHost(
    control=control,
    tier=LocalTier.at(Path(place)),
    attempt=1,
    journal=JournalWriter(control.journal, "leader", 1),
    host=own_address(towards),
    keep=2,
    linger=float(linger),
)
host.start()
print(*host.address, host.pid, flush=True)
time.sleep(120)
