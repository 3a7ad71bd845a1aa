"""What was found about a machine, its GPUs and its storage, and how bad that is. Pure.

With a pending row remap, programs can run on: the bad row is set aside at the next reset. A failed remap
means that no spare row is left, and that the device is due for replacement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec

from holdfast.base import size
from holdfast.policy import XIDS, accuses_device, proves_broken

# What was found about a machine, and how bad that is.
#
# Guarantee: pure and total. The limits are of two kinds. *Critical* is what training cannot do without: a
# node that is critical fails soon, or makes others wait. *Warning* is what has done harm elsewhere and need
# not do so here. A node is kept out for critical findings alone, so a limit that is merely prudent must stay
# a warning.


MIB = 1024 * 1024
GIB = 1024 * MIB


class HealthStatus(StrEnum):
    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"
    """It could not be looked at; that says nothing about the machine."""


EXIT_CODES = {HealthStatus.OK: 0, HealthStatus.WARNING: 1, HealthStatus.CRITICAL: 2, HealthStatus.UNKNOWN: 3}
"""What `holdfast doctor` ends with."""
_GRAVITY = {HealthStatus.OK: 0, HealthStatus.UNKNOWN: 1, HealthStatus.WARNING: 2, HealthStatus.CRITICAL: 3}


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    """What was looked at, e.g. `disk space` or `gpu 3 memory errors`."""
    status: HealthStatus
    found: str = ""
    expected: str = ""
    fix: str = ""
    """What to do; empty if all is well."""
    seconds: float = 0.0
    """Seconds that looking took."""

    def describe(self) -> str:
        text = f"{self.name}: {self.found}"
        text += f" (expected {self.expected})" if self.expected else ""
        return text + (f". {self.fix}" if self.fix else "")


def worst(results: Iterable[CheckResult]) -> HealthStatus:
    """The worst status of all. What is certainly wrong counts more than what could not be looked at."""
    return max((one.status for one in results), key=_GRAVITY.__getitem__, default=HealthStatus.OK)


def problems(results: Iterable[CheckResult]) -> list[CheckResult]:
    """The results that are not well, the worst first, otherwise in their order."""
    bad = [one for one in results if one.status is not HealthStatus.OK]
    return sorted(bad, key=lambda one: -_GRAVITY[one.status])


class GateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a node may take part."""

    kept_out: bool = False
    why: str = ""
    """For a node that is kept out, in words for a person: what was found and what to do."""
    told: list[str] = []
    """Findings worth a line in the log and the journal."""
    status: HealthStatus = HealthStatus.OK


def judge_gate(results: Sequence[CheckResult], gate: str) -> GateAnswer:
    """What follows from the results under the setting `health.gate`. An `unknown` never keeps a node out."""
    if gate == "off":
        return GateAnswer()
    bad = [one for one in problems(results) if one.status is not HealthStatus.UNKNOWN]
    told = [one.describe() for one in bad]
    grave = [one.describe() for one in bad if one.status is HealthStatus.CRITICAL]
    if not grave or gate != "refuse":
        return GateAnswer(told=told, status=worst(bad))
    why = (
        f"its health checks failed: {'; '.join(grave)}. `holdfast doctor` shows all of them; "
        "health.gate = 'warn' lets the node take part nevertheless"
    )
    return GateAnswer(kept_out=True, why=why, told=told, status=HealthStatus.CRITICAL)


# --- a site's own check -------------------------------------------------------------------------------------

COULD_NOT_TELL = 3
"""The exit code by which a site's check says that it could not look, as `holdfast doctor` says it."""
_NOT_RUN = {126: "it cannot be executed", 127: "there is no such command"}


class CommandEnded(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended."""

    code: int | None
    """Negative if a signal ended it; None if it did not end in time."""
    words: str = ""
    """The last words it printed."""


def judge_site(name: str, ended: CommandEnded, timeout: float, seconds: float) -> CheckResult:
    """What a site's own command says of a node: 0 fit, 3 could not tell, anything else unfit."""
    words = f": {ended.words}" if ended.words else ""
    expected = "exit code 0"
    if ended.code == 0:
        return CheckResult(
            name=name,
            status=HealthStatus.OK,
            found=f"ended with 0{words}",
            expected=expected,
            seconds=seconds,
        )
    status = HealthStatus.WARNING if ended.code == COULD_NOT_TELL else HealthStatus.CRITICAL
    fix = "what it says is for the node's administrators; the setting health.command names it"
    if ended.code is None:
        found = f"did not end within {timeout:g} s (health.command_timeout) and was killed{words}"
    elif ended.code < 0:
        found = f"was ended by signal {-ended.code}{words}"
    else:
        found = f"ended with {ended.code}{words}"
        if ended.code in _NOT_RUN:
            fix = f"{_NOT_RUN[ended.code]} on this node: install it, or set health.command to what is there"
    if status is HealthStatus.WARNING:
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


def _by_limits(value: float, critical: float, warning: float) -> HealthStatus:
    if value < critical:
        return HealthStatus.CRITICAL
    return HealthStatus.WARNING if value < warning else HealthStatus.OK


def judge_memory(available: int, limit: int | None) -> CheckResult:
    """`available`: to this process, with the limit of its cgroup, if there is one, taken into account."""
    status = _by_limits(available, MEMORY_CRITICAL, MEMORY_WARNING)
    where = f" of the {size(limit)} that its cgroup allows" if limit is not None else ""
    return CheckResult(
        name="memory",
        status=status,
        found=f"{size(available)} available{where}",
        expected=f"at least {size(MEMORY_WARNING)}",
        fix=""
        if status is HealthStatus.OK
        else "end what else runs here, or ask the scheduler for more (--mem)",
    )


def judge_space(what: str, path: str, free: int, inodes: int | None) -> CheckResult:
    """`inodes`: how many are free; None if the file system does not count them."""
    status = _by_limits(free, SPACE_CRITICAL, SPACE_WARNING)
    found = f"{size(free)} free in {path}"
    if inodes is not None and inodes < INODES_WARNING:
        # Some file systems create inodes when they need them: only a trial tells whether a file can be made.
        status = max(status, HealthStatus.WARNING, key=_GRAVITY.__getitem__)
        found += f", room for {inodes} more files"
    return CheckResult(
        name=f"space of {what}",
        status=status,
        found=found,
        expected=f"at least {size(SPACE_WARNING)}",
        fix=""
        if status is HealthStatus.OK
        else "free some space (`holdfast ckpt gc`), or set another directory",
    )


def judge_shared_memory(total: int, free: int) -> CheckResult:
    """Data loaders and asynchronous saves pass tensors through it; a container's default is 64 MiB."""
    status = HealthStatus.OK if free >= SHARED_WARNING else HealthStatus.WARNING
    return CheckResult(
        name="shared memory",
        status=status,
        found=f"{size(free)} free of {size(total)} in /dev/shm",
        expected=f"at least {size(SHARED_WARNING)}",
        fix=""
        if status is HealthStatus.OK
        else "start the container with --shm-size or --ipc=host, or clear it",
    )


def judge_open_files(soft: int, hard: int) -> CheckResult:
    """A limit of -1 means no limit."""
    status = HealthStatus.OK if soft < 0 else _by_limits(soft, FILES_CRITICAL, FILES_WARNING)
    more = "" if hard < 0 else f", at most {hard}"
    return CheckResult(
        name="open files",
        status=status,
        found=f"a limit of {'no number' if soft < 0 else soft}{more}",
        expected=f"at least {FILES_WARNING}",
        fix="" if status is HealthStatus.OK else f"`ulimit -n {FILES_WARNING}` or more, before the launch",
    )


def judge_threads(used: int, limit: int | None, kind: str) -> CheckResult:
    """`kind`: whose limit it is."""
    left = None if limit is None else limit - used
    status = HealthStatus.OK if left is None else _by_limits(left, THREADS_CRITICAL, THREADS_WARNING)
    found = "no limit" if limit is None else f"{used} of {limit} used ({kind})"
    return CheckResult(
        name="threads",
        status=status,
        found=found,
        expected=f"room for {THREADS_WARNING} more",
        fix="" if status is HealthStatus.OK else "raise `ulimit -u`, or the container's limit of processes",
    )


def judge_skew(what: str, seconds: float, uncertain: float) -> CheckResult:
    """`seconds`: how far this clock is ahead; `uncertain`: how far off that may be."""
    beyond = abs(seconds) - uncertain
    status = HealthStatus.WARNING if beyond > SKEW_WARNING else HealthStatus.OK
    way = "ahead of" if seconds > 0 else "behind"
    return CheckResult(
        name="clock",
        status=status,
        found=f"{abs(seconds):.2f} s {way} {what}" if abs(seconds) > uncertain else f"agrees with {what}",
        expected=f"at most {SKEW_WARNING:g} s",
        fix=""
        if status is HealthStatus.OK
        else "let chrony or ntpd set the clocks; leases and journals compare them",
    )


def judge_load(load: float, cores: int) -> CheckResult:
    """`load`: the average of the last minute."""
    status = HealthStatus.WARNING if load > 4 * max(1, cores) else HealthStatus.OK
    return CheckResult(
        name="load",
        status=status,
        found=f"{load:.1f} on {cores} cores",
        expected=f"at most {4 * max(1, cores)}",
        fix=""
        if status is HealthStatus.OK
        else "look for what else runs here (`top`); another job's leftovers?",
    )


def judge_storage(what: str, path: str, problem: str, seconds: float, slowest: str = "") -> CheckResult:
    """`problem`: why storage did not accept and return what was written; empty if it did."""
    if problem:
        return CheckResult(
            name=f"storage of {what}",
            status=HealthStatus.CRITICAL,
            found=problem,
            expected="what is written can be read back",
            fix="repair or mount it writable, or set another directory",
            seconds=seconds,
        )
    slow = seconds > LATENCY_WARNING
    return CheckResult(
        name=f"storage of {what}",
        status=HealthStatus.WARNING if slow else HealthStatus.OK,
        found=f"{path} took {seconds:.2f} s" + (f", most of it to {slowest}" if slow and slowest else ""),
        expected=f"at most {LATENCY_WARNING:g} s",
        fix="saves will be slow: look at the load of the file system" if slow else "",
        seconds=seconds,
    )


WHOSE = "see who uses it with `nvidia-smi`; an earlier job's process may hang"
UNCORRECTED_LIMIT = 4
"""Memory errors beyond correction that a device may have had since its last reset, unless set otherwise."""
HOT = 90.0
"""Degrees Celsius; data-centre devices slow down a little above."""
SLOWED = {
    0x8: "the hardware slows it down (power brake, heat or current)",
    0x40: "the hardware slows it down because it is hot",
    0x80: "the hardware slows it down because an external power brake says so",
    0x20: "the driver slows it down because it is hot",
}
"""NVML's bits that mean a fault of the machine. Idle clocks and the power cap are normal."""


def judge_reachable(name: str, problem: str) -> CheckResult:
    if not problem:
        return CheckResult(name=name, status=HealthStatus.OK, found="answers")
    return CheckResult(
        name=name,
        status=HealthStatus.CRITICAL,
        found=f"cannot be reached: {problem}",
        expected="the driver answers for it",
        fix="drain the node and reset the device or reboot; look for XID 79 in the kernel log",
    )


def judge_memory_errors(
    name: str,
    *,
    uncorrected: int | None,
    ever: int | None,
    remap_pending: bool | None,
    remap_failed: bool | None,
    retire_pending: bool | None,
    limit: int = UNCORRECTED_LIMIT,
) -> CheckResult:
    """None: not known. `limit`: with more errors beyond correction than this, the device is unfit."""
    expected = "no memory errors beyond correction"
    reset = "reset the device when nothing uses it (`nvidia-smi -r -i N`), or reboot the node"
    if remap_failed:
        found = "a bad row of its memory could not be replaced"
        fix = "drain the node and have the device replaced"
        return CheckResult(name=name, status=HealthStatus.CRITICAL, found=found, expected=expected, fix=fix)
    pending = []
    if remap_pending:
        pending.append("a bad row of its memory waits to be replaced")
    if retire_pending:
        pending.append("a bad page of its memory waits to be retired")
    if uncorrected:
        pending.append(f"{uncorrected} memory errors beyond correction since its last reset")
    if pending:
        found = "; ".join(pending)
        worn = uncorrected is not None and uncorrected > limit
        if worn:
            found += f", of which health.max_uncorrected_errors allows {limit}"
        status = HealthStatus.CRITICAL if worn else HealthStatus.WARNING
        return CheckResult(name=name, status=status, found=found, expected=expected, fix=reset)
    if uncorrected is None and ever is None:
        return CheckResult(name=name, status=HealthStatus.OK, found="it counts no memory errors (ECC is off)")
    past = f"; {ever} in its whole life" if ever else ""
    return CheckResult(name=name, status=HealthStatus.OK, found=f"none since its last reset{past}")


def judge_slowed(name: str, bits: int | None, temperature: float | None) -> CheckResult:
    why = [text for bit, text in SLOWED.items() if bits is not None and bits & bit]
    hot = temperature is not None and temperature >= HOT
    degrees = "" if temperature is None else f", {temperature:.0f} °C"
    if why or hot:
        return CheckResult(
            name=name,
            status=HealthStatus.WARNING,
            found=(why[0] if why else "it is hot") + degrees,
            expected="full clocks",
            fix="look at the node's cooling and power; a slow device slows all others down",
        )
    return CheckResult(name=name, status=HealthStatus.OK, found="not slowed down by heat or power" + degrees)


def judge_free_memory(name: str, used: int | None, total: int | None) -> CheckResult:
    """Before a job starts: memory that another program holds is not available to it."""
    if used is None or total is None:
        return CheckResult(name=name, status=HealthStatus.OK, found="not known")
    crowded = used > 0.05 * total + 2**30
    return CheckResult(
        name=name,
        status=HealthStatus.WARNING if crowded else HealthStatus.OK,
        found=f"{size(used)} of {size(total)} in use",
        expected="almost none in use",
        fix=WHOSE if crowded else "",
    )


def judge_computed(
    name: str, *, right: bool, gflops: float, free: int | None = None, problem: str = ""
) -> CheckResult:
    """`free`: bytes of its memory, if too few to compute with; `problem`: why there is no answer at all."""
    expected = "the known answer"
    if free is not None or "out of memory" in problem.lower():
        # Only a program that is alone on a device finds its memory empty: this says nothing about its health.
        left = problem if free is None else f"{size(free)} of its memory free"
        found = f"not tried, because another program uses it: {left}"
        return CheckResult(name=name, status=HealthStatus.WARNING, found=found, expected=expected, fix=WHOSE)
    if problem:
        fix = "look at the kernel log for XIDs; drain the node if it fails again while nothing else uses it"
        return CheckResult(name=name, status=HealthStatus.CRITICAL, found=problem, expected=expected, fix=fix)
    if not right:
        found = "a product whose every element is known, or what was written to its memory, came out WRONG"
        fix = "drain the node: a device that miscounts ruins what it trains"
        return CheckResult(name=name, status=HealthStatus.CRITICAL, found=found, expected=expected, fix=fix)
    return CheckResult(name=name, status=HealthStatus.OK, found=f"the known answer, {gflops:.4g} GFLOP/s")


def judge_untried(name: str, said: str, *, hung: bool) -> CheckResult:
    """For computing without an answer: a device that hangs is sick, one that was not tried may be well."""
    if not hung:
        return CheckResult(name=name, status=HealthStatus.UNKNOWN, found=f"could not be tried: {said}")
    return CheckResult(
        name=name,
        status=HealthStatus.CRITICAL,
        found=said,
        expected="an answer",
        fix="the driver or a device hangs: look at the kernel log, drain the node and reboot",
    )


def judge_unusable(name: str, problem: str) -> CheckResult:
    """For a torch that can use none of the devices on a node with a driver."""
    return CheckResult(
        name=name,
        status=HealthStatus.CRITICAL,
        found=problem,
        expected="CUDA works",
        fix="compare the driver's release (`nvidia-smi`) with torch's (`torch.version.cuda`)",
    )


# --- the driver, and the kernel's log -----------------------------------------------------------------------


def judge_driver(problem: str, *, visible: bool, hung: bool, source: str) -> CheckResult:
    """For a driver that says nothing: one that hangs is sick, one that nobody here can ask may be well."""
    ill = visible and (hung or source == "nvidia-smi")
    return CheckResult(
        name="gpu",
        status=HealthStatus.CRITICAL if ill else HealthStatus.UNKNOWN,
        found=problem,
        expected="an answer",
        fix="look at the kernel log for XIDs; drain the node and reboot" if ill else "",
    )


def judge_count(listed: int, visible: Sequence[str], *, source: str, insist: bool) -> CheckResult | None:
    """None if no device is missing. `insist`: the visible ones must exist, because the kernel shows them and
    nobody named them. Parts of a device (MIG) are not listed one by one."""
    if listed >= len(visible) or any(name.startswith("MIG-") for name in visible):
        return None
    return CheckResult(
        name="gpu count",
        status=HealthStatus.CRITICAL if insist else HealthStatus.WARNING,
        found=f"{source} lists {listed} of {len(visible)}",
        expected=f"{len(visible)}: {', '.join(visible)}",
        fix="a device is lost, or CUDA_VISIBLE_DEVICES names one that is not there; see XID 79",
    )


def judge_kernel_log(problem: str, errors: Sequence[tuple[int, str]]) -> CheckResult:
    """`errors`: (XID, in words), oldest first; `problem`: why the log could not be read."""
    name = "kernel log"
    if problem:
        return CheckResult(
            name=name,
            status=HealthStatus.UNKNOWN,
            found=problem,
            expected="no XID errors",
            fix="allow it (kernel.dmesg_restrict=0, or the group systemd-journal), or look as root",
        )
    if not errors:
        return CheckResult(name=name, status=HealthStatus.OK, found="no XID errors")
    bad = [one for one in errors if accuses_device(one[0])]
    number, told = (bad or errors)[-1]
    known = XIDS.get(number)
    return CheckResult(
        name=name,
        status=HealthStatus.CRITICAL if bad else HealthStatus.WARNING,
        found=f"{len(errors)} XID errors, of which {len(bad)} accuse a device; {told}",
        expected="no XID errors",
        fix=f"for the node: {known.for_node}" if known is not None else "see NVIDIA's catalogue of XIDs",
    )


# --- the history of a device -------------------------------------------------------------------------------

APART = 600.0
"""Errors at least so many seconds apart are two incidents: one incident is logged many times."""
INCIDENTS = 3
"""Incidents since boot with the hardware itself to blame, from which another one has to be expected."""


def judge_history(device: str, errors: Sequence[tuple[float, int]]) -> CheckResult | None:
    """A device's XIDs since boot, as (when, number); None if there is nothing to report.

    A single incident may be mended by now: the log keeps it even after a reset. So it is reported, and only
    several incidents, apart from each other, keep the device's node out.
    """
    bad = sorted((at, number) for at, number in errors if accuses_device(number))
    if not bad:
        return None
    proofs = [at for at, number in bad if proves_broken(number)]
    incidents = sum(after - at > APART for at, after in pairwise(proofs)) + bool(proofs)
    worn = incidents >= INCIDENTS
    numbers = ", ".join(str(number) for number in dict.fromkeys(number for _, number in bad))
    return CheckResult(
        name=f"gpu {device} history",
        status=HealthStatus.CRITICAL if worn else HealthStatus.WARNING,
        found=f"XID {numbers} since the boot, {incidents} times the hardware itself to blame",
        expected=f"fewer than {INCIDENTS} times" if worn else "no XID that accuses a device",
        fix="drain the node and have the device looked at; a reboot clears the log"
        if worn
        else "if it was not reset since, reset it (`nvidia-smi -r -i N`) or reboot",
    )


# What a run says when its storage accepts nothing any more, and how it ends. Pure.


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Storage that a run needs to go on, and that does not accept what is written."""

    path: str
    problem: str = ""
    """The error that the trial met; empty if there is merely too little space left."""
    full: bool = False
    """Whether it is full, with nothing else known to be wrong."""
    free: int | None = None
    """Free bytes; None if not known."""
    waited: float = 0.0

    @property
    def brief(self) -> str:
        return "the disk is full" if self.full else "the run's storage takes nothing"

    def describe(self) -> str:
        """`the disk is full (4.0 MiB free in /data/run, 1.0 GiB needed; waited 30 s)`."""
        waited = f"; waited {self.waited:.0f} s" if self.waited >= 1 else ""
        if not self.full:
            return f"the storage of {self.path} takes nothing ({self.problem}{waited})"
        if self.free is None or self.free >= SPACE_WARNING:
            # A quota, or no room for more files: to name the free bytes would only puzzle.
            return f"the disk is full ({self.path}: {self.problem or 'no room'}{waited})"
        found = f"{size(self.free)} free in {self.path}, {size(SPACE_WARNING)} needed"
        return f"the disk is full ({found}{waited})"


def last_words(trouble: Trouble, *, saved: int | None, last: int | None, requeued: bool = False) -> str:
    """The end of a launch in one line. `saved`, `last`: the highest step that was saved, and that was done.

    What is not known is left out.
    """
    words = [f"{trouble.describe()}."]
    if saved is not None:
        kept = f"Saved up to step {saved}" if saved else "Nothing is saved"
        words.append(f"{kept}{_lost(saved, last)}.")
    words.append(f"Next: {what_to_do(trouble, requeued=requeued)}.")
    return " ".join(words)


def what_to_do(trouble: Trouble, *, requeued: bool = False) -> str:
    """`free space, run the same command`."""
    mend = "free space" if trouble.full else "mend the storage"
    then = "the job comes back when it is queued again" if requeued else "run the same command"
    return f"{mend}, {then}"


def _lost(saved: int, last: int | None) -> str:
    if last is None or last < saved:
        return ""
    if last == saved:
        return "; no step is lost" if saved else ""
    first = saved + 1
    return f"; step {first} is lost" if first == last else f"; steps {first}–{last} are lost"
