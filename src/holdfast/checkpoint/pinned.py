"""Page-locks the host memory that snapshots are copied into, once, so that every copy runs at full speed.

Guarantee: a buffer that cannot be page-locked is told (`note`) and works, only slower. What was registered
here is unregistered exactly once, by `release`; memory that somebody else registered is left to them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from holdfast.checkpoint.lanes import is_locked

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): allocates and maps the pages of a range, whatever they hold stays."""
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""
_SLICE = 256 * 1024**2


class Pinned:
    """A host buffer and whether it is page-locked. Make it with `pin`."""

    def __init__(self, buffer: torch.Tensor, *, registered: bool, locked: bool, note: str) -> None:
        self.buffer = buffer
        self.locked = locked
        """Copies from a device into it run at full speed and without the host."""
        self.note = note
        """What is not as it should be; empty if nothing."""
        self._registered = registered

    def release(self) -> str:
        """Unlocks what `pin` locked; says what went wrong, if anything did. No copy may be under way."""
        if not self._registered:
            return ""
        self._registered = self.locked = False
        error = _cudart().cudaHostUnregister(self.buffer.data_ptr())
        return "" if int(error) == 0 else f"the buffer could not be unlocked: {_told(error)}"


def pin(buffer: torch.Tensor, *, threads: int = 4) -> Pinned:
    """Page-locks `buffer`, a contiguous CPU tensor; its memory must stay mapped until `release`."""
    if not torch.cuda.is_available():
        return Pinned(buffer, registered=False, locked=False, note="not page-locked: there is no CUDA device")
    if buffer.nbytes == 0:
        return Pinned(buffer, registered=False, locked=True, note="")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if is_locked(buffer):
        return Pinned(buffer, registered=False, locked=True, note="it was page-locked already")
    prefault(buffer, threads=threads)
    error = _cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE)
    if int(error) == 0:
        return Pinned(buffer, registered=True, locked=True, note="")
    _forget_error()
    return Pinned(
        buffer,
        registered=False,
        locked=False,
        note=f"{buffer.nbytes} bytes of host memory could not be page-locked ({_told(error)}): "
        "snapshots block training and copy at a fraction of the speed",
    )


def prefault(buffer: torch.Tensor, *, threads: int = 4) -> bool:
    """Has the kernel allocate all pages of `buffer`, on several cores; False where it cannot.

    Registering faults every page in by itself, on one core, which for tens of gigabytes takes many seconds.
    """
    page = mmap.PAGESIZE
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    start = -(-start // page) * page  # a page that is shared with something else is left to the registration
    slices = [(at, min(_SLICE, end - at)) for at in range(start, end, _SLICE)]
    with ThreadPoolExecutor(max(1, min(threads, os.cpu_count() or 1))) as pool:
        return all(pool.map(lambda piece: _populate(*piece), slices))


def _populate(address: int, length: int) -> bool:
    libc = ctypes.CDLL(
        None, use_errno=True
    )  # its calls let other threads run, those of `mmap.madvise` do not
    return bool(
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(_POPULATE_WRITE)) == 0
    )


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _told(error: object) -> str:
    return str(_cudart().cudaGetErrorString(error))


def _forget_error() -> None:
    """CUDA remembers a failed call, and the next kernel launch of anybody would raise it: raise it here."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")  # a kernel, and not a memset, which would not look
