"""How bad it is what is known of a GPU. Pure; see `policy.health` for what the words mean.

A pending row remap lets programs run on: the bad row is set aside at the next reset. A remap that failed
means that there is nothing left to replace it with, and the device is due for replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from holdfast.journal.text import size
from holdfast.policy.health import CheckResult, Status
from holdfast.policy.xids import XIDS, accuses_device, proves_broken

WHOSE = "see who uses it with `nvidia-smi`; an earlier job's process may hang"
UNCORRECTED_LIMIT = 4
"""Memory errors beyond correction since its last reset that a device may have, unless set otherwise."""
HOT = 90.0
"""Degrees Celsius; data-centre devices slow down a little above."""
SLOWED = {
    0x8: "the hardware slows it down (power brake, heat or current)",
    0x40: "the hardware slows it down because it is hot",
    0x80: "the hardware slows it down because an external power brake says so",
    0x20: "the driver slows it down because it is hot",
}
"""NVML's bits that mean a machine's fault. Idle clocks and the power cap are everyday."""


def judge_reachable(name: str, problem: str) -> CheckResult:
    if not problem:
        return CheckResult(name=name, status=Status.OK, found="answers")
    return CheckResult(
        name=name,
        status=Status.CRITICAL,
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
    """None: not known. `limit`: so many errors beyond correction may be counted; with more it is unfit."""
    expected = "no memory errors beyond correction"
    reset = "reset the device when nothing uses it (`nvidia-smi -r -i N`), or reboot the node"
    if remap_failed:
        found = "a bad row of its memory could not be replaced"
        fix = "drain the node and have the device replaced"
        return CheckResult(name=name, status=Status.CRITICAL, found=found, expected=expected, fix=fix)
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
        status = Status.CRITICAL if worn else Status.WARNING
        return CheckResult(name=name, status=status, found=found, expected=expected, fix=reset)
    if uncorrected is None and ever is None:
        return CheckResult(name=name, status=Status.OK, found="it counts no memory errors (ECC is off)")
    past = f"; {ever} in its whole life" if ever else ""
    return CheckResult(name=name, status=Status.OK, found=f"none since its last reset{past}")


def judge_slowed(name: str, bits: int | None, temperature: float | None) -> CheckResult:
    why = [text for bit, text in SLOWED.items() if bits is not None and bits & bit]
    hot = temperature is not None and temperature >= HOT
    degrees = "" if temperature is None else f", {temperature:.0f} °C"
    if why or hot:
        return CheckResult(
            name=name,
            status=Status.WARNING,
            found=(why[0] if why else "it is hot") + degrees,
            expected="full clocks",
            fix="look at the node's cooling and power; a slow device slows all others down",
        )
    return CheckResult(name=name, status=Status.OK, found="not slowed down by heat or power" + degrees)


def judge_free_memory(name: str, used: int | None, total: int | None) -> CheckResult:
    """Before a job starts: what another program holds is not there for it."""
    if used is None or total is None:
        return CheckResult(name=name, status=Status.OK, found="not known")
    crowded = used > 0.05 * total + 2**30
    return CheckResult(
        name=name,
        status=Status.WARNING if crowded else Status.OK,
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
        # Whoever is the only one on a device finds its memory empty: this says nothing about its health.
        left = problem if free is None else f"{size(free)} of its memory free"
        found = f"not tried, because another program uses it: {left}"
        return CheckResult(name=name, status=Status.WARNING, found=found, expected=expected, fix=WHOSE)
    if problem:
        fix = "look at the kernel log for XIDs; drain the node if it fails again while nothing else uses it"
        return CheckResult(name=name, status=Status.CRITICAL, found=problem, expected=expected, fix=fix)
    if not right:
        found = "a product whose every element is known, or what was written to its memory, came out WRONG"
        fix = "drain the node: a device that miscounts ruins what it trains"
        return CheckResult(name=name, status=Status.CRITICAL, found=found, expected=expected, fix=fix)
    return CheckResult(name=name, status=Status.OK, found=f"the known answer, {gflops:.4g} GFLOP/s")


def judge_untried(name: str, said: str, *, hung: bool) -> CheckResult:
    """Of computing without an answer: a device that hangs is ill, one that could not be tried may be well."""
    if not hung:
        return CheckResult(name=name, status=Status.UNKNOWN, found=f"could not be tried: {said}")
    return CheckResult(
        name=name,
        status=Status.CRITICAL,
        found=said,
        expected="an answer",
        fix="the driver or a device hangs: look at the kernel log, drain the node and reboot",
    )


def judge_unusable(name: str, problem: str) -> CheckResult:
    """Of torch on a node with a driver: none of its devices can be used."""
    return CheckResult(
        name=name,
        status=Status.CRITICAL,
        found=problem,
        expected="CUDA works",
        fix="compare the driver's release (`nvidia-smi`) with torch's (`torch.version.cuda`)",
    )


# --- the driver, and the kernel's log -----------------------------------------------------------------------


def judge_driver(problem: str, *, visible: bool, hung: bool, source: str) -> CheckResult:
    """Of a driver that says nothing: one that hangs is ill, one that nobody here can ask may be well."""
    ill = visible and (hung or source == "nvidia-smi")
    return CheckResult(
        name="gpu",
        status=Status.CRITICAL if ill else Status.UNKNOWN,
        found=problem,
        expected="an answer",
        fix="look at the kernel log for XIDs; drain the node and reboot" if ill else "",
    )


def judge_count(listed: int, visible: Sequence[str], *, source: str, insist: bool) -> CheckResult | None:
    """None if none is missing. `insist`: the visible ones must be there, because the kernel shows them and
    nobody named them. Parts of a device (MIG) are not listed one by one."""
    if listed >= len(visible) or any(name.startswith("MIG-") for name in visible):
        return None
    return CheckResult(
        name="gpu count",
        status=Status.CRITICAL if insist else Status.WARNING,
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
            status=Status.UNKNOWN,
            found=problem,
            expected="no XID errors",
            fix="allow it (kernel.dmesg_restrict=0, or the group systemd-journal), or look as root",
        )
    if not errors:
        return CheckResult(name=name, status=Status.OK, found="no XID errors")
    bad = [one for one in errors if accuses_device(one[0])]
    number, told = (bad or errors)[-1]
    known = XIDS.get(number)
    return CheckResult(
        name=name,
        status=Status.CRITICAL if bad else Status.WARNING,
        found=f"{len(errors)} XID errors, of which {len(bad)} accuse a device; {told}",
        expected="no XID errors",
        fix=f"for the node: {known.for_node}" if known is not None else "see NVIDIA's catalogue of XIDs",
    )


# --- the history of a device -------------------------------------------------------------------------------

APART = 600.0
"""Seconds between two errors from which on they are two incidents: one incident is logged many times."""
INCIDENTS = 3
"""Incidents since the boot in which the hardware itself was to blame: one more is to be expected."""


def judge_history(device: str, errors: Sequence[tuple[float, int]]) -> CheckResult | None:
    """XIDs of a device since the boot, as (when, number); None if there is nothing to tell.

    One incident may be mended by now: the log keeps it also after a reset. So it is told, and only several of
    them, apart from each other, keep the device's node out.
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
        status=Status.CRITICAL if worn else Status.WARNING,
        found=f"XID {numbers} since the boot, {incidents} times the hardware itself to blame",
        expected=f"fewer than {INCIDENTS} times" if worn else "no XID that accuses a device",
        fix="drain the node and have the device looked at; a reboot clears the log"
        if worn
        else "if it was not reset since, reset it (`nvidia-smi -r -i N`) or reboot",
    )
