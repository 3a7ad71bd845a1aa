"""Prints, as JSON, what a process can find out about how it was started."""

import contextlib
import ctypes
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy
import torch

import __main__


class Defined:
    pass


def stream(file: object) -> dict[str, str]:
    names = ("name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through")
    found = {name: repr(getattr(file, name, None)) for name in names}
    return {**found, "type": type(file.buffer).__name__, "tty": str(file.isatty())}


def descriptors() -> list[str]:
    found = []
    for entry in sorted(Path("/proc/self/fd").iterdir(), key=lambda entry: int(entry.name)):
        with contextlib.suppress(OSError):  # the listing's own
            found.append(f"{entry.name} {entry.readlink()}")
    return found


libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
before = os.umask(0o22)
os.umask(before)
told = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "xoptions": sys._xoptions,
    "executable": [sys.executable, sys.prefix, sys.exec_prefix],
    "main": sorted(name for name in vars(__main__) if name.startswith("__")),
    "file": [__file__, str(__spec__ and __spec__.name), str(__package__), str(__doc__)],
    "loader": [type(__loader__).__name__, __loader__.name, __loader__.path],
    "builtins": type(__builtins__).__name__,
    "this module": __main__ is sys.modules["__main__"] and __main__.Defined is Defined,
    "annotations": repr(vars(__main__).get("__annotations__")),
    "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
    "same streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    "signals": {
        number.name: str(signal.getsignal(number)).split(" at ")[0]
        for number in sorted(signal.valid_signals())
        if isinstance(number, signal.Signals)
    },
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "environment": dict(sorted(os.environ.items())),
    "getenv": str(libc.getenv(b"RANK")) + str(libc.getenv(b"NOT_FOR_WORKERS")),
    "cwd": str(Path.cwd()),
    "umask": before,
    "descriptors": [item for item in descriptors() if not item.endswith("/fd")],
    "limits": {
        name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT" in name
    },
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "faulthandler": faulthandler.is_enabled(),
    "warnings": [str(item) for item in warnings.filters],
    "locale": [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding(), time.tzname],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()],
    "recursion": sys.getrecursionlimit(),
    "switch": sys.getswitchinterval(),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "main thread": [threading.main_thread().native_id == os.getpid(), threading.current_thread().name],
    "process": [repr(multiprocessing.current_process()), repr(multiprocessing.parent_process())],
    "start method": multiprocessing.get_start_method(allow_none=True),
    "logging": [logging.root.level, len(logging.root.handlers)],
    "comm": Path("/proc/self/comm").read_text(),
    "command line": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
    "nice": os.nice(0),
    "processors": sorted(os.sched_getaffinity(0)),
    "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype())],
    "frames": sys._getframe().f_code.co_filename,
}
chance = {
    "random": random.random(),
    "numpy": float(numpy.random.rand()),
    "torch": float(torch.rand(1)),
    "seed": torch.initial_seed(),
    "authkey": multiprocessing.current_process().authkey.hex(),
}
print(json.dumps({"told": told, "chance": chance}))
