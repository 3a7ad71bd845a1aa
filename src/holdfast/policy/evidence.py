"""What an incident left to judge by: plain values, as the agents gathered them.

Whatever is not known is left out, and every field but what identifies a thing has a default; so evidence of
an older release, or of a node that could not say more, is evidence too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.policy.frames import LINKED, TRACEBACK, frames_in, is_users_place, where_of


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """One exception of the chain that ended a worker."""

    types: list[str] = []
    """Its class and those that it derives from, with their modules (`torch.distributed.DistBackendError`),
    its own first; those of Python itself without a module, and without `Exception` and what is above it."""
    message: str = ""
    errno: int | None = None
    where: str = ""
    """The user's own line that it came from, as `train.py:44 in __getitem__`; see `frames.where_of`. Empty if
    that is not known."""


class MemoryKill(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel counted when it killed something of a job for lack of memory."""

    kills: int
    """By how much its counter rose in this attempt."""
    group: str = ""
    """The control group (cgroup) that has the counter; empty if not known."""
    limit: int | None = None
    """Bytes that the tightest of the groups may use; None if none has a limit."""
    limited: str = ""
    """The group that has this limit: the one that has the counter, or one above it."""


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that ended by itself, not because it was stopped.

    One that left with 0 while its peers still needed it is among them: see `classify`.
    """

    rank: int
    exit_code: int
    """As from waitpid: negative for a signal."""
    at: float = 0.0
    node: str = ""
    device: str = ""
    """The device it ran on, if it had one and that is known."""
    message: str = ""
    errors: list[Raised] = []
    """The exception, then what caused it or was being handled when it was raised, as far as that is known."""
    left: bool = False
    """Whether it ended with exit code 0 while others of its attempt still ran. A code of 0 alone does not
    say so: it stands for one that is not known, too."""
    heard: bool = False
    """Whether the message is only what it last wrote to its standard error, and no exception's."""
    kernel_oom: bool = False


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that gave no sign of life for longer than its limit."""

    rank: int
    at: float = 0.0
    node: str = ""
    device: str = ""
    section: str = ""
    """The innermost open one; empty outside of all."""
    seconds: float = 0.0
    limit: float = 0.0
    missing: list[int] = []
    """Ranks that did not reach the collective in which this one waits, as far as that is known."""
    missing_nodes: list[str] = []
    """The nodes of those ranks."""
    silent: list[int] = []
    """Ranks that may be missing from it, and of which that cannot be known: they could not say."""
    exiting: bool = False
    """Whether it had left its loop: what was loaded, and its devices, had done their work by then."""


class Loss(StrEnum):
    """How a node was lost."""

    CLOSED = "closed"
    """Its connection was closed: its agent or its machine is gone."""
    SILENT = "silent"
    LEFT = "left"
    """It was told to leave, by its scheduler or by an operator."""
    REFUSED = "refused"
    """Its agent would not take part."""


class LostNode(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    how: Loss
    at: float = 0.0
    detail: str = ""


class DeviceError(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver or a kernel log said, during the attempt, about a device that it used."""

    node: str = ""
    device: str = ""
    at: float = 0.0
    xid: int | None = None
    """NVIDIA's number of the error, if it has one."""
    uncorrectable: bool = False
    """Whether memory errors were counted that ECC could not correct."""
    message: str = ""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of what ended an attempt. The order of the lists says nothing."""

    ends: list[WorkerEnd] = []
    hangs: list[Hang] = []
    lost: list[LostNode] = []
    devices: list[DeviceError] = []
    world_size: int = 0
    """0 if not known."""
    rung: str = ""
    """The checkpoint that was loaded; empty for a fresh start, or if that is not known."""
    steps: int | None = None
    """Steps completed since then; None if not known."""
    causes: list[tuple[str, str]] = []
    """Causes and the patterns of messages that have them, as the configuration adds them."""


_RANK = re.compile(r"^\[rank\d+\]:[ \t]?", re.MULTILINE)
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_ERRNO = re.compile(r"\[Errno (-?\d+)\]")
MOST_RAISED = 8
"""Exceptions of one chain that are kept."""
MOST_LINES = 12
"""Lines of one exception's message that are read from a traceback."""
MOST_HANDED_ON = 200
"""Lines below an exception in which the traceback of another process is looked for."""


def blamed(errors: Sequence[Raised]) -> str:
    """The line to look at first: the user's own that the innermost exception came from, else the outermost's.

    Empty if none is known.
    """
    theirs = (one.where for one in reversed(errors) if is_users_place(one.where))
    return next(theirs, "") or next((one.where for one in errors if one.where), "")


def told_by_traceback(text: str, directory: str = "") -> list[Raised]:
    """The exceptions in the last traceback of a text, the outermost first; none if it has no traceback.

    torch puts the rank before each line. What follows the message cannot be told from its further lines.
    `directory`: the one that paths below it are shown from.
    """
    lines = _RANK.sub("", text).splitlines()
    found: list[Raised] = []
    begin = None
    for number, line in enumerate(lines):
        if line.startswith(TRACEBACK):
            if begin is None:
                found = []
            begin = number
        elif LINKED.match(line):
            begin = number
        elif begin is not None and (raised := _RAISED.match(line)) and _follows_frames(lines, number):
            further = []
            for more in lines[number + 1 : number + MOST_LINES]:
                if not more.strip() or more.startswith(TRACEBACK):
                    break
                further.append(more.strip())
            message = "\n".join([raised["message"] or "", *further])
            errno = _ERRNO.search(raised["message"] or "")
            link = Raised(
                types=[raised["type"]],
                message=message,
                errno=int(errno[1]) if errno is not None else None,
                where=where_of(
                    frames_in("\n".join(lines[begin:number])), _handed_on(lines, number), directory
                ),
            )
            found.append(link)
            begin = None
    return found[: -MOST_RAISED - 1 : -1]


def _handed_on(lines: list[str], number: int) -> str:
    """The message of the exception in that line, with another process's traceback if it holds one."""
    below = lines[number + 1 : number + MOST_HANDED_ON]
    end = next((at for at, line in enumerate(below) if line.startswith(TRACEBACK)), len(below))
    return "\n".join(below[:end])


def _follows_frames(lines: list[str], number: int) -> bool:
    """Whether a line comes right after a traceback's frames, which are indented."""
    return number > 0 and (lines[number - 1].startswith((" ", "\t", TRACEBACK)))


_CLASS = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?=:|$)")
"""The exception's class at the head of a message: what tells causes apart before all else."""
_NAME = r"[^\s'\"`,;:()\[\]<>{}|/]+"
_UNITS = r"[KMGT]i?B|bytes|[nuµm]?s|secs?|(?:milli)?seconds?|min|minutes?|hours?"
_PASSING = re.compile(
    "|".join(
        (
            # A checkpoint's name: its step stays, what is drawn anew in every attempt goes.
            r"(?P<step>step_\d+)(?:-[0-9a-f]{8,})?",
            # Below a directory for temporary files; the name of a script that lies there stays.
            rf"(?:/{_NAME})*?/(?:tmp|shm)(?:/{_NAME})+?(?P<script>/(?!tmp[a-z0-9_]{{8}}\b){_NAME}\.py\b)",
            rf"(?:/{_NAME})*?/(?:tmp|shm)(?:/{_NAME})+",
            r"(?<![A-Za-z0-9])tmp[a-z0-9_]{8}(?![A-Za-z0-9])",  # as Python's tempfile draws them
            r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?(?:Z|[+-]\d\d:?\d\d)?",
            r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?",
            r"(?<![0-9a-f])[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}(?![0-9a-f])",
            rf"\b\d+(?:\.\d+)?(?:e[+-]?\d+)? ?(?:{_UNITS})\b",
            r"0x[0-9a-f]+",
            r"(?<![A-Za-z0-9])[0-9a-f]{8,}(?![A-Za-z0-9])",
            r"\b(?:pids?|pid\(s\)|tids?|process|port)[ =:#]*\d+(?:, ?\d+)*",
            r"(?<=[\w\]]:)\d{4,5}\b|(?<=\]:)\d+|<\d+>",  # ports; lines of that number in a file go too
            r"(?<![A-Za-z0-9.])\d{6,}(?:\.\d+)?",
        )
    ),
    re.IGNORECASE,
)


def comparable(message: str) -> str:
    """A message without what differs between two runs of the same thing.

    That is names and directories of temporary files, addresses, ids of processes, UUIDs, ports, times, sizes,
    and long numbers. The class of the exception stays, and so do short numbers and names of other files.
    """
    kind = _CLASS.match(message)
    head = kind.group() if kind is not None else ""
    return head + _PASSING.sub(_kept, message[len(head) :])


def _kept(passing: re.Match[str]) -> str:
    return (passing["step"] or "") + "…" + (passing["script"] or "")
