"""On the path of a writer process: it waits with what contains SLOW_HOLD until <out>/release is there.

The writer itself is the real one, started as it always is, so that the launcher knows it for what it is.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from holdfast.checkpoint.save import image

OUT = Path(os.environ["TINY_OUT"])
HOLD = os.environ.get("SLOW_HOLD", "")

write_image = image.write_image


def held(path: Path, *args: Any) -> Any:
    if HOLD and HOLD in str(path):
        rank = re.search(r"__(\d+)_", repr(args[1]))
        assert rank is not None
        (OUT / f"held-{rank[1]}").touch()
        deadline = time.monotonic() + 60
        while not (OUT / "release").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("nobody released the writer")
            time.sleep(0.01)
    return write_image(path, *args)


image.write_image = held
