"""A writer process that waits with what contains SLOW_HOLD in its path until <out>/release is there."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.checkpoint import writer_process

OUT = Path(os.environ["TINY_OUT"])
HOLD = os.environ.get("SLOW_HOLD", "")

write_image = writer_process.write_image


def held(path: Path, image: memoryview, layout: Any, *args: Any) -> Any:
    if HOLD and HOLD in str(path):
        rank = re.search(r"__(\d+)_", repr(layout))
        assert rank is not None
        (OUT / f"held-{rank[1]}").touch()
        deadline = time.monotonic() + 60
        while not (OUT / "release").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("nobody released the writer")
            time.sleep(0.01)
    return write_image(path, image, layout, *args)


writer_process.write_image = held
sys.exit(writer_process.main(int(sys.argv[1])))
