"""Who sent a signal, as the kernel tells it; Python's own handlers are not told.

`watch` puts a few machine instructions before the handler that `signal.signal` has installed. They note what
the kernel says about the sender in a slot of this module, and jump to that handler with everything as it was.

Guarantee: a signal does what it would do without them. The instructions call nothing, use no stack, take no
lock and touch no register that the handler they jump to may rely on. They note something only if the kernel
itself has called them: they look at a `siginfo` only if it lies where the kernel puts it, next to the stack
pointer. Their memory is never writable and executable at once, and is never freed, so they may be called
until the process ends. A later call of `signal.signal` replaces them, as the interpreter does when it ends;
an exec forgets them. If anything is not as it was checked to be (another processor, another C library, no
memory that can be made executable), nothing is installed, and the sender is not known.

What is known about a process is read at once (`proc.status`), which waits for nothing; what may hang (the
user's name, the command line) is asked for on a thread, which is left behind if it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import platform
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, NamedTuple

from holdfast.process import proc

log = logging.getLogger("holdfast")

PATIENCE = 0.3
"""Seconds that a stop may wait for a user's name or a command line."""
LONGEST = 40
"""How many characters of a process's or a script's name are shown."""

# --- what the instructions leave ----------------------------------------------------------------------------

_THERE = 1 << 23
"""Set in a slot that holds something. Process ids are below 2^22."""
_SI_USER, _SI_QUEUE, _SI_TKILL, _SI_TIMER, _SI_KERNEL = 0, -1, -6, -2, 0x80
_HAS_PID = (_SI_USER, _SI_QUEUE, _SI_TKILL)


class Origin(NamedTuple):
    """What the kernel says about a signal's sender."""

    code: int
    """`si_code`, of which the lowest eight bits are kept: from -127 to 128."""
    pid: int
    uid: int


def _unpacked(word: int) -> Origin:
    code = (word >> 24) & 0xFF
    return Origin(code if code <= _SI_KERNEL else code - 256, word & (_THERE - 1), word >> 32)


# --- the instructions ---------------------------------------------------------------------------------------


def _x86_64(slot: int, target: int) -> bytes:
    return b"".join(
        (
            bytes.fromhex("f30f1efa"),  # endbr64
            # The kernel's frame at a handler's first instruction: a return address, a ucontext, the siginfo.
            bytes.fromhex("488d842438010000"),  # lea rax, [rsp + 312]
            bytes.fromhex("4839f0"),  # cmp rax, rsi
            bytes.fromhex("7526"),  # jne go
            b"\x48\xb8" + slot.to_bytes(8, "little"),  # mov rax, slot
            bytes.fromhex("48833800"),  # cmp qword [rax], 0: the first one stays until it is taken
            bytes.fromhex("7516"),  # jne go
            bytes.fromhex("448b4608"),  # mov r8d, [rsi + 8]: si_code
            bytes.fromhex("41c1e018"),  # shl r8d, 24
            bytes.fromhex("4181c800008000"),  # or r8d, _THERE
            bytes.fromhex("4c0b4610"),  # or r8, [rsi + 16]: si_pid, and si_uid above it
            bytes.fromhex("4c8900"),  # mov [rax], r8: all of it in one store
            b"\x48\xb8" + target.to_bytes(8, "little"),  # go: mov rax, target
            bytes.fromhex("ffe0"),  # jmp rax
        )
    )


def _aarch64(slot: int, target: int) -> bytes:
    instructions = (
        0xD503245F,  # bti c
        0x910003E9,  # mov x9, sp: the kernel's frame begins with the siginfo
        0xEB01013F,  # cmp x9, x1
        0x54000141,  # b.ne go
        0x5800018A,  # ldr x10, slot
        0xF940014B,  # ldr x11, [x10]
        0xB50000EB,  # cbnz x11, go: the first one stays until it is taken
        0xB940082B,  # ldr w11, [x1, #8]: si_code
        0x53081D6B,  # lsl w11, w11, #24
        0x3209016B,  # orr w11, w11, #_THERE
        0xF940082C,  # ldr x12, [x1, #16]: si_pid, and si_uid above it
        0xAA0C016B,  # orr x11, x11, x12
        0xF900014B,  # str x11, [x10]: all of it in one store
        0x580000B0,  # go: ldr x16, target
        0xD61F0200,  # br x16
        0xD503201F,  # nop, so that what follows is aligned
    )
    return struct.pack(f"<{len(instructions)}IQQ", *instructions, slot, target)


CODE: dict[str, Callable[[int, int], bytes]] = {"x86_64": _x86_64, "aarch64": _aarch64}
"""By processor: the instructions for a slot and the handler to go on to."""


# --- installing them ----------------------------------------------------------------------------------------

_SA_SIGINFO, _SA_RESTORER = 0x4, 0x04000000
_KNOWN_FLAGS = _SA_SIGINFO | _SA_RESTORER | 0x1 | 0x2 | 0x08000000 | 0x10000000 | 0x40000000
"""The flags that are known to be safe to keep. SA_RESETHAND, with which a handler serves once, is not."""
_LOWEST = 1 << 16
"""No function lies below this; SIG_DFL and SIG_IGN do, and SIG_ERR lies far above any function."""
_GUARD = 64
_UNTOUCHED = 0xA5


class _Action(ctypes.Structure):
    """The C library's `struct sigaction`, as glibc has it on both processors, and a guard after it."""

    _fields_ = [
        ("handler", ctypes.c_uint64),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_uint32),
        ("restorer", ctypes.c_uint64),
        ("guard", ctypes.c_uint8 * _GUARD),
    ]


class _Native:
    """The C library's functions, and the slots. There is one per process."""

    def __init__(self, code: Callable[[int, int], bytes]) -> None:
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.gnu_get_libc_version  # noqa: B018 - an AttributeError if this is another C library
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self._libc = libc
        self._code = code
        self._flush: Any = None
        if platform.machine() != "x86_64":  # whose instruction cache sees every store
            self._flush = ctypes.CDLL("libgcc_s.so.1").__clear_cache
            self._flush.argtypes, self._flush.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        self._slots = self._memory()
        self._stubs: dict[tuple[int, int], int] = {}

    def _memory(self) -> int:
        at = self._libc.mmap(
            None,
            mmap.PAGESIZE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            -1,
            0,
        )
        if at is None or at == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "no memory")
        return int(at)

    def slot(self, number: int) -> Any:
        return ctypes.c_uint64.from_address(self._slots + 8 * number)

    def action(self, number: int) -> _Action:
        """What the kernel does for this signal now."""
        found = _Action()
        ctypes.memset(ctypes.addressof(found), _UNTOUCHED, ctypes.sizeof(found))
        if self._libc.sigaction(number, None, ctypes.addressof(found)) != 0:
            raise OSError(ctypes.get_errno(), "sigaction")
        if any(byte != _UNTOUCHED for byte in found.guard):
            raise ValueError("struct sigaction is larger here")
        return found

    def set(self, number: int, action: _Action) -> bool:
        return bool(self._libc.sigaction(number, ctypes.addressof(action), None) == 0)

    def knows(self, handler: int) -> bool:
        return handler in self._stubs.values()

    def stub(self, number: int, target: int) -> int:
        """Instructions for this signal and the handler to jump to, in their own memory."""
        if (number, target) not in self._stubs:
            at = self._memory()
            code = self._code(self._slots + 8 * number, target)
            ctypes.memmove(at, code, len(code))
            if self._libc.mprotect(at, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
                problem = ctypes.get_errno()
                self._libc.munmap(at, mmap.PAGESIZE)  # nothing refers to it yet
                raise OSError(problem, "memory cannot be made executable")
            if self._flush is not None:
                self._flush(at, at + len(code))
            self._stubs[number, target] = at
        return self._stubs[number, target]


_native: _Native | None = None
_unfit = ""


def watch(number: int) -> bool:
    """From here on `take` knows who sends this signal, until somebody calls `signal.signal` for it again.

    To be called in the main thread, right after `signal.signal` with a function. False if it is not possible.
    """
    global _unfit
    try:
        return not _unfit and _install(number)
    except Exception as error:  # noqa: BLE001 - not worth a stop, whatever it is
        _unfit = str(error) or type(error).__name__
        log.debug("holdfast: who sends a signal will not be known: %s", _unfit)
        return False


def _install(number: int) -> bool:
    native = _get_native()
    before = native.action(number)
    if native.knows(before.handler):
        native.slot(number).value = 0
        return True
    if not callable(signal.getsignal(number)) or before.handler < _LOWEST or before.handler >> 63:
        return False
    if before.flags & ~_KNOWN_FLAGS:
        return False
    ours = _Action.from_buffer_copy(before)
    ours.handler, ours.flags = native.stub(number, before.handler), before.flags | _SA_SIGINFO
    native.slot(number).value = 0
    if not native.set(number, ours):
        return False
    now = native.action(number)
    wanted = (ours.handler, before.mask[0], (before.flags | _SA_SIGINFO) & ~_SA_RESTORER)
    if (now.handler, now.mask[0], now.flags & ~_SA_RESTORER) == wanted:
        return True
    native.set(number, before)
    raise ValueError("sigaction does not read back what was set")


def _get_native() -> _Native:
    global _native
    if _native is None:
        code = CODE.get(platform.machine())
        if code is None or sys.platform != "linux" or struct.calcsize("P") != 8 or sys.byteorder != "little":
            raise ValueError(f"{platform.machine()} is not one of the processors that this was made for")
        _native = _Native(code)
    return _native


def take(number: int) -> Origin | None:
    """Who sent the first of these signals since the last call; None if not known."""
    if _native is None:
        return None
    slot = _native.slot(number)
    word, slot.value = slot.value, 0
    return _unpacked(word) if word & _THERE else None


# --- who that is --------------------------------------------------------------------------------------------


class SeenSender(NamedTuple):
    """A sender, and what could be seen of its process when the signal was noticed."""

    origin: Origin
    name: str
    """The process's name; empty if it was gone, or if its id belongs to another process by now."""
    ended: bool


def seen(origin: Origin | None) -> SeenSender | None:
    """Look at the sender while it may still be there. Waits for nothing, even inside a signal handler."""
    if origin is None:
        return None
    if origin.code not in _HAS_PID or not origin.pid:
        return SeenSender(origin, "", False)
    fields = proc.status(origin.pid)
    if str(origin.uid) not in fields.get("Uid", "").split():
        return SeenSender(origin, "", True)
    return SeenSender(origin, _plain(fields.get("Name", "")), fields.get("State", "").startswith("Z"))


def named(number: int, found: SeenSender | None, launcher: int | None = None) -> str:
    """The sender in words, as in `SIGTERM from slurmstepd (pid 4242, root)`; empty if not known.

    `launcher`: the process id of this process's own launcher.
    """
    if found is None:
        return ""
    origin = found.origin
    if origin.code not in _HAS_PID:
        return _of_the_kernel(number, origin)
    if not origin.pid:
        return "a process outside this container"
    if origin.pid == os.getpid():
        return "this process itself"
    if origin.pid == launcher:
        return f"its own launcher (pid {origin.pid})"
    ask = {"user": lambda: _user(origin.uid), "script": lambda: "" if found.ended else _script(found)}
    known = _asked(ask)
    user = known.get("user") or f"uid {origin.uid}"
    if not found.name:
        who = user if user.startswith("uid ") else f"user {user}"
        return f"process {origin.pid} of {who} (which has ended)"
    name = f"{found.name} {known['script']}" if known.get("script") else found.name
    return f"{name} (pid {origin.pid}, {user}{', which has ended' if found.ended else ''})"


def _of_the_kernel(number: int, origin: Origin) -> str:
    if origin.code == _SI_TIMER:
        return "a timer of this process"
    if origin.code == _SI_KERNEL and number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
        return "the terminal (a key was pressed)"
    if origin.code == _SI_KERNEL and number == signal.SIGHUP:
        return "the terminal (it was closed)"
    return "the kernel"


def _asked(questions: dict[str, Callable[[], str]]) -> dict[str, str]:
    """The answers that came in time. A user directory and the memory of another process may both hang."""
    answers: dict[str, str] = {}

    def ask(name: str, question: Callable[[], str]) -> None:
        with contextlib.suppress(Exception):
            answers[name] = question()

    threads = [
        threading.Thread(target=ask, args=asked, name="holdfast-signal-sender", daemon=True)
        for asked in questions.items()
    ]
    with contextlib.suppress(RuntimeError):  # the process table is full: the sender is described without it
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    return dict(answers)


def _user(uid: int) -> str:
    if uid == 0:
        return "root"
    import pwd  # its answer may come over the network

    return _plain(pwd.getpwuid(uid).pw_name)


_INTERPRETERS = ("python", "bash", "sh", "dash", "zsh", "ksh", "perl", "ruby", "node")


def _script(found: SeenSender) -> str:
    """What an interpreter runs: its own name says nothing. The rest of the command line may hold secrets."""
    if found.name.rstrip("0123456789.") not in _INTERPRETERS:
        return ""
    words = proc.arguments(found.origin.pid)
    if len(words) > 2 and words[1] == "-m":
        return f"-m {_plain(words[2])}"
    return _plain(PurePath(words[1]).name) if len(words) > 1 and not words[1].startswith("-") else ""


def _plain(text: str) -> str:
    """The text made harmless, because others choose the names of their processes."""
    return "".join(char if char.isprintable() else "?" for char in text.strip())[:LONGEST]


def from_whom(sender: str) -> str:
    """For a sentence: ` from SENDER`; empty if not known."""
    return f" from {sender}" if sender else ""
