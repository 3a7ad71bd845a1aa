"""What a rank leaves behind when an exception ends it: the error file, and the documented exit code.

torch's launcher names an error file for each rank but only functions wrapped with its decorator write one,
with times in whole seconds. This hook writes it for any uncaught exception, before anything else can hang, in
the same form and with the exact time. An error raised on purpose also becomes its own exit code.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from holdfast.errors import HoldfastError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class CrashHook:
    """Goes before the present excepthook; `on_crash` is told, if given, once the error file is written."""

    def __init__(self, on_crash: Callable[[BaseException], None] | None = None) -> None:
        self._on_crash = on_crash
        self._previous: Hook = sys.excepthook
        self._own: Hook = self._hook
        sys.excepthook = self._own

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        write_error_file(error)
        if self._on_crash is not None:
            self._on_crash(error)
        self._previous(kind, error, trace)
        if isinstance(error, HoldfastError):
            sys.stderr.flush()
            raise SystemExit(int(error.exit_code))

    def remove(self) -> None:
        """Nobody is told any more; unless another hook was put before it, it is gone."""
        self._on_crash = None
        if sys.excepthook is self._own:
            sys.excepthook = self._previous


def write_error_file(error: BaseException) -> None:
    """Write the launcher's error file, if there is to be one and nobody has written it yet."""
    name = os.environ.get(ERROR_FILE)
    if not name or Path(name).exists():
        return
    now = time.time()
    report = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(now)),
                "timestamp_exact": f"{now:.6f}",
                "exit_code": str(int(error.exit_code) if isinstance(error, HoldfastError) else 1),
            },
        }
    }
    try:
        Path(name).write_text(json.dumps(report))
    except OSError as problem:
        print(f"holdfast: cannot write the error file {name}: {problem}", file=sys.stderr)
