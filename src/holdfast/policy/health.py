"""What was found about a machine, and how bad that is.

Guarantee: pure and total. The limits are of two kinds. *Critical* is what training cannot do without: a node
that is critical fails soon, or makes others wait. *Warning* is what has hurt people and need not hurt here. A
node is kept out for critical findings alone, so a limit that is merely prudent must stay a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from holdfast.journal.text import size

MIB = 1024 * 1024
GIB = 1024 * MIB


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"
    """It could not be looked at; that says nothing about the machine."""


EXIT_CODES = {Status.OK: 0, Status.WARNING: 1, Status.CRITICAL: 2, Status.UNKNOWN: 3}
"""What `holdfast doctor` ends with."""
_GRAVITY = {Status.OK: 0, Status.UNKNOWN: 1, Status.WARNING: 2, Status.CRITICAL: 3}


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    """What was looked at, e.g. `disk space` or `gpu 3 memory errors`."""
    status: Status
    found: str = ""
    expected: str = ""
    fix: str = ""
    """What to do; empty if all is well."""
    seconds: float = 0.0
    """That looking took."""

    def describe(self) -> str:
        text = f"{self.name}: {self.found}"
        text += f" (expected {self.expected})" if self.expected else ""
        return text + (f". {self.fix}" if self.fix else "")


def worst(results: Iterable[CheckResult]) -> Status:
    """Of all of them. What is wrong for certain counts more than what could not be looked at."""
    return max((one.status for one in results), key=_GRAVITY.__getitem__, default=Status.OK)


def problems(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Those that are not well, the worst first; in their order otherwise."""
    bad = [one for one in results if one.status is not Status.OK]
    return sorted(bad, key=lambda one: -_GRAVITY[one.status])


class GateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a node may take part."""

    kept_out: bool = False
    why: str = ""
    """For a person, of a node that is kept out: what was found and what to do."""
    told: list[str] = []
    """What is worth a line in the log and the journal."""
    status: Status = Status.OK


def judge_gate(results: Sequence[CheckResult], gate: str) -> GateAnswer:
    """What the setting `health.gate` makes of it. What could not be looked at never keeps a node out."""
    if gate == "off":
        return GateAnswer()
    bad = [one for one in problems(results) if one.status is not Status.UNKNOWN]
    told = [one.describe() for one in bad]
    grave = [one.describe() for one in bad if one.status is Status.CRITICAL]
    if not grave or gate != "refuse":
        return GateAnswer(told=told, status=worst(bad))
    why = (
        f"its health checks failed: {'; '.join(grave)}. `holdfast doctor` shows all of them; "
        "health.gate = 'warn' lets the node take part nevertheless"
    )
    return GateAnswer(kept_out=True, why=why, told=told, status=Status.CRITICAL)


# --- a site's own check -------------------------------------------------------------------------------------

COULD_NOT_TELL = 3
"""The exit code by which a site's check says that it could not look, as `holdfast doctor` says it."""
_NOT_RUN = {126: "it cannot be executed", 127: "there is no such command"}


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended."""

    code: int | None
    """Negative: by a signal. None: it did not, in its time."""
    words: str = ""
    """What it said last."""


def judge_site(name: str, ended: Ended, timeout: float, seconds: float) -> CheckResult:
    """What a site's own command says of a node: 0 fit, 3 could not tell, anything else unfit."""
    words = f": {ended.words}" if ended.words else ""
    expected = "exit code 0"
    if ended.code == 0:
        return CheckResult(
            name=name, status=Status.OK, found=f"ended with 0{words}", expected=expected, seconds=seconds
        )
    status = Status.WARNING if ended.code == COULD_NOT_TELL else Status.CRITICAL
    fix = "what it says is for the node's administrators; the setting health.command names it"
    if ended.code is None:
        found = f"did not end within {timeout:g} s (health.command_timeout) and was killed{words}"
    elif ended.code < 0:
        found = f"was ended by signal {-ended.code}{words}"
    else:
        found = f"ended with {ended.code}{words}"
        if ended.code in _NOT_RUN:
            fix = f"{_NOT_RUN[ended.code]} on this node: install it, or set health.command to what is there"
    if status is Status.WARNING:
        found += " (it could not tell)"
    return CheckResult(name=name, status=status, found=found, expected=expected, fix=fix, seconds=seconds)


# --- the limits ---------------------------------------------------------------------------------------------

MEMORY_CRITICAL, MEMORY_WARNING = 128 * MIB, GIB
SPACE_CRITICAL, SPACE_WARNING = 16 * MIB, GIB
SHARED_WARNING = 256 * MIB
FILES_CRITICAL, FILES_WARNING = 128, 1024
THREADS_CRITICAL, THREADS_WARNING = 64, 1024
SKEW_WARNING = 2.0
LATENCY_WARNING = 2.0
"""Seconds for one small file to be written, made durable, moved and read back."""
INODES_WARNING = 1000


def _by_limits(value: float, critical: float, warning: float) -> Status:
    if value < critical:
        return Status.CRITICAL
    return Status.WARNING if value < warning else Status.OK


def judge_memory(available: int, limit: int | None) -> CheckResult:
    """`available` to this process, the limit of its cgroup counted in, if it has one."""
    status = _by_limits(available, MEMORY_CRITICAL, MEMORY_WARNING)
    where = f" of the {size(limit)} that its cgroup allows" if limit is not None else ""
    return CheckResult(
        name="memory",
        status=status,
        found=f"{size(available)} available{where}",
        expected=f"at least {size(MEMORY_WARNING)}",
        fix="" if status is Status.OK else "end what else runs here, or ask the scheduler for more (--mem)",
    )


def judge_space(what: str, path: str, free: int, inodes: int | None) -> CheckResult:
    """`inodes`: that are free; None where a file system does not count them."""
    status = _by_limits(free, SPACE_CRITICAL, SPACE_WARNING)
    found = f"{size(free)} free in {path}"
    if inodes is not None and inodes < INODES_WARNING:
        # Some file systems make more of them when they are needed: whether a file can be made, a trial tells.
        status = max(status, Status.WARNING, key=_GRAVITY.__getitem__)
        found += f", room for {inodes} more files"
    return CheckResult(
        name=f"space of {what}",
        status=status,
        found=found,
        expected=f"at least {size(SPACE_WARNING)}",
        fix="" if status is Status.OK else "free some space (`holdfast ckpt gc`), or set another directory",
    )


def judge_shared_memory(total: int, free: int) -> CheckResult:
    """Data loaders and asynchronous saves hand tensors over through it; containers give 64 MiB of it."""
    status = Status.OK if free >= SHARED_WARNING else Status.WARNING
    return CheckResult(
        name="shared memory",
        status=status,
        found=f"{size(free)} free of {size(total)} in /dev/shm",
        expected=f"at least {size(SHARED_WARNING)}",
        fix="" if status is Status.OK else "start the container with --shm-size or --ipc=host, or clear it",
    )


def judge_open_files(soft: int, hard: int) -> CheckResult:
    """Infinite limits are given as -1."""
    status = Status.OK if soft < 0 else _by_limits(soft, FILES_CRITICAL, FILES_WARNING)
    more = "" if hard < 0 else f", at most {hard}"
    return CheckResult(
        name="open files",
        status=status,
        found=f"a limit of {'no number' if soft < 0 else soft}{more}",
        expected=f"at least {FILES_WARNING}",
        fix="" if status is Status.OK else f"`ulimit -n {FILES_WARNING}` or more, before the launch",
    )


def judge_threads(used: int, limit: int | None, kind: str) -> CheckResult:
    """`kind`: whose limit it is."""
    left = None if limit is None else limit - used
    status = Status.OK if left is None else _by_limits(left, THREADS_CRITICAL, THREADS_WARNING)
    found = "no limit" if limit is None else f"{used} of {limit} used ({kind})"
    return CheckResult(
        name="threads",
        status=status,
        found=found,
        expected=f"room for {THREADS_WARNING} more",
        fix="" if status is Status.OK else "raise `ulimit -u`, or the container's limit of processes",
    )


def judge_skew(what: str, seconds: float, uncertain: float) -> CheckResult:
    """`seconds`: by which this clock is ahead; `uncertain`: how far off that may be."""
    beyond = abs(seconds) - uncertain
    status = Status.WARNING if beyond > SKEW_WARNING else Status.OK
    way = "ahead of" if seconds > 0 else "behind"
    return CheckResult(
        name="clock",
        status=status,
        found=f"{abs(seconds):.2f} s {way} {what}" if abs(seconds) > uncertain else f"agrees with {what}",
        expected=f"at most {SKEW_WARNING:g} s",
        fix=""
        if status is Status.OK
        else "let chrony or ntpd set the clocks; leases and journals compare them",
    )


def judge_load(load: float, cores: int) -> CheckResult:
    """Of the last minute."""
    status = Status.WARNING if load > 4 * max(1, cores) else Status.OK
    return CheckResult(
        name="load",
        status=status,
        found=f"{load:.1f} on {cores} cores",
        expected=f"at most {4 * max(1, cores)}",
        fix="" if status is Status.OK else "look for what else runs here (`top`); another job's leftovers?",
    )


def judge_storage(what: str, path: str, problem: str, seconds: float, slowest: str = "") -> CheckResult:
    """`problem`: why it does not take and give back what is written; empty if it does."""
    if problem:
        return CheckResult(
            name=f"storage of {what}",
            status=Status.CRITICAL,
            found=problem,
            expected="what is written can be read back",
            fix="repair or mount it writable, or set another directory",
            seconds=seconds,
        )
    slow = seconds > LATENCY_WARNING
    return CheckResult(
        name=f"storage of {what}",
        status=Status.WARNING if slow else Status.OK,
        found=f"{path} took {seconds:.2f} s" + (f", most of it to {slowest}" if slow and slowest else ""),
        expected=f"at most {LATENCY_WARNING:g} s",
        fix="saves will be slow: look at the load of the file system" if slow else "",
        seconds=seconds,
    )
