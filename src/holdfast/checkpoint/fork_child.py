"""What a forked child of the trainer does: copy frozen tensors into the staging memory, report, and end.

The trainer has threads, and a fork keeps none of them: a lock that one held stays held for ever, and a pool
of workers has no workers. So nothing here waits for anybody or uses torch, logging or threads. It works on
raw memory with numpy, xxhash and system calls, and ends by `_exit`: no finaliser and no exit hook of the
trainer ever runs in it. The garbage collector was turned off and every signal was blocked before the fork.

Guarantee: the child reports DONE only when every byte of its tensors is in the staging memory and their
fingerprints are on the board. It holds no descriptor but those that it needs, so that a dead trainer's
sockets are closed and its locks free; and it never outlives its trainer, which ends it by a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from holdfast.checkpoint import fingerprint, frozen_memory
from holdfast.checkpoint.image_children import PR_SET_PDEATHSIG

SLICE = 512 * 1024
"""Fingerprinted and written at a time, so that the kernel finds the bytes in the processor's cache."""
PRINT = len(fingerprint.of_bytes(b"", fingerprint.HOST))
"""Bytes of a fingerprint on the board."""
DONE = b"done\n"
FAILED = b"failed\n"
"""How a report begins; the reason follows, and the end is that of the child."""
_DONTNEED = 4

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_libc = ctypes.CDLL(None, use_errno=True)


class Work(NamedTuple):
    """One tensor to be copied."""

    source: Bytes
    offset: int
    """Where its bytes belong in the staging memory."""
    known: bool
    """Its fingerprint was taken before; else it is to be put on the board."""
    place: int
    """Its place on the board."""

    @property
    def range(self) -> frozen_memory.Range:
        start = int(self.source.ctypes.data)
        return start, start + self.source.nbytes


def share_out(works: Sequence[Work], shares: int) -> list[list[Work]]:
    """Divide by bytes, the largest first; no share is empty but the only one."""
    count = max(1, min(shares, len(works)))
    divided: list[list[Work]] = [[] for _ in range(count)]
    held = [0] * count
    for work in sorted(works, key=lambda work: -work.source.nbytes):
        at = held.index(min(held))
        divided[at].append(work)
        held[at] += work.source.nbytes
    # In the order in which the trainer is likely to change them: what is copied soon is let go of soon.
    return [sorted(share, key=lambda work: work.place) for share in divided if share] or [[]]


def work(
    trainer: int, report: int, staging: int, board: mmap.mmap, shares: Sequence[Sequence[Work]]
) -> NoReturn:
    """The whole life of the child; `report` and `staging` are descriptors, and the only ones that it keeps.

    With more than one share, each of the others is a child's of its own, so that the trainer waits for one
    fork and no more.
    """
    try:
        die_with(trainer)
        close_all_but(report, staging)
        be_ended_first()
        ranges = [one.range for share in shares for one in share]
        why = frozen_memory.not_frozen(ranges) or _copy_all(shares, staging, board)
        say(report, FAILED + why.encode() if why else DONE)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the trainer must learn of it
        with contextlib.suppress(BaseException):
            say(report, FAILED + f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)


def _copy_all(shares: Sequence[Sequence[Work]], staging: int, board: mmap.mmap) -> str:
    """Why it was not all copied; empty if it was."""
    me = os.getpid()
    others = [_other(me, staging, board, share) for share in shares[1:]]
    _copy(shares[0], staging, board)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others]
    bad = [code for code in codes if code]
    return f"helpers of it ended with {bad}" if bad else ""


def _other(parent: int, staging: int, board: mmap.mmap, share: Sequence[Work]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with(parent)
            _copy(share, staging, board)
            code = 0
        finally:
            os._exit(code)
    return pid


def _copy(share: Sequence[Work], staging: int, board: mmap.mmap) -> None:
    for one in share:
        hasher = None if one.known else fingerprint.Hasher(fingerprint.HOST)
        for start in range(0, one.source.nbytes, SLICE):
            piece = one.source[start : start + SLICE].data
            if hasher is not None:
                hasher.update(piece)
            _write(staging, piece, one.offset + start)
        if hasher is not None:
            board[one.place * PRINT : (one.place + 1) * PRINT] = hasher.done().encode()
        _let_go(one.range)


def _write(staging: int, data: memoryview, offset: int) -> None:
    """By a system call: this process has the staging memory mapped, and would fault on each of its pages."""
    while data:
        written = os.pwrite(staging, data, offset)
        data, offset = data[written:], offset + written


def _let_go(held: frozen_memory.Range) -> None:
    """Give up the view of what is copied: the trainer then writes to these pages without copying them."""
    start, end = -(-held[0] // mmap.PAGESIZE) * mmap.PAGESIZE, held[1] // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_DONTNEED))


def die_with(parent: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before that took effect
        os._exit(1)


def close_all_but(*kept: int) -> None:
    """Standard input and output too: whoever reads a dead trainer's output must see its end."""
    low = 0
    for descriptor in sorted(kept):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, 1 << 30)


def be_ended_first() -> None:
    """If the host runs out of memory, this process goes and not the trainer, which would look as large."""
    with contextlib.suppress(OSError):
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(descriptor, b"1000")
        os.close(descriptor)


def say(descriptor: int, told: bytes) -> None:
    view = memoryview(told[: 64 * 1024])  # what a pipe holds: saying it never blocks
    while view:
        view = view[os.write(descriptor, view) :]
