"""What an incident left to judge it by: ends, frames to blame, missing ranks, faults. Plain values. Pure.

Whatever is not known is left out, and every field has a default except those that identify a thing; so the
evidence of an older release, or of a node that could not say more, is evidence too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """One exception of the chain that ended a worker."""

    types: list[str] = []
    """Its class and the classes that it derives from, its own first, with their modules
    (`torch.distributed.DistBackendError`). Python's own classes have no module here, and `Exception` and
    those above it are left out."""
    message: str = ""
    errno: int | None = None
    where: str = ""
    """The user's own line that it came from, as `train.py:44 in __getitem__`; see `where_of`. Empty if not
    known."""


class MemoryKill(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel counted when it killed a process of the job for lack of memory."""

    kills: int
    """By how much its counter rose in this attempt."""
    group: str = ""
    """The control group (cgroup) that has the counter; empty if not known."""
    limit: int | None = None
    """Bytes that the group with the tightest limit may use; None if no group has a limit."""
    limited: str = ""
    """The group that has this limit: the one that has the counter, or one above it."""


KERNEL_OOM = "killed by the kernel for lack of memory"
"""The beginning of the agent's message when the kernel's counters say so."""


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that ended by itself, not because it was stopped, with what policies ask about it.

    This includes one that left with exit code 0 while its peers still needed it: see `diagnosis`.
    """

    rank: int
    exit_code: int
    """As from waitpid: negative for a signal."""
    at: float = 0.0
    node: str = ""
    device: str = ""
    """The device it ran on, if it had one and it is known."""
    message: str = ""
    """The last line of the exception, or of standard error, if the worker left any."""
    error_file: str = ""
    stderr_file: str = ""
    """Where its last lines of standard error are kept, if they were captured."""
    errors: list[Raised] = []
    """The exception, then what caused it or was being handled when it was raised, as far as known."""
    left: bool = False
    """Whether it was the first on its node to leave with exit code 0 while others of its attempt still ran.
    A code of 0 alone does not say so, because it also stands for a code that is not known."""

    @property
    def heard(self) -> bool:
        """Whether the message is only what it last wrote to standard error, and not from an exception."""
        return bool(self.stderr_file) and not self.errors and not self.error_file

    @property
    def kernel_oom(self) -> bool:
        return self.message.startswith(KERNEL_OOM)


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that gave no sign of life for longer than its limit."""

    rank: int
    at: float = 0.0
    node: str = ""
    device: str = ""
    section: str = ""
    """The innermost open section; empty outside of all sections."""
    seconds: float = 0.0
    limit: float = 0.0
    missing: list[int] = []
    """Ranks that did not reach the collective in which this one waits, as far as known."""
    missing_nodes: list[str] = []
    """The nodes of those ranks."""
    silent: list[int] = []
    """Ranks that may be missing from it too; nobody can know, because they could not say."""
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
    held: int = 0
    """Bytes of its memory that processes of an earlier attempt still held when this one's workers started;
    that is no error of the device, but explains why memory was short."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about what ended an attempt. The order of the lists means nothing."""

    ends: list[WorkerEnd] = []
    hangs: list[Hang] = []
    lost: list[LostNode] = []
    devices: list[DeviceError] = []
    world_size: int = 0
    """0 if not known."""
    rung: str = ""
    """The checkpoint that was loaded; empty for a fresh start, or if not known."""
    steps: int | None = None
    """Steps completed since then; None if not known."""
    causes: list[tuple[str, str]] = []
    """Causes that the configuration adds, each with the pattern of messages that indicate it."""


_RANK = re.compile(r"^\[rank\d+\]:[ \t]?", re.MULTILINE)
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_ERRNO = re.compile(r"\[Errno (-?\d+)\]")
MOST_RAISED = 8
"""How many exceptions of one chain are kept."""
MOST_LINES = 12
"""How many lines of an exception's message are read from a traceback."""
MOST_HANDED_ON = 200
"""How many lines below an exception are searched for the traceback of another process."""


def blamed(errors: Sequence[Raised]) -> str:
    """The line to look at first: the user's own that the innermost exception with such a line came from, else
    the first line known, from the outermost exception on. Empty if none is known.
    """
    theirs = (one.where for one in reversed(errors) if is_users_place(one.where))
    return next(theirs, "") or next((one.where for one in errors if one.where), "")


def told_by_traceback(text: str, directory: str = "") -> list[Raised]:
    """The exceptions in the last traceback of a text, the outermost first; none if it has no traceback.

    torch puts the rank before each line. Text after a message cannot be told apart from the message's own
    further lines. `directory`: paths below it are shown relative to it.
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
    """The message of the exception on that line, with another process's traceback if it contains one."""
    below = lines[number + 1 : number + MOST_HANDED_ON]
    end = next((at for at, line in enumerate(below) if line.startswith(TRACEBACK)), len(below))
    return "\n".join(below[:end])


def _follows_frames(lines: list[str], number: int) -> bool:
    """Whether a line comes right after the frames of a traceback, which are indented."""
    return number > 0 and (lines[number - 1].startswith((" ", "\t", TRACEBACK)))


_CLASS = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?=:|$)")
"""The exception's class at the start of a message: this more than anything tells causes apart."""
_NAME = r"[^\s'\"`,;:()\[\]<>{}|/]+"
_UNITS = r"[KMGT]i?B|bytes|[nuµm]?s|secs?|(?:milli)?seconds?|min|minutes?|hours?"
_PASSING = re.compile(
    "|".join(
        (
            # A checkpoint's name: its step stays, but the part that is random in every attempt goes.
            r"(?P<step>step_\d+)(?:-[0-9a-f]{8,})?",
            # A path below a directory for temporary files; the name of a script that lies there stays.
            rf"(?:/{_NAME})*?/(?:tmp|shm)(?:/{_NAME})+?(?P<script>/(?!tmp[a-z0-9_]{{8}}\b){_NAME}\.py\b)",
            rf"(?:/{_NAME})*?/(?:tmp|shm)(?:/{_NAME})+",
            r"(?<![A-Za-z0-9])tmp[a-z0-9_]{8}(?![A-Za-z0-9])",  # as Python's tempfile names them
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
    """A message without the parts that differ between two runs of the same thing.

    Those are names and directories of temporary files, addresses, process ids, UUIDs, ports, times, sizes and
    long numbers. The class of the exception stays, and so do short numbers and the names of other files.
    """
    kind = _CLASS.match(message)
    head = kind.group() if kind is not None else ""
    return head + _PASSING.sub(_kept, message[len(head) :])


def _kept(passing: re.Match[str]) -> str:
    return (passing["step"] or "") + "…" + (passing["script"] or "")


# The line that is to blame: which frame of a traceback is the user's own.
#
# Guarantee: pure and total. A traceback ends where the error was raised, which is most often inside torch or
# another package; whoever reads it looks for the last line of their own. Paths alone decide, so that the text
# of a traceback gives the same answer as the traceback itself.


TRACEBACK = "Traceback (most recent call last):"
LINKED = re.compile(r"^(The above exception was the direct cause|During handling of the above exception)")
MOST_WHERE = 200
"""How many characters of a place are kept."""
MOST_TOLD = 65_536
"""How many characters of a message are searched for another process's traceback."""

_FRAME = re.compile(
    r'^[ \t|+]*File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<function>[^\n]+))?$', re.MULTILINE
)
_OWN = __file__.rpartition("/policy/")[0] + "/"
_INSTALLED = re.compile(
    r"(^|/)(site|dist)-packages/|(^|/)lib(32|64)?/python3(\.\d+)?t?/|(^|/)python3\d+t?\.zip/"
    # a torch built from source lies where its sources are
    r"|(^|/)torch/(_\w+|amp|ao|autograd|backends|cuda|distributed|distributions|export|fx|func|functional"
    r"|jit|library|linalg|multiprocessing|nested|nn|onnx|optim|overrides|profiler|random|serialization"
    r"|sparse|storage|utils|xpu)(/|\.py$)"
)
_TYPED_IN = ("<string>", "<stdin>", "<ipython-input")
"""Names that are no file and yet hold a user's own lines; other such names (`<frozen runpy>`) do not."""
_WHERE = re.compile(r"(?P<path>.*):\d+( in .*)?", re.DOTALL)


class Frame(NamedTuple):
    path: str
    line: int
    function: str = ""
    """Empty for a line that could not even be compiled."""


def frames_in(text: str) -> list[Frame]:
    """The frames in the text of a traceback, in their order."""
    return [
        Frame(found["path"], int(found["line"][:9]), (found["function"] or "").strip())
        for found in _FRAME.finditer(text)
    ]


def is_users(path: str) -> bool:
    """Whether a file is neither torch's, Holdfast's, another package's nor Python's own."""
    if path.startswith("<"):
        return path.startswith(_TYPED_IN)
    return bool(path) and not path.startswith(_OWN) and not _INSTALLED.search(path)


def where_of(frames: Sequence[Frame], message: str = "", directory: str = "") -> str:
    """The last of a user's frames, as `train.py:44 in __getitem__`; empty if there is no frame to name.

    A message that holds the traceback of another process (one that loads data, say) knows better than the
    frames that waited for that process. If no frame is the user's, the last one that is not Holdfast's is
    taken. Paths below `directory` are shown relative to it.
    """
    theirs = _last_of_user(_told_in(message[:MOST_TOLD])) or _last_of_user(frames)
    others = (frame for frame in reversed(frames) if not frame.path.startswith(_OWN))
    chosen = theirs or next(others, None)
    return _shown(chosen, directory) if chosen is not None else ""


def is_users_place(where: str) -> bool:
    """Whether what `where_of` gave is a user's own line."""
    found = _WHERE.fullmatch(where)
    return found is not None and is_users(found["path"])


def clipped(where: str) -> str:
    """The place within bounds, and on one line; if it is too long its end is kept, which says more."""
    text = "".join(one if one.isprintable() else "?" for one in where[-2 * MOST_WHERE :])
    return text if len(where) <= MOST_WHERE else f"…{text[1 - MOST_WHERE :]}"


def _last_of_user(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in reversed(frames) if is_users(frame.path)), None)


def _told_in(message: str) -> list[Frame]:
    """The frames of the first error in another process's traceback; what followed from it comes below."""
    lines = message.partition(TRACEBACK)[2].splitlines()
    end = next((number for number, line in enumerate(lines) if LINKED.match(line)), len(lines))
    return frames_in("\n".join(lines[:end]))


def _shown(frame: Frame, directory: str) -> str:
    below = f"{directory.rstrip('/')}/"
    path = frame.path.removeprefix(below) if len(below) > 1 else frame.path
    place = f"{path.removeprefix('./')}:{frame.line}"
    return clipped(f"{place} in {frame.function}" if frame.function else place)


# Which ranks are missing from the collective that others wait in.
#
# Guarantee: pure, and the same answer in whatever order the ranks are given. A rank is called missing only if
# it testified that it has not got that far; one that could not testify is named as such, never accused.
#
# Every rank enters the collectives of a process group in the same order and counts them, each backend of the
# group for itself. So a rank that waits in number 412 waits for those members that have entered fewer. These
# may be waiting themselves, in another group: the ranks to look at first are those that others wait for and
# that wait for nobody.


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank stands in one process group."""

    group: str
    backend: str = ""
    """Which of the group's backends counts here; empty if only the group's own count is known."""
    entered: int
    """The number of the last collective that it entered; 0 if none."""
    name: str = ""
    """The name of the collective that it waits in, or else of the last; empty if only numbers are known."""
    waits_in: int = 0
    """The number of the first collective that it entered and that is not done; 0 if none is known."""
    members: tuple[int, ...] = ()
    """The global ranks of the group; empty if not known."""
    shapes: str = ""


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that some ranks wait in."""

    group: str
    backend: str = ""
    number: int
    name: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    """Members that testified and have not entered it."""
    silent: tuple[int, ...] = ()
    """Members that could not testify: they may be missing too."""
    differ: tuple[str, ...] = ()
    """What the waiting ranks call it, if they do not agree: then they do not all do the same thing."""
    certain: bool = True
    """False if no rank could say that it waits, only how many collectives it entered."""


Positions = Mapping[int, Sequence[Position] | None]
"""Per rank; None for one that could not testify."""


def find_missing(positions: Positions) -> list[Missing]:
    """For every group that some rank waits in: the first collective waited in, and which ranks are not there.

    If no rank is known to wait anywhere (no flight recorder), groups in which some ranks have got further
    than others.
    """
    return _find(positions, waits=True) or [one for one in _find(positions, waits=False) if one.missing]


def _find(positions: Positions, *, waits: bool) -> list[Missing]:
    spoken = {
        rank: {(p.group, p.backend): p for p in said} for rank, said in positions.items() if said is not None
    }
    unheard = {rank for rank, said in positions.items() if said is None}
    found = []
    for key in sorted({key for said in spoken.values() for key in said}):
        group, backend = key
        here = {rank: said[key] for rank, said in spoken.items() if key in said}
        numbers = {rank: position.waits_in if waits else position.entered for rank, position in here.items()}
        known = [number for number in numbers.values() if number > 0]
        if not known:
            continue
        number = min(known) if waits else max(known)
        # Where members are not known, only ranks that have used the group count, and those that are silent.
        named = {rank for position in here.values() for rank in position.members}
        members = (named & (set(spoken) | unheard)) if named else set(here) | unheard
        waiting = sorted(rank for rank in here if numbers[rank] == number)
        absent = sorted(rank for rank in members & set(spoken) if _entered(spoken[rank], key) < number)
        names = sorted({here[rank].name for rank in waiting if here[rank].name})
        found.append(
            Missing(
                group=group,
                backend=backend,
                number=number,
                name=names[0] if names else "",
                waiting=tuple(waiting),
                missing=tuple(absent),
                silent=tuple(sorted(members & unheard)),
                differ=tuple(names) if len(names) > 1 else (),
                certain=waits,
            )
        )
    return found


def _entered(said: Mapping[tuple[str, str], Position], key: tuple[str, str]) -> int:
    """How far a rank has got. Entries are kept only for a while; after that the group's own count remains."""
    group, backend = key
    if key in said:
        fits = [said[key]]
    else:
        fits = [p for p in said.values() if p.group == group and "" in (backend, p.backend)]
    return max((max(position.entered, position.waits_in) for position in fits), default=0)


def suspects(positions: Positions, found: Sequence[Missing] | None = None) -> tuple[int, ...]:
    """Ranks that others wait for and that wait for nobody; else the silent ones that may be waited for."""
    found = find_missing(positions) if found is None else found
    waiting = {rank for one in found for rank in one.waiting}
    absent = {rank for one in found for rank in one.missing}
    silent = {rank for one in found for rank in one.silent}
    return tuple(sorted(absent - waiting or silent))


def describe_missing(one: Missing) -> str:
    """`ranks 3, 5 did not reach the all_reduce that ranks 0-2, 4 wait in`."""
    what = f"the {one.name or 'collective'}"
    those = ranks(one.waiting)
    wait = "wait" if len(one.waiting) > 1 else "waits"
    if not one.certain:
        text = f"{ranks(one.missing)} did not reach {what} that {those} did"
    elif one.missing:
        text = f"{ranks(one.missing)} did not reach {what} that {those} {wait} in"
    elif one.silent:
        text = f"{those} {wait} in {what}"
    else:
        text = f"all ranks that are known reached {what}, and {those} still {wait} in it"
    if one.silent:
        text += f"; {ranks(one.silent)} could not say where {'they are' if len(one.silent) > 1 else 'it is'}"
    if one.differ:
        text += f"; they do not do the same there: {', '.join(one.differ)}"
    return text


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 4`, `no rank`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    if not spans:
        return "no rank"
    words = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    many = len(spans) > 1 or spans[0][0] != spans[0][1]
    return f"{'ranks' if many else 'rank'} {', '.join(words)}"


# What can happen to a process whose training function is restarted in place: the evidence of such a restart.


class FaultKind(StrEnum):
    EXCEPTION = "exception"
    """The function raised on this member."""
    LOST = "lost"
    """Its process has ended."""
    SOFT_TIMEOUT = "soft_timeout"
    """Its main thread made no progress for too long; the process may still restart."""
    HARD_TIMEOUT = "hard_timeout"
    """It did not leave the function in time, or its interpreter stood still: its keeper ended it."""
    SILENT = "silent"
    """Nothing more was heard from its node's keeper."""
    LATE = "late"
    """It did not come to the barrier before the others went on."""
    UNFIT = "unfit"
    """Its health check failed."""
    ASKED = "asked"
    """The function itself asked for a restart."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a member."""

    member: int
    """-1 if it is not known which."""
    rank: int = -1
    """The rank that it trained under; -1 for a reserve."""
    node: str = ""
    kind: FaultKind
    detail: str = ""
    """In words; for an exception, its type and message."""
    error: str = ""
    """The class of the exception, without its module."""
    errors: list[Raised] = []
    """That exception and those that led to it, as in `evidence.WorkerEnd`."""
    exit_code: int = 0
    """That of the error or of the process, as from waitpid, where known."""
    at: float = 0.0
    """Seconds since 1970."""
    step: int = 0
    """The last step that it completed, as far as known."""

    def describe(self) -> str:
        if self.member < 0:
            return f"{self.kind}: {self.detail}"
        who = f"rank {self.rank}" if self.rank >= 0 else f"reserve {self.member}"
        where = f" on {self.node}" if self.node else ""
        return f"{who}{where}: {self.kind}{f' ({self.detail})' if self.detail else ''}"
