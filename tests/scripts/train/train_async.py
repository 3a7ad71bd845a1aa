"""train_tiny.py with asynchronous saves, whose writers are slow (slow_writer/sitecustomize.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HOLDFAST_CHECKPOINT_ASYNC_SAVE", "true")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import train_tiny

from holdfast.checkpoint.save import handoff as writer
from holdfast.process.companion import outliving

SLOW = str(Path(__file__).resolve().parent / "slow_writer")
WRITER = "holdfast.checkpoint.save.writer_process"


def spawn(descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", WRITER, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env={**outliving(WRITER), "PYTHONPATH": SLOW},
        start_new_session=True,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    writer.spawn = spawn
    sys.exit(train_tiny.main())
